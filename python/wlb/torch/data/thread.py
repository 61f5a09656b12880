"""Threads that work during training, and the common parts of loaders that use them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from typing_extensions import Self

import wlb
from wlb._errors import error
from wlb.reading.state import SavedChain, Snapshot
from wlb.torch.data.peers import Peers

S = TypeVar("S")
P = TypeVar("P")
T = TypeVar("T")


def background_thread(name: str) -> ThreadPoolExecutor:
    """One thread, on the CUDA device of the caller, if CUDA is in use.

    Otherwise the thread would begin with device 0, and the pinned memory and tensors of all ranks would be there.
    """
    device = torch.cuda.current_device() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]
    use_device = None if device is None else functools.partial(torch.cuda.set_device, device)
    return ThreadPoolExecutor(1, name, use_device)


@dataclass(frozen=True, eq=False)
class PreparedStep(Generic[S, P]):
    """A step, or None at the end of the iteration, and the position of its maker after it."""

    step: S | None
    position: P


class StepsAhead(Generic[S, P]):
    """Makes each step in a thread while the one before is trained.

    Args:
        make: makes the next step.
        position: the position before the first step.
        name: of the thread.
        argument: name in the error of a call after a failed step.

    Attributes:
        position: position after the last step taken, whatever was made ahead.
        begun: whether a step was asked for.
        ended: whether there was no further step.
    """

    def __init__(self, make: Callable[[], PreparedStep[S, P]], position: P, *, name: str, argument: str) -> None:
        self.position = position
        self.begun = self.ended = False
        self._make = make
        self._argument = argument
        self._thread = background_thread(name)
        self._ahead: Future[PreparedStep[S, P]] | None = None
        self._broken = False
        self._closed = False

    def take(self) -> S | None:
        """The next step, or None at the end; a later call begins again. An error of `make` ends it for good.

        Raises:
            wlb.WlbError: a step failed before, or it is closed.
        """
        self._check_open()
        if self._broken:
            message = "failed in an earlier step; load a state saved before into a new loader"
            raise error(self._argument, message)
        self.begun = True
        if self._ahead is None:
            self._broken = True  # if Ctrl-C came here, the step of a thread that may have begun would be lost
            self._ahead = self._thread.submit(self._make)
            self._broken = False
        wait([self._ahead])  # after Ctrl-C here, a further call gets the step
        self._broken = True
        made = self._ahead.result()
        self._ahead = None if made.step is None else self._thread.submit(self._make)
        self.position, self._broken, self.ended = made.position, False, made.step is None
        return made.step

    def after(self, work: Callable[[], T]) -> T:
        """Runs `work` in the thread, after the step that is being made there, and returns its result.

        Raises:
            wlb.WlbError: it is closed.
        """
        self._check_open()
        return self._thread.submit(work).result()

    def close(self) -> bool:
        """Waits for the thread; returns whether it was open."""
        self._thread.shutdown()
        was_open, self._closed = not self._closed, True
        return was_open

    def _check_open(self) -> None:
        if self._closed:
            raise error("loader", "is closed; load its state into a new one")


@dataclass(frozen=True, eq=False)
class Position:
    """Position of a loader after a step.

    Attributes:
        number: steps so far.
        snapshot: the state.
        chain: place of the next state in the chain.
        metrics: those of the packer; None without one.
    """

    number: int
    snapshot: Snapshot
    chain: SavedChain
    metrics: wlb.PackerMetrics | None


class StepIterator(Generic[S]):
    """Base of iterators whose steps ranks make together, in threads. A new loop continues after the last one."""

    _peers: Peers
    _steps: StepsAhead[S, Position]

    def __iter__(self) -> Self:
        """Itself."""
        return self

    @property
    def ended(self) -> bool:
        """Whether the last loop came to the end of the data."""
        return self._steps.ended

    def state_dict(self) -> dict[str, Any]:
        """State after the last step that this loader *yielded*, also if the next one failed.

        That is a step too far if something fetches ahead of training; save the `state` of the step that was trained
        instead. Needs no communication. Plain JSON values, if the states of its source are.
        """
        return self._steps.position.snapshot.state

    def close(self) -> None:
        """Waits until the thread is done with the other ranks, and destroys its process group. The state stays."""
        if self._steps.close():
            self._peers.close()
