"""The parsers of ``lightning-odc bench``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

from lightning_odc.bench.options import (
    COMMUNICATIONS,
    COSTS,
    DISTRIBUTIONS,
    MODELS,
    PAPER_MODELS,
    POLICIES,
    PRECISIONS,
    SWEEPS,
    Combination,
    CommOptions,
    EngineOptions,
    SweepOptions,
    TrainOptions,
    parse_size,
)
from lightning_odc.console import Form, add_form, check_extra_packages, run_written, say_first

WHAT = ("train", "sweep", "comm", "engine")
DEVICE_HELP = (
    "device that ranks compute on, cpu or cuda; figures in the documentation are for cpu. If there are fewer GPUs than "
    "ranks, ranks share them: that shows that it works, not how fast"
)

_NUMBERS: dict[str, tuple[type, str]] = {
    "ranks": (int, "processes, one rank each (2, or 8 emulated devices)"),
    "samples_per_rank": (int, "samples of each rank in a minibatch, on average (8, emulated 4)"),
    "samples_per_microbatch": (int, "samples in a microbatch under local_sort and shuffled"),
    "minibatches": (int, "timed minibatches per run; an untimed one runs first"),
    "repetitions": (int, "how often each combination trains the same minibatches; combinations take turns"),
    "max_length": (int, "longest sample in tokens: texts, files and data sets drop longer ones, named "
        "distributions shrink (2048, emulated as they are)"),
    "packing_ratio": (float, "most tokens of a microbatch, in lengths of the longest sample"),
    "slow_rank": (float, "how many times slower the last rank is"),
    "seconds_per_minibatch": (float, "emulated time of a minibatch; by default so long that sleeping dominates"),
    "seed": (int, "seed of weights, named distributions and the order of samples"),
}  # fmt: skip


class _Formatter(argparse.ArgumentDefaultsHelpFormatter):
    """Shows defaults, but none where the help says what it depends on."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return action.help if action.default is None else super()._get_help_string(action)


def completed(arguments: Sequence[str]) -> list[str]:
    """The command line with ``train`` put in where only ``bench`` stands."""
    if arguments[:1] == ["bench"] and arguments[1:2] not in ([[one] for one in (*WHAT, "-h", "--help")]):
        return ["bench", "train", *arguments[1:]]
    return list(arguments)


def add_parser(commands: Any, parser_class: Any) -> None:
    """Add ``bench`` to the commands of the program."""
    bench = commands.add_parser(
        "bench",
        help="measure your model and data under every way to communicate and to balance",
        description="Measure on this machine. `bench` alone runs `bench train`.",
    )
    kinds = bench.add_subparsers(required=True, metavar="what", parser_class=parser_class)
    _add_train(kinds)
    _add_sweep(kinds)
    _add_comm(kinds)
    _add_engine(kinds)


def _add_train(kinds: Any) -> None:
    train = kinds.add_parser(
        "train",
        help="train under combinations of communication and balancing, which take turns",
        description="Train one model on the same minibatches under combinations of communication and balancing, which "
        "take turns. Show times with confidence intervals, speed-ups split into causes, idle time and memory.",
        formatter_class=_Formatter,
    )
    train.set_defaults(command=_train)
    _add_output(train)
    train.add_argument(
        "--runs",
        nargs="+",
        metavar="C+P",
        help=f"combinations: one of {', '.join(COMMUNICATIONS)}, a plus, one of {', '.join(POLICIES)}; a second plus "
        'and a cost override --cost; auto is the choice of strategy="odc"',
    )
    train.add_argument(
        "--emulate",
        action="store_true",
        help="layers sleep as long as a cost model says: many ranks on few cores",
    )
    train.add_argument(
        "--model",
        metavar="M",
        help=f"one of {', '.join(MODELS)} (emulated: {', '.join(PAPER_MODELS)}); layers x width of another such model, "
        "as in 4x256; a type of model that transformers knows, such as gpt2, in its default configuration with random "
        "weights; or a Hugging Face config.json",
    )
    train.add_argument(
        "--lengths",
        metavar="L",
        help=f"one of {', '.join(DISTRIBUTIONS)}; a .txt, .json or .jsonl file of lengths or token ids; or the folder "
        "of a data set",
    )
    train.add_argument("--cost", metavar="C", help=f"cost that the planner uses, one of {', '.join(COSTS)}")
    train.add_argument(
        "--precision", metavar="P", help=f"precision of the computation, {' or '.join(PRECISIONS)}"
    )
    train.add_argument("--device", metavar="D", help=DEVICE_HELP)
    for name, (kind, text) in _NUMBERS.items():
        letter = "N" if kind is int else "X"
        train.add_argument(_flag(name), type=kind, metavar=letter, help=text)
    train.set_defaults(**{one.name: one.default for one in fields(TrainOptions)})


def _add_sweep(kinds: Any) -> None:
    defaults = SweepOptions()
    sweep = kinds.add_parser(
        "sweep",
        help="the paper's parametric study on emulated devices",
        description="Vary devices, minibatch size, longest sample and packing ratio on emulated devices, one at a "
        "time. Show the speed-up, its bound and the paper's figure. balanced is the control with equal lengths.",
        formatter_class=_Formatter,
    )
    sweep.set_defaults(command=_sweep)
    sweep.add_argument(
        "sweeps", nargs="*", metavar="sweep", help=f"one or more of {', '.join(SWEEPS)}; by default all"
    )
    _add_output(sweep)
    sweep.add_argument(
        "--minibatches",
        type=int,
        default=defaults.minibatches,
        metavar="N",
        help="timed minibatches per setting",
    )
    sweep.add_argument(
        "--most-ranks",
        type=int,
        default=defaults.most_ranks,
        metavar="N",
        help="leave out settings with more ranks",
    )
    sweep.add_argument(
        "--seconds-per-minibatch", type=float, metavar="X", help=_NUMBERS["seconds_per_minibatch"][1]
    )


def _add_comm(kinds: Any) -> None:
    comm = kinds.add_parser(
        "comm",
        help="gather, accumulate and settle, compared with the process group's collectives",
        description="Time gather, accumulate and settle. Compare them with all-gather, reduce-scatter and all-reduce "
        "of the process group, and with a plain copy of the same bytes on this machine.",
        formatter_class=_Formatter,
    )
    comm.set_defaults(command=_comm)
    _add_output(comm)
    defaults = CommOptions()
    comm.add_argument(
        "--ranks", nargs="+", type=int, default=defaults.ranks, metavar="N", help="processes, 1 to 16"
    )
    comm.add_argument(
        "--sizes",
        nargs="+",
        metavar="S",
        default=("4K", "64K", "1M", "16M", "64M"),
        help="sizes of the whole fp32 unit, 4K to 256M",
    )
    comm.add_argument("--rounds", type=int, default=defaults.rounds, metavar="N", help="timed rounds")
    comm.add_argument(
        "--skew",
        type=float,
        default=defaults.skew,
        metavar="S",
        help="seconds by which the last rank is later than the first one; the others are spread evenly between",
    )


def _add_engine(kinds: Any) -> None:
    defaults = EngineOptions()
    engine = kinds.add_parser(
        "engine",
        help="time of the engine's Python, and how much adding slows down a busy owner",
        description="Time the engine's own Python per microbatch and unit, and the work of an owner while peers add "
        "gradients into its accumulator.",
        formatter_class=_Formatter,
    )
    engine.set_defaults(command=_engine)
    _add_output(engine)
    engine.add_argument(
        "--peers",
        nargs="+",
        type=int,
        default=defaults.peers,
        metavar="N",
        help="number of peers that add into the owner",
    )
    engine.add_argument(
        "--mib", type=int, default=defaults.mib, metavar="N", help="MiB of the gradients they add"
    )
    engine.add_argument("--rounds", type=int, default=defaults.rounds, metavar="N", help="timed rounds")


def _add_output(parser: Any) -> None:
    """The options that all of them have."""
    parser.add_argument(
        "--output",
        type=Path,
        default=TrainOptions.output,
        metavar="DIR",
        help="folder for JSON, Markdown and pictures",
    )
    add_form(parser, "print errors only; the files are written")


def _train(parsed: dict[str, Any], form: Form) -> int:
    """``lightning-odc bench train``."""
    runs = parsed.pop("runs")
    chosen = None if runs is None else tuple(map(Combination.parse, runs))
    options = TrainOptions(**parsed, runs=chosen)
    check_extra_packages("benchmark")
    # The heavy imports wait until the options are right.
    say_first(form)
    from lightning_odc.bench.train import run_train

    return run_written(form, partial(run_train, options), parsed["output"] / "bench.json")


def _sweep(parsed: dict[str, Any], form: Form) -> int:
    """``lightning-odc bench sweep``."""
    options = SweepOptions(**{**parsed, "sweeps": tuple(parsed["sweeps"]) or SWEEPS})
    check_extra_packages("benchmark")
    say_first(form)
    from lightning_odc.bench.sweeps import run_sweep

    return run_written(form, partial(run_sweep, options), parsed["output"] / "sweep.json")


def _comm(parsed: dict[str, Any], form: Form) -> int:
    """``lightning-odc bench comm``."""
    sizes = tuple(map(parse_size, parsed.pop("sizes")))
    options = CommOptions(**{**parsed, "ranks": tuple(parsed["ranks"]), "sizes": sizes})
    check_extra_packages("benchmark")
    say_first(form)
    from lightning_odc.bench.comm import run_comm

    return run_written(form, partial(run_comm, options), parsed["output"] / "comm.json")


def _engine(parsed: dict[str, Any], form: Form) -> int:
    """``lightning-odc bench engine``."""
    options = EngineOptions(**{**parsed, "peers": tuple(parsed["peers"])})
    check_extra_packages("benchmark")
    say_first(form)
    from lightning_odc.bench.engine_costs import run_engine

    return run_written(form, partial(run_engine, options), parsed["output"] / "engine.json")


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
