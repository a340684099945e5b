"""On-demand communication for PyTorch Lightning: sharded training without a barrier at every layer.

Importing this package registers the strategy: ``import lightning_odc``, then ``Trainer(strategy="odc")``.
"""

import sys
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from lightning_odc._version import __version__

# ``lightning-odc`` answers before it imports torch, and where torch is broken.
_program = (getattr(sys, "argv", None) or [""])[0]
_is_module = _program == "-m" and sys.orig_argv[1:3] == ["-m", "lightning_odc"]
_is_command = _is_module or _program.endswith("/lightning-odc")

if TYPE_CHECKING:
    from lightning_odc.advice import advise
    from lightning_odc.attached import attach
if TYPE_CHECKING or not _is_command:
    from lightning_odc._registration import register
    from lightning_odc.data.loader import BalancedDataLoader
    from lightning_odc.data.minibatch import Minibatch
    from lightning_odc.strategy.odc import ODCStrategy

    register()

_LATER = {
    "BalancedDataLoader": "lightning_odc.data.loader",
    "Minibatch": "lightning_odc.data.minibatch",
    "ODCStrategy": "lightning_odc.strategy.odc",
    "advise": "lightning_odc.advice",
    "attach": "lightning_odc.attached",
}
"""Names that are imported when they are asked for, as modules are; classes only in the command line."""


def __getattr__(name: str) -> Any:
    if name in _LATER:
        return getattr(import_module(_LATER[name]), name)
    if not name.startswith("_") and find_spec(f"{__name__}.{name}"):
        return import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = ["BalancedDataLoader", "Minibatch", "ODCStrategy", "__version__", "advise", "attach"]
