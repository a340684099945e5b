"""The exchange of roll-outs between ranks, as raw numbers and JSON, without pickle."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lightning_odc.rl.ranks import Ranks, strategy_of
from lightning_odc.rl.rollout import Rollout, from_bytes, to_bytes
from lightning_odc.rl.rollouts import Rollouts
from lightning_odc.strategy.model_facts import causal_model, cost_of_model, keeps_apart


def exchange(
    where: Any, own: Sequence[Rollout], *, max_tokens: int | None = None, cost: Any = "auto"
) -> Rollouts:
    """The roll-outs of all ranks. All ranks together, inside a step of the module.

    They come in the order of their groups: numbers rise, then texts. Within a group they are in rank order. So the
    order does not depend on who sampled which group.

    Args:
        where: The `LightningModule` that trains (``self``), its trainer, or a ``Fabric``.
        own: The roll-outs that this rank has sampled; an empty list if it had no prompts.
        max_tokens: The most tokens in a microbatch, padding included. By default, and at least, those of the longest
            roll-out, which has to fit anyway.
        cost: The cost of a roll-out, as in `lightning_odc.balance.plan_minibatch`; ``"auto"``: what the model says.

    Returns:
        The same roll-outs in the same order on every rank, with a plan.

    Raises:
        TypeError: A strategy of another package, or an item of ``own`` that is not a `Rollout`.
        PeerFailedError: another rank has failed, for example in its reward function. It names the rank and shows the
            error.
    """
    strategy = strategy_of(where, "rl.exchange(self, rollouts)")
    _check(own)
    ranks, model = Ranks.of(strategy), causal_model(strategy.model)
    packs = model is not None and keeps_apart(model, ranks.device)
    shares, all_pack = ranks.gather("exchange of roll-outs", to_bytes(own), packs)
    by_rank = [from_bytes(share) for share in shares]
    if isinstance(cost, str) and cost == "auto":
        cost = cost_of_model(strategy.model, ranks.device.type).cost
    return Rollouts(
        sorted((one for share in by_rank for one in share), key=_by_group),
        ranks,
        max_tokens=max_tokens,
        cost=cost,
        keeps_apart=all(all_pack),
        sampled=[len(share) for share in by_rank],
    )


def _check(own: Sequence[Any]) -> None:
    other = next((one for one in own if not isinstance(one, Rollout)), None)
    if other is not None:
        raise TypeError(
            f"rl.exchange(self, rollouts) takes a list of rl.Rollout, and got a {type(other).__name__} in it: "
            "[rl.Rollout(prompt + response, len(prompt), reward)]."
        )


def _by_group(one: Rollout) -> tuple[bool, Any]:
    """Numbers before texts, which do not compare with each other."""
    return isinstance(one.group, str), one.group
