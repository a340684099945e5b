"""Whether and where code talks to other ranks, or changes parameters."""

from __future__ import annotations

import linecache
import sys
import traceback
from collections.abc import Iterable
from types import FrameType
from typing import Any

from torch import Tensor, nn

from lightning_odc import _compat
from lightning_odc.errors import ODCError
from lightning_odc.samples.content import tensors_of
from lightning_odc.trial.untouched import LIBRARIES


class CollectiveListener(_compat.TorchDispatchMode):
    """Notes whether code in this context calls a collective, beside those of the engine and of ``fully_shard``.

    It notes, too, whether the code writes into parameters that this rank has whole, and keeps what they were.

    Args:
        parameters: Those that are watched.
        refuses: Such a collective raises an error instead.

    Attributes:
        heard: The line of the first such collective, ``file:line: `code` ``; empty while there was none.
    """

    supports_higher_order_operators = True  # passes them on

    def __init__(self, parameters: Iterable[Tensor] = (), refuses: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.heard = ""
        self._refuses = refuses
        self.kept: dict[Tensor, Tensor] = {}  # what parameters were before they were written to
        whole = [one for one in parameters if type(one.data) is Tensor and one.numel()]
        self._watched = {one.untyped_storage().data_ptr(): one for one in whole}
        self._before = [(one, one.data) for one in whole]  # the same memory

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional") and (self._refuses or not self.heard):
            frames = [frame for frame, _ in traceback.walk_stack(sys._getframe(1))]
            if not any(module_of(frame).startswith(_MOVERS) for frame in frames):
                self.heard = _line_of(frames)
                if self._refuses:
                    raise ODCError(f"the step talks to other ranks, and none of them answers: {self.heard}")
        for _, tensor in tensors_of(_compat.written_by(func, args)):
            if type(tensor) not in (Tensor, nn.Parameter):
                continue
            parameter = self._watched.get(tensor.untyped_storage().data_ptr())
            if parameter is not None and parameter not in self.kept:
                self.kept[parameter] = parameter.detach().clone()
        return func(*args, **(kwargs or {}))

    def put_back(self) -> bool:
        """Let parameters be what they were; returns whether they had changed."""
        replaced = [(one, data) for one, data in self._before if one.data_ptr() != data.data_ptr()]
        for parameter, data in replaced:
            parameter.data = data
        for parameter, value in self.kept.items():
            parameter.data.copy_(value)
        return bool(replaced or self.kept)


_MOVERS = ("torch.distributed.fsdp.", "torch.distributed.tensor.", "lightning_odc.engine.")
_NOT_OF_USERS = {*LIBRARIES, "accelerate", *sys.stdlib_module_names} - {"__main__"}


def module_of(frame: FrameType) -> str:
    """The name of the module that runs."""
    return str(frame.f_globals.get("__name__"))


def _line_of(frames: Iterable[FrameType]) -> str:
    """The innermost line that is not of a library which every user has."""
    for frame in frames:
        if module_of(frame).split(".")[0] not in _NOT_OF_USERS:
            file = frame.f_code.co_filename
            code = linecache.getline(file, frame.f_lineno).strip()
            return f"{file}:{frame.f_lineno}: `{code}`"
    return "a library"
