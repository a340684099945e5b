"""The colours of all pictures: computing is blue, padding orange, moving bytes purple, waiting grey.

People who do not see red and green as different can tell the lines by brightness.
"""

LIGHT_BLUE = "#6baed6"
BLUE = "#2c6aa8"
ORANGE = "#f0a04b"
RED = "#c8553d"
LIGHT_PURPLE = "#b692dc"
PURPLE = "#8559b0"
DEEP_PURPLE = "#5b3f8a"
GREEN = "#41a36b"
TEAL = "#62b3a8"
YELLOW = "#e8d174"
GREY = "#666c75"
PINK = "#e3a1c1"
BROWN = "#8a5f44"
IDLE = "#bfc3c9"
BLACK = "#000000"
WHITE = "#ffffff"

MODES = {"collective": RED, "on_demand": BLUE, "balanced": TEAL}
"""Of the ways to communicate."""
DARK = {
    BLACK: "#e6e9ee",
    WHITE: "#1e2129",
    GREY: "#a3acb8",
    BLUE: "#4484c6",
    RED: "#df7059",
    PURPLE: "#a07fca",
    DEEP_PURPLE: "#7c58b6",
    BROWN: "#b5845f",
    IDLE: "#656b77",
}
"""What stands for a colour on a dark screen, where it is another one."""
