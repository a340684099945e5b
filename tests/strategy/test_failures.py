"""When a rank raises, dies or disagrees, the others stop within seconds, say why, and leave nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import OnExceptionCheckpoint
from torch.utils.data import DataLoader, Dataset, IterableDataset

from lightning_odc import Minibatch, host_memory
from lightning_odc.host_memory import Room
from tests.support.models import WIDTH
from tests.support.modules import TokenModule, loader, token_batches, trainer
from tests.support.ranks import Outcome, run_ranks, try_ranks
from tests.test_host_memory import V2_MOUNT, count_kill, tree

#: Far below the strategy's own timeout of 30 minutes, far above what a busy machine needs.
SECONDS = 20


def fit(rank: int, module: TokenModule, batches: list[Any], **options: Any) -> Trainer:
    t = trainer(2, **options)
    t.fit(module, loader(batches))
    return t


class Raises(TokenModule):
    def __init__(self, rank: int, at: int) -> None:
        super().__init__("items")
        self.failing, self.at = rank == 1, at

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
        if self.failing and len(self.seen) == self.at:
            raise ValueError("no such token")
        return super().training_step(batch, batch_idx)


def _raises(rank: int, at: int) -> None:
    fit(rank, Raises(rank, at), [Minibatch(token_batches([5, 9, 4])) for _ in range(4)])


@pytest.mark.parametrize("at", [0, 2, 4], ids=["first microbatch", "last microbatch", "second minibatch"])
def test_a_rank_that_raises_stops_the_others_with_its_error(at):
    survivor, failed = try_ranks(_raises, at, timeout=SECONDS)
    assert "ValueError: no such token" in failed.error
    assert "PeerFailedError: Rank 1 failed, so rank 0 stops too. Its error was:" in survivor.error
    assert "ValueError: no such token" in survivor.error
    assert survivor.exitcode == failed.exitcode == 1


def _raises_and_saves(rank: int, directory: str) -> None:
    options = {"enable_checkpointing": True, "callbacks": [OnExceptionCheckpoint(directory, "last")]}
    fit(rank, Raises(rank, 4), [Minibatch(token_batches([5, 9, 4])) for _ in range(4)], **options)


def test_callbacks_that_save_when_a_rank_has_failed(tmp_path):
    survivor, failed = try_ranks(_raises_and_saves, str(tmp_path), timeout=SECONDS)
    assert "ValueError: no such token" in failed.error
    assert "PeerFailedError: Rank 1 failed, so rank 0 stops too." in survivor.error
    saved = torch.load(tmp_path / "last.ckpt", weights_only=True)
    assert saved["global_step"] == 1
    assert saved["state_dict"].keys() == TokenModule().state_dict().keys()


class SavesAlone(TokenModule):
    """As with strategies that do not shard, where it is right."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path

    def on_train_batch_end(self, *_: Any) -> None:
        if self.trainer.is_global_zero:
            self.trainer.save_checkpoint(self.path)


def _saves_alone(rank: int, path: Path) -> None:
    fit(rank, SavesAlone(path), token_batches([5, 9, 4]), timeout=timedelta(seconds=4))


def test_a_rank_that_saves_alone_is_told_what_it_waits_for(tmp_path):
    saving, other = try_ranks(_saves_alone, tmp_path / "some.ckpt", timeout=2 * SECONDS)
    assert saving.exitcode == other.exitcode == 1
    # From Lightning 2.6 on, the other one waits in a broadcast of Lightning's; before, both hear of it at once.
    assert "Gave up after 4 s" in saving.error or "Rank 0 is at" in saving.error
    assert "trainer.save_checkpoint, which all ranks call together" in saving.error


def _saves_alone_afterwards(rank: int, path: Path) -> None:
    t = fit(rank, TokenModule(), token_batches([5]), timeout=timedelta(seconds=20))
    if not t.is_global_zero:
        os._exit(0)
    t.save_checkpoint(path)


def test_a_rank_that_saves_alone_after_training_is_told_to_save_on_all(tmp_path):
    saving, _ = try_ranks(_saves_alone_afterwards, tmp_path / "some.ckpt", timeout=SECONDS)
    assert "PeerFailedError: Rank 0 saves a checkpoint, but another rank has ended" in saving.error


ENDINGS = {"interrupted": KeyboardInterrupt(), "exits": SystemExit(3), "exits well": SystemExit(0)}


class Ends(TokenModule):
    """Rank 1 ends in the middle of a minibatch without an error of its own."""

    def __init__(self, rank: int, ending: str) -> None:
        super().__init__("items")
        self.ending = ENDINGS[ending] if rank == 1 else None

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
        if self.ending is not None and len(self.seen) == 4:
            raise self.ending
        return super().training_step(batch, batch_idx)


def _ends(rank: int, ending: str) -> None:
    fit(rank, Ends(rank, ending), [Minibatch(token_batches([5, 9, 4])) for _ in range(4)])


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_rank_that_is_interrupted_or_exits_stops_the_others(ending):
    survivor, ended = try_ranks(_ends, ending, timeout=SECONDS)
    name = type(ENDINGS[ending]).__name__
    assert "PeerFailedError: Rank 1 failed, so rank 0 stops too. Its error was:" in survivor.error
    assert name in survivor.error
    assert name in ended.error or "SystemExit: 1" in ended.error  # Lightning turns an interrupt into an exit
    assert survivor.exitcode == ended.exitcode == 1


class Interrupted(TokenModule):
    """Rank 1 gets a Ctrl+C while it waits for rank 0, which sleeps."""

    def __init__(self, rank: int) -> None:
        super().__init__("items")
        self.rank = rank

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
        if len(self.seen) == 5:
            if self.rank == 0:
                time.sleep(3)
            else:
                threading.Timer(1, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
        return super().training_step(batch, batch_idx)


def _interrupted(rank: int) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    fit(rank, Interrupted(rank), [Minibatch(token_batches([5, 9, 4])) for _ in range(4)])


def test_an_interrupt_ends_a_wait():
    sleeper, waiting = try_ranks(_interrupted, timeout=SECONDS)
    assert "PeerFailedError: Rank 1 failed, so rank 0 stops too" in sleeper.error
    for outcome in (sleeper, waiting):
        assert "waiting.py" in outcome.error.split("KeyboardInterrupt", 1)[0]
        assert outcome.exitcode == 1


def _both_interrupted(rank: int) -> None:
    fit(rank, Ends(1, "interrupted"), [Minibatch(token_batches([5, 9, 4])) for _ in range(4)])


def test_all_ranks_may_be_interrupted_at_once():
    for outcome in try_ranks(_both_interrupted, timeout=SECONDS):
        assert "KeyboardInterrupt" in outcome.error
        assert outcome.exitcode == 1


class Dies(TokenModule):
    def __init__(self, rank: int) -> None:
        super().__init__("items")
        self.dying = rank == 1
        self.before_death: Callable[[], Any] = lambda: None

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
        if self.dying and len(self.seen) == 4:
            self.before_death()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().training_step(batch, batch_idx)


def _dies(rank: int) -> None:
    fit(rank, Dies(rank), [Minibatch(token_batches([5, 9, 4])) for _ in range(4)])


def _killed_by_the_kernel(rank: int, folder: Path, group: str) -> None:
    """Rank 1 ends as one does that the kernel chose: it is counted, and gets SIGKILL."""
    host_memory.ROOT = folder
    module = Dies(rank)
    if rank == 1:
        own = folder / "sys/fs/cgroup" / group / "memory.events"
        module.before_death = lambda: own.write_text("oom_kill 1\n")  # type: ignore[assignment]
    fit(rank, module, [Minibatch(token_batches([5, 9, 4])) for _ in range(4)])


@pytest.mark.parametrize(
    ("group", "verdict"),
    [("job", "control group /job since this run began: it ran out"), ("", "it probably ran out")],
)
def test_a_rank_that_the_kernel_ended_for_want_of_memory_is_named_as_such(tmp_path, group, verdict):
    tree(tmp_path, "0::/job", [V2_MOUNT.format(top="/")], available_kib=2**20)
    for folder in ("job", ""):
        count_kill(tmp_path / "sys/fs/cgroup" / folder / "memory.events", 0)
    survivor, killed = try_ranks(_killed_by_the_kernel, tmp_path, group, timeout=SECONDS)
    assert killed.exitcode == -signal.SIGKILL
    assert "PeerFailedError: rank 1 (process " in survivor.error
    found = survivor.error.split("ended without a word (killed, out of memory, or crashed).")[1]
    assert "The kernel's out-of-memory killer has ended 1 process of " in found
    assert verdict in found


def test_a_killed_rank_stops_the_others():
    survivor, killed = try_ranks(_dies, timeout=SECONDS)
    assert killed.exitcode == -signal.SIGKILL
    assert "PeerFailedError: rank 1 (process " in survivor.error
    assert "ended without a word (killed, out of memory, or crashed)" in survivor.error
    assert "rank 1 (process " in survivor.error.rsplit("ended without a word", 1)[1]  # where everybody was
    assert "out-of-memory killer" not in survivor.error


class Stalls(TokenModule):
    def __init__(self, rank: int) -> None:
        super().__init__("items")
        self.stalling = rank == 1

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
        if self.stalling:
            time.sleep(4)
        return super().training_step(batch, batch_idx)


def _stalls(rank: int) -> None:
    fit(rank, Stalls(rank), [Minibatch(token_batches([5]))], timeout=timedelta(seconds=2))


def test_a_stalled_rank_is_given_up_at_the_timeout():
    waiting, stalled = try_ranks(_stalls, timeout=60)
    assert "WaitTimeoutError: Gave up after 2 s of waiting for rank 1" in waiting.error
    assert "rank 1 (process " in waiting.error
    assert "microbatch 1, computing" in waiting.error
    assert "PeerFailedError: Rank 0 failed" in stalled.error or "WaitTimeoutError" in stalled.error


def errors(function: Any, *args: Any, world_size: int = 2) -> list[str]:
    outcomes: list[Outcome] = try_ranks(function, *args, world_size=world_size, timeout=60)
    assert all(outcome.exitcode == 1 for outcome in outcomes)
    return [outcome.error for outcome in outcomes]


class RunsInBetween(TokenModule):
    """Runs a block after the gradients were summed and before the optimizer steps."""

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        with torch.no_grad():
            self.net.blocks[0](torch.ones(3, WIDTH))


class Twice(torch.optim.SGD):
    """Calls its closure again after a step of its own, as LBFGS does."""

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        return super().step(closure)


class StepsTwice(TokenModule):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return Twice(self.parameters(), lr=0.1)


def _runs_too_late(rank: int, module: type[TokenModule]) -> None:
    fit(rank, module("items"), [Minibatch(token_batches([5])) for _ in range(2)])


@pytest.mark.parametrize("module", [RunsInBetween, StepsTwice])
def test_a_model_that_runs_while_peers_change_their_shards(module):
    found = errors(_runs_too_late, module)
    assert "StaleShardError: The model ran (unit" in found[0] + found[1]
    for message in found:
        assert "`on_before_optimizer_step`" in message
        assert "call their closure several times in one step (LBFGS) cannot work on demand" in message


def _different_models(rank: int) -> None:
    fit(rank, TokenModule("items", vocab=11 + rank), [Minibatch(token_batches([5]))])


def test_different_models_are_found_at_setup():
    for message in errors(_different_models):
        assert "DisagreementError: The ranks built different models. The first difference" in message
        assert "net.embed.weight: shape [11, 7]" in message
        assert "net.embed.weight: shape [12, 7]" in message


def _different_plans(rank: int) -> None:
    fit(rank, TokenModule("items"), [Minibatch(token_batches([5]), plan=f"seed {rank}")])


def test_different_plans_are_found_at_the_first_minibatch():
    for message in errors(_different_plans):
        assert (
            "Rank 1 follows a different minibatch plan from rank 0: ['seed 1'] against ['seed 0']" in message
        )


def _different_kinds(rank: int) -> None:
    batches = token_batches([5])
    fit(rank, TokenModule(), [Minibatch(batches)] if rank else batches)


def test_a_minibatch_here_and_a_plain_batch_there():
    for message in errors(_different_kinds):
        assert "Rank 0 trained on plain batches, rank 1 on Minibatches" in message


def _collective_kinds(rank: int) -> None:
    batches = token_batches([5])
    fit(rank, TokenModule(), [Minibatch(batches)] if rank else batches, communication="collective")


def test_a_minibatch_here_and_a_plain_batch_there_under_collectives():
    for message in errors(_collective_kinds):
        assert (
            "DisagreementError: The ranks begin their first batch with ['plain batch', 'Minibatch']"
            in message
        )


class Endless(IterableDataset[Any]):
    """A data set that does not say how many batches it has."""

    def __init__(self, batches: list[Any]) -> None:
        self.batches = batches

    def __iter__(self) -> Any:
        return iter(self.batches)


def _unknown_lengths(rank: int, counts: tuple[int, int], options: dict[str, Any]) -> int:
    data = DataLoader(Endless([Minibatch(token_batches([5])) for _ in range(counts[rank])]), batch_size=None)
    t = trainer(2, **options)
    t.fit(TokenModule("items"), data)
    return t.global_step


@pytest.mark.parametrize("counts", [(2, 3), (3, 2)], ids=str)
def test_loaders_of_unknown_length_that_end_at_different_times(counts):
    short = counts.index(2)
    for message in errors(_unknown_lengths, counts, {}):
        assert f"Rank {short} has no more batches in this epoch, rank {1 - short} has." in message
    assert run_ranks(_unknown_lengths, counts, {"max_steps": 2, "max_epochs": -1}) == [2, 2]


class Shares(Dataset[Any]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Minibatch:
        return Minibatch(token_batches([5]))


def _dealt_out_again(rank: int, options: dict[str, Any]) -> None:
    trainer(2, **options).fit(TokenModule("items"), DataLoader(Shares(), batch_size=None))


def test_shares_that_lightning_would_deal_out_again():
    for message in errors(_dealt_out_again, {"use_distributed_sampler": True}):
        assert "Write Trainer(use_distributed_sampler=False)" in message
    run_ranks(_dealt_out_again, {})


def _different_steps(rank: int) -> None:
    fit(rank, TokenModule("items"), [Minibatch(token_batches([5])) for _ in range(2 + rank)])


def test_different_numbers_of_steps_are_found_before_the_first():
    for message in errors(_different_steps):
        assert "DisagreementError: The ranks have [2, 3] training batches per epoch (by rank)." in message


def _uneven(rank: int, communication: str) -> None:
    batches = token_batches([5, 9, 4])
    fit(rank, TokenModule("items"), [Minibatch(batches[: 2 + rank])], communication=communication)


@pytest.mark.parametrize("communication", ["collective", "lockstep"])
def test_unequal_counts_are_refused_where_ranks_wait_at_every_unit(communication):
    for message in errors(_uneven, communication):
        assert f'ValueError: communication="{communication}"' in message
        assert "this minibatch has [2, 3] (by rank)" in message
        assert 'ODCStrategy(communication="on_demand")' in message


def _no_memory(rank: int) -> None:
    host_memory.rooms = lambda: [Room(4096, "a test", "allow more")]  # type: ignore[assignment]
    fit(rank, TokenModule("items"), [Minibatch(token_batches([5]))])


def test_windows_that_do_not_fit_in_memory():
    for message in errors(_no_memory):
        assert "WindowError: Rank 0 could not share memory with its peers: the windows (2 ranks of" in message


class Unfreezes(TokenModule):
    """Needs a larger window in its second batch, for which there is no memory."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            host_memory.rooms = lambda: [Room(4096, "a test", "allow more")]  # type: ignore[assignment]
            self.net.requires_grad_(True)


def _no_memory_later(rank: int) -> None:
    module = Unfreezes("items", frozen=True)
    fit(rank, module, [Minibatch(token_batches([5])) for _ in range(2)])


def test_a_larger_window_that_does_not_fit_in_memory():
    for message in errors(_no_memory_later):
        assert "could not share memory with its peers: the windows (2 ranks of" in message.splitlines()[-1]


SCRIPT = """
import sys
import torch
from tests.strategy.test_failures import Raises
from tests.support.modules import loader, token_batches, trainer
from lightning_odc import Minibatch

if __name__ == "__main__":
    t = trainer(2)
    t.fit(Raises(t.global_rank, 4), loader([Minibatch(token_batches([5, 9, 4])) for _ in range(4)]))
"""


def test_lightnings_own_launcher_ends_and_leaves_no_process(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    root = Path(__file__).parents[2]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    environment["PYTHONPATH"] = str(root)
    run = subprocess.run(
        [sys.executable, str(script)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert run.returncode != 0
    assert "ValueError: no such token" in run.stderr
    assert not [line for line in _command_lines() if str(script) in line]


def _command_lines() -> list[str]:
    lines = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            lines.append(path.read_bytes().replace(b"\0", b" ").decode(errors="replace"))
        except OSError:
            continue
    return lines


# -- afterwards -------------------------------------------------------------------------------------------


class LogsAndRaises(TokenModule):
    def __init__(self, at: int) -> None:
        super().__init__("items")
        self.at = at

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
        self.log("length", float(batch.numel()), sync_dist=True, reduce_fx="sum")
        if len(self.seen) == self.at:
            raise ValueError("no such token")
        return super().training_step(batch, batch_idx)


def _fits_again(rank: int) -> list[Any]:
    """The first fit fails in the second microbatch, after both ranks have logged; the second has one minibatch."""
    t = trainer(2)
    with pytest.raises(ValueError, match="no such token"):
        t.fit(LogsAndRaises(1), loader([Minibatch(token_batches([100, 200, 300]))]))
    module, late = LogsAndRaises(-1), Late(rank)
    t.callbacks.append(late)  # type: ignore[attr-defined]
    t.fit(module, loader([Minibatch(token_batches([5, 9]))]))
    waited = time.monotonic() - late.ended > 0.3
    return [module.seen, t.callback_metrics["length"].item(), waited]


class Late(Callback):
    """Rank 1 comes half a second late to the end."""

    def __init__(self, rank: int) -> None:
        self.rank, self.ended = rank, 0.0

    def on_train_end(self, *_: Any) -> None:
        self.ended = time.monotonic()
        time.sleep(self.rank / 2)


def test_a_failed_run_leaves_nothing_to_the_next_one():
    # Rank 0 waits for rank 1 at the end of a run that did not fail.
    assert run_ranks(_fits_again) == [[[5, 9], 28.0, True]] * 2
