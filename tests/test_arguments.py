"""Every option of every public class refuses values of a wrong type, by name, with a line to write."""

from __future__ import annotations

import inspect
import pkgutil
import re
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import pytest
import torch

from lightning_odc import BalancedDataLoader, Minibatch, ODCStrategy, advise, balance, rl
from lightning_odc.arguments import Count, Like, checked
from lightning_odc.balance.costs import FunctionCost, PolynomialCost
from lightning_odc.data.reader import WorkerOptions

ROOT = Path(__file__).parent.parent


class Strange:
    """What no option takes that says what it takes."""


STRANGE = [Strange()]
NO_CHOICE: list[Any] = ["nonsense", "", 5, True, []]
NO_COUNT: list[Any] = [0, -1, 2.0, "8", True, float("nan"), [1], torch.ones(2)]
NO_NUMBER: list[Any] = ["0.5", True, [0.5]]
NO_TIME: list[Any] = [5, 5.0, "30", True, timedelta(0), timedelta(seconds=-1)]
NO_FUNCTION: list[Any] = ["len", 5, True, [len]]
NO_CLASSES: list[Any] = ["Block", 5, True, [int], torch.nn.Linear(1, 1).weight]
NO_CAP: list[Any] = [0, "8192", True, 2.5, [8, 8], (8, 8)]
#: Wrong values by annotation, beside a `Strange` one. Elsewhere text, numbers and truth values are: an option that
#: takes some of them has to say here which are wrong.
WRONG: dict[str, list[Any]] = {
    "Annotated[Tensor | Sequence[int], ...]": [5, "text", [[1, 2]], [0.5]],
    "Annotated[float, ...]": [*NO_NUMBER, 0, -1, float("nan")],
    "Annotated[int | str, ...]": [0.5, (1, 2), True],
    "Backend": ["glooo", "cpu:glooo", "", 5, True],
    "Balance": NO_CHOICE,
    "Callable[[list[Any]], Any]": NO_FUNCTION,
    "Cap": NO_CAP,
    "Collate": NO_FUNCTION,
    "Collation": ["padded"],
    "CollationKind": NO_CHOICE,
    "Communication": NO_CHOICE,
    "Count": NO_COUNT,
    "FloatDtype": ["float32", torch.int32, float],
    "Index": [-1, 2.0, "8", True],
    "Iterable[Any]": [5, "text", True],
    "Iterable[float | Tensor]": [5, "text", ["1"], [True]],
    "LengthFunction": NO_FUNCTION,
    "Literal['full', 'sharded']": NO_CHOICE,
    "Literal['logprobs', 'ref_logprobs']": NO_CHOICE,
    "Literal['on_demand', 'collective']": [*NO_CHOICE, "lockstep"],
    "Literal['skip']": NO_CHOICE,
    "Mapping[str, Any]": [5, "text", [("a", 1)], True],
    "MemorySize": [2.5, -1, "lots", True, None, [4]],
    "NodeMesh": [(4,), (2, 0), (2.0, 2), "2x2", 4],
    "OnOutOfMemory": NO_CHOICE,
    "Packing": ["yes", 1, 0, None],
    "Policy": NO_CHOICE,
    "Precisions": ["bf16", torch.bfloat16, True],
    "Seconds": [*NO_NUMBER, -1],
    "Sequence[Rollout]": [5, "text", [1]],
    "Sequence[float]": [5, "text", ["1"]],
    "Sequence[int]": [5, "text", [0.5]],
    "Steps": ["3", 3, 2.0, (1,), (1, 2, 3), (1.0, 2.0), [1, 2]],
    "Temperature": [*NO_NUMBER, 0, -1],
    "Term": [*NO_NUMBER, -1, float("inf"), float("nan")],
    "Timeout": NO_TIME,
    "Weighting": ["tokens", 5, True],
    "WrapPolicy": [[torch.nn.LSTM], {1}, "Block", True, torch.nn.LSTM(1, 1).bias_hh_l0],
    "bool": ["yes", "no", 1, 0, 0.0, [True]],
    "bool | CPUOffload": ["yes", 1],
    "float": NO_NUMBER,
    "float | Tensor": ["0.5", [0.5]],
    "float | bool | Tensor": ["0.5", [0.5]],
    "int | Tensor": ["8", 2.5, True],
    "list[torch.device]": ["cuda", ["cuda"], 2],
    "options.Backend": ["glooo", 5],
    "str": [5, True, b"text"],
    "str | Path": [5, True, None],
    "str | ShardingStrategy": [5, True, None],
    "type[nn.Module] | list[type[nn.Module]]": NO_CLASSES,
}
#: Those that say what is wrong when they are used, or that may be anything: the rest of the call, and wrong values.
LOOKED_INTO: dict[str, tuple[Any, list[Any]]] = {
    "BalancedDataLoader.cost": (lambda wrong: loader(cost=wrong), [5, "cubic", None, True]),
    "BalancedDataLoader.lengths": (
        lambda wrong: loader(lengths=wrong),
        [5, "text", [0, 1], [1, True], [1] * 3],
    ),
    "BalancedDataLoader.multiprocessing_context": (
        lambda wrong: next(iter(loader(lengths=[1] * 8, num_workers=1, multiprocessing_context=wrong))),
        ["x", 5],
    ),
    "ODCStrategy.cost": (lambda wrong: ODCStrategy(cost=wrong), [5, "cubic", None, True]),
    "Planner.cost": (lambda wrong: balance.Planner(2, cost=wrong), [5, "cubic", None, True]),
    "with_speeds.cost": (lambda wrong: balance.with_speeds(wrong, [1.0]), [5, "cubic", None, True]),
    "advise.lengths": (lambda wrong: advise(wrong, model="7b"), [5, True, [0.5], [[1, 2]], "no file", ["1"]]),
    "advise.model": (lambda wrong: advise([512] * 64, model=wrong), [5, True, "nonsense", [1]]),
    "transformer.config": (lambda wrong: balance.transformer(wrong), [{"hidden_size": 5}, Strange()]),
}
ANYTHING = {"BalancedDataLoader.dataset", "Rollouts.cost", "exchange.where"}


def loader(**options: Any) -> BalancedDataLoader:
    return BalancedDataLoader(range(8), minibatch_size=2, **options)


def documented() -> Iterator[Any]:
    """Classes and functions of the reference that a user gives arguments to; those of its modules, too."""
    for page in sorted((ROOT / "docs" / "reference").glob("*.md")):
        for name in re.findall(r"^::: (\S+)", page.read_text(), re.MULTILINE):
            if name.startswith("lightning_odc.ray"):  # has the arguments of `ODCStrategy`
                continue
            found = pkgutil.resolve_name(name)
            names = getattr(found, "__all__", None)
            if names is None:
                yield found
            else:
                yield from (getattr(found, inner) for inner in names)


CLASSES = {made for made in documented() if inspect.isclass(made) and "Args:" in (made.__doc__ or "")}
#: Their docstrings call arguments attributes.
CLASSES |= {PolynomialCost, FunctionCost}
FUNCTIONS = {made for made in documented() if inspect.isfunction(made) and hasattr(made, "__wrapped__")}


def options() -> Iterator[tuple[str, Any, str, str]]:
    """Name, class or function, argument, and annotation without ``None``, of every option."""
    for made in sorted(CLASSES | FUNCTIONS, key=lambda made: made.__name__):
        for argument in inspect.signature(made).parameters.values():
            found = {argument.name: str(argument.annotation)}
            if argument.kind == argument.VAR_KEYWORD and "Unpack" in str(argument.annotation):
                found = {name: kind.__forward_arg__ for name, kind in WorkerOptions.__annotations__.items()}
            elif argument.kind in (argument.VAR_KEYWORD, argument.VAR_POSITIONAL):
                continue  # of another class; the names of ours are checked in `test_bad_input.py`
            for name, kind in found.items():
                plain = re.sub(r"Like\(.*\)\]", "...]", kind).removesuffix(" | None")
                yield f"{made.__name__}.{name}", made, name, plain


OPTIONS = [*options()]


def test_the_walk_sees_the_public_classes():
    names = {made.__name__ for made in CLASSES}
    assert {"ODCStrategy", "ODCFabricStrategy", "BalancedDataLoader", "DeviceIdleMonitor", "Rollout"} <= names
    assert {"Planner", "Minibatch", "TimelineRecorder", "ODCTrainerMixin", "Collation"} <= names
    assert {"attach", "logprobs", "exchange", "save_pretrained"} <= {one.__name__ for one in FUNCTIONS}
    assert len(OPTIONS) > 100


@pytest.mark.parametrize(
    ("name", "made", "argument", "annotation"), OPTIONS, ids=[name for name, *_ in OPTIONS]
)
def test_every_option_refuses_wrong_types_by_name_with_a_line_to_write(name, made, argument, annotation):
    if annotation == "Any":
        make, values = LOOKED_INTO.get(name, (None, []))
        if name not in ANYTHING:
            assert values, f"say in LOOKED_INTO what is wrong for {name}"
        for wrong in values:
            with pytest.raises((ValueError, TypeError), match=argument):
                make(wrong)
        return
    for wrong in STRANGE + WRONG.get(annotation, ["text", 5, True]):
        with pytest.raises(ValueError, match=re.escape(f"{made.__name__}({argument}=")) as error:
            made(**{argument: wrong})
        assert f" cannot work. Write {argument}=" in str(error.value), wrong


def test_the_message_has_the_argument_and_every_kind_of_value():
    @checked
    def call(
        count: Count = 8,
        *,
        order: Literal["long", "short"] | None = None,
        part: Annotated[float, Like("0.5 (a part)", lambda value: 0 < value < 1)] = 0.5,
        pair: tuple[int, bool] | list[str] = (1, True),
    ) -> tuple[Any, ...]:
        return (count, order, part, pair)

    assert call(np.int32(3), order="long", part=np.float32(0.25), pair=["a"]) == (3, "long", 0.25, ["a"])
    refused: list[tuple[dict[str, Any], str]] = [
        ({"count": 0}, "call(count=0) cannot work. Write count=8 (a whole number of at least 1)."),
        ({"order": "none"}, 'call(order=\'none\') cannot work. Write order="long", "short" or None.'),
        ({"part": 1.5}, "call(part=1.5) cannot work. Write part=0.5 (a part)."),
        ({"pair": (1, 1)}, 'call(pair=(1, 1)) cannot work. Write pair=(8, True or False) or ["text"].'),
    ]
    for given, message in refused:
        with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
            call(**given)
    with pytest.raises(TypeError, match="unexpected keyword argument 'parts'"):
        call(parts=1)  # type: ignore[call-arg]
    with pytest.raises(ValueError, match=r"cannot work") as error:
        call(pair=("a" * 5000, True))  # type: ignore[arg-type]
    assert len(str(error.value)) < 400


def test_what_is_handed_on_is_not_looked_at():
    @checked
    def call(first: Count, *args: Any, last: Count = 8, **kwargs: Any) -> tuple[Any, ...]:
        return (first, *args, last)

    assert call(1, "text", "more", "of it", other=0) == (1, "text", "more", "of it", 8)
    with pytest.raises(ValueError, match=r"call\(last=0\)"):
        call(1, "text", last=0)


def test_what_looks_wrong_and_is_right_stays_right():
    """Numbers of numpy and scalars of torch, where they were taken before."""
    assert Minibatch([1, 2], weights=[torch.tensor(2), np.float32(0.5)]).weights == [2.0, 0.5]
    assert Minibatch(iter([1, 2]), weights=np.array([1, 2])).weights == [1.0, 2.0]
    rollout = rl.Rollout(np.array([1, 2, 3]), torch.tensor(1), reward=True, group=np.int64(4))
    assert rollout.group == 4
    advantage = torch.tensor(2.0)
    assert rl.Rollout([1, 2], 1, reward=np.bool_(True), advantage=advantage).advantage == 2.0
    lengths = np.arange(1, 9)
    assert loader(max_tokens=np.int64(8), lengths=lengths).max_tokens == 8
    assert balance.Planner(np.int64(2), max_tokens=np.int64(9)).max_tokens == 9
    ODCStrategy(
        auto_wrap_policy=torch.nn.Linear,
        process_group_backend="cpu:gloo,cuda:NCCL",
        keep_gathered=np.int64(5),
    )
