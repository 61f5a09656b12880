"""A model on a cluster: the library's scenario and layout, as options."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter, Token, validators

import wlb
import wlb_tools
from wlb_tools.cluster.hardware import GIB
from wlb_tools.cluster.overhead import NO_OVERHEAD, Overhead
from wlb_tools.command.errors import CliError, in_options
from wlb_tools.command.inputs.model import Cost, model_config, one_of
from wlb_tools.command.inputs.options import NotAnOption, Numbers, Options, options, plain, scaled
from wlb_tools.command.inputs.packing import Limits

# Names take the place of these two.
_MODEL, _HARDWARE = wlb.ModelConfig.preset("llama2-7b"), wlb_tools.Hardware.preset("h100")


@options("Cluster")
class Layout(Options, wlb_tools.ParallelLayout):
    """By default the paper's layout of a 7B model with 128K tokens of context.

    Args:
        dp: data-parallel ranks; with --gpus by default what tp, cp and pp leave of them.
        stage_layers: layers of each stage in the order of the model, such as 7,8,8,7; by default as even as possible,
            ends with fewer.
    """

    pp: int = 4
    cp: int = 2
    tp: int = 8
    stage_layers: Annotated[tuple[int, ...] | None, Numbers] = None

    def __post_init__(self) -> None:
        """Values are checked by :meth:`Cluster.scenario`, together with those of the rest."""


def _gib(type_: object, tokens: Sequence[Token]) -> int:
    return scaled("--reserved-gib", float(tokens[0].value), GIB)


def _in_gib(size: int) -> str:
    return f"{size / GIB:g}"


@options(
    "Cluster",
    batches=("context", "num_micro_batches", "max_tokens", "memory_factor"),
    waiting=("num_queues", "outlier_thresholds", "max_mean_delay", "max_delay", "max_step_cost"),
    methods=("noise", "noise_seed"),
)
class Cluster(Cost, Limits, wlb_tools.Scenario):
    """A scenario whose model and hardware are names.

    Args:
        max_tokens: the most tokens of a micro-batch of variable length; on a cluster by default what fits into memory.
        reserved_bytes: GiB of a GPU that are not available.
        gpu_count: GPUs there are: dp is what tp, cp and pp leave of them, or where it is given the product is checked.
        gemm_efficiency: share of the GPU's peak that the linear part of a layer reaches; by default the preset's.
    """

    layout: Layout = Layout()
    gpu_count: int | None = None
    profile: str | None = None
    gemm_efficiency: Annotated[float | None, Parameter(validator=validators.Number(gte=0.01, lte=1))] = None
    outlier_thresholds: Annotated[tuple[int, ...] | None, Numbers] = None
    reserved_bytes: Annotated[int, Parameter(converter=_gib, show_default=_in_gib)] = 4 * GIB
    model: Annotated[wlb.ModelConfig, NotAnOption] = _MODEL
    hardware: Annotated[wlb_tools.Hardware, NotAnOption] = _HARDWARE
    kernel_model: Annotated[wlb.KernelModel | None, NotAnOption] = None
    selector: Annotated[wlb.KernelModel | None, NotAnOption] = None
    cost_model: Annotated[wlb.CostModel | None, NotAnOption] = None
    overhead: Annotated[Overhead, NotAnOption] = NO_OVERHEAD

    def __post_init__(self) -> None:
        """Values are checked by :meth:`scenario`."""

    def scenario(self) -> wlb_tools.Scenario:
        """The scenario that the options say.

        Raises:
            CliError: a name that there is not, or options that contradict each other.
            WlbError: as :class:`wlb_tools.Scenario`.
        """
        layout = self.spread()
        self._check_profile()
        layout.check(world_size=self.gpu_count)
        return plain(self, wlb_tools.Scenario, layout=layout, **self._named(layout))

    def spread(self) -> wlb_tools.ParallelLayout:
        """The layout, on all of the GPUs where their number is given and that of data-parallel ranks is not.

        Raises:
            CliError: experts cannot be divided among so many ranks; says which sizes can have that.
            WlbError: as :class:`wlb_tools.ParallelLayout`.
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
        """What the options say to :func:`wlb_tools.simulation.search_layouts`, but for the layout and the global batch.

        Raises:
            CliError: a name that there is not.
        """
        self._check_profile()
        waiting = ("max_mean_delay", "max_delay", "max_step_cost")
        searched = ("context", *waiting, "profile", "schedule", "sync", "reserved_bytes")
        hidden = ("cp_overlap", "cp_keys", "tp_overlap", "ep_overlap", "expert_imbalance", "p2p_overlap", "dp_overlap")
        return {name: getattr(self, name) for name in (*searched, *hidden)} | self._named(self.spread())

    def _check_profile(self) -> None:
        if self.profile is not None and self.profile.endswith(".json") and not Path(self.profile).is_file():
            raise CliError(f"--kernel-profile {self.profile}: no such file")

    def _named(self, layout: wlb_tools.ParallelLayout) -> dict[str, Any]:
        """What is given by a name or a file, or in other units."""
        hardware, model, rates = self.preset(), model_config(self.model_name), self.efficiencies()
        cost_model = self.from_files()
        if cost_model is None and len(rates) > 1:
            again = layout.recompute == "full"
            cost_model = one_of([model.cost_model(attention_efficiency=rate, recompute=again) for rate in rates])
        return {
            "model": model,
            "hardware": dataclasses.replace(
                hardware,
                attention_efficiency=rates[0],
                gemm_efficiency=self.gemm_efficiency or hardware.gemm_efficiency,
            ),
            "max_tokens": self.token_limit(),
            "cost_model": cost_model,
        }
