# %% [markdown]
# # 2. Your first ODC run
#
# **You will learn**
#
# - how to switch a Lightning training from `"ddp"` or `"fsdp"` to `"odc"`: one line;
# - that the losses stay the same;
# - what DDP, FSDP and ODC do differently, as timelines of your own machine;
# - what balancing adds: ranks have different numbers of texts, and equal work;
# - how much time goes into waiting, and how many tokens are padding.
#
# **It needs** Linux, two CPU cores and one to two minutes. No GPU, no network. In a clone of the repository,
# `make lab` installs everything and opens the notebooks. (With a GPU for each of two ranks, write `accelerator="gpu"`.)
# You should have written a `LightningModule` before. [Notebook 1](01_seeing_the_imbalance.ipynb) explains why ranks
# wait.
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

from support import pictures
from support.corpus import read_corpus
from support.display import mean_of_log, print_table, quiet, read_log, show

from lightning_odc.demo import VOCABULARY, encode

quiet()

# %%
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

# importing the package registers strategy="odc"
from lightning_odc import ODCStrategy
from lightning_odc.callbacks import (
    DeviceIdleMonitor,
    TimelineRecorder,
    draw_timelines,
    load_timeline,
)
from lightning_odc.samples.packing import pack_samples

# DDP in a notebook forks this process: safe as long as torch has no threads in it
torch.set_num_threads(1)

# %% [markdown]
# ## A training that you could have written
#
# A small language model with random weights, and real texts: the functions and classes of Python's standard
# library, one byte per token. The module is plain Lightning.


# %%
class Reader(LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=256,
            intermediate_size=640,
            num_hidden_layers=4,
            num_attention_heads=4,
            use_cache=False,
        )
        self.model = LlamaForCausalLM(config)

    def forward(self, batch):
        names = ("input_ids", "position_ids", "labels")
        return self.model(**{name: batch[name] for name in names}).loss

    def training_step(self, batch, batch_idx):
        loss = self(batch)
        self.log("loss", loss, batch_size=1)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


texts = [encode(sample) for sample in read_corpus(max_length=2048).samples]


def loader(batch_size=1, collate_fn=pack_samples):
    return DataLoader(
        texts, batch_size=batch_size, shuffle=True, collate_fn=collate_fn
    )


# %% [markdown]
# (`pack_samples` puts the texts of a batch into one row, without padding. With `batch_size=1` a row is one text.)
#
# The trainer starts two processes. Each runs four texts per optimizer step, one after the other. The runs that
# follow differ only in the strategy, and in what puts four texts together. Two callbacks watch: `DeviceIdleMonitor`
# logs how long the ranks wait, and `TimelineRecorder` records what every rank does, and when.


# %%
def fit(name, strategy, batch_size=1, accumulate=4, collate_fn=pack_samples):
    model = Reader()
    trainer = Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=2,
        max_steps=5,
        accumulate_grad_batches=accumulate,
        log_every_n_steps=1,
        callbacks=[
            DeviceIdleMonitor(every_n_steps=1),
            TimelineRecorder(f"runs/{name}", steps=range(2, 5)),
        ],
        logger=CSVLogger("runs", name=name, version="log"),
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, loader(batch_size, collate_fn))
    return model


# %% [markdown]
# ## One line
#
# In a script you would write `strategy="ddp"`. A notebook has no script to start again for the second process, so
# Lightning's DDP forks this process instead. Lightning calls that variant `"ddp_notebook"`. `"odc"` works in both.
#
# `"odc"` changes two things: how ranks communicate, and which of them trains on which texts. We look at the first one
# alone, with `"odc_plain"`. It leaves the batches as they are, so we can compare the losses step by step. We use it
# only for this comparison. In your own training, use `"odc"`, which also balances. This model is small, so each rank
# keeps the whole of it, as under DDP. A line at the start says so.

# %%
fit("ddp", strategy="ddp_notebook")
model = fit("odc_plain", strategy="odc_plain")

# %% [markdown]
# Was it the same training? Both began with the same weights and saw the same texts in the same order. So their losses
# must be the same, up to the order in which numbers are summed.

# %% Compare the losses tags=["hide-input"]
ddp, plain = (read_log(f"runs/{name}/log", "loss") for name in ("ddp", "odc_plain"))
print_table(
    ["step", "ddp", "odc_plain", "difference"],
    [
        [step, f"{a:.4f}", f"{b:.4f}", f"{abs(a - b):.1e}"]
        for step, (a, b) in enumerate(zip(ddp, plain, strict=True))
    ],
)
assert all(abs(a - b) < 1e-3 * a for a, b in zip(ddp, plain, strict=True))

# %% [markdown]
# The training ran in other processes, and its result is back here: `model` has the trained weights.

# %%
with torch.no_grad():
    for name, one in (("untrained", Reader()), ("trained", model)):
        print(f"{name}: loss {one(pack_samples(texts[:10])):.3f} on ten texts")

# %% [markdown]
# ## What is different, then?
#
# Three ways to train one model on several ranks:
#
# | | each rank keeps | ranks synchronize |
# |---|---|---|
# | **DDP** | the whole model | once per optimizer step, to sum gradients |
# | **FSDP** | one slice of every layer | at every layer of every microbatch |
# | **ODC** | the whole model if it fits, else one slice of every layer | once per optimizer step |
#
# DDP needs all parameters, gradients and optimizer states on every device, so large models cannot use it. FSDP
# divides them among the ranks, and the price is barriers. ODC divides the models that do not fit, and always has as
# few barriers as DDP. Our model fits. To see what happens to a large one, we ask for slices with
# `sharding_strategy="FULL_SHARD"`.
#
# One thing first. Lightning itself synchronizes ranks: before *every batch*, rank 0 sends the others a small message
# (whether the job should stop). To avoid that inside a step, give Lightning the whole step as *one* batch. `balance=`
# does so. It takes eight texts at a time from your `DataLoader`, now with `batch_size=4`, and deals them out to the
# ranks, one or more microbatches for each. `training_step` still gets one microbatch at a time.
#
# We run the same texts three times:
#
# 1. `communication="collective"`: the same sharding over PyTorch's own collectives, as under FSDP. (FSDP itself
#    refuses to run in notebooks.) `balance="local_sort"` gives each rank four texts, the longest first.
# 2. On demand, with the same texts on the same ranks.
# 3. As `"odc"` does it for a large model: on demand, and balanced. Each rank gets as many texts as make its work equal
#    to that of the other. The strategy chooses the policy, the cost of a text and the weights by itself.

# %%
runs = {
    "collectives, as in FSDP": ODCStrategy(
        sharding_strategy="FULL_SHARD",
        communication="collective",
        balance="local_sort",
        weighting="next_token",
    ),
    "on demand": ODCStrategy(
        sharding_strategy="FULL_SHARD",
        balance="local_sort",
        weighting="next_token",
    ),
    "odc: on demand, balanced": ODCStrategy(sharding_strategy="FULL_SHARD"),
}
models = {
    name: fit(name, strategy, batch_size=4, accumulate=1)
    for name, strategy in runs.items()
}

# %%
timelines = {name: load_timeline(f"runs/{name}/timeline.json") for name in runs}
draw_timelines(timelines, "runs/timelines.png")

# %% Show the picture tags=["hide-input"]
show(
    pictures.timelines_figure(timelines),
    "Three timelines of the same three optimizer steps on two ranks. With "
    "collectives, grey waiting is spread over the microbatches. On demand, all "
    "waiting is at the end of the steps. Balanced as well, the ranks end their "
    "steps nearly together, with different numbers of microbatches.",
)

# %% [markdown]
# Optimizer steps end at the lines through a row. Blue is computing, purple is moving bytes, and grey is waiting.
#
# - **Collectives**: the ranks run their microbatches side by side. Beside a longer text the other rank waits, layer by
#   layer.
# - **On demand**: each rank runs at its own speed. The grey has moved to the end of the step: one rank had *more to
#   do*.
# - **Balanced**: now the planner levels the work itself. That is possible *because* ranks no longer synchronize inside
#   a step, so they may have different numbers of microbatches. With collectives that would hang.
#
# ## Waiting and padding, in numbers
#
# `DeviceIdleMonitor` has logged the waiting. It also counts *padding*. The texts of our batches lie one after another
# in a row, so there is none. Most scripts pad: in a batch of four texts, every row becomes as long as the longest one.
# Let us run DDP once more, with such batches.


# %%
def pad_samples(samples):
    ids = pad_sequence(samples, batch_first=True)
    return {
        "input_ids": ids,
        "position_ids": torch.arange(ids.shape[1]).expand_as(ids),
        "labels": pad_sequence(samples, batch_first=True, padding_value=-100),
    }


fit(
    "ddp, padded",
    strategy="ddp_notebook",
    batch_size=4,
    accumulate=1,
    collate_fn=pad_samples,
)

# %% Print idle time and padding tags=["hide-input"]
rows = []
for name in ("ddp, padded", "ddp", *runs):
    idle, seconds, padding, computed, speed = (
        mean_of_log(f"runs/{name}/log", value, skip=1)
        for value in (
            "idle/fraction",
            "step_seconds",
            "padding/fraction",
            "computed_tokens_per_second",
            "tokens_per_second",
        )
    )
    rows.append(
        [
            name,
            f"{idle * seconds:.2f} s",
            f"{seconds:.2f} s",
            f"{idle:.0%}",
            f"{padding:.0%}",
            f"{computed:,.0f}",
            f"{speed:,.0f}",
        ]
    )
print_table(
    [
        "per step",
        "idle",
        "of",
        "idle part",
        "padding",
        "computed tokens/s",
        "real tokens/s",
    ],
    rows,
)

# %% [markdown]
# Look at the first row. Its ranks compute many tokens per second, and a large part of them is padding. The last column
# is what training gets. `"odc"` pads less where it must pad, because it puts texts of similar length together.
#
# Idle time is measured, not estimated: the seconds of a step in which a rank waited for the other one, for data, or
# for that small message. These are numbers of one short run on one machine. On a laptop that runs other programs
# they vary, the seconds more than the idle part. Run it again before you believe them.
#
# The last three rows had the same texts in every step. DDP came from another loader, so its steps may hold other texts:
# compare its idle part, not its seconds. It has no plan, so a rank with long texts makes the other one wait. DDP can be
# planned, too: [Plain DDP, balanced](../docs/full-gain.md#plain-ddp-balanced) has the edits and the measured time.
#
# What does `"odc"` choose? The *cost* of a text is the number of operations that follows from the model's
# configuration. The *weighting* says what a microbatch counts in the gradient. `"odc"` tests the loss on a few texts
# before training. It finds a mean over the predicted tokens, so each microbatch counts its tokens. That is
# why the other two runs have `weighting="next_token"`. So in these runs each *token* counts the same, not each text as
# in the first two. With texts of different lengths that is usually right. [Losses, weights and
# minibatches](../docs/minibatches.md) says why, and how to change it. The three models have learnt the same, wherever
# the texts were computed:

# %%
with torch.no_grad():
    for name, one in models.items():
        print(f"{name}: loss {one(pack_samples(texts[:10])):.4f} on ten texts")

# %% [markdown]
# ## In a script
#
# ```python
# import lightning_odc  # first: this registers the strategy
#
# trainer = Trainer(strategy="odc", accelerator="cpu", devices=2)
# ```
#
# It keeps the model whole where it fits, else it communicates on demand. It balances. Everything else stays the same.
# [Get started](../docs/get-started.md) has a complete one, and how to switch a project that uses DDP or FSDP.
#
# ## What you have seen
#
# - One line switches a training. The losses stay the same.
# - ODC keeps the whole model like DDP, or slices like FSDP. It always synchronizes as rarely as DDP.
# - The waiting that is left comes from uneven work. Balancing levels the work. `"odc"` does both.
#
# ## Exercises
#
# 1. Let the ranks sum their gradients in a fixed order, `ODCStrategy(deterministic=True)`, and train twice. Are
#    the losses equal in all digits? And without it?
# 2. Give the three runs a single text per rank and step (`batch_size=1`). What is left of the difference between
#    the timelines? Why?
# 3. Open `runs/on demand/timeline.json` at [ui.perfetto.dev](https://ui.perfetto.dev) and click on a grey
#    stretch. For whom did that rank wait?
# 4. Add `self.log("memory", ...)` with the number of parameters that `self.parameters()` really holds on a rank
#    (`p.to_local().numel()` for a `DTensor`), under DDP and under ODC.
#
# <details>
# <summary>Answer to 1</summary>
#
# With `deterministic=True` all digits are equal, in the losses and in the weights. Without it they may differ in the
# last digits: a rank adds its gradient when it is done, so the order of the sums depends on timing.
#
# </details>
#
# <details>
# <summary>Answer to 2</summary>
#
# Little. Each rank has one microbatch in a step, so a barrier at every layer and one barrier per step cost equally much
# waiting. The rank with the longer text is last at every layer. Only the place of the grey differs, and the cost of
# moving bytes. Balancing has nothing to deal out, with one text for each rank.
#
# </details>
#
# <details>
# <summary>Answer to 3</summary>
#
# The field `peer` of a grey stretch is the rank that it waited for, and `cause` says what for. With two ranks it is
# always the other one.
#
# </details>
#
# <details>
# <summary>Answer to 4</summary>
#
# ```python
# def held(self):
#     return sum(
#         (p.to_local() if hasattr(p, "to_local") else p).numel() for p in self.parameters()
#     )
# ```
#
# Log `float(self.held())` at the beginning of `training_step`. Under DDP it is the number of all parameters. Under ODC
# it is about half: the slices of one of two ranks. Log it again after the forward pass, and it is more. Layers that
# a rank has gathered are kept until the backward pass, as long as memory allows.
#
# </details>
#
# Next: [Balancing a minibatch](03_balancing_a_minibatch.ipynb).
