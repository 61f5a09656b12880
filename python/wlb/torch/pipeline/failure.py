"""A rank that fails tells the others why."""

from __future__ import annotations

import inspect
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist


class PeerFailed(RuntimeError):
    """Another rank failed first; the message has its traceback, `rank` is its global rank."""

    def __init__(self, rank: int, reason: str) -> None:
        super().__init__(f"rank {rank} failed first:\n{reason}")
        self.rank = rank


class _Escape(BaseException):
    """Carries an exception through torch's schedules.

    On an `Exception` they wait for what they have sent, which the peers, waiting for this rank, may never receive.
    """


class _Step:
    """Where this process is: ranks that take their steps together look for failures in the same place."""

    number = 0
    depth = 0  # of `failures_explained` inside one another


@contextmanager
def failures_explained() -> Iterator[None]:
    """Around a training step: a rank that fails leaves its reason to the others, which wait for it in vain.

    ```
    with failures_explained():
        micro_batches = next(loader)
        pipeline_step(stages, micro_batches, loss_fn=loss_fn)
        optimizer.step()
    ```

    An exception raised inside is written to the store of the default process group, then raised as it is. If it may
    come from communication (a plain `RuntimeError`, or one of `torch.distributed`) and another rank failed first in
    this step, `PeerFailed` is raised from it instead. `pipeline_step` does the same for itself, so alone it needs no
    such context.

    Steps are counted, so that a failure that was survived does not explain a later one: all ranks must enter as many
    contexts (of this kind or `pipeline_step`; those inside another one do not count).

    When do the others notice? With gloo, as soon as the failed process ends, or else after the timeout of the process
    group. NCCL reports nothing to Python: after the timeout, its watchdog ends the process, which then cannot raise
    `PeerFailed`. The reason is in what the failed rank itself prints, and in the store, which under torchrun outlives
    the workers; otherwise rank 0 takes it with it.

    Raises:
        PeerFailed: Another rank failed first in this step; with its traceback.
        Exception: What was raised inside.
    """
    if not _Step.depth:
        _Step.number += 1
    _Step.depth += 1
    try:
        yield
    except PeerFailed:
        raise
    except _Escape as escape:
        own = escape.__cause__
        assert own is not None
    except Exception as reason:
        own = reason
        _publish(reason)
    else:
        return
    finally:
        _Step.depth -= 1
    if type(own) is RuntimeError or isinstance(own, dist.DistError):
        first = _first()
        if first is not None and first[0] != dist.get_rank():
            raise PeerFailed(*first) from own
    raise own


@contextmanager
def computing() -> Iterator[None]:
    """Around what a stage computes: if it fails, its reason is left in the store before anything else happens."""
    try:
        yield
    except Exception as reason:
        _publish(reason)
        raise _Escape from _unwrapped(reason)


def _unwrapped(reason: Exception) -> BaseException:
    """What the module raised, of which torch makes the cause of a plain `RuntimeError` that tells stage and inputs."""
    own, text = reason.__cause__, str(reason)
    if own is None or not ("failed to run forward" in text or "Failed to run stage backward" in text):
        return reason
    if sys.version_info >= (3, 11):
        own.add_note(inspect.cleandoc(text))
    return own


def _key() -> str:
    return f"wlb/first_failure/{_Step.number}"


def _publish(reason: BaseException) -> None:
    if not dist.is_initialized():
        return
    text = "".join(traceback.format_exception(reason))
    try:
        dist.distributed_c10d._get_default_store().compare_set(_key(), "", f"{dist.get_rank()}\n{text}")
    except RuntimeError:  # whoever keeps the store is gone; the reason is raised here all the same
        return


def _first() -> tuple[int, str] | None:
    if not dist.is_initialized():
        return None
    try:
        store = dist.distributed_c10d._get_default_store()
        if not store.check([_key()]):
            return None
        rank, _, text = store.get(_key()).decode().partition("\n")
    except RuntimeError:
        return None
    return int(rank), text
