"""``attach``: the engine under plain ``fully_shard`` in the user's own loop, against one process in plain torch.

The tolerance of parity is derived in ``tests/support/fits.py``.
"""

from __future__ import annotations

import copy
import math
import os
import re
import time
from collections.abc import Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from transformers import AutoModelForCausalLM

from lightning_odc import Minibatch, attach
from lightning_odc.errors import ODCError, StaleShardError, WindowError
from lightning_odc.pretrained import save_pretrained
from tests.docs.blocks import ROOT, fragments
from tests.strategy.test_falling_back import REFUSED
from tests.strategy.test_models import CausalLM, causal_lm
from tests.support import fits
from tests.support.fits import are_equal, assert_same, doing
from tests.support.models import Net, full_parameters, init_gloo, summed_loss, token_batches
from tests.support.modules import TokenModule, loader, trainer, warned
from tests.support.out_of_memory import TEXT, needs_reset
from tests.support.ranks import of_all_ranks, on_ranks, try_ranks

LENGTHS = [[5, 9, 4, 7, 12], [8, 3, 15, 6, 2], [30, 2, 2, 3, 9]]
EPOCHS = 2
PAGE = ROOT / "docs" / "without-the-trainer.md"


def new_model(**options: Any) -> nn.Module:
    torch.manual_seed(0)
    return Net(**options)


def made(rank: int, **options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A sharded model on this rank, and its optimizer."""
    init_gloo(rank)
    model = sharded(new_model(), **options)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def sharded(model: nn.Module, **options: Any) -> nn.Module:
    # `fully_shard` takes no parameters without a dimension: every rank has them whole.
    options["ignored_params"] = {parameter for parameter in model.parameters() if not parameter.dim()}
    for block in model.blocks:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def step_by_step() -> Iterator[list[Tensor]]:
    """The batches of every optimizer step."""
    for _ in range(EPOCHS):
        for step, lengths in enumerate(LENGTHS):
            yield token_batches(lengths, seed=step)


def one_process(clip: float = math.inf) -> tuple[dict[str, Tensor], list[float]]:
    parameters = fits.one_process(TokenModule("items", lr=0.01), step_by_step(), clip, norms := [])
    return {name.removeprefix("net."): value for name, value in parameters.items()}, norms


def train(
    rank: int,
    counts: tuple[int, ...],
    clip: float | None = None,
    model: nn.Module | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Train with so many microbatches by rank; evaluates on rank 0 alone in between."""
    init_gloo(rank)
    if model is None:
        model = sharded(new_model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    begin = sum(counts[:rank])
    norms = []
    with attach(model, **options) as odc:
        for batches in step_by_step():
            for batch in batches[begin : begin + counts[rank]]:
                loss = summed_loss(model, batch)
                with odc.backward(weight=batch.numel() - 1):
                    loss.backward()
            norm = odc.step(optimizer, max_norm=clip)
            optimizer.zero_grad()
            norms += [] if norm is None else [norm.item()]
            if rank == 0:
                with torch.no_grad():
                    summed_loss(model, batches[0])
        reads = odc.engine.traffic.reads
    return {"parameters": full_parameters(model), "norms": norms, "reads": reads}


@on_ranks(2)
@pytest.mark.parametrize(
    ("counts", "clip", "options"),
    [((4, 1), None, {}), ((5, 0), 0.1, {}), ((2, 3), 0.1, {"deterministic": True})],
)
def test_the_gradient_does_not_depend_on_who_ran_what(rank, counts, clip, options):
    result = train(rank, counts, clip, **options)
    parameters, norms = one_process(clip or math.inf)
    assert_same(result["parameters"], parameters)
    wanted = []
    if clip:
        wanted = norms
    assert result["norms"] == pytest.approx(wanted, rel=1e-5)
    if counts[rank]:
        assert result["reads"] > 0


@on_ranks(2)
def test_where_it_cannot_run_every_rank_reads_the_line_that_trains_by_collectives(rank):
    """`tests/run/test_doors.py` trains so."""
    refuses, says = REFUSED["memory"]
    init_gloo(rank)
    with refuses(rank), pytest.raises(WindowError) as caught:
        attach(sharded(new_model()))
    text = str(caught.value)
    assert of_all_ranks(text) == [text] * 2
    assert says in text
    assert text.endswith(
        "If your loop runs equally many microbatches on every rank, write "
        'attach(model, communication="collective").'
    )
    assert "ODCStrategy(" not in text


def _unlike(rank: int) -> None:
    init_gloo(rank)
    train(rank, (4, 1), communication="collective")


def test_unequal_numbers_under_collectives_are_an_error():
    more, fewer = try_ranks(_unlike)
    assert "In optimizer step 0, rank 1 runs fewer microbatches (1) than rank 0 (at least 2)." in fewer.error
    assert "Rank 1 failed. Its error was:" in more.error
    assert more.exitcode == fewer.exitcode == 1


def _fail(rank: int) -> None:
    model, optimizer = made(rank)
    with attach(model, communication="collective") as odc:
        with odc.backward():
            summed_loss(model, token_batches([6])[0]).backward()
        if rank == 1:
            raise ValueError("bad data")
        odc.step(optimizer)


def test_under_collectives_a_rank_that_fails_is_named_with_its_error():
    waited, failed = try_ranks(_fail)
    assert "PeerFailedError: Rank 1 failed. Its error was:" in waited.error
    for outcome in (waited, failed):
        assert "ValueError: bad data" in outcome.error
        assert outcome.exitcode == 1


@on_ranks(2)
def test_the_blocks_of_the_page_run_on_two_ranks(rank):
    """One after another; the page's program is run by its own command, see ``tests/docs``."""
    namespace: dict[str, Any] = {}
    init_gloo(rank)
    with patch.object(dist, "init_process_group") as joins, patch.dict(os.environ):
        for block in fragments(PAGE):
            exec(compile(block.text, str(PAGE), "exec"), namespace)
    joins.assert_called_once_with("gloo")
    first, second = of_all_ranks(sum(p.full_tensor().sum().item() for p in namespace["model"].parameters()))
    assert first == second


@on_ranks(4)
def test_two_nodes(rank):
    init_gloo(rank)
    with patch.dict(os.environ, LOCAL_WORLD_SIZE="2"):  # what `torchrun --nnodes 2 --nproc-per-node 2` sets
        result = train(rank, (0, 1, 3, 1), model=sharded(new_model()))
    assert_same(result["parameters"], one_process()[0])


@on_ranks(2)
def test_bf16_without_weights_is_that_of_fully_shard(rank):
    """What ``param_dtype=bfloat16`` gives on demand and with the collectives of ``fully_shard``."""
    init_gloo(rank)
    found = []
    for on_demand in (True, False):
        model = sharded(new_model(), mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        odc = None
        if on_demand:
            odc = attach(model)
        for batches in step_by_step():
            loss = summed_loss(model, batches[rank])
            if odc is None:
                loss.backward()
                optimizer.step()
            else:
                with odc.backward():
                    loss.backward()
                odc.step(optimizer)
            optimizer.zero_grad()
        if odc is not None:
            streamed = dict(odc.stream_parameters())
            odc.close()
            odc.close()
        found.append(full_parameters(model))
    assert_same(*found)
    assert {value.dtype for value in streamed.values()} == {torch.bfloat16}
    assert are_equal(streamed, {name: value.bfloat16() for name, value in found[0].items()})


@on_ranks(2)
def test_state_that_torch_s_functions_load_goes_on(rank):
    """Train an epoch, keep the state by torch's functions, and train the second epoch: with it, and loaded."""
    init_gloo(rank)
    state: Any = None
    for _ in range(2):
        model = sharded(new_model())
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        with attach(model) as odc:
            for number, batches in enumerate(step_by_step()):
                if number == len(LENGTHS) and state is None:
                    state = copy.deepcopy(get_state_dict(model, optimizer))
                elif number == len(LENGTHS):
                    parts = {"model_state_dict": state[0], "optim_state_dict": state[1]}
                    set_state_dict(model, optimizer, **parts)
                    odc.publish()
                elif state is not None and number < len(LENGTHS):
                    continue  # what the first epoch does is in the state
                for batch in batches[4 * rank : 4 + rank]:
                    with odc.backward(weight=batch.numel() - 1):
                        summed_loss(model, batch).backward()
                odc.step(optimizer)
                optimizer.zero_grad()
        assert_same(full_parameters(model), one_process()[0])


# -- parameters for any reader --------------------------------------------------------------------------------


@on_ranks(2)
def test_one_rank_streams_what_a_full_checkpoint_holds_while_the_others_train(rank):
    """Rank 0 has read one parameter, and waits with the others until rank 1 has run a microbatch."""
    init_gloo(rank)
    model = sharded(new_model(scalars=True))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    signal_of_rank_1 = torch.ones(1)
    with attach(model) as odc:
        for _ in range(2):
            whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
            before = full_parameters(model)
            if rank == 0:
                stream = odc.stream_parameters()
                streamed = dict([next(stream)])
                dist.recv(signal_of_rank_1, src=1)
                streamed |= stream
                block = dict(odc.stream_parameters(model.blocks[1]))
                assert {*streamed} == {name for name, _ in model.named_parameters()}
                assert are_equal(streamed, whole)
                assert len(block) == 6
                for name in block:
                    assert torch.equal(block[name], whole[f"blocks.1.{name}"])
            else:
                with odc.backward(weight=1):
                    summed_loss(model, token_batches([5])[0]).backward()
                dist.send(signal_of_rank_1, dst=0)
            odc.step(optimizer)
            optimizer.zero_grad()
            assert not torch.equal(full_parameters(model)["head.weight"], before["head.weight"])


@on_ranks(2)
def test_no_two_versions_are_mixed(rank):
    model, optimizer = made(rank)
    with attach(model) as odc:
        stream = odc.stream_parameters()
        next(stream)
        odc.step(optimizer)
        with pytest.raises(StaleShardError, match="Take all of `stream_parameters"):
            next(stream)
        with pytest.raises(ValueError, match="not a part of the model"):
            next(odc.stream_parameters(nn.Linear(2, 2)))
        odc.settle()
        with pytest.raises(StaleShardError, match="has begun to change"):
            next(odc.stream_parameters())
        odc.step(optimizer)


# -- what goes wrong ------------------------------------------------------------------------------------------


def _break_off(rank: int, how: str) -> None:
    model, optimizer = made(rank)
    seconds = 20
    if how == "hung":
        seconds = 3
    with attach(model, timeout=timedelta(seconds=seconds)) as odc:
        odc.step(optimizer)
        if rank == 1:
            if how == "hung":
                time.sleep(4)
            raise RuntimeError("bad sample")
        odc.step(optimizer)


@pytest.mark.parametrize(
    ("how", "says"),
    [("raised", "PeerFailedError(?s:.*)bad sample"), ("hung", "WaitTimeoutError(?s:.*)rank 1")],
)
def test_the_others_hear_of_a_rank_that_breaks_off(how, says):
    survivor, broken = try_ranks(_break_off, how, timeout=60)
    assert re.search(says, survivor.error)
    assert broken.exitcode != 0


@on_ranks(2)
def test_a_part_that_is_sharded_again_and_a_step_after_the_end_are_refused(rank):
    model, optimizer = made(rank)
    with attach(model) as odc:
        whole, model.blocks[0] = model.blocks[0], fully_shard(new_model().blocks[0])
        with pytest.raises(ODCError, match=r"replaced after `attach\(model\)`"):
            odc.step(optimizer)
        model.blocks[0] = whole
    with pytest.raises(ODCError, match=r"call `attach\(model\)` again"):
        odc.step(optimizer)


def prepared(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Any, nn.Module, Any]:
    """An accelerator, and what its FSDP2 plugin makes of a model of transformers and its optimizer."""
    accelerate = pytest.importorskip("accelerate")
    plugin = accelerate.FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap"
    )
    accelerator = accelerate.Accelerator(cpu=True, fsdp_plugin=plugin)
    accelerator.state.fsdp_plugin = plugin  # 1.15 shards on GPUs alone
    for state in (accelerator.state, accelerate.PartialState()):
        state.distributed_type = accelerate.DistributedType.FSDP
    model, optimizer = accelerator.prepare(model, optimizer)
    return accelerator, model, optimizer


@on_ranks(2)
@pytest.mark.parametrize("tied", [False, True])
def test_a_model_that_accelerate_has_sharded(rank, tied):
    """Uneven microbatches in a loop of Accelerate end where one process ends."""
    model = causal_lm(tied=tied)
    for parameter in model.parameters():
        nn.init.uniform_(parameter, -0.3, 0.3, generator=torch.Generator().manual_seed(parameter.numel()))
    alone = copy.deepcopy(model)
    norms = []
    optimizer = torch.optim.AdamW(alone.parameters(), lr=0.01)
    for batches in step_by_step():
        count = sum(batch.numel() - 1 for batch in batches)
        for batch in batches:
            loss = alone(input_ids=batch, labels=batch).loss
            (loss * (batch.numel() - 1) / count).backward()
        norms.append(nn.utils.clip_grad_norm_(alone.parameters(), 0.1).item())
        optimizer.step()
        optimizer.zero_grad()

    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    accelerator, model, optimizer = prepared(model, optimizer)
    assert accelerator.is_fsdp2
    assert type(optimizer) is not torch.optim.AdamW
    found = []
    with attach(model) as odc:
        for batches in step_by_step():
            for batch in (batches[:4], batches[4:])[rank]:
                labels = batch.numel() - 1
                loss = model(input_ids=batch, labels=batch).loss * labels
                with odc.backward(weight=labels):
                    accelerator.backward(loss)
            found.append(odc.step(optimizer, max_norm=0.1).item())
            optimizer.zero_grad()
        assert odc.engine.traffic.reads > 0
    assert found == pytest.approx(norms, rel=1e-5)
    assert_same(full_parameters(model), full_parameters(alone))


@on_ranks(2)
def test_what_cannot_be_attached_is_refused_with_the_line_to_write(rank):
    init_gloo(rank)
    halves = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    two_meshes = new_model()
    fully_shard(two_meshes.blocks[0], mesh=halves["shard"])
    fully_shard(two_meshes)
    in_a_part = new_model()
    fully_shard(in_a_part.blocks[0])
    attached = sharded(new_model())
    with attach(attached) as odc:
        for words, model in {
            "fully_shard(model)": in_a_part,
            "FSDP1": FullyShardedDataParallel(new_model(), device_id=torch.device("cpu")),
            "wrapped in DistributedDataParallel": nn.parallel.DistributedDataParallel(new_model()),
            "same `mesh=`": two_meshes,
            "over the ranks [[0], [1]], and there are 2. For `attach`": sharded(new_model(), mesh=halves),
            "is attached already": attached,
            "shard it over all of them": sharded(new_model(), mesh=halves["shard"]),
        }.items():
            with pytest.raises((ValueError, TypeError), match=re.escape(words)):
                attach(model)
        with pytest.raises(ValueError, match="LBFGS"):
            odc.step(torch.optim.LBFGS(attached.parameters()))
        with pytest.raises(TypeError, match=r"not a list. Write .*Minibatch\(\[batch\]\)"):
            odc.run(token_batches([5]), attached)
        summed_loss(attached, token_batches([5])[0]).backward()
        with pytest.raises(ODCError, match=r"with odc\.backward\(weight=n\)"):
            odc.settle()


class Rows(nn.Module):
    """Runs out of memory with more rows than fit."""

    def __init__(self, fits: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([nn.Linear(8, 8)])
        self.head = nn.Linear(8, 1)
        self._fits = fits

    def forward(self, rows: Tensor) -> Tensor:
        if torch.is_grad_enabled() and len(rows) > self._fits:  # trials run forward alone
            raise torch.OutOfMemoryError(TEXT)
        return self.head(self.blocks[0](rows).tanh()).square().mean()


@needs_reset
@on_ranks(2)
def test_what_runs_again_in_parts_loses_nothing_of_a_loop_that_synchronizes_late(rank):
    init_gloo(rank)
    generator = torch.Generator().manual_seed(rank)
    batches = [torch.randn(4, 8, generator=generator) for _ in range(3)]
    parameters = []
    for rows in (4, 4 - 2 * rank):
        model = sharded(Rows(rows))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with attach(model) as odc, warned() as said:
            for part in (batches[:2], batches[2:]):
                model.set_requires_gradient_sync(len(part) == 1)
                odc.run(Minibatch(part, weights=[4] * len(part)), model)
            odc.step(optimizer)
        parameters.append(full_parameters(model))
    assert len(said) == rank
    assert_same(*parameters)


def write(own: Any, directory: Path) -> None:
    """The model, on rank 0 alone: into one file, then into several over it."""
    if own.trainer.is_global_zero:
        for max_file_bytes in (5_000_000_000, 3_000):
            stream = own.trainer.strategy.stream_parameters(own.net)
            save_pretrained(own.net, stream, str(directory), max_file_bytes)


@on_ranks(2)
@pytest.mark.parametrize("tied", [False, True])
def test_from_pretrained_reads_what_one_rank_wrote(rank, tied, tmp_path):
    module = CausalLM(partial(causal_lm, tied=tied))
    doing(module, on_train_batch_end=partial(write, directory=tmp_path))
    trainer(2).fit(module, loader(token_batches([6, 9], seed=rank)))
    trained = full_parameters(module.net)
    files = sorted(path.name for path in tmp_path.glob("*model*"))
    assert len(files) > 3
    assert "model.safetensors.index.json" in files
    for path in tmp_path.glob("*.safetensors"):
        assert path.stat().st_size < 8_000
    read = AutoModelForCausalLM.from_pretrained(tmp_path)
    for name, value in full_parameters(read).items():
        assert torch.equal(value, trained[name])
