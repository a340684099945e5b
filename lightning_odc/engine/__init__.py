"""The engine of on-demand communication: a parameter server with no server process.

From the bottom up: ``units`` and ``comm`` (how ``fully_shard`` is entered), sums of gradients, and the engines that a
strategy can drive: ``on_demand`` and ``collective`` over shards, ``whole`` over whole models.
"""
