"""The engine in a loop of Hugging Face's Accelerate, whose FSDP2 plugin shards the model."""

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin, PartialState
from accelerate.utils import DistributedType
from lightning_odc import attach
from transformers import LlamaConfig, LlamaForCausalLM

plugin = FullyShardedDataParallelPlugin(
    fsdp_version=2,
    auto_wrap_policy="transformer_based_wrap",  # by the model's own layers
)
accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)  # GPUs: without `cpu=True`
if accelerator.device.type == "cpu":  # Accelerate 1.15 shards on GPUs alone
    accelerator.state.fsdp_plugin = plugin
    for state in (accelerator.state, PartialState()):
        state.distributed_type = DistributedType.FSDP

torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=32,
    hidden_size=16,
    intermediate_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
)
model = LlamaForCausalLM(config)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
model, optimizer = accelerator.prepare(model, optimizer)
rank = accelerator.process_index
count = 3 if rank == 0 else 1  # microbatches of each step

with attach(model) as odc:
    for _ in range(10):
        for batch in torch.randint(32, (count, 4, 8)):
            labels = batch[:, 1:].numel()  # the first token of a text is none
            loss = model(input_ids=batch, labels=batch).loss * labels
            with odc.backward(weight=labels):
                accelerator.backward(loss)
        odc.step(optimizer, max_norm=1.0)
        optimizer.zero_grad()
    print(f"rank {rank}: 10 steps of {count}")
accelerator.end_training()
