"""torchtitan's data loader that gives the micro-batches of a plan, one for every forward pass."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Annotated, Any, Final, Literal

import torch
import tyro
from torch import Tensor
from torch.nn.functional import pad
from torch.utils.data import DataLoader
from torchtitan.components.dataloader import BaseDataLoader

import wlb
from wlb._core import MAX_DELAY, most_tokens, padded_tokens
from wlb._errors import check_integer, error
from wlb.integrations.torchtitan.documents import known, streams
from wlb.integrations.with_labels import steps_with_labels
from wlb.reading.sizes import step_tokens
from wlb.reading.state import field as field_of
from wlb.torch.data import IGNORE, BalancedStream, PackedBatch, Step, StepLoader, collate
from wlb.torch.data.loading import FOREVER, SHAPE, Loading
from wlb.torch.metrics import StepMetrics
from wlb.torch.subgroup import Subgroup

_STATE: Final = "wlb"  # the state is one text under this key, because checkpoints ask for keys before they load
_FILLER: Final = 128  # padding is cut into documents of one attention block, which take almost no time
_PARTS: Final = {
    "documents",
    "streams",
    "weights",
    "lengths",
    "cost_model",
    "group",
}  # objects, which a command line cannot express


class WlbDataLoader(BaseDataLoader):
    """Gives torchtitan's Trainer micro-batches of equal work: several documents in one row.

    A batch is `{"input": int64 [1, tokens], "positions": int64 [1, tokens]}` and its labels, int64 [1, tokens]: the
    next token of the document, -100 where there is none. Positions begin at 0 in every document and in every piece of a
    cut document, from which torchtitan makes its varlen and FlexAttention masks. An empty micro-batch, which a plan may
    have, becomes the shortest row that is allowed. Padding has no labels.

    The state in torchtitan's checkpoints is equal on all ranks, and may be loaded on another number of ranks.

    Args:
        config: what to pack, and how.
        dp_world_size: data-parallel ranks.
        dp_rank: this rank among them.
        tokenizer: for data sets of text.
        seq_len: the model's context; the configuration may say less.
        local_batch_size: not used: `max_tokens` limits a micro-batch.
        snapshot_every_n_steps: not used: a state is made when it is asked for.

    Attributes:
        config: the configuration, with the lengths that were read.
        steps: source of micro-batches.
        step: the step of the last micro-batch.
        before_first: called with the first step before any of it is given.
        given: number of steps that were given, with those before a resume.
        figures: figures of the step's plan, by the names of `wlb.torch.StepMetrics`.

    Raises:
        wlb.WlbError: an argument is invalid; the configuration has no documents, or several kinds of them.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        """Configuration: the documents and how they are packed."""

        max_tokens: int
        """Most tokens of a micro-batch, limited by the memory of a rank."""

        max_document_tokens: int | None = None
        """Most tokens of a document that is not cut; by default training.seq_len, at most max_tokens."""

        oversize: Literal["split", "truncate", "error"] = "split"
        """What to do with longer documents. In split ones every token still predicts the next one."""

        max_delay: int = MAX_DELAY
        """Most steps that a document waits for others; with 0 none waits."""

        sync: Literal["step", "micro_batch"] | None = None
        """Where data-parallel ranks wait for each other: once a step, or in every micro-batch. By default as FSDP and
        the pipeline demand."""

        tokens_per_batch: int | None = None
        """Tokens of a step on all ranks; by default four fifths of what its micro-batches hold."""

        micro_batches: int = 1
        """Micro-batches of a rank in a step: gradient accumulation times those of the pipeline. Set by `balance`."""

        multiple_of_tokens: int = 1
        """Micro-batches are padded to a multiple of this, and max_tokens counts the padding. `balance` makes that a
        multiple on each context-parallel rank, and a multiple of what parallelism needs."""

        token_buckets: list[int] = field(default_factory=list)
        """The allowed lengths of micro-batches, ascending. Micro-batches are padded to the next one, so compiled models
        see only these shapes. Lengths above max_tokens are not used."""

        max_documents: int | None = None
        """Most documents of a micro-batch, not counting padding."""

        shuffle: bool = True
        """Whether each epoch has another order of documents. Streams keep their order."""

        seed: int = 0
        """Seed of these orders."""

        num_epochs: int | None = None
        """Number of epochs, after which waiting documents are trained and the data ends. None: the data begins again as
        often as needed. Streams are read once."""

        num_workers: int = 0
        """Number of processes that read documents."""

        prefetch_factor: int | None = None
        """Number of micro-batches that each of them reads ahead."""

        documents: Annotated[Any, tyro.conf.Suppress] = None
        """`documents[i]`: a mapping with `input_ids` and maybe `labels`, or tokens."""

        streams: Annotated[Any, tyro.conf.Suppress] = None
        """Instead: iterables of documents, as `wlb.torch.BalancedStream` takes them, or a Hugging Face stream."""

        weights: Annotated[Any, tyro.conf.Suppress] = None
        """float [streams], the share of each stream in a step, as in `wlb.torch.BalancedStream`."""

        lengths: Annotated[Any, tyro.conf.Suppress] = None
        """int [documents] tokens of each, if they are known; otherwise they are read once."""

        cost_model: Annotated[Any, tyro.conf.Suppress] = None
        """What documents cost. Set by `balance` from the model."""

        group: Annotated[Any, tyro.conf.Suppress] = None
        """Data-parallel process group, for streams; by default all ranks. Set by `balance`."""

        verify: bool = True
        """Whether to prove before the first step that packing does not change what is learnt."""

        give_lengths: Annotated[bool, tyro.conf.Suppress] = False
        """Whether batches also have "lengths", int [documents] with padding, needed for context parallelism."""

        give_filler: Annotated[bool, tyro.conf.Suppress] = False
        """Whether batches also have "filler", the number of tokens of padding at the end of the row."""

        def most_tokens(self) -> int:
            """The longest micro-batch: `max_tokens`, or the largest allowed length below it.

            Raises:
                wlb.WlbError: the allowed lengths are invalid, or are all above `max_tokens`.
            """
            multiple, buckets = self.multiple_of_tokens, self.token_buckets
            return most_tokens(self.max_tokens, multiple_of_tokens=multiple, token_buckets=buckets)

        def to_dict(self) -> dict[str, Any]:
            """All fields except the data, for a log."""
            values = {part.name: getattr(self, part.name) for part in fields(self) if part.name not in _PARTS}
            return values | {"cost_model": repr(self.cost_model)}

    def __init__(
        self,
        config: Config,
        *,
        dp_world_size: int,
        dp_rank: int,
        tokenizer: Any = None,
        seq_len: int,
        local_batch_size: int = 1,
        snapshot_every_n_steps: int | None = 1,
    ) -> None:
        for name in ("max_tokens", "micro_batches"):
            check_integer(name, getattr(config, name), minimum=1)
        self.config = config
        self._filler = min(_FILLER, seq_len)
        shape: dict[str, Any] = {name: getattr(config, name) for name in SHAPE}
        most = config.most_tokens()
        context = min(seq_len, most) if config.max_document_tokens is None else config.max_document_tokens
        if context > seq_len:
            message = f"= {context}: more than training.seq_len = {seq_len}, the positions that the model has"
            raise error("max_document_tokens", message, value=context)
        if config.cost_model is None:
            raise error("cost_model", "is missing: balance(config, ...) takes it from the model")
        loading = Loading(
            max_document_tokens=context,
            oversize=config.oversize,
            max_delay=config.max_delay,
            sync=config.sync,
            num_epochs=FOREVER if config.num_epochs is None else config.num_epochs,
            shuffle=config.shuffle,
            seed=config.seed,
            num_workers=config.num_workers,
        )
        limits: dict[str, Any] = {"max_tokens": config.max_tokens, "cost_model": config.cost_model, **shape}
        num_micro_batches = config.micro_batches * dp_world_size
        tokens = step_tokens(num_micro_batches * most) if config.tokens_per_batch is None else config.tokens_per_batch
        packer = loading.packer(num_micro_batches, ranks=dp_world_size, **limits, tokens_per_batch=tokens)
        packed = partial(collate, **shape)
        self.steps: StepLoader[PackedBatch] | BalancedStream[PackedBatch]
        self._share = of_replicas(None) if dp_world_size == 1 else config.group
        measured = known(config, tokenizer)
        if measured is None:
            self.steps = BalancedStream(
                streams(config, tokenizer),
                packer=packer,
                collate_fn=packed,
                weights=config.weights,
                group=_group(config, dp_world_size),
            )
        else:
            documents, lengths = measured
            self.config = replace(config, lengths=lengths)  # so that a second loader need not read the lengths again
            sampler = loading.sampler(lengths, packer, rank=dp_rank, ranks=dp_world_size)
            self.steps = StepLoader(
                DataLoader(
                    documents,
                    batch_sampler=sampler,
                    collate_fn=packed,
                    num_workers=config.num_workers,
                    prefetch_factor=config.prefetch_factor if config.num_workers else None,
                )
            )
        self.figures: dict[str, float] = {}
        self._metrics = StepMetrics(self.steps)
        self.step: Step[PackedBatch] | None = None
        self.before_first: Callable[[Step[PackedBatch]], None] | None = None
        self.given = 0  # steps that were given, with those before a resume
        self._inside = 0  # micro-batches that were given of an unfinished step

    def __iter__(self) -> Iterator[tuple[dict[str, Any], Tensor]]:
        """The micro-batches of this rank, step by step, to the end of the data, without steps that have no label."""
        # A state may be that of the end of the last epoch. Then nothing is left, and no further epoch begins.
        ended = isinstance(self.steps, StepLoader) and self.steps.ended
        while not ended:
            for step, _ in steps_with_labels(self.steps, group=self._share):
                if self.before_first is not None:
                    before, self.before_first = self.before_first, None
                    before(step)
                self.step = step
                self.given += 1
                self.figures = self._metrics.end_step(step)
                for done, batch in enumerate(step.micro_batches, start=1):
                    self._inside = done % len(step.micro_batches)
                    yield self.row(batch)
            ended = isinstance(self.steps, BalancedStream) or self.steps.ended

    def state_dict(self) -> dict[str, Any]:
        """State after the last step that was given, equal on all ranks. The Trainer fetches no batch ahead.

        Raises:
            wlb.WlbError: a step was given only in part, because the Trainer takes another number of micro-batches.
        """
        if self._inside:
            message = f"= {self.config.micro_batches}: the Trainer saved after {self._inside} of them; make it what a "
            message += "rank takes in a step: gradient accumulation times pipeline micro-batches"
            raise error("micro_batches", message, value=self.config.micro_batches)
        try:
            return {_STATE: json.dumps({"given": self.given, "steps": self.steps.state_dict()})}
        except TypeError as cause:
            raise error("streams", f"have states that JSON does not hold: {cause}") from cause

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """The next iteration begins at this state. On an error nothing has changed.

        Raises:
            wlb.WlbError: the state is of another loader, other documents or another configuration.
        """
        if not state_dict:  # a checkpoint without a state of the loader
            return
        try:
            saved = json.loads(field_of(state_dict, _STATE, str))
        except ValueError as cause:
            if isinstance(cause, wlb.WlbError):
                raise
            raise error("state_dict", f"is cut or changed: {cause}") from cause
        given = field_of(saved, "given", int)
        self.steps.load_state_dict(field_of(saved, "steps", dict))
        self._inside, self.given = 0, given

    def check_begin(self, step: int) -> None:
        """Checks that the data are after the step at which the Trainer resumes.

        Raises:
            wlb.WlbError: they are not, for example because the checkpoint was loaded without the state of the data.
        """
        if self.given != step:
            message = (
                f"goes on after step {step}, but the data stand after step {self.given}: load the state of "
                '"dataloader" too, from a checkpoint that was saved with it; or keep the model and optimizer of '
                "another, and begin data and schedule anew: "
                'checkpoint.exclude_from_loading=["dataloader", "train_state", "lr_scheduler"]'
            )
            raise error("checkpoint", message, value=step)

    def close(self) -> None:
        """Ends the reading of streams."""
        if isinstance(self.steps, BalancedStream):
            self.steps.close()

    def row(self, batch: PackedBatch) -> tuple[dict[str, Any], Tensor]:
        """One micro-batch as torchtitan takes it, padded to an allowed length.

        Raises:
            wlb.WlbError: documents have position ids or weights, which torchtitan's batches cannot have.
        """
        batch.check_columns((), "torchtitan's batches have no place for")
        tokens = batch.tokens.numel() - batch.num_padding
        multiple, buckets = self.config.multiple_of_tokens, self.config.token_buckets
        filler = padded_tokens(max(tokens, 1), multiple_of_tokens=multiple, token_buckets=buckets) - tokens
        positions = torch.cat([batch.position_ids[:tokens], torch.arange(filler) % self._filler])
        row: dict[str, Any] = {
            "input": pad(batch.tokens[:tokens], (0, filler)).unsqueeze(0),
            "positions": positions.unsqueeze(0),
        }
        if self.config.give_lengths:
            documents = batch.shard.lengths[: batch.document_ids.numel()].tolist()
            row["lengths"] = documents + [min(self._filler, filler - at) for at in range(0, filler, self._filler)]
        if self.config.give_filler:
            row["filler"] = filler
        return row, pad(batch.labels[:tokens], (0, filler), value=IGNORE).unsqueeze(0)


def of_replicas(group: Any) -> Any:
    """The data-parallel ranks, which share a step; None if that is only this rank."""
    if group is None and torch.distributed.is_initialized():
        return Subgroup(None, [torch.distributed.get_rank()])
    return group


def _group(config: WlbDataLoader.Config, dp_world_size: int) -> Any:
    if dp_world_size == 1:
        return None
    if config.group is not None:
        return config.group
    world = torch.distributed.get_world_size()
    if world != dp_world_size:
        message = f"is missing: of {world} ranks {dp_world_size} are data-parallel; balance(config, ...) gives them"
        raise error("group", message)
    return torch.distributed.group.WORLD
