"""The steps of a run for Megatron-Core's `forward_backward_func`: some ranks read them, all ranks get them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.rerun_state_machine import RerunDataIterator
from numpy.typing import NDArray
from torch.utils.hooks import RemovableHandle

import wlb
from wlb._core import padded_tokens
from wlb._errors import error
from wlb._warned import warn
from wlb.integrations.megatron.documents import PADDING, PaddedDocuments
from wlb.integrations.megatron.refusals import check_interleaved
from wlb.integrations.megatron.rows import Batch, Ranks, Row, batch_of, padding_of
from wlb.integrations.megatron.sharing import Sharing
from wlb.reading.documents import WEIGHTS
from wlb.reading.state import field as state_field
from wlb.torch.data import DynamicCpLoader, DynamicCpStep, PackedBatch, Step, StepLoader
from wlb.torch.data.peers import Peers, failure_text
from wlb.torch.metrics import StepMetrics, writes_to

AnyStep = Step[PackedBatch] | DynamicCpStep[PackedBatch]

# Settings of the packer of a Dynamic-CP plan that depend on the number of reading ranks and their tokens.
_OF_READERS: Final = ("max_tokens", "num_micro_batches", "ranks", "tokens_per_batch", "shape")


@dataclass(frozen=True, eq=False)
class MegatronStep:
    """One step of a rank: everything between two updates of the optimizer.

    Attributes:
        number: steps before this one, since the run began.
        epoch: pass over the documents to which it belongs.
        batches: its micro-batches, equally many on all ranks; with a Dynamic-CP plan their number differs between
            steps.
        padding_tokens: tokens of padding that kernels demand. Only ranks that read count them, each its own, so their
            sum is that of the step.
        arguments: for `forward_backward_func(forward_step_func=..., model=..., **step.arguments)`.
        figures: figures of its plan, by the names of `wlb.torch.StepMetrics`; on every rank, because Megatron's writers
            are on the last one.
        source: on a rank that reads, the step of its loader, with its plan, its pieces for a `wt.Ledger`, and its
            documents; None on others.
    """

    number: int
    epoch: int
    batches: list[Batch]
    padding_tokens: int
    arguments: dict[str, Any]
    figures: dict[str, float]
    source: AnyStep | None

    def log(self, *writers: Any) -> None:
        """Writes its figures. Steps are numbered from 1, as Megatron counts iterations.

        Args:
            *writers: what `wlb.torch.StepMetrics` takes, such as `get_tensorboard_writer()` and `get_wandb_writer()`.
                These return None except on the last rank, and None is ignored.

        Raises:
            wlb.WlbError: a writer is of an unknown kind.
        """
        for index, writer in enumerate(writers):
            if writer is not None:
                writes_to(writer, index)(self.figures, self.number + 1)

    @property
    def state(self) -> dict[str, Any] | None:
        """State to save after this step is trained; `DataIterator.load_state_dict` resumes after it.

        Plain JSON values, equal on all ranks that read (the first tensor-parallel rank of the first stage, so also rank
        0 of the world), and None on the others. May be loaded on another number of data-parallel ranks or stages, but
        not with kernels that need another padding, because documents then have other lengths.
        """
        return None if self.source is None else self.source.state


@dataclass(frozen=True)
class Header:
    """The facts of a step that all ranks with the same documents need.

    Attributes:
        failure: what went wrong while it was read; None: nothing.
        ended: whether there is no further step.
        number: number of the step.
        epoch: its epoch.
        rows: its micro-batches.
        figures: figures of its plan.
        weighted: whether its labels have weights.
    """

    failure: str | None = None
    ended: bool = False
    number: int = 0
    epoch: int = 0
    rows: tuple[Row, ...] = ()
    figures: dict[str, float] = field(default_factory=dict)
    weighted: bool = False


class DataIterator:
    """The steps of a run, on every rank; made by `data_iterator`.

    For every step all ranks communicate. Only ranks that read have documents, plans and a state; the others receive
    what their part of the model needs. If a rank fails to read, all ranks raise.
    """

    def __init__(
        self,
        *,
        config: Any,
        sharing: Sharing[Header],
        ranks: Ranks,
        peers: Peers | None,
        steps: StepLoader[Any] | None,
        dynamic: DynamicCpLoader[PackedBatch] | None,
        documents: PaddedDocuments | None,
        row_multiple: int,
        pad_token: int,
        padded: bool,
        hooks: Sequence[RemovableHandle] = (),
    ) -> None:
        self._hooks = hooks
        self._config, self._sharing, self._ranks, self._peers = config, sharing, ranks, peers
        self._steps, self._dynamic, self._documents = steps, dynamic, documents
        self._row_multiple, self._pad_token = row_multiple, pad_token
        self._padded = padded
        self._iterator: Iterator[AnyStep] | None = None
        self._metrics = StepMetrics(steps if dynamic is None else dynamic)

    def __iter__(self) -> DataIterator:
        """Itself: a new loop continues where the last one stopped."""
        return self

    def __next__(self) -> MegatronStep:
        """The next step.

        Raises:
            wlb.WlbError: on all ranks, if a rank could not read or ranks have different plans.
        """
        if self._config.finalize_model_grads_func is None:
            message = "is not set: gradients would not be added up and divided by the labels of a step; set it to "
            message += "megatron.core.distributed.finalize_model_grads"
            raise error("finalize_model_grads_func", message)
        if not self._sharing.reads:
            header = self._sharing.header(None)
            if header.failure:
                raise error("dataset", f"could not be read for this rank: {header.failure}")
            return self._given(header, None)
        step: AnyStep | None = None
        failure: BaseException | None = None
        header = Header(ended=True)
        try:
            step = self._read()
            if step is not None:
                header = self._header(step)
                check_interleaved(len(header.rows), self._config)
        except BaseException as cause:  # of any kind: the other ranks wait for an answer
            failure, header = cause, Header(failure=failure_text(cause))
        self._sharing.header(header)
        if failure is not None:
            self._iterator = None  # it has failed: another call must not see that as the end of the data
            raise failure
        return self._given(header, step)

    @property
    def reads(self) -> bool:
        """Whether this rank reads documents, and has plans and a state."""
        return self._steps is not None

    def metrics(self) -> wlb.PackerMetrics:
        """Balance and delay so far, on ranks that read.

        Raises:
            wlb.WlbError: this rank does not read.
        """
        return self._reading().metrics()

    def state_dict(self) -> dict[str, Any] | None:
        """State after the last step that was given; None on ranks that do not read."""
        if self._steps is None:
            return None
        return self._steps.state_dict() if self._dynamic is None else self._dynamic.state_dict()

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Continues after the step that had this state. Every rank calls it; ranks that do not read ignore it.

        Raises:
            wlb.WlbError: this rank reads, and the state is not of these documents and settings.
        """
        if self._steps is None:
            return
        if state is None:
            raise error("state", "is None: it was saved on a rank that does not read; save that of rank 0")
        if self._dynamic is None:
            self._steps.load_state_dict(state)
        else:
            same_packer = self._packs_like(state_field(state, "batches", dict))
            self._dynamic.load_state_dict(state, allow_config_change=same_packer)
        self._iterator = None  # a step that was begun before the state was loaded is dropped

    def _packs_like(self, state: Mapping[str, Any]) -> bool:
        """Whether a state is of this packer. Sizes of micro-batches may differ: they only decide who reads."""

        def settings(steps: Mapping[str, Any]) -> dict[str, Any]:
            config = state_field(state_field(steps, "packer", dict), "config", dict)
            config = config | state_field(config, "shape", dict)
            return {name: value for name, value in config.items() if name not in _OF_READERS}

        return settings(state) == settings(self._reading().state_dict())

    def close(self) -> None:
        """Ends reading ahead. Call it before the process groups are destroyed. The state stays."""
        self._iterator = None
        for hook in self._hooks:
            hook.remove()
        for opened in (self._dynamic, self._peers):
            if opened is not None:
                opened.close()

    def _reading(self) -> StepLoader[Any]:
        if self._steps is None:
            raise error("rank", f"{dist.get_rank()} does not read documents: ask rank 0")
        return self._steps

    def _read(self) -> AnyStep | None:
        """The next step that has a label, once all ranks that read have theirs; None after the last epoch.

        In a step without labels, Megatron-Core would still decay weights and apply momentum.
        """
        while True:
            step, labels = self._agreed()
            if step is None or labels:
                return step
            message = f"step {step.number} has no label that counts on any rank: it is skipped"
            warn(message)

    def _agreed(self) -> tuple[AnyStep | None, int]:
        """The next step, and its labels on all ranks. Ranks that read have checked that their plans are equal."""
        if self._iterator is None:
            self._iterator = self._run()
        if self._peers is None:  # the ranks of a Dynamic-CP plan agree on every step anyway
            step = next(self._iterator, None)
            return step, step.num_valid_tokens if isinstance(step, DynamicCpStep) else 0
        step = None
        failure: BaseException | None = None
        try:
            step = next(self._iterator, None)
        except BaseException as cause:
            failure = cause
        digest = None if step is None else (step.plan.digest(), getattr(step, "content", None))
        labels = 0 if step is None else sum(batch.num_valid_tokens for batch in step.micro_batches)
        parts = self._peers.gather({"failure": failure_text(failure), "agreement": digest, "labels": labels})
        self._peers.agree(parts, failure, argument="dataset", what="plan or content of the data set")
        return step, sum(part["labels"] for part in parts)

    def _run(self) -> Iterator[AnyStep]:
        """The rest of this epoch, and all further ones."""
        steps = self._reading()
        while not steps.ended:
            yield from (steps if self._dynamic is None else self._dynamic)

    def _header(self, step: AnyStep) -> Header:
        rows = []
        for batch in step.micro_batches:
            batch.check_columns((WEIGHTS, PADDING), "Megatron-Core's batches have no place for")
            size = _own(batch)
            filler = padded_tokens(max(size, 1), multiple_of_tokens=self._row_multiple) - size
            lengths = tuple(batch.shard.lengths[: batch.document_ids.numel()].tolist())
            padded = batch.columns[PADDING][:size].numpy() if PADDING in batch.columns else np.zeros(0)
            bits = np.packbits(padded.astype(bool)).tobytes() if padded.any() else b""
            rows.append(Row(lengths, batch.shard.cp_size, batch.cp_rank, filler, bits))
        return Header(
            number=step.number,
            epoch=step.epoch,
            rows=tuple(rows),
            figures=self._metrics.end_step(step),
            weighted=any(WEIGHTS in batch.columns for batch in step.micro_batches),
        )

    def _given(self, header: Header, step: AnyStep | None) -> MegatronStep:
        """The step on this rank, with the tokens that it receives."""
        if header.ended:
            raise StopIteration
        device = self._sharing.device
        mine = None
        if step is not None:
            tokens, labels = (
                torch.cat([getattr(batch, name)[: _own(batch)] for batch in step.micro_batches])
                for name in ("tokens", "labels")
            )
            mine = tokens.to(device), labels.to(device)
        sizes = [row.shard.rank(row.cp_rank).num_tokens - row.filler for row in header.rows]
        columns = [
            [None] * len(sizes) if values is None else torch.split(values, sizes)
            for values in self._sharing.values(mine, sum(sizes))
        ]
        weights: Any = [None] * len(sizes)
        if header.weighted:
            given = None
            if step is not None:
                ones = [torch.ones(_own(batch)) for batch in step.micro_batches]
                found = [
                    batch.columns.get(WEIGHTS, one)[: one.numel()]
                    for batch, one in zip(step.micro_batches, ones, strict=True)
                ]
                given = torch.cat(found).float().to(device)
            sent = self._sharing.weights(given, sum(sizes))
            weights = weights if sent is None else torch.split(sent, sizes)
        batches = [
            batch_of(
                row,
                self._ranks,
                tokens,
                labels,
                weight,
                self._hidden(row, size),
                pad=self._pad_token,
                device=device,
            )
            for row, size, tokens, labels, weight in zip(header.rows, sizes, *columns, weights, strict=True)
        ]
        return MegatronStep(
            number=header.number,
            epoch=header.epoch,
            batches=batches,
            padding_tokens=self._padding(header, step),
            arguments=self._arguments(batches),
            figures=header.figures,
            source=step,
        )

    def _hidden(self, row: Row, num_tokens: int) -> NDArray[np.bool_] | None:
        """Mask of padding for the routers of this stage; None: no padding, or no router."""
        if not getattr(self._config, "num_moe_experts", None):
            return None
        mask = padding_of(row, num_tokens)
        if mask is None and self._padded:
            # With several ranks, a mask changes the weight of a router's loss in Megatron-Core, so every row gets one.
            mask = np.zeros(num_tokens + row.filler, bool)
        if mask is None or self._sharing.first or not self._config.sequence_parallel:
            return mask  # the model of the first stage splits it among tensor-parallel ranks
        tp = self._sharing.tp
        return np.split(mask, tp.size())[tp.rank()]

    def _padding(self, header: Header, step: AnyStep | None) -> int:
        if step is None or not self._sharing.leads:
            return 0
        padding = sum(row.filler for row in header.rows)
        first = self._ranks.dynamic or all(row.cp_rank == 0 for row in header.rows)
        if self._documents is not None and first:
            pieces = step.pieces
            assert pieces is not None
            ids = pieces.ids % len(self._documents)  # a packer's ids go on over epochs
            padding += self._documents.padding(ids, pieces.starts, pieces.lengths)
        return padding

    def _arguments(self, batches: list[Batch]) -> dict[str, Any]:
        chunks = self._config.virtual_pipeline_model_parallel_size
        iterators = [RerunDataIterator(iter(batches)) for _ in range(chunks or 1)]
        return {
            "data_iterator": iterators if chunks else iterators[0],
            "num_microbatches": len(batches),
            "seq_length": max(batch.position_ids.shape[1] for batch in batches),
            "micro_batch_size": 1,
        }


def _own(batch: PackedBatch) -> int:
    """Tokens of a rank's part before its padding."""
    return batch.tokens.numel() - batch.num_padding // batch.cp_size
