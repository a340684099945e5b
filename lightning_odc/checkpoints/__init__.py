"""Checkpoints of sharded models: one whole file, or a directory of shards."""
