"""The model of a command, and what its documents cost."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter, validators

import wlb
from wlb.cli.errors import CliError, option
from wlb.cli.inputs.options import Options, options
from wlb.cluster.hardware import presets as gpus
from wlb.cluster.models import presets

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
@dataclass(frozen=True, kw_only=True)
class Cost(Options):
    """What a document costs.

    Args:
        cost_file: costs that `wlb fit` wrote, instead of those of a model.
        attention_efficiency: FLOP/s of attention kernels relative to matrix multiplications; by default what is assumed
            of the GPU.
    """

    model_name: ModelName = "llama2-7b"
    cost_file: Path | None = None
    gpu: Annotated[str, Parameter(help=f"Kind of GPU: {', '.join(gpus())}.")] = "h100"
    attention_efficiency: Annotated[float | None, Parameter(validator=validators.Number(gte=0.01))] = None

    def preset(self) -> wlb.Hardware:
        """The GPU by its name."""
        if self.gpu not in gpus():
            raise CliError(f"--gpu {self.gpu}: must be one of {', '.join(gpus())}")
        return wlb.Hardware.preset(self.gpu)

    def efficiency(self) -> float:
        """Of attention: given, or assumed of the GPU."""
        return self.preset().attention_efficiency if self.attention_efficiency is None else self.attention_efficiency

    def in_words(self) -> str:
        """What the costs rest on, in a sentence."""
        if self.cost_file is not None:
            return f"Costs are those of {self.cost_file}."
        source = f"assumed of a {self.gpu}" if self.attention_efficiency is None else "as given"
        return (
            f"Costs are the FLOPs of {self.model_name}, attention's at {self.efficiency():g} of the rate of matrix"
            f" multiplications ({source})."
        )

    def told(self) -> wlb.CostModel | None:
        """The costs in the file that the options name, if they do."""
        if self.cost_file is None:
            return None
        try:
            return wlb.CostModel.from_json(self.cost_file.read_text())
        except (wlb.WlbError, UnicodeDecodeError) as cause:
            raise CliError(f"--cost-model {self.cost_file}: is no cost model: {cause}") from None

    def of_documents(self) -> wlb.CostModel:
        """The cost model; unit: seconds where it was fitted, else GEMM-equivalent FLOPs."""
        if (told := self.told()) is not None:
            for name in sorted(self.given & {"model_name", "attention_efficiency"}):
                raise CliError(f"--{option(name)}: --cost-model says what documents cost; leave this out")
            return told
        return model_config(self.model_name).cost_model(attention_efficiency=self.efficiency())
