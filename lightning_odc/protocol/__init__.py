"""Who may touch which shared memory when: windows, versions, meetings, waits. It does without ``fully_shard``.

From the bottom up: ``transports`` (memory that ranks share), ``waiting`` (deadlines, idle time), ``protocol`` (who may
touch what when), and ``nodes`` (several hosts).
"""
