"""`wlb profile`, for real on the CPU with tiny grids: what it writes, how it goes on, and what it refuses."""

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import wlb
from tests.profiles import profile as example
from wlb.torch.attention.kernels import VarlenKernel
from wlb.torch.attention.plan import Call
from wlb_tools.profiling import Grid, Profiler, Shape, held_out_errors
from wlb_tools.profiling import device as device_module
from wlb_tools.profiling import profiler as profiler_module
from wlb_tools.profiling.attention import AttentionBench
from wlb_tools.profiling.device import Device, repetitions
from wlb_tools.profiling.layer import LayerBench, _LinearPart
from wlb_tools.profiling.records import Records

MODEL = wlb.ModelConfig(
    hidden_size=32, ffn_hidden_size=48, num_layers=1, num_heads=4, num_kv_heads=2, head_dim=8, vocab_size=10
)
GRID = Grid(query_lengths=(16, 64), key_lengths=(32, 64), tokens=(8, 16), held_out=((20, 40), (10, 50)))
LLAMA = wlb.ModelConfig.preset("llama2-7b")


@pytest.fixture(autouse=True)
def _few_repetitions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_module, "REPEATS", (2, 3))
    monkeypatch.setattr(profiler_module, "ROUNDS", 1)


def measure(records: Path, **options: Any) -> dict[str, Any]:
    built = {name: options.pop(name) for name in ("tp", "memory_bytes") if name in options}
    return Profiler(MODEL, device="cpu", **built).measure(records=records, **({"grid": GRID} | options))


def lines(records: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in records.read_text().splitlines()]


# --- what is written ---


def test_both_models_read_what_is_measured(tmp_path: Path) -> None:
    profile = measure(tmp_path / "r.jsonl")
    path = tmp_path / "p.json"
    path.write_text(json.dumps(profile))
    kernel = wlb.KernelModel.from_profile(path)
    assert kernel.source == "measured: CPU CpuFlashKernel"
    assert (kernel.num_heads, kernel.num_kv_heads, kernel.head_dim, kernel.causal) == (4, 2, 8, True)
    assert (wlb.CostModel.from_profile(path).cost([16, 64]) > 0).all()

    # The tables are the medians of the records.
    records = {Shape(**line["shape"]): line["measured"] for line in lines(tmp_path / "r.jsonl")[1:]}
    assert len(records) == 1 + 3 + 2 + 2  # (64, 32) cannot be
    for name in ("forward", "backward"):
        part = profile[name]
        assert [[entry is None for entry in row] for row in part["median_seconds"]] == [[False, False], [True, False]]
        sample = records[Shape("attention", 16, 64)]
        segments = sample["segments_per_call"]
        median = (np.median(sample[f"{name}_call_seconds"]) - part["launch_seconds"]) / segments
        assert part["median_seconds"][0][1] == pytest.approx(median)
        assert part["segments_per_call"][0][1] == segments
        assert part["p10_seconds"][0][1] <= median <= part["p90_seconds"][0][1]
        assert kernel.segment_seconds([16], [64], passes=name)[0] == pytest.approx(median, rel=1e-9)
        samples = records[Shape("layer", 16)][f"{name}_call_seconds"]
        assert profile["linear"][name]["median_seconds"][1] == np.median(samples)
    assert [(held["query_length"], held["key_length"]) for held in profile["held_out"]] == [(10, 50), (20, 40)]
    assert profile["versions"]["torch"] == torch.__version__
    assert profile["dtype"] == "float32"
    errors = held_out_errors(path)
    assert errors is not None
    assert errors.relative.shape == (2,)
    assert 0 <= errors.median <= errors.p95


def test_errors_are_those_of_the_model(tmp_path: Path) -> None:
    profile = example()
    shapes = [(20, 300), (700, 5000), (128, 1024)]
    path = tmp_path / "p.json"
    path.write_text(json.dumps(profile))
    model = wlb.KernelModel.from_profile(path)

    def seconds(shape: tuple[int, int], name: Any) -> float:
        return float(model.segment_seconds([shape[0]], [shape[1]], passes=name)[0])

    # Measured is twice, half, and exactly what the model says.
    profile["held_out"] = [
        {"query_length": q, "key_length": k}
        | {f"{name}_seconds": scale * seconds((q, k), name) for name in ("forward", "backward")}
        for (q, k), scale in zip(shapes, (2, 0.5, 1), strict=True)
    ]
    path.write_text(json.dumps(profile))
    errors = held_out_errors(path)
    assert errors is not None
    assert errors.relative == pytest.approx([-0.5, 1.0, 0.0])
    assert errors.median == pytest.approx(0.5)
    assert errors.p95 == pytest.approx(0.95)
    path.write_text(json.dumps(profile | {"held_out": []}))
    assert held_out_errors(path) is None
    del profile["held_out"]
    path.write_text(json.dumps(profile))
    assert held_out_errors(path) is None


def test_what_a_call_computes() -> None:
    """Segments of a call are apart, each causal with its last query at its last key."""
    bench = AttentionBench.of(MODEL, tp=1, device=Device.open("cpu"), kernel="auto")
    q, k, v = torch.randn(6, 4, 8), torch.randn(10, 2, 8), torch.randn(10, 2, 8)
    out, _ = bench.kernel.forward(q, k, v, Call.of_lengths([3, 3], [5, 5], (-1, 0), "cpu"))
    mask = torch.ones(3, 5, dtype=torch.bool).tril(2)
    for i in range(2):
        rows = [x.transpose(0, 1) for x in (q[3 * i : 3 * i + 3], k[5 * i : 5 * i + 5], v[5 * i : 5 * i + 5])]
        expected = torch.nn.functional.scaled_dot_product_attention(*rows, attn_mask=mask, enable_gqa=True)
        assert torch.allclose(out[3 * i : 3 * i + 3].transpose(0, 1), expected, atol=1e-5)


def test_queries_are_rounded_up_to_what_the_kernel_computes_together() -> None:
    """A flash kernel of a GPU computes 128 queries together, that of the CPU those that there are."""
    on_cpu = AttentionBench.of(MODEL, tp=1, device=Device.open("cpu"), kernel="auto")
    flash = replace(on_cpu, kernel=VarlenKernel(1.0))
    assert (on_cpu.identity()["tiles"], flash.identity()["tiles"]) == ([1, 1], [128, 128])
    little_more, double = (Shape("attention", tokens, tokens) for tokens in (129, 256))
    pairs = 129 * 130 / (256 * 257)
    for bench, share in ((on_cpu, pairs), (flash, 1.0)):
        segments = [bench.segments(shape) for shape in (little_more, double)]
        assert bench.flops(little_more) / segments[0] == pytest.approx(share * bench.flops(double) / segments[1])


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_flops_of_the_layer(tp: int) -> None:
    """Every matrix product of the layer, forward and backward; summed over the ranks, those of the cost model."""
    bench = LayerBench.of(MODEL, tp=tp, device=Device.open("cpu"))
    counts = []

    class Counting(Device):
        def time(self, calls: Any, *, seconds: float) -> Any:
            for call in calls.values():
                with FlopCounterMode(display=False) as counter:
                    call()
                counts.append(counter.get_total_flops())
            return {}

    counting = LayerBench(**{**vars(bench), "device": Counting(torch.device("cpu"), 2**30, None)})
    counting.run(Shape("layer", 16), seconds=0)
    assert sum(counts) == bench.flops(Shape("layer", 16))
    assert counts[1] == 2 * counts[0]
    if tp <= MODEL.num_kv_heads:  # beyond, key heads are copied
        shape = MODEL.shape() | {"num_layers": 2}
        two, one = (wlb.CostModel.from_flops(**s).linear_cost([16])[0] for s in (shape, MODEL.shape()))
        assert tp * sum(counts) == two - one


def test_every_row_of_the_layers_weights_has_a_gradient() -> None:
    """Also those of keys and values, though attention is left out."""
    layer = _LinearPart(32, 48, 4, 2, 8, gated=True)
    angles = torch.rand(16, 1, 4)
    layer(torch.randn(16, 32), angles.cos(), angles.sin()).square().sum().backward()
    for weight in layer.parameters():
        assert weight.grad is not None
        assert weight.grad.reshape(len(weight), -1).any(dim=1).all()


# --- which shapes ---


def test_the_default_grid() -> None:
    grid = Grid.default()
    assert grid.query_lengths == tuple(2**i for i in range(4, 14))
    assert grid.key_lengths == tuple(2**i for i in range(7, 18))
    assert len(grid.held_out) == 24
    assert grid == Grid.default()
    for q, k in grid.held_out:
        assert 16 <= q <= 8192
        assert max(q, 128) <= k <= 131072
    work = [shape.tokens * shape.keys for shape in grid.shapes() if shape.kind != "layer"]
    assert work == sorted(work)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"tokens": ()}, "tokens is empty"),
        ({"key_lengths": (64, 32)}, r"key_lengths\[1\] = 32: must be above 64"),
        ({"query_lengths": (0, 16)}, r"query_lengths\[0\] = 0"),
        ({"query_lengths": (16, 128)}, r"query_lengths\[1\] = 128: no key length is that long"),
        ({"held_out": ((50, 40),)}, r"held_out\[0\] = \(50, 40\)"),
    ],
)
def test_grids_that_cannot_be(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(wlb.WlbError, match=said):
        Grid(**(vars(GRID) | changes))


def test_what_does_not_fit_is_left_out_and_said(tmp_path: Path) -> None:
    said: list[str] = []
    with pytest.raises(wlb.WlbError, match="has no shape that fits"):
        measure(tmp_path / "none.jsonl", memory_bytes=1, skipped=said.append)
    said.clear()
    grid = Grid(query_lengths=(16, 64), key_lengths=(32, 64, 4096), tokens=(8, 10**7))
    profile = measure(tmp_path / "some.jsonl", memory_bytes=2**20, grid=grid, skipped=said.append)
    assert said == [
        "attention 16 x 4,096: needs more than 0.0 GiB",
        "layer 10,000,000 tokens: needs more than 0.0 GiB",
    ]
    assert profile["key_lengths"] == [32, 64]
    assert profile["linear"]["tokens"] == [8]
    (tmp_path / "p.json").write_text(json.dumps(profile))
    wlb.KernelModel.from_profile(tmp_path / "p.json")


def test_out_of_memory_leaves_a_column_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = AttentionBench.run

    def fails(self: AttentionBench, shape: Shape, *, seconds: float) -> dict[str, Any]:
        if shape == Shape("attention", 16, 64):
            raise torch.OutOfMemoryError("as a GPU would")
        return run(self, shape, seconds=seconds)

    monkeypatch.setattr(AttentionBench, "run", fails)
    grid = Grid(query_lengths=(16, 32), key_lengths=(32, 64), tokens=(8,))
    profile = measure(tmp_path / "r.jsonl", grid=grid)
    assert profile["key_lengths"] == [32]
    assert profile["query_lengths"] == [16, 32]


# --- going on ---


class Stop(BaseException):
    pass


def stop_at(count: int) -> Any:
    def progress(done: int, _total: int, _name: str) -> None:
        if done == count:
            raise Stop

    return progress


def test_a_run_that_is_cut_off_goes_on(tmp_path: Path) -> None:
    records = tmp_path / "r.jsonl"
    with pytest.raises(Stop):
        measure(records, progress=stop_at(3))
    kept = records.read_text()
    assert len(lines(records)) == 1 + 3
    # Killed in the middle of a line: that one is measured again.
    records.write_text(kept + '{"shape": {"kind": "attention", "tok')
    seen: list[tuple[int, int, str]] = []
    profile = measure(records, progress=lambda *state: seen.append(state))
    assert records.read_text().startswith(kept)
    assert [total for _, total, _ in seen] == [5] * 6
    assert len(lines(records)) == 1 + 8
    # And again: nothing is left, and the profile is the same.
    before = records.read_text()
    assert measure(records) == profile
    assert records.read_text() == before


def test_a_device_that_is_slow_for_a_round_spoils_no_median(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiler_module, "ROUNDS", 3)
    records = tmp_path / "r.jsonl"
    measure(records)
    header, *rounds = lines(records)
    assert len(rounds) == 3 * 8
    shapes = [line["shape"] for line in rounds]
    assert shapes[:8] == shapes[8:16] == shapes[16:]  # all of them, then all again

    usual: dict[Shape, list[float]] = {}
    for index, line in enumerate(rounds):
        calls = line["measured"]["forward_call_seconds"]
        if 8 <= index < 16:
            line["measured"]["forward_call_seconds"] = [1.0] * len(
                rounds[index - 8]["measured"]["forward_call_seconds"]
            )
        else:
            usual.setdefault(Shape(**line["shape"]), []).extend(calls)
    records.write_text("".join(json.dumps(line) + "\n" for line in [header, *rounds]))
    part = measure(records)["forward"]
    slowest = max(usual[Shape("attention", 16, 64)]) / part["segments_per_call"][0][1]
    assert part["median_seconds"][0][1] <= slowest
    assert part["p90_seconds"][0][1] > slowest

    # Calls of another size, as after more memory was free, are not put together with these.
    rounds[-1]["measured"]["segments_per_call"] = 10**6
    records.write_text("".join(json.dumps(line) + "\n" for line in [header, *rounds]))
    with Records.open(records, {name: header[name] for name in header if name not in ("format", "version")}) as found:
        shape = Shape(**rounds[-1]["shape"])
        assert found.rounds(shape) == 3
        assert found[shape]["forward_call_seconds"] == rounds[-1]["measured"]["forward_call_seconds"]


def test_records_of_something_else_are_refused(tmp_path: Path) -> None:
    records = tmp_path / "r.jsonl"
    with pytest.raises(Stop):
        measure(records, progress=stop_at(1))
    header, shape = lines(records)

    def refused(said: str, *content: Any, **options: Any) -> None:
        records.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in content))
        before = records.read_text()
        with pytest.raises(wlb.WlbError, match=said) as caught:
            measure(records, **options)
        assert caught.value.argument == "records"
        assert records.read_text() == before

    refused("measured with gpu 'NVIDIA H100', this is 'CPU'", header | {"gpu": "NVIDIA H100"}, shape)
    old = header | {"versions": header["versions"] | {"torch": "1.0"}}
    refused(f"measured with versions.torch '1.0', this is '{torch.__version__}'".replace("+", r"\+"), old, shape)
    refused("measured with kernel 'FlashAttention3', this is 'CpuFlashKernel'", header | {"kernel": "FlashAttention3"})
    refused("measured with num_heads 4, this is 2", header, shape, tp=2)
    refused("not a file of records", {"format": "wlb.profile"})
    refused("not a file of records", "[1]")
    refused("line 1: is not JSON", "nonsense")
    refused("line 2: is not JSON", header, "nonsense", shape)
    refused("line 2: is not a record", header, {"shape": {"kind": "attention", "rows": 3}, "measured": {}})
    with pytest.raises(wlb.WlbError, match="cannot be read"):
        measure(tmp_path)


# --- the budget ---


def test_repetitions_follow_the_time_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_module, "REPEATS", (5, 50))
    assert repetitions(0.0, round_seconds=1.0) == 5
    assert repetitions(22.0, round_seconds=1.0) == 20
    assert repetitions(1.0, round_seconds=0.0) == 50
    assert torch.get_num_threads() == 1  # so that processor time counts, and sleeping takes none

    def work() -> None:
        until = time.thread_time() + 0.001
        while time.thread_time() < until:
            pass

    timed = Device.open("cpu").time({"a": work, "b": lambda: time.sleep(0.001)}, seconds=0.0)
    assert {name: len(samples) for name, samples in timed.items()} == {"a": 5, "b": 5}
    assert min(timed["a"]) >= 0.001 > min(timed["b"])


class PlayedStream:
    """A second GPU's stream and the host that enqueues, on one clock; stands in for `torch.cuda`."""

    def __init__(self) -> None:
        self.now = self.idle_from = 0.0
        self.current = 0

    def perf_counter(self) -> float:
        return self.now

    def work(self, seconds: float) -> None:
        self.idle_from = max(self.now, self.idle_from) + seconds

    @contextmanager
    def device(self, device: torch.device) -> Iterator[None]:
        before, self.current = self.current, device.index
        yield
        self.current = before

    def synchronize(self, device: torch.device) -> None:
        self.now = max(self.now, self.idle_from)

    def _sleep(self, cycles: int) -> None:
        self.work(cycles / 1.8e9)

    def zero_(self) -> None:
        self.work(35e-6)

    def Event(self, *, enable_timing: bool) -> Any:
        return PlayedEvent(self)


class PlayedEvent:
    def __init__(self, stream: PlayedStream) -> None:
        self.stream = stream

    def record(self) -> None:
        assert self.stream.current == 1
        self.time = max(self.stream.now, self.stream.idle_from)

    def elapsed_time(self, end: "PlayedEvent") -> float:
        return 1e3 * (end.time - self.time)


def test_what_the_host_takes_to_enqueue_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = PlayedStream()
    for name in ("device", "synchronize", "Event", "_sleep"):
        monkeypatch.setattr(torch.cuda, name, getattr(stream, name))
    monkeypatch.setattr(device_module.time, "perf_counter", stream.perf_counter)

    def call(host: float, gpu: float) -> None:
        stream.now += host
        stream.work(gpu)

    gpu = Device(torch.device("cuda", 1), 1, stream)  # type: ignore[arg-type]
    timed = gpu.time({"a": lambda: call(2e-4, 1e-5), "b": lambda: call(1e-5, 1e-3)}, seconds=0.0)
    assert timed["a"] == pytest.approx([1e-5, 1e-5])
    assert timed["b"] == pytest.approx([1e-3, 1e-3])


def test_a_budget_that_is_used_up_keeps_what_is_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(10**6))
    records = tmp_path / "r.jsonl"
    with monkeypatch.context() as patched:
        patched.setattr(profiler_module.time, "monotonic", lambda: float(next(clock)))  # a second a look
        with pytest.raises(wlb.WlbError, match="budget_seconds = 4: used up with 5 of 8 shapes left"):
            measure(records, budget_seconds=4)
    assert len(lines(records)) == 1 + 3
    measure(records)
    assert len(lines(records)) == 1 + 8
    with pytest.raises(wlb.WlbError, match="budget_seconds = 0"):
        measure(records, budget_seconds=0)
    # Every shape is measured: more rounds are for as long as there is time.
    with monkeypatch.context() as patched:
        patched.setattr(profiler_module, "ROUNDS", 3)
        patched.setattr(profiler_module.time, "monotonic", lambda: float(next(clock)))
        assert measure(records, budget_seconds=4)["query_lengths"] == [16, 64]
    assert 1 + 8 < len(lines(records)) < 1 + 2 * 8


@dataclass(frozen=True)
class PretendedGpu(Device):
    """The size of an A100 40GB, as far as choosing shapes and segments goes."""

    dtype = torch.bfloat16  # type: ignore[assignment]
    processors = 108  # type: ignore[assignment]
    assumed_flops = 2e14  # type: ignore[assignment]


@pytest.mark.parametrize("flops_per_second", [5e13, 1e14, 5e14])
def test_the_default_grid_takes_less_than_five_minutes(
    flops_per_second: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Played on a clock that passes as a GPU of that speed would let it, from half an A100's attention on."""
    monkeypatch.setattr(device_module, "REPEATS", (5, 50))
    now = [0.0]
    monkeypatch.setattr(profiler_module.time, "monotonic", lambda: now[0])
    gpu = PretendedGpu(torch.device("cpu"), 32 * 2**30, None)
    profiler = Profiler(LLAMA, device="cpu")
    repeats = []

    class Played:
        def __init__(self, bench: Any) -> None:
            self.bench = type(bench)(**{**vars(bench), "device": gpu})
            self.flops, self.fits = self.bench.flops, self.bench.fits

        def run(self, shape: Shape, *, seconds: float) -> dict[str, Any]:
            call = 50e-6 + self.flops(shape) / flops_per_second
            count = repetitions(seconds, round_seconds=call)
            repeats.append(count)
            now[0] += 0.05 + (2 + count) * (call + 1e-4)  # making tensors, flushing the cache
            segments = self.bench.segments(shape) if shape.kind != "layer" else 1
            return {"segments_per_call": segments} | {
                f"{name}_call_seconds": [share * call] for name, share in (("forward", 2 / 7), ("backward", 5 / 7))
            }

    benches = {kind: Played(bench) for kind, bench in (("a", profiler._attention), ("l", profiler._layer))}
    monkeypatch.setattr(profiler, "_bench", lambda shape: benches["l" if shape.kind == "layer" else "a"])
    profiler.measure(records=tmp_path / "r.jsonl")
    assert now[0] < 300
    assert np.median(repeats) == 50


# --- the command ---

CONFIG = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 10,
}
CLI = ["--model", "config.json", "--device", "cpu", "--output", "cpu.json"]
CLI += ["--queries", "16", "32", "--keys", "32", "64", "--tokens", "8", "16", "--held-out", "2"]

needs_cli = pytest.mark.skipif(importlib.util.find_spec("cyclopts") is None, reason="needs the command's packages")


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))

    def run(*argv: object) -> tuple[object, str, str]:
        from wlb_tools.command import main

        with pytest.raises(SystemExit) as exit_:
            main(["profile", *map(str, argv)])
        captured = capsys.readouterr()
        return exit_.value.code or 0, captured.out, captured.err

    return run


@needs_cli
def test_the_command(run: Any, tmp_path: Path) -> None:
    code, out, err = run(*CLI)
    assert (code, err) == (0, "")
    assert "CPU, CpuFlashKernel" in out
    assert "Error of the model on 2 other segments: median" in out
    assert "says nothing about a GPU" in out
    code, out, err = run(*CLI, "--json")
    assert (code, err) == (0, "")
    summary = json.loads(out)
    assert summary["source"] == "measured: CPU CpuFlashKernel"
    assert summary["held_out"]["segments"] == 2
    assert summary["skipped"] == []
    assert (tmp_path / summary["profile"]).exists()
    assert (tmp_path / summary["records"]).exists()
    assert run(*CLI, "--quiet") == (0, "", "")


KILLED = """
import os, signal
from wlb_tools.command import main
from wlb_tools.profiling.records import Records
add = Records.add
def add_and_die(self, shape, measured):
    add(self, shape, measured)
    if len(self._found) == 2:
        os.kill(os.getpid(), signal.SIGKILL)
Records.add = add_and_die
main()
"""


@needs_cli
def test_a_process_that_is_killed_goes_on(run: Any, tmp_path: Path) -> None:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(wlb.__file__).parents[1])}
    killed = subprocess.run([sys.executable, "-c", KILLED, "profile", *CLI], env=environment, timeout=500)
    assert killed.returncode == -signal.SIGKILL
    records = tmp_path / "cpu.records.jsonl"
    kept = records.read_text()
    assert kept.count("\n") == 3  # and a line that says what was measured
    assert not (tmp_path / "cpu.json").exists()
    assert run(*CLI, "--quiet") == (0, "", "")
    assert records.read_text().startswith(kept)
    wlb.KernelModel.from_profile(tmp_path / "cpu.json")


@needs_cli
def test_the_command_refuses_in_one_line(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    small = ("--model", "config.json", "--device", "cpu")
    cases: dict[tuple[object, ...], str] = {
        (*small, "--kernel", "fast"): "kernel = 'fast': must be one of auto, flash_attn, varlen, reference",
        (*small, "--kernel", "varlen"): "runs on CUDA, not on cpu",
        (*small, "--tp", 3): "tp = 3: does not divide num_heads = 4",
        (*small, "--queries", 3, 8): "queries[0] = 3: must be a power of two",
        (*small, "--keys", 64, 32): "keys[1] = 32: must not be below 64",
        ("--device", "cpu", "--model", "gpt-9"): "--model gpt-9",
        ("--device", "abacus"): "device 'abacus' cannot be used",
        ("--device", "meta"): "must be a CUDA device or the CPU",
    }
    if not torch.cuda.is_available():
        cases[()] = "torch sees no GPU"
        cases["--device", "cuda"] = "device 'cuda' cannot be used"
    for arguments, said in cases.items():
        code, out, err = run(*arguments)
        assert (code, out) == (2, ""), arguments
        assert said in err, arguments
        assert err.startswith("wlb: ")
        assert err.count("\n") == 1, err
    monkeypatch.setattr("wlb_tools.command.commands.profile.find_spec", lambda _: None)
    assert run(*small) == (2, "", 'wlb: torch not installed; run: pip install "torch>=2.11"\n')
