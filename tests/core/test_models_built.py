"""Types that no family here describes: built by transformers on the meta device, and counted module by module."""

from __future__ import annotations

import collections
import subprocess
import sys
from typing import Any

import pytest

import wlb
from wlb.models import CountedBlock, Mask, built
from wlb.models.image_families import IMAGE_FAMILIES
from wlb.models.text_families import FAMILIES

transformers = pytest.importorskip("transformers")
pytest.importorskip("torch")
from tests.oracles import transformers_models as real  # noqa: E402

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
    assert any(isinstance(block, CountedBlock) for layer in model.kinds for block in layer.blocks)
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
        ({"model_type": "rwkv"}, "heads are not found"),
        ({"model_type": "gpt2", "n_memory": 7}, "n_memory = 7: transformers' GPT2Config does not read it"),
        (
            {"model_type": "internvl", "text_config": {"model_type": "qwen2", "mla_rank": 5}},
            r"text_config.mla_rank = 5",
        ),
        ({"model_type": "gpt2", "architectures": ["GPT2ForSequenceClassification"]}, "that is another model"),
        ({"model_type": "gpt2", "n_head": 7}, "cannot be built by transformers: ValueError"),
        ({"model_type": "vit"}, "has no language model|has no projection|no language model"),
        ({"model_type": "made_up", "auto_map": {"AutoConfig": "x"}}, "its own code .auto_map. is not run"),
        ({"model_type": "prophetnet", "is_encoder_decoder": False}, "something in it is not known to wlb"),
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
        by_hand = name in FAMILIES or name in IMAGE_FAMILIES
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
    assert found["read"] >= 240
