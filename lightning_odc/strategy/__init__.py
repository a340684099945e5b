"""``ODCStrategy``: what Lightning calls, from the launch of the ranks to the last checkpoint."""

from lightning_odc.strategy.odc import ODCStrategy

__all__ = ["ODCStrategy"]
