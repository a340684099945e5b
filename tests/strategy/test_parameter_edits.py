"""Parameters changed outside the optimizer step: all ranks read the new value, or the change is refused.

The reference is ``communication="collective"`` on the same batches: all units are gathered anew from the shards there,
so an edit counts at once. Both sum two ranks' fp32 gradients, and a sum of two numbers has no order, so parameters
are equal bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Trainer, callbacks
from torch import Tensor, nn

from lightning_odc import ODCStrategy
from tests.support.modules import TokenModule, full_parameters, loader, token_batches, trainer
from tests.support.ranks import run_ranks

#: Hooks after which Lightning or the strategy comes by anyway.
SEEN = {
    "on_train_start",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_validation_start",
    "on_validation_epoch_end",
    "on_validation_end",
}
#: Hooks after which `publish_parameters()` must be called; without, the edit is refused.
PUBLISHED = {
    "on_train_epoch_start",
    "on_train_batch_start",
    "on_train_batch_end",
    "on_train_epoch_end",
    "on_validation_epoch_start",
}
#: Places in the middle of a step, or of an evaluation.
REFUSED = {"on_before_zero_grad", "end of training_step", "on_validation_batch_end"}


def halve(module: TokenModule) -> None:
    for parameter in module.parameters():
        parameter.data.mul_(0.5)


class Edits(TokenModule):
    """Calls ``edit`` once, in the second step or later, in the hook named ``place``."""

    def __init__(self, place: str, edit: Callable[[TokenModule], None], publish: bool = False) -> None:
        super().__init__()
        self.place, self.edit, self.publish = place, edit, publish
        self.edited = False
        if place.startswith("on_"):
            setattr(self, place, lambda *_: self.edit_once())

    def edit_once(self) -> None:
        is_early = self.global_step == 0 and self.place not in ("on_train_start", "on_train_epoch_start")
        if self.edited or is_early or self.trainer.sanity_checking:
            return
        self.edited = True
        with torch.no_grad():
            self.edit(self)
        if self.publish:
            self.trainer.strategy.publish_parameters()  # type: ignore[attr-defined]

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        if self.place == "end of training_step":
            self.edit_once()
        return loss


def fit(rank: int, communication: str, module: TokenModule, *own: Any, **options: Any) -> dict[str, Tensor]:
    t = trainer(2, communication=communication, max_epochs=2, callbacks=list(own), **options)
    t.num_sanity_val_steps = 0
    batches = token_batches([5, 7, 4], seed=rank)
    t.fit(module, loader(batches), loader(batches[:2]))
    if communication == "on_demand":
        assert module.trainer.world_size == 2
    return full_parameters(module) | {k: v.clone() for k, v in t.callback_metrics.items()}


def outcome(rank: int, communication: str, module: Edits) -> Any:
    try:
        found = fit(rank, communication, module)
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"
    assert module.edited
    return found


def outcomes(rank: int, make: Callable[[], Edits], allowed: bool) -> Any:
    """The message of an edit that is not allowed; whether an allowed one ends in the reference's parameters."""
    found = outcome(rank, "on_demand", make())
    return equal(found, outcome(rank, "collective", make())) if allowed else found


def _edits_everywhere(rank: int) -> dict[tuple[str, bool], Any]:
    cases = [(place, False) for place in SEEN | PUBLISHED | REFUSED] + [(place, True) for place in PUBLISHED]
    return {
        (place, publish): outcomes(rank, partial(Edits, place, halve, publish), publish or place in SEEN)
        for place, publish in sorted(cases)
    }


def equal(one: Any, other: Any) -> bool:
    assert isinstance(one, dict) and isinstance(other, dict), (one, other)
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_an_edit_is_read_everywhere_or_refused():
    for found in run_ranks(_edits_everywhere):
        for (place, publish), message in found.items():
            if place in SEEN or publish:
                assert message is True, place
            else:
                assert isinstance(message, str), place
                assert message.startswith("StaleShardError: Parameter 'net."), (place, message)
                assert "`trainer.strategy.publish_parameters()` on all of them" in message


def load_itself(module: TokenModule) -> None:
    module.load_state_dict({name: value * 0.5 for name, value in module.state_dict().items()})


def initialise(module: TokenModule) -> None:
    nn.init.ones_(module.net.blocks[1].up.weight)


def one_number(module: TokenModule) -> None:
    """The last rank's, in the last block: every other rank's shards are what they were."""
    if module.global_rank == 1:
        module.net.blocks[2].up.weight.data.to_local()[-1, -1] += 1  # type: ignore[operator, union-attr]


def gathered_row(module: TokenModule) -> None:
    """Of the root unit, which is gathered then."""
    module.net.head.weight.data[-1] += 1


def _ways_of_editing(rank: int) -> list[Any]:
    ways = [load_itself, initialise, one_number]
    missed = [outcome(rank, "on_demand", Edits("on_train_batch_end", way)) for way in ways]
    missed.append(outcome(rank, "on_demand", Edits("end of training_step", gathered_row)))
    told = [outcomes(rank, partial(Edits, "on_train_batch_end", way, publish=True), True) for way in ways]
    return [missed, told]


def test_every_way_of_editing_is_found():
    ranks = run_ranks(_ways_of_editing)
    names = ["net.embed.weight", "net.blocks.1.up.weight", "net.blocks.2.up.weight", "net.head.weight"]
    for which, name in enumerate(names):
        # A rank sees its own shard; the others hear of it.
        messages = [missed[which] for missed, _ in ranks]
        assert any(message.startswith(f"StaleShardError: Parameter {name!r}") for message in messages)
        assert all("publish_parameters()" in message for message in messages)
    assert "while it was gathered; such a change would be lost" in ranks[1][0][3]
    assert ranks[0][1] == ranks[1][1] == [True] * 3


# -- averages ----------------------------------------------------------------------------------------------------

needs_averaging = pytest.mark.skipif(
    not hasattr(callbacks, "WeightAveraging"), reason="lightning < 2.6 has no WeightAveraging"
)


class Watches(callbacks.Callback):
    """Remembers the parameters that validation batches were run with."""

    def __init__(self) -> None:
        self.seen: list[dict[str, Tensor]] = []

    def on_validation_batch_start(self, trainer: Trainer, pl_module: TokenModule, *_: Any) -> None:  # type: ignore[override]
        if not trainer.sanity_checking:
            trainer.strategy.engine.reshard()  # type: ignore[attr-defined]
            self.seen.append(full_parameters(pl_module))


def _averages(rank: int, root: Path) -> int:
    results = []
    for communication in ("on_demand", "collective"):
        watch, checkpoint = Watches(), root / f"{communication}.ckpt"
        own = [callbacks.EMAWeightAveraging(decay=0.5), watch]
        last = fit(rank, communication, TokenModule(), *own)
        # A run that ends after the first epoch, and another one that goes on from there:
        first = trainer(2, communication=communication, callbacks=[callbacks.EMAWeightAveraging(decay=0.5)])
        batches = token_batches([5, 7, 4], seed=rank)
        first.fit(Saves(checkpoint), loader(batches), loader(batches[:2]))
        own = [callbacks.EMAWeightAveraging(decay=0.5)]
        again = trainer(2, communication=communication, max_epochs=2, callbacks=own)
        module = TokenModule()
        again.fit(module, loader(batches), loader(batches[:2]), ckpt_path=checkpoint)
        resumed = full_parameters(module) | {k: v.clone() for k, v in again.callback_metrics.items()}
        assert equal(resumed, last)
        assert len(watch.seen) == 4
        results.append([last, watch.seen])
    (last, seen), (other_last, others_seen) = results
    assert equal(last, other_last)
    assert all(equal(*pair) for pair in zip(seen, others_seen, strict=True))
    expected, averages, val_loss = one_process_averages()
    for name, value in expected.items():
        assert (last[name] - value).abs().max() <= 1e-5, name
        # Two validation batches each epoch: both with the average of that epoch.
        for epoch, average in enumerate(averages):
            assert (seen[2 * epoch + 1][name] - average[name]).abs().max() <= 1e-5, name
    assert abs(last["val_loss"] - val_loss) <= 1e-4
    return len(seen)


class Saves(TokenModule):
    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path

    def on_train_epoch_end(self) -> None:
        self.trainer.save_checkpoint(self.path)


@needs_averaging
def test_averages_are_kept_in_shards_and_validated_on_every_rank(tmp_path):
    assert run_ranks(_averages, tmp_path) == [4, 4]
    saved = torch.load(tmp_path / "on_demand.ckpt", weights_only=True)
    for name, average in one_process_averages()[1][0].items():
        assert (saved["state_dict"][name] - average).abs().max() <= 1e-5
    TokenModule().load_state_dict(saved["current_model_state"])


def one_process_averages() -> tuple[dict[str, Tensor], list[dict[str, Tensor]], float]:
    """Plain torch: the average at the end, the one of each epoch, and its loss on the validation batches.

    As for the tolerance: an average of fp32 numbers from at most six steps, each of which parity leaves 1e-5 in sum.
    """
    module = TokenModule()
    optimizer = module.configure_optimizers()
    average: dict[str, Tensor] = {}
    of_epochs = []
    for _ in range(2):
        for batches in zip(*(token_batches([5, 7, 4], seed=rank) for rank in range(2)), strict=True):
            optimizer.zero_grad()
            sum(module.training_step(batch, 0) for batch in batches).div(2).backward()  # type: ignore[union-attr]
            optimizer.step()
            now = {name: p.detach().clone() for name, p in module.named_parameters()}
            average = {name: average.get(name, p).lerp(p, 0.5) for name, p in now.items()}
        of_epochs.append(average)
    module.load_state_dict(average)
    with torch.no_grad():
        losses = [module.training_step(b, 0) for r in range(2) for b in token_batches([5, 7, 4], seed=r)[:2]]
    return average, of_epochs, float(sum(losses)) / 4


def _refusals(rank: int) -> list[str]:
    cases: list[tuple[Any, dict[str, Any]]] = [
        (callbacks.StochasticWeightAveraging(swa_lrs=0.1), {}),
    ]
    if hasattr(callbacks, "WeightAveraging"):
        cases.append((callbacks.EMAWeightAveraging(), {"state_dict_type": "sharded"}))
    messages = []
    for callback, options in cases:
        with pytest.raises((MisconfigurationException, ValueError)) as error:
            fit(rank, "on_demand", TokenModule(), callback, **options)
        messages.append(str(error.value))
    return messages


def test_averages_that_cannot_be_kept_are_refused():
    for messages in run_ranks(_refusals):
        assert messages[0] == "SWA does not currently support sharded models."
        assert all('ODCStrategy(state_dict_type="full")' in message for message in messages[1:])


# -- checkpoints -------------------------------------------------------------------------------------------------


class Returns(TokenModule):
    """Goes back to a checkpoint at the beginning of the second epoch."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            strategy = self.trainer.strategy
            assert isinstance(strategy, ODCStrategy)
            strategy.load_checkpoint(self.path)

    def on_train_batch_end(self, *_: Any) -> None:
        if self.global_step == 1:
            self.trainer.save_checkpoint(self.path)


def _goes_back(rank: int, root: Path) -> bool:
    results = [
        fit(rank, communication, Returns(root / f"{communication}-{kind}.ckpt"), state_dict_type=kind)
        for kind in ("full", "sharded")
        for communication in ("on_demand", "collective")
    ]
    assert not equal(results[0], fit(rank, "on_demand", TokenModule()))
    return all(equal(results[0], other) for other in results[1:])


def test_a_checkpoint_loaded_in_mid_run_reaches_every_rank(tmp_path):
    assert run_ranks(_goes_back, tmp_path) == [True, True]
