"""What nodes tell each other, through the store by which the ranks of the job have found each other.

Note [News between nodes]
~~~~~~~~~~~~~~~~~~~~~~~~~
The first rank of every node *leads* it. Leaders meet: each sets its own key, and reads those of the others when all of
them are there. Keys of an earlier meeting are deleted, since who came to this one has read them::

    leader of node 0                                leader of node 1
    set    7/0                                      set    7/1
    check  7/0, 7/1: not yet, look again later      check  7/0, 7/1: all are there
    check  7/0, 7/1: all are there                  get    7/0, 7/1; delete 6/1
    get    7/0, 7/1; delete 6/0

Every rank has a thread for that, which also brings the news. A store may stop to answer, and then a request never
comes back. So no request is made in the thread that trains.

- *A process ends, or raises.* Others of its node see that in their windows. They put it under the key ``trouble``,
  for which all ranks look.
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
_LOOK_EVERY = 0.5
#: Requests per second of all ranks together, which a store answers without effort. A rank makes three when it looks.
_REQUESTS = 10_000
_FIRST_PAUSE = 50e-6
_LONGEST_PAUSE = 2e-3
_PAUSE_GROWS = 1.03
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
        self._layout = layout
        self._rendezvous = rendezvous
        self._store = store
        self._main_address = main_address
        self._silence = silence
        self._look_every = max(min(_LOOK_EVERY, silence / 8), 3 * layout.world_size / _REQUESTS)
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
            time.sleep(self._look_every)  # it may be this process that was asleep
            if self._looked == looked:
                self._trouble = (
                    "There has been no sign of the store by which ranks find each other, on "
                    f"{self._main_address}, for {self._silence:g} s: its host is down or cut off."
                )
        return self._trouble

    def fail(self, message: str) -> None:
        """Tell all ranks that this one has failed, and why."""
        if self._thread is None:
            return
        layout = self._layout
        who = f"Rank {layout.rank} ({self._addresses[layout.node]}) failed, so all ranks stop"
        self._jobs.put(partial(self._tell, f"{who}. Its error was:\n{message[: MOST_BYTES // 4]}"))
        if layout.rank == 0:  # it may keep the store: others hear it before it ends
            time.sleep(2 * self._look_every)

    def close(self) -> None:
        """Leave for good. Idempotent."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._jobs.put(self._ended.set)
            thread.join(_FAREWELL)  # it may hang in a request
            self.of_node = str

    def _address(self) -> str:
        """The address of this host that the main host sees. Sends nothing."""
        if self._layout.node == 0:
            return self._main_address
        with suppress(OSError):
            family, kind, _, _, target = socket.getaddrinfo(self._main_address, 9, type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, kind) as probe:
                probe.connect(target)
                return str(probe.getsockname()[0])
        return socket.gethostname()

    def _ranks_of(self, node: int) -> str:
        row = self._layout.row_of(node)
        return f"ranks {row[0]} to {row[-1]} ({self._addresses[node]})"

    # -- in the thread ------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._ended.is_set():
                self._look()
                with suppress(queue.Empty):
                    self._jobs.get(timeout=self._look_every)()
            if self._layout.leads and not self._trouble:
                self._come(b"")
        except Exception as error:
            self._trouble = self._trouble or (
                f"The store by which ranks find each other, on {self._main_address}, has ended: rank 0, or the agent "
                f"of its launcher, was killed or has crashed.\n{error}"
            )

    def _come(self, message: bytes) -> list[str]:
        """Come to the next meeting; returns the keys of all nodes."""
        self._meetings += 1
        keys = [f"{self._meetings}/{node}" for node in range(self._layout.nodes)]
        self._store.set(keys[self._layout.node], message)
        return keys

    def _meet(self, message: bytes, heard: list[bytes]) -> None:
        keys = self._come(message)
        pause = _FIRST_PAUSE
        while not self._store.check(keys):
            if not self._jobs.empty():
                return  # to the meeting, no rank comes any more
            time.sleep(pause)
            pause = min(pause * _PAUSE_GROWS, self._longest_pause)
            if self._look():
                come = bisect_left(
                    keys, True, key=lambda key: not self._store.check(keys[: keys.index(key) + 1])
                )
                self.missing = self._ranks_of(min(come, len(keys) - 1))
        heard += self._store.multi_get(keys)
        self._store.delete_key(f"{self._meetings - 1}/{self._layout.node}")

    def _look(self) -> bool:
        """Tell what has happened on this node, and hear what has happened on others, if it is time for that."""
        now = time.monotonic()
        if self._trouble or now - self._looked < self._look_every:
            return False
        self._looked = now
        node = self._layout.node
        if happened := self.of_node():
            self._tell(f"On {self._addresses[node]}: {happened}")
        self._store.add(f"life/{node}", 1)
        if self._layout.leads:
            self._look_after((node + 1) % self._layout.nodes)
        if self._store.check(["trouble"]):
            self._hear()
        return True

    def _look_after(self, node: int) -> None:
        life = self._store.add(f"life/{node}", 0)
        self._unchanged += 1
        if life != self._life:
            self._unchanged = 0
        self._life = life
        if self._unchanged * self._look_every > self._silence:
            self._tell(
                f"There has been no sign of {self._ranks_of(node)} for {self._silence:g} s: their host is down or cut "
                "off."
            )

    def _tell(self, trouble: str) -> None:
        if not self._store.check(["trouble"]):  # what came first is the reason of the rest
            self._store.set("trouble", trouble)
        self._hear()

    def _hear(self) -> None:
        self._trouble = self._store.get("trouble").decode(errors="replace")
