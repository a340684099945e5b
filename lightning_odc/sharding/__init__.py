"""Which modules become units, on which ranks they lie, and how they get their values."""
