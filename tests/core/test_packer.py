"""A stream of global batches: each document exactly once, whatever happens. Plans are held by the goldens."""

import copy
import itertools
import json
import pickle
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from numpy.typing import NDArray

import wlb
from plain import Piece, leftover_of, pieces_of, plain
from wlb import testing

# Pushes of anything, whatever waits: the bounds are tested in test_admission.py.
pytestmark = pytest.mark.filterwarnings("ignore::wlb.BacklogWarning")


def through_json(packer: wlb.Packer) -> dict[str, Any]:
    state: dict[str, Any] = json.loads(json.dumps(packer.state_dict(), allow_nan=False))
    return state


WAYS_TO_RESUME: dict[str, Callable[[wlb.Packer], wlb.Packer]] = {
    "state": lambda packer: wlb.Packer.from_state_dict(through_json(packer)),
    "pickle": lambda packer: pickle.loads(pickle.dumps(packer)),
    "deepcopy": copy.deepcopy,
}


@dataclass
class Known:
    """What a test knows of a packer: how it was made, and what waits in it since when."""

    settings: dict[str, Any]
    cost: wlb.CostModel
    alive: dict[Piece, int] = field(default_factory=dict)
    iteration: int = 0
    next_id: int = 0

    @property
    def limit(self) -> int:
        """Longest document that is not cut."""
        return int(self.settings["max_document_tokens"] or self.settings["max_tokens"])

    def build(self) -> wlb.Packer:
        """Such a packer, empty."""
        return wlb.Packer(cost_model=self.cost, **self.settings)


@dataclass
class Saved:
    """A checkpoint: what the packer and the test knew, and the plan of what came next."""

    state: dict[str, Any]
    known: Known


class PackerMachine(RuleBasedStateMachine):
    """Pushes, flushes, errors, checkpoints, rewinds and resumes under another configuration, in any order."""

    @initialize(settings=testing.packer_settings(), cost=testing.cost_models())
    def start(self, settings: dict[str, Any], cost: wlb.CostModel) -> None:
        self.known = Known(settings, cost)
        self.packer = self.known.build()
        self.saved: list[Saved] = []

    def lengths(self, data: st.DataObject) -> list[int]:
        longest = self.known.limit * (1 if self.packer.oversize == "error" else 3)
        return data.draw(testing.document_lengths(max_length=longest, max_size=12))

    @rule(data=st.data(), own_ids=st.booleans())
    def push(self, data: st.DataObject, own_ids: bool) -> None:
        known, lengths, ids = self.known, self.lengths(data), None
        if own_ids:
            pending = {piece.id for piece in known.alive}
            fresh = st.integers(-5, 60).filter(lambda i: i not in pending)
            ids = data.draw(st.lists(fresh, min_size=len(lengths), max_size=len(lengths), unique=True))
        names = ids if ids is not None else list(range(known.next_id, known.next_id + len(lengths)))
        known.next_id = max([known.next_id, *(name + 1 for name in names)])
        for name, length in zip(names, lengths, strict=True):
            starts = range(0, length, known.limit)
            pieces = [Piece(name, start, min(known.limit, length - start)) for start in starts]
            known.alive |= dict.fromkeys(pieces if self.packer.oversize == "split" else pieces[:1], known.iteration)

        state = through_json(self.packer)
        packing = self.packer.push(lengths, ids)
        again = wlb.Packer.from_state_dict(state)
        assert plain(again.push(lengths, ids)) == plain(packing), "the same state makes the same plan"
        self.take_out(packing)
        if self.packer.method == "refined":
            unrefined = Known(known.settings | {"method": "var_length"}, known.cost).build()
            unrefined.load_state_dict(state, allow_config_change=True)
            plan = unrefined.push(lengths, ids)
            assert max(packing.costs) <= max(plan.costs)
            # Another configuration queues what arrived together by its ids: of equal documents others may be left.
            assert len(leftover_of(packing)) <= len(leftover_of(plan))
            assert unrefined.queued == self.packer.queued

        fifo = self.packer.release == "fifo"
        assert not fifo or all(count < self.packer.num_micro_batches for count in self.packer.queued)
        for piece in known.alive.keys() - set(leftover_of(packing)):
            assert not fifo or piece.length >= self.packer.outlier_thresholds[0], "only outliers wait for others"
            waited = known.iteration - 1 - known.alive[piece]
            assert self.packer.max_delay is None or waited < self.packer.max_delay
        where = {piece.id: j for j, batch in enumerate(packing) for piece in pieces_of(batch)}
        waiting = {piece.id for piece in known.alive}
        for name, length, j in zip(names, lengths, packing.assignment.tolist(), strict=True):
            cut = length > known.limit and self.packer.oversize == "split"
            assert j == (-1 if cut or name in waiting else where[name])

    @rule()
    def flush(self) -> None:
        for packing in self.packer.flush():
            assert packing.num_tokens > 0
            self.take_out(packing)
        assert not self.known.alive
        assert self.packer.pending == 0
        assert self.packer.flush() == []

    @precondition(lambda self: self.known.alive)
    @rule(data=st.data())
    def push_an_id_that_waits(self, data: st.DataObject) -> None:
        ids = sorted({piece.id for piece in self.known.alive})
        taken = data.draw(st.sampled_from(ids))
        self.refuse([1, 1], [ids[-1] + 1, taken], "ids", 1, taken)

    @rule(i=st.integers(-(2**63), 2**63 - 1))
    def push_an_id_twice(self, i: int) -> None:
        if all(piece.id != i for piece in self.known.alive):
            self.refuse([1, 1], [i, i], "ids", 1, i)

    @rule(data=st.data(), bad=st.sampled_from([0, -1, 2**31]))
    def push_a_bad_length(self, data: st.DataObject, bad: int) -> None:
        good = self.lengths(data)
        self.refuse([*good, bad, *good], None, "lengths", len(good), bad)

    @rule(data=st.data())
    def push_a_document_that_is_too_long(self, data: st.DataObject) -> None:
        if self.packer.oversize == "error":
            good = self.lengths(data)
            self.refuse([*good, self.known.limit + 1], None, "lengths", len(good), self.known.limit + 1)

    def refuse(self, lengths: list[int], ids: list[int] | None, argument: str, index: int, value: int) -> None:
        before = self.packer.state_dict()
        with pytest.raises(wlb.WlbError) as raised:
            self.packer.push(lengths, ids)
        assert (raised.value.argument, raised.value.index, raised.value.value) == (argument, index, value)
        assert self.packer.state_dict() == before

    @rule()
    def save(self) -> None:
        self.saved.append(Saved(through_json(self.packer), copy.deepcopy(self.known)))

    @precondition(lambda self: self.saved)
    @rule(data=st.data())
    def rewind(self, data: st.DataObject) -> None:
        """Load a checkpoint into the running packer; the number of micro-batches may have changed since."""
        saved = data.draw(st.sampled_from(self.saved))
        if self.configuration(saved.known) == self.configuration(self.known):
            self.packer.load_state_dict(saved.state)
            settings = self.known.settings
            self.known = replace(copy.deepcopy(saved.known), settings=settings)

    @rule(way=st.sampled_from(sorted(WAYS_TO_RESUME)))
    def resume(self, way: str) -> None:
        resumed = WAYS_TO_RESUME[way](self.packer)
        assert resumed.state_dict() == self.packer.state_dict()
        assert resumed.fingerprint == self.packer.fingerprint
        self.packer = resumed

    @rule(num_micro_batches=st.integers(1, 5))
    def resume_on_another_cluster(self, num_micro_batches: int) -> None:
        self.known.settings = self.known.settings | {"num_micro_batches": num_micro_batches}
        resumed = self.known.build()
        resumed.load_state_dict(through_json(self.packer))
        assert resumed.num_micro_batches == num_micro_batches
        self.packer = resumed

    @rule(settings=testing.packer_settings(), cost=testing.cost_models())
    def resume_under_another_configuration(self, settings: dict[str, Any], cost: wlb.CostModel) -> None:
        changed = replace(self.known, settings=settings, cost=cost)
        resumed, state = changed.build(), through_json(self.packer)
        empty = resumed.state_dict()
        now, then = self.configuration(changed), self.configuration(self.known)
        differs = {name: now[name] != then[name] for name in now}
        if any(differs.values()):
            with pytest.raises(wlb.StateError) as raised:
                resumed.load_state_dict(state)
            assert {name: name in str(raised.value) for name in differs} == differs
            assert resumed.state_dict() == empty

        if any(piece.length > changed.limit for piece in self.known.alive):
            with pytest.raises(wlb.StateError):
                resumed.load_state_dict(state, allow_config_change=True)
            assert resumed.state_dict() == empty
        else:
            resumed.load_state_dict(state, allow_config_change=True)
            self.known, self.packer = changed, resumed

    @staticmethod
    def configuration(known: Known) -> dict[str, Any]:
        """What a resume must leave as it is, unless told otherwise."""
        settings = known.settings | {"max_document_tokens": known.limit, "cost_model": known.cost}
        if settings["release"] == "adaptive":
            settings["max_delay"] = 16 if settings["max_delay"] is None else settings["max_delay"]
        del settings["num_micro_batches"]
        return settings

    def take_out(self, packing: wlb.Packing) -> None:
        """Every piece that comes out was put in and had not come out before."""
        known = self.known
        pieces = [piece for batch in packing.micro_batches for piece in pieces_of(batch)]
        for piece in pieces:
            del known.alive[piece]
        known.iteration += 1
        assert set(leftover_of(packing)) <= known.alive.keys()
        assert max(packing.tokens) <= packing.max_tokens == known.settings["max_tokens"]
        assert len(packing) == known.settings["num_micro_batches"]
        if self.packer.method != "refined":  # there may be room, where the cost would be too high
            for piece in leftover_of(packing):
                assert min(packing.tokens) + piece.length > packing.max_tokens

    @invariant()
    def tells_the_truth(self) -> None:
        for name, value in self.known.settings.items():
            if value is not None:
                assert getattr(self.packer, name) == value
        assert self.packer.iteration == self.known.iteration
        assert self.packer.pending == len(self.known.alive) == self.packer.carried + sum(self.packer.queued)


TestPackerMachine = PackerMachine.TestCase


def test_metrics_have_the_names_of_what_they_are() -> None:
    """A hundred steps of two micro-batches, worked out by hand so that metrics which could be mixed up differ."""
    cost = wlb.CostModel(attention=1.0, linear=0.0)
    packer = wlb.Packer(num_micro_batches=2, max_tokens=10, cost_model=cost, outlier_thresholds=(8,))
    # The first 8 waits for the second. Pairs: 10 of 4 tokens, 3 of 2, 21 of 6.
    for lengths in ([8, 4, 2], [8, 1, 1], *[[4, 4]] * 96, [4, 2], [6, 2]):
        packer.push(lengths)
    metrics = packer.metrics()
    totals = np.array([6, 18, *[8] * 96, 6, 8])
    assert metrics.as_dict() == pytest.approx(
        {
            "steps": 100,
            "documents": 2 + 4 + 192 + 2 + 2,
            "tokens": 806,
            "imbalance_mean": (97 + 2 * 20 / 13 + 42 / 24) / 100,
            "imbalance_p95": 1.0,
            "imbalance_p99": 20 / 13,
            "imbalance_worst": 42 / 24,
            "delay_mean": 8 / 806,
            "delay_p99": 0,
            "delay_max": 1,
            "early_mean": 0.0,
            "backlog_mean": 8 / 100,
            "backlog_max": 8,
            "tokens_per_step_cv": totals.std() / totals.mean(),
            "memory_skew_mean": (97 + 2 * 4 / 3 + 1.5) / 100,
            "memory_skew_worst": 1.5,
            "length_fallbacks": 0,
            "carried_over": 0,
            "padding_tokens": 0,
        },
        rel=1e-3,
    )
    assert metrics.delay_histogram.tolist() == [798, 8]


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
def test_a_long_stream(corpus: NDArray[Any], llama_cost: wlb.CostModel, rule: dict[str, Any]) -> None:
    """Real proportions: queues fill and empty, micro-batches overflow, and a resume in the middle changes nothing."""
    settings: dict[str, Any] = {
        "num_micro_batches": 8,
        "max_tokens": 65_536,
        **rule,
        "max_delay": 6,
        "max_document_tokens": 49_152,
        "oversize": "split",
    }
    packer, resumed = (wlb.Packer(cost_model=llama_cost, **settings) for _ in range(2))
    packings: list[wlb.Packing] = []
    for step, (start, end) in enumerate(itertools.pairwise(wlb.batch_offsets(corpus[:3000], tokens_per_batch=400_000))):
        packings.append(packer.push(corpus[start:end]))
        assert resumed.push(corpus[start:end]) == packings[-1]
        if step == 15:
            resumed = WAYS_TO_RESUME["state"](resumed)
    packings += packer.flush()
    assert sum(packing.num_tokens for packing in packings) == corpus[:3000].sum()
    metrics = packer.metrics()
    assert pickle.loads(pickle.dumps(metrics)) == metrics
    assert metrics != wlb.Packer(cost_model=llama_cost, **settings).metrics()
    assert min(metrics.length_fallbacks, metrics.delay_p99) > 0
    if packer.release == "fifo":
        assert metrics.carried_over > 0
    else:
        assert (metrics.carried_over, metrics.delay_max) == (0, 6), "max_delay holds exactly"


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
