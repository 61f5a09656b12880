"""The model of a command, and what its documents cost."""

from pathlib import Path

import wlb
from wlb.cli.output.console import CliError
from wlb.models import presets


def model_config(model: str) -> wlb.ModelConfig:
    """The model of a preset's name or of a Hugging Face `config.json`."""
    if model in presets():
        return wlb.ModelConfig.preset(model)
    if not Path(model).exists():
        raise CliError(f"--model {model}: neither a file nor one of {', '.join(presets())}")
    return wlb.ModelConfig.from_hugging_face(model)


def cost_model(model: str, *, attention_efficiency: float) -> wlb.CostModel:
    """The cost model of a preset's name or of a Hugging Face `config.json`; unit: GEMM-equivalent FLOPs."""
    return model_config(model).cost_model(attention_efficiency=attention_efficiency)
