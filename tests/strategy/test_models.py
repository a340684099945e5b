"""The kinds of models that people train: each ends in the same parameters on demand as under stock collectives.

With two ranks and plain batches both sum two fp32 gradients per parameter; a sum of two numbers has no order, so
equal means bit for bit.
"""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.fx
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch._dynamo.backends.debugging import aot_eager
from torch.distributed.fsdp import fully_shard

from lightning_odc import Minibatch
from tests.support import fits
from tests.support.fits import Watch, are_equal, fitted, largest_difference
from tests.support.models import Block, token_batches
from tests.support.modules import TokenModule, loader, said, trainer, warned
from tests.support.ranks import of_all_ranks, on_ranks, try_ranks

VOCAB = 32
HAS_PEFT = importlib.util.find_spec("peft") is not None


def causal_lm(kind: str = "Llama", tied: bool = False) -> Any:
    """A small model of Hugging Face's, from a config."""
    import transformers

    sizes = {"vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    config = getattr(transformers, f"{kind}Config")(**sizes, **heads, tie_word_embeddings=tied)
    return getattr(transformers, f"{kind}ForCausalLM")(config)


def with_lora() -> nn.Module:
    import peft

    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    return peft.get_peft_model(causal_lm(), config)


def checkpointed() -> nn.Module:
    model = causal_lm()
    model.gradient_checkpointing_enable()
    assert model.is_gradient_checkpointing
    return model


class Compiled(TokenModule):
    """Its blocks are compiled, each on its own, so that a unit is around a compiled block."""

    def __init__(self, backend: Any, depth: int) -> None:
        super().__init__()
        for index, block in enumerate(self.net.blocks[:depth]):
            self.net.blocks[index] = torch.compile(block, backend=backend, dynamic=True)


def sharded_by_hand() -> nn.Module:
    model = causal_lm()
    for layer in model.model.layers:
        fully_shard(layer)
    return model


class Offloading(nn.Module):
    """Keeps what the backward pass needs in host memory."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, **batch: Tensor) -> Any:
        with torch.autograd.graph.save_on_cpu():
            return self.net(**batch)


def is_decoder_layer(module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
    return recurse or type(module).__name__ == "LlamaDecoderLayer"


class CausalLM(LightningModule):
    """Makes its model in ``configure_model``."""

    def __init__(self, make: Callable[[], nn.Module], meta: bool = False) -> None:
        super().__init__()
        self.make = make
        self.meta = meta
        self.net: Any = None

    def configure_model(self) -> None:
        if self.net is None:
            torch.manual_seed(0)
            device = "cpu"
            if self.meta:
                device = "meta"
            with torch.device(device):
                self.net = self.make()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.net(input_ids=batch, labels=batch).loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=0.01)


def fit(rank: int, module: LightningModule, communication: str = "on_demand", **options: Any) -> Any:
    """Two steps; the parameters, and the reads from peers in the first one."""
    watch = Watch()
    batches = token_batches([6, 9], seed=rank, vocab=11)
    parameters = fitted(module, batches, communication=communication, callbacks=[watch], **options)
    return parameters, watch.traffic[0].reads


#: How the model is made, and options of the strategy.
KINDS: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "Llama, default policy": (causal_lm, {}),
    "Llama, tied": (partial(causal_lm, tied=True), {}),
    "Qwen2": (partial(causal_lm, "Qwen2"), {}),
    "LoRA": (with_lora, {}),
    "by hand": (sharded_by_hand, {}),
    "checkpointing": (causal_lm, {"activation_checkpointing_policy": is_decoder_layer}),
    "gradient_checkpointing_enable": (checkpointed, {}),
    "activations on the host": (lambda: Offloading(causal_lm()), {}),
    "compiled whole": (lambda: torch.compile(causal_lm(), backend="aot_eager"), {}),
}


needs_peft = pytest.mark.skipif(not HAS_PEFT, reason="peft is not installed")
MARKS = {"LoRA": needs_peft, "compiled whole": pytest.mark.slow}


@on_ranks(2)
@pytest.mark.parametrize("kind", [pytest.param(kind, marks=MARKS.get(kind, ())) for kind in KINDS])
def test_equal_to_collectives(rank, kind):
    make, options = KINDS[kind]
    ours, reads = fit(rank, CausalLM(make), **options)
    stock, none = fit(rank, CausalLM(make), "collective", **options)
    # Forward and backward pass of both blocks, one of the root unit, each from one peer.
    assert reads == 5
    assert none == 0
    assert are_equal(ours, stock)


def generating_model(net: nn.Module) -> nn.Module:
    """Hugging Face's model, which adapters may be around."""
    return [module for module in net.modules() if type(module).__name__.endswith("ForCausalLM")][-1]


@contextmanager
def counted(net: nn.Module, engine: Any, into: list[list[int]]) -> Iterator[None]:
    """Notes the forward passes of a model, and the shards that were read for them."""
    passes = []
    reads = engine.traffic.reads
    with generating_model(net).register_forward_pre_hook(lambda *_: passes.append(1)):
        yield
    into.append([len(passes), engine.traffic.reads - reads])


class Samples(CausalLM):
    """Samples 4 tokens on rank 0 and 24 on rank 1, in every step of training and of an uneven validation."""

    def __init__(self, **options: Any) -> None:
        super().__init__(causal_lm)
        self.options = options
        self.counts: list[list[int]] = []

    def sample(self, prompt: Tensor) -> None:
        strategy = self.trainer.strategy
        if strategy.communication == "collective":
            outer = strategy.gathered()
        else:
            outer = nullcontext()
        tokens = (4, 24)[self.global_rank]
        with outer, counted(self.net, strategy.engine, self.counts):
            answer = self.net.generate(prompt, max_new_tokens=tokens, min_new_tokens=tokens, **self.options)
        assert answer.shape[1] == prompt.shape[1] + tokens

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.sample(batch)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        if not self.options:  # ranks that wait for each other need equally many batches
            self.sample(batch)


#: The communication, what is kept, options of `generate`, and forward passes and reads by rank. One pass per token; all
#: wait for the longest if told so, or collectively. Of three units the root is gathered already. In validation, units
#: are kept by then.
GENERATED: list[tuple[str, Any, dict[str, Any], list[list[list[int]]]]] = [
    ("on_demand", "auto", {}, [[[4, 2]] * 2, [[24, 2]] * 2 + [[24, 0]] * 2]),
    ("on_demand", 0, {}, [[[4, 4 * 2]] * 2, [[24, 24 * 2]] * 4]),
    ("on_demand", "auto", {"synced_gpus": True}, [[[24, 2]]] * 2),
    ("collective", "auto", {}, [[[24, 0]]] * 2),
]


@on_ranks(2)
@pytest.mark.parametrize(("communication", "keep", "options", "counts"), GENERATED)
def test_generate_ends_on_every_rank_by_itself_and_reads_once(rank, communication, keep, options, counts):
    from transformers.integrations import is_fsdp_managed_module

    module = Samples(**options)
    patience = {"timeout": timedelta(seconds=30), "num_sanity_val_steps": 0}
    t = trainer(2, communication=communication, keep_gathered=keep, **patience)
    uneven = 0
    if communication == "on_demand":
        uneven = [1, 3][rank]
    batches = token_batches([6], seed=rank, vocab=11)
    t.fit(module, loader(batches), loader(batches * uneven) if uneven else None)
    assert not is_fsdp_managed_module(module.net)  # the run is over, and it is whole
    assert "generate" not in vars(module.net)
    assert module.counts == counts[rank]


#: Ways to generate.
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "no cache": {"use_cache": False},
    "static cache": {"cache_implementation": "static"},
    "sampling": {"do_sample": True, "top_k": 8},
    "beams": {"num_beams": 3},
}


def answers(net: Any, rank: int, counts: list[list[int]], engine: Any) -> list[Tensor]:
    """One answer for every way: 3 tokens on rank 0, and 6 on rank 1."""
    net.eval()
    prompt = torch.tensor([[3, 1, 2]])
    tokens = 3 * (rank + 1)
    found = []
    shape = {"attention_mask": torch.ones_like(prompt), "max_new_tokens": tokens, "min_new_tokens": tokens}
    for options in WAYS.values():
        torch.manual_seed(1)
        with counted(net, engine, counts):
            found.append(net.generate(input_ids=prompt, **shape, **options))
    return found


def compiled_difference(rank: int, backend: Any, depth: int, **options: Any) -> float:
    ours, reads = fit(rank, Compiled(backend, depth), **options)
    assert reads == 7  # three blocks, twice, and the root unit
    stock, _ = fit(rank, TokenModule(), "collective")
    return largest_difference({name.replace("_orig_mod.", ""): value for name, value in ours.items()}, stock)


@pytest.mark.slow
@on_ranks(2)
def test_compiled_blocks_equal_the_others_under_collectives(rank):
    graphs = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return aot_eager(graph, inputs)

    assert compiled_difference(rank, backend, 3) == 0  # the same kernels
    assert graphs


#: Rows and tokens of microbatches: torch makes a graph more of them where it finds out by itself what is dynamic.
SHAPES = [(2, 5), (2, 7), (3, 7), (1, 7), (1, 4), (4, 9)]


@pytest.mark.parametrize("limit", [8, 1])
@on_ranks(2)
def test_blocks_have_one_graph_for_a_row_and_one_for_several_and_the_limit_is_said(rank, limit):
    graphs = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    module = TokenModule()
    for block in module.net.blocks:
        block.compile(backend=backend)
    torch.compiler.reset()  # tests share ranks, and what is compiled there
    microbatches = [torch.randint(11, shape) for shape in SHAPES]
    with torch._dynamo.config.patch(recompile_limit=limit), warned() as messages:
        fits.fit(module, [Minibatch(microbatches)])
        assert torch._dynamo.config.assume_static_by_default
    assert len(graphs) == min(limit, 2)
    told = [message for message in messages if f"compiled a function {limit} times" in message]
    assert bool(told) == (limit == 1)
    assert all("recompile_limit = 4" in message for message in told)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("c++") is None, reason="torch's own compiler for CPUs needs a C++ compiler")
@on_ranks(2)
def test_blocks_compiled_to_cpp(rank):
    # Fused kernels round otherwise: see the tolerances in test_parity, with a ten times larger step here.
    assert compiled_difference(rank, "inductor", 1, auto_wrap_policy={Block}) <= 1e-4


@on_ranks(2)
def test_the_default_policy_says_what_it_chose_and_an_empty_one_that_it_chose_nothing(rank):
    with said() as text, warned() as caught:
        for policy in (None, {Block}, {nn.LSTM}):
            fits.fit(TokenModule(), token_batches([6]), auto_wrap_policy=policy)
    lines = [line for line in text.getvalue().splitlines() if line.startswith("ODCStrategy shards")]
    warnings_ = [one for one in caught if one.startswith("auto_wrap_policy")]
    if rank == 0:
        expected = (1, 1)
    else:
        expected = (0, 0)
    assert (len(lines), len(warnings_)) == expected
    for line in lines:
        assert "(3 x Block) and the rest as one unit" in line
    for line in lines:
        assert "ODCStrategy(auto_wrap_policy={Block})" in line
    for one in warnings_:
        assert "selects no module, so the whole model is one unit" in one


def level(own: Any) -> None:
    """Levels its statistics before validation, as ``docs/models.md`` shows it."""
    for buffer in own.buffers():
        if buffer.is_floating_point():
            buffer.copy_(own.trainer.strategy.reduce(buffer.clone(), reduce_op="mean"))


@on_ranks(2)
def test_statistics_are_those_of_each_rank_until_they_are_levelled(rank, tmp_path):
    module = fits.before_step(TokenModule(), lambda own, batch: own.batch_norm(batch.float().T))
    module.batch_norm = nn.BatchNorm1d(1)
    fits.doing(module, on_validation_start=level)
    t = fits.fit(module, [Minibatch(token_batches([9, 5, 6], seed=rank)[: 1 + 2 * rank])])
    means = of_all_ranks(module.batch_norm.running_mean.clone())
    assert int(module.batch_norm.num_batches_tracked) == 1 + 2 * rank
    assert not torch.equal(*means)
    t.save_checkpoint(path := tmp_path / "full.ckpt")
    assert torch.equal(torch.load(path)["state_dict"]["batch_norm.running_mean"], means[0])
    t.validate(module, loader(token_batches([5])), verbose=False)
    levelled = of_all_ranks(module.batch_norm.running_mean)
    assert torch.equal(*levelled)
    torch.testing.assert_close(levelled[0], sum(means) / 2)


def test_a_collective_in_the_step_works_with_equal_counts_and_ends_with_a_hint_if_they_differ():
    for counts, hint in (((2, 2), ""), ((3, 1), "in a collective inside `forward` or `training_step`")):
        for outcome in try_ranks(_meets, counts, timeout=60):
            assert outcome.exitcode == int(bool(hint))
            assert hint in outcome.error


def meet(*_: Any) -> None:
    count = torch.ones(1)
    dist.all_reduce(count)
    assert count == 2


def _meets(rank: int, counts: tuple[int, int]) -> None:
    minibatch = Minibatch(token_batches([5, 6, 7][: counts[rank]]))
    fits.fit(fits.before_step(TokenModule("items"), meet), [minibatch], timeout=timedelta(seconds=2))
