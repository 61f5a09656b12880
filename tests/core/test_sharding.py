"""Shards through the bindings; the goldens hold all that a shard says.

Every token once, legal input for kernels, balance: `rust/wlb-core/tests/sharding.rs` has the properties.
"""

import pytest
from hypothesis import given
from hypothesis import strategies as st

import wlb


@given(st.lists(st.integers(200, 60_000), min_size=20, max_size=80), st.sampled_from([2, 4, 7, 8, 16]), st.booleans())
def test_auto_is_as_even_as_asked_and_fetches_less(lengths: list[int], cp_size: int, causal: bool) -> None:
    """Where cutting every document for all ranks is even enough, so is it; and the busiest rank fetches no more."""
    auto, all_ranks = (
        wlb.shard(lengths, cp_size=cp_size, causal=causal, strategy=strategy) for strategy in ("auto", "per_document")
    )
    allowed = max(1.01 * auto.pairs_per_rank.mean(), all_ranks.pairs_per_rank.max())
    assert auto.pairs_per_rank.max() <= allowed
    assert auto.keys_moved.max() <= all_ranks.keys_moved.max()


def test_a_million_tokens_do_not_overflow() -> None:
    shard = wlb.shard([10**6, 3], cp_size=2)
    assert sum(shard.pairs_per_rank.tolist()) == 10**6 * (10**6 + 1) // 2 + 6


@pytest.mark.parametrize("rank", [-1, 4, 2**40])
def test_no_such_rank(rank: int) -> None:
    shard = wlb.shard([10], cp_size=4)
    with pytest.raises(wlb.WlbError) as raised:
        shard.rank(rank)
    assert raised.value.argument == "rank"
    assert raised.value.value == rank
