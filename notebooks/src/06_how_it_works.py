# %% [markdown]
# # 6. How it works inside
#
# **You will learn**
#
# - how a rank reads a parameter shard and adds a gradient while its owner does something else, by hand;
# - how to predict what a training takes, in six lines that you write;
# - which single number replaces the barriers, and why that is enough;
# - what goes wrong, step by step, when a rule of the protocol is left out;
# - how to read the errors that you get when ranks disagree.
#
# **It needs** Linux and half a minute on one core. No GPU, no network. In a clone of the repository, `make lab`
# installs everything and opens the notebooks. You should have seen [notebook 1](01_seeing_the_imbalance.ipynb), or
# know what FSDP does at a layer.
#
# Some cells are folded. They import, draw, or hold an answer. Click on one to read it.

# %% Set up tags=["hide-input"]
import sys
from importlib.util import find_spec

if find_spec("lightning_odc") is None:  # in Colab, for example
    # %pip install --quiet "lightning-odc[notebooks]"
    print("installed")
if find_spec("support") is None:  # the folder beside the notebooks
    # !git clone --quiet --depth 1 https://github.com/OWNER/lightning-odc clone
    sys.path.append("clone/notebooks")

from support import pictures
from support.display import (
    QUIET,
    last_line,
    print_table,
    quiet,
    show,
)
from support.interleavings import (
    PROTOCOL,
    explore,
    microbatches,
    swapped,
    without,
)
from support.windows import Recorded, open_ranks, together

quiet()

# %%
import time

import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.demos.boring_classes import BoringModel

from lightning_odc import ODCStrategy
from lightning_odc.errors import ODCError
from lightning_odc.protocol.transports.base import Segment, UnitSpec

torch.set_printoptions(precision=3, sci_mode=False)

# %% [markdown]
# ## Four numbers, two owners
#
# Our model is the smallest that can be sharded: a weight vector of four numbers. Rank 0 **owns** the first two,
# rank 1 the last two. The owner of a shard keeps it and runs the optimizer on it. No other rank may change it.
#
# Every rank opens a **window**, a piece of memory that the others can reach. For each *unit* of the model
# (usually one transformer layer, here the whole vector) it holds three things:
#
# | in the window | who writes | who reads |
# |---|---|---|
# | a copy of the rank's **shard** | its owner | all ranks |
# | a **version** number of that copy | its owner | all ranks |
# | an **accumulator** for the shard's gradient | all ranks add, under a lock | its owner |
#
# With processes the window is shared memory. Here both ranks live in this notebook's process, so that you can
# drive them by hand. The protocol code is the real one: the same class that `strategy="odc"` uses. (A model that fits
# on each rank is not sharded. There, ranks publish gradients in place of parameters, by the same protocol.)

# %%
vector = UnitSpec(
    "vector",
    shard_numel=2,
    shard_dtype=torch.float32,
    grad_numel=2,
    grad_dtype=torch.float32,
)
rank0, rank1 = open_ranks([vector])

weights = torch.tensor([[1.0, 2.0], [3.0, 4.0]])  # row r is the shard of rank r
for rank, shard in zip((rank0, rank1), weights, strict=True):
    unit = rank.windows[0]  # how this rank sees the first unit in all windows
    unit.own_shard.copy_(shard)  # write the bytes ...
    unit.publish()  # ... and only then set the version, here 1

# %% [markdown]
# ## Reading without asking
#
# Rank 1 has to compute, and needs the whole vector. Watch what rank 0 does in the next cell: *nothing*. Rank 1 reads
# its shard anyway.

# %%
full = torch.zeros(2, 2)
full[1] = weights[1]  # the own shard is at hand
rank1.windows[0].gather(full.view(-1))  # fill in what the peers have published
print("rank 1 sees", full.flatten().tolist())

# %% [markdown]
# An all-gather would need both ranks at the same time. Reading a window needs one.
#
# ## Adding without asking
#
# Rank 1 runs three microbatches, one after the other. Each makes a gradient for all four numbers. The first two
# belong to rank 0, so rank 1 adds them to *rank 0's accumulator*. Rank 0 still does nothing.

# %%
for microbatch in (1, 2, 3):
    # row r is for the owner of shard r
    gradient = torch.full((2, 2), float(microbatch))
    whole = [Segment(target=0, source=0, numel=2)]
    rank1.windows[0].accumulate(gradient.view(-1), whole)

for rank in (rank0, rank1):
    print("in its accumulator:", rank.windows[0].summed().tolist())

# %% [markdown]
# With a reduce-scatter, three microbatches on rank 1 would have needed three on rank 0, or the job would hang.
# Here rank 0 may run one, or five, or zero. The sum is the same in any order of the gradients. (In floating point, up
# to rounding. `ODCStrategy(deterministic=True)` fixes the order, too.)
#
# ## Once per step, all ranks synchronize
#
# Rank 0 must not run its optimizer before *all* gradients are there. So ranks synchronize once per minibatch: each
# rank says "I am done with version 1", and waits until all ranks have said so. The message
# also carries numbers that the other ranks need, for example how many items a rank's losses are sums over.
#
# To synchronize, both ranks have to run, so now each gets a thread. Rank 0 comes half a second late.


# %%
def late():
    time.sleep(0.5)
    return rank0.end_version("step", {"items": 0})


def punctual():
    return rank1.end_version("step", {"items": 6})


heard, _ = together(late, punctual)
print("rank 0 has heard:", heard)
print(
    f"rank 1 has waited {sum(rank1.waiter.seconds.values()):.1f} s, rank 0 {sum(rank0.waiter.seconds.values()):.1f} s"
)

# %% [markdown]
# Every wait of the protocol is measured like this one. That is where the idle times of [notebook
# 1](01_seeing_the_imbalance.ipynb) come from.
#
# ## A new version
#
# Now each owner takes the sum, divides it once by the number of items of *all* ranks, empties the accumulator,
# and changes its shard. Then it publishes version 2. Rank 0 does so here; rank 1 is slow.

# %%
items = sum(record["items"] for record in heard)
gradient = rank0.windows[0].summed() / items
weights[0] -= 0.1 * gradient  # the optimizer: on the own shard only
rank0.windows[0].clear()
rank0.next_version()
rank0.windows[0].own_shard.copy_(weights[0])
rank0.windows[0].publish()
print("rank 0's shard, version 2:", weights[0].tolist())

# %% [markdown]
# Rank 0 continues with the next minibatch. It has to read version 2 of rank 1's shard, which is not there yet. It does
# not take the old version. It *waits*. (Every wait has a deadline. Ours is one second.) Read the error. It says which
# rank waits for which, for what, and where all ranks are.

# %%
try:
    rank0.windows[0].gather(full.view(-1))
except ODCError as error:
    print(f"{type(error).__name__}: {error}")

# %% [markdown]
# So this is the whole protocol:
#
# ```text
# for every microbatch of this rank's share, at its own pace:
#     gather       wait until the owner's version is v, copy its shard
#     compute      forward and backward
#     accumulate   lock, add, unlock
#
# once per minibatch:
#     settle       say "done with v", wait until all have said so
#     take         take the sum out of the own accumulator, zero it
#     step         the optimizer, on the own shard
#     publish      write the shard, then set its version to v + 1
# ```
#
# ## A whole training, by hand
#
# Twenty lines are enough for a data-parallel training with sharded parameters. Linear regression; rank 0 has one
# microbatch per step, rank 1 has three, and every microbatch takes a random time.

# %%
torch.manual_seed(0)
truth = torch.tensor([1.0, -2.0, 3.0, -4.0])
inputs = torch.randn(8, 4, 5, 4)  # [step, microbatch, sample, feature]
targets = inputs @ truth
PAUSES = 0.02 + 0.06 * torch.rand(8, 4)  # how long each microbatch "computes"
SHARES = {0: [0], 1: [1, 2, 3]}  # which microbatches each rank runs


def run_rank(number, rank, shard):
    unit = rank.windows[0]
    for step in range(len(inputs)):
        unit.own_shard.copy_(shard)
        unit.publish()
        for microbatch in SHARES[number]:
            full = torch.empty(2, 2)
            full[number] = shard
            unit.gather(full.view(-1))
            began = time.monotonic_ns()
            w = full.flatten().requires_grad_()
            loss = (
                (inputs[step, microbatch] @ w - targets[step, microbatch])
                .square()
                .sum()
            )
            loss.backward()
            time.sleep(float(PAUSES[step, microbatch]))
            rank.record("forward", began)
            unit.accumulate(w.grad, [Segment(0, 0, 2)])
        records = rank.end_version("step", {"items": 5 * len(SHARES[number])})
        shard -= 0.1 * unit.summed() / sum(record["items"] for record in records)
        unit.clear()
        rank.next_version()
    return shard


ranks = open_ranks([vector], timeout=10)
with Recorded(ranks) as recorded:
    shards = together(
        *(lambda n=n: run_rank(n, ranks[n], torch.zeros(2)) for n in (0, 1))
    )

# %% [markdown]
# The same training in one process, on all microbatches at once:

# %%
alone = torch.zeros(4)
for x, y in zip(inputs, targets, strict=True):
    w = alone.clone().requires_grad_()
    (x @ w - y).square().mean().backward()
    alone -= 0.1 * w.grad

print("two ranks: ", torch.cat(shards))
print("one process:", alone)
assert torch.allclose(torch.cat(shards), alone, rtol=1e-5)

# %% [markdown]
# The same numbers, although the ranks ran different numbers of microbatches and never agreed on an order. This is
# what they did:

# %% Draw what the ranks did tags=["hide-input"]
show(
    pictures.one_timeline_figure(recorded.timeline, "eight steps by hand"),
    "Timeline of the training by hand. Rank 1 computes three microbatches per "
    "step without a gap. Rank 0 computes one and then waits in grey for the end "
    "of the step. There is no waiting between microbatches.",
)

# %% [markdown]
# Rank 0 waits, since it has a third of the work. It waits *once per step*, not at every microbatch. To give it
# more work is the planner's job, see [notebook 3](03_balancing_a_minibatch.ipynb).

# %% [markdown]
# ## Write it yourself: what will it take?
#
# Six lines predict how long such a training takes. Keep a clock for each rank. Add to it what the rank does. Where
# ranks synchronize, set all clocks to the latest one. Write the six lines in the next cell. (The notebook also runs if
# you do not: the answer is in the folded cell below the check.)


# %%
def replay(times, wait_always):
    """When the last rank is done.

    times[rank] lists how long each of the rank's pieces of work takes, equally many for
    all ranks. wait_always: whether ranks wait for each other after every piece, or only at the end.
    """
    # your six lines


# %%
example = [[8, 1, 1], [1, 1, 8]]
print("after every piece: ", replay(example, wait_always=True), "(17 is right)")
print("once, at the end:  ", replay(example, wait_always=False), "(10 is right)")


# %% The answer tags=["hide-input"]
def answer(times, wait_always):
    clocks = [0.0] * len(times)
    for pieces in zip(*times, strict=True):
        clocks = [
            clock + piece for clock, piece in zip(clocks, pieces, strict=True)
        ]
        if wait_always:
            clocks = [max(clocks)] * len(clocks)
    return max(clocks)


if [replay(example, wait_always=True), replay(example, wait_always=False)] != [
    17,
    10,
]:
    replay = answer
    print("from here on, the answer is used")

# %% [markdown]
# Now predict the training by hand. A piece is the whole share of a rank in one step, and the ranks synchronize after
# every step. For comparison, two predictions for two microbatches on each rank: on demand, and with collectives, where
# the ranks synchronize after every microbatch.


# %%
def predict(shares, every_microbatch):
    """Seconds of the training, if rank r runs the microbatches shares[r] of every step."""
    times = []
    for mine in shares.values():
        pauses = PAUSES[:, mine]  # by step and microbatch
        pieces = pauses.flatten() if every_microbatch else pauses.sum(1)
        times.append(pieces.tolist())
    return replay(times, wait_always=True)


# %% Compare with the measurement tags=["hide-input"]
predicted = predict(SHARES, every_microbatch=False)
measured = recorded.timeline.seconds
halves = {0: [0, 1], 1: [2, 3]}
print_table(
    ["seconds", "predicted", "measured", "off by"],
    [
        [
            "one microbatch and three, on demand",
            f"{predicted:.2f}",
            f"{measured:.2f}",
            f"{measured / predicted - 1:+.1%}",
        ],
        ["two and two, on demand", f"{predict(halves, False):.2f}", "", ""],
        ["two and two, collectives", f"{predict(halves, True):.2f}", "", ""],
    ],
)

# %% [markdown]
# The arithmetic of [notebook 1](01_seeing_the_imbalance.ipynb) and of its pictures is this function. There, a piece
# is one layer of one microbatch.

# %% [markdown]
# ## Why is no barrier needed?
#
# Ranks write into each other's memory, and no barrier keeps them in order. What if a rank reads a shard while its
# owner overwrites it? What if a gradient comes too late, or too early?
#
# There are two dangers between one step and the next.
#
# *An owner could overwrite a shard while a peer still reads it.* It cannot: the owner writes only after all ranks have
# synchronized, and a peer synchronizes only after its last read.
#
# *A gradient of step 2 could fall into an accumulator that still holds step 1.* It cannot: to have a gradient of
# step 2, a rank must have read version 2 of that owner's shard. The owner publishes version 2 only after it has
# emptied the accumulator.
#
# Do not believe arguments about concurrency. Try all orders. Below, a rank is a list of small actions. The
# protocol is one such list, repeated for every step. `explore` lets two ranks run it in *every* order that is
# possible, for three steps. It looks for a rank that reads what it should not, and for a sum that is not complete.

# %%
print("\n".join(PROTOCOL))

# %%
print("one microbatch each:   ", explore(PROTOCOL))
print("one against three:     ", explore(microbatches(1), microbatches(3)))
print("two against zero:      ", explore(microbatches(2), microbatches(0)))

# %% [markdown]
# ## Break it on purpose
#
# Now leave something out. The explorer prints the shortest way to the error: rank 0 on the left, rank 1 on the right,
# time runs down.
#
# **No rank waits for the others at the end.** The owner takes the sum before it is complete:

# %%
print(explore(without(PROTOCOL, "wait for done")))

# %% [markdown]
# **No rank looks at the version.** The first read comes before the first write:

# %%
print(explore(without(PROTOCOL, "wait for version")))

# %% [markdown]
# **The owner sets the version before it has written the bytes.** Half of the shard is new, half of it was never
# written. This is called a *torn read*:

# %%
print(explore(swapped(PROTOCOL, "write second half", "announce version")))

# %% [markdown]
# **Publish first, clean up later.** It seems harmless to publish the new shard before emptying the accumulator. But a
# rank that sees the new version may add at once, and then the owner deletes that gradient:

# %%
late_zero = (*PROTOCOL[:3], "zero sum", *PROTOCOL[3:-1])
print(explore(late_zero))

# %% [markdown]
# **Count from zero.** Control words are zero in the beginning. If the first version is 0 as well, everything looks
# published before the first write. An early prototype of this package had this error. Its loss looked fine.

# %%
print(explore(PROTOCOL, first_version=0))

# %% [markdown]
# Such mistakes are silent. Nothing crashes. The model learns a little worse, in some runs. So the package's tests run
# the real protocol in many random orders as well, and check that this *finds* broken protocols.

# %% [markdown]
# ## Read the errors
#
# A user can break the rules, too. The engine checks what it can and says what to do. You may see these four errors.
#
# **The ranks run different programs.** One is at the end of a step, the other one has gone to validation:

# %%
rank0, rank1 = open_ranks([vector])
error, _ = together(
    lambda: rank0.meet("step"),
    lambda: rank1.meet("validation"),
    catch=ODCError,
)
print(f"{type(error).__name__}: {error}")

# %% [markdown]
# **The model runs at a moment when shards change**, after ranks have synchronized and before the new
# version:

# %%
rank0, rank1 = open_ranks([vector])
together(
    lambda: rank0.end_version("step"),
    lambda: rank1.end_version("step"),
)
try:
    rank0.windows[0].gather(full.view(-1))
except ODCError as error:
    print(f"{type(error).__name__}: {error}")

# %% [markdown]
# **Another rank has failed.** A rank that waits for it stops, and shows the error of the rank that failed first:

# %%
rank0, rank1 = open_ranks([vector])
rank1.fail("ValueError: sample 4711 has no tokens")
try:
    rank0.windows[0].gather(full.view(-1))
except ODCError as error:
    print(f"{type(error).__name__}: {error}")

# %% [markdown]
# **Your code has changed a parameter by hand.** If the model is sharded, peers would read the old value. Here it is in
# a real training with two processes:


# %%
class EditsByHand(Callback):
    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if batch_idx == 1:
            with torch.no_grad():
                next(module.parameters()).mul_(0.9)


trainer = Trainer(
    strategy=ODCStrategy(sharding_strategy="FULL_SHARD", balance=None),
    accelerator="cpu",
    devices=2,
    max_steps=3,
    callbacks=[EditsByHand()],
    **QUIET,
)
try:
    trainer.fit(BoringModel())
except ODCError as error:
    print(last_line(error))

# %% [markdown]
# The check compares, bit by bit, what a rank has published with what it holds. It runs when a rank first reads a
# unit in a step, and after the last backward pass. The message shows the line to write.
#
# ## What you have seen
#
# - Reading and adding need no partner. A rank that is busy, or asleep, does not hold up the others.
# - One number per shard, its version, says when it may be read. One synchronization per
#   step says when it may be changed.
# - Six lines of arithmetic predict how long ranks take, and where they wait.
# - Leave out any rule, and an exhaustive search finds the order of events that breaks training.
# - Every wait is measured, has a deadline, and names the rank that it waits for.
#
# [How it works](../docs/how-it-works.md) continues from here: who divides the gradient, what it costs in memory,
# and how processes share windows. The protocol itself is in `lightning_odc/protocol/protocol.py`. Read its Notes next.
#
# ## Exercises
#
# 1. `explore(without(PROTOCOL, "zero sum"))`: in which step is the error found, and why not earlier?
# 2. Find two actions of `PROTOCOL` that can be swapped without harm, and two whose swap makes both ranks wait
#    forever.
# 3. Leave out both `"wait for done"` and `"take sum"`. Now the explorer finds another mistake than before. Which
#    of the two dangers is it?
# 4. In the training by hand, let rank 0 crash in step 3 (`raise ValueError`). What does rank 1 say, and after how
#    long? What does it say if rank 0 calls `rank.fail("...")` first?
# 5. Give rank 0 no microbatches at all (`SHARES = {0: [], 1: [0, 1, 2, 3]}`). Are the weights still those of one
#    process?
#
# <details>
# <summary>Answer to 1</summary>
#
# In step 2, when a rank takes its sum: the sum still holds gradients of step 1. In step 1 the accumulators are empty
# from the beginning, so leaving out `"zero sum"` changes nothing there.
#
# </details>
#
# <details>
# <summary>Answer to 2</summary>
#
# Without harm: `"read first half"` and `"read second half"`, or `"add to peer"` and `"add to own"`. Both ranks wait
# forever if you swap `"say done"` and `"wait for done"`: each waits for the other to say so first. There are more of
# both kinds. Try all pairs:
#
# ```python
# from itertools import combinations
#
# for one, other in combinations(PROTOCOL, 2):
#     print(one, "|", other, "|", explore(swapped(PROTOCOL, one, other)).violation or "no harm")
# ```
#
# </details>
#
# <details>
# <summary>Answer to 3</summary>
#
# The first one. A rank that does not wait at the end continues with the next step, and overwrites its shard while a
# peer still has to read the old version: "works on version 1 and has read version 2".
#
# </details>
#
# <details>
# <summary>Answer to 4</summary>
#
# Rank 1 says that it gave up waiting for version 4 of rank 0's shard, after 10 seconds: the deadline of
# `open_ranks(..., timeout=10)`. With `rank.fail("...")` rank 1 stops at once, and its error has the message of rank
# 0. The strategies of this package call `fail` for you.
#
# </details>
#
# <details>
# <summary>Answer to 5</summary>
#
# Yes. The sum does not depend on which rank adds. Rank 0 reads nothing, adds nothing, and waits at the end of every
# step.
#
# </details>
