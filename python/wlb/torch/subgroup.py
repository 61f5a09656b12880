"""Some ranks of a process group as a process group, without a communicator of their own."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, Final, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from wlb._errors import error
from wlb.torch.collectives import device_of

_COUNT: Final = itertools.count()
REDUCTIONS: Final[list[tuple[Any, Callable[[Tensor], Tensor]]]] = [
    (dist.ReduceOp.SUM, lambda every: every.sum(0)),
    (dist.ReduceOp.AVG, lambda every: every.sum(0) / len(every)),
    (dist.ReduceOp.MAX, lambda every: every.amax(0)),
    (dist.ReduceOp.MIN, lambda every: every.amin(0)),
]


def register(group: dist.ProcessGroup, ranks: Sequence[int], *, backend: Any, config: str) -> str:
    """Makes a group known to functions of torch.distributed that take a group, and to torch.compile; gives its name.

    Args:
        group: a group that torch did not make.
        ranks: its ranks, in its order, as ranks of the world.
        backend: name of its backend, and its store.
        config: its backends by device.
    """
    name = f"wlb_group_{next(_COUNT)}"  # of this process: no other rank needs to know it
    c10d._world.pg_map[group] = backend
    c10d._world.pg_group_ranks[group] = {rank: index for index, rank in enumerate(ranks)}
    c10d._world.pg_backend_config[group] = config
    c10d._register_process_group(name, group)  # type: ignore[attr-defined,arg-type]
    return name


def unregister(group: dist.ProcessGroup, name: str) -> None:
    """Makes torch forget a group that `register` made known."""
    for known in (c10d._world.pg_map, c10d._world.pg_group_ranks, c10d._world.pg_backend_config):
        known.pop(group, None)
    c10d._unregister_process_group(name)  # type: ignore[attr-defined,arg-type]


class Subgroup(dist.ProcessGroup):
    """Some ranks of a process group, which talk by send and receive over the communicator of that group.

    torch makes a group collectively: `new_group` is called by every rank of the world, and `split_group` by every rank
    of the parent. `use_local_synchronization` spares that, but then the name of a group follows from the groups that
    the rank was in before. Ranks with another history wait for each other for ever: in the group itself (torch 2.11),
    or in the next group that the whole world makes (torch 2.15). Where the world is bound to a device, NCCL waits too.
    A subgroup needs none of that: nothing is agreed on, nothing is connected, and it costs no memory on the device.

    It takes `all_gather`, `all_gather_into_tensor`, `all_gather_object`, `all_to_all_single`, `all_reduce`, `broadcast`
    and `barrier` of `torch.distributed`, and refuses other collectives by name. All-to-all takes as long as in a group
    that torch made, because NCCL makes it of sends and receives too. The others send each tensor to every rank, so they
    take longer in large groups over several nodes.

    The parent's ranks must agree on the order of their subgroups, as they do for NCCL's communicators.

    Args:
        parent: a group that torch made, in which this rank is; None for all ranks.
        ranks: ranks of the subgroup, in its order, as ranks of the world. This rank is one of them.

    Raises:
        WlbError: this rank is not in the subgroup, or the parent does not have all ranks.

    Complexity:
        Nothing is communicated. A collective of `n` ranks takes `n - 1` sends and receives on each rank.
    """

    def __init__(self, parent: dist.ProcessGroup | None, ranks: Sequence[int]) -> None:
        ranks, me = list(ranks), dist.get_rank()
        parent = parent or c10d._get_default_group()
        if me not in ranks:
            raise error("ranks", f"= {ranks}: rank {me}, which asks, is not among them", value=ranks)
        if missing := sorted({*ranks} - {*(known := dist.get_process_group_ranks(parent))}):
            raise error("ranks", f"= {ranks}: ranks {missing} are not in the parent {known}", value=ranks)
        super().__init__(ranks.index(me), len(ranks))
        self._parent, self._ranks = parent, ranks
        config = dist.get_backend_config(parent)
        self._name = register(self, ranks, backend=c10d._world.pg_map[parent], config=config)

    # torch calls these by place. Its stubs give each of them several forms.
    def getBackendName(self) -> str:
        """For messages of torch."""
        return "wlb_subgroup"

    def getGroupName(self) -> str:
        """By which torch.compile finds it."""
        return self._name

    def getGroupDesc(self) -> str:
        """For messages of torch."""
        return f"ranks {self._ranks}"

    @property
    def _device_types(self) -> Any:
        """Devices of its tensors."""
        return self._parent._device_types

    def _get_backend(self, device: torch.device) -> Any:
        """What the ranks talk through."""
        return self._parent._get_backend(device)

    def all_to_all_single(
        self, output: Tensor, sent: Tensor, arriving: list[int], leaving: list[int], options: Any = None
    ) -> dist.Work:
        """`dist.all_to_all_single`: rows by source of rows by destination."""
        return self._exchange(by_rank(output, arriving, self.size()), by_rank(sent, leaving, self.size()))

    def all_gather_single(self, output: Tensor, sent: Tensor, options: Any = None) -> dist.Work:
        """`dist.all_gather_into_tensor`: the tensor of each rank, one after the other."""
        return self._exchange(output.view(self.size(), *sent.shape).unbind(), [sent] * self.size())

    # Names of both before torch 2.15.
    alltoall_base = all_to_all_single  # type: ignore[assignment]
    _allgather_base = all_gather_single  # type: ignore[assignment]

    def allgather(self, outputs: list[list[Tensor]], sent: list[Tensor], options: Any = None) -> dist.Work:  # type: ignore[override]
        """`dist.all_gather`: the tensor of each rank, in a list."""
        (come,), (mine,) = outputs, sent
        return self._exchange(come, [mine.contiguous()] * self.size())

    def allreduce(self, tensors: list[Tensor], options: Any = None) -> dist.Work:  # type: ignore[override]
        """`dist.all_reduce`: every rank adds up the same tensors in the same way, so all get the same bits."""
        (tensor,) = tensors
        how = dist.ReduceOp.SUM if options is None else options.reduceOp
        reduction = next((reduced for known, reduced in REDUCTIONS if how == known), None)
        if reduction is None:
            raise error("op", f"= {how}: a subgroup has SUM, AVG, MAX and MIN", value=how)
        every = tensor.new_empty(self.size(), *tensor.shape)
        sent = tensor.contiguous()
        return self._exchange(every.unbind(), [sent] * self.size(), lambda: tensor.copy_(reduction(every)))

    def broadcast(self, tensors: list[Tensor], options: Any) -> dist.Work:  # type: ignore[override]
        """`dist.broadcast`: the tensor of one rank."""
        (tensor,) = tensors
        nothing, source = tensor.new_empty(0), options.rootRank
        mine = self.rank() == source
        given = tensor.contiguous()
        come = [given if rank == source else nothing for rank in range(self.size())]
        return self._exchange(come, [given if mine else nothing] * self.size(), lambda: tensor.copy_(given))

    def barrier(self, options: Any = None, **more: Any) -> dist.Work:  # type: ignore[override]
        """`dist.barrier`."""
        return self.allreduce([torch.zeros(1, device=device_of(self))])

    def _exchange(
        self, come: Sequence[Tensor], go: Sequence[Tensor], then: Callable[[], object] | None = None
    ) -> dist.Work:
        """Sends `go[r]` to each rank `r` of the subgroup, and receives `come[r]` from it."""
        operations = []
        for rank, (arriving, leaving) in enumerate(zip(come, go, strict=True)):
            if rank == self.rank():
                if arriving is not leaving:
                    arriving.copy_(leaving)
                continue
            for how, tensor in ((dist.irecv, arriving), (dist.isend, leaving)):
                if tensor.numel():
                    operations.append(dist.P2POp(how, tensor, self._ranks[rank], self._parent))
        works = dist.batch_isend_irecv(operations) if operations else []
        return Exchange(self._ranks, operations, works, then)


def by_rank(rows: Tensor, sizes: list[int], ranks: int) -> tuple[Tensor, ...]:
    """The rows of each rank; by default all have equally many."""
    return rows.split_with_sizes(sizes or [rows.shape[0] // ranks] * ranks)


def refuse_others(kind: type[dist.ProcessGroup], what: str, known: str) -> None:
    """Lets a group refuse by name the collectives that it has not: torch would say that its backend is wrong."""

    def refused(name: str) -> Callable[..., NoReturn]:
        def refuse(self: dist.ProcessGroup, *args: Any, **kwargs: Any) -> NoReturn:
            raise error("group", f"is {what}, which has {known}, but no {name}", value=self)

        return refuse

    for name in _COLLECTIVES:
        if name not in vars(kind):
            setattr(kind, name, refused(name))


_COLLECTIVES: Final = (
    *("allgather_coalesced", "allreduce_coalesced", "alltoall", "gather", "gather_single", "reduce", "reduce_scatter"),
    *("_reduce_scatter_base", "reduce_scatter_single", "scatter", "send", "recv", "recv_anysource"),
)
refuse_others(
    Subgroup,
    "a subgroup of wlb",
    "all_gather, all_gather_into_tensor, all_to_all_single, all_reduce, broadcast and barrier",
)


class Exchange(dist.Work):
    """Sends and receives under way, with the tensors that they use."""

    def __init__(
        self, ranks: list[int], operations: list[Any], works: list[Any], then: Callable[[], object] | None
    ) -> None:
        super().__init__()
        self._ranks, self._operations, self._works, self._then = ranks, operations, works, then

    def is_completed(self) -> bool:
        """Whether nothing is under way."""
        return all(work.is_completed() for work in self._works)

    def wait(self, timeout: Any = None) -> bool:
        """Waits until all tensors arrived.

        Raises:
            RuntimeError: some did not; the message has the rank that did not send or receive.
        """
        known = len(self._works) == len(self._operations)  # else all went as one
        peers = [f"rank {operation.peer}" for operation in self._operations] if known else ["a rank"]
        for work, peer in zip(self._works, peers, strict=False):
            self._finish(work, peer, timeout)
        self._works, self._operations = [], []
        if self._then is not None:
            done, self._then = self._then, None
            done()
        return True

    def _finish(self, work: Any, peer: str, timeout: Any) -> None:
        try:
            work.wait() if timeout is None else work.wait(timeout)
        except RuntimeError as cause:
            message = f"ranks {self._ranks} wait for {peer}, which failed or is late: {cause}"
            raise RuntimeError(message) from cause
