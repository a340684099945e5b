"""Reinforcement learning of language models: exchange roll-outs, score them, and update on them, balanced and exact.

The page *RL post-training* of the documentation has a whole step of GRPO: `claim_prompts`, `exchange`,
`normalize_advantages`, `score`, and a loop over ``rollouts.updates()`` with `logprobs` and `policy_loss`.
Everything here works under every ``communication``, on one rank, and in Fabric.
"""

from lightning_odc.rl.loss import (
    PolicyLoss,
    group_advantages,
    logprobs,
    normalize_advantages,
    policy_loss,
    score,
)
from lightning_odc.rl.prompts import claim_prompts
from lightning_odc.rl.rollout import Microbatch, Rollout
from lightning_odc.rl.rollouts import Rollouts, Update, exchange

__all__ = [
    "Microbatch",
    "PolicyLoss",
    "Rollout",
    "Rollouts",
    "Update",
    "claim_prompts",
    "exchange",
    "group_advantages",
    "logprobs",
    "normalize_advantages",
    "policy_loss",
    "score",
]
