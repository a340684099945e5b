"""Making ``"odc"`` and its variants names that Lightning knows."""

from __future__ import annotations

from typing import Any, NoReturn

from lightning.fabric.strategies import STRATEGY_REGISTRY
from lightning.pytorch.strategies import StrategyRegistry
from lightning.pytorch.utilities import rank_zero_warn

from lightning_odc import _compat_lightning
from lightning_odc.strategy.odc import ODCStrategy

NAMES = ("odc", "odc_plain", "odc_balanced")
MISSPELT = {"odc-plain": "odc_plain", "odc_balance": "odc", "odc-balanced": "odc", "lightning_odc": "odc"}
"""Names that Lightning would refuse without a word of ours, and what was meant."""


def register() -> None:
    """Register the strategies with Lightning's Trainer and Fabric. Safe to call again."""
    if ODCStrategy.strategy_name not in StrategyRegistry:
        ODCStrategy.register_strategies(StrategyRegistry)
    other = _compat_lightning.other_strategy_registry()
    for name in NAMES:
        if name not in STRATEGY_REGISTRY:
            describe = "On-demand communication in Fabric"
            STRATEGY_REGISTRY.register(name, _fabric_strategy, description=describe, word=name)
        if other is not None and name not in other:
            other.register(name, _explain_other_trainer, description="see lightning_odc", word=name)
    for registry in filter(None, (StrategyRegistry, STRATEGY_REGISTRY, other)):
        for name in MISSPELT.keys() - registry.keys():
            registry.register(name, _explain_name, description=f"see {MISSPELT[name]}", word=name)


def _fabric_strategy(word: str, **options: Any) -> Any:
    """Imported when needed: users of the Trainer do not wait for it."""
    from lightning_odc.fabric import ODCFabricStrategy

    if word == "odc_balanced":
        rank_zero_warn(
            'Fabric(strategy="odc_balanced") balances nothing: in Fabric, your loop says which rank runs which '
            "microbatches. Ranks may run different numbers of them, with fabric.backward(loss, num_items=n). Write "
            'Fabric(strategy="odc"), or use lightning.pytorch.Trainer, which balances.'
        )
    return ODCFabricStrategy(**options)


def _explain_name(word: str) -> NoReturn:
    raise ValueError(f'strategy="{word}" is unknown: did you mean strategy="{MISSPELT[word]}"?')


def _explain_other_trainer(word: str) -> NoReturn:
    raise TypeError(
        f'Trainer(strategy="{word}") is for the Trainer of the `lightning` package. Write\n'
        "    from lightning.pytorch import LightningModule, Trainer\n"
        "instead of importing them from `pytorch_lightning`; the two packages do not mix."
    )
