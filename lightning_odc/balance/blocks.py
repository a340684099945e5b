"""Padded microbatches that line up: equal counts of samples, and the ``m``-th microbatches of all ranks alike.

Collectives wait for the largest ``m``-th microbatch of all ranks. So samples are sorted by length and cut into
*blocks* of ``num_ranks * k`` neighbours. A block is one microbatch of ``k`` samples on every rank. It costs as much as
``k`` rows of its longest sample, and `cut` finds the blocks of least total cost.

Example: 2 ranks, lengths 10, 11, 12, 13, 40, 41. Neighbours make the rows (10, 11), (12, 13), (40, 41). The blocks may
be (10, 11, 12, 13) with two samples per rank and (40, 41) with one: the ranks get ``[[41], [11, 10]]`` and
``[[40], [13, 12]]``. The rank with the longest sample gets the shorter part of the next block.

If the number of ranks does not divide the number of samples, some ranks get one more. They put it together with another
one of the shortest samples, so that no rank has more microbatches than others. If too few samples fit together, those
ranks have one microbatch more, and the others an empty one.

Blocks waste time if one sample is far longer than its neighbours. So for up to 256 samples ranks are also lined up
one after another: while one rank runs a sample of 100 tokens, another one runs three of 30.

If samples have rows of numbers, blocks are made of the first numbers. The samples of a block are dealt out to its
parts by the other numbers: largest first, forwards and backwards, so that parts have similar sums.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from lightning_odc.balance.arrays import Floats, Ints, Plan
from lightning_odc.balance.padding import PaddedSamples, cut
from lightning_odc.balance.partition import partition
from lightning_odc.balance.workload import Workload

_MOST_FIRST_BLOCKS = 16

_MOST_LINED_UP = 256

Block = list[list[int]]
"""The samples of each rank in one microbatch, numbered as in `PaddedSamples`; before ranks are chosen, in any order."""
Columns = list[list[list[int]]]
"""For each rank its microbatches, of samples numbered as in `PaddedSamples`."""


def padded_blocks(samples: PaddedSamples, starts: int) -> Plan:
    """The microbatches of every rank, equally many; some are empty if they must be.

    Args:
        samples: the samples, and what their rows cost; all caps are equal.
        starts: see `Planner`.
    """
    best = _deal(samples, _blocks(samples))
    if starts and len(samples.sizes) <= _MOST_LINED_UP:
        options = [_costliest_first(samples, columns) for columns in (best, *_lined_up(samples, best))]
        best = min(options, key=lambda columns: _span(samples, columns))
    else:
        best = _costliest_first(samples, best)
    return [[samples.named(own) for own in column] for column in best]


def _blocks(samples: PaddedSamples) -> list[Block]:
    """The blocks of least total cost."""
    everything = np.arange(len(samples.sizes))
    if len(everything) % samples.num_ranks == 0:
        return _cut_rows(samples, everything)[1]
    options = []
    for first in _first_blocks(samples):
        rest = np.delete(everything, [sample for own in first for sample in own])
        total, blocks = _cut_rows(samples, rest)
        options.append((total + _cost_of(samples, first), [*blocks, first]))
    return min(options, key=lambda option: option[0])[1]


def _cut_rows(samples: PaddedSamples, members: Ints) -> tuple[float, list[Block]]:
    """Blocks of samples that the ranks divide, and what they cost together."""
    rows = members.reshape(-1, samples.num_ranks)  # [rows, num_ranks], rising
    if not len(rows):
        return 0.0, []
    longest, here = rows[:, -1], np.arange(len(rows))
    by_rank = _slowest_first(samples) if not samples.alike else np.zeros(samples.num_ranks, dtype=np.int64)
    costs = samples.costs[by_rank, rows].max(1)
    most = np.maximum(samples.caps[0] // samples.sizes[longest], 1)
    # If rows must have equal lengths, a block begins with a row in which all have the length of its longest.
    alike = np.minimum(np.searchsorted(rows[:, 0], samples.runs[longest]), here)
    firsts = np.maximum(here + 1 - most, alike)
    if samples.others is not None:
        firsts = np.maximum.accumulate(_where_parts_fit(samples, rows, firsts))
    total, cuts = cut(costs.tolist(), firsts.tolist(), float(samples.overhead.max()))
    parts = (_parts(samples, rows[own.start : own.stop].ravel()) for own in cuts)
    return total, [block.tolist() for block in parts]


def _parts(samples: PaddedSamples, members: Ints) -> Ints:
    """``[num_ranks, k]``: the samples of a block, rising, as parts of ``k`` samples, each rising."""
    if samples.others is None:
        return members.reshape(samples.num_ranks, -1)
    shares = samples.others[0].shares
    falling = sorted(members.tolist(), key=lambda sample: -shares[sample])
    rounds = np.array(falling).reshape(-1, samples.num_ranks)
    rounds[1::2] = rounds[1::2, ::-1]
    return np.sort(rounds.T, axis=1)


def _where_parts_fit(samples: PaddedSamples, rows: Ints, firsts: Ints) -> Ints:
    """Where blocks that end at each row may begin so that the numbers after the first fit, from ``firsts`` on."""
    assert samples.others is not None
    others, found = samples.others[0], []
    for last, first in enumerate(firsts.tolist()):
        begin = last
        while begin > first and all(
            map(others.fit, _parts(samples, rows[begin - 1 : last + 1].ravel()).tolist())
        ):
            begin -= 1
        found.append(begin)
    return np.array(found)


def _first_blocks(samples: PaddedSamples) -> list[Block]:
    """Blocks in which as many ranks as remain have one sample more; with empty microbatches if there are no others."""
    ranks, (whole, more) = samples.num_ranks, divmod(len(samples.sizes), samples.num_ranks)
    blocks = [] if not whole else [block for block in [_pairs_and_singles(samples, more)] if block]
    for rows in range(2, min(whole, _MOST_FIRST_BLOCKS) + 1):
        longer = [list(range(own * (rows + 1), (own + 1) * (rows + 1))) for own in range(more)]
        begin = more * (rows + 1)
        others = [list(range(begin + own * rows, begin + (own + 1) * rows)) for own in range(ranks - more)]
        if _fits(samples, [*longer, *others]):
            blocks.append([*longer, *others])
    return blocks or [[[sample] for sample in range(more)] + [[] for _ in range(ranks - more)]]


def _pairs_and_singles(samples: PaddedSamples, more: int) -> Block | None:
    """So many pairs of the shortest neighbours that fit together, and the next shortest samples; None if few fit."""
    pairs: Block = []
    sample = 0
    while sample + 1 < len(samples.sizes) and len(pairs) < more:
        if _fits(samples, [[sample, sample + 1]]):
            pairs.append([sample, sample + 1])
            sample += 1
        sample += 1
    if len(pairs) < more:
        return None
    others = np.delete(np.arange(len(samples.sizes)), np.ravel(pairs))
    return pairs + [[one] for one in others[: samples.num_ranks - more].tolist()]


def _fits(samples: PaddedSamples, block: Iterable[list[int]]) -> bool:
    return all(
        len(own) * samples.sizes[own[-1]] <= samples.caps[0]
        and samples.runs[own[-1]] <= own[0]
        and (samples.others is None or samples.others[0].fit(own))
        for own in block
    )


def _slowest_first(samples: PaddedSamples) -> Ints:
    return np.argsort(-samples.costs.sum(1), kind="stable")


def _costliest_first(samples: PaddedSamples, columns: Columns) -> Columns:
    """Sort each rank's microbatches by falling cost, if the length of the longest sample does not determine it."""
    if samples.beside is None:
        return columns
    rows = [0 if samples.alike else rank for rank in range(len(columns))]
    return [
        sorted(column, key=lambda own: -_cost_on(samples, row, own))
        for row, column in zip(rows, columns, strict=True)
    ]


def _cost_of(samples: PaddedSamples, block: Block) -> float:
    """Cost of the largest microbatch of a block, if the fastest rank has it."""
    fastest = int(_slowest_first(samples)[-1])
    return max(_cost_on(samples, fastest, own) for own in block) + float(samples.overhead.max())


def _cost_on(samples: PaddedSamples, row: int, members: list[int]) -> float:
    if not members:
        return 0.0
    return len(members) * float(samples.costs[row, members[-1]]) + samples.beside_of(row, members)


def _deal(samples: PaddedSamples, blocks: list[Block]) -> Columns:
    """Blocks, the costliest first and those with empty microbatches last; slow and loaded ranks get the short parts."""
    ranks = samples.num_ranks
    slowness = np.broadcast_to(samples.costs.sum(1), (ranks,)).tolist()
    loads, columns = [0.0] * ranks, [list[list[int]]() for _ in range(ranks)]
    for block in sorted(blocks, key=lambda block: (not all(block), -_cost_of(samples, block))):
        short_first = sorted(block, key=lambda own: _cost_on(samples, 0, own))
        receivers = sorted(range(ranks), key=lambda rank: (-slowness[rank], -loads[rank]))
        for rank, own in zip(receivers, short_first, strict=True):
            columns[rank].append(own)
            loads[rank] += _cost_on(samples, 0 if samples.alike else rank, own)
    return columns


def _costs(samples: PaddedSamples, columns: Columns) -> Floats:
    """``[num_ranks, microbatches]``, without overheads."""
    rows = [0 if samples.alike else rank for rank in range(len(columns))]
    return np.array(
        [[_cost_on(samples, row, own) for own in column] for row, column in zip(rows, columns, strict=True)]
    )


def _span(samples: PaddedSamples, columns: Columns) -> tuple[bool, float]:
    """What collectives take; worse than all others if a microbatch is empty."""
    largest = float(_costs(samples, columns).max(0).sum())
    return not all(map(all, columns)), largest + len(columns[0]) * float(samples.overhead.max())


def _lined_up(samples: PaddedSamples, dealt: Columns) -> list[Columns]:
    """Plans where ranks with short samples run several of them beside one long sample of another rank.

    Ranks get equally many samples of level cost. Then each, those with the longest samples first, cuts its own such
    that the largest microbatches so far grow least: `_along`.
    """
    work = Workload.of(samples.all_costs, samples.num_ranks)
    groups = [sorted(work.order[own].tolist(), reverse=True) for own in partition(work, True, starts=0)]
    fewest, likely = min(map(len, groups)), len(dealt[0])
    divisions = [groups]
    if 0 < fewest < max(map(len, groups)):
        in_blocks = [sorted((one for own in column for one in own), reverse=True) for column in dealt]
        divisions += [_spare_to_short(groups, fewest), in_blocks, _spare_to_short(in_blocks, fewest)]
    counts = range(max(likely - 2, 1), min(likely + 1, fewest) + 1)
    plans = [_line_up(samples, division, count) for division in divisions for count in counts]
    return [columns for columns in plans if columns]


def _spare_to_short(groups: list[list[int]], fewest: int) -> list[list[int]]:
    """The samples that some ranks have more, given to the ranks whose longest samples are the shortest."""
    spare = [own[-1] for own in groups if len(own) > fewest]
    kept = [own[:fewest] for own in groups]
    for rank in sorted(range(len(kept)), key=lambda rank: kept[rank][0])[: len(spare)]:
        kept[rank] = sorted([*kept[rank], spare.pop()], reverse=True)
    return kept


def _line_up(samples: PaddedSamples, groups: list[list[int]], count: int) -> Columns:
    """So many microbatches of every rank; none if its samples do not fit into them."""
    columns, profile = [list[list[int]]() for _ in groups], np.zeros(count)
    for rank in sorted(range(len(groups)), key=lambda rank: -groups[rank][0]):
        row = 0 if samples.alike else rank
        columns[rank] = _along(samples, row, groups[rank], profile)
        if not columns[rank]:
            return []
        profile = np.maximum(profile, [_cost_on(samples, row, own) for own in columns[rank]])
    falling = np.argsort(-profile, kind="stable").tolist()
    return [[column[place] for place in falling] for column in columns]


def _along(samples: PaddedSamples, row: int, falling: list[int], profile: Floats) -> list[list[int]]:
    """Samples, the longest first, cut into as many microbatches as the profile has; none if they do not fit.

    ``least[i]`` is what the profile and the first ``i`` samples in the microbatches so far cost; in each turn one more
    microbatch, ``j .. i - 1``, is put on the next entry of the profile.
    """
    count, own = len(falling), np.array(falling)
    rows = np.arange(count + 1) - np.arange(count)[:, None]  # [j, i] samples j .. i - 1
    fits = (rows > 0) & (rows * samples.sizes[own][:, None] <= samples.caps[0])
    fits &= samples.runs[own][:, None] <= np.append(count, own)
    costs = rows * samples.costs[row, own][:, None]
    if samples.others is not None:
        firsts = np.array([0, *samples.others[0].firsts(falling)])
        fits &= np.arange(count)[:, None] >= firsts
    if samples.beside is not None:
        before = np.append(0.0, np.cumsum(samples.beside[row, own]))
        costs = costs + before - before[:count, None]
    costs = np.where(fits, costs, np.inf)
    least, begins = np.where(np.arange(count + 1), np.inf, 0.0), []
    for limit in profile:
        total = least[:count, None] + np.maximum(costs, limit)
        begins.append(total.argmin(0))
        least = total.min(0)
    if least[-1] == np.inf:
        return []
    bins, end = [], count
    for begin in reversed(begins):
        bins.append(falling[begin[end] : end][::-1])
        end = int(begin[end])
    return bins[::-1]
