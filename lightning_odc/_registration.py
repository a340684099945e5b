"""Making ``"odc"`` and its variants names that Lightning knows."""

from __future__ import annotations

from typing import Any, NoReturn

from lightning.fabric.strategies import STRATEGY_REGISTRY
from lightning.pytorch.strategies import StrategyRegistry

from lightning_odc import _compat_lightning
from lightning_odc.strategy.odc import ODCStrategy

NAMES = ("odc", "odc_plain")


def register() -> None:
    """Register the strategies with Lightning's Trainer and Fabric. Safe to call again."""
    if ODCStrategy.strategy_name not in StrategyRegistry:
        ODCStrategy.register_strategies(StrategyRegistry)
    other = _compat_lightning.other_strategy_registry()
    for name in NAMES:
        if name not in STRATEGY_REGISTRY:
            describe = "On-demand communication in Fabric"
            STRATEGY_REGISTRY.register(name, _fabric_strategy, description=describe)
        if other is not None and name not in other:
            other.register(name, _explain_other_trainer, description="see lightning_odc", word=name)


def _fabric_strategy(**options: Any) -> Any:
    """Imported when needed: users of the Trainer do not wait for it."""
    from lightning_odc.fabric import ODCFabricStrategy

    return ODCFabricStrategy(**options)


def _explain_other_trainer(word: str) -> NoReturn:
    raise TypeError(
        f'Trainer(strategy="{word}") is for the Trainer of the `lightning` package. Write\n'
        "    from lightning.pytorch import LightningModule, Trainer\n"
        "instead of importing them from `pytorch_lightning`; the two packages do not mix."
    )
