"""What a minibatch logs, without processes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_odc.logbook import LogBook, flush, merge, neutral


class Module:
    """Takes what is logged."""

    def __init__(self) -> None:
        self.logged: list[tuple[str, Any, dict[str, Any]]] = []

    def log(self, name: str, value: Any, **options: Any) -> None:
        self.logged.append((name, value, options))


def totals(*values: tuple[Any, float], **options: Any) -> list[dict[str, Any]]:
    """The totals of a rank that logged each value in a microbatch of the given weight."""
    book, module = LogBook(), Module()
    with book.recording(module):  # type: ignore[arg-type]
        for value, weight in values:
            module.log("x", value, **options)
            book.weigh(weight)
    assert not module.logged
    module.log("x", 0)
    assert module.logged, "the module's own log is back"
    return book.take()


def logged(*ranks: list[dict[str, Any]], own: int = 0) -> list[tuple[str, Any, dict[str, Any]]]:
    module = Module()
    flush(merge(list(ranks), own), module)  # type: ignore[arg-type]
    return module.logged


def test_a_mean_is_weighted_by_microbatch():
    assert logged(totals((1.0, 3), (5.0, 1))) == [("x", 2.0, {"batch_size": 4})]


def test_an_explicit_batch_size_wins():
    assert logged(totals((1.0, 3), (5.0, 1), batch_size=2)) == [("x", 3.0, {"batch_size": 4})]


def test_tensors_and_weights_may_be_tensors():
    ((_, value, options),) = logged(totals((torch.tensor(1.0), torch.tensor(3)), (torch.tensor([5.0]), 1)))
    assert (value, options) == (2.0, {"batch_size": 4})


@pytest.mark.parametrize(
    ("reduce_fx", "expected"), [("sum", 6.0), ("min", 1.0), (max, 5.0), (torch.sum, 6.0)]
)
def test_other_reductions(reduce_fx, expected):
    assert logged(totals((1.0, 3), (5.0, 1), reduce_fx=reduce_fx))[0][1] == expected


def test_an_unknown_reduction():
    with pytest.raises(ValueError, match="use 'mean', 'sum', 'min' or 'max'"):
        totals((1.0, 1), reduce_fx=torch.prod)


def test_synchronised_values_are_merged_over_ranks_and_others_stay():
    both = [totals((1.0, 3), sync_dist=True), [], totals((5.0, 1), sync_dist=True)]
    for own in range(3):
        assert logged(*both, own=own) == [("x", 2.0, {"batch_size": 4, "sync_dist": True})]
    apart = [totals((1.0, 3)), [], totals((5.0, 1))]
    assert [logged(*apart, own=own) for own in range(3)] == [
        [("x", 1.0, {"batch_size": 3})],
        [],
        [("x", 5.0, {"batch_size": 1})],
    ]


def test_merging_keeps_what_ranks_posted():
    first, second = totals((1.0, 3), sync_dist=True), totals((5.0, 1), sync_dist=True)
    assert logged(first, second) == logged(first, second, own=1)


@pytest.mark.parametrize(("reduction", "expected"), [("mean", 2.0), ("sum", 6.0), ("min", 1.0), ("max", 5.0)])
def test_a_neutral_total_changes_nothing(reduction, expected):
    some = totals((1.0, 3), (5.0, 1), reduce_fx=reduction, sync_dist=True)
    assert logged(some, [neutral(some[0])])[0][1] == expected


def test_a_metric_object_is_logged_at_once():
    book, module, metric = LogBook(), Module(), object()
    with book.recording(module):  # type: ignore[arg-type]
        module.log("acc", metric, on_epoch=True)
    assert module.logged == [("acc", metric, {"on_epoch": True})]


def test_the_modules_log_comes_back_after_an_error():
    book, module = LogBook(), Module()
    with pytest.raises(RuntimeError), book.recording(module):  # type: ignore[arg-type]
        raise RuntimeError
    assert "log" not in vars(module)
