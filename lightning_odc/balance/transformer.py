"""Floating-point operations of training a decoder-only transformer, from its configuration.

Note [What a forward pass keeps]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
For the backward pass, a layer of the usual build keeps these numbers for each token. ::

    two norms                          the input, the scaled input, the output        6 hidden
    attention, without its scores      queries, keys, values, and the output          2 queries + 2 keys
    feed-forward with a gate           gate, its activation, the other half, product  4 intermediate
    feed-forward without               before and after the activation                2 intermediate

With gradient checkpointing it keeps its input alone, and one layer at a time has the rest again. While a layer goes
backward, gradients of its widest part are there, too. The loss has logits, their logarithms, and the gradients of
both: four numbers for each word of the vocabulary. No layer goes backward at that time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from lightning_odc.arguments import checked
from lightning_odc.balance.arrays import Floats
from lightning_odc.balance.costs import MICROBATCH, Term

_FORWARD_AND_BACKWARD = 3  # the backward pass computes two products for each of the forward pass
_ALIASES = {
    "hidden_size": ("hidden_size", "n_embd", "d_model"),
    "layers": ("num_hidden_layers", "n_layer", "num_layers"),
    "heads": ("num_attention_heads", "n_head", "num_heads"),
    "key_value_heads": ("num_key_value_heads",),
    "head_dim": ("head_dim",),
    "intermediate_size": ("intermediate_size", "n_inner", "ffn_dim", "d_ff"),
    "vocab_size": ("vocab_size",),
}
_REQUIRED = ("hidden_size", "layers", "heads")
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
_GATED_FAMILIES = ("llama", "mistral", "qwen", "gemma", "phi3", "granite", "olmo", "smollm", "cohere")
_GATED_ACTIVATIONS = ("silu", "swish", "swiglu", "geglu")


@dataclass(frozen=True)
class TransformerCost:
    """FLOPs of the forward and backward pass of each sample, attention causal and separate for each sample.

    A sample of ``s`` tokens costs ``per_token * s + per_pair * pairs``, where ``pairs`` counts each query with each key
    that it sees: ``s (s + 1) / 2`` in a layer with full attention, fewer in one with a sliding window.

    Attributes:
        per_token: FLOPs of projections, feed-forward layers and the output head, for one token.
        per_pair: FLOPs of attention in one layer, for one pair.
        full_layers: number of layers with full attention.
        windows: the window of each layer with sliding-window attention, in tokens.
        constant: cost of a microbatch besides its samples, in FLOPs.
        dense: attention runs over all tokens of a microbatch, see Note [Dense attention].
        parameters: Number of parameters of all matrices.
    """

    per_token: float
    per_pair: float
    full_layers: int
    windows: tuple[int, ...] = ()
    constant: float = 0.0
    dense: bool = False
    parameters: int = 0

    def samples(self, lengths: Floats) -> Floats:
        pairs = self.full_layers * (lengths * (lengths + 1) / 2)
        for window in sorted(set(self.windows)):
            inside = np.minimum(lengths, window)
            seen = inside * (inside + 1) / 2 + (lengths - inside) * window
            pairs = pairs + self.windows.count(window) * seen
        return self.per_token * lengths + self.per_pair * pairs

    @property
    def overhead(self) -> float:
        return self.constant

    @property
    def pair(self) -> float:
        """A mask hides the pairs from the result, not from the work: both orders count, in windows, too."""
        layers = self.full_layers + len(self.windows)
        return 2 * self.per_pair * layers * self.dense


@checked
def transformer(config: Any, *, constant: Term | None = None, dense: bool = False) -> TransformerCost:
    """The cost of training the dense decoder-only transformer that a configuration describes.

    Multi-head, grouped-query and multi-query attention, plain and gated feed-forward layers, full and sliding-window
    attention. Norms, activations and embedding look-ups are left out (they are linear in the tokens and small).

    Args:
        config: a Hugging Face ``PretrainedConfig``, or a mapping with its names: ``hidden_size``,
            ``num_hidden_layers`` and ``num_attention_heads``, and optionally ``num_key_value_heads``, ``head_dim``,
            ``intermediate_size`` (by default 4 times ``hidden_size``) and ``vocab_size``. GPT-2's names work too.
        constant: cost of a microbatch besides its samples, in FLOPs; by default nothing, or, if ``dense``, that of 64
            tokens.
        dense: attention runs over all tokens of a microbatch, see Note [Dense attention]: on CPUs, and wherever packed
            samples are kept apart by a mask.

    Raises:
        ValueError: a needed number is missing, or the model has experts, an encoder, or layers of unknown attention.

    Example:
        >>> transformer({"hidden_size": 1536, "num_hidden_layers": 28, "num_attention_heads": 12}).full_layers
        28
    """
    sizes = Sizes.of(config)
    queries = sizes.queries
    layer_weights = (
        2 * sizes.hidden * (queries + sizes.keys) + (2 + sizes.has_gate) * sizes.hidden * sizes.intermediate
    )
    head_weights = sizes.hidden * sizes.vocabulary
    multiplied = sizes.layers * layer_weights + head_weights
    per_token = _FORWARD_AND_BACKWARD * 2.0 * multiplied
    if constant is None:
        constant = 0.0
        if dense:
            constant = MICROBATCH * per_token
    embedded = 0
    if not sizes.is_tied:
        embedded = head_weights
    return TransformerCost(
        per_token=per_token,
        per_pair=_FORWARD_AND_BACKWARD * 4.0 * queries,  # a product for the scores, one with the values
        full_layers=sizes.layers - len(sizes.windows),
        windows=sizes.windows,
        constant=constant,
        dense=dense,
        parameters=multiplied + embedded,
    )


@dataclass(frozen=True)
class Sizes:
    """The sizes in a configuration.

    Attributes:
        hidden: Width between layers.
        layers: Number of layers.
        queries: Width of all queries of a token.
        keys: Width of all keys of a token, and of all values.
        intermediate: Width inside of a feed-forward layer.
        vocabulary: Number of words.
        has_gate: Whether feed-forward layers have a gate.
        is_tied: Whether the first and the last layer share their weights.
        windows: The window of each layer with sliding-window attention, in tokens.
    """

    hidden: int
    layers: int
    queries: int
    keys: int
    intermediate: int
    vocabulary: int
    has_gate: bool
    is_tied: bool
    windows: tuple[int, ...]

    @classmethod
    def of(cls, config: Any) -> Sizes:
        """Those of a dense decoder-only transformer."""
        raw = _mapping(config)
        experts = _first(raw, _EXPERTS)
        if (isinstance(experts, int) and experts > 1) or raw.get("is_encoder_decoder"):
            raise ValueError(
                "the model has experts or an encoder: transformer(config) knows dense decoder-only models. "
                'Give a function, cost=lambda lengths: ...; cost="auto" of a loader measures it while training.'
            )
        sizes = {name: _first(raw, names) for name, names in _ALIASES.items()}
        missing = [_ALIASES[name][0] for name in _REQUIRED if sizes[name] is None]
        if missing:
            raise ValueError(
                f"the configuration lacks {', '.join(missing)}: transformer(model.config), or transformer("
                '{"hidden_size": 1536, "num_hidden_layers": 28, "num_attention_heads": 12}).'
            )
        hidden = int(sizes["hidden_size"])
        layers = int(sizes["layers"])
        heads = int(sizes["heads"])
        head_dim = int(sizes["head_dim"] or hidden // heads)
        activation = _first(raw, ("hidden_act", "hidden_activation", "activation_function"))
        family = str(raw.get("model_type"))
        return cls(
            hidden=hidden,
            layers=layers,
            queries=heads * head_dim,
            keys=int(sizes["key_value_heads"] or heads) * head_dim,
            intermediate=int(sizes["intermediate_size"] or 4 * hidden),
            vocabulary=int(sizes["vocab_size"] or 0),
            has_gate=family.startswith(_GATED_FAMILIES) or activation in _GATED_ACTIVATIONS,
            is_tied=raw.get("tie_word_embeddings", True),
            windows=_windows(raw, layers),
        )

    def activations(self, width: int, checkpointed: bool) -> int:
        """Bytes that a token of a microbatch takes at the worst moment, in numbers of ``width`` bytes.

        See Note [What a forward pass keeps].
        """
        inside = 2 * (1 + self.has_gate) * self.intermediate
        layer = width * (6 * self.hidden + 2 * (self.queries + self.keys) + inside)
        going_back = width * (2 * self.hidden + (2 + self.has_gate) * self.intermediate)
        # A loss computes in fp32.
        loss = (3 * 4 + width) * self.vocabulary
        if checkpointed:
            return self.layers * width * self.hidden + max(layer + going_back, loss)
        return self.layers * layer + max(going_back, loss)


def _mapping(config: Any) -> Mapping[str, Any]:
    """The configuration of the text model as a mapping."""
    raw = config
    if hasattr(config, "to_dict"):
        raw = config.to_dict()
    elif not isinstance(config, Mapping):
        raw = vars(config)
    if _first(raw, _ALIASES["hidden_size"]) is None and raw.get("text_config") is not None:
        return _mapping(raw["text_config"])
    return raw


def _first(raw: Mapping[str, Any], names: tuple[str, ...]) -> Any:
    for name in names:
        if raw.get(name) is not None:
            return raw[name]
    return None


def _windows(raw: Mapping[str, Any], layers: int) -> tuple[int, ...]:
    """The windows of the layers with sliding-window attention."""
    window: Any = raw.get("sliding_window")
    kinds = raw.get("layer_types")
    if kinds is None:
        kinds = ["full_attention"] * layers
        if window and raw.get("use_sliding_window", True):
            kinds = ["sliding_attention"] * layers
    unknown = set(kinds) - {"sliding_attention", "full_attention"}
    if unknown:
        raise ValueError(
            f"the model has {', '.join(sorted(unknown))}: transformer(config) knows full and sliding attention. "
            'cost="auto" of a loader measures it while training.'
        )
    return (window,) * kinds.count("sliding_attention")
