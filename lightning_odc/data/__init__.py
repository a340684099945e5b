"""Minibatches and how samples become them."""
