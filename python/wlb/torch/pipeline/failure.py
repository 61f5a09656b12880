"""A rank that fails tells the others why."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

_KEY = "wlb/pipeline/first_failure"


class PeerFailed(RuntimeError):
    """Another rank failed first; the message has its traceback, `rank` is its global rank."""

    def __init__(self, rank: int, reason: str) -> None:
        super().__init__(f"rank {rank} failed first:\n{reason}")
        self.rank = rank


class _Escape(BaseException):
    """Carries an exception through torch's schedules.

    On an `Exception` they wait for what they have sent, which the peers, waiting for this rank, may never receive.
    """


@contextmanager
def computing() -> Iterator[None]:
    """Around what a stage computes: if it fails, its reason is left in the store before anything else happens."""
    try:
        yield
    except Exception as reason:
        _publish(reason)
        raise _Escape from reason


@contextmanager
def explained() -> Iterator[None]:
    """Around a whole step: raises what failed here, or `PeerFailed` if the cause lies on another rank.

    A peer notices when the connection closes, which is when the failed process ends, or else after the timeout of the
    process group.
    """
    try:
        yield
    except _Escape as escape:
        own = escape.__cause__
        assert own is not None
    except Exception as reason:
        own = reason
        _publish(reason)
    else:
        return
    first = _first()
    if first is not None and first[0] != dist.get_rank():
        raise PeerFailed(*first) from own
    raise own


def _publish(reason: BaseException) -> None:
    text = "".join(traceback.format_exception(reason))
    try:
        dist.distributed_c10d._get_default_store().compare_set(_KEY, "", f"{dist.get_rank()}\n{text}")
    except RuntimeError:  # whoever keeps the store is gone; the reason is raised here all the same
        return


def _first() -> tuple[int, str] | None:
    try:
        store = dist.distributed_c10d._get_default_store()
        if not store.check([_KEY]):
            return None
        rank, _, text = store.get(_KEY).decode().partition("\n")
    except RuntimeError:
        return None
    return int(rank), text
