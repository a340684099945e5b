"""The parser of ``lightning-odc advise``, and what it prints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lightning_odc.bench.options import DISTRIBUTIONS
from lightning_odc.console import Form, OptionError, add_form, say_first

_ENDINGS = (".svg", ".png", ".pdf")


def add_parser(commands: Any) -> None:
    """Add ``advise`` to the commands of the program."""
    parser = commands.add_parser(
        "advise",
        help="predict the gain on your lengths, model and cluster; trains nothing",
        description="Predict time, idle time and memory of every way to communicate, to balance and to shard, from "
        "lengths alone, and say which Trainer to write. If on-demand communication would not help, the first line says "
        "so.",
    )
    parser.set_defaults(command=_advise)
    parser.add_argument(
        "--lengths",
        required=True,
        metavar="L",
        help=f"one of {', '.join(DISTRIBUTIONS)}; a file of lengths (.txt with one per line, .npy, .json), of records "
        "with token ids, lengths or texts (.jsonl); or the folder of a data set",
    )
    parser.add_argument(
        "--model",
        required=True,
        metavar="M",
        help="a Hugging Face config.json or its folder; 1.5b, 7b, 14b, 32b (Qwen 2.5), 8b, 70b (Llama 3); a type that "
        "transformers knows, such as gpt2; or a number of parameters, such as 3e9",
    )
    parser.add_argument(
        "--device",
        metavar="D",
        help="A100, H100, H200, MI300X, or cpu for this machine's processor (H100)",
    )
    parser.add_argument("--devices", type=int, metavar="N", help="devices of all nodes together (8 per node)")
    parser.add_argument("--nodes", type=int, metavar="N", help="nodes (1)")
    parser.add_argument(
        "--minibatch-size",
        type=int,
        metavar="N",
        help="samples per device and optimizer step (4)",
    )
    parser.add_argument(
        "--max-tokens",
        type=int,
        metavar="N",
        help="most tokens of a microbatch (those of the longest sample)",
    )
    parser.add_argument(
        "--max-length",
        type=int,
        metavar="N",
        help="longest sample in tokens: texts, files and data sets drop longer ones, named distributions shrink",
    )
    parser.add_argument(
        "--tokenizer",
        metavar="T",
        help="a Hugging Face tokenizer for texts; without one, 4 bytes count as a token",
    )
    parser.add_argument(
        "--picture", type=Path, metavar="FILE", help=f"also draw a picture ({', '.join(_ENDINGS)})"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of the order of samples (0)")
    add_form(parser, "print the Trainer to write, and nothing else")


def _advise(parsed: dict[str, Any], form: Form) -> int:
    """``lightning-odc advise``."""
    picture = parsed.pop("picture")
    if picture is not None and picture.suffix not in _ENDINGS:
        raise OptionError(f"--picture {picture}: its ending says the format: {', '.join(_ENDINGS)}")
    say_first(form)
    from lightning_odc.advisor.answer import answer
    from lightning_odc.advisor.question import Sizes, ask
    from lightning_odc.advisor.report import Advice

    sizes = Sizes(*(parsed.pop(name) for name in ("devices", "nodes", "minibatch_size", "max_tokens")))
    advice = Advice.of(answer(ask(parsed.pop("lengths"), parsed.pop("model"), sizes, **parsed)))
    if picture is not None:
        _draw(advice, picture)
    if form.json:
        print(json.dumps(advice.as_dict(), indent=2))
    else:
        print(advice.line if form.quiet else advice)
    return 0


def _draw(advice: Any, picture: Path) -> None:
    try:
        advice.save(picture)
    except ImportError:
        raise OptionError('--picture needs matplotlib: pip install "lightning-odc[demo]"') from None
    except OSError as error:
        raise OptionError(f"--picture {picture}: {error.strerror or error}") from error
