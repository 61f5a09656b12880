"""The proof, small: what is trained is the plan, each part once; figures say what was measured and no more."""

import ctypes
import dataclasses
import itertools
import multiprocessing
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import wlb
import wlb_tools
from tests.torch import processes as forked
from wlb.torch.attention import context_parallel_attention
from wlb_tools.cluster.overhead import NO_OVERHEAD, Overhead
from wlb_tools.profiling import LinkTimes, probe_link

for needed in ("cyclopts", "matplotlib", "rich"):
    pytest.importorskip(needed)
proof = pytest.importorskip("studies.proof")
batches, command, echo, figures, page, pacing, probing, processes, shared, slices, system = (
    pytest.importorskip(f"studies.proof.{name}")
    for name in (
        *("batches", "__main__", "echo", "figures", "page", "pace", "probe", "processes", "shared", "slices"),
        "system",
    )
)

BENCH = proof.Bench(hidden=64, context=64, batches=4)
CPU = torch.device("cpu")
torch.set_num_threads(1)  # as tests/torch: threads that wait for each other on a busy machine take minutes


def outcomes(layout: str, *names: str) -> dict[str, Any]:
    bench = BENCH
    lengths = np.random.default_rng(0).lognormal(3, 1, 400).astype(np.int64).clip(1, 64)
    layout = proof.Layout(layout)
    scenario = wlb_tools.Scenario(
        model=bench.model,
        layout=wlb_tools.ParallelLayout(**layout.sizes, fsdp="zero2"),
        hardware=wlb_tools.Hardware.preset("h100"),
        context=bench.context,
        max_tokens=128,
    )
    return bench.simulate(lengths, scenario, list(names))


def test_layouts_by_name() -> None:
    assert proof.Layout("dp2pp4").sizes == {"dp": 2, "pp": 4, "cp": 1}
    assert proof.Layout("cp2").world_size == 2
    for wrong in ("tp2", "pp", "pp2pp2", "pp2x"):
        with pytest.raises(SystemExit, match="is named like"):
            _ = proof.Layout(wrong).sizes


def test_lengths_keep_their_share_of_the_context() -> None:
    scaled = BENCH.scaled(np.array([131072, 65536, 1, 200000]), 131072)
    assert sorted(scaled.tolist()) == [1, 32, 34, 64, 64]  # 200,000 are cut at the window first


def test_an_echo_is_what_the_rank_itself_sent() -> None:
    shard = wlb.shard([10, 3, 7], cp_size=4, strategy="per_document")
    with echo.ranks(4):
        assert echo.group(0, 1) is None
        for rank in range(4):
            group = echo.group(rank, 4)
            assert group is not None
            assert group.size() == 4
            assert torch.distributed.get_rank(group) == rank
            tokens = shard.rank(rank).token_indices.size
            q, k, v = (torch.ones(tokens, 1, 8, requires_grad=True) for _ in range(3))
            out = context_parallel_attention(q, k, v, shard, group=group)
            out.sum().backward()
            torch.testing.assert_close(out, torch.ones_like(out))  # all values are, wherever they came from
            assert v.grad is not None


def test_every_part_is_run_in_slices() -> None:
    found = outcomes("dp2pp2cp2", "original", "adaptive", "Dynamic-CP")
    ticks: list[int] = []
    beside = [pacing.parts_of(lengths, 2)[0] for lengths in pacing.documents(BENCH.context)]
    measured = slices.measure(
        BENCH, found, beside, repeats=2, device=CPU, thread_clock=True, tick=lambda: ticks.append(1)
    )
    # One of the others before each method's step, and what the last turn lacks.
    steps = sum(len(outcome.run.digests) for outcome in found.values())
    assert measured.others.shape == (len(beside), 2, -(-steps // len(beside)))
    assert measured.others.min() > 0
    assert sum(seconds.shape[0] * seconds.shape[1] for seconds in measured.seconds.values()) == len(ticks)
    for name, outcome in found.items():
        seconds = measured.seconds[name]
        assert (seconds > 0).all()
        middle = np.median(seconds, axis=0)
        timed = slices.as_measured(outcome, middle)
        assert timed.tokens == outcome.tokens
        spread = slices.even(outcome, middle)
        assert spread.work.sum() <= timed.work.sum() * 1.001  # work is that of the slowest rank of a group
        busy = slices.busy(outcome, middle)
        assert sum(np.sum(step) for step in busy) == pytest.approx(middle.sum())
        assert np.array(busy[0]).shape[0] == 8


def train(rank: int, work: Any) -> dict[str, Any]:
    settings = processes.train.Settings(
        pp=work.layout.sizes["pp"], cp=work.layout.sizes["cp"], model=processes.train.Shape(**BENCH.config.shape())
    )
    device, mesh = processes.train.set_up_ranks(settings)
    return processes.Runner(work, settings, device, mesh).run()


@pytest.mark.parametrize("layout", ["pp2", "cp2"])
def test_processes_train_the_same_plans(layout: str) -> None:
    names = ("original", "finer", "Dynamic-CP") if layout == "cp2" else ("original", "finer")
    found = outcomes(layout, *names)
    work = processes.work_of(BENCH, proof.Layout(layout), found, 2, "cpu")
    first, second = forked.run(2, train, work)
    assert first == second
    for name, outcome in found.items():
        assert np.array(first["seconds"][name]).shape == (2, len(outcome.run.digests))
        for took, ranks in zip(first["seconds"][name][0], first["busy"][name][0], strict=True):
            assert all(0 < sum(busy) <= took for busy in ranks)


def test_tokens_are_those_of_the_plan() -> None:
    found = outcomes("dp2cp2", "original", "Dynamic-CP")
    text = batches.Text()
    for outcome in found.values():
        trained = 0
        for part in outcome.parts():
            batch = text.batch(batches.Part.of(outcome, part), CPU)
            trained += batch.tokens.numel()
            if part.rank == 0 and batch.tokens.numel():
                row = outcome.run.document[part.pieces], outcome.run.start[part.pieces]
                assert int(batch.tokens[0]) == int(text.document(int(row[0][0]), int(row[1][0]), 1)[0])
        assert trained == outcome.tokens


def run_of(seconds: list[float], work: list[float], *, predicted: float = 1.0, streamed: int | None = None) -> Any:
    both = np.array(seconds), np.array(work)
    many = len(seconds) if streamed is None else streamed
    return figures.Run(both[0], both[0], both[0] * predicted, both[1], many, tokens=100, flops=1000.0)


def test_a_gain_is_found_and_one_that_is_not_there_is_not() -> None:
    rng = np.random.default_rng(1)
    noise = rng.uniform(0.9, 1.1, 40)
    base, faster = run_of(list(noise * 2), [1.0] * 40), run_of(list(noise), [1.0] * 40, predicted=1.1)
    found = figures.gain(faster, base, flops=False)
    assert found.ratio == pytest.approx(2)
    assert found.low <= 2 <= found.high
    assert found.shown
    assert found.predicted == pytest.approx(2 / 1.1)
    assert found.error == pytest.approx(1 / 1.1 - 1)
    other = run_of(list(rng.permutation(noise) * 2), [1.0] * 40)
    assert not figures.gain(other, base, flops=False).shown


def test_other_repetitions_are_the_same_ones_for_all_methods() -> None:
    outcome = outcomes("pp2", "original")["original"]
    table = np.random.default_rng(0).uniform(0.9, 1.1, (5, len(outcome.seconds))) * outcome.seconds

    def drawn(table: np.ndarray) -> np.ndarray:
        return np.array(command.again(outcome, 5, lambda chosen: np.median(table[chosen], axis=0)))

    assert drawn(2 * table) == pytest.approx(2 * drawn(table))
    assert np.ptp(drawn(table)) > 0
    assert drawn(np.tile(outcome.seconds, (5, 1))) == pytest.approx(outcome.steady_seconds)


def test_the_end_of_a_stream_counts_at_the_efficiency_of_the_rest() -> None:
    assert run_of([1.0, 1.0, 5.0], [1.0, 1.0, 1.0], streamed=2).steady == pytest.approx(3)


def test_levels_by_hand() -> None:
    # pp 2, dp 2, cp 1; two micro-batches: replica 0 has 1 and 3 on each stage, replica 1 has 1 and 1.
    found = figures.levels([[[1, 3], [1, 1], [1, 3], [1, 1]]], {"pp": 2, "dp": 2, "cp": 1})
    assert found == pytest.approx({"micro-batch": 2.0, "dp": 4 / 3, "pp": 1.0, "cp": 1.0, "gpu": 4 / 3})


SLICED = {"even": [1.0] * 8, "attribution": {"compute": 0.5}}


def test_the_page_says_where_there_is_no_gain(tmp_path: Path) -> None:
    def row(factor: float) -> dict[str, Any]:
        seconds = [factor] * 8
        level = dict.fromkeys(page.LEVELS, 1.0)
        made = {"seconds": seconds, "work": seconds, "predicted": seconds, "predicted_work": seconds, "levels": level}
        made |= {"profiled": seconds, "steadied": seconds, "repetitions": [seconds, seconds], "again": [8.0] * 4}
        return made | {"streamed": 8, "tokens": 100, "flops": 1e9, "delay": 0.0}

    methods = {"original": row(1.0), "original, uncut": row(1.1), "adaptive": row(0.8), "finer": row(1.2)}
    layout = {"kind": "processes", "title": "pp 2", "sizes": {"pp": 2}, "methods": methods, "link": {}}
    layout["settings"] = {"batches": 8, "hidden": 64, "layers": 2, "context": 64, "clock": "thread", "repeats": 2}
    share = dict.fromkeys(("flops", "seconds", "flops_7b", "seconds_7b_h100"), 0.7)
    about = {"time": "2025-01-01T", "gpu": None, "cpu": "x", "cores": 2, "busy": None, "packages": {"torch": "2"}}
    about |= {"wlb": "1", "commit": "abc", "attention_share": share}
    layout["machine"] = about | {"busy": 0.9}
    layout["pace"] = {"seconds": 1.25}
    layout["beside"] = {"alone": 0.925}
    record = {"machine": about, "documents": "some", "command": "c", "layouts": [layout]}
    text = page.text(record, picture="proof.png")
    assert "the whole interval above 1: adaptive. Not shown: finer." in " ".join(text.split())
    assert "**Other programs were running" in " ".join(text.split())
    assert "UTC, 2 times, 0.9 of 2 processors" in " ".join(text.split())
    assert "took 1.25 times" in " ".join(text.split())
    assert "While the others wait a rank takes 0.925 of" in " ".join(text.split())
    assert "too few steps told it" not in " ".join(text.split())
    noise = record | {"layouts": [layout | {"beside": {"alone": 0.437}}]}
    assert "too few steps told it" in " ".join(page.text(noise, picture="proof.png").split())
    assert all(len(line) <= 120 for line in text.splitlines() if not line.startswith("|"))
    assert "No link was probed" not in text
    # Two repetitions do not tell how far a third would be off; equal ones are off by nothing, uneven ones are.
    assert page.noise(layout) is None
    five = layout | {"settings": layout["settings"] | {"repeats": 5}}
    assert page.noise(five) == 0
    uneven = {
        name: row | {"again": [7.0, 9.0, 8.0, 8.0] if name != "original" else [8.0] * 4}
        for name, row in methods.items()
    }
    assert page.noise(five | {"methods": uneven}) == pytest.approx(
        np.std([1 / 7, 1 / 9, 1 / 8, 1 / 8]) / np.mean([1 / 7, 1 / 9, 1 / 8, 1 / 8])
    )
    together = {name: row | {"again": [7.0, 9.0]} for name, row in methods.items()}
    assert page.noise(five | {"methods": together}) == 0
    several = page.text(record | {"layouts": [five | {"methods": uneven}]}, picture="proof.png")
    assert "would be another by some 8.9%" in " ".join(several.split())
    sliced = layout | {"kind": "slices", "methods": {name: made | SLICED for name, made in methods.items()}}
    text = page.text(record | {"layouts": [sliced]}, picture="proof.png")
    assert "No link was probed, for want of a second device" in text
    assert "(thread time)" in text
    page.draw(record, tmp_path / "proof.png")
    assert (tmp_path / "proof.png").stat().st_size > 0


def test_a_pace_is_found_by_even_micro_batches() -> None:
    took = np.array([2.0, 0.5])
    assert pacing.of(took, [2.0, 0.5]) == pytest.approx(1)
    assert pacing.of(took, [1.0, 0.5]) == pytest.approx(2**0.5)
    (outcome,) = outcomes("dp2", "original").values()
    assert command.predicted(outcome, 1.3, 1.0)["predicted"] == pytest.approx(1.3 * outcome.seconds)


def test_what_is_now_and_then_in_the_way_of_a_step_is_not_seen() -> None:
    rng = np.random.default_rng(0)
    in_the_way = (rng.random((9, 500)) < 0.6) * rng.exponential(0.3, (9, 500))
    seconds = 1 + rng.normal(0, 0.01, (9, 500)) + in_the_way
    assert pacing.quiet(seconds) == pytest.approx(np.sort(seconds, axis=0)[:2].mean(axis=0))
    assert pacing.quiet(seconds).mean() == pytest.approx(1, abs=0.01)
    assert np.median(seconds, axis=0).mean() > 1.05
    assert (pacing.quiet(seconds[:1]) == seconds[0]).all()
    # What is known to be alike in all turns is seen by the same repetitions: no turn that was lucky stands for it.
    both = np.stack([seconds, 3 * seconds])
    assert pacing.alike(both) == pytest.approx(np.array([1, 3]) * np.median(pacing.quiet(seconds)))
    assert (pacing.quiet(both, axis=1) == np.stack([pacing.quiet(seconds), pacing.quiet(3 * seconds)])).all()


def test_predictions_are_graded_by_what_is_steadied_and_gains_by_the_clock() -> None:
    run, base = (dataclasses.replace(run_of([1.0] * 4, [1.0] * 4), steadied=np.full(4, of)) for of in (0.8, 1.0))
    found = figures.gain(run, base, flops=False)
    assert found.ratio == pytest.approx(1)
    assert found.error == pytest.approx(1 / 1.25 - 1)
    assert found.error_as_ran == pytest.approx(0)
    assert run.step_errors == pytest.approx([0.25] * 4)


def test_the_page_has_the_command_without_folders(monkeypatch: pytest.MonkeyPatch) -> None:
    words = [
        "--lengths",
        "../some/lengths.npy",
        "--page",
        "docs/proof.md",
        "--repeats",
        "3",
        "--record",
        "/r/proof.json",
    ]
    monkeypatch.setattr(sys, "argv", ["proof", *words])
    assert command.command() == "python -m studies.proof --lengths lengths.npy --repeats 3"


def test_a_step_weighs_what_it_was_predicted_to_whatever_ranks_waited_inside() -> None:
    row = {"seconds": [1.0, 5.0], "steadied": [1.0, 5.0], "predicted": [1.0, 4.0], "predicted_work": [1.0, 1.0]}
    found = figures.Run.of(row | {"work": [1.0, 9.0], "streamed": 1, "tokens": 10, "flops": 1.0})
    assert (found.steady, found.steady_predicted) == (2, 2)


def test_even_micro_batches_stand_between_the_methods() -> None:
    made = command.between(dict.fromkeys("abcde", 1), {"x": 2, "y": 3})
    assert list(made.items()) == [("x", 2), ("a", 1), ("b", 1), ("c", 1), ("y", 3), ("d", 1), ("e", 1)]
    assert list(command.between({"a": 1}, {"x": 2, "y": 3})) == ["x", "a", "y"]


def test_even_micro_batches_are_run_on_all_ranks() -> None:
    sorts = pacing.documents(BENCH.context)
    steps, _ = command.known_steps(BENCH, proof.Layout("dp2pp2cp2"), 3)
    found = {name: turns for name, turns in steps.items() if name.startswith(command.PACE)}
    assert len(found) == len(sorts)
    assert max(map(max, sorts)) == BENCH.context - 1  # a round length takes less than others
    for steps, lengths in zip(found.values(), sorts, strict=True):
        assert len(steps) == 3
        assert [len(ranks) for ranks in steps[0]] == [2] * 4  # as many micro-batches as stages, dp 2 x cp 2 ranks
        assert [part.lengths.tolist() for part in steps[0][0]] == [lengths] * 2


def test_documents_that_no_method_trains_are_of_all_lengths() -> None:
    for tokens, many in ((4096, 1), (4096, 4), (4096, 16), (64, 16)):
        lengths = proof.uneven(tokens, many)
        assert lengths == sorted(lengths, reverse=True)
        assert len(lengths) == many
        assert tokens - 2 * many <= sum(lengths) <= tokens + many
    longest, *_, shortest = proof.uneven(1 << 16, 16)
    assert 12 < longest / shortest < 16
    bench = proof.Bench()
    shapes = probing.shapes(bench, [1, 2])
    assert {(size, strategy) for size, _, strategy in shapes} == {
        (1, "per_document"),
        (2, "per_document"),
        (2, "per_sequence"),
    }
    for size, lengths, _ in shapes:
        assert 2 * size <= min(lengths) <= max(lengths) <= bench.context


def test_ranks_that_run_alone_attend_to_nothing_that_memory_happened_to_hold() -> None:
    """Of two ranks one sends fewer keys, and what fills up its rows stands for keys of the other."""
    # Of the only document that is cut 110 tokens lie on the first rank, 130 on the second.
    parts = pacing.parts_of([240, *[20] * 10], 2, strategy="per_sequence")
    keys = parts[0].shard.keys_gathered
    assert keys.min() < keys.max()
    stages = slices.Stages(BENCH, 2, CPU, time.perf_counter)
    fills = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)  # new memory holds NaN
    try:
        with echo.ranks(2):
            assert torch.empty(4).isnan().all()
            for part in parts:
                stages.run(batches.Text().batch(part, CPU), 2)
    finally:
        torch.use_deterministic_algorithms(fills[0], warn_only=fills[1])
    gradients = [parameter.grad for stage in stages.stages for parameter in stage.parameters()]
    assert all(gradient.isfinite().all() for gradient in gradients)


def test_a_probe_has_neighbours_that_end_with_it() -> None:
    (outcome,) = outcomes("dp2pp2cp2", "original").values()
    alone, beside = (
        probing.stages(BENCH, outcome.scenario, [1, 2], device=CPU, thread_clock=True, neighbours=count)
        for count in (0, 2)
    )
    assert np.isfinite([*alone.attention, *beside.attention]).all()
    assert not multiprocessing.active_children()


def on_a_shared_machine(costs: np.ndarray, count: int, alone: float) -> float:
    """Seconds of 1F1B on two stages, whose ops take `alone` times as long while the other stage has nothing to do.

    Args:
        costs: float64[stages, 2] of a forward and a backward.
        count: micro-batches.
        alone: see above.
    """
    order: list[list[tuple[str, int]]] = [[], []]
    for stage, warm_up in ((0, 2), (1, 1)):
        ahead = [("f", j) for j in range(min(warm_up, count))]
        rest = [op for j in range(count) for op in (("b", j), ("f", j + warm_up)) if op[1] < count]
        order[stage] = ahead + rest
    done: set[tuple[str, int, int]] = set()
    left = [0.0, 0.0]
    now = 0.0
    at = [0, 0]
    while min(at[stage] - len(order[stage]) for stage in (0, 1)) < 0:
        running = []
        for stage in (0, 1):
            if at[stage] == len(order[stage]):
                continue
            kind, j = order[stage][at[stage]]
            needs = {("f", 0): None, ("f", 1): ("f", j, 0), ("b", 0): ("b", j, 1), ("b", 1): ("f", j, 1)}[kind, stage]
            if needs is None or needs in done:
                left[stage] = left[stage] or float(costs[stage, int(kind == "b")])
                running.append(stage)
        rate = 1.0 if len(running) == 2 else 1 / alone
        passed = min(left[stage] for stage in running) / rate
        now += passed
        for stage in running:
            left[stage] -= passed * rate
            if left[stage] < 1e-12:
                left[stage] = 0.0
                done.add((*order[stage][at[stage]], stage))
                at[stage] += 1
    return now


@pytest.mark.parametrize("count", [2, 3, 8])
@pytest.mark.parametrize("backward", [1.0, 2.5])
def test_ranks_that_share_a_machine_are_faster_while_others_wait(count: int, backward: float) -> None:
    costs = np.array([[1.0, backward], [1.1, 1.1 * backward]])
    passes = probing.Passes(np.concatenate([costs, np.zeros((2, 1))], axis=1), p2p=0.0, waits=0.0)
    scenario = next(iter(outcomes("pp2", "original").values())).scenario
    for alone in (1.0, 0.9):
        found = probing.pipeline_seconds(scenario, passes, count, alone) - scenario.step_end
        assert found == pytest.approx(on_a_shared_machine(costs, count, alone))


def test_replicas_that_share_a_machine_are_faster_while_others_wait() -> None:
    (outcome,) = outcomes("dp2", "original").values()
    busy = outcome.costs.sum(axis=(2, 3, 4))  # [steps, ranks]
    least, most = busy.min(axis=1), busy.max(axis=1)
    assert (most > 1.01 * least).any()
    end = outcome.scenario.step_end
    assert outcome.seconds == pytest.approx(most + end)
    assert shared.of_steps(outcome, 0.9) == pytest.approx(least + 0.9 * (most - least) + end)
    assert command.predicted(outcome, 2.0, 0.9)["predicted"] == pytest.approx(2 * shared.of_steps(outcome, 0.9))


@pytest.mark.parametrize("name", ["pp2", "dp2", "cp2", "dp2pp2cp2"])
def test_what_waiting_saves_is_found(name: str) -> None:
    """From steps that a machine of so many processors would take, as long as predicted or longer."""
    (outcome,) = outcomes(name, "original").values()
    scenario, lengths, count = outcome.scenario, [900, 100, 24], max(2, outcome.scenario.layout.pp)
    (more, saved_more), (less, saved_less) = predicted = probing.waiting_seconds(scenario, lengths, count)
    assert saved_more / more > 1.1 * saved_less / less  # ranks do wait more
    if scenario.layout.pp == 1:
        assert (more, saved_less) == (less, 0)
        assert 0 < saved_more < less
    for alone in (0.8, 0.95, 1.0):
        took_more, took_less = (1.3 * (full - (1 - alone) * saved) for full, saved in predicted)
        assert shared.found(took_more / took_less, predicted) == pytest.approx(alone)
    assert shared.found(1.05 * more / less, predicted) == 1.0  # nobody is slower for that others wait


def test_steps_in_which_ranks_wait() -> None:
    def tokens(step: list[list[Any]]) -> list[list[int]]:
        return [[int(part.lengths.sum()) for part in parts] for parts in step]

    for name, size in {"dp2": 1, "dp2cp2": 1, "cp2": 1}.items():
        layout = proof.Layout(name)
        more, less = processes.waiting(layout, [50, 7], 3, 2)
        assert tokens(more) == [[57] * 2] + [[3] * 2] * (layout.world_size - 1)
        assert tokens(less) == [[57] * 2] * layout.world_size
        _, of_groups = command.known_steps(BENCH, layout, 1)
        dynamic = set(command.WAITING) <= of_groups
        assert dynamic == (layout.sizes["cp"] > 1) == bool(set(command.WAITING) & of_groups)
        firsts = list(range(layout.world_size)) if dynamic else [None] * layout.world_size
        for step in (more, less):
            assert [[(part.cp_size, part.first_rank) for part in parts] for parts in step] == [
                [(size, first)] * 2 for first in firsts
            ]
    more, less = processes.waiting(proof.Layout("dp2pp2cp2"), [50, 7], 3, 2)
    dynamic = bool(set(command.WAITING) & command.known_steps(BENCH, proof.Layout("dp2pp2cp2"), 1)[1])
    assert (tokens(more), tokens(less), dynamic) == ([[57] * 2] * 4, [[57] * 4] * 4, False)


def test_neighbours_work_meanwhile() -> None:
    # No lock: whoever is killed while it holds one keeps it for ever.
    turns = multiprocessing.get_context("fork").RawValue("i", 0)

    def work(index: int) -> None:
        while True:
            turns.value += 1

    with probing.busy(2, work):
        assert len(multiprocessing.active_children()) == 2
        until = time.monotonic() + 60
        while turns.value < 100 and time.monotonic() < until:
            time.sleep(0.01)
    assert turns.value >= 100
    assert not multiprocessing.active_children()


def test_even_steps_are_predicted_as_the_simulation_does() -> None:
    (outcome,) = outcomes("dp2pp2cp2", "original").values()
    # Of two ranks that share a document the first copies more, and the other waits for it.
    stages = ((1e-3, 1e-6),) * 2
    overhead = Overhead(forward=stages, backward=stages, copies=((1e-6, 2e-7), (2e-6, 4e-7)), gather=1e-4)
    lengths = [BENCH.context] * 8
    for beside in (Overhead(), overhead):
        scenario = dataclasses.replace(outcome.scenario, num_micro_batches=8, overhead=beside)
        found = BENCH.simulate(np.array(lengths * 5), scenario, ["original"])["original"]
        each = probing.pass_seconds(scenario, lengths[:1])
        for alone in (1.0, 0.9):
            expected = shared.of_steps(found, alone)[0]
            assert probing.pipeline_seconds(scenario, each, 4, alone) == pytest.approx(expected)


PAGES = """
import ctypes, resource, runpy, sys

if sys.argv[2] == "kept":
    runpy.run_path(sys.argv[1])["keep_memory"]()
libc, size = ctypes.CDLL(None), 1 << 26  # which glibc maps by themselves
libc.malloc.restype = ctypes.c_void_p
for turn in range(8):
    if turn == 4:  # it had what it needs, wherever there was room
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    block = ctypes.c_void_p(libc.malloc(ctypes.c_size_t(size)))
    ctypes.memset(block, 1, size)
    libc.free(block)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
"""Prints the pages that the system gave anew, for blocks that the program had before."""


def test_memory_that_was_freed_is_kept() -> None:
    if not hasattr(ctypes.CDLL(None), "mallopt"):
        pytest.skip("the C library is not glibc")

    def pages(kept: str) -> int:
        # A program of its own: after a test of what is too large for the memory, glibc may have moved this process'
        # thread to an arena that large blocks do not fit into, and a fork of it stays there.
        program = [sys.executable, "-c", PAGES, system.__file__, kept]
        return int(subprocess.run(program, check=True, capture_output=True, text=True, timeout=60).stdout)

    assert pages("given back") >= 4 * 32  # even where pages have 2 MiB
    assert pages("kept") <= 16


def by_a_rank(prepare: Callable[[], object], seen: Callable[[], Any]) -> Any:
    """What a thread sees that a process of its own starts once it has prepared itself."""
    found = multiprocessing.get_context("fork").SimpleQueue()

    def rank() -> None:
        prepare()
        thread = threading.Thread(target=lambda: found.put(seen()))
        thread.start()
        thread.join()

    process = multiprocessing.get_context("fork").Process(target=rank)
    process.start()
    it = found.get()
    process.join()
    return it


def test_a_rank_keeps_to_a_processor_of_its_own() -> None:
    if not hasattr(os, "sched_setaffinity"):
        pytest.skip("this system does not tell processes which processors they may use")
    mine = sorted(os.sched_getaffinity(0))
    if len(mine) < 2:
        pytest.skip("this process has one processor")

    def taken(index: int, of: int) -> set[int]:
        return by_a_rank(lambda: system.take_processor(index, of=of), lambda: os.sched_getaffinity(0))

    assert (taken(0, 2), taken(1, 2)) == ({mine[0]}, {mine[1]})
    assert taken(1, len(mine) + 1) == set(mine)  # too few for all of them
    with system.on_a_processor("cpu"):
        assert os.sched_getaffinity(0) == {mine[0]}
        assert taken(1, 2) == {mine[1]}
    assert os.sched_getaffinity(0) == set(mine)
    with system.on_a_processor("cuda"):  # whose host has threads of its own to run
        assert os.sched_getaffinity(0) == set(mine)


def test_threads_of_a_rank_give_way_to_each_other() -> None:
    if not hasattr(os, "SCHED_BATCH"):
        pytest.skip("this system has no such policy")
    assert by_a_rank(system.give_way, lambda: os.sched_getscheduler(0)) == os.SCHED_BATCH
    assert os.sched_getscheduler(0) == os.SCHED_OTHER


def test_a_rank_computes_last_or_first() -> None:
    if not hasattr(os, "SCHED_IDLE"):
        pytest.skip("this system has no such policy")

    def policies(compute: Callable[[], None]) -> tuple[int, int]:
        """Of a thread that is there before, and of the one that computes."""
        system.give_way()
        done, sends = threading.Event(), threading.Thread(target=lambda: done.wait())
        sends.start()
        compute()
        try:
            return os.sched_getscheduler(sends.native_id or 0), os.sched_getscheduler(0)
        finally:
            done.set()

    assert by_a_rank(lambda: None, lambda: policies(system.compute_last)) == (os.SCHED_BATCH, os.SCHED_IDLE)
    assert by_a_rank(lambda: None, lambda: policies(system.compute_first)) == (os.SCHED_BATCH, os.SCHED_OTHER)
    assert os.sched_getscheduler(0) == os.SCHED_OTHER


def test_layouts_whose_ranks_wait_for_all_that_they_exchange() -> None:
    waits = {name: processes.waits_for_all(proof.Layout(name)) for name in ("dp2", "cp2", "dp2cp2", "pp2", "pp2cp2")}
    assert waits == {"dp2": True, "cp2": True, "dp2cp2": True, "pp2": False, "pp2cp2": False}


def test_programs_that_are_busy_are_seen() -> None:
    found = system.busy_processors(0.01)
    assert found is None or found >= 0


def test_methods_by_a_part_of_their_names() -> None:
    assert command.matching(("queues",)) == ["original", "queues"]
    assert command.matching(()) == list(proof.METHODS)
    with pytest.raises(SystemExit, match="is in the name of none"):
        command.matching(("nobody",))


def test_probed_links() -> None:
    sizes = np.array([1 << 12, 1 << 16, 1 << 20])
    exact = LinkTimes(4, sizes, 3 * 2e-5 + 3 / 4 * sizes / 5e8)
    assert exact.link.latency == pytest.approx(2e-5)
    assert exact.link.bandwidth == pytest.approx(5e8)
    found = forked.run(2, probe)
    assert found[0] == found[1]
    assert min(found[0]) > 0
    with pytest.raises(forked.RankFailed, match="a link joins two or more"):
        forked.run(1, probe)


def probe(rank: int) -> list[float]:
    times = probe_link(num_bytes=(2, 1 << 16), repeats=2)
    return [times.link.latency, times.link.bandwidth, *times.seconds.tolist()]


def test_a_probe_finds_what_is_beside() -> None:
    """Of seconds that are exactly as it takes them to be."""
    rng = np.random.default_rng(0)
    layers = np.array([1, 2])
    terms = rng.uniform(1, 100, (20, 2, 4)) * [1, 1e-3, 2, 3]
    predicted = rng.uniform(0.1, 1, (20, 2, 2))
    truth = rng.uniform(-1e-3, 1e-2, (2, 2, 2))  # [stages, passes, terms of a stage]
    copies = ((1e-3, 2e-3), (3e-3, 4e-3))
    measured = predicted.copy()
    for stage in range(2):
        for one, share in enumerate((1.1, 0.9)):
            once, each = truth[stage, one]
            beside = (share - 1) * terms[:, one, 1] + terms[:, one, 2:] @ copies[one]
            measured[:, stage, one] += once + each * terms[:, one, 0] + layers[stage] * beside
    found = probing.fit(measured, predicted, terms, layers)
    assert found.attention == pytest.approx((1.1, 0.9))
    assert np.array(found.overhead.forward) == pytest.approx(truth[:, 0])
    assert np.array(found.overhead.backward) == pytest.approx(truth[:, 1])
    assert np.array(found.overhead.copies) == pytest.approx(np.array(copies))
    assert found.error == pytest.approx(0, abs=1e-9)
    measured[3, 0, 0] *= 1.2  # one that happened to take longer says nothing of the others
    found = probing.fit(measured, predicted, terms, layers)
    assert found.attention == pytest.approx((1.1, 0.9), abs=1e-3)
    assert np.array(found.overhead.forward) == pytest.approx(truth[:, 0], rel=0.01, abs=1e-4)
    # Where all groups are of one rank nothing is copied.
    terms[:, :, 2:] = 0.0
    assert probing.fit(predicted * 1.5, predicted, terms, layers).overhead.copies == ((0.0, 0.0), (0.0, 0.0))


def test_where_everything_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def chosen(gpus: int, *words: str) -> str:
        monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
        _, bound, _ = command.app.parse_args(list(words))
        return str(command.device_of(bound.arguments.get("options", command.Options())))

    assert (chosen(0), chosen(2), chosen(2, "--device", "cpu")) == ("cpu", "cuda", "cpu")
    assert capsys.readouterr().err == ""
    assert chosen(1) == "cpu"
    assert "pp 2 takes 2 GPUs, one for each rank, and there are 1: measured on the CPU" in capsys.readouterr().err
    assert chosen(1, "--empty-layouts") == "cuda"
    assert chosen(0, "--empty-layouts") == "cpu"
    assert capsys.readouterr().err == ""
    for gpus, *words in ((1, "--device", "cuda"), (0, "--empty-layouts", "--device", "cuda")):
        with pytest.raises(SystemExit, match="GPUs, one for each rank"):
            chosen(gpus, *words)


def test_the_command_line_is_read() -> None:
    _, bound, _ = command.app.parse_args(["--hidden", "64", "--layouts", "pp2", "--seed", "3"])
    options = bound.arguments["options"]
    assert (options.hidden, options.layouts, options.seed) == (64, ("pp2",), 3)
    with pytest.raises(SystemExit):
        command.app.parse_args(["--hidden", "0"])


@pytest.mark.parametrize("name", ["pp2", "dp2", "dp2pp2cp2"])
def test_a_probe_finds_what_ops_gathering_and_steps_take(name: str) -> None:
    """Of steps that take what the simulation says they take with it."""
    layout, few = proof.Layout(name), probing.few_tokens(BENCH.context)

    def scenario(group: int, count: int, overhead: Any) -> wlb_tools.Scenario:
        ranks = layout.sizes["dp"] * layout.sizes["cp"]
        return wlb_tools.Scenario(
            model=BENCH.model,
            layout=wlb_tools.ParallelLayout(pp=layout.sizes["pp"], cp=group, dp=ranks // group, fsdp="zero2"),
            hardware=wlb_tools.Hardware.preset("h100"),
            context=few * group,
            num_micro_batches=count * (ranks // group),
            overhead=overhead,
        )

    stages = ((0.5, 1e-3),) * layout.sizes["pp"]
    with_ops = tuple((once + 0.125, *rest) for once, *rest in stages)
    groups = probing.group_sizes(layout)
    gather = 0.25 if len(groups) > 1 else 0.0
    copies = ((1e-3, 2e-3), (3e-3, 4e-3))
    truth = Overhead(forward=with_ops, backward=with_ops, copies=copies, gather=gather, step=3.0)
    seconds: dict[int, dict[int, float]] = {}
    slower = 1.1  # than in the profile's minutes: these steps, and those that tell
    for group, factor in itertools.product(groups, (2, 4)):
        count = factor * layout.sizes["pp"]
        case = scenario(group, count, truth)
        lengths = np.full(case.micro_batches, few * group)
        outcome = wlb_tools.simulate(lengths, case, variants=("per_document",)).baseline
        took = float(shared.of_steps(outcome, 0.9)[0])  # of which the waiting is that of ranks which share a machine
        seconds.setdefault(group, {})[count] = slower * took

    def even(overhead: Any) -> float:
        return 20.0 + sum(once for once, *_ in (*overhead.forward, *overhead.backward))

    known = scenario(layout.sizes["cp"], 2, NO_OVERHEAD)
    found = probing.of_steps(
        Overhead(forward=stages, backward=stages, copies=copies),
        known,
        few,
        seconds,
        lambda predicted: (slower * even(truth) / even(predicted.overhead), 0.9),
    )
    assert np.array(found.forward) == pytest.approx(np.array(truth.forward))
    assert np.array(found.backward) == pytest.approx(np.array(truth.backward))
    assert found.copies == copies
    assert found.gather == pytest.approx(truth.gather)
    assert found.step == pytest.approx(3.0)


def test_short_steps_have_every_rank_and_both_sorts_of_groups() -> None:
    options = command.Options(context=256, hidden=64)
    for name, groups in {"pp2": {"1"}, "dp2": {"1", "2"}, "cp2": {"1", "2"}, "dp4cp2": {"1", "2"}}.items():
        layout = proof.Layout(name)
        known, dynamic = command.known_steps(options, layout, 3)
        short = {made: steps for made, steps in known.items() if not made.startswith(command.PACE)}
        short = {made: steps for made, steps in short.items() if made not in command.WAITING}
        assert len(known) == len(short) + len(pacing.KINDS) + 2
        assert {made.split(command.IN_GROUPS)[0] for made in short} == groups
        for made, steps in short.items():
            assert len(steps) == len(known[f"{command.PACE}0"]) == 3
            size, count = map(int, made.split(command.IN_GROUPS))
            assert (made in dynamic) == (size != layout.sizes["cp"])
            for ranks in steps:
                assert len(ranks) == layout.sizes["dp"] * layout.sizes["cp"]
                for place, parts in enumerate(ranks):
                    assert len(parts) == len({id(part.shard) for part in parts}) == count
                    first = place // size * size if made in dynamic else None
                    assert {(part.cp_size, part.rank, part.first_rank) for part in parts} == {
                        (size, place % size, first)
                    }
        # Turns of four repetitions: an hour in the way of half of them, and one of all in one turn.
        slow = np.array([[1.0, 1.0, 1.0], [2.0, 3.0, 2.0], [1.0, 1.0, 1.0], [9.0, 9.0, 9.0]]) * [1.0, 1.0, 1.5]
        took = {made: ((2.0 + index) * slow).tolist() for index, made in enumerate(known)}
        found = command.known_seconds(took | {"original": [[9.0, 9.0]]})
        assert found["took"] == took
        assert found["even"] == [took[f"{command.PACE}{sort}"][0][0] for sort in range(len(pacing.KINDS))]
        assert found["waiting"] == took[command.WAITING[0]][0][0] / took[command.WAITING[1]][0][0]
        assert all(
            seconds == took[f"{group}{command.IN_GROUPS}{count}"][0][0]
            for group, of in found["short"].items()
            for count, seconds in of.items()
        )
        assert {(size, count) for size, of in found["short"].items() for count in of} == {
            tuple(made.split(command.IN_GROUPS)) for made in short
        }
