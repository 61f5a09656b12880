"""A simulation reads documents as training does: the same plans, step by step."""

from typing import Any

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st

import wlb
import wlb.torch as wt
from wlb import testing
from wlb_tools.simulation.stream import Reading


@settings(max_examples=100)
@given(
    testing.document_lengths(max_length=100, min_size=1, max_size=150),
    st.sampled_from([100, 110, 200]),
    st.integers(1, 4),
    st.sampled_from([None, 50, 100, 150]),
    st.sampled_from([{"outlier_thresholds": (50, 80)}, {}, {"release": "adaptive"}]),
    st.none() | st.integers(0, 4),
    st.sampled_from([0, 0, 1, 3]),
)
@example([1, 1, 95, 4], 100, 1, 50, {}, None, 0)  # a document that is more than a global batch, and little behind it
def test_a_simulation_has_the_plans_of_a_run(
    lengths: list[int],
    max_tokens: int,
    num_micro_batches: int,
    tokens_per_batch: int | None,
    waiting: dict[str, Any],
    max_delay: int | None,
    max_early: int,
) -> None:
    max_early = max_early if waiting.get("release") == "adaptive" else 0
    if tokens_per_batch is not None:
        tokens_per_batch = min(tokens_per_batch, num_micro_batches * max_tokens)
    packer = wlb.Packer(
        num_micro_batches=num_micro_batches,
        max_tokens=max_tokens,
        max_document_tokens=100,
        cost_model=wlb.CostModel(attention=1.0, linear=10.0),
        max_delay=max_delay,
        **waiting,
    )
    sampler = wt.BalancedBatchSampler(
        lengths,
        packer=packer,
        dp_rank=0,
        dp_size=1,
        shuffle=False,
        tokens_per_batch=tokens_per_batch,
        max_early=max_early,
    )
    reader, trained = sampler.reader.copy(), []
    while not reader.ended:
        trained.append(reader.next_step().digest())
    per_batch = 100 * num_micro_batches if tokens_per_batch is None else tokens_per_batch
    reading = Reading(np.array(lengths), packer, per_batch, max_early=max_early)
    simulated = list(reading.steps())
    assert [read.packing.digest() for read in simulated] == trained
    assert packer.pending == 0
    assert reading.packer.pending == 0
    # A document's delay is what the packer itself counts, from its turn on or before it.
    metrics = reading.packer.metrics()
    tokens = np.array(lengths)
    delays = np.zeros(tokens.size)
    for read in simulated:
        for micro_batch in read.packing.micro_batches:
            delays[micro_batch.document_ids] = read.iteration - reading.turns[micro_batch.document_ids]
    assert metrics.delay_max == max(delays.max(), 0)
    assert -delays.min() <= max_early
    for counted, moved in ((metrics.delay_mean, delays), (metrics.early_mean, -delays)):
        np.testing.assert_allclose(counted, (np.maximum(moved, 0) * tokens).sum() / tokens.sum(), rtol=1e-12)
