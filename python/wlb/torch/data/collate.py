"""Makes tensors of the documents of one micro-batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, overload

import numpy as np
import torch
from numpy.typing import ArrayLike

import wlb
from wlb._core import padded_tokens
from wlb._errors import check_integer, error
from wlb.reading.columns import common_layout, filled_up, layout_of
from wlb.reading.documents import Document, num_labels
from wlb.reading.packed import Run, joined, pack, whole_runs
from wlb.reading.rows import RowReader
from wlb.reading.values import as_arrays, integers
from wlb.torch.data.batch import PackedBatch, count_positions, shared_rows
from wlb.torch.data.forest import ForestBatch, check_planned, collate_samples


@overload
def collate(documents: Sequence[Document | Any], micro_batch: None = None, **options: Any) -> PackedBatch: ...
@overload
def collate(documents: Sequence[Document | Any], micro_batch: wlb.PrefixForest, **options: Any) -> ForestBatch: ...
@overload
def collate(documents: Sequence[Document | Any], micro_batch: wlb.MicroBatch, **options: Any) -> Any: ...
def collate(
    documents: Sequence[Document | Any],
    micro_batch: wlb.MicroBatch | wlb.PrefixForest | None = None,
    *,
    cp_rank: int = 0,
    cp_size: int = 1,
    strategy: str = "auto",
    causal: bool = True,
    document_ids: ArrayLike | None = None,
    multiple_of_tokens: int = 1,
    token_buckets: Sequence[int] = (),
    max_documents: int | None = None,
    columns: Sequence[str] = (),
    labels_ahead: int = 1,
    **sharding: Any,
) -> PackedBatch | ForestBatch:
    """Packs documents one after the other and keeps what this context-parallel rank computes.

    Labels are shifted in the whole sequence before it is sharded: every token predicts the next one of its document, on
    whatever rank that is, and the last one predicts nothing. The last token of a *piece* predicts the first of the next
    piece (`Document.next_token`), so a cut changes only what tokens see. Tokens that are not to be learnt
    (`Document.labels`) are seen, and count in the plan, like all others.

    With a forest, documents are its samples: each shared token is there once, and predicts every token that follows it
    in some sample. Padding is a root of its own.

    Use it as the `collate_fn` of a `DataLoader`: `functools.partial(collate, cp_rank=..., cp_size=...)`.

    Args:
        documents: each is a `Document`; or bare token ids: array, tensor, bytes or sequence of integers, [n], n >= 1;
            or a mapping with `"input_ids"`, and maybe `"labels"` and other columns (`wlb.torch.RowReader` says what
            they mean). May be empty; the batch is then empty.
        micro_batch: of a plan; the documents are then those of its `document_ids`, in their order. Or a
            `wlb.PrefixForest`, with all its samples. None: documents without a plan.
        cp_rank: this rank in the context-parallel group.
        cp_size: ranks of that group.
        strategy: as in `wlb.shard`.
        causal: as in `wlb.shard`. Labels are those of next-token prediction either way.
        document_ids: int64 [documents], instead of those in the documents; by default rows have their index here.
        multiple_of_tokens: pads so that every context-parallel rank has a multiple of this number of tokens (all have
            equally many). Give this and `cp_size` to the packer, too, which counts the padding. The padding is a
            document of its own with token 0, positions from 0 and no labels.
        token_buckets: pads to the first of these sizes that is large enough, ascending; as in the packer.
        max_documents: `cu_seqlens` has this and 2 entries (with padding's), as CUDA graphs need.
        columns: names of further columns of rows to carry, as `PackedBatch.columns`. If the documents were read with
            columns, give these here too, so that an empty batch also has them.
        labels_ahead: how many tokens ahead every token predicts, for multi-token prediction. Above 1 the batch has
            `columns["labels_ahead"]`, int64 [labels_ahead - 1, tokens]: in row j the label j + 2 ahead in the document,
            on whatever rank that token is. To roll each rank's labels would be wrong where documents or ranks meet.
        **sharding: further arguments of `wlb.shard`: `max_imbalance`, `kernel_model` and `cp_seconds_per_key` for
            "adaptive", ...

    Returns:
        The batch, in ordinary memory of the CPU: a `ForestBatch` with a forest, else a `PackedBatch`.

    Raises:
        wlb.WlbError: an argument is invalid; names the document. Documents are not those of the micro-batch. With a
            forest: tokens that the forest shares differ (names the sample and the token); a sample is a piece of a
            document, or has columns, which nodes do not have; labels are not the tokens; `strategy`, `causal`,
            `document_ids`, `token_buckets`, `max_documents`, `columns`, `labels_ahead` or further arguments are given.

    Complexity:
        O(documents), and one copy of the tokens and columns of this rank. With a forest O(tokens of all samples).
    """
    if isinstance(micro_batch, wlb.PrefixForest) or (
        isinstance(micro_batch, wlb.MicroBatch) and micro_batch.forest is not None
    ):
        only_documents = {
            "strategy": strategy != "auto",
            "causal": not causal,
            "document_ids": document_ids is not None,
            "token_buckets": len(token_buckets) > 0,
            "max_documents": max_documents is not None,
            "columns": len(columns) > 0,
            "labels_ahead": labels_ahead != 1,
            **dict.fromkeys(sharding, True),
        }
        for name in (name for name, given in only_documents.items() if given):
            raise error(name, "is for documents: leave it out for the samples of a forest")
        sizes: dict[str, Any] = {"cp_size": cp_size, "multiple_of_tokens": multiple_of_tokens}
        return collate_samples(documents, micro_batch, cp_rank=cp_rank, **sizes)
    if micro_batch is not None and not isinstance(micro_batch, wlb.MicroBatch):
        kind = type(micro_batch).__name__
        raise error("micro_batch", f"is a {kind}, not a wlb.MicroBatch or a wlb.PrefixForest", value=micro_batch)
    reader = RowReader(columns, labels_ahead)
    named: list[Document] = []
    for number, document in enumerate(documents):
        found = reader.documents(document, number, "documents", first_id=len(named))
        named += [as_arrays(part, "documents", number) for part in found]
    lengths = np.array([document.tokens.size for document in named], np.int64)
    if micro_batch is not None:
        check_planned(lengths, micro_batch.lengths, " where the plan")
        document_ids = micro_batch.document_ids if document_ids is None else document_ids
    if document_ids is None:
        ids = integers([document.id for document in named], "documents", "id")
    else:
        given = np.array(document_ids, object)  # every number as it is
        if given.shape != (len(named),):
            raise error("document_ids", f"has shape {given.shape}, not [{len(named)}]", value=given.shape)
        ids = integers(given.tolist(), "document_ids", "id")
    followers = [0 if document.next_token is None else document.next_token for document in named]
    integers(followers, "documents", "next_token")
    if max_documents is not None and len(named) > max_documents:
        message = f"= {max_documents}: these are {len(named)} documents; give the packer the same limit"
        raise error("max_documents", message, value=max_documents)
    total = int(lengths.sum())
    sizes = {"multiple_of_tokens": multiple_of_tokens, "token_buckets": token_buckets}
    padding = padded_tokens(total, cp_size=cp_size, **sizes) - total
    if padding:
        lengths = np.append(lengths, padding)
    shard = wlb.shard(lengths, cp_size=cp_size, strategy=strategy, causal=causal, **sharding)  # type: ignore[arg-type]
    check_integer("cp_rank", cp_rank, minimum=0)
    if cp_rank >= cp_size:
        raise error("cp_rank", f"= {cp_rank}: the group has ranks 0 to {cp_size - 1}", value=cp_rank)

    layout = common_layout([layout_of(document) for document in named], "documents")
    held = shard.rank(cp_rank)
    runs = held_runs(held) if cp_size > 1 or padding else whole_runs(named)
    own_positions = any(name == "position_ids" for name, *_ in layout)
    rows = shared_rows(2 if own_positions else 3, held.num_tokens)
    on_host = rows.numpy()
    pack(named, runs, on_host[0], on_host[1])
    if not own_positions:
        count_positions(held, shard.lengths, len(named), on_host[2])
    if named:
        further = joined(named, layout, runs)
    else:
        further = {name: filled_up(name, values, held.num_tokens) for name, values in reader.nothing().items()}
    return PackedBatch.of(
        rows[0],
        rows[1],
        document_ids=ids,
        shard=shard,
        cp_rank=cp_rank,
        num_valid_tokens=sum(num_labels(document) for document in named),
        position_ids=None if own_positions else rows[2],
        cu_seqlens_size=None if max_documents is None else max_documents + 2,
        columns={name: torch.from_numpy(np.ascontiguousarray(values)) for name, values in further.items()},
    )


def held_runs(held: wlb.RankShard) -> list[Run]:
    """Runs of documents that a rank holds, in the order of its rows."""
    rows = held.cu_seqlens_q
    starts = held.position_ids[rows[:-1]]
    ends = starts + np.diff(rows)
    return list(zip(held.documents.tolist(), starts.tolist(), ends.tolist(), strict=True))
