"""Runs a model in float32 for a while, whatever precision it trains in."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, Final
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp.autocast_mode import autocast
from torch.nn.parallel import DistributedDataParallel

from wlb.torch.boundaries import unplaced_masks
from wlb.torch.layers import with_configs
from wlb.torch.lazy import fsdp1, fsdp2

EPS: Final = torch.finfo(torch.float32).eps


class Precision:
    """The precision in which a model trains, and a way to run the model in float32 instead.

    Args:
        model: all parts of the model on this rank.
        stages: the pipeline stages that hold these parts, if there are any.
        dtype: what the model computes in, if that is coarser than its parameters; None if nobody says.

    Attributes:
        is_float32: whether the model trains in float32 or finer, without TF32.
        has_float32: whether `float32` can run rows of several documents.
        has_float32_alone: whether `float32` can run a document alone.
    """

    def __init__(self, model: nn.Module, stages: Sequence[Any], dtype: torch.dtype | None) -> None:
        self._model, self._stages = model, stages
        _reshard(model)  # a forward without backward leaves gathered parameters in the place of the shards
        self._half = [each for each in [*model.parameters(), *model.buffers()] if _is_coarse(each.dtype)]
        self._policies = [each for each in _wrappers(model) if _policy(each).param_dtype]
        self._flat = [each for each in model.modules() if isinstance(each, fsdp1()) and _mixed(each)]
        # Kernels of 8-bit numbers know no other precision. FSDP1 allocates its flat parameter in one.
        self.has_float32_alone = (dtype is None or dtype.itemsize > 1) and not self._flat
        # Some models know the documents of a row by flash attention alone, which has no float32.
        by_flash = bool(_flash_configs(model)) and bool(unplaced_masks(model, flash=True))
        self.has_float32 = self.has_float32_alone and not by_flash
        self.is_float32 = not (
            _rounding() or self._half or self._policies or self._flat or (dtype is not None and _is_coarse(dtype))
        )
        self._in_float32 = False
        self._is_ddp = any(isinstance(each, DistributedDataParallel) for each in model.modules())

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Notices autocast of a training loop."""
        enter = autocast.__enter__

        def noticing(context: autocast) -> Any:
            self.is_float32 &= not context._enabled
            return enter(context)  # type: ignore[no-untyped-call]

        with mock.patch.object(autocast, "__enter__", noticing):
            yield

    @contextmanager
    def float32(self) -> Iterator[None]:
        """Computes in float32: without autocast, TF32 and mixed precision, on float32 copies of 16-bit weights.

        Flash attention, which has no float32, is exchanged for torch's own. DistributedDataParallel does not exchange
        gradients of the copies (`exchange` does), because its buckets are 16-bit.
        """
        with ExitStack() as stack:
            stack.callback(_reset, self._model)  # last, also where something raises
            stack.enter_context(_without_autocast())
            stack.enter_context(_highest())
            for values in _flash_configs(self._model):
                stack.enter_context(mock.patch.dict(values, _attn_implementation_internal="sdpa"))
            stack.enter_context(_buffers_apart(self._model))
            if self._half:
                for module in self._model.modules():
                    if isinstance(module, DistributedDataParallel):
                        stack.enter_context(mock.patch.object(module, "require_backward_grad_sync", False))
                for stage in self._stages:
                    stack.enter_context(mock.patch.object(stage, "dtype", torch.float32))
                with torch.no_grad():
                    for tensor in self._half:
                        part = getattr(tensor, "_local_tensor", None)
                        stack.callback(_put_back, tensor, tensor.data, part)
                        tensor.data = tensor.data.float()
                        if part is not None:  # of a DTensor, of which `data` only has the shape
                            tensor._local_tensor = part.float()  # type: ignore[attr-defined]
            for module in self._policies:
                policies = [_policy(module), *(each.mp_policy for each in _sharded(module))]
                for policy in {id(each): each for each in policies}.values():
                    for name in ("param_dtype", "reduce_dtype", "output_dtype"):
                        stack.callback(object.__setattr__, policy, name, getattr(policy, name))
                        object.__setattr__(policy, name, None)
            _reset(self._model)
            self._in_float32 = True
            try:
                yield
            finally:
                self._in_float32 = False

    def finest(self) -> AbstractContextManager[None]:
        """Computes in float32 if the model can."""
        return self.float32() if self.has_float32 else nullcontext()

    def exchange(self, gradients: Sequence[Tensor | None]) -> None:
        """Averages gradients over the ranks of DistributedDataParallel, which does not do it for float32 copies."""
        if not (self._in_float32 and self._half and self._is_ddp):
            return
        number = {id(parameter): place for place, parameter in enumerate(self._model.parameters())}
        for module in self._model.modules():
            if isinstance(module, DistributedDataParallel):
                for parameter in module._module_parameters:
                    gradient = gradients[number[id(parameter)]]
                    if gradient is not None:
                        dist.all_reduce(gradient, group=module.process_group)
                        gradient /= module.process_group.size()


def _is_coarse(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point and dtype.itemsize < 4


@contextmanager
def _without_autocast() -> Iterator[None]:
    enter = autocast.__enter__

    def off(context: autocast) -> Any:
        with mock.patch.object(context, "_enabled", False):
            return enter(context)  # type: ignore[no-untyped-call]

    kinds = [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
    with ExitStack() as stack, mock.patch.object(autocast, "__enter__", off):
        for kind in kinds:
            stack.enter_context(autocast(kind, enabled=False))
        yield


def _rounding() -> list[Any]:
    """Where torch says, from the general to the special, that products of float32 round to fewer digits (TF32)."""
    backends: Any = torch.backends
    # That of cudnn is the general one of CUDA.
    settings = (backends, backends.cudnn, backends.cuda.matmul, backends.mkldnn, backends.mkldnn.matmul)
    return [each for each in settings if each.fp32_precision not in ("none", "ieee")]


@contextmanager
def _highest() -> Iterator[None]:
    """Products of float32 in all digits. It uses the names of torch that are in use: torch raises where both are."""
    if not _rounding():
        yield
        return
    try:
        before = torch.get_float32_matmul_precision()
    except RuntimeError:  # `torch.backends` was used
        kept = []
        while rounding := _rounding():  # the special ones may only repeat the general one
            kept.append((rounding[0], rounding[0].fp32_precision))
            rounding[0].fp32_precision = "ieee"
        try:
            yield
        finally:
            for setting, precision in reversed(kept):
                setting.fp32_precision = precision
        return
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _flash_configs(model: nn.Module) -> list[dict[str, Any]]:
    """Attributes of configurations that choose flash attention."""
    found = {id(values): values for module in model.modules() for _, values in with_configs(module)}
    name = "_attn_implementation_internal"
    return [values for values in found.values() if "flash" in str(values.get(name, ""))]


def _policy(module: Any) -> Any:
    return module._get_fsdp_state()._mp_policy


def _mixed(module: Any) -> bool:
    handle = module._handle
    return handle is not None and _is_coarse(handle._fwd_bwd_param_dtype)


def _wrappers(model: nn.Module) -> list[Any]:
    return [each for each in model.modules() if isinstance(each, fsdp2())]


def _groups(module: Any) -> list[Any]:
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
    return [group for group in groups if group is not None]


def _sharded(module: Any) -> list[Any]:
    return [each for group in _groups(module) for each in group.fsdp_params]


def _put_back(tensor: Tensor, data: Tensor, part: Tensor | None) -> None:
    tensor.grad = None
    tensor.data = data
    if part is not None:
        tensor._local_tensor = part  # type: ignore[attr-defined]


@contextmanager
def _buffers_apart(model: nn.Module) -> Iterator[None]:
    """Lets `fully_shard` gather into buffers of their own, since those that it has are of one precision."""
    kept: list[tuple[Any, dict[str, Any]]] = []
    _reshard(model)
    for module in _wrappers(model):
        for each in _sharded(module):
            names = ("_unsharded_param", "all_gather_outputs", "_sharded_param_data")
            kept.append((each, {name: vars(each)[name] for name in names if name in vars(each)}))
            vars(each).pop("_unsharded_param", None)
            each.all_gather_outputs = []
    try:
        yield
    finally:
        _reshard(model)
        for each, values in kept:
            vars(each).pop("_unsharded_param", None)
            vars(each).update(values)


def _reshard(model: nn.Module) -> None:
    for module in _wrappers(model):
        module.reshard()


def _reset(model: nn.Module) -> None:
    """Makes `fully_shard` look at the types of its parameters again."""
    for module in _wrappers(model):
        for each in _sharded(module):
            each.reset_sharded_param()
        for group in _groups(module):
            group._init_mp_dtypes()
