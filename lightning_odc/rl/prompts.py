"""Prompts that ranks share while they sample: a rank that is done takes prompts of a rank that still samples.

Note [The answer does not depend on the rank]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Time decides which rank samples a prompt. Three things keep time out of the answers. A prompt has an *index*, its
place among the prompts of all ranks, rank 0's first. Random numbers are seeded from that index while a prompt is
sampled. And items are not regrouped: one item of a rank, even a batch, is sampled as one item.

Two ranks with prompts ``[a, b]`` and ``[c, d, e]``; the responses to ``c`` and ``d`` are long::

    index    0    1    2    3    4
    prompt   a    b    c    d    e
    seed     s    s+1  s+2  s+3  s+4     s: drawn by rank 0 in every call, and told to all
    rank     0    0    1    1    0       e would have been rank 1's, but rank 0 was done
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from lightning.fabric.utilities import move_data_to_device

from lightning_odc.protocol.sample_group import Claims
from lightning_odc.rl.ranks import ranks_of

_SEEDS = 2**62


class _Share(NamedTuple):
    """The message of a rank to the others."""

    prompts: list[Any]
    costs: list[float]
    seed: int


def claim_prompts(
    where: Any, prompts: Iterable[Any], expected: Iterable[float] | None = None
) -> Iterator[tuple[int, Any]]:
    """Iterate over the prompts that this rank is to sample: its own, then those of ranks that still sample.

    Every prompt of every rank comes up exactly once, on one of the ranks. Write the loop in ``training_step``, and
    keep the index with the response::

        for index, prompt in rl.claim_prompts(self, prompts):
            tokens = self.model.generate(prompt, do_sample=True, max_new_tokens=512)

    Inside the loop's body, ``torch``'s random numbers begin from a seed of the prompt's own. So the responses are the
    same on every rank. After the loop, random numbers continue as if it had not run.

    All ranks call it together, and synchronize. Where they synchronize at every unit (``communication="collective"``),
    every rank gets its own prompts only, since there they must generate equally often. With several nodes, prompts are
    taken from ranks of the same node.

    Args:
        where: The `LightningModule` that trains (``self``), its trainer, or a ``Fabric``.
        prompts: This rank's prompts, 0 to 4095 of them, which are pickled. Tensors come back on the rank's device. An
            item may be a batch of prompts, which is then sampled by one rank.
        expected: The length that each response is expected to have, in any unit. The longest ones are sampled first,
            so that what is left to the end, and to other ranks, is short. By default all are equal.

    Yields:
        The index of the prompt among those of all ranks, rank 0's first, and the prompt.

    Raises:
        TypeError: ``prompts`` is a single prompt or batch, or another strategy than those of this package.
        ValueError: there is not one finite positive length for every prompt, or ranks that synchronize at every unit
            have different numbers of prompts.
        PeerFailedError: another rank has failed or died.
    """
    strategy, ranks = ranks_of(where, "rl.claim_prompts(self, prompts)")
    if isinstance(prompts, str | Mapping):
        raise TypeError("claim_prompts needs a list of prompts, or of batches: claim_prompts(self, [batch]).")
    own = list(prompts)
    costs = [1.0] * len(own)
    if expected is not None:
        costs = [float(cost) for cost in expected]
    if len(costs) != len(own) or not all(0 < cost < math.inf for cost in costs):
        raise ValueError(
            f"claim_prompts got {len(own)} prompts and the lengths {costs}. Give one finite positive number per "
            "prompt: claim_prompts(self, [a, b], expected=[100, 2000])."
        )
    seed = int(torch.randint(_SEEDS, ()))
    shares = ranks.gather("claim prompts", _Share(own, costs, seed))
    counts = [len(share.prompts) for share in shares]
    # All ranks make each call of ``generate`` together.
    if ranks.meets and len(set(counts)) > 1:
        raise ValueError(
            f'communication="{strategy.communication}" makes all ranks generate together, so every rank needs the same '
            f"number of prompts, but they have {counts} (by rank). Use "
            'ODCStrategy(communication="on_demand"), or give every rank equally many.'
        )
    in_order = [sorted(share.costs, reverse=True) for share in shares]
    claimed = strategy.engine.claims(strategy.global_rank, in_order)
    return _sampled(strategy, shares, claimed)


def _sampled(strategy: Any, shares: Sequence[_Share], claimed: Claims) -> Iterator[tuple[int, Any]]:
    """See Note [The answer does not depend on the rank]."""
    device: torch.device = strategy.root_device
    counts = [len(share.prompts) for share in shares]
    first = list(itertools.accumulate(counts, initial=0))  # in the example [0, 2, 5]
    orders = [np.argsort(np.negative(share.costs), kind="stable") for share in shares]  # the longest first
    devices = []  # besides the CPU
    if device.type == "cuda":
        devices.append(device)
    with torch.random.fork_rng(devices):
        for rank, number in claimed:
            place = int(orders[rank][number])
            index = first[rank] + place
            torch.manual_seed(shares[0].seed + index)
            prompt = move_data_to_device(shares[rank].prompts[place], device)
            with strategy.engine.traced("sampling", prompt=index):
                yield index, prompt
