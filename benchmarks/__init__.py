"""Experiments that renew figures of the documentation: ``make bench NAME=planner``. Not part of the installed package."""
