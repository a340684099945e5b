"""The command line: ``lightning-odc doctor``, ``advise``, ``demo``, and their options."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from importlib import import_module
from typing import Any, NamedTuple, NoReturn

from lightning_odc import doctor
from lightning_odc._version import __version__
from lightning_odc.advisor.options import AdviseOptions
from lightning_odc.console import (
    PROGRAM,
    Form,
    OptionError,
    add_options,
    check_extra_packages,
    complain,
    did_you_mean,
    read_options,
    say_first,
)

BAD_USAGE = 2
INTERRUPTED = 130

EXAMPLES = """\
examples:
  lightning-odc doctor                      can this machine run it, and if not, what to do?
  lightning-odc advise --lengths longalign --model 1.5b --device H200 --devices 8
                                            what would it gain on these lengths? trains nothing
  lightning-odc demo                        train a small model here, three ways, and compare
"""


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line, which names the closest thing that it knows."""

    given: Sequence[str] = ()  # the words that it parses

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Refuse unknown options here: the parser of the whole line does not know those of a command."""
        self.given = list(args or ())
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return found, unknown

    def error(self, message: str) -> NoReturn:
        """End the program with one line."""
        options = re.findall(r"--[a-z][a-z-]*", self.format_usage())
        words = [word.partition("=")[0] for word in self.given if word.startswith("--")]
        unknown = [word for word in words if not any(option.startswith(word) for option in options)]
        if unknown and "are required" in message:  # a slip is why something is missing
            message = f"unrecognized arguments: {' '.join(unknown)}"
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
    if word.startswith("-"):
        return did_you_mean(word, options)
    return did_you_mean(word, [*COMMANDS, *MODULES], f"{PROGRAM} ")


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of ``lightning-odc`` and of ``python -m lightning_odc``; returns the exit code."""
    # It is 1 if the demo's losses disagree, a rank failed, or the doctor found an error; 2 for options that
    # cannot work; 130 after Ctrl-C; otherwise 0.
    if arguments is None:
        arguments = sys.argv[1:]
    if arguments and arguments[0] in MODULES:
        return _run_module(arguments[0], arguments[1:])
    parser = _build_parser()
    if not arguments:
        print(parser.format_help(), end="")
        return 0
    parsed = vars(parser.parse_args(arguments))
    if "command" not in parsed:
        parser.error("the following arguments are required: command")
    command: _Command = parsed["command"]
    form = Form(json=parsed["json"], quiet=parsed["quiet"])
    try:
        options: Any = None
        if command.options is not None:
            options = read_options(command.options, parsed)
        say_first(form)  # the heavy imports wait until the options are right
        return command.run(options, form)
    except OptionError as error:
        complain(str(error))
        return BAD_USAGE
    except KeyboardInterrupt:
        complain("interrupted; no results were written")
        return INTERRUPTED


def _run_module(name: str, arguments: Sequence[str]) -> int:
    """Run a command that has a module of its own."""
    try:
        check_extra_packages(name)
    except OptionError as error:
        complain(str(error))
        return BAD_USAGE
    module = import_module(MODULES[name][0])
    parser = argparse.ArgumentParser(prog=f"{PROGRAM} {name}", description=module.__doc__)
    module.add_arguments(parser)
    code: int = module.run(parser.parse_args(arguments))
    return code


def _doctor(_: None, form: Form) -> int:
    """``lightning-odc doctor``."""
    findings = doctor.examine(doctor.look())
    is_ok = all(finding.level != "error" for finding in findings)
    if form.json:
        records = [asdict(finding) for finding in findings]
        print(json.dumps({"ok": is_ok, "findings": records}, indent=2))
        return int(not is_ok)
    for finding in findings:
        if finding.level != "ok" or not form.quiet:
            print(finding.text)
    if not form.quiet:
        print(doctor.summary(findings))
    return int(not is_ok)


def _advise(options: AdviseOptions, form: Form) -> int:
    """``lightning-odc advise``."""
    from lightning_odc.advisor.inputs import parse_inputs
    from lightning_odc.advisor.report import Advice

    advice = Advice.on(parse_inputs(options))
    if form.json:
        print(json.dumps(advice.as_dict(), indent=2))
    elif form.quiet:
        print(advice.line)
    else:
        print(advice)
    return 0


class _Command(NamedTuple):
    """A command: what runs it, its options, what ``--quiet`` does, and two texts of its help."""

    run: Callable[[Any, Form], int]
    options: type | None
    quiet: str
    help: str
    description: str


COMMANDS = {
    "doctor": _Command(
        _doctor,
        None,
        quiet="print warnings and errors only",
        help="check this machine; say what to do",
        description=(
            "Check what the strategy needs: kernel, memory, network, versions, GPUs. Exit code 1 if there is an error."
        ),
    ),
    "advise": _Command(
        _advise,
        AdviseOptions,
        quiet="print the Trainer to write, and nothing else",
        help="say what balancing would gain on your lengths and model, and which Trainer to write; trains nothing",
        description=(
            "Say from lengths alone how long ranks would wait for each other, before and after balancing, what a rank "
            "needs in memory, and which Trainer to write. If it would not help, the first line says so."
        ),
    ),
}

MODULES = {
    "demo": (
        "lightning_odc.demo",
        "train one model on real text with collectives, on demand and balanced, and compare",
    ),
}
"""Commands with ``add_arguments`` and ``run``."""


def _build_parser() -> argparse.ArgumentParser:
    """The parser of all commands."""
    parser = _Parser(
        prog=PROGRAM,
        description=("On-demand, one-sided parameter sharding for Lightning."),
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"{PROGRAM} {__version__}")
    commands = parser.add_subparsers(metavar="command", parser_class=_Parser)
    for name, (_, text) in MODULES.items():
        commands.add_parser(name, help=text).set_defaults(command=name)
    for name, command in COMMANDS.items():
        own = commands.add_parser(name, help=command.help, description=command.description)
        own.set_defaults(command=command)
        if command.options is not None:
            add_options(own, command.options)
        own.add_argument("--json", action="store_true", help="print one JSON document instead of text")
        own.add_argument("--quiet", action="store_true", help=command.quiet)
    return parser
