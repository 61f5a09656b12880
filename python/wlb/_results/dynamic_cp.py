"""Results of `wlb.plan_dynamic_cp`."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from wlb._core import dynamic_cp_seconds, result
from wlb._errors import check_integer
from wlb._results.copied import Copied

_Number = TypeVar("_Number", bound=np.generic)


@dataclass(frozen=True, eq=False, repr=False)
class CpGroup(Copied):
    """Ranks that share the documents of one micro-batch.

    Every array is a fresh copy that the caller may keep or change. Groups are equal if they run the same documents on
    the same ranks in the same time, in whatever plan.

    Attributes:
        first_rank: First of its ranks; a multiple of ``cp_size``, unless ``group_sizes="any"``.
        cp_size: Number of ranks, a power of two, unless ``group_sizes="any"``; also ``len()``.
        document_ids: int64[k]: the documents, in order of arrival.
        lengths: int32[k]: tokens of each document.
        tokens_per_rank: Most tokens of a rank, sharded "per_document": the ranks differ by at most one.
        padding_tokens: Tokens of one more document after the others, which fills all ranks to the same padded size
            (`multiple_of_tokens`, `token_buckets`); 0 without padding.
        seconds: Predicted time through the whole model, forward and backward, on each of its ranks.
    """

    first_rank: int
    cp_size: int
    document_ids: NDArray[np.int64]
    lengths: NDArray[np.int32]
    tokens_per_rank: int
    padding_tokens: int
    seconds: float

    @property
    def ranks(self) -> range:
        """The ranks of the stage that belong to it."""
        return range(self.first_rank, self.first_rank + self.cp_size)

    @property
    def cu_seqlens(self) -> NDArray[np.int32]:
        """int32[k + 1]: index of each document's first token in the packed sequence, and at the end its length."""
        return np.concatenate([[0], self.lengths]).cumsum(dtype=np.int32)

    @property
    def max_seqlen(self) -> int:
        """Tokens of the longest document; 0 without documents."""
        return int(self.lengths.max(initial=0))

    @property
    def tokens(self) -> int:
        """Tokens of all documents."""
        return int(self.lengths.sum(dtype=np.int64))

    @property
    def padded_tokens_per_rank(self) -> int:
        """Most tokens of a rank including padding; with padding all of its ranks have equally many."""
        return -(-(self.tokens + self.padding_tokens) // self.cp_size)

    def __len__(self) -> int:
        """Number of ranks."""
        return self.cp_size

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CpGroup) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    @property
    def _key(self) -> tuple[int, int, float, bytes, bytes]:
        documents = self.document_ids.tobytes(), self.lengths.tobytes()
        return self.first_rank, self.cp_size, self.seconds, *documents

    def __repr__(self) -> str:
        return (
            f"CpGroup(first_rank={self.first_rank}, cp_size={self.cp_size}, documents={len(self.lengths)}, "
            f"tokens={self.tokens}, seconds={self.seconds})"
        )


@dataclass(frozen=True, repr=False)
class DynamicMicroBatch:
    """One micro-batch of a `DynamicCpPlan`: groups that together have all ranks of a stage.

    A pickle holds the whole plan. To send several micro-batches of one plan, send the plan.
    """

    _plan: DynamicCpPlan
    _index: int

    @property
    def groups(self) -> tuple[CpGroup, ...]:
        """The groups in the order of their ranks; together they have all ranks. A group may be empty."""
        return tuple(self)

    @property
    def seconds(self) -> float:
        """Seconds of its slowest group through the whole model, forward and backward."""
        groups = self._range
        return float(self._plan._group_seconds[groups.start : groups.stop].max())

    @property
    def tokens(self) -> int:
        """Tokens of all its groups."""
        groups = self._range
        first, end = self._plan._document_offsets[[groups.start, groups.stop]]
        return int(self._plan._lengths[first:end].sum(dtype=np.int64))

    def group_of(self, rank: int) -> CpGroup:
        """The group that a rank of the stage belongs to.

        Raises:
            WlbError: no such rank.
        """
        check_integer("rank", rank, minimum=0, maximum=self._plan.world_size - 1)
        groups = self._range
        first_ranks = self._plan._first_ranks[groups.start : groups.stop]
        return self._plan._group(groups[int(first_ranks.searchsorted(rank, side="right")) - 1])

    @property
    def _range(self) -> range:
        """Indices of this micro-batch's groups among the plan's groups."""
        first, end = self._plan._group_offsets[self._index : self._index + 2].tolist()
        return range(first, end)

    def __len__(self) -> int:
        """Number of groups."""
        return len(self._range)

    def __getitem__(self, index: int, /) -> CpGroup:
        return self._plan._group(_item(self._range, index, "group"))

    def __iter__(self) -> Iterator[CpGroup]:
        return map(self._plan._group, self._range)

    def __repr__(self) -> str:
        groups = self._range
        sizes = self._plan._cp_sizes[groups.start : groups.stop].tolist()
        return f"DynamicMicroBatch(cp_sizes={sizes}, tokens={self.tokens})"


@result
@dataclass(frozen=True, eq=False, repr=False)
class DynamicCpPlan(Copied):
    """The plan of one step: which documents run when, and on which ranks of a pipeline stage.

    Plain data that can be printed, compared, pickled and sent. Every array is a fresh copy that the caller may keep or
    change.

    Attributes:
        world_size: Ranks of a pipeline stage, DP times CP.
        num_stages: Pipeline stages.
        num_virtual_stages: Parts of the model on each stage.
        schedule: Order in which a stage runs its micro-batches.
        sync: Where the ranks of a stage wait for each other, once a "step" or in every "micro_batch".
        max_tokens_per_rank: Most tokens that a rank was allowed in a micro-batch; with padding, the largest padded size
            within that.
        max_documents: Most documents that a group was allowed; None: any number.
        multiple_of_tokens: Each rank's tokens in a micro-batch are padded to a multiple of this.
        token_buckets: The only padded sizes, ascending; empty for any.
        seconds: Predicted time of the step, by simulating the pipeline with every rank's micro-batches; the ranks of a
            group wait for one another, and all ranks of a stage where `sync` says so.
        p2p_seconds: Latency between pipeline stages, included in `seconds`.
        lower_bound: Lower bound on `seconds` (up to rounding) for any plan with at most as many micro-batches as were
            tried and at least ``min_micro_batches``; if ``num_micro_batches`` was given, with exactly as many. Proved
            from the work, the filling and draining of the pipeline, and the paths around the longest documents.
        balanced_seconds: Time if all work were spread evenly over all ranks of all stages and no rank ever waited; no
            pipeline reaches it.
        sweep: The numbers of micro-batches that were tried, ascending, each with an estimate of its step in which every
            rank is as slow as the slowest of the micro-batch. For numbers given up early it is a lower time (with short
            documents divided at will, or with a part of the documents) that already exceeds the best.
    """

    world_size: int
    num_stages: int
    num_virtual_stages: int
    schedule: str
    sync: str
    max_tokens_per_rank: int
    max_documents: int | None
    multiple_of_tokens: int
    token_buckets: tuple[int, ...]
    seconds: float
    p2p_seconds: float
    lower_bound: float
    balanced_seconds: float
    sweep: tuple[tuple[int, float], ...]
    _digest: str
    # One entry for each group; `_group_offsets` says where each micro-batch begins and the last one ends.
    _first_ranks: NDArray[np.int32]
    _cp_sizes: NDArray[np.int32]
    _tokens_per_rank: NDArray[np.int64]
    _padded_tokens_per_rank: NDArray[np.int64]
    _group_seconds: NDArray[np.float64]
    _group_offsets: NDArray[np.int64]
    # One entry for each document; `_document_offsets` says where each group begins and the last one ends.
    _document_ids: NDArray[np.int64]
    _lengths: NDArray[np.int32]
    _document_offsets: NDArray[np.int64]

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches of the step, ``m``, the same on every rank; also ``len()``."""
        return len(self)

    @property
    def micro_batches(self) -> tuple[DynamicMicroBatch, ...]:
        """The micro-batches in the order in which they run."""
        return tuple(self)

    @property
    def cp_sizes(self) -> NDArray[np.int32]:
        """int32[m, world_size]: for each rank, the number of ranks in its group."""
        return self._of_ranks(self._cp_sizes)

    @property
    def tokens_per_rank(self) -> NDArray[np.int64]:
        """int64[m, world_size]: most tokens of each rank; the ranks of a group differ by at most one."""
        return self._of_ranks(self._tokens_per_rank)

    @property
    def padded_tokens_per_rank(self) -> NDArray[np.int64]:
        """int64[m, world_size]: tokens of each rank including padding."""
        return self._of_ranks(self._padded_tokens_per_rank)

    @property
    def rank_seconds(self) -> NDArray[np.float64]:
        """float64[m, world_size]: seconds of each rank through the whole model, forward and backward."""
        return self._of_ranks(self._group_seconds)

    def step_seconds(self, group_seconds: ArrayLike) -> float:
        """The step's time if its groups took `group_seconds` instead of the predicted times, in any unit.

        Args:
            group_seconds: float [groups], time of each group through the whole model, forward and backward: micro-batch
                by micro-batch, and inside each in the order of ranks.

        Raises:
            WlbError: their number is not that of the groups, or one is negative or not finite.

        Complexity:
            O(num_stages * m * world_size): the pipeline is simulated.
        """
        return dynamic_cp_seconds(
            group_seconds,
            cp_sizes=self._cp_sizes,
            group_offsets=self._group_offsets,
            world_size=self.world_size,
            num_stages=self.num_stages,
            num_virtual_stages=self.num_virtual_stages,
            schedule=self.schedule,
            sync=self.sync,
            p2p_seconds=self.p2p_seconds,
        )

    @property
    def padding_tokens(self) -> int:
        """Tokens of padding in all micro-batches."""
        return self._padding(0, len(self._cp_sizes))

    def digest(self) -> str:
        """Hex hash of which documents run when and where: equal if and only if two plans are, apart from seconds."""
        return self._digest

    def _of_ranks(self, of_groups: NDArray[_Number]) -> NDArray[_Number]:
        return of_groups.repeat(self._cp_sizes).reshape(len(self), self.world_size)

    def _padding(self, first: int, end: int) -> int:
        if self.multiple_of_tokens == 1 and not self.token_buckets:
            return 0
        filled = self._cp_sizes[first:end].astype(np.int64) @ self._padded_tokens_per_rank[first:end]
        documents = slice(*self._document_offsets[[first, end]])
        return int(filled - self._lengths[documents].sum(dtype=np.int64))

    def _group(self, group: int) -> CpGroup:
        first, end = self._document_offsets[group : group + 2]
        return CpGroup(
            first_rank=int(self._first_ranks[group]),
            cp_size=int(self._cp_sizes[group]),
            document_ids=self._document_ids[first:end],
            lengths=self._lengths[first:end],
            tokens_per_rank=int(self._tokens_per_rank[group]),
            padding_tokens=self._padding(group, group + 1),
            seconds=float(self._group_seconds[group]),
        )

    def __len__(self) -> int:
        """Number of micro-batches."""
        return len(self._group_offsets) - 1

    def __getitem__(self, index: int, /) -> DynamicMicroBatch:
        return DynamicMicroBatch(self, _item(range(len(self)), index, "micro-batch"))

    def __iter__(self) -> Iterator[DynamicMicroBatch]:
        return (DynamicMicroBatch(self, index) for index in range(len(self)))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, DynamicCpPlan):
            return NotImplemented
        return all(np.array_equal(value, vars(other)[name]) for name, value in vars(self).items())

    def __hash__(self) -> int:
        return hash(self._digest)

    def __repr__(self) -> str:
        return (
            f"DynamicCpPlan(world_size={self.world_size}, num_stages={self.num_stages}, "
            f"num_micro_batches={len(self)}, documents={len(self._lengths)}, "
            f"largest_cp_size={self._cp_sizes.max()}, seconds={self.seconds:.6f})"
        )


def _item(among: range, index: int, what: str) -> int:
    try:
        return among[operator.index(index)]
    except IndexError:
        raise IndexError(f"{what} {index} of {len(among)}") from None
