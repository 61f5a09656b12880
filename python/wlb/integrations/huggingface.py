"""Micro-batches for Hugging Face models and their `Trainer`: documents side by side in one row, without padding.

:class:`PackedCollator` works with any sampler. `Trainer` trains on wlb's plan with a `BalancedBatchSampler`::

    class PackedTrainer(Trainer):
        def get_train_dataloader(self):
            documents = DataLoader(self.train_dataset, batch_sampler=sampler, collate_fn=self.data_collator)
            return MicroBatchLoader(StepLoader(documents))

    sampler = BalancedBatchSampler(lengths, packer=packer, dp_rank=rank, dp_size=data_parallel_ranks, num_epochs=3)
    arguments = TrainingArguments(
        max_steps=sampler.total_steps(),
        gradient_accumulation_steps=packer.num_micro_batches // data_parallel_ranks,
        ignore_data_skip=True,
        ...,
    )
    trainer = PackedTrainer(
        model, arguments, train_dataset=documents, data_collator=PackedCollator(), callbacks=[MicroBatchCallback()]
    )
    trainer.train(resume_from_checkpoint=...)

`max_steps` is needed: how many steps the packer makes of an epoch is known only once they are planned. The Trainer
takes it for the length of an epoch, so its own count of epochs means nothing. It goes on, epoch after epoch, until
then; steps without a label, which `total_steps` counts, are passed over.
`gradient_accumulation_steps` is the number of micro-batches of a rank in a global batch; then the Trainer divides the
loss by the tokens of the whole global batch, over all ranks (`average_tokens_across_devices=True`, its default).

The Trainer resumes by skipping as many micro-batches as it has trained, within one epoch, and knows of no queues.
:class:`MicroBatchCallback` puts the state of the last step that was trained into the checkpoint instead, whatever has
been fetched since; for that to count, `ignore_data_skip=True`. A resumed run trains the documents of one that was not
interrupted, on another number of ranks or workers too. The Trainer asks one rank alone for the state, which needs no
communication. Documents without an index come from a `BalancedStream` in the place of the `StepLoader`.

The loader is not given to `accelerator.prepare`: the sampler yields this rank's part alone, and `accelerate` would
share it out a second time.

What keeps documents apart is the model's attention, by `attn_implementation`:

- `"sdpa"`, `"eager"`, `"flex_attention"` find the documents in `position_ids`, but only without an `attention_mask` and
  without a cache. A model called with `use_cache=True`, the default of most configurations, silently attends across
  documents; so batches say `use_cache=False`, and have no mask. `sdpa` and `eager` make a mask of tokens x tokens.
- `"flash_attention_2"` and `"flash_attention_3"` (on a GPU only) take `cu_seq_lens_q/k` and `max_length_q/k`.

`sdpa` and `eager` are tested on CPU with gradients, `flex_attention` forward and uncompiled (no backward on CPU);
flash attention needs a GPU and is not.
Layers that are no attention (convolutions, state-space layers) mix documents unless the model says otherwise.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState

from wlb._errors import error
from wlb.torch.data import BalancedStream, StepLoader
from wlb.torch.data.state import Snapshot, field

__all__ = ["MicroBatchCallback", "MicroBatchLoader", "PackedCollator"]

IGNORE = -100  # the label that Hugging Face losses skip


@dataclass(frozen=True)
class PackedCollator:
    """Lays the documents of a micro-batch side by side in one row.

    An empty micro-batch, legal in a plan, becomes one token that no loss counts: its rank stays in step.

    Attributes:
        flash_attention_kwargs: also give what flash attention wants; off for models that take no other arguments.
    """

    flash_attention_kwargs: bool = True

    def __call__(self, features: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Makes a batch of the documents, in their order.

        Args:
            features: of each document `input_ids` (int[d], a list, an array or a tensor), and if not all tokens count
                `labels` (int[d], not shifted, -100 where none).

        Returns:
            `input_ids`, `position_ids` (from 0 in every document) and `labels`, int64 `[1, tokens]`; `use_cache` False.
            Labels are not shifted, since the models do it, and the first of each document is -100: no document
            predicts the next. With `flash_attention_kwargs`: `cu_seq_lens_q`, `cu_seq_lens_k` (int32
            `[documents + 1]`), `max_length_q`, `max_length_k` (int).

        Raises:
            wlb.WlbError: a document has no tokens, or not as many labels as tokens.
        """
        documents, labels = [], []
        for index, feature in enumerate(features):
            document = torch.as_tensor(feature["input_ids"], dtype=torch.int64)
            if document.ndim != 1 or not len(document):
                raise error("features", "must have input_ids of shape [tokens], at least one", index=index)
            given = feature.get("labels")  # None in the rows of a joined data set that has labels in others
            label = document if given is None else torch.as_tensor(given, dtype=torch.int64)
            if label.shape != document.shape:
                message = f"has {len(document)} input_ids and labels of shape {list(label.shape)}"
                raise error("features", message, index=index, value=list(label.shape))
            documents.append(document)
            labels.append(torch.cat((label.new_full((1,), IGNORE), label[1:])))
        if not documents:
            documents, labels = [torch.zeros(1, dtype=torch.int64)], [torch.tensor([IGNORE])]
        lengths = torch.tensor([len(document) for document in documents])
        batch = {
            "input_ids": torch.cat(documents).unsqueeze(0),
            "position_ids": torch.cat([torch.arange(length) for length in lengths]).unsqueeze(0),
            "labels": torch.cat(labels).unsqueeze(0),
            "use_cache": False,
        }
        if self.flash_attention_kwargs:
            cu_seq_lens = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
            longest = int(lengths.max())
            batch |= {"cu_seq_lens_q": cu_seq_lens, "cu_seq_lens_k": cu_seq_lens}
            batch |= {"max_length_q": longest, "max_length_k": longest}
        return batch


class MicroBatchLoader:
    """Gives the Trainer one micro-batch at a time of the steps that a `StepLoader` or a `BalancedStream` gives.

    No `DataLoader`, and without a length or `set_epoch`: the sampler goes from epoch to epoch by itself, and goes on
    where it stood after a resume, which the Trainer's epochs know nothing of.

    Attributes:
        steps: Where the micro-batches come from.
        untrained: States of the steps that were given and of which it is not known that they were trained; None: nobody
            asks.
    """

    def __init__(self, steps: StepLoader[Any] | BalancedStream[Any]) -> None:
        self.steps = steps
        self.untrained: deque[Snapshot] | None = None

    def __iter__(self) -> Iterator[Any]:
        """The micro-batches of the rest of the epoch; of the next one if it has none: the Trainer would stop there.

        None once a stream has ended.

        A step in which all documents wait, or no token has another to predict, is passed over: the Trainer would divide
        by its labels, of which there are none.

        Raises:
            wlb.WlbError: In two epochs all documents that were not waiting had one token.
        """
        given, barren, empty = False, 0, 0
        while not given and empty < 2:  # an epoch may have no further step, but not the next one too
            if barren > 1:
                raise error("steps", "have documents of one token only: there is nothing to predict")
            trained, any_step = False, False
            for step in self.steps:
                any_step = True
                trained |= any(map(len, step.packing))
                if any((micro_batch.lengths > 1).any() for micro_batch in step.packing):
                    given = True
                    if self.untrained is not None and step.snapshot is not None:
                        self.untrained.append(step.snapshot)
                    yield from step.micro_batches
            barren, empty = barren + trained, 0 if any_step else empty + 1


class MicroBatchCallback(TrainerCallback, ExportableState):
    """Keeps in the Trainer's checkpoints the state of the last step trained, and goes on after it.

    A step counts as trained once the optimizer has taken it, however many micro-batches the Trainer, or what stands
    between it and the :class:`MicroBatchLoader`, has fetched since.
    """

    def __init__(self) -> None:
        self._untrained: deque[Snapshot] = deque()
        self._trained: Snapshot | None = None  # after the last step since training began
        self._began: dict[str, Any] | None = None  # where it did

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Restores the loader if training resumes.

        Raises:
            wlb.WlbError: The Trainer has another loader, or arguments with which it would train other documents, or
                the checkpoint was saved without this callback or is of other documents.
        """
        loader = kwargs["train_dataloader"]
        if not isinstance(loader, MicroBatchLoader):
            found = type(loader).__name__
            raise error("train_dataloader", f"is a {found}, not a MicroBatchLoader", value=found)
        if not args.ignore_data_skip:
            message = "= False: must be True, or the Trainer skips micro-batches after a resume"
            raise error("ignore_data_skip", message, value=False)
        own, planned = args.gradient_accumulation_steps, loader.steps.num_micro_batches_per_rank
        if own != planned:
            message = f"= {own}: a rank has {planned} micro-batches in every global batch"
            raise error("gradient_accumulation_steps", message, value=own)
        if state.global_step:
            callbacks: Any = state.stateful_callbacks  # in a checkpoint a dict
            saved = field(callbacks, type(self).__name__, dict)
            loader.steps.load_state_dict(field(saved, "steps", dict))
        self._untrained, self._trained, self._began = deque(), None, loader.steps.state_dict()
        loader.untrained = self._untrained

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """The optimizer has taken a step: the first of those that were given and not yet trained."""
        self._trained = self._untrained.popleft()

    def state(self) -> dict[str, Any]:
        """What the Trainer writes into `trainer_state.json`: plain JSON values, the same on every rank.

        Read by one rank alone, without communication.
        """
        steps = self._began if self._trained is None else self._trained.state
        return {"args": {}, "attributes": {}, "steps": steps}
