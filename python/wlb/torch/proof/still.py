"""Keeps a model unchanged, and free of random numbers, while it is checked."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import numpy as np
import torch
from torch import nn

from wlb.torch.layers import has_batch_statistics, is_recurrent, with_configs
from wlb.torch.lazy import fsdp2, local
from wlb.torch.timing import untimed
from wlb.torch.training import untrained

# # Parts of the names of attributes to turn off: random numbers, and losses over whole rows.
_OFF: Final = ("drop", "noise", "jitter", "aux_loss", "z_loss")


class Still:
    """Puts back the weights and buffers of a model during a check.

    Weights that do not learn are not copied: they may be most of the memory, and no optimizer changes them.
    """

    def __init__(self, model: nn.Module) -> None:
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._kept = [local(parameter).detach().clone() for parameter in self._parameters]
        self._buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
        self._wrappers = [module for module in model.modules() if isinstance(module, fsdp2())]

    @torch.no_grad()
    def restored(self) -> bool:
        """Puts weights and buffers back. Returns whether all weights had stayed the same."""
        same = True
        for parameter, before in zip(self._parameters, self._kept, strict=True):
            if not torch.equal(local(parameter), before):
                same = False
                local(parameter).copy_(before)
        for buffer, before in self._buffers:
            buffer.copy_(before)
        for module in self._wrappers:
            module.reshard()
        return same


@contextmanager
def still(model: nn.Module) -> Iterator[Still]:
    """Turns off dropout and router losses for a while, and leaves no trace.

    Modes, weights, gradients, `requires_grad`, buffers, hooks, divisors of wrappers and random states are restored
    afterwards.
    """
    modules = [(module, module.training, {**module._buffers}) for module in model.modules()]
    learning = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    kept = Still(model)
    try:
        with untrained(model), untimed(), _random_states(), _without_chance(model):
            yield kept
    finally:
        for module, mode, own in modules:
            module.training = mode
            module._buffers.clear()
            module._buffers.update(own)
        model.zero_grad(set_to_none=True)
        for parameter, learns in learning:
            if parameter.requires_grad != learns:
                parameter.requires_grad_(learns)
        kept.restored()


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


@contextmanager
def _random_states() -> Iterator[None]:
    """Puts back the random states of Python, numpy and torch."""
    python, arrays = random.getstate(), np.random.get_state()  # noqa: NPY002  # what users draw from
    kind = torch.accelerator.current_accelerator()
    try:
        with torch.random.fork_rng() if kind is None else torch.random.fork_rng(device_type=kind.type):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(arrays)  # noqa: NPY002


def mixing_layers(model: nn.Module) -> str:
    """Names of the layers that mix documents unless they are told where one begins."""
    return ", ".join(sorted({type(module).__name__ for module in model.modules() if _mixes(module)}))


def _mixes(module: nn.Module) -> bool:
    return is_recurrent(module) or isinstance(module, nn.Conv1d)


def batch_norms(model: nn.Module) -> list[nn.Module]:
    """Layers that take statistics of whole rows in their present mode."""
    return [module for module in model.modules() if has_batch_statistics(module)]
