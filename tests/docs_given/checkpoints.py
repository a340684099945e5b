"""What docs/checkpoints.md takes as given."""
