"""Keeps a model unchanged, and free of random numbers, while it is checked."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import nn

from wlb.torch.boundaries import row_layer
from wlb.torch.layers import has_batch_statistics, is_recurrent, with_configs
from wlb.torch.lazy import fsdp2, local
from wlb.torch.random_states import random_states
from wlb.torch.timing import untimed
from wlb.torch.training import untrained

# Parts of the names of attributes to turn off: random numbers, and losses over whole rows.
_OFF: Final = ("drop", "noise", "jitter", "aux_loss", "z_loss")


class Still:
    """Puts back the weights and buffers of a model during a check.

    Weights that do not learn are not copied: they may be most of the memory, and no optimizer changes them.
    """

    def __init__(self, model: nn.Module, *, weights: bool = True) -> None:
        self._moved = _moved(model) if weights else []
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad and weights]
        self._kept = [local(parameter).detach().clone() for parameter in self._parameters]
        self._buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
        self._wrappers = [module for module in model.modules() if isinstance(module, fsdp2())]

    @torch.no_grad()
    def restored(self) -> bool:
        """Puts weights and buffers back. Returns whether all weights had stayed the same."""
        same = True
        for parameter, before in zip(self._parameters, self._kept, strict=True):
            if not torch.equal(local(parameter), before.to(local(parameter).dtype)):
                same = False
                local(parameter).copy_(before)
        for buffer, before in self._buffers:
            buffer.copy_(before)
        for module in self._wrappers:
            module.reshard()
        return same

    @torch.no_grad()
    def put_back(self) -> None:
        """Makes weights that were 0 before the check 0 again, and restores all others."""
        self.restored()
        for weight in self._moved:
            local(weight).zero_()


@torch.no_grad()
def _moved(model: nn.Module) -> list[nn.Parameter]:
    """Weights that were all 0 (adapters, gates), and are not any more: nothing would pass through them."""
    moved = []
    for number, weight in enumerate(model.parameters()):
        if weight.requires_grad and local(weight).numel() and not local(weight).any():
            generator = torch.Generator().manual_seed(number)
            local(weight).copy_(0.02 * torch.randn(local(weight).shape, generator=generator))
            moved.append(weight)
    return moved


@contextmanager
def still(model: nn.Module, *, weights: bool = True) -> Iterator[Still]:
    """Turns off dropout and router losses for a while, and leaves no trace.

    Modes, weights, gradients, `requires_grad`, buffers, hooks, divisors of wrappers and random states are restored
    afterwards.

    Args:
        model: all its parts.
        weights: whether weights may change and gradients are computed meanwhile. If not, weights are not copied.
    """
    modules = [(module, module.training, {**module._buffers}) for module in model.modules()]
    learning = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    kept = Still(model, weights=weights)
    try:
        with untrained(model), untimed(), random_states(), _without_chance(model):
            yield kept
    finally:
        for module, mode, own in modules:
            module.training = mode
            module._buffers.clear()
            module._buffers.update(own)
        if weights:
            model.zero_grad(set_to_none=True)
        for parameter, learns in learning:
            if parameter.requires_grad != learns:
                parameter.requires_grad_(learns)
        kept.put_back()


@contextmanager
def _without_chance(model: nn.Module) -> Iterator[None]:
    changed: list[tuple[dict[str, Any], str, Any]] = []
    seen: set[int] = set()
    for module in model.modules():
        for owner, values in with_configs(module):
            if id(values) in seen:
                continue
            seen.add(id(values))
            changed += [(values, name, value) for name, value in values.items() if _is_chance(owner, name, value)]
    try:
        for values, name, value in changed:
            values[name] = type(value)(0)
        yield
    finally:
        for values, name, value in changed:
            values[name] = value


def _is_chance(owner: Any, name: str, value: object) -> bool:
    """Whether a number is a rate of dropout or noise, or the weight of a loss over whole rows."""
    if isinstance(value, bool) or not (isinstance(value, float) or (isinstance(value, int) and "noise" in name)):
        return False
    return any(part in name for part in _OFF) or (name == "p" and "Drop" in type(owner).__name__)


def look_along_rows(model: nn.Module) -> list[str]:
    """Names of the layers in which a document depends on its row, without those that are told where documents begin."""
    told = {id(part) for module in model.modules() if _is_told(module) for part in module.modules()}
    return sorted({type(each).__name__ for each in model.modules() if id(each) not in told and _looks_along(each)})


def _is_told(module: nn.Module) -> bool:
    layer = row_layer(type(module))
    return layer is not None and bool(layer.needs)


def _looks_along(module: nn.Module) -> bool:
    known = is_recurrent(module) or row_layer(type(module)) is not None
    return known or has_batch_statistics(module) or isinstance(module, nn.Conv1d)
