"""The strategy is imported."""

from lightning_odc import ODCStrategy
