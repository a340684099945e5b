# %% [markdown]
# # 5. RL post-training
#
# **You will learn**
#
# - why reinforcement learning of language models is the hardest case of uneven work;
# - a complete GRPO step in thirty lines: sample with `generate()`, check, exchange, score, update;
# - why the gradient stays *exactly* the same wherever the answers are computed, and two popular ways to get it
#   wrong;
# - what ranks do in such a step with collectives and on demand, side by side.
#
# **It needs** Linux, two CPU cores and about a minute and a half. No GPU, no network. In a clone of the repository,
# `make lab` installs everything and opens the notebooks. [Notebook 3](03_balancing_a_minibatch.ipynb) explains the
# planner that is used here.
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

from support import pictures, strokes
from support.display import (
    QUIET,
    print_table,
    quiet,
    read_log,
    show,
)

quiet()

# %%
from collections import defaultdict
from statistics import mean, stdev

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader

from lightning_odc import ODCStrategy, rl
from lightning_odc.callbacks import TimelineRecorder, load_timeline
from lightning_odc.rl.ranks import Ranks

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
# The reward is 1 for the right number of strokes, 1/2 if it is one off, 1/3 for two, and so on. It is 0 for
# anything that is not an answer.
#
# Reinforcement learning improves what a model can do already, so it needs a base model. Ours is a tiny Llama of
# Hugging Face, built from a configuration. We train it on right answers for a few seconds, and stop early. For
# comparison we print the reward of guesses: answers that have the right form, but belong to other problems.

# %%
base = strokes.make_model()
losses = strokes.teach(base, steps=160)
print(f"supervised loss: {losses[0]:.2f} at first, {losses[-1]:.2f} at the end")

exam = strokes.problems(200, seed=123456)


def exam_reward(model):
    torch.manual_seed(0)
    answers = strokes.sample(model, [strokes.prompt(problem) for problem in exam])
    return strokes.mean_reward(exam, answers)


guess_reward = strokes.mean_reward(exam, strokes.guesses(exam, seed=0))
base_reward = exam_reward(base)
print(
    f"mean reward: {guess_reward:.2f} for guesses, {base_reward:.2f} for the base model"
)

# %% [markdown]
# ## One step, slowly
#
# **GRPO** (group relative policy optimization) in four sentences. For each prompt, sample a *group* of answers.
# Check each of them. An answer's **advantage** is its reward minus the mean of its group, divided by the standard
# deviation of its group: was it better than the model's other tries at the same problem? Then make each token of
# an answer more likely or less likely, by the gradient of `advantage * log(probability)`.
#
# A prompt with one answer is a `Rollout`. It also carries its reward, and the number of its group. `set_advantages`
# compares each answer with those of its group.

# %%
GROUP = 8


def roll_out(model, index, problem):
    """Sample a group of answers to a problem, and check them."""
    prompt = strokes.prompt(problem)
    return [
        rl.Rollout(
            prompt + answer, len(prompt), strokes.reward(problem, answer), index
        )
        for answer in strokes.sample(model, [prompt], GROUP)  # calls model.generate
    ]


def compare(answers):
    """Set the advantages of answers that are compared with each other."""
    rewards = [one.reward for one in answers]
    spread = stdev(rewards) if len(rewards) > 1 else 0.0
    for one in answers:
        one.advantage = (one.reward - mean(rewards)) / (spread + 1e-4)


def set_advantages(rollouts):
    """Compare each answer with those of its group, wherever they were sampled."""
    groups = defaultdict(list)
    for one in rollouts:
        groups[one.group].append(one)
    for answers in groups.values():
        compare(answers)


torch.manual_seed(0)
rollouts = rl.Rollouts(
    [
        one
        for index, problem in enumerate(strokes.problems(16, seed=5))
        for one in roll_out(base, index, problem)
    ]
)
set_advantages(rollouts)
for one in rollouts[:GROUP]:
    text = strokes.decode(one.tokens)
    print(f"reward {one.reward:.2f}, advantage {one.advantage:+.2f}  {text}")

# %% [markdown]
# One group. The answers have different lengths although the prompt is the same. Over all prompts of the step it
# looks like this:

# %% Draw the lengths of the answers tags=["hide-input"]
show(
    pictures.histogram_figure(
        [one.response_length for one in rollouts],
        "Tokens of the answers of one step",
        "tokens",
        "answers",
    ),
    "A histogram of the lengths of the answers of one step: most are short, a few "
    "are several times as long.",
)

# %% [markdown]
# In real post-training the tail is far longer: a reasoning trace may have a hundred tokens or thirty thousand, and
# its length is not known before it is sampled. And there are *three* places where ranks wait for each other if
# parameters are gathered by collectives:
#
# - **sampling**: every forward pass is a barrier. A rank whose answers have all ended runs dummy passes until the
#   longest answer of *all* ranks has ended;
# - **scoring**: the probabilities of all tokens are computed again, under the model that sampled them and often
#   under a reference model, and every microbatch is a barrier;
# - **updating**: the same.
#
# On demand, ranks synchronize only between these parts.
#
# ## The gradient does not care where it is computed
#
# Now the planner deals out the answers of a step to ranks and microbatches. The gradient that we want depends on
# neither:
#
# ```text
# g  =  sum over the tokens of all answers of ( -advantage * grad log(probability) )  /  number of these tokens
# ```
#
# (We divide by the tokens of all answers, as DAPO does. GRPO as published divides each answer by its own length
# first, and takes the mean over answers: see exercise 1.)
#
# Two rules make it exact under *any* placement:
#
# 1. **Normalise before placing.** An advantage is a property of a group. It is computed where the whole group is
#    known, and travels with the answer. From then on answers of one group may go to different ranks.
# 2. **Sum, and divide once.** Microbatches contribute sums. The number of tokens is that of the whole step, on all
#    ranks: `microbatch.whole.tokens`.
#
# The loss is yours. Ours is that of PPO. `rl.logprobs` runs the model and returns the log-probability of every token
# of the answers of a microbatch, one after another. `ratio` compares it with the model that has sampled, and the loss
# follows it only up to `clip` away from 1. (Losses of TRL and verl are written the same way. Where one returns a mean,
# multiply by `len(microbatch.targets)`.)


# %%
def policy_loss(logprobs, microbatch, clip=0.2):
    """The clipped loss of PPO, summed over the tokens of a microbatch."""
    old = microbatch.logprobs
    if old is None:  # the model has not changed since it sampled
        old = logprobs.detach()
    ratio = (logprobs - old).exp()
    advantages = microbatch.advantages[microbatch.sequence]  # of each token
    clipped = ratio.clamp(1 - clip, 1 + clip)
    return -torch.minimum(ratio * advantages, clipped * advantages).sum()


# %% [markdown]
# Let us check that, and break it. We place the same 128 answers in three ways. For each way we compute the gradient
# with both rules, and with two shortcuts that exist in real code: dividing each microbatch by its own number of
# tokens (*divided early*), and normalising rewards over the answers of a microbatch (*normalised early*).


# %%
def gradient(ranks, max_tokens, rule):
    """The gradient of one step, as these ranks would compute it together."""
    set_advantages(rollouts)
    microbatches = [
        microbatch
        for rank in range(ranks)
        for microbatch in rl.Rollouts(
            rollouts, Ranks(rank, ranks), max_tokens=max_tokens
        ).microbatches()
    ]
    base.zero_grad()
    for microbatch in microbatches:
        if rule == "normalised early":
            compare(microbatch.rollouts)
        loss = policy_loss(rl.logprobs(base, microbatch), microbatch)
        if rule == "divided early":
            loss = loss / len(microbatch.targets) / len(microbatches)
        else:
            loss = loss / microbatch.whole.tokens
        loss.backward()
    return torch.cat([parameter.grad.flatten() for parameter in base.parameters()])


placements = {
    "1 rank, 2048 tokens": (1, 2048),
    "2 ranks, 512 tokens": (2, 512),
    "8 ranks, 128 tokens": (8, 128),
}
RULES = ("both rules", "divided early", "normalised early")
truth = gradient(1, 2048, "both rules")
rows = []
for name, (ranks, max_tokens) in placements.items():
    errors = [
        (gradient(ranks, max_tokens, rule) - truth).norm() / truth.norm()
        for rule in RULES
    ]
    rows.append([name, *(f"{error:.1e}" for error in errors)])
print_table(["relative error", *RULES], rows)

# %% [markdown]
# The first column is rounding. The others are real errors, and they depend on the placement: two runs with different
# numbers of GPUs would learn different things.
#
# ## The loop in Lightning
#
# The module below does this on every rank. It uses **manual optimization**, since one `training_step` samples,
# exchanges, scores and updates. It updates twice, on one half of the answers each. Before the second update the model
# has changed since it sampled. The loss corrects for that with the scores, and clips the correction. The strategy takes
# the mean over ranks of what they backpropagate, so each rank multiplies its sum by their number.


# %%
class GRPO(LightningModule):
    def __init__(self, model):
        super().__init__()
        self.model = model
        self.automatic_optimization = False

    def training_step(self, problems, batch_idx):
        # 1. Sample: this rank's problems, then those of the rank that still samples.
        own = []
        with strokes.counted(self.model) as passes:
            for index, problem in rl.claim_prompts(self, problems):
                own += roll_out(self.model, index, problem)

        # 2. Synchronize: every rank gets all answers, and a plan.
        rollouts = rl.exchange(self, own, max_tokens=1024)
        set_advantages(rollouts)

        # 3. Score: each rank its part of the plan.
        rl.score(self.model, rollouts, into="logprobs")

        # 4. Update: two optimizer steps.
        optimizer = self.optimizers()
        for update in rollouts.updates(minibatches=2, seed=batch_idx):
            for microbatch in update:
                logprobs = rl.logprobs(self.model, microbatch)
                loss = policy_loss(logprobs, microbatch)
                whole = microbatch.whole
                self.manual_backward(loss * whole.ranks / whole.tokens)
            optimizer.step()
            optimizer.zero_grad()

        self.log_counts(len(own) / GROUP, len(passes))
        reward = mean(one.reward for one in rollouts)
        self.log("reward", reward, batch_size=1)

    def log_counts(self, prompts, passes):
        """What each rank has sampled, and how many forward passes that took."""
        counts = [prompts, float(passes)]
        by_rank = self.trainer.strategy.engine.exchange("counts", counts)
        for rank, (count, several) in enumerate(by_rank):
            self.log(f"prompts of rank {rank}", count, batch_size=1)
            self.log(f"passes of rank {rank}", several, batch_size=1)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=2e-4)


def fit(name, steps, communication="on_demand", callbacks=()):
    """Train on `steps` batches of 8 problems for each of two ranks."""
    torch.manual_seed(1)
    model = strokes.make_model()
    model.load_state_dict(base.state_dict())
    module = GRPO(model)
    trainer = Trainer(
        strategy=ODCStrategy(
            sharding_strategy="FULL_SHARD",
            communication=communication,
            balance=None,
        ),
        accelerator="cpu",
        devices=2,
        max_steps=2 * steps,  # optimizer steps
        log_every_n_steps=1,
        callbacks=list(callbacks),
        **{**QUIET, "logger": CSVLogger("runs", name=name, version="log")},
    )
    data = strokes.problems(16 * steps, seed=7)
    trainer.fit(module, DataLoader(data, batch_size=8, collate_fn=list))
    return module


# %% [markdown]
# ## With collectives and on demand
#
# The same three steps of training, with collectives and on demand. The pictures show the last of them.

# %%
STEPS = 3
timelines, rows = {}, []
for communication in ("collective", "on_demand"):
    recorder = TimelineRecorder(f"runs/{communication}/timeline", steps=range(4, 6))
    fit(communication, STEPS, communication, [recorder])
    title = communication.replace("_", " ")
    timelines[title] = load_timeline(recorder.dirpath / "timeline.json")

    def logged(name):
        return read_log(f"runs/{communication}/log", name)

    for step in range(STEPS):
        prompts, passes = (
            [f"{logged(f'{what} of rank {rank}')[step]:.0f}" for rank in (0, 1)]
            for what in ("prompts", "passes")
        )
        rows.append(
            [
                f"{communication}, step {step}",
                f"{logged('reward')[step]:.6f}",
                ", ".join(prompts),
                ", ".join(passes),
            ]
        )
print_table(["", "reward", "prompts by rank", "passes by rank"], rows)

# %% [markdown]
# The rewards are the same, so the answers are the same. The random numbers of a prompt do not depend on the rank that
# samples it, and the gradient does not depend on the rank that computes it. (Sampling reacts to the last digit of a
# probability. In a longer run some token will differ, and from then on two runs differ as two seeds do. With
# `ODCStrategy(deterministic=True)` an on-demand run repeats bit by bit.)
#
# The forward passes differ. With collectives both ranks run equally many: as many as the longer answer of the two
# needs, for each pair of prompts. On demand each rank runs those of its own answers, and a rank that is done takes a
# prompt of the other.

# %% Draw the timelines tags=["hide-input"]
show(
    pictures.timelines_figure(timelines),
    "Timelines of two ranks in one step, with collectives above and on demand below: one bar for each prompt that "
    "is sampled, then scoring, then forward and backward passes. On demand takes less time.",
)

# %% [markdown]
# The upper lane of a rank is what it computes, and the lower lane what it moves. Grey is waiting. Each bar of sampling
# is one prompt. Dummy passes look like real ones here, so with collectives a part of the pink is lost time, too.
#
# ## Train

# %%
STEPS = 30
trained = fit("grpo", STEPS)
rewards = read_log("runs/grpo/log", "reward")
smooth = [
    sum(rewards[max(0, i - 4) : i + 1]) / len(rewards[max(0, i - 4) : i + 1])
    for i in range(len(rewards))
]
steps = range(len(rewards))

# %% Draw the rewards tags=["hide-input"]
show(
    pictures.lines_figure(
        {
            "GRPO, mean of five steps": (steps, smooth),
            "base model, without RL": (steps, [base_reward] * len(steps)),
            "guesses": (steps, [guess_reward] * len(steps)),
        },
        points={"GRPO, one step": (steps, rewards)},
        title="Reward of the sampled answers",
        x="step",
        y="mean reward",
    ),
    "The mean reward over the steps: it rises well above two level lines, the reward of the base model and that of "
    "guesses.",
)

# %% Print the exam tags=["hide-input"]
print_table(
    ["", "mean reward in the exam"],
    [
        ["guesses", f"{guess_reward:.2f}"],
        ["base model", f"{base_reward:.2f}"],
        ["after GRPO", f"{exam_reward(trained.model):.2f}"],
    ],
)

# %% [markdown]
# How often did a rank help the other one, and what did that save?

# %%
by_rank = [read_log("runs/grpo/log", f"passes of rank {rank}") for rank in (0, 1)]
helped = sum(count != 8 for count in read_log("runs/grpo/log", "prompts of rank 0"))
print(f"one rank helped the other in {helped} of {STEPS} steps")
longest = sum(max(pair) for pair in zip(*by_rank, strict=True))
print(
    f"forward passes of the busier rank over the mean: {longest / sum(map(sum, by_rank)) * 2:.2f}"
)

# %% [markdown]
# ## What you have seen
#
# - Answers that are sampled differ in length, and their lengths are not known beforehand.
# - Normalise in the group, place afterwards, sum, divide once: then the gradient is exact under any placement.
# - In Lightning: manual optimization, and four calls of `lightning_odc.rl`: claim, exchange, score, log-probabilities.
#   The advantages and the loss are your own.
# - Ranks sample at their own pace, without dummy passes, and the one that is done helps the other.
#
# This loop has no reference model. A second model in the module that does not train is scored the same way, with
# `into="ref_logprobs"`. Then `microbatch.ref_logprobs` has what a KL divergence needs, which keeps the policy near it.
#
# ## Exercises
#
# 1. We divide by the tokens of all answers. Divide each answer by its own length first, as GRPO does:
#    `microbatch.lengths[microbatch.sequence]` has it for every token, and `whole.sequences` is the number of answers.
#    Which one makes answers longer?
# 2. Subtract the mean only, and do not divide by the standard deviation. For which groups does that matter most?
# 3. Update with `updates(epochs=4)`, and count how many tokens the loss clips.
# 4. Give rank 1 all the hard problems (large sums). Which rank samples them?
# 5. Replace `rl.claim_prompts(self, problems)` by `enumerate(problems)`. What do you have to do about the groups,
#    and what happens to the forward passes by rank?
#
# <details>
# <summary>Answer to 1</summary>
#
# GRPO gives every answer the same weight, so a token of a long answer counts less than a token of a short one. A
# long wrong answer is then discouraged less per token than a short wrong one, and answers can get longer without
# getting better. DAPO gives every token the same weight. Log the mean of `one.response_length` over the roll-outs and
# compare.
#
# </details>
#
# <details>
# <summary>Answer to 2</summary>
#
# For groups whose rewards hardly differ. Their standard deviation is small, so dividing by it turns a tiny difference
# into a large advantage. Without scaling, such a group hardly moves the model. A group whose rewards are all equal
# has advantage 0 either way.
#
# </details>
#
# <details>
# <summary>Answer to 3</summary>
#
# Give the trainer `max_steps=4 * steps`, since every `training_step` then makes four updates. A token is clipped where
# `clipped * advantages < ratio * advantages`. Count these for each of the four updates. In the first no token is
# clipped: the model is still the one that sampled, so every ratio is 1. Later the model has changed, and some ratios
# leave the range.
#
# </details>
#
# <details>
# <summary>Answer to 4</summary>
#
# Both. Rank 0 has the short answers, is done first, and takes prompts of rank 1: "prompts of rank 0" rises above 8.
# With collectives each rank samples its own prompts.
#
# </details>
#
# <details>
# <summary>Answer to 5</summary>
#
# Groups need numbers that are unique over all ranks: `index + 8 * self.global_rank`. Otherwise two problems share a
# group, and `set_advantages` compares answers to different problems. No rank helps the other, so each runs the
# forward passes of its own answers, and the rank with the longer answers decides how long a step takes.
#
# </details>
#
# Next: [How it works inside](06_how_it_works.ipynb).
