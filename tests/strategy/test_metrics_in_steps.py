"""A torchmetrics object that exchanges in ``training_step`` costs no gain, and logs what it logs under DDP."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
from lightning.pytorch import Callback
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader
from torchmetrics import Metric, MetricCollection
from torchmetrics.classification import MulticlassAUROC, MulticlassF1Score, MulticlassPrecision
from torchmetrics.wrappers import MinMaxMetric

from lightning_odc import Minibatch
from lightning_odc.strategy.torch_metrics import metrics_of
from tests.support.fits import fit, numbers
from tests.support.losses import CLASSES, Losses, collate, samples
from tests.support.modules import said, warned
from tests.support.ranks import on_ranks
from tests.support.tiers import fast

BATCH = 4


class Nested(Metric):
    """Computes other metrics, which exchange whenever they do, and never resets them."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = MetricCollection([f1(), MulticlassPrecision(CLASSES)])

    def update(self, scores: Tensor, labels: Tensor) -> None:
        self.inner.update(scores, labels)

    def compute(self) -> Any:
        return self.inner.compute()


def f1(**options: Any) -> Metric:
    """No mean over parts of a batch: a wrong exchange shows."""
    return MulticlassF1Score(CLASSES, average="macro", **options)


def several(**options: Any) -> MetricCollection:
    return MetricCollection([f1(**options), MulticlassPrecision(CLASSES, **options)])


def returned(m: Any, scores: Tensor, labels: Tensor) -> None:
    m.log("v", m.metric(scores, labels), on_epoch=True)


def as_object(m: Any, scores: Tensor, labels: Tensor) -> None:
    m.metric(scores, labels)
    m.log("v", m.metric, on_step=True, on_epoch=True)


def all_returned(m: Any, scores: Tensor, labels: Tensor) -> None:
    m.log_dict({f"v_{name}": value for name, value in m.metric(scores, labels).items()})


def raw_returned(m: Any, scores: Tensor, labels: Tensor) -> None:
    m.log("v", m.metric(scores, labels)["raw"])


def all_objects(m: Any, scores: Tensor, labels: Tensor) -> None:
    m.metric(scores, labels)
    m.log_dict(m.metric, on_step=True, on_epoch=True)


def computed(m: Any, scores: Tensor, labels: Tensor) -> None:
    m.metric.update(scores, labels)
    m.log("v", m.metric.compute())


def all_computed(m: Any, scores: Tensor, labels: Tensor) -> None:
    m.metric.update(scores, labels)
    m.log_dict(m.metric.compute())


def reset_behind(m: Any, scores: Tensor, labels: Tensor) -> None:
    """Every second step, over the samples of both."""
    m.metric.update(scores, labels)
    m.log("v", m.metric.compute())
    if m.index % 2:
        m.metric.reset()


def reset_before(m: Any, scores: Tensor, labels: Tensor) -> None:
    if m.index % 2 == 0:
        m.metric.reset()
    computed(m, scores, labels)


def hidden(m: Any, scores: Tensor, labels: Tensor) -> None:
    """In a list, where nothing finds it."""
    m.metric[0].update(scores, labels)
    m.log("v", m.metric[0].compute())


#: A metric, and how a step uses it.
KINDS: dict[str, tuple[Callable[[], Any], Callable[[Any, Tensor, Tensor], None]]] = {
    "returned": (lambda: f1(dist_sync_on_step=True), returned),
    "object": (lambda: f1(dist_sync_on_step=True), as_object),
    "computed": (f1, computed),
    "lists": (lambda: MulticlassAUROC(CLASSES), computed),
    "reset behind": (f1, reset_behind),
    "reset before": (f1, reset_before),
    "collection": (lambda: several(dist_sync_on_step=True), all_returned),
    "objects": (lambda: several(dist_sync_on_step=True), all_objects),
    "collection computes": (several, all_computed),
    "nested": (Nested, all_returned),
    "wrapped": (lambda: MinMaxMetric(f1()), raw_returned),
}
EVERY = [*KINDS]
KINDS["hidden"] = (lambda: [f1()], hidden)
KINDS["own"] = (f1, as_object)  # which exchanges at the end of the epoch alone


class Measured(Losses):
    """Trains classes, and measures scores that come with the samples."""

    def __init__(self, kind: str) -> None:
        super().__init__("classes")
        make, self.use = KINDS[kind]
        self.metric = make()
        self.index = 0
        self.rows: list[int] = []  # of the batches that ran

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.index = batch_idx
        self.rows.append(len(batch["label"]))
        self.use(self, batch["target"], batch["label"])
        return cross_entropy(self.classes(self.pooled(batch)), batch["label"])


class Logged(Callback):
    """What a user sees after each batch and each epoch, under any strategy."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []
        self.epochs: list[dict[str, float]] = []

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.steps.append(numbers(trainer.callback_metrics))

    def on_train_epoch_end(self, trainer: Any, _: Any) -> None:
        self.epochs.append(numbers(trainer.callback_metrics))


def about(logged: dict[str, float]) -> Any:
    return pytest.approx(logged, rel=1e-6, abs=1e-9)


@on_ranks(2)
@pytest.mark.parametrize("kind", fast(EVERY, "collection", "nested"))
def test_a_metric_that_exchanges_logs_as_under_ddp_while_batches_are_cut(rank, kind):
    ddp = Logged()
    data = DataLoader(samples(), batch_size=BATCH, collate_fn=collate)
    options: dict[str, Any] = {"max_epochs": 2, "use_distributed_sampler": True}
    fit(Measured(kind).double(), data, callbacks=[ddp], strategy="ddp_find_unused_parameters_true", **options)
    odc = Logged()
    with said() as text, warned() as caught:
        module = Measured(kind).double()
        fit(module, data, callbacks=[odc], balance="auto", **options)
    assert "Your batches" not in "\n".join([text.getvalue(), *caught])
    assert module.rows
    assert {*module.rows} != {BATCH}, "batches are cut"
    assert len(odc.steps) == 4
    assert "v" in odc.steps[0] or len(odc.steps[0]) > 1
    assert odc.steps == list(map(about, ddp.steps))
    assert odc.epochs == list(map(about, ddp.epochs))


TALKS = r"""talks to other ranks \(\S+test_metrics_in_steps\.py:\d+: `m.log\("v", m.metric\[0\].compute\(\)\)`\)"""


@on_ranks(2)
def test_what_talks_all_the_same_is_named_by_its_line_with_the_line_that_helps(rank):
    data = DataLoader(samples(), batch_size=BATCH, collate_fn=collate)
    with warned() as caught:
        fit(Measured("hidden").double(), data, balance="auto")
    text = "\n".join(caught)
    if rank == 0:
        assert re.search(TALKS, text), text
        assert "\n    self.log(name, value, sync_dist=True)\n" in text
        assert "if it is an attribute of the module" in text


#: How many samples the microbatches of each step have, by rank.
MICROBATCHES = [[[3, 1, 2], []], [[], [2, 4]], [[5], [1, 3]]]


def in_microbatches() -> list[list[list[Any]]]:
    """Batches by step and rank."""
    left = samples() * 2
    return [
        [[collate([left.pop() for _ in range(size)]) for size in sizes] for sizes in of_ranks]
        for of_ranks in MICROBATCHES
    ]


def alone(kind: str, batches: list[Any]) -> tuple[list[dict[str, float]], Measured]:
    """What one process logs of these batches, and its module."""
    module = Measured(kind).double()
    for part in module.modules():
        if isinstance(part, Metric):
            part.distributed_available_fn = lambda: False
    logged: list[dict[str, float]] = []

    def log(name: str, value: Any, **_: Any) -> None:
        if isinstance(value, Metric):
            value = value._forward_cache
        logged[-1][name] = float(value)

    object.__setattr__(module, "log", log)
    for index, batch in enumerate(batches):
        logged.append({})
        module.training_step(batch, index)
    return logged, module


@on_ranks(2)
@pytest.mark.parametrize("kind", fast(EVERY, "object", "lists", "reset before"))
def test_ranks_with_different_numbers_of_microbatches_log_what_one_process_logs(rank, kind):
    steps = in_microbatches()
    watch = Logged()
    module = Measured(kind).double()
    fit(module, [Minibatch(step[rank]) for step in steps], callbacks=[watch])
    for _, metric in metrics_of(module):
        assert metric.dist_sync_fn is None
        assert "reset" not in vars(metric)
        assert not metric._forward_hooks
    taken = samples() * 2
    sizes = [sum(map(sum, of_ranks)) for of_ranks in MICROBATCHES]
    expected, module = alone(kind, [collate([taken.pop() for _ in range(size)]) for size in sizes])
    found = [{name: logged[name] for name in one} for logged, one in zip(watch.steps, expected, strict=True)]
    assert found == list(map(about, expected))
    if kind == "object":
        assert watch.epochs[0]["v_epoch"] == pytest.approx(float(module.metric.compute()))


@on_ranks(2)
def test_a_metric_of_one_rank_has_the_value_of_all_its_microbatches_as_that_of_the_step(rank):
    watch = Logged()
    steps = in_microbatches()
    fit(Measured("own").double(), [Minibatch(step[rank]) for step in steps], callbacks=[watch])
    taken = samples() * 2
    for index, of_ranks in enumerate(MICROBATCHES):
        own = [[taken.pop() for _ in range(sum(sizes))] for sizes in of_ranks]
        if own[rank]:
            [logged], _ = alone("own", [collate(own[rank])])
            assert watch.steps[index]["v_step"] == pytest.approx(logged["v"])
        else:
            assert watch.steps[index].keys() <= {*watch.steps[0]}
    everything = (samples() * 2)[::-1][: sum(sum(map(sum, of_ranks)) for of_ranks in MICROBATCHES)]
    _, module = alone("own", [collate(everything)])
    assert watch.epochs[0]["v_epoch"] == pytest.approx(float(module.metric.compute()))
