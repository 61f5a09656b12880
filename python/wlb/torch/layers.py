"""Finds layers in which a token depends on more than the tokens before it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, Final

from torch import nn

from wlb._errors import error
from wlb.torch.boundaries import against_rows, row_layer

_MIXTURES: Final = ("expert", "moe", "mixtral", "mixture")  # parts of names of classes
_RECURRENT: Final = ("mamba", "deltanet", "rwkv", "lstm", "ssm")  # parts of names of classes
_SEVERAL_AHEAD: Final = ("mtp", "multitoken", "nextn")
_BY_ROW: Final = ("dynamic", "longrope", "su")  # kinds of RoPE
_NEFTUNE: Final = "has neftune_noise_alpha, whose noise scales with the length of the row: leave it out"
_SHORT: Final = 2048  # tokens of the longest document of a check
_OTHER_HEADS: Final = (
    "Classification",
    "ForMaskedLM",
    "ForMultipleChoice",
    "ForNextSentencePrediction",
    "ForQuestionAnswering",
    "ForQuestionAnsweringSimple",
)  # ends of names of transformers' classes whose labels are no next tokens
_NUMBERS_AHEAD: Final = ("mtp_num_layers", "num_mtp_layers", "num_nextn_predict_layers")  # of configurations


def is_recurrent(module: nn.Module) -> bool:
    """Whether a module carries a state along a row."""
    name = type(module).__name__.lower().replace("gptoss", "")  # no state, though the name of its modules has "ssm"
    known = row_layer(type(module))
    stateful = known is not None and known.has_state
    return stateful or isinstance(module, nn.RNNBase) or any(word in name for word in _RECURRENT)


def adds_up_others(module: nn.Module) -> bool:
    """Whether kernels of a module add up numbers of other documents, times 0 or in other blocks, which rounds."""
    name = type(module).__name__.lower()
    return is_recurrent(module) or any(word in name for word in _MIXTURES)


def has_batch_statistics(module: nn.Module) -> bool:
    """Whether a module takes statistics of whole rows in its present mode."""
    return isinstance(module, nn.modules.batchnorm._BatchNorm) and module.training


def with_configs(module: nn.Module) -> Iterator[tuple[Any, dict[str, Any]]]:
    """A module and its configurations, with their attributes."""
    configs = [getattr(module, "config", None), getattr(module, "text_config", None)]
    configs += [getattr(config, "text_config", None) for config in configs]
    for owner in (module, *configs):
        values = getattr(owner, "__dict__", None)
        if isinstance(values, dict):
            yield owner, values


def longest_document(model: nn.Module) -> int | None:
    """The most tokens of a document for which positions do not depend on the other documents of its row; None: any.

    The factors of dynamic RoPE and LongRoPE follow the longest position of the whole row once it exceeds the context
    for which the model was first trained.
    """
    limits = []
    for values in {id(values): values for module in model.modules() for _, values in with_configs(module)}.values():
        ropes = values.get("rope_parameters") or values.get("rope_scaling")
        if not isinstance(ropes, dict):
            continue
        for rope in (ropes, *(each for each in ropes.values() if isinstance(each, dict))):
            if (rope.get("rope_type") or rope.get("type")) in _BY_ROW:
                names = "original_max_position_embeddings", "max_position_embeddings"
                limits += [each[name] for name in names for each in (rope, values) if each.get(name)][:1]
    return min(limits, default=None)


def against_packing(model: nn.Module, longest: int) -> str:
    """The reason in a model's configuration or layers why documents cannot share a row, and the way out; or empty.

    Args:
        model: with its configuration, or a part of it.
        longest: tokens of the longest document there can be.

    Complexity:
        O(modules).
    """
    limit = longest_document(model)
    if limit is not None and longest > limit:
        return (
            f"has dynamic or LongRoPE of {limit} tokens, and a document has {longest}: its factors follow the longest "
            f"document of a row, so the others would be trained with other factors than alone; give "
            f"max_document_tokens={limit}"
        )
    for module in model.modules():
        if getattr(module, "neftune_noise_alpha", None):
            return _NEFTUNE
        configs = getattr(module, "peft_config", None)
        for config in configs.values() if isinstance(configs, dict) else ():
            if getattr(config, "is_prompt_learning", False):
                return (
                    f"is tuned by a {type(config).__name__}: its virtual tokens come before the first document of a "
                    "row only; use LoRA or another adapter of weights"
                )
    return against_rows(model)


def against_labels(model: nn.Module) -> str:
    """The reason why a model's own head does not learn next tokens, and the way out; empty if none is known.

    A row of documents has next tokens as labels: the first label of each document is no label, because no token
    predicts it. Heads that learn a label at the place of its own token would lose it, and learn the other labels one
    token too early.

    Complexity:
        O(modules).
    """
    for module in model.modules():
        names = (kind.__name__ for kind in type(module).__mro__)
        found = next((name for name in names if name.endswith(_OTHER_HEADS)), None)
        if found and any(parameter.requires_grad for parameter in module.parameters()):
            return (
                f"is a {found}: labels of a packed row are next tokens, and its head learns others; do not balance it, "
                "or give its labels by another name (columns=) to wt.train_step with a loss of your own"
            )
    return ""


def special_tokens(parts: Sequence[nn.Module]) -> frozenset[int]:
    """Tokens that a model's configurations name: ends of texts, padding, places of images and sounds."""
    found: set[int] = set()
    for _, name, value in _numbers(parts):
        if name.endswith(("_token_id", "_token_index")):
            found.add(value)
    return frozenset(found)


def limit_of(parts: Sequence[nn.Module]) -> int:
    """The most tokens, up to 2,048, of a window, a chunk or a context that a model's configurations name; 0 if none."""
    names = ("window", "chunk", "original_max_position")
    return max(
        (value for _, name, value in _numbers(parts) if value <= _SHORT and any(word in name for word in names)),
        default=0,
    )


def _numbers(parts: Sequence[nn.Module]) -> Iterator[tuple[Any, str, int]]:
    """Whole numbers of all configurations, those in lists and dictionaries too, with their owners and names."""
    owners = {id(owner): owner for part in parts for module in part.modules() for owner, _ in with_configs(module)}
    for owner in owners.values():
        if isinstance(owner, nn.Module):
            continue
        for name, value in vars(owner).items():
            inside = value.items() if isinstance(value, dict) else [(name, value)]
            for key, each in inside:
                for number in each if isinstance(each, list | tuple) else [each]:
                    if isinstance(number, int) and not isinstance(number, bool):
                        yield owner, str(key), number


def against_forests(model: nn.Module) -> str:
    """The reason why a model cannot run a forest, and the way out; empty if none is known.

    Samples can share a layer's result for a token only if that result depends on the tokens before it on its path and
    on nothing else.

    Complexity:
        O(modules).
    """
    seen = set[tuple[int, bool]]()
    for name, module in model.named_modules():
        found = _against(module, seen)
        if found:
            place = f"{name} ({type(module).__name__})" if name else type(module).__name__
            return f"cannot run a forest: it has {place}, {found}. Collate the samples one by one (wt.collate)"
    return ""


def check_forest(model: nn.Module, argument: str = "model") -> None:
    """Refuses a model in which a shared token would get another result than in each of its samples.

    Raises:
        wlb.WlbError: it names the layer, its kind and the way out.
    """
    if message := against_forests(model):
        raise error(argument, message)


def _against(module: nn.Module, seen: set[tuple[int, bool]]) -> str:
    """The reason why a module cannot run a forest; empty if none is known.

    `seen` has the configurations that were checked, for training mode and not, because modules share them.
    """
    name = type(module).__name__.lower()
    if is_recurrent(module) or isinstance(module, nn.RNNCellBase):
        return "a recurrent layer: its state goes along the row, where siblings follow each other"
    if (isinstance(module, nn.modules.conv._ConvNd) and math.prod(module.kernel_size) > 1) or row_layer(type(module)):
        return "a convolution: it mixes neighbours of the row, where siblings follow each other"
    if has_batch_statistics(module):
        return "whose statistics count a shared token once: call eval() on this layer, or take LayerNorm or RMSNorm"
    if any(word in name for word in _SEVERAL_AHEAD):
        return "which predicts several tokens ahead: behind a shared token there are several"
    for owner, values in with_configs(module):
        if (key := (id(values), module.training)) in seen:
            continue
        seen.add(key)
        for attribute, value in values.items():
            if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
                continue
            known = f"with {attribute} = {value:g}"
            if module.training and _is_dropout(owner, attribute):
                return f"{known}: samples that share a token would share its dropout; set it to 0"
            if "capacity" in attribute:
                return f"{known}: which tokens experts drop depends on all tokens of the row; set no capacity"
            if attribute in _NUMBERS_AHEAD:
                return f"{known}: behind a shared token there are several tokens to predict; set it to 0"
    return ""


def _is_dropout(owner: Any, attribute: str) -> bool:
    """Whether a number is a rate of dropout; not that of heads that classify."""
    if attribute == "p":
        return "Drop" in type(owner).__name__
    return "drop" in attribute and not attribute.startswith(("classifier", "summary"))
