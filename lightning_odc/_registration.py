"""Making ``"odc"`` and its variants names that Lightning knows."""

from __future__ import annotations

import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any, NoReturn

from lightning.fabric.strategies import STRATEGY_REGISTRY
from lightning.pytorch.strategies import StrategyRegistry

from lightning_odc.strategy.odc import ODCStrategy

NAMES = ("odc", "odc_plain")
#: Where the separate package has a registry of its own.
_OTHER = "pytorch_lightning.strategies"


def register() -> None:
    """Register the strategies with Lightning's Trainer and Fabric. Safe to call again."""
    if ODCStrategy.strategy_name not in StrategyRegistry:
        ODCStrategy.register_strategies(StrategyRegistry)
    for name in NAMES:
        if name not in STRATEGY_REGISTRY:
            STRATEGY_REGISTRY.register(
                name, _fabric_strategy, description="On-demand communication in Fabric"
            )
    other = sys.modules.get(_OTHER)
    if other is not None:
        _explain_in(other)
    elif not any(isinstance(finder, _WhenImported) for finder in sys.meta_path):
        sys.meta_path.insert(0, _WhenImported())


def _fabric_strategy(**options: Any) -> Any:
    """Imported when needed: users of the Trainer do not wait for it."""
    from lightning_odc.fabric import ODCFabricStrategy

    return ODCFabricStrategy(**options)


class _WhenImported(MetaPathFinder):
    """Lets ``"odc"`` explain itself to the other package's trainer, if that package is imported later."""

    def find_spec(self, name: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != _OTHER or self not in sys.meta_path:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(name)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def load_and_explain(module: ModuleType) -> None:
                load(module)
                _explain_in(module)

            setattr(spec.loader, "exec_module", load_and_explain)  # noqa: B010 - of this loader alone
        return spec


def _explain_in(strategies: Any) -> None:
    registry: Any = getattr(strategies, "StrategyRegistry", StrategyRegistry)
    for name in NAMES:
        if registry is not StrategyRegistry and name not in registry:
            registry.register(name, _explain_other_trainer, description="see lightning_odc", word=name)


def _explain_other_trainer(word: str) -> NoReturn:
    raise TypeError(
        f'Trainer(strategy="{word}") is for the Trainer of the `lightning` package. Write\n'
        "    from lightning.pytorch import LightningModule, Trainer\n"
        "instead of importing them from `pytorch_lightning`; the two packages do not mix. If it is a library that\n"
        "imports `pytorch_lightning`, make both names one in the first line of your script:\n"
        "    import lightning_odc.pytorch_lightning"
    )
