"""Checks sharded checkpoints of unknown origin before torch reads them.

torch's reader unpickles the index of a sharded checkpoint, and every value in it that is no tensor, whatever they
contain. `refuse_code` reads them first as ``torch.load(weights_only=True)`` reads a full checkpoint: it refuses what is
neither a tensor nor plain data.
"""

from __future__ import annotations

import dataclasses
import enum
import io
import pickle
from pathlib import Path, PurePath
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata
from torch.distributed.checkpoint.planner import ReadItem

from lightning_odc import _compat

#: Modules of the classes that describe a checkpoint.
_DESCRIBING = ("torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem")


def refuse_code(path: Path) -> None:
    """Read everything of a sharded checkpoint that is no tensor, and run no code from it.

    Raises:
        pickle.UnpicklingError: It contains more than tensors and plain data.
    """
    reader = _Reader(path)
    metadata = reader.read_metadata()
    values = [
        name
        for name, entry in metadata.state_dict_metadata.items()
        if isinstance(entry, BytesStorageMetadata)
    ]
    planner = _Planner()
    planner.set_up_planner(dict.fromkeys(values), metadata, is_coordinator=True)
    reader.set_up_storage_reader(metadata, is_coordinator=True)
    plan = reader.prepare_local_plan(planner.create_local_plan())
    reader.read_data(plan, planner).wait()


class _Reader(FileSystemReader):
    """torch's reader, behind a look at the index."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        index = Path(self.path) / ".metadata"
        with index.open("rb") as file:
            _IndexUnpickler(file, index).load()
        return super().read_metadata(*args, **kwargs)


class _Planner(DefaultLoadPlanner):
    """torch's plan of what is read, behind a look at each value."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        torch.load(value, weights_only=True)
        value.seek(0)
        super().load_bytes(read_item, value)


class _IndexUnpickler(pickle.Unpickler):
    """Unpickles an index, or raises where it names anything that an index does not need."""

    def __init__(self, file: Any, path: Path) -> None:
        super().__init__(file)
        self._path = path

    def find_class(self, module_name: str, name: str) -> Any:
        if self._is_known(module_name, name):
            return super().find_class(module_name, name)
        raise pickle.UnpicklingError(
            f"Weights only load failed: {self._path} refers to {module_name}.{name}, which the index of a sharded "
            "checkpoint does not need. Unpickling it may run code. If you trust this checkpoint, load it with "
            "weights_only=False."
        )

    def _is_known(self, module_name: str, name: str) -> bool:
        if (module_name, name) in (("torch", "Size"), ("collections", "OrderedDict"), _compat.LAYOUT_READER):
            return True
        if "." in name:  # an attribute of something, such as `Metadata.__init__.__globals__`
            return False
        if module_name == "torch":
            return isinstance(getattr(torch, name, None), torch.dtype)
        if module_name not in (*_DESCRIBING, "pathlib", "pathlib._local"):
            return False
        found = super().find_class(module_name, name)
        if not isinstance(found, type):
            return False
        describes = dataclasses.is_dataclass(found) or issubclass(found, enum.Enum)
        return (describes and found.__module__ in _DESCRIBING) or issubclass(found, PurePath)
