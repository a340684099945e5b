"""What Accelerate shards, and which arguments of ``Trainer`` do not work with it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy

from lightning_odc import _compat
from lightning_odc.engine.values import give_first_values
from lightning_odc.sharding.wrapping import repeated_blocks


def shards_on_cpu(accelerator: Any, args: Any) -> bool:
    """Let Accelerate shard on CPU ranks as it does on GPUs; 1.15 ignores ``fsdp`` there, silently."""
    state = accelerator.state
    if state.distributed_type != DistributedType.MULTI_CPU:
        return False
    plugin = FullyShardedDataParallelPlugin(**args.fsdp_plugin_args)
    if state.mixed_precision != "no":
        plugin.set_mixed_precision(state.mixed_precision)
    state.fsdp_plugin = plugin
    state.distributed_type = PartialState().distributed_type = DistributedType.FSDP
    return True


def prepare(accelerator: Any, shard: Callable[..., Any], args: Any, *objects: Any, **options: Any) -> Any:
    """Let Accelerate shard what ``"odc"`` shards, unless the user has said what."""
    # Beside layers, Accelerate 1.15 shards the embeddings of a model, and its head. That fails for embeddings inside
    # of a layer, such as BERT's; for weights that are tied more than once, such as T5's; and for models without them,
    # such as CLIP. If they are not found, they belong to the root unit. `fully_shard` takes no scalars, such as CLIP's.
    chosen = {"transformer_layer_cls_to_wrap", "min_num_params", "auto_wrap_policy"} & {*args.fsdp_config}
    models = [one for one in objects if isinstance(one, nn.Module)]
    if not accelerator.state.fsdp_plugin.cpu_ram_efficient_loading:  # else Accelerate does it
        for model in models:
            give_first_values(model, accelerator.device)
    if not models or any(args.fsdp_config[name] for name in chosen):
        return shard(*objects, **options)
    [model] = models
    plugin = accelerator.state.fsdp_plugin
    plugin.auto_wrap_policy = transformer_auto_wrap_policy
    plugin.transformer_cls_names_to_wrap = [*{type(unit).__name__: None for unit in repeated_blocks(model)}]
    scalars = [parameter for parameter in model.parameters() if not parameter.dim()]
    if plugin.ignored_modules is None and scalars:
        plugin.ignored_modules = [nn.ParameterList(scalars)]
    getters = {"get_input_embeddings", "get_output_embeddings"}
    vars(model).update(dict.fromkeys(getters, lambda: None))
    _compat.keep_name(model)  # `Trainer` shifts labels for a smoothed loss by the name
    try:
        return shard(*objects, **options)
    finally:
        for name in getters:
            del vars(model)[name]


def generates(args: Any) -> bool:
    """Whether a trainer samples texts while it trains. It decides which rank has which, and scores them in groups."""
    samples = hasattr(args, "max_completion_length") or hasattr(args, "max_new_tokens")
    return samples and hasattr(args, "temperature")


def check(trainer: Any) -> None:
    """Refuse arguments that do not work with the mix-in, when the trainer is made."""
    args = trainer.args
    if args.fp16:
        raise ValueError("fp16=True has no room for sums of losses: write bf16=True.")
    if trainer.is_deepspeed_enabled or (trainer.is_fsdp_enabled and not trainer.accelerator.is_fsdp2):
        raise ValueError(
            f"{type(trainer).__name__} trains models that are whole, or that Accelerate shards with `fully_shard`. "
            f"Write {type(args).__name__}(..., fsdp=True), or leave the model whole, without fsdp and deepspeed."
        )
    if not (trainer.is_fsdp_enabled or isinstance(trainer.model, FSDPModule)):
        return
    if args.torch_compile:
        raise ValueError(
            "torch_compile=True compiles what moves parameters, too. Compile the layers: "
            "`for layer in model.model.layers: layer.compile()`."
        )
    if getattr(args, "sync_ref_model", False):
        raise ValueError("sync_ref_model=True changes a model that other ranks read: leave it at False.")
    if any(hasattr(one, "SCB") for one in trainer.model.parameters()):
        raise ValueError(
            "`fully_shard` cuts weights of 8 bits off from their scales: write BitsAndBytesConfig(load_in_4bit=True)."
        )
    stored = {one.dtype for one in trainer.model.parameters() if hasattr(one, "quant_state")}
    if args.bf16 and not stored.isdisjoint({torch.float16, torch.float32}):
        raise ValueError(
            "bf16=True casts the elements in which weights of 4 bits are stored, and they are lost: leave "
            "bnb_4bit_quant_storage of BitsAndBytesConfig at torch.uint8."
        )
