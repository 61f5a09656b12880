"""Seconds of collectives, from latency and bandwidth at two levels: NVLink inside a node, the network between.

This is NCCL's own model of its rings (`src/graph/tuning.cc`). A ring over `n` ranks in `N` nodes sends every byte of
the result past each rank `(n - 1) / n` times, in `n - N` hops inside nodes and `N - 1` between them. With `L = n / N`
ranks a node there are `L` rings, each over another network card, so the bandwidth is the lower one of NVLink and of `L`
cards:

    seconds = launch + (n - N) * nvlink.latency + (N - 1) * network.latency
            + (n - 1) / n * bytes / min(nvlink.bandwidth, L * network.bandwidth)

An all-to-all sends an equal part to every rank at the same time, over NVLink inside the node and over the rank's own
network card to other nodes,

    seconds = launch + latency + max((L - 1) / n * bytes / nvlink.bandwidth, (n - L) / n * bytes / network.bandwidth)

with the latency of the farthest rank. Everything is linear in bytes, and 0 for one rank or no bytes. Not modelled:
contention between groups that share a switch but no network card, reduction in switches (NVLS, SHARP), and the
protocols for small messages.
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
    """The ranks of one collective, as NCCL calls them.

    Args:
        size: number of ranks.
        nodes: number of nodes over which they are spread evenly.
        hardware: the GPUs and links.

    Raises:
        WlbError: a number is below 1, there are more nodes than ranks, or more ranks in a node than it has GPUs.
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
        """The ranks along an axis; "dp_cp" are those with the same parameters, "edp" those with the same experts.

        Their nodes follow from the order of the axes, see `wlb_tools.ParallelLayout`. Among several groups, it is the
        one spread over most nodes.
        """
        nodes = layout.nodes(axis, gpus_per_node=hardware.gpus_per_node)
        return cls(size=layout.size(axis), nodes=nodes, hardware=hardware)

    def all_gather(self, num_bytes: ArrayLike) -> Seconds:
        """Seconds until every rank has all `num_bytes`, of which each rank had its share; same shape."""
        return self._ring(num_bytes, rounds=1)

    def reduce_scatter(self, num_bytes: ArrayLike) -> Seconds:
        """Seconds until every rank has the sum of its share of `num_bytes`, of which each rank had all; same shape."""
        return self._ring(num_bytes, rounds=1)

    def all_reduce(self, num_bytes: ArrayLike) -> Seconds:
        """Seconds until every rank has the sum of all `num_bytes`: a reduce-scatter and an all-gather in one launch."""
        return self._ring(num_bytes, rounds=2)

    def all_to_all(self, num_bytes: ArrayLike) -> Seconds:
        """Seconds until every rank has sent `num_bytes` in equal parts to all, and received as many; same shape."""
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
        """Seconds to send `num_bytes` to the next rank, over the network if there are several nodes."""
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
