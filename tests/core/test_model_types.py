"""Every model type that wlb reads: files as people publish them, families by hand, and what transformers builds.

Parameters are those of transformers' own model, exactly; forward FLOPs those of a tiny one, as
`tests/oracles/transformers_models.py` counts them. What is not understood is refused by name. Every configuration here
is our own, with the keys of a published one that matter. Where a checkout of published ones lies beside this one, those
are read as well.
"""

from __future__ import annotations

import collections
import copy
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import wlb
import wlb_tools
from wlb.models import Attention, FeedForward, LatentAttention, Mask, built
from wlb.models.image_families import IMAGE_FAMILIES
from wlb.models.text_families import FAMILIES
from wlb_tools.cluster.memory import activation_bytes, exchanged_width

transformers = pytest.importorskip("transformers")
pytest.importorskip("torch")
from tests.oracles import transformers_models as real  # noqa: E402

PUBLISHED = Path(__file__).parents[3] / "shared" / "configs"

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 101,
    "max_position_embeddings": 512,
}
LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], **SIZES}

HYBRID = {
    "full_attention_interval": 4,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
    "attn_output_gate": True,
    "mtp_num_hidden_layers": 1,
    "mtp_use_dedicated_embeddings": False,
    "mamba_ssm_dtype": "float32",
}
LATENT = {
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "moe_intermediate_size": 32,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}


def read(config: Any, **options: Any) -> wlb.ModelConfig:
    return wlb.ModelConfig.from_hugging_face(config, **options)


AS_PUBLISHED: dict[str, dict[str, Any]] = {
    "Qwen3.5": {"model_type": "qwen3_5_text", "architectures": ["Qwen3_5ForCausalLM"], **SIZES, **HYBRID},
    "MiniMax-M2": {
        "model_type": "minimax_m2",
        "architectures": ["MiniMaxM2ForCausalLM"],
        **SIZES,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "use_qk_norm": True,
        "qk_norm_type": "per_layer",
        "attn_type_list": [1] * 4,
        "use_mtp": True,
        "mtp_transformer_layers": 1,
        "num_mtp_modules": 3,
        "scoring_func": "sigmoid",
        "use_routing_bias": True,
    },
    "Qwen3-Coder": {
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        **SIZES,
        **EXPERTS,
        "num_experts": 4,
        "use_qk_norm": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
    "DeepSeek": {
        "model_type": "deepseek_v3",
        "architectures": ["DeepseekV3ForCausalLM"],
        **SIZES,
        **LATENT,
        "num_routed_experts": 4,
        "moe_layer_freq": 1,
        "n_group": 1,
        "num_nextn_predict_layers": 1,
    },
    "Kimi-K2": {
        "model_type": "kimi_k2",
        "architectures": ["DeepseekV3ForCausalLM"],
        **SIZES,
        **LATENT,
        "n_routed_experts": 4,
        "num_nextn_predict_layers": 0,
    },
    "Devstral": {
        "model_type": "mistral3",
        "architectures": ["Mistral3ForConditionalGeneration"],
        "image_token_index": 10,
        "multimodal_projector_bias": False,
        "projector_hidden_act": "gelu",
        "spatial_merge_size": 2,
        "vision_feature_layer": -1,
        "text_config": {"model_type": "mistral", **SIZES, "sliding_window": None, "rope_theta": 1e9},
        "vision_config": {
            "model_type": "pixtral",
            "head_dim": 16,
            "hidden_size": 32,
            "image_size": 448,
            "intermediate_size": 48,
            "num_attention_heads": 2,
            "num_channels": 3,
            "num_hidden_layers": 2,
            "patch_size": 14,
        },
    },
    "Nemotron-3": {
        "model_type": "nemotron_h",
        "architectures": ["NemotronHForCausalLM"],
        **SIZES,
        "hybrid_override_pattern": "ME*E",
        "mtp_hybrid_override_pattern": "*E",
        "num_nextn_predict_layers": 1,
        "mamba_num_heads": 4,
        "mamba_head_dim": 8,
        "ssm_state_size": 16,
        "n_groups": 2,
        "conv_kernel": 4,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "moe_latent_size": 16,
        "moe_shared_expert_intermediate_size": 32,
        "chunk_size": 128,
        "expand": 2,
        "mamba_proj_bias": False,
    },
}


@pytest.mark.parametrize("name", AS_PUBLISHED)
def test_files_as_published_are_read_as_transformers_builds_them(name: str) -> None:
    content = AS_PUBLISHED[name]
    model = read(content)
    theirs = {key: value for key, value in content.items() if key not in ("model_type", "architectures")}
    if "num_routed_experts" in theirs:  # DeepSeek's own name for it, which transformers does not read
        theirs["n_routed_experts"] = theirs.pop("num_routed_experts")
    model_type = {"kimi_k2": "deepseek_v3"}.get(content["model_type"], content["model_type"])
    assert model.num_parameters == real.num_parameters(transformers.AutoConfig.for_model(model_type, **theirs))


def test_heads_that_predict_further_tokens_are_trained_where_the_caller_says_so() -> None:
    for name, heads in (("Qwen3.5", 1), ("MiniMax-M2", 3), ("DeepSeek", 1), ("Nemotron-3", 1)):
        assert not read(AS_PUBLISHED[name]).prediction_layers
        assert len(read(AS_PUBLISHED[name], multi_token_prediction=True).prediction_layers) == heads, name
    (layer,) = read(AS_PUBLISHED["Nemotron-3"], multi_token_prediction=True).prediction_layers
    assert len(layer.blocks) == 2
    assert isinstance(layer.blocks[0], Attention)
    (layer,) = read(AS_PUBLISHED["Qwen3.5"], multi_token_prediction=True).prediction_layers
    assert not any(block.recurrence() for block in layer.blocks), (
        "the head has attention, as the file's authors build it"
    )
    assert any(block.recurrence() for block in read(AS_PUBLISHED["Nemotron-3"]).stack[0].blocks)
    for name in ("Kimi-K2", "Qwen3-Coder"):
        with pytest.raises(wlb.WlbError, match="there are no heads that predict further tokens"):
            read(AS_PUBLISHED[name], multi_token_prediction=True)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (LLAMA | {"hidden_dimension": 5}, "hidden_dimension = 5: what that costs is not known"),
        (LLAMA | {"num_memory_slots": 4}, "num_memory_slots = 4"),
        (LLAMA | {"draft_vocab_size": 50}, "draft_vocab_size = 50"),
        (AS_PUBLISHED["MiniMax-M2"] | {"attn_type_list": [1, 1, 0, 1]}, "attn_type_list = "),
        (AS_PUBLISHED["Qwen3-Coder"] | {"use_qk_norm": False}, "use_qk_norm False"),
        (
            AS_PUBLISHED["Devstral"] | {"text_config": {**AS_PUBLISHED["Devstral"]["text_config"], "mla_rank": 3}},
            r"text_config.mla_rank = 3",
        ),
        (
            AS_PUBLISHED["Devstral"] | {"vision_config": {**AS_PUBLISHED["Devstral"]["vision_config"], "experts": 3}},
            r"vision_config.experts = 3",
        ),
        (AS_PUBLISHED["Devstral"] | {"audio_config": {"hidden_size": 3}}, "audio_config"),
    ],
)
def test_a_key_that_nothing_reads_is_refused_by_name(content: dict[str, Any], said: str) -> None:
    with pytest.raises(wlb.WlbError, match=said) as caught:
        read(content)
    assert caught.value.argument == "config"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"architectures": ["LlamaForCausalLMEagle3"]}, "LlamaForCausalLMEagle3: a draft head for speculative"),
        ({"architectures": ["Eagle3LlamaForCausalLM"]}, "a draft head"),
        ({"architectures": ["DFlashDraftModel"]}, "a draft head"),
        ({"architectures": ["LlamaMedusaModel"]}, "a draft head"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "no projection to the vocabulary"),
        ({"architectures": ["LlamaModel"]}, "no projection to the vocabulary"),
        ({"architectures": ["Qwen2ForCausalLM"]}, "Qwen2ForCausalLM and model_type 'llama': which of the two"),
        ({"architectures": "LlamaForCausalLM"}, "not a list of text"),
        ({"model_type": None}, "has no model_type"),
    ],
)
def test_architectures_say_what_a_file_is(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(wlb.WlbError, match=said):
        read(LLAMA | changes)
    assert read(LLAMA | {"architectures": None}) == read(LLAMA) == read(LLAMA | {"architectures": []})


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({"peft_type": "LORA", "r": 16, "base_model_name_or_path": "x"}, r"an adapter \(LORA\): give the config.json"),
        ({"_class_name": "FluxTransformer2DModel", "_diffusers_version": "0.30"}, "a diffusers model"),
        ({"num_layers": 4, "hidden_size": 64, "ffn_hidden_size": 96}, "Megatron's own configuration"),
        ({"metadata": {}, "weight_map": {}}, "the index of a checkpoint's files"),
        ({"producer": {"name": "modelopt"}, "quantization": {}}, "how a checkpoint was quantised"),
        ({"tokenizer_class": "PreTrainedTokenizerFast"}, "the file of a tokenizer"),
        ({"dim": 4096, "n_layers": 32, "n_heads": 32}, "a params.json"),
        ({"hello": 1}, "has no model_type"),
    ],
)
def test_other_files_are_said_to_be_what_they_are(content: dict[str, Any], said: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(content))
    with pytest.raises(wlb.WlbError, match=said) as caught:
        read(path)
    assert str(path) in str(caught.value)


def test_a_model_of_one_layer_may_be_a_draft_head() -> None:
    """EAGLE's first heads say that they are Llamas."""
    head = {**LLAMA, "num_hidden_layers": 1, "vocab_size": 32000, "architectures": ["LlamaForCausalLM"]}
    assert "draft heads" in read(head).assumptions[0]
    assert not read({**head, "num_hidden_layers": 2}).assumptions


# Parameters as transformers 5.24 counts them on the meta device; None: refused by name.
EXPECTED: dict[str, int | None] = {
    "Qwen-Qwen3.5-35B-A3B": 35_107_181_936,
    "Qwen-Qwen3.5-27B": 27_356_728_560,
    "MiniMaxAI-MiniMax-M2.5": 228_689_748_992,
    "nvidia-NVIDIA-Nemotron-3-Super-120B-A12B-FP8": 120_668_687_360,
    "moonshotai-Kimi-K2-Instruct": 1_026_408_209_408,
    "llama3-8B-eagle3": None,
    "qwen3-8b-dflash": None,
    "adapter": None,
    "deepseek-ai-DeepSeek-V4-Flash": 284_332_230_231,
    "google-gemma-4-26B-A4B": 25_805_933_872,
    "zai-org-GLM-5": 743_911_199_232,
    "meta-llama-Llama-4-Scout-17B-16E-Instruct": 108_225_039_360,
    "starcoder2": 7_173_923_840,
    "gpt2": 124_439_808,
    "phi-4": 3_836_021_760,
    "EXAONE-4.0-32B": 32_003_216_384,
    "XiaomiMiMo-MiMo-7B-Base": None,
    "deepseek-ai-DeepSeek-R1": 671_026_404_352,
    "gemma2_9b": 9_241_705_984,
    "openai-gpt-oss-20b": 20_914_757_184,
}


@pytest.mark.a_few(4)
@pytest.mark.skipif(not PUBLISHED.is_dir(), reason="needs the published configurations beside the checkout")
@pytest.mark.parametrize("name", EXPECTED)
def test_published_configurations(name: str) -> None:
    path = PUBLISHED / f"{name}.json"
    expected = EXPECTED[name]
    if expected is None:
        with pytest.raises(wlb.WlbError, match="config"):
            read(path)
    else:
        assert read(path).num_parameters == expected


# Small sizes; a window smaller than the document.
TINY: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": real.VOCABULARY,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "sliding_window": 24,
}
KINDS = ["sliding_attention", "full_attention"] * 2

SHRUNK: dict[str, dict[str, Any]] = {
    "cohere": {},
    "starcoder2": {},
    "stablelm": {},
    "granitemoeshared": {"num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 32},
    "gpt2": {"n_embd": 64, "n_layer": 4, "n_head": 4},
    "gptj": {"n_embd": 64, "n_layer": 4, "n_head": 4, "rotary_dim": 8},
    "gpt_neox": {},
    "opt": {"ffn_dim": 96, "word_embed_proj_dim": 64},
    "helium": {},
    "ernie4_5": {},
    "seed_oss": {},
    "arcee": {},
    "phi": {},
    "cwm": {"layer_types": KINDS},
    "vaultgemma": {"layer_types": KINDS},
    "mellum": {"layer_types": KINDS, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "exaone_moe": {
        "layer_types": KINDS,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "mlp_layer_types": None,
    },
    "glm4_moe_lite": {
        "num_key_value_heads": 4,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "n_group": 1,
        "topk_group": 1,
        "kv_lora_rank": 16,
        "q_lora_rank": 24,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "mlp_layer_types": None,
    },
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2, "block_ff_dim": 96, "block_auto_adjust_ff_dim": False},
}


@pytest.mark.a_few(8)
@pytest.mark.parametrize("name", SHRUNK)
def test_flops_and_parameters_of_shrunk_models(name: str) -> None:
    kind = transformers.CONFIG_MAPPING[name]
    known = set(kind().to_dict()) | {*kind.attribute_map} | {"head_dim"}
    sizes = {key: value for key, value in TINY.items() if key in known} | SHRUNK[name]
    config = transformers.AutoConfig.for_model(name, **{key: v for key, v in sizes.items() if v is not None})
    model = wlb.ModelConfig.from_hugging_face(config)
    assert model.num_parameters == real.num_parameters(config)
    counted = real.count_text(config)
    assert model.flops([real.TOKENS])[0] / 3 == pytest.approx(counted.total, rel=0.01)


# Attention in their own code, which computes the whole square and masks half of it.
SQUARES: dict[str, dict[str, Any]] = {
    "falcon": {"new_decoder_architecture": False, "multi_query": True, "parallel_attn": True, "ffn_hidden_size": 256},
    "gpt_neo": {"num_layers": 4, "num_heads": 4, "attention_types": [[["global", "local"], 2]], "window_size": 24},
    "codegen": {"n_embd": 64, "n_layer": 4, "n_head": 4, "rotary_dim": 8},
}


@pytest.mark.parametrize("name", SQUARES)
def test_models_that_compute_the_whole_square(name: str) -> None:
    """The counter of torch sees all (query, key) pairs; those whose probability is above 0 are as many as wlb counts.

    So the counter's total is above wlb's by exactly the pairs that the model computes and hides.
    """
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    kind = transformers.CONFIG_MAPPING[name]
    known = set(kind().to_dict()) | {*kind.attribute_map}
    sizes = {key: value for key, value in TINY.items() if key in known} | SQUARES[name]
    config = transformers.AutoConfig.for_model(name, **sizes)
    model = wlb.ModelConfig.from_hugging_face(config)
    torch.manual_seed(0)
    network = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    tokens = real.TOKENS
    ids = torch.randint(3, real.VOCABULARY, (1, tokens))
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        weights = network(input_ids=ids, use_cache=False, output_attentions=True).attentions
    assert [tuple(each.shape) for each in weights] == [(1, 4, tokens, tokens)] * 4
    seen = [int((each > 0).sum()) for each in weights]  # over four heads of 16
    whole = tokens * tokens * 4
    counted, ours = counter.get_total_flops(), float(model.flops([tokens])[0] / 3)
    masked = sum(4 * 16 * (whole - each) for each in seen)
    assert counted - masked == pytest.approx(ours, rel=1e-3)
    assert counted - sum(4 * 16 * whole for _ in seen) == pytest.approx(model.token_flops * tokens, rel=1e-3)
    assert 0.05 < masked / counted < 0.30, "the difference that was not explained before"
    causal = tokens * (tokens + 1) // 2
    local = 24 * 25 // 2 + (tokens - 24) * 24
    assert [each // 4 for each in seen] == ([causal, local] * 2 if name == "gpt_neo" else [causal] * 4)


_COMPRESSED = {
    "layer_types": ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"],
    "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 16},
    "mlp_layer_types": ["moe"] * 3,
    "num_hidden_layers": 3,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "q_lora_rank": 24,
    "o_groups": 2,
    "o_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "partial_rotary_factor": 0.25,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "index_topk": 6,
    "index_n_heads": 2,
    "index_head_dim": 16,
    "hc_mult": 2,
}
SELECTING: dict[str, tuple[dict[str, Any], int]] = {
    # Keys that a query at position p meets, by hand; with heads x width and layers.
    "deepseek_v4": (_COMPRESSED, 4 * 32),
    "doge": ({"keep_window_size": 24, "sliding_window": None}, 4 * 16),
    "minimax_m3_vl_text": (
        {
            "layer_types": ["full_attention", "minimax_m3_sparse"] * 2,
            "mlp_layer_types": ["dense"] * 4,
            "dense_intermediate_size": 96,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "index_block_size": 8,
            "index_topk_blocks": 3,
            "index_local_blocks": 1,
            "index_n_heads": 2,
            "index_head_dim": 16,
            "rotary_dim": 8,
        },
        4 * 16,
    ),
}


def keys_met(name: str, position: int) -> int:
    """Keys that a query meets, over all layers, counted one by one."""
    seen = position + 1
    if name == "deepseek_v4":
        window = min(seen, 24)
        return 3 * window + min(seen // 4, 6) + seen // 16
    if name == "doge":
        return 4 * min(seen, 24)
    own = position % 8 + 1
    return 2 * seen + 2 * (own + 8 * min(position // 8, 2))


def probabilities_above_zero(config: Any) -> int:
    """(Query, key) pairs of one document that a model does not hide, over its layers and heads."""
    import torch

    torch.manual_seed(0)
    network = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    ids = torch.randint(3, real.VOCABULARY, (1, real.TOKENS))
    with torch.no_grad():
        weights = network(input_ids=ids, use_cache=False, output_attentions=True).attentions
    return sum(int((each > 0).sum()) for each in weights)


@pytest.mark.a_few(1)
@pytest.mark.parametrize("name", SELECTING)
def test_keys_that_are_selected_or_compressed(name: str) -> None:
    """The pairs of a tiny model's own masks are as many as by hand; wlb's are, but for half a key of a query."""
    kind = transformers.CONFIG_MAPPING[name]
    own, width = SELECTING[name]
    known = set(kind().to_dict()) | {*kind.attribute_map} | {"head_dim"}
    sizes = {key: value for key, value in TINY.items() if key in known} | own
    config = transformers.AutoConfig.for_model(name, **sizes)
    model = wlb.ModelConfig.from_hugging_face(config)
    assert model.num_parameters == real.num_parameters(config)
    by_hand = sum(keys_met(name, position) for position in range(real.TOKENS))
    if name == "doge":
        assert probabilities_above_zero(config) == 4 * by_hand, "of four heads"
    else:
        assert real.count_text(config).attention == 4 * width * by_hand
    scores = sum(flops for mask, flops in model.pair_flops.items() if mask == Mask()) if name != "doge" else 0
    one = wlb.ModelConfig.from_hugging_face(config).cost_model(attention_efficiency=1.0, passes="forward")
    pairs = float(one.attention_cost([real.TOKENS])[0])
    if name == "deepseek_v4":
        scores = round(2 * 2 * 17 / 4)
        assert model.residual_width == 2 * 64
    elif name == "minimax_m3_vl_text":
        scores -= 2 * 4 * width
    pairs -= scores * real.TOKENS * (real.TOKENS + 1) / 2
    assert pairs == pytest.approx(4 * width * by_hand, rel=0.03)


def test_what_is_assumed_is_said() -> None:
    model = wlb.ModelConfig.from_hugging_face({"model_type": "gpt2"})
    assert model.other_parameters == 1024 * 768 + 768, "positions, and the bias of the last norm"
    assert model.assumptions == ("787,200 parameters outside the 12 layers of transformer.h cost documents nothing",)
    assert model.num_parameters == 124_439_808


def test_keys_of_encoders_that_nothing_reads_are_said() -> None:
    vision = {"model_type": "internvl_vision", "register_banks": 7}
    model = wlb.ModelConfig.from_hugging_face({"model_type": "internvl", "vision_config": vision})
    assert model.assumptions[0] == "not read, since documents do not meet it: vision_config.register_banks"


def test_a_window_is_a_mask_and_heads_are_known_to_kernels() -> None:
    config = {"model_type": "granite_swa", "layer_types": ["sliding_attention", "full_attention"] * 12}
    model = wlb.ModelConfig.from_hugging_face(config)
    assert set(model.pair_flops) == {Mask(), Mask("window", 128)}
    assert model.kernel_heads[0] > 0


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({"model_type": "longcat_flash"}, "zero_expert_num"),
        ({"model_type": "xmod", "languages": ["en_XX", "de_DE"]}, "adapters of 2 languages"),
        (
            {"model_type": "deepseek_v4", "compress_rates": {"heavily_compressed_attention": 128}},
            "cannot be built by transformers: KeyError: 'compressed_sparse_attention'",
        ),
        ({"model_type": "dory"}, "n_recurrent_loops = 2: what its attention does with that is not known"),
        ({"model_type": "t5gemma2"}, "an encoder and a decoder"),
        ({"model_type": "paligemma"}, "use_bidirectional_attention"),
        ({"model_type": "gpt2", "n_memory": 7}, "n_memory = 7: transformers' GPT2Config does not read it"),
        (
            {"model_type": "internvl", "text_config": {"model_type": "qwen2", "mla_rank": 5}},
            r"text_config.mla_rank = 5",
        ),
        ({"model_type": "gpt2", "architectures": ["GPT2ForSequenceClassification"]}, "that is another model"),
        ({"model_type": "gpt2", "n_head": 7}, "cannot be built by transformers: ValueError"),
        ({"model_type": "vit"}, "has no language model|has no projection|no language model"),
        ({"model_type": "made_up", "auto_map": {"AutoConfig": "x"}}, "its own code .auto_map. is not run"),
    ],
)
def test_what_is_not_understood_is_refused_by_name(content: dict[str, Any], said: str) -> None:
    with pytest.raises(wlb.WlbError, match=said) as caught:
        wlb.ModelConfig.from_hugging_face(content)
    assert caught.value.argument == "config"


def test_without_transformers_it_says_what_to_install() -> None:
    code = (
        "import sys; sys.modules['transformers'] = None\n"
        "import wlb\n"
        "try: wlb.ModelConfig.from_hugging_face({'model_type': 'gpt2'})\n"
        "except wlb.WlbError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "has model_type 'gpt2', which wlb reads through transformers: pip install" in done.stdout, done.stderr


# What transformers' defaults lack: without these keys, it cannot build the type itself.
_VISION = {"model_type": "siglip_vision_model", "hidden_size": 1152, "num_attention_heads": 16}
_BY_KIND = {kind: {"rope_type": "default", "rope_theta": 1e4} for kind in ("full_attention", "sliding_attention")}
_INDEXED = {
    "indexer_n_heads": 4,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 256,
    "indexer_budget": 2048,
    "indexer_compress_ratio": 16,
    "ple_layer_ids": [2],
    "eos_token_id": 2,
}
_OCR = {"mlp_layer_types": ["dense"] + ["sparse"] * 11, "num_hidden_layers": 12, "num_experts_per_tok": 6}
NEEDED: dict[str, dict[str, Any]] = {
    "aya_vision": {"vision_config": _VISION},
    "chameleon": {"vocabulary_map": {"<image>": 4}},
    "dots1": {
        "moe_intermediate_size": 1408,
        "n_routed_experts": 128,
        "n_shared_experts": 2,
        "num_experts_per_tok": 6,
        "n_group": 1,
        "topk_group": 1,
    },
    "emu3": {"vocabulary_map": {"<image>": 4}},
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128, "num_experts": 8, "moe_topk": 2, "num_experts_per_tok": 2},
    "hunyuan_vl": {"text_config": {"head_dim": 128}},
    "lfm2_moe": {"layer_types": ["conv", "conv", "full_attention", "conv"] * 8, "num_hidden_layers": 32},
    "nemotron": {"num_key_value_heads": 8, "head_dim": 128},
    "cohere_compass": {"text_config": {"rope_parameters": _BY_KIND}},
    "cohere_compass_text": {"rope_parameters": _BY_KIND},
    "dbrx": {"attn_config": {"rope_theta": 5e5, "kv_n_heads": 8, "clip_qkv": 8.0}},
    "step3p7": {"text_config": {"sliding_window": 512}},
    "deepseek_v2": {"num_experts_per_tok": 6},
    "gemma3": {"vision_config": {**_VISION, "image_size": 896, "patch_size": 14}},
    "deepseek_ocr2": {"text_config": {**_OCR}},
    "granite4_vision": {
        "image_grid_pinpoints": [[384, 384]],
        "deepstack_layer_map": [[5, 0]],
        "downsample_rate": "1/2",
    },
    "xmod": {"default_language": "en_XX"},
    "qwen4_exp": {"text_config": _INDEXED},
    "qwen4_exp_text": _INDEXED,
    "bert-generation": {},
}


def default(name: str) -> dict[str, Any]:
    """The default configuration of a type, as a file would have it."""
    content: dict[str, Any] = transformers.AutoConfig.for_model(name).to_dict()
    del content["architectures"]
    for key, value in NEEDED.get(name, {}).items():
        nested = isinstance(value, dict) and isinstance(content.get(key), dict)
        content[key] = {**content[key], **value} if nested else value
    return content


@pytest.mark.long
def test_every_causal_type_of_transformers(capsys: pytest.CaptureFixture[str]) -> None:
    """The default of each type is read or refused by name. Prints how many are read."""
    found: collections.Counter[str] = collections.Counter()
    lines = []
    for name in built.model_types():
        by_hand = name in FAMILIES
        try:
            model = wlb.ModelConfig.from_hugging_face(default(name))
        except Exception as problem:  # ours, or transformers', which refuses some of its own defaults
            found["refused"] += 1
            lines.append(f"{name}: {str(problem)[:160]}")
            continue
        assert model.num_parameters >= model.num_active_parameters - model.hidden_size > 0, name
        found["read"] += 1
        found["by hand" if by_hand else "by transformers"] += 1
        found["not held to a run"] += any("not held" in each for each in model.assumptions)
    with capsys.disabled():
        print("", *lines, dict(found), sep="\n")
    assert found["read"] >= 245


CASES = {case.model_type: case for case in real.CASES}


def test_every_family_is_compared() -> None:
    inside = {"qwen2_vl_text", "qwen2_5_vl_text", "qwen3_vl_text", "qwen3_vl_moe_text"}  # of the families with images
    # transformers' default Ministral is not one that it can build.
    assert CASES.keys() >= {*FAMILIES, *IMAGE_FAMILIES} - inside - {"ministral"}


@pytest.mark.a_few(12)
@pytest.mark.parametrize("name", CASES)
def test_parameters_at_full_size(name: str) -> None:
    config = CASES[name].config()
    expected = real.num_parameters(config)
    model = read(config)
    assert model.num_parameters == expected
    assert read(config.to_dict()) == model
    assert read(json.loads(config.to_json_string())).num_parameters == expected


@pytest.mark.a_few(16)
@pytest.mark.parametrize("name", CASES)
def test_flops(name: str) -> None:
    case = CASES[name]
    config = case.tiny_config()
    model = read(config)
    counted = real.count_text(config)
    assert model.flops([real.TOKENS])[0] / 3 == pytest.approx(counted.total, rel=0.01)
    if not any(block.recurrence() for layer in model.kinds for block in layer.blocks):
        # The counter also sees the outputs of a convolution that are dropped; without one there is no difference.
        assert model.flops([real.TOKENS])[0] / 3 == counted.total
    if case.grid is not None:
        assert model.vision is not None
        assert model.vision.flops([case.grid])[0] / 3 == real.count_image(config, case.grid).total


BY_HAND = [
    name
    for name in CASES
    if name in FAMILIES or (name in IMAGE_FAMILIES and "qwen3_5" not in name and "qwen4" not in name)
]


@pytest.mark.a_few(12)
@pytest.mark.parametrize("name", BY_HAND)
def test_a_missing_key_is_known_or_refused(name: str) -> None:
    """Whatever key a file leaves out: the model is the one that transformers builds from the rest, or refused by name.

    transformers' own configs, at full size and in small, with each key taken out.
    """
    from huggingface_hub.errors import StrictDataclassError

    case = CASES[name]
    for whole in (case.config().to_dict(), case.tiny_config().to_dict()):
        sections = [whole] + [whole[part] for part in ("text_config", "vision_config") if whole.get(part)]
        for section in sections:
            for key in [*section]:
                if key in ("model_type", "text_config", "vision_config"):
                    continue
                kept = section.pop(key)
                try:
                    ours = read(whole)
                except wlb.WlbError:
                    continue
                else:
                    content = {name: value for name, value in whole.items() if name != "model_type"}
                    try:
                        theirs = transformers.AutoConfig.for_model(case.model_type, **copy.deepcopy(content))
                    except StrictDataclassError:
                        continue
                    assert ours == read(theirs), key
                finally:
                    section[key] = kept


def test_terms_of_a_cost_are_the_masks_of_the_layers() -> None:
    model = read(CASES["gemma3_text"].config())
    assert [mask for layer in model.stack[:6] for mask in layer.pairs()] == [Mask("window", 4096)] * 5 + [Mask()]
    terms = model.cost_model(attention_efficiency=1.0, passes="forward").terms
    per_pair = 4 * 8 * 256
    assert terms["pairs"] == 4 * per_pair
    assert terms["window_pairs[4096]"] == 22 * per_pair
    assert terms["tokens"] == model.token_flops
    assert model.cost_model().unit == "flops"
    assert model.cost_model(flops_per_second=1e15).unit == "seconds"
    with pytest.raises(wlb.WlbError, match="causal = False: gemma3_text has layers with window 4096"):
        model.cost_model(causal=False)


def test_blocks_of_keys_that_an_indexer_selects() -> None:
    """Pairs counted query by query: whole blocks up to the budget, and what is behind the last whole block."""
    config = CASES["qwen4_exp_text"].config()
    model, tokens = read(config), 20_000
    block, budget = config.indexer_compress_ratio, config.indexer_budget
    visible = np.arange(1, tokens + 1)
    met = np.minimum(visible // block, budget // block) * block + visible % block
    scored = visible // block
    layers = config.num_hidden_layers // 4
    ours = {
        mask.kind: (wlb.pairs([tokens]) if mask == Mask() else window_pairs(tokens, mask.size)) * flops
        for mask, flops in model.pair_flops.items()
    }
    assert ours["window"] == pytest.approx(layers * 4 * 16 * 256 * met.sum(), rel=1e-3)
    assert ours["full"] == pytest.approx(layers * 2 * 4 * 256 * scored.sum(), rel=1e-3)


def window_pairs(tokens: int, size: int) -> int:
    return int(np.minimum(np.arange(1, tokens + 1), size).sum())


def test_several_residual_streams_are_kept_and_sent() -> None:
    """Between layers and pipeline stages; context-parallel ranks send the indexer's keys, too."""
    model = read(CASES["qwen4_exp_text"].config())
    assert model.residual_width == 4 * model.hidden_size
    layout = wlb_tools.ParallelLayout(tp=2, cp=2, pp=2, dp=1, recompute="full")
    assert activation_bytes(model, layout) == layout.number_bytes * 4 * model.hidden_size / 2
    attention = next(layer for layer in model.stack if any(block.pairs() for block in layer.blocks))
    assert exchanged_width(attention, layout) == 2 * 256 + 256
    matrices = [m for layer in model.stack for block in layer.blocks for m in block.matrices(model.hidden_size)]
    tables = max((matrix for matrix in matrices if not matrix.used), key=lambda matrix: matrix.parameters(1))
    assert tables.parameters(1) > 40e9
    assert model.num_parameters - model.num_active_parameters > tables.parameters(1)
    # A layer keeps, for each of its two mixes, the streams and the row that is added to them.
    mixing = next(block for layer in model.stack for block in layer.blocks if getattr(block, "streams", 1) > 1)
    assert mixing.kept(model.hidden_size).rows == 2 * (4 + 1) * model.hidden_size


def test_tensor_parallelism_divides_the_key_heads_of_a_state() -> None:
    layers = {"layer_types": ["linear_attention"] * 4}
    model = read({**AS_PUBLISHED["Qwen3.5"], **layers})
    wlb_tools.ParallelLayout(tp=2).check(model=model)
    with pytest.raises(wlb.WlbError, match="tp = 4: does not divide num_heads = 2"):
        wlb_tools.ParallelLayout(tp=4).check(model=model)


TINY_OF_THREE = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 96}
# Sizes, and the part of the whole square's FLOPs that a token's visible pairs are: encoders' code hides none.
IN_THEIR_OWN_CODE: dict[str, tuple[dict[str, Any], bool]] = {
    "bert": (TINY_OF_THREE, True),  # a matrix before the output projection
    "electra": (TINY_OF_THREE | {"embedding_size": 32}, True),  # narrower embeddings
    "roberta": (TINY_OF_THREE, True),
    "xlnet": ({"d_model": 64, "n_layer": 3, "n_head": 4, "d_inner": 96}, True),  # scores of relative positions
    "xlm": ({"emb_dim": 64, "n_layers": 3, "n_heads": 4}, True),  # reads the values of its lengths
    "diffllama": (TINY_OF_THREE | {"num_key_value_heads": 2}, False),  # two attentions in one
    "hrm_text": (TINY_OF_THREE | {"num_layers_per_stack": 2, "head_dim": 16}, False),  # layers are met again
    "rwkv": ({"hidden_size": 64, "num_hidden_layers": 3, "context_length": 512}, False),
}


@pytest.mark.a_few(5)
@pytest.mark.parametrize("name", IN_THEIR_OWN_CODE)
def test_flops_and_parameters_of_models_with_their_own_code(name: str) -> None:
    sizes, whole = IN_THEIR_OWN_CODE[name]
    config = transformers.AutoConfig.for_model(name, vocab_size=real.VOCABULARY, **sizes)
    model = read(config)
    assert model.num_parameters == real.num_parameters(config)
    tokens = real.TOKENS
    pairs = sum(model.pair_flops.values()) * (tokens * tokens if whole else tokens * (tokens + 1) / 2)
    assert model.token_flops * tokens + pairs == real.count_text(config).total


def test_deepseek_v3_is_as_published() -> None:
    """README_WEIGHTS.md of DeepSeek-V3: 671 G in all, 36.7 G active."""
    config = CASES["deepseek_v3"].config()
    model, with_head = read(config), read(config, multi_token_prediction=True)
    assert model.num_parameters / 1e9 == pytest.approx(671, abs=0.5)
    # Its active parameters count the embedding once.
    embedding = model.vocab_size * model.hidden_size
    assert (model.num_active_parameters - embedding) / 1e9 == pytest.approx(36.7, abs=0.1)
    # The head is a layer, a projection of two rows to one, three norms, and the output projection again.
    (layer,) = with_head.prediction_layers
    added = layer.parameters(7168) + 2 * 7168 * 7168 + 3 * 7168
    assert with_head.num_parameters - model.num_parameters == added
    added = layer.token_flops(7168) + 2 * 2 * 7168 * 7168 + 2 * 7168 * model.vocab_size
    assert with_head.token_flops - model.token_flops == added
    with pytest.raises(wlb.WlbError, match="has no num_nextn_predict_layers"):
        read(CASES["llama"].config(), multi_token_prediction=True)


# As published on the Hub, whose files leave out what transformers knows. Parameters are the models' own, in full.
ON_THE_HUB: dict[str, tuple[dict[str, Any], int]] = {
    "google/gemma-3-4b-it": (
        {
            "model_type": "gemma3",
            "mm_tokens_per_image": 256,
            "text_config": {
                "hidden_size": 2560,
                "intermediate_size": 10240,
                "model_type": "gemma3_text",
                "num_hidden_layers": 34,
                "sliding_window": 1024,
            },
            "vision_config": {
                "hidden_size": 1152,
                "image_size": 896,
                "intermediate_size": 4304,
                "model_type": "siglip_vision_model",
                "num_attention_heads": 16,
                "num_hidden_layers": 27,
                "patch_size": 14,
                "vision_use_head": False,
            },
        },
        4_300_079_472,
    ),
    "Qwen/Qwen3-Next-80B-A3B-Instruct": (
        {
            "model_type": "qwen3_next",
            "decoder_sparse_step": 1,
            "full_attention_interval": 4,
            "head_dim": 256,
            "hidden_size": 2048,
            "intermediate_size": 5120,
            "linear_conv_kernel_dim": 4,
            "linear_key_head_dim": 128,
            "linear_num_key_heads": 16,
            "linear_num_value_heads": 32,
            "linear_value_head_dim": 128,
            "max_position_embeddings": 262144,
            "mlp_only_layers": [],
            "moe_intermediate_size": 512,
            "num_attention_heads": 16,
            "num_experts": 512,
            "num_experts_per_tok": 10,
            "num_hidden_layers": 48,
            "num_key_value_heads": 2,
            "shared_expert_intermediate_size": 512,
            "tie_word_embeddings": False,
            "vocab_size": 151936,
        },
        79_674_391_296,
    ),
}


@pytest.mark.parametrize("name", ON_THE_HUB)
def test_files_as_published(name: str) -> None:
    content, parameters = ON_THE_HUB[name]
    assert read(content).num_parameters == parameters
    rest = {key: value for key, value in content.items() if key != "model_type"}
    assert real.num_parameters(transformers.AutoConfig.for_model(content["model_type"], **rest)) == parameters


def test_files_in_the_words_of_their_authors() -> None:
    """Keys of files that came before transformers knew the family, beside those that transformers makes of them."""
    layers = {"full_attn_layers": [4, 8], "kda_layers": [1, 2, 3, 5, 6, 7]}
    sizes = {"num_heads": 32, "head_dim": 128, "short_conv_kernel_size": 4}
    kimi = {"num_hidden_layers": 8, "linear_attn_config": layers | sizes, "first_k_dense_replace": 2}
    nemotron = {"hybrid_override_pattern": "M-M*E", "num_hidden_layers": 5}
    gemma = {"sliding_window_pattern": 3, "num_hidden_layers": 7}
    qwen = {"full_attention_interval": 3, "num_hidden_layers": 7}
    # Lists that transformers makes of these keys.
    made = ("layer_types", "mlp_layer_types", "layers_block_type", "_sliding_window_pattern")
    for name, changes in {
        "kimi_linear": kimi,
        "nemotron_h": nemotron,
        "gemma3_text": gemma,
        "qwen3_next": qwen,
    }.items():
        config = transformers.AutoConfig.for_model(name, **copy.deepcopy(changes))
        written = {key: value for key, value in config.to_dict().items() if key not in made} | changes
        assert read(written) == read(config), name
        assert read(config).num_parameters == real.num_parameters(config), name
    llama4 = transformers.AutoConfig.for_model("llama4")
    assert read(llama4).stack == read(llama4.text_config).stack


def test_older_files_have_the_keys_of_the_language_model_outside() -> None:
    config = CASES["qwen2_5_vl"].config().to_dict()
    flat = {**config.pop("text_config"), **config}
    assert read(flat) == read(CASES["qwen2_5_vl"].config())


@pytest.mark.parametrize(
    ("name", "changes", "said"),
    [
        ("gemma2", {"layer_types": ["full_attention"]}, "has 1 layer_types and 26 layers"),
        ("llama", {"layer_types": ["full_attention"]}, "has 1 layer_types and 32 layers"),
        ("gemma2", {"layer_types": ["ring_attention"] * 26}, "layer_types 'ring_attention'"),
        ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("deepseek_v3", {"moe_layer_freq": 2}, "moe_layer_freq 2"),
        ("gemma3", {"mm_tokens_per_image": 5000}, "mm_tokens_per_image 5000, of 4096 patches"),
        ("gemma3_text", {"layer_types": None, "sliding_window_pattern": 0}, "sliding_window_pattern = 0"),
        ("mistral", {"sliding_window": -1}, "sliding_window = -1"),
        ("deepseek_v3", {"first_k_dense_replace": -1}, "first_k_dense_replace = -1"),
        ("deepseek_v3", {"num_nextn_predict_layers": -1}, "num_nextn_predict_layers = -1"),
        ("gemma3", {"vision_config": 3}, "vision_config 3, not an object"),
    ],
)
def test_contradictions_are_refused_by_name(name: str, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(wlb.WlbError, match=said) as caught:
        read(CASES[name].config().to_dict() | changes)
    assert caught.value.argument == "config"


def test_a_folder_that_transformers_wrote(tmp_path: Path) -> None:
    config = CASES["qwen3_5"].tiny_config()
    config.save_pretrained(tmp_path)
    assert read(tmp_path) == read(config)


def test_blocks_that_layers_have_in_common() -> None:
    gpt_oss = read(CASES["gpt_oss"].config())
    assert gpt_oss.attention.num_heads == 64
    assert gpt_oss.feed_forward.num_experts == 128
    deepseek = read(CASES["deepseek_v3"].config())
    assert isinstance(deepseek.stack[0].blocks[0], LatentAttention)
    for name in ("attention", "feed_forward"):
        with pytest.raises(wlb.WlbError, match="layers of deepseek_v3"):
            getattr(deepseek, name)
    with pytest.raises(wlb.WlbError, match=r"layers differ: shape\(\) is of a model of equal layers"):
        deepseek.shape()
    assert isinstance(read(CASES["llama"].config()).stack[0].blocks[0], Attention)
    assert isinstance(read(CASES["llama"].config()).stack[0].blocks[1], FeedForward)


def test_a_name_on_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    constants = pytest.importorskip("huggingface_hub.constants")
    snapshot = tmp_path / "models--some--name" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96}
    config = {"model_type": "llama", "vocab_size": 2000, **sizes}
    (snapshot / "config.json").write_text(json.dumps(config))
    (tmp_path / "models--some--name" / "refs").mkdir()
    (tmp_path / "models--some--name" / "refs" / "main").write_text("abc")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert wlb.ModelConfig.from_hugging_face("some/name") == wlb.ModelConfig.from_hugging_face(config)
    with pytest.raises(wlb.WlbError, match="config 'other/name' is no file, nor is it in the hub's cache"):
        wlb.ModelConfig.from_hugging_face("other/name")
