"""Draws the pictures of the documentation, from the raw numbers under ``docs/data`` and by hand."""
