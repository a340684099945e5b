# %% [markdown]
# # 3. Balancing a minibatch
#
# **You will learn**
#
# - four ways to deal out a minibatch, and which of them work with collectives;
# - what a sample *costs*, and what a wrong cost does;
# - how a cost is measured during training, even if one device is slower than the others;
# - what no planner can level: the longest sample.
#
# **It needs** Linux, two CPU cores and less than a minute. No GPU, no network. In a clone of the repository,
# `make lab` installs everything and opens the notebooks. [Notebook 1](01_seeing_the_imbalance.ipynb) explains the
# words: rank, minibatch, microbatch, idle.
#
# Some cells are folded. They import, print or draw. Click on one to read it.

# %% Set up tags=["hide-input"]
import sys
from importlib.util import find_spec

if find_spec("lightning_odc") is None:  # in Colab, for example
    # %pip install --quiet "lightning-odc[notebooks]"
    print("installed")
if find_spec("support") is None:  # the folder beside the notebooks
    # !git clone --quiet --depth 1 https://github.com/OWNER/lightning-odc clone
    sys.path.append("clone/notebooks")

from support import pictures, replay
from support.corpus import read_corpus
from support.display import QUIET, print_table, quiet, show
from support.models import CausalModel, byte_llama

from lightning_odc.demo import encode

quiet()

# %%
import random
import time

import numpy as np
from lightning.pytorch import Trainer

from lightning_odc import BalancedDataLoader, ODCStrategy, balance
from lightning_odc.balance.learnt import MeasuredCost
from lightning_odc.callbacks import TimelineRecorder, load_timeline
from lightning_odc.samples.packing import pack_samples

# %% [markdown]
# ## One minibatch, four ranks
#
# Our texts are again functions and classes of the Python standard library, this time up to 4,096 tokens long.
# Sixteen of them make a minibatch for four ranks. (We picked this one from about a hundred, because it shows the
# differences well. Averages follow.)

# %%
lengths = np.array(read_corpus(max_length=4096).lengths)
minibatch = lengths[balance.epoch_order(len(lengths), seed=314, epoch=0)[:16]]
print("lengths:", *minibatch)

# %% [markdown]
# A planner gets these lengths and nothing else. It returns a list per rank: the microbatches of this rank, each a
# list of samples. Samples that share a microbatch are **packed**: they follow each other in a row, without
# padding, and do not see each other. A microbatch holds at most `max_tokens` tokens, since memory is limited.

# %%
MAX_TOKENS = int(minibatch.max())
plan = balance.plan_minibatch(
    minibatch, num_ranks=4, max_tokens=MAX_TOKENS, policy="lb_mini"
)
for rank, microbatches in enumerate(plan):
    print(
        f"rank {rank}:",
        [
            [int(minibatch[sample]) for sample in microbatch]
            for microbatch in microbatches
        ],
    )

# %% [markdown]
# Every rank computes this plan by itself. It is a pure function of the lengths, so all ranks get the same plan, bit by
# bit, without a message.
#
# ## Four policies
#
# | policy | a rank gets | microbatches per rank |
# |---|---|---|
# | `local_sort` | every fourth sample, one per microbatch, longest first | equal |
# | `lb_micro` | equally many samples, costs levelled, packed | **equal** |
# | `lb_mini` | any number of samples, *total* cost levelled, packed | **may differ** |
# | `steal` | the plan of `lb_mini`, and a rank without work takes some from others | may differ |
#
# The third column decides. With collectives, every rank must enter every all-gather. A rank with three microbatches
# beside one with five would hang. So collectives cannot use `lb_mini`:

# %%
try:
    balance.collective_cost(plan, minibatch)
except ValueError as error:
    print("ValueError:", error)

# %% [markdown]
# How long does each policy take? With collectives the ranks synchronize in every microbatch. (Really at every layer,
# which changes nothing here.) On demand they synchronize once.


# %%
def duration(costs, barrier):
    """The time of a minibatch, from costs[rank][microbatch]."""
    if barrier == "microbatch":  # each time, all wait for the largest
        return sum(map(max, zip(*costs, strict=True)))
    return max(map(sum, costs))  # all wait for the rank with the most


def idle_fraction(minibatches, barrier="minibatch"):
    """Waiting as a part of all ranks' time."""
    busy = sum(sum(map(sum, costs)) for costs in minibatches)
    times = sum(len(costs) * duration(costs, barrier) for costs in minibatches)
    return 1 - busy / times


# %% Draw four ways tags=["hide-input"]
def as_replay(policy, barrier):
    plan = balance.plan_minibatch(minibatch, 4, MAX_TOKENS, policy)
    costs = balance.microbatch_costs(plan, minibatch)
    return replay.replay(replay.layered(costs, layers=1, passes=1), barrier)


show(
    pictures.replays_figure(
        {
            "local_sort, collectives": as_replay("local_sort", "microbatch"),
            "lb_micro, collectives": as_replay("lb_micro", "microbatch"),
            "lb_micro, on demand": as_replay("lb_micro", "minibatch"),
            "lb_mini, on demand": as_replay("lb_mini", "minibatch"),
        },
        "tokens",
        x="cost in tokens",
    ),
    "Four diagrams of the same sixteen samples on four ranks, one above the "
    "other: local sorting with collectives has the most grey waiting, balanced "
    "microbatches have less, synchronizing once less again, and balancing the whole "
    "minibatch ends the earliest.",
)

# %% [markdown]
# From top to bottom:
#
# - **`local_sort`** runs long samples beside long ones, and short beside short. It is simple and needs no planner.
#   But the longest samples of four ranks are seldom equally long.
# - **`lb_micro`** levels the ranks *and* makes the m-th microbatches of all ranks alike. It is the best that
#   collectives can do. The constraint has a price: no other sample is as long as one of maximum length.
# - **The same plan on demand**: no rank waits between microbatches.
# - **`lb_mini`** drops the constraint. It has only one aim: all ranks finish at the same time.
#
# One minibatch proves little, and a picked one less. Here are averages over many minibatches, for several numbers of
# ranks, with four samples per rank.


# %%
def minibatches(ranks, per_rank, count=200, regroup=1):
    """Plans of many minibatches under lb_mini; their samples are indices into `lengths`."""
    loader = BalancedDataLoader(
        lengths,  # the data set; plans need its lengths only
        lengths=lengths,
        minibatch_size=per_rank,
        shuffle=True,
        seed=0,
        drop_last=True,
        window=regroup if regroup > 1 else None,
        regroup=regroup > 1,
        num_replicas=ranks,
        rank=0,
    )
    steps = range(min(count, len(loader)))
    return [loader.plan(step).microbatches for step in steps]


def idle(policy, ranks, barrier):
    """The idle fraction under a policy, over many minibatches."""
    costs = []
    for dealt in minibatches(ranks, per_rank=4):
        own = lengths[
            [
                sample
                for rank in dealt
                for microbatch in rank
                for sample in microbatch
            ]
        ]
        plan = balance.plan_minibatch(own, ranks, int(lengths.max()), policy)
        costs.append(balance.microbatch_costs(plan, own))
    return idle_fraction(costs, barrier)


rows = []
for policy, barrier, way in (
    ("local_sort", "microbatch", "collectives"),
    ("lb_micro", "microbatch", "collectives"),
    ("lb_micro", "minibatch", "on demand"),
    ("lb_mini", "minibatch", "on demand"),
):
    rows.append(
        [
            f"{policy}, {way}",
            *(f"{idle(policy, ranks, barrier):.0%}" for ranks in (2, 4, 8)),
        ]
    )
print_table(["idle", "2 ranks", "4 ranks", "8 ranks"], rows)

# %% [markdown]
# These are costs, not measured times. [Results](../docs/results.md) has measured times, and says
# where they differ.
#
# ## What no planner can level
#
# Why is the last row not zero? Look at one minibatch with a giant in it:

# %%
giant = [30_000, 900, 700, 600, 500, 400, 300, 200]
plan = balance.plan_minibatch(giant, 4)
costs = balance.microbatch_costs(plan, giant)
print("the best that any plan could do:", round(balance.least_cost(giant, 4)))
print(
    "this plan:                      ", round(balance.on_demand_cost(plan, giant))
)

# %% Draw the giant tags=["hide-input"]
show(
    pictures.replays_figure(
        {
            "one giant": replay.replay(
                replay.layered(costs, 1, passes=1), "minibatch"
            )
        },
        "tokens",
        x="cost in tokens",
    ),
    "One rank computes a single giant sample for the whole time. The three other "
    "ranks share seven small samples, are done almost at once, and wait in grey.",
)

# %% [markdown]
# A sample runs on one rank. So a minibatch takes at least as long as its largest sample, with any number of ranks.
# The planner has reached that limit here, and three ranks are idle for nearly all of it.
#
# Two things help. *More samples per minibatch* give the other ranks enough work to fill the time. Or `regroup` puts
# giants together: while one rank runs a giant, the others run theirs. It exchanges samples between the minibatches
# of a window. (So which samples share an optimizer step then depends on their lengths.)

# %%
PER_RANK = [1, 2, 4, 8, 16]
curves = {}
for regroup, title in (
    (1, "lb_mini"),
    (8, "lb_mini, regrouped over 8 minibatches"),
):
    left = [
        idle_fraction(
            [
                balance.microbatch_costs(plan, lengths)
                for plan in minibatches(8, per_rank, 24, regroup)
            ]
        )
        for per_rank in PER_RANK
    ]
    curves[title] = (PER_RANK, left)

# %% Draw what balancing leaves tags=["hide-input"]
show(
    pictures.lines_figure(
        curves,
        title="Idle time that balancing leaves on 8 ranks",
        x="samples per rank and minibatch",
        y="idle, %",
        percent=True,
        log_x=True,
    ),
    "Idle time over samples per rank: high with one sample per rank, and falling "
    "fast with more. The curve with regrouping is lower.",
)

# %% [markdown]
# With one sample per rank there is nothing to balance. Reinforcement learning with tiny minibatches has its idle time
# from this, and no communication scheme changes it.

# %% [markdown]
# ## What does a sample cost?
#
# The planner levels *costs*. By default a sample of `s` tokens costs `s + s² / 42166`: linear work, and attention.
# (The number belongs to the paper's 1.5B model.) What if you plan with a wrong cost? We plan with each of three
# costs, and compute the idle time for each of three true costs.

# %%
COSTS = {
    "tokens": balance.tokens(),
    "quadratic": balance.quadratic(),
    "short crossover": balance.quadratic(
        crossover=2_000
    ),  # a narrow model: attention counts early
}
sets = [
    lengths[chosen]
    for chosen in np.split(balance.epoch_order(len(lengths), 0, 0)[: 32 * 40], 40)
]
rows = []
for planned, cost in COSTS.items():
    plans = [
        balance.plan_minibatch(own, 4, int(lengths.max()), cost=cost)
        for own in sets
    ]
    left = []
    for truth in COSTS.values():
        costs = [
            balance.microbatch_costs(plan, own, truth)
            for plan, own in zip(plans, sets, strict=True)
        ]
        left.append(f"{idle_fraction(costs):.1%}")
    rows.append([f"planned with {planned}", *left])
print_table(["idle, if the truth is ...", *COSTS], rows)

# %% [markdown]
# Read a column from top to bottom: one true cost, three plans. The smallest number is where the plan used the true
# cost. Counting tokens alone is fine for short samples, and wrong for long ones. For a Hugging Face model,
# `balance.transformer(model.config)` takes the cost from the configuration.
#
# **Dense attention.** Attention kernels for packed rows (flash attention) compute the square of each sample. Without
# them, as on every CPU, the whole *row* is squared: packing two long samples makes them more expensive. With a dense
# cost the planner knows, and packs less. Here are eight short samples and eight long ones:

# %%
for own in ([60, 50, 40, 30, 60, 50, 40, 30], [6_000, 5_000, 4_000, 3_000] * 2):
    for name, dense in (("flash attention", False), ("dense attention", True)):
        cost = balance.quadratic(crossover=2_000, constant=64, dense=dense)
        plan = balance.plan_minibatch(own, 2, 20_000, cost=cost)
        print(
            f"{max(own):5} tokens at most, {name}:",
            [[len(microbatch) for microbatch in rank] for rank in plan],
        )

# %% [markdown]
# (The numbers are samples per microbatch, rank by rank.) Short samples are packed either way, since a microbatch
# costs something by itself. Long ones are packed only where that is free.
#
# ## Let it measure
#
# `cost="auto"` begins with what the model says, and times microbatches on every rank. So the planner knows a slow
# device, and gives it less. If the model says nothing, it also measures how much of the time goes into `s²`.
#
# We begin with a simulation. Rank 3 is only 0.6 times as fast as the others, and the planner does not know that. Times
# are measured with 5 percent of noise.

# %%
truth = balance.with_speeds(
    balance.quadratic(crossover=2_000, constant=64), [1, 1, 1, 0.6]
)
noise = random.Random(0)
measured = MeasuredCost(4, balance.resolve_cost("quadratic"))
left = {"planned as if ranks were alike": [], "planned with measured speeds": []}
for own in np.split(balance.epoch_order(len(lengths), 1, 0)[: 40 * 24], 24):
    own = lengths[own]
    for name, cost in (
        ("planned as if ranks were alike", "quadratic"),
        ("planned with measured speeds", measured.found or "quadratic"),
    ):
        plan = balance.plan_minibatch(own, 4, int(lengths.max()), cost=cost)
        costs = balance.microbatch_costs(plan, own, truth)
        left[name].append(idle_fraction([costs]))
    by_rank = []
    for microbatches, row in zip(plan, costs, strict=True):
        times = [
            (own[microbatch].tolist(), seconds * noise.gauss(1, 0.05))
            for microbatch, seconds in zip(microbatches, row, strict=True)
        ]
        by_rank.append(measured.sums_of(times))
    measured.observe(by_rank)
speeds = measured.found.speeds
print("measured speed of rank 3:", round(speeds[3] / speeds[0], 2))

# %% Draw idle time by minibatch tags=["hide-input"]
show(
    pictures.lines_figure(
        {name: (range(1, 25), values) for name, values in left.items()},
        title="Idle time with a slow rank",
        x="minibatch",
        y="idle, %",
        percent=True,
    ),
    "Idle time per minibatch. Planned as if all ranks were alike, it stays high. "
    "With measured speeds it falls after the first minibatches and stays low.",
)

# %% [markdown]
# ## Or steal
#
# Measuring helps where a device is always slow. It does not help where a device is slow *for a moment*: another program
# runs on it, it is hot, its host swaps. For that there is `balance="steal"`. It begins with the plan of `lb_mini`. A
# rank that has no work left takes a microbatch that a busy rank has not begun. This needs no barrier, because
# the list of which rank does what is in the windows, too. The gradient stays the same, since a microbatch keeps its
# weight wherever it runs.
#
# Now we really train: two processes, and rank 1 computes three times slower (it sleeps after each forward pass). We try
# three ways. The timelines show the last two of eight minibatches.

# %%
corpus = read_corpus(max_length=1024)
samples = [encode(sample) for sample in corpus.samples]


class OneSlowRank(CausalModel):
    def training_step(self, *batch):
        begin = time.monotonic()
        loss = super().training_step(*batch)
        if self.global_rank == 1:  # forward and backward take three times as long
            time.sleep(6 * (time.monotonic() - begin))
        return loss


def train(name, policy, cost):
    loader = BalancedDataLoader(
        samples,
        lengths=corpus.lengths,
        minibatch_size=8,
        balance=policy,
        cost=cost,
        weighting="next_token",
        collate_fn=pack_samples,
        shuffle=True,
        seed=1,
    )
    trainer = Trainer(
        strategy=ODCStrategy(),
        accelerator="cpu",
        devices=2,
        max_steps=8,
        callbacks=[TimelineRecorder(f"runs/{name}", steps=range(6, 8))],
        **QUIET,
    )
    trainer.fit(OneSlowRank(byte_llama(2, 256, 1024), seed=0), loader)
    return load_timeline(f"runs/{name}/timeline.json")


dense = balance.transformer(byte_llama(2, 256, 1024), dense=True)
recorded = {
    "lb_mini": train("lb_mini", "lb_mini", dense),
    "steal": train("steal", "steal", dense),
    "lb_mini with measured speeds": train("measured", "lb_mini", "auto"),
}

# %% Draw the timelines tags=["hide-input"]
show(
    pictures.timelines_figure(recorded),
    "Three timelines of two ranks of which rank 1 is slow. With lb_mini rank 0 "
    "waits for long. With stealing and with measured speeds, rank 0 runs more of "
    "the microbatches and waits less.",
)
print_table(
    ["two minibatches", "seconds", "idle seconds of rank 0", "of rank 1"],
    [
        [n, f"{t.seconds:.2f}", *(f"{rank.idle_seconds:.2f}" for rank in t.ranks)]
        for n, t in recorded.items()
    ],
)

# %% [markdown]
# Count the bars: with stealing and with measured speeds, rank 0 runs more microbatches. Stealing cannot
# divide a microbatch that has begun, so a little waiting stays at the end.
#
# ## In your own training
#
# You write one word. Your `DataLoader` stays as it is, and the strategy chooses the policy and the cost:
#
# ```python
# Trainer(strategy="odc")
# ```
#
# [Balancing](../docs/balancing.md) has all options, and [Plans and predictions](../docs/plans.md) says how far
# plans are from the best possible ones.
#
# ## What you have seen
#
# - Collectives need equal counts. On demand, the planner can level the total.
# - A wrong cost makes a wrong plan. `cost="auto"` measures the speed of every device.
# - Stealing corrects what no plan could know.
# - The longest sample is the limit. More samples per minibatch, or regrouping, move it.
#
# ## Exercises
#
# 1. Double `MAX_TOKENS`. Which policies gain, and why?
# 2. In the giant's minibatch, how many copies of the small samples do you need until no rank is idle?
# 3. Results come rank by rank, microbatch by microbatch. Put them back into the order of the samples.
# 4. Let rank 3 of the simulation become fast again after minibatch 12. How many minibatches does it take to
#    notice?
# 5. Write a cost function for a model with a sliding window of 1,000 tokens, and plan with `cost=your_function`.
#
# <details>
# <summary>Answer to 1</summary>
#
# `lb_micro` with collectives. With room for more tokens it packs the same samples into fewer microbatches, so the
# ranks synchronize less often. On demand the number of microbatches does not matter here, and neither policy gains.
# `local_sort` does not pack, so nothing changes.
#
# </details>
#
# <details>
# <summary>Answer to 2</summary>
#
# As many as fill three ranks for about as long as the giant takes. Let the planner count:
#
# ```python
# for copies in range(1, 60):
#     more = giant[:1] + giant[1:] * copies
#     costs = balance.microbatch_costs(balance.plan_minibatch(more, 4), more)
#     if idle_fraction([costs]) < 0.005:
#         break
# print(copies)
# ```
#
# It prints a number between 40 and 45. A minibatch with one such giant needs about 300 other samples.
#
# </details>
#
# <details>
# <summary>Answer to 3</summary>
#
# The flat order of a plan is rank by rank, microbatch by microbatch.
#
# ```python
# plan = balance.plan_minibatch(minibatch, 4, MAX_TOKENS)
# results = np.array([minibatch[s] for rank in plan for microbatch in rank for s in microbatch])
# order = np.argsort([s for rank in plan for microbatch in rank for s in microbatch])
# print(results[order].tolist() == minibatch.tolist())
# ```
#
# </details>
#
# <details>
# <summary>Answer to 4</summary>
#
# Use `truth` for the first 12 of 24 minibatches, and `balance.quadratic(crossover=2_000, constant=64)` for the
# others. Idle time jumps at minibatch 13 and is small again two or three minibatches later. The planner forgets: with
# `forgetting=0.98` a measurement counts two percent less after each further one of the same rank.
#
# </details>
#
# <details>
# <summary>Answer to 5</summary>
#
# Beyond the window the work of attention grows linearly.
#
# ```python
# def sliding(lengths, window=1_000, crossover=42_166):
#     seen = np.where(lengths < window, lengths**2, window * (2 * lengths - window))
#     return lengths + seen / crossover
#
# balance.plan_minibatch(minibatch, 4, MAX_TOKENS, cost=sliding)
# ```
#
# Below the window this is the quadratic cost. At the window both branches are equal, and so are their slopes.
#
# </details>
#
# Next: [Fine-tuning a Hugging Face model with LoRA](04_fine_tuning_with_lora.ipynb).
