"""A check leaves no trace, and sees nothing that is drawn at random."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import numpy as np
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from wlb.torch.proof.alone import local
from wlb.torch.timing import untimed
from wlb.torch.training import untrained

# Parts of names of numbers that modules or their configurations have: random numbers, and losses over whole rows.
_OFF: Final = ("drop", "noise", "jitter", "aux_loss", "z_loss")
_FLAGS: Final = ("output_router_logits",)


class Still:
    """A model during a check: what changes meanwhile is put back."""

    def __init__(self, model: nn.Module) -> None:
        self._parameters = list(model.parameters())
        self._kept = [local(parameter).detach().clone() for parameter in self._parameters]
        self._buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
        self._wrappers = [module for module in model.modules() if isinstance(module, FSDPModule)]

    @torch.no_grad()
    def restored(self) -> bool:
        """Puts parameters and buffers back; whether no parameter was changed."""
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
    """Without dropout and router losses. Leaves all as it was found.

    That is modes, parameters, gradients, what needs them, buffers (what experts count, say), hooks, divisors of
    wrappers and random states.
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
        configs = [getattr(module, "config", None), getattr(module, "text_config", None)]
        configs += [getattr(config, "text_config", None) for config in configs]
        for owner in (module, *configs):
            values = getattr(owner, "__dict__", None)
            if not isinstance(values, dict) or id(values) in seen:
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
    """Whether it is what dropout, or a loss over a whole row, is multiplied by."""
    if isinstance(value, bool):
        return name in _FLAGS
    if not isinstance(value, float) and not (isinstance(value, int) and "noise" in name):
        return False
    return any(part in name for part in _OFF) or (name == "p" and "Drop" in type(owner).__name__)


@contextmanager
def _random_states() -> Iterator[None]:
    """Puts back those of Python, numpy and torch."""
    python, arrays = random.getstate(), np.random.get_state()  # noqa: NPY002  # what users draw from
    kind = torch.accelerator.current_accelerator()
    try:
        with torch.random.fork_rng() if kind is None else torch.random.fork_rng(device_type=kind.type):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(arrays)  # noqa: NPY002


def mixing_layers(model: nn.Module) -> str:
    """Names of layers that mix documents unless told where one begins; empty if there are none."""
    return ", ".join(sorted({type(module).__name__ for module in model.modules() if _mixes(module)}))


def _mixes(module: nn.Module) -> bool:
    name = type(module).__name__.lower()
    known = isinstance(module, nn.Conv1d | nn.RNNBase)
    return known or any(word in name for word in ("mamba", "deltanet", "rwkv", "lstm", "ssm"))


def batch_norms(model: nn.Module) -> list[nn.Module]:
    """Layers whose statistics are those of whole rows, in this mode."""
    return [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm) and m.training]
