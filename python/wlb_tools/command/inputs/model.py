"""The model of a command, and what its documents cost."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter, validators

import wlb
import wlb_tools
from wlb.models import presets
from wlb_tools.cluster.hardware import presets as gpus
from wlb_tools.command.errors import CliError, option
from wlb_tools.command.inputs.options import Options, options

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
    """Cost of documents.

    Args:
        cost_file: costs that `wlb fit` wrote, instead of those of a model.
        attention_efficiency: FLOP/s of attention kernels relative to matrix multiplications; by default what is assumed
            of the GPU.
    """

    model_name: ModelName = "llama2-7b"
    cost_file: Path | None = None
    gpu: Annotated[str, Parameter(help=f"Kind of GPU: {', '.join(gpus())}.")] = "h100"
    attention_efficiency: Annotated[float | None, Parameter(validator=validators.Number(gte=0.01, lt=math.inf))] = None

    def preset(self) -> wlb_tools.Hardware:
        """The GPU by its name."""
        if self.gpu not in gpus():
            raise CliError(f"--gpu {self.gpu}: must be one of {', '.join(gpus())}")
        return wlb_tools.Hardware.preset(self.gpu)

    def efficiency(self) -> float:
        """Attention's efficiency: as given, or as assumed of the GPU."""
        given = self.attention_efficiency
        return self.preset().attention_efficiency if given is None else given

    def shown_efficiency(self) -> float | None:
        """The efficiency as a report's settings have it; None where costs do not rest on it."""
        return None if self.cost_file else self.efficiency()

    def in_words(self) -> str:
        """A sentence about what the costs rest on."""
        if self.cost_file:
            return f"Costs are those of {self.cost_file}."
        source = f"assumed of a {self.gpu}" if self.attention_efficiency is None else "as given"
        return (
            f"Costs are the FLOPs of {self.model_name}, attention's at {self.efficiency():g} of the"
            f" rate of matrix multiplications ({source})."
        )

    def from_file(self) -> wlb.CostModel | None:
        """The costs in the file that the options name, if they do."""
        if self.cost_file is None:
            return None
        if "attention_efficiency" in self.given:
            raise superfluous("attention_efficiency", "cost_file")
        return _read(self.cost_file)

    def of_documents(self) -> wlb.CostModel | None:
        """The cost model; unit: seconds where it was fitted, else GEMM-equivalent FLOPs."""
        if (costs := self.from_file()) is not None:
            for name in sorted(self.given & {"model_name", "gpu"}):
                raise superfluous(name, "cost_file")
            return costs
        return model_config(self.model_name).cost_model(attention_efficiency=self.efficiency())


def _read(path: Path) -> wlb.CostModel:
    try:
        return wlb.CostModel.from_json(path.read_text())
    except (wlb.WlbError, UnicodeDecodeError) as cause:
        raise CliError(f"--cost-model {path}: is no cost model: {cause}") from None


def superfluous(name: str, told_by: str) -> CliError:
    """Error for an option that contradicts another option about costs."""
    return CliError(f"--{option(name)}: --{option(told_by)} says what documents cost; leave this out")
