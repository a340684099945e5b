"""``ODCStrategy(balance=...)`` turns a plain ``DataLoader`` into balanced minibatches."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import FSDPStrategy
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, Sampler, SequentialSampler, WeightedRandomSampler

from lightning_odc import BalancedDataLoader, Minibatch, ODCStrategy
from lightning_odc.data.convert import only
from lightning_odc.run.session import choose_policy
from tests.support.fits import assert_same, failure, fit, one_process
from tests.support.models import Net, full_parameters, token_batches
from tests.support.modules import ListDataset, TokenModule, Unsized, loader, said, trainer, warned
from tests.support.ranks import of_all_ranks, on_ranks
from tests.support.tiers import fast

SAMPLES = [torch.randint(11, (size,), generator=torch.Generator().manual_seed(size)) for size in range(2, 26)]


def pad(samples: list[Tensor]) -> Tensor:
    return nn.utils.rnn.pad_sequence(samples, batch_first=True, padding_value=-1)


class Padded(pl.LightningModule):
    """A mean loss over the predicted tokens of a padded batch, as anybody would write it."""

    def __init__(self, counted: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = Net()
        self.counted = counted
        self.sizes: list[list[int]] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        self.sizes.append((batch >= 0).sum(1).tolist())
        logits = self.net(batch.clamp(min=0))[:, :-1].flatten(0, 1)
        targets = batch[:, 1:].flatten()
        loss = nn.functional.cross_entropy(logits, targets, ignore_index=-1, reduction="sum")
        count = (targets >= 0).sum()
        if self.counted:
            return {"loss": loss, "num_items": count}
        return loss / count

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def plain(**options: Any) -> DataLoader[Tensor]:
    return DataLoader(**{"dataset": SAMPLES, "batch_size": 4, "collate_fn": pad, **options})


def reference(world: int) -> dict[str, Tensor]:
    """Plain torch on minibatches of four samples per rank, in the order of the data set."""
    starts = range(0, len(SAMPLES), 4 * world)
    padded = Padded(counted=True)
    return one_process(padded, [[s[None] for s in SAMPLES[i : i + 4 * world]] for i in starts])


#: The policy, whether a step counts its items, and the communication.
BALANCED = [
    ("lb_mini", False, "on_demand"),
    ("lb_micro", True, "on_demand"),
    ("local_sort", False, "on_demand"),
    ("steal", True, "on_demand"),
    ("lb_micro", False, "collective"),
    ("local_sort", True, "collective"),
]


@on_ranks(2)
@pytest.mark.parametrize(("policy", "counted", "communication"), BALANCED)
def test_one_line_balances_and_the_gradient_is_exact(rank, policy, counted, communication):
    module = Padded(counted)
    options = {"balance": policy, "weighting": "next_token", "communication": communication}
    t = fit(module, plain(), **options)  # no distributed sampler: Lightning's would shuffle
    assert_same(full_parameters(module), reference(2))
    assert t.global_step == 3
    first, second = of_all_ranks(module.sizes)
    sizes = sorted(size for batch in first + second for size in batch)
    assert sizes == sorted(len(sample) for sample in SAMPLES), "every sample exactly once"
    if policy not in ("lb_mini", "steal"):
        assert len(first) == len(second)


@pytest.mark.parametrize(("name", "balance"), [("odc", "auto"), ("odc_plain", None)])
def test_the_registered_names(name, balance):
    strategy = pl.Trainer(strategy=name, accelerator="cpu", devices=1, logger=False).strategy
    assert isinstance(strategy, FSDPStrategy)
    found = type(strategy), strategy.options.balance, strategy.communication
    assert found == (ODCStrategy, balance, "auto")
    assert ODCStrategy().options.balance == "auto"


@on_ranks(2)
def test_only_training_data_is_balanced_and_an_explicit_loader_is_left_alone(rank):
    module = Padded()
    options = {"balance": "lb_mini", "use_distributed_sampler": True}
    module.validation_step = lambda batch, batch_idx: None
    t = fit(module, plain(shuffle=True), 2, plain(), **options)
    assert isinstance(t.train_dataloader, BalancedDataLoader)
    assert type(t.val_dataloaders) is DataLoader
    own = BalancedDataLoader(SAMPLES, minibatch_size=4, balance="lb_mini", collate_fn=pad)
    u = fit(Padded(), own, **options)
    assert u.train_dataloader is own
    assert t.num_training_batches == u.global_step == 3


#: The communication, whether sums have a fixed order, ranks, whether samples are read by index, and the policy.
CHOSEN = [
    ("on_demand", False, 2, True, "steal"),
    ("on_demand", True, 2, True, "lb_mini"),
    ("on_demand", False, 1, True, "lb_mini"),
    ("on_demand", False, 2, False, "lb_mini"),
    ("collective", False, 2, True, "lb_micro"),
]


@pytest.mark.parametrize(("communication", "deterministic", "world_size", "indexed", "policy"), CHOSEN)
def test_auto_chooses_what_can_run(communication, deterministic, world_size, indexed, policy):
    assert choose_policy(communication, world_size, "cpu", can_read=indexed, is_fixed=deterministic) == policy
    found = choose_policy(communication, world_size, "cuda", can_read=indexed, is_fixed=deterministic)
    assert found == policy.replace("steal", "lb_mini")
    ODCStrategy(balance="auto", communication=communication, deterministic=deterministic)


class ReadOnce(Unsized):
    def __init__(self) -> None:
        super().__init__([])
        self.iterator = iter(SAMPLES)

    def __iter__(self) -> Iterator[Tensor]:
        return self.iterator


FOLDED = {"accumulate_grad_batches": 2}
STREAM = lambda: plain(dataset=Unsized(SAMPLES), batch_size=2)  # noqa: E731
#: The loader, options, and the policy that is chosen.
AUTO: dict[str, tuple[Any, dict[str, Any], str]] = {
    "stream": (STREAM, {"balance": "auto", **FOLDED}, "lb_mini"),
    "by name": (STREAM, {"balance": "lb_micro", **FOLDED}, "lb_micro"),
    "map": (plain, {"balance": "auto", "cost": "tokens"}, "steal"),
}


@on_ranks(2)
@pytest.mark.parametrize("name", AUTO)
def test_auto_balances_what_it_can(rank, name):
    make, options, policy = AUTO[name]
    module = Padded(counted=True)
    t = fit(module, make(), **options)
    assert t.train_dataloader.recipe.policy == policy
    assert t.global_step == 3
    assert_same(full_parameters(module), reference(2))


class Unpacks(Padded):
    """Trains on the batches of one loader in a dict or list."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        assert type(batch) in (dict, list, tuple)
        if isinstance(batch, dict):
            [batch] = batch.values()
        else:
            [batch] = batch
        return super().training_step(batch, batch_idx)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        assert isinstance(batch, Minibatch)


def own_shares(rank: int) -> Any:
    """Minibatches that the user has made, of three steps."""
    groups = [SAMPLES[start + rank * 4 : start + rank * 4 + 4] for start in (0, 8, 16)]
    return loader([Minibatch([pad(group[:3]), pad(group[3:])], plan="mine") for group in groups])


def made_by_hand(rank: int) -> Any:
    return BalancedDataLoader(SAMPLES, minibatch_size=4, collate_fn=pad)


#: The loaders by rank, and whether each step counts its items.
ALONE: dict[str, tuple[Any, bool]] = {
    "dict": (lambda rank: {"a": plain()}, False),
    "tuple": (lambda rank: (plain(),), False),
    "list": (lambda rank: CombinedLoader([plain()], "min_size"), False),
    "by hand": (lambda rank: {"a": made_by_hand(rank)}, False),
    "stream": (lambda rank: {"a": plain(dataset=Unsized(SAMPLES))}, False),
    "stream in a list": (lambda rank: CombinedLoader([plain(dataset=Unsized(SAMPLES))], "min_size"), False),
    "minibatches": (lambda rank: {"a": own_shares(rank)}, True),
}


@on_ranks(2)
@pytest.mark.parametrize("name", fast(ALONE, "dict", "list", "minibatches"))
def test_one_loader_in_a_dict_or_list_is_balanced_and_the_step_gets_its_batches_so(rank, name):
    make, counted = ALONE[name]
    module = Unpacks(counted)
    t = fit(module, make(rank), balance="auto", cost="tokens")
    assert_same(full_parameters(module), reference(2))
    assert t.global_step == 3
    loaders = t.train_dataloader
    kinds = {"by hand": "dict", "minibatches": "dict", "stream": "dict", "stream in a list": "list"}
    expected = kinds.get(name, name)
    assert type(loaders).__name__ == expected
    if name != "minibatches":
        balanced = only(loaders)
        assert isinstance(balanced, BalancedDataLoader)
        assert not balanced.recipe.is_whole, "the loss was tried with batches in a dict or list, too"


def ids(size: int, seed: int) -> Tensor:
    return torch.randint(1, 11, (size,), generator=torch.Generator().manual_seed(seed))


def tables(samples: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Sequences padded, and images stacked."""
    made = {}
    for name in samples[0]:
        rows = [torch.as_tensor(sample[name]) for sample in samples]
        made[name] = nn.utils.rnn.pad_sequence(rows, batch_first=True)
    return made


def spelled(samples: list[str]) -> dict[str, Tensor]:
    """As a tokenizer makes a batch of texts."""
    return tables([{"ids": [1 + ord(letter) % 10 for letter in sample]} for sample in samples])


class Scores(pl.LightningModule):
    """A mean over samples, of all tokens that they have under any name."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Embedding(11, 4, padding_idx=0), nn.Linear(4, 1)])
        self.rows: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        scores = 0.0
        for table in batch.values():
            hidden = self.layers[0](table.flatten(1).long()).sum(1) / 9
            scores = scores + self.layers[1](hidden.tanh()).squeeze(1)
        self.rows.append(len(scores))
        return scores.square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


PLACES = range(2, 26)
#: Samples that do not say how long they are, what makes batches of them, and the longest one as the batch shows it.
SHOWN: dict[str, tuple[list[Any], Any, int]] = {
    "a pair": ([{"chosen": ids(i, i), "rejected": ids(2 + i // 3, 2 * i)} for i in PLACES], tables, 35),
    "an image": ([{"image": ids(4, i).view(2, 2), "words": ids(i, 2 * i)} for i in PLACES], tables, 25),
    "a list": ([{"words": ids(i, i).tolist()} for i in PLACES], tables, 25),
    "texts": (["abcdefghijklmnopqrstuvwxyz"[:i] for i in PLACES], spelled, 25),
}


@on_ranks(2)
@pytest.mark.parametrize("name", SHOWN)
@pytest.mark.parametrize("streamed", fast([False, True], False))
def test_what_a_batch_shows_is_a_length_by_which_batches_are_balanced(rank, name, streamed):
    samples, collate_fn, longest = SHOWN[name]
    data: Any = samples
    if streamed:
        data = Unsized(samples)
    module = Scores().double()
    with said() as text, warned() as caught:
        t = fit(module, DataLoader(data, 4, collate_fn=collate_fn), balance="auto", cost="tokens")
    words = "\n".join([text.getvalue(), *caught])
    assert isinstance(t.train_dataloader, BalancedDataLoader), words
    assert not t.train_dataloader.recipe.is_whole, words
    if not streamed:
        assert t.train_dataloader.lengths.values.max() == longest
        assert t.global_step == 3
        ran: list[Any] = [
            None,
            None,
        ]  # how many microbatches a rank ran: a rank may have taken some of the other one's
        dist.all_gather_object(ran, len(module.rows))
        assert sum(ran) > 2 * 3, "batches are cut"
    starts = range(0, len(samples), 8)
    steps = [[collate_fn([sample]) for sample in samples[start : start + 8]] for start in starts]
    assert_same(full_parameters(module), one_process(Scores().double(), steps))


class StatefulBatches(BatchSampler):
    """As torchdata has one: with an iterator of its own."""

    def __iter__(self) -> Iterator[list[int]]:
        yield from super().__iter__()


class Stateful(DataLoader[Tensor]):
    """As torchdata's loader: it keeps its place, and makes its batches by a batch sampler of its own class."""

    def __init__(self, dataset: Any, batch_size: Any = 1, shuffle: Any = None, **options: Any) -> None:
        sampler = options.pop("sampler", None) or SequentialSampler(dataset)
        options["batch_sampler"] = options.get("batch_sampler") or StatefulBatches(
            sampler, batch_size or 1, False
        )
        super().__init__(dataset, **options)

    def __iter__(self) -> Any:
        return super().__iter__()

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Any) -> None:
        pass


for of_torchdata in (StatefulBatches, Stateful, Stateful.__iter__):
    of_torchdata.__module__ = "torchdata.stateful_dataloader"


@on_ranks(2)
@pytest.mark.parametrize("own", [False, True])
def test_a_loader_of_torchdata_that_keeps_its_place_is_balanced(rank, own):
    """Lightning makes another one of it, with its own sampler in the batch sampler."""
    module = Padded()
    with said() as text:
        stateful = Stateful(SAMPLES, batch_size=4, collate_fn=pad)
        t = fit(module, stateful, balance="auto", cost="tokens", use_distributed_sampler=own)
    assert isinstance(t.train_dataloader, BalancedDataLoader), text.getvalue()
    assert t.global_step == 3
    assert t.train_dataloader.options.minibatch_size == 4
    if not own:  # else shuffled
        assert_same(full_parameters(module), reference(2))


class Returns(Padded):
    """Returns what a callback computes with."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        first = batch[:, 0].float()
        more = {
            "preds": first - 5,
            "table": batch,
            "number": first.mean(),
            "text": "a",
            "pair": (first, first),
        }
        return {"loss": super().training_step(batch, batch_idx), **more}


class Computes(pl.Callback):
    """Computes with what the step returned, as under any strategy."""

    def __init__(self) -> None:
        self.seen: list[dict[str, Any]] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        assert 0 <= (outputs["preds"] > 0).float().mean() <= 1
        self.seen.append({**outputs, "microbatches": len(batch)})


@on_ranks(2)
def test_callbacks_get_the_rows_of_all_microbatches_as_one_tensor(rank):
    callback = Computes()
    module = Returns()
    fit(module, plain(), cost="tokens", balance="lb_mini", callbacks=[callback])
    begin = 0
    assert max(outputs["microbatches"] for outputs in callback.seen) > 1
    for outputs in callback.seen:
        count = outputs["microbatches"]
        sizes = module.sizes[begin : begin + count]
        begin += count
        assert outputs["preds"].shape == (sum(map(len, sizes)),)
        assert not outputs["preds"].requires_grad
        assert outputs["number"].shape == (count,)
        assert outputs["text"] == ["a"] * count
        assert len(outputs["pair"]) == count
        if len({max(own) for own in sizes}) > 1:  # padded to different lengths
            assert [len(table) for table in outputs["table"]] == [len(own) for own in sizes]
            assert isinstance(outputs["table"], list)
    both = torch.cat(of_all_ranks(torch.cat([outputs["preds"] for outputs in callback.seen])))
    assert both.sort().values.tolist() == sorted(float(sample[0]) - 5 for sample in SAMPLES)


class OwnLoader:
    """Not of torch's class."""

    def __len__(self) -> int:
        return 2

    def __iter__(self) -> Iterator[Tensor]:
        return iter([pad(SAMPLES[:4])] * 2)


class NoMinibatch(Padded):
    """Trains on plain batches, on samples that do not tell how long they are, and on those of two loaders."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        assert not isinstance(batch, Minibatch)
        if isinstance(batch, dict):
            if batch["a"].dim() == 2:
                batch = batch["a"]
            else:
                batch = torch.zeros(1, 2, dtype=torch.long)
        return super().training_step(batch, batch_idx)


class ByHand(NoMinibatch):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        self.optimizers().zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        self.optimizers().step()


WEIGHTED = WeightedRandomSampler([1.0] * 8, 8)
EQUAL = [SAMPLES[0]] * 8
#: Samples that do not tell how long they are.
OPAQUE = [{"a": torch.tensor(float(index)), "b": "a text"} for index in range(8)]
IMAGES = [{"a": torch.ones(3, 4, 4), "b": index} for index in range(8)]
IN_FOURS = {"batch_size": 1, "batch_sampler": BatchSampler(range(24), 4, False)}
#: The loader by rank, options, and the reason that is said.
UNBALANCED: dict[str, tuple[Any, dict[str, Any], str]] = {
    "unknown": (lambda rank: DataLoader(OPAQUE, batch_size=2), {}, r"Write\n    ODCStrategy\(length_fn="),
    "images": (lambda rank: DataLoader(IMAGES, batch_size=2), {}, "all samples are equally long"),
    "streamed images": (
        lambda rank: DataLoader(Unsized(IMAGES), batch_size=2),
        {},
        "all samples are equally long",
    ),
    "manual": (lambda rank: plain(), {}, r"receives a Minibatch as a whole.*balance=\"lb_mini\""),
    "parts": (lambda rank: plain(dataset=Unsized(SAMPLES[rank::2])), {}, "the same samples on every rank"),
    "read once": (lambda rank: plain(dataset=ReadOnce()), {}, "that can be read twice"),
    "equal": (lambda rank: plain(dataset=EQUAL), {}, "all samples are equally long"),
    "own order": (lambda rank: plain(sampler=WEIGHTED), {}, "sampler=WeightedRandomSampler"),
    "own batches": (lambda rank: plain(**IN_FOURS), {}, "chooses which samples go together"),
    "own loader": (lambda rank: OwnLoader(), {}, "only a torch DataLoader can be balanced"),
    "two": (lambda rank: {"a": plain(), "b": plain()}, {"cost": "tokens"}, "one plan cannot cover several"),
    "plain": (lambda rank: plain(), {"balance": None}, ""),
}


@on_ranks(2)
@pytest.mark.parametrize("name", UNBALANCED)
def test_auto_leaves_alone_what_it_cannot_balance_and_says_so_once(rank, name):
    make, options, reason = UNBALANCED[name]
    if name == "manual":
        module = ByHand()
    else:
        module = NoMinibatch()
    with said() as text, warned() as caught:
        t = fit(module, make(rank), **{"balance": "auto", **options})
    words = "\n".join([text.getvalue(), *caught])
    assert t.global_step > 0
    is_warned = rank == 0 and name != "plain"
    assert words.count("leaves the training data as it is") == is_warned, words
    if rank == 0:
        assert re.search(reason, words), words
    assert "Expected" not in words


class OwnBatches(Sampler[list[int]]):
    """A batch sampler that nobody can rebuild."""

    def __init__(self, cleverness: int) -> None:
        self.cleverness = cleverness

    def __len__(self) -> int:
        return 6

    def __iter__(self) -> Iterator[list[int]]:
        return iter([[4 * i, 4 * i + 1, 4 * i + 2, 4 * i + 3] for i in range(6)])


OWN = {"use_distributed_sampler": False}
WEIGHTED = WeightedRandomSampler([1.0] * 24, 24)
GROUPS = r"chooses which samples go together.*DataLoader\(dataset, batch_size="
STOLEN = 'balance="steal" reads the samples of other ranks by index.*write balance="lb_mini"'
UNKNOWN = r"Write\n    ODCStrategy\(length_fn=lambda sample: 1\)"
#: Options of the loader, those of the strategy, and what is said.
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "too long": ({}, {"max_tokens": 20}, "23 has 25 tokens, more than max_tokens=20.*write max_tokens=25"),
    "few samples": ({"dataset": SAMPLES[:1]}, {}, r"1 sample, fewer than 2 .*Write Trainer\(devices=1\)"),
    "no minibatch": ({"dataset": SAMPLES[:5], "drop_last": True}, {}, "drop_last=True leaves no minibatch"),
    "batch sampler": (
        IN_FOURS,
        {},
        r"each of its samples is a batch.*DataLoader\(batch_sampler=BatchSampler",
    ),
    "no batch size": (
        {"batch_size": None},
        OWN,
        r"each of its samples is a batch already.*shuffle=True\)\.$",
    ),
    "own batch sampler": ({"batch_size": 1, "batch_sampler": OwnBatches(3)}, OWN, rf"{GROUPS}\.\.\., "),
    "sampler": ({"sampler": WEIGHTED}, {}, r"would ignore DataLoader\(sampler=WeightedRandomSampler"),
    "own sampler": ({"sampler": WEIGHTED}, OWN, r"would ignore DataLoader\(sampler=WeightedRandomSampler"),
    "unknown": ({"dataset": [object()] * 8}, {}, UNKNOWN),
    "stolen stream": ({"dataset": ListDataset(SAMPLES)}, {"balance": "steal"}, STOLEN),
}


@on_ranks(2)
@pytest.mark.parametrize("name", CASES)
def test_each_mistake_has_one_clear_error_on_every_rank(rank, name):
    loader, options, message = CASES[name]
    options = {"balance": "lb_mini", "use_distributed_sampler": True, **options}
    data = DataLoader(collate_fn=pad, **{"dataset": SAMPLES, "batch_size": 4, **loader})
    with pytest.raises((ValueError, TypeError), match=f"(?s){message}") as error:
        trainer(2, **options).fit(Padded(), data)
    # Both ranks make the mistake: neither is told that it followed from something else.
    for note in getattr(error.value, "__notes__", []):
        assert "followed" not in note


COLLECTIVE = {"communication": "collective"}
UNEQUAL = 'balance="lb_mini" gives ranks different.*use communication="on_demand", or balance="lb_micro"'
STEAL = {"balance": "steal"}
#: A loader's own options, those of the strategy, and what is said.
EXPLICIT: list[tuple[dict[str, str], dict[str, Any], str]] = [
    ({"balance": "lb_mini"}, COLLECTIVE, UNEQUAL),
    (STEAL, COLLECTIVE, 'balance="steal" gives ranks different numbers'),
    (STEAL, {"deterministic": True}, 'Use balance="lb_mini" with deterministic=True'),
]


@on_ranks(2)
@pytest.mark.parametrize(("own", "options", "message"), EXPLICIT)
def test_an_explicit_loader_that_the_strategy_cannot_run(rank, own, options, message):
    """Refused before training, which would run until ranks have unequal counts, or until one steals."""
    module = Padded()
    with pytest.raises(ValueError, match=f"(?s){message}"):
        fit(module, BalancedDataLoader(SAMPLES, minibatch_size=4, collate_fn=pad, **own), **options)
    assert module.sizes == []


def test_options_without_a_policy_are_said_to_do_nothing():
    with pytest.warns(UserWarning, match=r"\(max_tokens=\.\.\., cost=\.\.\.\) has no effect with bal"):
        ODCStrategy(balance=None, max_tokens=64, cost="tokens")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ODCStrategy(max_tokens=64)
        ODCStrategy(balance=None)


@on_ranks(1)
def test_minibatches_and_unequal_counts_under_a_strategy_that_does_not_know_them(rank):
    own = BalancedDataLoader(SAMPLES, minibatch_size=4, balance="lb_mini", collate_fn=pad)
    for strategy in ("auto", "ddp"):
        message = failure(TokenModule(), [Minibatch(token_batches([5]))], 1, strategy=strategy)
        assert 'trainer = lightning.pytorch.Trainer(strategy="odc", ...)' in message
        assert "NotUnrolledError" in message
        message = failure(Padded(), own, 1, strategy=strategy)
        assert 'trainer = lightning.pytorch.Trainer(strategy="odc", ...)' in message
        assert '"Plain DDP, balanced" of docs/full-gain.md' in message
