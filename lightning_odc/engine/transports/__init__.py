"""How the bytes move: one contract (``base``), several bodies."""
