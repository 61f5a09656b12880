"""Readers let no more wait than the packer's bounds allow, and train no step of next to nothing, whatever they read."""

from __future__ import annotations

import functools
import json
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from torch.utils.data import DataLoader

import wlb
from wlb.torch.data import BalancedBatchSampler, BalancedStream, Documents, Ledger, StepLoader, collate
from wlb_tools.audit import audit

CONTEXT, MICRO_BATCHES = 64, 4
COST = wlb.CostModel(attention=1.0, linear=20.0)


def _tail(rng: np.random.Generator) -> NDArray[np.int64]:
    return np.minimum(rng.lognormal(2.5, 1.5, 450).astype(np.int64) + 1, 4000)


KINDS: dict[str, Any] = {
    "0.6 of a context": lambda rng: np.full(300, 39),
    "a long tail": _tail,
    "full contexts and single tokens": lambda rng: rng.permutation(np.r_[np.full(150, CONTEXT), np.full(150, 1)]),
    "some of many global batches": lambda rng: rng.permutation(np.r_[np.full(3, 4000), np.full(100, 30)]),
    "half a context and a token": lambda rng: np.full(250, CONTEXT // 2 + 1),
    "single tokens": lambda rng: np.full(1500, 1),
}
RULES: dict[str, dict[str, Any]] = {
    "adaptive": {"release": "adaptive"},
    "one level": {"outlier_thresholds": (33,), "max_delay": 6},
    "every document an outlier": {"outlier_thresholds": (1, 20, 60), "max_delay": 12},
    "queues without a limit": {"outlier_thresholds": (1, 40)},
    "no queue": {"release": "fifo"},
}


def packer(rule: str, **options: Any) -> wlb.Packer:
    sizes = {"num_micro_batches": MICRO_BATCHES, "max_tokens": CONTEXT, "cost_model": COST, "oversize": "split"}
    return wlb.Packer(**{**sizes, **RULES[rule], **options})


class Trained:
    """The tokens of every document that came out, each once."""

    def __init__(self) -> None:
        self._pieces: dict[int, list[tuple[int, int]]] = defaultdict(list)

    def add(self, packing: wlb.Packing) -> None:
        for part in packing:
            rows = zip(part.document_ids.tolist(), part.starts.tolist(), part.lengths.tolist(), strict=True)
            for id, start, length in rows:
                self._pieces[id].append((start, start + length))

    def check(self, lengths: list[int]) -> None:
        assert sorted(self._pieces) == list(range(len(lengths)))
        for id, pieces in self._pieces.items():
            pieces.sort()
            assert [start for start, _ in pieces] == [0, *(end for _, end in pieces[:-1])]
            assert pieces[-1][1] == lengths[id]


@pytest.mark.a_few(12)
@pytest.mark.filterwarnings("ignore:the longest document")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rule", RULES)
def test_a_sampler_keeps_its_word(rule: str, kind: str) -> None:
    """Two epochs, resumed in between under the way of states: bounded, no nearly empty step, every token once."""
    lengths = KINDS[kind](np.random.default_rng(0))
    config = packer(rule)
    bounds, least = config.bounds(), MICRO_BATCHES * CONTEXT // 10
    sampler = BalancedBatchSampler(lengths, packer=config, dp_rank=0, dp_size=1, num_epochs=2)
    reader, trained, steps = sampler.reader.copy(), Trained(), 0
    while reader.epoch < 2:
        while not reader.ended:
            draining = reader.epoch == 1 and reader.state_dict()["position"] == lengths.size
            packing = reader.next_step()
            trained.add(packing)
            assert packing.num_tokens >= (1 if draining else least), f"step {reader.step} of epoch {reader.epoch}"
            assert reader.pending_tokens <= bounds.tokens
            steps += 1
            if steps % 50 == 0:
                again = sampler.reader.copy()
                again.load_state_dict(json.loads(json.dumps(reader.state_dict())))
                reader = again
        reader.next_epoch()
    trained.check([*lengths.tolist(), *lengths.tolist()])
    assert bounds.delay is None or reader.metrics().delay_max <= bounds.delay + bounds.drain
    if rule == "adaptive":
        assert bounds.delay == 16
    assert steps == reader.step <= 2 * lengths.sum() / least


@pytest.mark.filterwarnings("ignore:the longest document")
@pytest.mark.parametrize("kind", ["some of many global batches", "0.6 of a context"])
def test_a_ledger_proves_documents_that_enter_piece_by_piece(kind: str, tmp_path: Path) -> None:
    lengths = KINDS[kind](np.random.default_rng(0))
    data = [np.zeros(length, np.int64) for length in lengths.tolist()]
    sampler = BalancedBatchSampler(lengths, packer=packer("adaptive"), dp_rank=0, dp_size=1)
    loader = StepLoader(DataLoader(Documents(data), batch_sampler=sampler, collate_fn=collate))
    ledger = Ledger(tmp_path, dp_rank=0, dp_size=1, source=loader)
    halves = 0
    for step in loader:
        ledger.record(step)
        halves += bool(step.state["outside"]["ids"])
        if step.number % 20 == 0:
            assert audit(tmp_path, state=step.state, lengths=lengths).findings == ()
            assert audit(tmp_path).findings == ()
    found = audit(tmp_path, lengths=lengths)
    assert found.sound
    assert found.epochs[0].trained == lengths.size
    assert (halves > 0) == (kind == "some of many global batches")


def documents(lengths: list[int]) -> Iterator[NDArray[np.int64]]:
    for length in lengths:
        yield np.arange(length) % 250


@pytest.mark.a_few(8)
@pytest.mark.filterwarnings("ignore:document .* more than tokens_per_batch")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rule", ["adaptive", "one level", "every document an outlier"])
def test_a_stream_keeps_its_word(rule: str, kind: str) -> None:
    lengths = KINDS[kind](np.random.default_rng(0)).tolist()
    config = packer(rule)
    bounds, least = config.bounds(), MICRO_BATCHES * CONTEXT // 10
    shards = [lengths[at::3] for at in range(3)]
    of = [documents(shard) for shard in shards]
    stream = BalancedStream(of, weights=[1, 1, 1], packer=config, collate_fn=list)
    trained, read, most = Trained(), 0, 0
    for step in stream:
        trained.add(step.packing)
        state = step.state
        read = state["next_id"]
        assert step.packing.num_tokens >= (1 if read == len(lengths) else least), f"step {step.number}"
        held = sum(record["left"] for record in state["waiting"])
        most = max(most, held)
        # In the packer; and outside, a global batch and one document a stream, all of which were read.
        assert held <= bounds.tokens + 2 * MICRO_BATCHES * CONTEXT + 3 * max(lengths)
    stream.close()
    assert read == len(lengths)
    assert stream.metrics().backlog_max <= bounds.tokens
    assert bounds.delay is None or stream.metrics().delay_max <= bounds.delay + bounds.drain
    assert sum(end - start for pieces in trained._pieces.values() for start, end in pieces) == sum(lengths)


def test_a_stream_that_starves_in_its_packer_holds_little() -> None:
    """Documents of 0.6 of the context: what waits, in memory and in the state, does not grow with the steps."""
    stream = BalancedStream([documents([39] * 3000)], packer=packer("adaptive"), collate_fn=list)
    sizes = [len(json.dumps(step.state)) for step in stream]
    stream.close()
    assert max(sizes[-120:]) <= 1.1 * max(sizes[20:120]) < 4000  # counters grow by a digit


def test_a_least_number_of_tokens_is_checked() -> None:
    lengths = np.full(10, 30)
    make = functools.partial(BalancedBatchSampler, lengths, packer=packer("adaptive"), dp_rank=0, dp_size=1)
    for tokens in (-1, 0.5, MICRO_BATCHES * CONTEXT // 3 + 1):
        with pytest.raises(wlb.WlbError, match="min_step_tokens"):
            make(min_step_tokens=tokens)
        with pytest.raises(wlb.WlbError, match="min_step_tokens"):
            BalancedStream([[]], packer=packer("adaptive"), collate_fn=list, min_step_tokens=tokens)  # type: ignore[arg-type]
    assert make(min_step_tokens=0).total_steps() > 0


def trained_steps(sampler: BalancedBatchSampler) -> list[int]:
    reader, tokens = sampler.reader.copy(), []
    while reader.epoch < sampler.num_epochs:
        while not reader.ended:
            tokens.append(reader.next_step().num_tokens)
        reader.next_epoch()
    return tokens


@pytest.mark.filterwarnings("ignore:the longest document")
@pytest.mark.parametrize("lengths", [[100, 1], [1000, 1], [30, 1, 1]])
def test_an_epoch_leaves_no_rest_of_next_to_nothing(lengths: list[int]) -> None:
    config = wlb.Packer(num_micro_batches=4, max_tokens=100, cost_model=COST, oversize="split", release="fifo")
    sampler = BalancedBatchSampler(
        lengths, packer=config, dp_rank=0, dp_size=1, tokens_per_batch=50, min_step_tokens=40, num_epochs=2
    )
    steps = trained_steps(sampler)
    assert sum(steps) == 2 * sum(lengths)
    assert min(steps) >= min(40, sum(lengths))


def test_much_is_read_in_few_steps() -> None:
    """A least step of a thousand batches: what waits is packed some ten times, and not a thousand."""
    config = wlb.Packer(num_micro_batches=8, max_tokens=65536, cost_model=COST, release="fifo")
    sampler = BalancedBatchSampler(
        np.full(200_000, 3), packer=config, dp_rank=0, dp_size=1, tokens_per_batch=128, min_step_tokens=128_000
    )
    reader, began = sampler.reader.copy(), time.process_time()
    assert reader.next_step().num_tokens >= 128_000
    assert time.process_time() - began < 2.0  # of the processor; 7 s if the batches were added one by one


@pytest.mark.filterwarnings("ignore:the longest document", "ignore:document .* more than tokens_per_batch")
@pytest.mark.parametrize("oversize", ["error", "truncate"])
def test_only_who_splits_goes_on_with_a_document_that_entered_in_part(oversize: str) -> None:
    splitting = wlb.Packer(num_micro_batches=2, max_tokens=100, cost_model=COST, oversize="split", release="fifo")
    other = wlb.Packer(num_micro_batches=2, max_tokens=1000, cost_model=COST, oversize=oversize, release="fifo")  # type: ignore[arg-type]
    sizes: dict[str, Any] = {"dp_rank": 0, "dp_size": 1, "shuffle": False}
    reader = BalancedBatchSampler([1000] * 3, packer=splitting, **sizes).reader.copy()
    reader.next_step()
    again = BalancedBatchSampler([1000] * 3, packer=other, **sizes)
    with pytest.raises(wlb.WlbError, match='only oversize="split" can go on with it'):
        again.load_state_dict(reader.state_dict(), allow_config_change=True)
    stream = BalancedStream([documents([1000] * 3)], packer=splitting, collate_fn=list)
    state = next(stream).state
    stream.close()
    with pytest.raises(wlb.WlbError, match='only oversize="split" can go on with it'):
        BalancedStream([documents([1000] * 3)], packer=other, collate_fn=list).load_state_dict(
            state, allow_config_change=True
        )


def test_truncated_documents_fill_a_stream_s_steps() -> None:
    """They count for what is trained of them, in reading as in packing."""
    config = wlb.Packer(num_micro_batches=4, max_tokens=100, cost_model=COST, oversize="truncate", release="fifo")
    stream = BalancedStream([documents([2000] * 40)], packer=config, collate_fn=list)
    steps = [step.packing.num_tokens for step in stream]
    stream.close()
    assert steps == [400] * 10


def test_an_epoch_beyond_ids_is_refused() -> None:
    sampler = BalancedBatchSampler([30] * 9, packer=packer("adaptive"), dp_rank=0, dp_size=1)
    with pytest.raises(wlb.WlbError, match="beyond what ids can count"):
        sampler.set_epoch(2**60)
