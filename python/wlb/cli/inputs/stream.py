"""The stream of global batches that every method of a comparison sees."""

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
from cyclopts.types import NonNegativeInt
from numpy.typing import NDArray

import wlb
from wlb.cli.errors import CliError
from wlb.cli.inputs.documents import Documents, Reading
from wlb.cli.inputs.options import options
from wlb.cli.words import counted
from wlb.simulation.stream import GlobalBatches

Oversize = Literal["split", "truncate", "error"]

_MOST_PIECES = 10**8  # of several epochs, at 75 bytes each


@dataclass(frozen=True)
class Stream(GlobalBatches):
    """Global batches of the documents of a source.

    A source document longer than the context arrives as several, one after the other.
    """

    ids: NDArray[np.int64]  # [n] document of the source
    starts: NDArray[np.int64]  # [n] its first token inside that document
    epochs: int  # passes over the source, the last one perhaps not to its end


@options("Documents")
@dataclass(frozen=True, kw_only=True)
class Ordered(Reading):
    """How documents are read, and how they become a stream.

    Args:
        seed: shuffles the documents, every epoch anew; by default they come in the source's order.
        oversize: what to do with documents longer than the context.
    """

    seed: NonNegativeInt | None = None
    oversize: Oversize = "split"

    def stream(self, documents: Documents, *, context: int, tokens_per_batch: int, steps: int | None) -> Stream:
        """Orders the documents, fits them to `context` tokens and forms global batches, see :func:`build_stream`."""
        return build_stream(
            documents,
            context=context,
            tokens_per_batch=tokens_per_batch,
            seed=self.seed,
            steps=steps,
            oversize=self.oversize,
        )


def build_stream(
    documents: Documents,
    *,
    context: int,
    tokens_per_batch: int,
    seed: int | None,
    steps: int | None,
    oversize: Oversize = "split",
) -> Stream:
    """Orders the documents, fits them to `context` tokens and forms global batches of `tokens_per_batch`.

    With a seed, every epoch is shuffled anew; without one the order is the source's. With `steps`, epochs
    follow one another until there are so many global batches; without, there is one epoch and the last batch
    may be small.
    """
    lengths = np.minimum(documents.lengths, context) if oversize == "truncate" else documents.lengths
    count, tokens = lengths.size, int(lengths.sum())
    if tokens < tokens_per_batch:
        raise CliError(
            f"{documents.source}: {counted(count, 'document')} with {tokens:,}"
            f" {documents.unit} do not fill a global batch of {tokens_per_batch:,};"
            " lower --context or --micro-batches"
        )
    epochs = 1 if steps is None else math.ceil(steps * tokens_per_batch / tokens)
    most = epochs * (count + tokens // context)  # pieces, at most
    if epochs > 1 and most > _MOST_PIECES:
        raise CliError(
            f"--steps {steps:,}: {epochs:,} epochs of {documents.source}, up to {most:,} documents; the most is"
            f" {_MOST_PIECES:,}"
        )
    generator = None if seed is None else np.random.default_rng(seed)
    order = np.concatenate(
        [np.arange(count) if generator is None else generator.permutation(count) for _ in range(epochs)]
    )
    lengths, ids = lengths[order], documents.ids[order]

    starts = np.zeros_like(lengths)
    if oversize == "split":
        pieces, first, lengths = wlb.split_documents(lengths, max_document_tokens=context)
        ids, starts = ids[pieces], first.astype(np.int64)
    elif lengths.max() > context:
        worst = int(lengths.argmax())
        raise CliError(
            f"{documents.source}: document {ids[worst]} has {lengths[worst]:,} {documents.unit}, more than"
            f" --context {context:,}; choose --oversize split or truncate"
        )

    # No batch exceeds `tokens_per_batch`, so the epochs hold `steps` of them; the small last one is cut off.
    offsets = wlb.batch_offsets(lengths, tokens_per_batch=tokens_per_batch)
    if steps is not None:
        offsets = offsets[: steps + 1]
    used = int(offsets[-1])
    return Stream(lengths[:used].astype(np.int64), offsets, ids[:used], starts[:used], epochs)
