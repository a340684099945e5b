"""Making ``"odc"`` a name that Lightning knows."""

from __future__ import annotations

from typing import Any, NoReturn

from lightning.fabric.strategies import STRATEGY_REGISTRY
from lightning.pytorch.strategies import StrategyRegistry

from lightning_odc import _compat
from lightning_odc.strategy.odc import ODCStrategy


def register() -> None:
    """Register the strategies with Lightning's Trainer and Fabric. Safe to call again."""
    if ODCStrategy.strategy_name not in StrategyRegistry:
        ODCStrategy.register_strategies(StrategyRegistry)
    if ODCStrategy.strategy_name not in STRATEGY_REGISTRY:
        STRATEGY_REGISTRY.register(
            ODCStrategy.strategy_name, _fabric_strategy, description="On-demand communication in Fabric"
        )
    other = _compat.other_strategy_registry()
    if other is not None and ODCStrategy.strategy_name not in other:
        other.register(ODCStrategy.strategy_name, _explain_other_trainer, description="see lightning_odc")


def _fabric_strategy(**options: Any) -> Any:
    """Imported when needed: users of the Trainer do not wait for it."""
    from lightning_odc.fabric import ODCFabricStrategy

    return ODCFabricStrategy(**options)


def _explain_other_trainer(**_: Any) -> NoReturn:
    raise TypeError(
        'Trainer(strategy="odc") is for the Trainer of the `lightning` package. Write\n'
        "    from lightning.pytorch import LightningModule, Trainer\n"
        "instead of importing them from `pytorch_lightning`; the two packages do not mix."
    )
