"""Measures all shapes in several rounds within a budget of time, and writes down each measurement."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from wlb._errors import error
from wlb.models import ModelConfig
from wlb.torch.attention.kernels import KernelName
from wlb_tools.profiling.assemble import PASSES, assemble
from wlb_tools.profiling.attention import AttentionBench
from wlb_tools.profiling.device import LEAST_CALLS, Device
from wlb_tools.profiling.grid import LAUNCH, Grid, Shape
from wlb_tools.profiling.layer import LayerBench
from wlb_tools.profiling.records import Records

ROUNDS = 5
"""How many times all shapes are measured.

If a device is slow for some seconds, because it is hot or shared, at most one round of a shape is slow, which does not
change the median.
"""

_PLANNED = 0.8
"""Share of the remaining time that is planned; the rest is for making tensors and for delays."""


class Profiler:
    """Measures one model's heads and widths on one device.

    Args:
        model: has the heads and widths to measure.
        tp: tensor-parallel ranks that divide heads and the feed-forward width.
        device: default the current CUDA device.
        kernel: as in `wlb.torch.context_parallel_attention`.
        memory_bytes: most memory for buffers; default 80 % of free memory.

    Raises:
        WlbError: the device does not exist, the kernel cannot run on it, or `tp` does not divide the model.
    """

    def __init__(
        self,
        model: ModelConfig,
        *,
        tp: int = 1,
        device: torch.device | str | None = None,
        kernel: KernelName = "auto",
        memory_bytes: int | None = None,
    ) -> None:
        self._device = Device.open(device, memory_bytes=memory_bytes)
        self._attention = AttentionBench.of(model, tp=tp, device=self._device, kernel=kernel)
        self._layer = LayerBench.of(model, tp=tp, device=self._device)

    @property
    def identity(self) -> dict[str, Any]:
        """GPU, versions, kernel and heads, which identify a profile."""
        return self._device.identity() | self._attention.identity()

    @property
    def name(self) -> str:
        """Name for files: the GPU, the kernel and its package's version, and the shape of its heads."""
        bench, identity = self._attention, self.identity
        packages = {
            "FlashAttention2": "flash_attn",
            "FlashAttention3": "flash_attn_3",
            "FlashAttention4": "flash-attn-4",
        }
        package = packages.get(identity["kernel"], "torch")
        version = str(identity["versions"].get(package)).partition("+")[0]
        words = (
            self._device.name,
            identity["kernel"],
            f"{package} {version}",
            f"h{bench.heads}",
            f"kv{bench.kv_heads}",
            f"d{bench.head_dim}",
        )
        return re.sub(r"[^a-z0-9]+", "-", " ".join(words).lower())

    def measure(
        self,
        *,
        records: Path,
        grid: Grid | None = None,
        budget_seconds: float = 300.0,
        progress: Callable[[int, int, str], None] | None = None,
        skipped: Callable[[str], None] | None = None,
    ) -> dict[str, Any]:
        """Measures every shape of the grid that is not in the records, and returns the profile of all of them.

        Args:
            records: a file with a JSON object on each line, new or to be continued. Its first line identifies the
                measurement; each other line is a shape with the samples of a round. A run that was stopped continues
                from there.
            grid: default `Grid.default`.
            budget_seconds: wall time for this run. The number of repetitions depends on it, between 5 and 50 of a shape
                in each of `ROUNDS`; rounds after the first end with it.
            progress: called with the number of finished measurements, the number of all, and the next shape's name.
            skipped: called with shapes that are left out for lack of memory.

        Returns:
            A profile as docs/semantics.md describes it, in plain JSON values, for
            `wlb.KernelModel.from_profile` and `wlb.CostModel.from_profile`.

        Raises:
            WlbError: records are of another GPU, kernel, version or model, which is named; or the budget is too small
                for the next shape (finished measurements are kept: call it again).
        """
        if not budget_seconds > 0:
            raise error("budget_seconds", f"= {budget_seconds}: must be above 0", value=budget_seconds)
        deadline = time.monotonic() + budget_seconds
        wanted = (grid or Grid.default()).shapes()
        with Records.open(records, self.identity | {"layer": self._layer.identity()}) as done:
            lost: set[Shape] = set()

            def lose(shape: Shape) -> None:
                """Tables have no gaps, so with one segment all segments of its key length are left out."""
                keys = shape.keys if shape.kind == "attention" else None
                lost.update(s for s in wanted if s == shape or (s.kind == "attention" and s.keys == keys))
                if skipped is not None:
                    skipped(f"{shape.name}: needs more than {self._device.memory_bytes / 2**30:.1f} GiB")

            for shape in wanted:
                if shape not in lost and not self._bench(shape).fits(shape):
                    lose(shape)
            todo = [
                (number, shape)
                for number in range(ROUNDS)
                for shape in wanted
                if shape not in lost and done.rounds(shape) <= number
            ]
            rate: float | None = None  # FLOP/s of the shape before
            for index, (number, shape) in enumerate(todo):
                if shape in lost:
                    continue
                if progress is not None:
                    progress(index, len(todo), shape.name)
                bench = self._bench(shape)
                left = deadline - time.monotonic()
                # Shapes ascend: the next one is a little larger and reaches about the same FLOP rate.
                if left < (0.0 if rate is None else LEAST_CALLS * bench.flops(shape) / rate):
                    if number > 0:
                        break
                    missing = sum(one == 0 for one, _ in todo[index:])
                    raise error(
                        "budget_seconds",
                        f"= {budget_seconds:g}: used up with {missing} of {len(wanted)} shapes left;"
                        f" {str(records)!r} keeps the others: run it again to go on, or measure a smaller grid",
                        value=budget_seconds,
                    )
                try:
                    sample = bench.run(shape, seconds=_PLANNED * left / (len(todo) - index))
                except torch.OutOfMemoryError:
                    lose(shape)
                    continue
                done.add(shape, sample | {"clock_mhz": self._device.clock_mhz()})
                if shape != LAUNCH:
                    rate = bench.flops(shape) / sum(min(sample[f"{name}_call_seconds"]) for name in PASSES)
            if progress is not None:
                progress(len(todo), len(todo), "done")
            measured = {shape: done[shape] for shape in wanted if shape not in lost}
        return assemble(self.identity, self._layer.identity(), measured)

    def _bench(self, shape: Shape) -> AttentionBench | LayerBench:
        return self._layer if shape.kind == "layer" else self._attention
