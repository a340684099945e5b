# %% [markdown]
# # 1. Seeing the imbalance problem
#
# **You will learn**
#
# - how uneven real texts are, and why a few of them are most of the work;
# - what sharded training does at every layer, and why ranks have to wait there;
# - how to measure the waiting, how to see it, and how to predict it;
# - how it grows with the skew of the lengths and with the number of devices.
#
# **It needs** Linux, two CPU cores and about two minutes. No GPU, no network. In a clone of the repository,
# `make lab` installs everything and opens the notebooks. (On a machine with two GPUs, set `ACCELERATOR = "gpu"` below.)
# You should know what a training loop in PyTorch looks like. You need not know how sharding works.
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

from support import pictures, replay, texts
from support.corpus import read_corpus
from support.dealing import DealtTexts, deal_minibatches
from support.display import (
    QUIET,
    mean_of_log,
    print_table,
    quiet,
    show,
)
from support.models import CausalModel, byte_llama
from support.sleeping import LAYERS, SleepingLayer, SleepingModel
from support.sliders import show_sliders

quiet()

# %%
import numpy as np
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.loggers import CSVLogger

from lightning_odc import ODCStrategy, balance
from lightning_odc.callbacks import (
    DeviceIdleMonitor,
    TimelineRecorder,
    load_timeline,
)

ACCELERATOR = "cpu"  # "gpu": one for each of two ranks

# %% [markdown]
# ## Real texts are uneven
#
# Our texts are the functions and classes of Python's own standard library. They are on your disk already. One
# byte is one token, so no tokenizer has to be downloaded. Texts of more than 2,048 tokens are left out, as in any
# training with a maximum length.

# %%
corpus = read_corpus(max_length=2048)
lengths = corpus.lengths

print(f"{len(lengths):,} texts of {min(lengths)} to {max(lengths):,} tokens")
print(
    f"the longest tenth holds {texts.fraction_in_longest(lengths):.0%} of the tokens"
)
print(
    f"and {texts.fraction_in_longest([n * n for n in lengths]):.0%} of the attention work"
)

# %% Draw the lengths tags=["hide-input"]
show(
    pictures.lengths_figure(lengths),
    "Left: a histogram of text lengths, a high peak at short texts and a long "
    "tail. Right: the longest tenth of the texts holds a large part of the tokens "
    "and an even larger part of the attention work.",
)

# %% [markdown]
# Remember the right-hand picture. Most of a transformer's work grows with the number of tokens. Attention grows
# with its *square*. So a text that is ten times as long is between ten and a hundred times as much work.
#
# Chats, code and the reasoning traces of language models look like this. Traces are worse: their longest texts
# have tens of thousands of tokens.

# %% [markdown]
# ## One minibatch on two devices
#
# Four words mean the same thing in all notebooks.
#
# - A **rank** is one process that trains, usually with one GPU. Here a rank is a process with one CPU core.
# - A **minibatch** is all the texts, on all ranks, of *one optimizer step*.
# - A **microbatch** is what one rank sends through the model at once, forward and backward. Memory limits its
#   size. A rank with eight texts in a minibatch may run them one after the other.
# - A rank is **idle** while it waits for another rank.
#
# Let us draw minibatches of our texts, and deal them out to two ranks, four texts each. These are the first two.

# %%
plan = deal_minibatches(
    lengths, ranks=2, samples_per_rank=4, minibatches=8, seed=3, longest_first=False
)

for number, minibatch in enumerate(plan[:2]):
    for rank, share in enumerate(minibatch):
        own = [lengths[index] for index in share]
        print(
            f"minibatch {number}, rank {rank}: texts of {own} tokens, {sum(own):,} in all"
        )

# %% [markdown]
# The texts differ from microbatch to microbatch, and the totals differ from rank to rank. Which rank waits for
# which? That depends on when the ranks have to *synchronize*.

# %% [markdown]
# ## What sharded training does at every layer
#
# A large model does not fit on one device. **Sharded** training (FSDP, ZeRO-3, `fully_shard`) cuts every layer's
# parameters into as many slices as there are ranks. Each rank keeps one slice of each layer. To compute a layer,
# a rank needs all of it. So for every microbatch:
#
# 1. *before* a layer computes, forward and again backward, all ranks send each other their slices
#    (**all-gather**);
# 2. *after* the layer's backward, all ranks sum their gradients, and each keeps its slice of the sum
#    (**reduce-scatter**).
#
# Both are *collectives*: operations that all ranks enter together. No rank leaves a collective before the last
# one has entered. So each collective is a **barrier**, and a model of 32 layers has about 100 barriers per
# microbatch.
#
# Here is a small example in pure arithmetic: two ranks, three microbatches each, a model of four layers. Rank 0
# has its long text first, rank 1 last. Both have 10 seconds of work in total.

# %%
# seconds of the three microbatches of each rank, spread evenly over four layers
microbatches = [[8, 1, 1], [1, 1, 8]]
seconds = np.repeat(np.array(microbatches)[:, :, None] / 4, 4, axis=2)
# ... so this is seconds[rank, microbatch, layer]

every_layer = seconds.max(axis=0).sum()  # the slowest rank, layer by layer
once = seconds.sum(axis=(1, 2)).max()  # the rank with the most work
print(f"synchronize at every layer: {every_layer:.0f} s; once: {once:.0f} s")

# %% Draw the two replays tags=["hide-input"]
work = replay.layered(microbatches, layers=4)
show(
    pictures.replays_figure(
        {
            "synchronize at every layer": replay.replay(work, barrier="layer"),
            "synchronize once": replay.replay(work, barrier="minibatch"),
        },
        "seconds",
    ),
    "Two diagrams on one time axis. With a barrier at every layer, rank 1 waits at each "
    "layer of the first microbatch and rank 0 at each layer of the last one. "
    "With one barrier, both ranks work without a gap and are done much earlier.",
)

# %% [markdown]
# Look at the upper diagram. In the first microbatch, rank 1 finishes its small layer at once. It cannot begin the
# next layer: rank 0 is not there yet. In the last microbatch the roles are swapped. Most of the time one rank
# waits, although both have the same amount of work.
#
# The two lines that computed the seconds are the whole idea: a sum of maxima, and a maximum of sums. The maximum of
# sums is never larger. The difference is idle time. It does not depend on how much work there is. It depends on *when
# the ranks synchronize*. (The sum of maxima is equation 1 of [arXiv 2601.19362](https://arxiv.org/abs/2601.19362).)
#
# Do they have to synchronize at every layer? A slice of parameters does not change until the optimizer step. So a rank
# can *read* it when it needs it, without asking. And a gradient can be *added* to its owner's sum at any time
# before the optimizer uses that sum. Then one barrier per minibatch is enough. This is **on-demand
# communication**, and this package does it. [Notebook 6](06_how_it_works.ipynb) shows how. Here we stay with the
# problem.

# %% [markdown]
# ## Now measure it
#
# Let us train a small Llama with random weights on the minibatches from above, sharded over two processes. It would fit
# on each of them, so we ask for shards: `sharding_strategy="FULL_SHARD"`. The first run uses PyTorch's collectives
# (`communication="collective"` is stock `fully_shard`), the second one on-demand communication. `DeviceIdleMonitor`
# logs how long the ranks wait. `TimelineRecorder` records what every rank does, and when.


# %%
def train(name, strategy, model, data, accelerator=ACCELERATOR):
    """Train on four minibatches, and watch all of them but the first."""
    trainer = Trainer(
        strategy=strategy,
        accelerator=accelerator,
        devices=2,
        max_epochs=1,
        use_distributed_sampler=False,  # the data module deals out the texts itself
        log_every_n_steps=1,
        callbacks=[
            DeviceIdleMonitor(),
            TimelineRecorder(f"runs/{name}", steps=range(1, 4)),
        ],
        **{**QUIET, "logger": CSVLogger("runs", name=name, version="log")},
    )
    trainer.fit(model, data)


few = plan[:4]
WAYS = {"collectives": "collective", "on demand": "on_demand"}
for communication in WAYS.values():
    train(
        communication,
        ODCStrategy(sharding_strategy="FULL_SHARD", communication=communication),
        CausalModel(byte_llama(4, 256, corpus.max_length), seed=0),
        DealtTexts(corpus, few),
    )


# %% Print idle seconds per minibatch tags=["hide-input"]
def per_minibatch(name):
    """Seconds of a minibatch, and idle seconds of a rank in it: means over ranks and minibatches."""
    seconds, busy = (
        mean_of_log(f"runs/{name}/log", value, skip=1)
        for value in ("step_seconds", "busy_seconds")
    )
    return seconds, seconds - busy


rows = []
for title, name in WAYS.items():
    seconds, idle = per_minibatch(name)
    rows.append(
        [title, f"{idle:.2f} s", f"{seconds:.2f} s", f"{idle / seconds:.0%}"]
    )
print_table(["per minibatch", "idle", "of", "idle part"], rows)
before, after = (per_minibatch(name)[1] for name in WAYS.values())
print(f"\nidle seconds per minibatch: {before:.2f} -> {after:.2f}")

# %% [markdown]
# The line at the bottom is the result: how many seconds of every minibatch a rank spends waiting, with
# collectives and on demand. Compare idle *seconds*. The idle *part* can mislead: when a minibatch gets shorter,
# the same waiting is a larger part of it.
#
# Be careful with the column "of". Two things differ between the rows: there are fewer waits, and bytes move through
# shared memory instead of a socket, which is cheaper. The idle column is about the waits alone.
#
# Where are these seconds? Here are the timelines.

# %% Draw the timelines tags=["hide-input"]
measured = {
    title: load_timeline(f"runs/{name}/timeline.json")
    for title, name in WAYS.items()
}
show(
    pictures.timelines_figure(measured),
    "Measured timelines of three minibatches on two ranks. With collectives, grey "
    "waiting is spread over all microbatches of both ranks. On demand, a rank "
    "only waits at the end of a minibatch.",
)

# %% [markdown]
# Each panel shows three minibatches of both ranks on the same time axis. Blue is computing, purple is moving bytes,
# **grey is waiting**. Minibatches begin and end at the lines through a row.
#
# With collectives, grey is in every microbatch: beside every long text there is a grey stretch on the other rank.
# On demand, the grey that is left is at the *end* of the minibatches: one rank had less to do there. That is
# another problem, and [notebook 3](03_balancing_a_minibatch.ipynb) is about it.
#
# How do we know what is waiting and what is moving bytes? A collective cannot end before the last rank has begun
# it. So all the time that a rank spends in it before that moment is waiting. Both callbacks compare when
# ranks entered.
#
# Let us look closer, at one forward pass with collectives: the one in which the ranks waited longest.

# %% Draw the longest wait tags=["hide-input"]
show(
    pictures.one_timeline_figure(
        pictures.close_up(measured["collectives"]),
        "one forward pass with collectives",
    ),
    "A close-up of one microbatch under collectives. The rank with the short text "
    "computes for a moment, then waits in the all-gather of the next layer until "
    "the rank with the long text gets there, layer after layer.",
)

# %% [markdown]
# This is the barrier at every layer, four times in a row. The rank with the shorter text computes its layer,
# enters the next all-gather, and waits there, in grey, until the other rank arrives. It does so in every layer,
# forward and backward.

# %% [markdown]
# ## A knob for the skew
#
# Are the *lengths* the reason? We can turn a knob. Keep the text, the number of samples and the number of tokens.
# Change only where the text is cut. With skew 0 all samples are equally long. With skew 1 they are as uneven as
# the real ones. Above 1 the tail is longer still.
#
# First by arithmetic, for many ranks at once. The cost of a sample is what the model's configuration says: the
# number of floating-point operations for its length.

# %%
cost = balance.transformer(byte_llama(4, 256, max_length=2048))


def costs_of(skew, minibatch):
    """The costs of a minibatch's samples, rank by rank."""
    costs = cost.samples(texts.bend(lengths, skew))
    return [costs[share] for share in minibatch]


def expected_idle(skew, plan, barrier):
    """The idle fraction of a plan's minibatches, if only computing took time."""
    costs = np.array([costs_of(skew, minibatch) for minibatch in plan])
    _, ranks, _ = costs.shape  # costs[minibatch, rank, microbatch]
    if barrier == "layer":
        times = costs.max(axis=1).sum(axis=1)
    else:
        times = costs.sum(axis=2).max(axis=1)
    return 1 - costs.sum() / (ranks * times.sum())


SKEWS = [0, 0.25, 0.5, 0.75, 1, 1.25]
curves = {}
for ranks in (32, 8, 2):
    dealt = deal_minibatches(
        lengths,
        ranks=ranks,
        samples_per_rank=8,
        minibatches=40,
        seed=0,
        longest_first=False,
    )
    for barrier, word in (("layer", "at every layer"), ("minibatch", "once")):
        idle = [expected_idle(skew, dealt, barrier) for skew in SKEWS]
        curves[f"{ranks} ranks, synchronize {word}"] = (SKEWS, idle)

# %% Draw the curves tags=["hide-input"]
labels = {
    "x": "skew (0: equal lengths, 1: the real ones)",
    "y": "idle, %",
    "percent": True,
}
show(
    pictures.lines_figure(
        curves, title="Idle time by skew, in theory", in_turns=2, **labels
    ),
    "Six rising curves of idle time over skew. All begin at zero for equal "
    "lengths. With more ranks they are higher. Synchronizing at every layer lies far "
    "above synchronizing once with as many ranks.",
)

# %% [markdown]
# With equal lengths no rank waits, however often they synchronize. Two things make them wait:
#
# - **more skew**: the longest text of the moment is further from the average;
# - **more ranks**: all ranks wait for the *slowest of all*, and among many ranks there is nearly always a long
#   text. This is why the problem is worst where training is most expensive.
#
# ## Turn the knobs yourself
#
# The next figure computes one minibatch in your browser: four samples per rank, a barrier at every layer or one per
# minibatch, and two sliders. Lengths are drawn at random with a fixed seed, so that only the sliders change the
# picture. *sigma* is the standard deviation of the logarithms of the lengths. A sample takes as long as it has tokens,
# the mean is 1, and moving bytes takes no time. Blue is computing, grey is waiting.

# %%
show_sliders(
    "An interactive figure: two sliders, for the skew of the lengths and for the number of ranks, and two "
    "timelines of one minibatch, synchronizing at every layer and once. It needs JavaScript: run this cell, or "
    "open the page of the documentation."
)
print(f"sigma of our texts: {np.log(lengths).std():.1f}")

# %% [markdown]
# Three things to try:
#
# - Set sigma to 0. Both pictures are solid blue.
# - Set sigma as high as in our texts, and go from 2 ranks to 16. The upper picture gets much longer.
# - In the lower picture, look at the grey at the end. On-demand communication cannot remove it. Balancing can.

# %% [markdown]
# ## Theory and measurement
#
# The arithmetic knows only computing and barriers. Real training also moves bytes, runs the optimizer, and shares
# the machine with other programs. So we measure twice. First the Llama from above, at three places of the knob:


# %%
def data_at(skew):
    """The minibatches at one place of the knob: the same text, cut elsewhere."""
    return DealtTexts(texts.recut(corpus, texts.bend(lengths, skew)), few)


PLACES = [0, 0.5, 1]
for skew in PLACES:
    for communication in WAYS.values():
        train(
            f"llama-{skew}-{communication}",
            ODCStrategy(
                sharding_strategy="FULL_SHARD", communication=communication
            ),
            CausalModel(byte_llama(4, 256, corpus.max_length), seed=0),
            data_at(skew),
        )

# %% [markdown]
# Then a model whose layers **sleep** as long as the arithmetic says, a third of it forward and two thirds backward.
# Processes, sharding, protocol and monitor are the real ones. Only the work of a layer is emulated, so nothing else
# takes much time.

# %%
# so long that the mean microbatch of our minibatches sleeps for 0.3 s
UNIT = 0.3 / np.mean([costs_of(1, minibatch) for minibatch in few])


class AsleepModel(SleepingModel):
    """The sleeping model on packed texts."""

    def compute(self, microbatch):
        tokens = microbatch["input_ids"].shape[1]
        seconds = UNIT * float(cost.samples(np.array([tokens]))[0])
        return super().compute(torch.tensor([tokens, seconds]))


for skew in PLACES:
    for communication in WAYS.values():
        train(
            f"asleep-{skew}-{communication}",
            ODCStrategy(
                sharding_strategy="FULL_SHARD",
                communication=communication,
                auto_wrap_policy={SleepingLayer},
            ),
            AsleepModel(),
            data_at(skew),
            accelerator="cpu",  # sleeping needs no GPU
        )

# %% Draw theory and measurement tags=["hide-input"]
expected, points = {}, {}
for title, barrier, communication in (
    ("synchronize at every layer", "layer", "collective"),
    ("synchronize once", "minibatch", "on_demand"),
):
    expected[title] = (PLACES, [expected_idle(s, few[1:], barrier) for s in PLACES])
    for model, name in (("sleeping model", "asleep"), ("Llama", "llama")):
        measured_idle = []
        for skew in PLACES:
            seconds, idle = per_minibatch(f"{name}-{skew}-{communication}")
            measured_idle.append(idle / seconds)
        points[f"{title}: {model}, measured"] = (PLACES, measured_idle)
show(
    pictures.lines_figure(
        expected,
        points=points,
        title="2 ranks: theory (lines) and measurement (points)",
        **labels,
    ),
    "Two theoretical lines of idle time over skew, for synchronizing at every layer and once, and measured "
    "points. Those of the model that sleeps are closer to the lines than those of the Llama.",
)

# %% [markdown]
# The points of the sleeping model are close to the lines. In seconds, at skew 1:

# %% Compare in seconds tags=["hide-input"]
rows = []
for title, barrier, communication in (
    ("synchronize at every layer", "layer", "collective"),
    ("synchronize once", "minibatch", "on_demand"),
):
    pieces = [
        replay.replay(replay.layered(costs_of(1, minibatch), LAYERS), barrier)
        for minibatch in few[1:]
    ]
    seconds = UNIT * sum(map(replay.duration, pieces)) / len(pieces)
    waiting = UNIT * sum(
        piece.end - piece.begin for some in pieces for piece in some if piece.idle
    )
    idle = waiting / len(pieces) / 2
    found = per_minibatch(f"asleep-1-{communication}")
    for what, predicted, value in (
        ("seconds", seconds, found[0]),
        ("idle seconds", idle, found[1]),
    ):
        off = f"{(value / predicted - 1):+.1%}"
        rows.append([f"{title}: {what}", f"{predicted:.3f}", f"{value:.3f}", off])
print_table(["per minibatch", "predicted", "measured", "off by"], rows)

# %% [markdown]
# So the waiting follows from the lengths and from the barriers alone. Where the Llama's points differ from the
# lines, the reason is what the arithmetic leaves out: bytes that move, the optimizer, two processes that never run
# at quite the same speed.

# %% [markdown]
# ## What you have seen
#
# - Real texts have a long tail, and the tail holds a large part of the work.
# - Sharded training has a barrier at every layer, and at each barrier all ranks wait for the slowest.
# - That idle time has two sources: *when* ranks synchronize, and *how much* each of them has to do. On-demand
#   communication removes the first. Balancing removes as much of the second as can be removed.
# - You can measure it. `DeviceIdleMonitor` logs it under DDP and FSDP2, too: see [Idle time](../docs/idle.md). It also
#   counts padding, of which our packed rows have none. [Notebook 2](02_your_first_odc_run.ipynb) pads, and shows it.
#   `TimelineRecorder` draws it: see [Timelines](../docs/idle.md#timelines-and-idle-time).
# - You can predict it: the maximum over ranks, at every barrier.
#
# ## Exercises
#
# 1. Deal out the texts with `longest_first=True`: every rank sorts its own texts by length. Why does this help
#    collectives, and why not enough?
# 2. Give each rank a single text per minibatch (`samples_per_rank=1`). What does on-demand communication gain
#    now? Look at the two formulas.
# 3. Replace `lengths` by the lengths of your own data. How much does the longest tenth of them hold?
#
# <details>
# <summary>Answer to 1</summary>
#
# Sorted, the longest texts of all ranks run side by side, then the second longest, and so on. They are more alike
# than texts in random order, so every maximum is closer to its mean. But the longest text of one rank is seldom
# as long as that of another, and sorting does not change how much work a rank has. Compare
# `expected_idle(1, deal_minibatches(..., longest_first=True), "layer")` with `longest_first=False`, and with
# `"minibatch"` in place of `"layer"`.
#
# </details>
#
# <details>
# <summary>Answer to 2</summary>
#
# Nothing but cheaper bytes. With one microbatch, the sum over `m` has one term. If every layer takes the same part
# of a text's work, the rank with the longest text is the last one at every barrier, and both formulas give the
# time of that text. The idle time that is left is uneven work.
#
# </details>
#
# <details>
# <summary>Answer to 3</summary>
#
# `texts.fraction_in_longest(your_lengths)` is 0.1 if all are equally long. Texts like ours have several times as
# much. `texts.fraction_in_longest([n * n for n in your_lengths])` does the same for the work of attention.
#
# </details>
#
# Next: [Your first ODC run](02_your_first_odc_run.ipynb).
