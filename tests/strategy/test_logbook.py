"""What a minibatch logs, without processes; ``test_logging.py`` and ``test_evaluation.py`` have real ranks."""

from __future__ import annotations

import json
import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningModule

from lightning_odc.strategy.logbook import LogBook, Message, flush


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


def logged(*ranks: LogBook) -> list[tuple[str, Any, dict[str, Any]]]:
    module = Module()
    flush(ranks[0].merge([sent(book.post()) for book in ranks], 0), module)
    return module.logged


#: Values and weights of microbatches, options, the value that Lightning gets, and its weight.
MERGED: list[tuple[list[tuple[Any, Any]], dict[str, Any], float, float]] = [
    ([(1.0, 3), (5.0, 1)], {}, 2.0, 4),
    ([(1.0, 3), (5.0, 1)], {"batch_size": 2}, 3.0, 4),
    ([(torch.tensor(1.0), torch.tensor(3)), (torch.tensor([5.0]), 1)], {}, 2.0, 4),
    ([(math.inf, 1), (-math.inf, 1)], {}, math.nan, 2),
    ([(math.inf, 1), (1.0, 1)], {}, math.inf, 2),
    ([(math.nan, 0.0), (3.0, 2.0)], {}, 3.0, 2),
    ([(math.nan, 1.0), (3.0, 2.0)], {}, math.nan, 3),
    *(([(two, 1)], {"sync_dist": True}, 2.0, 1) for two in (2, np.float32(2), np.int64(2), Fraction(2))),
]
REDUCTIONS = [("sum", 6.0), ("min", 1.0), (max, 5.0), (torch.sum, 6.0), (torch.max, 5.0), ("AVG", 2.0)]


@pytest.mark.parametrize(("values", "options", "expected", "weight"), MERGED)
def test_a_mean_is_weighted_by_microbatch(values, options, expected, weight):
    ((_, result, given),) = logged(recorded(*values, **options))
    assert (result, given["batch_size"]) == (pytest.approx(expected, nan_ok=True), weight)


@pytest.mark.parametrize(("reduce_fx", "expected"), REDUCTIONS)
def test_other_reductions(reduce_fx, expected):
    for sync_dist in (False, True):
        ((_, result, _),) = logged(recorded((1.0, 3), (5.0, 1), reduce_fx=reduce_fx, sync_dist=sync_dist))
        assert result == expected


def test_wrong_calls_are_found_out_at_once():
    with pytest.raises(ValueError, match="use 'mean', 'sum', 'min' or 'max'"):
        recorded((1.0, 1), reduce_fx=torch.prod)
    book, module = LogBook(), Module()
    with book.recording(module):
        module.log("x", 1.0, reduce_fx="sum")
        with pytest.raises(ValueError, match=r"called twice.*'sum' and with 'mean'"):
            module.log("x", 1.0)
    with LogBook().recording(strict := LightningModule()), pytest.raises(TypeError, match="synk"):
        strict.log("x", 1.0, synk=True)


def test_a_mean_over_nothing_is_not_logged():
    nothing = recorded((3.0, 0.0), sync_dist=True)
    assert logged(nothing, recorded((5.0, 0.0), sync_dist=True)) == []
    ((_, mean, _),) = logged(nothing, recorded((5.0, 1.0), sync_dist=True))
    ((_, total, _),) = logged(recorded((3.0, 0.0), reduce_fx="sum"))
    assert (mean, total) == (5.0, 3.0)


def test_what_other_ranks_do_not_need_is_not_sent_and_names_are_sent_compactly():
    assert recorded((1.0, 3), sync_dist=True, rank_zero_only=True).post() == [[], []]
    book, module = LogBook(), Module()
    with book.recording(module):
        for layer in range(2000):
            module.log(f"layer_{layer}/norm", 1.0, sync_dist=True, on_epoch=True)
            module.log(f"own_{layer}", 1.0)
    assert len(json.dumps(book.post())) < 2000 * 40


def test_what_is_neither_number_nor_metric_goes_to_lightning_at_once():
    book, module = LogBook(), Module()
    with book.recording(module):
        module.log("x", "text", on_epoch=True)
        module.log("y", torch.ones(2))
    assert [name for name, *_ in module.logged] == ["x", "y"]
    assert book.take() == []
