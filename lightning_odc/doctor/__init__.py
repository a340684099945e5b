"""``lightning-odc doctor``: can this machine run the strategy, and if not, what to do."""
