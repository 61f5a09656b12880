"""The model of a command, and the costs of its documents."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter, validators

import wlb
import wlb_tools
from wlb.models import preset_named, presets
from wlb_tools.cluster.hardware import presets as gpus
from wlb_tools.command.errors import CliError, option
from wlb_tools.command.inputs.options import Options, options

ModelName = Annotated[
    str,
    Parameter(
        help=f"shape of the model: {', '.join(presets())}; a Hugging Face config.json or its folder; a name"
        " on the hub, as Qwen/Qwen3-8B; or sizes, as hidden_size=4096,num_layers=32,num_heads=32,num_kv_heads=8,"
        "ffn_hidden_size=14336,vocab_size=128256."
    ),
]
MultiTokenPrediction = Annotated[
    bool, Parameter(negative="", help="the model's heads of multi-token prediction are trained as well.")
]


def preset_meant(name: str) -> str | None:
    """The preset that `--model` names, if any; a file of that name comes before a preset in another case."""
    return None if name not in presets() and Path(name).exists() else preset_named(name)


def model_config(name: str, *, multi_token_prediction: bool = False) -> wlb.ModelConfig:
    """The model of a preset's name, of sizes, of a Hugging Face `config.json`, or of a name on the hub.

    Raises:
        CliError: it is none of these, or the file has something unknown.
    """
    preset = preset_meant(name)
    if preset is not None or ("=" in name and not Path(name).exists()):
        if multi_token_prediction:
            raise CliError(f"--multi-token-prediction: --model {name} has no heads that predict further tokens")
        return _by_sizes(name) if preset is None else wlb.ModelConfig.preset(preset)
    if "/" not in name and not Path(name).exists():
        raise CliError(f"--model {name}: neither a file nor one of {', '.join(presets())}")
    return wlb.ModelConfig.from_hugging_face(name, multi_token_prediction=multi_token_prediction)


def _by_sizes(text: str) -> wlb.ModelConfig:
    sizes: dict[str, int | bool] = {}
    known = [each.name for each in dataclasses.fields(wlb.ModelConfig) if each.type in ("int", "bool")]
    for pair in text.split(","):
        name, _, value = (part.strip() for part in pair.partition("="))
        if name not in known:
            raise CliError(f"--model {text}: {name!r} is no size; known are {', '.join(known)}")
        if value.lower() in ("true", "false"):
            sizes[name] = value.lower() == "true"
        elif value.isdecimal():
            sizes[name] = int(value)
        else:
            raise CliError(f"--model {text}: {name} = {value!r} is neither a whole number nor true or false")
    missing = [each for each in ("hidden_size", "vocab_size", "num_layers", "num_heads") if each not in sizes]
    if missing:
        raise CliError(f"--model {text}: lacks {', '.join(missing)}")
    return wlb.ModelConfig(**sizes)  # type: ignore[arg-type]


@options
class Cost(Options):
    """Cost of documents.

    Args:
        cost_file: costs that `wlb fit` wrote, instead of those of a model.
        attention_efficiency: FLOP/s of attention kernels relative to matrix multiplications; by default the assumption
            for the GPU.
    """

    model_name: ModelName = "llama2-7b"
    multi_token_prediction: MultiTokenPrediction = False
    cost_file: Path | None = None
    gpu: Annotated[str, Parameter(help=f"Kind of GPU: {', '.join(gpus())}.")] = "h100"
    attention_efficiency: Annotated[float | None, Parameter(validator=validators.Number(gte=0.01, lte=10))] = None

    def preset(self) -> wlb_tools.Hardware:
        """The GPU by its name."""
        try:
            return wlb_tools.Hardware.preset(self.gpu)
        except wlb.WlbError:
            raise CliError(f"--gpu {self.gpu}: must be one of {', '.join(gpus())}") from None

    def efficiency(self) -> float:
        """Attention's efficiency: as given, or as assumed for the GPU."""
        given = self.attention_efficiency
        return self.preset().attention_efficiency if given is None else given

    def shown_efficiency(self) -> float | None:
        """The efficiency for a report's settings; None if costs do not depend on it."""
        return None if self.cost_file else self.efficiency()

    def in_words(self) -> str:
        """A sentence about the source of the costs."""
        if self.cost_file:
            return f"Costs are those of {self.cost_file}."
        source = f"assumed of a {self.gpu}" if self.attention_efficiency is None else "as given"
        return (
            f"Costs are the FLOPs of {self.model_name}, attention's at {self.efficiency():g} of the"
            f" rate of matrix multiplications ({source})."
        )

    def from_file(self) -> wlb.CostModel | None:
        """The costs from the file of the options, if there is one."""
        if self.cost_file is None:
            return None
        if "attention_efficiency" in self.given:
            raise superfluous("attention_efficiency", "cost_file")
        return _read(self.cost_file)

    def of_documents(self) -> wlb.CostModel | None:
        """The cost model; in seconds if it was fitted, else in GEMM-equivalent FLOPs."""
        if (costs := self.from_file()) is not None:
            for name in sorted(self.given & {"model_name", "multi_token_prediction", "gpu"}):
                raise superfluous(name, "cost_file")
            return costs
        return self.model().cost_model(attention_efficiency=self.efficiency())

    def model(self) -> wlb.ModelConfig:
        """The shape of the model."""
        return model_config(self.model_name, multi_token_prediction=self.multi_token_prediction)


def _read(path: Path) -> wlb.CostModel:
    try:
        return wlb.CostModel.from_json(path.read_text())
    except (wlb.WlbError, UnicodeDecodeError) as cause:
        raise CliError(f"--cost-model {path}: is no cost model: {cause}") from None


def superfluous(name: str, told_by: str) -> CliError:
    """Error for an option that contradicts another option about costs."""
    return CliError(f"--{option(name)}: --{option(told_by)} says what documents cost; leave this out")
