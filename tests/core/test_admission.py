"""What waits stays within the packer's bounds, for whoever asks how much to push; who does not is told."""

import copy
import warnings
from typing import Any

import numpy as np
import pytest

import wlb
from tests.oracles import filling

COST = wlb.CostModel(attention=1.0, linear=100.0)


def tight(**options: Any) -> wlb.Packer:
    """Memory for one document of full length in a micro-batch, so that documents of 0.6 of it waste the rest."""
    defaults: dict[str, Any] = {"num_micro_batches": 4, "max_tokens": 100, "cost_model": COST, "release": "adaptive"}
    return wlb.Packer(**{**defaults, **options})


def push_often(packer: wlb.Packer) -> None:
    """Of every six documents four can be trained."""
    for _ in range(40):
        packer.push([60] * 6)


@pytest.mark.parametrize("release", ["fifo", "adaptive"])
def test_a_backlog_is_told_once_with_figures(release: str) -> None:
    packer = tight(release=release)
    told = rf"tokens wait after this push, more than the {packer.bounds().tokens} of packer\.bounds"
    with pytest.warns(wlb.BacklogWarning, match=told) as warned:
        push_often(packer)
    assert len(warned) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        packer.push([60] * 6)
        packer.copy().flush()
    assert packer.pending_tokens == packer.bounds().tokens > tight(release=release).bounds().tokens
    assert packer.room == packer.admits([1]) == 0


def test_what_shows_a_warning_may_use_the_packer() -> None:
    """A push inside the warning comes first; the push that warned is made after it, and nothing is lost."""
    packer = tight()
    inner: list[wlb.Packing] = []

    def show(*_: object, **__: object) -> None:
        assert packer.pending == 0
        inner.append(packer.push([7]))

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = show
        outer = packer.push([60] * 200)
    packings = [*inner, outer, *packer.flush()]
    assert [packing.num_tokens for packing in inner] == [7]
    assert sum(packing.num_tokens for packing in packings) == 7 + 200 * 60


@pytest.mark.parametrize("as_error", ["on_backlog", "filter"])
def test_a_push_that_is_refused_for_its_backlog_changes_nothing(as_error: str) -> None:
    packer = tight(on_backlog="error" if as_error == "on_backlog" else "warn")
    expected = (wlb.WlbError, wlb.BacklogWarning)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(expected, match=r"packer\.admits"):
            push_often(packer)
        before = packer.state_dict()
        with pytest.raises(expected):
            packer.push([60] * 6)
    assert packer.state_dict() == before
    assert packer.pending_tokens <= packer.bounds().tokens
    assert packer.push([])[0].tokens > 0


def test_the_adaptive_rule_has_a_limit_by_default() -> None:
    assert (tight().max_delay, tight(release="fifo").max_delay, tight(max_delay=3).max_delay) == (16, None, 3)
    bounds = tight().bounds()
    assert (bounds.delay, bounds.tokens, bounds.drain) == (16, 800, 6)
    assert tight(release="fifo", outlier_thresholds=(50,)).bounds().delay is None


@pytest.mark.parametrize("release", ["adaptive", "fifo"])
def test_a_document_that_no_step_holds_is_refused(release: str) -> None:
    """Whoever pushes nothing until it is admitted would do so for ever: in a queue without `max_delay` one waits."""
    packer = tight(oversize="split", release=release, outlier_thresholds=(50,) if release == "fifo" else None)
    packer.push([100])
    for _ in range(2):
        assert packer.admits([10, 5000]) == 1
        with pytest.raises(wlb.WlbError, match=r"lengths\[0\] = 5000: .*split_documents") as caught:
            packer.admits([5000, 10])
        assert (caught.value.argument, caught.value.index, caught.value.value) == ("lengths", 0, 5000)
        packer = packer.empty_copy()


def test_pieces_enter_in_several_iterations() -> None:
    packer = tight(oversize="split", release="fifo")
    seen = []
    for start in range(0, 1000, 250):
        plan = packer.push([100, 100, 50], ids=[7, 7, 7], starts=[start, start + 100, start + 200])
        seen += [(part.starts[at], part.lengths[at]) for part in plan for at in range(len(part.lengths))]
    assert sorted(seen) == [
        (start + at, n) for start in range(0, 1000, 250) for at, n in ((0, 100), (100, 100), (200, 50))
    ]
    with pytest.raises(wlb.WlbError, match=r"ids\[1\] = 7: this id stands twice"):
        packer.push([100, 100], ids=[7, 7], starts=[0, 99])
    with pytest.raises(wlb.WlbError, match=r"starts\[0\] = -1"):
        packer.push([100], ids=[7], starts=[-1])
    with pytest.raises(wlb.WlbError, match="starts: need ids"):
        packer.push([100], starts=[0])


@pytest.mark.filterwarnings("ignore::wlb.BacklogWarning")
def test_drained_steps_are_those_of_a_flush() -> None:
    packer = tight(num_micro_batches=2, release="fifo", outlier_thresholds=(50,))
    packer.push(np.arange(1, 100, 7))
    drained, flushed = packer.copy(), copy.copy(packer)
    steps = []
    while drained.pending:
        steps.append(drained.drain())
    assert steps == flushed.flush()
    assert drained.state_dict() == flushed.state_dict()
    assert packer.pending > 0, "copies are independent"
    assert drained.drain().tokens.sum() == 0


def test_copies_keep_what_is_not_in_a_state() -> None:
    packer = tight(on_backlog="error", oversize="truncate")
    packer.push([60] * 6)
    assert packer.copy() is not packer
    assert packer.copy().state_dict() == packer.state_dict()
    empty = packer.empty_copy()
    assert (empty.pending, empty.iteration, empty.on_backlog, empty.oversize) == (0, 0, "error", "truncate")
    assert empty.fingerprint == packer.fingerprint


def test_a_run_on_fewer_micro_batches_is_never_refused_for_ever() -> None:
    """15 documents of 90 wait under N = 16; under N = 2 bounds say so, nothing enters, and they drain."""
    cost = wlb.CostModel(attention=1.0, linear=100.0)

    def packer(num_micro_batches: int) -> wlb.Packer:
        return wlb.Packer(
            num_micro_batches=num_micro_batches,
            max_tokens=100,
            cost_model=cost,
            outlier_thresholds=(80,),
            on_backlog="error",
        )

    before = packer(16)
    before.push([90] * 15)
    few = packer(2)
    few.load_state_dict(before.state_dict())
    bounds = few.bounds()
    assert (few.pending_tokens, bounds.tokens, bounds.settles, few.admits([90, 90])) == (1350, 1350, 12, 0)
    with pytest.raises(wlb.WlbError, match=r"push\(\[\]\) trains of what waits"):
        few.push([90, 90])
    steps = 0
    while few.bounds() != packer(2).bounds():
        assert few.push([]).tokens.sum() > 0
        steps += 1
    assert steps <= bounds.settles
    assert few.pending_tokens <= packer(2).bounds().tokens
    assert few.admits([10, 10]) == 2


def random_packer(rng: np.random.Generator) -> wlb.Packer:
    """An adaptive packer in which some documents wait."""
    packer = tight(num_micro_batches=int(rng.integers(1, 5)), max_delay=int(rng.integers(0, 9)))
    for _ in range(int(rng.integers(4))):
        lengths = rng.integers(1, 101, 8)
        packer.push(lengths[: packer.admits(lengths)])
    return packer


@pytest.mark.parametrize("seed", range(300))
def test_pieces_are_offered_as_the_slow_oracle_says(seed: int) -> None:
    rng = np.random.default_rng(seed)
    packer, count = random_packer(rng), int(rng.integers(1, 30))
    lengths = np.where(rng.random(count) < 0.3, rng.integers(60, 101, count), rng.integers(1, 12, count))
    most_early = np.where(rng.random(count) < 0.2, -1, np.where(rng.random(count) < 0.2, 0, int(rng.integers(5))))
    most_early[rng.integers(count)] = 0
    steps = np.sort(rng.integers(0, 4, count)) if rng.random() < 0.4 else None
    wanted = int(rng.integers(1, 300))
    options: dict[str, Any] = {
        "tokens_per_batch": int(rng.integers(20, 400)),
        "min_step_tokens": int(rng.integers(0, 60)),
        "to_the_end": bool(rng.integers(2)),
    }
    end, pieces, due, early = packer.offered(
        lengths, most_early=most_early, **({"wanted": wanted} if steps is None else {"steps": steps}), **options
    )
    plain = [lengths.tolist(), most_early.tolist(), None if steps is None else steps.tolist()]
    expected = filling.offered(packer, plain[0], most_early=plain[1], steps=plain[2], wanted=wanted, **options)
    assert (end, pieces.tolist(), due, None if early is None else early.tolist()) == expected


@pytest.mark.parametrize("seed", range(200))
def test_a_step_is_filled_as_the_slow_oracle_says(seed: int) -> None:
    rng = np.random.default_rng(seed)
    packer, lengths = random_packer(rng), rng.integers(1, 101, int(rng.integers(1, 20)))
    least = int(rng.integers(0, 300)) if seed % 3 else int(lengths[rng.integers(lengths.size) :].sum())
    more, rest_waits = bool(rng.integers(2)), bool(rng.integers(2))
    ids = np.arange(1000, 1000 + lengths.size)
    after, again = packer.copy(), packer.copy()
    entered, packing = after.fill(lengths, ids, min_step_tokens=least, more=more, rest_waits=rest_waits)
    assert entered == filling.entering(packer, lengths.tolist(), min_step_tokens=least, rest_waits=rest_waits)
    may_add = more and entered == lengths.size
    pushed = again.push(lengths[:entered], ids[:entered], min_step_tokens=0 if may_add else max(least, 1))
    assert (packing, after.state_dict()) == (pushed, again.state_dict())


def test_what_cannot_be_offered_is_named() -> None:
    packer = tight()
    options: dict[str, Any] = {"tokens_per_batch": 10, "min_step_tokens": 0, "to_the_end": False}
    for changes, argument, index in (
        ({"most_early": [0]}, "most_early", None),
        ({"most_early": [0, -2]}, "most_early", 1),
        ({"most_early": [0, 1025]}, "most_early", 1),
        ({"most_early": [0, 0], "wanted": 0}, "wanted", None),
        ({"most_early": [0, 0], "wanted": None}, "wanted", None),
        ({"most_early": [0, 0], "steps": [0, 1]}, "wanted", None),
        ({"most_early": [0, 0], "wanted": None, "steps": [1, 0]}, "steps", 1),
    ):
        with pytest.raises(wlb.WlbError) as refused:
            packer.offered([5, 6], **{"wanted": 5, **options, **changes})
        assert (refused.value.argument, refused.value.index) == (argument, index)
    with pytest.raises(wlb.WlbError, match="ids"):
        packer.fill([5, 6], [1], min_step_tokens=0, more=False, rest_waits=False)
    assert packer.pending == packer.iteration == 0
