"""Turns a Hugging Face config into arguments of `ModelConfig`: by a family here, else through transformers."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from wlb._core import WlbError
from wlb._errors import error
from wlb.models.encoder import ImageEncoder
from wlb.models.image_families import IMAGE_FAMILIES, VISION_DEFAULTS
from wlb.models.keys import Keys, Refused
from wlb.models.layers import Layer
from wlb.models.text_families import DEFAULTS, FAMILIES


@runtime_checkable
class PretrainedConfig(Protocol):
    """The part of a transformers configuration that is used here."""

    def to_dict(self) -> dict[str, Any]:
        """All keys."""
        ...


Source = str | os.PathLike[str] | Mapping[str, Any] | PretrainedConfig


def read(config: Source, *, multi_token_prediction: bool) -> dict[str, Any]:
    """Arguments of `ModelConfig`.

    Raises:
        WlbError: the file cannot be read, or what it says is not known.
    """
    where = ""
    if isinstance(config, Mapping):
        content: Mapping[str, Any] = config
    elif isinstance(config, PretrainedConfig):
        content = config.to_dict()
    elif isinstance(config, str | os.PathLike):
        path = Path(config)
        if isinstance(config, str) and _ON_HUB.fullmatch(config) and not path.exists():
            path = _from_hub(config)
        content, where = _read_json(path), f"{os.fspath(config)!r} "
    else:
        message = f"is a {type(config).__name__}: must be a transformers config, a dict, or the path of a config.json"
        raise error("config", message, value=config)
    try:
        found = _read(content, multi_token_prediction)
    except Refused as refused:
        raise error("config", f"{where}{refused}", value=refused.value) from None
    except WlbError as problem:  # a size that a layer cannot have
        raise error("config", f"{where}has {problem}", value=problem.value) from None
    if len(found["layers"]) == 1 and found["vocab_size"] >= _REAL_VOCABULARY:
        found["assumptions"] = (*found.get("assumptions", ()), _ONE_LAYER)
    return found


_REAL_VOCABULARY = 1000
_ONE_LAYER = "it has one layer, as draft heads for speculative decoding have: give their target's config.json instead"
"""Early EAGLE heads call themselves what their targets are."""


def _read(content: Mapping[str, Any], multi_token_prediction: bool) -> dict[str, Any]:
    _refuse_other_files(content)
    if content.get("model_type") is None:
        raise Refused("has no model_type: which architecture its sizes are of is not said; add it", None)
    model_type = Keys(content).read(str, "model_type")
    model_type = ALIASES.get(model_type, model_type)
    name = str(content.get("_name_or_path") or content["model_type"])
    if _text_type(content, model_type) not in FAMILIES:
        return {"name": name} | _built({**content, "model_type": model_type}, multi_token_prediction)
    return {"name": name} | _by_family(content, model_type, multi_token_prediction)


def _text_type(content: Mapping[str, Any], model_type: str) -> str:
    """The type of the language model."""
    if model_type not in IMAGE_FAMILIES:
        return model_type
    inner = content.get("text_config")
    nested = f"{model_type}_text"
    said = inner.get("model_type", "llama") if isinstance(inner, Mapping) else "llama"
    return nested if nested in FAMILIES else str(said)


def _by_family(content: Mapping[str, Any], model_type: str, multi_token_prediction: bool) -> dict[str, Any]:
    """A model that a family here describes."""
    keys, text_type = Keys(content), _text_type(content, model_type)
    keys.pass_over("model_type")
    check_architectures(content, model_type)
    vision, inner = None, content
    if model_type in IMAGE_FAMILIES:
        # Files of earlier versions have the keys of the language model beside `vision_config`.
        inner = keys.read(dict, "text_config", default={}) or content
        if inner is not content:
            check_architectures(inner, text_type)
        text_keys = Keys(inner, _NESTED_DEFAULTS.get(text_type, DEFAULTS.get(text_type)))
        vision = _vision(keys, model_type, text_keys.integer("hidden_size"))
        text_keys.pass_over("vision_config", *_OF_IMAGES)
    else:
        text_keys = Keys(content, DEFAULTS.get(model_type))

    text = FAMILIES[text_type](text_keys)
    tied = text_keys.flag("tie_word_embeddings", default=text.tied)
    if vision is not None:  # the outer key decides; some families pass it on from inside
        outer = keys.flag("tie_word_embeddings", default=model_type in _TIED_OUTSIDE)
        tied = outer or (tied and model_type in _TIED_INSIDE)
    counts = [text_keys.count(name, default=0) for name in _HEADS]
    shape = {
        "hidden_size": text_keys.integer("hidden_size"),
        "vocab_size": text_keys.integer("vocab_size"),
        "layers": text.layers,
        "tied_embeddings": tied,
    }
    text_keys.pass_over(*_OF_HEADS)
    if vision is not None:
        keys.pass_over("text_config", *_OF_IMAGES)
        if keys.read(dict, "text_config", default={}):
            keys.finish()
        else:
            text_keys.share(keys)
        shape["vision"] = vision
    text_keys.finish("text_config." if inner is not content else "")
    if multi_token_prediction:
        shape["prediction_layers"] = _heads(counts, text.prediction, text_type)
    return shape


def _vision(keys: Keys, model_type: str, hidden: int) -> ImageEncoder:
    """The encoder of images before a language model of this width."""
    images = keys.section("vision_config", VISION_DEFAULTS.get(model_type))
    vision = IMAGE_FAMILIES[model_type](keys, images, hidden)
    images.pass_over("tokens_per_second", "projection_dim", "vocab_size", "image_size")  # sizes that no row uses
    images.finish("vision_config.")
    return vision


def _heads(counts: Sequence[int], layer: Layer | None, text_type: str) -> tuple[Layer, ...]:
    """The layers of the heads of multi-token prediction."""
    heads = next((count for count in counts if count), 0)
    if not heads:
        raise Refused(f"has no {' or '.join(_HEADS)}: there are no heads that predict further tokens", None)
    if layer is None:
        message = f"has {heads} heads of multi-token prediction: how those of {text_type} are built is not known"
        raise Refused(message, heads)
    return (layer,) * heads


def _built(content: Mapping[str, Any], multi_token_prediction: bool) -> dict[str, Any]:
    """A model that transformers builds."""
    from wlb.models import built  # for types that no family here describes, and large

    model_type = content["model_type"]
    found = built.read(content)
    shape = {
        "hidden_size": found.hidden_size,
        "vocab_size": found.vocab_size,
        "layers": found.layers,
        "tied_embeddings": found.tied,
        "embedding_size": found.embedding_size if found.embedding_size != found.hidden_size else 0,
        "other_parameters": found.other_parameters,
        "assumptions": found.assumptions,
    }
    if model_type in IMAGE_FAMILIES and isinstance(content.get("vision_config"), Mapping):
        vision = _vision(Keys(content), model_type, found.hidden_size)
        shape |= {"vision": vision, "other_parameters": found.other_parameters - vision.num_parameters}
    if multi_token_prediction:
        inner = content.get("text_config")
        keys = Keys(inner if isinstance(inner, Mapping) else content)
        counts = [keys.count(name, default=0) for name in _HEADS]
        shape["prediction_layers"] = _heads(counts, _prediction(keys, model_type, found.layers), model_type)
    return shape


_PREDICTING = re.compile(r"(deepseek|glm|minimax|qwen|kimi)\w*")
"""Types whose heads of multi-token prediction have a layer as the model's last one with attention."""


def _prediction(keys: Keys, model_type: str, layers: Sequence[Layer]) -> Layer | None:
    """The layer of a head of multi-token prediction; None: how it is built is not known."""
    pattern = keys.read(str, "mtp_hybrid_override_pattern", default="")
    whole = keys.read(str, "hybrid_override_pattern", default="")
    if pattern and len(whole) == len(layers) and {*pattern} <= {*whole}:  # Nemotron-H: a layer has one block
        blocks = [block for letter in pattern for block in layers[whole.index(letter)].blocks]
        return Layer(tuple(blocks), norms=len(pattern))
    if not _PREDICTING.fullmatch(model_type):
        return None
    return next((layer for layer in reversed(layers) if layer.pairs()), None)


_HEADS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_modules")
"""Keys that count heads of multi-token prediction."""

_OF_HEADS = (
    "use_mtp",
    "mtp_transformer_layers",
    "mtp_use_dedicated_embeddings",
    "mtp_hybrid_override_pattern",
    "mtp_layers_block_type",
    "mtp_layer_types",
)
"""Keys of these heads, which are trained where the caller says so."""

_OF_IMAGES = (
    "vision_feature_layer",
    "vision_feature_select_strategy",
    "image_seq_length",
    "image_grid_pinpoints",
    "mm_tokens_per_image",
    "language_model_only",
    "projector_hidden_act",
    "multimodal_projector_bias",
    "spatial_merge_size",
)
"""Keys beside `vision_config` that families with images read where they need them."""

ALIASES: Mapping[str, str] = {"kimi_k2": "deepseek_v3", "deepseek_v3_2": "deepseek_v32"}
"""Types that are others' by their files' own words: the architecture is that of the other."""

_HEAD_SUFFIX = re.compile(r"^(.+?)(ForCausalLM|ForConditionalGeneration|ForImageTextToText|LMHeadModel)$")
_OTHER_HEAD = re.compile(r"For(Sequence|Token)Classification$|For(Process)?RewardModel$|ForQuestionAnswering$|Model$")

_STEMS: Mapping[str, tuple[str, ...]] = {
    "deepseek_v2": ("deepseek",),
    "deepseek_v32": ("deepseekv3",),
    "minimax": ("minimaxm1", "minimaxtext01"),
    "ministral": ("mistral",),
    "mistral": ("ministral",),
    "llava": ("llavallama", "llavamistral"),
    "llama4_text": ("llama4",),
    "qwen2_5_vl_text": ("qwen25vl",),
}
"""Further names of classes, where the type alone does not give them."""


def check_architectures(content: Mapping[str, Any], model_type: str) -> None:
    """Refuses a file whose `architectures` is not a language model of its `model_type`.

    Raises:
        Refused: it names a draft head, a classifier or another model.
    """
    named = content.get("architectures") or []
    if not isinstance(named, list) or not all(isinstance(name, str) for name in named):
        raise Refused(f"has architectures {named!r}, not a list of text", named)
    own = model_type.removesuffix("_text")
    stems = {re.sub(r"[^a-z0-9]", "", stem.lower()) for stem in (model_type, own, *_STEMS.get(model_type, ()))}
    for name in named:
        found = _HEAD_SUFFIX.match(name)
        stem = re.sub(r"[^a-z0-9]", "", found.group(1).lower()) if found else ""
        if stem.removesuffix("text") in stems or stem in stems:
            continue
        if re.search(r"eagle|draft|medusa|speculator|dflash|mtp|nextn", name, re.IGNORECASE):
            message = f"has architectures {name}: a draft head for speculative decoding, not a model; give its target's"
        elif not found and _OTHER_HEAD.search(name):
            message = (
                f"has architectures {name}, which has no projection to the vocabulary; to read the language model that"
                " it was made from, leave architectures out"
            )
        else:
            message = f"has architectures {name} and model_type {model_type!r}: which of the two it is is not known"
        raise Refused(message, name)


# Other JSON files that lie beside a config.json, by keys that only they have.
_OTHER_FILES: tuple[tuple[tuple[str, ...], str], ...] = (
    (("peft_type",), "is the file of an adapter ({peft_type}): give the config.json of base_model_name_or_path"),
    (("_diffusers_version",), "is the file of a diffusers model: an image model, whose documents wlb does not plan"),
    (("_class_name",), "is the file of a diffusers model: an image model, whose documents wlb does not plan"),
    (("weight_map",), "is the index of a checkpoint's files: give the config.json beside it"),
    (("producer", "quantization"), "says how a checkpoint was quantised: give the config.json beside it"),
    (("tokenizer_class",), "is the file of a tokenizer: give the config.json beside it"),
    (("image_processor_type",), "is the file of a processor of images: give the config.json beside it"),
    (("zero_optimization",), "is the file of DeepSpeed: give the config.json of the model"),
    (
        ("num_layers", "ffn_hidden_size"),
        "is Megatron's own configuration: give a Hugging Face config.json, or the sizes, as"
        " hidden_size=4096,num_layers=32,num_heads=32,ffn_hidden_size=11008,vocab_size=32000",
    ),
    (("dim", "n_layers"), "is a params.json, as Meta and Mistral write it: give the Hugging Face config.json"),
)


def _refuse_other_files(content: Mapping[str, Any]) -> None:
    if isinstance(content.get("model_type"), str) and "peft_type" not in content:
        return
    for names, said in _OTHER_FILES:
        if all(name in content for name in names):
            raise Refused(said.format_map({**content}), names[0])


_TIED_OUTSIDE = ("gemma3", "mistral3")
"""Families that tie embeddings where the outer config says nothing."""

_TIED_INSIDE = ("llava", "qwen2_vl", "qwen2_5_vl")
"""Families that tie embeddings where the config of the language model says so."""

# LLaVA's files give only the keys in which the language model differs from transformers' Llama.
_NESTED_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "llama": {
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "vocab_size": 32000,
    },
}


_ON_HUB = re.compile(r"[\w-][\w.-]*/[\w.-]+(?<!\.json)")


def _from_hub(name: str) -> Path:
    """The config.json of a model on the hub, from the local cache or downloaded."""
    problem = f"{name!r} is no file"
    try:
        hub = import_module("huggingface_hub")
    except ImportError:
        raise error("config", f"{problem}; for names on the hub: pip install huggingface_hub", value=name) from None
    try:
        found = hub.try_to_load_from_cache(name, "config.json")
        if isinstance(found, str):
            return Path(found)
        hub.utils.logging.set_verbosity(50)  # its retries are not ours to tell
        return Path(hub.hf_hub_download(name, "config.json"))
    except Exception as cause:  # of many types: no network, unknown name, no permission
        said = str(cause).strip().splitlines()[0] if str(cause).strip() else type(cause).__name__
        message = f"{problem}, nor is it in the hub's cache, nor could it be had: {said}"
        raise error("config", message, value=name) from None


def _read_json(path: Path) -> Mapping[str, Any]:
    try:
        content = json.loads((path / "config.json" if path.is_dir() else path).read_bytes())
    except (OSError, ValueError) as problem:
        raise error("config", f"{str(path)!r} cannot be read: {problem}", value=str(path)) from problem
    if not isinstance(content, dict):
        raise error("config", f"{str(path)!r} is not a JSON object", value=str(path))
    return content
