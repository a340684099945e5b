"""The colours of all pictures. People who do not see red and green as different can tell the lines by brightness."""

LIGHT_BLUE = "#6baed6"
BLUE = "#2c6aa8"
ORANGE = "#f0a04b"
RED = "#c8553d"
LIGHT_PURPLE = "#c2a5e0"
PURPLE = "#8b6bb1"
GREEN = "#41a36b"
TEAL = "#8fc7c0"
YELLOW = "#e8d174"
GREY = "#7f7f7f"
PINK = "#e3a1c1"
BROWN = "#8a5f44"
IDLE = "#d4d4d4"
"""Waiting for others, in every picture."""

MODES = {"collective": RED, "on_demand": BLUE, "balanced": TEAL}
"""Of the ways to communicate."""
DARK = {BLUE: "#4484c6", IDLE: "#555a65"}
"""What stands for a colour on a dark screen, where it is another one."""
