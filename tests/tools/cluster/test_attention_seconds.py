"""Attention under windows and chunks: pairs counted one by one, and what must hold of any kernel."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import wlb
from wlb.models import Attention, CountedBlock, FeedForward, Indexer, Layer, Mask, Matrix
from wlb.models.attention import LatentAttention
from wlb_tools.cluster.attention_seconds import attention_of_kinds, rank_seconds, segment_seconds

H100 = wlb.KernelModel.analytic("h100", num_heads=8, head_dim=128)


@pytest.fixture(scope="module")
def constant(tmp_path_factory: pytest.TempPathFactory) -> wlb.KernelModel:
    """A kernel that takes a nanosecond a pair, whatever the shape, and no launch."""
    lengths = [1, 1024]
    seconds = [[1e-9 * (q * k - q * (q - 1) / 2) if q <= k else None for k in lengths] for q in lengths]
    table = {"tile": 1, "median_seconds": seconds, "launch_seconds": 0.0}
    profile = {
        "format": "wlb.profile",
        "version": 1,
        "gpu": "none",
        "kernel": "none",
        "causal": True,
        "num_heads": 8,
        "num_kv_heads": 8,
        "head_dim": 128,
        "query_lengths": lengths,
        "key_lengths": lengths,
        "forward": table,
        "backward": table,
    }
    path: Path = tmp_path_factory.mktemp("profile") / "profile.json"
    path.write_text(json.dumps(profile))
    return wlb.KernelModel.from_profile(path)


def counted(queries: int, keys: int, mask: Mask) -> int:
    """Pairs, one by one."""
    total = 0
    for position in range(keys - queries, keys):
        first = {"full": 0, "window": position - mask.size + 1, "chunk": position - position % max(1, mask.size)}
        total += position - max(0, first[mask.kind]) + 1
    return total


segments = st.lists(
    st.integers(1, 300).flatmap(lambda k: st.tuples(st.integers(1, k), st.just(k))), min_size=1, max_size=8
)
masks = st.one_of(
    st.just(Mask()),
    st.builds(Mask, st.sampled_from(["window", "chunk"]), st.integers(1, 400)),  # type: ignore[arg-type]
)


@given(segments, masks)
def test_a_kernel_of_constant_speed_takes_the_pairs(
    constant: wlb.KernelModel, made: list[tuple[int, int]], mask: Mask
) -> None:
    queries, keys = np.array(made).T
    seconds = segment_seconds(constant, queries, keys, mask, passes="forward")
    assert seconds == pytest.approx([1e-9 * counted(q, k, mask) for q, k in made], rel=1e-9)


@given(st.lists(st.integers(1, 60_000), min_size=1, max_size=6), st.integers(64, 100_000), st.sampled_from([1, 2, 4]))
def test_less_to_see_takes_no_longer(lengths: list[int], size: int, cp_size: int) -> None:
    cut = wlb.shard(lengths, cp_size=cp_size)
    whole = H100.rank_seconds(cut)
    assert rank_seconds(H100, cut, Mask(), passes="forward_backward").tolist() == whole.tolist()
    window = rank_seconds(H100, cut, Mask("window", size), passes="forward_backward")
    assert (window <= whole * (1 + 1e-9)).all()
    if size >= max(lengths):
        for kind in ("window", "chunk"):
            hidden = rank_seconds(H100, cut, Mask(kind, size), passes="forward_backward")  # type: ignore[arg-type]
            assert hidden == pytest.approx(whole, rel=1e-9)


def test_chunks_are_documents() -> None:
    cut = wlb.shard([10_000], cp_size=1)
    chunks = segment_seconds(H100, [10_000], [10_000], Mask("chunk", 4096), passes="forward")
    documents = H100.segment_seconds([4096, 4096, 1808], [4096, 4096, 1808], passes="forward").sum()
    assert chunks[0] == pytest.approx(documents)
    assert rank_seconds(H100, cut, Mask("chunk", 4096), passes="forward")[0] < H100.rank_seconds(cut)[0]


def test_kinds_of_layers_take_their_share_of_flops() -> None:
    full = Attention(num_heads=8, num_kv_heads=2, head_dim=64)
    half = Attention(num_heads=4, num_kv_heads=2, head_dim=64, mask=Mask("window", 128))
    state = CountedBlock(weights=(Matrix(64, 296), Matrix(128, 64)), other_flops=9472, num_heads=8)
    sparse = LatentAttention(
        num_heads=8,
        kv_rank=32,
        key_dim=64,
        rope_dim=32,
        value_dim=64,
        query_rank=48,
        indexer=Indexer(num_heads=2, head_dim=31, top_k=256),
    )
    ffn = FeedForward(width=96)
    layers = tuple(Layer((block, ffn)) for block in (full, half, state, sparse, full))
    model = wlb.ModelConfig(hidden_size=64, vocab_size=101, layers=layers)
    assert model.kernel_heads == (8, 2, 64)
    found, weights = attention_of_kinds(model)
    assert found == (Mask(), Mask("window", 128), Mask("window", 256))
    assert weights.T.tolist() == [[1, 0, 0], [0, 0.5, 0], [0, 0, 0], [2 * 2 * 32 / (4 * 8 * 64), 0, 160 / 128]]
    with pytest.raises(wlb.WlbError, match="of custom have no attention: all tokens cost the same"):
        _ = wlb.ModelConfig(hidden_size=64, vocab_size=101, layers=(Layer((state,)),)).kernel_heads
