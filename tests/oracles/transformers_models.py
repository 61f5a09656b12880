"""Parameters and forward FLOPs of transformers' own models, to compare `wlb.ModelConfig` with.

Parameters: the model of the family's default config on the meta device, where it takes no memory. FLOPs: a tiny model,
run once on the CPU under `torch.utils.flop_counter`. What the counter sees is all matrix products and convolutions.
It is corrected to the model's own mathematics, by what the model's code passes around, not by what `wlb` reads:

- Attention is replaced by a function that counts: two products of (query, key) pairs that the mask it is given lets
  through, of the widths of the tensors it is given.
- Scans of states are replaced by functions that count. The counter would see some of the products inside chunks, by
  which an implementation computes them, and not triangular solves or what is element-wise. A token reads and writes
  the state once each, and reads it once more under a delta rule: 4 or 6 FLOPs for each number of the state, whose size
  is that of the tensors.
- MiniMax computes its scan inside a module, block by block: its products of queries and keys of a block, and of these
  with values, are taken off.
- The indexer of sparse attention scores the full square; the pairs above the diagonal are taken off.
- Llama 4 runs every expert on every token; those that a token does not visit are taken off.
- The rotation's angles are computed by a product, which is none of the model's work, and taken off.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import transformers
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

TOKENS = 96
VOCABULARY = 211

# Sizes that make a model tiny; of these, a family is given what its config has.
_TINY: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "intermediate_size_mlp": 80,
    "moe_intermediate_size": 48,
    "moe_shared_expert_intermediate_size": 40,
    "shared_expert_intermediate_size": 56,
    "shared_intermediate_size": 72,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "sliding_window": 24,
    "attention_chunk_size": 40,
    "num_local_experts": 6,
    "num_experts": 6,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "kv_lora_rank": 24,
    "q_lora_rank": 40,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 24,
    "index_topk": 20,
    "index_head_dim": 16,
    "index_n_heads": 3,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "linear_num_heads": 3,
    "linear_head_dim": 16,
    "block_size": 32,
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 12,
    "mamba_dt_rank": 6,
    "mamba_chunk_size": 16,
    "mamba_num_heads": 6,
    "mamba_head_dim": 16,
    "ssm_state_size": 12,
    "n_groups": 2,
    "chunk_size": 16,
    "state_size": 12,
    "time_step_rank": 6,
    "max_position_embeddings": 1024,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@dataclass(frozen=True)
class Case:
    """A family: what its tiny config has that is not in the list above, and what its default config lacks."""

    model_type: str
    tiny: dict[str, Any] = field(default_factory=dict)
    full: dict[str, Any] = field(default_factory=dict)
    vision: dict[str, Any] = field(default_factory=dict)  # the tiny encoder of images
    full_vision: dict[str, Any] = field(default_factory=dict)
    grid: tuple[int, int, int] | None = None  # of an image, in patches

    def config(self) -> Any:
        """The family's default config, at full size."""
        full: dict[str, Any] = dict(self.full)
        if self.full_vision:
            full["vision_config"] = self.full_vision
        return transformers.AutoConfig.for_model(self.model_type, **full)

    def tiny_config(self) -> Any:
        """The family in small."""
        default = self.config()
        if not self.vision:
            return transformers.AutoConfig.for_model(self.model_type, **self._sizes(default))
        text = self._sizes(default.text_config) | {"model_type": default.text_config.model_type}
        outer = {name: value for name, value in self.tiny.items() if hasattr(default, name)}
        vision = self.full_vision | {"model_type": default.vision_config.model_type} | self.vision
        return transformers.AutoConfig.for_model(self.model_type, text_config=text, vision_config=vision, **outer)

    def _sizes(self, default: Any) -> dict[str, Any]:
        has = default.to_dict()
        sizes = {name: value for name, value in _TINY.items() if name in has or name == "head_dim"}
        if "sliding_window" in has and not has["sliding_window"]:
            del sizes["sliding_window"]  # the family's models have none
        if has.get("q_lora_rank", 1) is None:
            del sizes["q_lora_rank"]
        return {name: value for name, value in (sizes | self.tiny).items() if value is not ...}


_QWEN_VISION = {"depth": 4, "hidden_size": 32, "num_heads": 2, "patch_size": 14, "out_hidden_size": 64}
_ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
_CLIP = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 2}


# transformers' default Qwen4-Exp cannot be built: it lacks what its indexer takes.
_QSA = {"indexer_kv_heads": 1, "ple_layer_ids": [2], "eos_token_id": 2}
_QWEN4 = _QSA | {"indexer_n_heads": 4, "indexer_head_dim": 256, "indexer_budget": 2048, "indexer_compress_ratio": 16}
_TINY_QWEN4 = _QSA | {
    "indexer_n_heads": 3,
    "indexer_head_dim": 32,
    "indexer_budget": 20,
    "indexer_compress_ratio": 4,
    "hc_count": 3,
    "hc_lowrank": 24,
    "ngram_vocab_size_base": 50,
    "ple_embed_dim": 48,
}

CASES = [
    Case("llama"),
    Case("llama4_text", {"interleave_moe_layer_step": 2, "moe_layers": [1, 3], "layer_types": None}),
    Case("mistral"),
    Case("mixtral", {"sliding_window": 24}),
    Case("qwen2", {"head_dim": ..., "use_sliding_window": True, "max_window_layers": 2, "sliding_window": 24}),
    Case("qwen2_moe", {"head_dim": ..., "mlp_only_layers": [0]}),
    Case("qwen3"),
    Case("qwen3_moe", {"decoder_sparse_step": 2}),
    Case("qwen3_next"),
    Case("qwen3_5_text"),
    Case("qwen3_5_moe_text"),
    Case("qwen4_exp_text", _TINY_QWEN4, _QWEN4),
    Case("gemma"),
    Case("gemma2"),
    Case("gemma3_text", {"num_hidden_layers": 6}),
    Case("gpt_oss"),
    Case("deepseek_v2", {"head_dim": ..., "first_k_dense_replace": 1}, {"num_experts_per_tok": 6}),
    Case("deepseek_v3", {"head_dim": ..., "first_k_dense_replace": 2}),
    Case("deepseek_v32", {"head_dim": ..., "first_k_dense_replace": 2}),
    Case("glm", {}),
    Case("glm4", {}),
    Case("glm4_moe", {"use_qk_norm": True}),
    Case("phi3", {"head_dim": ..., "sliding_window": 24}),
    Case("olmo2", {"head_dim": ...}),
    Case("olmo3", {"head_dim": ...}),
    Case("olmoe", {"head_dim": ...}),
    Case("granite", {"head_dim": ...}),
    Case("granitemoe", {"head_dim": ...}),
    Case("granitemoehybrid", {"head_dim": ..., "layer_types": ["linear_attention"] * 2 + ["full_attention"] * 2}),
    Case("cohere2", {"head_dim": ...}),
    Case("smollm3", {"head_dim": ...}),
    Case("exaone4"),
    Case("minimax"),
    Case("minimax_m2"),
    Case("nemotron_h", {"layers_block_type": ["mamba", "moe", "attention", "mlp", "mamba"], "num_hidden_layers": ...}),
    Case("falcon_h1", {"mamba_d_ssm": 128}),
    Case("jamba", {"head_dim": ..., "attn_layer_offset": 1, "attn_layer_period": 4}),
    Case("bamba", {"head_dim": ..., "attn_layer_indices": [2]}),
    Case("mamba", {"head_dim": ..., "intermediate_size": ...}),
    Case("mamba2", {"num_heads": 8, "head_dim": 16}),
    Case("kimi_linear", {"head_dim": ..., "num_experts_per_token": 2, "num_hidden_layers": 5}),
    Case(
        "qwen2_vl",
        {"head_dim": ..., "rope_parameters": _ROPE},
        vision={"depth": 3, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "mlp_ratio": 3},
        grid=(1, 12, 18),
    ),
    Case(
        "qwen2_5_vl",
        {"head_dim": ..., "rope_parameters": _ROPE},
        vision=_QWEN_VISION | {"intermediate_size": 48, "fullatt_block_indexes": [1, 3]},
        grid=(2, 12, 18),
    ),
    Case(
        "qwen3_vl",
        {},
        vision=_QWEN_VISION | {"intermediate_size": 48, "deepstack_visual_indexes": [0, 2]},
        grid=(1, 12, 18),
    ),
    Case(
        "qwen3_vl_moe",
        {},
        vision=_QWEN_VISION | {"intermediate_size": 48, "deepstack_visual_indexes": [0, 2]},
        grid=(1, 12, 18),
    ),
    Case("qwen3_5", vision=_QWEN_VISION | {"intermediate_size": 48}, grid=(1, 12, 18)),
    Case("qwen3_5_moe", vision=_QWEN_VISION | {"intermediate_size": 48}, grid=(1, 12, 18)),
    Case(
        "qwen4_exp",
        _TINY_QWEN4,
        {"text_config": _QWEN4},
        vision=_QWEN_VISION | {"intermediate_size": 48},
        grid=(1, 12, 18),
    ),
    Case(
        "gemma3",
        {"mm_tokens_per_image": 16},
        full_vision={"image_size": 896, "patch_size": 14, "model_type": "siglip_vision_model"},
        vision=_CLIP | {"image_size": 224, "vision_use_head": False},
        grid=(1, 16, 16),
    ),
    Case("llava", {"head_dim": ...}, vision=_CLIP | {"image_size": 224, "patch_size": 14}, grid=(1, 16, 16)),
    Case(
        "llava_next",
        {"head_dim": ..., "image_grid_pinpoints": [[224, 224]]},
        vision=_CLIP | {"image_size": 224, "patch_size": 14},
        grid=(2, 16, 16),  # the whole image and its one tile
    ),
    Case("mistral3", {}, vision=_CLIP | {"head_dim": 16, "image_size": 448, "patch_size": 14}, grid=(1, 12, 18)),
]


# Experts one by one, each on the tokens that visit it: the counter does not see grouped products.
_EAGER = {"attn_implementation": "eager", "experts_implementation": "eager"}


def build(config: Any, **options: Any) -> Any:
    """The model of a config, with random weights."""
    auto = (
        transformers.AutoModelForImageTextToText
        if hasattr(config, "vision_config")
        else transformers.AutoModelForCausalLM
    )
    return auto.from_config(config, **options)  # type: ignore[no-untyped-call]


def num_parameters(config: Any) -> int:
    """Of the whole model; tied weights once."""
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in build(config).parameters())


@dataclass
class Counted:
    """Forward FLOPs by what counted them."""

    products: int = 0  # the flop counter, without the rotation's angles
    attention: int = 0  # pairs under the masks that attention was given
    scans: int = 0  # states
    taken_off: int = 0  # of the first: what is not the model's own work

    @property
    def total(self) -> int:
        """The model's own FLOPs."""
        return self.products + self.attention + self.scans - self.taken_off


def count(model: nn.Module, run: Callable[[], object]) -> Counted:
    """Forward FLOPs of what `run` runs of the model."""
    counted = Counted()
    with _counting(model, counted), torch.no_grad(), FlopCounterMode(display=False) as counter:
        run()
    by_module = {name: sum(ops.values()) for name, ops in counter.get_flop_counts().items()}
    rotary = sum(flops for name, flops in by_module.items() if name.rsplit(".", 1)[-1] == "rotary_emb")
    counted.products = counter.get_total_flops() - rotary
    return counted


def count_text(config: Any, tokens: int = TOKENS) -> Counted:
    """Of one document."""
    torch.manual_seed(0)
    model = build(config, **_EAGER).eval()
    ids = torch.randint(3, VOCABULARY, (1, tokens))
    return count(model, lambda: model(input_ids=ids, use_cache=False))


def count_image(config: Any, grid: tuple[int, int, int]) -> Counted:
    """Of one image."""
    torch.manual_seed(0)
    model = build(config, **_EAGER).eval()
    frames, rows, columns = grid
    vision = config.vision_config
    side = vision.patch_size
    given: dict[str, Any]
    if "qwen" in config.model_type:
        channels = getattr(vision, "in_channels", 3)
        values = channels * vision.temporal_patch_size * side * side
        given = {"image_grid_thw": torch.tensor([grid])}
        pixels = torch.randn(frames * rows * columns, values)
    else:
        pixels = torch.randn(1, 3, rows * side, columns * side)
        given = {"image_sizes": torch.tensor([[rows * side, columns * side]])} if "mistral" in config.model_type else {}
        if config.model_type == "llava_next":
            pixels, given = (
                pixels.expand(1, frames, -1, -1, -1),
                {"image_sizes": torch.tensor([[rows * side, columns * side]])},
            )
    return count(model, lambda: model.model.get_image_features(pixels, **given))


@contextlib.contextmanager
def _counting(model: nn.Module, counted: Counted) -> Iterator[None]:
    """Kernels of the model's modules replaced by what counts their work."""

    def attention(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **_: Any
    ) -> tuple[Tensor, None]:
        batch, heads, tokens, width = query.shape
        if attention_mask is None:
            if getattr(module, "is_causal", False):
                raise AssertionError("causal attention without a mask")
            pairs = tokens * key.shape[2]
        else:
            mask = attention_mask[0, 0, :, : key.shape[2]]
            pairs = int((mask if mask.dtype == torch.bool else mask == 0).sum())
        counted.attention += 2 * batch * heads * pairs * (width + value.shape[-1])
        return query.new_zeros(batch, tokens, heads, value.shape[-1]), None

    def delta(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
        tokens, heads, width = value.shape[1:]
        counted.scans += 6 * tokens * heads * width * key.shape[-1]
        return torch.zeros_like(value), None

    def mamba2(
        hidden_states: Tensor, dt: Tensor, A: Tensor, B: Tensor, *_: Any, return_final_states: bool = False, **__: Any
    ) -> object:
        tokens, heads, width = hidden_states.shape[1:]
        counted.scans += 4 * tokens * heads * width * B.shape[-1]
        return (torch.zeros_like(hidden_states), None) if return_final_states else torch.zeros_like(hidden_states)

    def mamba1(
        hidden_states: Tensor, dt: Tensor, A: Tensor, *_: Any, return_last_state: bool = False, **__: Any
    ) -> Any:
        counted.scans += 4 * hidden_states.shape[-1] * A.shape[0] * A.shape[1]
        return (torch.zeros_like(hidden_states), None) if return_last_state else torch.zeros_like(hidden_states)

    def lightning(module: Any, inputs: Any, kwargs: dict[str, Any]) -> None:
        tokens = (inputs[0] if inputs else kwargs["hidden_states"]).shape[1]
        blocks = [min(module.block_size, tokens - start) for start in range(0, tokens, module.block_size)]
        counted.taken_off += 4 * module.num_attention_heads * module.head_dim * sum(size**2 for size in blocks)

    def indexer(module: Any, inputs: Any, kwargs: dict[str, Any]) -> None:
        tokens = (inputs[0] if inputs else kwargs["hidden_states"]).shape[1]
        hidden = tokens**2 - tokens * (tokens + 1) // 2
        counted.taken_off += 2 * hidden * module.n_heads * (module.head_dim + 1)

    def all_experts(module: Any, inputs: Any, kwargs: dict[str, Any]) -> None:
        tokens = inputs[0].shape[0] // module.num_experts
        visited: int = model.config.num_experts_per_tok  # type: ignore[union-attr, assignment]
        per_token = 6 * module.hidden_size * module.expert_dim
        counted.taken_off += (module.num_experts - visited) * tokens * per_token

    kernels = {
        "eager_attention_forward": attention,
        "torch_chunk_gated_delta_rule": delta,
        "chunk_kimi_delta_attention": delta,
        "mamba2_chunk_scan": mamba2,
        "mamba_selective_scan": mamba1,
    }
    hooks = {
        "MiniMaxLightningAttention": lightning,
        "DeepseekV32Indexer": indexer,
        "Llama4TextExperts": all_experts,
    }
    with contextlib.ExitStack() as stack:
        for name in {type(module).__module__ for module in model.modules()}:
            for kernel, counting in kernels.items():
                if hasattr(sys.modules[name], kernel):
                    stack.enter_context(mock.patch.object(sys.modules[name], kernel, counting))
        for module in model.modules():
            if hook := hooks.get(type(module).__name__):
                handle = module.register_forward_pre_hook(hook, with_kwargs=True)
                stack.callback(handle.remove)
        yield
