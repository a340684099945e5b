"""The ranks of a group that computes one sample together, each a part of every layer, or a part of the sample.

They run the same microbatches at the same time.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from lightning_odc.errors import DisagreementError

Claims = Iterator[tuple[int, int]]
"""Place and number of what a rank is to do, in order; see `lightning_odc.protocol.stealing`."""

#: The most bytes of what ranks of a group tell each other: a digest, or two numbers.
_MOST_BYTES = 256
#: The time that a rank which ran out of memory waits for the others to do so, too.
_PATIENCE = timedelta(seconds=60)
_SAME_BATCHES = (
    "Give all ranks of a group the same batches, without random transforms. Outside of the Trainer, shard the data by "
    '`mesh["data_parallel"].get_local_rank()`, not by the rank.'
)


class SampleGroup:
    """The group of this rank, and what its ranks tell each other beside the layers that they compute together.

    All ranks make it together, of a mesh of all of them whose rows are the groups.
    """

    def __init__(self, mesh: DeviceMesh, timeout: timedelta, divide_layers: bool = True) -> None:
        self.divide_layers = divide_layers  # else samples
        # Of its own: a rank that is still inside of a layer must not take this for a part of that layer.
        self._group, _ = dist.new_subgroups_by_enumeration(mesh.mesh.tolist(), timeout, "gloo")
        self.ranks = dist.get_process_group_ranks(self._group)
        self._is_first = mesh.get_local_rank(1) == 0
        self.name = self._group.group_name

    def close(self) -> None:
        """Release the group. All of its ranks together."""
        self.tell("end of the run", None)
        dist.destroy_process_group(self._group)

    def tell(self, kind: str, item: Any, within: timedelta | None = None) -> list[Any]:
        """The short item of every rank of the group. Refused if the others tell something else.

        Raises:
            DisagreementError: The ranks of the group are at different places.
        """
        text = json.dumps([kind, item]).encode()
        assert len(text) <= _MOST_BYTES, kind
        own = torch.tensor(list(text.ljust(_MOST_BYTES)), dtype=torch.uint8)
        by_rank = [torch.empty_like(own) for _ in self.ranks]
        try:
            work = dist.all_gather(by_rank, own, group=self._group, async_op=within is not None)
            if work is not None:
                work.wait(within)
        except RuntimeError as error:
            error.add_note(f"This rank waited for the ranks {self.ranks}, its group, to come to: {kind}.")
            raise
        heard = [json.loads(bytes(other.tolist())) for other in by_rank]
        kinds, items = zip(*heard, strict=True)
        if len(set(kinds)) > 1:
            places = [f"rank {rank}: {other}" for rank, other in zip(self.ranks, kinds, strict=True)]
            raise DisagreementError(
                f"The ranks {self.ranks} are one group, and are at different places ({', '.join(places)})."
            )
        return list(items)

    def check_same(self, what: str, item: Any, advice: str = _SAME_BATCHES) -> None:
        """Refuse what is another one on another rank of the group."""
        by_rank = self.tell(what, item)
        if any(other != by_rank[0] for other in by_rank):
            different = ", ".join(str(other)[:40] for other in by_rank)
            raise DisagreementError(
                f"The ranks {self.ranks} are one group, and have different {what}: {different}. {advice}"
            )

    def follow(self, claims: Claims) -> Claims:
        """The claims of the first rank of the group, on all of its ranks."""
        while True:
            own = next(claims, None) if self._is_first else None
            claim = self.tell("next microbatch", own)[0]
            if claim is None:
                return
            yield claim[0], claim[1]

    def all_without_loss(self, index: int) -> None:
        """Refuse a loss of ``None`` that others of the group do not have: they wait in the backward pass."""
        try:
            self.tell("training_step returned None", index, within=_PATIENCE)
        except RuntimeError as error:
            raise DisagreementError(
                f"training_step returned None for microbatch {index} on this rank, and not on all of its group "
                f"{self.ranks}. Leave out a microbatch on all of them, or on none."
            ) from error

    def all_out_of_memory(self, error: Exception, where: Any) -> None:
        """Return if the whole group ran out of memory there; else raise: others wait inside of the microbatch."""
        try:
            by_rank: list[Any] = self.tell("out of memory", where, within=_PATIENCE)
        except DisagreementError as other:
            raise other from error
        except RuntimeError:
            by_rank = [where, None]
        if any(other != by_rank[0] for other in by_rank):
            error.add_note(
                f"Of the group {self.ranks}, not all ran out of memory here. The others wait in the middle of the "
                "microbatch, so it cannot run again in parts."
            )
            raise error from None
