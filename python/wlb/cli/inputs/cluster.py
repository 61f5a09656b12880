"""A model on a cluster: the library's scenario and layout, as options."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter, Token, validators

import wlb
from wlb.cli.errors import CliError
from wlb.cli.inputs.model import MODELS, model_config
from wlb.cli.inputs.options import NotAnOption, Numbers, Options, options, plain, whole
from wlb.cluster.hardware import GIB, presets

# Names take the place of these two.
_MODEL, _HARDWARE = wlb.ModelConfig.preset("llama2-7b"), wlb.Hardware.preset("h100")


@options("Cluster")
@dataclass(frozen=True, kw_only=True)
class Layout(Options, wlb.ParallelLayout):
    """By default the paper's layout of a 7B model with 128K tokens of context.

    Args:
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
    return whole("--reserved-gib", float(tokens[0].value), GIB)


def _in_gib(size: int) -> str:
    return f"{size / GIB:g}"


@options(
    "Cluster",
    batches=("context", "num_micro_batches", "max_tokens", "memory_factor"),
    waiting=("num_queues", "outlier_thresholds", "max_mean_delay", "max_delay"),
    methods=("noise", "noise_seed"),
)
@dataclass(frozen=True, kw_only=True)
class Cluster(Options, wlb.Scenario):
    """A scenario whose model and hardware are names.

    Args:
        max_tokens: the most tokens of a micro-batch of variable length; on a cluster by default what fits into memory.
        reserved_bytes: GiB of a GPU that are not available.
        gpu_count: GPUs there are: checks that dp x pp x cp x tp is that.
        gemm_efficiency: share of the GPU's peak that the linear part of a layer reaches; by default the preset's.
        attention_efficiency: FLOP/s of attention kernels relative to matrix multiplications.
        memory_factor: the same as --max-tokens, in contexts.
    """

    model: Annotated[wlb.ModelConfig, NotAnOption] = _MODEL
    model_name: Annotated[str, Parameter(help=f"Model to train: {MODELS}.")] = "llama2-7b"
    layout: Layout = Layout()
    hardware: Annotated[wlb.Hardware, NotAnOption] = _HARDWARE
    gpu: Annotated[str, Parameter(help=f"Kind of GPU: {', '.join(presets())}.")] = "h100"
    gpu_count: int | None = None
    kernel_model: Annotated[wlb.KernelModel | None, NotAnOption] = None
    profile: str | None = None
    selector: Annotated[wlb.KernelModel | None, NotAnOption] = None
    cost_model: Annotated[wlb.CostModel | None, NotAnOption] = None
    gemm_efficiency: Annotated[float | None, Parameter(validator=validators.Number(gte=0.01, lte=1))] = None
    attention_efficiency: Annotated[float, Parameter(validator=validators.Number(gte=0.01))] = 0.55
    memory_factor: Annotated[float | None, Parameter(validator=validators.Number(gte=1, lte=1000))] = None
    outlier_thresholds: Annotated[tuple[int, ...] | None, Numbers] = None
    reserved_bytes: Annotated[int, Parameter(converter=_gib, show_default=_in_gib)] = 4 * GIB

    def __post_init__(self) -> None:
        """Values are checked by :meth:`scenario`."""

    def scenario(self) -> wlb.Scenario:
        """The scenario that the options say.

        Raises:
            CliError: a name that there is not, or options that contradict each other.
            WlbError: as :class:`wlb.Scenario`.
        """
        layout = plain(self.layout, wlb.ParallelLayout)
        if self.gpu_count not in (None, layout.world_size):
            sizes = " x ".join(f"{name.upper()} {getattr(layout, name)}" for name in ("dp", "pp", "cp", "tp"))
            raise CliError(f"--gpus {self.gpu_count}: {sizes} = {layout.world_size}")
        if self.gpu not in presets():
            raise CliError(f"--gpu {self.gpu}: must be one of {', '.join(presets())}")
        hardware = wlb.Hardware.preset(self.gpu)
        if self.profile is not None and self.profile.endswith(".json") and not Path(self.profile).is_file():
            raise CliError(f"--kernel-profile {self.profile}: no such file")
        return plain(
            self,
            wlb.Scenario,
            model=model_config(self.model_name),
            layout=layout,
            hardware=dataclasses.replace(
                hardware,
                attention_efficiency=self.attention_efficiency,
                gemm_efficiency=self.gemm_efficiency or hardware.gemm_efficiency,
            ),
            max_tokens=self.token_limit(),
        )

    def token_limit(self) -> int | None:
        """The most tokens of a micro-batch that the options give, or None without them."""
        if self.memory_factor is None:
            return token_limit(self.max_tokens, self.context)
        if self.max_tokens is not None:
            raise CliError("--max-tokens and --memory-factor: give one of them")
        return whole("--memory-factor", self.memory_factor, self.context)


def token_limit(max_tokens: int | None, context: int) -> int | None:
    """`--max-tokens`, where it is not below the context."""
    if max_tokens is not None and max_tokens < context:
        raise CliError(
            f"--max-tokens {max_tokens:,}: below --context {context:,}, so the longest documents fit nowhere"
        )
    return max_tokens
