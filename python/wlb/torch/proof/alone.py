"""Runs documents one at a time on one rank: the reference that training is compared with."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

import wlb
from wlb._errors import error
from wlb.reading.documents import WEIGHTS
from wlb.torch.data.batch import PackedBatch
from wlb.torch.gradients import as_written, sum_gradients, unchanged, unwrapped
from wlb.torch.lazy import dtensor, fsdp, local
from wlb.torch.loss import token_normalized_loss
from wlb.torch.proof.ranks import Ranks
from wlb.torch.proof.short import Document, Row, teaching_nothing
from wlb.torch.tied import of_pipeline
from wlb.torch.training import hf_logits, logits_of, takes_input_ids, takes_keywords, without_weights

Alone: TypeAlias = Callable[[nn.Module, PackedBatch], Tensor]


@dataclass
class Outcome:
    """What a step gave.

    Attributes:
        loss: the mean loss, or None if the loop returns none.
        gradients: one for each parameter, 0 where the model has none.
    """

    loss: float | None
    gradients: list[Tensor]


class Model:
    """The model that is trained, or the pipeline stages of this rank.

    Args:
        given: the outermost wrapper, or this rank's stages.
        ranks: all ranks that take part.
        alone: gives the logits of a batch, or the sum of its losses.
    """

    def __init__(self, given: nn.Module | Sequence[Any], ranks: Ranks, alone: Alone) -> None:
        self._ranks, self._alone = ranks, alone
        self._stages: dict[int, nn.Module] = {}
        if isinstance(given, nn.Module):
            self.whole = given
            self.parts = [given]
        else:
            self._stages = {stage.stage_index: stage.submod for stage in given}
            self.parts = list(self._stages.values())
            self.whole = nn.ModuleList(self.parts)
            self._last = given[0].num_stages - 1
            self._pipeline = given[0].group
            every = ranks.gathered_of_parts(sorted(self._stages))
            self._owners = {index: rank for rank, indices in enumerate(every) for index in indices}
        named = dict(self.whole.named_parameters())
        self.names, self.parameters = list(named), list(named.values())
        wrappers = fsdp()
        self.sharded = any(isinstance(module, wrappers) for module in self.whole.modules()) or any(
            isinstance(parameter, dtensor()) for parameter in self.parameters
        )

    def taken(self) -> list[Tensor | None]:
        """Takes this rank's gradients out of the model and returns them."""
        found = [None if p.grad is None else local(p.grad).detach().clone() for p in self.parameters]
        self.whole.zero_grad(set_to_none=True)
        return found

    def alone(self, rows: Sequence[Row]) -> Outcome:
        """Mean loss and gradient of all documents, each alone on one rank. Every rank gets them, for its own shards.

        A model that fits on one rank runs without its wrapper, so that the wrapper's averages and communication are not
        trusted. A wrapper that shards parameters is made to add gradients up.
        """
        documents = [document for row in rows for document in row.documents if document.num_labels]
        labels = sum(document.num_labels for document in documents)
        # Ranks meet in every run where parameters or experts are shared out.
        documents += [teaching_nothing(documents[0])] * (-len(documents) % self._ranks.size)
        with self._summed():
            mine = documents[self._ranks.rank :: self._ranks.size]
            total = sum(self._run(each, 1 / labels if each.share is None else each.share) for each in mine)
        found = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters]
        if not self.sharded:
            self._ranks.add_up(found)
        if self._stages:
            for parameter, gradient in zip(self.parameters, found, strict=True):
                parameter.grad = gradient
            for tied in of_pipeline(self._pipeline):
                tied.all_reduce_gradients()
        self.whole.zero_grad(set_to_none=True)
        return Outcome(self._ranks.sums(total)[0], [local(gradient) for gradient in found])

    @contextmanager
    def _summed(self) -> Iterator[None]:
        if self.sharded:
            with unchanged(self.whole):
                sum_gradients(self.whole, group=self._ranks.share)
                yield
        else:
            with as_written(self.whole):
                yield

    def _run(self, document: Document, weight: float) -> float:
        """Runs forward and backward, through all stages. Returns the loss."""
        batch = _batch(document).to(self._ranks.device)
        if not self._stages:
            part = self.whole if self.sharded else unwrapped(self.whole)
            whole = self._loss(part, batch) * weight
            whole.backward()  # type: ignore[no-untyped-call]
            return whole.item()
        kept: dict[int, tuple[Tensor, Tensor]] = {}
        given: Any = batch.tokens
        for index in range(self._last + 1):
            if index in self._stages:
                entering = given if index == 0 else given.detach().requires_grad_()
                call = self._loss if index == self._last else self._called
                kept[index] = entering, call(self._stages[index], replace(batch, tokens=entering))
            leaving = kept[index][1].detach() if index in kept else None
            given = self._ranks.handed(leaving, self._owners[index])
        loss = float(given) * weight
        gradient: Any = torch.tensor(weight, device=self._ranks.device)
        for index in range(self._last, -1, -1):
            entering, left = kept.get(index, (None, None))
            if left is not None:
                torch.autograd.backward(left, gradient.to(left.dtype))
            gradient = None if entering is None or index == 0 else entering.grad
            gradient = self._ranks.handed(gradient, self._owners[index])
        return loss

    def _called(self, part: nn.Module, batch: PackedBatch) -> Tensor:
        try:
            return self._alone(part, batch)
        except Exception as cause:
            message = (
                f"runs no document of {batch.labels.numel()} tokens alone on one rank ({cause}): give verify `alone`, "
                "which calls your model with a batch of one document and cp_size = 1, without a context-parallel group"
            )
            raise error("model", message) from cause

    def _loss(self, part: nn.Module, batch: PackedBatch) -> Tensor:
        """Sum of the losses of all labels."""
        found = self._called(part, batch)
        if found.ndim == 0:
            return found
        if found.shape[:1] != batch.labels.shape or found.ndim != 2:
            message = f"gives {list(found.shape)} for {batch.labels.numel()} tokens: logits [tokens, vocabulary], or "
            raise error("alone", message + "the sum of their losses, a scalar", value=list(found.shape))
        return token_normalized_loss(found, batch.labels, num_valid_tokens=1, weights=batch.columns.get(WEIGHTS))


def logits_alone(model: nn.Module, batch: PackedBatch) -> Tensor:
    """Logits of one row. A model that takes `input_ids` gets plain tokens, with nothing that wlb made."""
    if not takes_input_ids(model):
        return logits_of(model, batch)[0]
    given: dict[str, Any] = {"input_ids": batch.tokens[None], "use_cache": False}
    if not torch.equal(batch.position_ids, torch.arange(batch.tokens.numel(), device=batch.tokens.device)):
        # With a mask, the model does not look for documents in position ids.
        positions = without_weights(batch).as_hf(plain=True)["position_ids"]
        others = {"position_ids": positions, "attention_mask": torch.ones_like(batch.tokens)[None]}
        known = inspect.signature(unwrapped(model).forward).parameters
        given |= {name: value for name, value in others.items() if name in known or takes_keywords(model)}
    logits: Tensor = hf_logits(model(**given))[0]
    return logits


def _batch(document: Document) -> PackedBatch:
    batch = PackedBatch.of(
        document.tokens,
        document.labels,
        document_ids=[0],
        shard=wlb.shard(np.array([len(document)], np.int64), cp_size=1),
        cp_rank=0,
        num_valid_tokens=document.num_labels,
        columns=document.columns,
    )
    return replace(batch, position_ids=batch.position_ids + document.moved)
