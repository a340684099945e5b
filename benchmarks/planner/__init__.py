"""How good and how fast the planner is."""
