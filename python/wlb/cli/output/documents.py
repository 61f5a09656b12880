"""The documents of a source, as numbers and in words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from wlb.cli.inputs.stream import Stream
from wlb.cli.words import counted
from wlb.simulation.methods import Setup


def describe_documents(stream: Stream, context: int) -> dict[str, Any]:
    """The documents of a source and what the stream took of them; lengths in `unit`."""
    documents, lengths = stream.documents, stream.documents.lengths
    return {
        "source": documents.source,
        "unit": documents.unit,
        "distinct": lengths.size,
        "distinct_used": np.unique(stream.ids).size,
        "empty": documents.empty,
        "tokens": documents.tokens,
        "mean": float(lengths.mean()),
        "median": float(np.median(lengths)),
        "p99": float(np.quantile(lengths, 0.99)),
        "longest": int(lengths.max()),
        "longer_than_context": int((lengths > context).sum()),
        "epochs": stream.epochs,
        "global_batches": stream.batches,
        "streamed_tokens": int(stream.lengths.sum()),
        "streamed_documents": stream.lengths.size,
    }


def document_sentences(described: Mapping[str, Any], setup: Setup, *, oversize: str) -> list[str]:
    """What `describe_documents` found, in words."""
    d = described
    sentences = [
        f"{d['source']}: {d['distinct']:,} documents, {d['tokens']:,} {d['unit']}"
        f" (median {d['median']:,.0f}, p99 {d['p99']:,.0f}, longest {d['longest']:,})."
        f"{' A byte counts as a token.' if d['unit'] == 'bytes' else ''}",
        f"{d['global_batches']:,} global batches of up to {setup.tokens_per_batch:,} tokens"
        f" ({setup.num_micro_batches} micro-batches x {setup.context:,}), from"
        f" {d['distinct_used']:,} distinct documents in {counted(d['epochs'], 'epoch')}.",
    ]
    if d["longer_than_context"]:
        fate = {"split": "split", "truncate": "truncated"}[oversize]
        sentences.append(f"{d['longer_than_context']:,} documents longer than the context are {fate} to fit it.")
    return sentences
