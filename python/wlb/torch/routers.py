"""Makes routers of mixtures of experts learn from the tokens of documents and not from padding."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from types import ModuleType
from typing import Any, Final
from unittest import mock

from torch import Tensor, nn

from wlb._errors import error
from wlb.torch.data.batch import PackedBatch
from wlb.torch.data.forest import ForestBatch

_BALANCE: Final = "load_balancing_loss_func"  # of a router's logits and more, in the modules of Hugging Face's models


@contextmanager
def real_tokens(model: nn.Module, batch: PackedBatch | ForestBatch) -> Iterator[None]:
    """Tells the routers of a Hugging Face model which tokens of a row are those of documents.

    A model with `output_router_logits` in its configuration adds a loss that balances its experts over all tokens of
    the row, including padding (`multiple_of_tokens`, `token_buckets`) and the one token of an empty micro-batch. Inside
    this context the loss covers only the documents' tokens; for a row without documents it is 0. `train_step` and the
    adapters of trainers do this by themselves. In a loop of your own::

        with wt.real_tokens(model, batch):
            loss = model(**batch.as_hf()).loss

    Args:
        model: the model, wrapped or not. Models without such a loss are left alone.
        batch: what the model is called with, as `batch.as_hf()`, or a `ForestBatch`.

    Raises:
        wlb.WlbError: the row has padding, and the model has a router loss from which padding cannot be left out.

    Complexity:
        O(modules) for a row with padding; O(1) for one without.
    """
    total = batch.tokens.numel()
    real = int(batch.real.sum())  # padding comes last on each rank
    with routed(model, None if real == total > 0 else real):
        yield


@contextmanager
def routed(model: nn.Module, real: int | None) -> Iterator[None]:
    """`real_tokens` for a row whose first `real` tokens are those of documents; None: all."""
    if real is None or not has_router_loss(model):
        yield
        return
    check_told(model, "model")
    with ExitStack() as stack:
        for module in _modules(model):
            balance = _of_real(getattr(module, _BALANCE), real)
            stack.enter_context(mock.patch.object(module, _BALANCE, balance))
        yield


def has_router_loss(model: nn.Module) -> bool:
    """Whether a Hugging Face model adds a loss of its routers (`output_router_logits`)."""
    configs = {id(config): config for module in model.modules() if (config := getattr(module, "config", None))}
    for config in configs.values():
        text = config.get_text_config() if hasattr(config, "get_text_config") else config
        if getattr(config, "output_router_logits", False) or getattr(text, "output_router_logits", False):
            return True
    return False


def check_told(model: nn.Module, argument: str, value: Any = None) -> None:
    """Refuses padding for a model whose routers would learn from it.

    Raises:
        wlb.WlbError: the model has a loss of its routers, in which padding cannot be left out.
    """
    if not has_router_loss(model) or _modules(model):
        return
    name = type(model).__name__
    message = (
        f"makes padding, and {name} has a loss of its routers (output_router_logits) that would learn from it, for its "
        f"module has no {_BALANCE} that could be told which tokens are real: leave out multiple_of_tokens and "
        "token_buckets, or make output_router_logits False"
    )
    raise error(argument, message, value=name if value is None else value)


def _modules(model: nn.Module) -> list[ModuleType]:
    """Modules of Python that define the losses of a model's routers."""
    classes = {cls for module in model.modules() for cls in type(module).__mro__}
    found = {cls.__module__: sys.modules.get(cls.__module__) for cls in classes}
    return [module for _, module in sorted(found.items()) if module is not None and hasattr(module, _BALANCE)]


def _of_real(balance: Callable[..., Any], real: int) -> Callable[..., Any]:
    """The loss of the first tokens alone."""

    @wraps(balance)
    def of_real(gate_logits: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(gate_logits, tuple):
            return balance(gate_logits, *args, **kwargs)
        rows = [logits.reshape(-1, logits.shape[-1]) for logits in gate_logits]
        if not real:
            total: Tensor = sum(logits.sum() for logits in rows) * 0.0
            return total
        return balance(tuple(logits[:real] for logits in rows), *args, **kwargs)

    return of_real
