"""Ranks that do not run the same program are told so at once, by what differs."""

from __future__ import annotations

import importlib
import re
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_odc import Minibatch
from tests.support.modules import TokenModule, loader, token_batches, trainer
from tests.support.ranks import try_ranks

#: The ranks' own patience, longer than that of these tests.
TIMEOUT = timedelta(minutes=10)


class OtherCode(TokenModule):
    """The same model, another loss."""

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
        output = super().training_step(batch, batch_idx)
        return {**output, "loss": 2 * output["loss"]}


class StopsEarly(TokenModule):
    """One rank leaves the loop without an error after its first batch."""

    who = 1

    def on_train_batch_end(self, *_: Any) -> None:
        self.trainer.should_stop = self.trainer.global_rank == self.who


class StepsOnce(TokenModule):
    """Manual optimization; rank 1 leaves out a step."""

    def __init__(self, returns: str) -> None:
        super().__init__(returns)
        self.automatic_optimization = False

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        optimizer = self.optimizers()
        for step in range(2):
            output = super().training_step(batch, batch_idx)
            self.manual_backward(output["loss"])
            if step == 0 or self.trainer.global_rank == 0:
                optimizer.step()
                optimizer.zero_grad()


class LeavesTheEpoch(TokenModule):
    """Skips the rest of the epoch, by Lightning's own door."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if batch_idx == 1 and self.trainer.global_rank == 1 else None


def _fit(rank: int, case: str) -> None:
    module_class, options, lr = CASES[case][:3]
    different = rank == 1 or module_class in (StopsEarly, StepsOnce, LeavesTheEpoch)
    module = (module_class if different else TokenModule)("items")
    module.lr = lr if rank == 1 else 0.1
    fit = trainer(2, timeout=TIMEOUT, **(options if rank == 1 else {}))
    batches = token_batches([5, 9, 4])
    manual = module_class is StepsOnce
    fit.fit(module, loader(batches if manual else [Minibatch([batch]) for batch in batches]))


CASES: dict[str, tuple[type[TokenModule], dict[str, Any], float, str]] = {
    "code": (
        OtherCode,
        {},
        0.1,
        r"where rank 1 has\s+class tests.strategy.test_disagreement.OtherCode in a file with digest",
    ),
    "dtype": (
        TokenModule,
        {"precision": "bf16-true"},
        0.1,
        r"net.embed.weight: shape \[11, 7\], torch.bfloat16",
    ),
    "precision": (TokenModule, {"precision": "bf16-mixed"}, 0.1, r"computed in torch.bfloat16"),
    "learning rate": (TokenModule, {}, 0.2, r"where rank 1 has\s+optimizer 0: AdamW\(lr=0.2"),
    "accumulation": (TokenModule, {"accumulate_grad_batches": 3}, 0.1, "accumulate_grad_batches=3"),
    "clipping": (TokenModule, {"gradient_clip_val": 1.0}, 0.1, "gradient_clip_val=1.0"),
    # Who finds it out, and in which words, depends on where Lightning's versions make ranks wait.
    "optimizer steps": (StepsOnce, {}, 0.1, "DisagreementError: Rank [01] "),
    "skips the epoch": (LeavesTheEpoch, {}, 0.1, "DisagreementError: Rank [01] "),
}


@pytest.mark.parametrize("case", CASES)
def test_it_is_named_at_once(case):
    outcomes = try_ranks(_fit, case, timeout=90)
    for outcome in outcomes:
        assert outcome.exitcode == 1, case
    texts = "".join(outcome.error for outcome in outcomes)
    assert "DisagreementError" in texts
    assert re.search(CASES[case][3], texts), texts


OF_TWO_FILES = """
from tests.support.modules import TokenModule

class Edited(TokenModule):
    factor = {factor}
"""


def _fits_another_file(rank: int, folder: Path) -> None:
    file = folder / str(rank) / "edited.py"
    file.parent.mkdir()
    file.write_text(OF_TWO_FILES.format(factor=rank))
    sys.path.insert(0, str(file.parent))
    edited = importlib.import_module("edited")
    trainer(2, timeout=TIMEOUT).fit(edited.Edited("items"), loader([Minibatch(token_batches([5]))]))


def test_another_version_of_the_same_class_is_named(tmp_path):
    for outcome in try_ranks(_fits_another_file, tmp_path, timeout=90):
        assert outcome.exitcode == 1
        first, second = re.findall(r"class edited.Edited in a file with digest ([0-9a-f]{12})", outcome.error)
        assert first != second


def _stops(rank: int, who: int) -> int:
    module = StopsEarly("items")
    module.who = who
    fit = trainer(2, timeout=TIMEOUT)
    fit.fit(module, loader([Minibatch([batch]) for batch in token_batches([5, 9, 4])]))
    return int(fit.global_step)


@pytest.mark.parametrize("who", [0, 1])
def test_a_rank_that_leaves_the_loop_is_told_by_all(who):
    """``trainer.should_stop``, Lightning's way to ``break``."""
    outcomes = try_ranks(_stops, who, timeout=90)
    assert [outcome.exitcode for outcome in outcomes] == [1, 1]
    texts = "".join(outcome.error for outcome in outcomes)
    assert re.search("DisagreementError: Rank [01] (is at|has ended)", texts), texts


class Gathers(TokenModule):
    """Gathers embeddings in the loss: as they are, or as the error says."""

    pads = False

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
        x = self.net.embed(batch).flatten(0, 1)
        if not self.pads:
            return self.all_gather(x, sync_grads=True).mean()
        sizes = self.all_gather(len(x))
        padded = torch.nn.functional.pad(x, (0, 0) * (x.dim() - 1) + (0, int(sizes.max()) - len(x)))
        parts = [
            part[:size] for part, size in zip(self.all_gather(padded, sync_grads=True), sizes, strict=True)
        ]
        return torch.cat(parts).square().mean()


def _gathers(rank: int, lengths: list[list[int]], pads: bool = False) -> None:
    module = Gathers()
    module.pads = pads
    trainer(2, timeout=TIMEOUT).fit(module, loader([Minibatch(token_batches(lengths[rank]))]))


@pytest.mark.parametrize(
    ("lengths", "says"),
    [
        ([[5], [9]], r"by rank: \[5, 7\] of float32; \[9, 7\] of float32. Pad"),
        (
            [[5, 5], [5]],
            r"'self.all_gather \(.* equally many microbatches\)' of meeting \d+, rank 1 at 'optimizer step'",
        ),
    ],
    ids=["sizes", "counts"],
)
def test_gathering_in_the_loss_needs_equal_sizes_and_counts(lengths, says):
    texts = [outcome.error for outcome in try_ranks(_gathers, lengths, timeout=60)]
    assert all("DisagreementError" in text for text in texts), texts
    assert re.search(says, texts[0]), texts


def test_padding_before_gathering_is_as_the_error_says():
    assert [outcome.exitcode for outcome in try_ranks(_gathers, [[5], [9]], True, timeout=60)] == [0, 0]
