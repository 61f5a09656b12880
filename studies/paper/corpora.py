"""Lengths for the corpora of NVIDIA's report on Dynamic-CP: it names GitHub and CommonCrawl, and publishes no lengths.

Each is a log-normal distribution with two facts that others publish of such a corpus. They were taken before anything
was run with them, and nothing about them was fitted to the report's results. Real tails are heavier than log-normal
ones.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Corpus:
    """Documents whose lengths' logarithms are normal.

    Args:
        mean: tokens of a document.
        spread: standard deviation of the logarithm.
        source: where the two facts are from.
    """

    mean: float
    spread: float
    source: str

    @classmethod
    def with_long_documents(cls, mean: float, *, tokens: int, share: float, source: str) -> Corpus:
        """`share` of the documents have at least `tokens` tokens; the smaller of the two spreads that have it."""
        quantile = NormalDist().inv_cdf(1 - share)
        return cls(mean, quantile - math.sqrt(quantile**2 - 2 * math.log(tokens / mean)), source)

    @classmethod
    def with_long_files(cls, mean: float, *, longest: float, hold: float, source: str) -> Corpus:
        """The `longest` share of the documents holds the share `hold` of the tokens."""
        normal = NormalDist()
        return cls(mean, normal.inv_cdf(1 - longest) - normal.inv_cdf(1 - hold), source)

    def wider(self, factor: float) -> Corpus:
        """The same mean at another spread."""
        return replace(self, spread=self.spread * factor)

    def lengths(self, count: int, window: int, generator: np.random.Generator) -> NDArray[np.int64]:
        """`count` documents, cut off at the window: int64[count] tokens, at least 1."""
        drawn = generator.lognormal(math.log(self.mean) - self.spread**2 / 2, self.spread, count)
        return np.clip(np.rint(drawn), 1, window).astype(np.int64)


CORPORA = {
    "GitHub": Corpus.with_long_files(
        430e9 / 236e6,
        longest=0.02,
        hold=0.2,
        source="430 B tokens in 236 M files (The Stack in the card of Dolma); the longest 2 % of its Python files hold"
        " about 20 % of their tokens (arXiv 2407.00434)",
    ),
    "CommonCrawl": Corpus.with_long_documents(
        20.5e12 / 14.5e9,
        tokens=65536,
        share=6_661_465 / 14.5e9,
        source="20.5 T tokens in 14.5 B English documents (card of RedPajama-V2), of which 6,661,465 have 65,536"
        " tokens and passed a filter (LongCrawl64)",
    ),
}
"""By the report's names."""
