"""Checks what users write for the arguments of classes and functions: against their annotations, by `checked`.

An annotation says the whole rule. ``Literal`` has the known values, and `Like` in ``Annotated`` adds what a type cannot
say: a value to write, and which values of the type can work. ::

    @checked
    class Loader:
        def __init__(self, *, batch: Count = 8, order: Literal["long", "short"] | None = None) -> None: ...

    Loader(batch=0)       ValueError: Loader(batch=0) cannot work. Write batch=8 (a whole number of at least 1).
    Loader(order="none")  ValueError: Loader(order='none') cannot work. Write order="long", "short" or None.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, wraps
from itertools import islice
from numbers import Integral, Real
from types import UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, Unpack, cast, get_args, get_origin, get_type_hints

import numpy as np

from lightning_odc.words import did_you_mean

Checked = TypeVar("Checked", bound=Callable[..., Any])

_NUMBERS: dict[Any, Any] = {bool: (bool, np.bool_), int: Integral, float: Real}  # those of numpy, too
_EXAMPLES = {
    "Any": "...",
    "Callable": "a function",
    "device": 'torch.device("cuda", 0)',
    "dtype": "torch.float32",
    "float": "0.5",
    "int": "8",
    "NoneType": "None",
    "Path": 'Path("folder")',
    "str": '"text"',
    "type": "a class",
}
_LOOKED_AT = 100  # items of a long list
_BRACKETS = {list: "[{}]", Sequence: "[{}]", Iterable: "[{}]", set: "{{{}}}", tuple: "({})"}


@dataclass(frozen=True)
class Like:
    """What ``Annotated`` says about the values of an argument.

    Attributes:
        example: What to write, as the end of a message.
        allows: Whether a value of the right type can work.
    """

    example: str
    allows: Callable[[Any], bool] = lambda _: True


Count = Annotated[int, Like("8 (a whole number of at least 1)", lambda value: value >= 1)]
Index = Annotated[int, Like("0 (a whole number of at least 0)", lambda value: value >= 0)]


def checked(made: Checked) -> Checked:
    """Check the arguments of a function, or of a class when it is made.

    An argument of a type that the annotation does not allow raises `ValueError`, with what to write.
    """
    function: Any = made
    if isinstance(made, type):
        function = vars(made)["__init__"]
    parameters = inspect.signature(function).parameters.values()
    names = [one.name for one in parameters if one.kind is one.POSITIONAL_OR_KEYWORD]

    @cache
    def hints() -> dict[str, Any]:
        found = get_type_hints(function, include_extras=True)
        for hint in list(found.values()):
            if get_origin(hint) is Unpack:  # a ``TypedDict`` behind ``**``
                (options,) = get_args(hint)
                found |= get_type_hints(options, include_extras=True)
        return found

    @wraps(function)
    def check_and_call(*args: Any, **kwargs: Any) -> Any:
        given = dict(zip(names, args, strict=False)) | kwargs
        for name, value in given.items():
            hint = hints().get(name, Any)
            if not allows(hint, value):
                shown = f"{value!r:.200}"
                known = examples(hint)
                meant = did_you_mean(value if isinstance(value, str) else "", re.findall('"(.+?)"', known))
                raise ValueError(f"{made.__name__}({name}={shown}) cannot work. Write {name}={known}.{meant}")
        return function(*args, **kwargs)

    if function is made:
        return cast(Checked, check_and_call)
    setattr(made, "__init__", check_and_call)  # noqa: B010 - to mypy this is not a class
    return made


def allows(hint: Any, value: Any) -> bool:
    """Whether a value is one that an annotation describes."""
    origin = get_origin(hint) or hint
    inner = get_args(hint)
    if origin is Any or isinstance(origin, TypeVar):
        return True
    if origin in (Union, UnionType):
        return any(allows(one, value) for one in inner)
    if origin is Annotated:
        kind, *rules = inner
        return allows(kind, value) and all(rule.allows(value) for rule in rules)
    if origin is Literal:
        return any(type(value) is type(known) and value == known for known in inner)
    if origin is type:
        return isinstance(value, type) and issubclass(value, inner)
    return _is_instance(origin, inner, value)


def _is_instance(origin: Any, inner: tuple[Any, ...], value: Any) -> bool:
    """Whether a value is of a class, with items of the annotations in brackets."""
    if isinstance(value, bool) and origin in (int, float):
        return False
    if isinstance(value, str) and origin in _BRACKETS:
        return False
    items = value
    if origin is Sequence and hasattr(value, "tolist"):  # of numpy or torch
        items = value.tolist()
    if not isinstance(items, _NUMBERS.get(origin, origin)):
        return False
    if not inner or not isinstance(items, list | tuple | set):
        return True
    if origin is tuple and ... not in inner:
        return len(items) == len(inner) and all(map(allows, inner, items))
    return all(allows(inner[0], item) for item in islice(items, _LOOKED_AT))


def examples(hint: Any) -> str:
    """What to write instead, from the annotation."""
    found = [*_each_example(hint)]
    if len(found) == 1:
        return found[0]
    return ", ".join(found[:-1]) + f" or {found[-1]}"


def _each_example(hint: Any) -> Iterator[str]:
    origin = get_origin(hint) or hint
    inner = get_args(hint)
    if origin in (Union, UnionType):
        for one in inner:
            yield from _each_example(one)
    elif origin is Annotated:
        yield inner[1].example
    elif origin is Literal:
        yield from (f'"{known}"' if isinstance(known, str) else repr(known) for known in inner)
    elif origin is bool:
        yield from ("True", "False")
    elif origin in _BRACKETS:
        items = [examples(one) for one in inner if one is not ...]
        yield _BRACKETS[origin].format(", ".join(items))
    else:
        name = origin.__name__
        yield _EXAMPLES.get(name, f"{name}(...)")
