"""Shapes of models, against transformers' own models."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import wlb
from wlb.cluster.models import presets

LLAMA = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 101,
    "max_position_embeddings": 512,
}


# As their authors give them (model cards; "Llama 3 Herd of Models", table 3).
@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("llama2-7b", 6.738415616),
        ("llama2-13b", 13.015864320),
        ("llama2-70b", 68.976648192),
        ("llama3-8b", 8.030261248),
        ("llama3-70b", 70.553706496),
        ("llama3-405b", 405.853388800),
    ],
)
def test_presets_are_as_published(name: str, billions: float) -> None:
    assert wlb.ModelConfig.preset(name).num_parameters == round(billions * 1e9)


def test_the_papers_models_have_their_size_and_divide() -> None:
    for size, layout in {"550m": (2, 0.55), "7b": (8, 7.0), "30b": (8, 30.0), "70b": (16, 70.0)}.items():
        tp, billions = layout
        model = wlb.ModelConfig.preset(f"wlb-llm-{size}")
        assert model.num_parameters == pytest.approx(billions * 1e9, rel=0.05)
        assert model.num_layers % 8 == 0
        assert model.num_heads % tp == model.ffn_hidden_size % tp == 0
        assert model.head_dim == 128


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [
        ("llama", {}),
        ("llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 32, "tie_word_embeddings": True}),
        ("mistral", {"sliding_window": None}),
        ("qwen2", {}),
        ("qwen3", {"head_dim": 32}),
        ("phi3", {"pad_token_id": 0, "sliding_window": None}),
        ("gemma", {"head_dim": 32}),
        ("granite", {"attention_bias": True}),
        ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}),
        ("qwen3_moe", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "mlp_only_layers": []}),
    ],
)
def test_parameters_are_those_of_transformers(model_type: str, changes: dict[str, Any]) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model(model_type, **LLAMA, **changes)
    with torch.device("meta"):
        built = transformers.AutoModelForCausalLM.from_config(config)
    expected = sum(parameter.numel() for parameter in built.parameters())
    # What is written to config.json, and what its author would write.
    assert wlb.ModelConfig.from_hugging_face(json.loads(config.to_json_string())).num_parameters == expected
    written = {"model_type": model_type, **LLAMA, **changes}
    assert wlb.ModelConfig.from_hugging_face(written).num_parameters == expected


def test_a_file_or_its_folder(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    model = wlb.ModelConfig.from_hugging_face(LLAMA)
    assert wlb.ModelConfig.from_hugging_face(tmp_path / "config.json") == model
    assert wlb.ModelConfig.from_hugging_face(str(tmp_path)) == model


def test_cost_is_that_of_the_core() -> None:
    model = wlb.ModelConfig.preset("llama2-7b")
    assert model.cost_model(attention_efficiency=0.5, recompute=True) == wlb.CostModel.from_flops(
        hidden_size=4096,
        ffn_hidden_size=11008,
        num_layers=32,
        num_heads=32,
        vocab_size=32000,
        attention_efficiency=0.5,
        recompute=True,
    )
    # 6 FLOPs a parameter and token for whatever is multiplied; 12 L h d (causal: half) for attention.
    tokens = np.array([1000, 4096])
    multiplied = model.num_parameters - 32000 * 4096 - 65 * 4096
    expected = 6 * multiplied * tokens + 12 * 32 * 4096 * tokens * (tokens + 1) / 2
    assert model.flops(tokens) == pytest.approx(expected, rel=1e-12)


def test_experts() -> None:
    dense = wlb.ModelConfig.from_hugging_face(LLAMA)
    mixture = wlb.ModelConfig.from_hugging_face(LLAMA | {"num_local_experts": 8, "num_experts_per_tok": 2})
    assert mixture.num_active_parameters - dense.num_parameters == 3 * (3 * 64 * 96 + 64 * 8)
    assert mixture.num_parameters - dense.num_parameters == 3 * (7 * 3 * 64 * 96 + 64 * 8)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model_type": "mamba"}, "model_type 'mamba'"),
        ({"kv_lora_rank": 512}, "kv_lora_rank"),
        ({"shared_expert_intermediate_size": 512}, "shared_expert_intermediate_size"),
        ({"text_config": {"hidden_size": 1}}, "text_config"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ({"sliding_window": 128}, "sliding_window 128"),
        ({"decoder_sparse_step": 2}, "decoder_sparse_step 2"),
        ({"hidden_size": None}, "lacks hidden_size"),
        ({"hidden_size": "64"}, "hidden_size '64', not an integer"),
        ({"model_type": ["llama"]}, r"model_type \['llama'\], not text"),
        ({"sliding_window": "4096"}, "sliding_window '4096', not an integer"),
        ({"max_position_embeddings": "x", "sliding_window": 1}, "max_position_embeddings 'x', not an integer"),
        ({"layer_types": 5}, "layer_types 5, not a list"),
        ({"layer_types": [["full_attention"]]}, "layer_types"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings 'false', not true or false"),
        ({"attention_bias": 1}, "attention_bias 1, not true or false"),
        ({"use_sliding_window": "no", "sliding_window": 1}, "use_sliding_window 'no'"),
        ({"decoder_sparse_step": True}, "decoder_sparse_step True"),
        ({"num_hidden_layers": True}, "num_hidden_layers True"),
        ({"num_attention_heads": 5, "num_key_value_heads": 5}, "num_heads = 5"),
        ({"num_key_value_heads": 3}, "num_kv_heads = 3"),
        ({"num_hidden_layers": 0}, "num_layers = 0"),
        ({"num_local_experts": 2, "num_experts_per_tok": 4}, "experts_per_token = 4"),
    ],
)
def test_what_is_not_known_is_refused_by_name(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA | changes))
    for config in (LLAMA | changes, path):
        with pytest.raises(wlb.WlbError, match=said):
            wlb.ModelConfig.from_hugging_face(config)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"gated_ffn": "no"}, "gated_ffn = 'no': must be true or false"),
        ({"tied_embeddings": 1}, "tied_embeddings = 1"),
        ({"num_layers": 2.0}, "num_layers = 2.0: must be an integer"),
        ({"num_experts": True}, "num_experts = True"),
        ({"name": None}, "name = None: must be text"),
    ],
)
def test_types(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(wlb.WlbError, match=said):
        dataclasses.replace(wlb.ModelConfig.preset("llama2-7b"), **changes)


def test_a_window_that_is_not_used_hides_nothing() -> None:
    for changes in ({"sliding_window": 128, "use_sliding_window": False}, {"sliding_window": 512}):
        wlb.ModelConfig.from_hugging_face(LLAMA | changes)


def test_bad_files(tmp_path: Path) -> None:
    (tmp_path / "text.json").write_text("{")
    (tmp_path / "list.json").write_text("[]")
    for name, said in {"none.json": "cannot be read", "text.json": "cannot be read", "list.json": "not a JSON"}.items():
        with pytest.raises(wlb.WlbError, match=said) as caught:
            wlb.ModelConfig.from_hugging_face(tmp_path / name)
        assert caught.value.argument == "config"
        assert caught.value.value == str(tmp_path / name)
    with pytest.raises(wlb.WlbError, match="llama3-405b") as caught:
        wlb.ModelConfig.preset("gpt-9")
    assert caught.value.value == "gpt-9"
    assert len(presets()) == 10
