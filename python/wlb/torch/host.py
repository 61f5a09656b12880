"""Process groups whose collectives run on the host, without a communicator."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from wlb._errors import error
from wlb.torch.collectives import GLOO_WAITS, device_of, timeout_of
from wlb.torch.subgroup import REDUCTIONS, Exchange, by_rank, refuse_others, register, unregister
from wlb.torch.tree import Tree

T = TypeVar("T")


class HostGroup(dist.ProcessGroup):
    """The ranks of a process group, which talk on the host through a `Tree`. Only its ranks make it, together.

    gloo would connect each rank with every other one when the group is made, and all ranks of the world would have to
    take part. Here a rank connects with its neighbours in a tree, and with ranks that it sends tokens to, over the
    network on which the launcher's store is (MASTER_ADDR); GLOO_SOCKET_IFNAME does not matter.

    It takes `all_gather`, `all_gather_into_tensor`, `all_gather_object`, `all_reduce`, `all_to_all_single`, `barrier`,
    `broadcast` and `scatter` of `torch.distributed`, and what is made of them. A collective has ended when it returns.

    Args:
        group: its ranks.
        description: purpose, for errors.
        timeout: how long a rank waits for another one.

    Raises:
        RuntimeError: a rank did not come in time, ended, or failed; from here and from each collective. It names them.
    """

    def __init__(self, group: dist.ProcessGroup, *, description: str, timeout: timedelta) -> None:
        ranks = dist.get_process_group_ranks(group)
        super().__init__(group.rank(), len(ranks))
        store = c10d._get_default_store()
        self.timeout = timeout
        self._tree = Tree(store, ranks, group.rank(), what=description, timeout=timeout)
        self._name = register(self, ranks, backend=("wlb_host", store), config="cpu:wlb_host")

    # torch calls these by place. Its stubs give each of them several forms.
    def getBackendName(self) -> str:
        """For messages of torch."""
        return "wlb_host"

    def getGroupName(self) -> str:
        """By which torch.compile finds it."""
        return self._name

    def getGroupDesc(self) -> str:
        """For messages of torch."""
        return self._tree.what

    @property
    def _device_types(self) -> Any:
        """Devices of its tensors."""
        return [torch.device("cpu")]

    def gather_objects(self, mine: T) -> list[T]:
        """An object of every rank."""
        return self._tree.gather(mine)

    def close(self) -> None:
        """Ends this rank's mailbox; `destroy_process_group` of the world does not."""
        unregister(self, self._name)
        self._tree.close()

    def all_gather_single(self, output: Tensor, sent: Tensor, options: Any = None) -> dist.Work:
        """`dist.all_gather_into_tensor`: the tensor of each rank, one after the other."""
        output.copy_(torch.stack(self.gather_objects(_own(sent))).view_as(output))
        return _done()

    def all_to_all_single(
        self, output: Tensor, sent: Tensor, arriving: list[int], leaving: list[int], options: Any = None
    ) -> dist.Work:
        """`dist.all_to_all_single`: rows by source of rows by destination."""
        come, go = by_rank(output, arriving, self.size()), by_rank(sent, leaving, self.size())
        outgoing = {rank: _own(part) for rank, part in enumerate(go) if part.numel()}
        incoming = [rank for rank, part in enumerate(come) if part.numel()]
        for rank, part in self._tree.exchange(outgoing, incoming).items():
            _fill(come[rank], part)
        return _done()

    # Names of both before torch 2.15.
    alltoall_base = all_to_all_single  # type: ignore[assignment]
    _allgather_base = all_gather_single  # type: ignore[assignment]

    def allgather(self, outputs: list[list[Tensor]], sent: list[Tensor], options: Any = None) -> dist.Work:  # type: ignore[override]
        """`dist.all_gather`: the tensor of each rank, in a list."""
        (come,), (mine,) = outputs, sent
        for into, part in zip(come, self.gather_objects(_own(mine)), strict=True):
            _fill(into, part)
        return _done()

    def allreduce(self, tensors: list[Tensor], options: Any = None) -> dist.Work:  # type: ignore[override]
        """`dist.all_reduce`: all ranks get the same bits, summed along the tree."""
        (tensor,) = tensors
        how = dist.ReduceOp.SUM if options is None else options.reduceOp
        average = how == dist.ReduceOp.AVG
        known = dist.ReduceOp.SUM if average else how
        reduction = next((reduced for name, reduced in REDUCTIONS if known == name), None)
        if reduction is None:
            raise error("op", f"= {how}: a group on the host has SUM, AVG, MAX and MIN", value=how)
        combine: Callable[[list[Tensor]], Tensor] = lambda parts: reduction(torch.stack(parts))  # noqa: E731
        result = self._tree.reduce(_own(tensor), combine)
        tensor.copy_(result / self.size() if average else result)
        return _done()

    def broadcast(self, tensors: list[Tensor], options: Any) -> dist.Work:  # type: ignore[override]
        """`dist.broadcast`: the tensor of one rank."""
        (tensor,) = tensors
        mine = _own(tensor) if self.rank() == options.rootRank else None
        tensor.copy_(self._tree.reduce(mine, lambda parts: next((part for part in parts if part is not None), None)))  # type: ignore[arg-type]
        return _done()

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], options: Any) -> dist.Work:  # type: ignore[override]
        """`dist.scatter`: a tensor for each rank, from one."""
        (output,), source = outputs, options.rootRank
        outgoing = dict(enumerate(map(_own, inputs[0]))) if self.rank() == source else {}
        _fill(output, self._tree.exchange(outgoing, [source])[source])
        return _done()

    def barrier(self, options: Any = None, **more: Any) -> dist.Work:  # type: ignore[override]
        """`dist.barrier`."""
        self.gather_objects(None)
        return _done()


refuse_others(
    HostGroup,
    "a group on the host",
    "all_gather, all_gather_into_tensor, all_reduce, all_to_all_single, barrier, broadcast and scatter",
)


def _fill(into: Tensor, part: Tensor) -> None:
    if into.shape != part.shape:
        message = f"has shape {[*into.shape]}, and {[*part.shape]} arrived"
        raise error("output", message, value=into.shape)
    into.copy_(part)


def _own(tensor: Tensor) -> Tensor:
    """A copy whose storage has nothing else: pickling sends storages whole."""
    return tensor.detach().contiguous().clone()


def _done() -> dist.Work:
    return Exchange([], [], [], None)


_HOSTS: weakref.WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = weakref.WeakKeyDictionary()


def host_group(group: dist.ProcessGroup | None = None, *, description: str) -> dist.ProcessGroup:
    """A group of the same ranks whose collectives run on the host: nobody waits for what a device still computes.

    It is the group itself, if its backend works on the host. Else it is a `HostGroup`, which is made once: the ranks of
    the group make the first call together.

    Args:
        group: None for all ranks.
        description: what the new group is for.
    """
    group = group or c10d._get_default_group()
    if device_of(group).type == "cpu":
        return group
    if group not in _HOSTS:
        _HOSTS[group] = on_host(group, description=description)
    return _HOSTS[group]


def on_host(group: dist.ProcessGroup, *, description: str) -> HostGroup:
    """A new group of the same ranks on the host, for a thread of their own; they make it together.

    Its ranks wait for each other as long as those of the given group, and at least as long as gloo's.
    """
    longest = max(timeout_of(group, device_of(group)) or GLOO_WAITS, GLOO_WAITS)
    return HostGroup(group, description=description, timeout=longest)
