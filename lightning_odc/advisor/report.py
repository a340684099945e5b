"""An answer for people: what to write, what it brings, why, and where that ends. And the same for programs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from textwrap import indent
from typing import Any

import numpy as np

from lightning_odc.advisor.answer import AS_THEY_COME, WORTH, Answer, Setting, enough_devices
from lightning_odc.advisor.limits import Limit, limits_of
from lightning_odc.bench.results import Interval
from lightning_odc.files import write_json

GIGA = 1e9
CAUSES: Mapping[str, str] = {
    "compute": "computing, if it were level",
    "padding": "padding",
    "longest_sample": "the longest sample, which no plan can share out",
    "imbalance": "imbalance of the plan",
    "waits": "waiting at every layer",
    "communication": "communication inside a node",
    "network": "communication between nodes",
    "step": "the optimizer step and its meeting",
}
"""What `Simulation.causes` are called."""
_LEAST_PART = 0.005


@dataclass(frozen=True)
class Advice:
    """What `lightning_odc.advise` returns. ``print(advice)`` is what ``lightning-odc advise`` prints.

    Attributes:
        answer: Every setting that was simulated, and what follows.
        limits: Where on-demand communication stops gaining.
    """

    answer: Answer
    limits: Sequence[Limit]

    @classmethod
    def of(cls, answer: Answer) -> Advice:
        """The advice that follows from an answer."""
        return cls(answer, limits_of(answer))

    @property
    def helps(self) -> bool:
        """Whether on-demand communication gains anything over the best that collectives can do."""
        return self.answer.helps

    @property
    def line(self) -> str:
        """The ``Trainer`` to write, below the import that it needs."""
        return trainer_line(self.answer)

    @cached_property
    def speed_up(self) -> Interval:
        """Low end, value and high end: the recommended setting over stock sharding with batches as they come."""
        return self.answer.speed_up(self.answer.baseline, self.answer.recommended)

    def __str__(self) -> str:
        parts = [
            self._verdict(),
            indent(self.line, "    "),
            self._untried(),
            self._facts(),
            self._table(),
            self._why(),
            self._limits(),
        ]
        return "\n\n".join(filter(None, parts))

    __repr__ = __str__

    def _verdict(self) -> str:
        """One or two sentences; that nothing is gained, or nothing fits, comes first."""
        answer = self.answer
        over_collectives = answer.speed_up(answer.by_collectives, answer.on_demand)
        said = (
            f"On-demand communication would help: {_ratio(over_collectives)} over the best that collectives can do "
            f"({answer.by_collectives}), {_ratio(self.speed_up)} over batches as they come."
        )
        if not answer.helps:
            tight = "" if answer.on_demand in answer.fitting else ", and it does not fit into memory"
            said = (
                f"On-demand communication would not help{tight}: {_ratio(over_collectives)} over the best that "
                f"collectives can do ({answer.by_collectives})."
            )
            if answer.question.cluster.devices == 1:
                said = "One device has no other to wait for: on-demand communication gains nothing."
            if answer.recommended.policy != AS_THEY_COME and self.speed_up[1] >= WORTH:
                said += f" Balancing would: {_ratio(self.speed_up)} over batches as they come."
        return said if answer.fits else f"{self._shortage()}\n{said}"

    def _shortage(self) -> str:
        least = min(self.answer.settings, key=lambda one: one.simulation.memory.total)
        memory, question = least.simulation.memory, self.answer.question
        enough = enough_devices(question)
        remedy = "More devices alone would not do: shorten the samples, or use a loss that keeps no logits."
        if enough:
            remedy = f"{enough} devices would do."
        return (
            f"No setting fits into memory: the smallest ({least}) takes {_gb(memory.total)} of {_gb(memory.limit)}, "
            f"{_gb(memory.activations)} of it for activations and logits. {remedy} The times below assume enough."
        )

    def _untried(self) -> str:
        is_untried = not self.answer.is_cpu and "lightning_odc" in self.line
        return "Lightning-ODC's code for GPUs has not run on a GPU yet." if is_untried else ""

    def _facts(self) -> str:
        question, gain = self.answer.question, self.answer.gain
        skew = skew_of(question.lengths)
        cluster = question.cluster
        nodes = f" on {cluster.nodes} nodes" if cluster.nodes > 1 else ""
        tail = ", ".join(f"{name} {skew[name]:,.0f}" for name in ("median", "mean", "90%", "longest"))
        lines = [
            f"lengths: {question.source}",
            f"         {tail} ({skew['longest / mean']:.1f} x the mean)",
            f"         balancing alone, without communication: {gain.factor:.2f}x, idle {gain.idle:.0%} -> "
            f"{gain.balanced_idle:.0%}",
            f"model:   {question.model_name}, {question.model.parameters / GIGA:.2f} B parameters",
            f"cluster: {cluster.devices} x {cluster.device.name}{nodes}; {question.minibatch_size} samples per device "
            "and step",
            "",
            f"Predicted, not measured: {self.answer.steps} of {question.steps:,} steps were simulated. The intervals "
            "say what other\nsamples would change, not what the model of a step leaves out.",
        ]
        return "\n".join(lines)

    def _table(self) -> str:
        rows = [row for row in self.rows() if row["communication"] != "lockstep"]
        head = ["setting", "s/step", "idle", "GB per rank", "speed-up [95 %]", ""]
        return aligned(head, [_cells(row) for row in rows])

    def _why(self) -> str:
        compared = list(
            dict.fromkeys([self.answer.baseline, self.answer.by_collectives, self.answer.recommended])
        )
        parts = [{c: s / one.seconds for c, s in one.simulation.causes.items()} for one in compared]
        shown = [cause for cause in CAUSES if any(part.get(cause, 0) >= _LEAST_PART for part in parts)]
        rows = [[CAUSES[cause], *(f"{part.get(cause, 0):.0%}" for part in parts)] for cause in shown]
        return aligned(["where the time of a step goes", *map(str, compared)], rows)

    def _limits(self) -> str:
        title = "Where the gain ends:" if self.helps else "The gain by minibatch:"
        return "\n".join([title, *(f"- {limit.text}" for limit in self.limits)])

    def rows(self) -> list[dict[str, Any]]:
        """Every setting as plain values, the fastest first."""
        answer = self.answer
        return [
            {
                "communication": one.communication,
                "policy": one.policy,
                "sharding": one.sharding,
                "seconds": one.seconds,
                "idle": one.simulation.idle_fraction,
                "memory": one.simulation.memory.total,
                "fits": one.simulation.memory.fits,
                "speed_up": answer.speed_up(answer.baseline, one),
                "causes": dict(one.simulation.causes),
                "is_recommended": one is answer.recommended,
            }
            for one in answer.settings
        ]

    def as_dict(self) -> dict[str, Any]:
        """Everything as plain values, for JSON. Memory in bytes, times in seconds of an optimizer step."""
        question = self.answer.question
        return {
            "helps": self.helps,
            "fits": self.answer.fits,
            "trainer": self.line,
            "speed_up": self.speed_up,
            "over_collectives": self.answer.speed_up(self.answer.by_collectives, self.answer.on_demand),
            "settings": self.rows(),
            "limits": {limit.name: {"value": limit.value, "text": limit.text} for limit in self.limits},
            "lengths": {"source": question.source, "tokens": skew_of(question.lengths)},
            "balancing_alone": {
                "factor": self.answer.gain.factor,
                "idle": self.answer.gain.idle,
                "balanced_idle": self.answer.gain.balanced_idle,
            },
            "model": {"name": question.model_name, "parameters": question.model.parameters},
            "cluster": {
                "device": question.cluster.device.name,
                "devices": question.cluster.devices,
                "nodes": question.cluster.nodes,
            },
            "minibatch_size": question.minibatch_size,
            "steps_simulated": self.answer.steps,
            "steps": question.steps,
        }

    def save(self, path: str | Path) -> None:
        """Write a picture (``.svg``, ``.png``, ``.pdf``), or everything as JSON (``.json``).

        Args:
            path: The file; its ending says which.
        """
        if Path(path).suffix == ".json":
            write_json(Path(path), self.as_dict())
            return
        from lightning_odc.advisor.picture import write_causes

        write_causes(Path(path), self.rows())


def aligned(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table for a terminal: the first column to the left, the others to the right, and a last one without a head."""
    lines = [head, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    written = [
        "  ".join(
            cell.ljust(width) if not column or not title else cell.rjust(width)
            for column, (cell, width, title) in enumerate(zip(line, widths, head, strict=True))
        ).rstrip()
        for line in lines
    ]
    return "\n".join([written[0], "-" * max(map(len, written)), *written[1:]])


def trainer_line(answer: Answer) -> str:
    """The ``Trainer`` to write for the recommended setting, below the import that it needs."""
    question, setting = answer.question, answer.recommended
    per_node = question.cluster.devices // question.cluster.nodes
    nodes = f", num_nodes={question.cluster.nodes}" if question.cluster.nodes > 1 else ""
    where = 'accelerator="cpu"' if answer.is_cpu else 'accelerator="gpu"'
    precision = "" if answer.is_cpu else ', precision="bf16-mixed"'
    strategy = _strategy(setting, answer)
    imported = "import lightning_odc\n" * ("odc" in strategy)
    return f"{imported}Trainer({where}, devices={per_node}{nodes}{precision}, strategy={strategy})"


def _strategy(setting: Setting, answer: Answer) -> str:
    """The value of ``Trainer(strategy=...)``. Without balancing, it is Lightning's; its FSDP refuses processors."""
    options = []
    if setting.communication != "on_demand":
        options.append(f'communication="{setting.communication}"')
    if setting.policy == AS_THEY_COME:
        options.append("balance=None")
    elif setting.communication != "on_demand":
        options.append(f'balance="{setting.policy}"')
    if setting.sharding == "hybrid":
        options.append('sharding_strategy="HYBRID_SHARD"')
    written = ", ".join(options)
    if written == 'communication="collective", balance=None':
        return '"auto"' if answer.question.cluster.devices == 1 else '"ddp"' if answer.is_cpu else '"fsdp"'
    names = {"": '"odc"', "balance=None": '"odc_plain"'}
    return names.get(written, f"lightning_odc.ODCStrategy({written})")


def skew_of(lengths: Any) -> dict[str, float]:
    """Figures that describe the tail of lengths.

    Args:
        lengths: ``[n]`` tokens.
    """
    values = np.asarray(lengths, dtype=np.float64)
    mean = float(values.mean())
    median, ninth = np.quantile(values, [0.5, 0.9]).tolist()
    return {
        "count": len(values),
        "median": median,
        "mean": mean,
        "90%": ninth,
        "longest": float(values.max()),
        "longest / mean": float(values.max()) / mean,
        "deviation / mean": float(values.std()) / mean,
    }


def _cells(row: Mapping[str, Any]) -> list[str]:
    hybrid = ", hybrid" if row["sharding"] == "hybrid" else ""
    notes = ["recommended"] * row["is_recommended"] + ["does not fit"] * (not row["fits"])
    return [
        f"{row['communication']}+{row['policy']}{hybrid}",
        f"{row['seconds']:.3f}",
        f"{row['idle']:.0%}",
        f"{row['memory'] / GIGA:.1f}",
        _ratio(row["speed_up"]),
        ", ".join(notes),
    ]


def _ratio(interval: Interval) -> str:
    low, middle, high = interval
    return f"x{middle:.2f}" if low == high else f"x{middle:.2f} [{low:.2f}, {high:.2f}]"


def _gb(size: float) -> str:
    return f"{size / GIGA:.0f} GB"
