"""Roll-outs on two real ranks: exchanged, scored and learnt from as in one process, wherever they were sampled."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from lightning_odc import rl
from tests.rl.sampled import VOCAB, logprobs_alone, rolled_out, textbook_loss
from tests.strategy.test_models import causal_lm
from tests.support.models import Net, full_parameters
from tests.support.modules import loader, trainer
from tests.support.ranks import Cases, run_calls, try_ranks

#: Prompts and responses; the sixth response is empty.
LENGTHS = [(2, 5), (1, 12), (4, 1), (1, 7), (3, 3), (2, 0), (1, 4)]
#: The ranks that sampled them, in two steps: groups are spread over both, and then rank 1 had no prompts.
PLACES = ([0, 1, 1, 0, 1, 0, 0], [0] * 7)
LR, CLIP, BETA = 0.05, (0.1, 0.3), 0.1
EPOCHS, MINIBATCHES = 2, 5  # of one or two roll-outs, so that a rank may have none


def llamas() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    return causal_lm(), causal_lm()


def nets() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    return Net(vocab=VOCAB), Net(vocab=VOCAB)


class Learns(LightningModule):
    """PPO on roll-outs whose sampling is left out."""

    def __init__(self, make: Callable[[], tuple[nn.Module, nn.Module]], loss_type: Any) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.policy, self.reference = make()
        self.reference.requires_grad_(False)
        self.loss_type = loss_type
        self.scores: list[list[list[float]]] = []
        self.microbatches: list[int] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        places = PLACES[batch_idx]
        own = [one for one, rank in zip(rolled_out(LENGTHS), places, strict=True) if rank == self.global_rank]
        if self.trainer.world_size == 1:
            own = rolled_out(LENGTHS)
        rollouts = rl.exchange(self, own)
        counts = [places.count(rank) for rank in range(self.trainer.world_size)]
        assert rollouts.sampled == (counts if len(counts) > 1 else [7])
        assert [one.group for one in rollouts] == [0] * 4 + [1] * 3
        rl.normalize_advantages(rollouts)
        rl.score(self.policy, rollouts, into="logprobs")
        rl.score(self.reference, rollouts, into="ref_logprobs")
        assert self.policy.training
        self.scores.append([[*one.logprobs, *one.ref_logprobs] for one in by_index(rollouts)])  # type: ignore[misc]
        optimizer: Any = self.optimizers()
        for update in rollouts.updates(EPOCHS, MINIBATCHES, seed=batch_idx):
            self.microbatches.append(len(update))
            for microbatch in update:
                new = rl.logprobs(self.policy, microbatch)
                loss = rl.policy_loss(
                    new,
                    microbatch,
                    loss_type=self.loss_type,
                    clip_range=CLIP,
                    beta=BETA,
                    max_response_length=12,
                )
                self.manual_backward(loss.scaled)
            optimizer.step()
            optimizer.zero_grad()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.policy.parameters(), lr=LR)


def by_index(rollouts: Any) -> list[rl.Rollout]:
    return sorted(rollouts, key=lambda one: one.metadata["index"])


def _learn(rank: int, make: Any, losses: dict[str, str], world_size: int = 2) -> list[Any]:
    found = []
    for communication, loss_type in losses.items():
        module = Learns(make, loss_type)
        t = trainer(world_size, communication=communication, timeout=timedelta(seconds=60))
        t.fit(module, loader([torch.zeros(1)] * len(PLACES)))
        scores = [[[float(x) for x in one] for one in step] for step in module.scores]
        found.append((scores, full_parameters(module), module.microbatches))
    return found


def one_process(make: Any, loss_type: str) -> tuple[list[Any], dict[str, Tensor]]:
    """The same without any of the module: response by response, with the minibatches of the plan."""
    policy, reference = make()
    optimizer, scores = torch.optim.SGD(policy.parameters(), lr=LR), []
    for step in range(len(PLACES)):
        # The order of the exchange: by group, and in it by rank.
        places = PLACES[step]
        order = sorted(range(len(LENGTHS)), key=lambda i: (i % 2, places[i], i))
        rollouts = rl.Rollouts([rolled_out(LENGTHS)[i] for i in order])
        rl.normalize_advantages(rollouts)
        with torch.no_grad():
            for one in rollouts:
                one.logprobs, one.ref_logprobs = logprobs_alone(policy, one), logprobs_alone(reference, one)
        scores.append([[*one.logprobs.tolist(), *one.ref_logprobs.tolist()] for one in by_index(rollouts)])  # type: ignore[union-attr]
        for update in rollouts.updates(EPOCHS, MINIBATCHES, seed=step):
            chosen = [rollouts[i] for microbatch in update.plan[0] for i in microbatch]
            optimizer.zero_grad()
            textbook_loss(policy, chosen, loss_type, CLIP, BETA, 12).backward()
            optimizer.step()
    return scores, {f"policy.{name}": p.detach() for name, p in policy.named_parameters()}


LEARNT = {llamas: {"on_demand": "dapo", "collective": "gspo"}, nets: {"on_demand": "grpo"}}
HAS_PEFT = importlib.util.find_spec("peft") is not None


@pytest.fixture(scope="module")
def ranks() -> Cases:
    """All that two ranks learn, in one launch."""
    calls: dict[Any, tuple[Any, ...]] = {make: (_learn, make, losses) for make, losses in LEARNT.items()}
    calls |= {"adapters": (_adapt,)} if HAS_PEFT else {}
    return run_calls(calls | {"fabric": (_learn_with_fabric,)})


@pytest.mark.parametrize(("make", "losses"), LEARNT.items())
def test_scores_and_updates_are_those_of_one_process(ranks: Cases, make: Any, losses: dict[str, str]) -> None:
    expected = [one_process(make, loss_type) for loss_type in losses.values()]
    first, second = ranks[make]
    for communication, (scores, parameters), one, other in zip(losses, expected, first, second, strict=True):
        assert one[0] == other[0]  # every rank has all scores, the same ones
        for mine, theirs in zip(one[0], scores, strict=True):
            flat = torch.tensor([x for row in mine for x in row])
            # Logits of size 1 in fp32; in the second step, of parameters that differ by less than 1e-5.
            torch.testing.assert_close(
                flat, torch.tensor([x for row in theirs for x in row]), rtol=0, atol=1e-5
            )
        before = dict(make()[0].named_parameters())
        moved = max((parameters[f"policy.{name}"] - value).abs().max() for name, value in before.items())
        assert moved > 0.01
        for name, value in parameters.items():
            # 20 steps of SGD: sums in another order, 1e-7 of gradients of size 1, times the rate of 0.05.
            torch.testing.assert_close(one[1][name], value, rtol=0, atol=1e-5)
        counts = list(zip(one[2], other[2], strict=True))
        assert len(counts) == len(PLACES) * EPOCHS * MINIBATCHES
        assert any(a != b for a, b in counts) == (communication == "on_demand")


# -- adapters --------------------------------------------------------------------------------------------------


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
        rollouts = rl.exchange(self, rolled_out(LENGTHS) if self.global_rank == 0 else [])
        rl.normalize_advantages(rollouts)
        with self.policy.disable_adapter():
            reference = rl.score(self.policy, rollouts, into="ref_logprobs")
        policy = rl.score(self.policy, rollouts)
        self.found.append([torch.cat(reference).tolist(), torch.cat(policy).tolist()])
        optimizer: Any = self.optimizers()
        for update in rollouts.updates():
            for microbatch in update:
                loss = rl.policy_loss(rl.logprobs(self.policy, microbatch), microbatch)
                self.manual_backward(loss.scaled)
            optimizer.step()
            optimizer.zero_grad()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=10.0)


def _adapt(rank: int) -> Any:
    module = Adapts()
    trainer(2, timeout=timedelta(seconds=60)).fit(module, loader([torch.zeros(1)] * 3))
    return module.found


@pytest.mark.skipif(not HAS_PEFT, reason="peft is not installed")
def test_the_reference_is_the_policy_without_its_adapters(ranks: Cases) -> None:
    first, second = ranks["adapters"]
    assert first == second
    references, policies = zip(*first, strict=True)
    torch.manual_seed(0)
    base = causal_lm()
    with torch.no_grad():
        truth = torch.cat(
            [logprobs_alone(base, one) for one in sorted(rolled_out(LENGTHS), key=lambda o: o.group)]
        )
    for reference in references:  # in every step
        torch.testing.assert_close(torch.tensor(reference), truth, rtol=0, atol=1e-5)
    torch.testing.assert_close(torch.tensor(policies[0]), truth, rtol=0, atol=1e-5)  # adapters begin at zero
    for policy in policies[1:]:  # and learn
        assert (torch.tensor(policy) - truth).abs().max() > 1e-3


# -- Fabric ----------------------------------------------------------------------------------------------------


def _learn_with_fabric(rank: int) -> Any:
    fabric = Fabric(strategy="odc", accelerator="cpu", devices=2)
    fabric.launch()
    policy = nets()[0]
    model, optimizer = fabric.setup(policy, torch.optim.SGD(policy.parameters(), lr=LR))
    rollouts = rl.exchange(fabric, rolled_out(LENGTHS) if rank == 1 else [])
    rl.normalize_advantages(rollouts)
    rl.score(model, rollouts, into="logprobs")
    counts = []
    for update in rollouts.updates(EPOCHS, MINIBATCHES):
        counts.append(len(update))
        for microbatch in update:
            loss = rl.policy_loss(rl.logprobs(model, microbatch), microbatch, clip_range=CLIP)
            fabric.backward(loss.scaled)
        optimizer.step()
        optimizer.zero_grad()
    strategy: Any = fabric.strategy
    strategy.teardown()
    return full_parameters(policy), counts


def test_fabric(ranks: Cases) -> None:
    policy = nets()[0]
    rollouts = rl.Rollouts(sorted(rolled_out(LENGTHS), key=lambda one: one.group))
    rl.normalize_advantages(rollouts)
    rl.score(policy, rollouts, into="logprobs")
    optimizer = torch.optim.SGD(policy.parameters(), lr=LR)
    for update in rollouts.updates(EPOCHS, MINIBATCHES):
        chosen = [rollouts[i] for microbatch in update.plan[0] for i in microbatch]
        optimizer.zero_grad()
        textbook_loss(policy, chosen, "dapo", CLIP, 0.0, 12).backward()
        optimizer.step()
    (first, one), (_, other) = ranks["fabric"]
    for name, value in policy.named_parameters():
        torch.testing.assert_close(first[name], value.detach(), rtol=0, atol=1e-5)
    assert 0 in one + other


# -- what goes wrong -------------------------------------------------------------------------------------------


class Fails(Learns):
    def __init__(self) -> None:
        super().__init__(nets, "dapo")

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        if self.global_rank == 1:
            raise ArithmeticError("the reward function divides by zero")
        super().training_step(batch, batch_idx)


def _fail(rank: int) -> None:
    trainer(2, timeout=timedelta(seconds=60)).fit(Fails(), loader([torch.zeros(1)] * 2))


def test_a_reward_function_that_raises_ends_all_ranks_and_is_named() -> None:
    begin = time.monotonic()
    first, second = try_ranks(_fail)
    assert time.monotonic() - begin < 60  # not by the timeout of a wait
    assert "ArithmeticError: the reward function divides by zero" in second.error
    assert "PeerFailedError" in first.error
    assert "rank 1" in first.error.lower()
    assert "the reward function divides by zero" in first.error


def test_what_is_exchanged() -> None:
    with pytest.raises(TypeError, match=r"list of rl.Rollout, and got a dict"):
        rl.exchange(trainer(1), [{"tokens": [1]}])  # type: ignore[list-item]
    with pytest.raises(
        TypeError, match=r'Trainer with SingleDeviceStrategy. Write(.|\n)*Trainer\(strategy="odc_plain"'
    ):
        rl.exchange(trainer(1, strategy="auto"), [])
