"""``weighting="auto"``: mean losses are weighted by the labels they count, so a minibatch has one process's gradient.

One step of SGD with lr 1 from equal parameters shows the gradient. transformers computes losses in fp32, so each of the
two or three terms of a sum has a relative error of some 2^-24 = 6e-8, and so have their sums: 1e-6 of gradients of at
most 1. Weights by tokens instead of labels are wrong by more than 1e-3, as a test here shows.
"""

from __future__ import annotations

import time
from dataclasses import make_dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_odc.balance.collation import Collation
from lightning_odc.data.loader import BalancedDataLoader
from lightning_odc.data.model_cost import cost_of_model
from lightning_odc.errors import DisagreementError
from lightning_odc.protocol.records import Ledger, WeightKind, check_records
from lightning_odc.run.contribution import contribution
from lightning_odc.samples.packing import PackingCollator
from lightning_odc.samples.weighting import LabelCounter
from tests.strategy.test_balance import Padded, plain
from tests.strategy.test_models import causal_lm
from tests.support import fits
from tests.support.fits import largest_difference
from tests.support.models import full_parameters
from tests.support.modules import said, trainer
from tests.support.ranks import of_all_ranks, on_ranks

transformers: Any = pytest.importorskip("transformers")

VOCAB = 32
LENGTHS = (9, 4, 12, 7, 3, 10, 6, 5)
PROMPTS = (7, 1, 2, 5, 0, 9, 0, 2)  # labels of so many first tokens are -100
TOLERANCE = 1e-6
Sample = dict[str, list[int]]


def samples(lengths: Any = LENGTHS, prompts: Any = PROMPTS) -> list[Sample]:
    generator = torch.Generator().manual_seed(0)
    tokens = [torch.randint(VOCAB, (length,), generator=generator).tolist() for length in lengths]
    labels = [[-100] * prompt + own[prompt:] for own, prompt in zip(tokens, prompts, strict=True)]
    return [{"input_ids": own, "labels": of_own} for own, of_own in zip(tokens, labels, strict=True)]


def padded(batch: list[Sample]) -> dict[str, Tensor]:
    def table(name: str, value: int) -> Tensor:
        rows = [torch.tensor(sample[name]) for sample in batch]
        return nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=value)

    masks = [torch.ones(len(sample["input_ids"]), dtype=torch.int64) for sample in batch]
    mask = nn.utils.rnn.pad_sequence(masks, batch_first=True)
    input_ids = table("input_ids", 0)
    return {"input_ids": input_ids, "labels": table("labels", -100), "attention_mask": mask}


class Tuned(LightningModule):
    """What everybody writes: the loss of the model, a mean; or one by hand: without labels it is 0 / 0."""

    def __init__(self, by_hand: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = causal_lm()
        self.by_hand = by_hand

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.mean(batch)
        self.log("loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.mean(batch), sync_dist=True)

    def mean(self, batch: Any) -> Tensor:
        if not self.by_hand:
            return self.model(**batch).loss
        logits = self.model(batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, :-1]
        labels = batch["labels"][:, 1:]
        mask = (labels != -100).flatten()
        labels = labels.clamp(min=0).flatten()
        losses = nn.functional.cross_entropy(logits.flatten(0, 1), labels, reduction="none") * mask
        return losses.sum() / mask.sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1.0)


def one_process(minibatch: list[Sample]) -> dict[str, Tensor]:
    """After a step on the mean over all predicted tokens."""
    module = Tuned()
    optimizer = module.configure_optimizers()
    counted = 0
    for sample in minibatch:
        count = sum(label != -100 for label in sample["labels"][1:])
        if count:
            (module.model(**padded([sample])).loss * count).backward()
        counted += count
    for parameter in module.parameters():
        if parameter.grad is not None:
            parameter.grad = parameter.grad / counted
    optimizer.step()
    return full_parameters(module)


def fit(
    rank: int,
    data: list[Sample],
    seconds: float = 0.0,
    communication: str = "on_demand",
    precision: str = "32-true",
    **options: Any,
) -> Any:
    defaults = {"weighting": "auto", "minibatch_size": len(data) // 2, "num_replicas": 2, "rank": rank}
    defaults |= {"lengths": [len(sample["input_ids"]) for sample in data], "collate_fn": padded}
    ran = []
    module = fits.before_step(Tuned(), lambda *_: (ran.append(1), time.sleep(seconds)))
    t = trainer(2, communication=communication, precision=precision)
    t.fit(module, BalancedDataLoader(data, **{**defaults, **options}))
    loss = float(t.callback_metrics.get("loss", 0.0))
    return SimpleNamespace(parameters=full_parameters(module), ran=len(ran), loss=loss)


@on_ranks(2)
def test_every_collator_and_policy_has_the_gradient_over_all_predicted_tokens(rank):
    data = samples()
    expected = one_process(samples())
    losses = []
    packed = {"collate_fn": PackingCollator(), "max_tokens": 20}
    for case, options in {
        "packed": packed,
        "padded": {"max_tokens": 20},
        "one by one": {"balance": "local_sort"},
        "collective": {"balance": "lb_micro", "communication": "collective"},
    }.items():
        found = fit(rank, data, **options)
        assert largest_difference(found.parameters, expected) < TOLERANCE, case
        losses.append(found.loss)
    stolen = {"collate_fn": PackingCollator(), "max_tokens": 13, "balance": "steal"}
    found = fit(rank, data, 0.3 * (rank == 0), **stolen)
    assert largest_difference(found.parameters, expected) < TOLERANCE
    first, second = of_all_ranks(found.ran)
    assert first < second, "rank 0 is slow and was helped"
    logged = [losses[0], losses[1], losses[2], found.loss]
    assert logged == pytest.approx([losses[0]] * 4, rel=1e-6), "what is logged is weighted alike"
    explicit = fit(rank, data, weighting="token").parameters
    assert largest_difference(explicit, expected) > 1e-3, "explicit weights keep their meaning"


#: Two samples a minibatch, one per rank: labels on one rank only, on the other only, on no rank.
MASKED = samples((4, 5, 6, 4, 5, 6), (4, 1, 1, 4, 5, 6))


@on_ranks(2)
def test_microbatches_ranks_and_minibatches_without_labels(rank):
    expected = one_process(MASKED)
    before = full_parameters(Tuned())
    assert largest_difference(fit(rank, MASKED, balance="local_sort").parameters, expected) < TOLERANCE
    half = fit(rank, MASKED, balance="local_sort", precision="16-mixed")
    # fp16 rounds to 2^-11, through two layers and back, relative to gradients of up to 0.5: the unit of the weights
    # is the same on both ranks.
    assert largest_difference(half.parameters, expected) < 2e-3
    options = {"collate_fn": PackingCollator(), "minibatch_size": 1, "balance": "local_sort"}
    for first, own in ((0, one_process(MASKED[:2])), (2, one_process(MASKED[2:4])), (4, before)):
        for communication in ("on_demand", "collective"):
            apart = fit(rank, MASKED[first : first + 2], communication=communication, **options)
            assert largest_difference(apart.parameters, own) < TOLERANCE
            assert apart.loss == apart.loss, "not NaN"


def check_by_hand(rank: int, communication: str, world_size: int) -> None:
    """The gradients of a mean over nothing are left out, and an evaluation is weighted by labels."""
    module = Tuned(by_hand=True)
    counts = [float(LabelCounter(skips_first=True).of(padded([one]))) for one in MASKED]
    with torch.no_grad():
        means = [float(module.mean(padded([one]))) for one in MASKED]
    expected = sum(mean * n for mean, n in zip(means, counts, strict=True) if n) / sum(counts)
    shape = {"num_replicas": world_size, "rank": rank, "balance": "local_sort"}
    shape |= {"lengths": [len(sample["input_ids"]) for sample in MASKED], "collate_fn": padded}
    loader = BalancedDataLoader(MASKED, minibatch_size=len(MASKED) // world_size, **shape)
    parameters = fits.fitted(module, loader, world_size, communication=communication)
    assert largest_difference(parameters, one_process(MASKED)) < TOLERANCE
    t = trainer(world_size, communication=communication)
    (values,) = t.validate(Tuned(by_hand=True), loader, verbose=False)
    assert values["val_loss"] == pytest.approx(expected, rel=1e-6)


@on_ranks(2)
@pytest.mark.parametrize("communication", ["on_demand", "collective"])
def test_gradients_of_a_mean_over_nothing_are_left_out(rank, communication):
    check_by_hand(rank, communication, 2)


@on_ranks(1)
def test_gradients_of_a_mean_over_nothing_are_left_out_on_one_rank(rank):
    check_by_hand(rank, "on_demand", 1)


ROWS = torch.tensor([[1, 2, 3], [-100, -100, 4]])


COUNTED: list[tuple[Any, bool, int | None]] = [
    ({"labels": ROWS}, True, 3),
    ({"labels": ROWS}, False, 4),
    (make_dataclass("Batch", ["labels"])(ROWS), True, 3),
    ((torch.ones(2), {"labels": ROWS}), True, 3),
    (transformers.BatchEncoding({"labels": ROWS}), True, 3),
    ({"labels": ROWS[0]}, True, 3),  # one per sample: a classifier's
    ({"labels": torch.full((2, 3), -100)}, True, 0),
    ({"labels": ROWS.float()}, True, None),
    ({"labels": ROWS > 0}, True, None),
    ({"labels": [1, 2]}, True, None),
    ({"input_ids": ROWS}, True, None),
    (ROWS, True, None),
]


def test_labels_that_a_mean_is_over_and_what_goes_before_them():
    for batch, shifted, count in COUNTED:
        found = LabelCounter(skips_first=shifted).of(batch)
        if count is None:
            assert found is None, batch
        else:
            assert float(found) == count, batch
    summed = {"loss": torch.tensor(6.0), "num_items": 3}
    labels = torch.tensor(0.0)
    item = contribution(summed, 5.0, WeightKind.PLANNED, labels)
    assert item is not None
    assert float(item.loss) == 6.0
    assert item.weight == 3.0
    assert item.weight_kind == WeightKind.EXACT


def test_batches_and_ranks_with_and_without_labels_do_not_mix():
    ledgers = []
    for weight_kind in (WeightKind.LABELS, WeightKind.PLANNED):
        ledgers.append(ledger := Ledger())
        ledger.add(torch.tensor(3.0), weight_kind)
    with pytest.raises(ValueError, match=r'has counted labels and Minibatch weights.*weighting="token"'):
        ledgers[0].add(5.0, WeightKind.PLANNED)
    with pytest.raises(
        DisagreementError,
        match=r'rank 1 has Minibatch weights.*weighting="token"',
    ):
        check_records([ledger.record() for ledger in ledgers])


def prepare(worker: int) -> None:
    """What a user's data set might need in every worker."""


def fit_plain(data: list[Sample], batch_size: int, accumulate: int, workers: int = 0, **options: Any) -> Any:
    """Parameters, steps, the loader, and what was said."""
    module = Tuned()
    shape: dict[str, Any] = {"batch_size": batch_size, "collate_fn": padded, "num_workers": workers}
    if (
        workers
    ):  # by default, a rank of these tests starts them from a server of their own, which imports everything
        shape["multiprocessing_context"] = "fork"
    loader = DataLoader(data, worker_init_fn=prepare, **shape)
    with said() as text:
        t = fits.fit(module, loader, accumulate_grad_batches=accumulate, **{"balance": "auto", **options})
    return full_parameters(module), t.global_step, t.train_dataloader, text.getvalue()


@on_ranks(1)
def test_one_rank_is_told_that_it_waits_for_no_other(rank):
    assert "\nOne rank has no other one to wait for" in fit_plain(samples(), 4, 1, balance="lb_mini")[-1]


#: Batch size, batches accumulated, other options, how samples are put together, and what rank 0 says.
WAYS: dict[str, tuple[int, int, dict[str, Any], str, list[str]]] = {
    "packed": (4, 1, {"packing": True}, "packed", []),
    "prepared": (4, 1, {"workers": 1}, "padded", ['policy "lb_mini"', "Step: 4 samples per rank"]),
    "accumulated": (
        1,
        4,
        {},
        "padded",
        [
            "the collate_fn pads to the longest sample",
            'policy "steal"',
            f"({len(LENGTHS) // 2} accumulated batches of 1)",
            "% of the computed tokens; with your batches, ",
            "Loss: mean over labels (checked).",
            "Measured: the first epoch took",
        ],
    ),
}


@on_ranks(2)
@pytest.mark.parametrize("case", WAYS)
def test_one_step_is_that_of_one_process(rank, case):
    batch_size, accumulated, options, collation, words = WAYS[case]
    parameters, steps, loader, text = fit_plain(samples(), batch_size, accumulated, **options)
    assert steps == 1, "all accumulated batches are one optimizer step"
    assert largest_difference(parameters, one_process(samples())) < TOLERANCE
    assert loader.collation == Collation(collation)
    if rank == 0:
        for line in words:
            assert line in text, "rank 0 speaks for all"
    else:
        assert not text, "rank 0 speaks for all"


@on_ranks(2)
def test_what_cannot_be_packed_or_differs_is_told_before_training(rank):
    with pytest.raises(ValueError, match=r"(?s)has no Hugging Face causal model.*write packing=False"):
        fits.fit(Padded(), plain(), balance="auto", packing=True)
    said = f"(?s)different training data.*Rank 0: {len(samples())} samples.*seed_everything"
    with pytest.raises(DisagreementError, match=said):
        fit_plain(samples()[: len(samples()) - rank], 2, 1)


def test_the_model_tells_its_cost_and_its_attention():
    module = Tuned()
    on_cpu = cost_of_model(module, "cpu")
    on_gpu = cost_of_model(module, "cuda")
    assert on_cpu.cost.dense
    assert float(on_cpu.cost.overhead) > 0
    assert "attention" in on_cpu.source
    assert on_gpu.cost.dense, "eager or sdpa: a mask over the row"
    module.model.config._attn_implementation = "flash_attention_2"
    assert not cost_of_model(module, "cuda").cost.dense
    assert cost_of_model(module, "cpu").cost.dense, "a CPU has no flash attention"
    assert cost_of_model(torch.nn.Linear(2, 2), "cpu").cost.dense, "unknown, so as on this device"
