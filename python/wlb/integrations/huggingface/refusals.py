"""Refuses settings of a trainer that contradict a plan, by name and before anything has changed."""

from __future__ import annotations

import inspect
from typing import Any

import transformers
from packaging.version import Version
from torch.utils.data import RandomSampler, SequentialSampler
from transformers import Trainer

from wlb._errors import error
from wlb.integrations.versions import OLDEST
from wlb.torch.layers import against_labels, against_packing

_NEEDED: tuple[str, ...] = (
    "get_batch_samples",
    "_get_num_items_in_batch",
    "_get_collator_with_removed_columns",
    "_get_train_sampler",
    "_inner_training_loop",
    "evaluation_loop",
)


def check_trainer(trainer: Any) -> None:
    """Refuses trainers that cannot be balanced.

    Raises:
        wlb.WlbError: the first reason, and what to do about it.
    """
    if Version(transformers.__version__) < Version(OLDEST["transformers"]):
        message = f"is of transformers {transformers.__version__}: {OLDEST['transformers']} or newer is needed"
        raise error("trainer", message, value=transformers.__version__)
    if not isinstance(trainer, Trainer):
        raise error("trainer", f"is a {type(trainer).__name__}, not a transformers.Trainer", value=trainer)
    missing = [name for name in _NEEDED if not hasattr(trainer, name)]
    if missing:
        message = (
            f"has no {missing[0]}: transformers {transformers.__version__} is newer than this version of wlb knows"
        )
        raise error("trainer", message, value=transformers.__version__)
    if trainer.train_dataset is None:
        raise error("train_dataset", "is None: there is nothing to train")
    _check_examples(trainer)
    _check_class(trainer)
    _check_model(trainer)
    _check_arguments(trainer.args)
    _check_parallelism(trainer)
    if getattr(trainer.data_collator, "mlm", False):
        message = "has mlm=True: only next tokens can be learnt; DataCollatorForLanguageModeling(tokenizer, mlm=False)"
        raise error("data_collator", message, value=True)
    _check_labels_are_counted(trainer)


def shuffles(trainer: Any) -> bool:
    """Whether each epoch has an order of its own; False if epochs keep the order of the data set.

    Raises:
        wlb.WlbError: the sampler draws with weights or leaves documents out. A plan would not use it.
    """
    dataset = trainer.train_dataset
    sampler = trainer._get_train_sampler(dataset)
    if type(sampler) is SequentialSampler:
        return False
    name = type(sampler).__name__
    if type(sampler) is RandomSampler:
        if sampler.replacement:
            name += " with replacement"
        elif sampler.num_samples != len(dataset):
            name += f" of {sampler.num_samples} of {len(dataset)}"
        else:
            return True
    message = (
        f"draws documents by a {name}, which wlb would not call: leave its _get_train_sampler out; or put the "
        'documents that it would draw into the data set, in that order, with train_sampling_strategy="sequential"'
    )
    raise error("trainer", message, value=name)


# Columns from which TRL's trainers make examples of several sequences.
_PREFERENCES = ("chosen", "rejected", "chosen_ids", "chosen_input_ids", "rejected_input_ids", "completion_input_ids")


def _check_examples(trainer: Any) -> None:
    """Refuses trainers whose examples are several sequences: DPO, KTO, reward models.

    Raises:
        wlb.WlbError: it names the trainer, and a way to plan its micro-batches.
    """
    columns = getattr(trainer.train_dataset, "column_names", None) or ()
    names = [cls.__name__ for cls in type(trainer).__mro__]
    paired = next((name for name in names if name in ("DPOTrainer", "KTOTrainer", "RewardTrainer")), None)
    found = [name for name in _PREFERENCES if name in columns]
    if paired is None and not found:
        return
    what = f"is a {paired}" if paired else f"trains examples of {', '.join(found)}"
    message = (
        f"{what}: several sequences are one example, whose loss is no sum over tokens, and the packed rows of this "
        "trainer do not keep them together. Plan micro-batches that do with "
        'wlb.rl.plan(groups=, together="micro_batch")'
    )
    raise error("trainer", message, value=paired or found)


def _check_class(trainer: Trainer) -> None:
    classes = [cls for cls in type(trainer).__mro__ if not cls.__module__.startswith("wlb.")]
    own = next(cls for cls in classes if "get_train_dataloader" in vars(cls))
    if own is not Trainer:
        message = f"is a {own.__name__} with its own get_train_dataloader, which wlb would not call: leave it out"
        raise error("trainer", message, value=own.__name__)


def _check_model(trainer: Any) -> None:
    """Refuses a model that was set after the trainer was made: the Trainer would train the one that it has wrapped."""
    unwrapped = (trainer.accelerator.unwrap_model(model) for model in (trainer.model, trainer.model_wrapped))
    named, trained = (getattr(model, "_orig_mod", model) for model in unwrapped)  # `_orig_mod`: inside a compiled one
    if named is not trained:
        message = (
            f"is a {type(named).__name__} that was set after the trainer was made: it would train model_wrapped, the "
            "one that it has; set trainer.model_wrapped to it too, or make the trainer with it"
        )
        raise error("model", message, value=type(named).__name__)
    if wrong := against_labels(trained) or against_packing(trained, 0):
        raise error("model", wrong, value=type(trained).__name__)


def check_longest(trainer: Any, max_document_tokens: int) -> None:
    """Refuses models for which a document of a row may be too long.

    Raises:
        wlb.WlbError: the factors of its positions follow the longest document of a row.
    """
    if wrong := against_packing(trainer.model, max_document_tokens):
        raise error("max_document_tokens", f"= {max_document_tokens}: the model {wrong}", value=max_document_tokens)


def _check_arguments(args: Any) -> None:
    for name in ("packing", "eval_packing", "sample_packing", "eval_sample_packing"):  # TRL's, axolotl's
        if getattr(args, name, None):
            raise error(name, "= True: wlb packs; make the trainer with False", value=True)
    strategy = getattr(args, "train_sampling_strategy", "random")
    if getattr(args, "group_by_length", False):
        strategy = "group_by_length"
    if strategy not in ("random", "sequential"):
        message = f'= {strategy!r} chooses documents by length too: "random" or "sequential"'
        raise error("train_sampling_strategy", message, value=strategy)
    if getattr(args, "neftune_noise_alpha", None):
        message = f"= {args.neftune_noise_alpha}: its noise scales with the length of the row; leave it out"
        raise error("neftune_noise_alpha", message, value=args.neftune_noise_alpha)
    for name, why in (
        ("dataloader_drop_last", "documents would be left out"),
        ("auto_find_batch_size", "max_tokens says what fits"),
    ):
        if getattr(args, name, False):
            raise error(name, f"= True: {why}; make it False", value=True)
    if getattr(args, "dataloader_in_order", True) is False:
        message = "= False: micro-batches belong to steps, in the order of the plan; leave it out"
        raise error("dataloader_in_order", message, value=False)
    for name in ("dispatch_batches", "split_batches"):
        if getattr(args.accelerator_config, name, None):
            message = "= True in accelerator_config: every rank reads its own part of the plan; leave it out"
            raise error(name, message, value=True)
    if args.n_gpu > 1:
        message = f"= {args.n_gpu}: DataParallel would split rows; run a process for each GPU, with torchrun"
        raise error("n_gpu", message, value=args.n_gpu)


def _check_parallelism(trainer: Any) -> None:
    if trainer.is_deepspeed_enabled:
        message = "= True: DeepSpeed took its number of micro-batches when the trainer was made; use DDP or FSDP"
        raise error("deepspeed", message, value=True)
    for name in ("get_cp_size", "get_sp_size", "get_tp_size"):
        size = getattr(trainer, name, lambda: 1)()
        if size > 1:
            message = f"shards sequences over {size} ranks ({name[4:6]}): only data-parallel ranks can be balanced here"
            raise error("parallelism_config", message, value=size)


def _check_labels_are_counted(trainer: Any) -> None:
    """Refuses losses that are not divided by the labels of the step on all ranks."""
    if not trainer.model_accepts_loss_kwargs and trainer.compute_loss_func is None:
        name = type(trainer.model).__name__
        message = (
            f"is a {name}, which takes no num_items_in_batch: every micro-batch would count the same, however many "
            "labels it has; give the trainer a compute_loss_func"
        )
        raise error("model", message, value=name)
    smoother = trainer.label_smoother
    if smoother is not None and "num_items_in_batch" not in inspect.signature(smoother.__call__).parameters:
        message = (
            f"= {smoother.epsilon}: transformers {transformers.__version__} smooths by micro-batch; 0, or a newer one"
        )
        raise error("label_smoothing_factor", message, value=smoother.epsilon)
    if trainer.args.world_size > 1 and not trainer.args.average_tokens_across_devices:
        message = "= False: every rank would count the same, however many labels it has; make it True"
        raise error("average_tokens_across_devices", message, value=False)
