"""The command line: ``lightning-odc demo``, ``lightning-odc bench``, and what they can be told."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from lightning_odc._version import __version__
from lightning_odc.bench import command_line as bench_cli
from lightning_odc.demo.options import (
    MODES,
    ORDERS,
    PRECISIONS,
    DemoOptions,
    OptionError,
    check_extra_packages,
)

PROGRAM = "lightning-odc"
BAD_USAGE = 2
INTERRUPTED = 130

COUNTS = {
    "devices": "processes, one rank each",
    "minibatches": "timed minibatches per repetition; one more goes before them, untimed",
    "repetitions": "how often each mode trains the same minibatches, the modes in turns",
    "samples_per_rank": "samples of each rank in a minibatch",
    "samples_per_microbatch": "samples packed into one microbatch; balanced chooses by itself",
    "max_length": "longest sample in tokens (bytes); longer functions are left out",
    "layers": "decoder layers of the model",
    "hidden_size": "width of the model",
    "seed": "of the weights and of the choice of samples",
}
"""The options that are numbers, with their help."""


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        _complain(f"{message} (see {self.prog} --help)")
        self.exit(BAD_USAGE)


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of ``lightning-odc`` and of ``python -m lightning_odc``.

    Args:
        arguments: the command line without the program's name; by default that of the process.

    Returns:
        The exit code: 0; 1 if the demo's losses disagree or a benchmark's rank failed; 2 for options that cannot work;
        130 after Ctrl-C.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    parsed = vars(_build_parser().parse_args(bench_cli.completed(given)))
    command = parsed.pop("command")
    try:
        return int(command(parsed))
    except OptionError as error:
        _complain(str(error))
        return BAD_USAGE
    except KeyboardInterrupt:
        _complain("interrupted; no results were written")
        return INTERRUPTED


def _demo(parsed: dict[str, Any]) -> int:
    """``lightning-odc demo``."""
    options = DemoOptions(**{**parsed, "communication": tuple(parsed["communication"])})
    check_extra_packages()
    # The heavy imports wait until the options are right.
    from lightning_odc.demo.run import run_demo

    return run_demo(options)


def _build_parser() -> argparse.ArgumentParser:
    """The parser of all commands; the defaults are those of `DemoOptions`."""
    parser = _Parser(prog=PROGRAM, description="On-demand, one-sided parameter sharding for Lightning.")
    parser.add_argument("--version", action="version", version=f"{PROGRAM} {__version__}")
    commands = parser.add_subparsers(required=True, metavar="command", parser_class=_Parser)
    demo = commands.add_parser(
        "demo",
        help="train one model on real text with collectives, on demand and balanced, and compare",
        description="Train the same small language model on the same minibatches of Python source: with collectives, "
        'on demand, and on demand with balanced minibatches (strategy="odc_balanced"). Show times, losses, the '
        "speed-up and its causes.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    demo.set_defaults(command=_demo)
    _add_demo_options(demo, DemoOptions())
    bench_cli.add_parser(commands, _Parser)
    return parser


def _add_demo_options(demo: argparse.ArgumentParser, defaults: DemoOptions) -> None:
    """Everything that `DemoOptions` holds."""
    demo.add_argument(
        "--output",
        type=Path,
        default=defaults.output,
        metavar="DIR",
        help="folder for result.json and pictures",
    )
    demo.add_argument(
        "--communication",
        nargs="+",
        metavar="MODE",
        default=defaults.communication,
        help=f'modes to compare, among {", ".join(MODES)}; balanced is strategy="odc_balanced", and lockstep splits '
        "cheaper bytes from fewer waits",
    )
    for name, text in COUNTS.items():
        demo.add_argument(_flag(name), type=int, default=getattr(defaults, name), metavar="N", help=text)
    demo.add_argument(
        "--order",
        metavar="ORDER",
        default=defaults.order,
        help=f"of a rank's samples within a minibatch, {' or '.join(ORDERS)}: by length, the longest first, "
        "or as a shuffling loader delivers them; balanced has its own",
    )
    demo.add_argument(
        "--equal-lengths",
        action="store_true",
        help="the control: cut the same text into samples of one length",
    )
    demo.add_argument(
        "--precision",
        metavar="P",
        default=defaults.precision,
        help=f"of the computation, {' or '.join(PRECISIONS)}",
    )
    demo.add_argument("--device", metavar="D", default=defaults.device, help=bench_cli.DEVICE_HELP)


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _complain(message: str) -> None:
    """One line on stderr."""
    print(f"{PROGRAM}: {message}", file=sys.stderr)
