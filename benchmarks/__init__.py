"""Experiments that renew figures of the documentation: ``make bench NAME=planner``. They are not installed."""
