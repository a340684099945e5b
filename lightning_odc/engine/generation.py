"""``generate`` of models, on demand: each rank ends with its own last token, and reads parameters once for all of them.

``generate`` runs the model once per token. Two things would make that slow: reading every unit for every token, and
going on until the longest answer of all ranks has ended. (Hugging Face does the latter for sharded models.) Meanwhile a
module has its ``generate`` as an attribute, like torch's ``register_fsdp_forward_method``. So its class and other
models of that class do not change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import wraps
from typing import Any

from torch import nn

from lightning_odc import _compat


@contextmanager
def generating(model: nn.Module, gathered: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
    """A context in which ``generate`` of every module that has one waits for no rank, and keeps units gathered.

    Args:
        model: The root module.
        gathered: Makes a context in which units stay gathered.
    """
    found = [module for module in model.modules() if _can_generate(module)]
    with ExitStack() as stack:
        stack.enter_context(_compat.generating_alone(found))
        for module in found:
            stack.enter_context(_generating_within(module, gathered))
        yield


def _can_generate(module: nn.Module) -> bool:
    """Looks at the class and at what was set on the module, so that no property runs and no wrapper passes it on."""
    return callable(vars(module).get("generate", getattr(type(module), "generate", None)))


@contextmanager
def _generating_within(
    module: nn.Module, gathered: Callable[[], AbstractContextManager[None]]
) -> Iterator[None]:
    """A context in which ``module.generate`` runs in the context ``gathered``."""
    owner: Any = module
    before, method = vars(module).get("generate"), owner.generate

    @wraps(method)
    def generate(*args: Any, **kwargs: Any) -> Any:
        with gathered():
            return method(*args, **kwargs)

    owner.generate = generate
    try:
        yield
    finally:
        if vars(module).get("generate") is generate:  # else other code has replaced it
            del owner.generate
            if before is not None:
                owner.generate = before
