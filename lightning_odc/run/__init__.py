"""Runs microbatches, and decides how: the same for every way to train. It does without Lightning."""
