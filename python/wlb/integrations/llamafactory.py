"""wlb's plans in LLaMA-Factory: `run_exp = balanced(run_exp, max_tokens=65536)`."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from wlb._errors import error
from wlb.integrations.huggingface.balance import check_named
from wlb.integrations.huggingface.balancing import balancing
from wlb.integrations.versions import check_version


def balanced(run_exp: Callable[..., None], **options: Any) -> Callable[..., None]:
    """Wraps LLaMA-Factory's `run_exp` so that its trainers are balanced when they begin to train.

    Supports what transformers' `Trainer` trains on tokens: the stages `pt` and `sft` with `full`, `freeze` or `lora`.

    Args:
        run_exp: `llamafactory.train.tuner.run_exp`.
        **options: of `wlb.integrations.huggingface.balance`.

    Raises:
        wlb.WlbError: an option is unknown, or LLaMA-Factory is older than 0.9.5. In `run_exp`: LLaMA-Factory's own
            packing is on (in stage `pt` by default), Ray would train in other processes, the stage is another one, or
            what `balance` and `balancing` raise.
    """
    check_version("llamafactory")
    check_named(options)

    @wraps(run_exp)
    def run(args: Any = None, callbacks: Any = None) -> None:
        from llamafactory.hparams import get_ray_args, read_args

        args = read_args(args)
        if get_ray_args(args).use_ray:
            raise error(
                "use_ray", "= True: it would train in other processes; unset USE_RAY, run with torchrun", value=True
            )
        stage = args.get("stage", "sft") if isinstance(args, dict) else "sft"
        if stage == "ppo":  # PPO has a training loop of its own, which wlb cannot plan
            raise error("stage", '= "ppo": is no stage of supervised training; balance "sft" or "pt"', value=stage)
        with balancing(check=_check_arguments, **options):
            run_exp(args, callbacks)

    return run


def _check_arguments(trainer: Any) -> None:
    """Checks LLaMA-Factory's arguments, which one of its callbacks has."""
    for callback in trainer.callback_handler.callbacks:
        stage = getattr(getattr(callback, "finetuning_args", None), "stage", "sft")
        if stage not in ("pt", "sft"):
            raise error("stage", f'= "{stage}": only next tokens can be learnt, as in "pt" and "sft"', value=stage)
        for name in ("packing", "neat_packing"):
            if getattr(getattr(callback, "data_args", None), name, False):
                raise error(name, f"= True: wlb packs; say {name}: false", value=True)
