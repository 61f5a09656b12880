"""One rank reads for all stages and tensor-parallel ranks of the same documents, and sends each what it needs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from wlb.torch.host import host_group

T = TypeVar("T")


@dataclass(frozen=True)
class Sharing(Generic[T]):
    """The ranks that train the same documents: tensor-parallel ranks of all stages. They call each method together.

    Values for all ranks first go along the stages, between the first tensor-parallel ranks, and then to the other
    tensor-parallel ranks. Tokens go to the ranks of the first stage, labels to those of the last one.

    Attributes:
        tp: the tensor-parallel ranks of this stage.
        pp: the stages of this tensor-parallel rank.
        device: the device of tensors to send.
        predicts: whether the last stage predicts further tokens, and so needs tokens, too.
        each: whether every rank reads for itself and nothing is sent. Needed if steps are read inside a schedule, where
            a stage that waited for the next one would wait forever.
    """

    tp: dist.ProcessGroup
    pp: dist.ProcessGroup
    device: torch.device
    predicts: bool = False
    each: bool = False

    @property
    def leads(self) -> bool:
        """Whether this rank is the first of those that train the same documents."""
        return bool(self.tp.rank() == 0 and self.pp.rank() == 0)

    @property
    def reads(self) -> bool:
        """Whether this rank reads."""
        return self.each or self.leads

    @property
    def first(self) -> bool:
        """Whether this rank is of the first stage."""
        return bool(self.pp.rank() == 0)

    @property
    def last(self) -> bool:
        """Whether this rank is of the last stage."""
        return bool(self.pp.rank() == self.pp.size() - 1)

    def header(self, mine: T | None) -> T:
        """Sends the reading rank's value to all ranks. All of them make the first call together."""
        if self.each and mine is not None:
            return mine
        # On the host no rank waits for its device. Every rank makes both groups, whether or not it sends in them.
        hosts = [host_group(group, description="wlb: headers of steps") for group in (self.pp, self.tp)]
        box: list[Any] = [mine]
        for group, sends in zip(hosts, (self.tp.rank() == 0, True), strict=True):
            if group.size() > 1 and sends:
                source = dist.get_process_group_ranks(group)[0]
                dist.broadcast_object_list(box, src=source, group=group)
        given: T = box[0]
        return given

    def values(self, mine: tuple[Tensor, Tensor] | None, size: int) -> tuple[Tensor | None, Tensor | None]:
        """Tokens on the first stage, labels on the last one: int64 [size] each; None where they are not needed.

        Args:
            mine: both, on the reading rank, on `device`.
            size: of each, known to all.
        """
        tokens, labels = (None, None) if mine is None else mine
        return (
            self._sent(tokens, size, to_first=True, to_last=self.predicts),
            self._sent(labels, size, to_first=False, to_last=True),
        )

    def weights(self, mine: Tensor | None, size: int) -> Tensor | None:
        """Weights of labels on the last stage, float32 [size]; None elsewhere.

        Args:
            mine: on the reading rank, on `device`.
            size: known to all.
        """
        bits = None if mine is None else mine.double().view(torch.int64)
        found = self._sent(bits, size, to_first=False, to_last=True)
        return None if found is None else found.view(torch.float64).float()

    def _sent(self, values: Tensor | None, size: int, *, to_first: bool, to_last: bool) -> Tensor | None:
        if self.each:
            return values if (to_first and self.first) or (to_last and self.last) else None
        if to_last and self.pp.size() > 1 and self.tp.rank() == 0 and size:
            stages = dist.get_process_group_ranks(self.pp)
            if values is not None:
                dist.send(values, dst=stages[-1], group=self.pp)
            elif self.last:
                values = torch.empty(size, dtype=torch.int64, device=self.device)
                dist.recv(values, src=stages[0], group=self.pp)
        if not (to_first and self.first) and not (to_last and self.last):
            return None
        if values is None:
            values = torch.empty(size, dtype=torch.int64, device=self.device)
        if self.tp.size() > 1 and size:
            dist.broadcast(values, src=dist.get_process_group_ranks(self.tp)[0], group=self.tp)
        return values
