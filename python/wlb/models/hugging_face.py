"""A Hugging Face config as the arguments of a `ModelConfig`. transformers is not imported: its configs say all."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from wlb._core import WlbError
from wlb._errors import error
from wlb.models.image_families import IMAGE_FAMILIES, VISION_DEFAULTS
from wlb.models.keys import Keys, Refused
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
        content, where = _read_json(Path(config)), f"{os.fspath(config)!r} "
    else:
        message = f"is a {type(config).__name__}: must be a transformers config, a dict, or the path of a config.json"
        raise error("config", message, value=config)
    try:
        return _read(content, multi_token_prediction)
    except Refused as refused:
        raise error("config", f"{where}{refused}", value=refused.value) from None
    except WlbError as problem:  # a size that a layer cannot have
        raise error("config", f"{where}has {problem}", value=problem.value) from None


def _read(content: Mapping[str, Any], multi_token_prediction: bool) -> dict[str, Any]:
    keys = Keys(content)
    model_type = keys.read(str, "model_type", default="llama")
    name = str(content.get("_name_or_path") or model_type)
    vision = None
    if model_type in IMAGE_FAMILIES:
        # Files of earlier versions have the keys of the language model beside `vision_config`.
        inner: Mapping[str, Any] = keys.read(dict, "text_config", default={}) or content
        nested = f"{model_type}_text"
        text_type = nested if nested in FAMILIES else str(inner.get("model_type", "llama"))
        if text_type not in FAMILIES:
            raise Refused(f"has text_config of {_unknown(text_type)}", text_type)
        text_keys = Keys(inner, _NESTED_DEFAULTS.get(text_type, DEFAULTS.get(text_type)))
        hidden = text_keys.integer("hidden_size")
        images = keys.section("vision_config", VISION_DEFAULTS.get(model_type))
        vision = IMAGE_FAMILIES[model_type](keys, images, hidden)
        text_keys.pass_over("vision_config")
    elif model_type in FAMILIES:
        text_type, text_keys = model_type, Keys(content, DEFAULTS.get(model_type))
    else:
        inner = keys.read(dict, "text_config", default={})
        if inner.get("model_type") in FAMILIES:
            message = f"has model_type {model_type!r}, whose images or sounds are not known to wlb; its text_config is"
            raise Refused(f"{message}: give that", model_type)
        raise Refused(_unknown(model_type), model_type)

    text = FAMILIES[text_type](text_keys)
    tied = text_keys.flag("tie_word_embeddings", default=text.tied)
    if vision is not None:  # the outer key decides; some families pass it on from inside
        outer = keys.flag("tie_word_embeddings", default=model_type in _TIED_OUTSIDE)
        tied = outer or (tied and model_type in _TIED_INSIDE)
    heads = text_keys.count("num_nextn_predict_layers", default=0) if text.prediction is not None else 0
    shape = {
        "name": name,
        "hidden_size": text_keys.integer("hidden_size"),
        "vocab_size": text_keys.integer("vocab_size"),
        "layers": text.layers,
        "tied_embeddings": tied,
    }
    text_keys.finish()
    if vision is not None:
        shape["vision"] = vision
    if multi_token_prediction:
        if not heads or text.prediction is None:
            raise Refused("has no num_nextn_predict_layers: there are no heads that predict further tokens", None)
        shape["prediction_layers"] = (text.prediction,) * heads
    return shape


def _unknown(model_type: str) -> str:
    known = ", ".join(sorted({name for name in FAMILIES if not name.endswith("vl_text")} | {*IMAGE_FAMILIES}))
    return f"has model_type {model_type!r}, which is not known to wlb; known are {known}"


_TIED_OUTSIDE = ("gemma3", "mistral3")
"""Families that tie embeddings where the outer config says nothing."""

_TIED_INSIDE = ("llava", "qwen2_vl", "qwen2_5_vl")
"""Families that tie embeddings where the config of the language model says so."""

# LLaVA's files give of the language model only what differs from transformers' Llama.
_NESTED_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "llama": {
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "vocab_size": 32000,
    },
}


def _read_json(path: Path) -> Mapping[str, Any]:
    try:
        content = json.loads((path / "config.json" if path.is_dir() else path).read_bytes())
    except (OSError, ValueError) as problem:
        raise error("config", f"{str(path)!r} cannot be read: {problem}", value=str(path)) from problem
    if not isinstance(content, dict):
        raise error("config", f"{str(path)!r} is not a JSON object", value=str(path))
    return content
