"""Threads that work beside training, and what the loaders that use them have in common."""

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
from wlb.torch.data.peers import Peers
from wlb.torch.data.state import Link, Snapshot

S = TypeVar("S")
P = TypeVar("P")
T = TypeVar("T")


def background_thread(name: str) -> ThreadPoolExecutor:
    """One thread, on the CUDA device of the one that makes it, if CUDA is in use.

    A thread begins with device 0, where pinned memory and what it makes would go from all ranks.
    """
    device = torch.cuda.current_device() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]
    use_device = None if device is None else functools.partial(torch.cuda.set_device, device)
    return ThreadPoolExecutor(1, name, use_device)


@dataclass(frozen=True, eq=False)
class PreparedStep(Generic[S, P]):
    """A step, None where the iteration ends, and where its maker stands after it."""

    step: S | None
    position: P


class StepsAhead(Generic[S, P]):
    """Makes steps in a thread, each while the one before is trained.

    Args:
        make: Makes the next step.
        position: Where one stands before the first.
        name: Of the thread.
        argument: What an error names that comes after a step that failed.

    Attributes:
        position: After the last step taken, whatever was made ahead.
        begun: Whether a step was asked for.
    """

    def __init__(self, make: Callable[[], PreparedStep[S, P]], position: P, *, name: str, argument: str) -> None:
        self.position = position
        self.begun = False
        self._make = make
        self._argument = argument
        self._thread = background_thread(name)
        self._ahead: Future[PreparedStep[S, P]] | None = None
        self._broken = False
        self._closed = False

    def take(self) -> S | None:
        """The next step, None at the end: the next one begins anew. What `make` raises ends it for good.

        Raises:
            wlb.WlbError: A step failed before, or it is closed.
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
        self.position, self._broken = made.position, False
        return made.step

    def after(self, work: Callable[[], T]) -> T:
        """Runs `work` in the thread, after the step that is being made there, and gives its result.

        Raises:
            wlb.WlbError: It is closed.
        """
        self._check_open()
        return self._thread.submit(work).result()

    def close(self) -> bool:
        """Waits for the thread; whether it was open."""
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
        number: Steps so far.
        snapshot: The state.
        link: The place of the next state in the chain.
        metrics: Those of the packer; None where there is none.
    """

    number: int
    snapshot: Snapshot
    link: Link
    metrics: wlb.PackerMetrics | None


class StepIterator(Generic[S]):
    """Base of iterators whose steps ranks make together, in threads: a loop that was left goes on in the next one."""

    _peers: Peers
    _steps: StepsAhead[S, Position]

    def __iter__(self) -> Self:
        """Itself."""
        return self

    def state_dict(self) -> dict[str, Any]:
        """State after the last step that this loader *gave*, also if the next one failed.

        A step too far wherever something fetches ahead of training; save the `state` of the step that was trained
        instead. No communication. Plain JSON values, if those that its source saves of itself are.
        """
        return self._steps.position.snapshot.state

    def close(self) -> None:
        """Waits for what the thread does with the other ranks, and destroys its process group. The state stays."""
        if self._steps.close():
            self._peers.close()
