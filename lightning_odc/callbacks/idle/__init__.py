"""How long devices wait, measured."""
