"""The batch sampler: every document once, the same plan everywhere, and no trace of a death."""

import functools
import itertools
import json
import os
import random
import signal
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

import wlb
from tests.torch import processes
from wlb._seal import seal
from wlb.reading.permutation import Permutation
from wlb.torch.data import BalancedBatchSampler, Documents, Ledger, PackedBatch, Piece, Step, StepLoader, collate
from wlb_tools.audit import audit

COST = wlb.CostModel(attention=1e-3, linear=1e-2)
RNG = np.random.default_rng(0)
LENGTHS = np.where(RNG.random(150) < 0.9, RNG.integers(1, 20, 150), RNG.integers(30, 90, 150))
DATA = [RNG.integers(0, 1000, length) for length in LENGTHS]
Micro = dict[tuple[int, int], list[Any]]  # (step, micro-batch) -> what it holds


def packer(num_micro_batches: int = 4, oversize: Any = "split", **options: Any) -> wlb.Packer:
    options = {"max_tokens": 96, "max_document_tokens": 64, "outlier_thresholds": (24, 48)} | options
    return wlb.Packer(num_micro_batches=num_micro_batches, cost_model=COST, oversize=oversize, **options)


def sampler(
    dp_rank: int = 0, dp_size: int = 2, *, lengths: Any = LENGTHS, packer_: wlb.Packer | None = None, **options: Any
) -> BalancedBatchSampler:
    return BalancedBatchSampler(lengths, packer=packer_ or packer(), dp_rank=dp_rank, dp_size=dp_size, **options)


def step_loader(of: BalancedBatchSampler, *, cp: tuple[int, int] = (0, 1), **options: Any) -> StepLoader[PackedBatch]:
    work = functools.partial(collate, cp_rank=cp[0], cp_size=cp[1])
    if options.get("num_workers"):
        options["timeout"] = 500
    return StepLoader(DataLoader(Documents(DATA), batch_sampler=of, collate_fn=work, **options))


def contents(steps: list[Step[PackedBatch]]) -> Micro:
    return {
        (step.number, index): [batch.document_ids.tolist(), batch.tokens.tolist(), batch.labels.tolist()]
        for step in steps
        for index, batch in zip(step.indices.tolist(), step.micro_batches, strict=True)
    }


def everything(dp_size: int, state: dict[str, Any] | None = None, **options: Any) -> Micro:
    """All micro-batches of all ranks from `state` to the end of the run."""
    result: Micro = {}
    for rank in range(dp_size):
        of = sampler(rank, dp_size, **options)
        loader = step_loader(of)
        if state is not None:
            loader.load_state_dict(json.loads(json.dumps(state)))
        while of.epoch < of.num_epochs:
            result |= contents(list(loader))
    return result


def tokens_of(micro: Micro) -> Counter[int]:
    return Counter(token for _, tokens, _ in micro.values() for token in tokens)


def all_tokens(epochs: int = 1) -> Counter[int]:
    return Counter(token for document in DATA for token in document.tolist() * epochs)


# --- order -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 17, 64, 1000, 65537])
def test_a_permutation_is_one(size: int) -> None:
    order = Permutation(size, seed=3, epoch=1)(np.arange(size))
    assert np.array_equal(np.sort(order), np.arange(size))


def test_permutations_look_random() -> None:
    """Every element is as often at every place, and neighbours are strangers."""
    size, draws = 10, 1500
    counts = np.zeros((size, size))
    for seed in range(draws):
        counts[np.arange(size), Permutation(size, seed=seed, epoch=0)(np.arange(size))] += 1
    expected = draws / size
    chi_square = float(((counts - expected) ** 2 / expected).sum())
    assert chi_square < 150  # 81 degrees of freedom: 1 in 10^5
    large = Permutation(100_000, seed=0, epoch=0)(np.arange(100_000)).astype(float)
    assert abs(np.corrcoef(large[:-1], large[1:])[0, 1]) < 0.015
    assert abs(np.corrcoef(large, np.arange(100_000.0))[0, 1]) < 0.015
    assert not np.array_equal(large, Permutation(100_000, seed=0, epoch=1)(np.arange(100_000)))


def test_an_order_is_never_stored() -> None:
    assert Permutation(10**12, seed=0, epoch=0)(np.arange(5)).max() > 10**9


def test_the_order_is_a_promise() -> None:
    """Saved states count on it: this must never change."""
    assert Permutation(1000, seed=1, epoch=2)(np.arange(6)).tolist() == [560, 865, 750, 444, 815, 668]


# --- the plan --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dp_size", [1, 2, 4])
def test_ranks_share_the_plan_of_a_packer(dp_size: int) -> None:
    """Against a packer that is fed by hand, in file order."""
    reference = packer()
    offsets = wlb.batch_offsets(LENGTHS, tokens_per_batch=256)
    digests = [
        reference.push(LENGTHS[first:last], ids=np.arange(first, last)).digest()
        for first, last in itertools.pairwise(offsets)
    ]
    for rank in range(dp_size):
        steps = list(step_loader(sampler(rank, dp_size, shuffle=False)))
        assert [step.packing.digest() for step in steps][: len(digests)] == digests
        for step in steps:
            assert step.indices.tolist() == step.packing.deal(dp_size)[rank].tolist()
            assert len(step.micro_batches) == 4 // dp_size
            for index, batch in zip(step.indices.tolist(), step.micro_batches, strict=True):
                assert batch.shard.lengths.tolist() == step.packing[index].lengths.tolist()
                assert batch.document_ids.tolist() == step.packing[index].document_ids.tolist()


@pytest.mark.parametrize("oversize", ["split", "truncate"])
def test_every_document_once(oversize: str) -> None:
    micro = everything(2, packer_=packer(oversize=oversize))
    expected = all_tokens()
    if oversize == "truncate":
        expected = Counter(token for document in DATA for token in document[:64].tolist())
    assert tokens_of(micro) == expected


def test_documents_of_many_batches_do_not_pile_up() -> None:
    """Each alone is ten global batches: it enters piece by piece, and less than two global batches ever wait."""
    lengths = np.full(6, 1000)
    config = wlb.Packer(
        num_micro_batches=4,
        max_tokens=25,
        max_document_tokens=25,
        oversize="split",
        cost_model=wlb.CostModel(attention=1.0, linear=1.0),
        release="fifo",
    )
    with pytest.warns(UserWarning, match="the longest document has 1000 tokens, more than tokens_per_batch = 100"):
        of = BalancedBatchSampler(lengths, packer=config, dp_rank=0, dp_size=1)
    reader = of.reader.copy()
    trained = 0
    while not reader.ended:
        trained += reader.next_step().num_tokens
        assert reader.pending_tokens <= config.bounds().tokens == 100
    assert trained == lengths.sum()


def test_epochs_differ_and_hand_over_what_waits() -> None:
    of = sampler(0, 1, num_epochs=3)
    loader = step_loader(of)
    epochs, steps = [], of.total_steps()
    while of.epoch < 3:
        epochs.append(contents(list(loader)))
        assert of.total_steps() == steps
    assert {step for epoch in epochs for step, _ in epoch} == set(range(steps))
    total = tokens_of({}) + sum((tokens_of(epoch) for epoch in epochs), Counter())
    assert total == all_tokens(3)
    assert tokens_of(epochs[0]) != all_tokens()  # some waited for the next epoch
    assert len({str(next(iter(epoch.values()))) for epoch in epochs}) == 3
    assert loader.metrics().documents == sum(len(step[0]) for epoch in epochs for step in epoch.values())


def test_set_epoch() -> None:
    of = sampler(0, 1)
    for epoch in (-1, 0.5):
        with pytest.raises(wlb.WlbError, match="epoch"):
            of.set_epoch(epoch)  # type: ignore[arg-type]
    of.set_epoch(5)
    steps = list(step_loader(of))
    assert {step.epoch for step in steps} == {5}
    assert of.epoch == 6
    of.set_epoch(5)  # nothing waits: it may be repeated
    assert contents(list(step_loader(of))).keys() == {
        (step.number + len(steps), index) for step in steps for index in range(4)
    }
    waiting = sampler(0, 1, num_epochs=3)
    list(step_loader(waiting))
    with pytest.raises(wlb.WlbError, match="still wait"):
        waiting.set_epoch(0)


def test_fewer_documents_than_micro_batches() -> None:
    for rank in range(4):
        steps = list(step_loader(sampler(rank, 4, lengths=LENGTHS[:2])))
        assert [len(step.micro_batches) for step in steps] == [1] * len(steps)
    batches = [list(sampler(rank, 4, lengths=LENGTHS[:2])) for rank in range(4)]
    assert sum(batch == [] for rank in batches for batch in rank) >= 2


def test_elements_are_numbers_or_pieces() -> None:
    elements = [element for batch in sampler(0, 1) for element in batch]
    pieces = [element for element in elements if isinstance(element, Piece)]
    assert pieces
    assert all(type(element) in (int, Piece) for element in elements)
    for piece in pieces:
        assert piece.length < LENGTHS[piece.document]


def test_a_memory_map_is_neither_copied_nor_changed(tmp_path: Path) -> None:
    path = tmp_path / "lengths.npy"
    np.save(path, LENGTHS.astype(np.int32))
    mapped = np.load(path, mmap_mode="r")
    assert list(sampler(lengths=mapped)) == list(sampler(lengths=LENGTHS))
    state = sampler(lengths=mapped).state_dict()
    sampler(lengths=LENGTHS.tolist()).load_state_dict(state)  # the same lengths, whatever holds them


# --- loaders ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_workers", "start_method"),
    [(1, "fork"), (4, "fork"), pytest.param(1, "spawn", marks=pytest.mark.long)],
    ids=["1", "4", "spawn"],
)
def test_state_is_tied_to_consumed_steps(num_workers: int, start_method: str) -> None:
    """Whatever workers prefetch, batches and states are those of a loader without any."""
    plain, ahead = (
        step_loader(sampler()),
        step_loader(sampler(), num_workers=num_workers, multiprocessing_context=start_method),
    )
    count = 0
    for expected, step in zip(plain, ahead, strict=True):
        assert contents([step]) == contents([expected])
        time.sleep(0.02)  # while workers go on, perhaps to the end of the epoch
        assert ahead.state_dict() == plain.state_dict()
        assert ahead.state_dict()["step"] == step.number + 1
        count += 1
    assert count > 5


def test_a_loop_that_is_left_goes_on() -> None:
    expected = contents(list(step_loader(sampler())))
    loader = step_loader(sampler(), num_workers=2)
    found: Micro = {}
    for _ in range(3):
        for number, step in enumerate(loader):
            found |= contents([step])
            if number == 3:
                break
    found |= contents(list(loader))
    assert found == expected


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("how", ["load", "epoch", "iteration"])
def test_a_loop_does_not_go_on_where_the_next_was_told_to_begin_elsewhere(how: str, num_workers: int) -> None:
    """Or what was loaded in the middle of a loop would be forgotten, and steps be trained twice, in silence."""
    of = sampler(0, 1)
    loader = step_loader(of, num_workers=num_workers)
    steps = iter(loader)
    first = next(steps)
    next(steps)
    if how == "load":
        loader.load_state_dict(first.state)
    elif how == "epoch":
        of.set_epoch(3)
    else:
        assert next(iter(loader)).number == 2
    with pytest.raises(wlb.WlbError, match="loader was given a state, another epoch or a second iteration"):
        next(steps)
    step = next(iter(loader))
    assert (step.number, step.epoch) == {"load": (1, 0), "epoch": (2, 3), "iteration": (3, 0)}[how]


def test_micro_batches_do_not_go_on_where_the_next_were_told_to_begin_elsewhere() -> None:
    of = sampler(0, 1)
    state, batches = of.state_dict(), iter(of)
    first = next(batches)
    of.load_state_dict(state)
    with pytest.raises(wlb.WlbError, match="sampler was given a state, another epoch or a second iteration"):
        next(batches)
    assert next(iter(of)) == first


def test_a_failed_read_does_not_count() -> None:
    """The state saved after a worker's error still has the documents of the step that failed."""
    of = sampler(0, 1)
    data: list[Any] = list(DATA)
    loader: StepLoader[PackedBatch] = StepLoader(DataLoader(Documents(data), batch_sampler=of, collate_fn=collate))
    found: Micro = {}
    steps = iter(loader)
    for _ in range(3):
        found |= contents([next(steps)])
    data[:] = [None] * len(data)
    with pytest.raises(wlb.WlbError):
        next(steps)
    assert found | everything(1, loader.state_dict()) == everything(1)


def test_a_data_set_of_other_lengths_is_refused() -> None:
    data = [np.append(document, 0) for document in DATA]  # an end-of-text token that nobody counted
    loader: StepLoader[PackedBatch] = StepLoader(
        DataLoader(Documents(data), batch_sampler=sampler(0, 1), collate_fn=collate)
    )
    with pytest.raises(wlb.WlbError, match=r"gives document .* where the plan has") as caught:
        list(loader)
    assert caught.value.value == LENGTHS[caught.value.index] + 1


# --- states ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dp_size", "max_early"), [(1, 0), (2, 0), (4, 0), (2, 3)])
def test_resume_after_any_step_on_any_number_of_ranks(dp_size: int, max_early: int) -> None:
    """Saved with 2 ranks and 2 epochs: bit for bit the same global batches."""
    options: dict[str, Any] = {"num_epochs": 2}
    if max_early:
        options |= {"max_early": max_early, "packer_": packer(outlier_thresholds=(), release="adaptive")}
    expected = everything(2, **options)
    of = sampler(0, 2, **options)
    loader = step_loader(of)
    done = 0
    while of.epoch < 2:
        for step in loader:
            done = step.number + 1
            if done % 5 and done > 3:
                continue
            rest = everything(dp_size, loader.state_dict(), **options)
            assert rest == {key: value for key, value in expected.items() if key[0] >= done}
    assert done > 20


@pytest.mark.parametrize("num_micro_batches", [2, 8])
def test_resume_with_another_number_of_micro_batches(num_micro_batches: int) -> None:
    """Other plans, but every document once: also when saved while what waits is drained."""
    loader = step_loader(sampler(0, 1))
    before: Micro = {}
    for step in loader:
        before |= contents([step])
        state = loader.state_dict()
        draining = state["position"] == len(DATA)
        if step.number % 4 and not draining:
            continue
        rest = everything(2, state, packer_=packer(num_micro_batches))
        assert tokens_of(before) + tokens_of(rest) == all_tokens()
    assert draining


@pytest.mark.parametrize("oversize", ["split", "truncate"])
@pytest.mark.parametrize("seed", range(6))
def test_documents_come_early_once_and_within_bounds(oversize: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    n, most, context = int(rng.integers(4, 9)), int(rng.integers(1, 7)), 64
    lengths = np.where(rng.random(600) < 0.97, rng.integers(1, 12, 600), rng.integers(40, 2 * context, 600))
    made = packer(n, oversize, outlier_thresholds=(), release="adaptive", delay_price=0.02, max_delay=9)
    of = sampler(0, 1, lengths=lengths, packer_=made, max_early=most, seed=seed)
    came = False
    reader, tokens = of.reader.copy(), np.zeros(lengths.size, np.int64)
    while not reader.ended:
        if reader.step % 2:  # a state goes on alike, also where documents do not come early any more
            state = json.loads(json.dumps(reader.state_dict()))
            again, later = (
                sampler(0, 1, lengths=lengths, packer_=made, max_early=value, seed=seed) for value in (most, 0)
            )
            again.load_state_dict(state)
            later.load_state_dict(state)
            came |= bool(state.get("taken"))
            assert not state.get("taken") or later.total_steps() >= reader.step
            reader = again.reader.copy()
        packing = reader.next_step()
        assert packing.tokens.sum() > 0
        for micro_batch in packing.micro_batches:
            np.add.at(tokens, reader.documents(micro_batch), micro_batch.lengths)
        assert reader.pending_tokens <= made.bounds().tokens
        assert reader.oldest_wait <= made.bounds().delay
    assert (tokens == (lengths if oversize == "split" else np.minimum(lengths, context))).all()
    metrics = reader.metrics()
    assert 0 <= metrics.early_mean <= most
    assert came or oversize == "split", "no state had one that came early"
    assert metrics.delay_max <= made.bounds().delay


def test_early_documents_do_not_depend_on_what_was_guessed() -> None:
    """A reader that is copied, as a loader does before every step, guesses anew how many documents to look at."""
    lengths = np.clip(np.random.default_rng(0).lognormal(5.5, 1.4, 4000), 8, 8192).astype(np.int64)
    made = packer(4, max_tokens=12288, max_document_tokens=8192, outlier_thresholds=(), release="adaptive")
    reader = sampler(0, 1, lengths=lengths, packer_=made, max_early=4, num_epochs=1).reader.copy()
    while not reader.ended:
        expected = reader.copy().next_step().digest()
        assert reader.next_step().digest() == expected
    assert reader.metrics().early_mean > 0


def test_an_epoch_ends_that_was_read_early() -> None:
    """Also where a step may hold as little as it likes."""
    lengths = [10] * 60 + [100, 10, 100, 10, 100]
    made = packer(2, max_tokens=100, max_document_tokens=100, outlier_thresholds=(), release="adaptive")
    of = sampler(
        0, 1, lengths=lengths, packer_=made, shuffle=False, max_early=4, min_step_tokens=0, tokens_per_batch=50,
        num_epochs=1,
    )  # fmt: skip
    assert len(list(itertools.islice(of, 200))) < 200


def test_early_documents_lower_the_displacement_at_equal_balance() -> None:
    """The guarantee of benches/early.py, small: at equal mean imbalance a fifth less."""
    lengths = np.clip(np.random.default_rng(1).lognormal(4.5, 1.4, 30_000), 1, 8192).astype(np.int64)
    found = []
    for most in (0, 4):
        points = []
        for price in (0.1, 0.06, 0.04, 0.025, 0.016):
            made = packer(
                16,
                max_tokens=12288,
                max_document_tokens=8192,
                outlier_thresholds=(),
                release="adaptive",
                delay_price=price,
            )
            reader = sampler(0, 1, lengths=lengths, packer_=made, max_early=most).reader.copy()
            while not reader.ended:
                reader.next_step()
            metrics = reader.metrics()
            points.append((metrics.imbalance_mean, metrics.delay_mean + metrics.early_mean))
        found.append(sorted(points))
    level = max(points[0][0] for points in found) * 1.001
    moved = [np.interp(level, *zip(*points, strict=True)) for points in found]
    assert moved[1] < 0.85 * moved[0]


def test_more_epochs_may_be_added() -> None:
    loader = step_loader(sampler(0, 1))
    micro = contents(list(loader))
    state = loader.state_dict()
    assert tokens_of(micro | everything(1, state, num_epochs=2)) == all_tokens(2)


def stateful_loader(of: BalancedBatchSampler, num_workers: int) -> Any:
    return StatefulDataLoader(Documents(DATA), batch_sampler=of, collate_fn=collate, num_workers=num_workers)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_stateful_data_loader(num_workers: int) -> None:
    """Its own state goes on after any micro-batch, inside a step and at the end of an epoch too."""

    def epoch(loader: Any) -> list[list[int]]:
        return [batch.tokens.tolist() for batch in loader]

    whole = stateful_loader(sampler(num_epochs=2), num_workers)
    expected = epoch(whole) + epoch(whole)
    for stop in (1, 4, 7, len(expected) // 2 - 1):
        first = stateful_loader(sampler(num_epochs=2), num_workers)
        found = [batch.tokens.tolist() for _, batch in zip(range(stop), first, strict=False)]
        state = first.state_dict()
        second = stateful_loader(sampler(num_epochs=2), num_workers)
        second.load_state_dict(state)
        while len(found) < len(expected):
            found += epoch(second)
        assert found == expected


def test_stateful_data_loader_between_epochs() -> None:
    first = stateful_loader(sampler(num_epochs=2), 2)
    list(first)
    second = stateful_loader(sampler(num_epochs=2), 2)
    second.load_state_dict(first.state_dict())
    assert [batch.tokens.tolist() for batch in second] == [batch.tokens.tolist() for batch in first]


def test_step_loader_over_a_stateful_one() -> None:
    """Both states agree, and that of the steps does not depend on the workers."""
    expected = contents(list(step_loader(sampler())))
    inner = stateful_loader(sampler(), 2)
    loader: StepLoader[PackedBatch] = StepLoader(inner)
    found: Micro = {}
    for step in loader:
        found |= contents([step])
        if step.number == 4:
            break
    theirs, ours = inner.state_dict(), loader.state_dict()
    again = stateful_loader(sampler(), 2)
    again.load_state_dict(theirs)
    assert found | contents(list(StepLoader(again))) == expected
    without = step_loader(sampler())
    without.load_state_dict(ours)
    assert found | contents(list(without)) == expected


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lengths": LENGTHS[:-1]}, "documents = 150; this corpus has 149"),
        ({"lengths": LENGTHS[::-1]}, "fingerprint"),
        ({"seed": 1}, "seed = 0; this sampler has 1"),
        ({"shuffle": False}, "shuffle = True; this sampler has False"),
        ({"packer_": packer(max_tokens=100)}, "max_tokens"),
    ],
)
def test_states_that_do_not_fit_are_named(change: dict[str, Any], message: str) -> None:
    state = sampler().state_dict()
    other = sampler(**change)
    before = other.state_dict()
    with pytest.raises(wlb.WlbError, match=message):
        other.load_state_dict(state)
    assert other.state_dict() == before


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda state: state.pop("position"), "no 'position'"),
        (lambda state: state.update(position=10**6), "beyond the last document"),
        (lambda state: state.update(epoch=-1), "'epoch' = -1"),
        (lambda state: state.update(step="3"), "'step' = '3', not of type int"),
        (lambda state: state.update(version=99), "version = 99"),
        (lambda state: state.update(taken=["3"]), "'taken' that is no list"),
        (lambda state: state.update(taken=[3, 3]), "'taken' that does not ascend from 0 to below 150"),
        (lambda state: state.update(taken=[150]), "'taken' that does not ascend"),
        (lambda state: state.update(format="x"), "format = 'x'"),
        (lambda state: state["packer"].update(iteration=7), "digest"),
        (lambda state: state.update(micro_batches=1, dp_size=4), "inside a step .* 4 data-parallel ranks"),
        (lambda state: state.update(micro_batches=9, dp_size=2), "inside a step"),
    ],
)
def test_broken_states_are_named(edit: Any, message: str) -> None:
    """By its seal; and where that was made to fit, by what is wrong."""
    state = sampler().state_dict()
    edit(state)
    with pytest.raises(wlb.WlbError, match=r"digest|version|format"):
        sampler().load_state_dict(state)
    with pytest.raises(wlb.WlbError, match=message):
        sampler().load_state_dict(seal(state))


def test_a_changed_packer_is_accepted_on_request() -> None:
    loader = step_loader(sampler(0, 1))
    before = contents([next(iter(loader)) for _ in range(6)])
    other = sampler(0, 1, packer_=packer(outlier_thresholds=(30,)))
    other.load_state_dict(loader.state_dict(), allow_config_change=True)
    assert tokens_of(before) + tokens_of(contents(list(step_loader(other)))) == all_tokens()


def test_a_packer_says_what_a_global_batch_is() -> None:
    """It is read as the packer has it; where that bounds the work of steps no other is taken, and no other unit."""
    told = sampler(0, 1, packer_=packer(tokens_per_batch=120))
    read = sampler(0, 1, tokens_per_batch=120)
    assert list(told) == list(read)
    bounded = {"release": "adaptive", "outlier_thresholds": (), "max_step_cost": 1.5}
    with pytest.raises(wlb.WlbError, match="make it with tokens_per_batch=120") as caught:
        sampler(0, 1, packer_=packer(**bounded), tokens_per_batch=120)
    assert (caught.value.argument, caught.value.value) == ("tokens_per_batch", 120)
    sampler(0, 1, packer_=packer(**bounded, tokens_per_batch=120), tokens_per_batch=120)
    sampler(0, 1, packer_=packer(**bounded, tokens_per_batch=120))


@pytest.mark.parametrize(
    ("options", "argument"),
    [
        ({"dp_size": 3}, "dp_size"),
        ({"dp_size": 0}, "dp_size"),
        ({"dp_size": 2.0}, "dp_size"),
        ({"dp_rank": 0.0}, "dp_rank"),
        ({"num_epochs": 1.5}, "num_epochs"),
        ({"tokens_per_batch": 10.5}, "tokens_per_batch"),
        ({"seed": 0.5}, "seed"),
        ({"dp_rank": 2}, "dp_rank"),
        ({"dp_rank": -1}, "dp_rank"),
        ({"tokens_per_batch": 0}, "tokens_per_batch"),
        ({"tokens_per_batch": 4 * 96 + 1}, "tokens_per_batch"),
        ({"num_epochs": 0}, "num_epochs"),
        ({"max_early": 2}, "max_early"),
        ({"max_early": -1}, "max_early"),
        ({"lengths": []}, "lengths"),
        ({"lengths": [[1, 2]]}, "lengths"),
        ({"lengths": [1.5]}, "lengths"),
        ({"lengths": [3, 0]}, "lengths"),
        ({"packer_": packer(oversize="error")}, "lengths"),
    ],
)
def test_bad_input_is_named(options: dict[str, Any], argument: str) -> None:
    with pytest.raises(wlb.WlbError) as caught:
        sampler(**({"dp_rank": 0, "dp_size": 2} | options))
    assert caught.value.argument == argument
    if options.get("lengths") == [3, 0]:
        assert (caught.value.index, caught.value.value) == (1, 0)


def test_a_packer_that_holds_documents_is_refused() -> None:
    used = packer()
    used.push([60])
    with pytest.raises(wlb.WlbError, match="packer holds 1"):
        sampler(packer_=used)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_micro_batches_are_prepared_beside_the_step_before(num_workers: int) -> None:
    """The step holds what `prepare` gives; with workers a thread runs it; an error of its reaches the loop."""
    seen: list[threading.Thread] = []

    def prepare(batch: PackedBatch) -> tuple[int, PackedBatch]:
        seen.append(threading.current_thread())
        return len(seen), batch

    loaded = step_loader(sampler(), num_workers=num_workers)._loader
    steps = list(StepLoader(loaded, prepare=prepare))
    numbers = [number for step in steps for number, _ in step.micro_batches]
    assert numbers == list(range(1, len(seen) + 1))
    assert all((thread is threading.main_thread()) == (num_workers == 0) for thread in seen)
    plain = [batch.tokens.tolist() for step in step_loader(sampler()) for batch in step.micro_batches]
    assert [batch.tokens.tolist() for step in steps for _, batch in step.micro_batches] == plain

    with pytest.raises(ZeroDivisionError):
        list(StepLoader(step_loader(sampler(), num_workers=num_workers)._loader, prepare=lambda _: 1 // 0))


def test_a_loader_without_our_sampler_is_refused() -> None:
    with pytest.raises(wlb.WlbError, match="BalancedBatchSampler"):
        StepLoader(DataLoader(Documents(DATA)))


# --- death -----------------------------------------------------------------------------------------------------------


def train(rank: int, folder: Path, dp_size: int, cp_size: int, num_workers: int, kill: tuple[int, int, bool]) -> None:
    """Trains from the last checkpoint on, writing what each rank saw; `kill`: rank, step, before or after saving."""
    of = sampler(rank // cp_size, dp_size, num_epochs=2)
    loader = step_loader(of, cp=(rank % cp_size, cp_size), num_workers=num_workers)
    ledger = Ledger(folder / "ledger", dp_rank=rank // cp_size, dp_size=dp_size, source=loader)
    checkpoint = folder / "checkpoint.json"
    if checkpoint.exists():
        loader.load_state_dict(json.loads(checkpoint.read_text()))
    while of.epoch < 2:
        for step in loader:
            for index, batch in zip(step.indices.tolist(), step.micro_batches, strict=True):
                seen = [batch.document_ids.tolist(), batch.tokens.tolist(), batch.labels.tolist()]
                restore = batch.shard.restore_indices.tolist()
                name = f"{step.number}-{index}-{cp_size}-{rank % cp_size}.json"
                (folder / name).write_text(json.dumps([*seen, restore]))
            if rank % cp_size == 0:
                ledger.record(step)
            dist.barrier()  # as ranks meet where they save together
            if kill == (rank, step.number, False):
                os.kill(os.getpid(), signal.SIGKILL)
            if rank == 0:
                (folder / "next.json").write_text(json.dumps(step.state))
                os.replace(folder / "next.json", checkpoint)
            if kill == (rank, step.number, True):
                os.kill(os.getpid(), signal.SIGKILL)
            dist.barrier()  # as the gradients' reduction does


def seen(folder: Path, cp_size: int) -> Micro:
    result: Micro = {}
    parts: dict[tuple[int, int], list[list[Any]]] = {}
    for path in folder.glob(f"*-*-{cp_size}-*.json"):
        number, index, _, _ = map(int, path.stem.split("-"))
        parts.setdefault((number, index), [[]] * cp_size)
    for key in parts:
        ranks = [json.loads((folder / f"{key[0]}-{key[1]}-{cp_size}-{r}.json").read_text()) for r in range(cp_size)]
        tokens, labels = (np.array([t for part in ranks for t in part[i]], int)[ranks[0][3]].tolist() for i in (1, 2))
        result[key] = [ranks[0][0], tokens, labels]
    return result


def die_and_go_on(folder: Path, dp_size: int, cp_size: int, num_workers: int, seed: int) -> None:
    """Killed with 2 ranks of 2 workers each, resumed with these numbers: bit for bit the uninterrupted run."""
    expected = everything(2, num_epochs=2)
    last = max(number for number, _ in expected)
    chance = random.Random(seed)
    kill = (chance.randrange(2), chance.randrange(last), bool(chance.randrange(2)))
    with pytest.raises(processes.RankFailed):
        processes.run(2, train, folder, 2, 1, 2, kill)
    checkpoint = folder / "checkpoint.json"
    resumed_at = json.loads(checkpoint.read_text())["step"] if checkpoint.exists() else 0
    assert abs(resumed_at - kill[1]) <= 1
    before = {key: value for key, value in seen(folder, 1).items() if key[0] < resumed_at}
    for path in folder.glob("*-*-*-*.json"):
        path.unlink()
    processes.run(dp_size * cp_size, train, folder, dp_size, cp_size, num_workers, (-1, -1, False))
    after = seen(folder, cp_size)
    assert before.keys().isdisjoint(after)
    assert before | after == expected
    proof = audit(folder / "ledger", state=json.loads(checkpoint.read_text()), lengths=LENGTHS)
    assert proof.sound, proof.findings
    assert [epoch.trained for epoch in proof.epochs] == [LENGTHS.size] * 2


@pytest.mark.parametrize(
    ("dp_size", "cp_size", "num_workers"),
    [(2, 1, 0), *(pytest.param(*of, marks=pytest.mark.long) for of in [(4, 1, 2), (2, 2, 1)])],
)
def test_killed_and_resumed(dp_size: int, cp_size: int, num_workers: int, tmp_path: Path) -> None:
    die_and_go_on(tmp_path, dp_size, cp_size, num_workers, seed=dp_size * 10 + num_workers)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(12))
def test_killed_and_resumed_many_times(seed: int, tmp_path: Path) -> None:
    dp_size, cp_size = [(1, 1), (2, 1), (4, 1), (1, 2), (2, 2), (1, 4)][seed % 6]
    die_and_go_on(tmp_path, dp_size, cp_size, seed % 3, seed)
