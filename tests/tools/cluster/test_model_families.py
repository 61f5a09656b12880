"""Configs of transformers' families, read and compared with transformers' own models.

Every family that `wlb` knows: parameters of the family's default config at full size, exactly; forward FLOPs of a tiny
one within 1 %. `tests/oracles/transformers_models.py` says how these are counted.
"""

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import wlb
import wlb_tools
from wlb.models import Attention, FeedForward, LatentAttention, Mask, NGramEmbedding
from wlb.models.image_families import IMAGE_FAMILIES
from wlb.models.text_families import FAMILIES
from wlb_tools.cluster.memory import activation_bytes, exchanged_width

pytest.importorskip("torch")
pytest.importorskip("transformers")
from tests.oracles import transformers_models as real

CASES = {case.model_type: case for case in real.CASES}


def read(config: Any, **options: Any) -> wlb.ModelConfig:
    return wlb.ModelConfig.from_hugging_face(config, **options)


def test_every_family_is_compared() -> None:
    inside = {"qwen2_vl_text", "qwen2_5_vl_text", "qwen3_vl_text", "qwen3_vl_moe_text"}  # of the families with images
    # transformers' default Ministral is not one that it can build.
    assert CASES.keys() == {*FAMILIES, *IMAGE_FAMILIES} - inside - {"ministral"}


@pytest.mark.parametrize("name", CASES)
def test_parameters_at_full_size(name: str) -> None:
    config = CASES[name].config()
    expected = real.num_parameters(config)
    model = read(config)
    assert model.num_parameters == expected
    assert read(config.to_dict()) == model
    assert read(json.loads(config.to_json_string())).num_parameters == expected


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


@pytest.mark.parametrize("name", CASES)
def test_a_missing_key_is_known_or_refused(name: str) -> None:
    """Whatever key a file leaves out: the model is the one that transformers builds from the rest, or refused by name.

    transformers' own configs, at full size and in small, with each key taken out.
    """
    import transformers
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
    attention = next(layer for layer in model.stack if any(layer.of_kind(Attention)))
    assert exchanged_width(attention, layout) == 2 * 256 + 256
    tables = next(block for layer in model.stack for block in layer.of_kind(NGramEmbedding))
    assert model.num_parameters - model.num_active_parameters > tables.table * tables.row
    assert tables.table * tables.row > 40e9


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
PUBLISHED: dict[str, tuple[dict[str, Any], int]] = {
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


@pytest.mark.parametrize("name", PUBLISHED)
def test_files_as_published(name: str) -> None:
    import transformers

    content, parameters = PUBLISHED[name]
    assert read(content).num_parameters == parameters
    rest = {key: value for key, value in content.items() if key != "model_type"}
    assert real.num_parameters(transformers.AutoConfig.for_model(content["model_type"], **rest)) == parameters


def test_files_in_the_words_of_their_authors() -> None:
    """Keys of files that came before transformers knew the family, beside those that transformers makes of them."""
    import transformers

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
        ("deepseek_v3", {"index_topk": 64, "q_lora_rank": None, "index_n_heads": 2, "index_head_dim": 8}, "query_rank"),
        ("qwen3_next", {"layer_types": ["sliding_attention"] * 48}, "layer_types 'sliding_attention'"),
        ("jamba", {"num_experts_per_tok": 32}, "experts_per_token = 32"),
        ("granitemoehybrid", {"mamba_d_state": None}, "lacks mamba_d_state"),
        ("nemotron_h", {"num_hidden_layers": 3}, "num_hidden_layers that are not its 4 blocks"),
        ("mamba2", {"num_heads": 0}, "num_heads = 0"),
        ("gemma3", {"mm_tokens_per_image": 5000}, "mm_tokens_per_image 5000, of 4096 patches"),
        ("gemma3_text", {"layer_types": None, "sliding_window_pattern": 0}, "sliding_window_pattern = 0"),
        ("mistral", {"sliding_window": -1}, "sliding_window = -1"),
        ("jamba", {"attn_layer_period": 0}, "attn_layer_period = 0"),
        ("llama4_text", {"attention_chunk_size": 0}, "attention_chunk_size = 0"),
        ("deepseek_v3", {"first_k_dense_replace": -1}, "first_k_dense_replace = -1"),
        ("deepseek_v3", {"num_nextn_predict_layers": -1}, "num_nextn_predict_layers = -1"),
        ("gemma3", {"vision_config": 3}, "vision_config 3, not an object"),
        ("llama4_text", {"moe_layers": [1, "x"]}, "moe_layers 'x', not an integer"),
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
