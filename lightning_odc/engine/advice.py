"""What to write instead of what cannot work on shards, where torch's own message does not say it."""

from __future__ import annotations

from collections.abc import Sequence

from torch.optim import LBFGS, Optimizer

from lightning_odc import _compat
from lightning_odc.engine.units import Unit
from lightning_odc.errors import ODCError
from lightning_odc.words import text_of

#: A penalty on the parameters, for messages.
PENALTY = """\
    def on_before_optimizer_step(self, optimizer):
        for p in self.parameters():
            if p.grad is not None:
                p.grad.add_(p.detach(), alpha=2 * 0.01)  # the gradient of 0.01 * sum(p.pow(2).sum())"""

_MIXED = f"""parameters are whole only inside `forward` of their unit.
  A penalty in the loss: use the optimizer's `weight_decay`, or add its gradient to the others:
{PENALTY}
  A weight of a unit that is read outside of it, or a layer or another method of it that is called by itself: call the
  unit, `self.block(x)`. If the model fits on every rank, ODCStrategy(sharding_strategy="NO_SHARD") runs any code.
  An average of the weights: update it in `on_train_batch_end`, or use Lightning's EMAWeightAveraging callback."""
_UNALLOCATED = """their values are not in one place. For the norm of the gradients, after clipping:
    self.log("grad_norm", self.trainer.precision_plugin.gradient_norm)"""
_NO_NUMPY = "assemble one with `p.full_tensor()`, on all ranks together, before it is logged."
_NO_STORAGE = """their values are not in one place. A Hugging Face directory is written by one rank alone with
    from lightning_odc.pretrained import save_pretrained
    save_pretrained(self.model, self.trainer.strategy.stream_parameters(self.model), directory)
in the dtype that it computes in. In full precision, on all ranks: `trainer.strategy.lightning_module_state_dict()`."""
_NO_COPY = """a sharded model cannot be copied or pickled. Fill a new one from its whole weights, on all ranks together:
    state = self.trainer.strategy.lightning_module_state_dict()  # rank 0 gets it"""
_GATHERED = """`training_step` and `forward` cannot change parameters, which are whole there. Load or change them in
`on_train_batch_start` or `on_train_batch_end`, on all ranks."""
_ANOTHER_OPTIMIZER = (
    "    torch.optim.AdamW(self.parameters(), lr=1e-4)  # SGD, Muon and most others work, too"
)
_UNKNOWN = f"""this operation does not know how to work on shards. An optimizer may do with `foreach=False`, or write
{_ANOTHER_OPTIMIZER}"""

#: What ranks come to a meeting for before `full_tensor()` and the like.
OVER_SHARDS = (
    "`full_tensor()` or a sum over shards (call it on all ranks, without `if trainer.is_global_zero:`; one rank alone "
    "reads whole parameters, in the dtype that the model computes in, by `trainer.strategy.stream_parameters(module)`)"
)

_RAW = "\nWhat torch says: "

#: By a part of what torch says (2.9 to 2.13).
_ADVICE = {
    "got mixed torch.Tensor and DTensor": _MIXED,
    "its data is not allocated yet": _UNALLOCATED,
    "is not supported for tensor subclasses": _NO_NUMPY,
    "access the data pointer on an invalid": _NO_STORAGE,
    "call copy_() on an invalid": _NO_COPY,
    "FSDP does not support deepcopy": _NO_COPY,
    "default implementation of __deepcopy__": _NO_COPY,
    "_fsdp_init.FSDP": _NO_COPY,
    "'Parameter' object has no attribute '_local_tensor'": _GATHERED,
    "Sharding propagation failed": _UNKNOWN,
    "does not have a sharding strategy registered": _UNKNOWN,
}


def advise(exception: BaseException) -> None:
    """Say first what to write, if this is an error of torch about something sharded. Idempotent."""
    # The page of questions and answers has the same table, with more words.
    said = text_of(exception)
    advice = next((advice for words, advice in _ADVICE.items() if words in said), None)
    if advice is not None and _RAW not in said:
        exception.args = (f"ODCStrategy shards parameters and gradients (DTensor): {advice}{_RAW}{said}",)


def refuse_optimizers(optimizers: Sequence[Optimizer]) -> None:
    """Refuse optimizers that cannot work on demand."""
    for kind in (kind for optimizer in optimizers for kind in type(optimizer).__mro__):
        if kind.__module__.startswith("bitsandbytes."):
            raise ValueError(
                f"{kind.__name__} of bitsandbytes reads parameters at their addresses in memory, and sharded ones "
                f"(DTensor) have none of their own. Write\n{_ANOTHER_OPTIMIZER}"
            )
    if any(isinstance(optimizer, LBFGS) for optimizer in optimizers):
        raise ValueError(
            "LBFGS runs the model several times in one step, while ranks change the shards that others would read, "
            "and flattens parameters, which are sharded. Write torch.optim.AdamW(self.parameters(), lr=1e-4), or "
            'train with Trainer(strategy="ddp").'
        )


def refuse_hooks(units: Sequence[Unit]) -> None:
    """Refuse hooks of ``fully_shard`` that would see zeros on demand, and those that nothing would call."""
    for unit in units:
        if _compat.has_all_reduce_hook(unit.module):
            raise ValueError(
                f"`set_all_reduce_hook` was called on {unit.name!r}, but on demand no gradient passes there: ranks "
                "add gradients to their owners, which have the sums at the optimizer step. Change gradients in "
                '`on_before_optimizer_step`, or use ODCStrategy(communication="collective").'
            )
        for slot in unit.slots:
            if len(_compat.tensor_hooks_of(slot.sharded_param)) > slot.has_hook:  # one is the engine's own
                raise lost_hook(slot.name)


def lost_hook(name: str) -> ValueError:
    """The error for a hook that nothing would call."""
    return ValueError(
        f"{name!r} has a hook of `register_hook`, and gradients of shards do not pass it. Register it with "
        "`register_post_accumulate_grad_hook`, and change `parameter.grad` there; or keep the model whole: "
        'sharding_strategy="NO_SHARD".'
    )


def undivided_gradient(name: str) -> ODCError:
    """The error for a gradient that does not go through the accumulators: see Note [Who divides]."""
    return ODCError(
        f"The loss depends on the shards of {name!r} (a penalty over `self.parameters()`), and such a gradient "
        "is not divided by the weight of the minibatch. Use the optimizer's `weight_decay`, or leave the "
        f"penalty out of the loss and add its gradient to the others:\n{PENALTY}"
    )


def unexpected_gradient(unit: Unit, prepared: bool) -> ODCError:
    """The error for gradients that have no place in the accumulators."""
    names = [slot.name for slot in unit.slots if slot.registered_param.requires_grad and not slot.has_hook]
    if not prepared:
        return ODCError(
            f"A backward pass reached unit {unit.name!r}, but `trainer.validate`, `test` and `predict` make no "
            "room for gradients. Freeze the model (`self.requires_grad_(False)`), or run it in `trainer.fit`."
        )
    return ODCError(
        f"Unit {unit.name!r} has gradients of parameters that were frozen when the batch began: {names}. Unfreeze "
        "them before, in `on_train_batch_start` or `on_train_epoch_start`, on all ranks."
    )
