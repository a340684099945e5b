"""The command line: ``lightning-odc doctor``, ``advise``, ``demo``, ``bench``, and their options."""

from __future__ import annotations

import argparse
import difflib
import re
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from lightning_odc._version import __version__
from lightning_odc.advisor import command_line as advise_cli
from lightning_odc.bench import command_line as bench_cli
from lightning_odc.bench.options import PRECISIONS
from lightning_odc.console import (
    PROGRAM,
    Form,
    OptionError,
    add_form,
    check_extra_packages,
    complain,
    run_written,
    say_first,
)
from lightning_odc.demo.options import (
    MODES,
    ORDERS,
    DemoOptions,
)
from lightning_odc.doctor import command_line as doctor_cli

BAD_USAGE = 2
INTERRUPTED = 130

EXAMPLES = """\
examples:
  lightning-odc doctor                      can this machine run it, and if not, what to do?
  lightning-odc advise --lengths longalign --model 1.5b --device H200 --devices 8
                                            what would it gain on these lengths? trains nothing
  lightning-odc demo                        train a small model here, three ways, and compare
  lightning-odc bench train --model gpt2 --lengths lengths.txt
                                            measure your model and your lengths on this machine
"""

COUNTS = {
    "devices": "processes, one rank each",
    "minibatches": "timed minibatches per repetition; an untimed one runs first",
    "repetitions": "how often each mode trains the same minibatches; modes take turns",
    "samples_per_rank": "samples of each rank in a minibatch",
    "samples_per_microbatch": "samples packed into one microbatch; balanced chooses by itself",
    "max_length": "longest sample in tokens (bytes); longer functions are left out",
    "layers": "decoder layers of the model",
    "hidden_size": "width of the model",
    "seed": "seed of the weights and of the choice of samples",
}
"""The options that are numbers, with their help."""
COMMANDS = {
    **{name: name for name in ("doctor", "advise", "demo", "bench")},
    **{name: f"bench {name}" for name in bench_cli.WHAT},
}
"""What to type for a word that is a command, or one of ``bench``."""


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line, which names the closest thing that it knows."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Refuse unknown options here: the parser of the whole line does not know those of a command."""
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return found, unknown

    def error(self, message: str) -> NoReturn:
        """End the program with one line."""
        options = re.findall(r"--[a-z][a-z-]*", self.format_usage())
        complain(f"{message}{_suggestion(message, options)} (see {self.prog} --help)")
        self.exit(BAD_USAGE)


def _suggestion(message: str, options: Sequence[str]) -> str:
    """The closest option or command to the word that argparse complains about; empty if none is close.

    >>> _suggestion("unrecognized arguments: --sede 3", ["--seed", "--order"])
    ': did you mean --seed?'
    """
    found = re.search(r"(?:unrecognized arguments: |invalid choice: ')([^\s'=]+)", message)
    if found is None:
        return ""
    word = found[1]
    close = difflib.get_close_matches(word, options if word.startswith("-") else COMMANDS, n=1)
    if not close:
        return ""
    return f": did you mean {close[0] if word.startswith('-') else f'{PROGRAM} {COMMANDS[close[0]]}'}?"


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of ``lightning-odc`` and of ``python -m lightning_odc``.

    Args:
        arguments: the command line without the program's name; by default that of the process.

    Returns:
        The exit code. It is 1 if the demo's losses disagree, a benchmark's rank failed, or the doctor found an error;
        2 for options that cannot work; 130 after Ctrl-C; otherwise 0.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    parser = _build_parser()
    if not given:
        print(parser.format_help(), end="")
        return 0
    parsed = vars(parser.parse_args(bench_cli.completed(given)))
    if "command" not in parsed:
        parser.error("the following arguments are required: command")
    command = parsed.pop("command")
    form = Form(json=parsed.pop("json"), quiet=parsed.pop("quiet"))
    try:
        return int(command(parsed, form))
    except OptionError as error:
        complain(str(error))
        return BAD_USAGE
    except KeyboardInterrupt:
        complain("interrupted; no results were written")
        return INTERRUPTED


def _demo(parsed: dict[str, Any], form: Form) -> int:
    """``lightning-odc demo``."""
    options = DemoOptions(**{**parsed, "communication": tuple(parsed["communication"])})
    check_extra_packages("demo")
    # The heavy imports wait until the options are right.
    say_first(form)
    from lightning_odc.demo.run import run_demo

    return run_written(form, partial(run_demo, options), options.output / "result.json")


def _build_parser() -> argparse.ArgumentParser:
    """The parser of all commands; the defaults are those of `DemoOptions`."""
    parser = _Parser(
        prog=PROGRAM,
        description="On-demand, one-sided parameter sharding for Lightning.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"{PROGRAM} {__version__}")
    commands = parser.add_subparsers(metavar="command", parser_class=_Parser)
    doctor_cli.add_parser(commands)
    advise_cli.add_parser(commands)
    demo = commands.add_parser(
        "demo",
        help="train one model on real text with collectives, on demand and balanced, and compare",
        description="Train the same small language model on the same minibatches of Python source: with collectives, "
        'on demand, and on demand with balanced minibatches (strategy="odc"). Show times, losses, the '
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
        help=f'modes to compare, among {", ".join(MODES)}; balanced is strategy="odc", and lockstep splits '
        "cheaper bytes from fewer waits",
    )
    for name, text in COUNTS.items():
        demo.add_argument(_flag(name), type=int, default=getattr(defaults, name), metavar="N", help=text)
    demo.add_argument(
        "--order",
        metavar="ORDER",
        default=defaults.order,
        help=f"order of a rank's samples in a minibatch, {' or '.join(ORDERS)}: longest first, or like a shuffling "
        "loader; balanced chooses its own",
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
        help=f"precision of the computation, {' or '.join(PRECISIONS)}",
    )
    demo.add_argument("--device", metavar="D", default=defaults.device, help=bench_cli.DEVICE_HELP)
    add_form(demo, "print errors only; the files are written")


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
