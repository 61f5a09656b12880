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
from wlb._core import forest_edges, padded_tokens
from wlb._errors import check_integer, error
from wlb._shown import explained
from wlb.reading.documents import IGNORE, Document
from wlb.reading.rows import KNOWN, RowReader, is_text
from wlb.reading.values import as_arrays

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
        sample_of: int64 [predictions]: its sample, as an index into `document_ids`.
        sample_positions: int64 [predictions]: position in its sample of the predicted token.
        document_ids: int64 [samples]: their numbers in the plan.
        shard: the places of the tokens on all context-parallel ranks.
        cp_rank: the rank whose tokens these are.
        num_valid_tokens: predictions that count, of all samples and context-parallel ranks together, as many as without
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
    document_ids: Tensor
    shard: wlb.Shard
    cp_rank: int
    num_valid_tokens: int

    @property
    def cp_size(self) -> int:
        """Ranks of its context-parallel group."""
        return self.shard.cp_size

    @property
    def forest(self) -> wlb.PrefixForest:
        """Its forest, with nodes in memory order. With padding, this is the last sample and the last root."""
        return forest_of(self.shard)

    @property
    def num_padding(self) -> int:
        """Tokens of padding, on all context-parallel ranks together: a root of their own, which predicts nothing."""
        forest = self.forest
        padded = forest.num_samples > self.document_ids.numel()
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
            wlb.WlbError: the number of values is not that of edges.
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


def collate_samples(
    samples: Sequence[Document | Any],
    micro_batch: wlb.MicroBatch | wlb.PrefixForest,
    *,
    cp_rank: int,
    cp_size: int,
    multiple_of_tokens: int,
) -> ForestBatch:
    """`collate` for the samples of a forest.

    Complexity:
        O(tokens of all samples).
    """
    forest = micro_batch.forest if isinstance(micro_batch, wlb.MicroBatch) else micro_batch
    assert forest is not None
    reader = RowReader()
    named = [_whole(reader, sample, number) for number, sample in enumerate(samples)]
    ids = micro_batch.document_ids if isinstance(micro_batch, wlb.MicroBatch) else np.arange(len(named))
    sizes = np.array([sample.tokens.size for sample in named], np.int64)
    check_planned(sizes, forest.sample_lengths, ", and sample {} of the forest")
    offsets = np.cumsum([0, *sizes], dtype=np.int64)
    flat = np.concatenate([np.zeros(0, np.int64), *(each.tokens for each in named)], dtype=np.int64, casting="unsafe")
    forest.check_tokens(flat, offsets)
    check_integer("cp_rank", cp_rank, minimum=0)
    unique = forest.unique_tokens
    padding = padded_tokens(unique, multiple_of_tokens=multiple_of_tokens, cp_size=cp_size) - unique
    shard = wlb.shard(_filled(forest, padding) if padding else forest, cp_size=cp_size)
    if cp_rank >= cp_size:
        raise error("cp_rank", f"= {cp_rank}: the group has ranks 0 to {cp_size - 1}", value=cp_rank)
    counts = np.concatenate([np.zeros(0, bool), *(_counts(sample, number) for number, sample in enumerate(named))])
    arrays: dict[str, Any] = forest_edges(shard, cp_rank, tokens=flat, counts=counts)
    return ForestBatch(
        **{name: torch.from_numpy(values) for name, values in arrays.items()},
        position_ids=torch.from_numpy(shard.rank(cp_rank).position_ids.astype(np.int64)),
        document_ids=torch.from_numpy(ids),
        shard=shard,
        cp_rank=cp_rank,
        num_valid_tokens=int(counts.sum()),
    )


def forest_of(shard: wlb.Shard) -> wlb.PrefixForest:
    """The forest of a shard that has one."""
    assert shard.forest is not None
    return shard.forest


def paths_of(shard: wlb.Shard) -> list[Ints]:
    """Packed indices of the tokens of each sample of a forest."""
    forest = forest_of(shard)
    return np.split(forest.token_indices, np.cumsum(forest.sample_lengths, dtype=np.int64)[:-1])


def _filled(forest: wlb.PrefixForest, padding: int) -> wlb.PrefixForest:
    """The forest with a root of padding, which is its last sample and its last root."""
    parents, lengths = np.append(forest.parents, -1), np.append(forest.lengths, padding)
    return wlb.PrefixForest.from_parents(parents, lengths, np.append(forest.ends, forest.num_nodes))


def check_planned(found: Ints, wanted: NDArray[np.int32], said: str) -> None:
    """Refuses documents of other lengths than planned.

    Args:
        found: their lengths.
        wanted: those of the micro-batch.
        said: where the planned length stands, for the error; with {} for the document's number.
    """
    if found.size != wanted.size:
        message = f"are {found.size}, but the micro-batch has {wanted.size}: give them in the order of document_ids"
        raise error("documents", message, value=found.size)
    for number in np.flatnonzero(found != wanted)[:1].tolist():
        other = np.array_equal(np.sort(found), np.sort(wanted))
        what = "they are in another order" if other else "these are other samples"
        message = f"has {found[number]} tokens{said.format(number)} has {wanted[number]}: {what}; give those of "
        raise error("documents", message + "document_ids, in their order", index=number, value=int(found[number]))


def _whole(reader: RowReader, row: Document | Any, number: int) -> Document:
    if isinstance(row, Mapping):
        for name, value in row.items():
            if name not in KNOWN and not is_text(value):
                message = f"has the column {name!r}: nodes have tokens and labels alone; leave it out of the samples"
                raise error("documents", message, index=number, value=name)
    rows = reader.documents(row, number, "documents")
    if len(rows) != 1:
        raise error("documents", f"holds {len(rows)} documents: a sample is one", index=number, value=len(rows))
    sample = as_arrays(rows[0], "documents", number)
    if sample.start or sample.next_token is not None:
        message = "is a piece of a document: a forest has whole samples, since nodes are told by what is before them"
        raise error("documents", message, index=number, value=sample.start)
    if sample.columns:
        names = ", ".join(sorted(sample.columns))
        raise error(
            "documents",
            f"has columns ({names}): nodes have tokens and labels alone; leave them out of the samples",
            index=number,
            value=names,
        )
    return sample


def _counts(sample: Document, number: int) -> NDArray[np.bool_]:
    """Mask of the tokens that are to be predicted: never the first."""
    if sample.labels is None:
        return np.arange(sample.tokens.size) > 0
    labels = np.asarray(sample.labels)
    counts: NDArray[np.bool_] = (labels != IGNORE) & (np.arange(labels.size) > 0)
    if (wrong := np.flatnonzero(counts & (labels != sample.tokens))).size:
        at = int(wrong[0])
        message = f"has label {labels[at]} for token {at}: on a path the token that follows is the label, or {IGNORE}"
        raise error("documents", message, index=number, value=int(labels[at]))
    return counts
