"""What engines have in common whose ranks share windows of memory: they meet by the protocol, and take work over."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from lightning_odc.engine.base import Engine
from lightning_odc.protocol import stealing
from lightning_odc.protocol.proof import open_proven
from lightning_odc.protocol.protocol import Protocol
from lightning_odc.protocol.sample_group import Claims, SampleGroup
from lightning_odc.protocol.stealing import Costs
from lightning_odc.protocol.transports.base import Rendezvous, SumDtype, Transport, UnitSpec
from lightning_odc.protocol.unit_window import Traffic
from lightning_odc.protocol.waiting import HangReport


class OverWindows(Engine):
    """An engine of ranks that share windows, see `Protocol`. What lies in them is for its subclasses to say."""

    def __init__(
        self,
        make_transport: Callable[[], Transport],  # a fresh, unopened one
        rendezvous: Rendezvous,  # used at `attach` only
        *,
        timeout: float,  # seconds after which any wait gives up
        deterministic: bool = False,  # sum in rank order; one accumulator per source rank
        accumulator_dtype: SumDtype = None,
        hang_report: HangReport | None = None,
        sample_group: SampleGroup | None = None,  # with tensor parallelism
        agree: Rendezvous | None = None,  # of all ranks that must come to one answer, if they are more
        make_protocol: Callable[..., Protocol] = Protocol,
    ) -> None:
        super().__init__()
        self._protocol_options: dict[str, Any] = {
            "timeout": timeout,
            "deterministic": deterministic,
            "hang_report": hang_report,
            "signals": self.signals,
            "tracers": self.tracers,
        }
        self._sample_group = sample_group
        self._make_transport = make_transport
        self.make_protocol = make_protocol
        self._rendezvous = rendezvous
        self._agree = agree or rendezvous
        self._accumulator_dtype = accumulator_dtype
        self._protocol: Protocol | None = None

    @property
    def protocol(self) -> Protocol:
        assert self._protocol is not None, "the engine is not attached"
        return self._protocol

    def _open(self, specs: Sequence[UnitSpec]) -> Protocol:
        """Make windows and prove them. All ranks together."""
        protocol = self.make_protocol(self._make_transport(), specs, **self._protocol_options)
        open_proven(protocol, self._agree)
        if self._protocol is not None:  # parameters were unfrozen
            protocol.go_on_from(self._protocol)
        self._protocol = protocol
        self.world_size = protocol.nodes * protocol.transport.world_size
        return protocol

    def close(self) -> None:
        super().close()
        if self._protocol is not None:
            self._protocol.close()

    def begin_microbatch(self, index: int) -> None:
        self.protocol.begin_microbatch(index)

    @property
    def stolen(self) -> int:
        """Items of other ranks that this rank has taken so far."""
        return self.protocol.stolen

    def claims(self, place: int, costs: Costs, *, trains: bool = False) -> Claims:
        return stealing.claims(self.protocol, costs, trains, self._sample_group if trains else None)

    def announce_collective(self, kind: str) -> None:
        self.exchange(kind, None)

    def exchange(self, kind: str, item: Any) -> list[Any]:
        return self.protocol.meet(kind, item)

    def fail(self, message: str) -> None:
        super().fail(message)
        if self._protocol is not None:
            self._protocol.fail(message)

    def peer_trouble(self) -> str:
        if self._protocol is None:
            return ""
        return self._protocol.peers.trouble()

    @property
    def waits(self) -> dict[str, float]:
        return {str(cause): seconds for cause, seconds in self.protocol.waiter.seconds.items()}

    @property
    def traffic(self) -> Traffic:
        return replace(self.protocol.traffic)

    @property
    def window_bytes(self) -> int:
        return self.protocol.spec.total_bytes
