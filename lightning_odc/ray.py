"""The strategy for jobs of Ray Train. Needs Ray: ``pip install "ray[train]"``."""

from __future__ import annotations

from lightning_odc.strategy import ODCStrategy

try:
    from ray.train.lightning import RayFSDPStrategy
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f'Ray Train needs {error.name}, which is not installed: pip install "ray[train]"',
        name=error.name,
    ) from None


class RayODCStrategy(ODCStrategy, RayFSDPStrategy):  # type: ignore[misc]
    """`ODCStrategy` whose devices and rank numbers are Ray's.

    Give it to the ``Trainer`` of a Ray worker, and that to ``ray.train.lightning.prepare_trainer``. On demand, ranks
    read each other's memory, so all workers must be on one node:
    ``ScalingConfig(placement_strategy="STRICT_PACK")``.

    Arguments are those of `ODCStrategy`.

    Example:
        ``Trainer(strategy=RayODCStrategy(), plugins=[RayLightningEnvironment()])``
    """
