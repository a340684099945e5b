"""What `lightning_odc.advise` says of memory, beside the peaks of two ranks that train.

``python -m benchmarks.activations`` prints a Markdown table. Models have random weights. Measured is the peak of a
rank's private memory over three steps of one microbatch, sampled every millisecond, less what it had before its model.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers

from benchmarks.command import markdown, parser_of
from benchmarks.harness.processes import run_ranks
from benchmarks.memory import MIB, Sampler, status_bytes
from lightning_odc import advise, attach

MODELS: dict[str, Any] = {
    "Llama": transformers.LlamaConfig(
        vocab_size=32_000,
        hidden_size=512,
        intermediate_size=1376,
        num_hidden_layers=8,
        num_attention_heads=8,
        tie_word_embeddings=False,
    ),
    "Qwen 2": transformers.Qwen2Config(
        vocab_size=8_000,
        hidden_size=768,
        intermediate_size=3072,
        num_hidden_layers=12,
        num_attention_heads=12,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    ),
    "GPT-2": transformers.GPT2Config(
        vocab_size=16_000,
        n_embd=512,
        n_layer=8,
        n_head=8,
        n_positions=8192,
        bos_token_id=None,
        eos_token_id=None,
        activation_function="gelu",
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    ),
}
RANKS = 2


def measure(_: int, __: int, name: str, tokens: int, checkpointed: bool) -> int:
    """Bytes of private memory that training takes."""
    before = status_bytes("RssAnon")
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(MODELS[name])
    model.train()
    if checkpointed:
        model.gradient_checkpointing_enable()
    optimizer = torch.optim.AdamW(model.parameters())
    ids = torch.randint(0, MODELS[name].vocab_size, (1, tokens))
    sampler = Sampler()
    sampler.start()
    with attach(model) as odc:
        for _ in range(3):
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
            with odc.backward():
                loss.backward()
            odc.step(optimizer)
            optimizer.zero_grad()
    return sampler.stop() - before


def main(arguments: list[str] | None = None) -> None:
    """Entry point of ``python -m benchmarks.activations``."""
    parser = parser_of("activations", __doc__)
    parser.add_argument("--tokens", type=int, metavar="N", nargs="+", default=[512, 2048], help="lengths")
    parser.add_argument("--models", metavar="NAME", nargs="+", default=[*MODELS], help=", ".join(MODELS))
    options = parser.parse_args(arguments)
    rows = []
    for name in options.models:
        for tokens in options.tokens:
            advice = advise(
                [tokens] * RANKS, model=MODELS[name], devices=RANKS, device="cpu", minibatch_size=1
            )
            for checkpointed in (False, True):
                expected = advice.states + advice.activations[checkpointed]
                peak = max(run_ranks(measure, RANKS, name, tokens, checkpointed))
                sizes = [f"{size / MIB:,.0f} MiB" for size in (advice.states, expected, peak)]
                error = f"{expected / peak - 1:+.0%}"
                way = "kept"
                if checkpointed:
                    way = "checkpointed"
                rows.append([name, tokens, way, *sizes, error])
    head = ("model", "tokens", "activations", "states", "estimate", "measured", "error")
    print(markdown(head, rows))


if __name__ == "__main__":
    main()
