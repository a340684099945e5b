"""What a minibatch logs, without processes."""

from __future__ import annotations

import json
import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
import torchmetrics
from lightning.pytorch import LightningModule

from lightning_odc.errors import DisagreementError
from lightning_odc.strategy import logbook
from lightning_odc.strategy.logbook import LogBook, Message, Total, flush

#: How a value is logged that is that of all ranks already.
DONE = {"sync_dist": True, "rank_zero_only": True}


class Module(LightningModule):
    """Takes what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.logged: list[tuple[str, Any, dict[str, Any]]] = []

    def log(self, name: str, value: Any, *args: Any, **options: Any) -> None:
        assert not args
        self.logged.append((name, value, options))


def recorded(*values: tuple[Any, float], **options: Any) -> LogBook:
    """A rank's book after each value was logged in a microbatch of the given weight."""
    book, module = LogBook(), Module()
    with book.recording(module):
        for value, weight in values:
            module.log("x", value, **options)
            book.weigh(weight)
    assert not module.logged
    module.log("x", 0)
    assert module.logged, "the module's own log is back"
    return book


def sent(message: Message) -> Message:
    """As it comes out of a mailbox."""
    return json.loads(json.dumps(message))


def logged(*ranks: LogBook, own: int = 0) -> list[tuple[str, Any, dict[str, Any]]]:
    module = Module()
    flush(ranks[own].merge([sent(book.post()) for book in ranks], own), module)
    return module.logged


def value(*values: tuple[Any, float], **options: Any) -> tuple[Any, int | float]:
    ((_, result, given),) = logged(recorded(*values, **options))
    return result, given["batch_size"]


def test_a_mean_is_weighted_by_microbatch():
    assert value((1.0, 3), (5.0, 1)) == (2.0, 4)


def test_an_explicit_batch_size_wins():
    assert value((1.0, 3), (5.0, 1), batch_size=2) == (3.0, 4)


def test_tensors_and_weights_may_be_tensors():
    assert value((torch.tensor(1.0), torch.tensor(3)), (torch.tensor([5.0]), 1)) == (2.0, 4)


@pytest.mark.parametrize("two", [2, np.float32(2), np.int64(2), Fraction(2), torch.tensor(2)])
def test_any_number_is_a_value(two):
    assert value((two, 1), sync_dist=True) == (2.0, 1)


@pytest.mark.parametrize(
    ("reduce_fx", "expected"),
    [("sum", 6.0), ("min", 1.0), (max, 5.0), (torch.sum, 6.0), (torch.max, 5.0), ("AVG", 2.0)],
)
@pytest.mark.parametrize("sync_dist", [False, True])
def test_other_reductions(reduce_fx, expected, sync_dist):
    assert value((1.0, 3), (5.0, 1), reduce_fx=reduce_fx, sync_dist=sync_dist)[0] == expected


def test_an_unknown_reduction():
    with pytest.raises(ValueError, match="use 'mean', 'sum', 'min' or 'max'"):
        recorded((1.0, 1), reduce_fx=torch.prod)


def test_two_reductions_of_one_name():
    book, module = LogBook(), Module()
    with book.recording(module):
        module.log("x", 1.0, reduce_fx="sum")
        with pytest.raises(ValueError, match=r"called twice.*'sum' and with 'mean'"):
            module.log("x", 1.0)


def test_positional_arguments_have_the_names_of_lightnings():
    book, module = LogBook(), Module()
    with book.recording(module):
        module.log("x", 1.0, True, None, True, False, torch.max, sync_dist=True)
        module.log(name="y", value=2.0, batch_size=3)
    (x, y) = book.take()
    options = {"prog_bar": True, "logger": None, "on_step": True, "on_epoch": False}
    assert x.options == {**options, "reduce_fx": torch.max, "sync_dist": True}
    assert (y.value, y.weight, y.options) == (6.0, 3.0, {})


def test_wrong_arguments_are_found_out_at_the_call():
    book, module = LogBook(), LightningModule()
    with book.recording(module), pytest.raises(TypeError, match="synk"):
        module.log("x", 1.0, synk=True)


def test_a_mean_over_nothing_is_not_logged():
    assert logged(recorded((3.0, 0.0))) == []
    assert logged(recorded((3.0, 0.0), sync_dist=True), recorded((5.0, 0.0), sync_dist=True)) == []
    ((_, mean, _),) = logged(recorded((3.0, 0.0), sync_dist=True), recorded((5.0, 1.0), sync_dist=True))
    assert mean == 5.0
    ((_, total, _),) = logged(recorded((3.0, 0.0), reduce_fx="sum"))
    assert total == 3.0


def test_infinite_values_do_not_break_a_sum():
    assert math.isnan(value((math.inf, 1), (-math.inf, 1))[0])
    assert value((math.inf, 1), (1.0, 1))[0] == math.inf


def test_synchronised_values_are_merged_over_ranks_and_others_stay():
    for own in range(3):
        both = [recorded((1.0, 3), sync_dist=True), LogBook(), recorded((5.0, 1), sync_dist=True)]
        assert logged(*both, own=own) == [("x", 2.0, {"batch_size": 4, "reduce_fx": "mean", **DONE})]
    for own, expected in enumerate([[("x", 1.0, {"batch_size": 3})], [], [("x", 5.0, {"batch_size": 1})]]):
        assert logged(recorded((1.0, 3)), LogBook(), recorded((5.0, 1)), own=own) == expected
    alone = recorded((1.0, 3), sync_dist=True, rank_zero_only=True)
    assert alone.post() == [[], []]


def test_names_come_in_one_order_on_every_rank():
    for own in range(2):
        books = [LogBook(), LogBook()]
        for book, names in zip(books, ("abc", "cb"), strict=True):
            module = Module()
            with book.recording(module):
                for name in names:
                    module.log(name, ord(name), sync_dist=True)
        assert [name for name, *_ in logged(*books, own=own)] == ["a", "b", "c"]


def test_the_options_of_a_name_stay_those_it_was_first_seen_with():
    book, module = LogBook(), Module()
    other = recorded((1.0, 1), sync_dist=True, prog_bar=False)
    flush(book.merge([book.post(), sent(other.post())], own=0), module)
    with book.recording(module):
        module.log("x", 2.0, sync_dist=True, prog_bar=True)
    flush(book.merge([sent(book.post()), LogBook().post()], own=0), module)
    assert [options["prog_bar"] for _, _, options in module.logged] == [False, False]


def test_ranks_that_reduce_a_name_differently_disagree():
    with pytest.raises(
        DisagreementError, match=r"Rank 0 logged 'x' as a value with reduce_fx='mean', rank 1 .*'sum'"
    ):
        logged(recorded((1.0, 1), sync_dist=True), recorded((1.0, 1), sync_dist=True, reduce_fx="sum"))


def test_subgroups_of_ranks_have_values_of_their_own():
    groups = [(0, 2), (1,), (0, 2)]
    parts = [
        [Total("x", "mean", {"sync_dist": True}, 2.0 * rank, 1.0, group)] for rank, group in enumerate(groups)
    ]
    parts = [logbook.from_message(sent(logbook.to_message(part))) for part in parts]
    assert [logbook.merge(parts, own)[0].result for own in range(3)] == [2.0, 2.0, 2.0]
    assert logbook.merge(parts, 1)[0].weight == 1.0


def test_many_names_are_sent_compactly():
    book, module = LogBook(), Module()
    with book.recording(module):
        for layer in range(2000):
            module.log(f"layer_{layer}/norm", 1.0, sync_dist=True, on_epoch=True)
            module.log(f"own_{layer}", 1.0)
    assert len(json.dumps(book.post())) < 2000 * 40


class Measured(Module):
    def __init__(self) -> None:
        super().__init__()
        self.acc = torchmetrics.MeanMetric()


def test_a_metric_object_logged_on_one_rank_is_logged_on_all():
    modules, books = [Measured(), Measured()], [LogBook(), LogBook()]
    with books[0].recording(modules[0]):
        modules[0].log("acc", modules[0].acc, on_epoch=True)
    messages = [sent(book.post()) for book in books]
    for rank, module in enumerate(modules):
        flush(books[rank].merge(messages, rank), module)
        options = {"on_epoch": True, "metric_attribute": "acc"}
        assert module.logged == [("acc", module.acc, options)]
        assert module.logged[0][1] is module.acc
    with pytest.raises(DisagreementError, match=r"Another rank logged 'acc', .* its `self.acc`"):
        flush(LogBook().merge(messages, 1), Module())


def test_what_is_neither_number_nor_metric_goes_to_lightning_at_once():
    book, module = LogBook(), Module()
    with book.recording(module):
        module.log("x", "text", on_epoch=True)
        module.log("y", torch.ones(2))
    assert [name for name, *_ in module.logged] == ["x", "y"]
    assert book.take() == []


def test_the_modules_log_comes_back_after_an_error():
    book, module = LogBook(), Module()
    with pytest.raises(RuntimeError), book.recording(module):
        raise RuntimeError
    assert "log" not in vars(module)


def test_a_mean_leaves_out_what_weighs_nothing_even_if_it_is_nan():
    assert logged(recorded((math.nan, 0.0), (3.0, 2.0)))[0][1] == 3.0
    assert math.isnan(logged(recorded((math.nan, 1.0), (3.0, 2.0)))[0][1])
