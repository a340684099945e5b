"""The main job: the same text, the same model, trained once with collectives and once on demand.

Started by ``lightning-odc demo``; needs the extra packages of ``pip install "lightning-odc[demo]"``.
"""
