"""Advantages: how much better a response is than the others of its group."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence

from lightning_odc.rl.rollouts import Rollouts


def group_advantages(
    rewards: Sequence[float], groups: Sequence[Hashable], *, scale: bool = True, epsilon: float = 1e-4
) -> list[float]:
    """Rewards less the mean of their group, over its standard deviation.

    Sums are exact, so that neither the order nor the place of the responses changes a bit of the results.

    Two groups, with ``epsilon=0``::

        groups        a     a     b    a    b
        rewards       0     1     5    2    5
        mean          1     1     5    1    5
        deviation     1     1     0    1    0      over n - 1
        advantages   -1     0     0    1    0

    Args:
        rewards: One number per response.
        groups: The same for the responses to one prompt, in any order. A response alone has the advantage 0.
        scale: Whether to divide by the standard deviation, as GRPO does; Dr. GRPO does not.
        epsilon: The number to add to the standard deviation.

    Returns:
        One number per response.

    Raises:
        ValueError: there are not as many groups as rewards, or a reward is not finite.

    Source: *DeepSeekMath*, arXiv 2402.03300, and *Understanding R1-Zero-Like Training*, arXiv 2503.20783 (Dr. GRPO).
    """
    members: dict[Hashable, list[float]] = {}
    for reward, group in zip(rewards, groups, strict=True):
        if not math.isfinite(reward):
            raise ValueError(
                f"A response of group {group!r} has the reward {reward}, and rewards are compared: use finite ones."
            )
        members.setdefault(group, []).append(reward)
    # Rounding must not make equal rewards differ from their mean.
    means = {
        group: own[0] if min(own) == max(own) else math.fsum(own) / len(own) for group, own in members.items()
    }
    if not scale:
        return [reward - means[group] for reward, group in zip(rewards, groups, strict=True)]
    spreads = {group: _deviation(own, means[group]) + epsilon for group, own in members.items()}
    return [
        (reward - means[group]) / spreads[group] if reward != means[group] else 0.0
        for reward, group in zip(rewards, groups, strict=True)
    ]


def _deviation(values: Sequence[float], mean: float) -> float:
    """The standard deviation over ``n - 1``; 0 of a single value."""
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / max(len(values) - 1, 1))


def normalize_advantages(rollouts: Rollouts, *, scale: bool = True, epsilon: float = 1e-4) -> None:
    """Set the advantage of every roll-out by `group_advantages`, wherever those of its group were sampled.

    Args:
        rollouts: The roll-outs of all ranks, with rewards and groups.
        scale: The same as in `group_advantages`.
        epsilon: The same as in `group_advantages`.

    Raises:
        ValueError: a reward is not finite.
    """
    rewards, groups = [one.reward for one in rollouts], [one.group for one in rollouts]
    advantages = group_advantages(rewards, groups, scale=scale, epsilon=epsilon)
    for one, advantage in zip(rollouts, advantages, strict=True):
        one.advantage = advantage
