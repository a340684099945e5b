"""The bandwidth, length and minibatch below which on-demand communication gains nothing.

Note [Break-even]
~~~~~~~~~~~~~~~~~
The recommended on-demand setting is compared with the best that collectives can do. Both are planned again when
lengths or sizes change. Bandwidth changes no plan, so it is found by bisection, on a logarithmic scale. Lengths and
sizes are tried at powers of two: nothing is claimed between the last one that loses and the first one that gains.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from lightning_odc.advisor.answer import WORTH, Answer, work_of
from lightning_odc.advisor.question import Question
from lightning_odc.simulate import Work, simulate_work

_FAR = 1e3  # how many times more or less bandwidth is looked at
_HALVINGS = 24
_STEPS = 8
_PARTS = tuple(2.0**power for power in range(0, -9, -1))
_SIZES = (1, 2, 4, 8, 16, 32)
_MOST_SAMPLES = 8192
_MOST_LENGTHS = 16384


@dataclass(frozen=True)
class Limit:
    """One bound of the gain.

    Attributes:
        name: ``"network"``, ``"link"`` (inside a node), ``"length"`` or ``"minibatch"``.
        value: Bytes per second of a device, mean tokens of a sample, or samples per device; ``None``: nowhere.
        text: The same for people.
    """

    name: str
    value: float | None
    text: str


def limits_of(answer: Answer) -> list[Limit]:
    """All limits of an answer; only that of the minibatch where nothing is gained as it is."""
    if not answer.helps:
        return [_of_minibatch(answer)]
    return [_of_bandwidth(answer), _of_length(answer), _of_minibatch(answer)]


def ratio(answer: Answer, question: Question, works: tuple[Work, Work]) -> float:
    """The time by collectives over that on demand.

    Args:
        answer: The two settings to compare.
        question: The cluster and the model.
        works: The planned steps of both.
    """
    seconds = [
        simulate_work(
            work,
            question.model,
            question.cluster,
            communication=setting.communication,
            sharding=setting.sharding,
        ).mean_seconds
        for work, setting in zip(works, (answer.by_collectives, answer.on_demand), strict=True)
    ]
    return seconds[0] / seconds[1]


def _works(answer: Answer, question: Question) -> tuple[Work, Work]:
    steps = min(_STEPS, max(_MOST_SAMPLES // question.samples_per_step, 1))
    policies = answer.by_collectives.policy, answer.on_demand.policy
    slow, fast = (work_of(question, policy, steps) for policy in policies)
    return slow, fast


def _of_bandwidth(answer: Answer) -> Limit:
    question = answer.question
    name = "network" if question.cluster.nodes > 1 else "link"
    now = getattr(question.cluster.device, name)
    works = answer.by_collectives.work, answer.on_demand.work

    def gains(bandwidth: float) -> bool:
        return ratio(answer, replace(question, cluster=question.cluster.but(**{name: bandwidth})), works) > 1

    where = "between nodes" if name == "network" else "inside a node"
    found = _least(gains, now)
    if found is None:
        text = f"bandwidth {where}: gains at any that was looked at, {_rate(now / _FAR)} to {_rate(now)} of a device"
    else:
        text = f"bandwidth {where}: loses below {_rate(found)} per device; now {_rate(now)}"
    return Limit(name, found, text)


def _least(gains: Callable[[float], bool], now: float) -> float | None:
    """The value below ``now`` at which gaining ends, by bisection; ``None`` if it does not."""
    low, high = now / _FAR, now
    if gains(low) or not gains(high):
        return None
    for _ in range(_HALVINGS):
        middle = (low * high) ** 0.5
        low, high = (low, middle) if gains(middle) else (middle, high)
    return high


def _fewer(question: Question) -> Question:
    """The question with a sample of its lengths, because every plan sorts all of them again."""
    lengths = question.lengths
    if len(lengths) > _MOST_LENGTHS:
        lengths = np.random.default_rng(question.seed).choice(lengths, _MOST_LENGTHS, replace=False)
    return replace(question, lengths=lengths, max_tokens=question.max_tokens or int(question.lengths.max()))


def _of_length(answer: Answer) -> Limit:
    question = _fewer(answer.question)
    means = []
    for part in _PARTS:
        shorter = np.maximum(question.lengths * part, 1).astype(np.int64)
        most = (
            None if question.max_tokens is None else max(int(question.max_tokens * part), int(shorter.max()))
        )
        means.append(float(shorter.mean()))
        asked = replace(question, lengths=shorter, max_tokens=most)
        if ratio(answer, asked, _works(answer, asked)) < WORTH:
            return Limit(
                "length",
                means[-1],
                f"length: nothing is gained at {means[-1]:,.0f} tokens on average; now {means[0]:,.0f}",
            )
    return Limit(
        "length", None, f"length: gains down to {means[-1]:,.0f} tokens on average; now {means[0]:,.0f}"
    )


def _of_minibatch(answer: Answer) -> Limit:
    question = _fewer(answer.question)
    found = dict(_by_size(answer, question))
    worthless = [size for size, gain in found.items() if gain < WORTH]
    shown = ", ".join(f"{size}: x{gain:.2f}" for size, gain in found.items())
    value = max((size for size in worthless if size < question.minibatch_size), default=None)
    return Limit("minibatch", value, f"samples per device and step: {shown}; now {question.minibatch_size}")


def _by_size(answer: Answer, question: Question) -> Sequence[tuple[int, float]]:
    found = []
    for size in sorted({*_SIZES, question.minibatch_size}):
        asked = replace(question, minibatch_size=size)
        if asked.samples_per_step <= min(_MOST_SAMPLES, len(asked.lengths)):
            found.append((size, ratio(answer, asked, _works(answer, asked))))
    return found


def _rate(bandwidth: float) -> str:
    """Bytes per second for people."""
    return f"{bandwidth / 1e9:.3g} GB/s" if bandwidth >= 1e8 else f"{bandwidth / 1e6:.3g} MB/s"
