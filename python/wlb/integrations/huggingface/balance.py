"""A trainer of Hugging Face on wlb's plans: two lines."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import ArrayLike
from torch import nn
from torch.utils.data import IterableDataset
from transformers import Trainer
from transformers.trainer_utils import EvalLoopOutput, has_length

import wlb
from wlb._choices import Oversize
from wlb._core import MAX_DELAY
from wlb._errors import check_integer, check_options, error
from wlb.integrations.huggingface.loader import MicroBatchCallback, MicroBatchLoader
from wlb.integrations.huggingface.plans import Evaluation, KnownLengths, Limits, Streamed
from wlb.integrations.huggingface.proof import prove
from wlb.integrations.huggingface.refusals import check_trainer, shuffles
from wlb.integrations.rows import Rows
from wlb.torch.data import IGNORE, BalancedStream
from wlb.torch.data.loading import Loading, step_tokens
from wlb.torch.training import meeting_place, takes_keywords

_SET_HERE = ("trainer", "packer", "num_micro_batches")  # not given by a user
AnyTrainer = TypeVar("AnyTrainer", bound=Trainer)


def check_named(options: Iterable[str]) -> None:
    """Refuses options that :func:`balance` does not have.

    Raises:
        wlb.WlbError: naming the first.
    """
    check_options(options, balance, wlb.Packer, but=_SET_HERE)


def balance(
    trainer: AnyTrainer,
    *,
    max_tokens: int,
    max_document_tokens: int | None = None,
    oversize: Oversize = "split",
    max_delay: int = MAX_DELAY,
    tokens_per_batch: int | None = None,
    lengths: ArrayLike | None = None,
    cost_model: wlb.CostModel | None = None,
    verify: bool = True,
    **packer: Any,
) -> AnyTrainer:
    """Makes a trainer train micro-batches of equal work, on documents packed without padding.

    The data set stays as the trainer has tokenised it, and its collator says what is learnt: it is asked for one
    document at a time. What changes:

    - A step trains as many tokens as the trainer's own batch sizes would on average, so that its learning rate stays
      right; `gradient_accumulation_steps` becomes the fewest micro-batches of `max_tokens` that hold them with a
      quarter to spare. Work is balanced by the FLOPs of `model.config`.
    - `max_steps` becomes the steps of `num_train_epochs`, unless it was given. Epochs are counted by documents:
      `eval_strategy="epoch"` and `save_strategy="epoch"` come where an epoch ends.
    - Checkpoints hold what waits (`trainer_state.json`), and `train(resume_from_checkpoint=...)` goes on with the next
      document, pieces of long ones included, on another number of ranks or workers too.
    - What the trainer logs of a step has its figures: `wlb/imbalance`, `wlb/lost_time`, `wlb/delay_max` and others
      (:class:`wlb.torch.StepMetrics`), wherever it reports to.
    - Evaluation is a mean over tokens, on packed rows. With `compute_metrics`, or on data without a length, the
      trainer's own batches are kept; their losses are weighted by labels.

    A data set without a length is read as streams: one for each of its shards, each by one rank, and documents move to
    where they are trained. Set `max_steps` as always; training ends earlier if the data does. It resumes from the data
    set's own `state_dict`, or by reading again where that is not exact (shuffle buffers). Steps have the
    `gradient_accumulation_steps` that were given, filled to four fifths.

    Args:
        trainer: transformers' `Trainer`, TRL's `SFTTrainer`, or one made of them; it is changed, and returned.
        max_tokens: most tokens of a micro-batch: what the memory of a rank holds.
        max_document_tokens: the context; by default that of the model, at most `max_tokens`.
        oversize: "split" longer documents, each token predicting the next one all the same; "truncate" them; or it is
            an "error".
        max_delay: most steps that a document waits for others; 0: none waits.
        tokens_per_batch: tokens of a step on all ranks, instead of those above.
        lengths: int[documents] tokens after tokenisation, if they are known: by default read from the data set.
        cost_model: what documents cost, instead of `wlb.ModelConfig.from_hugging_face(model.config)`.
        verify: prove on the first step, before the optimizer takes it, that the trainer's loss, gradients and
            evaluation are those of documents alone (:func:`wlb.torch.verify`); seconds.
        **packer: further arguments of `wlb.Packer`: `method`, `release`, `delay_price`.

    Returns:
        The same trainer.

    Raises:
        wlb.WlbError: an argument makes no sense; the trainer has its own packing on, groups by length, draws documents
            by a sampler of its own, drops what is left, dispatches batches, or shards sequences; data without
            `input_ids`; a model of which the costs are not known. Nothing has changed then. In `train`: what
            :func:`wlb.torch.verify` finds.
    """
    check_named(packer)
    check_trainer(trainer)
    check_integer("max_tokens", max_tokens, minimum=1)
    model: Any = trainer.model
    if max_document_tokens is None:
        context = getattr(model.config.get_text_config(), "max_position_embeddings", None) or max_tokens
        max_document_tokens = min(max_tokens, context)
    if cost_model is None:
        cost_model = wlb.ModelConfig.from_hugging_face(model.config.to_dict()).cost_model()
    loading = Loading(
        max_document_tokens=max_document_tokens, oversize=oversize, max_delay=max_delay, cost_model=cost_model
    )
    limits = Limits(max_tokens, loading, packer)
    plain = not takes_keywords(model)
    plan: KnownLengths | Streamed
    if has_length(trainer.train_dataset) and not isinstance(trainer.train_dataset, IterableDataset):
        plan = _known(trainer, limits, tokens_per_batch, lengths)
        split = oversize == "split" and int(plan.lengths.max()) > max_document_tokens
    else:
        plan = _streamed(trainer, limits, tokens_per_batch)
        split = oversize == "split"
    if plain and split:
        name = type(model).__name__
        message = f'= "split": {name} takes no shift_labels, so what follows a piece could not be learnt; "truncate"'
        raise error("oversize", message, value=oversize)
    args = trainer.args
    max_steps = args.max_steps
    if isinstance(plan, KnownLengths) and max_steps <= 0:
        max_steps = max(1, math.ceil(plan.sampler().total_steps() * args.num_train_epochs / plan.num_epochs))
    args.max_steps = max_steps
    args.gradient_accumulation_steps = plan.packer.num_micro_batches // args.world_size
    args.ignore_data_skip = True
    own = type(trainer)
    trainer.__class__ = type(own.__name__, (_Balanced, own), {"__doc__": own.__doc__, "__module__": own.__module__})
    balanced: Any = trainer
    balanced._wlb_plan, balanced._wlb_limits, balanced._wlb_plain, balanced._wlb_verify = plan, limits, plain, verify
    balanced._wlb_callback = MicroBatchCallback()
    trainer.add_callback(balanced._wlb_callback)
    return trainer


def _known(trainer: Trainer, limits: Limits, tokens_per_batch: int | None, lengths: ArrayLike | None) -> KnownLengths:
    args = trainer.args
    rows = Rows(*_documents(trainer, trainer.train_dataset, "training"))
    if not len(rows):
        raise error("train_dataset", "is empty")
    shuffle = shuffles(trainer)
    measured = rows.lengths() if lengths is None else np.asarray(lengths)
    if measured.shape != (len(rows),):
        message = f"has shape {measured.shape}, but there are {len(rows)} documents"
        raise error("lengths", message, value=measured.shape)
    if lengths is not None:
        rows.planned_by(measured, "by lengths=")
    context = limits.loading.max_document_tokens or limits.max_tokens
    trained = measured.clip(max=context) if limits.loading.oversize == "truncate" else measured
    if tokens_per_batch is None:
        documents = args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size
        tokens_per_batch = max(1, round(float(trained.mean()) * documents))
    packer = limits.packer(limits.micro_batches(tokens_per_batch, args.world_size), tokens_per_batch)
    num_epochs = max(1, math.ceil(args.num_train_epochs))
    if args.max_steps > 0:  # as many as that takes: what waits is drained after the last one
        num_epochs = 2 + math.ceil(args.max_steps * tokens_per_batch / int(trained.sum()))
    return KnownLengths(rows, measured, packer, num_epochs, shuffle, args)


def _streamed(trainer: Trainer, limits: Limits, tokens_per_batch: int | None) -> Streamed:
    args = trainer.args
    if args.max_steps <= 0:
        message = "is not given, and a data set that is read as a stream does not say how many steps it has: give it"
        raise error("max_steps", message, value=args.max_steps)
    dataset, collator = _documents(trainer, trainer.train_dataset, "training")
    if tokens_per_batch is None:
        num_micro_batches = args.world_size * args.gradient_accumulation_steps
        tokens_per_batch = step_tokens(num_micro_batches * limits.max_tokens)
    else:
        num_micro_batches = limits.micro_batches(tokens_per_batch, args.world_size)
    return Streamed(dataset, collator, limits.packer(num_micro_batches, tokens_per_batch))


def _documents(trainer: Any, dataset: Any, description: str) -> tuple[Any, Any]:
    """A data set and its collator, without the columns that the model does not take: as the trainer reads them."""
    if hasattr(dataset, "remove_columns") and hasattr(dataset, "select_columns") and has_length(dataset):
        return trainer._remove_unused_columns(dataset, description=description), trainer.data_collator
    return dataset, trainer._get_collator_with_removed_columns(trainer.data_collator, description=description)


class _Balanced(Trainer):
    """Goes in front of a trainer's own class."""

    _wlb_plan: KnownLengths | Streamed
    _wlb_limits: Limits
    _wlb_plain: bool
    _wlb_verify: bool
    _wlb_callback: MicroBatchCallback
    _wlb_losses: list[tuple[float, int]] | None = None  # of the evaluation that runs: sum, and number of labels

    def _inner_training_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Also closes what reads streams."""
        result = super()._inner_training_loop(*args, **kwargs)
        loader: Any = self.callback_handler.train_dataloader
        if isinstance(loader.steps, BalancedStream):
            loader.steps.close()
        return result

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Adds the figures of the last step to a line of training, for whatever the trainer reports to."""
        if "loss" in logs:
            logs.update(self._wlb_callback.line)
        super().log(logs, *args, **kwargs)

    def get_train_dataloader(self) -> Any:
        """The micro-batches of the plan."""
        check = (lambda step: prove(self, step, plain=self._wlb_plain)) if self._wlb_verify else None
        return MicroBatchLoader(self._wlb_plan.steps(), plain=self._wlb_plain, before_first=check)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """Packed rows, if that does no harm."""
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(dataset, str):
            dataset = self.eval_dataset[dataset]  # type: ignore[index]
        if self.compute_metrics is not None or dataset is None or not has_length(dataset):
            return super().get_eval_dataloader(eval_dataset)
        rows = Rows(*_documents(self, dataset, "evaluation"))
        return Evaluation(rows, self._wlb_limits, self.args, plain=self._wlb_plain)

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> EvalLoopOutput:
        """The loss becomes the mean over labels: that of batches, as the Trainer has it, weighs them all the same."""
        self._wlb_losses = []
        try:
            output = super().evaluation_loop(*args, **kwargs)
        finally:
            losses, self._wlb_losses = self._wlb_losses, None
        name = f"{kwargs.get('metric_key_prefix', 'eval')}_loss"
        if output.metrics is not None and name in output.metrics:
            total = torch.tensor(losses, dtype=torch.float64).reshape(-1, 2).sum(0)
            if dist.is_initialized():
                total = total.to(meeting_place(dist.group.WORLD, self.args.device))
                dist.all_reduce(total)
            output.metrics[name] = (total[0] / total[1]).item()
        return output

    def prediction_step(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Keeps the loss of a batch with the number of its labels."""
        shifted = inputs.get("shift_labels")
        if shifted is None and inputs.get("labels") is not None:
            shifted = inputs["labels"][..., 1:]
        loss, logits, labels = super().prediction_step(model, inputs, *args, **kwargs)
        if loss is not None and shifted is not None and self._wlb_losses is not None:
            count = int((shifted != IGNORE).sum())
            self._wlb_losses.append((loss.item() * count if count else 0.0, count))
        return loss, logits, labels

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> Any:
        """None in an evaluation: then losses are means over the labels of a batch of this rank alone."""
        if self._wlb_losses is not None:
            return None
        return super()._get_num_items_in_batch([_labels_to_count(batch) for batch in batch_samples], device)


def _labels_to_count(batch: dict[str, Any]) -> dict[str, Any]:
    """Labels that every version of transformers counts right: older ones do not look at `shift_labels`.

    What follows the last token of a piece is learnt there, though no row holds it.
    """
    shifted = batch.get("shift_labels")
    return batch if shifted is None else {"labels": torch.nn.functional.pad(shifted, (1, 0), value=IGNORE)}
