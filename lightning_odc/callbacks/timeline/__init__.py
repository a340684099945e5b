"""What every rank did when, recorded and drawn."""
