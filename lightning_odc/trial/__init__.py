"""Runs a user's step on a few samples, so that nothing of it stays, and finds out what its loss is a mean over."""
