"""Steps from documents of known lengths: `balanced_loader` for your own loop, and the options of all loaders."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, Final, get_args

import torch
import torch.distributed as dist
from numpy.typing import ArrayLike
from torch.utils.data import DataLoader

import wlb
from wlb._choices import Oversize, Sync
from wlb._core import MAX_DELAY
from wlb._errors import check_bool, check_integer, check_options, error
from wlb._shown import explained
from wlb.reading.rows import RowReader
from wlb.reading.sizes import micro_batches
from wlb.torch.data.batch import PackedBatch
from wlb.torch.data.collate import collate
from wlb.torch.data.dataset import Documents, measured
from wlb.torch.data.processed import ProcessedRows
from wlb.torch.data.sampler import BalancedBatchSampler
from wlb.torch.data.step import StepLoader
from wlb.torch.data.stream import BalancedStream

SHAPE: Final = ("multiple_of_tokens", "token_buckets", "max_documents")  # options of a packer and of `collate`

_OF_READING: Final = (
    "lengths",
    "num_epochs",
    "shuffle",
    "seed",
    "num_workers",
    "worker_init_fn",
    "generator",
    "multiprocessing_context",
)  # options of `Loading` that have no meaning for rows that something else reads

FOREVER: Final = 2**31 - 1
"""Number of epochs of a run that a trainer ends by its steps."""


@explained
@dataclass(frozen=True, kw_only=True, eq=False)
class Loading:
    """Arguments of `balanced_loader` and of loaders inside trainers.

    Attributes:
        max_document_tokens: most tokens of a document; by default what a micro-batch holds.
        oversize: for longer documents: "split" them into pieces, where every token still predicts the next one,
            "truncate" them, or raise an "error".
        max_delay: most steps that a document waits for others; with 0 none waits.
        sync: where data-parallel ranks wait for each other: once a "step" (DDP, ZeRO-1 and 2), or in every
            "micro_batch" (FSDP, ZeRO-3). By default what the trainer says; "step" in a loop of your own.
        cost_model: what documents cost, if the model's configuration does not tell.
        lengths: int[documents] tokens, if you know them; otherwise they are read once.
        num_epochs: epochs of the run, after which waiting documents are trained.
        shuffle: whether each epoch has another order.
        seed: of these orders.
        num_workers: number of processes that read.
        worker_init_fn: called in each of these processes with its number, as `torch.utils.data.DataLoader` does. Rows
            that draw random numbers need it on several ranks: with equal seeds, all ranks draw the same.
        generator: draws the seeds of these processes.
        multiprocessing_context: how these processes are started, such as "spawn".
        columns: names of further columns of rows to carry (`wlb.torch.RowReader` says which are always carried).
        labels_ahead: how many tokens ahead every token predicts (`collate`).

    Raises:
        wlb.WlbError: a number is invalid.
    """

    max_document_tokens: int | None = None
    oversize: Oversize = "split"
    max_delay: int = MAX_DELAY
    sync: Sync | None = None
    cost_model: wlb.CostModel | None = None
    lengths: ArrayLike | None = None
    num_epochs: int = 1
    shuffle: bool = True
    seed: int = 0
    num_workers: int = 0
    worker_init_fn: Callable[[int], None] | None = None
    generator: torch.Generator | None = None
    multiprocessing_context: Any = None
    columns: Sequence[str] = ()
    labels_ahead: int = 1

    def __post_init__(self) -> None:
        check_integer("max_delay", self.max_delay, minimum=0)
        check_integer("num_workers", self.num_workers, minimum=0)
        if self.sync not in (None, *get_args(Sync)):
            raise error("sync", f"= {self.sync!r}: must be one of {', '.join(get_args(Sync))}", value=self.sync)
        check_bool("shuffle", self.shuffle)
        RowReader(self.columns, self.labels_ahead)  # raises if they are wrong

    @classmethod
    def of(
        cls, options: Mapping[str, Any], *functions: Callable[..., Any], but: Collection[str] = ()
    ) -> tuple[Loading, dict[str, Any]]:
        """The arguments among these options, and the others.

        Args:
            options: by name.
            *functions: functions whose options the others must be.
            but: names of their options that the caller sets itself.

        Raises:
            wlb.WlbError: an option is unknown; or as the class.
        """
        check_options(options, cls, *functions, but=but)
        own = {field.name for field in fields(cls)}
        mine = {name: value for name, value in options.items() if name in own}
        return cls(**mine), {name: value for name, value in options.items() if name not in own}

    def costs(self, config: Any) -> wlb.CostModel:
        """The given cost model, or the one of a Hugging Face configuration or mapping.

        Raises:
            wlb.WlbError: both are given, or none.
        """
        if (config is None) == (self.cost_model is None):
            raise error("cost_model", "or config: give one of them, which says what documents cost")
        if self.cost_model is not None:
            return self.cost_model
        mapping = config if isinstance(config, Mapping) else config.to_dict()
        return wlb.ModelConfig.from_hugging_face(mapping).cost_model()

    def packer(self, num_micro_batches: int, *, ranks: int, meet: bool = False, **others: Any) -> wlb.Packer:
        """A packer for steps of `num_micro_batches`.

        Args:
            num_micro_batches: of a step, on all ranks together.
            ranks: data-parallel ranks.
            meet: whether these ranks wait for each other in every micro-batch, unless `sync` was given.
            **others: arguments of `wlb.Packer` that take precedence. Give `tokens_per_batch` if it is not one context
                for each micro-batch.
        """
        arguments: dict[str, Any] = {"max_document_tokens": self.max_document_tokens, "oversize": self.oversize}
        if ranks > 1 and (meet if self.sync is None else self.sync == "micro_batch"):
            arguments |= {"dp_size": ranks, "sync": "micro_batch"}
        if self.max_delay:
            arguments |= {"release": "adaptive", "max_delay": self.max_delay}
        elif {"release", "outlier_thresholds"} & others.keys():
            arguments["max_delay"] = 0  # a given rule limits delays by itself
        else:
            arguments["release"] = "fifo"  # no document waits
        return wlb.Packer(num_micro_batches=num_micro_batches, **arguments | others)

    def measured(self, dataset: Any, argument: str = "dataset") -> tuple[Documents, ArrayLike]:
        """The documents of a data set, and their lengths.

        Raises:
            wlb.WlbError: as `wlb.torch.data.dataset.measured`.
        """
        return measured(dataset, self.lengths, argument, columns=self.columns, labels_ahead=self.labels_ahead)

    @property
    def collate(self) -> Callable[..., PackedBatch]:
        """`collate`, for documents with these columns."""
        return partial(collate, columns=self.columns, labels_ahead=self.labels_ahead)

    def sampler(self, lengths: ArrayLike, packer: wlb.Packer, *, rank: int, ranks: int) -> BalancedBatchSampler:
        """The batch sampler of one data-parallel rank."""
        return BalancedBatchSampler(
            lengths,
            packer=packer,
            dp_rank=rank,
            dp_size=ranks,
            shuffle=self.shuffle,
            seed=self.seed,
            num_epochs=self.num_epochs,
        )

    def loader(
        self, documents: Any, sampler: BalancedBatchSampler, collate_fn: Callable[[list[Any]], Any], **others: Any
    ) -> DataLoader[Any]:
        """The `DataLoader` of documents; `others` are its further arguments."""
        return DataLoader(
            documents,
            batch_sampler=sampler,
            collate_fn=collate_fn,
            num_workers=self.num_workers,
            worker_init_fn=self.worker_init_fn,
            generator=self.generator,
            multiprocessing_context=self.multiprocessing_context if self.num_workers else None,
            **others,
        )


def balanced_loader(
    dataset: Any,
    *,
    max_tokens: int,
    tokens_per_batch: int,
    config: Any = None,
    group: dist.ProcessGroup | None = None,
    **options: Any,
) -> StepLoader[PackedBatch] | BalancedStream[PackedBatch]:
    """Steps of equal work from a data set: packer, sampler, `DataLoader` and `StepLoader` made for it.

        loader = wt.balanced_loader(documents, max_tokens=65536, tokens_per_batch=2**20, config=model.config)
        while not loader.ended:
            for step in loader:
                loss = wt.train_step(model, step)
                ...  # optimizer; save step.state

    A step has the fewest micro-batches of `max_tokens` that hold `tokens_per_batch` and leave a quarter of room. Do not
    give the loader to `accelerator.prepare`, because each rank already reads only its own part.

    Args:
        dataset: `dataset[i]` gives row `i`: its tokens, or a mapping with `input_ids` and maybe `labels` (-100 where
            nothing is learnt), `attention_mask`, `position_ids`, `completion_mask`, `loss_weights` and others
            (`wlb.torch.RowReader`). Or a `ProcessedRows`, whose lengths are not known before; then a `BalancedStream`
            is returned.
        max_tokens: most tokens of a micro-batch, limited by the memory of a rank.
        tokens_per_batch: tokens of a step on all ranks.
        config: of a Hugging Face model, from which costs of documents are computed; or give `cost_model`.
        group: data-parallel ranks; None: all ranks, or a single process.
        **options: of `wlb.torch.Loading`: `max_document_tokens`, `oversize`, `max_delay`, `cost_model`,
            `sync`, `lengths`, `num_epochs`, `shuffle`, `seed`, `num_workers`, `worker_init_fn`, `generator`,
            `multiprocessing_context`, `columns`, `labels_ahead`; and of `wlb.Packer`: `method`, `release`,
            `delay_price`, `max_step_cost`, ...

    Returns:
        The steps of this rank.

    Raises:
        wlb.WlbError: an argument is invalid or unknown; a data set has no length, or a column without a known meaning
            that is not in `columns`; the costs of the model are not known.

    Complexity:
        O(documents) if lengths need not be read from documents.
    """
    loading, packer = Loading.of(options, wlb.Packer, but=("num_micro_batches", "cp_size"))
    check_integer("max_tokens", max_tokens, minimum=1)
    check_integer("tokens_per_batch", tokens_per_batch, minimum=1)
    if group is None and dist.is_initialized():
        group = dist.group.WORLD
    rank, ranks = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
    count = ranks * micro_batches(tokens_per_batch, ranks=ranks, max_tokens=max_tokens)
    limits: dict[str, Any] = {
        "max_tokens": max_tokens,
        "cost_model": loading.costs(config),
        "tokens_per_batch": tokens_per_batch,
    }
    made = loading.packer(count, ranks=ranks, **limits, **packer)
    shape = {name: packer[name] for name in SHAPE if name in packer}
    if isinstance(dataset, ProcessedRows):
        if wrong := [name for name in _OF_READING if name in options]:
            raise error(wrong[0], "is an option of ProcessedRows here, which reads the rows", value=options[wrong[0]])
        return BalancedStream(
            dataset.streams(),
            packer=made,
            collate_fn=partial(loading.collate, **shape),
            group=group,
            columns=loading.columns,
            labels_ahead=loading.labels_ahead,
        )
    documents, lengths = loading.measured(dataset)
    sampler = loading.sampler(lengths, made, rank=rank, ranks=ranks)
    return StepLoader(loading.loader(documents, sampler, partial(loading.collate, **shape)))
