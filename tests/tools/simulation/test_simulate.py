"""The simulator: every method trains the same documents, all time is accounted for, and nothing grades itself."""

import dataclasses
import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import wlb
import wlb_tools
from wlb.models import Attention, FeedForward, Layer, Mask
from wlb_tools.command.commands.simulate import not_compared
from wlb_tools.simulation import (
    ATTENTION_RATES,
    ATTRIBUTION,
    DEFAULT,
    VARIANTS,
    Scenario,
    Variant,
    defaults,
    simulate,
    tune,
)
from wlb_tools.simulation.methods import packer_options, var_length
from wlb_tools.simulation.stream import GlobalBatches, Reading
from wlb_tools.simulation.trained import collect

MODEL = wlb.ModelConfig(hidden_size=512, ffn_hidden_size=1024, num_layers=8, num_heads=8, vocab_size=1000)
LAYOUTS = [
    wlb_tools.ParallelLayout(),
    wlb_tools.ParallelLayout(dp=2, pp=2, cp=2, tp=2),
    wlb_tools.ParallelLayout(pp=4, cp=4, virtual_stages=2, recompute="full"),
    wlb_tools.ParallelLayout(dp=4, tp=8, fsdp="zero3", sequence_parallel=False),
]
SCHEDULES: list[tuple[Any, int, int]] = [("zbv", 2, 6), ("interleaved_1f1b", 2, 5), ("zb_h2", 1, 7), ("gpipe", 1, 3)]


def scenario(layout: wlb_tools.ParallelLayout = LAYOUTS[1], **changes: Any) -> Scenario:
    defaults: dict[str, Any] = {"context": 4096, "max_tokens": 6144, "outlier_thresholds": (1500, 3000)}
    return Scenario(model=MODEL, layout=layout, hardware=wlb_tools.Hardware.preset("h100"), **(defaults | changes))


def documents(count: int = 400, seed: int = 0, longest: int = 4096) -> NDArray[np.int64]:
    lengths = np.random.default_rng(seed).lognormal(5.5, 1.3, count)
    return np.clip(lengths, 1, longest).astype(np.int64)


def possible(case: Scenario) -> tuple[str, ...]:
    """All methods that a cluster can have."""
    return tuple(name for name in VARIANTS if not VARIANTS[name].dynamic or name in defaults(case))


def trained(plan: Any, lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """int64[tokens]: how often each token of the stream is trained."""
    firsts = np.cumsum(lengths) - lengths
    counts = np.zeros(int(lengths.sum()), dtype=np.int64)
    for document, start, length in zip(plan.document, plan.start, plan.length, strict=True):
        first = firsts[document] + start
        counts[first : first + length] += 1
    return counts


@pytest.mark.parametrize("layout", LAYOUTS, ids=repr)
def test_all_documents_and_all_time_are_accounted_for(layout: wlb_tools.ParallelLayout) -> None:
    lengths = documents()
    case = scenario(layout, noise=0.05)
    names = possible(case)
    cannot = set() if layout.dp * layout.cp > 1 else {"dynamic_cp", "wlb_dynamic_cp"}
    assert set(VARIANTS) - set(names) == cannot
    simulation = simulate(lengths, case, variants=names)
    assert tuple(simulation.outcomes) == names
    for outcome in simulation.outcomes.values():
        assert (trained(outcome.run, lengths) == 1).all()
        assert outcome.tokens == lengths.sum()
        assert tuple(outcome.attribution) == ATTRIBUTION
        assert all((part >= -1e-12 * outcome.seconds).all() for part in outcome.attribution.values())
        np.testing.assert_allclose(sum(outcome.attribution.values()), outcome.seconds, rtol=1e-12)
        for step in (0, len(outcome.seconds) - 1):
            slowest = max(timeline.seconds for timeline in outcome.timelines(step))
            assert outcome.seconds[step] == pytest.approx(slowest + case.step_end, rel=1e-12)
    assert tuple(json.loads(json.dumps(simulation.as_json()))["variants"]) == names


@settings(max_examples=30)
@given(st.integers(0, 1000), st.integers(60, 600), st.sampled_from(["fifo", "adaptive"]), st.sampled_from([0, 3]))
def test_a_stream_has_the_same_numbers_as_its_packer(seed: int, count: int, release: Any, max_early: int) -> None:
    """Nothing about balance and delay is defined twice."""
    case = scenario()
    lengths = documents(count, seed)
    stream = GlobalBatches(lengths, wlb.batch_offsets(lengths, tokens_per_batch=case.tokens_per_batch))
    setup = case.setup()
    waiting: dict[str, Any] = {"release": release}
    if release == "fifo":
        waiting["outlier_thresholds"], max_early = (1500, 3000), 0
    made = wlb.Packer(**packer_options(setup), **waiting)
    reading = Reading(lengths, made, case.tokens_per_batch, max_early=max_early)
    digests = [read.packing.digest() for read in reading.steps()]
    packer = reading.packer
    thresholds = waiting.get("outlier_thresholds", ())
    steps = var_length(stream, setup, thresholds, waiting, max_early=max_early)
    plan = collect("packer", steps, stream, thresholds, release)
    assert plan.digests == tuple(digests)
    found, metrics = plan.summary(), packer.metrics()
    for name in ("delay_p99", "delay_max"):
        assert found[name] == getattr(metrics, name)
    if found["steps"] == found["steps_of_flush"] or metrics.steps == 0:
        return  # the stream is over before anything is let go
    assert found["imbalance_p95"] == pytest.approx(metrics.imbalance_p95, rel=1e-12)
    for name in ("imbalance_mean", "imbalance_worst", "delay_mean", "early_mean"):
        assert found[name] == pytest.approx(getattr(metrics, name), rel=1e-12)
    assert found["memory_skew"] == pytest.approx(metrics.memory_skew_mean, rel=1e-12)


@pytest.mark.parametrize(("schedule", "virtual", "per_rank"), SCHEDULES)
def test_any_schedule_and_number_of_micro_batches(schedule: Any, virtual: int, per_rank: int) -> None:
    """Also where the pipeline's ranks do not divide the micro-batches."""
    layout = wlb_tools.ParallelLayout(dp=2, pp=4, virtual_stages=virtual)
    case = scenario(layout, schedule=schedule, num_micro_batches=2 * per_rank)
    lengths = documents(700)
    for outcome in simulate(lengths, case, variants=possible(case)).outcomes.values():
        assert (trained(outcome.run, lengths) == 1).all()
        np.testing.assert_allclose(sum(outcome.attribution.values()), outcome.seconds, rtol=1e-12)
        step = len(outcome.seconds) - 1
        slowest = max(timeline.seconds for timeline in outcome.timelines(step))
        gradients = outcome.attribution["dp_communication"][step]
        assert outcome.seconds[step] == pytest.approx(slowest + gradients, rel=1e-12)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_micro_batches_hold_what_their_ranks_compute(layout: wlb_tools.ParallelLayout) -> None:
    """Contents have all tokens of a step, in the micro-batches that pipelines run, for every method and Dynamic-CP."""
    case = scenario(layout)
    for outcome in simulate(documents(), case, variants=possible(case)).outcomes.values():
        parts = list(outcome.parts())
        for step in range(outcome.seconds.size):
            lines, contents = outcome.timelines(step), outcome.contents(step)
            assert [line.num_micro_batches for line in lines] == [len(row) for row in contents]
            # Under Dynamic-CP a pipeline is a rank, and the ranks of a group hold the same documents together.
            shared = outcome.pipelines == "rank"
            held = sum(each.tokens / (each.cp_size if shared else 1) for row in contents for each in row)
            assert held == pytest.approx(outcome.run.length[outcome.run.step == step].sum())
            ranks = outcome.placement(step)[:: 1 if shared else layout.cp]
            for row, of_rank in zip(contents, ranks.tolist(), strict=True):
                for each, part in zip(row, of_rank, strict=True):
                    lengths = outcome.run.length[parts[part].pieces]
                    found = each.tokens, each.documents, each.longest, each.cp_size
                    assert found == (lengths.sum(), lengths.size, lengths.max(initial=0), parts[part].cp_size)


@pytest.mark.parametrize(("name", "keys"), [("original", "all"), ("wlb_llm", "all"), ("wlb_llm", "needed")])
def test_steps_recomputed_one_by_one(name: str, keys: Any) -> None:
    """The naive way: every micro-batch by itself, on its slowest rank, through its own pipeline."""
    layout = wlb_tools.ParallelLayout(dp=2, pp=2, cp=4, recompute="full")
    case = scenario(layout, num_micro_batches=8, tp_overlap=0.5, cp_keys=keys)
    outcome = simulate(documents(), case, variants=(name,)).baseline
    plan, kernel = outcome.run, case.attention
    for step in range(len(plan.digests)):
        replicas = []
        for order in plan.order[step]:
            costs, transfers, waits = [], [], 0.0
            for micro_batch in order:
                lengths = plan.length[(plan.step == step) & (plan.micro_batch == micro_batch)]
                if lengths.size == 0:
                    costs.append(np.zeros((2, 3)))
                    transfers.append(0.0)
                    continue
                strategy = VARIANTS[name].strategies[0]
                made = wlb.shard(
                    lengths, cp_size=4, strategy=strategy, kernel_model=kernel if strategy == "adaptive" else None
                )
                forward, backward = (kernel.rank_seconds(made, passes=passes) for passes in ("forward", "backward"))
                stages = wlb_tools.stage_seconds(
                    [made.tokens_per_rank.max()],
                    attention_forward=[forward.max()],
                    attention_backward=[backward.max()],
                    model=MODEL,
                    layout=case.layout,
                    hardware=case.hardware,
                    keys_gathered=None if keys == "all" else [made.keys_gathered.max()],
                    keys_moved=None if keys == "all" else [made.keys_moved.max()],
                    tp_overlap=0.5,
                )
                costs.append(stages.seconds[0])
                transfers.append(stages.p2p[0])
                # Full recomputation runs every layer's forward twice.
                idle = 2 * (forward.max() - forward.mean()) + backward.max() - backward.mean()
                waits += MODEL.num_layers * idle
            timeline = wlb.simulate_pipeline(costs, num_stages=2, p2p_seconds=transfers)
            replicas.append((timeline.seconds, waits))
        gradients = wlb_tools.data_parallel_seconds(MODEL, case.layout, case.hardware).max()
        assert outcome.seconds[step] == pytest.approx(max(seconds for seconds, _ in replicas) + gradients, rel=1e-12)
        mean_wait = sum(waits for _, waits in replicas) / 4
        assert outcome.attribution["cp_wait"][step] == pytest.approx(mean_wait, rel=1e-9, abs=1e-15)


def dealt(outcome: Any, scenario: Scenario) -> NDArray[np.int64]:
    """[steps, dp, micro-batches of a rank] what `Packing.deal` says of every step's micro-batches."""
    plan, width = outcome.run, outcome.run.tokens.shape[1]
    orders = []
    for step in range(len(plan.digests)):
        here = plan.step == step
        packing = wlb.Packing.from_assignment(
            plan.length[here],
            plan.micro_batch[here],
            num_micro_batches=width,
            max_tokens=10**6,
            cost_model=scenario.packer_cost,
        )
        orders.append(packing.deal(scenario.layout.dp))
    return np.stack(orders)


def test_every_method_is_dealt_alike() -> None:
    """What dealing gives is in no method's gain: the baseline is dealt, too, and a row of its own shows it."""
    case = scenario(wlb_tools.ParallelLayout(dp=4, pp=2))
    outcomes = simulate(documents(1500), case, variants=possible(case)).outcomes
    for name in ("original", "fixed_length", "per_document", "adaptive_cp", "wlb_llm_packing", "wlb_llm"):
        np.testing.assert_array_equal(outcomes[name].run.order, dealt(outcomes[name], case))
    window = {"window": Variant(title="window", packing="fixed_length", window=3)}
    outcome = simulate(documents(1500), case, variants=window).baseline
    np.testing.assert_array_equal(outcome.run.order, dealt(outcome, case))
    steps, width = outcomes["original"].run.tokens.shape
    arrival = np.tile(np.arange(width).reshape(4, -1), (steps, 1, 1))
    np.testing.assert_array_equal(outcomes["as_they_come"].run.order, arrival)
    assert outcomes["original"].total_seconds < outcomes["as_they_come"].total_seconds


@pytest.mark.parametrize("layout", LAYOUTS, ids=repr)
def test_methods_that_cut_get_full_global_batches(layout: wlb_tools.ParallelLayout) -> None:
    lengths = documents(1000)
    case = scenario(layout)
    window = Variant(title="window", packing="fixed_length", window=2)
    simulation = simulate(
        lengths, case, variants={name: VARIANTS[name] for name in ("original", "fixed_length")} | {"w": window}
    )
    steps = -(-int(lengths.sum()) // case.tokens_per_batch)
    for name, outcome in simulation.outcomes.items():
        assert (trained(outcome.run, lengths) == 1).all()
        assert outcome.run.tokens.shape[0] == steps
        assert (outcome.run.tokens[: steps - steps % 2 - 2] == case.context).all()
        assert outcome.run.streamed == steps - 1  # the last one is not full
        if name != "w":
            assert (outcome.run.tokens[:-1] == case.context).all()
            assert outcome.run.delay_mean == 0
    full = simulate(np.full(3 * case.micro_batches, 4096), case, variants=("original",)).baseline
    assert full.run.streamed == 3


def test_fixed_takes_the_better_sharding_of_the_whole_run() -> None:
    case, lengths = scenario(wlb_tools.ParallelLayout(pp=2, cp=4)), documents(1000)
    one, other = (
        Variant(title=strategy, packing="fixed_length", strategies=(strategy,))
        for strategy in ("per_sequence", "per_document")
    )
    outcomes = simulate(
        lengths, case, variants={"fixed_length": VARIANTS["fixed_length"], "one": one, "other": other}
    ).outcomes
    best = min(outcomes["one"], outcomes["other"], key=lambda outcome: outcome.total_seconds)
    assert (
        outcomes["fixed_length"].total_seconds == best.total_seconds < max(o.total_seconds for o in outcomes.values())
    )
    assert len(outcomes["fixed_length"].sharded.strategies) == 1


def test_no_document_waits_longer_than_it_may() -> None:
    case = scenario(outlier_thresholds=(1500, 3000))
    longest = [
        int(
            simulate(
                documents(), dataclasses.replace(case, max_delay=most), variants=("wlb_llm",)
            ).baseline.run.delay.max()
        )
        for most in (None, 1)
    ]
    assert longest[1] <= 1 < longest[0]


@pytest.mark.filterwarnings("error:attention_efficiency")
@pytest.mark.parametrize("layout", LAYOUTS, ids=repr)
def test_equal_documents_leave_nothing_to_gain(layout: wlb_tools.ParallelLayout) -> None:
    case = scenario(layout, outlier_thresholds=())
    simulation = simulate(np.full(5 * 8, 4096), case, variants=possible(case))
    # One document a micro-batch: per-sequence and per-document shards are the same.
    for name in {"fixed_length", "wlb_llm_packing", "per_document"} & set(simulation.outcomes):
        assert simulation.speedup(name) == pytest.approx(1, rel=1e-12)
        assert simulation.outcomes[name].imbalance.max() == pytest.approx(1)
    assert simulation.speedup("wlb_llm") >= 1 - 1e-9


def test_the_same_input_gives_the_same_numbers() -> None:
    first, second = (simulate(documents(), scenario(noise=0.1, noise_seed=3)).as_json() for _ in range(2))
    assert first == second
    other = simulate(documents(), scenario(noise=0.1, noise_seed=4)).as_json()
    assert other != first


def test_ordering() -> None:
    """Nothing here is tuned: these hold by construction, or for any long-tailed stream."""
    lengths = documents(2000)
    layout = wlb_tools.ParallelLayout(dp=2, pp=4, cp=2)
    simulation = simulate(lengths, scenario(layout))
    outcomes = simulation.outcomes
    adaptive, per_document, plain = (outcomes[name].sharded for name in ("adaptive_cp", "per_document", "original"))

    def slowest(sharded: Any) -> NDArray[np.float64]:
        return np.asarray((sharded.forward + sharded.backward).max(axis=1))

    assert (slowest(adaptive) <= np.minimum(slowest(per_document), slowest(plain)) * (1 + 1e-9)).all()
    assert outcomes["wlb_llm"].imbalance.mean() < outcomes["original"].imbalance.mean()
    assert outcomes["wlb_llm_fitted"].imbalance.mean() < outcomes["wlb_llm"].imbalance.mean()
    assert simulation.speedup("original") == 1
    assert outcomes["wlb_llm"].sharded.imbalance < outcomes["original"].sharded.imbalance
    assert outcomes["original"].run.delay_mean == 0 < outcomes["wlb_llm"].run.delay_mean
    faster = simulate(lengths, scenario(layout, cp_overlap=1.0, tp_overlap=1.0, dp_overlap=1.0))
    for name, outcome in faster.outcomes.items():
        assert outcome.total_seconds < outcomes[name].total_seconds
        assert outcome.attribution["cp_communication"].sum() == 0
        assert outcome.attribution["dp_communication"].sum() == 0


def test_balance_pays_where_long_documents_are_most_of_the_work() -> None:
    """Not for any model: whole documents mean more attention, and small global batches of them are less full."""
    lengths = np.random.default_rng(0).lognormal(7.5, 1.8, 8000).clip(1, 131072).astype(np.int64)
    layout = wlb_tools.ParallelLayout(dp=4, pp=4, cp=2, tp=8)
    case = Scenario(
        model=wlb.ModelConfig.preset("llama2-7b"), layout=layout, hardware=wlb_tools.Hardware.preset("h100")
    )
    simulation = simulate(lengths, case, variants=("original", "wlb_llm", "wlb_llm_fitted"))
    assert 1 < simulation.speedup("wlb_llm") < simulation.speedup("wlb_llm_fitted")


@settings(max_examples=20)
@given(st.lists(st.integers(1, 4096), min_size=1, max_size=60), st.sampled_from(LAYOUTS), st.booleans())
def test_any_stream(lengths: list[int], layout: wlb_tools.ParallelLayout, queues: bool) -> None:
    thresholds = (1500, 3000) if queues else ()
    simulation = simulate(lengths, scenario(layout, outlier_thresholds=thresholds))
    for outcome in simulation.outcomes.values():
        assert (trained(outcome.run, np.array(lengths)) == 1).all()
        np.testing.assert_allclose(sum(outcome.attribution.values()), outcome.seconds, rtol=1e-9)
        assert outcome.seconds.min() > 0


def test_the_packer_does_not_grade_itself() -> None:
    """Other costs change the plan, and not how a plan is priced."""
    lengths = documents()
    variants = {"original": VARIANTS["original"], "wlb_llm": VARIANTS["wlb_llm"]}
    one = simulate(lengths, scenario(), variants=variants)
    other = simulate(lengths, scenario(cost_model=wlb.CostModel(attention=1.0, linear=0.0)), variants=variants)
    assert one.outcomes["original"].total_seconds == other.outcomes["original"].total_seconds
    assert one.outcomes["wlb_llm"].run.digests != other.outcomes["wlb_llm"].run.digests


def test_memory_is_that_of_the_memory_model() -> None:
    """Equal micro-batches under 1F1B hold what `memory_per_rank` says, and `S_max` is `max_tokens`."""
    layout = wlb_tools.ParallelLayout(pp=4, cp=2)
    case = scenario(layout, outlier_thresholds=(), max_tokens=None)
    assert case.limit == wlb_tools.max_tokens(MODEL, layout, case.hardware, num_micro_batches=4)
    outcome = simulate(np.full(8, 4096), case, variants=("original",)).baseline
    expected = wlb_tools.memory_per_rank(MODEL, layout, 4096, num_micro_batches=4)
    np.testing.assert_allclose(outcome.memory.total, expected.total, rtol=1e-12)
    # GPipe holds every micro-batch on every rank, so fewer tokens fit.
    gpipe = scenario(layout, schedule="gpipe", max_tokens=None, num_micro_batches=8)
    assert gpipe.limit < scenario(layout, max_tokens=None, num_micro_batches=8).limit
    held = gpipe.memory(gpipe.limit, np.full(4, 8.0 * gpipe.limit)).total.max()
    assert 0 <= gpipe.hardware.memory_bytes - held < 1e-4 * held


def holding(mebibytes: int) -> Scenario:
    """GPipe, which holds twice as much with twice as many micro-batches, on GPUs with that much to use."""
    hardware = dataclasses.replace(wlb_tools.Hardware.preset("h100"), memory_bytes=4 * 2**30 + mebibytes * 2**20)
    layout = wlb_tools.ParallelLayout(dp=2, pp=2, recompute="full")
    return dataclasses.replace(scenario(layout, schedule="gpipe"), hardware=hardware, max_tokens=None)


def test_more_micro_batches_fit_into_memory_too() -> None:
    case, lengths = holding(400), documents(2000)
    finer = VARIANTS["finer"]
    variants = {str(split): dataclasses.replace(finer, split=split) for split in (1, 2, 4)}
    fits = [case.setup(split=variant.split).max_tokens for variant in variants.values()]
    assert case.limit == fits[0] > fits[1] > fits[2] > case.context
    assert fits[1] == wlb_tools.max_tokens(MODEL, case.layout, case.hardware, schedule="gpipe", num_micro_batches=4)
    for most, outcome in zip(fits, simulate(lengths, case, variants=variants).outcomes.values(), strict=True):
        assert outcome.run.tokens.max() <= most
        assert outcome.memory.total.max() <= case.hardware.memory_bytes
    given = dataclasses.replace(case, max_tokens=7000)
    assert given.setup(split=4).max_tokens == 7000, "is not checked"


@pytest.mark.parametrize(
    ("case", "argument"),
    [
        (holding(280), "layout"),
        (scenario(LAYOUTS[2], num_micro_batches=7), "num_micro_batches"),  # 7 are one round, 14 no three
    ],
)
def test_more_micro_batches_than_a_cluster_can_have(case: Scenario, argument: str) -> None:
    assert [name for name in possible(case) if name not in defaults(case) and name in DEFAULT] == ["finer"]
    assert "Not compared: wlb, finer, since " in not_compared(case)[0]
    with pytest.raises(wlb.WlbError) as raised:
        simulate(documents(), case, variants=("original", "finer"), progress=lambda *_: pytest.fail("too late"))
    assert raised.value.argument == argument
    assert {choice.split for choice in tune(documents(100), case).tried} <= {1, 4}


def test_own_variants_and_paper_choices() -> None:
    lengths = documents()
    own = {
        "base": Variant(title="base"),
        "two": Variant(title="two", strategies=("per_sequence", "per_document")),
        "window": Variant(title="window", packing="fixed_length", window=4),
    }
    simulation = simulate(lengths, scenario(), variants=own)
    assert list(simulation.outcomes) == list(own)
    assert set(simulation.outcomes["two"].sharded.strategies) <= {"per_sequence", "per_document"}
    assert simulation.outcomes["window"].run.delay_mean > 0
    assert simulation.outcomes["two"].total_seconds <= simulation.outcomes["base"].total_seconds * (1 + 1e-9)


def test_thresholds_are_tuned_with_the_costs_that_use_them() -> None:
    case, lengths = scenario(outlier_thresholds=None, num_queues=1), documents(1500)
    simulation = simulate(lengths, case, variants=("wlb_llm", "wlb_llm_fitted"))
    stream = lengths[: wlb.batch_offsets(lengths, tokens_per_batch=case.tokens_per_batch)[simulation.batches // 4]]
    for name, setup in (("wlb_llm", case.setup()), ("wlb_llm_fitted", case.setup(fitted_to=lengths))):
        tuned = wlb.tune(
            stream,
            num_micro_batches=case.micro_batches,
            max_tokens=case.limit,
            cost_model=setup.cost_model,
            num_queues=1,
            max_mean_delay=case.max_mean_delay,
            max_document_tokens=case.context,
            tokens_per_batch=case.tokens_per_batch,
        )
        assert simulation.outcomes[name].run.thresholds == tuned.thresholds
    assert simulation.thresholds == simulation.outcomes["wlb_llm"].run.thresholds


def test_fitted_efficiency_is_what_the_cluster_does() -> None:
    """On one GPU with an attention kernel at the linear part's rate, FLOPs alone have the right ratio."""
    case = scenario(wlb_tools.ParallelLayout())
    lengths = np.full(10, 4096)
    efficiency = case.fitted_efficiency(lengths)
    cost = MODEL.cost_model(attention_efficiency=efficiency)
    stage = wlb_tools.stage_seconds(
        [4096],
        attention_forward=case.attention.segment_seconds([4096], [4096], passes="forward"),
        attention_backward=case.attention.segment_seconds([4096], [4096], passes="backward"),
        model=MODEL,
        layout=case.layout,
        hardware=case.hardware,
    ).seconds.sum()
    kernel = float(case.attention.segment_seconds([4096], [4096])[0]) * MODEL.num_layers
    expected = kernel / (stage - kernel)
    found = cost.attention_cost([4096])[0] / cost.linear_cost([4096])[0]
    assert found == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(
    ("changes", "argument"),
    [
        ({"max_tokens": 4095}, "max_tokens"),
        ({"context": 0}, "context"),
        ({"num_micro_batches": 3}, "num_micro_batches"),
        ({"num_micro_batches": 0}, "num_micro_batches"),
        ({"num_micro_batches": 10**23}, "num_micro_batches"),
        ({"cp_overlap": 1.5}, "cp_overlap"),
        ({"noise": -0.1}, "noise"),
        ({"noise": "a"}, "noise"),
        ({"noise": 1}, "noise"),
        ({"tp_overlap": True}, "tp_overlap"),
        ({"context": 4096.5}, "context"),
        ({"context": "4096"}, "context"),
        ({"context": None}, "context"),
        ({"max_tokens": 6144.5}, "max_tokens"),
        ({"num_micro_batches": True}, "num_micro_batches"),
        ({"num_queues": -1}, "num_queues"),
        ({"cp_keys": "some"}, "cp_keys"),
        ({"max_delay": 1.5}, "max_delay"),
        ({"max_step_cost": 0}, "max_step_cost"),
        ({"max_step_cost": "1"}, "max_step_cost"),
        ({"reserved_bytes": -1}, "reserved_bytes"),
        ({"noise_seed": -1}, "noise_seed"),
        ({"schedule": "2f2b"}, "schedule"),
        ({"schedule": "zbv"}, "num_virtual_stages"),
        ({"kernel_model": wlb.KernelModel.analytic("h100", num_heads=5, head_dim=64)}, "kernel_model"),
        ({"kernel_model": wlb.KernelModel.analytic("h100", num_heads=4, head_dim=32)}, "kernel_model"),
        ({"kernel_model": wlb.KernelModel.analytic("h100", num_heads=4, head_dim=64, causal=False)}, "kernel_model"),
        ({"hardware": dataclasses.replace(wlb_tools.Hardware.preset("h100"), name="mine")}, "kernel_model"),
        ({"hardware": dataclasses.replace(wlb_tools.Hardware.preset("h100"), memory_bytes=2**32 + 2**20)}, "layout"),
        ({"layout": wlb_tools.ParallelLayout(tp=3)}, "tp"),
    ],
)
def test_scenarios_that_make_no_sense(changes: dict[str, Any], argument: str) -> None:
    if argument == "layout":
        changes = changes | {"max_tokens": None}
    with pytest.raises(wlb.WlbError) as raised:
        dataclasses.replace(scenario(), **changes)
    assert raised.value.argument == argument


def test_a_kernel_measured_elsewhere() -> None:
    for gpu, generation, elsewhere in (("h100", "h100", False), ("h100", "a100", True), ("gb200", "b200", False)):
        kernel = wlb.KernelModel.analytic(generation, num_heads=4, head_dim=64)  # type: ignore[arg-type]
        case = scenario(kernel_model=kernel)
        case = dataclasses.replace(case, hardware=wlb_tools.Hardware.preset(gpu))
        assert case.measured_elsewhere == elsewhere


def test_the_default_schedule_is_named_where_it_does_not_fit() -> None:
    layout = wlb_tools.ParallelLayout(tp=8, cp=2, pp=4, virtual_stages=2)
    with pytest.raises(wlb.WlbError) as raised:
        Scenario(
            model=wlb.ModelConfig.preset("llama2-7b"),
            layout=layout,
            hardware=wlb_tools.Hardware.preset("h100"),
            num_micro_batches=6,
            context=200_000,
        )
    assert "None" not in str(raised.value)


@pytest.mark.parametrize(
    ("changes", "argument"),
    [
        ({"packing": "bogus"}, "packing"),
        ({"strategies": ("adaptive", "nonsense")}, "strategies"),
        ({"strategies": ()}, "strategies"),
        ({"window": 0}, "window"),
        ({"split": 0}, "split"),
        ({"packer": {"max_delay": 3}}, "packer"),
    ],
)
def test_variants_that_cannot_be(changes: dict[str, Any], argument: str) -> None:
    with pytest.raises(wlb.WlbError) as raised:
        Variant(title="mine", **changes)
    assert raised.value.argument == argument


@pytest.mark.parametrize(
    ("lengths", "variants", "argument", "index"),
    [
        ([10, 4097], ("original",), "lengths", 1),
        ([10, 0], ("original",), "lengths", 1),
        ([], ("original",), "lengths", None),
        ([10], ("original", "faster"), "variants", 1),
        ([10], (), "variants", None),
    ],
)
def test_streams_and_variants_that_make_no_sense(
    lengths: list[int], variants: tuple[str, ...], argument: str, index: int | None
) -> None:
    with pytest.raises(wlb.WlbError) as raised:
        simulate(lengths, scenario(), variants=variants)
    assert (raised.value.argument, raised.value.index) == (argument, index)


@pytest.mark.parametrize(("name", "bound"), [("wlb", 1.3), ("finer", 1.3), ("wlb_dynamic_cp", 1.1)])
def test_the_work_of_steps_is_bounded(name: str, bound: float) -> None:
    """In global batches of the scenario, however many of them a packer takes for one."""
    lengths = documents(3000)
    free, bounded = (
        simulate(lengths, scenario(max_step_cost=most), variants=("original", "wlb_llm", name))
        for most in (None, bound)
    )
    heaviest = [one.outcomes[name].summary()["step_work_heaviest"] for one in (free, bounded)]
    assert heaviest[1] < min(heaviest[0], bound + 0.2)
    assert [one.outcomes["wlb_llm"].run.digests for one in (free, bounded)] == [
        free.outcomes["wlb_llm"].run.digests
    ] * 2


def test_a_method_may_bound_the_work_of_its_steps_by_itself() -> None:
    bound, finer = 1.3, VARIANTS["finer"]
    variants = {"free": finer, "bounded": dataclasses.replace(finer, packer={**finer.packer, "max_step_cost": bound})}
    found = simulate(documents(3000), scenario(), variants=variants).outcomes
    by_scenario = simulate(documents(3000), scenario(max_step_cost=bound), variants=variants).outcomes
    assert found["free"].run.digests != found["bounded"].run.digests
    assert found["bounded"].run.digests == by_scenario["bounded"].run.digests == by_scenario["free"].run.digests
    loose = {
        "loose": dataclasses.replace(finer, packer={**finer.packer, "max_step_cost": 9.0})
    }  # the scenario's is what counts
    assert simulate(documents(3000), scenario(max_step_cost=bound), variants=loose).outcomes["loose"].run.digests == (
        found["bounded"].run.digests
    )


@pytest.mark.parametrize("name", ["original", "wlb_llm", "wlb_dynamic_cp"])
def test_plans_are_graded_by_attention_that_they_were_not_made_for(name: str) -> None:
    """The sweep prices the same plan with a kernel that is so much faster, whatever else follows from it."""
    case, lengths = scenario(), documents()
    simulation = simulate(lengths, case, variants=("original", name) if name != "original" else ("original",))
    outcome = simulation.outcomes[name]
    assert [at.attention_rate for at in outcome.swept] == list(ATTENTION_RATES)
    for at in outcome.swept:
        other = outcome.at_attention_rate(at.attention_rate)
        assert other.run is outcome.run
        assert other.total_seconds == pytest.approx(at.total_seconds, rel=1e-12)
        attention = outcome.total_seconds * (outcome.attribution["compute"].sum() / outcome.seconds.sum())
        assert (other.total_seconds - outcome.total_seconds) * (at.attention_rate - 1) <= 0 < attention
    low, high = simulation.speedup_band(name)
    assert low <= simulation.speedup(name) <= high
    low, high = outcome.imbalance_band
    assert 1 <= low <= outcome.imbalance.mean() <= high
    summary = outcome.summary()
    costs = outcome.imbalance * outcome.balance.mean
    assert summary["lost_time"] == pytest.approx(costs.sum() / outcome.balance.mean.sum(), rel=1e-12)
    work = outcome.work[: outcome.run.streamed]
    assert summary["step_work_cv"] == pytest.approx(work.std() / work.mean(), rel=1e-12)
    assert summary["step_work_heaviest"] == pytest.approx(work.max() / work.mean(), rel=1e-12)


@given(st.integers(0, 1000), st.floats(0.1, 10))
def test_a_packing_is_graded_as_if_its_costs_were_others(seed: int, rate: float) -> None:
    case, lengths = scenario(), documents(200, seed)
    stream = GlobalBatches(lengths, wlb.batch_offsets(lengths, tokens_per_batch=case.tokens_per_batch))
    cost = MODEL.cost_model(attention_efficiency=0.5)
    setup = dataclasses.replace(case.setup(), cost_model=cost)
    plan = collect("", var_length(stream, setup, (1500, 3000)), stream, (1500, 3000))
    (graded,) = plan.graded(cost, [rate])
    other = MODEL.cost_model(attention_efficiency=0.5 * rate)
    costs = np.zeros(plan.costs.shape)
    np.add.at(costs, (plan.step, plan.micro_batch), other.cost(plan.length))
    costs = costs[: plan.streamed]
    np.testing.assert_allclose(graded.imbalance, costs.max(axis=1) / costs.mean(axis=1), rtol=1e-9)
    assert graded.lost_time == pytest.approx(costs.max(axis=1).sum() / costs.mean(axis=1).sum(), rel=1e-9)
    assert graded.step_cv == pytest.approx(costs.sum(axis=1).std() / costs.sum(axis=1).mean(), rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("gpu", ["a100", "h100", "h200", "b200", "gb200"])
def test_assumed_attention_is_the_kernel_models(gpu: str) -> None:
    """One source for both: a GPU's assumed efficiency is that of its analytic kernel at documents of 8,192 tokens."""
    hardware = wlb_tools.Hardware.preset(gpu)
    case = dataclasses.replace(scenario(wlb_tools.ParallelLayout()), hardware=hardware)
    seconds = case.attention_seconds([8192])
    cost = MODEL.cost_model(attention_efficiency=1.0)
    found = float(cost.attention_cost([8192])[0]) / hardware.flops_per_second / seconds
    assert round(found, 2) == pytest.approx(hardware.attention_efficiency)


def test_layers_are_priced_as_what_they_are() -> None:
    """Equal layers one by one are the same model; windows in most of them take less attention; plans follow."""
    attention = Attention(num_heads=8, num_kv_heads=8, head_dim=64)
    local = dataclasses.replace(attention, mask=Mask("window", 512))
    ffn = FeedForward(width=1024)
    lengths = documents(longest=32768) * 8

    def simulated(*blocks: Attention, model: wlb.ModelConfig | None = None) -> dict[str, Any]:
        layers = tuple(Layer((block, ffn)) for block in blocks)
        unlike = model or wlb.ModelConfig(hidden_size=512, vocab_size=1000, layers=layers)
        base = scenario(LAYOUTS[2], context=32768 * 8, max_tokens=49152 * 8)
        case = dataclasses.replace(base, model=unlike, outlier_thresholds=None)
        return simulate(lengths, case, variants=("original", "wlb_llm")).outcomes["wlb_llm"].summary()

    plain, windows = simulated(model=MODEL), simulated(*[local] * 6, attention, attention)
    assert simulated(*[attention] * 8) == plain
    # Six of eight layers; all the rest of the work stays.
    assert windows["seconds"] < 0.8 * plain["seconds"]
    assert simulated(*[local] * 8)["seconds"] < windows["seconds"]
