"""Makes every wrapper of a model add gradients up over the ranks of a global batch, or refuses the wrapper.

Every data-parallel wrapper averages by default. But each rank of `token_normalized_loss` holds its share of the mean
over all tokens, so an average would be too small by the number of ranks. Nothing would show it: Adam hardly notices,
while clipping, weight decay and a change of the number of ranks do.
"""

from __future__ import annotations

import gc
import math
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import (
    allreduce_hook,
    bf16_compress_hook,
    fp16_compress_hook,
)
from torch.nn.parallel import DistributedDataParallel

from wlb._errors import error
from wlb.torch.data.dynamic_cp import DynamicCpStep
from wlb.torch.data.step import Step
from wlb.torch.groups import ranks_of_step
from wlb.torch.lazy import dtensor, fsdp1, fsdp2

# Wrappers of other libraries, by the module of their classes, and the way to add gradients up with each.
_FOREIGN: Final = {
    "deepspeed.runtime": "DeepSpeed divides by the data-parallel ranks and by gradient_accumulation_steps: multiply "
    "the loss by both, and do not call sum_gradients",
    "megatron.core.distributed": "let Megatron add up, with calculate_per_token_loss=True in its TransformerConfig, "
    "and do not call sum_gradients",
    "torch.distributed._composable.replicate": "use DistributedDataParallel or fully_shard instead",
    "colossalai": "use DistributedDataParallel or fully_shard instead",
}
_ANOTHER: Final = (
    "use DistributedDataParallel or fully_shard instead; or, if it averages over n ranks, multiply the loss by n, and "
    "do not call sum_gradients"
)
# Wrappers that Lightning's strategies put around a LightningModule once `fit` has begun.
_STRATEGIES: Final[dict[str, str | None]] = {
    "SingleDeviceStrategy": None,
    "ModelParallelStrategy": None,  # fully_shard, by the LightningModule itself
    "DDPStrategy": "DistributedDataParallel",
    "FSDPStrategy": "FullyShardedDataParallel",
}
# Attributes of `fully_shard` and FullyShardedDataParallel that hold the divisor of gradients.
_REDUCTION: Final = ("gradient_divide_factor", "force_sum_reduction_for_comms")
_DIVISORS: Final = ("_gradient_predivide_factor", "_gradient_postdivide_factor")
# Communication hooks of DDP that average as it does without one.
_AVERAGING: Final = (allreduce_hook, fp16_compress_hook, bf16_compress_hook)


def sum_gradients(model: nn.Module, *, group: dist.ProcessGroup | None = None) -> None:
    """Makes a wrapped model add gradients up over ranks, instead of averaging them.

    With `token_normalized_loss` the gradients are then those of the mean over all tokens of the global batch, however
    many ranks there are and however unequal their shares. Call it once, after wrapping and before the first backward
    pass; a second call changes nothing::

        model = DistributedDataParallel(model)  # or FullyShardedDataParallel, fully_shard, accelerator.prepare
        sum_gradients(model)

    - `DistributedDataParallel`: every gradient is multiplied by the number of ranks before it is accumulated, since DDP
      divides by it. That holds with and without `no_sync`, with `static_graph`, `gradient_as_bucket_view`, unused
      parameters and compressed communication. (Not with a communication hook that adds up: in a step with several
      backward passes without `no_sync`, it would add up again the gradients that are already accumulated.)
    - `FullyShardedDataParallel`: its two divisors become 1, also with hybrid sharding; with `NO_SHARD`, as under DDP.
    - `fully_shard`, also over a 2-D mesh: it divides by 1, and reduces with a sum.
    - A model without a wrapper: nothing changes, since nothing is divided. With several ranks nobody exchanges its
      gradients either: call `all_reduce_gradients` before each optimizer step.

    Wrappers are found anywhere inside `model`, also under `torch.compile`.

    accelerate: give it what `Accelerator.prepare` returned, and accumulate with `accelerator.no_sync(model)`;
    `gradient_accumulation_steps` above 1 is refused, for `Accelerator.backward` divides every loss by it. Hugging
    Face's `Trainer` needs no `sum_gradients`: it multiplies the loss by the number of ranks by itself.

    Lightning: call `sum_gradients(self)` in `on_fit_start`, where the strategy has wrapped the module. With automatic
    optimization `accumulate_grad_batches` above 1 is refused, for Lightning divides every loss by it: run the
    micro-batches of a step in one `training_step`, or set `automatic_optimization = False`. Fabric: give it what
    `setup` returned.

    This function cannot see Horovod (whose optimizer averages, unless made with `op=hvd.Sum`), communication hooks that
    are registered later, and wrappers that are put around the model after this call.

    Args:
        model: the outermost wrapper, or a module with wrapped ones inside. Parameters keep their hooks when they are
            moved or loaded; a `copy.deepcopy` has none.
        group: the ranks that share the global batch, data- and context-parallel; None for all.

    Raises:
        WlbError: a wrapper exchanges gradients between other ranks than `group`, or leaves parameters out; a wrapper is
            unknown, or has a communication hook that may or may not average; `model` is inside a wrapper; a trainer
            divides the loss as well. In all these cases nothing was changed.

    Complexity:
        Under DDP each backward pass writes every gradient once more; otherwise nothing.
    """
    if any(_is_a(module, "LightningModule") for module in _unwrapped(model)):
        model = _wrapped_by_lightning(model)
    changes: list[Callable[[], None]] = []
    found = False
    for module in model.modules():
        change = _change(module)
        found |= change is not None
        changes += [] if change is None else [change]
        if getattr(module, "_is_accelerate_prepared", False):
            _check_accelerate()
    if not found:
        _check_outermost(model)
    else:
        check_wrappers(model, group)
    for change in changes:
        change()


def check_wrappers(model: nn.Module, group: dist.ProcessGroup | None = None) -> None:
    """Refuses wrappers that exchange gradients between other ranks than those that share the global batch.

    Experts that are sharded over "edp" of `expert_ranks` are an exception: the other ranks of
    the group send their tokens to them.

    Args:
        model: with wrappers around or inside it.
        group: the ranks that share the global batch, data- and context-parallel; None for all.

    Raises:
        WlbError: a wrapper has other ranks, or a parameter that learns is in none of them.
    """
    if not dist.is_initialized():
        return
    ranks = dist.get_process_group_ranks(group)
    inside: set[int] = set()
    for module in model.modules():
        if _change(module) is None:
            continue
        inside.update(map(id, module.parameters()))
        axes, experts = _exchanged_over(module)
        if not axes:
            continue
        size = math.prod(map(len, axes))
        if not all(set(axis) <= set(ranks) for axis in axes) or (size != len(ranks) and not experts):
            over = " x ".join(map(str, axes))
            message = (
                f"is or holds a {_name(module)} over ranks {over}, but ranks {ranks} share the global batch: wrap it "
                "over wt.data_and_context(mesh), and give group=wt.data_and_context(mesh).get_group()"
            )
            raise error("model", message, value=over)
    outside = [name for name, each in model.named_parameters() if each.requires_grad and id(each) not in inside]
    if outside and len(ranks) > 1:
        message = (
            f"has {len(outside)} parameters outside of its wrappers ({outside[0]} is one), of which no rank exchanges "
            "gradients: wrap the whole model"
        )
        raise error("model", message, value=outside[0])


def all_reduce_gradients(
    model: nn.Module, step: Step[Any] | DynamicCpStep[Any], *, group: dist.ProcessGroup | None = None
) -> None:
    """Adds gradients up over ranks, for a model without a wrapper; call it once before each optimizer step.

    Args:
        model: the same model on every rank. A parameter without a gradient counts as 0, since other ranks may have one.
        step: the step of the gradients; it knows how many ranks share it.
        group: the ranks that share the step, data- and context-parallel; None for all.

    Raises:
        WlbError: another number of ranks shares the step; the model has a wrapper, which exchanges gradients by
            itself, or parameters that are sharded.

    Complexity:
        One all-reduce for each parameter, all started at once.
    """
    group = ranks_of_step(step, group)
    for module in model.modules():
        if _change(module) is not None:
            message = f"holds a {_name(module)}, which exchanges gradients by itself: call sum_gradients(model) instead"
            raise error("model", message, value=_name(module))
    _check_outermost(model)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if any(isinstance(parameter, dtensor()) for parameter in parameters):
        raise error("model", "has parameters that are DTensors: their gradients are sharded and cannot be added up")
    if group is None:
        return
    works = []
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        works.append(dist.all_reduce(parameter.grad, group=group, async_op=True))
    for work in works:
        if work is not None:  # this rank is not in the group
            work.wait()


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Undoes the changes of `sum_gradients` afterwards: hooks of parameters, divisors and kinds of reduction."""
    handles = [module._handle for module in model.modules() if isinstance(module, fsdp1())]
    flat = [handle.flat_param for handle in handles if handle is not None]
    hooks = [(each, each._backward_hooks, dict(each._backward_hooks or {})) for each in [*model.parameters(), *flat]]
    settings = [(owner, name, getattr(owner, name)) for owner, name in _settings(model)]
    try:
        yield
    finally:
        for parameter, found, before in hooks:
            if found is not None:
                found.clear()
                found.update(before)
            parameter._backward_hooks = found
        for owner, name, value in settings:
            setattr(owner, name, value)


@contextmanager
def as_written(model: nn.Module) -> Iterator[None]:
    """Turns off the factors of `sum_gradients`: a backward pass of the bare model then leaves its own gradients."""
    with unchanged(model):
        for parameter in model.parameters():
            hooks = parameter._backward_hooks or {}
            for key in [key for key, hook in hooks.items() if isinstance(hook, _Multiplied)]:
                del hooks[key]
        yield


def _settings(model: nn.Module) -> Iterator[tuple[Any, str]]:
    """Attributes of wrappers that decide the divisor of gradients."""
    for module in model.modules():
        if isinstance(module, fsdp2()):
            yield from ((group, name) for group in _param_groups(module) for name in _REDUCTION)
        elif isinstance(module, fsdp1()):
            yield from ((module, name) for name in _DIVISORS)


def exchanges_gradients(model: nn.Module) -> bool:
    """Whether a data-parallel wrapper is around the model, or somewhere inside it.

    Raises:
        WlbError: a wrapper is unknown.
    """
    return any(_change(module) is not None for module in model.modules())


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside `torch.compile` and data-parallel wrappers."""
    return _unwrapped(model)[-1]


class _Multiplied:
    """A hook of a parameter that multiplies its gradient on the way to where it is accumulated."""

    __torch_unserializable__ = True  # torch.save need not warn that it is left out

    def __init__(self, factor: int) -> None:
        self.factor = factor

    def __call__(self, gradient: Tensor) -> Tensor:
        return gradient * self.factor


def _multiply(parameters: Iterable[Tensor], factor: int) -> None:
    """Multiplies each gradient by the factor when a backward pass computes it, before it is added to the others.

    Accumulated gradients may be averaged over ranks several times (in every micro-batch), so they could not be
    corrected.
    """
    if factor == 1:
        return
    for parameter in parameters:
        hooks = (parameter._backward_hooks or {}).values()
        if parameter.requires_grad and not any(isinstance(hook, _Multiplied) for hook in hooks):
            parameter.register_hook(_Multiplied(factor))  # type: ignore[no-untyped-call]


def _change(module: nn.Module) -> Callable[[], None] | None:
    """The change that makes one wrapper add up gradients; None if the module is no wrapper.

    Raises:
        WlbError: it is a wrapper whose division is unknown.
    """
    if isinstance(module, fsdp2()):
        return _fully_shard(module)
    if isinstance(module, fsdp1()):
        return _fsdp1(module)
    if isinstance(module, DistributedDataParallel):
        return _ddp(module)
    for cls in type(module).__mro__:
        for place, fix in _FOREIGN.items():
            if cls.__module__ == place or cls.__module__.startswith(f"{place}."):
                raise _unknown(module, fix)
        if cls.__name__.endswith("DataParallel"):
            raise _unknown(module, _ANOTHER)
    return None


def _exchanged_over(module: Any) -> tuple[list[list[int]], bool]:
    """Ranks between which a wrapper exchanges gradients, as the axes of a grid; whether it wraps experts."""
    if isinstance(module, fsdp2()):
        meshes = {id(group.mesh_info.mesh): group.mesh_info.mesh for group in _param_groups(module)}
        grids = [mesh.mesh.flatten().tolist() for mesh in meshes.values()]  # none where others hold all parameters
        return sorted(grids, key=len)[:1], all(mesh.mesh_dim_names == ("edp",) for mesh in meshes.values())
    axes = [module.process_group, getattr(module, "_inter_node_pg", None)]
    return [dist.get_process_group_ranks(axis) for axis in axes if axis is not None], False


def _param_groups(module: Any) -> list[Any]:
    """Parameters that `fully_shard` exchanges together."""
    state: Any = module._get_fsdp_state()
    # One group of parameters before torch 2.12, several since.
    groups = state._fsdp_param_groups if hasattr(state, "_fsdp_param_groups") else [state._fsdp_param_group]
    return [group for group in groups if group is not None]


def _fully_shard(module: Any) -> Callable[[], None]:
    if any(getattr(group, "_all_reduce_hook", None) is not None for group in _param_groups(module)):
        raise _unknown_hook(module, "set_all_reduce_hook")

    def change() -> None:
        module.set_force_sum_reduction_for_comms(True)  # gloo has no other; must precede the factor
        module.set_gradient_divide_factor(1.0)

    return change


def _fsdp1(module: Any) -> Callable[[], None]:
    if module._comm_hook is not None:
        raise _unknown_hook(module, "register_comm_hook")
    if not all(hasattr(module, divisor) for divisor in _DIVISORS):
        raise _unknown(
            module, f"this torch ({torch.__version__}) divides elsewhere than 2.11 to 2.15 do: use fully_shard"
        )
    replicas = getattr(module, "_inter_node_pg", None)
    if replicas is not None and replicas.size() > 1 and module.process_group.size() == 1:
        fix = "torch exchanges nothing where every shard is on one rank: use NO_SHARD over all ranks, or shard over two"
        raise _unknown(module, fix)
    handle = module._handle
    if handle is not None and not handle.uses_sharded_strategy:
        # Like DDP, it averages accumulated gradients again after each backward pass.
        return lambda: _multiply([handle.flat_param], module.process_group.size())

    def change() -> None:
        for divisor in _DIVISORS:
            setattr(module, divisor, 1.0)

    return change


def _ddp(module: DistributedDataParallel) -> Callable[[], None]:
    for hook, _ in module._comm_hooks:
        if hook not in _AVERAGING:
            raise _unknown_hook(module, getattr(hook, "__qualname__", repr(hook)))
    size = module.process_group.size()
    return lambda: _multiply(module._module_parameters, size)


def _wrapped_by_lightning(model: nn.Module) -> nn.Module:
    """The module that Lightning's strategy runs for a LightningModule in training; otherwise the module itself.

    Raises:
        WlbError: it has not been wrapped yet, or the strategy is not known, or the Trainer divides the loss.
    """
    own: Any = next(module for module in _unwrapped(model) if _is_a(module, "LightningModule"))
    trainer = getattr(own, "_trainer", None)
    if trainer is None:
        return model
    if own.automatic_optimization and trainer.accumulate_grad_batches != 1:
        steps = trainer.accumulate_grad_batches
        message = (
            f"is trained with accumulate_grad_batches = {steps}, by which Lightning divides every loss: run the "
            "micro-batches of a step in one training_step, or set automatic_optimization = False"
        )
        raise error("model", message, value=steps)
    names = [cls.__name__ for cls in type(trainer.strategy).__mro__]
    known = next((name for name in names if name in _STRATEGIES), None)
    if known is None:
        fix = 'use strategy="ddp", "fsdp" or ModelParallelStrategy'
        raise error("model", f"is trained with Lightning's {names[0]}, which is not known here: {fix}", value=names[0])
    wrapped, expected = trainer.strategy.model, _STRATEGIES[known]
    if expected is not None and not any(_is_a(module, expected) for module in _unwrapped(wrapped)):
        message = f"is not wrapped yet by Lightning's {names[0]}: call sum_gradients in on_fit_start"
        raise error("model", message, value=names[0])
    return wrapped  # type: ignore[no-any-return]


def _check_accelerate() -> None:
    accelerate: Any = sys.modules["accelerate"]
    steps = accelerate.state.GradientState().num_steps
    if steps != 1:
        message = (
            f"is from an Accelerator with gradient_accumulation_steps = {steps}, by which Accelerator.backward divides "
            "every loss: make it 1, and run all micro-batches of a step but the last under accelerator.no_sync(model)"
        )
        raise error("model", message, value=steps)


def _check_outermost(model: nn.Module) -> None:
    """Refuses a module inside a wrapper, such as `ddp.module`: it would look like a model without a wrapper.

    A module does not know its wrapper, so all living modules are searched, once in a run.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    inside = set(model.modules())
    wrappers: tuple[type[Any], ...] = (DistributedDataParallel, *fsdp1())
    for alive in gc.get_objects():
        if not issubclass(type(alive), wrappers) or alive in inside:
            continue
        if any(module is model for module in alive.modules()):
            name = _name(alive)
            raise error("model", f"is inside a {name}: give sum_gradients that one", value=name)


def _unwrapped(model: nn.Module) -> list[nn.Module]:
    """The model and the modules inside `torch.compile` and data-parallel wrappers, outermost first."""
    result = [model]
    while True:
        inner = getattr(result[-1], "_orig_mod", None)
        if inner is None and isinstance(result[-1], (DistributedDataParallel, *fsdp1())):
            inner = result[-1].module
        if inner is None:
            return result
        result.append(inner)


def _is_a(module: nn.Module, name: str) -> bool:
    return any(cls.__name__ == name for cls in type(module).__mro__)


def _name(module: nn.Module) -> str:
    return f"{type(module).__module__}.{type(module).__qualname__}"


def _unknown(module: nn.Module, fix: str) -> Exception:
    name = _name(module)
    return error("model", f"is or holds a {name}, and wlb does not know how it divides gradients: {fix}", value=name)


def _unknown_hook(module: nn.Module, hook: str) -> Exception:
    message = (
        f"is or holds a {_name(module)} with a communication hook ({hook}), and wlb does not know whether it "
        "averages: leave it out, or use one of torch's default hooks of DDP"
    )
    return error("model", message, value=hook)
