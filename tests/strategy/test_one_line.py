"""``strategy="odc"`` and nothing else: what it finds out, says, and trains."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from lightning_odc.balance.collation import Collation
from lightning_odc.errors import DisagreementError
from lightning_odc.strategy.model_facts import cost_of_model
from tests.strategy.test_balance import Padded, plain
from tests.strategy.test_label_weights import TOLERANCE, Sample, Tuned, one_process, padded, samples
from tests.support.fits import fit as fit_on
from tests.support.fits import largest_difference
from tests.support.models import full_parameters
from tests.support.modules import said
from tests.support.ranks import run_ranks


class Sized(Tuned):
    """Notes the tokens of every microbatch, padding included."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.tokens.append(batch["input_ids"].numel())
        return super().training_step(batch, batch_idx)


def prepare(worker: int) -> None:
    """What a user's data set might need in every worker."""


def fit(
    data: list[Sample], batch_size: int, accumulate: int, workers: int = 0, **options: Any
) -> dict[str, Any]:
    module, shape = Sized(), {"batch_size": batch_size, "collate_fn": padded, "num_workers": workers}
    loader = DataLoader(data, worker_init_fn=prepare, **shape)
    with said() as text:
        t = fit_on(module, loader, accumulate_grad_batches=accumulate, **{"balance": "auto", **options})
    own = t.train_dataloader
    return {
        "parameters": full_parameters(module),
        "tokens": module.tokens,
        "steps": t.global_step,
        "collation": own.collation,
        "cap": own.max_tokens,
        "text": text.getvalue(),
    }


def fit_all(rank: int) -> dict[str, Any]:
    data = samples()
    half = len(data) // 2
    return {
        "batches": fit(data, half, 1),
        "accumulated": fit(data, 1, half),
        "packed": fit(data, half, 1, packing=True),
        "prepared": fit(data, half, 1, workers=1),
        "deterministic": fit(data, half, 1, deterministic=True),
        "collective": fit(data, 1, half, communication="collective"),
    }


def test_one_step_is_that_of_one_process_and_three_lines_say_how():
    first, second = run_ranks(fit_all)
    expected = one_process(samples())
    lengths = [len(sample["input_ids"]) for sample in samples()]
    for case, found in first.items():
        assert found["steps"] == 1, f"{case}: all accumulated batches are one optimizer step"
        assert largest_difference(found["parameters"], expected) < TOLERANCE, case
        tokens = found["tokens"] + second[case]["tokens"]
        assert max(tokens) <= found["cap"], case
        assert sum(tokens) >= sum(lengths), "every sample ran"
    assert first["batches"]["collation"] == Collation("padded")
    assert first["packed"]["collation"] == Collation("packed")
    assert sum(first["packed"]["tokens"] + second["packed"]["tokens"]) == sum(lengths), "no padding"
    lines = first["accumulated"]["text"]
    assert "the collate_fn pads to the longest sample" in lines
    assert 'policy "steal"' in lines
    assert f"({len(lengths) // 2} accumulated batches of 1)" in lines
    assert "% of the computed tokens are padding, instead of" in lines
    assert "a microbatch counts its labels that are not -100 and not in the first column" in lines
    assert "Measured: the first epoch took" in lines
    reason = "stealing reads samples in this process, where no worker_init_fn has run"
    assert f'policy "lb_mini" ({reason})' in first["prepared"]["text"]
    assert not second["accumulated"]["text"], "rank 0 speaks for all"


def refused(rank: int) -> list[str]:
    with pytest.raises(ValueError, match="packing=True") as error:
        fit_on(Padded(), plain(), balance="auto", packing=True)
    with pytest.raises(DisagreementError) as other_data:
        fit(samples()[: len(samples()) - rank], 2, 1)
    return [str(error.value), str(other_data.value)]


def test_what_cannot_be_packed_or_differs_is_told_before_training():
    for unpackable, message in run_ranks(refused):
        assert "has no Hugging Face causal model" in unpackable
        assert "write packing=False" in unpackable
        assert "The ranks have different training data" in message
        assert f"Rank 0: {len(samples())} samples" in message
        assert "seed_everything" in message


def test_the_model_tells_its_cost_and_its_attention():
    module = Tuned()
    on_cpu, on_gpu = cost_of_model(module, "cpu"), cost_of_model(module, "cuda")
    assert on_cpu.dense is True
    assert float(on_cpu.cost.overhead) > 0
    assert "attention" in on_cpu.source
    module.model.config._attn_implementation = "flash_attention_2"
    assert on_gpu.dense is True, "eager or sdpa: a mask over the row"
    assert cost_of_model(module, "cuda").dense is False
    assert cost_of_model(module, "cpu").dense is True, "a CPU has no flash attention"
    assert float(getattr(cost_of_model(module, "cuda").cost, "pair", 0.0)) == 0
    plain = cost_of_model(torch.nn.Linear(2, 2), "cpu")
    assert plain.dense is None
