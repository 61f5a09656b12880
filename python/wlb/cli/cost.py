"""The cost model of a command: from a model's shape."""

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

# Names of a Hugging Face config.json.
_CONFIG_NAMES = {
    "hidden_size": "hidden_size",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
    "vocab_size": "vocab_size",
}
_OPTIONAL_CONFIG_NAMES = {
    "num_key_value_heads": "num_kv_heads",
    "head_dim": "head_dim",
    "num_experts_per_tok": "experts_per_token",
}
# What `CostModel.from_flops` does not know: unlike layers, experts beside the routed ones, latent attention.
_UNKNOWN_CONFIG_NAMES = (
    "n_shared_experts",
    "num_shared_experts",
    "shared_expert_intermediate_size",
    "first_k_dense_replace",
    "mlp_only_layers",
    "kv_lora_rank",
)


def cost_model(model: str, *, attention_efficiency: float) -> wlb.CostModel:
    """The cost model of a preset's name or of a Hugging Face `config.json`; unit: GEMM-equivalent FLOPs."""
    shape: dict[str, Any] = PRESETS.get(model) or _read_config(Path(model))
    return wlb.CostModel.from_flops(**shape, attention_efficiency=attention_efficiency)


def _read_config(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise CliError(f"--model {path}: neither a file nor one of {', '.join(PRESETS)}")
    try:
        config = json.loads(path.read_bytes())
        unknown = [name for name in _UNKNOWN_CONFIG_NAMES if config.get(name)]
        if unknown:
            raise CliError(
                f"--model {path}: the cost of {', '.join(unknown)} is not known to wlb; give a simpler model"
            )
        shape = {ours: int(config[theirs]) for theirs, ours in _CONFIG_NAMES.items()}
        # Mixtral names the width of one expert `intermediate_size`; where both stand, that is the dense layers'.
        ffn = config.get("moe_intermediate_size") or config["intermediate_size"]
        shape["ffn_hidden_size"] = int(ffn)
        optional = {ours: config.get(theirs) for theirs, ours in _OPTIONAL_CONFIG_NAMES.items()}
        return shape | {name: int(value) for name, value in optional.items() if value is not None}
    except (ValueError, TypeError, AttributeError) as error:
        raise CliError(f"--model {path}: not a config.json: {error}") from None
    except KeyError as error:
        raise CliError(f"--model {path}: has no {error}") from None
