"""Hypothesis strategies: document lengths, cost models and packer settings, with the edges drawn often."""

from typing import Any

from hypothesis import strategies as st

from wlb.testing.cost import AnalyticCost
from wlb.testing.kernel import profile


def document_lengths(*, max_length: int, min_size: int = 0, max_size: int = 40) -> st.SearchStrategy[list[int]]:
    """Lengths of one batch: short ones, some near the limit, simple parts of it; often only few values."""
    short = st.integers(1, min(max_length, 8))
    near_limit = st.integers(max(1, max_length - 3), max_length)
    anything = st.integers(1, max_length)
    parts = st.sampled_from([max(1, max_length // part) for part in (2, 3, 4)])
    length = st.one_of(short, anything, parts, near_limit)
    few_values = st.lists(length, min_size=1, max_size=3).flatmap(
        lambda values: st.lists(st.sampled_from(values), min_size=min_size, max_size=max_size)
    )
    return st.lists(length, min_size=min_size, max_size=max_size) | few_values


def costs(*, exact: bool = False) -> st.SearchStrategy[AnalyticCost]:
    """Cost models: `exact` ones have whole coefficients, so that sums of costs carry no rounding."""
    whole = st.integers(0, 1000).map(float)
    real = st.floats(1e-12, 1e3)
    coefficient = whole if exact else st.one_of(whole, real)
    return st.builds(AnalyticCost, coefficient, coefficient, st.booleans()).filter(
        lambda cost: cost.attention > 0 or cost.linear > 0
    )


@st.composite
def kernel_profiles(draw: st.DrawFn) -> dict[str, Any]:
    """Profiles with any grid and times in no order, as `wlb.KernelModel.from_profile` reads them."""
    lengths = st.sets(st.integers(1, 300) | st.sampled_from([128, 512, 4096]), min_size=1, max_size=5)
    query_lengths = sorted(draw(lengths))
    key_lengths = sorted(draw(lengths) | {query_lengths[-1]})

    def table() -> list[list[float | None]]:
        seconds = st.floats(1e-7, 1e-3)
        return [[draw(seconds) if queries <= keys else None for keys in key_lengths] for queries in query_lengths]

    return profile(
        query_lengths=query_lengths,
        key_lengths=key_lengths,
        forward=table(),
        backward=table(),
        tile=draw(st.sampled_from([1, 16, 100, 128])),
        causal=draw(st.booleans()),
    )


@st.composite
def packer_settings(draw: st.DrawFn, *, max_tokens: int = 60) -> dict[str, Any]:
    """Arguments of `wlb.Packer`, without its cost model."""
    tokens = draw(st.integers(1, max_tokens))
    limit = draw(st.none() | st.integers(1, tokens))
    prices = st.just(0.0) | st.floats(1e-4, 1.0)
    delay_price = draw(st.none() | prices)
    thresholds = draw(st.sets(st.integers(1, limit or tokens), max_size=0 if delay_price is not None else 3))
    return {
        "num_micro_batches": draw(st.integers(1, 5)),
        "max_tokens": tokens,
        "outlier_thresholds": tuple(sorted(thresholds)),
        "release": "fifo" if delay_price is None else "adaptive",
        "delay_price": delay_price,
        "max_delay": draw(st.none() | st.integers(0, 4)),
        "max_document_tokens": limit,
        "oversize": draw(st.sampled_from(["error", "split", "truncate"])),
        "method": draw(st.sampled_from(["var_length", "refined"])),
    }
