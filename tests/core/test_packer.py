"""A stream of global batches: equal to the naive packer, each document exactly once, whatever happens."""

import copy
import itertools
import json
import pickle
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import ceil
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from numpy.typing import NDArray

import wlb
from oracles import strategies
from oracles.cost import AnalyticCost, ModelCost
from oracles.packer import Log, NaivePacker
from oracles.packing import Piece, Plan, leftover_of, pieces_of, plain, split_documents

# Pushes of anything, whatever waits: the bounds are tested in test_admission.py.
pytestmark = pytest.mark.filterwarnings("ignore::wlb.BacklogWarning")


def build(naive: NaivePacker) -> wlb.Packer:
    """The packer that `naive` describes, empty."""
    assert isinstance(naive.cost, AnalyticCost)
    return wlb.Packer(
        num_micro_batches=naive.num_micro_batches,
        max_tokens=naive.max_tokens,
        cost_model=naive.cost.model(),
        outlier_thresholds=naive.outlier_thresholds,
        release=naive.release,  # type: ignore[arg-type]
        delay_price=naive.delay_price,
        max_delay=naive.max_delay,
        max_document_tokens=naive.max_document_tokens,
        oversize=naive.oversize,  # type: ignore[arg-type]
        method=naive.method,  # type: ignore[arg-type]
    )


def as_var_length(naive: NaivePacker) -> NaivePacker:
    """What `naive` would be if it did not refine."""
    queues = [list(queue) for queue in naive.queues]
    return replace(naive, method="var_length", carried=list(naive.carried), queues=queues, log=Log())


def through_json(packer: wlb.Packer) -> dict[str, Any]:
    state: dict[str, Any] = json.loads(json.dumps(packer.state_dict(), allow_nan=False))
    return state


WAYS_TO_RESUME: dict[str, Callable[[wlb.Packer], wlb.Packer]] = {
    "state": lambda packer: wlb.Packer.from_state_dict(through_json(packer)),
    "pickle": lambda packer: pickle.loads(pickle.dumps(packer)),
    "deepcopy": copy.deepcopy,
}


@dataclass
class Saved:
    """A checkpoint: what the packer, the oracle and the test knew."""

    state: dict[str, Any]
    naive: NaivePacker
    alive: dict[Piece, int]


class PackerMachine(RuleBasedStateMachine):
    """Pushes, flushes, errors, checkpoints, rewinds and resumes under another configuration, in any order."""

    @initialize(settings=strategies.packer_settings(), cost=strategies.costs())
    def start(self, settings: dict[str, Any], cost: AnalyticCost) -> None:
        self.naive = NaivePacker(cost=cost, **settings)
        self.packer = build(self.naive)
        self.alive: dict[Piece, int] = {}  # what was pushed and has not come out, and when it was pushed
        self.saved: list[Saved] = []

    def lengths(self, data: st.DataObject) -> list[int]:
        longest = self.naive.limit if self.naive.oversize == "error" else 3 * self.naive.limit
        return data.draw(strategies.document_lengths(max_length=longest, max_size=12))

    @rule(data=st.data(), own_ids=st.booleans())
    def push(self, data: st.DataObject, own_ids: bool) -> None:
        lengths = self.lengths(data)
        ids = None
        if own_ids:
            pending = {piece.id for piece in self.alive}
            fresh = st.integers(-5, 60).filter(lambda i: i not in pending)
            ids = data.draw(st.lists(fresh, min_size=len(lengths), max_size=len(lengths), unique=True))
        first_id, iteration = self.naive.next_id, self.naive.iteration
        for i, length in zip(ids or range(first_id, first_id + len(lengths)), lengths, strict=True):
            limit = self.naive.limit
            pieces = split_documents([length], max_document_tokens=limit)
            if self.naive.oversize == "truncate":
                pieces = pieces[:1]
            self.alive |= {piece._replace(id=i): iteration for piece in pieces}

        unrefined = as_var_length(self.naive)
        packing = self.packer.push(lengths, ids)
        assert plain(packing) == self.naive.push(lengths, ids).plain()
        self.take_out(packing)
        if self.naive.method == "refined":
            plan = unrefined.push(lengths, ids)
            assert max(packing.costs) <= max(plan.costs)
            assert set(leftover_of(packing)) <= set(plan.leftover)
            assert unrefined.queues == self.naive.queues

        carried = leftover_of(packing)
        queued = self.alive.keys() - set(carried)
        fifo = self.naive.release == "fifo"
        assert not fifo or all(count < self.naive.num_micro_batches for count in self.packer.queued)
        for piece in queued:
            assert not fifo or piece.length >= self.naive.outlier_thresholds[0], "only outliers wait for others"
            assert self.naive.max_delay is None or iteration - self.alive[piece] < self.naive.max_delay
        self.check_nothing_carried_fits(packing)

    @rule()
    def flush(self) -> None:
        packings = self.packer.flush()
        assert [plain(packing) for packing in packings] == [plan.plain() for plan in self.naive.flush()]
        for packing in packings:
            self.take_out(packing)
            self.check_nothing_carried_fits(packing)
        assert not self.alive
        assert self.packer.pending == 0
        assert self.packer.flush() == []

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def push_an_id_that_waits(self, data: st.DataObject) -> None:
        taken = data.draw(st.sampled_from(sorted({piece.id for piece in self.alive})))
        self.refuse([1, 1], [max(piece.id for piece in self.alive) + 1, taken], "ids", 1, taken)

    @rule(i=st.integers(-(2**63), 2**63 - 1))
    def push_an_id_twice(self, i: int) -> None:
        if all(piece.id != i for piece in self.alive):
            self.refuse([1, 1], [i, i], "ids", 1, i)

    @rule(data=st.data(), bad=st.sampled_from([0, -1, 2**31]))
    def push_a_bad_length(self, data: st.DataObject, bad: int) -> None:
        good = self.lengths(data)
        self.refuse([*good, bad, *good], None, "lengths", len(good), bad)

    @rule(data=st.data())
    def push_a_document_that_is_too_long(self, data: st.DataObject) -> None:
        if self.naive.oversize == "error":
            good = self.lengths(data)
            self.refuse([*good, self.naive.limit + 1], None, "lengths", len(good), self.naive.limit + 1)

    def refuse(self, lengths: list[int], ids: list[int] | None, argument: str, index: int, value: int) -> None:
        before = self.packer.state_dict()
        with pytest.raises(wlb.WlbError) as raised:
            self.packer.push(lengths, ids)
        assert (raised.value.argument, raised.value.index, raised.value.value) == (argument, index, value)
        assert self.packer.state_dict() == before

    @rule()
    def save(self) -> None:
        self.saved.append(Saved(through_json(self.packer), copy.deepcopy(self.naive), dict(self.alive)))

    @precondition(lambda self: self.saved)
    @rule(data=st.data())
    def rewind(self, data: st.DataObject) -> None:
        """Load a checkpoint into the running packer; the number of micro-batches may have changed since."""
        saved = data.draw(st.sampled_from(self.saved))
        if self.configuration(saved.naive) == self.configuration(self.naive):
            self.packer.load_state_dict(saved.state)
            n = self.naive.num_micro_batches
            self.naive = replace(copy.deepcopy(saved.naive), num_micro_batches=n)
            self.alive = dict(saved.alive)

    @rule(way=st.sampled_from(sorted(WAYS_TO_RESUME)))
    def resume(self, way: str) -> None:
        resumed = WAYS_TO_RESUME[way](self.packer)
        assert resumed.state_dict() == self.packer.state_dict()
        assert resumed.fingerprint == self.packer.fingerprint
        self.packer = resumed

    @rule(num_micro_batches=st.integers(1, 5))
    def resume_on_another_cluster(self, num_micro_batches: int) -> None:
        self.naive.num_micro_batches = num_micro_batches
        resumed = build(self.naive)
        resumed.load_state_dict(through_json(self.packer))
        assert resumed.num_micro_batches == num_micro_batches
        self.packer = resumed

    @rule(settings=strategies.packer_settings(), cost=strategies.costs())
    def resume_under_another_configuration(self, settings: dict[str, Any], cost: AnalyticCost) -> None:
        changed = NaivePacker(cost=cost, **settings)
        resumed, state = build(changed), through_json(self.packer)
        empty = resumed.state_dict()
        now, then = self.configuration(changed), self.configuration(self.naive)
        differs = {name: now[name] != then[name] for name in now}
        if any(differs.values()):
            with pytest.raises(wlb.StateError) as raised:
                resumed.load_state_dict(state)
            assert {name: name in str(raised.value) for name in differs} == differs
            assert resumed.state_dict() == empty

        if any(piece.length > changed.limit for piece in self.alive):
            with pytest.raises(wlb.StateError):
                resumed.load_state_dict(state, allow_config_change=True)
            assert resumed.state_dict() == empty
        else:
            resumed.load_state_dict(state, allow_config_change=True)
            self.naive = replace(self.naive, cost=cost, **settings)
            if any(differs.values()):
                self.naive.refile()
            self.packer = resumed

    @staticmethod
    def configuration(naive: NaivePacker) -> dict[str, Any]:
        """What a resume must leave as it is, unless told otherwise."""
        return {
            "max_tokens": naive.max_tokens,
            "max_document_tokens": naive.limit,
            "oversize": naive.oversize,
            "outlier_thresholds": naive.outlier_thresholds,
            "release": naive.release,
            "delay_price": naive.delay_price,
            "max_delay": naive.max_delay,
            "method": naive.method,
            "cost_model": naive.cost,
        }

    def take_out(self, packing: wlb.Packing) -> None:
        """Every piece that comes out was put in and had not come out before."""
        for batch in packing.micro_batches:
            for piece in pieces_of(batch):
                del self.alive[piece]
        assert set(leftover_of(packing)) <= self.alive.keys()
        assert max(packing.tokens) <= self.naive.max_tokens == packing.max_tokens
        assert len(packing) == self.naive.num_micro_batches

    def check_nothing_carried_fits(self, packing: wlb.Packing) -> None:
        if self.naive.method == "refined":
            return  # there may be room, where the cost would be too high
        for piece in leftover_of(packing):
            assert min(packing.tokens) + piece.length > self.naive.max_tokens

    @invariant()
    def tells_the_truth(self) -> None:
        naive = self.naive
        assert self.packer.iteration == naive.iteration
        assert (self.packer.release, self.packer.delay_price) == (naive.release, naive.delay_price)
        assert self.packer.method == naive.method
        assert self.packer.num_micro_batches == naive.num_micro_batches
        assert self.packer.carried == len(naive.carried)
        assert self.packer.queued == tuple(len(queue) for queue in naive.queues)
        assert self.packer.pending == len(self.alive)
        check_metrics(self.packer.metrics(), naive.log)


TestPackerMachine = PackerMachine.TestCase


def nearest_rank(values: list[float], percent: int) -> float:
    """The smallest value with at least `percent` % of all at or below it."""
    return sorted(values)[ceil(len(values) * percent / 100) - 1]


def check_metrics(metrics: wlb.PackerMetrics, log: Log) -> None:
    assert metrics.steps == len(log.steps)
    assert metrics.documents == len(log.delays)
    assert metrics.tokens == log.tokens
    assert metrics.length_fallbacks == log.length_fallbacks
    assert metrics.carried_over == log.carried_over
    assert metrics.delay_histogram.tolist() == log.delay_histogram
    assert metrics.delay_mean == pytest.approx(log.delay_mean, rel=1e-12)
    assert metrics.delay_p99 == log.delay_p99
    assert metrics.delay_max == max((delay for delay, _ in log.delays), default=0)
    if log.steps:
        imbalances, skews = log.imbalances, log.memory_skews
        assert metrics.imbalance_mean == pytest.approx(sum(imbalances) / len(imbalances), rel=1e-12)
        assert metrics.imbalance_worst == pytest.approx(max(imbalances), rel=1e-12)
        for estimate, percent in [(metrics.imbalance_p95, 95), (metrics.imbalance_p99, 99)]:
            exact = nearest_rank(imbalances, percent)
            rounding = 1e-12 * exact
            assert exact - rounding <= estimate <= min(exact + 0.001, metrics.imbalance_worst) + rounding
        assert metrics.memory_skew_mean == pytest.approx(sum(skews) / len(skews), rel=1e-12)
        assert metrics.memory_skew_worst == pytest.approx(max(skews), rel=1e-12)
        # Running sums of squares keep half of the digits.
        assert metrics.tokens_per_step_cv == pytest.approx(log.tokens_per_step_cv, rel=1e-6, abs=1e-7)
    for name, value in metrics.as_dict().items():
        assert value == getattr(metrics, name)


@given(
    st.lists(strategies.document_lengths(max_length=50, max_size=10), max_size=20),
    st.lists(st.integers(10, 50), min_size=1, max_size=3, unique=True).map(sorted),
    st.none() | st.integers(0, 3),
)
def test_a_level_is_first_in_first_out(batches: list[list[int]], thresholds: list[int], max_delay: int | None) -> None:
    """Documents of one level leave in the order they came, into a micro-batch or to be carried over."""
    packer = wlb.Packer(
        num_micro_batches=3,
        max_tokens=50,
        cost_model=wlb.CostModel(attention=1.0, linear=1.0),
        outlier_thresholds=thresholds,
        max_delay=max_delay,
    )
    lengths: list[int] = []
    left_at: dict[int, int] = {}
    for batch in batches:
        lengths += batch
        packing = packer.push(batch)
        emitted = [piece for micro_batch in packing.micro_batches for piece in pieces_of(micro_batch)]
        for piece in [*emitted, *leftover_of(packing)]:
            left_at.setdefault(piece.id, packer.iteration)
    level = [sum(length >= threshold for threshold in thresholds) for length in lengths]
    for queue in range(1, len(thresholds) + 1):
        times = [left_at.get(i, packer.iteration + 1) for i in range(len(lengths)) if level[i] == queue]
        assert times == sorted(times)


@pytest.mark.parametrize("method", ["var_length", "refined"])
def test_without_queues_a_packer_is_pack(corpus: NDArray[Any], llama_cost: wlb.CostModel, method: str) -> None:
    sizes: dict[str, Any] = {"num_micro_batches": 16, "max_tokens": 200_000, "cost_model": llama_cost, "method": method}
    packer = wlb.Packer(**sizes)
    for batch in corpus.reshape(-1, 200):
        pushed, packed = packer.push(batch), wlb.pack(batch, leftover="return", **sizes)
        assert pushed.assignment.tolist() == packed.assignment.tolist()
        assert pushed.costs.tolist() == packed.costs.tolist()
        assert pushed.leftover.size == 0


RULES: list[dict[str, Any]] = [
    {"outlier_thresholds": (16_384, 32_768)},
    {"release": "adaptive", "delay_price": 0.002},
]


@pytest.mark.parametrize("rule", RULES)
def test_a_long_stream_equals_the_oracle(corpus: NDArray[Any], llama_cost: wlb.CostModel, rule: dict[str, Any]) -> None:
    """Real proportions: queues fill and empty, micro-batches overflow, and a resume happens in the middle."""
    settings: dict[str, Any] = {
        "num_micro_batches": 8,
        "max_tokens": 65_536,
        **rule,
        "max_delay": 6,
        "max_document_tokens": 49_152,
        "oversize": "split",
    }
    packer = wlb.Packer(cost_model=llama_cost, **settings)
    naive = NaivePacker(cost=ModelCost(llama_cost), **settings)
    offsets = wlb.batch_offsets(corpus[:3000], tokens_per_batch=8 * 50_000)
    plans: list[tuple[wlb.Packing, Plan]] = []
    for step, (start, end) in enumerate(itertools.pairwise(offsets)):
        batch = corpus[start:end]
        plans.append((packer.push(batch), naive.push(batch.tolist())))
        if step == 15:
            packer = WAYS_TO_RESUME["state"](packer)
    plans += zip(packer.flush(), naive.flush(), strict=True)
    for packing, plan in plans:
        assert plain(packing) == plan.plain()
    check_metrics(packer.metrics(), naive.log)
    copy = pickle.loads(pickle.dumps(packer.metrics()))
    check_metrics(copy, naive.log)
    assert copy == packer.metrics()
    assert copy != wlb.Packer(cost_model=llama_cost, **settings).metrics()
    assert min(naive.log.length_fallbacks, naive.log.delay_p99) > 0
    if naive.release == "fifo":
        assert naive.log.carried_over > 0
    else:
        assert (naive.log.carried_over, packer.metrics().delay_max) == (0, 6), "max_delay holds exactly"


@pytest.mark.parametrize("rule", RULES)
def test_refined_steps_are_no_worse(corpus: NDArray[Any], llama_cost: wlb.CostModel, rule: dict[str, Any]) -> None:
    """The same documents leave, and the heaviest micro-batch is never heavier: often lighter."""
    settings: dict[str, Any] = {
        "num_micro_batches": 8,
        "max_tokens": 53_000,
        "max_document_tokens": 49_152,
        "cost_model": llama_cost,
        "max_delay": 6,
        "oversize": "split",
        **rule,
    }
    refined = wlb.Packer(method="refined", **settings)
    lighter = 0
    for start, end in itertools.pairwise(wlb.batch_offsets(corpus[:4000], tokens_per_batch=8 * 49_152)):
        unrefined = wlb.Packer(**settings)
        unrefined.load_state_dict(refined.state_dict(), allow_config_change=True)
        after, before = refined.push(corpus[start:end]), unrefined.push(corpus[start:end])
        assert (after.method, before.method) == ("refined", "var_length")
        assert after.costs.max() <= before.costs.max()
        assert max(after.tokens) <= 53_000
        assert set(leftover_of(after)) <= set(leftover_of(before))
        assert refined.queued == unrefined.queued
        assert after.num_tokens >= before.num_tokens
        lighter += after.costs.max() < before.costs.max()
    assert lighter > 5


def test_the_price_is_the_knob(corpus: NDArray[Any], llama_cost: wlb.CostModel) -> None:
    """Dearer delay: less of it, and less balance. Either way better than the same stream without waiting."""
    found = []
    for delay_price in (0.003, 0.03, 0.3, 1e6):
        packer = wlb.Packer(
            num_micro_batches=8,
            max_tokens=98_304,
            cost_model=llama_cost,
            release="adaptive",
            delay_price=delay_price,
            max_document_tokens=65_536,
            oversize="split",
        )
        for start, end in itertools.pairwise(wlb.batch_offsets(corpus, tokens_per_batch=8 * 65_536)):
            packer.push(corpus[start:end])
        metrics = packer.metrics()
        found.append((metrics.delay_mean, -metrics.imbalance_mean))
    assert found == sorted(found, reverse=True), found


def test_the_default_price_is_stated() -> None:
    sizes: dict[str, Any] = {
        "num_micro_batches": 2,
        "max_tokens": 9,
        "cost_model": wlb.CostModel(attention=1.0, linear=1.0),
    }
    assert wlb.Packer(**sizes, release="adaptive").delay_price == 0.03
    assert wlb.Packer(**sizes).delay_price is None
    assert wlb.Packer(**sizes, release="adaptive").queued == (0,)


def small_packer() -> wlb.Packer:
    return wlb.Packer(num_micro_batches=1, max_tokens=9, cost_model=wlb.CostModel(attention=0.0, linear=1.0))


def test_default_ids_stay_above_every_id_seen() -> None:
    packer = small_packer()
    assert pieces_of(packer.push([1, 1]).micro_batches[0]) == [Piece(0, 0, 1), Piece(1, 0, 1)]
    packer.push([1], ids=[100])
    assert packer.push([1]).micro_batches[0].document_ids.tolist() == [101]
    packer.push([1], ids=[-7])
    assert packer.push([1]).micro_batches[0].document_ids.tolist() == [102]


def test_ids_can_run_out() -> None:
    packer = small_packer()
    largest = 2**63 - 1
    assert packer.push([1], ids=[largest]).micro_batches[0].document_ids.tolist() == [largest]
    before = packer.state_dict()
    with pytest.raises(wlb.WlbError):
        packer.push([1])
    assert packer.state_dict() == before
    assert packer.push([1], ids=[5]).micro_batches[0].document_ids.tolist() == [5]


@pytest.mark.parametrize("release", ["fifo", "adaptive"])
def test_other_costs_price_what_waits_anew_and_come_with_the_state(release: Any) -> None:
    rng = np.random.default_rng(5)
    settings: dict[str, Any] = {"num_micro_batches": 4, "max_tokens": 400, "release": release}
    if release == "fifo":
        settings["outlier_thresholds"] = (150,)
    first, later = wlb.CostModel(attention=0.0, linear=1.0), wlb.CostModel(attention=1.0, linear=10.0)
    packer = wlb.Packer(cost_model=first, **settings)
    batches = [rng.integers(100, 400, 5) for _ in range(12)]
    for lengths in batches[:4]:
        packer.push(lengths)
    assert packer.pending
    before = packer.fingerprint
    packer.set_cost_model(first)  # no change
    assert packer.fingerprint == before == wlb.Packer(cost_model=first, **settings).fingerprint
    packer.set_cost_model(later)
    assert packer.cost_model == later
    assert packer.fingerprint not in (before, wlb.Packer(cost_model=later, **settings).fingerprint)
    resumed = wlb.Packer(cost_model=first, **settings)
    resumed.load_state_dict(json.loads(json.dumps(packer.state_dict())))
    assert resumed.cost_model == later
    # As a packer that always had these costs, and met the same documents waiting.
    other = wlb.Packer(cost_model=later, **settings)
    with pytest.raises(wlb.StateError, match="cost_model"):
        other.load_state_dict(packer.state_dict())
    other.load_state_dict(packer.state_dict(), allow_config_change=True)
    for lengths in batches[4:]:
        pickled = pickle.loads(pickle.dumps(packer))
        assert len({each.push(lengths).digest() for each in (packer, resumed, other, pickled)}) == 1
    assert packer.state_dict() == resumed.state_dict() != other.state_dict()


def test_costs_whose_sums_overflow_change_nothing() -> None:
    packer = small_packer()
    before = packer.state_dict()
    with pytest.raises(wlb.WlbError, match="cost_model"):
        packer.set_cost_model(wlb.CostModel(attention=1e308, linear=0.0))
    assert packer.state_dict() == before
