"""Finding the causal model in a module, and finding out whether it keeps packed samples apart."""

from __future__ import annotations

import importlib.util
import random
import re
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from lightning_odc import ODCStrategy
from lightning_odc.data.model_cost import causal_model, hugging_face_config
from lightning_odc.samples.packing import PackingCollator
from lightning_odc.strategy.model_facts import (
    _trouble_of,
    packing_trouble,
    watch_packed_calls,
)
from tests.support.fits import assert_same, one_process
from tests.support.models import full_parameters
from tests.support.modules import loader, trainer
from tests.support.ranks import on_ranks

transformers: Any = pytest.importorskip("transformers")

VOCAB = 64
CPU = torch.device("cpu")


def model_of(kind: str, attention: str = "sdpa") -> Any:
    """A small model from its configuration, with random values."""
    own = {"vocab_size": VOCAB, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    if kind == "GPT2":
        config = transformers.GPT2Config(n_embd=16, n_layer=2, n_head=2, n_positions=64, **own)
    elif kind == "Bloom":
        config = transformers.BloomConfig(hidden_size=16, n_layer=2, n_head=2, **own)
    else:
        sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
        heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
        config = getattr(transformers, f"{kind}Config")(**sizes, **heads, **own)
    if kind != "Bloom":
        config._attn_implementation = attention
    if kind == "GPT2":
        name = "GPT2LMHeadModel"
    else:
        name = f"{kind}ForCausalLM"
    torch.manual_seed(0)
    return getattr(transformers, name)(config)


def leaky() -> Any:
    """A Llama that gets its position_ids and does not use them."""

    class LeakyForCausalLM(transformers.LlamaForCausalLM):
        def forward(self, *args: Any, position_ids: Tensor | None = None, **options: Any) -> Any:
            return super().forward(*args, **options)

    torch.manual_seed(0)
    return LeakyForCausalLM(model_of("Llama").config)


class Inside(LightningModule):
    """Has a model of Hugging Face's somewhere in it."""

    def __init__(self, *models: nn.Module, sets_up_early: bool = False) -> None:
        super().__init__()
        self.parts = nn.ModuleDict({f"part{index}": model for index, model in enumerate(models)})
        self.sets_up_early = sets_up_early

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.parts["part0"](**batch).loss

    def configure_optimizers(self) -> Any:
        if self.sets_up_early:
            assert self.trainer.estimated_stepping_batches == 1  # asks for the loader now
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_the_outermost_causal_model_that_trains():
    teacher = model_of("GPT2").requires_grad_(False)
    student = model_of("Llama")
    assert causal_model(Inside(teacher, student)) is student
    assert causal_model(Inside(teacher)) is teacher
    assert causal_model(student) is student
    assert hugging_face_config(Inside(teacher, student)) is student.config


def test_others_are_not_causal_models():
    config = model_of("Llama").config
    classifier = transformers.LlamaForSequenceClassification(config)
    t5_config = transformers.T5Config(
        vocab_size=VOCAB, d_model=16, d_ff=16, d_kv=8, num_layers=1, num_heads=2
    )
    seq2seq = transformers.T5ForConditionalGeneration(t5_config)
    for model in (classifier, seq2seq, transformers.LlamaModel(config)):
        assert causal_model(Inside(model)) is None
        assert hugging_face_config(Inside(model)) is model.config
    module = Inside(nn.Linear(1, 1))
    module.config = {"hidden_size": 3}
    assert causal_model(module) is None
    assert hugging_face_config(module) is None


@pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="peft is not installed")
def test_a_model_of_peft():
    from tests.strategy.test_models import with_lora

    model = with_lora()
    assert causal_model(Inside(model)) is model
    assert hugging_face_config(Inside(model)).model_type == "llama"
    with torch.no_grad():
        assert _trouble_of(model.eval(), CPU) == ""


@pytest.mark.parametrize(("kind", "attention"), [("Llama", "sdpa"), ("GPT2", "eager"), ("Qwen2", "sdpa")])
def test_a_packed_batch_has_the_outputs_and_gradients_of_its_samples(kind, attention):
    model = model_of(kind, attention).double().eval()
    generator = torch.Generator().manual_seed(1)
    samples = [torch.randint(VOCAB, (length,), generator=generator) for length in (7, 1, 12, 4)]
    batch = PackingCollator()(samples)
    packed = model(**batch)
    alone = [model(input_ids=sample[None], labels=sample[None]) for sample in samples]
    # Sums of at most 16 products in another order, in fp64: 16 * 1e-16 through two layers; the softmax of the eager
    # attention and the loss are computed in fp32, 6e-8 relative to numbers of size 1 and 4.
    pieces = packed.logits[0].split(batch["cu_seq_lens_q"].diff().tolist())
    for piece, one in zip(pieces, alone, strict=True):
        torch.testing.assert_close(piece, one.logits[0], rtol=0, atol=1e-7)
    counts = [len(sample) - 1 for sample in samples]
    mean = sum(one.loss * count for one, count in zip(alone, counts, strict=True) if count) / sum(counts)
    torch.testing.assert_close(packed.loss, mean, rtol=0, atol=1e-6)
    gradients = [torch.autograd.grad(loss, [*model.parameters()]) for loss in (packed.loss, mean)]
    torch.testing.assert_close(*gradients, rtol=0, atol=1e-6)
    with torch.no_grad():
        assert _trouble_of(model.float(), CPU) == ""
        assert _trouble_of(model.bfloat16(), CPU) == ""


LEAKY = r"LeakyForCausalLM \(attn_implementation='sdpa'\) lets packed samples see each other: the outputs"
BLOOM = "BloomForCausalLM .* lets packed samples see each other: the outputs"


def test_a_leak_is_found():
    for model, says in ((leaky(), LEAKY), (model_of("Bloom"), BLOOM)):
        for dtype in (torch.float32, torch.bfloat16):
            with torch.no_grad():
                trouble = _trouble_of(model.to(dtype).eval(), CPU)
            assert re.match(says, trouble), trouble
            assert "packing=False" in trouble


class Counted(nn.Module):
    """Adds something of the previous token of the same sample; but it numbers all tokens of a row."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.config = SimpleNamespace(vocab_size=VOCAB)
        self.tokens = nn.Embedding(VOCAB, 8)
        self.positions = nn.Embedding(VOCAB, 8)

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None, **_: Any) -> Any:
        hidden = self.tokens(input_ids) + self.positions(torch.arange(input_ids.shape[1]))
        previous = nn.functional.pad(hidden, (0, 0, 1, 0))[:, :-1]
        if position_ids is not None:
            previous = previous * (position_ids != 0)[..., None]
        return SimpleNamespace(logits=(hidden + previous) @ self.tokens.weight.T)


def test_other_trouble():
    strategy = SimpleNamespace(lightning_module=Inside(nn.Linear(1, 1)))
    assert packing_trouble(strategy).startswith("Inside has no Hugging Face causal model")
    counted = Counted()
    old = Counted()
    constant = Counted()
    old.forward = lambda input_ids, use_cache=True: counted(input_ids)
    constant.forward = lambda input_ids, **_: SimpleNamespace(logits=torch.zeros(*input_ids.shape, VOCAB))
    with torch.no_grad():
        assert "does not number the tokens of each by position_ids" in _trouble_of(counted, CPU)
        assert "does not take what a packed batch has" in _trouble_of(old, CPU)
        assert "could not be checked" in _trouble_of(constant, CPU)


class Checks(ODCStrategy):
    """Checks where balancing would: when Lightning hands over the training loader."""

    def process_dataloader(self, dataloader: object) -> object:
        module = self.lightning_module
        assert module is not None
        before = states(module)
        self.found = packing_trouble(self)
        assert states(module) == before, "nothing of the check stays"
        return dataloader


def states(module: LightningModule) -> list[Any]:
    modes = [part.training for part in module.modules()]
    gradients = [parameter.grad for parameter in module.parameters()]
    numbers = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    names = set(vars(module)) - {"forward"}  # Lightning leaves that behind after every step
    return [modes, gradients, *numbers, names, dict(module.trainer.callback_metrics)]


ROWS = [[3, 4, 5], [6, 7]]


@on_ranks(2)
@pytest.mark.parametrize(
    ("sets_up_early", "communication", "leaks"),
    [(True, "on_demand", ""), (False, "collective", ""), (False, "on_demand", "LeakyForCausalLM")],
)
def test_sharded_models_are_checked_on_all_ranks_together(rank, sets_up_early, communication, leaks):
    strategy = Checks(communication=communication, hang_report_after=None)
    if leaks:
        inner = leaky()
    else:
        inner = model_of("Llama")
    module = Inside(inner, sets_up_early=sets_up_early)
    module.train()
    fitter = trainer(2, strategy=strategy)
    batch = PackingCollator()(ROWS)
    fitter.fit(module, loader([batch]))
    assert fitter.global_step == 1
    assert strategy.found.partition(" ")[0] == leaks
    if not leaks:  # training is that without a check
        expected = one_process(Inside(model_of("Llama")), [[batch]])
        assert_same(full_parameters(module), expected, tolerance=1e-6)


def test_the_whole_packed_batch_must_reach_the_model():
    batch = PackingCollator()(ROWS)
    model = model_of("Llama").train()
    watch_packed_calls(model)
    model.eval()(batch["input_ids"])  # not a call that trains
    model.train()(**batch)
    model(batch["input_ids"])  # no longer watched

    for call in (
        lambda: model(batch["input_ids"], labels=batch["labels"]),
        lambda: model(**{**batch, "use_cache": None}),
        lambda: model(**batch, attention_mask=torch.ones_like(batch["input_ids"])),
    ):
        watch_packed_calls(model)
        with pytest.raises(ValueError, match=r"Write `self.model\(\*\*batch\)`"):
            call()
