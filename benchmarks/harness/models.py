"""The models of a benchmark: our own small table, or what `config_of` knows, with random weights."""

from __future__ import annotations

import re
from collections.abc import Iterable

import torch
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_MASKED_LM_MAPPING,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    PretrainedConfig,
)

from benchmarks.command import OptionError
from benchmarks.harness.configs import config_of, one_line
from notebooks.support.models import HEAD_SIZE, byte_llama

_CAUSAL_HEADS = ("ForCausalLM", "LMHeadModel")
SIZES = {"tiny": "2x64", "demo": "4x256", "small": "6x384", "wide": "2x768"}
"""Decoder layers and width of our own models: Llamas that read bytes."""


def find_config(name: str, max_length: int) -> PretrainedConfig:
    """The configuration of a causal language model."""
    # The name is one of `SIZES`; layers x width of another such model, as in ``4x256``; or what `config_of` knows.
    size = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", SIZES.get(name, name))
    if size is not None:
        layers = int(size[1])
        width = int(size[2])
        if width % HEAD_SIZE:
            raise OptionError(f"--model {name}: the width {width} is not a multiple of {HEAD_SIZE}")
        return byte_llama(layers, width, max_length)
    config = configuration(name, SIZES)
    is_causal = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING
    if is_causal and config.architectures:
        is_causal = any(name.endswith(_CAUSAL_HEADS) for name in config.architectures)
    elif is_causal and not getattr(config, "is_decoder", False):
        # It does not say what it is for: then its type is for predicting the next token, and for nothing else.
        others = (MODEL_FOR_MASKED_LM_MAPPING, MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING)
        is_causal = not any(type(config) in mapping for mapping in others)
    if not is_causal:
        raise OptionError(f"--model {name}: {config.model_type} is not a causal language model")
    config.use_cache = False
    return config


def configuration(name: str, own: Iterable[str]) -> PretrainedConfig:
    """What `config_of` knows as an object; ``own`` are further names for the message."""
    given = config_of(name, own)
    if isinstance(given, PretrainedConfig):
        return given
    values = dict(given)
    if "model_type" not in values:
        raise OptionError(f'--model {name}: it has no "model_type", so transformers cannot make it')
    # Every type checks its values in its own way, with exceptions of its own: bases of theirs are not public.
    try:
        return AutoConfig.for_model(values.pop("model_type"), **values)
    except Exception as error:
        raise OptionError(f"--model {name}: transformers cannot make it: {one_line(error)}") from error


def count_parameters(name: str, config: PretrainedConfig) -> int:
    """Count the parameters of the model that a configuration describes, without making it."""
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
    except Exception as error:  # as in `configuration`
        raise OptionError(f"--model {name}: no model can be made of it: {one_line(error)}") from error
    return sum(parameter.numel() for parameter in model.parameters())
