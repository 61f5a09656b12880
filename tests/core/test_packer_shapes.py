"""A packer whose steps are made for ranks, within a number of documents, in padded sizes: what a user gets of them.

That the plans are the oracle's is tested in `rust/wlb-core/tests/packer.rs`.
"""

from __future__ import annotations

import json
import pickle
from typing import Any

import numpy as np
import pytest

import wlb

COST = wlb.CostModel(attention=1.0, linear=100.0)
SHAPE: dict[str, Any] = {
    "dp_size": 4,
    "sync": "step",
    "max_documents": 24,
    "multiple_of_tokens": 32,
    "token_buckets": (2048, 3072),
}


def packer(**options: Any) -> wlb.Packer:
    defaults: dict[str, Any] = {
        "num_micro_batches": 16,
        "max_tokens": 3072,
        "max_document_tokens": 2048,
        "cost_model": COST,
        "release": "adaptive",
    }
    return wlb.Packer(**{**defaults, **options})


def batches(steps: int) -> list[np.ndarray]:
    draw = np.random.default_rng(3).lognormal(5.5, 1.2, size=(steps, 60)).astype(int).clip(1, 2048)
    return list(draw)


def rank_seconds(packing: wlb.Packing, dp_size: int, sync: str) -> float:
    """How long a step takes over one on equal ranks."""
    costs = packing.costs[packing.deal(dp_size)]
    longest = costs.sum(axis=1).max() if sync == "step" else costs.max(axis=0).sum()
    return float(longest / (costs.sum() / dp_size))


@pytest.mark.parametrize("release", ["adaptive", "fifo"])
@pytest.mark.parametrize("sync", ["step", "micro_batch"])
def test_steps_are_even_where_ranks_meet(release: str, sync: str) -> None:
    thresholds = (1024,) if release == "fifo" else None
    plain = packer(release=release, outlier_thresholds=thresholds)
    ranks = packer(release=release, outlier_thresholds=thresholds, dp_size=4, sync=sync)
    dealt, planned = [], []
    for lengths in batches(30):
        dealt.append(rank_seconds(plain.push(lengths), 4, sync))
        packing = ranks.push(lengths)
        assert (packing.dp_size, packing.sync) == (4, sync)
        planned.append(rank_seconds(packing, 4, sync))
        assert planned[-1] == pytest.approx(packing.rank_imbalance)
    metrics = ranks.metrics()
    assert metrics.imbalance_mean == pytest.approx(np.mean(planned))
    assert np.mean(planned) < np.mean(dealt)
    assert metrics.delay_mean <= plain.metrics().delay_mean
    if sync == "step":
        assert np.mean(planned) < 1.001


def test_shapes_are_kept_and_the_padding_is_told() -> None:
    shaped = packer(**SHAPE)
    assert (shaped.max_tokens, shaped.multiple_of_tokens, shaped.token_buckets) == (3072, 32, (2048, 3072))
    steps = [shaped.push(lengths) for lengths in batches(20)] + shaped.flush()
    sizes = {int(size) for packing in steps for size in packing.padded_tokens}
    assert sizes <= {2048, 3072}
    assert max(len(batch.lengths) for packing in steps for batch in packing) <= 24
    added = sum(int((packing.padded_tokens - packing.tokens).sum()) for packing in steps)
    assert shaped.metrics().padding_tokens == added > 0
    assert packer().metrics().padding_tokens == 0
    assert packer(max_tokens=3071, multiple_of_tokens=128).max_tokens == 2944


def test_a_state_goes_on_with_other_ranks_and_no_other_shape() -> None:
    whole, first = packer(**SHAPE), packer(**SHAPE)
    for lengths in batches(5):
        assert first.push(lengths) == whole.push(lengths)
    state = json.loads(json.dumps(first.state_dict()))
    assert pickle.loads(pickle.dumps(first)).push(batches(1)[0]) == first.copy().push(batches(1)[0])
    for dp_size, micro_batches in ((4, 16), (2, 8), (8, 16)):
        resumed = packer(**{**SHAPE, "dp_size": dp_size, "num_micro_batches": micro_batches})
        assert resumed.fingerprint == whole.fingerprint
        resumed.load_state_dict(state)
        packing = resumed.push(batches(1)[0])
        assert packing.deal(dp_size).shape == (dp_size, micro_batches // dp_size)
        if dp_size == 4:
            assert packing == whole.copy().push(batches(1)[0])
    elsewhere = packer(**{**SHAPE, "sync": "micro_batch"})  # DDP's checkpoint goes on under FSDP
    assert elsewhere.fingerprint == whole.fingerprint
    elsewhere.load_state_dict(state)
    assert elsewhere.sync == "micro_batch"
    for name, other in (("max_documents", 25), ("token_buckets", (3072,))):
        with pytest.raises(wlb.StateError, match=name):
            packer(**{**SHAPE, name: other}).load_state_dict(state)
    # Other ranks share a micro-batch in other multiples.
    for multiple in (1, 64, 128):
        resumed = packer(**{**SHAPE, "multiple_of_tokens": multiple})
        assert resumed.fingerprint == whole.fingerprint
        resumed.load_state_dict(state)
        assert resumed.multiple_of_tokens == multiple


@pytest.mark.parametrize(
    ("options", "argument"),
    [
        ({"dp_size": 3}, "dp_size"),
        ({"dp_size": 0}, "dp_size"),
        ({"dp_size": -1}, "dp_size"),
        ({"sync": "step"}, "sync"),
        ({"dp_size": 4, "sync": "never"}, "sync"),
        ({"max_documents": 0}, "max_documents"),
        ({"multiple_of_tokens": 0}, "multiple_of_tokens"),
        ({"multiple_of_tokens": 4096}, "max_tokens"),
        ({"token_buckets": (100, 50)}, "token_buckets"),
        ({"dp_size": 4, "cost_model": None, "cost_columns": 2, "release": "fifo"}, "cost_columns"),
    ],
)
def test_what_makes_no_sense_is_named(options: dict[str, Any], argument: str) -> None:
    with pytest.raises(wlb.WlbError) as caught:
        packer(**options)
    assert caught.value.argument == argument


@pytest.mark.parametrize(
    ("options", "limit"),
    [
        ({}, "max_document_tokens = 3072"),
        ({"token_buckets": (2048,), "max_document_tokens": 1024}, "max_document_tokens = 1024"),
        ({"token_buckets": (2048, 3100)}, "2048 tokens, the largest of token_buckets within max_tokens"),
        (
            {"multiple_of_tokens": 1000},
            "3000 tokens, the largest multiple of multiple_of_tokens = 1000 within max_tokens",
        ),
    ],
    ids=str,
)
def test_a_document_is_too_long_for_what_was_given(options: dict[str, Any], limit: str) -> None:
    """`max_document_tokens` that nobody gave is `max_tokens`, which sizes lower."""
    with pytest.raises(wlb.WlbError) as caught:
        packer(**{"max_document_tokens": None, **options}).push([10, 4000])
    assert str(caught.value) == f'lengths[1] = 4000 exceeds {limit}; oversize="split" or "truncate" accepts it'
    assert (caught.value.argument, caught.value.index, caught.value.value) == ("lengths", 1, 4000)
