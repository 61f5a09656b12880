"""The cost model of a command: from a model's shape, or from a measured profile."""

import json
from pathlib import Path
from typing import Any

import wlb
from wlb.cli.console import CliError

LLAMA2_7B = {
    "hidden_size": 4096,
    "ffn_hidden_size": 11008,
    "num_layers": 32,
    "num_heads": 32,
    "num_kv_heads": 32,
    "vocab_size": 32000,
}
LLAMA2_70B = {
    "hidden_size": 8192,
    "ffn_hidden_size": 28672,
    "num_layers": 80,
    "num_heads": 64,
    "num_kv_heads": 8,
    "vocab_size": 32000,
}
LLAMA3_8B = LLAMA2_7B | {"ffn_hidden_size": 14336, "num_kv_heads": 8, "vocab_size": 128256}
LLAMA3_70B = LLAMA2_70B | {"vocab_size": 128256}

PRESETS = {
    "llama2-7b": LLAMA2_7B,
    "llama2-70b": LLAMA2_70B,
    "llama3-8b": LLAMA3_8B,
    "llama3-70b": LLAMA3_70B,
}

# Names of a Hugging Face config.json: attention is MHA or GQA, experts are those of Mixtral.
_CONFIG_NAMES = {
    "hidden_size": "hidden_size",
    "intermediate_size": "ffn_hidden_size",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
    "vocab_size": "vocab_size",
}
_OPTIONAL_CONFIG_NAMES = {
    "num_key_value_heads": "num_kv_heads",
    "head_dim": "head_dim",
    "num_experts_per_tok": "experts_per_token",
}


def cost_model(model: str, *, attention_efficiency: float) -> wlb.CostModel:
    """The cost model of a preset's name or of a Hugging Face `config.json`; unit: GEMM-equivalent FLOPs."""
    shape: dict[str, Any] = PRESETS.get(model) or _read_config(Path(model))
    return wlb.CostModel.from_flops(**shape, attention_efficiency=attention_efficiency)


def _read_config(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise CliError(f"--model {path}: neither a file nor one of {', '.join(PRESETS)}")
    try:
        config = json.loads(path.read_bytes())
        shape = {ours: int(config[theirs]) for theirs, ours in _CONFIG_NAMES.items()}
    except (ValueError, TypeError) as error:
        raise CliError(f"--model {path}: not a config.json: {error}") from None
    except KeyError as error:
        raise CliError(f"--model {path}: has no {error}") from None
    optional = {ours: config.get(theirs) for theirs, ours in _OPTIONAL_CONFIG_NAMES.items()}
    return shape | {name: int(value) for name, value in optional.items() if value is not None}
