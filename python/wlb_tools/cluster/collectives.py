"""Seconds of collectives: a latency and a bandwidth at each of two levels, NVLink in a node and the network between.

NCCL's own model of its rings (`src/graph/tuning.cc`). A ring over `n` ranks in `N` nodes sends every byte of the result
`(n - 1) / n` times past each rank, in `n - N` hops inside nodes and `N - 1` between them. With `L = n / N` ranks a node
there are `L` rings, each over another network card, so that data moves at the slower of NVLink's rate and `L` cards':

    seconds = launch + (n - N) * nvlink.latency + (N - 1) * network.latency
            + (n - 1) / n * bytes / min(nvlink.bandwidth, L * network.bandwidth)

An all-to-all sends an equal part to every rank, all at the same time: what stays in the node over NVLink, the rest over
the rank's own network card,

    seconds = launch + latency + max((L - 1) / n * bytes / nvlink.bandwidth, (n - L) / n * bytes / network.bandwidth)

with the latency of the farthest. Everything is linear in bytes, and 0 for one rank or no bytes. Not modelled:
contention between groups that share no network card but a switch, in-switch reduction (NVLS, SHARP), and that smaller
messages use leaner protocols.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from wlb._errors import error
from wlb_tools.cluster.hardware import Hardware
from wlb_tools.cluster.parallel import Axis, ParallelLayout

Seconds = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Communicator:
    """The ranks of one collective, in NCCL's word.

    Args:
        size: ranks.
        nodes: over how many nodes they are spread, evenly.
        hardware: what they run on.

    Raises:
        WlbError: a number below 1, or more nodes than ranks, or more ranks a node than it has GPUs.
    """

    size: int
    nodes: int
    hardware: Hardware

    def __post_init__(self) -> None:
        if self.size < 1:
            raise error("size", f"= {self.size}: must be at least 1", value=self.size)
        if not 1 <= self.nodes <= self.size <= self.nodes * self.hardware.gpus_per_node:
            message = f"= {self.nodes}: for {self.size} ranks on nodes of {self.hardware.gpus_per_node} GPUs"
            raise error("nodes", message, value=self.nodes)

    @classmethod
    def along(cls, axis: Axis, layout: ParallelLayout, hardware: Hardware) -> Communicator:
        """The ranks along an axis of a layout, "dp_cp" for those that hold the same parameters, "edp" the same experts.

        Where they lie follows from the order of the axes, see `wlb_tools.ParallelLayout`; of several groups, the
        one spread over most nodes.
        """
        nodes = layout.nodes(axis, gpus_per_node=hardware.gpus_per_node)
        return cls(size=layout.size(axis), nodes=nodes, hardware=hardware)

    def all_gather(self, num_bytes: ArrayLike) -> Seconds:
        """Seconds until every rank has all `num_bytes`, of which each began with its share; same shape."""
        return self._ring(num_bytes, rounds=1)

    def reduce_scatter(self, num_bytes: ArrayLike) -> Seconds:
        """Seconds until every rank has the sum of its share of `num_bytes`, of which each began with all."""
        return self._ring(num_bytes, rounds=1)

    def all_reduce(self, num_bytes: ArrayLike) -> Seconds:
        """Seconds until every rank has the sum of all `num_bytes`: a reduce-scatter and an all-gather in one launch."""
        return self._ring(num_bytes, rounds=2)

    def all_to_all(self, num_bytes: ArrayLike) -> Seconds:
        """Seconds until every rank has sent `num_bytes`, equally to all ranks, and received as many; same shape."""
        values = np.asarray(num_bytes, dtype=np.float64)
        if self.size == 1:
            return np.zeros_like(values)
        near, far = self.hardware.intra_node, self.hardware.inter_node
        inside = self.size / self.nodes
        moved = np.maximum(
            (inside - 1) / self.size * values / near.bandwidth,
            (self.size - inside) / self.size * values / far.bandwidth,
        )
        latency = self.hardware.launch_latency + (far if self.nodes > 1 else near).latency
        return np.asarray(np.where(values > 0, latency + moved, 0.0))

    def neighbour(self, num_bytes: ArrayLike) -> Seconds:
        """Seconds to send `num_bytes` to the next rank, over the network where there is more than one node."""
        values = np.asarray(num_bytes, dtype=np.float64)
        if self.size == 1:
            return np.zeros_like(values)
        link = self.hardware.inter_node if self.nodes > 1 else self.hardware.intra_node
        seconds = self.hardware.launch_latency + link.latency + values / link.bandwidth
        return np.asarray(np.where(values > 0, seconds, 0.0))

    def _ring(self, num_bytes: ArrayLike, *, rounds: int) -> Seconds:
        values = np.asarray(num_bytes, dtype=np.float64)
        if self.size == 1:
            return np.zeros_like(values)
        near, far = self.hardware.intra_node, self.hardware.inter_node
        hops = (self.size - self.nodes) * near.latency + (self.nodes - 1) * far.latency
        bandwidth = near.bandwidth
        if self.nodes > 1:
            bandwidth = min(
                self.size / self.nodes * far.bandwidth, near.bandwidth if self.size > self.nodes else np.inf
            )
        moved = (self.size - 1) / self.size * values / bandwidth
        return np.asarray(np.where(values > 0, self.hardware.launch_latency + rounds * (hops + moved), 0.0))
