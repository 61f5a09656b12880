"""Micro-batches for Megatron-LM's `pretrain`, which has its own loop and takes one at a time."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import Any

import torch
from megatron.core.distributed import finalize_model_grads

from wlb._errors import error
from wlb.integrations.megatron.costs import cost_of
from wlb.integrations.megatron.data import data_iterator
from wlb.integrations.megatron.iterator import DataIterator
from wlb.integrations.megatron.rows import Batch
from wlb.reading.sizes import step_tokens
from wlb.torch.data.loading import FOREVER


def pretraining(
    dataset: Any, *, max_tokens_per_rank: int, num_epochs: int = FOREVER, validation: bool = False, **options: Any
) -> MicroBatches:
    """The return value of a data provider for Megatron-LM's `pretrain`, for training or for validation.

    With `--dataloader-type external --micro-batch-size 1 --calculate-per-token-loss`::

        def provider(sizes):
            return megatron.pretraining("corpus_text_document", max_tokens_per_rank=8192), None, None

        provider.is_distributed = True
        pretrain(provider, model_provider, ModelType.encoder_or_decoder, forward_step)

    `forward_step` is that of `data_iterator`. With several stages the model's provider begins with
    `get_args().variable_seq_lengths = True`, for which `pretrain` has no option. `--global-batch-size` is the number of
    micro-batches of `max_tokens_per_rank` tokens in a step. They are four fifths full on average, so that any documents
    can be balanced.

    The last rank's TensorBoard and Weights & Biases writers get each step's figures. Megatron's checkpoints hold the
    state, and a resumed run continues after the last trained step. In the samples and FLOPs that Megatron reports,
    every micro-batch counts as `--seq-length` tokens; the loss and the training are not affected.

    All ranks call this together.

    Args:
        dataset: as for `data_iterator`.
        max_tokens_per_rank: as for `data_iterator`.
        num_epochs: of the documents; `pretrain` fails if they end before `--train-iters`.
        validation: whether it is for validation: it starts from the first document in every run, and writes no figures.
            Each evaluation takes the next documents.
        **options: of `data_iterator`, except `model`, `tokens_per_batch` and `each_rank_reads`: here every rank reads,
            because `pretrain` takes micro-batches one by one, when a stage has nothing to send yet.

    Returns:
        An iterator of `wlb.integrations.megatron.rows.Batch`.

    Raises:
        wlb.WlbError: an argument of the command line contradicts the plan, or the checkpoint has no state of the data.
    """
    from megatron.training import get_args, get_tensorboard_writer, get_wandb_writer
    from megatron.training.arguments import core_transformer_config_from_args

    args = get_args()
    _check(args, options)
    config = core_transformer_config_from_args(args)
    config.finalize_model_grads_func = finalize_model_grads  # `pretrain` sets it in the model's, but later
    if options.get("cost_model") is None:
        options["cost_model"] = cost_of(config, vocab_size=args.padded_vocab_size)
    held = max_tokens_per_rank * args.context_parallel_size
    steps = data_iterator(
        dataset,
        model=config,
        max_tokens_per_rank=max_tokens_per_rank,
        tokens_per_batch=step_tokens(args.global_batch_size * held),
        num_epochs=num_epochs,
        each_rank_reads=True,
        **options,
    )
    needed = args.global_batch_size // args.data_parallel_size
    found = MicroBatches(steps, needed, () if validation else (get_tensorboard_writer(), get_wandb_writer()))
    if validation:
        return found
    given = getattr(args, "dataloader_save", None)  # an argument that some forks add for loaders with a state
    if args.iteration > 0:
        found.load_state(_saved(given or args.load, args.iteration))
    args.dataloader_save = given or args.save
    return found


class MicroBatches:
    """The micro-batches of one step after the other, equally many in each.

    Args:
        steps: source of steps.
        each: micro-batches of a rank in a step.
        writers: of the figures; None is ignored.
    """

    def __init__(self, steps: DataIterator, each: int, writers: tuple[Any, ...] = ()) -> None:
        self._steps, self._each, self._writers = steps, each, writers
        self._left: deque[Batch] = deque()

    def __iter__(self) -> MicroBatches:
        return self

    def __next__(self) -> Batch:
        """The next one. With the first one of a step the whole step is read.

        Raises:
            wlb.WlbError: the step has another number of micro-batches than `pretrain` takes.
        """
        if not self._left:
            step = next(self._steps)
            if len(step.batches) != self._each:
                message = f"takes {self._each} micro-batches of a rank, the plan has {len(step.batches)}"
                raise error("global_batch_size", message, value=self._each)
            step.log(*self._writers)
            self._left.extend(step.batches)
        return self._left.popleft()

    def save_state(self) -> dict[str, Any] | None:
        """State after the last step that was given, for Megatron's checkpoints.

        Raises:
            wlb.WlbError: a step was given only in part.
        """
        if self._left:
            message = f"= {self._each}: it was saved inside of a step, {len(self._left)} before its end"
            raise error("global_batch_size", message, value=self._each)
        return self._steps.state_dict()

    def load_state(self, state: dict[str, Any]) -> None:
        """The next one is the first of the step after the one that had this state. Every rank calls it."""
        self._left.clear()
        self._steps.load_state_dict(state)

    def close(self) -> None:
        """Ends reading ahead."""
        self._steps.close()


def _check(args: Any, options: dict[str, Any]) -> None:
    """Refuses arguments of Megatron's command line with which its loop would contradict the plan."""
    for name in ("model", "tokens_per_batch", "each_rank_reads"):
        if name in options:
            raise error(name, "follows from Megatron's arguments and loop: leave it out", value=options[name])
    if args.dataloader_type != "external":
        message = f"= {args.dataloader_type!r}: would read it as a data set; give --dataloader-type external"
        raise error("dataloader_type", message, value=args.dataloader_type)
    if args.micro_batch_size != 1:
        message = f"= {args.micro_batch_size}: a micro-batch is one row of documents; give --micro-batch-size 1"
        raise error("micro_batch_size", message, value=args.micro_batch_size)
    for name, why in (
        ("rampup_batch_size", "wlb plans all steps with the same number of micro-batches"),
        ("virtual_pipeline_model_parallel_size", "its checkpoints hold no state of several chunks' iterators"),
        ("full_validation", "an evaluation takes --eval-iters steps"),
    ):
        if value := getattr(args, name, None):
            raise error(name, f"= {value!r}: {why}; leave it out, or write the loop around data_iterator", value=value)
    if options.get("dynamic_cp"):
        message = "= True: pretrain takes as many micro-batches in every step; write the loop around data_iterator"
        raise error("dynamic_cp", message, value=True)


def _saved(folder: str, iteration: int) -> Any:
    """The state that Megatron saved with the checkpoint from which the run resumes, equal on all ranks."""
    from megatron.training.checkpointing import get_checkpoint_name

    name = "train_dataloader_dprank000.pt"
    path = get_checkpoint_name(folder, iteration, tensor_rank=0, pipeline_rank=0, basename=name)
    if not Path(path).is_file():
        message = f"= {folder!r}: has no {path}, so nobody knows where the data stood; give --finetune to begin anew"
        raise error("load", message, value=folder)
    return torch.load(path, weights_only=True)["dataloader_state_dict"]
