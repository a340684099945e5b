"""The command line: ``lightning-odc doctor``, ``advise`` and ``demo``.

A command is a module with ``add_arguments`` and ``run``, which is imported when the command is called: help needs no
torch, and the doctor works where torch is broken.
"""

from __future__ import annotations

import re
import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Sequence
from importlib import import_module

from lightning_odc._version import __version__
from lightning_odc.words import did_you_mean

PROGRAM = "lightning-odc"
BAD_USAGE = 2
INTERRUPTED = 130

COMMANDS = {
    "doctor": ("lightning_odc.doctor", "check whether this machine can run it, and say what to do"),
    "advise": (
        "lightning_odc.advice",
        "say what balancing would gain on your lengths and model; trains nothing",
    ),
    "demo": ("lightning_odc.demo", "train one model on real text in three ways, and compare them"),
}
"""The module and the help of each command."""

EXAMPLES = """\
examples:
  lightning-odc doctor
  lightning-odc advise --data longalign --model 1.5b --device H200 --devices 8
  lightning-odc demo
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of ``lightning-odc`` and of ``python -m lightning_odc``; returns the exit code."""
    # It is 1 if the demo's losses disagree, a rank failed, or the doctor misses something; 2 for options that cannot
    # work; 130 after Ctrl-C; otherwise 0.
    given = sys.argv[1:] if arguments is None else arguments
    parser = ArgumentParser(
        prog=PROGRAM,
        description="On-demand, one-sided parameter sharding for Lightning.",
        epilog=EXAMPLES,
        formatter_class=RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"{PROGRAM} {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="command")
    for name, (_, text) in COMMANDS.items():
        commands.add_parser(name, help=text)
    if not given:
        parser.print_help()
        return 0
    if given[0] not in COMMANDS and not given[0].startswith("-"):
        meant = did_you_mean(given[0], COMMANDS, "{}")
        parser.error(f"There is no command {given[0]!r}. Write one of {', '.join(COMMANDS)}.{meant}")
    command = parser.parse_args(given[:1]).command
    place, text = COMMANDS[command]
    own = ArgumentParser(prog=f"{PROGRAM} {command}", description=f"{text.capitalize()}.", allow_abbrev=False)
    try:
        module = import_module(place)
        module.add_arguments(own)
        known = re.findall(r"--[\w-]+", own.format_help())
        for word in given[1:]:
            option = word.partition("=")[0]
            if option.startswith("--") and option not in known:
                own.error(f"There is no option {option}.{did_you_mean(option, known, '{}')}")
        return int(module.run(own.parse_args(given[1:])))
    except ModuleNotFoundError as error:
        print(f"{own.prog}: {error.name} is missing: pip install {error.name}", file=sys.stderr)
        return BAD_USAGE
    except KeyboardInterrupt:
        print(f"{own.prog}: interrupted", file=sys.stderr)
        return INTERRUPTED
