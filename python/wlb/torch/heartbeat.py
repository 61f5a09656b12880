"""A rank's heartbeat: through the store it tells the others that it lives, how far it is, and how it ended.

Communication that fails or times out does not say who is to blame, and a rank that was killed says nothing at all.
What each rank last wrote to the store does; `wlb.torch.failures` reads it.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from wlb.torch.stacks import Line, stacks, waits, where

T = TypeVar("T")

INTERVAL: Final = 0.5  # seconds between two beats of a rank
BEATS_A_SECOND: Final = 2000  # of all ranks together: what one store has to take
ANSWERING: Final = 16  # intervals in which beats tell where a rank is, once somebody asked: until that one has read it
PATIENCE: Final = 3.0  # seconds until a store that does not answer counts as gone

_ASKED: Final = "wlb/heartbeat/asked"
_LOG: Final = logging.getLogger("wlb")


class StoreGone(RuntimeError):
    """The store does not answer, for whoever keeps it is gone or hangs."""


@dataclass(eq=False)
class Activity:
    """Something that ranks do together, each in one thread, which writes here how far it is.

    Attributes:
        name: The same on every rank.
        step: The number of the step it is in, or was in last.
        count: How often it began something that the others have to begin too: a step, or an exchange. It tells who is
            behind.
        busy: Whether it is in a step.
        thread: That which does it.
        stream: Of the device, where that thread began the step; None without CUDA. A rank that reads a loss waits there
            for the device, and it for the others, in whatever line of the user's code.
        key: Where in the store the first failure in it is left, "" if none is looked for.
        failure: What was found there: known also after the store is gone.
        in_vain: Called once with it if this rank is still in the step a beat later; from the heartbeat's thread.
    """

    name: str
    step: int = 0
    count: int = 0
    busy: bool = False
    thread: int = 0
    stream: Any = None
    key: str = ""
    failure: bytes | None = None
    in_vain: Callable[[bytes], None] | None = None

    def place(self, threads: Mapping[int, list[Line]]) -> Place:
        """What it tells now; where each thread is."""
        lines = threads.get(self.thread, []) if self.busy else []
        found = waits(lines) if self.busy else False
        if found is False and lines and self._device_works():
            found = None
        return Place(self.step, self.count, self.busy, found, where(lines))

    def begin(self, step: int) -> None:
        """This thread is in the step."""
        self.step, self.busy, self.thread = step, True, threading.get_ident()
        initialized = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        self.stream = torch.cuda.current_stream() if initialized else None

    def _device_works(self) -> bool:
        """Whether what was given to the device is not done: for long only if it waits, with NCCL for other ranks."""
        try:
            return self.stream is not None and not self.stream.query()
        except RuntimeError:  # a device that has failed, or captures a graph, tells nothing
            return True


@dataclass(frozen=True)
class Place:
    """How far a rank is in an activity, as it tells the others.

    Attributes:
        step: See `Activity`.
        count: See `Activity`.
        busy: See `Activity`.
        waits: Whether it waits for other ranks; None where that cannot be seen, in torch's own C++ or while its device
            has not done what it was given, or nobody asked.
        where: The line of code it is in, if somebody asked.
    """

    step: int
    count: int
    busy: bool
    waits: bool | None
    where: str


@dataclass(frozen=True)
class Beat:
    """What a rank told last.

    Attributes:
        asked: How often ranks had been asked where they are: one that does not answer does not live, or cannot run
            Python.
        main: The line of code that its main thread is in, if somebody asked.
        ended: How its program ended, None while it has not.
        does: Its activities.
    """

    asked: int
    main: str
    ended: str | None = None
    does: dict[str, Place] = field(default_factory=dict)

    def text(self) -> str:
        """As it stands in the store."""
        places = {name: list(vars(place).values()) for name, place in self.does.items()}
        return json.dumps([self.asked, self.main, self.ended, places])

    @classmethod
    def of(cls, text: bytes) -> Beat:
        """The beat that a text from the store holds."""
        asked, main, ended, places = json.loads(text)
        return cls(asked, main, ended, {name: Place(*place) for name, place in places.items()})


class Heartbeat:
    """That of this process: a daemon thread that beats every `interval` seconds and whenever a step begins.

    It has a connection to the store of its own, for one that another thread waits on takes nothing else; it alone uses
    that, and does for others what they `ask`. It ends with the default process group, or with the main program.

    Attributes:
        rank: Of this process in the world.
        size: Ranks of the world.
        interval: Seconds; longer in large worlds, so that the store is not busy with beats alone.
        store: The store of the default process group.
        keeper: Who keeps it, in words; then None if that is no rank, else the rank.
        failure_known: Whether something has failed, which others may still want to read about in the store.
    """

    def __init__(self, store: Store) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.interval = max(INTERVAL, self.size / BEATS_A_SECOND)
        self.store = store
        self.keeper = _keeper(store)
        self.failure_known = False
        self._connection = store.clone()
        self._activities: dict[str, Activity] = {}
        self._answered = 0  # of the times that it was asked where it is
        self._answers_until = 0.0
        self._ended: str | None = None
        self._gone = ""  # or why the store is
        self._complained = False
        self._asked: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="wlb-heartbeat", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether it beats."""
        return self._thread.is_alive()

    def tell(self, activity: Activity) -> None:
        """Tells the other ranks of this activity too from now on; returns at once."""
        self._activities[activity.name] = activity
        self._asked.put(self._beat)

    def forget(self, activity: Activity) -> None:
        """It is over."""
        self._activities.pop(activity.name, None)

    def ask(self, work: Callable[[Store], T], *, patience: float = PATIENCE) -> T:
        """What `work` gives for the store. It must not wait there.

        Raises:
            StoreGone: It does not answer.
        """
        answer: Future[T] = Future()

        def answered() -> None:
            try:
                answer.set_result(self._use(work))
            except BaseException as reason:
                answer.set_exception(reason)

        if self._gone or not self.alive:
            raise StoreGone(self._gone or "the heartbeat has ended")
        self._asked.put(answered)
        try:
            return answer.result(patience)
        except FutureTimeoutError:
            raise StoreGone(f"no answer in {patience:g} s") from None
        except RuntimeError as reason:
            raise StoreGone(str(reason)) from reason

    def ask_ranks(self) -> int:
        """Asks all ranks where they are; gives how often that was asked, which the beats that answer tell.

        To know it at any time would cost each beat more than all else it does.

        Raises:
            StoreGone: It does not answer.
        """
        return self.ask(lambda store: store.add(_ASKED, 1))

    def read(self, ranks: Sequence[int]) -> dict[int, Beat]:
        """What they told last; of those that never told anything, nothing.

        Raises:
            StoreGone: It does not answer.
        """

        def work(store: Store) -> dict[int, Beat]:
            beating = list(ranks)
            if not store.check([_key(rank) for rank in beating]):
                beating = [rank for rank in beating if store.check([_key(rank)])]
            texts = store.multi_get([_key(rank) for rank in beating]) if beating else []
            return {rank: Beat.of(text) for rank, text in zip(beating, texts, strict=True)}

        return self.ask(work)

    def end(self, how: str) -> None:
        """Tells how the main program ended, and stops."""
        self._ended = how
        self._asked.put(self._beat)
        self._asked.put(None)
        self._thread.join(PATIENCE)
        if self.failure_known and self.keeper[1] == self.rank:  # and takes the reason with it
            time.sleep(2 * self.interval)

    def _run(self) -> None:
        due = time.monotonic()
        while True:
            try:
                work = self._asked.get(timeout=max(0.0, due - time.monotonic()))
            except queue.Empty:
                due, work = time.monotonic() + self.interval, self._beat
            if work is None or not _is_of_default_group(self.store):
                return
            try:
                work()
            except RuntimeError:  # of a beat, which nobody waits for
                continue
            except Exception:  # this rank would seem dead, and who it waits for would not be found
                if not self._complained:
                    _LOG.warning("a heartbeat of rank %d failed; it goes on", self.rank, exc_info=True)
                self._complained = True

    def _beat(self) -> None:
        asked = self._use(lambda store: store.add(_ASKED, 0))
        if asked != self._answered:
            self._answered, self._answers_until = asked, time.monotonic() + ANSWERING * self.interval
        main = threading.main_thread()
        if self._ended is None and not main.is_alive():  # other threads keep the process
            self._ended = _how_it_ended()
        threads = stacks() if time.monotonic() < self._answers_until else {}
        does = {activity.name: activity.place(threads) for activity in list(self._activities.values())}
        beat = Beat(asked, where(threads.get(main.ident or 0, [])), self._ended, does)
        self._use(lambda store: store.set(_key(self.rank), beat.text()))
        for activity in list(self._activities.values()):
            if activity.busy and activity.failure is None:
                self._look(activity, activity.key)
            elif activity.busy and activity.failure is not None and activity.in_vain is not None:
                activity.in_vain(activity.failure)
                activity.in_vain = None

    def _look(self, activity: Activity, key: str) -> None:
        """Whether a rank left a failure: known before whoever keeps the store is gone too, and told while one waits."""
        found = self._use(lambda store: store.get(key) if store.check([key]) else None)
        if found is not None and activity.key == key:
            activity.failure = found

    def _use(self, work: Callable[[Store], T]) -> T:
        """`work` on the connection, unless it is broken: torch reports each further use of it at length."""
        if self._gone:
            raise StoreGone(self._gone)
        try:
            return work(self._connection)
        except dist.DistNetworkError as reason:
            self._gone = str(reason).partition("\n")[0]
            raise StoreGone(self._gone) from reason


_of_process: Heartbeat | None = None
_starting = threading.Lock()


def heartbeat() -> Heartbeat | None:
    """The heartbeat of this process, begun if it has none; None without other ranks, or if the store is gone."""
    global _of_process
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    store = dist.distributed_c10d._get_default_store()
    found = _of_process
    if found is not None and found.store is store and found.alive:
        return found
    with _starting:
        found = _of_process
        if found is None or found.store is not store or not found.alive:
            try:
                _of_process = found = Heartbeat(store)
            except RuntimeError:
                return None
    return found


def _at_exit() -> None:
    """Before the interpreter goes: a thread that comes back from C++ after that would abort the process."""
    if _of_process is not None and _of_process.alive:
        _of_process.end(_how_it_ended())


def _after_fork() -> None:
    """A child has no heartbeat: it is not the rank, and threads stay with the parent."""
    global _of_process, _starting
    _of_process, _starting = None, threading.Lock()


atexit.register(_at_exit)
os.register_at_fork(after_in_child=_after_fork)


def _key(rank: int) -> str:
    return f"wlb/heartbeat/{rank}"


def _is_of_default_group(store: Store) -> bool:
    return dist.is_initialized() and dist.distributed_c10d._get_default_store() is store


def _keeper(store: Store) -> tuple[str, int | None]:
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    if not isinstance(store, dist.TCPStore):  # type: ignore[attr-defined]
        return "whoever keeps the store", None
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return "the agent of torchrun, which keeps the store,", None
    return "rank 0, which keeps the store,", 0


def _how_it_ended() -> str:
    """What the main program did not catch; `SystemExit` leaves no trace."""
    reason = getattr(sys, "last_value", None)
    return "" if reason is None else "".join(traceback.format_exception(reason))
