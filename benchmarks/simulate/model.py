"""What a model costs: seconds of its microbatches, bytes of its parameters and activations."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from benchmarks.simulate.devices import Device
from lightning_odc.balance.arrays import check_choice
from lightning_odc.balance.costs import MICROBATCH, Cost
from lightning_odc.balance.transformer import TransformerShape, shape_of, transformer

PRECISIONS = {"32-true": (4, 4), "bf16-mixed": (4, 2), "16-mixed": (4, 2), "bf16-true": (2, 2)}
"""Bytes of a parameter and of what computes and is published."""

_OPTIMIZER_STATES = 2  # Adam
_RECOMPUTED = 4 / 3  # with activation checkpointing, the forward pass runs twice
_FP32 = 4


@dataclass(frozen=True)
class Unit:
    """A group of parameters that is gathered together, or several that are alike.

    Attributes:
        parameters: How many, in each of them.
        share: Part of the time of a microbatch that one of them computes.
        count: How many such units there are.
        trained: Part of the parameters that is trained.
    """

    parameters: float
    share: float
    count: int = 1
    trained: float = 1.0


@dataclass(frozen=True)
class Model:
    """What a model costs.

    Attributes:
        cost: Seconds of a microbatch, forward and backward, on a device of slowness 1: any `Cost` of the planner.
        units: The root unit (embedding and head) first, then the layers. Their shares add up to 1.
        compute_bytes: Bytes of a parameter as it is published and computed with.
        gradient_bytes: Bytes of a gradient as it is sent.
        accumulator_bytes: Bytes of an accumulator.
        parameter_bytes: Bytes of a parameter and of its gradient in the optimizer's shard.
        activation_bytes: Bytes per token of a microbatch.
        forward: Part of the time of a microbatch that the forward pass takes.

    Raises:
        ValueError: shares that do not add up to 1, or values out of range.
    """

    cost: Cost
    units: tuple[Unit, ...]
    compute_bytes: int = 2
    gradient_bytes: int = 2
    accumulator_bytes: int = 4
    parameter_bytes: int = 4
    activation_bytes: float = 0.0
    forward: float = 1 / 3

    def __post_init__(self) -> None:
        shares = sum(unit.share * unit.count for unit in self.units)
        good = all(unit.parameters >= 0 and unit.share >= 0 and unit.count >= 1 for unit in self.units)
        if not good or abs(shares - 1) > 1e-6:
            raise ValueError(
                f"the shares of the units add up to {shares:g}, and must to 1, with no negative number: "
                "units=(Unit(2e8, 0.1), Unit(5e7, 0.9 / 28, count=28))."
            )

    @classmethod
    def from_config(
        cls,
        config: Any,
        device: Device,
        *,
        precision: str = "bf16-mixed",
        checkpointing: bool = True,
        dense: bool = False,
    ) -> Model:
        """A dense decoder-only transformer: seconds are its FLOPs over those of the device.

        Args:
            config: A Hugging Face config, or a mapping with its names; see `lightning_odc.balance.transformer`.
            device: What computes.
            precision: One of ``"32-true"``, ``"bf16-mixed"``, ``"16-mixed"`` and ``"bf16-true"``.
            checkpointing: Whether layers drop their activations and compute them again (activation checkpointing).
            dense: Whether attention runs over all tokens of a packed microbatch, as on CPUs.

        Raises:
            ValueError: the config belongs to another kind of model, or the precision is unknown.
        """
        check_choice("precision", precision, tuple(PRECISIONS))
        shape = shape_of(config)
        flops = transformer(config, dense=dense)
        slow = (_RECOMPUTED if checkpointing else 1.0) / device.flops
        cost = replace(
            flops,
            per_token=flops.per_token * slow,
            per_pair=flops.per_pair * slow,
            constant=MICROBATCH * flops.per_token * slow,
        )
        parameter, compute = PRECISIONS[precision]
        return cls(
            cost,
            _units(shape),
            *(compute, compute),
            parameter_bytes=parameter,
            activation_bytes=_activation_bytes(shape, compute, checkpointing),
            forward=1 / 4 if checkpointing else 1 / 3,
        )

    @property
    def parameters(self) -> float:
        """The number of parameters."""
        return sum(unit.parameters * unit.count for unit in self.units)

    @property
    def trained(self) -> float:
        """The number of parameters that are trained."""
        return sum(unit.parameters * unit.count * unit.trained for unit in self.units)

    @property
    def state_bytes(self) -> float:
        """Bytes of the optimizer per trained parameter."""
        return float(_OPTIMIZER_STATES * self.parameter_bytes)


def _units(shape: TransformerShape) -> tuple[Unit, ...]:
    """Embedding and head are the root unit; each layer is one."""
    weights = shape.layers * shape.layer_weights + shape.head_weights
    root = shape.head_weights * (1 if shape.tied else 2)
    layer = Unit(shape.layer_weights, shape.layer_weights / weights, shape.layers)
    return (Unit(root, shape.head_weights / weights), layer)


def _activation_bytes(shape: TransformerShape, width: int, checkpointing: bool) -> float:
    """Per token: what layers keep for the backward pass, and the logits.

    A layer keeps the inputs of its two norms and of what follows them, queries, keys, values, the output of attention,
    and the feed-forward layer's intermediate values. With checkpointing only its input stays, and one layer has the
    rest. Logits stand three times: in the compute dtype, in fp32, and as their gradient.
    """
    layer = width * (
        4 * shape.hidden + 2 * (shape.queries + shape.keys) + shape.matrices * shape.intermediate
    )
    kept = shape.layers * width * shape.hidden + layer if checkpointing else shape.layers * layer
    return float(kept + shape.vocabulary * (width + 2 * _FP32))
