"""Makes tensors of the samples of one micro-batch of a forest, each shared token once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

import wlb
from wlb._core import padded_tokens
from wlb._errors import check_integer, error
from wlb._shown import explained
from wlb.reading.documents import IGNORE, Document, as_arrays
from wlb.reading.rows import KNOWN, RowReader, is_text
from wlb.torch.data.step import Step

Ints = NDArray[np.int64]


@explained
@dataclass(frozen=True, eq=False)
class ForestBatch:
    """The tokens of one micro-batch of a forest on one context-parallel rank, each shared token once.

    An *edge* is a prediction that counts in some sample: a token of this rank predicts the token that follows it on a
    path. A token that different tokens follow has several edges. A loss is computed once for each edge, on
    `hidden[edge_rows]`. `to_samples` gives every sample the value of each of its predictions, for losses that differ
    between samples.

    Attributes:
        tokens: int64 [tokens_of_this_rank], in the order of `shard.rank(cp_rank)`.
        position_ids: int64 [tokens_of_this_rank]: number of tokens before each on its path. Siblings have the same.
        sample_counts: int64 [tokens_of_this_rank]: number of samples with each token; 0 for padding. A mean over tokens
            with these weights, such as a loss of routers, is that of all samples without sharing. With the weights
            `sample_counts > 0` each shared token counts once.
        edge_rows: int64 [edges]: the row of `tokens` that predicts.
        edge_targets: int64 [edges]: the token that it predicts.
        edge_weights: int64 [edges]: number of samples in which it counts, at least 1; weights of a cross-entropy.
        sample_edges: int64 [predictions]: edge of each prediction of this rank that counts, sample by sample, in the
            order of tokens.
        sample_of: int64 [predictions]: its sample, as an index into `sample_ids`.
        sample_positions: int64 [predictions]: position in its sample of the predicted token.
        sample_ids: int64 [samples], as in the plan.
        shard: The places of the tokens on all context-parallel ranks.
        cp_rank: The rank whose tokens these are.
        num_valid_tokens: Predictions that count, of all samples and context-parallel ranks together, as many as without
            sharing.
    """

    tokens: Tensor
    position_ids: Tensor
    sample_counts: Tensor
    edge_rows: Tensor
    edge_targets: Tensor
    edge_weights: Tensor
    sample_edges: Tensor
    sample_of: Tensor
    sample_positions: Tensor
    sample_ids: Tensor
    shard: wlb.ForestShard
    cp_rank: int
    num_valid_tokens: int

    @property
    def cp_size(self) -> int:
        """Ranks of its context-parallel group."""
        return self.shard.cp_size

    @property
    def num_padding(self) -> int:
        """Tokens of padding, on all context-parallel ranks together: a root of their own, which predicts nothing."""
        forest = self.shard.forest
        padded = forest.num_samples > self.sample_ids.numel()
        return int(forest.lengths[int(forest.ends[-1])]) if padded else 0

    @property
    def real(self) -> Tensor:
        """Mask of the tokens of samples: bool [tokens_of_this_rank], False for padding."""
        return self.sample_counts > 0

    def to_samples(self, values: Tensor) -> Tensor:
        """Values of the predictions of each sample, from one value for each edge. Differentiable: gradients add up.

        Args:
            values: [edges, ...]: log-probabilities, for example.

        Returns:
            [predictions, ...], in the order of `sample_of` and `sample_positions`. On one of several context-parallel
            ranks only the predictions of this rank: sums over ranks are those of the micro-batch.

        Raises:
            wlb.WlbError: The number of values is not that of edges.
        """
        edges = self.edge_rows.numel()
        if values.ndim < 1 or values.shape[0] != edges:
            shape = tuple(values.shape)
            raise error("values", f"has shape {shape}: must be [{edges}, ...], one for each edge", value=shape)
        return values.index_select(0, self.sample_edges)

    def to(self, device: torch.device | str | int, non_blocking: bool = False) -> ForestBatch:
        """A copy of the batch with its tensors on `device`; `non_blocking` overlaps the copy if they are pinned."""
        return self._map(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> ForestBatch:
        """A copy of the batch in page-locked memory; `DataLoader(pin_memory=True)` calls it."""
        return self._map(Tensor.pin_memory)

    def _map(self, work: Callable[[Tensor], Tensor]) -> ForestBatch:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        moved: dict[str, Any] = {name: work(value) for name, value in values.items() if isinstance(value, Tensor)}
        return replace(self, **moved)

    def as_hf(self, model: Any = None, *, plain: bool = False) -> NoReturn:
        """Refused, because Hugging Face's causal models take a restart of positions for a new document.

        Raises:
            wlb.WlbError: Always.
        """
        message = "is of a forest: these models find documents by their positions, and know no shared prefix; "
        message += "run attention by wt.context_parallel_attention(q, k, v, batch.shard), or wt.collate the samples"
        raise error("batch", message, value=plain)


def collate_forest(
    samples: Sequence[Document | Any],
    micro_batch: wlb.ForestMicroBatch | wlb.PrefixForest,
    *,
    cp_rank: int = 0,
    cp_size: int = 1,
    multiple_of_tokens: int = 1,
) -> ForestBatch:
    """Packs the samples of a micro-batch, each shared token once, and keeps what this context-parallel rank computes.

    Every token predicts the next one of its sample; if different tokens follow in different samples, it predicts each
    of them. Each sample says which predictions count (`Document.labels`).

    Args:
        samples: those of the micro-batch, in the order of its `sample_ids`: each is a `Document`, bare token ids, or a
            mapping with `"input_ids"` and maybe `"labels"` or a mask (`wt.RowReader`).
        micro_batch: of a `wlb.ForestPlan`; or a forest, with all its samples.
        cp_rank: this rank in the context-parallel group.
        cp_size: ranks of that group.
        multiple_of_tokens: pads so that every context-parallel rank has a multiple of this number of unique tokens,
            with a root of its own, of token 0, that predicts nothing. Give this and `cp_size` to `wlb.pack_forest`,
            too.

    Returns:
        The batch, in ordinary memory of the CPU.

    Raises:
        wlb.WlbError: The number of samples is wrong; tokens that the forest shares differ (with the sample and the
            token); a sample is a piece of a document; labels are not the tokens; there are columns, which nodes do not
            have.

    Complexity:
        O(tokens of all samples).
    """
    if isinstance(micro_batch, wlb.ForestMicroBatch):
        forest, ids = micro_batch.forest, micro_batch.sample_ids
    elif isinstance(micro_batch, wlb.PrefixForest):
        forest, ids = micro_batch, np.arange(micro_batch.num_samples)
    else:
        kind = type(micro_batch).__name__
        raise error("micro_batch", f"is a {kind}, not a wlb.ForestMicroBatch or a wlb.PrefixForest", value=micro_batch)
    if len(samples) != forest.num_samples:
        message = (
            f"are {len(samples)}, but the micro-batch has {forest.num_samples}: give them in the order of sample_ids"
        )
        raise error("samples", message, value=len(samples))
    reader = RowReader()
    named = [_whole(reader, sample, number) for number, sample in enumerate(samples)]
    _check_sizes(named, forest)
    arrays = [sample.tokens for sample in named]
    offsets = np.cumsum([0, *(array.size for array in arrays)], dtype=np.int64)
    flat = np.concatenate(arrays, dtype=np.int64, casting="unsafe") if arrays else np.zeros(0, np.int64)
    forest.check_tokens(flat, offsets)
    check_integer("cp_rank", cp_rank, minimum=0)
    unique = forest.unique_tokens
    padding = padded_tokens(unique, multiple_of_tokens=multiple_of_tokens, cp_size=cp_size) - unique
    shard = wlb.shard_forest(_filled(forest, padding) if padding else forest, cp_size=cp_size)
    if cp_rank >= cp_size:
        raise error("cp_rank", f"= {cp_rank}: the group has ranks 0 to {cp_size - 1}", value=cp_rank)

    packed = shard.forest  # the forest with nodes in memory order; padding is the last sample
    tokens = np.zeros(packed.unique_tokens, np.int64)
    paths = paths_of(packed)[: len(named)]
    times = np.zeros(packed.unique_tokens, np.int64)
    counted: list[Ints] = []  # positions of the tokens that each sample predicts
    for number, (sample, at) in enumerate(zip(named, paths, strict=True)):
        tokens[at] = sample.tokens
        times[at] += 1
        follows = np.ones(at.size - 1, bool) if sample.labels is None else _counts(sample, number)
        counted.append(np.flatnonzero(follows) + 1)

    # An edge is named by the predicted token, because each token except the first of a root is predicted by one token.
    before = _Runs.of(packed).before
    mine = shard.rank(cp_rank).token_indices
    row = np.full(tokens.size, -1, np.int64)
    row[mine] = np.arange(mine.size)
    held = (before >= 0) & (row[np.maximum(before, 0)] >= 0)
    predicted = [places[positions] for places, positions in zip(paths, counted, strict=True)]
    learnt = np.zeros(tokens.size, bool)
    for places in predicted:
        learnt[places] = True
    targets = np.flatnonzero(held & learnt)
    edge = np.full(tokens.size, -1, np.int64)
    edge[targets] = np.arange(targets.size)

    expanded, whose, where = [], [], []
    for number, (places, positions) in enumerate(zip(predicted, counted, strict=True)):
        edges = edge[places]
        expanded.append(edges[edges >= 0])
        where.append(positions[edges >= 0])
        whose.append(np.full(expanded[-1].size, number, np.int64))
    sample_edges = np.concatenate([*expanded, np.zeros(0, np.int64)])
    return ForestBatch(
        tokens=torch.from_numpy(tokens[mine]),
        position_ids=torch.from_numpy(shard.rank(cp_rank).position_ids.astype(np.int64)),
        sample_counts=torch.from_numpy(times[mine]),
        edge_rows=torch.from_numpy(row[before[targets]]),
        edge_targets=torch.from_numpy(tokens[targets]),
        edge_weights=torch.from_numpy(np.bincount(sample_edges, minlength=targets.size).astype(np.int64)),
        sample_edges=torch.from_numpy(sample_edges),
        sample_of=torch.from_numpy(np.concatenate([*whose, np.zeros(0, np.int64)])),
        sample_positions=torch.from_numpy(np.concatenate([*where, np.zeros(0, np.int64)])),
        sample_ids=torch.from_numpy(np.asarray(ids, np.int64).copy()),
        shard=shard,
        cp_rank=cp_rank,
        num_valid_tokens=int(sum(positions.size for positions in counted)),
    )


def forest_step(
    samples: Sequence[Document | Any],
    plan: wlb.ForestPlan,
    *,
    number: int = 0,
    dp_rank: int = 0,
    dp_size: int | None = None,
    cp_rank: int = 0,
    cp_size: int = 1,
    multiple_of_tokens: int = 1,
) -> Step[ForestBatch]:
    """This rank's part of the step of a plan, as `train_step` and `verify` take it.

    Args:
        samples: all samples of the plan's forest, by their ids: anything with indices. Only those of this rank are
            read. Each is what `collate_forest` takes.
        plan: of `wlb.pack_forest`, the same on all ranks.
        number: steps before this one, since the run began.
        dp_rank: this rank among the data-parallel ranks.
        dp_size: data-parallel ranks; None: the number for which the plan was made, or one.
        cp_rank: this rank in the context-parallel group.
        cp_size: ranks of that group.
        multiple_of_tokens: as `collate_forest` takes it.

    Returns:
        The step; its `indices` are those of this rank's micro-batches in the plan (`plan.deal`).

    Raises:
        wlb.WlbError: The number of samples is not the plan's; a rank does not exist; ranks cannot have equally many
            micro-batches; and for what `collate_forest` refuses.

    Complexity:
        O(tokens of this rank's samples).

    Examples:
        >>> import wlb, wlb.torch as wt
        >>> samples = [[5, 6, 7, 1, 2], [5, 6, 7, 3], [8, 9], [8, 4]]
        >>> forest = wlb.PrefixForest.from_tokens(sum(samples, []), [0, 5, 9, 11, 13])
        >>> cost = wlb.CostModel(attention=1.0, linear=9.0)
        >>> plan = wlb.pack_forest(forest, num_micro_batches=2, max_tokens=8, cost_model=cost, dp_size=2)
        >>> step = wt.forest_step(samples, plan, dp_rank=0)
        >>> step.num_ranks, [batch.num_valid_tokens for batch in step.micro_batches]
        (2, [7])
    """
    if not isinstance(plan, wlb.ForestPlan):
        raise error("plan", f"is a {type(plan).__name__}, not a wlb.ForestPlan", value=plan)
    if len(samples) != plan.forest.num_samples:
        message = f"are {len(samples)}, but the plan's forest has {plan.forest.num_samples}: give all, by their ids"
        raise error("samples", message, value=len(samples))
    if dp_size is None:
        dp_size = plan.dp_size or 1
    check_integer("dp_size", dp_size, minimum=1)
    check_integer("dp_rank", dp_rank, minimum=0, maximum=dp_size - 1)
    indices = plan.deal(dp_size)[dp_rank]
    batches = [
        collate_forest(
            [samples[sample] for sample in plan[index].sample_ids.tolist()],
            plan[index],
            cp_rank=cp_rank,
            cp_size=cp_size,
            multiple_of_tokens=multiple_of_tokens,
        )
        for index in indices.tolist()
    ]
    return Step(number, 0, plan, indices, batches)


def paths_of(forest: wlb.PrefixForest) -> list[Ints]:
    """Places of the tokens of each sample, if the nodes of the forest follow one another."""
    runs = _Runs.of(forest)
    return [runs.of_sample(int(end)) for end in forest.ends]


@dataclass(frozen=True)
class _Runs:
    """Places of the nodes of a forest in memory."""

    forest: wlb.PrefixForest
    parents: Ints
    start: Ints
    end: Ints
    before: Ints  # place of the token before each on its path, -1 for the first token of a root

    @classmethod
    def of(cls, forest: wlb.PrefixForest) -> _Runs:
        parents, lengths = forest.parents.astype(np.int64), forest.lengths.astype(np.int64)
        end = np.cumsum(lengths)
        start = end - lengths
        before = np.arange(-1, int(lengths.sum()) - 1)
        before[start] = np.where(parents < 0, -1, end[np.maximum(parents, 0)] - 1)
        return cls(forest, parents, start, end, before)

    def of_sample(self, node: int) -> Ints:
        """Places of the tokens on the path to a node, in their order."""
        runs = []
        while node >= 0:
            runs.append(np.arange(self.start[node], self.end[node]))
            node = int(self.parents[node])
        return np.concatenate(runs[::-1])


def _filled(forest: wlb.PrefixForest, padding: int) -> wlb.PrefixForest:
    """The forest with a root of padding, which is its last sample and its last root."""
    parents, lengths = np.append(forest.parents, -1), np.append(forest.lengths, padding)
    return wlb.PrefixForest.from_parents(parents, lengths, np.append(forest.ends, forest.num_nodes))


def _check_sizes(samples: Sequence[Document], forest: wlb.PrefixForest) -> None:
    """Refuses samples of other lengths than the forest's."""
    sizes = [places.size for places in paths_of(forest)]
    found = [sample.tokens.size for sample in samples]
    for number, (size, wanted) in enumerate(zip(found, sizes, strict=True)):
        if size != wanted:
            other = sorted(found) == sorted(sizes)
            what = "they are in another order" if other else "these are other samples"
            message = f"has {size} tokens, and sample {number} of the forest has {wanted}: {what}; give those of "
            raise error("samples", message + "sample_ids, in their order", index=number, value=size)


def _whole(reader: RowReader, row: Document | Any, number: int) -> Document:
    if isinstance(row, Mapping):
        for name, value in row.items():
            if name not in KNOWN and not is_text(value):
                message = f"has the column {name!r}: nodes have tokens and labels alone; leave it out of the samples"
                raise error("samples", message, index=number, value=name)
    rows = reader.documents(row, number, "samples")
    if len(rows) != 1:
        raise error("samples", f"holds {len(rows)} documents: a sample is one", index=number, value=len(rows))
    sample = as_arrays(rows[0], "samples", number)
    if sample.start or sample.next_token is not None:
        message = "is a piece of a document: a forest has whole samples, since nodes are told by what is before them"
        raise error("samples", message, index=number, value=sample.start)
    if sample.columns:
        names = ", ".join(sorted(sample.columns))
        raise error(
            "samples",
            f"has columns ({names}): nodes have tokens and labels alone; leave them out of the samples",
            index=number,
            value=names,
        )
    return sample


def _counts(sample: Document, number: int) -> NDArray[np.bool_]:
    """Mask of the tokens, without the first, that are to be predicted."""
    labels = np.asarray(sample.labels[1:])
    counts: NDArray[np.bool_] = labels != IGNORE
    if (wrong := np.flatnonzero(counts & (labels != sample.tokens[1:]))).size:
        at = int(wrong[0]) + 1
        message = (
            f"has label {labels[at - 1]} for token {at}: on a path the token that follows is the label, or {IGNORE}"
        )
        raise error("samples", message, index=number, value=int(labels[at - 1]))
    return counts
