"""One rank's share of a minibatch: a sequence of microbatches, and what they hold."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

from lightning_odc.arguments import checked
from lightning_odc.samples.content import named, sizes_of, tensors_of
from lightning_odc.samples.packing import IGNORE_INDEX
from lightning_odc.samples.weighting import LabelCounter

if TYPE_CHECKING:
    from lightning_odc.data.learning import Learning

_TEACH = (
    "A Minibatch holds microbatches and must be unrolled by a strategy that knows it. Write\n"
    "    import lightning_odc\n"
    '    trainer = lightning.pytorch.Trainer(strategy="odc", ...)\n'
    "and your `training_step` receives one microbatch at a time. With another strategy, loop over them by hand, as in "
    '"Plain DDP, balanced" of docs/full-gain.md.'
)
INSIDE = (
    "A Minibatch must be the whole batch, and here it is inside a dict, list or tuple (several loaders at once, or a "
    "loader that wraps it). Let one loader yield it, with all that a microbatch needs inside of its microbatches: "
    'Minibatch([{"a": a0, "b": b0}, {"a": a1, "b": b1}]), not {"a": Minibatch([a0, a1]), "b": Minibatch([b0, b1])}.'
)
_WHOLE = (
    "Callbacks, and hooks such as `on_train_batch_end`, get the whole Minibatch. Write there\n"
    "    for microbatch in batch:\n"
    "        ..."
)


class NotUnrolledError(TypeError):
    """A `Minibatch` came to code that does not unroll it."""


class MicrobatchFacts(NamedTuple):
    """What a loader knows about a microbatch besides its content."""

    # the tokens of its rows, or of the samples in its one row; those of padding are among them
    lengths: list[int]
    # the seed of the random numbers that belong to it, see Note [Random numbers follow the sample]
    seed: tuple[int, ...]
    samples: Rereader | None = None  # the samples, where they can be read again
    # How many samples ``collate_fn`` has made; `None`: as many as planned, as far as is known.
    ran: int | None = None
    tokens: int | None = None  # the sum of the lengths of its samples, without padding

    @property
    def sample_count(self) -> int:
        """How many samples it holds."""
        return len(self.lengths) if self.ran is None else self.ran


class Rereader(NamedTuple):
    """The samples of a microbatch, by which a part of it can be read."""

    indices: list[int]  # those of the samples in the data set
    read: Callable[[list[int]], Task]  # makes a microbatch of some of them, or of any others
    # Indices and lengths of some samples of the data set.
    others: Callable[[], tuple[list[int], list[int]]]


class Task(NamedTuple):
    """A microbatch to run."""

    microbatch: Any  # what `training_step` gets
    weight: float  # its weight in the gradient
    detail: MicrobatchFacts | None  # what its loader knows about it, if it does

    def sizes(self) -> list[int]:
        """The tokens of the samples, or 1 each; empty where it has a single one, or it does not show them."""
        sizes = sizes_of(self.microbatch)
        # Rows may be anything, unless there are as many as samples.
        if self.detail is None or len(sizes) != self.detail.sample_count:
            return []
        if len(sizes) == len(self.detail.lengths):
            return self.detail.lengths
        return sizes


class LoaderFacts:
    """What the loader that made a `Minibatch` knows about it."""

    # No dataclass: Lightning's collection helpers would look for tensors inside.
    def __init__(
        self,
        details: list[MicrobatchFacts],
        by_labels: bool = False,
        counter: LabelCounter | None = None,
        is_sum: bool = False,
    ) -> None:
        self.details = details  # one per microbatch
        self.by_labels = by_labels  # labels, where there are any, count instead of planned weights
        self.counter = counter  # is counted instead, if that was found out
        self.is_sum = is_sum  # losses are sums, which weights do not multiply
        self.number = 0  # of the minibatch, from the beginning of training
        self.learning: Learning | None = None  # learns how long the microbatches took, and how much memory


class StealableWork:
    """What all ranks are planned to do in one minibatch, so that they can help each other."""

    # No dataclass: Lightning's collection helpers would look for tensors inside.
    def __init__(self, place: int, costs: list[list[float]], task: Callable[[int, int], Task]) -> None:
        self.place = place  # of this rank among those that share the work
        self.costs = costs  # by rank, in any unit
        self.task = task  # makes a microbatch of a rank, by its number

    def map(self, function: Callable[[Any], Any]) -> StealableWork:
        """The same, with ``function`` applied to every microbatch that is made."""

        def task(rank: int, number: int) -> Task:
            made = self.task(rank, number)
            return made._replace(microbatch=function(made.microbatch))

        return StealableWork(self.place, self.costs, task)


@checked
@dataclass(init=False, repr=False, eq=False)
class Minibatch:
    """One rank's share of an optimizer step: 0 to k microbatches, each a batch as ``training_step`` expects it.

    Yield one from a data loader per step and per rank. The number of microbatches in them may differ from rank to rank,
    and may be zero. ``ODCStrategy`` moves them to the device and calls ``training_step`` (``validation_step``,
    ``test_step``, ``predict_step``) once per microbatch.

    The gradient of the step is ``sum_m w_m grad L_m / sum_m w_m`` over the microbatches of *all* ranks.

    Args:
        microbatches: The batches, in the order to run them.
        weights: One number per microbatch, for example its samples or tokens; by default each counts 1. A
            ``training_step`` that returns ``{"loss": summed_loss, "num_items": n}`` overrides them with exact counts.
        plan: Any text that is equal on all ranks if they follow the same plan (seed, epoch and step, say). Ranks
            compare it at the end of the step, and an error names those that differ.

    Attributes:
        all_ranks: The plan of all ranks, set by a loader that balances by stealing. A rank that has finished runs
            microbatches of others.
        origin: Further facts about the microbatches, set by a loader.

    Raises:
        ValueError: Numbers of weights and microbatches differ, or a weight is negative or not finite.
    """

    microbatches: list[Any]
    weights: list[float] | None
    plan: str | None
    all_ranks: StealableWork | None
    origin: LoaderFacts | None

    def __init__(
        self,
        microbatches: Iterable[Any],
        weights: Iterable[float | Tensor] | None = None,
        plan: str | None = None,
    ) -> None:
        self.microbatches = list(microbatches)
        self.weights = None if weights is None else [float(weight) for weight in weights]
        self.plan = plan
        self.all_ranks = None
        self.origin = None
        if self.weights is not None and len(self.weights) != len(self.microbatches):
            raise ValueError(
                f"Minibatch(...) got {len(self.microbatches)} microbatches but {len(self.weights)} weights; give one "
                "weight per microbatch: Minibatch([a, b], weights=[3, 5])."
            )
        for index, weight in enumerate(self.weights or ()):
            if not 0 <= weight < float("inf"):
                raise ValueError(
                    f"The weight of microbatch {index} is {weight}; weights must be finite and not negative."
                )

    def __len__(self) -> int:
        return len(self.microbatches)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.microbatches)

    def __getitem__(self, index: Any) -> Any:
        """A microbatch by its number; of a single one, what it holds by any other key."""
        if not isinstance(index, int) and len(self) == 1:
            return self.microbatches[0][index]
        if not isinstance(index, int):
            raise TypeError(f"{self!r} has no single value for {index!r}. {_WHOLE}")
        return self.microbatches[index]

    if not TYPE_CHECKING:  # else no name would be wrong

        def __getattr__(self, name: str) -> Any:
            microbatches = vars(self).get("microbatches", ())  # none while it is copied
            if len(microbatches) == 1 and not name.startswith("_") and hasattr(microbatches[0], name):
                return getattr(microbatches[0], name)
            raise AttributeError(f"A Minibatch has no attribute {name!r}. {_WHOLE}")

    def __repr__(self) -> str:
        return f"Minibatch({len(self)} microbatches, weights={self.weights})"

    def weighted(self) -> Iterator[tuple[Any, float]]:
        """Pairs of microbatch and weight."""
        return zip(self.microbatches, self.weights or [1.0] * len(self), strict=True)

    def tasks(self) -> Iterator[Task]:
        """The microbatches with all that is known about them."""
        details: Iterable[MicrobatchFacts | None] = [None] * len(self)
        if self.origin is not None:
            details = self.origin.details
        for (microbatch, weight), detail in zip(self.weighted(), details, strict=True):
            yield Task(microbatch, weight, detail)

    def map(self, function: Callable[[Any], Any]) -> Minibatch:
        """A new ``Minibatch`` with ``function`` applied to every microbatch."""
        mapped = Minibatch([function(batch) for batch in self.microbatches], self.weights, self.plan)
        mapped.all_ranks = self.all_ranks
        mapped.origin = self.origin
        return mapped

    def pin_memory(self) -> Minibatch:
        """Called by ``DataLoader(pin_memory=True)``."""
        return self.map(lambda batch: apply_to_collection(batch, Tensor, Tensor.pin_memory))

    def to(self, *args: Any, **kwargs: Any) -> Minibatch:
        """Refused: only strategies that do not know a ``Minibatch`` try to move it as a whole.

        Raises:
            NotUnrolledError: always, a ``TypeError`` with the line to write instead.
        """
        raise NotUnrolledError(_TEACH)


# -- what a batch holds -----------------------------------------------------------------------------------


def microbatches_of(batch: Any) -> list[Any]:
    """The microbatches of a whole `Minibatch` (manual optimization passes one), else the batch alone."""
    return list(batch) if isinstance(batch, Minibatch) else [batch]


def token_count(batch: Any) -> int | None:
    """Tokens in a batch: the elements of its ``"input_ids"``, or of its first tensor if that holds integers."""

    def count(microbatch: Any) -> int | None:
        tensor = named(microbatch, "input_ids")
        if tensor is None:
            tensor = _first_tensor(microbatch)
        if tensor is None or tensor.is_floating_point() or tensor.is_complex():
            return None
        return tensor.numel()

    return _sum_over(batch, count)


def real_token_count(batch: Any, facts: MicrobatchFacts | None = None) -> Tensor | int | None:
    """Tokens of a batch without padding; a tensor on its device where it counts them there.

    Unknown where nothing tells which tokens are padding. An ``attention_mask`` tells it, and so do the bounds of a
    packed row, and the lengths of a loader's plan if they explain how many tokens the batch has. With ``labels``
    alone, padding is what stands behind the last label that counts. One row has none.
    """

    def count(microbatch: Any) -> Tensor | int | None:
        cells = token_count(microbatch)
        if cells is None or named(microbatch, "cu_seqlens") is not None:
            return cells
        mask = named(microbatch, "attention_mask")
        if mask is not None and mask.numel() == cells:
            return mask.sum()
        if facts is not None and facts.tokens is not None and sum(facts.lengths) == cells:
            return facts.tokens
        labels = named(microbatch, "labels")
        if labels is not None and labels.dim() == 2 and labels.numel() == cells:
            counts = labels != IGNORE_INDEX
            return (counts.flip(1).cumsum(1) > 0).sum()
        if sample_count(microbatch) == 1:
            return cells
        return None

    return _sum_over(batch, count)


def sample_count(batch: Any) -> int | None:
    """Samples in a batch: those of a packed row, by their bounds, or the first dimension of the first tensor."""

    def count(microbatch: Any) -> int | None:
        for name in ("cu_seqlens", "cu_seq_lens_q"):
            bounds = named(microbatch, name)
            if bounds is not None:
                return max(bounds.numel() - 1, 0)
        tensor = _first_tensor(microbatch)
        if tensor is None or not tensor.dim():
            return None
        return tensor.size(0)

    return _sum_over(batch, count)


def _first_tensor(batch: Any) -> Tensor | None:
    return next((tensor for _, tensor in tensors_of(batch)), None)


def _sum_over(batch: Any, count: Callable[[Any], Any]) -> Any:
    """The count over all microbatches; unknown if one is unknown. Batches may be of any kind, and must never raise."""
    try:
        counts = [count(microbatch) for microbatch in microbatches_of(batch)]
    except Exception:
        return None
    if any(one is None for one in counts):
        return None
    return sum(counts)
