"""What a rank trains of a micro-batch, with real text of the lengths that a plan has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

import wlb
from studies.trainer.corpus import read_corpus
from wlb.torch.attention import prepare_attention
from wlb.torch.data import Document, PackedBatch
from wlb.torch.data.collate import packed
from wlb_tools.simulation.outcome import Outcome, RankPart

_TEXT_BYTES = 1 << 22


@dataclass(frozen=True)
class Part:
    """A `wlb_tools.simulation.outcome.RankPart` by itself, to be sent to the process that trains it."""

    documents: NDArray[np.int64]
    starts: NDArray[np.int64]
    lengths: NDArray[np.int64]
    shard: wlb.Shard
    rank: int
    cp_size: int
    first_rank: int | None

    @classmethod
    def of(cls, outcome: Outcome, part: RankPart) -> Part:
        """One of a run."""
        run, rows = outcome.run, part.pieces
        which = (run.document[rows], run.start[rows], run.length[rows])
        return cls(*which, part.shard, part.rank, part.cp_size, part.first_rank)

    @property
    def valid_tokens(self) -> int:
        """Labels of its whole documents: all tokens but the last of each."""
        return int((self.lengths - 1).sum())


class Text:
    """Bytes of Python's own library. Document `i` begins anywhere in them, always in the same place."""

    def __init__(self) -> None:
        corpus, found, size = read_corpus(None), [], 0
        for index in range(len(corpus)):
            found.append(corpus[index])
            size += found[-1].size
            if size >= _TEXT_BYTES:
                break
        self._text: NDArray[Any] = np.concatenate(found)

    def document(self, document: int, start: int, length: int) -> NDArray[Any]:
        """Its tokens from `start` on."""
        places = (document * 7919 + start + np.arange(length)) % self._text.size
        return self._text[places]

    def batch(self, part: Part, device: torch.device) -> PackedBatch:
        """The tokens of a part on its device, and what attention has to know of them made ready."""
        rows = zip(part.documents.tolist(), part.starts.tolist(), part.lengths.tolist(), strict=True)
        tokens, labels = packed([Document(self.document(*row), row[0], row[1]) for row in rows])
        mine = part.shard.rank(part.rank).token_indices
        prepare_attention(part.shard, rank=part.rank, device=device)
        return PackedBatch.of(
            torch.from_numpy(tokens[mine]),
            torch.from_numpy(labels[mine]),
            document_ids=part.documents,
            shard=part.shard,
            cp_rank=part.rank,
            num_valid_tokens=int(np.count_nonzero(labels != -100)),
            cp_first_rank=part.first_rank,
        ).to(device)
