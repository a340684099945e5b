# %% [markdown]
# # 1. Seeing the imbalance problem
#
# **You will learn**
#
# - how uneven real texts are, and why a few of them are most of the work;
# - what sharded training does at every layer, and why somebody has to wait there;
# - how to measure the waiting, and how to see it;
# - how it grows with the skew of the lengths and with the number of devices.
#
# **It needs** Linux, two CPU cores, about a minute, and the package: until its first release,
# `pip install ".[notebooks]"` in a clone of the repository. No GPU, no network. (On a machine with GPUs, set
# `DEVICE = "cuda"` below.) You should know what a training loop in PyTorch looks like. You need not know how
# sharding works.

# %%
from lightning.pytorch import Trainer

import lightning_odc  # noqa: F401
from lightning_odc import ODCStrategy, balance
from lightning_odc.bench.models import CausalModel, byte_llama
from lightning_odc.callbacks import TimelineRecorder, load_timeline
from lightning_odc.demo.corpus import read_corpus
from lightning_odc.lessons import pictures, replay, texts
from lightning_odc.lessons.dealing import DealtTexts, deal_minibatches
from lightning_odc.lessons.devices import ranks_on
from lightning_odc.lessons.display import QUIET, print_table, quiet, show

quiet()

# "cuda": a GPU for each of two ranks, or one for both (which shows that it works,
# not how fast)
DEVICE = "cpu"

# %% [markdown]
# ## Real texts are uneven
#
# Our texts are the functions and classes of Python's own standard library. They are on your disk already. One
# byte is one token, so no tokenizer has to be downloaded. The few definitions that are longer than 2,048 tokens
# are left out, as any training with a maximum length would do.

# %%
corpus = read_corpus(max_length=2048)
lengths = corpus.lengths

show(
    pictures.lengths_figure(lengths),
    "Left: a histogram of text lengths, a high peak at short texts and a long "
    "tail. Right: the longest tenth of the texts holds a large part of the tokens "
    "and an even larger part of the attention work.",
)
print(f"{len(lengths):,} texts of {min(lengths)} to {max(lengths):,} tokens")
print(
    f"the longest tenth holds {texts.fraction_in_longest(lengths):.0%} of the tokens"
)
print(
    f"and {texts.fraction_in_longest([n * n for n in lengths]):.0%} of the attention work"
)

# %% [markdown]
# The right-hand picture is the one to remember. Most of a transformer's work grows with the number of tokens;
# attention grows with its *square*. So a text that is ten times as long is between ten and a hundred times as
# much work.
#
# Chats, code, and above all the reasoning traces of language models look like this, and worse: their longest
# texts have tens of thousands of tokens.

# %% [markdown]
# ## One minibatch on two devices
#
# First, four words that mean the same thing in all notebooks.
#
# - A **rank** is one process that trains, usually with one GPU. Here a rank is a process with one CPU core.
# - A **minibatch** is all the texts, on all ranks, of *one optimizer step*.
# - A **microbatch** is what one rank sends through the model at once, forward and backward. It is limited by
#   memory: a rank that has eight texts in a minibatch runs them, for example, one after the other.
# - A rank is **idle** while it waits for another rank.
#
# Let us draw two minibatches of our texts, and deal them out to two ranks, four texts each.

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
# The texts differ from microbatch to microbatch, and the totals differ from rank to rank. Who waits for whom now?
# That depends on when the ranks have to *meet*.

# %% [markdown]
# ## What sharded training does at every layer
#
# A large model does not fit on one device. **Sharded** training (FSDP, ZeRO-3, `fully_shard`) therefore cuts
# every layer's parameters into as many slices as there are ranks, and each rank keeps one slice of each layer. To
# compute a layer, a rank needs all of it. So, for every microbatch:
#
# 1. *before* a layer computes, forward and again backward, all ranks send each other their slices
#    (**all-gather**);
# 2. *after* the layer's backward, all ranks sum their gradients and each keeps its slice of the sum
#    (**reduce-scatter**).
#
# Both are *collectives*: operations that all ranks enter together. Nobody leaves a collective before the last one
# has come. So each of them is a **meeting**, and a model of 32 layers has about 100 meetings per microbatch.
#
# A small example, in pure arithmetic. Two ranks, three microbatches each, a model of four layers. Rank 0 has its
# long text first, rank 1 last. Both have the same work in total: 10 seconds.

# %%
# seconds per microbatch, spread over the layers
work = replay.layered([[8, 1, 1], [1, 1, 8]], layers=4)

collective = replay.replay(work, meeting="layer")
once = replay.replay(work, meeting="minibatch")
show(
    pictures.replays_figure(
        {"meet at every layer": collective, "meet once": once}, "seconds"
    ),
    "Two diagrams on one time axis. Meeting at every layer, rank 1 waits at each "
    "layer of the first microbatch and rank 0 at each layer of the last one. "
    "Meeting once, both ranks work without a gap and are done much earlier.",
)

# %% [markdown]
# Look at the upper diagram. In the first microbatch rank 1 is done with its little layer at once, and cannot
# begin the next one: rank 0 has not come yet. In the last microbatch it is the other way round. Most of the time
# somebody waits, although the work was dealt out *perfectly*.
#
# As a formula, with `T[m, d, l]` for the time of rank `d` in layer `l` of its microbatch `m`:
#
# ```text
# meet at every layer:   sum over m   sum over l   max over d   T[m, d, l]
# meet once:             max over d   sum over m   sum over l   T[m, d, l]
# ```
#
# The maximum of sums is never larger than the sum of maxima. What lies between them is idle time that has nothing
# to do with how much work there is. It is only due to *when the ranks meet*. (The first formula is equation 1 of
# [arXiv 2601.19362](https://arxiv.org/abs/2601.19362).)
#
# Must they meet at all? A slice of parameters does not change until the optimizer step. So a rank could *read* it
# when it needs it, without asking. And a gradient can be *added* to its owner's sum at any time before the
# optimizer uses that sum. Then one meeting per minibatch is enough. This is **on-demand communication**, and this
# package does it. [Notebook 6](06_how_it_works.ipynb) shows how. Here we stay with the problem.

# %% [markdown]
# ## Now measure it
#
# Arithmetic is patient. So let us train: a small Llama with random weights, on the minibatches from above,
# sharded over two processes, with the collectives that PyTorch uses (`communication="collective"` is stock
# `fully_shard`). Then the same minibatches with on-demand communication. A `TimelineRecorder` writes down what
# every rank does when. (`ranks_on("cpu", strategy)` stands for `accelerator="cpu", devices=2, strategy=strategy`.)


# %%
def train(name, communication, corpus, plan, steps):
    """Train on a plan, and return the timeline of the given optimizer steps."""
    trainer = Trainer(
        **ranks_on(DEVICE, ODCStrategy(communication=communication)),
        max_epochs=1,
        use_distributed_sampler=False,  # the data module deals out the texts itself
        callbacks=[TimelineRecorder(f"runs/{name}", steps=steps)],
        **QUIET,
    )
    model = CausalModel(byte_llama(4, 256, corpus.max_length), seed=0)
    trainer.fit(model, DealtTexts(corpus, plan))
    return load_timeline(f"runs/{name}/timeline.json")


measured = {
    title: train(communication, communication, corpus, plan[:4], steps=range(1, 4))
    for title, communication in (
        ("collectives", "collective"),
        ("on demand", "on_demand"),
    )
}

# %%
show(
    pictures.timelines_figure(measured),
    "Measured timelines of three minibatches on two ranks. With collectives, grey "
    "waiting is spread over all microbatches of both ranks. On demand, a rank "
    "only waits at the end of a minibatch.",
)

# %% [markdown]
# Each panel shows three minibatches of both ranks on the same time axis. Blue is computing, orange and red is
# moving bytes, **grey is waiting**. The numbers are tokens. The black lines are where minibatches begin and end.
#
# With collectives, grey is all over the place: beside every long text there is a grey stretch on the other rank.
# With on-demand communication the grey that is left lies at the *end* of the minibatches: one rank had less to do
# there. That is another problem, and [notebook 3](03_balancing_a_minibatch.ipynb) is about it.
#
# How do we know what is waiting and what is moving bytes? A collective cannot end before the last rank has begun
# it. So all the time that a rank spends in it before that moment is waiting. The recorder compares when the ranks
# came.

# %%
print_table(
    ["", "seconds", "idle", "rank 0 waits", "rank 1 waits"],
    [
        [
            title,
            f"{line.seconds:.2f}",
            f"{line.idle_fraction:.0%}",
            *(f"{r.idle_seconds:.2f} s" for r in line.ranks),
        ]
        for title, line in measured.items()
    ],
)

# %% [markdown]
# Be careful with the seconds: two things differ between the rows. There are fewer waits, and bytes move through
# shared memory instead of a socket, which is cheaper. `communication="lockstep"` tells the two apart, see the
# first exercise. The idle column is about the waits alone.
#
# Let us look closer, at one forward pass with collectives: the one in which the ranks waited longest.

# %%
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
# This is the meeting at every layer, four times in a row. The rank with the shorter text computes its layer,
# enters the next all-gather, and stands there, in grey, until the other one has come. Layer after layer, forward
# and backward.

# %% [markdown]
# ## A knob for the skew
#
# Is it really the *lengths*? We can turn a knob. Keep the text, the number of samples, and the number of tokens;
# change only where the text is cut. With skew 0 all samples are equally long. With skew 1 they are as uneven as
# the real ones. Above 1 the tail is longer still.
#
# First by arithmetic, for many ranks at once. The cost of a sample is what the model's configuration says: so
# many floating-point operations for its length.

# %%
cost = balance.transformer(byte_llama(4, 256, max_length=2048))


def expected_idle(skew, plan, meeting):
    """The idle fraction of a plan's minibatches, if only computing took time."""
    costs = cost.samples(texts.bend(lengths, skew))
    return replay.average_idle(
        [[costs[share] for share in minibatch] for minibatch in plan], meeting
    )


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
    for meeting in ("layer", "minibatch"):
        title = (
            f"{ranks} ranks, meet "
            + {"layer": "at every layer", "minibatch": "once"}[meeting]
        )
        curves[title] = (
            SKEWS,
            [expected_idle(skew, dealt, meeting) for skew in SKEWS],
        )

labels = {
    "x": "skew (0: equal lengths, 1: the real ones)",
    "y": "idle, %",
    "percent": True,
    "in_turns": 2,
}
show(
    pictures.lines_figure(curves, title="Idle time by skew, in theory", **labels),
    "Six rising curves of idle time over skew. All begin at zero for equal "
    "lengths. With more ranks they are higher. Meeting at every layer lies far "
    "above meeting once with as many ranks.",
)

# %% [markdown]
# With equal lengths nobody waits, however often they meet. Then it goes up, and two things drive it:
#
# - **more skew**: the longest text of the moment is further from the average;
# - **more ranks**: everybody waits for the *slowest of all*, and among many ranks there is nearly always a long
#   text. This is why the problem is worst where training is most expensive.
#
# Now measure it, on two ranks. Three places of the knob, each trained with both ways to communicate. The lines
# are the arithmetic for the very same minibatches.

# %%
few = plan[:4]
PLACES = [0, 0.5, 1]

expected, points = {}, {}
for title, meeting, communication in (
    ("meet at every layer", "layer", "collective"),
    ("meet once", "minibatch", "on_demand"),
):
    expected[title] = (
        PLACES,
        [expected_idle(skew, few[1:], meeting) for skew in PLACES],
    )
    idle = []
    for skew in PLACES:
        bent = texts.recut(corpus, texts.bend(lengths, skew))
        timeline = train(
            f"skew-{skew}-{communication}", communication, bent, few, range(1, 4)
        )
        idle.append(timeline.idle_fraction)
    points[title] = (PLACES, idle)

show(
    pictures.lines_figure(
        expected,
        points=points,
        title="The same on 2 ranks: theory and measurement",
        **{**labels, "in_turns": 1},
    ),
    "Two theoretical lines of idle time over skew and the measured points, three "
    "for each way to meet.",
)

# %% [markdown]
# Points and lines need not agree exactly. The lines know nothing of moving bytes, of the optimizer, or of what
# else your machine does right now; and two processes never run at quite the same speed, even with equal lengths.
# What matters is the direction: it is the unevenness of the texts that makes ranks wait, and fewer meetings mean
# less of it.

# %% [markdown]
# ## What you have seen
#
# - Real texts have a long tail, and the tail holds a large part of the work.
# - Sharded training meets at every layer, and at each meeting all ranks wait for the slowest.
# - That idle time has two sources: *when* ranks meet, and *how much* each of them has to do. On-demand
#   communication takes away the first. Balancing takes away the second, as far as it can be taken away.
# - You can measure it. `DeviceIdleMonitor` logs it under DDP and FSDP2, too: see [Idle time](../docs/idle.md).
#   `TimelineRecorder` draws it: see [Timelines](../docs/timelines.md).
#
# ## Exercises
#
# 1. Train with `communication="lockstep"` as well. It reads and adds like `"on_demand"` and meets like
#    `"collective"`. How much of the difference in seconds is cheaper bytes, how much is fewer waits?
# 2. Deal out the texts with `longest_first=True`: every rank sorts its own texts by length. Why does this help
#    collectives, and why not enough?
# 3. Give each rank a single text per minibatch (`samples_per_rank=1`). What does on-demand communication gain
#    now? Look at the two formulas.
# 4. Replace `lengths` by the lengths of your own data. How much does the longest tenth of them hold?
#
# Next: [Your first ODC run](02_your_first_odc_run.ipynb).
