"""``communication="auto"``: on demand where windows are had and proven, else balanced collectives, on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_odc import BalancedDataLoader, ODCStrategy, host_memory
from lightning_odc.engine.collective import CollectiveEngine
from lightning_odc.errors import WindowError
from lightning_odc.protocol.transports.shared_memory import SharedMemoryTransport
from lightning_odc.strategy.setup import attaching
from tests.strategy.test_balance import SAMPLES, Padded, pad, plain, reference
from tests.support import groups
from tests.support.fits import are_equal, assert_same, failure, fit
from tests.support.models import full_parameters
from tests.support.modules import TokenModule, said, token_batches, trainer, warned
from tests.support.ranks import of_all_ranks, on_ranks
from tests.support.tiers import fast


@contextmanager
def no_room(rank: int) -> Iterator[None]:
    """Rank 1 has no memory left for windows."""
    plain_answer = host_memory.shortage

    def shortage(what: str, size: int, advice: str) -> str:
        if rank == 1 and what.startswith("the windows"):
            return f"{what} do not fit: {advice}."
        return plain_answer(what, size, advice)

    with patch.object(host_memory, "shortage", shortage):
        yield


@contextmanager
def wrong_byte(rank: int) -> Iterator[None]:
    """Rank 1 reads a bit wrongly."""
    plain_read = SharedMemoryTransport.read

    def read(self: Any, shards: Sequence[Tensor], out: Tensor) -> None:
        plain_read(self, shards, out)
        if rank == 1:
            out.view(torch.uint8)[3:4].bitwise_xor_(1)

    with patch.object(SharedMemoryTransport, "read", read):
        yield


@contextmanager
def other_device(rank: int) -> Iterator[None]:
    """Devices of another kind, which are refused before the model is sharded."""
    with patch.object(attaching, "check_device", side_effect=WindowError("not between mps devices")):
        yield


#: Lengths that are worth balancing.
UNEVEN = {
    "dataset": [
        SAMPLES[size % 20].repeat(size) for size in (40, 2, 3, 2, 5, 2, 38, 3, 2, 35, 2, 2, 3, 2, 2, 3)
    ]
}
Refusal = Callable[[int], Any]
REFUSED: dict[str, tuple[Refusal, str]] = {
    "memory": (no_room, "Rank 1 could not share memory with its peers: the windows (2 ranks of"),
    "proof": (wrong_byte, "What ranks read and add came out wrongly. rank 1 (process "),
    "device": (other_device, "not between mps devices"),
}


class Watched(Padded):
    """Remembers what ran."""

    def on_train_start(self) -> None:
        self.engine = self.trainer.strategy.engine
        self.shown = repr(self.trainer.strategy)


@on_ranks(2)
@pytest.mark.parametrize("case", fast(REFUSED, "memory", "device"))
@pytest.mark.parametrize("precision", fast(["32-true", "bf16-mixed"], "32-true"))
def test_what_cannot_run_on_demand_trains_by_balanced_collectives_bit_for_bit(
    rank, case, precision, tmp_path
):
    refuses, says = REFUSED[case]
    expected = Watched()
    fit(expected, plain(**UNEVEN), balance="auto", communication="collective", precision=precision)

    module = Watched()
    logger = CSVLogger(tmp_path, version=0)
    with refuses(rank), warned() as messages, said() as text:
        t = fit(module, plain(**UNEVEN), balance="auto", precision=precision, logger=logger)
    assert isinstance(module.engine, CollectiveEngine)
    assert of_all_ranks(module.sizes) == of_all_ranks(expected.sizes), "another plan"
    assert are_equal(full_parameters(module), full_parameters(expected))
    # Said once, by rank 0, with what refused and what to do; and everywhere else what runs.
    told = [message for message in messages if "trains with collectives" in message]
    assert len(told) == (rank == 0)
    for message in told:
        assert says in message
        assert 'communication="on_demand") makes this an error' in message
    assert t.strategy.communication == "collective"
    assert module.shown == "ODCStrategy(communication='collective') for lightning.pytorch.Trainer"
    if rank == 0:
        assert 'policy "lb_micro"' in text.getvalue(), text.getvalue()
        assert 'communication="collective".' in text.getvalue()
        assert (
            "odc_communication: collective"
            in (tmp_path / "lightning_logs/version_0/hparams.yaml").read_text()
        )


@on_ranks(2)
@pytest.mark.parametrize("case", REFUSED)
def test_who_insists_gets_an_error_on_every_rank(rank, case):
    refuses, says = REFUSED[case]
    with refuses(rank), warned() as messages:
        text = failure(TokenModule(), token_batches([5]), communication="on_demand")
    assert says in text
    assert not [message for message in messages if "collectives" in message]


@on_ranks(2)
def test_the_next_fit_decides_anew_and_on_demand_is_said_too(rank, tmp_path):
    strategy = ODCStrategy(balance=None, sharding_strategy="FULL_SHARD")
    assert repr(strategy) == "ODCStrategy(communication='auto') for lightning.pytorch.Trainer"
    module = TokenModule()
    t = trainer(2, strategy=strategy, max_epochs=1)
    with no_room(rank), warned():
        t.fit(module, DataLoader(token_batches([5, 4]), batch_size=None))
    assert strategy.communication == "collective"
    t.fit_loop.max_epochs = 2
    t.fit(module, DataLoader(token_batches([5, 4]), batch_size=None))
    assert strategy.communication == "on_demand"
    assert "communication='on_demand'" in repr(strategy)


@on_ranks(2)
def test_policies_with_unequal_counts_become_one_with_equal_ones(rank):
    for data, options in (
        (plain(), {"balance": "lb_mini"}),
        (plain(), {"balance": "steal", "cost": "auto"}),
        (BalancedDataLoader(SAMPLES, minibatch_size=4, balance="lb_mini", collate_fn=pad), {}),
    ):
        module = Padded(counted=True)
        with no_room(rank), warned():
            fit(module, data, **options)
        counts = of_all_ranks(len(module.sizes))
        assert counts[0] == counts[1] > 0
        assert_same(full_parameters(module), reference(2))


@pytest.mark.slow
@on_ranks(4)
def test_tensor_parallel_groups_decide_alike_where_the_windows_of_some_ranks_are_refused(rank):
    module = groups.Module()
    with no_room(rank), warned() as messages:
        t = groups.run(module, 4, balance="lb_mini")
    assert of_all_ranks(t.strategy.communication) == ["collective"] * 4
    assert len([message for message in messages if "trains with collectives" in message]) == (rank == 0)
    assert_same(full_parameters(module), groups.reference(), groups.CLOSE)
