"""Balances the trainers of programs that make their trainers themselves."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from transformers import Trainer

from wlb._errors import error
from wlb.integrations.huggingface.balance import balance, check_named


@contextmanager
def balancing(*, check: Callable[[Trainer], None] = lambda trainer: None, **options: Any) -> Iterator[None]:
    """Inside this context, every trainer of Hugging Face is balanced when it begins to train.

        with balancing(max_tokens=65536):
            main()

    Args:
        check: called with each trainer before it is changed; may refuse it.
        **options: of `balance`.

    Raises:
        wlb.WlbError: an option is unknown; or no trainer began to train, because the program has a loop of its own or
            trained in another process. `train` raises what `balance` raises.
    """
    check_named(options)  # before data and model are loaded
    own, began = Trainer.train, []

    def train(trainer: Any, *args: Any, **kwargs: Any) -> Any:
        if not hasattr(trainer, "_wlb_plan"):
            check(trainer)
            balance(trainer, **options)
        began.append(trainer)
        return own(trainer, *args, **kwargs)

    Trainer.train = train  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        Trainer.train = own  # type: ignore[method-assign]
    if not began:
        message = "none of transformers' began to train here: it has a loop of its own, or trains in another process"
        raise error("trainer", f"is missing: {message}")
