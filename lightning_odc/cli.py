"""The command line: ``lightning-odc doctor``, ``advise``, ``demo``, ``bench``, and their options."""

from __future__ import annotations

import argparse
import difflib
import re
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any, NoReturn

from lightning_odc._version import __version__
from lightning_odc.advisor import command_line as advise_cli
from lightning_odc.bench.options import DemoOptions, TrainOptions
from lightning_odc.console import (
    PROGRAM,
    Form,
    OptionError,
    add_form,
    add_options,
    check_extra_packages,
    complain,
    read_options,
    run_written,
    say_first,
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
  lightning-odc bench --model gpt2 --lengths lengths.txt
                                            measure your model and your lengths on this machine
"""

COMMANDS = ("doctor", "advise", "demo", "bench")


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
    return f": did you mean {close[0] if word.startswith('-') else f'{PROGRAM} {close[0]}'}?"


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of ``lightning-odc`` and of ``python -m lightning_odc``.

    Args:
        arguments: the command line without the program's name; by default that of the process.

    Returns:
        The exit code. It is 1 if the demo's losses disagree, a rank failed, or the doctor found an error;
        2 for options that cannot work; 130 after Ctrl-C; otherwise 0.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    parser = _build_parser()
    if not given:
        print(parser.format_help(), end="")
        return 0
    parsed = vars(parser.parse_args(given))
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
    options = read_options(DemoOptions, parsed)
    check_extra_packages("demo")
    # The heavy imports wait until the options are right.
    say_first(form)
    from lightning_odc.bench.demo import run_demo

    return run_written(form, partial(run_demo, options), options.output / "result.json")


def _bench(parsed: dict[str, Any], form: Form) -> int:
    """``lightning-odc bench``."""
    options = read_options(TrainOptions, parsed)
    check_extra_packages("benchmark")
    say_first(form)
    from lightning_odc.bench.report import Outcome
    from lightning_odc.bench.train import run_train
    from lightning_odc.bench.workload import Workload

    return run_written(form, lambda: run_train(Outcome(Workload(options))), parsed["output"] / "bench.json")


def _build_parser() -> argparse.ArgumentParser:
    """The parser of all commands."""
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
    )
    bench = commands.add_parser(
        "bench",
        help="measure your model and data under every way to communicate and to balance",
        description="Train one model on the same minibatches under combinations of communication and balancing, which "
        "take turns. Show times with confidence intervals, speed-ups split into causes, idle time and memory.",
    )
    bench.add_argument("train", nargs="?", choices=("train",), metavar="train", help="may be left out")
    for command, run, options in ((demo, _demo, DemoOptions), (bench, _bench, TrainOptions)):
        command.set_defaults(command=run)
        add_options(command, options)
        add_form(command, "print errors only; the files are written")
    return parser
