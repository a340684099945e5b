"""Errors between ranks, as exceptions that users can catch by name."""

from __future__ import annotations

PUBLISH = (
    "`trainer.strategy.publish_parameters()` (in Fabric `fabric.strategy.publish_parameters()`, after `attach` "
    "`odc.publish()`)"
)
"""What to call after a change of parameters, in messages."""
SETTLE = (
    "`self.trainer.strategy.settle_gradients()` (in Fabric `fabric.strategy.settle_gradients()`, after `attach` "
    "`odc.settle()`)"
)
"""What to call before gradients are read outside of Lightning's hooks, in messages."""


class ODCError(RuntimeError):
    """Base class of the errors that on-demand communication raises while it runs."""


class PeerFailedError(ODCError):
    """Another rank raised, died, or left the training loop while this rank still needed it."""


class WaitTimeoutError(ODCError):
    """A wait passed its deadline; the message says where every rank was at that time."""


class DisagreementError(ODCError):
    """The ranks do not run the same program: models, minibatch plans or steps differ."""


class StaleShardError(ODCError):
    """Parameters changed after they were published, so peers would read old values."""


class WindowError(ODCError):
    """The memory that ranks share could not be made or attached."""
