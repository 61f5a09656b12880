"""Model types that wlb describes in no line of its own: transformers' class, built on torch's meta device and counted.

The meta device holds shapes and no weights. Nothing is downloaded. transformers is an optional dependency.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from wlb.models.keys import Refused, says_nothing
from wlb.models.reader import Built, Reader


def model_types() -> tuple[str, ...]:
    """Model types for which transformers has a causal or an image-text model. Empty if transformers is missing."""
    try:
        from transformers.models.auto import modeling_auto as auto
    except ImportError:
        return ()
    causal, images = auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    return tuple(sorted({*causal, *images}))


def read(content: Mapping[str, Any]) -> Built:
    """Counts the model of a configuration whose type wlb has no family for.

    Args:
        content: content of the model's config.json.

    Raises:
        Refused: transformers or torch is missing, transformers does not know the type or refuses the configuration, or
            wlb does not know what some part of the model costs.
    """
    model_type = str(content["model_type"])
    try:
        import torch
        import transformers
    except ImportError:
        message = f"has model_type {model_type!r}, which wlb reads through transformers: pip install transformers torch"
        raise Refused(message, model_type) from None
    if model_type not in transformers.CONFIG_MAPPING:
        message = f"has model_type {model_type!r}, which neither wlb nor transformers {transformers.__version__} knows"
        more = "; its own code (auto_map) is not run" if content.get("auto_map") else ""
        raise Refused(f"{message}{more}", model_type)
    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity(40)  # errors only
    try:
        kind = transformers.CONFIG_MAPPING[model_type]
        passed_over = [*_unread(kind, content, "")]
        config = _config(kind, content)
        reader = Reader(config, _model(torch, transformers, config, content))
        if passed_over:
            reader.assumptions.append(f"not read, since documents do not meet it: {', '.join(passed_over)}")
        return reader.read()
    finally:
        transformers.logging.set_verbosity(verbosity)


def _config(kind: Any, content: Mapping[str, Any]) -> Any:
    try:
        return kind.from_dict(_with_floats(content))
    except Exception as problem:  # transformers may raise any type for a file that it cannot read
        raise Refused(f"is refused by transformers: {_line(problem)}", content.get("model_type")) from problem


def _with_floats(value: Any) -> Any:
    """The value with the floats that transformers writes into JSON as `{"__float__": "Infinity"}`."""
    if isinstance(value, Mapping):
        if value.keys() == {"__float__"}:
            return float(value["__float__"])
        return {name: _with_floats(each) for name, each in value.items()}
    return [_with_floats(each) for each in value] if isinstance(value, list) else value


def _unread(kind: Any, content: Mapping[str, Any], where: str) -> Iterator[str]:
    """Yields the keys that transformers does not read and that cost documents nothing, such as those of a vision tower.

    Args:
        kind: transformers' configuration class.
        content: the configuration.
        where: prefix of its keys, for a configuration inside another.

    Raises:
        Refused: transformers does not read a key, and it may change what documents cost.
    """
    known = {each.name for each in dataclasses.fields(kind)} | {*kind.attribute_map} | {*dir(kind)} | _words(kind)
    inner = getattr(kind, "sub_configs", {})
    for name, value in content.items():
        if name in inner and isinstance(value, Mapping):
            inside = inner[name]
            if not dataclasses.is_dataclass(inside):  # its model_type names the class
                from transformers import CONFIG_MAPPING

                said = value.get("model_type")
                inside = CONFIG_MAPPING[said] if isinstance(said, str) and said in CONFIG_MAPPING else None
            if inside is not None:
                yield from _unread(inside, value, f"{where}{name}.")
        elif name == "attn_type_list" and isinstance(value, list) and {*value} == {1}:  # MiniMax M2: all attention
            continue
        elif name not in known and not says_nothing(name, value) and value not in _RESTATED.get(name, ()):
            if _ELSEWHERE.search(f"{where}{name}"):
                yield f"{where}{name}"
                continue
            message = f"has {where}{name} = {value!r:.60}: transformers' {kind.__name__} does not read it"
            raise Refused(f"{message}, and what it costs is not known", value)


_RESTATED: Mapping[str, tuple[object, ...]] = {"attn_output_gate": (True,), "use_qk_norm": (True,)}
"""Keys of authors' files that say what a type always has."""

# Keys of encoders of images and sounds, and of heads for multi-token prediction: they cost documents nothing here.
_ELSEWHERE = re.compile(r"vision|image|audio|video|mtp|nextn")


def _words(kind: Any) -> set[str]:
    """Every word in the code of a configuration and its models. A key that is not among them is read by nothing."""
    folder = Path(inspect.getfile(kind)).parent
    return {word for path in folder.glob("*.py") for word in re.findall(r"\w+", path.read_text())}


def _model(torch: Any, transformers: Any, config: Any, content: Mapping[str, Any]) -> Any:
    from transformers.models.auto import modeling_auto as auto

    named = [str(name) for name in content.get("architectures") or ()]
    causal = auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type)
    images = auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.get(config.model_type)
    generating = {name for each in (causal, images) if each for name in ([each] if isinstance(each, str) else each)}
    both = getattr(auto, "MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES", {}).get(config.model_type)
    generating |= {both} if isinstance(both, str) else set()
    alike = {re.sub(r"[^a-z0-9]", "", name.lower()): name for name in generating}
    chosen = [alike[key] for name in named if (key := re.sub(r"[^a-z0-9]", "", name.lower())) in alike]
    if named and not chosen:
        says = f"says architectures {', '.join(named)}"
        if not generating:
            raise Refused(f"{says}: transformers has no language model of type {config.model_type!r}", named[0])
        expected = ", ".join(sorted(generating))
        raise Refused(f"{says}, where transformers has {expected}: that is another model", named[0])
    for each in (images, causal):
        chosen = chosen or ([each] if isinstance(each, str) else [*(each or ())])
    if not chosen:
        raise Refused(f"has model_type {config.model_type!r}, of which transformers has no language model", None)
    kind = getattr(transformers, chosen[0])
    if getattr(config, "is_encoder_decoder", False):
        if not causal or (named and chosen[0] != causal):
            message = "is an encoder and a decoder, which read two documents each: wlb plans documents of one sequence"
            raise Refused(message, config.model_type)
        config.is_encoder_decoder = False
    if getattr(config, "is_decoder", True) is False:
        config.is_decoder = True
    try:
        with torch.device("meta"):
            model = kind._from_config(config, attn_implementation="eager").eval()
        return model.to("meta")  # some classes name the CPU themselves
    except Exception as problem:
        raise Refused(f"cannot be built by transformers: {type(problem).__name__}: {_line(problem)}", None) from problem


def _line(problem: Exception) -> str:
    return next((line for line in str(problem).splitlines() if line.strip()), type(problem).__name__).strip()[:300]
