"""`TimelineRecorder`: Lightning's hooks translated into a recording of one rank, and the recording into files."""

from __future__ import annotations

import socket
import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lightning_odc import files
from lightning_odc.arguments import Like, checked
from lightning_odc.callbacks.timeline.chrome_trace import encode
from lightning_odc.callbacks.timeline.spans import RankTimeline, Timeline, with_collective_waits
from lightning_odc.data.minibatch import token_count
from lightning_odc.engine.base import Engine
from lightning_odc.protocol.tracing import Tracer
from lightning_odc.protocol.transports.host import boot_id
from lightning_odc.strategy.odc import ODCStrategy

Steps = Annotated[range, Like("range(10, 13)", lambda steps: min(steps, default=-1) >= 0)]


@checked
class TimelineRecorder(Callback):
    """Records what every rank does when, and writes it as a Chrome trace.

    For the given optimizer steps: forward and backward of every microbatch with its tokens, reads and adds of
    shards, every wait with its peer and its cause, the barrier at the minibatch's end, the optimizer, and the time
    between batches, in which data are loaded. Under `ODCStrategy` the engine reports them. Under any other strategy,
    the recorder sees Lightning's hooks only, and waits for other ranks lie inside them.

    Writes ``timeline.json`` when the fit ends. `draw_timelines` draws it, and https://ui.perfetto.dev opens it. If the
    fit ends by an error, every rank writes its own timeline, ``timeline-rank<r>.json``, which is a trace, too. Between
    the first and the last step, recording sends no message between ranks.

    Args:
        dirpath: Where to write; made if it does not exist. Use one directory per run.
        steps: Optimizer steps to record, counted from 0 like ``trainer.global_step``. By default all, until a rank has
            100,000 spans of about 400 bytes; later ones are dropped.

    Attributes:
        timeline: The recording, on rank 0 after the fit.

    Raises:
        ValueError: Invalid steps.
        OSError: The directory cannot be made, when the fit begins.
    """

    def __init__(self, dirpath: str | Path, steps: Steps | None = None) -> None:
        self.dirpath = Path(dirpath)
        self.steps = steps
        self.timeline: Timeline | None = None
        self._recording: Recording | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.timeline = None
        self.dirpath.mkdir(parents=True, exist_ok=True)
        self._rank_path(trainer).unlink(missing_ok=True)
        strategy = trainer.strategy
        waiting_seen = trainer.world_size == 1
        engine = None
        called: nn.Module = pl_module  # its call is a microbatch
        if isinstance(strategy, ODCStrategy):
            waiting_seen |= strategy.communication != "collective"
            engine = strategy.engine
            called = strategy.model
        run = Timeline([], waiting_seen)
        self._recording = Recording(run, _beginning(trainer.world_size), engine, called)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._recording is not None:
            self._recording.gap_began = time.monotonic_ns()

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if self._recording is not None and self._wants(trainer.global_step):
            self._recording.begin_batch(trainer.global_step, batch)

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        if self._recording is not None:
            self._recording.enter("backward")

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer
    ) -> None:
        if self._recording is not None:
            self._recording.enter("optimizer")

    def on_train_batch_end(self, trainer: Trainer, *_: object) -> None:
        if self._recording is not None:
            step = trainer.global_step
            self._recording.end_batch(step, self._wants(step))

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._recording is not None:
            self._recording.end_gap("data")

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._recording is not None:
            self._recording.end_gap("validation")

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        recording, self._recording = self._recording, None
        if recording is None:
            return
        recording.release()
        ranks = [recording.of_rank(trainer.global_rank)] * trainer.world_size
        if trainer.world_size > 1:
            of_all = None
            if trainer.is_global_zero:
                of_all = ranks
            dist.gather_object(ranks[0], of_all)
        if not trainer.is_global_zero:
            return
        timeline = with_collective_waits(replace(recording.run, ranks=ranks))
        if not any(rank.spans for rank in timeline.ranks):
            rank_zero_warn(
                f"TimelineRecorder(steps={self.steps}) recorded nothing: training ended after optimizer step "
                f"{trainer.global_step - 1}. Steps are counted from 0, over all epochs."
            )
            return
        self.timeline = timeline
        self._write(self.dirpath / "timeline.json", timeline)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        recording, self._recording = self._recording, None
        if recording is None:
            return
        recording.end_batch(next_step=-1, wanted=False)
        if recording.spans:
            timeline = replace(recording.run, ranks=[recording.of_rank(trainer.global_rank)])
            self._write(self._rank_path(trainer), timeline)

    def _wants(self, step: int) -> bool:
        return self.steps is None or step in self.steps

    def _rank_path(self, trainer: Trainer) -> Path:
        """Where this rank writes if the fit ends by an error."""
        return self.dirpath / f"timeline-rank{trainer.global_rank}.json"

    def _write(self, path: Path, timeline: Timeline) -> None:
        try:
            files.write_whole(path, encode(timeline))
        except OSError as error:  # a full disk must not end the training
            rank_zero_warn(f"TimelineRecorder could not write: {error}")


class Recording(Tracer):
    """What one rank has recorded so far. Call `release` at the end."""

    def __init__(
        self,
        run: Timeline,  # without ranks
        beginning: int,  # nanoseconds of this rank's clock
        engine: Engine | None,
        module: nn.Module,
    ) -> None:
        super().__init__()
        self.run = run
        self.step: int | None = None  # the optimizer step that is being recorded, if one is
        self._engine = engine  # which traces what it does; ``None`` to go by Lightning's hooks alone
        self._module = module  # the module whose inputs are looked at to count tokens
        self._tokens: int | None = None  # of the next forward pass, once it has an input
        self._forwards = 0  # in this step
        self._last: dict[str, int] = {}  # what is known of the last forward pass
        self._phase = ""  # by the hooks, without an engine
        self._phase_began = 0
        self._hook: RemovableHandle | None = None
        self._beginning = beginning
        self._step_began = 0
        self.gap_began = time.monotonic_ns()  # since when the next batch is loaded, or validation runs

    def record(self, kind: str, begin: int, **details: Any) -> None:
        """A span that ends now. Passes of an optimizer step get numbers."""
        if kind == "forward":
            known = {}
            if details.get("step", "training_step") == "training_step":
                details.pop("step", None)
                known["microbatch"] = self._forwards
                self._forwards += 1
                self._last = known
            if self._tokens is not None:
                known["tokens"] = self._tokens
                self._tokens = None
            details |= known
        elif kind == "backward":
            # It belongs to the forward pass before it, once. One without (the loss of an empty share) has no number.
            details |= self._last
            self._last = {}
        super().record(kind, begin, **details)

    def begin_batch(self, step: int, batch: Any) -> None:
        """A batch of a step that is to be recorded begins."""
        self.record("data", self.gap_began)
        if self.step != step:
            self.step = step
            self._step_began = time.monotonic_ns()
            self._forwards = 0
            self._last = {}
        if self._hook is None:
            self._hook = self._module.register_forward_pre_hook(self._see_input)
            if self._engine is not None:
                self._engine.listen(self)
        if self._engine is None:
            self._see_input(self._module, (batch,))
            self.enter("forward")

    def enter(self, kind: str) -> None:
        """A hook says what comes now."""
        if self._engine is None and self.step is not None:
            self.leave()
            self._phase = kind
            self._phase_began = time.monotonic_ns()

    def leave(self) -> None:
        """A hook says that the current activity has ended."""
        if self._phase:
            self.record(self._phase, self._phase_began)
        self._phase = ""

    def end_batch(self, next_step: int, wanted: bool) -> None:
        """A batch ends; what comes next is of ``next_step``, and ``wanted`` or not."""
        self.leave()
        if self.step not in (None, next_step):
            self.record("minibatch", self._step_began, number=self.step)
            self.step = None
        if not wanted:
            self.release()
        self.gap_began = time.monotonic_ns()

    def end_gap(self, kind: str) -> None:
        """The time between two batches until now was loading data, or validation."""
        if self._hook is not None:
            self.record(kind, self.gap_began)
        self.gap_began = time.monotonic_ns()

    def release(self) -> None:
        """Stop listening. Idempotent."""
        if self._hook is not None:
            self._hook.remove()
            if self._engine is not None:
                self._engine.unlisten(self)
        self._hook = None

    def of_rank(self, rank: int) -> RankTimeline:
        """This rank's timeline so far."""
        shift = self._beginning
        spans = [span._replace(begin=span.begin - shift, end=span.end - shift) for span in self.spans]
        return RankTimeline(rank, socket.gethostname(), spans)

    def _see_input(self, _: nn.Module, inputs: tuple[Any, ...]) -> None:
        """What the next forward pass gets; what modules inside it get is not counted."""
        if self._tokens is None and inputs:
            self._tokens = token_count(inputs[0])


def _beginning(world_size: int) -> int:
    """When the fit began, by this rank's clock, which ranks of a machine share. All ranks together."""
    here = boot_id()
    now = (here, time.monotonic_ns())
    moments = [now] * world_size
    if world_size > 1:  # all have the message at nearly the same moment: that is the beginning
        dist.all_gather_object(moments, now)
    return next(moment for place, moment in moments if place == here)
