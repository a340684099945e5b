"""``lightning-odc doctor``: can this machine run the strategy, what would it choose for a model, and what refuse."""
