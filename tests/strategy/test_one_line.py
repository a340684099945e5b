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
from tests.support.ranks import of_all_ranks, on_ranks


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


@on_ranks(1)
def test_one_rank_is_told_that_it_waits_for_no_other(rank):
    assert "\nOne rank has no other one to wait for" in fit(samples(), 4, 1, balance="lb_mini")["text"]


#: Batch size, batches accumulated, and other options.
WAYS: dict[str, tuple[int, int, dict[str, Any]]] = {
    "batches": (4, 1, {}),
    "accumulated": (1, 4, {}),
    "packed": (4, 1, {"packing": True}),
    "prepared": (4, 1, {"workers": 1}),
    "deterministic": (4, 1, {"deterministic": True}),
    "collective": (1, 4, {"communication": "collective"}),
}


@on_ranks(2)
@pytest.mark.parametrize("case", WAYS)
def test_one_step_is_that_of_one_process(rank, case):
    batch_size, accumulated, options = WAYS[case]
    found = fit(samples(), batch_size, accumulated, **options)
    lengths = [len(sample["input_ids"]) for sample in samples()]
    assert found["steps"] == 1, "all accumulated batches are one optimizer step"
    assert largest_difference(found["parameters"], one_process(samples())) < TOLERANCE
    tokens = [size for own in of_all_ranks(found["tokens"]) for size in own]
    assert max(tokens) <= found["cap"]
    assert sum(tokens) >= sum(lengths), "every sample ran"
    text = found["text"]
    if case == "packed":
        assert found["collation"] == Collation("packed")
        assert sum(tokens) == sum(lengths), "no padding"
    elif case == "batches":
        assert found["collation"] == Collation("padded")
    elif case == "prepared" and rank == 0:
        reason = "stealing reads samples in this process, where no worker_init_fn has run"
        assert f'policy "lb_mini" ({reason})' in text
    elif case == "accumulated" and rank == 0:
        assert "the collate_fn pads to the longest sample" in text
        assert 'policy "steal"' in text
        assert f"({len(lengths) // 2} accumulated batches of 1)" in text
        assert "% of the computed tokens are padding, instead of" in text
        assert "a microbatch counts its labels that are not -100 and not in the first column" in text
        assert "Measured: the first epoch took" in text
    assert rank == 0 or not text, "rank 0 speaks for all"


@on_ranks(2)
def test_what_cannot_be_packed_or_differs_is_told_before_training(rank):
    with pytest.raises(ValueError, match=r"(?s)has no Hugging Face causal model.*write packing=False"):
        fit_on(Padded(), plain(), balance="auto", packing=True)
    said = f"(?s)different training data.*Rank 0: {len(samples())} samples.*seed_everything"
    with pytest.raises(DisagreementError, match=said):
        fit(samples()[: len(samples()) - rank], 2, 1)


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
