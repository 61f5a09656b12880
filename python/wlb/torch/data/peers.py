"""The ranks that read documents together: they share what each knows, and send tokens to the ranks that train them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

import wlb
from wlb._errors import error
from wlb.torch.host import HostGroup, on_host

T = TypeVar("T")


class Peers:
    """The ranks that read documents together, or a single rank. All ranks call each method except `close`.

    They communicate over a group of their own, because a thread must not interfere with training, and on the host,
    because no kernel should wait for documents. All ranks of the group make one at the same point.

    The timeout is that of the given group, or gloo's 30 minutes if that is longer: a rank may be behind the others
    while it saves a checkpoint.

    Args:
        group: its ranks.
        description: purpose of the new group.

    Attributes:
        rank: this rank in the group.
        size: ranks of the group.
        ranks: their numbers in the world.
    """

    def __init__(self, group: dist.ProcessGroup | None, *, description: str) -> None:
        self._group: HostGroup | None = None
        if group is not None:
            self._group = on_host(group, description=description)
        self.rank = 0 if self._group is None else self._group.rank()
        self.size = 1 if self._group is None else self._group.size()
        self.ranks = [0] if self._group is None else dist.get_process_group_ranks(self._group)

    def close(self) -> None:
        """Closes the group of their own."""
        if self._group is not None:
            self._group.close()

    def gather(self, mine: dict[str, Any]) -> list[dict[str, Any]]:
        """`mine` of every rank."""
        if self._group is None:
            return [mine]
        return self._group.gather_objects(mine)

    def agree(
        self,
        parts: list[dict[str, Any]],
        failure: BaseException | None,
        *,
        argument: str,
        what: str,
        step: int | None = None,
    ) -> None:
        """Raises on all ranks if some failed or disagree: each part has its "failure" or None, and an "agreement".

        Args:
            parts: results of `gather`, by rank.
            failure: this rank's own failure, or None.
            argument: name for the error.
            what: what has to be the same on all ranks, in words.
            step: the number of the step, if it is known.

        Raises:
            wlb.WlbError: naming the ranks.
            BaseException: `failure`, if it should end the program, such as `SystemExit`.
        """
        if failure is not None and not isinstance(failure, Exception):
            raise failure
        if isinstance(failure, wlb.WlbError) and self.size == 1:
            raise failure
        failures = [
            f"rank {rank}: {part['failure']}" for rank, part in zip(self.ranks, parts, strict=True) if part["failure"]
        ]
        if len(failures) == self.size > 1 and len({part["failure"] for part in parts}) == 1:
            failures = [f"all ranks: {parts[0]['failure']}"]
        if failures:
            in_step = "" if step is None else f" in step {step}"
            failed = f"{step} failed" if argument == "step" else f"failed{in_step}"
            raise error(argument, f"{failed} on {'; '.join(failures)}") from failure
        pairs = zip(self.ranks, parts, strict=True)
        others = [rank for rank, part in pairs if part["agreement"] != parts[0]["agreement"]]
        if others:
            raise error("group", f"has ranks {others} with another {what} than rank {self.ranks[0]}", value=others)

    def finished(self, work: Callable[[], T], *, step: int) -> T:
        """Runs `work` for a step and returns its result once all ranks succeeded, so that no rank continues alone.

        Raises:
            wlb.WlbError: on every rank, if it failed on some.
        """
        failure: BaseException | None = None
        result: list[T] = []
        try:
            result = [work()]
        except BaseException as cause:  # of any kind: the other ranks wait for an answer
            failure = cause
        parts = self.gather({"failure": failure_text(failure), "agreement": None})
        self.agree(parts, failure, step=step, argument="step", what="step")
        return result[0]

    def all_to_all(
        self, outgoing: list[list[NDArray[Any]]], incoming: list[list[int]]
    ) -> list[Iterator[NDArray[np.int64]]]:
        """Arrays by source, in the order in which it sends them.

        Args:
            outgoing: int [n] each, by destination.
            incoming: their sizes, by source.
        """
        sent = [array.astype(np.int64, copy=False) for arrays in outgoing for array in arrays]
        joined = np.concatenate([np.empty(0, np.int64), *sent])
        counts = [sum(sizes) for sizes in incoming]
        if self._group is None:
            arrived = joined
        else:
            received = torch.empty(sum(counts), dtype=torch.int64)
            given = [sum(array.size for array in arrays) for arrays in outgoing]
            sent_tensor = torch.from_numpy(joined)
            dist.all_to_all_single(received, sent_tensor, counts, given, group=self._group)
            arrived = received.numpy()
        by_source = np.split(arrived, np.cumsum(counts)[:-1])
        return [iter(np.split(array, np.cumsum(sizes)[:-1])) for array, sizes in zip(by_source, incoming, strict=True)]


def failure_text(failure: BaseException | None) -> str | None:
    """A failure as text for the other ranks."""
    return None if failure is None else f"{type(failure).__name__}: {failure}"
