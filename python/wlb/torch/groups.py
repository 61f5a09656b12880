"""The device mesh, and the context-parallel groups of plans."""

from __future__ import annotations

import itertools
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from wlb._errors import check_integer, error
from wlb.torch.collectives import GLOO_WAITS, can_split, timeout_of
from wlb.torch.data.batch import PackedBatch
from wlb.torch.store import meet
from wlb.torch.subgroup import Subgroup

MESH_DIMS = ("pp", "dp", "cp", "tp")


def build_mesh(*, pp: int = 1, dp: int = 1, cp: int = 1, tp: int = 1, device_type: str | None = None) -> DeviceMesh:
    """The 4-D device mesh, outermost dimension first: neighbours in tp are neighbours in rank.

    Args:
        pp: pipeline ranks. The product of all four is the world size.
        dp: data-parallel ranks.
        cp: context-parallel ranks.
        tp: tensor-parallel ranks.
        device_type: "cuda", "cpu"; default CUDA where there is one.

    Returns:
        A mesh with dimensions ``("pp", "dp", "cp", "tp")``.

    Raises:
        WlbError: for a size below 1, or a product that is not the world size; before any communication.
    """
    sizes = {"pp": pp, "dp": dp, "cp": cp, "tp": tp}
    for name, size in sizes.items():
        if size < 1:
            raise error(name, f"= {size}: must be at least 1", value=size)
    world_size = dist.get_world_size()
    if (product := pp * dp * cp * tp) != world_size:
        layout = " x ".join(f"{name} {size}" for name, size in sizes.items())
        raise error("dp", f"= {dp}: {layout} = {product} ranks, but the world has {world_size}", value=dp)
    device_type = device_type or ("cuda" if torch.cuda.is_available() else "cpu")
    return init_device_mesh(device_type, tuple(sizes.values()), mesh_dim_names=MESH_DIMS)


def data_and_context(mesh: DeviceMesh) -> DeviceMesh:
    """The dp and cp dimensions as one: the ranks that hold the same parameters, which FSDP shards over.

    Args:
        mesh: from `build_mesh`.

    Returns:
        A 1-D mesh named "dp_cp".
    """
    root = mesh._get_root_mesh()
    if "dp_cp" in root._flatten_mapping:  # made once: it creates process groups
        return root._flatten_mapping["dp_cp"]
    return mesh["dp", "cp"]._flatten("dp_cp")


def ranks_of_step(step: Any, group: dist.ProcessGroup | None = None) -> dist.ProcessGroup | None:
    """The ranks that share a step, data- and context-parallel; None for one process without process groups.

    All functions that add up over a step's ranks take their group from here.

    Args:
        step: a `Step` or a `DynamicCpStep`.
        group: the ranks that should share it; None for all.

    Raises:
        WlbError: another number of ranks shares the step. Raised on every rank, before any communication.
    """
    if group is None and dist.is_initialized():
        group = dist.group.WORLD
    size = 1 if group is None else dist.get_world_size(group)
    if size != step.num_ranks:
        message = (
            f"has {size} ranks, but {step.num_ranks} data- and context-parallel ranks share step {step.number}: give "
            "group=wt.data_and_context(mesh).get_group(), and loaders the dp and cp ranks of the same mesh"
        )
        raise error("group", message, value=size)
    return group


def expert_ranks(mesh: DeviceMesh, *, ep: int) -> DeviceMesh:
    """The dp x cp ranks as "edp" x "ep": neighbours divide a layer's experts, and those with the same ones add up.

    As in Megatron-Core and torchtitan, expert parallelism needs no ranks of its own. Attention does not depend on it,
    so the ranks of an ep group may have different documents, or parts of the same documents.

    Args:
        mesh: from `build_mesh`.
        ep: ranks among which a layer's experts are divided.

    Returns:
        A 2-D mesh with dimensions ``("edp", "ep")``: `ep` neighbours in "ep"; in "edp" the ranks that hold the same
        experts, over which their gradients are added up and sharded.

    Raises:
        WlbError: for an `ep` below 1, or that does not divide dp x cp.

    Complexity:
        Collective: every rank calls it once, at the same point.
    """
    check_integer("ep", ep, minimum=1)
    ranks = data_and_context(mesh)
    if ranks.size() % ep:
        raise error("ep", f"= {ep}: does not divide dp x cp = {ranks.size()} ranks", value=ep)
    return ranks._unflatten(0, (ranks.size() // ep, ep), ("edp", "ep"))


class ContextParallelGroups:
    """The context-parallel groups that plans choose for micro-batches, among the dp x cp ranks of a (pp, tp) position.

    A plan gives documents to a run of neighbours: `size` ranks from the `first` on. The runs of a size that is a power
    of two, aligned to it, and the run of all ranks are groups with a communicator, split from the world's when this
    object is made. That takes a backend that torch can split: NCCL if `init_process_group` was given a `device_id`,
    and gloo from torch 2.15 on. All other runs are a `Subgroup`: their ranks send and receive over the communicator of
    the run of all ranks or, where torch cannot split, over the world's. So no plan makes a group during training, where
    ranks that have different histories would wait for each other.

    Args:
        mesh: from `build_mesh`.

    Raises:
        WlbError: the mesh has other dimensions.
        RuntimeError: some ranks did not come within the timeout of the process group; the message has their numbers.

    Complexity:
        Collective: every rank calls it once, at the same point. For `n` dp x cp ranks it makes at most `log2(n) + 1`
        groups on each rank. NCCL connects ranks when they first exchange something.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        if mesh.mesh_dim_names != MESH_DIMS:
            raise error("mesh", f"has dimensions {mesh.mesh_dim_names}: must have {MESH_DIMS}", value=mesh)
        device = torch.device(mesh.device_type)
        timeout = timeout_of(None, device) or GLOO_WAITS
        meet("context-parallel groups", timeout=timeout)
        pp, dp, cp, tp = mesh.mesh.shape
        positions = mesh.mesh.permute(0, 3, 1, 2).reshape(pp * tp, dp * cp).tolist()
        self._stage = next(ranks for ranks in positions if dist.get_rank() in ranks)
        self._groups: dict[tuple[int, int], dist.ProcessGroup] = {}  # by first position and size
        self._parent: dist.ProcessGroup | None = None
        count = dp * cp
        if count == 1:
            return
        if can_split(device):
            for size in (*itertools.takewhile(lambda size: size < count, (2**n for n in itertools.count(1))), count):
                self._split(positions, size, timeout)
            self._parent = self._groups[0, count]
        elif device.type != "cpu":  # all ranks have to take part in the first exchange of a communicator of NCCL
            dist.all_reduce(torch.zeros(1, device=device))

    def _split(self, positions: list[list[int]], size: int, timeout: timedelta) -> None:
        """Makes this rank's aligned run of that size, if it is in one; a collective of the world."""
        runs = [ranks[i : i + size] for ranks in positions for i in range(0, len(ranks) - size + 1, size)]
        made = dist.split_group(None, runs, timeout=timeout, group_desc=f"cp{size}")
        if isinstance(made, dist.ProcessGroup):
            self._groups[self._stage.index(dist.get_rank()) // size * size, size] = made

    def run(self, first: int, size: int) -> dist.ProcessGroup | None:
        """The group of `size` neighbours among the dp x cp ranks, of which this rank is one; None for a single rank.

        Args:
            first: position of the first among the dp x cp ranks.
            size: ranks of the group.

        Raises:
            WlbError: this rank, or another one of the run, is not among them.
        """
        me = self._stage.index(dist.get_rank())
        check_integer("first", first, minimum=0, maximum=me)
        check_integer("size", size, minimum=me - first + 1, maximum=len(self._stage) - first)
        if size == 1:
            return None
        if (first, size) not in self._groups:
            self._groups[first, size] = Subgroup(self._parent, self._stage[first : first + size])
        return self._groups[first, size]

    def of(self, batch: PackedBatch) -> dist.ProcessGroup | None:
        """The group of a micro-batch whose plan chose one, for attention; None for a single rank.

        A process group cannot be passed from a loader's worker or a planning thread. So the micro-batch names its
        ranks, and the training process looks the group up here.

        Raises:
            WlbError: the micro-batch belongs to another rank, or some of its ranks are not in this mesh.

        Complexity:
            Nothing is communicated.
        """
        first, size = batch.cp_first_rank, batch.cp_size
        me = self._stage.index(dist.get_rank())
        if first is None or first + size > len(self._stage) or me - first != batch.cp_rank:
            message = f"is for rank {batch.cp_rank} of {size} from {first} on"
            raise error("batch", f"{message}; this is rank {me} of {len(self._stage)}", value=batch.cp_rank)
        return self.run(first, size)
