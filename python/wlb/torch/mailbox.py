"""A mailbox of each rank, into which other ranks put messages over TCP."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import struct
import threading
import time
import weakref
from collections import defaultdict, deque
from collections.abc import Iterable
from typing import Final, NamedTuple

_HEADER: Final = struct.Struct("<16siq?")  # the mailbox's token, the source, bytes, whether it is a failure
_TAKEN: Final = b"\1"
_ANSWERS: Final = 1.0  # seconds in which the host of a rank answers a connection

# A forked worker of a data loader must not keep the sockets of a rank that was killed.
_SOCKETS: Final[weakref.WeakSet[socket.socket]] = weakref.WeakSet()


def _after_fork() -> None:
    for each in list(_SOCKETS):
        if (number := each.detach()) >= 0:
            os.close(number)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


class Address(NamedTuple):
    """Where a mailbox is. What comes without its token is not read, since ranks unpickle messages."""

    host: str
    port: int
    token: bytes


class Mailbox:
    """The mailbox of this rank. Threads take messages in, so a rank may put some while it is busy or waits itself.

    Args:
        host: this host, as other ranks reach it.
        place: number of this rank, which its own messages carry.

    Attributes:
        address: what other ranks put messages with.
        failure: the first failure that another rank told of; None for none.
    """

    def __init__(self, host: str, place: int) -> None:
        both = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both else socket.AF_INET
        self._server = socket.create_server(("", 0), family=family, backlog=1024, dualstack_ipv6=both)
        self.address = Address(host, self._server.getsockname()[1], secrets.token_bytes(16))
        self.failure: str | None = None
        self._place = place
        self._messages: defaultdict[int, deque[bytes]] = defaultdict(deque)
        self._news = threading.Condition()
        self._kept: dict[Address, socket.socket] = {}
        _SOCKETS.add(self._server)
        threading.Thread(target=self._serve, name="wlb mailbox", daemon=True).start()

    def put(self, to: Address, message: bytes, *, until: float, keep: bool = False, failure: bool = False) -> None:
        """Puts a message into another mailbox: when it returns the message is there, and this process may end.

        Args:
            to: the other mailbox.
            message: any bytes.
            until: the `time.monotonic()` at which to give up.
            keep: whether to keep the connection for the next message.
            failure: whether the message is the text of a failure.

        Raises:
            OSError: a `TimeoutError` if nothing took it in time; a `ConnectionError` if the other process ended.
        """
        connection = self._kept.pop(to, None)
        try:
            if connection is None:
                connection = socket.create_connection(to[:2], timeout=_left(until))
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                _SOCKETS.add(connection)
            connection.settimeout(_left(until))
            connection.sendall(_HEADER.pack(to.token, self._place, len(message), failure))
            connection.sendall(message)
            _read(connection, len(_TAKEN))
        except BaseException:
            if connection is not None:
                connection.close()
            raise
        if keep:
            self._kept[to] = connection
        else:
            connection.close()

    def take(self, sources: Iterable[int], seconds: float) -> dict[int, bytes]:
        """The next message of each of these ranks that has sent one. Waits for the first, or for a failure."""

        def arrived() -> list[int]:
            return [source for source in sources if self._messages[source]]

        with self._news:
            self._news.wait_for(lambda: arrived() or self.failure is not None, seconds)
            return {source: self._messages[source].popleft() for source in arrived()}

    def close(self) -> None:
        """Refuses what comes from now on, and ends what waits here."""
        with self._news:
            self.failure = self.failure or "the mailbox is closed"
            self._news.notify_all()
        with contextlib.suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)  # wakes its thread
        self._server.close()
        for connection in self._kept.values():
            connection.close()
        self._kept.clear()

    def _serve(self) -> None:
        while self._server.fileno() >= 0:
            try:
                connection, _ = self._server.accept()
                _SOCKETS.add(connection)
                threading.Thread(target=self._receive, args=[connection], name="wlb message", daemon=True).start()
            except (OSError, RuntimeError):  # noqa: PERF203 - closed; or for now there are no more files or threads
                time.sleep(0.01)

    def _receive(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            while True:
                token, source, size, failure = _HEADER.unpack(_read(connection, _HEADER.size))
                if not secrets.compare_digest(token, self.address.token):
                    return
                message = _read(connection, size)
                if self._server.fileno() < 0:
                    return  # closed: who sent it hears so
                with self._news:
                    connection.sendall(_TAKEN)  # first: who takes the message may end at once
                    if not failure:
                        self._messages[source].append(message)
                    elif self.failure is None:
                        self.failure = message.decode()
                    self._news.notify_all()


def answers(address: Address) -> bool | None:
    """Whether something takes connections where a mailbox is said to be; None if its host says neither yes nor no."""
    try:
        socket.create_connection(address[:2], timeout=_ANSWERS).close()
    except ConnectionError:
        return False
    except OSError:
        return None  # slow, or not known
    return True


def runs(address: Address) -> bool:
    """Whether the process that has a mailbox may still run, and has not closed it. One that is stopped runs."""
    return answers(address) is not False


def _left(until: float) -> float:
    return max(until - time.monotonic(), 0.001)


def _read(connection: socket.socket, size: int) -> bytes:
    message = bytearray(size)
    left = memoryview(message)
    while left:
        count = connection.recv_into(left)
        if not count:
            raise ConnectionResetError("it closed the connection")
        left = left[count:]
    return bytes(message)
