"""The model of a command, and what its documents cost."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

import wlb
import wlb_tools
from wlb.models import presets
from wlb_tools.cluster.hardware import presets as gpus
from wlb_tools.command.errors import CliError, option
from wlb_tools.command.inputs.options import Options, Reals, joined, options
from wlb_tools.command.words import listed

ModelName = Annotated[
    str, Parameter(help=f"shape of the model: {', '.join(presets())}, or a Hugging Face config.json.")
]


def model_config(name: str) -> wlb.ModelConfig:
    """The model of a preset's name or of a Hugging Face `config.json`."""
    if name in presets():
        return wlb.ModelConfig.preset(name)
    if not Path(name).exists():
        raise CliError(f"--model {name}: neither a file nor one of {', '.join(presets())}")
    return wlb.ModelConfig.from_hugging_face(name)


@options("Cost")
class Cost(Options):
    """What a document costs.

    Args:
        cost_files: costs that `wlb fit` wrote, instead of those of a model; of several files, any may be the true one.
        attention_efficiency: FLOP/s of attention kernels relative to matrix multiplications; by default what is assumed
            of the GPU. 0.4,2.1 packs for all of a range.
    """

    model_name: ModelName = "llama2-7b"
    cost_files: Annotated[tuple[Path, ...] | None, Parameter(negative="")] = None
    gpu: Annotated[str, Parameter(help=f"Kind of GPU: {', '.join(gpus())}.")] = "h100"
    attention_efficiency: Annotated[tuple[float, ...] | None, Reals] = None

    def preset(self) -> wlb_tools.Hardware:
        """The GPU by its name."""
        if self.gpu not in gpus():
            raise CliError(f"--gpu {self.gpu}: must be one of {', '.join(gpus())}")
        return wlb_tools.Hardware.preset(self.gpu)

    def efficiencies(self) -> tuple[float, ...]:
        """Efficiencies of attention: as given, or as assumed of the GPU; several where any may be the true one."""
        rates = self.attention_efficiency
        if rates is None:
            return (self.preset().attention_efficiency,)
        if not rates or not all(0.01 <= rate < math.inf for rate in rates):
            raise CliError(f"--attention-efficiency {joined(rates)}: give finite numbers from 0.01 on")
        return rates

    def shown_efficiency(self) -> float | str | None:
        """The efficiencies as a report's settings have them; None where costs do not rest on them."""
        if self.cost_files:
            return None
        rates = self.efficiencies()
        return joined(rates) if len(rates) > 1 else rates[0]

    def in_words(self) -> str:
        """What the costs rest on, in a sentence."""
        if self.cost_files:
            return f"Costs are those of {listed(self.cost_files, ' or ')}."
        source = f"assumed of a {self.gpu}" if self.attention_efficiency is None else "as given"
        return (
            f"Costs are the FLOPs of {self.model_name}, attention's at {listed(self.efficiencies(), ' or ')} of the"
            f" rate of matrix multiplications ({source})."
        )

    def from_files(self) -> wlb.CostModel | None:
        """The costs in the files that the options name, if they do."""
        if self.cost_files and "attention_efficiency" in self.given:
            raise superfluous("attention_efficiency", "cost_files")
        return one_of([_read(path) for path in self.cost_files]) if self.cost_files else None

    def of_documents(self) -> wlb.CostModel | None:
        """The cost model; unit: seconds where it was fitted, else GEMM-equivalent FLOPs."""
        if (costs := self.from_files()) is not None:
            for name in sorted(self.given & {"model_name", "gpu"}):
                raise superfluous(name, "cost_files")
            return costs
        model = model_config(self.model_name)
        return one_of([model.cost_model(attention_efficiency=rate) for rate in self.efficiencies()])


def one_of(models: list[wlb.CostModel]) -> wlb.CostModel:
    """The model, or the range of which any may be the true one."""
    return wlb.CostModel.range(models) if len(models) > 1 else models[0]


def _read(path: Path) -> wlb.CostModel:
    try:
        return wlb.CostModel.from_json(path.read_text())
    except (wlb.WlbError, UnicodeDecodeError) as cause:
        raise CliError(f"--cost-model {path}: is no cost model: {cause}") from None


def superfluous(name: str, told_by: str) -> CliError:
    """What refuses an option beside another one that says what documents cost."""
    return CliError(f"--{option(name)}: --{option(told_by)} says what documents cost; leave this out")
