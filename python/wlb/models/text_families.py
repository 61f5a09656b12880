"""Language models by Hugging Face model type: the meaning of each key, and the properties that no key gives."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from wlb.models.attention import Attention, LatentAttention
from wlb.models.blocks import Block, Mask
from wlb.models.feed_forward import FeedForward
from wlb.models.keys import Keys, Refused
from wlb.models.layers import Layer

FULL, SLIDING = "full_attention", "sliding_attention"


@dataclass(frozen=True)
class Text:
    """A language model."""

    layers: tuple[Layer, ...]
    tied: bool = False  # the default where no key says it
    prediction: Layer | None = None  # the layer of a head that predicts a token further on


@dataclass(frozen=True)
class Heads:
    """Attention of a family. A text value names the key that holds it."""

    qkv_bias: bool | str = False
    output_bias: bool | str = False
    qk_norm: Literal["none", "head", "all"] = "none"
    sinks: bool = False

    def block(self, keys: Keys, kind: str) -> Attention:
        """Attention block of one layer."""
        hidden, heads = keys.integer("hidden_size"), keys.positive("num_attention_heads")
        head_dim = keys.integer("head_dim", "attention_head_dim", default=0)
        if not head_dim:
            head_dim, rest = divmod(hidden, heads)
            if rest:
                message = f"num_heads = {heads}: does not divide hidden_size = {hidden}; head_dim is needed"
                raise Refused(f"has {message}", heads)
        return Attention(
            num_heads=heads,
            num_kv_heads=keys.integer("num_key_value_heads", default=heads),
            head_dim=head_dim,
            mask=_mask(keys, kind),
            qkv_bias=_flag(keys, self.qkv_bias),
            output_bias=_flag(keys, self.output_bias),
            qk_norm=self.qk_norm,
            sinks=self.sinks,
        )


_BIASED = Heads(qkv_bias="attention_bias", output_bias="attention_bias")


def _flag(keys: Keys, value: bool | str) -> bool:
    return keys.flag(value) if isinstance(value, str) else value


def _mask(keys: Keys, kind: str) -> Mask:
    if kind == FULL:
        return Mask()
    if kind == SLIDING:
        window = keys.window()
        return Mask("window", window) if window else Mask()
    raise Refused(f"has layer_types {kind!r}: what that costs is not known to wlb", kind)


def _count(keys: Keys) -> int:
    count = keys.integer("num_hidden_layers")
    if count < 1:
        raise Refused(f"has num_layers = {count}: must be at least 1", count)
    return count


# Feed-forward blocks.


def _dense(keys: Keys, *, bias: bool | str = False) -> FeedForward:
    return FeedForward(width=keys.integer("intermediate_size"), bias=_flag(keys, bias))


def _experts(keys: Keys, *, width: int, **more: Any) -> FeedForward:
    experts = keys.integer("num_local_experts", "num_experts", "n_routed_experts", "num_routed_experts", default=1)
    visited = keys.integer("num_experts_per_tok", "num_experts_per_token", default=1 if experts == 1 else None)
    return FeedForward(width=width, num_experts=experts, experts_per_token=visited, **more)


def _mixtral(keys: Keys, **more: Any) -> FeedForward:
    """Experts of width `intermediate_size`, as in Mixtral, unless another key gives the width of experts.

    Without experts: a dense block.
    """
    return _experts(keys, width=keys.integer("moe_intermediate_size", "intermediate_size"), **more)


def _qwen_feed_forward(keys: Keys, index: int) -> FeedForward:
    """Experts in every `decoder_sparse_step`-th layer that is not listed as dense; perhaps a gated shared one."""
    step = keys.integer("decoder_sparse_step", default=1)
    if index in keys.integers("mlp_only_layers", ()) or not step or (index + 1) % step:
        return _dense(keys)
    shared = keys.integer("shared_expert_intermediate_size", default=0)
    width = keys.integer("moe_intermediate_size")
    return _experts(keys, width=width, shared_width=shared, shared_gate=bool(shared))


def _deepseek_feed_forward(keys: Keys) -> Callable[[int], FeedForward]:
    """Leading dense layers, then experts of which some are shared."""
    leading = keys.count("first_k_dense_replace", default=0)
    count = _count(keys)
    kinds = keys.per_layer(["mlp_layer_types"], count, lambda index: "dense" if index < leading else "sparse")
    keys.only("moe_layer_freq", 1)

    def block(index: int) -> FeedForward:
        if kinds[index] == "dense":
            return _dense(keys)
        width = keys.integer("moe_intermediate_size")
        shared = keys.integer("n_shared_experts", "num_shared_experts", default=0)
        return _experts(keys, width=width, shared_width=shared * width)

    return block


# Families. Each reads a config into layers.

Family = Callable[[Keys], Text]


def _decoder(
    heads: Heads = _BIASED,
    *,
    feed_forward: Callable[[Keys, int], FeedForward] = lambda keys, index: _mixtral(keys),
    kinds: Callable[[Keys, int], list[str]] | None = None,
    norms: int = 2,
    parallel: bool = False,
    tied: bool = False,
    always: tuple[str, ...] = (),
) -> Family:
    """Attention, then a feed-forward block; `kinds` gives those of the layers, full attention where there is none.

    `always` names flags that restate what the family always has.
    """

    def family(keys: Keys) -> Text:
        count = _count(keys)
        for name in always:
            keys.only(name, True)
        of_layers = kinds(keys, count) if kinds else [FULL] * count
        layers = []
        for index, kind in enumerate(of_layers):
            blocks: tuple[Block, ...] = (heads.block(keys, kind), feed_forward(keys, index))
            layers.append(Layer((blocks,) if parallel else blocks, norms))
        return Text(tuple(layers), tied)

    return family


def _all_sliding(keys: Keys, count: int) -> list[str]:
    return [SLIDING] * count


def _every(period: int) -> Callable[[Keys, int], list[str]]:
    """Full attention in every `period`-th layer, unless a list says which; a key may give another period."""
    key = "sliding_window_pattern"

    def kinds(keys: Keys, count: int) -> list[str]:
        if "layer_types" in keys:
            keys.pass_over(key)  # what the list was made from
            return keys.per_layer(["layer_types"], count, lambda index: FULL)
        each = keys.positive(key, default=period)
        return [SLIDING if (index + 1) % each else FULL for index in range(count)]

    return kinds


def _from_layer_on(keys: Keys, count: int) -> list[str]:
    """Qwen 2 and 3: layers from `max_window_layers` on have the window, where it is used."""
    used = keys.flag("use_sliding_window")
    first = keys.integer("max_window_layers", default=count) if used else count
    return keys.per_layer(["layer_types"], count, lambda index: SLIDING if index >= first else FULL)


def _deepseek(keys: Keys) -> Text:
    """Latent attention; leading dense layers, then experts."""
    attention, feed_forward = _latent(keys), _deepseek_feed_forward(keys)
    layers = tuple(Layer((attention, feed_forward(index))) for index in range(_count(keys)))
    return Text(layers, prediction=layers[-1])


def _latent(keys: Keys) -> LatentAttention:
    return LatentAttention(
        num_heads=keys.positive("num_attention_heads"),
        kv_rank=keys.integer("kv_lora_rank"),
        key_dim=keys.integer("qk_nope_head_dim"),
        rope_dim=keys.integer("qk_rope_head_dim"),
        value_dim=keys.integer("v_head_dim"),
        query_rank=keys.integer("q_lora_rank", default=0),
        bias=keys.flag("attention_bias"),
    )


_QWEN_NORMED = Heads("attention_bias", "attention_bias", qk_norm="head")
_ALL_NORMED = Heads("attention_bias", "attention_bias", qk_norm="all")

FAMILIES: Mapping[str, Family] = {
    "llama": _decoder(feed_forward=lambda keys, index: _mixtral(keys, bias=keys.flag("mlp_bias"))),
    "mistral": _decoder(Heads(), kinds=_all_sliding),
    "ministral": _decoder(Heads(), kinds=lambda keys, count: keys.per_layer(["layer_types"], count, lambda i: SLIDING)),
    "mixtral": _decoder(Heads(), kinds=_all_sliding),
    "qwen2": _decoder(Heads(qkv_bias=True), kinds=_from_layer_on),
    "qwen3": _decoder(_QWEN_NORMED, kinds=_from_layer_on),
    "qwen3_moe": _decoder(_QWEN_NORMED, feed_forward=_qwen_feed_forward, kinds=_all_sliding, always=("use_qk_norm",)),
    "qwen2_5_vl_text": _decoder(Heads(qkv_bias=True), kinds=_from_layer_on),
    "qwen2_vl_text": _decoder(Heads(qkv_bias=True), kinds=_from_layer_on),
    "qwen3_vl_text": _decoder(_QWEN_NORMED),
    "qwen3_vl_moe_text": _decoder(_QWEN_NORMED, feed_forward=_qwen_feed_forward),
    "gemma": _decoder(tied=True),
    "gemma2": _decoder(kinds=_every(2), norms=4, tied=True),
    "gemma3_text": _decoder(_QWEN_NORMED, kinds=_every(6), norms=4, tied=True),
    "gpt_oss": _decoder(
        Heads("attention_bias", "attention_bias", sinks=True),
        feed_forward=lambda keys, index: _mixtral(keys, bias=True, router_bias=True),
        kinds=_every(2),
    ),
    "deepseek_v2": _deepseek,
    "deepseek_v3": _deepseek,
    "glm": _decoder(Heads(qkv_bias="attention_bias")),
    "glm4": _decoder(Heads(qkv_bias="attention_bias"), norms=4),
    "phi3": _decoder(Heads(), kinds=_all_sliding),
    "olmo2": _decoder(_ALL_NORMED),
    "olmo3": _decoder(_ALL_NORMED, kinds=_every(4)),
    "olmoe": _decoder(_ALL_NORMED),
    "granite": _decoder(feed_forward=lambda keys, index: _mixtral(keys, bias=keys.flag("mlp_bias"))),
    "granitemoe": _decoder(),
    "cohere2": _decoder(kinds=_every(4), norms=1, parallel=True, tied=True),
    "exaone4": _decoder(Heads(qk_norm="head"), kinds=_every(4)),
}

# Defaults of transformers for keys that files leave out. Other keys are absent or missing, as in transformers; a test
# removes every key of every family.
DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "mistral": {"num_key_value_heads": 8, "sliding_window": 4096},
    "mixtral": {"num_key_value_heads": 8},
    "qwen2": {"use_sliding_window": False, "num_key_value_heads": 32},
    "qwen2_vl_text": {"use_sliding_window": False, "num_key_value_heads": 8},
    "qwen2_5_vl_text": {"use_sliding_window": False, "num_key_value_heads": 8},
    "qwen3": {"use_sliding_window": False, "num_key_value_heads": 32, "head_dim": 128},
    "qwen3_vl_text": {"num_key_value_heads": 32, "head_dim": 128},
    "qwen3_vl_moe_text": {"num_key_value_heads": 16},
    "qwen3_moe": {"use_sliding_window": False, "num_key_value_heads": 4},
    "gemma": {"num_key_value_heads": 16, "head_dim": 256},
    "gemma2": {"num_key_value_heads": 4, "head_dim": 256, "sliding_window": 4096},
    "gemma3_text": {
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "vocab_size": 262208,
        "sliding_window": 4096,
    },
    "gpt_oss": {"num_key_value_heads": 8, "head_dim": 64, "attention_bias": True, "sliding_window": 128},
    "deepseek_v2": {"q_lora_rank": 1536, "n_shared_experts": 2},
    "deepseek_v3": {"q_lora_rank": 1536, "n_shared_experts": 1, "first_k_dense_replace": 3},
    "glm": {"num_key_value_heads": 2, "head_dim": 128, "attention_bias": True},
    "glm4": {"num_key_value_heads": 2, "head_dim": 128, "attention_bias": True},
    "olmo3": {"sliding_window": 4096, "max_position_embeddings": 2048},
    "cohere2": {"sliding_window": 4096},
    "exaone4": {"num_key_value_heads": 32, "sliding_window": 4096, "max_position_embeddings": 2048},
}
