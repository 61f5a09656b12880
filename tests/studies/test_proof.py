"""The proof, small: what is trained is the plan, each part once; figures say what was measured and no more."""

import dataclasses
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import wlb
import wlb_tools
from benches.common import DOCS, RECORDS, rounded
from studies import proof
from studies.gpu import echo
from studies.proof import __main__ as command
from studies.proof import batches, figures, page, processes, slices
from studies.proof import pace as pacing
from studies.proof import probe as probing
from tests.torch import processes as forked
from wlb.torch.attention import context_parallel_attention
from wlb_tools.cluster.overhead import Overhead
from wlb_tools.profiling import LinkTimes, probe_link

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
                held = batch.shard.rank(0)
                piece, place = int(held.documents[0]), int(held.position_ids[0])
                document, start = outcome.run.document[part.pieces][piece], outcome.run.start[part.pieces][piece]
                assert int(batch.tokens[0]) == int(text.document(int(document), int(start) + place, 1)[0])
        assert trained == outcome.tokens


def run_of(seconds: list[float], work: list[float], *, predicted: float = 1.0, streamed: int | None = None) -> Any:
    both = np.array(seconds), np.array(work)
    many = len(seconds) if streamed is None else streamed
    return figures.Run(both[0], both[0] * predicted, both[1], many, tokens=100, flops=1000.0)


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


def test_the_end_of_a_stream_counts_at_the_efficiency_of_the_rest() -> None:
    assert run_of([1.0, 1.0, 5.0], [1.0, 1.0, 1.0], streamed=2).steady == pytest.approx(3)


def test_levels_by_hand() -> None:
    # pp 2, dp 2, cp 1; two micro-batches: replica 0 has 1 and 3 on each stage, replica 1 has 1 and 1.
    found = figures.levels([[[1, 3], [1, 1], [1, 3], [1, 1]]], {"pp": 2, "dp": 2, "cp": 1})
    assert found == pytest.approx({"micro-batch": 2.0, "dp": 4 / 3, "pp": 1.0, "cp": 1.0, "gpu": 4 / 3})


def test_a_pace_is_found_by_even_micro_batches() -> None:
    took = np.array([2.0, 0.5])
    assert pacing.of(took, [2.0, 0.5]) == pytest.approx(1)
    assert pacing.of(took, [1.0, 0.5]) == pytest.approx(2**0.5)
    (outcome,) = outcomes("dp2", "original").values()
    assert command.predicted(outcome, 1.3)["predicted"] == pytest.approx(1.3 * outcome.seconds)


def test_a_step_weighs_what_it_was_predicted_to_whatever_ranks_waited_inside() -> None:
    row = {"seconds": [1.0, 5.0], "predicted": [1.0, 4.0], "predicted_work": [1.0, 1.0]}
    found = figures.Run.of(row | {"streamed": 1, "tokens": 10, "flops": 1.0})
    assert (found.steady, found.steady_predicted) == (2, 2)


def test_even_micro_batches_are_run_on_all_ranks() -> None:
    sorts = pacing.documents(BENCH.context)
    steps = command.even_steps(BENCH, proof.Layout("dp2pp2cp2"), 3)
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


def test_a_probe_runs() -> None:
    (outcome,) = outcomes("dp2pp2cp2", "original").values()
    found = probing.stages(BENCH, outcome.scenario, [1, 2], device=CPU, thread_clock=True)
    assert np.isfinite(found.attention).all()


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
        assert probing.pipeline_seconds(scenario, each, 4) == pytest.approx(found.seconds[0])


def test_the_page_is_that_of_the_record(tmp_path: Path) -> None:
    record = json.loads((RECORDS / "proof.json").read_text())
    assert page.text(record, picture="proof.png") == (DOCS / "results" / "proof.md").read_text()
    assert json.loads(json.dumps(rounded({"found": page.found(record["layouts"])})))["found"] == record["found"]
    page.draw(record, tmp_path / "proof.png")
    assert (tmp_path / "proof.png").stat().st_size > 0


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
