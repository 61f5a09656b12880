"""torchtitan's data loader: the micro-batches of a plan, one for every forward pass."""

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
from wlb.integrations.labelled import labelled_steps
from wlb.integrations.torchtitan.documents import known, streams
from wlb.torch.data import IGNORE, BalancedStream, PackedBatch, Step, StepLoader, collate
from wlb.torch.data.loading import FOREVER, SHAPE, Loading, step_tokens
from wlb.torch.data.state import field as field_of
from wlb.torch.metrics import StepMetrics

_STATE: Final = "wlb"  # one text, whatever it holds: checkpoints ask for the keys before they load
_FILLER: Final = 128  # padding is cut into documents of one attention block, which cost next to nothing
_PARTS: Final = {
    "documents",
    "streams",
    "weights",
    "lengths",
    "cost_model",
    "group",
}  # objects, which a command line cannot express


class WlbDataLoader(BaseDataLoader):
    """Gives torchtitan's Trainer micro-batches of equal work: documents side by side in one row.

    A batch is `{"input": int64 [1, tokens], "positions": int64 [1, tokens]}` and its labels, int64 [1, tokens]: the
    next token of the document, -100 where there is none. Positions begin at 0 in every document, and in every piece of
    a cut one, which is where torchtitan's varlen and FlexAttention masks begin. An empty micro-batch, legal in a plan,
    becomes the shortest row that is allowed; no loss counts what fills rows up.

    Its state in torchtitan's checkpoints is the same on every rank, and may be loaded on another number of them.

    Args:
        config: What is packed, and how.
        dp_world_size: Data-parallel ranks.
        dp_rank: Which of them this is.
        tokenizer: Of data sets of text.
        seq_len: The context, unless the configuration says less.
        local_batch_size: Not used: a micro-batch holds what `max_tokens` says.
        snapshot_every_n_steps: Not used: a state is written when it is asked for.

    Attributes:
        config: The configuration, with the lengths that were read.
        steps: Where the micro-batches come from.
        step: The one of which micro-batches were given last.
        before_first: Gets the first step, before anything of it is given.
        given: Steps that were given, those before a resume included.
        figures: What its plan says, by the names of `wlb.torch.StepMetrics`.

    Raises:
        wlb.WlbError: An argument makes no sense; the configuration names no documents, or several kinds of them.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        """Configuration: the documents and how they are packed."""

        max_tokens: int
        """Most tokens of a micro-batch: what the memory of a rank holds."""

        max_document_tokens: int | None = None
        """Longest document that is trained uncut; by default training.seq_len, at most max_tokens."""

        oversize: Literal["split", "truncate", "error"] = "split"
        """What happens to longer documents. Of split ones each token predicts the next one all the same."""

        max_delay: int = MAX_DELAY
        """Most steps that a document waits for others; 0: none waits."""

        tokens_per_batch: int | None = None
        """Tokens of a step on all ranks; by default four fifths of what its micro-batches hold."""

        micro_batches: int = 1
        """Of a rank in a step: gradient accumulation times pipeline micro-batches. `balance` sets it."""

        multiple_of_tokens: int = 1
        """Micro-batches are filled up to a multiple of so many tokens, which max_tokens counts. `balance` makes it one
        of what parallelism needs, too."""

        token_buckets: list[int] = field(default_factory=list)
        """The only lengths of micro-batches, ascending: they are filled up to the next one, and compiled models see
        these shapes alone. Lengths above max_tokens are not used."""

        max_documents: int | None = None
        """Most documents of a micro-batch, but for what fills it up."""

        shuffle: bool = True
        """Whether documents come in another order in every epoch. Streams come as they are."""

        seed: int = 0
        """Of these orders."""

        num_epochs: int | None = None
        """After so many what waits is drained, and the data ends; None: it begins anew as often as needed. Streams are
        read once."""

        num_workers: int = 0
        """Processes that read documents."""

        prefetch_factor: int | None = None
        """Micro-batches that each of them reads ahead."""

        documents: Annotated[Any, tyro.conf.Suppress] = None
        """`documents[i]`: a mapping with `input_ids` and maybe `labels`, or tokens."""

        streams: Annotated[Any, tyro.conf.Suppress] = None
        """Instead: iterables of documents, as `wlb.torch.BalancedStream` takes them; or one of Hugging Face's."""

        weights: Annotated[Any, tyro.conf.Suppress] = None
        """float [streams], the share of each stream in a step, as `wlb.torch.BalancedStream` takes them."""

        lengths: Annotated[Any, tyro.conf.Suppress] = None
        """int [documents] tokens of each, if they are known. Else they are read, once."""

        cost_model: Annotated[Any, tyro.conf.Suppress] = None
        """What documents cost. `balance` takes it from the model."""

        group: Annotated[Any, tyro.conf.Suppress] = None
        """Data-parallel process group, for streams; by default all ranks. `balance` sets it."""

        verify: bool = True
        """Whether `balance`'s trainer proves before its first step that packing changes nothing that is learnt."""

        give_lengths: Annotated[bool, tyro.conf.Suppress] = False
        """Also gives "lengths", int [documents] with the filler, which context parallelism shards by."""

        give_filler: Annotated[bool, tyro.conf.Suppress] = False
        """Also gives "filler", the number of tokens at the end of the row that fill it up, for what counts tokens."""

        def most_tokens(self) -> int:
            """The longest micro-batch: `max_tokens`, down to one of the lengths that are allowed.

            Raises:
                wlb.WlbError: They make no sense, or are all above `max_tokens`.
            """
            multiple, buckets = self.multiple_of_tokens, self.token_buckets
            return most_tokens(self.max_tokens, multiple_of_tokens=multiple, token_buckets=buckets)

        def to_dict(self) -> dict[str, Any]:
            """For a log: all but the data."""
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
            num_epochs=FOREVER if config.num_epochs is None else config.num_epochs,
            shuffle=config.shuffle,
            seed=config.seed,
            num_workers=config.num_workers,
        )
        limits: dict[str, Any] = {"max_tokens": config.max_tokens, "cost_model": config.cost_model, **shape}
        num_micro_batches = config.micro_batches * dp_world_size
        tokens = step_tokens(num_micro_batches * most) if config.tokens_per_batch is None else config.tokens_per_batch
        packer = loading.packer(num_micro_batches, **limits, tokens_per_batch=tokens)
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
            self.config = replace(config, lengths=lengths)  # a second loader need not read the lengths again
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
        self.given = 0  # steps handed out, those before a resume included
        self._inside = 0  # micro-batches handed out of an unfinished step

    def __iter__(self) -> Iterator[tuple[dict[str, Any], Tensor]]:
        """The micro-batches of this rank, step by step, to the end of the data; steps without a label are left out."""
        # A state may stand at the end of the last epoch: then nothing is left, and no further epoch is begun.
        ended = isinstance(self.steps, StepLoader) and self.steps.ended
        while not ended:
            for step, _ in labelled_steps(self.steps, group=self._share):
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
        """State after the last step that was given, the same on every rank. The Trainer fetches nothing ahead.

        Raises:
            wlb.WlbError: A part of a step was given: the Trainer's steps have other numbers of micro-batches.
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
        """The next iteration begins there. On an error nothing has changed.

        Raises:
            wlb.WlbError: It is the state of another loader, of other documents or of another configuration.
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
        """Whether the data stand after the step at which the Trainer goes on.

        Raises:
            wlb.WlbError: They do not: its checkpoint was loaded without the state of the data, say.
        """
        if self.given != step:
            message = f"goes on after step {step}, but the data stand after step {self.given}: load the state of "
            message += '"dataloader" too, from a checkpoint that was saved with it'
            raise error("checkpoint", message, value=step)

    def close(self) -> None:
        """Ends what reads streams."""
        if isinstance(self.steps, BalancedStream):
            self.steps.close()

    def row(self, batch: PackedBatch) -> tuple[dict[str, Any], Tensor]:
        """One micro-batch as torchtitan takes it, filled up to a length that is allowed.

        Raises:
            wlb.WlbError: Documents bring position ids or weights, for which torchtitan's batches have no place.
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
    """The data-parallel ranks, which share a step; None is this one alone: others have the same rows, or parts."""
    if group is None and torch.distributed.is_initialized():
        return torch.distributed.new_group([torch.distributed.get_rank()], use_local_synchronization=True)
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
