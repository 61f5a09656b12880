"""Encoders of images by the Hugging Face model type of what they belong to."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from wlb.models.attention import Attention
from wlb.models.blocks import Mask, Matrix
from wlb.models.encoder import ImageEncoder
from wlb.models.feed_forward import FeedForward
from wlb.models.keys import Keys, Refused
from wlb.models.layers import Layer

ImageFamily = Callable[[Keys, Keys, int], ImageEncoder]
"""From the whole config, its `vision_config`, and the width of the language model."""

_ALL_PATCHES = Mask("bidirectional")


def _layer(keys: Keys, mask: Mask, *, gated: bool, bias: bool, norm_bias: bool) -> Layer:
    hidden, heads = keys.integer("hidden_size"), keys.positive("num_attention_heads", "num_heads")
    head_dim = keys.integer("head_dim", default=hidden // heads)
    attention = Attention(
        num_heads=heads, num_kv_heads=heads, head_dim=head_dim, mask=mask, qkv_bias=bias, output_bias=bias
    )
    return Layer(
        (attention, FeedForward(width=keys.integer("intermediate_size"), gated=gated, bias=bias)), norm_bias=norm_bias
    )


def _patch_values(keys: Keys) -> int:
    side = keys.positive("patch_size")
    frames = keys.integer("temporal_patch_size", default=1)
    return keys.integer("in_channels", "in_chans", "num_channels", default=3) * frames * side * side


def _qwen2_5(config: Keys, keys: Keys, text: int) -> ImageEncoder:
    """Windows in most layers; a gated feed-forward block; RMSNorm."""
    hidden, merge = keys.integer("hidden_size"), keys.integer("spatial_merge_size", default=2) ** 2
    side = keys.integer("window_size", default=112) // keys.positive("patch_size")
    everywhere = {*keys.integers("fullatt_block_indexes", (7, 15, 23, 31))}
    layers = []
    for index in range(keys.integer("depth")):
        mask = _ALL_PATCHES if index in everywhere else Mask("bidirectional_window", side * side)
        layers.append(_layer(keys, mask, gated=True, bias=True, norm_bias=False))
    return ImageEncoder(
        hidden_size=hidden,
        layers=tuple(layers),
        patch_values=_patch_values(keys),
        patch_bias=False,
        merge=merge,
        projection=_merger(hidden * merge, keys.integer("out_hidden_size")),
        other_parameters=hidden,
    )


def _merger(inner: int, output: int) -> tuple[Matrix, ...]:
    return (Matrix(inner, inner, bias=True), Matrix(inner, output, bias=True))


def _qwen2(config: Keys, keys: Keys, text: int) -> ImageEncoder:
    """The whole image everywhere; LayerNorm; `hidden_size` is the language model's."""
    hidden, merge = keys.integer("embed_dim"), keys.integer("spatial_merge_size", default=2) ** 2
    heads = keys.positive("num_heads")
    attention = Attention(
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=hidden // heads,
        mask=_ALL_PATCHES,
        qkv_bias=True,
        output_bias=True,
    )
    width = keys.integer("mlp_ratio", default=4) * hidden
    layer = Layer((attention, FeedForward(width=width, gated=False, bias=True)), norm_bias=True)
    return ImageEncoder(
        hidden_size=hidden,
        layers=(layer,) * keys.integer("depth"),
        patch_values=_patch_values(keys),
        patch_bias=False,
        merge=merge,
        projection=_merger(hidden * merge, keys.integer("hidden_size")),
        other_parameters=2 * hidden,
    )


def _qwen3(config: Keys, keys: Keys, text: int) -> ImageEncoder:
    """Learnt positions; the rows of some layers are handed on as well, each by a projection of its own (DeepStack)."""
    hidden, merge = keys.integer("hidden_size"), keys.integer("spatial_merge_size", default=2) ** 2
    deep = len(keys.integers("deepstack_visual_indexes", ()))
    return ImageEncoder(
        hidden_size=hidden,
        layers=(_layer(keys, _ALL_PATCHES, gated=False, bias=True, norm_bias=True),) * keys.integer("depth"),
        patch_values=_patch_values(keys),
        merge=merge,
        projection=_merger(hidden * merge, keys.integer("out_hidden_size")) * (1 + deep),
        other_parameters=keys.integer("num_position_embeddings") * hidden + 2 * hidden + deep * 2 * hidden * merge,
    )


def _vit(keys: Keys) -> tuple[int, int, Layer]:
    """Width, patches of an image, and a layer of CLIP and SigLIP."""
    side = keys.integer("image_size") // keys.positive("patch_size")
    layer = _layer(keys, _ALL_PATCHES, gated=False, bias=True, norm_bias=True)
    return keys.integer("hidden_size"), side * side, layer


def _gemma3(config: Keys, keys: Keys, text: int) -> ImageEncoder:
    """SigLIP; patches are averaged to `mm_tokens_per_image` tokens."""
    hidden, patches, layer = _vit(keys)
    tokens = config.integer("mm_tokens_per_image", default=256)
    if not 0 < tokens <= patches:
        raise Refused(f"has mm_tokens_per_image {tokens}, of {patches} patches", tokens)
    head = 0
    if keys.flag("vision_use_head", default=True):  # pools to one row, which a language model does not use
        feed_forward = FeedForward(width=keys.integer("intermediate_size"), gated=False, bias=True)
        head = 4 * Matrix(hidden, hidden, bias=True).parameters(1) + feed_forward.parameters(hidden) + 3 * hidden
    return ImageEncoder(
        hidden_size=hidden,
        layers=(layer,) * keys.integer("num_hidden_layers"),
        patch_values=_patch_values(keys),
        merge=patches // tokens,
        projection=(Matrix(hidden, text),),
        other_parameters=patches * hidden + 2 * hidden + head + hidden,
    )


def _llava(config: Keys, keys: Keys, text: int) -> ImageEncoder:
    """CLIP with a class token, and two matrices. All its layers run, the last for nothing where earlier rows go on."""
    kind = keys.read(str, "model_type", default="clip_vision_model")
    if kind not in ("clip_vision_model", "siglip_vision_model"):
        raise Refused(f"has vision_config of model_type {kind!r}, which is not known to wlb", kind)
    if kind == "siglip_vision_model":
        raise Refused("has vision_config of SigLIP in LLaVA: that is not known to wlb", kind)
    if "vision_feature_layer" in config:
        config.integer("vision_feature_layer")  # of several, the projection would be wider
    hidden, patches, layer = _vit(keys)
    bias = config.flag("multimodal_projector_bias", default=True)
    return ImageEncoder(
        hidden_size=hidden,
        layers=(layer,) * keys.integer("num_hidden_layers"),
        patch_values=_patch_values(keys),
        patch_bias=False,
        extra_positions=1,
        projection=(Matrix(hidden, text, bias), Matrix(text, text, bias)),
        other_parameters=(patches + 2) * hidden + 4 * hidden,
    )


def _llava_next(config: Keys, keys: Keys, text: int) -> ImageEncoder:
    """LLaVA over tiles of an image, each an image to the encoder, with a row that ends lines of patches."""
    encoder = _llava(config, keys, text)
    return dataclasses.replace(encoder, other_parameters=encoder.other_parameters + text)


def _mistral3(config: Keys, keys: Keys, text: int) -> ImageEncoder:
    """Pixtral without biases; squares of patches become one token, by a matrix of their own."""
    if keys.read(str, "model_type", default="pixtral") != "pixtral":
        raise Refused("has a vision_config that is not Pixtral's: that is not known to wlb", None)
    hidden, merge = keys.integer("hidden_size"), config.integer("spatial_merge_size", default=2) ** 2
    if "vision_feature_layer" in config:
        config.integer("vision_feature_layer")  # of several, the projection would be wider
    bias = config.flag("multimodal_projector_bias")
    layer = _layer(keys, _ALL_PATCHES, gated=True, bias=False, norm_bias=False)
    return ImageEncoder(
        hidden_size=hidden,
        layers=(layer,) * keys.integer("num_hidden_layers"),
        patch_values=_patch_values(keys),
        patch_bias=False,
        merge=merge,
        projection=(Matrix(hidden * merge, hidden), Matrix(hidden, text, bias), Matrix(text, text, bias)),
        other_parameters=2 * hidden,
    )


IMAGE_FAMILIES: Mapping[str, ImageFamily] = {
    "gemma3": _gemma3,
    "llava": _llava,
    "llava_next": _llava_next,
    "mistral3": _mistral3,
    "qwen2_vl": _qwen2,
    "qwen2_5_vl": _qwen2_5,
    "qwen3_vl": _qwen3,
    "qwen3_vl_moe": _qwen3,
    "qwen3_5": _qwen3,
    "qwen3_5_moe": _qwen3,
    "qwen4_exp": _qwen3,
}

_FRAMES = {"temporal_patch_size": 2}

# Defaults of transformers for keys that files leave out.
VISION_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "qwen2_vl": _FRAMES,
    "qwen2_5_vl": _FRAMES,
    "qwen3_vl": _FRAMES | {"deepstack_visual_indexes": [8, 16, 24]},
    "qwen3_vl_moe": _FRAMES | {"deepstack_visual_indexes": [8, 16, 24]},
    "qwen3_5": _FRAMES,
    "qwen3_5_moe": _FRAMES,
    "qwen4_exp": _FRAMES,
}
