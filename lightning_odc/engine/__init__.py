"""The engine of on-demand communication: a parameter server with no server process.

From the bottom up: ``transports`` (memory that ranks share), ``waiting`` (deadlines, idle time), ``protocol``
(who may touch what when), ``units`` and ``comm`` (how ``fully_shard`` is entered), ``on_demand`` and
``collective`` (the two engines a strategy can drive).
"""
