"""Finds layers in which a token depends on more than the tokens before it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, Final

from torch import nn

from wlb._errors import error

_RECURRENT: Final = ("mamba", "deltanet", "rwkv", "lstm", "ssm")  # parts of names of classes
_SEVERAL_AHEAD: Final = ("mtp", "multitoken", "nextn")
_NUMBERS_AHEAD: Final = ("mtp_num_layers", "num_mtp_layers", "num_nextn_predict_layers")  # of configurations


def is_recurrent(module: nn.Module) -> bool:
    """Whether a module carries a state along a row."""
    name = type(module).__name__.lower()
    return isinstance(module, nn.RNNBase) or any(word in name for word in _RECURRENT)


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
        wlb.WlbError: It names the layer, its kind and the way out.
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
    if isinstance(module, nn.modules.conv._ConvNd) and math.prod(module.kernel_size) > 1:
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
