"""Micro-batches for Hugging Face models and their `Trainer`: documents side by side in one row, without padding.

:class:`PackedCollator` works with any sampler; with a batch sampler whose elements are the documents of one micro-batch
of this data-parallel rank, `Trainer` trains on wlb's plan::

    class PackedTrainer(Trainer):
        def get_train_dataloader(self):
            return MicroBatchLoader(self.train_dataset, batch_sampler=batch_sampler, collate_fn=self.data_collator)

    PackedTrainer(model, TrainingArguments(gradient_accumulation_steps=micro_batches_per_rank, ...),
                  train_dataset=documents, data_collator=PackedCollator())

The loader is not given to `accelerator.prepare`: the sampler yields this rank's part alone, and `accelerate` would
share it out a second time. `gradient_accumulation_steps` is the number of micro-batches of a rank in a global batch;
then the Trainer divides the loss by the tokens of the whole global batch, over all ranks
(`average_tokens_across_devices=True`, its default).

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

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader

from wlb._errors import error

__all__ = ["MicroBatchLoader", "PackedCollator"]

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
            label = torch.as_tensor(feature.get("labels", document), dtype=torch.int64)
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


class MicroBatchLoader(DataLoader[Any]):
    """A `DataLoader` that tells its batch sampler of new epochs: the Trainer calls `set_epoch` on the loader."""

    def set_epoch(self, epoch: int) -> None:
        """Calls `batch_sampler.set_epoch(epoch)`."""
        sampler: Any = self.batch_sampler
        sampler.set_epoch(epoch)
