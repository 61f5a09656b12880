"""Hypothesis strategies for tests of programs that use wlb: document lengths, cost models and packer settings.

The strategies often draw edge cases. They need hypothesis: ``pip install hypothesis``.

    @given(wlb.testing.document_lengths(max_length=8192), wlb.testing.cost_models())
    def test_my_loader(lengths, cost_model): ...
"""

from typing import Any

from hypothesis import strategies as st

import wlb


def document_lengths(*, max_length: int, min_size: int = 0, max_size: int = 40) -> st.SearchStrategy[list[int]]:
    """Lengths of one batch: short ones, ones near the limit, simple fractions of it; often few different values."""
    short = st.integers(1, min(max_length, 8))
    near_limit = st.integers(max(1, max_length - 3), max_length)
    anything = st.integers(1, max_length)
    parts = st.sampled_from([max(1, max_length // part) for part in (2, 3, 4)])
    length = st.one_of(short, anything, parts, near_limit)
    few_values = st.lists(length, min_size=1, max_size=3).flatmap(
        lambda values: st.lists(st.sampled_from(values), min_size=min_size, max_size=max_size)
    )
    return st.lists(length, min_size=min_size, max_size=max_size) | few_values


def cost_settings(*, exact: bool = False) -> st.SearchStrategy[dict[str, Any]]:
    """Arguments of `wlb.CostModel`; with `exact` they are integers, so that sums of costs are not rounded."""
    integer = st.integers(0, 1000).map(float)
    real = st.floats(1e-12, 1e3)
    coefficient = integer if exact else st.one_of(integer, real)
    settings = st.fixed_dictionaries({"attention": coefficient, "linear": coefficient, "causal": st.booleans()})
    return settings.filter(lambda cost: cost["attention"] > 0 or cost["linear"] > 0)


def cost_models(*, exact: bool = False) -> st.SearchStrategy[wlb.CostModel]:
    """Cost models with `cost_settings`."""
    return cost_settings(exact=exact).map(lambda settings: wlb.CostModel(**settings))


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
        "max_step_cost": None if delay_price is None else draw(st.none() | st.floats(0.1, 4.0)),
    }
