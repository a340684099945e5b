"""When a rank raises, dies, disagrees or gets a signal, all stop within seconds, say why, and leave nothing behind."""

from __future__ import annotations

import os
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from lightning.pytorch.callbacks import OnExceptionCheckpoint
from lightning.pytorch.plugins.environments import SLURMEnvironment
from torch.distributed.tensor import distribute_tensor

from lightning_odc import Minibatch, host_memory
from lightning_odc.host_memory import Room
from lightning_odc.strategy import signals
from tests.support.fits import (
    LENGTHS,
    LR,
    Manual,
    Watch,
    assert_same,
    before_step,
    doing,
    failure,
    fit,
    one_process,
    shares,
    steps_of,
)
from tests.support.models import full_parameters
from tests.support.modules import TokenModule, loader, token_batches, trainer, unsized
from tests.support.out_of_memory import needs_reset
from tests.support.ranks import on_ranks, run_ranks, try_ranks
from tests.test_host_memory import count_kill, tree

#: Far below the strategy's own timeout of 30 minutes, far above what a busy machine needs.
SECONDS = 20


def batches(count: int = 4, lengths: Sequence[int] = (5, 9, 4)) -> list[Minibatch]:
    return [Minibatch(token_batches(lengths)) for _ in range(count)]


def acting(rank: int, act: Callable[[], Any], at: int = 4, who: int = 1) -> TokenModule:
    """Does something before its microbatch of that number, on one rank."""
    return before_step(TokenModule("items"), lambda own, _: rank == who and len(own.seen) == at and act())


def throw(error: BaseException) -> None:
    raise error


class SilentError(RuntimeError):
    """Fails to make its own text."""

    def __str__(self) -> str:
        raise KeyError("no text")


#: By name: an error, and what the others are told of it.
STRANGE = {
    "surrogate": (ValueError("the file \udcff is not text"), "the file \\udcff is not text"),
    "without a text": (SilentError(), "SilentError"),
    "very long": (ValueError("long " * 40_000 + "the end"), "the end"),
}


def _raises_strangely(rank: int, name: str) -> None:
    fit(acting(rank, partial(throw, STRANGE[name][0]), 0, who=2), batches(), 3)


@pytest.mark.parametrize("name", STRANGE)
def test_a_strange_error_is_told_and_the_rank_that_raised_it_is_named(name):
    outcomes = try_ranks(_raises_strangely, name, world_size=3, timeout=SECONDS)
    for rank, survivor in enumerate(outcomes[:2]):
        assert f"PeerFailedError: Rank 2 failed, so rank {rank} stops too" in survivor.error
        assert STRANGE[name][1] in survivor.error
    assert [outcome.exitcode for outcome in outcomes] == [1, 1, 1]


def _raises(rank: int, at: int, folder: str) -> None:
    callback = OnExceptionCheckpoint(folder, "last")
    module = acting(rank, partial(throw, ValueError("no such token")), at)
    fit(module, batches(), enable_checkpointing=True, callbacks=[callback])


@pytest.mark.parametrize("at", [2, 4], ids=["last microbatch", "second minibatch"])
def test_a_rank_that_raises_stops_the_others_with_its_error_and_callbacks_save(at, tmp_path):
    survivor, failed = try_ranks(_raises, at, str(tmp_path), timeout=SECONDS)
    assert "ValueError: no such token" in failed.error
    assert "PeerFailedError: Rank 1 failed, so rank 0 stops too. Its error was:" in survivor.error
    assert "ValueError: no such token" in survivor.error
    assert survivor.exitcode == failed.exitcode == 1
    saved = torch.load(tmp_path / "last.ckpt", weights_only=True)
    assert saved["global_step"] == (at == 4)
    expected = TokenModule().state_dict().keys()
    assert saved["state_dict"].keys() == expected


def _saves_alone(rank: int, path: Path) -> None:
    """As with strategies that do not shard, where it is right."""
    module = doing(TokenModule(), on_train_batch_end=lambda own: rank or own.trainer.save_checkpoint(path))
    fit(module, token_batches([5, 9, 4]), timeout=timedelta(seconds=4))


def test_a_rank_that_saves_alone_is_told_what_it_waits_for(tmp_path):
    saving, other = try_ranks(_saves_alone, tmp_path / "some.ckpt", timeout=2 * SECONDS)
    assert saving.exitcode == other.exitcode == 1
    # From Lightning 2.6 on, the other one waits in a broadcast of Lightning's; before, both hear of it at once.
    assert "Gave up after 4 s" in saving.error or "Rank 0 is at" in saving.error
    assert "trainer.save_checkpoint, which all ranks call together" in saving.error


def _saves_alone_afterwards(rank: int, path: Path) -> None:
    t = fit(TokenModule(), token_batches([5]), timeout=timedelta(seconds=20))
    if not t.is_global_zero:
        os._exit(0)
    t.save_checkpoint(path)


def test_a_rank_that_saves_alone_after_training_is_told_to_save_on_all(tmp_path):
    saving, _ = try_ranks(_saves_alone_afterwards, tmp_path / "some.ckpt", timeout=SECONDS)
    assert "PeerFailedError: Rank 0 saves a checkpoint, but another rank has ended" in saving.error


ENDINGS = {"interrupted": KeyboardInterrupt(), "exits well": SystemExit(0)}


def _ends(rank: int, ending: str) -> None:
    """In the middle of a minibatch, without an error of its own."""
    fit(acting(rank, partial(throw, ENDINGS[ending])), batches())


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_rank_that_is_interrupted_or_exits_stops_the_others(ending):
    survivor, ended = try_ranks(_ends, ending, timeout=SECONDS)
    name = type(ENDINGS[ending]).__name__
    assert "PeerFailedError: Rank 1 failed, so rank 0 stops too. Its error was:" in survivor.error
    assert name in survivor.error
    assert name in ended.error or "SystemExit: 1" in ended.error  # Lightning turns an interrupt into an exit
    assert survivor.exitcode == ended.exitcode == 1


def _interrupted(rank: int) -> None:
    """Rank 1 gets a Ctrl+C while it waits for rank 0, which sleeps."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    interrupt = threading.Timer(1, lambda: os.kill(os.getpid(), signal.SIGINT))
    if rank:
        act = interrupt.start
    else:
        act = partial(time.sleep, 3)
    fit(acting(rank, act, at=5, who=rank), batches())


def test_an_interrupt_ends_a_wait():
    sleeper, waiting = try_ranks(_interrupted, timeout=SECONDS)
    assert "PeerFailedError: Rank 1 failed, so rank 0 stops too" in sleeper.error
    for outcome in (sleeper, waiting):
        assert "waiting.py" in outcome.error.split("KeyboardInterrupt", 1)[0]
        assert outcome.exitcode == 1


def _dies(rank: int, folder: Path, is_counted: bool) -> None:
    """Rank 1 is killed, and may be counted before, as one that the kernel chose."""
    host_memory.ROOT = folder

    def die() -> None:
        if is_counted:
            (folder / "sys/fs/cgroup/job/memory.events").write_text("oom_kill 1\n")
        os.kill(os.getpid(), signal.SIGKILL)

    fit(acting(rank, die), batches())


@pytest.mark.parametrize("is_counted", [False, True])
def test_a_killed_rank_stops_the_others_which_say_whether_memory_ran_out(tmp_path, is_counted):
    tree(tmp_path, "0::/job", 2**20)
    for group in ("job", ""):
        count_kill(tmp_path / "sys/fs/cgroup" / group / "memory.events", 0)
    survivor, killed = try_ranks(_dies, tmp_path, is_counted, timeout=SECONDS)
    assert killed.exitcode == -signal.SIGKILL
    assert "PeerFailedError: rank 1 (process " in survivor.error
    found = survivor.error.split("ended without an error message (killed, out of memory, or crashed)")[1]
    assert "rank 1 (process " in found  # where everybody was
    words = "group /job: the kernel's out-of-memory killer has ended processes there"
    assert (words in found) == is_counted


@on_ranks(2)
@pytest.mark.parametrize("later", [False, True])
def test_windows_that_do_not_fit_are_told_to_every_rank(rank, later):
    """At once; or when more is trained in the second batch, and windows get larger."""
    nearly_full = patch.object(host_memory, "rooms", lambda: [Room(4096, "a test", "allow more")])

    def unfreeze(module: Any) -> None:
        if module.global_step == 1:
            stack.enter_context(nearly_full)
            module.net.requires_grad_(True)

    with ExitStack() as stack:
        if not later:
            stack.enter_context(nearly_full)
        module = doing(TokenModule("items", frozen=later), on_train_batch_start=unfreeze)
        told = failure(module, batches(2, [5]), communication="on_demand")
    assert "could not share memory with its peers: the windows (2 ranks of" in told
    if not later:
        assert f"WindowError: On {socket.gethostname()}: Rank 0 could" in told


@on_ranks(2)
def test_loaders_of_unknown_length_may_end_at_a_number_of_steps(rank):
    data = unsized(batches(2 + rank, [5]))
    assert fit(TokenModule("items"), data, max_steps=2, max_epochs=-1).global_step == 2


def fails_once(where: str) -> TokenModule:
    """Fails in its second training step, before or in the forward pass."""
    steps = []

    def fail(place: str) -> None:
        if place == where and len(steps) == 2:
            raise ValueError("once")

    def begin(own: Any, batch: torch.Tensor) -> None:
        steps.append(batch)
        own.log("length", float(batch.numel()), sync_dist=True, reduce_fx="sum")
        fail("before")

    module = before_step(TokenModule("items", lr=LR), begin)
    module.net.blocks[1].register_forward_pre_hook(lambda *_: fail("in"))
    return module


@needs_reset
@on_ranks(2)
@pytest.mark.parametrize("where", ["before", "in"])
def test_a_failed_run_leaves_nothing_to_the_next_one(rank, where, tmp_path):
    """The same trainer fits the same module again, from the parameters that it began with."""
    module = fails_once(where)
    t = trainer(2)
    start = full_parameters(TokenModule("items"))
    with pytest.raises(ValueError, match="once"):
        t.fit(module, loader(shares(rank, (3, 3))))
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.copy_(distribute_tensor(start[name], parameter.device_mesh, parameter.placements))

    def come_late(own: Any) -> None:
        if own.global_rank:
            time.sleep(0.5)
            (tmp_path / where).touch()

    doing(module, on_train_end=come_late)
    t.fit(module, loader(shares(rank, (3, 3))))
    assert (tmp_path / where).exists(), "rank 0 waits for rank 1 at the end of a run that did not fail"
    assert_same(full_parameters(module), one_process(TokenModule("items", lr=LR), steps_of()))
    assert t.callback_metrics["length"].item() == sum(LENGTHS[-1])


BATCHES = [Minibatch(token_batches([5, 9, 4], seed=seed)) for seed in range(4)]


def signalled(rank: int, number: int, sleep: float = 0.0) -> TokenModule:
    """Rank 1 gets a signal in the second microbatch of its second share; rank 0 may sleep there."""

    def act(own: Any, batch: Any) -> None:
        if len(own.seen) == 4 and rank == 1:
            os.kill(os.getpid(), number)
        elif len(own.seen) == 4:
            time.sleep(sleep)

    return before_step(TokenModule("items", lr=0.01), act)


def _requeued(rank: int, folder: str) -> Any:
    """In the environment that ``srun`` makes."""
    for name in ("RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RUN_ID"):
        del os.environ[name]
    numbers = {"NTASKS": 2, "NTASKS_PER_NODE": 2, "NNODES": 1, "NODEID": 0, "PROCID": rank, "LOCALID": rank}
    numbers |= {"JOB_ID": 7, "JOB_NAME": "train"}
    os.environ |= {f"SLURM_{name}": str(value) for name, value in numbers.items()}
    os.environ["PATH"] = f"{folder}:{os.environ['PATH']}"
    found = []
    for number in (signal.SIGUSR1, 0):
        module = signalled(rank, number)
        watch = Watch()
        # The second one goes on with the file of the first.
        t = fit(module, BATCHES, default_root_dir=folder, callbacks=[watch], deterministic=True)
        assert type(t.strategy.cluster_environment) is SLURMEnvironment
        assert t.global_rank == rank
        assert t.strategy.launcher is None
        assert watch.reads > 0
        found.append((len(module.seen), t.global_step))
        assert signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL
    return found


def test_a_requeue_signal_to_one_rank_writes_a_checkpoint_at_the_end_of_the_batch(tmp_path):
    scontrol = tmp_path / "scontrol"
    scontrol.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/requeued\n')
    scontrol.chmod(0o755)
    for first, second in run_ranks(_requeued, str(tmp_path)):
        assert first == (12, 4)  # the signal did not end the training
        assert second == (6, 4)  # it went on, with as many batches as were left
    assert (tmp_path / "requeued").read_text() == "requeue 7\n"
    checkpoint = torch.load(tmp_path / "hpc_ckpt_1.ckpt", weights_only=False)
    assert checkpoint["global_step"] == 2  # after the step in which the signal came


def _terminated(rank: int, communication: str) -> None:
    module = signalled(rank, signal.SIGTERM)
    try:
        fit(module, BATCHES, communication=communication)
    finally:
        assert module.trainer.global_step == 2
        assert len(module.seen) == 6
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


@pytest.mark.parametrize("communication", ["on_demand", "collective"])
def test_sigterm_to_one_rank_ends_all_after_the_same_batch(communication):
    for outcome in try_ranks(_terminated, communication, timeout=60):
        assert outcome.error.strip().endswith("SIGTERMException"), outcome.error


def _terminated_while_a_peer_hangs(rank: int) -> None:
    assert signals.PATIENCE < 10  # seconds within which every rank raises, whatever breaks
    signals.PATIENCE = 0.5
    begin = time.monotonic()
    try:
        fit(signalled(rank, signal.SIGTERM, sleep=4.0), BATCHES)
    finally:
        if rank > 0:
            assert time.monotonic() - begin < 4.0


def test_sigterm_does_not_wait_for_a_peer_that_hangs():
    peer, terminated = try_ranks(_terminated_while_a_peer_hangs, timeout=60)
    assert terminated.error.strip().endswith("SIGTERMException"), terminated.error
    assert "waiting.py" in terminated.error
    assert peer.exitcode == 1
    # Rank 1's, or its own: rank 1 had asked for the meeting before it raised.
    assert "SIGTERMException" in peer.error


def _own_handler(rank: int) -> list[int]:
    heard = []
    module = signalled(rank, signal.SIGUSR1)
    signal.signal(signal.SIGUSR1, lambda *_: heard.append(len(module.seen)))
    fit(module, BATCHES)
    return heard


def test_handlers_of_the_users_own_are_left_alone():
    assert run_ranks(_own_handler) == [[], [4]]


# -- ranks that do not run the same program --

#: The ranks' own patience, longer than that of these tests.
TIMEOUT = timedelta(minutes=10)


def step_once(own: Any, optimizer: Any, batch: torch.Tensor, i: int) -> None:
    """Manual optimization in two steps, of which rank 1 leaves out one."""
    for step in range(2):
        own.manual_backward(own.mean_loss(batch))
        if step == 0 or own.trainer.global_rank == 0:
            optimizer.step()
            optimizer.zero_grad()


#: What rank 1 does otherwise before the first step, and what both ranks are told.
CASES: dict[str, tuple[dict[str, Any], str]] = {
    "dtype": ({"precision": "bf16-true"}, r"net.embed.weight: shape \[11, 7\], torch.bfloat16"),
    "precision": ({"precision": "bf16-mixed"}, r"computed in torch.bfloat16"),
    "learning rate": ({"lr": 0.2}, r"where rank 1 has\s+optimizer 0: AdamW\(lr=0.2"),
    "accumulation": ({"accumulate_grad_batches": 3}, "accumulate_grad_batches=3"),
    "clipping": ({"gradient_clip_val": 1.0}, "gradient_clip_val=1.0"),
}


@on_ranks(2)
@pytest.mark.parametrize("case", CASES)
def test_it_is_named_before_the_first_step(rank, case):
    if rank == 1:
        options, message = CASES[case]
    else:
        options = {}
        message = CASES[case][1]
    options = dict(options)
    module = options.pop("module", TokenModule)("items", lr=options.pop("lr", 0.1))
    text = failure(module, [Minibatch([b]) for b in token_batches([5, 9, 4])], timeout=TIMEOUT, **options)
    assert "DisagreementError" in text
    assert re.search(message, text), text


def is_one(own: Any) -> bool:
    return (own.global_step, own.global_rank) == (1, 1)


#: What rank 1 does after its first batch, by Lightning's own doors.
PARTS: dict[str, tuple[Any, dict[str, Any]]] = {
    "steps once": (partial(Manual, act=step_once), {}),
    "skips the epoch": (TokenModule, {"on_train_batch_start": lambda own: -1 if is_one(own) else None}),
    "stops": (
        TokenModule,
        {"on_train_batch_end": lambda own: setattr(own.trainer, "should_stop", is_one(own))},
    ),
}
PARTS["stops and validates"] = PARTS["stops"]


def _parts(rank: int, name: str) -> None:
    make, hooks = PARTS[name]
    batches = token_batches([5, 9, 4])
    if name == "steps once":
        own = batches
    else:
        own = [Minibatch([batch]) for batch in batches]
    validation = None
    if name == "stops and validates":
        validation = token_batches([4])
    fit(doing(make("items"), **hooks), own, validation=validation, timeout=TIMEOUT)


# Who finds it out, and in which words, depends on where Lightning's versions make ranks wait.
@pytest.mark.parametrize("name", PARTS)
def test_ranks_that_part_in_mid_run_are_told(name):
    outcomes = try_ranks(_parts, name, timeout=90)
    assert [outcome.exitcode for outcome in outcomes] == [1, 1]
    texts = "".join(outcome.error for outcome in outcomes)
    assert re.search("DisagreementError: Rank [01] ", texts), texts


class Gathers(TokenModule):
    """Gathers embeddings in the loss: as they are, or as the error says."""

    def __init__(self, pads: bool) -> None:
        super().__init__()
        self.pads = pads

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
        x = self.net.embed(batch).flatten(0, 1)
        if not self.pads:
            return self.all_gather(x, sync_grads=True).mean()
        sizes = self.all_gather(len(x))
        padded = torch.nn.functional.pad(x, (0, 0) * (x.dim() - 1) + (0, int(sizes.max()) - len(x)))
        gathered = self.all_gather(padded, sync_grads=True)
        return torch.cat([part[:size] for part, size in zip(gathered, sizes, strict=True)]).square().mean()


def _gathers(rank: int, lengths: list[list[int]], pads: bool) -> None:
    fit(Gathers(pads), [Minibatch(token_batches(lengths[rank]))], timeout=TIMEOUT)


SIZES = r"by rank: \[5, 7\] of float32; \[9, 7\] of float32. Pad"
COUNTS = (
    r"'self.all_gather \(.* equally many microbatches\)' of synchronization \d+, rank 1 at 'optimizer step'"
)


@pytest.mark.parametrize(
    ("lengths", "pads", "says"),
    [([[5], [9]], False, SIZES), ([[5, 5], [5]], False, COUNTS), ([[5], [9]], True, "")],
    ids=["sizes", "counts", "padded as the error says"],
)
def test_gathering_in_the_loss_needs_equal_sizes_and_counts(lengths, pads, says):
    outcomes = try_ranks(_gathers, lengths, pads, timeout=60)
    assert [outcome.exitcode for outcome in outcomes] == [int(bool(says))] * 2
    for outcome in outcomes:
        assert bool(says) == ("DisagreementError" in outcome.error)
    assert re.search(says, outcomes[0].error), outcomes[0].error
