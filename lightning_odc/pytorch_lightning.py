"""For programs whose libraries import ``pytorch_lightning``: makes it another name of ``lightning.pytorch``.

Both packages are the same code, but have separate classes and registries. Write this line first::

    import lightning_odc.pytorch_lightning

From then on ``import pytorch_lightning`` and ``import lightning_fabric`` find the modules of ``lightning``.

Raises:
    ImportError: ``pytorch_lightning`` has been imported before.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

_SAME = {"pytorch_lightning": "lightning.pytorch", "lightning_fabric": "lightning.fabric"}


class _OneName(MetaPathFinder, Loader):
    """Finds the modules of one package under the names of the other."""

    def find_spec(self, name: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        package, _, rest = name.partition(".")
        if package not in _SAME:
            return None
        real = f"{_SAME[package]}.{rest}".rstrip(".")
        found = find_spec(real)
        if found is None:
            return None
        is_package = found.submodule_search_locations is not None
        return ModuleSpec(name, self, loader_state=found, is_package=is_package)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = import_module(spec.loader_state.name)
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        spec: Any = module.__spec__  # that of the second name, which the import has put there
        module.__spec__ = spec.loader_state


def _make_one() -> None:
    if any(isinstance(finder, _OneName) for finder in sys.meta_path):
        return
    before = sorted(_SAME.keys() & sys.modules.keys())
    if before:
        raise ImportError(
            f"`{before[0]}` has been imported before, with classes of its own. Make this the first line of the "
            "program, before libraries that import it:\n"
            "    import lightning_odc.pytorch_lightning"
        )
    sys.meta_path.insert(0, _OneName())


_make_one()
