"""Parts of torch that are slow to import and that most trainers never load."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar, cast

from torch._compile import _disable_dynamo

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
    from torch.distributed.tensor import DTensor

F = TypeVar("F", bound=Callable[..., Any])


def loaded(module: str, *names: str) -> tuple[type[Any], ...]:
    """Classes for `isinstance`; none if their module was never imported, since then no object is an instance of them.

    Args:
        module: name of the module.
        names: names of its classes.
    """
    found = sys.modules.get(module)
    return () if found is None else tuple(getattr(found, name) for name in names)


def fsdp() -> tuple[type[Any], ...]:
    """The classes of modules that FSDP shards: FSDP2's `FSDPModule`, FSDP1's `FullyShardedDataParallel`."""
    return (*fsdp2(), *fsdp1())


def fsdp1() -> tuple[type[FullyShardedDataParallel], ...]:
    """`FullyShardedDataParallel`."""
    return loaded("torch.distributed.fsdp", "FullyShardedDataParallel")


def fsdp2() -> tuple[type[FSDPModule], ...]:
    """`FSDPModule`, which `fully_shard` makes of modules."""
    return loaded("torch.distributed.fsdp", "FSDPModule")


def dtensor() -> tuple[type[DTensor], ...]:
    """`DTensor`."""
    return loaded("torch.distributed.tensor", "DTensor")


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor."""
    return tensor.to_local() if isinstance(tensor, dtensor()) else tensor


def not_compiled(function: F) -> F:
    """`torch.compiler.disable`, which would import the compiler at once; here it is imported only by a compiled run."""
    disabled = _disable_dynamo(function)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if "torch._dynamo" in sys.modules:
            return disabled(*args, **kwargs)
        return function(*args, **kwargs)

    return cast(F, call)
