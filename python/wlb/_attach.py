"""One way in: wlb for whatever trainer there is. Imports nothing of it before it is asked for."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

from wlb._errors import error


def attach(trainer: Any, **options: Any) -> Any:
    """Puts wlb's plans into the trainer that you have, by what it is.

    | given | gives | with |
    | --- | --- | --- |
    | transformers' `Trainer`, TRL's `SFTTrainer` | the same trainer, balanced | what `balance` takes |
    | Lightning's `Trainer` | a data module for its `fit` | `dataset=`, what `BalancedDataModule` takes |
    | torchtitan's `Trainer.Config` | such a configuration, balanced | what `balance` takes |
    | accelerate's `Accelerator` | `train_step` as a function of model and step | what `train_step` takes |
    | a model of Megatron-Core, or its chunks | steps for its schedules | `dataset=`, what `data_iterator` takes |
    | a torch module, wrapped or not | `train_step` as a function of the step | what `train_step` takes |

    Args:
        trainer: what trains.
        **options: of the function that is called: :func:`wlb.integrations.huggingface.balance`,
            :class:`wlb.integrations.lightning.BalancedDataModule`, :func:`wlb.integrations.megatron.data_iterator`,
            :func:`wlb.integrations.torchtitan.balance`, :func:`wlb.torch.train_step`.

    Returns:
        As in the table.

    Raises:
        WlbError: it is nothing that is known, or what the function raises.
    """
    chunks = isinstance(trainer, list) and bool(trainer)  # Megatron-Core's, of an interleaved pipeline
    for cls in type(trainer[0] if chunks else trainer).__mro__:
        package, name = cls.__module__.partition(".")[0], cls.__qualname__
        if (package, name) in _KNOWN and (not chunks or package == "megatron"):
            return _KNOWN[package, name](trainer, **options)
    found = f"{type(trainer).__module__}.{type(trainer).__qualname__}"
    known = "transformers.Trainer, lightning.Trainer, torchtitan's Trainer.Config, accelerate.Accelerator, "
    known += "megatron.core's models, torch.nn.Module"
    raise error("trainer", f"is a {found}, which is not known; known are {known}", value=found)


def _hugging_face(trainer: Any, **options: Any) -> Any:
    return import_module("wlb.integrations.huggingface").balance(trainer, **options)


def _lightning(trainer: Any, *, dataset: Any = None, **options: Any) -> Any:
    if dataset is None:
        raise error("dataset", "is missing: Lightning's Trainer has none before fit")
    return import_module("wlb.integrations.lightning").BalancedDataModule(dataset, **options)


def _megatron(model: Any, *, dataset: Any = None, **options: Any) -> Any:
    if dataset is None:
        raise error("dataset", "is missing: a model has none")
    return import_module("wlb.integrations.megatron").data_iterator(dataset, model=model, **options)


def _torchtitan(config: Any, **options: Any) -> Any:
    return import_module("wlb.integrations.torchtitan").balance(config, **options)


def _accelerate(accelerator: Any, **options: Any) -> Any:
    return partial(import_module("wlb.torch").train_step, accelerator=accelerator, **options)


def _module(model: Any, **options: Any) -> Any:
    return partial(import_module("wlb.torch").train_step, model, **options)


_KNOWN: dict[tuple[str, str], Callable[..., Any]] = {
    ("transformers", "Trainer"): _hugging_face,
    ("lightning", "Trainer"): _lightning,
    ("torchtitan", "Trainer.Config"): _torchtitan,
    ("accelerate", "Accelerator"): _accelerate,
    ("megatron", "MegatronModule"): _megatron,
    ("megatron", "TransformerConfig"): _megatron,
    ("torch", "Module"): _module,
}
