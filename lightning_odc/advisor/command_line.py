"""The parser of ``lightning-odc advise``, and what it prints."""

from __future__ import annotations

import json
from typing import Any

from lightning_odc.advisor.options import AdviseOptions
from lightning_odc.console import Form, add_form, add_options, read_options, say_first


def add_parser(commands: Any) -> None:
    """Add ``advise`` to the commands of the program."""
    parser = commands.add_parser(
        "advise",
        help="say what balancing would gain on your lengths and model, and which Trainer to write; trains nothing",
        description="Say from lengths alone how long ranks would wait for each other, before and after balancing, what "
        "a rank needs in memory, and which Trainer to write. If it would not help, the first line says so.",
    )
    parser.set_defaults(command=_advise)
    add_options(parser, AdviseOptions)
    add_form(parser, "print the Trainer to write, and nothing else")


def _advise(parsed: dict[str, Any], form: Form) -> int:
    """``lightning-odc advise``."""
    options = read_options(AdviseOptions, parsed)
    say_first(form)
    from lightning_odc.advisor.plans import Facts
    from lightning_odc.advisor.question import ask
    from lightning_odc.advisor.report import Advice

    advice = Advice(Facts.of(ask(options)))
    if form.json:
        print(json.dumps(advice.as_dict(), indent=2))
    else:
        print(advice.line if form.quiet else advice)
    return 0
