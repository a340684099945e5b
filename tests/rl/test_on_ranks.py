"""Roll-outs on two real ranks: exchanged, scored and learnt from as in one process, wherever they were sampled."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from lightning_odc import rl
from tests.rl.sampled import (
    VOCAB,
    logprobs_alone,
    policy_loss,
    rolled_out,
    set_advantages,
    textbook_loss,
)
from tests.strategy.test_models import causal_lm
from tests.support.fits import assert_same, largest_difference
from tests.support.models import Net, full_parameters
from tests.support.modules import loader, trainer
from tests.support.ranks import of_all_ranks, on_ranks
from tests.support.tiers import fast

#: Prompts and responses; the sixth response is empty.
LENGTHS = [(2, 5), (1, 12), (4, 1), (1, 7), (3, 3), (2, 0), (1, 4)]
#: The ranks that sampled them, in two steps: groups are spread over both, and then rank 1 had no prompts.
PLACES = ([0, 1, 1, 0, 1, 0, 0], [0] * 7)
LR = 0.05
EPOCHS = 2
MINIBATCHES = 5  # of one or two roll-outs, so that a rank may have none


def llamas() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    return causal_lm(), causal_lm()


def nets() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    return Net(vocab=VOCAB), Net(vocab=VOCAB)


def learn(policy: Any, updates: Any, optimizer: Any, backward: Any, counts: list[int]) -> None:
    """The loop of a user, on one rank."""
    for update in updates:
        counts.append(len(update))
        for microbatch in update:
            backward(policy_loss(rl.logprobs(policy, microbatch), microbatch))
        optimizer.step()
        optimizer.zero_grad()


def learn_alone(policy: Any, rollouts: Any, optimizer: Any, seed: int = 0) -> None:
    """The same by the textbook, with the minibatches of the plan."""
    for update in rollouts.updates(EPOCHS, MINIBATCHES, seed=seed):
        chosen = [one for microbatch in update for one in microbatch.rollouts]
        optimizer.zero_grad()
        textbook_loss(policy, chosen).backward()
        optimizer.step()


class Learns(LightningModule):
    """PPO on roll-outs whose sampling is left out."""

    def __init__(self, make: Callable[[], tuple[nn.Module, nn.Module]]) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.policy, self.reference = make()
        self.reference.requires_grad_(False)
        self.scores: list[list[list[float]]] = []
        self.microbatches: list[int] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        places = PLACES[batch_idx]
        own = [one for one, rank in zip(rolled_out(LENGTHS), places, strict=True) if rank == self.global_rank]
        if self.trainer.world_size == 1:
            own = rolled_out(LENGTHS)
        rollouts = rl.exchange(self, own)
        assert [one.group for one in rollouts] == [0] * 4 + [1] * 3
        set_advantages(rollouts)
        rl.score(self.policy, rollouts, into="logprobs")
        rl.score(self.reference, rollouts, into="ref_logprobs")
        assert self.policy.training
        self.scores.append([[*one.logprobs, *one.ref_logprobs] for one in by_index(rollouts)])  # type: ignore[misc]
        updates = rollouts.updates(EPOCHS, MINIBATCHES, seed=batch_idx)
        learn(self.policy, updates, self.optimizers(), self.manual_backward, self.microbatches)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.policy.parameters(), lr=LR)


def by_index(rollouts: Any) -> list[rl.Rollout]:
    return sorted(rollouts, key=lambda one: one.metadata["index"])


def one_process(make: Any) -> tuple[list[Any], dict[str, Tensor]]:
    """The same without any of the module: response by response, with the minibatches of the plan."""
    policy, reference = make()
    optimizer = torch.optim.SGD(policy.parameters(), lr=LR)
    scores = []
    for step in range(len(PLACES)):
        # The order of the exchange: by group, and in it by rank.
        places = PLACES[step]
        order = sorted(range(len(LENGTHS)), key=lambda i: (i % 2, places[i], i))
        rollouts = rl.Rollouts([rolled_out(LENGTHS)[i] for i in order])
        set_advantages(rollouts)
        with torch.no_grad():
            for one in rollouts:
                one.logprobs = logprobs_alone(policy, one)
                one.ref_logprobs = logprobs_alone(reference, one)
        scores.append([[*one.logprobs.tolist(), *one.ref_logprobs.tolist()] for one in by_index(rollouts)])  # type: ignore[union-attr]
        learn_alone(policy, rollouts, optimizer, seed=step)
    return scores, {f"policy.{name}": p.detach() for name, p in policy.named_parameters()}


HAS_PEFT = importlib.util.find_spec("peft") is not None


@on_ranks(2)
@pytest.mark.parametrize(
    ("make", "communication"),
    fast([(llamas, "on_demand"), (llamas, "collective"), (nets, "on_demand")], (nets, "on_demand")),
)
def test_scores_and_updates_are_those_of_one_process(rank, make, communication) -> None:
    module = Learns(make)
    t = trainer(2, communication=communication, timeout=timedelta(seconds=60))
    t.fit(module, loader([torch.zeros(1)] * len(PLACES)))
    scores, parameters = one_process(make)
    first, second = of_all_ranks(module.scores)
    assert first == second, "every rank has all scores, the same ones"
    for mine, theirs in zip(module.scores, scores, strict=True):
        flat = torch.tensor([float(x) for row in mine for x in row])
        # Logits of size 1 in fp32; in the second step, of parameters that differ by less than 1e-5.
        torch.testing.assert_close(flat, torch.tensor([x for row in theirs for x in row]), rtol=0, atol=1e-5)
    before = {f"policy.{name}": value for name, value in make()[0].named_parameters()}
    assert largest_difference(before, parameters) > 0.01
    found = full_parameters(module)
    # 20 steps of SGD: sums in another order, 1e-7 of gradients of size 1, times the rate of 0.05.
    assert_same({name: found[name] for name in parameters}, parameters, tolerance=1e-5)
    counts = list(zip(*of_all_ranks(module.microbatches), strict=True))
    assert len(counts) == len(PLACES) * EPOCHS * MINIBATCHES
    assert any(a != b for a, b in counts) == (communication == "on_demand")


class Adapts(LightningModule):
    """The reference is the policy without its adapters, scored before anything else has run."""

    def __init__(self) -> None:
        super().__init__()
        from tests.strategy.test_models import with_lora

        self.automatic_optimization = False
        torch.manual_seed(0)
        self.policy: Any = with_lora()
        self.found: list[Any] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        own = []
        if self.global_rank == 0:
            own = rolled_out(LENGTHS)
        rollouts = rl.exchange(self, own)
        set_advantages(rollouts)
        with self.policy.disable_adapter():
            rl.score(self.policy, rollouts, into="ref_logprobs")
        rl.score(self.policy, rollouts, into="logprobs")
        found = [[one.ref_logprobs for one in rollouts], [one.logprobs for one in rollouts]]
        self.found.append([torch.cat(scores).tolist() for scores in found])
        learn(self.policy, rollouts.updates(), self.optimizers(), self.manual_backward, [])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=10.0)


@on_ranks(2)
@pytest.mark.skipif(not HAS_PEFT, reason="peft is not installed")
def test_the_reference_is_the_policy_without_its_adapters(rank) -> None:
    module = Adapts()
    trainer(2, timeout=timedelta(seconds=60)).fit(module, loader([torch.zeros(1)] * 3))
    first, second = of_all_ranks(module.found)
    assert first == second
    references, policies = zip(*module.found, strict=True)
    torch.manual_seed(0)
    base = causal_lm()
    in_order = sorted(rolled_out(LENGTHS), key=lambda one: one.group)
    with torch.no_grad():
        truth = torch.cat([logprobs_alone(base, one) for one in in_order])
    for reference in references:  # in every step
        torch.testing.assert_close(torch.tensor(reference), truth, rtol=0, atol=1e-5)
    torch.testing.assert_close(torch.tensor(policies[0]), truth, rtol=0, atol=1e-5)  # adapters begin at zero
    for policy in policies[1:]:  # and learn
        assert (torch.tensor(policy) - truth).abs().max() > 1e-3


@on_ranks(2)
def test_fabric(rank) -> None:
    fabric = Fabric(strategy="odc", accelerator="cpu", devices=2)
    fabric.launch()
    policy = nets()[0]
    alone = nets()[0]
    model, optimizer = fabric.setup(policy, torch.optim.SGD(policy.parameters(), lr=LR))
    rollouts = rl.exchange(fabric, rolled_out(LENGTHS) if rank == 1 else [])
    set_advantages(rollouts)
    rl.score(model, rollouts, into="logprobs")
    counts: list[int] = []
    learn(model, rollouts.updates(EPOCHS, MINIBATCHES), optimizer, fabric.backward, counts)
    strategy: Any = fabric.strategy
    strategy.teardown()
    assert 0 in [count for own in of_all_ranks(counts) for count in own]
    rollouts = rl.Rollouts(sorted(rolled_out(LENGTHS), key=lambda one: one.group))
    set_advantages(rollouts)
    rl.score(alone, rollouts, into="logprobs")
    learn_alone(alone, rollouts, torch.optim.SGD(alone.parameters(), lr=LR))
    assert_same(full_parameters(policy), full_parameters(alone), tolerance=1e-5)


def test_what_is_exchanged() -> None:
    with pytest.raises(ValueError, match=r"exchange\(own=.*\) cannot work. Write own=\[Rollout\(\.\.\.\)\]"):
        rl.exchange(trainer(1), [{"tokens": [1]}])  # type: ignore[list-item]
    with pytest.raises(
        TypeError, match=r'Trainer with SingleDeviceStrategy. Write(.|\n)*Trainer\(strategy="odc_plain"'
    ):
        rl.exchange(trainer(1, strategy="auto"), [])
