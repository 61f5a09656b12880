"""One way in: wlb for whatever trainer there is.

It names rooms above its own floor, and imports one only when it is given what that room is for: a program that calls
`wlb.attach` has the trainer's packages, and one that does not needs none of them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from importlib import import_module
from types import ModuleType
from typing import Any, Final

from wlb._errors import check_options, error


def attach(trainer: Any, **options: Any) -> Any:
    """Puts wlb's plans into the trainer that you have, by what it is.

    | given | gives | with |
    | --- | --- | --- |
    | transformers' `Trainer`, TRL's `SFTTrainer` | the same trainer, balanced | what `balance` takes |
    | Lightning's `Trainer` | a data module for its `fit` | `dataset=`, what `BalancedDataModule` takes |
    | LLaMA-Factory's `run_exp` | such a function | what `balance` takes |
    | torchtitan's `Trainer.Config` | such a configuration, balanced | what `balance` takes |
    | accelerate's `Accelerator` | `train_step` as a function of model and step | what `train_step` takes |
    | a model of Megatron-Core, or its chunks | steps for its schedules | `dataset=`, what `data_iterator` takes |
    | the package `verl` | the package, with wlb's planners in this process | nothing |
    | a torch module, wrapped or not | `train_step` as a function of the step | what `train_step` takes |

    Args:
        trainer: what trains.
        **options: of the function that is called: :func:`wlb.integrations.huggingface.balance`,
            :class:`wlb.integrations.lightning.BalancedDataModule`, :func:`wlb.integrations.megatron.data_iterator`,
            :func:`wlb.integrations.torchtitan.balance`, :func:`wlb.torch.train_step`.

    Returns:
        As in the table.

    Raises:
        WlbError: it is nothing that is known, an option is unknown or missing, or what the function raises.
    """
    if isinstance(trainer, ModuleType) and trainer.__name__ == "verl":
        return _verl(trainer, **options)
    if (getattr(trainer, "__module__", None), getattr(trainer, "__name__", None)) == _RUN_EXP:
        return _llamafactory(trainer, **options)
    chunks = isinstance(trainer, list) and bool(trainer)  # Megatron-Core's, of an interleaved pipeline
    for cls in type(trainer[0] if chunks else trainer).__mro__:
        package, name = cls.__module__.partition(".")[0], cls.__qualname__
        if (package, name) in _KNOWN and (not chunks or package == "megatron"):
            return _KNOWN[package, name](trainer, **options)
    found = f"{type(trainer).__module__}.{type(trainer).__qualname__}"
    known = "transformers.Trainer, LLaMA-Factory's run_exp, lightning.Trainer, torchtitan's Trainer.Config, "
    known += "accelerate.Accelerator, megatron.core's models, the package verl, torch.nn.Module"
    raise error("trainer", f"is a {found}, which is not known; known are {known}", value=found)


def _checked(function: Callable[..., Any], options: dict[str, Any]) -> Callable[..., Any]:
    """The function, once it is known to take these options. One that hands some on checks these by itself."""
    parameters = inspect.signature(function).parameters.values()
    if all(parameter.kind is not inspect.Parameter.VAR_KEYWORD for parameter in parameters):
        check_options(options, function)
    for parameter in parameters:
        needed = parameter.kind is inspect.Parameter.KEYWORD_ONLY and parameter.default is inspect.Parameter.empty
        if needed and parameter.name not in options:
            raise error(parameter.name, f"is missing: {function.__name__} needs it")
    return function


def _hugging_face(trainer: Any, **options: Any) -> Any:
    return _checked(import_module("wlb.integrations.huggingface").balance, options)(trainer, **options)


def _llamafactory(run_exp: Any, **options: Any) -> Any:
    _checked(import_module("wlb.integrations.huggingface").balance, options)
    return import_module("wlb.integrations.llamafactory").balanced(run_exp, **options)


def _lightning(trainer: Any, *, dataset: Any = None, **options: Any) -> Any:
    if dataset is None:
        raise error("dataset", "is missing: Lightning's Trainer has none before fit")
    return _checked(import_module("wlb.integrations.lightning").BalancedDataModule, options)(dataset, **options)


def _other_lightning(trainer: Any, **options: Any) -> Any:
    message = "is of pytorch_lightning, which takes no data module of lightning: import lightning instead"
    raise error("trainer", message, value=type(trainer).__qualname__)


def _megatron(model: Any, *, dataset: Any = None, **options: Any) -> Any:
    if dataset is None:
        raise error("dataset", "is missing: a model has none")
    function = import_module("wlb.integrations.megatron").data_iterator
    return _checked(function, {"model": model, **options})(dataset, model=model, **options)


def _torchtitan(config: Any, **options: Any) -> Any:
    return _checked(import_module("wlb.integrations.torchtitan").balance, options)(config, **options)


def _accelerate(accelerator: Any, **options: Any) -> Any:
    function = import_module("wlb.torch").train_step
    return partial(_checked(function, options), accelerator=accelerator, **options)


def _module(model: Any, **options: Any) -> Any:
    return partial(_checked(import_module("wlb.torch").train_step, options), model, **options)


def _verl(package: Any, **options: Any) -> Any:
    function = import_module("wlb.integrations.verl").install
    _checked(function, options)()
    return package


_RUN_EXP: Final = ("llamafactory.train.tuner", "run_exp")
_KNOWN: dict[tuple[str, str], Callable[..., Any]] = {
    ("transformers", "Trainer"): _hugging_face,
    ("lightning", "Trainer"): _lightning,
    ("pytorch_lightning", "Trainer"): _other_lightning,
    ("torchtitan", "Trainer.Config"): _torchtitan,
    ("accelerate", "Accelerator"): _accelerate,
    ("megatron", "MegatronModule"): _megatron,
    ("megatron", "TransformerConfig"): _megatron,
    ("torch", "Module"): _module,
}
