# %% [markdown]
# # 4. Fine-tuning a Hugging Face model with LoRA
#
# **You will learn**
#
# - how to pack texts into rows without padding, and how to make sure that they do not see each other;
# - why the loss must be weighted by tokens, and how to do that exactly;
# - how to train LoRA adapters over frozen base weights, on two processes;
# - how to move checkpoints between two processes and a single one, and how to resume to the last bit.
#
# **It needs** Linux, two CPU cores and one to two minutes. No GPU, no network: the model begins with random weights and
# is trained here. For a model from the Hub, replace one line. In a clone of the repository, `make lab` installs
# everything and opens the notebooks. [Notebook 2](02_your_first_odc_run.ipynb) is a good beginning.
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

from support import pictures, texts
from support.corpus import read_corpus
from support.display import (
    QUIET,
    print_table,
    quiet,
    read_log,
    show,
)

from lightning_odc.demo import BOS, EOS, VOCABULARY, encode

quiet()

# %%
from pathlib import Path

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from peft import LoraConfig, get_peft_model
from torch.nn import functional
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_odc import ODCStrategy, balance
from lightning_odc.samples.packing import IGNORE_INDEX, pack_samples

# for tensors as small as these, more threads would only get in each other's way
torch.set_num_threads(1)

# %% [markdown]
# ## A base model, and two kinds of text
#
# The base model will learn *code*: functions and classes of the standard library. Then we fine-tune it on
# *English*: the docstrings in the same files. One byte is one token.

# %%
code = [encode(sample) for sample in read_corpus(max_length=512).samples]
prose = [encode(sample) for sample in texts.read_prose(max_length=512)]
prose, held_out = prose[:-96], prose[-96:]
shortest, longest = min(map(len, prose)), max(map(len, prose))
print(
    f"{len(code):,} pieces of code, {len(prose):,} docstrings of {shortest} to {longest} tokens"
)

config = LlamaConfig(
    vocab_size=VOCABULARY,
    bos_token_id=BOS,
    eos_token_id=EOS,
    hidden_size=128,
    intermediate_size=320,
    num_hidden_layers=3,
    num_attention_heads=2,
    max_position_embeddings=512,
)
torch.manual_seed(0)
base = LlamaForCausalLM(config)  # or LlamaForCausalLM.from_pretrained("...")

# %% [markdown]
# ## Packing, and a silent trap
#
# Docstrings are short, and a few are long. A batch that is padded computes as many tokens as its longest text has,
# for each of its texts. So we **pack** texts instead: one after another in a single row. The planner fills rows of
# up to 1,024 tokens. Here are 24 docstrings both ways.

# %%
some = [len(text) for text in prose[:24]]
(rows,) = balance.plan_minibatch(some, num_ranks=1, max_tokens=1024)

# %% Draw padded against packed tags=["hide-input"]
show(
    pictures.rows_figure(some, [[some[text] for text in row] for row in rows]),
    "Two panels on one axis. Padded: a row for each text, most of it orange padding. Packed: a few rows in which "
    "texts follow each other without padding.",
)

# %% [markdown]
# `pack_samples` is a `collate_fn` that makes such a row.

# %%
batch = pack_samples(prose[:3])
for name, values in batch.items():
    print(f"{name:13} {list(values.shape)}")
print(
    "positions start again at",
    (batch["position_ids"][0] == 0).nonzero().flatten().tolist(),
)

# %% [markdown]
# A language model that reads a row from left to right would let the second text see the first. Hugging Face models
# keep the texts apart when two things hold: each text's `position_ids` begin at 0, **and** the model runs with
# `use_cache=False`. With the cache on, which is the default, the model ignores the positions. There is no warning.
# So test it: what the model says about a text must not depend on what else is in the row.

# %%
row = {name: batch[name] for name in ("input_ids", "position_ids")}
begin, end = batch["cu_seqlens"][1:3].tolist()
with torch.no_grad():
    alone = base(input_ids=batch["input_ids"][:, begin:end], use_cache=False).logits
    for use_cache in (False, True):
        packed = base(**row, use_cache=use_cache).logits[:, begin:end]
        print(
            f"use_cache={use_cache}: largest difference {float((packed - alone).abs().max()):.1e}"
        )

# %% [markdown]
# The first number is rounding. The second one is a leak. Do this test with every model that you pack for.
#
# ## Every token counts the same
#
# A microbatch with 40 tokens and one with 900: what should their losses weigh? The usual `loss = mean over the
# microbatch`, averaged over microbatches, makes a token of the small one count more than twenty times as much as
# a token of the large one. Then the weight of a token depends on how texts were packed and dealt out.
#
# Return the **sum** of the losses and the **number** of tokens in it instead. The strategy adds up both over all
# microbatches of all ranks, and divides once.


# %%
class Language(LightningModule):
    def __init__(self, model, learning_rate=1e-3):
        super().__init__()
        self.model, self.learning_rate = model, learning_rate

    def forward(self, batch):
        """Summed loss, and how many tokens it is a sum over."""
        row = {name: batch[name] for name in ("input_ids", "position_ids")}
        logits = self.model(**row, use_cache=False).logits[0, :-1]
        targets = batch["labels"][0, 1:]
        total = functional.cross_entropy(
            logits, targets, ignore_index=IGNORE_INDEX, reduction="sum"
        )
        return total, int((targets != IGNORE_INDEX).sum())

    def training_step(self, batch, batch_idx):
        total, count = self(batch)
        self.log("train_loss", total / count, batch_size=count, sync_dist=True)
        return {"loss": total, "num_items": count}

    def validation_step(self, batch, batch_idx):
        total, count = self(batch)
        self.log("val_loss", total / count, batch_size=count, sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.AdamW(
            (p for p in self.parameters() if p.requires_grad), lr=self.learning_rate
        )


@torch.no_grad()
def loss_on(model, samples):
    """Mean loss per token, in this process."""
    rows = [
        Language(model)(pack_samples(samples[i : i + 8]))
        for i in range(0, len(samples), 8)
    ]
    return float(sum(total for total, _ in rows) / sum(count for _, count in rows))


# %% [markdown]
# ## Teach the base model
#
# We train in two processes. `balance="lb_mini"` is the balancing of [notebook
# 3](03_balancing_a_minibatch.ipynb). The cost of a text comes from the model's configuration.
# `deterministic=True` fixes the order in which gradients are summed. We need that for resuming.


# %%
def make_trainer(steps, **options):
    strategy = ODCStrategy(
        balance="lb_mini",
        max_tokens=1024,
        cost=balance.transformer(config, dense=True),
        deterministic=True,
    )
    return Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=2,
        max_steps=steps,
        **{**QUIET, **options},
    )


def loader(samples, **options):
    return DataLoader(samples, batch_size=8, collate_fn=pack_samples, **options)


def logger(name):
    return {
        "logger": CSVLogger("runs", name=name, version="log"),
        "log_every_n_steps": 1,
    }


make_trainer(60, **logger("base")).fit(Language(base), loader(code, shuffle=True))
print(
    f"base model: {loss_on(base, code[:24]):.2f} on code, {loss_on(base, held_out):.2f} on prose"
)

# %% [markdown]
# ## Add LoRA
#
# **LoRA** leaves the base weights as they are, and learns a small correction to each of the chosen matrices: the
# product of two thin ones. Only these adapters get gradients and optimizer states.

# %%
adapters = LoraConfig(
    r=8, lora_alpha=16, target_modules=["q_proj", "v_proj", "up_proj", "down_proj"]
)
model = get_peft_model(base, adapters)
trained, everything = model.get_nb_trainable_parameters()
print(
    f"{trained:,} of {everything:,} parameters are trained ({trained / everything:.1%})"
)

# %% [markdown]
# Nothing else changes. The model is small, so each rank keeps the whole of it. Only the adapters have gradients, so
# only those are sent. The base weights of a model that does not fit are sharded and read on demand.

# %%
checkpoints = ModelCheckpoint(
    "runs/lora", filename="{step}", every_n_train_steps=8, save_top_k=-1
)
trainer = make_trainer(
    16, callbacks=[checkpoints], enable_checkpointing=True, **logger("adapters")
)
trainer.fit(Language(model, learning_rate=5e-3), loader(prose, shuffle=True))

print(
    "checkpoints:", sorted(path.name for path in Path("runs/lora").glob("*.ckpt"))
)

# %% Draw the losses tags=["hide-input"]
curves, begin = {}, 1
for name, title in (
    ("base", "all weights, on code"),
    ("adapters", "adapters only, on prose"),
):
    losses = read_log(f"runs/{name}/log", "train_loss")
    curves[title] = (range(begin, begin + len(losses)), losses)
    begin += len(losses)
show(
    pictures.lines_figure(
        curves,
        title="Loss of both trainings",
        x="optimizer step",
        y="loss per token",
    ),
    "The training loss over the optimizer steps. It falls while the base model learns code. It jumps up where "
    "the text changes to prose, and falls again while only the adapters learn.",
)

# %% [markdown]
# The loss jumps where the text changes from code to prose. Then the adapters bring it down again.
#
# The trained adapters are back in this process. Do they help with prose that they have not seen? And is the base
# model underneath untouched?

# %%
rows = [
    [
        "with adapters",
        f"{loss_on(model, held_out):.3f}",
        f"{loss_on(model, code[:24]):.3f}",
    ]
]
with model.disable_adapter():
    rows.append(
        [
            "adapters switched off",
            f"{loss_on(model, held_out):.3f}",
            f"{loss_on(model, code[:24]):.3f}",
        ]
    )
print_table(["loss", "prose", "code"], rows)

# %% [markdown]
# ## Checkpoints without shards
#
# A checkpoint holds whole parameters, even if the model is sharded. It is the same file that a single process would
# have written. So plain PyTorch can read it, without a process group and without this package.

# %%
torch.manual_seed(1)
fresh = Language(get_peft_model(LlamaForCausalLM(config), adapters))
state = torch.load("runs/lora/step=16.ckpt", weights_only=True)["state_dict"]
fresh.load_state_dict(state)
print(f"read from the file: {loss_on(fresh.model, held_out):.3f} on prose")

# %% [markdown]
# The other direction works, too. Train in this process with plain Lightning, save a checkpoint, and validate it on
# two ranks.

# %%
single = Trainer(accelerator="cpu", devices=1, max_steps=2, **QUIET)
single.fit(fresh, loader(prose[:16]))
single.save_checkpoint("runs/single.ckpt")

two_ranks = make_trainer(-1)
empty = Language(get_peft_model(LlamaForCausalLM(config), adapters))
two_ranks.validate(
    empty, loader(held_out), ckpt_path="runs/single.ckpt", verbose=False
)
print(
    f"validated on two ranks:      {float(two_ranks.callback_metrics['val_loss']):.4f}"
)
print(f"in this process, on one:      {loss_on(fresh.model, held_out):.4f}")

# %% [markdown]
# ## Resume, to the last bit
#
# The training above went through 16 steps without a stop, and left a checkpoint after 8. Take a new model, resume at
# step 8, and compare the end. The data resume with the next minibatch, too: the loader's position is in the
# checkpoint.

# %%
checkpoints = ModelCheckpoint(
    "runs/resumed", filename="{step}", every_n_train_steps=8, save_top_k=-1
)
trainer = make_trainer(16, callbacks=[checkpoints], enable_checkpointing=True)
torch.manual_seed(2)
again = Language(
    get_peft_model(LlamaForCausalLM(config), adapters), learning_rate=5e-3
)
trainer.fit(again, loader(prose, shuffle=True), ckpt_path="runs/lora/step=8.ckpt")

resumed = torch.load("runs/resumed/step=16.ckpt", weights_only=True)["state_dict"]
differing = [
    name for name, value in state.items() if not torch.equal(value, resumed[name])
]
print(f"{len(state)} tensors compared, {len(differing)} differ")
assert not differing

# %% [markdown]
# Not one bit is different. That needs three things: `deterministic=True`, the same number of ranks, and the same
# version of PyTorch. Without `deterministic=True` the last digits differ, as they do between any two runs.
#
# ## Use the result
#
# Merge the adapters into the base weights, and you have an ordinary Hugging Face model.

# %%
merged = fresh.model.merge_and_unload()
merged.save_pretrained("runs/merged")
print(sorted(path.name for path in Path("runs/merged").iterdir()))

# %% [markdown]
# ## What you have seen
#
# - Packing saves the padding. `use_cache=False` and positions from 0 keep texts apart, and one small test proves it.
# - Sums and counts make every token count the same, wherever it was computed.
# - LoRA needs nothing special. Frozen weights are read on demand, and only the adapters have gradients.
# - Checkpoints are whole: from two ranks to one process and back. A resumed run can be equal to the last bit.
#
# ## Exercises
#
# 1. Return a mean loss (`total / count`) instead of sum and count, and give the strategy
#    `weighting="next_token"`. Is the validation loss the same? What if the prompt's labels are set to
#    `IGNORE_INDEX`?
# 2. Resume the run with another number of ranks (`devices=1`). What does the loader say, and how far apart are
#    the results? (Call `warnings.resetwarnings()` first: `quiet()` hides warnings.)
# 3. Resume without `deterministic=True`. How large are the differences?
# 4. Unfreeze the layer norms as well (`modules_to_save` of `LoraConfig`), and count what is trained.
# 5. Have a model in your cache? Replace `LlamaForCausalLM(config)` by `from_pretrained`, encode with its
#    tokenizer, and run the packing test first.
#
# <details>
# <summary>Answer to 1</summary>
#
# Yes, it is the same. `weighting="next_token"` weights a mean by the number of tokens that it predicts, which is the
# count in `{"loss": total, "num_items": count}`. With masked prompts it is not: `"next_token"` counts lengths, and so
# counts prompts, too. The default, `weighting="auto"`, counts labels and is right in both cases. So is returning sum
# and count.
#
# </details>
#
# <details>
# <summary>Answer to 2</summary>
#
# It warns that the state was saved with 16 samples per minibatch on all ranks, and now there are 8. It continues where
# no sample repeats. The results differ by far more than rounding: every later step sees other texts, and half as
# many.
#
# </details>
#
# <details>
# <summary>Answer to 3</summary>
#
# Differences in the last digits, in most tensors. With three microbatches or more, the order in which gradients are
# added changes the rounding.
#
# </details>
#
# <details>
# <summary>Answer to 4</summary>
#
# `modules_to_save=["input_layernorm", "post_attention_layernorm"]` trains 768 parameters more: two norms of 128
# weights in each of three layers. Add `"norm"` for the last one.
#
# </details>
#
# <details>
# <summary>Answer to 5</summary>
#
# ```python
# from transformers import AutoModelForCausalLM, AutoTokenizer
#
# base = AutoModelForCausalLM.from_pretrained(name)
# tokenizer = AutoTokenizer.from_pretrained(name)
# prose = [tokenizer(text.decode())["input_ids"] for text in texts.read_prose(max_length=512)]
# ```
#
# Use `base.config` where the notebook uses `config`. If the packing test shows a large difference with
# `use_cache=False`, the model does not keep packed texts apart. Then train it with one text per microbatch.
#
# </details>
#
# Next: [RL post-training](05_rl_post_training.ipynb).
