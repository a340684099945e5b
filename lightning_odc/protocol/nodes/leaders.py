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

Every rank has a thread for all that spans the nodes, which also looks for news. A store may stop to answer, and then a
request never comes back. So no request is made in the thread that trains.

- *A process ends, or raises.* Others of its node see that in their windows, and put it under the key ``trouble``, at
  which all ranks look.
- *A host is silent.* At every look, the ranks of a node count one more look for those of the next node, and set their
  own count to 0. It is a number of looks, not a time: so no host is blamed while all of them sleep.
- *The store is silent, or has ended.* Every rank sees that for itself.
"""

from __future__ import annotations

import secrets
import socket
import time
from functools import partial
from typing import Any

from torch.distributed import PrefixStore  # type: ignore[attr-defined]  # documented, but not listed

from lightning_odc.background import Background, Job
from lightning_odc.errors import PeerFailedError
from lightning_odc.protocol.nodes.column import Layout
from lightning_odc.protocol.transports.base import Ready, Rendezvous
from lightning_odc.protocol.waiting import Describe

#: Bytes of one message. A store refuses more than 8 MiB.
MOST_BYTES = 4 * 2**20
_LOOK_EVERY = 0.25
#: Requests per second of all ranks that wait, which a store answers without effort. All that look, with four requests
#: each, make half as many.
_REQUESTS = 10_000
_LONGEST_PAUSE = 2e-3
_PAUSE_FRACTION = 1 / 16  # of the time that was waited already
#: Seconds for the news of who is gone. A broken connection is older than they are.
_PATIENCE = 2.0
#: Seconds that the end waits for what is under way, and for a request to a store that may not answer.
_LAST_WORK = 10.0
_FAREWELL = 0.5


def address_towards(target: str) -> str:
    """The address of this host that another one sees. Sends nothing."""
    family, kind, _, _, place = socket.getaddrinfo(target, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(place)
        return str(probe.getsockname()[0])


class Leaders:
    """The other nodes, as one rank of the job sees them. See Note [News between nodes]."""

    def __init__(
        self,
        layout: Layout,
        rendezvous: Rendezvous,
        store: Any,  # of the job; torch's annotations lack most of what it can do
        main_address: str,  # of the host that keeps it
        silence: float,  # seconds without any sign of a host after which it counts as cut off
    ) -> None:
        self.of_node: Describe = str  # what has happened to this rank's node; empty if all is well
        self.look_every = max(min(_LOOK_EVERY, silence / 8), 8 * layout.world_size / _REQUESTS)
        self._layout = layout
        self._rendezvous = rendezvous
        self._store = store
        self._main_address = main_address
        self._silence = silence
        self._longest_pause = max(_LONGEST_PAUSE, layout.world_size / _REQUESTS)
        self._addresses: list[str] = []
        self._trouble = ""
        self._looked = 0.0  # when
        self._meetings = 0
        self._missing = 0  # the first node that has not come to this one
        self._has_ended = False
        self._thread: Background | None = None

    def open(self) -> None:
        """Begin. All ranks of the job together."""
        answers = self._rendezvous((secrets.token_hex(8), address_towards(self._main_address)))
        self._addresses = [address for _, address in answers[:: self._layout.on_node]]
        token, _ = answers[0]
        # A connection of its own: another thread may wait at the one of the process group.
        self._store = PrefixStore(f"odc/nodes/{token}", self._store.clone())
        self._looked = time.monotonic()
        self._thread = Background(
            "nodes", self.close, idle=self._hear, every=self.look_every, end=self._leave
        )

    def begin(self, job: Job) -> None:
        """Let the thread do something, behind what it was given before."""
        assert self._thread is not None
        self._thread.do(job)

    def meet(self, message: bytes) -> list[bytes]:
        """Begin to meet the leaders of all nodes; their messages come into the list, all at once."""
        heard: list[bytes] = []
        self.begin(partial(self._meet, message, heard))
        return heard

    @property
    def missing(self) -> str:
        """For whom it waits at a meeting, for messages."""
        return self._ranks_of(self._missing)

    def broke(self, what: str, error: BaseException) -> None:
        """A collective over nodes broke: that is the trouble, unless its reason is known in a moment."""
        trouble = (
            f"{what} over nodes broke on rank {self._layout.rank}. The reason is not known. Ranks "
            f"{self._layout.column} took part in it.\n{error}"
        )
        self.begin(partial(self._tell_later, trouble))

    def trouble(self) -> str:
        """Who failed on other nodes, or cannot be reached, and why; empty if all is well."""
        if self._thread is None:
            return self._trouble
        looked = self._looked
        error = self._thread.error
        if error is not None and not isinstance(error, PeerFailedError):
            self._trouble = self._trouble or (
                f"The store by which ranks find each other, on {self._main_address}, has ended: rank 0, or the agent "
                f"of its launcher, was killed or has crashed.\n{error}"
            )
        if time.monotonic() - looked > self._silence:
            time.sleep(self.look_every)  # it may be this process that was asleep
            if self._looked == looked:
                self._trouble = self._trouble or (
                    "There has been no sign of the store by which ranks find each other, on "
                    f"{self._main_address}, for {self._silence:g} s: its host is down or cut off."
                )
        return self._trouble

    def close(self) -> None:
        """End what was begun, and leave for good. Idempotent."""
        thread = self._thread
        if thread is not None:
            thread.stop(_FAREWELL if self.trouble() else _LAST_WORK)
            self._thread = None
            self._has_ended = True
            self.of_node = str

    def _ranks_of(self, node: int) -> str:
        row = self._layout.row_of(node)
        return f"ranks {row[0]} to {row[-1]} ({self._addresses[node]})"

    # -- in the thread ------------------------------------------------------------------------------------

    def _leave(self) -> None:
        self._look()  # others of the node may have failed just now
        if self._layout.leads and not self._trouble:
            self._come(b"")

    def until(self, ready: Ready) -> None:
        """Wait for something to be true, and look for news."""
        begin = time.monotonic()
        while not ready():
            self._hear()
            waited = time.monotonic() - begin
            time.sleep(min(waited * _PAUSE_FRACTION, self._longest_pause))

    def all_have_published(self, version: int, edited: bool) -> bool:
        """Wait until all ranks have published a version; whether more than what is trained may have changed on any."""
        edits = f"edits/{version}"
        self._store.add(edits, edited)
        self._store.add("published", 1)
        self.until(lambda: self._store.add("published", 0) >= version * self._layout.world_size)
        self._store.delete_key(f"edits/{version - 1}")  # which all have read
        return self._store.add(edits, 0) > 0

    def _come(self, message: bytes) -> None:
        """Come to the next meeting."""
        self._meetings += 1
        self._missing = 0
        self._store.set(self._key(self._layout.node), message)
        self._store.add("come", 1)

    def _key(self, node: int) -> str:
        """Where the message of a node to this meeting is."""
        return f"{self._meetings}/{node}"

    def _meet(self, message: bytes, heard: list[bytes]) -> None:
        nodes = self._layout.nodes
        self._come(message)
        self.until(lambda: self._store.add("come", 0) >= self._meetings * nodes)
        messages: list[bytes] = self._store.multi_get([self._key(node) for node in range(nodes)])
        if b"" in messages:
            gone = self._ranks_of(messages.index(b""))
            self._trouble = (
                f"One of {gone} has left the training while rank {self._layout.rank} still needs it. Every rank needs "
                "the same number of Lightning batches and optimizer steps."
            )
            return
        heard += messages
        self._store.delete_key(f"{self._meetings - 1}/{self._layout.node}")

    def _tell_later(self, trouble: str) -> None:
        end = time.monotonic() + _PATIENCE
        self.until(lambda: time.monotonic() > end)
        self._trouble = trouble

    def _hear(self) -> None:
        """Look for news, if it is time."""
        if self._trouble or self._has_ended:
            raise PeerFailedError(self._trouble)
        if time.monotonic() - self._looked >= self.look_every:
            self._look()

    def _look(self) -> None:
        """Tell what has happened on this node, and hear what has happened on others."""
        node = self._layout.node
        behind = (node + 1) % self._layout.nodes
        self._store.set(f"unseen/{node}", "0")
        unseen = self._store.add(f"unseen/{behind}", 1) / self._layout.on_node
        trouble = self.of_node()
        if trouble:
            trouble = f"On {self._addresses[node]}: {trouble}"
        elif unseen * self.look_every > self._silence:
            ranks = self._ranks_of(behind)
            trouble = (
                f"There has been no sign of {ranks} for {self._silence:g} s: their host is down or cut off."
            )
        while self._missing < self._layout.nodes - 1 and self._store.check([self._key(self._missing)]):
            self._missing += 1
        # Nothing is changed if something was told before: what came first is the reason of the rest.
        self._trouble = self._store.compare_set("trouble", "", trouble).decode(errors="replace")
        self._looked = time.monotonic()
