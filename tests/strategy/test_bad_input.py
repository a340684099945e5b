"""Every wrong line gets one exception that shows the right one."""

from __future__ import annotations

import copy
import inspect
import pickle
import re
import traceback
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch.plugins.precision import FSDPPrecision, HalfPrecision, MixedPrecision
from lightning.pytorch.utilities import grad_norm
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, MixedPrecisionPolicy
from torch.utils.data import DataLoader, Dataset

from lightning_odc import Minibatch, ODCStrategy
from lightning_odc.engine.advice import refuse_optimizers
from lightning_odc.sharding.wrapping import refuse_layers
from lightning_odc.strategy.setup.options import Options
from tests.support.fits import Manual, Sgd, assert_same, before_step, doing, failure, fit, one_process
from tests.support.models import WIDTH, full_parameters, token_batches
from tests.support.modules import TokenModule, trainer, unsized
from tests.support.ranks import of_all_ranks, on_ranks

HYBRID = {"sharding_strategy": "HYBRID_SHARD"}
LB_MINI = {"balance": "lb_mini"}
COLLECTIVE = {"communication": "collective"}
POLICY = "auto_wrap_policy"
CHECKPOINTING = "activation_checkpointing_policy"
TIMEOUT = r"Write timeout=datetime.timedelta\(minutes=30\)"
UNKNOWN: list[tuple[dict[str, Any], str]] = [
    (
        {"communication": "ring"},
        r"communication=.ring.\) cannot work. Write communication=.auto., .on_demand. or .coll",
    ),
    ({"state_dict_type": "half"}, r"state_dict_type='half'\) cannot work"),
    ({"sharding_strategy": "WHATEVER"}, r'Write one of "AUTO", "NO_SHARD", "FULL_SHARD", "SHARD_GRAD_OP"'),
    ({"device_mesh": (2, 2)}, r'Write sharding_strategy="HYBRID_SHARD"'),
    ({**HYBRID, "device_mesh": (4,)}, r"device_mesh=\(nodes, ranks per node\)"),
    ({"balance": "steal", "deterministic": True}, r'Use balance="lb_mini" with deterministic=True \(the'),
    ({"balance": "karma"}, r'Write balance="auto", "local_sort", "lb_micro", "lb_mini", "steal" or None\.$'),
    ({"balance": "lb-mini"}, r'"steal" or None\. Did you mean "lb_mini"\?$'),
    ({"communication": "ondemand"}, r'Did you mean "on_demand"\?$'),
    ({"sharding_strategy": "FULL_SHARDS"}, r'Did you mean "FULL_SHARD"\?$'),
    ({**LB_MINI, **COLLECTIVE}, 'use communication="on_demand", or balance="lb_'),
    ({"accumulator_dtype": torch.int32}, "Write accumulator_dtype=torch.float32 or None."),
    ({"max_tokens": 0}, r"ODCStrategy\(max_tokens=0\) cannot work. Write max_tokens=8192"),
    ({**LB_MINI, "weighting": "tokens"}, r"weighting=.tokens.\) cannot work. Write weighting=.auto., .label"),
    ({**LB_MINI, "cost": "cubic"}, r"cost='cubic' is unknown"),
    ({"timeout": 5}, TIMEOUT),
    ({POLICY: [nn.LSTM]}, r"Write auto_wrap_policy=\{Block\} \(a set of classes\)"),
    ({CHECKPOINTING: nn.LSTM(1, 1).bias}, r"Write activation_checkpointing_policy=\{Block\}"),
    ({"mixed_precision": "bf16"}, r'Trainer\(precision="bf16-mixed"\)'),
]
MISTYPED: list[tuple[dict[str, Any], str]] = [
    ({"precision_plugin": MixedPrecision("bf16-mixed", "cpu")}, "FSDPPrecision"),
    ({"sync_module_states": True, "ignored_modules": []}, "not know ignored_modules, sync_module_states"),
    ({"balanse": "lb_mini"}, r"^ODCStrategy does not know balanse=\. Did you mean balance=\?$"),
    ({"max_token": 8, "comunication": 1}, r"comunication=\. Did you mean communication=\? .*max_tokens=\?$"),
    ({"stage": 3}, r"^ODCStrategy does not know stage=\.$"),
    (
        {"find_unused_parameters": True},
        "find_unused_parameters, which DDP does. Leave it out: it is not needed",
    ),
]


@pytest.mark.parametrize(("options", "message"), UNKNOWN + MISTYPED, ids=lambda value: str(value)[:40])
def test_arguments_that_cannot_be(options, message):
    is_mistyped = any(options is other for other, _ in MISTYPED)
    with pytest.raises(TypeError if is_mistyped else ValueError, match=message):
        ODCStrategy(**options)


def test_every_argument_is_kept():
    """Arguments are written out three times: here, a forgotten one is missing."""
    given = {
        "communication": "on_demand",
        "deterministic": True,
        "accumulator_dtype": torch.float64,
        "keep_gathered": 0,
        "balance": "lb_micro",
        "max_tokens": 7,
        "cost": "quadratic",
        "length_fn": len,
        "weighting": "token",
        "packing": True,
        "on_out_of_memory": "raise",
        "on_nonfinite": "skip",
        "hang_report_after": None,
        "tensor_parallel_size": 2,
    }
    assert {field.name for field in fields(Options)} - given.keys() == {"context_parallel_size"}
    assert ODCStrategy(**given).options == Options(**given)
    assert ODCStrategy(context_parallel_size=2).options == Options(context_parallel_size=2)
    arguments = inspect.signature(ODCStrategy).parameters
    found = [arguments[field.name].default for field in fields(Options)]
    assert found == [field.default for field in fields(Options)]


def test_arguments_without_effect():
    ODCStrategy(mixed_precision=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    ODCStrategy(use_orig_params=True, limit_all_gathers=True)
    with pytest.warns(UserWarning, match=r"ODCStrategy\(deterministic=...\) has no effect"):
        ODCStrategy(communication="collective", deterministic=True)
    strategy = ODCStrategy(precision_plugin=FSDPPrecision("bf16-mixed"))
    assert trainer(1, strategy=strategy).precision == "bf16-mixed"
    with pytest.raises(TypeError, match="FSDPPrecision"):
        ODCStrategy().precision_plugin = HalfPrecision()


def test_the_engine_outside_a_run():
    with pytest.raises(RuntimeError, match="look at it from a callback"):
        _ = ODCStrategy().engine


class Does(TokenModule):
    """Does something to its parameters, in the hook of that name."""

    def __init__(self, act: Callable[[Any], Any], hook: str) -> None:
        super().__init__()
        self.act = act
        if hook == "training_step":
            plain = self.training_step
            self.training_step = lambda *batch: plain(*batch) + act(self)
        elif hook == "configure_optimizers":
            self.configure_optimizers = lambda: act(self.parameters())
        else:
            setattr(self, hook, lambda *_: act(self))


def penalty(module: Any) -> Any:
    return 0.01 * sum(p.pow(2).sum() for p in module.parameters())


def penalty_of_blocks(module: Any) -> Any:
    return 0.01 * sum(p.full_tensor().pow(2).sum() for p in module.net.blocks.parameters())


def average(module: Any) -> Any:
    pairs = zip(module.optimizers().param_groups[0]["params"], module.parameters(), strict=True)
    return [torch.lerp(shard.detach(), p.detach(), 0.1) for shard, p in pairs]


MIXED = "got mixed torch.Tensor and DTensor"
NO_RULE = "Sharding propagation failed"
NOT_YET = "its data is not allocated yet"
NO_NUMPY = "not supported for tensor subclasses"
STATE = "lightning_module_state_dict()"
ADAMW = "torch.optim.AdamW"
LAYER = 'ODCStrategy(sharding_strategy="NO_SHARD") runs any code'
STEP = "training_step"
START = "on_train_start"
END = "on_train_batch_end"
#: What is done and where, torch's own words (none if this package raises first), and what to write.
SHARDED: dict[str, tuple[Callable[[Any], Any], str, str, str]] = {
    "penalty": (penalty, STEP, MIXED, "alpha=2 * 0.01"),
    "weight": (lambda own: (own.net.embed.weight @ own.net.blocks[0].up.weight.T).mean(), STEP, MIXED, LAYER),
    "average": (average, "on_before_zero_grad", MIXED, "update it in `on_train_batch_end`"),
    "norm": (lambda own: grad_norm(own, 2), "on_before_optimizer_step", NOT_YET, "plugin.gradient_norm"),
    "histogram": (lambda own: next(own.parameters()).detach().numpy(), END, NO_NUMPY, "p.full_tensor()"),
    "copy": (lambda own: copy.deepcopy(own.net.blocks), START, "FSDP does not support deepcopy", STATE),
    "copy of a parameter": (
        lambda own: copy.deepcopy(own.net),
        START,
        "default implementation of __deepcopy__",
        STATE,
    ),
    "pickle": (pickle.dumps, START, "_fsdp_init.FSDP", STATE),
    "vector": (lambda own: nn.utils.parameters_to_vector(own.parameters()), END, NO_RULE, ADAMW),
    "Adafactor": (torch.optim.Adafactor, "configure_optimizers", NO_RULE, ADAMW),
    "LBFGS": (torch.optim.LBFGS, "configure_optimizers", "", ADAMW),
}


@on_ranks(2)
@pytest.mark.parametrize("case", SHARDED)
def test_errors_of_torch_about_sharded_parameters_say_what_to_write(rank, case):
    page = (Path(__file__).parents[2] / "docs" / "faq.md").read_text()
    act, hook, words, advice = SHARDED[case]
    assert words in page
    for communication in ("on_demand", "collective"):
        with pytest.raises((RuntimeError, AssertionError, ValueError, pickle.PicklingError)) as error:
            fit(Does(act, hook), token_batches([5]), communication=communication)
        text = "".join(traceback.format_exception_only(error.value))
        assert words in text
        assert text.count(advice) == 1, text
        if words:
            assert text.partition(": ")[2].startswith("ODCStrategy shards"), text
        if case == "LBFGS" and communication == "on_demand":
            assert text.startswith("ValueError: LBFGS runs the model several times in one step")
        elif case == "LBFGS":
            assert "Cannot flatten unevenly sharded tensor" in text


def test_bitsandbytes_and_adalora_are_refused_by_name():
    eight_bit = type("AdamW8bit", (torch.optim.SGD,), {"__module__": "bitsandbytes.optim.adamw"})
    with pytest.raises(ValueError, match=r"(?s)^AdamW8bit of bitsandbytes .*torch\.optim\.AdamW\("):
        refuse_optimizers([eight_bit([nn.Parameter(torch.ones(1))])])
    adapters = type("AdaLoraModel", (nn.Module,), {"__module__": "peft.tuners.adalora.model"})
    with pytest.raises(ValueError, match=r"^'1' is AdaLoRA.*peft\.LoraConfig"):
        refuse_layers(nn.Sequential(nn.Linear(1, 1), adapters()), sync_batchnorm=False)


class Returns(TokenModule):
    """Does something with what a step returns for a batch."""

    def __init__(self, change: Callable[[Any, Tensor], Any]) -> None:
        super().__init__("items")
        self.change = change

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        return self.change(super().training_step(batch, batch_idx), batch)


class Twice(torch.optim.SGD):
    """Calls its closure again after a step of its own, as LBFGS does."""

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        return super().step(closure)


class MixesCounts(Sgd):
    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        loss = self.mean_loss(batch)
        if batch_idx % 2:
            return loss
        return {"loss": loss, "num_items": 1}


class Shares(Dataset[Any]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Minibatch:
        return Minibatch(token_batches([5]))


def by_hand(act: Callable[[Any], Any]) -> Callable[[], Manual]:
    """A backward pass of each batch and something with the module, then a step."""

    def step(own: Any, optimizer: Any, batch: Any, i: int) -> None:
        if isinstance(batch, Minibatch):
            microbatches = batch
        else:
            microbatches = [batch]
        for tokens in microbatches:
            own.manual_backward(own.mean_loss(tokens))
            act(own)
        optimizer.step()

    return lambda: Manual(act=step)


def halve_gradients(own: Any) -> None:
    for parameter in own.parameters():
        parameter.grad = parameter.grad * 0.5


def edit_through_data(own: Any) -> None:
    """The edit that leaves no trace in version counters."""
    if (own.global_step, own.global_rank) == (1, 1):
        own.net.head.weight.data.to_local().mul_(2)


def run_block(own: Any) -> None:
    with torch.no_grad():
        own.net.blocks[0](torch.ones(3, WIDTH))


def clip(own: Any) -> None:
    nn.utils.clip_grad_norm_(own.parameters(), 0.01)


def log_one(own: Any) -> None:
    own.log("one", 1.0, sync_dist=True, batch_size=1)


def scale_head(own: Any) -> None:
    own.net.head.weight.grad.mul_(0.5)


def look_at_head(own: Any) -> None:
    print(own.net.head.weight.grad.norm())


def divide(own: Any) -> None:
    own.set_gradient_divide_factor(3.0)


def wrap_head(own: Any) -> None:
    if not isinstance(own.net.head, FullyShardedDataParallel):
        device_id = torch.device("cpu")
        own.net.head = FullyShardedDataParallel(own.net.head, device_id=device_id)


def hooked(**hooks: Any) -> Callable[[], Any]:
    return lambda: doing(Sgd("items"), **hooks)


def holding(layer: nn.Module) -> Callable[[], Any]:
    def make() -> Any:
        module = TokenModule()
        module.layer = layer
        return module

    return make


def items() -> TokenModule:
    return TokenModule("items")


def unfreezing() -> Any:
    return before_step(Sgd(frozen=True), lambda own, _: own.net.requires_grad_(True))


def returning(change: Callable[[Any, Tensor], Any]) -> Callable[[], Any]:
    return lambda: Returns(change)


def counting(wrong: Any) -> Callable[[], Any]:
    """A number of items, wrong in the last microbatch of rank 0."""
    given = {"num_items": wrong}
    return returning(lambda output, batch: output | given if batch.shape[1] == 3 else output)


PLAIN = [token_batches([5, 9, 4, 7], seed=rank) for rank in range(2)]
SHARE = Minibatch(token_batches([5]))
ONE = [[SHARE]] * 2
TWO = [[SHARE, SHARE]] * 2
UNEVEN = [[Minibatch(PLAIN[0][: 1 + rank])] for rank in range(2)]
PLANS = [[Minibatch(token_batches([5]), plan=f"seed {rank}")] for rank in range(2)]
KINDS = [token_batches([5]), [SHARE]]
STEPS = [[SHARE] * 2, [SHARE] * 3]
ITEMS = [[Minibatch(token_batches([5, 3]))], [Minibatch(token_batches([6, 7]))]]
WEIGHTED = [[Minibatch(token_batches([5, 4]), weights=[1.0, 3.0])]] * 2
ONE_EMPTY = [[Minibatch([b] * (rank == 0 or i != 1)) for i, b in enumerate(PLAIN[rank])] for rank in range(2)]
DEALT = [DataLoader(Shares(), batch_size=None)] * 2
ENDS = [unsized(own) for own in STEPS]
ONE_UNIT = {"auto_wrap_policy": set()}
CHANGED = "'net.head.weight' changed after"
COUNT = r'rank 0 .*"num_items" must be finite and at least 0'
COUNTS = r'ValueError: communication=.*has \[1, 2\] \(by rank\).*ODCStrategy\(communication="on_demand"\)'
LATE = r"StaleShardError: The model ran \(unit.*`on_before_optimizer_step`.*in one step \(LBFGS\)"
UNITS = r"at least two units.*=\{nn\.Embedding, nn\.LayerNorm, nn\.Linear\}"
FSDP1 = r"TypeError: net.head is wrapped in FullyShardedDataParallel.*fully_shard\(self.block\)"
#: How a module is made, batches or a loader by rank, options, and what all ranks are told.
REFUSED: dict[str, tuple[Callable[[], Any], Any, dict[str, Any], str]] = {
    # What is done with gradients and parameters:
    "clips": (by_hand(clip), PLAIN, {}, r"self\.clip_gradients\(optimizer, \.\.\.\)"),
    "replaces": (by_hand(halve_gradients), PLAIN, {}, "settle_gradients"),
    "logs": (by_hand(log_one), UNEVEN, {}, r"Rank . is at .*'a reduction over ranks, such as self\.log"),
    "scales": (hooked(on_after_backward=scale_head), PLAIN, {}, "on_before_optimizer_step"),
    "looks": (hooked(on_after_backward=look_at_head), PLAIN, {}, "'net.head.weight' is not complete yet"),
    "unfreezes": (unfreezing, PLAIN, {}, "before, in `on_train_batch_start`"),
    "divides": (hooked(on_train_start=divide), PLAIN, {}, "set_gradient_divide_factor"),
    "writes": (hooked(on_train_batch_start=edit_through_data), PLAIN, {}, CHANGED),
    "writes unread": (hooked(on_train_batch_start=edit_through_data), ONE_EMPTY, {}, CHANGED),
    "runs in between": (hooked(on_before_optimizer_step=run_block), TWO, {}, LATE),
    "steps twice": (hooked(configure_optimizers=lambda own: Twice(own.parameters(), lr=0.1)), TWO, {}, LATE),
    "penalty": (lambda: Does(penalty_of_blocks, STEP), WEIGHTED, {}, r"'net.blocks.2.down.*alpha=2 \* 0.01"),
    # What a step returns:
    "mixes": (MixesCounts, PLAIN, {"accumulate_grad_batches": 2}, "every call of `training_step`"),
    "a number": (returning(lambda output, _: output["loss"].item()), ONE, {}, "TypeError.*returned float"),
    "a dict": (returning(lambda output, _: {"losses": output["loss"]}), ONE, {}, "TypeError.*returned dict"),
    "count": (counting(-1), ITEMS, {}, 'ValueError.*"num_items" must be a finite number of at'),
    "count of numpy": (counting(np.float32("inf")), ITEMS, {}, '"num_items" must be a finite number of at'),
    "count in words": (counting("3"), ITEMS, {}, '"num_items" must be a finite number of at'),
    "count on a device": (counting(torch.tensor(-200.0)), ITEMS, {}, COUNT),
    "count, collectively": (counting(torch.tensor(float("nan"))), ITEMS, COLLECTIVE, COUNT),
    # Models:
    "one unit": (Manual, PLAIN, ONE_UNIT, UNITS),
    "one unit, collectively": (Manual, PLAIN, {**ONE_UNIT, **COLLECTIVE}, "at least two units"),
    "layer waits": (holding(nn.SyncBatchNorm(3)), PLAIN, {}, "'layer' is a SyncBatchNorm: it waits for all"),
    "layers wait": (TokenModule, PLAIN, {"sync_batchnorm": True}, r"sync_batchnorm=True\): it waits for all"),
    "layer has sparse gradients": (
        holding(nn.Embedding(3, 2, sparse=True)),
        PLAIN,
        {},
        "'layer' has sparse=True",
    ),
    "layer scales": (holding(nn.Embedding(3, 2, max_norm=1)), PLAIN, {}, "'layer' has max_norm=1: it scales"),
    "gradients have a hook": (
        hooked(configure_model=lambda own: own.net.head.weight.register_hook(torch.clone)),
        PLAIN,
        {},
        "'net.head.weight' has a hook of `register_hook`, and gradients of shards do not pass it",
    ),
    "gradients of shards have a hook": (
        hooked(on_train_start=lambda own: own.net.head.weight.register_hook(torch.clone)),
        PLAIN,
        {},
        "'net.head.weight' has a hook of `register_hook`, and gradients of shards do not pass it",
    ),
    "FSDP1": (hooked(configure_model=wrap_head), ONE, {}, FSDP1),
    # Ranks that differ:
    "plans": (items, PLANS, {}, r"plan from rank 0: \['seed 1'\] against \['seed 0'\]"),
    "kinds": (TokenModule, KINDS, {}, "rank 0 has plain batches with a mean loss and rank 1 has"),
    "steps": (items, STEPS, COLLECTIVE, r"have \[2, 3\] training batches per epoch \(by rank\)\."),
    "rank 0 ends": (items, ENDS, COLLECTIVE, "Rank 0 has no more batches in this epoch, rank 1 has"),
    "rank 1 ends": (items, ENDS[::-1], COLLECTIVE, "Rank 1 has no more batches in this epoch, rank 0 has"),
    "uneven, collectively": (items, UNEVEN, COLLECTIVE, COUNTS),
    "dealt": (items, DEALT, {"use_distributed_sampler": True}, r"Write Trainer\(use_distributed_sampler=F"),
}


@on_ranks(2)
@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_go_on_is_told_to_every_rank_with_the_line_to_write(rank, name):
    make, data, options, says = REFUSED[name]
    texts = of_all_ranks(failure(make(), data[rank], **options))
    for text in texts:
        assert re.search(f"(?s){says}", text), [t[-700:] for t in texts]


@on_ranks(2)
def test_models_that_differ_are_named(rank):
    text = failure(TokenModule("items", vocab=11 + rank), ONE[rank])
    assert re.search(r"(?s)different models. The first.*\[11, 7\].*net.embed.weight: shape \[12, 7\]", text)


class Advised(TokenModule):
    """Writes what the messages say."""

    def __init__(self) -> None:
        super().__init__()
        self.histograms: list[int] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        if self._is_sharded:
            return loss
        return loss + penalty(self)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for p in self.parameters():
            if self._is_sharded and p.grad is not None:
                p.grad.add_(p.detach(), alpha=2 * 0.01)

    def on_train_batch_end(self, *_: Any) -> None:
        if self._is_sharded:
            self.histograms = [p.full_tensor().detach().numpy().size for p in self.parameters()]

    @property
    def _is_sharded(self) -> bool:
        return isinstance(self, FSDPModule)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.5)


@on_ranks(2)
def test_what_these_messages_say_is_right(rank):
    module = Advised()
    t = fit(module, token_batches([6, 6]))
    assert module.histograms == [p.numel() for p in module.parameters()]
    state = t.strategy.lightning_module_state_dict()
    if rank > 0:
        assert state == {}
        return
    alone = Advised()  # whole, on one device
    alone.load_state_dict(state)
    assert alone.net(token_batches([6])[0]).shape == (1, 6, 11)
    # Gradients of two equal ranks, whose mean is exact, and a penalty added last.
    expected = one_process(Advised(), [[batch] for batch in token_batches([6, 6])])
    assert_same(full_parameters(alone), expected)


def test_pytorch_lightnings_trainer_explains_itself():
    other = pytest.importorskip("pytorch_lightning")
    for name in ("odc", "odc_plain"):
        with pytest.raises(TypeError, match=rf'(?s)"{name}".*import LightningModule, Trainer\ninstead'):
            other.Trainer(strategy=name, accelerator="cpu", devices=1)
    with pytest.raises(Exception, match=r"for lightning\.pytorch\.Trainer"):
        other.Trainer(strategy=ODCStrategy(), accelerator="cpu", devices=1)
