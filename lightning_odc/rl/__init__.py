"""Reinforcement learning of language models: exchange roll-outs, score them, and update on them, balanced and exact.

A step of GRPO with a reference model, two epochs and four minibatches of updates::

    from lightning_odc import rl

    def training_step(self, prompts, batch_idx):
        own = self.roll_out(prompts)                              # a list of rl.Rollout; each rank at its own pace
        rollouts = rl.exchange(self, own)                         # those of all ranks, planned
        rl.normalize_advantages(rollouts)
        rl.score(self.model, rollouts, into="logprobs")
        rl.score(self.reference, rollouts, into="ref_logprobs")
        optimizer = self.optimizers()
        for update in rollouts.updates(epochs=2, minibatches=4, seed=batch_idx):
            for microbatch in update:                             # those of this rank
                logprobs = rl.logprobs(self.model, microbatch)
                loss = rl.policy_loss(logprobs, microbatch, loss_type="grpo", beta=0.04)
                self.manual_backward(loss.scaled)
            optimizer.step()
            optimizer.zero_grad()

Everything here works under every ``communication``, on one rank, and in Fabric.
"""

from lightning_odc.rl.loss import PolicyLoss, group_advantages, normalize_advantages, policy_loss
from lightning_odc.rl.microbatch import Microbatch
from lightning_odc.rl.prompts import claim_prompts
from lightning_odc.rl.rollout import Rollout
from lightning_odc.rl.rollouts import Rollouts, Update, exchange
from lightning_odc.rl.scoring import logprobs, score

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
