"""One list of cases through every door: Lightning's ``Trainer`` and ``Fabric``, Hugging Face's, a loop with ``attach``.

The parameters are those of one process in plain torch, and the words are the same but for the names of the doors. The
tolerance of parity is derived in ``tests/support/fits.py``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

from lightning_odc import BalancedDataLoader, attach
from lightning_odc.fabric import ODCFabricStrategy
from tests.strategy.test_falling_back import no_room
from tests.support import fits
from tests.support.fits import assert_same
from tests.support.models import full_parameters, init_gloo
from tests.support.modules import said, warned
from tests.support.out_of_memory import TEXT, needs_reset
from tests.support.ranks import of_all_ranks, on_ranks

pytest.importorskip("accelerate")

from transformers import Trainer, TrainingArguments

from lightning_odc.huggingface import ODCTrainerMixin

VOCAB = 24
LR = 0.1
#: Optimizer steps of 8 samples, on two ranks. The long one fills a rank.
LENGTHS = (20, 8, 9, 7, 8, 9, 8, 7, 8, 7, 19, 9, 8, 6, 7, 9)
MASKED = 10  # this sample has no label, and a microbatch of its own
FITS = 2  # samples of a microbatch


class Model(nn.Module):
    """Predicts tokens. On some ranks it runs out of memory, is slow, or couples samples from some step on."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCAB, 16)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(2))
        self.head = nn.Linear(16, VOCAB)
        self.most = 100  # samples that fit
        self.pause = 0.0  # seconds by the sample
        self.ran: list[int] = []  # samples of each microbatch
        self.couples = False

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.embedding(input_ids)
        for block in self.blocks:
            x = block(x)
        if torch.is_grad_enabled():  # trials and audits run forward alone
            time.sleep(self.pause * len(input_ids))
            self.ran.append(len(input_ids))
            if len(input_ids) > self.most:
                raise torch.OutOfMemoryError(TEXT)
        loss = nn.functional.cross_entropy(self.head(x).transpose(1, 2), labels)
        if self.couples:
            loss = loss + x.mean(1).var(0, correction=0).sum()
        return {"loss": loss}


def samples() -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(2, VOCAB, (n,), generator=generator).tolist() for n in LENGTHS]


def padded(batch: list[list[int]]) -> dict[str, Tensor]:
    ids = nn.utils.rnn.pad_sequence([torch.tensor(tokens) for tokens in batch], batch_first=True)
    labels = ids.masked_fill(ids < 4, -100)
    for row, tokens in enumerate(batch):
        if tokens == samples()[MASKED]:
            labels[row] = -100
    return {"input_ids": ids, "labels": labels}


def one_process(epochs: int) -> dict[str, Tensor]:
    """The parameters of plain torch, with all samples of a step in one batch."""
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    for first in [*range(0, len(LENGTHS), 8)] * epochs:
        optimizer.zero_grad()
        model(**padded(samples()[first : first + 8]))["loss"].backward()
        optimizer.step()
    return full_parameters(model)


@dataclass
class Trained:
    """What came out of a training."""

    parameters: dict[str, Tensor]
    said: list[str] = field(default_factory=list)
    stolen: int = 0


class Module(LightningModule):
    """The model in Lightning."""

    def __init__(self, model: Model, begins: Callable[[int], None]) -> None:
        super().__init__()
        self.model = model
        self.begins = begins
        self.stolen = 0

    def training_step(self, batch: dict[str, Tensor]) -> Tensor:
        self.begins(self.trainer.global_step)
        return self.model(**batch)["loss"]

    def on_train_epoch_end(self) -> None:
        self.stolen = getattr(self.trainer.strategy.engine, "stolen", 0)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=LR)


def lightning(rank: int, model: Model, case: Case, epochs: int, folder: str) -> Trained:
    module = Module(model, lambda step: case.begins(model, rank, step))
    data = DataLoader(samples(), batch_size=2, collate_fn=padded)
    options = {"balance": case.policy, **case.options}
    fits.fit(
        module, data, accumulate_grad_batches=2, max_epochs=epochs, max_tokens=case.max_tokens, **options
    )
    parameters = full_parameters(module)
    return Trained(
        {name.removeprefix("model."): value for name, value in parameters.items()}, stolen=module.stolen
    )


def hugging_face(rank: int, model: Model, case: Case, epochs: int, folder: str) -> Trained:
    class Balanced(ODCTrainerMixin, Trainer):  # type: ignore[misc]
        stolen = 0

        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            case.begins(model, rank, self.state.global_step)
            self.stolen = getattr(self.odc.engine, "stolen", 0)
            return super().compute_loss(*args, **kwargs)

    arguments = TrainingArguments(
        folder,
        use_cpu=True,
        fsdp=True,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        num_train_epochs=epochs,
        learning_rate=LR,
        lr_scheduler_type="constant",
        optim="sgd",
        max_grad_norm=0.0,
        save_strategy="no",
        logging_strategy="no",
        train_sampling_strategy="sequential",
        remove_unused_columns=False,
        disable_tqdm=True,
        report_to=[],
        dataloader_pin_memory=False,
    )
    balance: dict[str, Any] = {"max_tokens": case.max_tokens}
    if case.policy != "auto":
        balance["balance"] = case.policy
    trainer = Balanced(
        model, arguments, padded, train_dataset=samples(), balance=balance, engine=case.options or None
    )
    trainer.train()
    return Trained(full_parameters(trainer.model), stolen=trainer.stolen)


def loader_for(case: Case, communication: str) -> BalancedDataLoader:
    policy = case.policy
    if policy == "auto":
        policy = "lb_mini"
    if communication == "collective":
        policy = "lb_micro"
    return BalancedDataLoader(
        samples(),
        minibatch_size=4,
        collate_fn=padded,
        max_tokens=case.max_tokens,
        weighting="label",
        balance=policy,
    )


def attached(rank: int, model: Model, case: Case, epochs: int, folder: str) -> Trained:
    init_gloo(rank)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    with attach(model, **{"communication": "auto", **case.options}) as odc:
        loader = loader_for(case, odc.communication)
        for _ in range(epochs):
            for minibatch in loader:
                odc.run(minibatch, lambda batch: model(**batch)["loss"])
                odc.step(optimizer)
                optimizer.zero_grad()
        stolen = getattr(odc.engine, "stolen", 0)
    return Trained(full_parameters(model), stolen=stolen)


def in_fabric(rank: int, model: Model, case: Case, epochs: int, folder: str) -> Trained:
    fabric = Fabric(strategy=ODCFabricStrategy(**case.options), accelerator="cpu", devices=2)  # whole
    fabric.launch()
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=LR))
    strategy = fabric.strategy
    loader = loader_for(case, strategy.communication)
    for _ in range(epochs):
        for minibatch in loader:
            strategy.run(fabric, minibatch, lambda batch: model(**batch)["loss"])
            optimizer.step()
            optimizer.zero_grad()
    stolen = getattr(strategy.attached.engine, "stolen", 0)
    parameters = full_parameters(model.module)
    strategy.teardown()
    return Trained(parameters, stolen=stolen)


DOORS = {
    "ODCStrategy": lightning,
    "Balanced": hugging_face,
    "attach": attached,
    "ODCFabricStrategy": in_fabric,
}


def nothing(*_: Any) -> None:
    """Nothing happens."""


@dataclass(frozen=True)
class Case:
    """What happens in a training."""

    says: str = ""  # to one rank or to both, with the name of the door for NAME
    epochs: int = 2
    prepares: Callable[[Model, int], None] = nothing
    begins: Callable[[Model, int, int], None] = nothing  # a microbatch, of an optimizer step
    refuses: Any = None
    policy: Any = "lb_mini"
    max_tokens: int = 40
    options: dict[str, Any] = field(default_factory=dict)
    doors: tuple[str, ...] = tuple(DOORS)
    is_exact: bool = True  # the parameters are those of one process
    levels: bool = False  # rank 1 is slow, and times show it: rank 0 runs more samples


def has_little_memory(model: Model, rank: int) -> None:
    if rank == 1:
        model.most = FITS
    else:
        model.most = 100


def is_slow(model: Model, rank: int) -> None:
    if rank == 1:
        model.pause = 0.05
    else:
        model.pause = 0.0


def is_slower(model: Model, rank: int) -> None:
    model.pause = 0.04 if rank == 1 else 0.005


def couples_later(model: Model, rank: int, step: int) -> None:
    model.couples = step >= 9


CASES = {
    "a retry out of memory": Case("ran out of memory, and runs again in parts", prepares=has_little_memory),
    "a steal": Case(prepares=is_slow, policy="steal", max_tokens=20),
    "one slow rank, no stealing": Case(prepares=is_slower, max_tokens=20, epochs=8, levels=True),
    "a microbatch of weight zero": Case(max_tokens=20),
    # Whoever writes a loop says what microbatches count: `attach` has no rule to prove.
    "a rule contradicted": Case(
        "In step 10, batches are not weighed by what your loss is a mean over",
        epochs=6,
        begins=couples_later,
        doors=("ODCStrategy", "Balanced"),
        is_exact=False,
    ),
    "fallback to collectives": Case(
        "NAME trains with collectives, since on-demand communication cannot run here.",
        refuses=no_room,
        policy="auto",
    ),
}


def tried() -> Iterator[Any]:
    """Every case at every door. One that a door does not have is skipped, and says why."""
    for name, case in CASES.items():
        for door in DOORS:
            marks = []
            if "retry" in name:
                marks.append(needs_reset)
            if door not in case.doors:
                marks.append(pytest.mark.skip(reason=f"{door} proves no rule, so none can be contradicted"))
            yield pytest.param(name, door, marks=marks)


@pytest.mark.parametrize(("name", "door"), tried())
@on_ranks(2)
def test_every_door_trains_the_same_and_says_the_same(rank, name, door, tmp_path):
    case = CASES[name]
    model = Model()
    case.prepares(model, rank)
    with ExitStack() as context:
        if case.refuses is not None:
            context.enter_context(case.refuses(rank))
        messages = context.enter_context(warned())
        context.enter_context(said())
        trained = DOORS[door](rank, model, case, case.epochs, str(tmp_path))
    if case.is_exact:
        assert_same(trained.parameters, one_process(case.epochs))
    assert_same(trained.parameters, of_all_ranks(trained.parameters)[0])
    if case.levels:
        fast, slow = map(sum, of_all_ranks(model.ran))
        assert fast + slow == case.epochs * len(LENGTHS)
        assert slow < 0.75 * fast
    if case.policy == "steal":
        assert sum(of_all_ranks(trained.stolen)) > 0
    else:
        assert trained.stolen == 0
    told = [case.says.replace("NAME", door) in message for message in messages]
    if case.says:
        assert 1 <= sum(of_all_ranks(sum(told))) <= 2, messages
