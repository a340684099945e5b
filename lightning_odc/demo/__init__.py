"""The demo: the same text and model, with collectives, on demand, and balanced; a preset of `bench train`.

Started by ``lightning-odc demo``; needs the extra packages of ``pip install "lightning-odc[demo]"``.
"""
