"""Sharding over context-parallel ranks: every token once, legal input for kernels. Shards are held by the goldens."""

import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import wlb
from plain import plain_rank
from wlb import testing

AUTO: list[dict[str, Any]] = [{"strategy": "auto"}, {"strategy": "auto", "max_imbalance": 1.2}]
VARIANTS: list[dict[str, Any]] = [
    {"strategy": "per_sequence"},
    {"strategy": "per_document"},
    {"strategy": "per_document", "remainder": "token"},
    {"strategy": "hybrid", "hybrid_threshold": 1},
    {"strategy": "hybrid", "hybrid_threshold": 20},
    {"strategy": "hybrid", "hybrid_threshold": 10_000},
]
LENGTHS = testing.document_lengths(max_length=90, max_size=12)
CP_SIZES = st.integers(1, 8)


@pytest.mark.parametrize("variant", VARIANTS + AUTO, ids=str)
@given(lengths=LENGTHS, cp_size=CP_SIZES, causal=st.booleans())
def test_every_token_on_one_rank(lengths: list[int], cp_size: int, variant: dict[str, Any], causal: bool) -> None:
    """Also: equal tokens within one, each rank ascending, all pairs attended once, and the way back."""
    shard = wlb.shard(lengths, cp_size=cp_size, causal=causal, **variant)
    ranks = [shard.rank(i) for i in range(cp_size)]
    total = sum(lengths)
    rank_major = np.concatenate([rank.token_indices for rank in ranks])
    assert sorted(rank_major) == list(range(total))
    assert all(np.all(np.diff(rank.token_indices) > 0) for rank in ranks)
    assert rank_major[shard.restore_indices].tolist() == list(range(total))
    assert shard.restore_indices.dtype == np.int32

    assert shard.num_tokens == total
    assert (shard.strategy, shard.cp_size, shard.causal, len(shard)) == (variant["strategy"], cp_size, causal, cp_size)
    assert shard.lengths.tolist() == lengths
    assert shard.tokens_per_rank.tolist() == [rank.num_tokens for rank in ranks]
    assert np.ptp(shard.tokens_per_rank) <= 1
    assert shard.pairs_per_rank.tolist() == [rank.pairs for rank in ranks]
    assert sum(shard.pairs_per_rank) == sum(length * (length + 1) // 2 if causal else length**2 for length in lengths)


@given(LENGTHS, CP_SIZES, st.sampled_from(VARIANTS), st.booleans())
def test_what_a_kernel_is_given_is_legal(
    lengths: list[int], cp_size: int, variant: dict[str, Any], causal: bool
) -> None:
    shard = wlb.shard(lengths, cp_size=cp_size, causal=causal, **variant)
    starts = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    for i in range(cp_size):
        rank = shard.rank(i)
        arrays = [rank.token_indices, rank.position_ids, rank.cu_seqlens_q, rank.cu_seqlens_k]
        assert {array.dtype for array in [*arrays, rank.k_starts, rank.documents]} == {np.dtype(np.int32)}
        q_lengths, k_lengths = np.diff(rank.cu_seqlens_q), np.diff(rank.cu_seqlens_k)
        assert rank.cu_seqlens_q[0] == rank.cu_seqlens_k[0] == 0
        assert np.all(q_lengths > 0), "no empty segment"
        assert np.all(k_lengths >= q_lengths), "a query sees itself"
        assert rank.num_segments == len(q_lengths) == len(k_lengths) == len(rank.k_starts) == len(rank.documents)
        assert rank.cu_seqlens_q[-1] == rank.num_tokens == len(rank.token_indices) == len(rank.position_ids)
        assert rank.max_seqlen_q == max(q_lengths, default=0)
        assert rank.max_seqlen_k == max(k_lengths, default=0)
        assert np.all(rank.k_starts + k_lengths <= starts[rank.documents + 1]), "keys of one document only"
        assert (
            rank.token_indices.tolist() == (rank.position_ids + starts[np.repeat(rank.documents, q_lengths)]).tolist()
        )
        keys = [range(start, start + n) for start, n in zip(rank.k_starts, k_lengths, strict=True)]
        assert len(set().union(*keys) - set(rank.token_indices.tolist())) == shard.keys_moved[i]


@given(st.lists(st.integers(200, 60_000), min_size=20, max_size=80), st.sampled_from([2, 4, 7, 8, 16]), st.booleans())
def test_auto_is_as_even_as_asked_and_fetches_less(lengths: list[int], cp_size: int, causal: bool) -> None:
    """Where cutting every document for all ranks is even enough, so is it; and the busiest rank fetches no more."""
    auto, all_ranks = (
        wlb.shard(lengths, cp_size=cp_size, causal=causal, strategy=strategy) for strategy in ("auto", "per_document")
    )
    allowed = max(1.01 * auto.pairs_per_rank.mean(), all_ranks.pairs_per_rank.max())
    assert auto.pairs_per_rank.max() <= allowed
    assert auto.keys_moved.max() <= all_ranks.keys_moved.max()


@given(LENGTHS, LENGTHS, CP_SIZES, CP_SIZES, st.sampled_from(VARIANTS), st.sampled_from(VARIANTS), st.booleans())
def test_digest_and_pickle(
    lengths: list[int],
    others: list[int],
    cp_size: int,
    other_size: int,
    variant: dict[str, Any],
    other_variant: dict[str, Any],
    causal: bool,
) -> None:
    shard = wlb.shard(lengths, cp_size=cp_size, causal=causal, **variant)
    copy = pickle.loads(pickle.dumps(shard))
    assert copy == shard
    assert copy.digest() == shard.digest()
    assert copy.strategy == shard.strategy
    assert contents(copy) == contents(shard)

    other = wlb.shard(others, cp_size=other_size, causal=causal, **other_variant)
    same = contents(shard) == contents(other) and lengths == others
    assert (shard.digest() == other.digest()) == same
    assert (shard == other) <= (shard.digest() == other.digest())


def contents(shard: wlb.Shard) -> list[dict[str, Any]]:
    return [plain_rank(shard.rank(rank)) for rank in range(shard.cp_size)]


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
