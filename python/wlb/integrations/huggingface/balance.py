"""Makes a trainer of Hugging Face train wlb's plans."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from numpy.typing import ArrayLike
from torch import Tensor, nn
from torch.utils.data import IterableDataset
from transformers import Trainer
from transformers.trainer_utils import EvalLoopOutput, has_length

import wlb
from wlb._choices import Oversize
from wlb._core import MAX_DELAY
from wlb._errors import check_integer, check_options, error
from wlb._warned import warn
from wlb.integrations.huggingface.figures import learnt_alone
from wlb.integrations.huggingface.loader import REAL, MicroBatchCallback, MicroBatchLoader
from wlb.integrations.huggingface.planning import Options, Planned, Planner, Resumed, documents_of, limits_of
from wlb.integrations.huggingface.plans import Evaluation, KnownLengths, Streamed
from wlb.integrations.huggingface.proof import prove
from wlb.integrations.huggingface.refusals import check_trainer
from wlb.integrations.huggingface.streamed import StreamedEvaluation
from wlb.integrations.rows import Rows
from wlb.torch.agreement import agree
from wlb.torch.boundaries import told
from wlb.torch.data import IGNORE, BalancedStream
from wlb.torch.host import host_group
from wlb.torch.routers import routed
from wlb.torch.training import meeting_place, takes_keywords

_SET_HERE = ("trainer", "packer", "num_micro_batches", "cp_size")  # not given by a user
AnyTrainer = TypeVar("AnyTrainer", bound=Trainer)


def check_named(options: Iterable[str]) -> None:
    """Refuses options that `balance` does not have.

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
    columns: Sequence[str] = (),
    verify: bool = True,
    **packer: Any,
) -> AnyTrainer:
    """Makes a trainer train micro-batches of equal work, on documents packed without padding.

    The data set stays as the trainer has tokenised it. Its collator still decides what is learnt, and gets one document
    at a time. What changes:

    - A step trains as many tokens as the trainer's own batch sizes would on average, so that its learning rate stays
      right; `gradient_accumulation_steps` becomes the fewest micro-batches of `max_tokens` that hold them with a
      quarter to spare. Work is balanced by the FLOPs of `model.config`.
    - `max_steps` becomes the steps of `num_train_epochs` that have a label, unless it was given. Epochs are counted by
      documents: `eval_strategy="epoch"` and `save_strategy="epoch"` come where an epoch ends.
    - Checkpoints hold the documents that wait (`trainer_state.json`). `train(resume_from_checkpoint=...)` resumes with
      the next document or piece, also on another number of ranks or workers and with other batch sizes, and trains all
      epochs to their end. The learning-rate schedule follows the documents: a step of half as many tokens moves it by
      half a step. If `max_steps` was given, it counts steps of any size.
    - The trainer's logs have figures of each step, such as `wlb/imbalance`, `wlb/lost_time` and `wlb/delay_max`
      (`wlb.torch.StepMetrics`).
    - The evaluation loss is a mean over tokens, on packed rows. With `compute_metrics`, or on data without a length,
      the trainer's own batches are kept and their losses are weighted by labels.

    You may change data set, collator, arguments and model of the trainer later: every `train` plans anew, so a second
    `train` can be a second stage. It refuses by name what cannot be balanced.

    A data set without a length is read as streams, one for each of its shards. One rank reads each stream, and
    documents move to the ranks that train them. Set `max_steps` as always; training ends earlier if the data does. A
    resume uses the data set's own `state_dict`, or reads again from the start if that is not exact (shuffle buffers).
    Steps have the `gradient_accumulation_steps` that were given, and are four fifths full on average.

    Args:
        trainer: transformers' `Trainer`, TRL's `SFTTrainer`, or a class derived from them. It is changed and returned.
        max_tokens: most tokens of a micro-batch, limited by the memory of a rank.
        max_document_tokens: most tokens of a document; by default the model's context, at most `max_tokens`.
        oversize: for longer documents: "split" them into pieces, where every token still predicts the next one,
            "truncate" them, or raise an "error".
        max_delay: most steps that a document waits for others; with 0 none waits.
        tokens_per_batch: tokens of a step on all ranks, instead of those of the trainer's batch sizes.
        lengths: int[documents] tokens after tokenisation, if you know them; by default read from the data set.
        cost_model: what documents cost, instead of `wlb.ModelConfig.from_hugging_face(model.config)`.
        columns: names of further columns of documents to give to the model, with numbers for each token
            (`wlb.torch.RowReader` says which are always carried).
        verify: before the first step of the optimizer, prove that the trainer's loss, gradients and evaluation are
            those of each document alone (`wlb.torch.verify`). Takes some seconds.
        **packer: further arguments of `wlb.Packer`: `method`, `release`, `delay_price`; `multiple_of_tokens` and
            `token_buckets`, which pad rows, though nothing learns from padding, and it is not counted; `sync`, where
            ranks wait for each other: by default in every "micro_batch" under FSDP, else once a "step".

    Returns:
        The same trainer.

    Raises:
        wlb.WlbError: an argument is invalid; the trainer packs by itself, groups by length, has a sampler that draws
            documents, drops the last documents, dispatches batches, or shards sequences; the data have no `input_ids`,
            or a column without a known meaning; the costs of the model are not known, or its routers would learn from
            padding. Nothing has changed then. `train` raises for the same reasons if something was changed since, for a
            checkpoint of other data, and for what `wlb.torch.verify` finds.

    Complexity:
        O(documents) if lengths need not be read from documents. Without `max_steps`, all steps of the run are planned
        here and again when training begins: some milliseconds each, and one document of each step is read.
    """
    check_named(packer)
    check_trainer(trainer)
    if isinstance(trainer, _Balanced):
        raise error("trainer", "is balanced already")
    check_integer("max_tokens", max_tokens, minimum=1)
    options = Options(
        max_tokens=max_tokens,
        max_document_tokens=max_document_tokens,
        oversize=oversize,
        max_delay=max_delay,
        tokens_per_batch=tokens_per_batch,
        lengths=lengths,
        cost_model=cost_model,
        columns=columns,
        verify=verify,
        packer=packer,
        dataset=trainer.train_dataset,
    )
    planner = Planner(options)
    planned = planner.plan(trainer)
    for what in planner.remarks(planned, trainer.args.world_size):
        warn(what)
    own = type(trainer)
    trainer.__class__ = type(own.__name__, (_Balanced, own), {"__doc__": own.__doc__, "__module__": own.__module__})
    balanced: Any = trainer
    balanced._wlb_planner, balanced._wlb_callback = planner, MicroBatchCallback()
    balanced._wlb_take(planned)
    trainer.add_callback(balanced._wlb_callback)
    return trainer


class _Balanced(Trainer):
    """Class that is put in front of a trainer's own class."""

    _wlb_planner: Planner
    _wlb_plan: KnownLengths | Streamed
    _wlb_plain: bool
    _wlb_callback: MicroBatchCallback
    _wlb_resumed: Resumed | None = None  # while it trains
    _wlb_losses: list[tuple[Tensor, Tensor]] | None = None  # losses and numbers of labels of the running evaluation
    _wlb_items: Any = None  # what the loss was divided by

    def _wlb_take(self, planned: Planned) -> None:
        self._wlb_planner.set_arguments(self, planned.arguments)
        self._wlb_plan, self._wlb_plain = planned.plan, planned.plain
        self._wlb_callback.pace, self._wlb_callback.anew = planned.pace, planned.anew

    def _inner_training_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Notes the checkpoint from which training resumes, and closes streams at the end."""
        anew = self._wlb_planner.given(self, "ignore_data_skip")
        folder = kwargs.get("resume_from_checkpoint")
        self._wlb_resumed = Resumed.of(folder, MicroBatchCallback.__name__, anew=anew)
        try:
            result = super()._inner_training_loop(*args, **kwargs)
        finally:
            self._wlb_resumed = None
        loader: Any = self.callback_handler.train_dataloader
        if isinstance(loader.steps, BalancedStream):
            loader.steps.close()
        return result

    def create_scheduler(self, num_training_steps: int, *args: Any, **kwargs: Any) -> Any:
        """Makes a schedule for steps of the first size, and sets the pace at which present steps move it."""
        pace = self._wlb_callback.pace
        assert pace is not None
        scheduler = super().create_scheduler(pace.length(num_training_steps), *args, **kwargs)
        pace.set(scheduler, 0 if self._wlb_resumed is None else self._wlb_resumed.step)
        return scheduler

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Adds the figures of the last step to the training log."""
        if "loss" in logs:
            logs.update(self._wlb_callback.line)
        if logs.get("train_runtime") and "train_samples_per_second" in logs:
            # The Trainer multiplies steps by the rows of its own batches; here a row holds many documents.
            logs["train_samples_per_second"] = round(self._wlb_callback.documents / logs["train_runtime"], 3)
        super().log(logs, *args, **kwargs)

    def get_train_dataloader(self) -> Any:
        """The micro-batches of a new plan, from the present data, collator, model and arguments.

        Raises:
            wlb.WlbError: one of them cannot be balanced, or the callback that saves states was removed.
        """
        if self._wlb_callback not in self.callback_handler.callbacks:
            message = "has no MicroBatchCallback any more, without which no checkpoint says where the data stand: "
            raise error("trainer", message + "leave it in")
        self._wlb_take(self._wlb_planner.plan(self, self._wlb_resumed))
        verify = self._wlb_planner.options.verify
        check = (lambda step: prove(self, step, plain=self._wlb_plain)) if verify else agree
        steps, dataset = self._wlb_plan.steps(), self.train_dataset
        device = self.args.device if getattr(self.args.accelerator_config, "non_blocking", False) else None
        return MicroBatchLoader(steps, plain=self._wlb_plain, before_first=check, dataset=dataset, device=device)

    def _load_callback_state(self) -> None:
        """Restores the states of callbacks; the one that saves states restores its own when training begins."""
        callbacks = self.callback_handler.callbacks
        place = callbacks.index(self._wlb_callback)
        super()._load_callback_state()
        if self._wlb_callback not in callbacks:
            self.remove_callback(MicroBatchCallback)
            callbacks.insert(place, self._wlb_callback)  # callbacks behind it find the state restored

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """Packed rows, if the evaluation allows it."""
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(dataset, str):
            dataset = self.eval_dataset[dataset]  # type: ignore[index]
        if self.compute_metrics is not None or dataset is None or _is_stream(dataset):
            own = super().get_eval_dataloader
            return self._wlb_streamed(dataset) if self._wlb_is_shared(dataset) else own(eval_dataset)
        model: Any = self.model
        limits, plain = limits_of(self, self._wlb_planner.options), not takes_keywords(model)
        rows = Rows(*documents_of(self, dataset, "evaluation"), limits.reader)
        return Evaluation(rows, limits, self.args, plain=plain)

    def get_test_dataloader(self, test_dataset: Any) -> Any:
        """The trainer's own batches; those of a stream have each row once."""
        own = super().get_test_dataloader
        return self._wlb_streamed(test_dataset) if self._wlb_is_shared(test_dataset) else own(test_dataset)

    def _wlb_is_shared(self, dataset: Any) -> bool:
        """Whether several ranks share a stream."""
        return self.args.world_size > 1 and dataset is not None and _is_stream(dataset)

    def _wlb_streamed(self, dataset: Any) -> StreamedEvaluation:
        return StreamedEvaluation(*documents_of(self, dataset, "evaluation"), self.args, self.accelerator)

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> EvalLoopOutput:
        """Makes the loss the mean over labels; the Trainer's own mean gives all batches equal weight."""
        self._wlb_losses = []
        try:
            output = super().evaluation_loop(*args, **kwargs)
        finally:
            losses, self._wlb_losses = self._wlb_losses, None
        name = f"{kwargs.get('metric_key_prefix', 'eval')}_loss"
        if output.metrics is not None and name in output.metrics:
            total = _sums(losses)
            if dist.is_initialized():
                total = total.to(meeting_place(dist.group.WORLD, self.args.device))
                dist.all_reduce(total)
            output.metrics[name] = (total[0] / total[1]).item()
        return output

    def compute_loss(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Keeps padding from routers and from counts. A row without documents teaches nothing."""
        total = inputs["input_ids"].numel()
        real = inputs.pop(REAL, None) if isinstance(inputs, dict) else None
        if hasattr(self, "_total_train_tokens") and model.training:  # TRL's, to which it adds the rows of all ranks
            self._total_train_tokens -= self._wlb_of_all_ranks(0 if real is None else total - real)
        inputs = told(model, inputs) if isinstance(inputs, dict) else inputs
        with routed(model, real if real else None), learnt_alone(self, inputs, model.training):
            result = super().compute_loss(model, inputs, *args, **kwargs)
        if real == 0:
            result = (result[0] * 0.0, *result[1:]) if isinstance(result, tuple) else result * 0.0
        return result

    def _track_num_input_tokens(self, inputs: Any) -> None:
        """Counts the tokens of documents, if the Trainer shall not count padding."""
        if self.args.include_num_input_tokens_seen != "non_padding":
            super()._track_num_input_tokens(inputs)  # type: ignore[no-untyped-call]
            return
        self.state.num_input_tokens_seen += self._wlb_of_all_ranks(inputs.get(REAL, inputs["input_ids"].numel()))

    def _wlb_of_all_ranks(self, count: int) -> int:
        """Sum of a number of each rank; it is sent on the host, so that no rank waits for its device."""
        if not dist.is_initialized():
            return int(self.accelerator.gather(torch.tensor(count, device=self.args.device)).sum())
        total = torch.tensor(count)
        dist.all_reduce(total, group=host_group(description="wlb: tokens of a micro-batch"))
        return int(total)

    def prediction_step(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Keeps the loss of a batch and the number of its labels, without rows that accelerate repeated."""
        inputs = self._wlb_once(inputs)
        shifted = inputs.get("shift_labels")
        if shifted is None and inputs.get("labels") is not None:
            shifted = inputs["labels"][..., 1:]
        self._wlb_items = None
        loss, logits, labels = super().prediction_step(model, inputs, *args, **kwargs)
        if loss is not None and shifted is not None and self._wlb_losses is not None:
            # The mean over this rank's labels; or their sum over the labels of all ranks, times the number of ranks.
            items = (shifted != IGNORE).sum() if self._wlb_items is None else self._wlb_items / self.args.world_size
            self._wlb_losses.append((loss.detach(), items))  # read when the evaluation is over
        return loss, logits, labels

    def _wlb_once(self, inputs: Any) -> Any:
        """The batch, in which rows that were repeated to fill it have no labels.

        accelerate gives all ranks equally many rows, so it repeats the first ones. It knows how many rows of the last
        batches of all ranks are new, in the order of the ranks.
        """
        state = self.accelerator.gradient_state
        labels = inputs.get("labels")
        last = self._wlb_losses is not None and state.in_dataloader and state.end_of_dataloader
        if not last or state.remainder <= 0 or labels is None:
            return inputs
        new = state.remainder - self.args.process_index * labels.shape[0]
        if new >= labels.shape[0]:
            return inputs
        repeated = torch.arange(labels.shape[0], device=labels.device) >= new
        masked = {
            name: inputs[name].masked_fill(repeated.reshape(-1, *[1] * (inputs[name].ndim - 1)), IGNORE)
            for name in ("labels", "shift_labels")
            if inputs.get(name) is not None
        }
        return {**inputs, **masked}

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> Any:
        """Labels of a step, or of a batch of an evaluation, on all ranks."""
        self._wlb_items = super()._get_num_items_in_batch([_labels_to_count(batch) for batch in batch_samples], device)
        return self._wlb_items


def _is_stream(dataset: Any) -> bool:
    return isinstance(dataset, IterableDataset) or not has_length(dataset)


def _labels_to_count(batch: dict[str, Any]) -> dict[str, Any]:
    """Labels in a form that every version of transformers counts right: older ones do not look at `shift_labels`.

    `shift_labels` also have the token that follows a piece, which is in no row.
    """
    shifted = batch.get("shift_labels")
    return batch if shifted is None else {"labels": torch.nn.functional.pad(shifted, (1, 0), value=IGNORE)}


def _sums(losses: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Sum of the losses of all labels, and the number of labels: float64 [2] on the host.

    Args:
        losses: of batches, the mean loss and the number of labels. Without labels a mean is NaN, and counts 0.
    """
    if not losses:
        return torch.zeros(2, dtype=torch.float64)
    of_batches, of_labels = zip(*losses, strict=True)
    means, counts = torch.stack(of_batches).cpu().double(), torch.stack(of_labels).cpu().double()
    return torch.stack([torch.where(counts > 0, means * counts, 0.0).sum(), counts.sum()])
