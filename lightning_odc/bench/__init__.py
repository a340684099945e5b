"""Benchmarks that users can run on their own machines."""
