"""Collectives in a loop of the user's own: does every rank run equally many microbatches?"""

from __future__ import annotations

import json
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.distributed_c10d import PrefixStore

from lightning_odc import _compat
from lightning_odc.engine.roll_call import RollCall
from lightning_odc.errors import DisagreementError, PeerFailedError, WaitTimeoutError

_LOOK_EVERY = 0.005  # seconds


class EqualCounts:
    """Counts the forward passes of every optimizer step, and compares them before its gradients are complete.

    Collectives pair up whatever comes next on every rank. Without this, a rank with fewer microbatches would mix
    another optimizer step into this one of the others, often without an error.
    """

    def __init__(self, model: nn.Module, timeout: timedelta) -> None:
        """All ranks together."""
        self.roll_call = RollCall()
        self._timeout = timeout
        self._rank = str(self.roll_call.rank)
        # Each model has its own places. Ranks attach their models in the same order.
        store = _compat.default_store()
        number = store.add(f"odc/models/{self._rank}", 1)
        self._places = PrefixStore(f"odc/places/{number}", store)
        # The optimizer step, its forward passes so far, and whether it ends. Later places are larger.
        self._place = [0, 0, False]
        self._say()
        dist.barrier()  # every place can be read
        self._hook = model.register_forward_pre_hook(self._begin, prepend=True)

    def close(self) -> None:
        """Count no longer. Idempotent."""
        self._hook.remove()

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # it has no types
    def _begin(self, *_: object) -> None:
        if torch.is_grad_enabled():
            self._place[1] += 1
            self._say()

    def settle(self) -> None:
        """Compare, in front of the collectives that end an optimizer step.

        Raises:
            DisagreementError: another rank runs more microbatches.
            PeerFailedError: another rank has failed or died.
            WaitTimeoutError: another rank did not come.
        """
        step, count, _ = self._place
        self._place[2] = True
        self._say()
        deadline = time.monotonic() + self._timeout.total_seconds()
        for rank in self.roll_call.others:
            while (place := json.loads(self._places.get(str(rank)))) < self._place:
                trouble, _ = self.roll_call.look()
                if trouble:
                    raise PeerFailedError(trouble)
                if time.monotonic() > deadline:
                    raise WaitTimeoutError(f"Rank {rank} did not come to optimizer step {step}.")
                time.sleep(_LOOK_EVERY)
            if self._place < place < [step + 1]:
                raise DisagreementError(
                    f"In optimizer step {step}, rank {self._rank} runs fewer microbatches ({count}) than "
                    f"rank {rank} (at least {place[1]}). Collectives need equally many on every rank, which "
                    '`plan_minibatch(..., policy="lb_micro")` and `BalancedDataLoader(..., policy="lb_micro")` plan.'
                )
        self._place = [step + 1, 0, False]

    def _say(self) -> None:
        self._places.set(self._rank, json.dumps(self._place))
