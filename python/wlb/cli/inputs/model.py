"""The model of a command, and what its documents cost."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter, validators

import wlb
from wlb.cli.errors import CliError
from wlb.cli.inputs.options import Options, options
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
        attention_efficiency: FLOP/s of attention kernels relative to matrix multiplications.
    """

    model_name: ModelName = "llama2-7b"
    attention_efficiency: Annotated[float, Parameter(validator=validators.Number(gte=0.01))] = 0.55

    def of_documents(self) -> wlb.CostModel:
        """The cost model; unit: GEMM-equivalent FLOPs."""
        return model_config(self.model_name).cost_model(attention_efficiency=self.attention_efficiency)
