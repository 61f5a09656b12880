"""A rank that fails tells the others why; of one that cannot, the others find out what can be known.

Whatever ends a step on a rank leaves its reason in the store before it goes on. A rank whose communication then fails
looks there first. If nothing was left, it watches what the ranks tell in their heartbeats: one that was killed has
none, one that hangs has one and stays where it is, outside of any communication.
"""

from __future__ import annotations

import inspect
import json
import logging
import re
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from enum import IntEnum
from typing import Final, NoReturn

import torch.distributed as dist

import wlb
from wlb.torch.heartbeat import Activity, Beat, Heartbeat, StoreGone, heartbeat


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
    """

    def __init__(self, name: str, ranks: Sequence[int] | None, *, what: str) -> None:
        self.activity = Activity(name, key=f"wlb/failure/{name}")
        self._ranks = ranks
        self._what = what

    def attempt(self, number: int) -> None:
        """What comes is another attempt: no failure in those before explains one in it."""
        activity = self.activity
        activity.failure, activity.count, activity.key = None, number, f"wlb/failure/{activity.name}/{number}"
        activity.in_vain = self._say

    def begin(self, step: int) -> None:
        """This rank, in this thread, is in the step."""
        self.activity.begin(step)
        if (heart := heartbeat()) is not None:
            heart.tell(self.activity)

    def end(self) -> None:
        """It is not in a step any more."""
        self.activity.busy = False

    def close(self) -> None:
        """It takes no part any more."""
        if (heart := heartbeat()) is not None:
            heart.forget(self.activity)

    def explained(self, own: BaseException) -> BaseException:
        """What to raise for what was raised here: itself, or `PeerFailed` for what another rank did. Tells the others.

        Takes up to about two seconds after communication failed, three if the store hangs.
        """
        if vars(own).get(_EXPLAINED) == self.activity.key:  # by a context inside this one
            return own
        result = self._explained(own)
        vars(result)[_EXPLAINED] = self.activity.key
        return result

    def explain(self, own: BaseException) -> NoReturn:
        """Raises what :meth:`explained` gives, from what was raised here where that is something else."""
        explained = self.explained(own)
        if explained is own:
            raise own
        raise explained from own

    def _explained(self, own: BaseException) -> BaseException:
        if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
            return own
        rank, heart = dist.get_rank(), heartbeat()
        communication = _is_communication(own)
        try:
            if heart is None:
                raise StoreGone("it takes no connection")
            heart.failure_known = True
            if isinstance(own, PeerFailed):
                self._leave(heart, _Failure(own.rank, rank, own.step, str(own), own.reason))
                return own
            if not communication:
                first = self._leave(heart, self._own(rank, own))
                # A plain RuntimeError may be communication's, in words that are not known here.
                return own if first.rank == rank or type(own) is not RuntimeError else first.error(rank)
            return self._found(heart).error(rank)
        except StoreGone as gone:
            if not communication:
                return own
            keeper, keeping = ("whoever keeps the store", None) if heart is None else heart.keeper
            text = f"{keeper} is gone or hangs, and took along why communication failed {self._place()} ({gone})"
            return _Failure(keeping, rank, None, text).error(rank)

    def failure(self) -> PeerFailed | None:
        """What another rank has left, as the heartbeat saw it last."""
        known = self.activity.failure
        return None if known is None else _Failure(**json.loads(known)).error(dist.get_rank())

    def _say(self, failure: bytes) -> None:
        """For a rank that waits in C++ until its timeout, or, with NCCL, until the watchdog ends it."""
        first = _Failure(**json.loads(failure))
        if first.rank != dist.get_rank():
            _LOG.warning("rank %d waits %s in vain: %s", dist.get_rank(), self._place(), first.text)

    def _place(self) -> str:
        return f"in step {self.activity.step} of {self._what}"

    def _own(self, rank: int, own: BaseException) -> _Failure:
        reason = "".join(traceback.format_exception(own))
        return _Failure(rank, rank, self.activity.step, f"rank {rank} failed first, {self._place()}:\n{reason}", reason)

    # In the store.

    def _first(self, heart: Heartbeat) -> _Failure | None:
        key = self.activity.key
        text = self.activity.failure or heart.ask(lambda store: store.get(key) if store.check([key]) else None)
        return None if text is None else _Failure(**json.loads(text))

    def _leave(self, heart: Heartbeat, failure: _Failure) -> _Failure:
        """The failure that was left first: this one, or another."""
        text = json.dumps(asdict(failure))
        key = self.activity.key
        found = self.activity.failure or heart.ask(lambda store: store.compare_set(key, "", text))
        return _Failure(**json.loads(found))

    def _found(self, heart: Heartbeat) -> _Failure:
        """Why communication failed. One rank looks at the heartbeats, the others wait for what it finds."""
        asks, me = f"{self.activity.key}/asks", str(heart.rank)
        first = self._first(heart)
        looks = first is None and heart.ask(lambda store: store.compare_set(asks, "", me)) == me.encode()
        ranks = [rank for rank in self._ranks or range(heart.size) if rank != heart.rank]
        until = time.monotonic() + (4 if looks else 8) * heart.interval
        asked = heart.ask_ranks() if looks else 0
        while first is None:
            late = time.monotonic() > until
            if looks:
                beats = heart.read(ranks)
                silent = {rank for rank in ranks if _silent(asked, beats.get(rank))}
                if late or not silent:
                    return self._leave(heart, self._blamed(heart, beats, silent))
            elif late:  # who looked is gone too
                looks, until, asked = True, time.monotonic() + 4 * heart.interval, heart.ask_ranks()
            time.sleep(heart.interval / 4)
            first = self._first(heart)
        return first

    def _blamed(self, heart: Heartbeat, beats: dict[int, Beat], silent: set[int]) -> _Failure:
        """The ranks whose fault the failure most likely is."""
        mine = self.activity
        found: dict[_Guilt, list[tuple[int, str]]] = {}
        for rank in [rank for rank in self._ranks or range(heart.size) if rank != heart.rank]:
            guilt, text = _judged(beats.get(rank), mine, silent=rank in silent)
            found.setdefault(guilt, []).append((rank, text))
        guilt = min(found, default=_Guilt.NONE)
        if guilt == _Guilt.NONE:
            text = f"communication failed {self._place()}, though all ranks live and wait, as if for different things"
            return _Failure(None, heart.rank, mine.step, text)
        text = "; ".join(f"rank {rank} {text}" for rank, text in found[guilt][:8])
        if len(found[guilt]) > 8:
            text += f"; so do {len(found[guilt]) - 8} more"
        if guilt == _Guilt.UNSEEN:  # the one to blame is among them, and so are those that wait for it
            return _Failure(None, heart.rank, mine.step, f"{text} (others wait {self._place()})")
        rank = found[guilt][0][0]
        beat = beats.get(rank, Beat(0, ""))
        step = beat.does[mine.name].step if mine.name in beat.does else None
        return _Failure(rank, heart.rank, step, f"{text} (others wait {self._place()})", beat.ended or None)


class _Guilt(IntEnum):
    """Why a rank may be to blame for failed communication, the surest sign first."""

    ENDED = 0
    NO_HEARTBEAT = 1
    NOT_THERE = 2
    MAYBE = 3
    FOLLOWED = 4
    UNSEEN = 5
    NONE = 6


def _silent(asked: int, beat: Beat | None) -> bool:
    return beat is None or (beat.ended is None and beat.asked < asked)


def _judged(beat: Beat | None, mine: Activity, *, silent: bool) -> tuple[_Guilt, str]:
    """What a rank's heartbeat says of it.

    Args:
        beat: Its last.
        mine: Where this rank waits.
        silent: Whether it was its last for some time.
    """
    if beat is None:
        return _Guilt.NO_HEARTBEAT, "was never heard of"
    place = beat.does.get(mine.name)
    last = "" if place is None else f" in step {place.step}" if place.busy else f" after step {place.step}"
    if beat.ended is not None:
        text = f"ended{last}" + (f":\n{beat.ended}" if beat.ended else ", its program done")
        return _Guilt.FOLLOWED if _COMMUNICATION.search(beat.ended) else _Guilt.ENDED, text
    if silent:
        text = f"has no heartbeat any more{last}: it ended without a word, was stopped, or does not let Python run"
        return _Guilt.NO_HEARTBEAT, text
    if place is None:
        return _Guilt.NOT_THERE, f"takes no part, or not any more: its heartbeat goes on; it is at {beat.main}"
    still = f"hangs or is slow{last}: its heartbeat goes on, its step does not; it is at"
    if place.busy and not place.where:
        return _Guilt.UNSEEN, f"is{last}: its heartbeat goes on, in which line of code it is could not be told"
    if place.busy and place.waits is not True:
        return _Guilt.MAYBE if place.waits is None else _Guilt.NOT_THERE, f"{still} {place.where}"
    if not place.busy and place.count < mine.count:
        return _Guilt.NOT_THERE, f"{still} {beat.main}"
    return _Guilt.NONE, ""


_EXPLAINED: Final = "_wlb_explained"  # of an exception: the key of the failure that it is
_LOG: Final = logging.getLogger("wlb")
_COMMUNICATION: Final = re.compile(r"gloo|NCCL|Connection |[Tt]imed out|timeout caused pair closure|Broken pipe")


def _is_communication(reason: BaseException) -> bool:
    """Whether it says that communication failed, and so nothing of why."""
    known = type(reason) is RuntimeError and _COMMUNICATION.search(str(reason)) is not None
    return known or isinstance(reason, dist.DistError)


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
    ends the process, which then cannot raise `PeerFailed`. But whoever waits for a rank that has failed logs why, with
    the logger "wlb", within a second or so. Where gloo's ranks look for one that hangs, one whose GPU has not done what
    it was given (`loss.item()` behind a collective of NCCL) comes after one that has, which is nearer to the fault.

    The store outlives the workers under torchrun. Otherwise rank 0 keeps it: when it fails it stays for a second, so
    that the others know why; when it is killed they say that it is gone.

    Args:
        step: Its number, to tell. By default contexts are counted from 1.

    Raises:
        PeerFailed: Another rank failed, ended or hangs.
        BaseException: What was raised inside.
    """
    global _depth, _attempts
    if not _depth:
        _attempts += 1
        _training.attempt(_attempts)
    if not _depth or step is not None:
        _training.begin(_attempts if step is None else step)
    _depth += 1
    try:
        yield
    except _Escape as escape:
        own = escape.__cause__
    except BaseException as reason:
        own = reason
    else:
        return
    finally:
        _depth -= 1
        if not _depth:
            _training.end()
    assert own is not None
    _training.explain(own)


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
