"""The simulator against measurements, against published figures, and past this machine."""
