"""Shapes of models, against transformers' own models."""

import dataclasses
import json
import pickle
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import wlb
import wlb_tools
from wlb._choices import Passes
from wlb.models import Attention, FeedForward, Layer, Mask, presets

LLAMA = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 101,
    "max_position_embeddings": 512,
}
FILE = {"model_type": "llama", **LLAMA}


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


def test_layers_one_by_one() -> None:
    attention = Attention(num_heads=4, num_kv_heads=2, head_dim=16)
    local = dataclasses.replace(attention, mask=Mask("window", 32))
    layers = tuple(Layer((block, FeedForward(width=96))) for block in (local, local, attention))
    model = wlb.ModelConfig(hidden_size=64, vocab_size=101, layers=layers)
    equal = wlb.ModelConfig(
        hidden_size=64, vocab_size=101, ffn_hidden_size=96, num_layers=3, num_heads=4, num_kv_heads=2
    )
    assert model.num_layers == 3
    assert model.num_parameters == equal.num_parameters
    assert model.stack == layers
    assert equal.stack == (layers[2],) * 3
    assert list(model.kinds.values()) == [2, 1]
    assert model.attention == local
    assert model.feed_forward == FeedForward(width=96)
    d = np.array([20, 32, 33, 1000])
    pairs = np.minimum.outer(np.arange(1, 1001), [32]).cumsum()[d - 1]  # a query sees itself and 31 before it
    linear = 3 * d * equal.token_flops
    assert model.flops(d).tolist() == (linear + 3 * 4 * 64 * (2 * pairs + d * (d + 1) / 2)).tolist()
    assert dataclasses.replace(model, tied_embeddings=True).num_parameters == model.num_parameters - 64 * 101
    assert pickle.loads(pickle.dumps(model)) == model


LAYER = Layer((Attention(num_heads=4, num_kv_heads=2, head_dim=16), FeedForward(width=96)))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"layers": ()}, r"layers = \(\): must not be empty"),
        ({"layers": [LAYER]}, "layers = .*: must be a tuple"),
        ({"layers": (LAYER, 3)}, r"layers\[1\] = 3: must be a layer"),
        ({"layers": (LAYER,), "num_layers": 2}, "num_layers = 2: there are 1 layers"),
        ({"layers": (LAYER,), "qkv_bias": True}, "qkv_bias = True: is of equal layers"),
        ({"layers": (LAYER,), "num_heads": 4}, "num_heads = 4: is of equal layers"),
        ({"prediction_layers": (None,), "layers": (LAYER,)}, r"prediction_layers\[0\]"),
        ({}, "ffn_hidden_size = 0: must be at least 1"),
    ],
)
def test_layers_that_contradict_are_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(wlb.WlbError, match=said):
        wlb.ModelConfig(hidden_size=64, vocab_size=101, **changes)


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
    (tmp_path / "config.json").write_text(json.dumps(FILE))
    model = wlb.ModelConfig.from_hugging_face(FILE)
    assert wlb.ModelConfig.from_hugging_face(tmp_path / "config.json") == model
    assert wlb.ModelConfig.from_hugging_face(str(tmp_path)) == model


sizes = st.integers(1, 2000)


@given(
    shape=st.fixed_dictionaries(
        {
            "hidden_size": sizes,
            "ffn_hidden_size": sizes,
            "num_layers": st.integers(1, 130),
            "num_kv_heads": st.integers(1, 16),
            "head_dim": st.integers(1, 300),
            "vocab_size": st.integers(1, 300_000),
            "gated_ffn": st.booleans(),
        }
    ),
    groups=st.integers(1, 16),
    experts=st.integers(1, 8),
    rates=st.tuples(st.floats(0.01, 2), st.floats(0.1, 1e15)),
    passes=st.sampled_from(get_args(Passes)),
    recompute=st.booleans(),
    causal=st.booleans(),
)
def test_equal_layers_cost_what_the_core_says(
    shape: dict[str, Any],
    groups: int,
    experts: int,
    rates: tuple[float, float],
    passes: Passes,
    recompute: bool,
    causal: bool,
) -> None:
    """The core's `from_flops` and the sum over layers are two ways to one number, the same to the last bit."""
    options: dict[str, Any] = {"passes": passes, "recompute": recompute, "causal": causal}
    options |= dict(zip(("attention_efficiency", "flops_per_second"), rates, strict=True))
    shape["num_heads"] = groups * shape["num_kv_heads"]
    dense = wlb.ModelConfig(**shape)
    assert dense.shape() == shape | {"experts_per_token": 1}
    assert dense.cost_model(**options).terms == wlb.CostModel.from_flops(**shape, **options).terms
    # Of experts, the core does not know the router.
    mixture = wlb.ModelConfig(**shape, num_experts=8, experts_per_token=experts)
    core = wlb.CostModel.from_flops(**mixture.shape(), passes="forward").terms["tokens"]
    assert mixture.token_flops == core + 2 * shape["num_layers"] * shape["hidden_size"] * 8


def test_flops_are_six_of_a_parameter_and_twelve_of_a_pair() -> None:
    model = wlb.ModelConfig.preset("llama2-7b")
    # 6 FLOPs a parameter and token for whatever is multiplied; 12 L h d (causal: half) for attention.
    tokens = np.array([1000, 4096])
    multiplied = model.num_parameters - 32000 * 4096 - 65 * 4096
    expected = 6 * multiplied * tokens + 12 * 32 * 4096 * tokens * (tokens + 1) / 2
    assert model.flops(tokens) == pytest.approx(expected, rel=1e-12)


def test_experts() -> None:
    dense = wlb.ModelConfig.from_hugging_face(FILE)
    mixture = wlb.ModelConfig.from_hugging_face(FILE | {"num_local_experts": 8, "num_experts_per_tok": 2})
    assert mixture.num_active_parameters - dense.num_parameters == 3 * (3 * 64 * 96 + 64 * 8)
    assert mixture.num_parameters - dense.num_parameters == 3 * (7 * 3 * 64 * 96 + 64 * 8)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model_type": "made_up"}, "model_type 'made_up', which neither wlb nor transformers"),
        ({"model_type": None}, "has no model_type"),
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
    path.write_text(json.dumps(FILE | changes))
    for config in (FILE | changes, path):
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
        wlb.ModelConfig.from_hugging_face(FILE | changes)


def test_a_window_that_no_document_fills_is_none() -> None:
    long = FILE | {"max_position_embeddings": 2**33}
    whole = wlb.ModelConfig.from_hugging_face(long)
    for size in (2**31 - 1, 2**31, 2**40):
        assert wlb.ModelConfig.from_hugging_face(long | {"sliding_window": size}) == whole
        assert Mask("window", size) == Mask("chunk", size) == Mask()
    assert Mask("window", 2**31 - 2).size == 2**31 - 2


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


def test_costs_on_a_gpu_are_seconds_at_its_assumed_rates() -> None:
    gpu, model = wlb_tools.Hardware.preset("h100"), wlb.ModelConfig.preset("llama2-7b")
    cost = gpu.cost_model(model)
    linear = model.cost_model().linear_cost([1000])[0] / gpu.flops_per_second
    attention = model.cost_model(attention_efficiency=1.0).attention_cost([1000])[0]
    assert cost.linear_cost([1000])[0] == pytest.approx(linear, rel=1e-12)
    rate = gpu.flops_per_second * gpu.attention_efficiency
    assert cost.attention_cost([1000])[0] == pytest.approx(attention / rate, rel=1e-12)


def test_a_percentage_is_no_efficiency() -> None:
    model = wlb.ModelConfig.preset("llama2-7b")
    shape: dict[str, Any] = {"hidden_size": 64, "ffn_hidden_size": 96, "num_layers": 2, "num_heads": 2, "vocab_size": 9}
    hardware = wlb_tools.Hardware.preset("h100")
    for made in (
        lambda: wlb.CostModel.from_flops(**shape, attention_efficiency=55),
        lambda: dataclasses.replace(hardware, attention_efficiency=55),
    ):
        with pytest.raises(wlb.WlbError, match=r"a ratio of two rates, such as 0\.55, not a percentage"):
            made()
    # A fit to a slow network may be as large, so that costs of a model warn.
    with pytest.warns(UserWarning, match=r"a ratio of two rates, such as 0\.55, not a percentage"):
        model.cost_model(attention_efficiency=55)


def test_a_name_of_the_hub_is_shown_the_way() -> None:
    with pytest.raises(wlb.WlbError, match=r"is read by ModelConfig\.from_hugging_face"):
        wlb.ModelConfig.preset("meta-llama/Llama-2-7b-hf")
