"""Hugging Face's ``Trainer`` with the mix-in: uneven microbatches on two ranks, against one process in plain torch.

The tolerance of parity is derived in ``tests/strategy/test_parity.py``.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import signal
import warnings
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.utils.data import Dataset, IterableDataset

from tests.support.ranks import of_all_ranks, on_ranks, run_ranks, try_ranks
from tests.support.tiers import fast

pytest.importorskip("accelerate")

from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments
from transformers.distributed import DistributedConfig

from lightning_odc import Minibatch
from lightning_odc.errors import WindowError
from lightning_odc.huggingface import ODCTrainerMixin
from tests.strategy.test_falling_back import REFUSED, no_room
from tests.strategy.test_models import causal_lm
from tests.strategy.test_parity import assert_same
from tests.support.models import full_parameters
from tests.support.modules import warned
from tests.support.out_of_memory import TEXT, needs_reset

#: Optimizer steps of 8 samples. The long one fills a rank, and the other rank runs the short ones.
LENGTHS = [20, 8, 9, 7, 8, 9, 8, 7, 8, 7, 19, 9, 8, 6, 7, 9]
LONGEST = 20
EPOCHS = 2
LR = 0.002
CLIP = 0.5

Sample = dict[str, list[int]]


def samples() -> list[Sample]:
    generator = torch.Generator().manual_seed(0)
    return [{"input_ids": torch.randint(1, 11, (n,), generator=generator).tolist()} for n in LENGTHS]


def padded(batch: list[Sample]) -> dict[str, Tensor]:
    """Labels of one token are masked, so that microbatches count less than their tokens."""
    ids = nn.utils.rnn.pad_sequence([torch.tensor(sample["input_ids"]) for sample in batch], batch_first=True)
    labels = ids.masked_fill((ids == 0) | (ids == 3), -100)
    return {"input_ids": ids, "labels": labels, "attention_mask": (ids > 0).long()}


def new_model() -> Any:
    torch.manual_seed(0)
    return causal_lm()


def one_process(count: int = len(LENGTHS)) -> tuple[dict[str, Tensor], list[float], list[float]]:
    """Parameters, norms and losses of plain torch, with all samples of a step in one batch."""
    model = new_model()
    norms = []
    losses = []
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.0)
    for _ in range(EPOCHS):
        for first in range(0, count, 8):
            loss = model(**padded(samples()[:count][first : first + 8])).loss
            loss.backward()
            losses.append(loss.item())
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), CLIP).item())
            optimizer.step()
            optimizer.zero_grad()
    return full_parameters(model), norms, losses


class GathersMetrics(Trainer):
    """Has a metric of all ranks in every microbatch, as TRL's ``SFTTrainer``."""

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        gathered = self.accelerator.gather_for_metrics(inputs["attention_mask"].sum())
        assert gathered.sum() > 0
        return super().compute_loss(model, inputs, *args, **kwargs)


class GathersOwn(ODCTrainerMixin, GathersMetrics):
    pass


class Balanced(GathersOwn):
    """Keeps how many microbatches it has run."""

    counts: list[int]

    def training_step(self, model: Any, inputs: Any, *args: Any) -> Any:
        self.counts.append(len(inputs))
        return super().training_step(model, inputs, *args)


class CountsTokens(GathersMetrics):
    """Counts the tokens of all ranks in every microbatch, as TRL's ``SFTTrainer``."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._total_train_tokens = 0
        self._metrics: dict[str, Any] = {"train": {}}

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        tokens = self.accelerator.gather_for_metrics(inputs["attention_mask"].sum()).sum().item()
        self._total_train_tokens += tokens
        self._metrics["train"]["num_tokens"] = [self._total_train_tokens]
        return super().compute_loss(model, inputs, *args, **kwargs)


class BalancedCounts(ODCTrainerMixin, CountsTokens):
    pass


@on_ranks(2)
def test_tokens_of_all_ranks_are_counted_and_a_replaced_order_is_named(rank, tmp_path):
    asked = arguments(str(tmp_path), fsdp=None, train_sampling_strategy="group_by_length")
    made = BalancedCounts(
        new_model(), asked, padded, train_dataset=samples(), balance={"max_tokens": LONGEST}
    )
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        made.train()
    total = EPOCHS * sum(LENGTHS)
    assert made._total_train_tokens == total
    assert made._metrics["train"]["num_tokens"] == [total]
    told = [
        str(one.message)
        for one in said
        if 'train_sampling_strategy="group_by_length" is replaced' in str(one.message)
    ]
    assert len(told) == (rank == 0)


class OnRank0(TrainerCallback):
    """Evaluates and streams on one rank alone, after every optimizer step."""

    def __init__(self) -> None:
        self.trainer: Any = None
        self.same: list[bool] = []
        self.reads = 0

    def on_step_end(self, *_: Any, model: Any = None, **__: Any) -> None:
        odc = self.trainer.odc
        self.reads = odc.engine.traffic.reads
        streamed = {}
        if self.trainer.args.process_index == 0:
            with torch.no_grad():
                model(**padded(samples()[:1]))
            streamed = dict(odc.stream_parameters())
        whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
        self.same += [torch.equal(value, whole[name]) for name, value in streamed.items()]


def arguments(folder: str, **options: Any) -> TrainingArguments:
    known = {
        "use_cpu": True,
        "fsdp": True,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "num_train_epochs": EPOCHS,
        "learning_rate": LR,
        "lr_scheduler_type": "constant",
        "max_grad_norm": CLIP,
        "logging_steps": 1,
        "save_strategy": "no",
        "remove_unused_columns": False,
        "disable_tqdm": True,
        "report_to": [],
        "dataloader_pin_memory": False,
    }
    return TrainingArguments(folder, **{**known, **options})


def balanced(folder: str, callbacks: Any = (), engine: Any = None, **options: Any) -> Balanced:
    made = Balanced(
        new_model(),
        arguments(folder, **options),
        padded,
        train_dataset=samples(),
        eval_dataset=samples()[:5],
        callbacks=[*callbacks],
        balance={"max_tokens": LONGEST},
        engine=engine,
    )
    made.counts = []
    return made


BOTH = pytest.mark.parametrize("fsdp", [True, None], ids=["sharded", "whole"])


@BOTH
@on_ranks(2)
def test_uneven_microbatches_end_in_the_parameters_of_one_process(rank, tmp_path, fsdp):
    """One rank evaluates and streams while the others go on."""
    alone = OnRank0()
    parameters, norms, losses = one_process()
    made = balanced(str(tmp_path), [alone], train_sampling_strategy="sequential", fsdp=fsdp)
    alone.trainer = made
    made.train()
    assert made.odc is None
    logged = [row for row in made.state.log_history if "loss" in row]
    assert_same(full_parameters(made.model), parameters)
    assert [row["grad_norm"] for row in logged] == pytest.approx(norms, rel=1e-5)
    assert [row["loss"] for row in logged] == pytest.approx(losses, rel=1e-5)
    assert alone.reads > 0
    assert made.state.total_flos > 0
    expected = []
    if rank == 0:
        expected = [True] * len(parameters) * 4
    assert alone.same == expected
    assert made.counts[::2] == [0] * 4  # of two accumulated batches, the last has all microbatches
    first, second = of_all_ranks(made.counts)
    assert first != second


@BOTH
@on_ranks(2)
def test_what_cannot_run_on_demand_trains_by_collectives_to_the_parameters_of_one_process(
    rank, tmp_path, fsdp
):
    """Of nine samples, the last step has one: the other rank goes along with a microbatch that counts nothing."""
    parameters, norms, losses = one_process(9)
    refuses, says = REFUSED["proof"]
    made = balanced(str(tmp_path), train_sampling_strategy="sequential", fsdp=fsdp)
    made.train_dataset = samples()[:9]
    said = io.StringIO()
    with refuses(rank), warned() as messages, contextlib.redirect_stdout(said):
        made.train()
    logged = [row for row in made.state.log_history if "loss" in row]
    assert_same(full_parameters(made.model), parameters)
    assert [row["grad_norm"] for row in logged] == pytest.approx(norms, rel=1e-5)
    assert [row["loss"] for row in logged] == pytest.approx(losses, rel=1e-5)
    first, second = of_all_ranks(made.counts)
    assert first == second
    assert max(first) > 1
    told = [message for message in messages if "Balanced trains with collectives" in message]
    assert len(told) == (rank == 0)
    for message in told:
        assert says in message
        assert 'engine={"communication": "on_demand"} makes this an error' in message
        assert "If your loop" not in message
        assert 'policy "lb_micro"' in said.getvalue()
        assert 'communication="collective".' in said.getvalue()
    for row in made.state.log_history:
        assert "idle/fraction" not in row


@on_ranks(2)
def test_who_insists_on_demand_gets_an_error_on_every_rank(rank, tmp_path):
    made = balanced(str(tmp_path), engine={"communication": "on_demand"})
    with no_room(rank), pytest.raises(WindowError, match="Rank 1 could not share memory"):
        made.train()


@BOTH
@on_ranks(2)
def test_saving_resuming_and_evaluating_go_on_working(rank, tmp_path, fsdp):
    options = {
        "save_strategy": "steps",
        "save_steps": 1,
        "eval_strategy": "steps",
        "eval_steps": 1,
        "fsdp": fsdp,
    }
    # By default, a rank of these tests starts its workers from a server of their own, which imports everything.
    workers = {"dataloader_num_workers": 1, "dataloader_multiprocessing_context": "fork"}
    straight = balanced(str(tmp_path / "straight"), **workers, **options)
    straight.train()
    loss = straight.evaluate()["eval_loss"]
    resumed = balanced(str(tmp_path / "again"), load_best_model_at_end=True, **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "straight" / "checkpoint-3"))
    assert rank == resumed.args.process_index
    resumed.save_model(str(tmp_path / "saved"))
    if fsdp:
        with pytest.raises(ValueError, match="Make a new trainer"):
            resumed.train()
    found = full_parameters(resumed.model)
    assert_same(found, full_parameters(straight.model))
    assert resumed.state.best_model_checkpoint.endswith("checkpoint-4")
    eval_loss = resumed.evaluate()["eval_loss"]
    assert [eval_loss, resumed.state.best_metric] == pytest.approx([loss] * 2, rel=1e-5)
    assert resumed.counts == straight.counts[-len(resumed.counts) :]
    for saved in (tmp_path / "saved", tmp_path / "again" / "checkpoint-4"):
        assert_same(full_parameters(AutoModelForCausalLM.from_pretrained(saved)), found)


@on_ranks(2)
def test_what_is_found_chosen_and_expected_is_said_and_how_long_ranks_waited_is_logged(rank, tmp_path):
    made = balanced(str(tmp_path))
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        made.train()
    lines = [line for line in said.getvalue().splitlines() if not line.startswith("{")]
    if rank == 0:
        assert lines[0].startswith("Found: 16 samples from 6 to 20 long")
        assert lines[-1].startswith("Measured: the first epoch took ")
        assert [line.startswith("Expected padding: ") for line in lines].count(True) == 1
    else:
        assert lines == []
    rows = [row for row in made.state.log_history if "idle/fraction" in row]
    assert [row["step"] for row in rows] == [2, 4]  # the ends of the epochs
    for row in rows:
        assert 0 < row["idle/fraction"] < 1


class CouplesLater(Trainer):
    """From some step on, the loss compares the samples of a batch."""

    since = 9

    def compute_loss(self, model: Any, inputs: Any, *_: Any, **__: Any) -> Any:
        outputs = model(**inputs)
        if self.state.global_step < self.since:
            return outputs.loss
        variance = outputs.logits.mean(1).var(0, correction=0)
        return outputs.loss + variance.sum()


class Recorded(ODCTrainerMixin, CouplesLater):
    """Keeps, for every batch, whether it was planned, and its samples."""

    def training_step(self, model: Any, inputs: Any, *args: Any) -> Any:
        if isinstance(inputs, Minibatch):
            batches = list(inputs)
        else:
            batches = [inputs]
        rows = [row[row > 0].tolist() for batch in batches for row in batch["input_ids"]]
        self.record.append((isinstance(inputs, Minibatch), rows))
        return super().training_step(model, inputs, *args)


@on_ranks(2)
def test_a_loss_that_couples_samples_later_is_found_and_batches_stay_whole_from_then_on(rank, tmp_path):
    """It is found in step 10, the third one of the second epoch. The third epoch has the batches of ``Trainer``."""
    options = {"gradient_accumulation_steps": 1, "num_train_epochs": 3}
    made = Recorded(new_model(), arguments(str(tmp_path), **options), padded, train_dataset=samples() * 2)
    made.record = []
    with warned() as said:
        made.train()
    assert ["In step 10, " in text for text in said if "are left as they are" in text] == [True] * (rank == 0)
    assert [planned for planned, _ in made.record] == [True] * 11 + [False] * 13
    by_rank = of_all_ranks([rows for _, rows in made.record])
    for first in (0, 8, 16):
        epoch = [row for batches in by_rank for rows in batches[first : first + 8] for row in rows]
        assert sorted(epoch) == sorted(sample["input_ids"] for sample in samples() * 2)
    for batches in by_rank:
        for rows in batches[11:]:
            assert len(rows) == 2
    first, second = of_all_ranks(full_parameters(made.model))
    assert_same(first, second)


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
@on_ranks(2)
def test_samples_are_shared_out_under_mixed_precision_and_with_compiled_layers(rank, tmp_path, compiled):
    """The loss is tested in float64, also where units get and return 16 bits."""
    made = balanced(str(tmp_path), bf16=True)
    for layer in made.model.model.layers:
        if compiled:
            layer.compile(backend="aot_eager")
    with warned() as said:
        made.train()
    assert [text for text in said if "are left as they are" in text] == []
    assert made.counts[::2] == [0] * 4
    first, second = of_all_ranks(made.counts)
    assert first != second


def sharded_by_transformers(folder: Any) -> Any:
    """A model of which every rank has loaded its shards."""
    new_model().save_pretrained(folder)
    return AutoModelForCausalLM.from_pretrained(folder, distributed_config=DistributedConfig(fsdp_size=2))


def _train_sharded(rank: int, folder: str) -> tuple[dict[str, Tensor], list[Any], list[int]]:
    model = sharded_by_transformers(f"{folder}/{rank}")
    options = {"fsdp": None, "train_sampling_strategy": "sequential"}
    made = Balanced(model, arguments(folder, **options), padded, train_dataset=samples())
    made.counts = []
    made.train()
    return full_parameters(made.model), made.state.log_history, made.counts


def test_a_model_that_transformers_has_sharded_needs_no_fsdp_in_the_arguments(tmp_path):
    """On ranks without a process group: with one, `save_pretrained` writes on rank 0 alone."""
    expected, norms, losses = one_process()
    for parameters, history, counts in run_ranks(_train_sharded, str(tmp_path)):
        logged = [row for row in history if "loss" in row]
        assert counts[::2] == [0] * 4
        assert_same(parameters, expected)
        assert [row["grad_norm"] for row in logged] == pytest.approx(norms, rel=1e-5)
        assert [row["loss"] for row in logged] == pytest.approx(losses, rel=1e-5)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Sample]:
        return iter(samples())


@on_ranks(2)
def test_what_does_not_work_is_refused_with_the_line_to_write(rank, tmp_path):
    for words, options in {
        "bf16=True": {"fp16": True},
        "layer.compile": {"torch_compile": True},
    }.items():
        with pytest.raises(ValueError, match=words):
            balanced(str(tmp_path), **options)
    with pytest.raises(ValueError, match="eval_on_start=True"):
        balanced(str(tmp_path)).evaluate()
    for attribute, words in {"quant_state": "torch.uint8", "SCB": "load_in_4bit=True"}.items():
        quantised = new_model()
        setattr(quantised.lm_head.weight, attribute, None)  # as bitsandbytes'
        with pytest.raises(ValueError, match=words):
            Balanced(quantised, arguments(str(tmp_path), bf16=True), padded, train_dataset=samples())


class Unmeasured(Dataset[Any]):
    """Says nothing of how long its samples are."""

    def __len__(self) -> int:
        return len(LENGTHS)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"a": samples()[index]["input_ids"], "b": [0]}


def of_unmeasured(batch: list[Any]) -> dict[str, Tensor]:
    """Neither does a batch of one tell."""
    assert len(batch) > 1
    return padded([{"input_ids": sample["a"]} for sample in batch])


@pytest.mark.parametrize(
    ("dataset", "collate", "reason"),
    [
        (Stream(), padded, "a stream cannot be planned"),
        (Unmeasured(), of_unmeasured, "is not known"),
    ],
)
@on_ranks(2)
def test_data_that_cannot_be_planned_trains_with_the_batches_of_trainer(
    rank, tmp_path, dataset, collate, reason
):
    # Else Accelerate lets rank 0 read for all, and refuses batches of unequal sizes.
    options = {"max_steps": 2, "accelerator_config": {"dispatch_batches": False}}
    made = Balanced(new_model(), arguments(str(tmp_path), **options), collate, train_dataset=dataset)
    made.counts = []
    with warned() as said:
        made.train()
    assert [reason in text for text in said if "are left as they are" in text] == [True] * (rank == 0)
    assert len(made.counts) == 4
    first, second = of_all_ranks(full_parameters(made.model))
    assert_same(first, second)


class HasLittleMemory(TrainerCallback):
    """A batch of two samples does not fit, in one of both passes."""

    def __init__(self, where: str = "forward") -> None:
        self._where = where
        self.ran: list[int] = []  # samples of each forward pass

    def on_train_begin(self, args: Any, *_: Any, model: Any, **__: Any) -> None:
        model.get_output_embeddings().register_forward_hook(self._look)

    def _look(self, head: Any, args: Any, logits: Tensor) -> None:
        if torch.is_grad_enabled():  # trials run forward alone
            self.ran.append(len(logits))
            if len(logits) > 1 and self._where == "forward":
                raise torch.OutOfMemoryError(TEXT)
            args[0].register_hook(self._end)

    def _end(self, gradient: Tensor) -> None:
        """The head has its gradient, and the blocks have none."""
        if len(gradient) > 1 and self._where == "backward":
            raise torch.OutOfMemoryError(TEXT)


class CountsSteps(Trainer):
    """May do in a step what must happen once, as ``GRPOTrainer``."""

    def training_step(self, *args: Any) -> Any:
        return super().training_step(*args)


class BalancedSteps(ODCTrainerMixin, CountsSteps):
    pass


class TalksToNobody(ODCTrainerMixin, Trainer):
    pass


def of_a_stream(kind: Any, folder: Any, *callbacks: TrainerCallback, **options: Any) -> Any:
    """A trainer of this class that runs the batches of Trainer's own, of two samples each."""
    args = arguments(str(folder), max_steps=2, accelerator_config={"dispatch_batches": False}, **options)
    return kind(new_model(), args, padded, train_dataset=Stream(), callbacks=[*callbacks])


@needs_reset
@on_ranks(2)
@pytest.mark.parametrize("fsdp", [True, None], ids=["sharded", "whole"])
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_batch_of_trainers_own_runs_again_in_parts_with_the_same_gradient(rank, tmp_path, where, fsdp):
    memory = HasLittleMemory(where)
    expected = of_a_stream(TalksToNobody, tmp_path, fsdp=fsdp)
    expected.train()
    made = of_a_stream(TalksToNobody, tmp_path, *[memory] * rank, fsdp=fsdp)
    with warned() as said:
        made.train()
    assert_same(full_parameters(expected.model), full_parameters(made.model))
    assert_same(*of_all_ranks(full_parameters(made.model)))
    assert sum("runs again in parts" in text for text in said) == rank
    assert memory.ran[:6] == [2, 1, 1] * 2 * rank


def _gathers(rank: int, folder: str, where: str, fsdp: bool | None) -> None:
    of_a_stream(GathersOwn, folder, *[HasLittleMemory(where)] * rank, fsdp=fsdp).train()


@pytest.mark.parametrize("fsdp", [True, None], ids=["sharded", "whole"])
@pytest.mark.parametrize("where", fast(["forward", "backward"], "backward"))
def test_a_batch_whose_loss_gathers_gathers_once(tmp_path, where, fsdp):
    """Rank 1 runs out of memory alone, and nobody would answer a second time."""
    for one in try_ranks(_gathers, str(tmp_path), where, fsdp, timeout=60):
        assert re.search(r"its step talks to other ranks \(.*accelerator\.gather_for_metrics", one.error)


@on_ranks(2)
def test_a_step_of_another_class_runs_once(rank, tmp_path):
    memory = HasLittleMemory()
    made = of_a_stream(BalancedSteps, tmp_path, memory)
    with pytest.raises(torch.OutOfMemoryError):
        made.train()
    assert memory.ran == [2]


class Killed(TrainerCallback):
    def on_step_end(self, args: Any, *_: Any, **__: Any) -> None:
        if args.process_index == 1:
            os.kill(os.getpid(), signal.SIGKILL)


def _die(rank: int, folder: str) -> None:
    balanced(folder, [Killed()], engine={"timeout": timedelta(seconds=20)}).train()


def test_the_others_hear_of_a_rank_that_dies(tmp_path):
    survivor, killed = try_ranks(_die, str(tmp_path), timeout=60)
    # It may have been in a collective of Trainer's: that error has a note.
    assert re.search(r"rank 1 \(process \d+\) ended without an error message .*SIGKILL", survivor.error)
    assert killed.exitcode == -signal.SIGKILL


class SavesItself(Balanced):
    """Leaves the state dict aside that ``Trainer`` has put together, as the trainers of sentence-transformers do."""

    def _save(self, output_dir: Any = None, state_dict: Any = None) -> None:
        self.model.save_pretrained(output_dir)


@on_ranks(2)
def test_a_whole_model_is_the_users_own_before_between_and_after_two_trainings(rank, tmp_path):
    model = new_model()
    parameters = [*model.parameters()]
    options = {"save_strategy": "steps", "save_steps": 2, "fsdp": None, "torch_compile": True}
    options["torch_compile_backend"] = "eager"
    made = SavesItself(model, arguments(str(tmp_path), **options), padded, train_dataset=samples())
    made.counts = []
    before = made.evaluate(samples()[:5])["eval_loss"]
    made.train()
    assert made.evaluate(samples()[:5])["eval_loss"] < before
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-4")
    assert_same(full_parameters(saved), full_parameters(model))
    made.train()
    assert all(one is other for one, other in zip(model.parameters(), parameters, strict=True))
    by_rank = of_all_ranks(full_parameters(model))
    assert_same(by_rank[0], by_rank[1], 0)


class WithALayerOfItsLoss(Balanced):
    """Has a layer that is no part of the model, as the ``SoftmaxLoss`` of sentence-transformers."""

    def create_optimizer(self, *args: Any) -> Any:
        torch.manual_seed(torch.distributed.get_rank())
        self.scale = nn.Linear(1, 1)
        self.optimizer = torch.optim.SGD([*self.model.parameters(), *self.scale.parameters()], lr=0.1)
        return self.optimizer

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        loss = super().compute_loss(*args, **kwargs)
        return loss + self.scale(loss.detach().view(1, 1)).square().mean()


@on_ranks(2)
def test_layers_beside_the_model_that_the_optimizer_steps_on_are_equal_on_all_ranks(rank, tmp_path):
    made = WithALayerOfItsLoss(
        new_model(), arguments(str(tmp_path), fsdp=None), padded, train_dataset=samples()
    )
    made.counts = []
    made.train()
    first, second = of_all_ranks(full_parameters(made.scale))
    assert_same(first, second, 0)
