"""Reinforcement learning of language models: exchange roll-outs, score them, and plan the updates, balanced and exact.

The page *RL post-training* of the documentation has a whole step of GRPO: `claim_prompts`, `exchange`, `score`, and a
loop over ``rollouts.updates()`` with `logprobs` and a loss of your own. Everything here works under every
``communication``, on one rank, and in Fabric.
"""

from lightning_odc.rl.prompts import claim_prompts
from lightning_odc.rl.rollout import Microbatch, Rollout
from lightning_odc.rl.rollouts import Rollouts, exchange
from lightning_odc.rl.scores import logprobs, score

__all__ = ["Microbatch", "Rollout", "Rollouts", "claim_prompts", "exchange", "logprobs", "score"]
