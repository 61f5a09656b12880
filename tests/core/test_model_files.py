"""Configurations as people publish them: read exactly, or refused by name.

Every configuration here is our own, with the keys of a published one that matter. Where a checkout of published ones
lies beside this one, those are read as well.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import wlb
from wlb.models import Attention, GatedDeltaNet, Mamba2

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
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("torch")
    from tests.oracles import transformers_models as real

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
    assert not any(layer.of_kind(GatedDeltaNet)), "the head has attention, as the file's authors build it"
    assert any(read(AS_PUBLISHED["Nemotron-3"]).stack[0].of_kind(Mamba2))
    for name in ("Kimi-K2", "Qwen3-Coder"):
        with pytest.raises(wlb.WlbError, match="there are no heads that predict further tokens"):
            read(AS_PUBLISHED[name], multi_token_prediction=True)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (LLAMA | {"hidden_dimension": 5}, "hidden_dimension = 5: what that costs is not known"),
        (LLAMA | {"num_memory_slots": 4}, "num_memory_slots = 4"),
        (LLAMA | {"draft_vocab_size": 50}, "draft_vocab_size = 50"),
        (AS_PUBLISHED["MiniMax-M2"] | {"attn_type_list": [1, 1, 0, 1]}, "attn_type_list with other kinds than 1"),
        (AS_PUBLISHED["MiniMax-M2"] | {"attn_type_list": [1]}, "1 attn_type_list and 4 layers"),
        (AS_PUBLISHED["MiniMax-M2"] | {"use_qk_norm": False}, "use_qk_norm False"),
        (AS_PUBLISHED["Qwen3-Coder"] | {"use_qk_norm": False}, "use_qk_norm False"),
        (AS_PUBLISHED["Qwen3.5"] | {"attn_output_gate": False}, "attn_output_gate False"),
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


@pytest.mark.skipif(not PUBLISHED.is_dir(), reason="needs the published configurations beside the checkout")
@pytest.mark.parametrize("name", EXPECTED)
def test_published_configurations(name: str) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("torch")
    path = PUBLISHED / f"{name}.json"
    expected = EXPECTED[name]
    if expected is None:
        with pytest.raises(wlb.WlbError, match="config"):
            read(path)
    else:
        assert read(path).num_parameters == expected
