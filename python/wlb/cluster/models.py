"""Shapes of language models: from a Hugging Face `config.json`, or by name.

A shape gives what planning needs: the cost of a document, the number of parameters, the bytes of keys and values.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from wlb._choices import Passes
from wlb._core import CostModel
from wlb._errors import check_bool, check_integer, error

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The shape of a decoder-only transformer: RMSNorm before attention and feed-forward, no dropout.

    Args:
        hidden_size: width of the residual stream.
        ffn_hidden_size: width of the feed-forward block; of one expert where there are several.
        num_layers: transformer layers.
        num_heads: query heads.
        vocab_size: rows of the embedding.
        num_kv_heads: key and value heads; default: as many as query heads (MHA).
        head_dim: width of one head; default `hidden_size / num_heads`.
        gated_ffn: three matrices in the feed-forward block (SwiGLU), else two.
        tied_embeddings: the output projection is the embedding.
        num_experts: routed experts of a layer; 1: a dense model.
        experts_per_token: experts that a token visits.
        qkv_bias: queries, keys and values have a bias.
        output_bias: attention's output projection has a bias.
        ffn_bias: the feed-forward block has biases.
        qk_norm: queries and keys are normalised, each head with the same weights (Qwen3).
        name: for reports.

    Raises:
        WlbError: naming the first size that makes no sense.
    """

    hidden_size: int
    ffn_hidden_size: int
    num_layers: int
    num_heads: int
    vocab_size: int
    num_kv_heads: int = 0
    head_dim: int = 0
    gated_ffn: bool = True
    tied_embeddings: bool = False
    num_experts: int = 1
    experts_per_token: int = 1
    qkv_bias: bool = False
    output_bias: bool = False
    ffn_bias: bool = False
    qk_norm: bool = False
    name: str = "custom"

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.type == "int":
                check_integer(field.name, value, minimum=0 if field.name in ("num_kv_heads", "head_dim") else 1)
            elif field.type == "bool":
                check_bool(field.name, value)
        if not isinstance(self.name, str):
            raise error("name", f"= {self.name!r}: must be text", value=self.name)
        if not self.num_kv_heads:
            object.__setattr__(self, "num_kv_heads", self.num_heads)
        if not self.head_dim:
            if self.hidden_size % self.num_heads:
                message = f"= {self.num_heads}: does not divide hidden_size = {self.hidden_size}; head_dim is needed"
                raise error("num_heads", message, value=self.num_heads)
            object.__setattr__(self, "head_dim", self.hidden_size // self.num_heads)
        if self.num_heads % self.num_kv_heads:
            message = f"= {self.num_kv_heads}: does not divide num_heads = {self.num_heads}"
            raise error("num_kv_heads", message, value=self.num_kv_heads)
        if self.experts_per_token > self.num_experts:
            message = f"= {self.experts_per_token}: there are {self.num_experts} experts"
            raise error("experts_per_token", message, value=self.experts_per_token)

    @classmethod
    def preset(cls, name: str) -> ModelConfig:
        """A model by name, see :func:`presets`.

        ========================  ==========================================================================
        ``llama2-7b`` ...         As published: ``llama2-7b``, ``-13b``, ``-70b``; ``llama3-8b``, ``-70b``, ``-405b``.
        ``wlb-llm-7b``            WLB-LLM (OSDI'25) section 7: the architecture of LLaMA2-7B.
        ``wlb-llm-70b``           Its 70B is taken to be LLaMA2-70B.
        ``wlb-llm-550m``, -30b    The paper says only that they keep the architecture and scale depth and width. Ours
                                  keep heads of 128, MHA, a feed-forward width of 8/3, and depths that divide into the
                                  paper's 4 pipeline stages, also interleaved twice: 16 x 1536 is 551 M parameters,
                                  64 x 6144 is 29.4 G (48 heads divide by its TP of 8; LLaMA-30B's 52 do not).
        ========================  ==========================================================================

        Raises:
            WlbError: there is no such name.
        """
        if name not in _PRESETS:
            raise error("name", f"{name!r}: must be one of {', '.join(_PRESETS)}", value=name)
        return cls(name=name, **_PRESETS[name])

    @classmethod
    def from_hugging_face(cls, config: str | os.PathLike[str] | Mapping[str, Any]) -> ModelConfig:
        """The shape in a Hugging Face `config.json`.

        Known are the model types ``llama``, ``mistral``, ``qwen2``, ``qwen3``, ``phi3``, ``gemma``, ``granite``,
        ``mixtral``, ``qwen3_moe``, and a config without a model type, which is read as a Llama. Whatever would change
        FLOPs or parameters and is not known here (shared experts, latent attention, unlike layers, sliding windows, a
        model type) is refused by name rather than priced wrongly.

        Args:
            config: a path of the file or of its folder, or what is in it.

        Raises:
            WlbError: the file cannot be read, a key is missing or of the wrong type, or a feature is not known.
        """
        content = config if isinstance(config, Mapping) else _read_json(Path(config))
        try:
            return cls(**_from_hugging_face(content))
        except _Refused as refused:
            where = "" if isinstance(config, Mapping) else f"{os.fspath(config)!r} "
            raise error("config", f"{where}{refused}", value=refused.value) from None

    def layer_parameters(self, *, experts: int | None = None) -> int:
        """Parameters of one layer, with all experts or with that many."""
        h, d = self.hidden_size, self.head_dim
        q, kv = self.num_heads * d, self.num_kv_heads * d
        attention = h * q + 2 * h * kv + q * h + self.qkv_bias * (q + 2 * kv) + self.output_bias * h
        up = 2 if self.gated_ffn else 1
        ffn = (up + 1) * h * self.ffn_hidden_size + self.ffn_bias * (up * self.ffn_hidden_size + h)
        router = h * self.num_experts if self.num_experts > 1 else 0
        experts = self.num_experts if experts is None else experts
        return attention + self.qk_norm * 2 * d + experts * ffn + router + 2 * h

    @property
    def num_parameters(self) -> int:
        """All parameters, exactly: embedding, layers, last norm, output projection unless tied."""
        return self._parameters(self.num_experts)

    @property
    def num_active_parameters(self) -> int:
        """Parameters that one token meets: those of `experts_per_token` experts only."""
        return self._parameters(self.experts_per_token)

    def _parameters(self, experts: int) -> int:
        embeddings = (1 if self.tied_embeddings else 2) * self.vocab_size * self.hidden_size
        return embeddings + self.num_layers * self.layer_parameters(experts=experts) + self.hidden_size

    def shape(self) -> dict[str, Any]:
        """Arguments of :meth:`wlb.CostModel.from_flops` and `wlb.torch.model_flops`."""
        names = ("hidden_size", "ffn_hidden_size", "num_layers", "num_heads", "num_kv_heads", "vocab_size", "head_dim")
        return {name: getattr(self, name) for name in (*names, "gated_ffn", "experts_per_token")}

    def cost_model(
        self,
        *,
        attention_efficiency: float = 0.55,
        flops_per_second: float = 1.0,
        passes: Passes = "forward_backward",
        recompute: bool = False,
        causal: bool = True,
    ) -> CostModel:
        """What documents cost: :meth:`wlb.CostModel.from_flops` of this shape. Routers, norms and biases cost nothing.

        Args:
            attention_efficiency: FLOP rate of attention relative to the matrix multiplications'.
            flops_per_second: rate of the matrix multiplications; 1: the unit is one of their FLOPs.
            passes: what is counted.
            recompute: the backward runs the forward again.
            causal: a token attends to itself and those before it, else to its whole document.

        Raises:
            WlbError: for a rate that is not positive.
        """
        return CostModel.from_flops(
            **self.shape(),
            attention_efficiency=attention_efficiency,
            flops_per_second=flops_per_second,
            passes=passes,
            recompute=recompute,
            causal=causal,
        )

    def flops(self, lengths: ArrayLike) -> NDArray[np.float64]:
        """Model FLOPs of training each document, as MFU counts them: three times those of its forward.

        Args:
            lengths: int[n] tokens.

        Returns:
            float64[n].
        """
        return 3 * self.cost_model(attention_efficiency=1.0, passes="forward").cost(lengths)


def presets() -> list[str]:
    """Names that :meth:`ModelConfig.preset` knows."""
    return list(_PRESETS)


def _shape(layers: int, hidden: int, ffn: int, heads: int, kv_heads: int, vocab: int = 32000) -> dict[str, int]:
    return {
        "num_layers": layers,
        "hidden_size": hidden,
        "ffn_hidden_size": ffn,
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "vocab_size": vocab,
    }


_LLAMA2_7B = _shape(32, 4096, 11008, 32, 32)
_LLAMA2_70B = _shape(80, 8192, 28672, 64, 8)
_LLAMA3_VOCABULARY = 128256
_PRESETS: dict[str, dict[str, Any]] = {
    "llama2-7b": _LLAMA2_7B,
    "llama2-13b": _shape(40, 5120, 13824, 40, 40),
    "llama2-70b": _LLAMA2_70B,
    "llama3-8b": _shape(32, 4096, 14336, 32, 8, _LLAMA3_VOCABULARY),
    "llama3-70b": _LLAMA2_70B | {"vocab_size": _LLAMA3_VOCABULARY},
    "llama3-405b": _shape(126, 16384, 53248, 128, 8, _LLAMA3_VOCABULARY),
    "wlb-llm-550m": _shape(16, 1536, 4096, 12, 12),
    "wlb-llm-7b": _LLAMA2_7B,
    "wlb-llm-30b": _shape(64, 6144, 16384, 48, 48),
    "wlb-llm-70b": _LLAMA2_70B,
}


class _Refused(Exception):
    """What is wrong with a config, and the value that is."""

    def __init__(self, message: str, value: object) -> None:
        super().__init__(message)
        self.value = value


# What a model type means where config.json says nothing; a string names the key that says it.
_LLAMA: dict[str, Any] = {"qkv_bias": "attention_bias", "output_bias": "attention_bias", "ffn_bias": "mlp_bias"}
_QWEN3 = _LLAMA | {"ffn_bias": False, "qk_norm": True}
_MODEL_TYPES: dict[str, dict[str, Any]] = {
    "llama": _LLAMA,
    "mistral": {},
    "qwen2": {"qkv_bias": True},
    "qwen3": _QWEN3,
    "phi3": {},
    "gemma": _LLAMA | {"ffn_bias": False, "tied_embeddings": True},
    "granite": _LLAMA,
    "mixtral": {},
    "qwen3_moe": _QWEN3,
}

# Keys that no shape here can express, where they are set to something.
_UNKNOWN = (
    "text_config",
    "n_shared_experts",
    "num_shared_experts",
    "shared_expert_intermediate_size",
    "first_k_dense_replace",
    "mlp_only_layers",
    "moe_layer_freq",
    "interleave_moe_layer_step",
    "kv_lora_rank",
    "q_lora_rank",
    "attention_chunk_size",
    "attn_layer_indices",
    "layers_block_type",
    "mamba_d_state",
    "num_nextn_predict_layers",
    "is_encoder_decoder",
)


def _from_hugging_face(config: Mapping[str, Any]) -> dict[str, Any]:
    model_type = _typed(config, "model_type", str, "llama")
    if model_type not in _MODEL_TYPES:
        known = ", ".join(_MODEL_TYPES)
        raise _Refused(f"has model_type {model_type!r}, which is not known to wlb; known are {known}", model_type)
    unknown = [name for name in _UNKNOWN if config.get(name)] + _unlike_layers(config)
    if unknown:
        raise _Refused(f"has {', '.join(unknown)}: what that costs is not known to wlb", unknown[0])

    shape: dict[str, Any] = {"name": str(config.get("_name_or_path") or model_type)}
    for ours, theirs in {
        "hidden_size": ["hidden_size"],
        "num_layers": ["num_hidden_layers"],
        "num_heads": ["num_attention_heads"],
        "vocab_size": ["vocab_size"],
        # Mixtral names the width of one expert `intermediate_size`; where both stand, that is the dense layers'.
        "ffn_hidden_size": ["moe_intermediate_size", "intermediate_size"],
    }.items():
        shape[ours] = _integer(config, theirs)
    for ours, theirs in {
        "num_kv_heads": ["num_key_value_heads"],
        "head_dim": ["head_dim"],
        "num_experts": ["num_local_experts", "num_experts"],
        "experts_per_token": ["num_experts_per_tok"],
    }.items():
        if any(config.get(name) is not None for name in theirs):
            shape[ours] = _integer(config, theirs)
    meaning = _MODEL_TYPES[model_type]
    if config.get("tie_word_embeddings") is not None:
        meaning = meaning | {"tied_embeddings": "tie_word_embeddings"}
    for ours, value in meaning.items():
        shape[ours] = _typed(config, value, bool, False) if isinstance(value, str) else value
    return shape


def _unlike_layers(config: Mapping[str, Any]) -> list[str]:
    """Features by which some layers, or all, attend to less than the whole document or lack experts."""
    found = []
    kinds = _typed(config, "layer_types", list, [])
    if any(kind != "full_attention" for kind in kinds):
        found.append(f"layer_types {sorted(set(map(str, kinds)))}")
    # Qwen writes a window and does not use it; a window no smaller than the context hides nothing.
    window = _typed(config, "sliding_window", int, 0)
    context = _typed(config, "max_position_embeddings", int, 0)
    if window and _typed(config, "use_sliding_window", bool, True) and (not context or window < context):
        found.append(f"sliding_window {window}")
    sparse_step = _typed(config, "decoder_sparse_step", int, 1)
    if sparse_step != 1:
        found.append(f"decoder_sparse_step {sparse_step}")
    return found


def _integer(config: Mapping[str, Any], names: list[str]) -> int:
    """The first of these keys that is there."""
    name = next((name for name in names if config.get(name) is not None), None)
    if name is None:
        raise _Refused(f"lacks {names[-1]}", None)
    return _typed(config, name, int, 0)


_TYPES: dict[type, str] = {int: "an integer", bool: "true or false", str: "text", list: "a list"}


def _typed(config: Mapping[str, Any], name: str, kind: type[T], default: T) -> T:
    """What is there, of that type and no other; the default where nothing or null is."""
    value = config.get(name)
    if value is None:
        return default
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise _Refused(f"has {name} {value!r}, not {_TYPES[kind]}", value)
    return value


def _read_json(path: Path) -> Mapping[str, Any]:
    try:
        content = json.loads((path / "config.json" if path.is_dir() else path).read_bytes())
    except (OSError, ValueError) as problem:
        raise error("config", f"{str(path)!r} cannot be read: {problem}", value=str(path)) from problem
    if not isinstance(content, dict):
        raise error("config", f"{str(path)!r} is not a JSON object", value=str(path))
    return content
