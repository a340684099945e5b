# %% [markdown]
# # 5. RL post-training
#
# **You will learn**
#
# - why reinforcement learning of language models is the hardest case of uneven work;
# - a complete GRPO step in thirty lines: sample, check, normalise, deal out, update;
# - why the gradient stays *exactly* the same wherever the answers are computed, and two popular ways to get it
#   wrong;
# - how to write such a loop in Lightning, with manual optimisation and unequal numbers of microbatches.
#
# **It needs** Linux, two CPU cores, about a minute, and the package: until its first release,
# `pip install ".[notebooks]"` in a clone of the repository. No GPU, no network.
# [Notebook 3](03_balancing_a_minibatch.ipynb) explains the planner that is used here.

# %%
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader

from lightning_odc import ODCStrategy, balance
from lightning_odc.callbacks import DeviceIdleMonitor
from lightning_odc.lessons import pictures, strokes
from lightning_odc.lessons.display import (
    QUIET,
    mean_of_log,
    print_table,
    quiet,
    read_log,
    show,
)

quiet()
# for tensors as small as these, more threads would only get in each other's way
torch.set_num_threads(1)

# %% [markdown]
# ## A task whose answers can be checked
#
# The model adds two numbers by writing strokes. It is a toy, but it has what matters: answers are *sampled* from
# the model, a program can *check* them, and they differ a lot in *length*.

# %%
for problem in strokes.problems(4, seed=1):
    right = strokes.solution(problem)
    print(strokes.decode(strokes.prompt(problem) + right), f" {len(right)} tokens")

# %% [markdown]
# The reward is 1 for the right number of strokes, 1/2 if it is one off, 1/3 for two, and so on; 0 for anything
# that is no answer.
#
# Reinforcement learning improves what a model can do already, so it needs a base model. Ours is a tiny Llama with
# random weights that has seen right answers for a few seconds, as in any supervised training. It is deliberately
# not done.

# %%
base = strokes.make_model()
losses = strokes.teach(base, steps=160)
exam = strokes.problems(200, seed=123456)
print(f"supervised loss: {losses[0]:.2f} at first, {losses[-1]:.2f} at the end")
print(
    f"the base model gets {strokes.fraction_right(base, exam, seed=0):.0%} of the problems right"
)

# %% [markdown]
# ## One step, slowly
#
# **GRPO** (group relative policy optimisation) in four sentences. For each prompt, sample a *group* of answers.
# Check each of them. An answer's **advantage** is its reward minus the mean of its group, divided by the standard
# deviation of its group: was it better than the model's other tries at the same problem? Then make each token of
# an answer more likely or less likely, by the gradient of `advantage * log(probability)`.

# %%
GROUP = 8
rollouts = strokes.roll_out(base, strokes.problems(16, seed=5), GROUP, seed=0)
for one in rollouts[:GROUP]:
    text = strokes.decode(one["prompt"] + one["answer"])
    print(f"reward {one['reward']:.2f}, advantage {one['advantage']:+.2f}  {text}")

# %% [markdown]
# One group. The answers have different lengths although the prompt is the same. Over all prompts of the step it
# looks like this:

# %%
lengths = strokes.tokens_of(rollouts)
show(
    pictures.histogram_figure(
        lengths, "Tokens of prompt and answer in one step", "tokens", "answers"
    ),
    "A histogram of the lengths of the answers of one step: most are short, a few "
    "are several times as long.",
)

# %% [markdown]
# In real post-training the tail is far longer: a reasoning trace may have a hundred tokens or thirty thousand,
# and nobody knows before it is sampled. And there are *two* places where ranks wait for each other:
#
# - **sampling**: with parameters sharded over ranks by collectives, every forward pass is a meeting. A rank whose
#   answers are all done must go on with dummy passes until the longest answer of *all* ranks has ended;
# - **updating**: every microbatch is a meeting.
#
# On demand, a rank that is done sampling is done, and a rank with short answers runs fewer microbatches.
#
# ## The gradient does not care where it is computed
#
# Now the answers of a step have to be dealt out to ranks and microbatches. The gradient we want does not know of
# either:
#
# ```text
# g  =  sum over the tokens of all answers of ( -advantage * grad log(probability) )  /  number of these tokens
# ```
#
# (We divide by the tokens of all answers, as DAPO does. GRPO as published divides each answer by its own length
# first, and takes the mean over answers.)
#
# Two rules make it exact under *any* placement:
#
# 1. **Normalise before placing.** An advantage is a property of a group. It is computed where the whole group is
#    known, and travels with the answer. From then on answers of one group may go to different ranks.
# 2. **Sum, and divide once.** Microbatches contribute sums. The number of tokens is that of the whole step.
#
# Let us check that, and break it. Four ways to place the same 128 answers; for each, the gradient with both
# rules, and the gradient of two shortcuts that one finds in real code: dividing each microbatch by its own number
# of tokens, and normalising rewards over whatever answers happen to be in the microbatch.


# %%
def gradient(placement, rule):
    """The gradient of one step; placement[rank][microbatch] lists answers."""
    microbatches = [
        [rollouts[i] for i in microbatch]
        for rank in placement
        for microbatch in rank
    ]
    base.zero_grad()
    for microbatch in microbatches:
        if rule == "normalised per microbatch":
            rewards = torch.tensor([[one["reward"] for one in microbatch]])
            advantages = (
                strokes.normalised(rewards)[0].tolist()
                if len(microbatch) > 1
                else [0.0]
            )
            microbatch = [
                {**one, "advantage": a}
                for one, a in zip(microbatch, advantages, strict=True)
            ]
        loss, tokens = strokes.policy_loss(base, strokes.pack_rollouts(microbatch))
        if rule == "divided per microbatch":
            (loss / tokens / len(microbatches)).backward()
        else:
            (loss / strokes.answer_tokens(rollouts)).backward()
    return torch.cat([parameter.grad.flatten() for parameter in base.parameters()])


everything = list(range(len(rollouts)))
placements = {
    "all in one microbatch": [[everything]],
    "2 ranks, 16 answers at a time": [
        [everything[i : i + 16] for i in (a, a + 16, a + 32, a + 48)]
        for a in (0, 64)
    ],
    "8 ranks, lb_mini": balance.plan_minibatch(lengths, 8, max_tokens=128),
    "2 ranks, all work on one": [
        [everything[:40], everything[40:60], everything[60:]],
        [],
    ],
}
RULES = ("both rules", "divided per microbatch", "normalised per microbatch")
truth = gradient(placements["all in one microbatch"], "both rules")
rows = []
for name, placement in placements.items():
    errors = [
        (gradient(placement, rule) - truth).norm() / truth.norm() for rule in RULES
    ]
    rows.append([name, *(f"{error:.1e}" for error in errors)])
print_table(["relative error of the gradient", *RULES], rows)

# %% [markdown]
# The first column is rounding. The others are real errors, and they depend on the placement: two runs that differ
# in nothing but the number of GPUs would learn different things. Look at the second column. Dividing by
# microbatch does little harm where the planner has made all microbatches equally large. That hides the mistake;
# it does not mend it. (And normalising over a microbatch is wrong even if there is only one: it compares answers
# to different problems.)
#
# ## The loop in Lightning
#
# The module below does this on every rank. It uses **manual optimisation**, since one `training_step` samples,
# exchanges and updates. Under manual optimisation the strategy takes the mean over ranks, as FSDP does, so the
# sum is divided by all tokens and multiplied by the number of ranks.


# %%
class GRPO(LightningModule):
    def __init__(self, model, placement="lb_mini"):
        super().__init__()
        self.model, self.placement = model, placement
        self.automatic_optimization = False

    def training_step(self, problems, batch_idx):
        # 1. Sample answers to this rank's problems. Ranks do not meet here: each stops when its own answers have ended.
        own = strokes.roll_out(
            self.model, problems, GROUP, seed=1000 * batch_idx + self.global_rank
        )

        # 2. One meeting: every rank learns all answers, with their advantages.
        shares = self.trainer.strategy.engine.exchange("rollouts", own)
        everything = [one for share in shares for one in share]

        # 3. Every rank makes the same plan, and takes its part of it.
        for microbatch in self.plan(everything)[self.global_rank]:
            loss, _ = strokes.policy_loss(
                self.model,
                strokes.pack_rollouts([everything[i] for i in microbatch]),
            )
            self.manual_backward(
                loss * self.trainer.world_size / strokes.answer_tokens(everything)
            )

        # 4. The other meeting: the optimizer step.
        optimizer = self.optimizers()
        optimizer.step()
        optimizer.zero_grad()
        # a forward pass per token of the longest answer
        passes = [max(len(one["answer"]) for one in share) for share in shares]
        values = {
            "reward": sum(one["reward"] for one in everything) / len(everything)
        }
        values["dummy_passes"] = max(passes) / (sum(passes) / len(passes)) - 1
        self.log_dict(values, batch_size=1)

    def plan(self, everything):
        world, lengths = self.trainer.world_size, strokes.tokens_of(everything)
        if self.placement == "lb_mini":
            return balance.plan_minibatch(
                lengths, world, max_tokens=512, cost="quadratic_dense"
            )
        size = len(everything) // world  # as sampled: in microbatches of 16 answers
        return [
            [
                list(range(begin, begin + 16))
                for begin in range(rank * size, (rank + 1) * size, 16)
            ]
            for rank in range(world)
        ]

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


def fit(name, placement, steps):
    """Train on `steps` minibatches of 16 problems for each of two ranks."""
    model = strokes.make_model()
    model.load_state_dict(base.state_dict())
    module = GRPO(model, placement)
    trainer = Trainer(
        strategy=ODCStrategy(),
        accelerator="cpu",
        devices=2,
        max_steps=steps,
        log_every_n_steps=1,
        callbacks=[DeviceIdleMonitor(every_n_steps=1)],
        **{**QUIET, "logger": CSVLogger("runs", name=name, version="log")},
    )
    data = strokes.problems(32 * steps, seed=7)
    trainer.fit(module, DataLoader(data, batch_size=16, collate_fn=list))
    return module


# %% [markdown]
# First the promise: the same training under two placements. `"as sampled"` leaves each answer on the rank that
# sampled it. Rewards are those of the answers *before* each update, so from the second step on they depend on all
# gradients so far.

# %%
for name, placement in (("as-sampled", "as sampled"), ("balanced", "lb_mini")):
    fit(name, placement, steps=4)
rows = zip(
    *(
        read_log(f"runs/{name}/log", "reward")
        for name in ("as-sampled", "balanced")
    ),
    strict=True,
)
print_table(
    ["step", "as sampled", "lb_mini"],
    [[step, *(f"{r:.6f}" for r in row)] for step, row in enumerate(rows)],
)

# %% [markdown]
# (Sampling is a lottery that reacts to the last digit: sooner or later a token falls differently, and from then
# on two runs differ as two seeds do. With `ODCStrategy(deterministic=True)` a run repeats bit by bit.)
#
# ## Train

# %%
STEPS = 50
trained = fit("grpo", "lb_mini", STEPS)
rewards = read_log("runs/grpo/log", "reward")
smooth = [
    sum(rewards[max(0, i - 9) : i + 1]) / len(rewards[max(0, i - 9) : i + 1])
    for i in range(len(rewards))
]
show(
    pictures.lines_figure(
        {"mean of the last ten steps": (range(STEPS), smooth)},
        points={"step": (range(STEPS), rewards)},
        title="Reward of the sampled answers",
        x="optimizer step",
        y="mean reward",
    ),
    "The mean reward over optimizer steps: single steps scatter, their running "
    "mean rises.",
)

# %%
for name, model in (("base", base), ("after GRPO", trained.model)):
    print(
        f"{name}: {strokes.fraction_right(model, exam, seed=0):.0%} of the exam right"
    )

# %% [markdown]
# And the waiting? In this toy, sampling is most of the time: one pass through the model for every token of the
# longest answer. With parameters gathered by collectives, a rank whose answers have all ended would have to run
# dummy passes until those of every other rank have ended, too. Here it does not. So many passes would have been
# added, on average over ranks and steps:

# %%
print(
    f"dummy passes saved: {mean_of_log('runs/grpo/log', 'dummy_passes'):.0%} of the real ones"
)
print(
    f"idle, waiting for other ranks and for data: {mean_of_log('runs/grpo/log', 'idle/fraction', skip=1):.0%}"
)

# %% [markdown]
# The idle time that is left is in the meeting after sampling: one rank had the longer answers. No placement of
# the *updates* changes that. With many ranks and long traces it is most of the idle time; what helps there is to
# sample more than one step's worth ahead, which is no longer on-policy, or to give the ranks more prompts each,
# as in [notebook 3](03_balancing_a_minibatch.ipynb).
#
# ## What you have seen
#
# - Answers that are sampled differ in length, and nobody knows how much beforehand.
# - Normalise in the group, place afterwards, sum, divide once: then the gradient is exact under any placement.
# - In Lightning: manual optimisation, one exchange, one plan, any number of microbatches per rank.
# - Ranks sample at their own pace. No dummy passes.
#
# This loop is small on purpose. It has no reference model and no penalty for leaving it, and it updates once per
# sampling, so it needs no clipping. What it shows about placement holds with all of these, too.
#
# ## Exercises
#
# 1. We divide by the tokens of all answers. Divide each answer by its own length first, as GRPO was published:
#    change `policy_loss` accordingly, keep the gradient exact under any placement (by what do you divide the sum
#    now?), and compare: which one makes answers longer?
# 2. Subtract the mean only, and do not divide by the standard deviation. For which groups does that matter most?
# 3. Sample once and update twice. Now the ratio of new to old probabilities is not 1: add it, with clipping. What
#    has to travel with an answer besides its advantage?
# 4. Give rank 1 all the hard problems (large sums). What happens to `dummy_passes`, and to the idle fraction?
# 5. Let one rank take no microbatches in a step: make `plan` give everything to rank 0. Is the reward of the next
#    step still the same?
#
# Next: [How it works inside](06_how_it_works.ipynb).
