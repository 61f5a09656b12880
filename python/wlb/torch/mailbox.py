"""What some ranks tell each other on the host, without a communicator: through a mailbox of each, along a tree."""

from __future__ import annotations

import hashlib
import os
import pickle
import socket
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, Final, TypeVar

from torch._C._distributed_c10d import FileStore, PrefixStore, Store, TCPStore

T = TypeVar("T")

NODE: Final = 8  # ranks of a node of the tree, and the nodes that hear from another one
_CHUNK: Final = 4 << 20  # bytes of a value; torch's store takes no more than 8 MiB
_LOOKS: Final = 1.0  # seconds between looks whether a rank that is waited for still runs
_PAUSES: Final = (0.0005, 0.02)  # seconds between looks into the own mailbox, first and at most
_LINGERS: Final = 3.0  # seconds for each level of the tree that a rank waits longer for an answer, which has the cause
_OPEN: Final = 64  # connections to ranks that are no neighbours in the tree
_MADE: Final[Counter[str]] = Counter()


def parent_of(rank: int) -> int | None:
    """The rank through which another one hears of the rest; None for the first.

    Eight neighbours are a node: seven of them hear from the first one, and that hears from the first rank of another
    node. A node has at most eight nodes below it.
    """
    node = rank // NODE
    if rank % NODE:
        return node * NODE
    return (node - 1) // NODE * NODE if node else None


def depth_of(rank: int) -> int:
    """Ranks between a rank and the first one, itself included."""
    parent = parent_of(rank)
    return 0 if parent is None else 1 + depth_of(parent)


def children_of(rank: int, size: int) -> list[int]:
    """The ranks that hear of the rest through this one, ascending."""
    if rank % NODE:
        return []
    nodes = range(rank + 1, rank + NODE + 1)  # of node n: 8 * n + 1 to 8 * n + 8, and rank = 8 * n
    return [child for child in (*range(rank + 1, rank + NODE), *(NODE * node for node in nodes)) if child < size]


class Mailboxes:
    """A mailbox on each of some ranks, into which the others put messages. The ranks make it, and call it, together.

    A mailbox is a `TCPStore` of torch that its rank keeps. The launcher's store is asked for the address of one
    mailbox, and each rank hears of all others along a tree of nodes. A message is in the mailbox of its destination
    when it was sent, so its source may end; who takes it out deletes it. Messages are pickled: as torch, it trusts the
    network that ranks talk over.

    Args:
        store: the launcher's store. Its keys are deleted once they were read.
        ranks: the ranks, as ranks of the world, in the order of their places.
        place: place of this rank among them.
        what: purpose, for errors; with `ranks` it names the keys, and the same purpose may come again.
        timeout: how long a rank waits for another one.

    Raises:
        RuntimeError: a rank did not come in time.

    Complexity:
        At most five requests to the launcher's store a rank, with less than 200 bytes, for any number of ranks.
    """

    def __init__(self, store: Store, ranks: Sequence[int], place: int, *, what: str, timeout: timedelta) -> None:
        self.ranks, self.place, self.what, self.timeout = list(ranks), place, what, timeout
        size = len(self.ranks)
        self._parent, self._children = parent_of(place), children_of(place, size)
        self._addresses: dict[int, tuple[str, int]] = {}
        self._boxes: dict[int, TCPStore] = {}
        self._put_to: Counter[int] = Counter()
        self._taken_from: Counter[int] = Counter()
        self._broken: str | None = None
        self._mine: TCPStore | None = None
        if size == 1:
            return
        self._mine = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        mine = (_host(store), self._mine.port)
        made = hashlib.blake2b(repr((what, self.ranks)).encode(), digest_size=16).hexdigest()
        _MADE[made] += 1
        # torchrun's store outlives a restart, with the keys of ranks that were killed.
        restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        name = f"wlb/mailbox/{restart}/{made}/{_MADE[made]}"
        if self._children:
            store.set(f"{name}/{place}", pickle.dumps(mine))  # type: ignore[arg-type]
        if self._parent is not None:
            try:  # over a connection of its own: while it waits, it takes no other request
                asked = store.clone()
                asked.wait([f"{name}/{self._parent}"], timeout)
                self._addresses[self._parent] = pickle.loads(asked.get(f"{name}/{self._parent}"))
            except RuntimeError as cause:
                raise RuntimeError(self._late(self._parent)) from cause
        self._through_tree({place: mine}, self._learnt)
        if self._children:
            store.delete_key(f"{name}/{place}")

    def gather(self, mine: T) -> list[T]:
        """`mine` of every rank, by place.

        Raises:
            RuntimeError: a rank ended, or is late; the message has its number.
        """
        return list(dict(sorted(self._through_tree({self.place: mine}, _merged).items())).values())

    def reduce(self, mine: T, combine: Callable[[list[T]], T]) -> T:
        """What `combine` makes of the values of all ranks. It gets some at a time, and its own results among them.

        Raises:
            RuntimeError: a rank ended, or is late; the message has its number.
        """
        return self._through_tree(mine, combine)

    def exchange(self, sent: Mapping[int, Any], sources: Sequence[int]) -> dict[int, Any]:
        """Sends values to places, straight, and takes one from each of the places that send to this one.

        Raises:
            RuntimeError: a rank ended, or is late; the message has its number.
        """
        self._check()
        until = time.monotonic() + self.timeout.total_seconds()
        try:
            for to, value in sent.items():
                if to != self.place:
                    self._put(to, pickle.dumps(value))
            return {at: sent[at] if at == self.place else pickle.loads(self._take(at, until)) for at in sources}
        except RuntimeError as cause:
            self._broken = str(cause)
            raise

    def close(self) -> None:
        """Ends this rank's mailbox, with what nobody took out."""
        self._broken = self._broken or f"{self.what}: is closed"
        self._boxes.clear()
        self._mine = None

    def _check(self) -> None:
        if self._broken is not None:
            raise RuntimeError(self._broken)

    def _learnt(self, parts: list[dict[int, tuple[str, int]]]) -> dict[int, tuple[str, int]]:
        found = _merged(parts)
        self._addresses |= found
        return found

    def _through_tree(self, mine: T, combine: Callable[[list[T]], T]) -> T:
        """Values go up the tree, combined; the result comes down, or the first failure: so all ranks raise alike."""
        self._check()
        until = time.monotonic() + self.timeout.total_seconds()
        failure: str | None = None
        parts, result = [mine], mine
        try:
            for child in self._children:
                failure, part = pickle.loads(self._take(child, until))
                if failure is not None:
                    break
                parts.append(part)
                if combine == self._learnt:  # also if another child fails: this one has to hear of it
                    self._learnt([part])
            else:
                result = combine(parts)
        except RuntimeError as cause:
            failure = str(cause)
        answer = pickle.dumps((failure, result if failure is None else None))
        if self._parent is not None:
            try:
                self._put(self._parent, answer)
                answer = self._take(self._parent, until + _LINGERS * depth_of(self.place))
                failure, result = pickle.loads(answer)
            except RuntimeError as cause:
                failure = str(cause)
                answer = pickle.dumps((failure, None))
        if combine == self._learnt and failure is None:
            self._learnt([result])
        for child in self._children:
            if child not in self._addresses:
                continue  # it has not come
            try:
                self._put(child, answer)
            except RuntimeError as cause:  # the others hear of it in the next exchange, or from who waits for it
                self._broken = str(cause)
        if failure is not None:
            self._broken = failure
            raise RuntimeError(failure)
        return result

    def _put(self, to: int, message: bytes) -> None:
        key = f"{self.place}/{self._put_to[to]}"
        self._put_to[to] += 1
        chunks = [message[at : at + _CHUNK] for at in range(0, len(message), _CHUNK)]
        try:
            box = self._box(to)
            for number, chunk in enumerate(chunks[1:], 1):
                box.set(f"{key}/{number}", chunk)  # type: ignore[arg-type]
            box.set(key, len(chunks).to_bytes(4, "little") + chunks[0])  # type: ignore[arg-type]
        except RuntimeError as cause:
            raise RuntimeError(f"{self.what}: rank {self.ranks[to]} ended: {cause}") from cause

    def _take(self, source: int, until: float) -> bytes:
        mailbox = self._mine
        assert mailbox is not None
        key = f"{source}/{self._taken_from[source]}"
        self._taken_from[source] += 1
        pause, look = _PAUSES[0], time.monotonic() + _LOOKS
        while not mailbox.check([key]):  # torch warns of each wait that ends without a value
            now = time.monotonic()
            if now >= look:
                look = now + _LOOKS
                if not self._runs(source) and not mailbox.check([key]):
                    raise RuntimeError(f"{self.what}: rank {self.ranks[source]} ended")
            if now >= until:
                raise RuntimeError(self._late(source))
            time.sleep(pause)
            pause = min(2 * pause, _PAUSES[1])
        first = mailbox.get(key)
        keys = [key, *(f"{key}/{number}" for number in range(1, int.from_bytes(first[:4], "little")))]
        chunks = [first[4:], *map(mailbox.get, keys[1:])]
        for read in keys:
            mailbox.delete_key(read)
        return b"".join(chunks)

    def _late(self, place: int) -> str:
        seconds = self.timeout.total_seconds()
        return f"{self.what}: rank {self.ranks[place]} did not come within {seconds:.0f} s: it failed, or is late"

    def _runs(self, place: int) -> bool:
        """Whether the process of a rank still keeps its mailbox; one that is stopped does."""
        if place not in self._addresses:
            return True
        try:
            socket.create_connection(self._addresses[place], timeout=_LOOKS).close()
        except ConnectionError:
            return False
        except OSError:
            return True  # slow; the timeout decides
        return True

    def _box(self, place: int) -> TCPStore:
        if place not in self._boxes:
            kept = {*self._children, self._parent}
            others = [other for other in self._boxes if other not in kept]
            if len(others) >= _OPEN:
                del self._boxes[others[0]]
            host, port = self._addresses[place]
            self._boxes[place] = TCPStore(host, port, is_master=False, wait_for_workers=False)
        return self._boxes[place]


def _merged(parts: list[dict[int, T]]) -> dict[int, T]:
    return {place: value for part in parts for place, value in part.items()}


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
