"""The device mesh, and the context-parallel groups of plans."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from wlb._errors import check_integer, error
from wlb.torch.collectives import timeout_of
from wlb.torch.data.batch import PackedBatch

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
    """Context-parallel groups of every power of two over the dp x cp ranks, for plans with a CP size per micro-batch.

    A group of size `s` is an aligned run of `s` neighbours: ranks ``[i * s, (i + 1) * s)`` of the dp x cp ranks of one
    (pp, tp) position. Where `s` does not divide their number, the last ranks have no group of that size.

    Other groups, of plans with ``group_sizes="any"``, are made by their ranks when a micro-batch needs them for the
    first time, and kept. Each is a communicator, so a job with many of them needs memory for them.

    Args:
        mesh: from `build_mesh`.

    Complexity:
        Collective: every rank calls it once, at the same point. At most 2 * world size groups, and at most half the
        square of the dp x cp ranks as plans ask for them; NCCL connects one at its first use.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        if mesh.mesh_dim_names != MESH_DIMS:
            raise error("mesh", f"has dimensions {mesh.mesh_dim_names}: must have {MESH_DIMS}", value=mesh)
        self._timeout = timeout = timeout_of(None, mesh.device_type)
        pp, dp, cp, tp = mesh.mesh.shape
        # [pp, tp, dp * cp]: the order in which every rank creates every group.
        positions = mesh.mesh.permute(0, 3, 1, 2).reshape(pp * tp, dp * cp).tolist()
        me = dist.get_rank()
        self._stage = next(ranks for ranks in positions if me in ranks)
        self._ranks: dict[int, tuple[tuple[int, ...], ...]] = {}
        self._group: dict[int, dist.ProcessGroup | None] = {}
        self._others: dict[tuple[int, ...], dist.ProcessGroup] = {}
        size = 1
        while size <= dp * cp:
            self._group[size] = None
            for ranks in positions:
                runs = [tuple(ranks[i : i + size]) for i in range(0, len(ranks) - size + 1, size)]
                if me in ranks:
                    self._ranks[size] = tuple(runs)
                for run in runs:
                    group = dist.new_group(list(run), timeout=timeout, group_desc=f"cp{size}")
                    if isinstance(group, dist.ProcessGroup):  # else this rank is not in it
                        self._group[size] = group
            size *= 2

    @property
    def sizes(self) -> tuple[int, ...]:
        """The available CP sizes, ascending."""
        return tuple(self._group)

    def ranks(self, cp_size: int) -> tuple[tuple[int, ...], ...]:
        """Global ranks of every group of that size at this rank's (pp, tp) position.

        Raises:
            WlbError: for a size that is no power of two, or larger than dp * cp.
        """
        if cp_size not in self._group:
            raise error("cp_size", f"= {cp_size}: must be one of {self.sizes}", value=cp_size)
        return self._ranks[cp_size]

    def group(self, cp_size: int) -> dist.ProcessGroup:
        """The group of that size that this rank belongs to.

        Raises:
            WlbError: no group has that size, or this rank is in none of them.
        """
        runs = self.ranks(cp_size)
        group = self._group[cp_size]
        if group is None:
            raise error(
                "cp_size", f"= {cp_size}: rank {dist.get_rank()} is in none of its groups {runs}", value=cp_size
            )
        return group

    def of(self, batch: PackedBatch) -> dist.ProcessGroup | None:
        """The group of a micro-batch whose plan chose one, for attention; None for a single rank.

        A process group cannot be passed from a loader's worker or a planning thread. So the micro-batch names its
        ranks, and the training process looks the group up here. For ranks that are no aligned power of two, the first
        call makes their group, a collective of these ranks alone. All ranks take the micro-batches of a plan in the
        same order, so no rank waits for another's. waits for another's.

        Raises:
            WlbError: the micro-batch belongs to another rank, or some of its ranks are not in this mesh.
        """
        first, size = batch.cp_first_rank, batch.cp_size
        me = self._stage.index(dist.get_rank())
        if first is None or first + size > len(self._stage) or me - first != batch.cp_rank:
            message = f"is for rank {batch.cp_rank} of {size} from {first} on"
            raise error("batch", f"{message}; this is rank {me} of {len(self._stage)}", value=batch.cp_rank)
        ranks = tuple(self._stage[first : first + size])
        if size == 1:
            return None
        if size in self._group and first % size == 0:
            return self.group(size)
        if ranks not in self._others:
            made = dist.new_group(
                list(ranks), timeout=self._timeout, group_desc=f"cp{size}", use_local_synchronization=True
            )
            assert isinstance(made, dist.ProcessGroup)  # this rank is in it
            self._others[ranks] = made
        return self._others[ranks]
