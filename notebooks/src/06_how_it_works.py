# %% [markdown]
# # 6. How it works inside
#
# **You will learn**
#
# - how a rank reads a parameter shard and adds a gradient while its owner does something else, by doing it by
#   hand;
# - which single number replaces the barriers, and why that is enough;
# - what goes wrong, step by step, when a rule of the protocol is left out;
# - how to read the errors that you get when ranks disagree.
#
# **It needs** Linux, half a minute on one core, and the package: until its first release,
# `pip install ".[notebooks]"` in a clone of the repository. No GPU, no network. You should have seen
# [notebook 1](01_seeing_the_imbalance.ipynb), or know what FSDP does at a layer.

# %%
import time

import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.demos.boring_classes import BoringModel

from lightning_odc import ODCStrategy
from lightning_odc.engine.transports.base import Segment, UnitSpec
from lightning_odc.errors import ODCError
from lightning_odc.lessons import pictures
from lightning_odc.lessons.display import QUIET, last_line, quiet, show
from lightning_odc.lessons.interleavings import (
    PROTOCOL,
    explore,
    microbatches,
    swapped,
    without,
)
from lightning_odc.lessons.windows import Recorded, open_ranks, together

quiet()
torch.set_printoptions(precision=3, sci_mode=False)

# %% [markdown]
# ## Four numbers, two owners
#
# The smallest model that can be sharded: a weight vector of four numbers. Rank 0 **owns** the first two, rank 1
# the last two. To *own* a shard means: I keep it, I run the optimizer on it, I am the only one who may change it.
#
# Every rank opens a **window**, a piece of memory that the others can reach. For each *unit* of the model
# (usually one transformer layer; here the whole vector) there are three things in it:
#
# | in the window | who writes | who reads |
# |---|---|---|
# | a copy of the rank's **shard** | its owner | everybody |
# | a **version** number of that copy | its owner | everybody |
# | an **accumulator** for the shard's gradient | everybody adds, under a lock | its owner |
#
# With processes the window is shared memory. Here both ranks live in this notebook's process, so that you can
# drive them by hand. The protocol code is the real one: the same class that `strategy="odc"` uses.

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
# Rank 1 wants to compute. It needs the whole vector. Watch what rank 0 does in the next cell: *nothing*. No line
# of it runs. Its shard is read anyway.

# %%
full = torch.zeros(2, 2)
full[1] = weights[1]  # the own shard is at hand
rank1.windows[0].gather(full.view(-1))  # fill in what the peers have published
print("rank 1 sees", full.flatten().tolist())

# %% [markdown]
# That is the difference to an all-gather. An all-gather is a conversation: both sides have to be there. This is a
# look at a notice board.
#
# ## Adding without asking
#
# Rank 1 runs three microbatches, one after the other. Each leaves a gradient for all four numbers. The first two
# belong to rank 0, so rank 1 adds them to *rank 0's accumulator*. Rank 0 still does nothing.

# %%
for microbatch in (1, 2, 3):
    # row r is for the owner of shard r
    gradient = torch.full((2, 2), float(microbatch))
    whole = [Segment(target=0, source=0, numel=2)]
    rank1.windows[0].accumulate(gradient.view(-1), whole)

for rank in (rank0, rank1):
    print("in its accumulator:", rank.windows[0].own_accumulator.tolist())

# %% [markdown]
# With a reduce-scatter, three microbatches on rank 1 would have needed three on rank 0, or the job would hang.
# Here rank 0 may run one, or five, or none. The sum is the same, in whatever order the gradients come. (In
# floating point, up to rounding. `ODCStrategy(deterministic=True)` fixes the order, too.)
#
# ## The one meeting
#
# Rank 0 must not run its optimizer before *all* gradients are there. So there is one meeting per minibatch: each
# rank says "I am done with version 1", and waits until everybody has said so. The message carries what else the
# ranks must know of each other, for example how many items their losses are sums over.
#
# A meeting needs both, so now each rank gets a thread. Rank 0 comes half a second late.


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
# Rank 0 goes on to the next minibatch. It wants to read rank 1's shard, version 2, which is not there yet. It
# *waits*; it does not take the old one. (Every wait has a deadline. Ours is one second.) Read the error: it says
# who waits for whom, for what, and where everybody is.

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
#     meet         say "done with v", wait until all have said so
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
            rank.tracer.record("forward", began)
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

# %%
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
# ## Why is no barrier needed?
#
# You may have an uneasy feeling by now. Ranks write into each other's memory and nobody keeps them in order. What
# if somebody reads a shard while it is being overwritten? What if a gradient comes too late, or too early?
#
# There are two dangers between one step and the next.
#
# *A shard could be overwritten while a peer still reads it.* It cannot: the owner writes only after the meeting,
# and a peer comes to the meeting only after its last read.
#
# *A gradient of step 2 could fall into an accumulator that still holds step 1.* It cannot: to have a gradient of
# step 2, a rank must have read version 2 of that owner's shard, and the owner publishes it only after it has
# emptied the accumulator.
#
# Do not believe arguments about concurrency. Try all orders! Below, a rank is a list of small actions. The
# protocol is one such list, repeated for every step. `explore` lets two ranks run it in *every* order that two
# ranks can possibly run it in, for three steps, and looks for a rank that reads what it should not, or a sum that
# is not complete.

# %%
print("\n".join(PROTOCOL))

# %%
print("one microbatch each:   ", explore(PROTOCOL))
print("one against three:     ", explore(microbatches(1), microbatches(3)))
print("two against none:      ", explore(microbatches(2), microbatches(0)))

# %% [markdown]
# ## Break it on purpose
#
# Now leave something out. The explorer prints the shortest way into the disaster: rank 0 on the left, rank 1 on
# the right, time runs down.
#
# **Nobody waits for the others at the end.** The sum is taken before it is complete:

# %%
print(explore(without(PROTOCOL, "wait for done")))

# %% [markdown]
# **Nobody looks at the version.** The first read comes before anything was written:

# %%
print(explore(without(PROTOCOL, "wait for version")))

# %% [markdown]
# **The version is set before the bytes are there.** Half of the shard is new, half of it was never written. This
# is called a *torn read*:

# %%
print(explore(swapped(PROTOCOL, "write second half", "announce version")))

# %% [markdown]
# **Publish first, clean up later.** It seems harmless to publish the new shard before the accumulator is emptied.
# But whoever sees the new version may add at once, and then the owner wipes that gradient away:

# %%
late_zero = (*PROTOCOL[:3], "zero sum", *PROTOCOL[3:-1])
print(explore(late_zero))

# %% [markdown]
# **Count from zero.** Control words are zero in the beginning. If the first version is 0 as well, then everything
# looks published before anybody has written. An early prototype of this package had exactly this hole. The loss
# looked fine.

# %%
print(explore(PROTOCOL, first_version=0))

# %% [markdown]
# Such mistakes are silent. Nothing crashes; the model learns a little worse, on some days. This is why the
# package's tests run the real protocol in many random orders as well, and check that this *finds* broken
# protocols.

# %% [markdown]
# ## Read the errors
#
# A user can break the rules, too. The engine checks what it can and says what to do. Four errors that you may
# meet.
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
# **The model runs at a moment when shards change**, between the meeting and the new version:

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
# **Another rank has failed.** Whoever waits for it stops, and shows the error of the one that failed first:

# %%
rank0, rank1 = open_ranks([vector])
rank1.fail("ValueError: sample 4711 has no tokens")
try:
    rank0.windows[0].gather(full.view(-1))
except ODCError as error:
    print(f"{type(error).__name__}: {error}")

# %% [markdown]
# **Somebody has changed a parameter by hand.** Peers would read the old value. This one in a real training with
# two processes:


# %%
class EditsByHand(Callback):
    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if batch_idx == 1:
            with torch.no_grad():
                next(module.parameters()).mul_(0.9)


trainer = Trainer(
    strategy=ODCStrategy(),
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
# The check compares, bit by bit, what a rank has published with what it holds: when it first reads a unit in a
# step, and after the last backward pass. The message shows the line to write.
#
# ## What you have seen
#
# - Reading and adding need no partner. A rank that is busy, or asleep, does not hold up the others.
# - One number per shard, its version, says when it may be read. One meeting per step says when it may be changed.
# - Leave out any rule, and an exhaustive search finds the order of events that breaks training.
# - Every wait is measured, has a deadline, and says who waits for whom.
#
# [How it works](../docs/how-it-works.md) goes on from here: who divides the gradient, what it costs in memory,
# and how windows are shared between processes. The protocol itself is in `lightning_odc/engine/protocol.py`; its
# Notes are worth reading now.
#
# ## Exercises
#
# 1. `explore(without(PROTOCOL, "zero sum"))`: in which step is it found out, and why not earlier?
# 2. Find two actions of `PROTOCOL` that can be swapped without harm, and two whose swap makes both ranks wait
#    forever.
# 3. Leave out both `"wait for done"` and `"take sum"`. Now the explorer finds another mistake than before. Which
#    of the two dangers is it?
# 4. In the training by hand, let rank 0 crash in step 3 (`raise ValueError`). What does rank 1 say, and after how
#    long? What does it say if rank 0 calls `rank.fail("...")` first?
# 5. Give rank 0 no microbatches at all (`SHARES = {0: [], 1: [0, 1, 2, 3]}`). Are the weights still those of one
#    process?
