"""What nodes tell each other, through the store by which the ranks of the job have found each other.

Note [News between nodes]
~~~~~~~~~~~~~~~~~~~~~~~~~
The first rank of every node *leads* it. Leaders meet: each sets its own key, counts itself, and reads the keys of all
when all are there. Keys of an earlier meeting are deleted, since who came to this one has read them. Meeting 7 of two
nodes::

    leader of node 0                            leader of node 1
    set 7/0; add 1 to come: 13
    add 0 to come: 13, look again later         set 7/1; add 1 to come: 14
    add 0 to come: 14, so all are there         get 7/0, 7/1; delete 6/1
    get 7/0, 7/1; delete 6/0

Every rank has a thread for that, which also brings the news. A store may stop to answer, and then a request never
comes back. So no request is made in the thread that trains.

- *A process ends, or raises.* Others of its node see that in their windows, and put it under the key ``trouble``, at
  which all ranks look.
- *A host is silent.* The ranks of a node count up its key of life. The leader of the node before it looks whether it
  changes. It may stay the same for a number of looks, not for a time: so no host is blamed while all of them sleep.
- *The store is silent, or has ended.* Every rank sees that for itself.
"""

from __future__ import annotations

import queue
import secrets
import socket
import threading
import time
from bisect import bisect_left
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

from torch.distributed import PrefixStore  # type: ignore[attr-defined]  # documented, but not listed

from lightning_odc.engine.nodes.column import Layout
from lightning_odc.engine.transports.base import Rendezvous
from lightning_odc.errors import PeerFailedError

#: Bytes of one message. A store refuses more than 8 MiB.
MOST_BYTES = 4 * 2**20
_LOOK_EVERY = 0.25
#: Requests per second of all leaders that wait, which a store answers without effort; and half of it of all ranks that
#: look, with three requests each.
_REQUESTS = 10_000
_LONGEST_PAUSE = 2e-3
_PAUSE_FRACTION = 1 / 16  # of the time that was waited already
_FAREWELL = 0.5


class Leaders:
    """The ranks that lead their nodes, as one rank of the job sees them. See Note [News between nodes]."""

    def __init__(
        self,
        layout: Layout,
        rendezvous: Rendezvous,
        store: Any,  # of the job; torch's annotations lack most of what it can do
        main_address: str,  # of the host that keeps it
        silence: float,  # seconds without any sign of a host after which it counts as cut off
    ) -> None:
        self.of_node: Callable[[], str] = str  # what has happened to this rank's node; empty if all is well
        self.missing = ""  # for whom it waits at a meeting, for messages
        self.look_every = max(min(_LOOK_EVERY, silence / 8), 6 * layout.world_size / _REQUESTS)
        self._layout = layout
        self._rendezvous = rendezvous
        self._store = store
        self._main_address = main_address
        self._silence = silence
        self._longest_pause = max(_LONGEST_PAUSE, layout.nodes / _REQUESTS)
        self._addresses: list[str] = []
        self._trouble = ""
        self._looked = 0.0  # when
        # The life of the next node as it was seen last, and how often it was the same.
        self._life = 0
        self._unchanged = 0
        self._meetings = 0
        self._jobs: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def open(self) -> None:
        """Begin. All ranks of the job together."""
        answers = self._rendezvous((secrets.token_hex(8), self._address()))
        self._addresses = [address for _, address in answers[:: self._layout.on_node]]
        token, _ = answers[0]
        # A connection of its own: another thread may wait at the one of the process group.
        self._store = PrefixStore(f"odc/nodes/{token}", self._store.clone())
        self._looked = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="lightning-odc nodes", daemon=True)
        self._thread.start()

    def meet(self, message: bytes, until: Callable[[Callable[[], bool]], None]) -> list[bytes]:
        """Meet the leaders of all nodes; returns their messages. ``until`` waits for something to be true."""
        self.missing = "other nodes"
        heard: list[bytes] = []
        self._jobs.put(partial(self._meet, message, heard))
        until(lambda: bool(heard))
        if b"" in heard:
            gone = self._ranks_of(heard.index(b""))
            raise PeerFailedError(
                f"One of {gone} has left the training while rank {self._layout.rank} still needs it. Every rank needs "
                "the same number of Lightning batches and optimizer steps."
            )
        return heard

    def trouble(self) -> str:
        """Who failed on other nodes, or cannot be reached, and why; empty if all is well."""
        looked = self._looked
        if self._thread is not None and not self._trouble and time.monotonic() - looked > self._silence:
            time.sleep(self.look_every)  # it may be this process that was asleep
            if self._looked == looked:
                self._trouble = (
                    "There has been no sign of the store by which ranks find each other, on "
                    f"{self._main_address}, for {self._silence:g} s: its host is down or cut off."
                )
        return self._trouble

    def close(self) -> None:
        """Leave for good. Idempotent."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._jobs.put(self._ended.set)
            thread.join(_FAREWELL)  # it may hang in a request
            self.of_node = str

    def _address(self) -> str:
        """The address of this host that the main host sees. Sends nothing."""
        family, kind, _, _, target = socket.getaddrinfo(self._main_address, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(target)
            return str(probe.getsockname()[0])

    def _ranks_of(self, node: int) -> str:
        row = self._layout.row_of(node)
        return f"ranks {row[0]} to {row[-1]} ({self._addresses[node]})"

    # -- in the thread ------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._ended.is_set():
                if self._is_time():
                    self._look()
                with suppress(queue.Empty):
                    self._jobs.get(timeout=self.look_every)()
            self._look()  # others of the node may have failed just now
            if self._layout.leads and not self._trouble:
                self._come(b"")
        except Exception as error:
            self._trouble = self._trouble or (
                f"The store by which ranks find each other, on {self._main_address}, has ended: rank 0, or the agent "
                f"of its launcher, was killed or has crashed.\n{error}"
            )

    def _come(self, message: bytes) -> int:
        """Come to the next meeting; returns how often leaders have come to meetings by now."""
        self._meetings += 1
        self._store.set(self._key(self._layout.node), message)
        return int(self._store.add("come", 1))

    def _key(self, node: int) -> str:
        """Where the message of a node to this meeting is."""
        return f"{self._meetings}/{node}"

    def _meet(self, message: bytes, heard: list[bytes]) -> None:
        nodes = self._layout.nodes
        come = self._come(message)
        begin = time.monotonic()
        while come < self._meetings * nodes:
            if not self._jobs.empty():
                return  # to the meeting, no rank comes any more
            waited = time.monotonic() - begin
            time.sleep(min(waited * _PAUSE_FRACTION, self._longest_pause))
            if self._is_time():
                self._look()
                self.missing = self._ranks_of(self._first_missing())
            come = self._store.add("come", 0)
        heard += self._store.multi_get([self._key(node) for node in range(nodes)])
        self._store.delete_key(f"{self._meetings - 1}/{self._layout.node}")

    def _first_missing(self) -> int:
        """The first node that has not come to this meeting; in a moment it may be there."""
        keys = [self._key(node) for node in range(self._layout.nodes)]

        def lacks(node: int) -> bool:
            """Whether a node up to this one has not come."""
            return not self._store.check(keys[: node + 1])

        return bisect_left(range(len(keys) - 1), True, key=lacks)

    def _is_time(self) -> bool:
        return not self._trouble and time.monotonic() - self._looked >= self.look_every

    def _look(self) -> None:
        """Tell what has happened on this node, and hear what has happened on others."""
        self._looked = time.monotonic()
        node = self._layout.node
        trouble = self.of_node()
        if trouble:
            trouble = f"On {self._addresses[node]}: {trouble}"
        self._store.add(f"life/{node}", 1)
        if self._layout.leads and not trouble:
            trouble = self._look_after((node + 1) % self._layout.nodes)
        # Nothing is changed if something was told before: what came first is the reason of the rest.
        self._trouble = self._store.compare_set("trouble", "", trouble).decode(errors="replace")

    def _look_after(self, node: int) -> str:
        """What is to be told of a node of which there has been no sign for long."""
        life = self._store.add(f"life/{node}", 0)
        self._unchanged += 1
        if life != self._life:
            self._unchanged = 0
        self._life = life
        if self._unchanged * self.look_every <= self._silence:
            return ""
        ranks = self._ranks_of(node)
        return f"There has been no sign of {ranks} for {self._silence:g} s: their host is down or cut off."
