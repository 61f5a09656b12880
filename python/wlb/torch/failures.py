"""A rank that fails tells the others why; of one that cannot, the others find out what can be known.

Whatever ends a step on a rank leaves its reason in the store before it goes on. A rank whose communication then fails
looks there first. If nothing was left, it watches what the ranks tell in their heartbeats: one that was killed has
none, one that hangs has one and stays where it is, outside of any communication.
"""

from __future__ import annotations

import inspect
import json
import re
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass

import torch.distributed as dist

import wlb
from wlb.torch.heartbeat import Activity, Beat, Heartbeat, Place, StoreGone, heartbeat


class PeerFailed(wlb.WlbError, RuntimeError):
    """Another rank failed, ended or hangs, and this one could not go on; the message says what is known of it.

    Attributes:
        rank: Its global rank; None if all that is known is that communication failed.
        step: The last step that was heard of, None if none was.
        reason: The traceback of what it raised, None if it could not tell.
    """

    rank: int | None
    step: int | None
    reason: str | None


class _Escape(BaseException):
    """Carries an exception through torch's schedules.

    On an `Exception` they wait for what they have sent, which the peers, waiting for this rank, may never receive.
    """


@dataclass(frozen=True)
class _Failure:
    """What the ranks leave to each other in the store.

    Attributes:
        rank: Which failed; None if none was found.
        witness: Which says so.
        step: Its last.
        text: What to tell.
        reason: See `PeerFailed`.
    """

    rank: int | None
    witness: int
    step: int | None
    text: str
    reason: str | None = None

    def error(self, own_rank: int) -> PeerFailed:
        """As this rank raises it."""
        text = self.text
        if self.rank == own_rank:
            text = f"rank {own_rank} is this one, and was given up by rank {self.witness}: {text}"
        result = PeerFailed(text)
        result.argument, result.index, result.value = "rank", None, self.rank
        result.rank, result.step, result.reason = self.rank, self.step, self.reason
        return result


class Together:
    """What several ranks do together, step by step: how far this one is, and why it failed.

    Args:
        name: The same on all of them, and of nothing else.
        ranks: Their global ranks; None for all.
        what: What they do, in words.

    Attributes:
        activity: How far this rank is.
        attempt: A failure in one does not explain that in another.
    """

    def __init__(self, name: str, ranks: Sequence[int] | None, *, what: str) -> None:
        self.activity = Activity(name)
        self.attempt = ""
        self._ranks = ranks
        self._what = what

    def begin(self, step: int) -> None:
        """This rank, in this thread, is in the step."""
        activity = self.activity
        activity.step, activity.busy, activity.thread = step, True, threading.get_ident()
        if (heart := heartbeat()) is not None:
            heart.tell(activity)

    def end(self) -> None:
        """It is not in a step any more."""
        self.activity.busy = False

    def close(self) -> None:
        """It takes no part any more."""
        if (heart := heartbeat()) is not None:
            heart.forget(self.activity)

    def explained(self, own: BaseException) -> BaseException:
        """What to raise for what was raised here: itself, or `PeerFailed` for what another rank did. Tells the others.

        Takes up to about two seconds after communication failed.
        """
        if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
            return own
        rank, heart = dist.get_rank(), heartbeat()
        communication = _is_communication(own)
        try:
            if heart is None:
                raise StoreGone("it takes no connection")
            if isinstance(own, PeerFailed):
                self._leave(heart, _Failure(own.rank, rank, own.step, str(own), own.reason))
                return own
            if not communication:
                first = self._leave(heart, self._own(rank, own))
                # A plain RuntimeError may be communication's, in words that are not known here.
                return own if first.rank == rank or type(own) is not RuntimeError else first.error(rank)
            return self._found(heart, own).error(rank)
        except StoreGone as gone:
            if not communication:
                return own
            keeper, keeping = ("whoever keeps the store", None) if heart is None else heart.keeper
            text = f"{keeper} is gone or hangs ({gone}), and took along why communication failed {self._place()}: {own}"
            return _Failure(keeping, rank, None, text).error(rank)

    def failure(self) -> PeerFailed | None:
        """What another rank has left. One round trip to the store."""
        heart = heartbeat()
        if heart is None:
            return None
        try:
            first = self._first(heart)
        except StoreGone:
            return None
        return None if first is None else first.error(heart.rank)

    def _place(self) -> str:
        return f"in step {self.activity.step} of {self._what}"

    def _own(self, rank: int, own: BaseException) -> _Failure:
        reason = "".join(traceback.format_exception(own))
        return _Failure(rank, rank, self.activity.step, f"rank {rank} failed first, {self._place()}:\n{reason}", reason)

    # In the store.

    @property
    def _key(self) -> str:
        return f"wlb/failure/{self.activity.name}/{self.attempt}"

    def _first(self, heart: Heartbeat) -> _Failure | None:
        text = heart.ask(lambda store: store.get(self._key) if store.check([self._key]) else None)
        return None if text is None else _Failure(**json.loads(text))

    def _leave(self, heart: Heartbeat, failure: _Failure) -> _Failure:
        """The failure that was left first: this one, or another."""
        heart.failure_known = True
        text = json.dumps(asdict(failure))
        return _Failure(**json.loads(heart.ask(lambda store: store.compare_set(self._key, "", text))))

    def _found(self, heart: Heartbeat, own: BaseException) -> _Failure:
        """Why communication failed. One rank looks at the heartbeats, the others wait for what it finds."""
        ask = f"{self._key}/asks"
        looks = heart.ask(lambda store: store.compare_set(ask, "", str(heart.rank))) == str(heart.rank).encode()
        until = time.monotonic() + (4 if looks else 8) * heart.interval
        ranks = [rank for rank in self._ranks or range(heart.size) if rank != heart.rank]
        before = heart.read(ranks) if looks else {}
        while True:
            if (first := self._first(heart)) is not None:
                return first
            late = time.monotonic() > until
            if late and not looks:  # who looked is gone too
                looks, until = True, time.monotonic() + 4 * heart.interval
                before = heart.read(ranks)
            elif looks:
                now = heart.read(ranks)
                silent = [
                    rank
                    for rank in ranks
                    if rank not in now or (rank in before and now[rank].number == before[rank].number)
                ]
                if late or not silent:
                    return self._leave(heart, self._blamed(heart, own, now, silent))
            time.sleep(heart.interval / 4)

    def _blamed(self, heart: Heartbeat, own: BaseException, beats: dict[int, Beat], silent: list[int]) -> _Failure:
        """Who has ended, else who has no heartbeat, else who is not where the others wait for it."""
        name, mine = self.activity.name, self.activity
        lost = any(word in str(own).lower() for word in ("closed", "reset", "broken pipe"))

        ended: list[tuple[int, str]] = []
        gone: list[tuple[int, str]] = []
        behind: list[tuple[int, str]] = []
        unclear: list[tuple[int, str]] = []
        for rank in [rank for rank in self._ranks or range(heart.size) if rank != heart.rank]:
            beat = beats.get(rank)
            place = None if beat is None else beat.does.get(name)
            if beat is None:
                gone.append((rank, "has never been heard of"))
            elif beat.ended is not None:
                ended.append(
                    (rank, f"ended{_last(place)}" + (f":\n{beat.ended}" if beat.ended else ", its program done"))
                )
            elif rank in silent:
                how = (
                    "ended without a word"
                    if lost
                    else "has no heartbeat any more: it is gone, or holds the interpreter"
                )
                gone.append((rank, f"{how}{_last(place)}"))
            elif place is None:
                behind.append((rank, f"takes no part, or not any more: it is at {beat.main}"))
            elif place.busy and place.waits is not True:
                text = (
                    f"hangs or is slow{_last(place)}: its heartbeat goes on, its step does not; it is at {place.where}"
                )
                (behind if place.waits is False else unclear).append((rank, text))
            elif not place.busy and place.count < mine.count:
                behind.append((rank, f"does not go on{_last(place)}: its heartbeat goes on, it is at {beat.main}"))
        blamed = ended or gone or behind or unclear
        if not blamed:
            text = f"communication failed {self._place()}, though all ranks live and wait, as if for different things"
            return _Failure(None, heart.rank, mine.step, f"{text}: {own}")
        rank = blamed[0][0]
        of_rank = beats.get(rank)
        last = None if of_rank is None or name not in of_rank.does else of_rank.does[name].step
        text = "; ".join(f"rank {rank} {what}" for rank, what in blamed[:8])
        if len(blamed) > 8:
            text += f"; so do {len(blamed) - 8} more"
        reason = None if of_rank is None else of_rank.ended or None
        return _Failure(rank, heart.rank, last, f"{text} (others wait {self._place()})", reason)


def _last(place: Place | None) -> str:
    return "" if place is None else f" in step {place.step}" if place.busy else f" after step {place.step}"


def _is_communication(reason: BaseException) -> bool:
    """Whether it says that communication failed, and so nothing of why."""
    if isinstance(reason, dist.DistError):
        return True
    text = str(reason)
    return (
        type(reason) is RuntimeError and re.search(r"gloo|NCCL|Connection |[Tt]imed out|Broken pipe", text) is not None
    )


_training = Together("training", None, what="training")
_depth = 0  # of `failures_explained` inside one another
_attempts = 0


@contextmanager
def failures_explained(step: int | None = None) -> Iterator[None]:
    """Around a training step: a rank that fails leaves its reason to the others, which wait for it in vain.

    ```
    for step in loader:
        with failures_explained(step.number):
            pipeline_step(stages, micro_batches, loss_fn=loss_fn)
            optimizer.step()
    ```

    What is raised inside, also `SystemExit` or `KeyboardInterrupt`, is written to the store of the default process
    group, then raised as it is. If communication failed (`RuntimeError` of gloo, `torch.distributed.DistError`), it is
    because of another rank: `PeerFailed` is raised from it instead, which names that rank, its last step and its
    reason. A rank that was killed, left without a word or hangs is found by its heartbeat, which begins here: a
    thread that writes to the store twice a second (more seldom beyond 1000 ranks) where the rank is. `pipeline_step`
    does the same for itself, so alone it needs no such context.

    Steps are counted, so that a failure that was survived does not explain a later one: all ranks must enter as many
    contexts (of this kind or `pipeline_step`; those inside another one do not count).

    When do the others notice? With gloo, as soon as the failed process ends, or else after the timeout of the process
    group; finding out takes up to two seconds more. NCCL reports nothing to Python: after the timeout, its watchdog
    ends the process, which then cannot raise `PeerFailed`. The reason is in what the failed rank itself prints, and in
    the store, which under torchrun outlives the workers; otherwise rank 0 keeps it, and says so if it is rank 0 that
    is gone.

    Args:
        step: Its number, to tell. By default contexts are counted from 1.

    Raises:
        PeerFailed: Another rank failed, ended or hangs.
        BaseException: What was raised inside.
    """
    global _depth, _attempts
    if not _depth:
        _attempts += 1
        _training.attempt, _training.activity.count = str(_attempts), _attempts
    if not _depth or step is not None:
        _training.begin(_attempts if step is None else step)
    _depth += 1
    try:
        yield
    except _Escape as escape:
        assert escape.__cause__ is not None
        own = escape.__cause__
    except BaseException as reason:
        own = reason
    else:
        return
    finally:
        _depth -= 1
        if not _depth:
            _training.end()
    told = _training.explained(own)
    if told is own:
        raise own
    raise told from own


@contextmanager
def computing() -> Iterator[None]:
    """Around what a stage computes: if it fails, its reason is left in the store before anything else happens."""
    try:
        yield
    except BaseException as reason:
        own = _unwrapped(reason)
        _training.explained(own)
        if isinstance(reason, Exception):
            raise _Escape from own
        raise


def _unwrapped(reason: BaseException) -> BaseException:
    """What the module raised, of which torch makes the cause of a plain `RuntimeError` that tells stage and inputs."""
    own, text = reason.__cause__, str(reason)
    if own is None or not ("failed to run forward" in text or "Failed to run stage backward" in text):
        return reason
    if sys.version_info >= (3, 11):
        own.add_note(inspect.cleandoc(text))
    return own
