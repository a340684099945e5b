"""Ranks that do not run the same program are told so at once, by what differs."""

from __future__ import annotations

import re
from datetime import timedelta
from typing import Any

import pytest
import torch

from lightning_odc import Minibatch
from tests.support.fits import doing, failure, fit
from tests.support.models import token_batches
from tests.support.modules import TokenModule
from tests.support.ranks import on_ranks, try_ranks

#: The ranks' own patience, longer than that of these tests.
TIMEOUT = timedelta(minutes=10)


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
    options, message = CASES[case] if rank == 1 else ({}, CASES[case][1])
    options = dict(options)
    module = options.pop("module", TokenModule)("items", lr=options.pop("lr", 0.1))
    text = failure(module, [Minibatch([b]) for b in token_batches([5, 9, 4])], timeout=TIMEOUT, **options)
    assert "DisagreementError" in text
    assert re.search(message, text), text


def is_one(own: Any) -> bool:
    return (own.global_step, own.global_rank) == (1, 1)


#: What rank 1 does after its first batch, by Lightning's own doors.
PARTS: dict[str, tuple[type[TokenModule], dict[str, Any]]] = {
    "steps once": (StepsOnce, {}),
    "skips the epoch": (TokenModule, {"on_train_batch_start": lambda own: -1 if is_one(own) else None}),
    "stops": (
        TokenModule,
        {"on_train_batch_end": lambda own: setattr(own.trainer, "should_stop", is_one(own))},
    ),
}


def _parts(rank: int, name: str) -> None:
    (make, hooks), batches = PARTS[name], token_batches([5, 9, 4])
    own = batches if make is StepsOnce else [Minibatch([batch]) for batch in batches]
    fit(doing(make("items"), **hooks), own, timeout=TIMEOUT)


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
COUNTS = r"'self.all_gather \(.* equally many microbatches\)' of meeting \d+, rank 1 at 'optimizer step'"


@pytest.mark.parametrize(
    ("lengths", "pads", "says"),
    [([[5], [9]], False, SIZES), ([[5, 5], [5]], False, COUNTS), ([[5], [9]], True, "")],
    ids=["sizes", "counts", "padded as the error says"],
)
def test_gathering_in_the_loss_needs_equal_sizes_and_counts(lengths, pads, says):
    outcomes = try_ranks(_gathers, lengths, pads, timeout=60)
    assert [outcome.exitcode for outcome in outcomes] == [int(bool(says))] * 2
    assert all(bool(says) == ("DisagreementError" in outcome.error) for outcome in outcomes)
    assert re.search(says, outcomes[0].error), outcomes[0].error
