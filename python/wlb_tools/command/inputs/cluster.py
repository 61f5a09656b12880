"""A model on a cluster: the library's scenario and layout, as options."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter, Token, validators
from cyclopts.types import PositiveInt

import wlb
import wlb_tools
from wlb_tools.cluster.hardware import GIB
from wlb_tools.command.errors import CliError, in_options
from wlb_tools.command.inputs.model import Cost
from wlb_tools.command.inputs.options import (
    BATCHES,
    GlobalBatch,
    GlobalBatchSize,
    Numbers,
    Options,
    options,
    plain,
    scaled,
    values_of,
)
from wlb_tools.command.inputs.packing import Limits


@options("Cluster", of=wlb_tools.ParallelLayout)
class Layout(Options):
    """By default the layout of the paper for a 7B model with 128K tokens of context.

    Args:
        dp: data-parallel ranks; with --gpus by default GPUs / (tp x cp x pp).
        stage_layers: layers of each stage in the order of the model, such as 7,8,8,7; by default as even as possible,
            with fewer at the ends.
    """

    pp: int = 4
    cp: int = 2
    tp: int = 8
    stage_layers: Annotated[tuple[int, ...] | None, Numbers] = None


def _gib(type_: object, tokens: Sequence[Token]) -> int:
    return scaled("--reserved-gib", float(tokens[0].value), GIB)


def _in_gib(size: int) -> str:
    return f"{size / GIB:g}"


@options(
    "Cluster",
    of=wlb_tools.Scenario,
    without=("model", "hardware", "selector", "cost_model", "overhead"),
    batches=("context", "num_micro_batches", "global_batch", "max_tokens", "memory_factor"),
    waiting=("num_queues", "outlier_thresholds", "max_mean_delay", "max_delay", "max_step_cost"),
    methods=("noise", "noise_seed"),
)
class Cluster(Cost, Limits):
    """A scenario whose model and hardware are names.

    Args:
        max_tokens: the most tokens of a micro-batch of variable length; on a cluster by default what fits into memory.
        reserved_bytes: GiB of a GPU that are not available.
        kernel_model: name or path of a profile of `wlb profile`, instead of the assumed kernel of the GPU. Its linear
            part is used, too, if it was measured for this model's layer on a tensor-parallel rank.
        launch_file: a launch file: a script or list of Megatron's arguments, a .toml of torchtitan, a .yaml of axolotl
            or LLaMA-Factory. It becomes options, which typed options override. The command says what was taken and what
            was left out.
        micro_batch_size: sequences of --context tokens in a micro-batch. `wlb tune` and `wlb advise` choose the tokens
            of a micro-batch themselves, and use this only for the size of the global batch.
        global_batch: size of a global batch, instead of --micro-batches: tokens, such as 4M, or samples of --context
            tokens, such as 256samples.
        gpu_count: number of GPUs: dp is GPUs / (tp x cp x pp); if dp is given, the product is checked.
        gemm_efficiency: share of the GPU's peak that the linear part of a layer reaches; by default the preset's.
    """

    layout: Layout = Layout()
    launch_file: Path | None = None
    micro_batch_size: Annotated[PositiveInt, BATCHES] = 1
    global_batch: Annotated[GlobalBatch | None, GlobalBatchSize] = None
    gpu_count: int | None = None
    kernel_model: str | None = None
    gemm_efficiency: Annotated[float | None, Parameter(validator=validators.Number(gte=0.01, lte=1))] = None
    outlier_thresholds: Annotated[tuple[int, ...] | None, Numbers] = None
    reserved_bytes: Annotated[int, Parameter(converter=_gib, show_default=_in_gib)] = 4 * GIB

    def scenario(self, *, chosen: bool = False) -> wlb_tools.Scenario:
        """The scenario of the options.

        Args:
            chosen: whether the command chooses the tokens of a micro-batch; the scenario then has micro-batches of one
                sequence in a global batch of the same size.

        Raises:
            CliError: a name is unknown, or options contradict each other.
            WlbError: as `wlb_tools.Scenario`.
        """
        layout = self.spread()
        self._check_profile()
        layout.check(world_size=self.gpu_count)
        size, samples = self.micro_batch_size, self.samples()
        if samples is not None and samples % size:
            said = f"--global-batch {self.global_batch}: {samples:,} sequences"
            raise CliError(f"{said} are no multiple of --micro-batch-size {size}")
        count = self.num_micro_batches if samples is None else samples // size
        if chosen and size > 1:
            count, size = (count or layout.pp * layout.dp) * size, 1
        named = self._named() | {"num_micro_batches": count, "context": self.context * size}
        return plain(self, wlb_tools.Scenario, layout=layout, **named)

    def samples(self) -> int | None:
        """Sequences of --context tokens in a global batch, if --global-batch says it.

        Raises:
            CliError: it is no multiple of the context, or --micro-batches is given, too.
        """
        batch = self.global_batch
        if batch is None:
            return None
        if "num_micro_batches" in self.given:
            raise CliError("--micro-batches: --global-batch says how large a global batch is; leave this out")
        if batch.unit == "samples":
            return batch.count
        if batch.count < self.context:
            raise CliError(
                f"--global-batch {batch.count:,} tokens: is below --context {self.context:,}; samples are"
                f" --global-batch {batch.count}samples"
            )
        if batch.count % self.context:
            raise CliError(
                f"--global-batch {batch.count:,} tokens: is no multiple of --context {self.context:,}, which a sequence"
                " has"
            )
        return batch.count // self.context

    def spread(self) -> wlb_tools.ParallelLayout:
        """The layout. If the number of GPUs is given and that of data-parallel ranks is not, it uses all GPUs.

        Raises:
            CliError: experts cannot be divided among these ranks; names sizes with which they can.
            WlbError: as `wlb_tools.ParallelLayout`.
        """
        layout, dp = self.layout, self.layout.dp
        others = layout.tp * layout.cp * layout.pp
        if "dp" not in layout.given and self.gpu_count and others > 0 and self.gpu_count % others == 0:
            dp = self.gpu_count // others
        try:
            return plain(layout, wlb_tools.ParallelLayout, dp=dp)
        except wlb.WlbError as reason:
            if reason.argument != "ep" or layout.ep < 1:
                raise
            factor = layout.ep // math.gcd(layout.ep, dp * layout.cp)
            sizes = {name: getattr(layout, name) for name in ("tp", "pp")}
            fixes = [f"--{name} {n // factor} --dp {dp * factor}" for name, n in sizes.items() if n % factor == 0]
            more = f"--dp {dp * factor} (on {factor} times as many GPUs)"
            raise CliError(f"{in_options(reason)}; it would with {', or with '.join([*fixes, more])}") from None

    def search(self) -> dict[str, Any]:
        """Arguments of `wlb_tools.simulation.search_layouts`, except the layout and the global batch.

        Raises:
            CliError: a name is unknown.
        """
        self._check_profile()
        searched = values_of(self, wlb_tools.Scenario)
        for name in ("layout", "num_micro_batches", "outlier_thresholds"):
            del searched[name]
        return searched | self._named()

    def _check_profile(self) -> None:
        path = self.kernel_model
        if path is not None and path.endswith(".json") and not Path(path).is_file():
            raise CliError(f"--kernel-profile {path}: no such file")

    def _named(self) -> dict[str, Any]:
        """Options that are given by a name or a file, or in other units."""
        hardware = self.preset()
        return {
            "model": self.model(),
            "hardware": dataclasses.replace(
                hardware,
                attention_efficiency=self.efficiency(),
                gemm_efficiency=self.gemm_efficiency or hardware.gemm_efficiency,
            ),
            "max_tokens": self.token_limit(),
            "cost_model": self.from_file(),
        }
