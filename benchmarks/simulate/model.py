"""What a model costs: seconds of its microbatches, bytes of its parameters and activations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.simulate.cluster import Device
from lightning_odc.balance import Cost, transformer

_RECOMPUTED = 4 / 3  # with activation checkpointing, the forward pass runs twice
_FORWARD = 1 / 4  # of the time of a microbatch that runs the forward pass twice
_SHORTEST = 64.0  # a microbatch takes as long as so many tokens besides its samples
_FLOPS_PER_WEIGHT = 6  # a product and a sum for each token, forward and twice backward
_FP32 = 4


@dataclass(frozen=True)
class Unit:
    """A group of parameters that is gathered together, or several that are alike.

    Attributes:
        parameters: How many, in each of them.
        share: Part of the time of a microbatch that one of them computes.
        count: How many such units there are.
    """

    parameters: float
    share: float
    count: int = 1


@dataclass(frozen=True)
class Model:
    """What a model costs, trained by Adam. The widths are by default those of bf16-mixed.

    Attributes:
        cost: Seconds of a microbatch, forward and backward: any `Cost` of the planner.
        units: The root unit (embedding and head) first, then the layers. Their shares add up to 1.
        compute_bytes: Bytes of a parameter as it is published and computed with.
        gradient_bytes: Bytes of a gradient as it is sent.
        accumulator_bytes: Bytes of an accumulator.
        parameter_bytes: Bytes of a parameter, of its gradient and of each moment in the optimizer's shard.
        activation_bytes: Bytes per token of a microbatch.
        forward: Part of the time of a microbatch that the forward pass takes.
    """

    cost: Cost
    units: tuple[Unit, ...]
    compute_bytes: int = 2
    gradient_bytes: int = 2
    accumulator_bytes: int = 4
    parameter_bytes: int = 4
    activation_bytes: float = 0.0
    forward: float = 1 / 3

    @classmethod
    def from_config(cls, config: Mapping[str, Any], device: Device) -> Model:
        """A dense decoder-only transformer under bf16-mixed, with activation checkpointing.

        Seconds are its FLOPs over those of the device.

        Args:
            config: A mapping with the names of a Hugging Face config; see `lightning_odc.balance.transformer`.
            device: What computes.

        Raises:
            ValueError: the config belongs to another kind of model.
        """
        flops = transformer(config)
        seconds_per_flop = _RECOMPUTED / device.flops
        seconds_per_token = flops.per_token * seconds_per_flop
        cost = replace(
            flops,
            per_token=seconds_per_token,
            per_pair=flops.per_pair * seconds_per_flop,
            constant=_SHORTEST * seconds_per_token,
        )
        hidden = int(config["hidden_size"])
        layers = int(config["num_hidden_layers"])
        vocabulary = int(config["vocab_size"])
        weights = flops.per_token / _FLOPS_PER_WEIGHT  # all that a token is multiplied with
        head = hidden * vocabulary
        layer = (weights - head) / layers
        root = head
        if not config.get("tie_word_embeddings", True):
            root += head  # the embedding, which computes nothing
        units = (Unit(root, head / weights), Unit(layer, layer / weights, layers))
        activation_bytes = _activation_bytes(hidden, layers, vocabulary, layer)
        return cls(cost, units, activation_bytes=activation_bytes, forward=_FORWARD)

    @property
    def parameters(self) -> float:
        """The number of parameters."""
        return sum(unit.parameters * unit.count for unit in self.units)


def _activation_bytes(hidden: int, layers: int, vocabulary: int, layer_weights: float) -> float:
    """Per token: what stays for the backward pass, and the logits.

    With checkpointing only the input of each layer stays. One layer has the rest: the inputs of its two norms and of
    what follows them, queries, keys, values, the output of attention, and the feed-forward layer's intermediate values.
    All but the first four are the other side of a matrix whose one side is `hidden`, so their number follows from
    the layer's weights. Logits stand three times: in bf16, in fp32, and as their gradient.
    """
    bf16 = 2
    inputs = bf16 * layers * hidden
    one_layer = bf16 * (4 * hidden + layer_weights / hidden)
    logits = vocabulary * (bf16 + 2 * _FP32)
    return inputs + one_layer + logits
