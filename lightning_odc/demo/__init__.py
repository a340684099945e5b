"""The demo: the same text, the same model, trained once with collectives and once on demand; a preset of `bench train`.

Started by ``lightning-odc demo``; needs the extra packages of ``pip install "lightning-odc[demo]"``.
"""
