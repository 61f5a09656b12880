"""wlb's plans in the packing slot of torchtitan's Grain data pipeline, which follows version 0.3.

    from wlb.integrations.torchtitan_packing import BalancedPackingConfig

    config.dataloader = GrainDataLoader.Config(
        dataset=BalancedPackingConfig(dataset=documents, cost_model=cost, micro_batches=4)
    )

torchtitan's own packers fill the rows of each data-parallel rank alone. This one plans all ranks together before the
split. Nothing of torchtitan is imported before a data set is built. For torchtitan 0.3: `wlb.integrations.torchtitan`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

import numpy as np
from grain import IterDataset, MultiprocessingOptions
from grain.sharding import ShardOptions
from numpy.typing import ArrayLike, NDArray

import wlb
from wlb._choices import Oversize, Sync
from wlb._core import MAX_DELAY
from wlb._errors import check_integer, error
from wlb.integrations.grain import BalancedIterDataset
from wlb.reading.documents import IGNORE
from wlb.reading.sizes import step_tokens
from wlb.torch.data.loading import FOREVER, Loading

__all__ = ["BalancedPackingConfig", "for_ranks"]


@dataclass(frozen=True, kw_only=True)
class BalancedPackingConfig:
    """Packs the documents of all data-parallel ranks into rows of equal work, one row for each micro-batch.

    It stands where `FirstFitPackingConfig` or `ConcatThenSplitPackingConfig` does. Rows hold at most
    `training.num_tokens_per_microbatch_per_dp_rank` tokens, and torchtitan pads them to that. Every token of a cut
    document still predicts the next one.

    Attributes:
        dataset: the configuration of the documents: `SingleDatasetConfig`, `DatasetMixConfig` or `DatasetConcatConfig`.
            It is built unsharded, so every rank reads and processes all rows, unless `lengths` are known.
        cost_model: what documents cost, such as `wlb.ModelConfig.from_hugging_face(config).cost_model()`.
        micro_batches: micro-batches of a rank in a step: gradient accumulation times those of the pipeline.
        max_document_tokens: most tokens of a document that is not cut; None: `training.max_context_length`.
        oversize: for longer documents: "split" them, "truncate" them, or raise an "error".
        max_delay: most steps that a document waits for others; with 0 none waits.
        sync: where data-parallel ranks wait for each other: once a "step", or in every "micro_batch", as under FSDP
            without a pipeline.
        tokens_per_batch: tokens of a step on all ranks; None: four fifths of what its micro-batches hold.
        lengths: int [documents], tokens of each row before its labels are shifted, if they are known. Then each rank
            reads and processes only its own rows; `dataset` must be random-access, and filter nothing.
        num_workers: processes that process rows, for random-access data.

    Raises:
        wlb.WlbError: a number is invalid.
    """

    dataset: Any
    cost_model: wlb.CostModel
    micro_batches: int = 1
    max_document_tokens: int | None = None
    oversize: Oversize = "split"
    max_delay: int = MAX_DELAY
    sync: Sync = "micro_batch"
    tokens_per_batch: int | None = None
    lengths: ArrayLike | None = None
    num_workers: int = 0

    def __post_init__(self) -> None:
        check_integer("micro_batches", self.micro_batches, minimum=1)
        check_integer("num_workers", self.num_workers, minimum=0)

    def build(self, *, context: Any, dataset_iteration_policy: Any) -> IterDataset[Any]:
        """The rows of one data-parallel rank, as torchtitan's `TextSequence`.

        Args:
            context: torchtitan's `DatasetBuildContext`.
            dataset_iteration_policy: torchtitan's `DatasetIterationPolicy`.

        Raises:
            wlb.WlbError: an option is invalid, or the documents cannot be read by index although `lengths` are given.
        """
        policy = dataset_iteration_policy
        indexed = self.lengths is not None
        unsharded = replace(policy, dp_rank=0, dp_world_size=1)
        if indexed:
            unsharded = replace(unsharded, shuffle=False, repeat=False)
        documents = self.dataset.build(context=context, dataset_iteration_policy=unsharded).map(unshifted)
        row = context.num_tokens_per_batch
        longest = min(context.max_context_length, row) if self.max_document_tokens is None else self.max_document_tokens
        if longest > context.max_context_length:
            message = f"= {longest}: more than training.max_context_length = {context.max_context_length}"
            raise error("max_document_tokens", message, value=longest)
        rules: dict[str, Any] = {"oversize": self.oversize, "max_delay": self.max_delay, "sync": self.sync}
        loading, ranks = Loading(max_document_tokens=longest, **rules), policy.dp_world_size
        count = self.micro_batches * ranks
        tokens = step_tokens(count * row) if self.tokens_per_batch is None else self.tokens_per_batch
        limits: dict[str, Any] = {"max_tokens": row, "cost_model": self.cost_model, "tokens_per_batch": tokens}
        packer = loading.packer(count, ranks=ranks, **limits)
        order: dict[str, Any] = {}
        if indexed:
            order = {"shuffle": policy.shuffle, "seed": policy.seed, "num_epochs": FOREVER if policy.repeat else 1}
        balanced = BalancedIterDataset(
            documents,
            packer=packer,
            shard_options=ShardOptions(shard_index=policy.dp_rank, shard_count=policy.dp_world_size),
            lengths=self.lengths,
            read_options=context.read_options,
            multiprocessing_options=MultiprocessingOptions(num_workers=self.num_workers) if self.num_workers else None,
            **order,
        )
        return balanced.map(_Row(import_module("torchtitan.components.data.dataset").TextSequence))


@dataclass(frozen=True)
class _Row:
    """Makes torchtitan's rows. Padding is left to its collator, which also counts its positions."""

    text_sequence: Any

    def __call__(self, element: Mapping[str, NDArray[Any]]) -> Any:
        real = element["segment_ids"][0] > 0
        names = {"input_ids": "input_ids", "labels": "labels", "positions": "position_ids"}
        return self.text_sequence(**{name: element[of][0][real].astype(np.int64) for name, of in names.items()})


def unshifted(sequence: Any) -> dict[str, NDArray[Any]]:
    """A row of torchtitan's processors as a document: the tokens with the last target, and labels in their places.

    Args:
        sequence: `input_ids` [n], and the target of each as `labels` [n], -100 where the loss is disabled.

    Raises:
        wlb.WlbError: it has positions of its own.
    """
    if getattr(sequence, "positions", None) is not None:
        raise error("dataset", "gives rows that are packed already: give the documents, without another packing")
    tokens, labels = np.asarray(sequence.input_ids), np.asarray(sequence.labels)
    if labels[-1] != IGNORE:
        tokens = np.append(tokens, labels[-1])
    learnt = np.append(np.int64(IGNORE), labels)[: tokens.size]
    return {"input_ids": tokens, "labels": learnt}


def for_ranks(state_dict: Mapping[str, Any], dp_world_size: int) -> dict[str, Any]:
    """A state of torchtitan's `GrainDataLoader` for another number of data-parallel ranks.

    torchtitan refuses to resume on another number, because its own packers cannot. The state of `BalancedPackingConfig`
    is the same on every rank, so any rank's will do. Take it after a whole step.

    Args:
        state_dict: `GrainDataLoader.state_dict()` of any rank.
        dp_world_size: ranks that resume.

    Raises:
        wlb.WlbError: there is no rank's state in it.
    """
    check_integer("dp_world_size", dp_world_size, minimum=1)
    own = [value for name, value in state_dict.items() if name.startswith("dp_rank_")]
    if not own:
        raise error("state_dict", f"has no state of a rank, but {', '.join(state_dict) or 'nothing'}")
    rest = {name: value for name, value in state_dict.items() if not name.startswith("dp_rank_")}
    ranks = {f"dp_rank_{rank}": own[0] for rank in range(dp_world_size)}
    return rest | ranks | {"dp_world_size": dp_world_size}
