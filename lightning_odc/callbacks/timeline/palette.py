"""The colours of all pictures. People who do not see red and green as different can tell the lines by brightness."""

LIGHT_BLUE, BLUE = "#6baed6", "#2c6aa8"
ORANGE, RED = "#f0a04b", "#c8553d"
LIGHT_PURPLE, PURPLE = "#c2a5e0", "#8b6bb1"
GREEN, TEAL, YELLOW, GREY = "#41a36b", "#8fc7c0", "#e8d174", "#7f7f7f"
PINK, BROWN = "#e3a1c1", "#8a5f44"
IDLE = "#d4d4d4"
"""Waiting for others, in every picture."""

LINES = (BLUE, ORANGE, GREEN, RED, PURPLE, GREY)
"""Of the lines in one picture, in this order."""
MODES = {"collective": RED, "on_demand": BLUE, "lockstep": ORANGE, "balanced": TEAL}
"""Of the ways to communicate."""
DARK = {BLUE: "#4484c6", IDLE: "#555a65"}
"""What stands for a colour on a dark screen, where it is another one."""
