"""What some ranks tell each other on the host: along a tree, without a communicator."""

from __future__ import annotations

import contextlib
import hashlib
import pickle
import socket
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any, Final, TypeVar

from torch._C._distributed_c10d import FileStore, PrefixStore, Store, TCPStore

from wlb.torch.mailbox import Address, Mailbox, answers, runs

T = TypeVar("T")

NODE: Final = 8  # ranks of a node of the tree, and the nodes that hear from another one
_LOOKS: Final = 1.0  # seconds between looks whether a rank that is waited for still runs
_LINGERS: Final = 3.0  # seconds that a rank waits longer than the ranks on which the one depends that it waits for
_MADE: Final[Counter[tuple[str, int]]] = Counter()  # how many trees this process made for a purpose and a place


def parent_of(place: int) -> int | None:
    """The rank through which another one hears of the rest; None for the first.

    Eight neighbours are a node: seven of them hear from the first one, and that hears from the first rank of another
    node. A node has at most eight nodes below it.
    """
    node = place // NODE
    if place % NODE:
        return node * NODE
    return (node - 1) // NODE * NODE if node else None


def children_of(place: int, size: int) -> list[int]:
    """The ranks that hear of the rest through this one, ascending: 15 at most."""
    if place % NODE:
        return []
    nodes = range(place + 1, place + NODE + 1)  # of node n: 8 * n + 1 to 8 * n + 8, and place = 8 * n
    return [child for child in (*range(place + 1, place + NODE), *(NODE * node for node in nodes)) if child < size]


def depth_of(place: int) -> int:
    """Levels of the tree above a rank."""
    parent = parent_of(place)
    return 0 if parent is None else 1 + depth_of(parent)


def height_of(place: int, size: int) -> int:
    """Levels of the tree below a rank."""
    return max((1 + height_of(child, size) for child in children_of(place, size)), default=0)


class Tree:
    """Some ranks, each with a `Mailbox`, in a tree. They make it, and call it, together.

    The launcher's store is asked for the address of one mailbox, and each rank hears of all others along the tree.
    Messages are pickled.

    A rank that waits here hears of a failure at once and passes it on; one that does other things hears of it in its
    next call. The tree is of no more use then: each call raises the failure. A rank that was killed is missed within a
    second by those that wait for it. A rank that only stopped, or whose host is lost, is missed after the timeout.

    Args:
        store: the launcher's store. Its keys are deleted once they were read.
        ranks: the ranks, as ranks of the world, in the order of their places.
        place: place of this rank among them.
        what: purpose, for errors; with `ranks` it names the keys. The same purpose may come again.
        timeout: how long a rank waits for another one.

    Raises:
        RuntimeError: a rank did not come in time, ended, or failed. Each method raises it, and names the ranks.

    Complexity:
        At most five requests to the launcher's store a rank, with about 300 bytes, for any number of ranks.
    """

    def __init__(self, store: Store, ranks: Sequence[int], place: int, *, what: str, timeout: timedelta) -> None:
        self.ranks, self.place, self.what, self.timeout = list(ranks), place, what, timeout
        size = len(self.ranks)
        self._parent, self._children = parent_of(place), children_of(place, size)
        self._waits_for_children = _LINGERS * max(height_of(place, size) - 1, 0)
        self._waits_for_parent = _LINGERS * (height_of(0, size) + depth_of(place) - 1)
        self._addresses: dict[int, Address] = {}
        self._broken: str | None = None
        if size == 1:
            return
        made = hashlib.blake2b(repr((what, self.ranks)).encode(), digest_size=16).hexdigest()
        _MADE[made, place] += 1
        name = f"wlb/tree/{made}/{_MADE[made, place]}"
        self._mailbox = Mailbox(_host(store), place)
        self._end = weakref.finalize(self, self._mailbox.close)
        mine = pickle.dumps(tuple(self._mailbox.address))
        with self._together() as until:
            if self._children:
                store.set(f"{name}/{place}", mine)  # type: ignore[arg-type]
            if self._parent is not None:
                self._arrive(store, f"{name}/{self._parent}", mine, until)
            for child, address in self._take(self._children, until + self._waits_for_children).items():
                self._addresses[child] = Address(*pickle.loads(address))
            if self._children:
                store.delete_key(f"{name}/{place}")
        self._addresses.update(enumerate(self.gather(self._mailbox.address)))

    def _arrive(self, store: Store, key: str, mine: bytes, until: float) -> None:
        """Tells the parent where this rank is.

        The store of `torchrun` outlives a restart, with keys of ranks that were killed, until the new ones come.
        """
        assert self._parent is not None
        asked = store.clone()  # a connection of its own: while it waits, it takes no other request
        while (left := until - time.monotonic()) > 0:
            try:
                asked.wait([key], timedelta(seconds=left))
                address = Address(*pickle.loads(asked.get(key)))
            except RuntimeError as cause:
                raise _Lost(self._late([self._parent])) from cause
            if answers(address):
                with contextlib.suppress(ConnectionError):  # of a rank that was killed, or of another mailbox
                    self._mailbox.put(address, mine, until=until, keep=True)
                    self._addresses[self._parent] = address
                    return
            time.sleep(_LOOKS / 5)
        raise _Lost(self._late([self._parent]))

    def gather(self, mine: T) -> list[T]:
        """`mine` of every rank, by place."""
        found = self.reduce(
            {self.place: mine}, lambda parts: {place: part for each in parts for place, part in each.items()}
        )
        return [found[place] for place in range(len(self.ranks))]

    def reduce(self, mine: T, combine: Callable[[list[T]], T]) -> T:
        """What `combine` makes of the values of all ranks. It gets some at a time, and its own results among them."""
        with self._together() as until:
            parts = self._take(self._children, until + self._waits_for_children)
            result = combine([mine, *(pickle.loads(parts[child]) for child in self._children)])
            message = pickle.dumps(result)
            if self._parent is not None:
                self._put(self._parent, message, until + self._waits_for_children + _LINGERS)
                message = self._take([self._parent], until + self._waits_for_parent)[self._parent]
                result = pickle.loads(message)
            for child in self._children:
                self._put(child, message, until + self._waits_for_parent)
        return result

    def exchange(self, sent: Mapping[int, Any], sources: Iterable[int]) -> dict[int, Any]:
        """Sends values to places, straight, and takes one from each of the places that send to this one."""
        with self._together() as until:
            for to, value in sent.items():
                if to != self.place:
                    self._put(to, pickle.dumps(value), until)
            others = [source for source in sources if source != self.place]
            found = self._take(others, until + _LINGERS)
            return {at: pickle.loads(found[at]) if at in found else sent[at] for at in sources}

    def close(self) -> None:
        """Ends this rank's mailbox. Ranks that still wait for this one hear that it ended."""
        self._broken = self._broken or f"{self.what}: is closed"
        if len(self.ranks) > 1:
            self._end()

    @contextlib.contextmanager
    def _together(self) -> Iterator[float]:
        """Gives the time by which other ranks have to come. What is raised inside is told to the others, once."""
        if self._broken is not None:
            raise RuntimeError(self._broken)
        try:
            yield time.monotonic() + self.timeout.total_seconds()
        except BaseException as cause:
            known = isinstance(cause, _Lost)
            mine = f"{self.what}: rank {self.ranks[self.place]} raised {type(cause).__name__}: {cause}"
            self._broken = str(cause) if known else mine
            for neighbour in (self._parent, *self._children):
                if neighbour in self._addresses:
                    with contextlib.suppress(OSError):
                        until = time.monotonic() + _LOOKS
                        self._mailbox.put(self._addresses[neighbour], self._broken.encode(), until=until, failure=True)
            raise

    def _put(self, to: int, message: bytes, until: float) -> None:
        try:
            self._mailbox.put(self._addresses[to], message, until=until, keep=to in (self._parent, *self._children))
        except TimeoutError as cause:
            raise _Lost(self._late([to])) from cause
        except ConnectionError as cause:
            raise _Lost(self._ended([to])) from cause
        except OSError as cause:
            host, port, _ = self._addresses[to]
            raise _Lost(f"{self._named([to])} cannot be reached at {host}:{port}: {cause}") from cause

    def _take(self, sources: Iterable[int], until: float) -> dict[int, bytes]:
        found: dict[int, bytes] = {}
        waiting = {*sources}
        while waiting:
            arrived = self._mailbox.take(waiting, max(min(_LOOKS, until - time.monotonic()), 0))
            found |= arrived
            waiting -= arrived.keys()
            if arrived or not waiting:
                continue
            if self._mailbox.failure is not None:
                raise _Lost(self._mailbox.failure)
            late = time.monotonic() >= until
            ended = {at for at in waiting if at in self._addresses and not runs(self._addresses[at])}
            arrived = self._mailbox.take(ended, 0)  # what they sent before they ended
            found |= arrived
            waiting -= arrived.keys()
            if ended - arrived.keys():
                raise _Lost(self._ended(ended - arrived.keys()))
            if late and waiting:
                raise _Lost(self._late(waiting))
        return found

    def _named(self, places: Iterable[int]) -> str:
        ranks = sorted(self.ranks[place] for place in places)
        return f"{self.what}: {'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks))}"

    def _late(self, places: Iterable[int]) -> str:
        seconds = self.timeout.total_seconds()
        return f"{self._named(places)} did not come within {seconds:.0f} s: late, stopped, or failed"

    def _ended(self, places: Iterable[int]) -> str:
        return f"{self._named(places)} ended"


class _Lost(RuntimeError):
    """Ranks are missing, which the message names."""


def _host(store: Store) -> str:
    """The address by which other ranks reach this host: that of the network on which the launcher's store is."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    if not isinstance(store, TCPStore):
        return socket.gethostname() if isinstance(store, FileStore) else "localhost"
    family, *_, address = socket.getaddrinfo(store.host, store.port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as way:  # sends nothing
        way.connect(address)
        mine: str = way.getsockname()[0]
    return store.host if mine.startswith("127.") or mine == "::1" else mine
