"""Dynamic-CP in the simulator: runs as the planner says, priced by what it did not know, nothing lost."""

import dataclasses
import json
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import wlb
import wlb_tools
from tests.oracles.dynamic_cp import violations
from tests.profiles import profile as example
from tests.tools.simulation.test_simulate import MODEL, documents, scenario, trained
from wlb import testing
from wlb_tools.command.commands.simulate import not_compared
from wlb_tools.simulation import (
    DEFAULT,
    KINDS,
    Objective,
    Scenario,
    Tuning,
    Variant,
    defaults,
    planner_options,
    simulate,
    tune,
)
from wlb_tools.simulation.dynamic import DynamicOutcome, collect_dynamic, dynamic_steps, group_waits
from wlb_tools.simulation.stream import GlobalBatches
from wlb_tools.simulation.tuning import CUTTING

BOTH = ("dynamic_cp", "wlb_dynamic_cp")
ODD = wlb_tools.ParallelLayout(dp=3, pp=1, cp=2, tp=4)


@settings(max_examples=30)
@given(
    testing.document_lengths(max_length=200, min_size=1, max_size=30),
    testing.cost_models(),
    st.integers(1, 9),
    st.sampled_from([(1, 1, "1f1b"), (3, 1, "1f1b"), (2, 2, "interleaved_1f1b"), (2, 2, "zbv"), (3, 2, "dualpipev")]),
    st.floats(0.0, 1.0),
    st.sampled_from(["step", "micro_batch"]),
)
def test_ranks_wait_for_their_groups_as_the_planner_says(
    lengths: list[int], cost: wlb.CostModel, world_size: int, stages: tuple[int, int, Any], share: float, sync: Any
) -> None:
    """With the planner's own costs, a step takes what it says."""
    pp, virtual, schedule = stages
    p2p = share * float(cost.cost([max(lengths)])[0])
    options = {
        "world_size": world_size,
        "num_stages": pp,
        "num_virtual_stages": virtual,
        "schedule": schedule,
        "sync": sync,
        "max_tokens_per_rank": 200,
        "cost_model": cost,
        "p2p_seconds": p2p,
    }
    stream = GlobalBatches(np.array(lengths), np.array([0, len(lengths)]))
    plan = collect_dynamic("", dynamic_steps(stream, options), stream)
    planned = wlb.plan_dynamic_cp(lengths, **options)
    groups = plan.groups(np.array([0]))
    alone = sync == "step"
    whole = np.array(
        [group.seconds if alone else batch.seconds for batch in planned.micro_batches for group in batch.groups]
    )
    seconds = np.broadcast_to((whole / (3 * pp * virtual))[:, None, None], (*whole.shape, pp * virtual, 3))
    seconds = seconds[groups.swapaxes(1, 2)]
    if not alone:
        groups = np.broadcast_to(groups.min(axis=2, keepdims=True), groups.shape)
    transfers = np.full(seconds.shape[:3], p2p)
    pipeline: dict[str, Any] = {"schedule": schedule, "num_stages": pp, "num_virtual_stages": virtual}
    waits = group_waits(groups, seconds, transfers, **pipeline)
    assert (waits >= 0).all()
    steps = wlb.simulate_steps(seconds + waits, p2p_seconds=transfers, **pipeline)
    assert steps.seconds[0] == pytest.approx(planned.seconds, rel=1e-9)


@pytest.mark.parametrize("keys", ["all", "needed"])
def test_steps_recomputed_group_by_group(keys: Any) -> None:
    """The naive way, on six ranks and without a pipeline: groups of four and two, each on its slowest rank."""
    case = scenario(ODD, num_micro_batches=6, cp_overlap=0.5, cp_keys=keys)
    # Documents of one token are on one rank, and no other one needs them.
    lengths = np.concatenate([documents(), np.ones(500, dtype=np.int64)])
    np.random.default_rng(1).shuffle(lengths)
    outcome = simulate(lengths, case, variants=("dynamic_cp",)).baseline
    offsets = wlb.batch_offsets(lengths, tokens_per_batch=case.tokens_per_batch)
    options = planner_options(case, lengths)
    gradients = wlb_tools.data_parallel_seconds(MODEL, ODD, case.hardware).max()
    sizes = set()
    for step in range(len(offsets) - 1):
        plan = wlb.plan_dynamic_cp(lengths[offsets[step] : offsets[step + 1]], **options)
        clocks = np.zeros(6)
        computing = 0.0
        for micro_batch in plan.micro_batches:
            for group in micro_batch.groups:
                sizes.add(group.cp_size)
                ranks = slice(group.first_rank, group.first_rank + group.cp_size)
                seconds = 0.0
                if len(group.lengths):
                    cut = wlb.shard(group.lengths, cp_size=group.cp_size, strategy="per_document")
                    layout = dataclasses.replace(ODD, cp=group.cp_size, dp=-(-6 // group.cp_size))
                    forward, backward = (
                        [case.attention.rank_seconds(cut, passes=passes).max()] for passes in ("forward", "backward")
                    )
                    seconds = wlb_tools.stage_seconds(
                        [cut.tokens_per_rank.max()],
                        attention_forward=forward,
                        attention_backward=backward,
                        model=MODEL,
                        layout=layout,
                        hardware=case.hardware,
                        keys_gathered=None if keys == "all" else [cut.keys_gathered.max()],
                        keys_moved=None if keys == "all" else [cut.keys_moved.max()],
                        cp_overlap=0.5,
                    ).seconds.sum()
                # Its forward and backward both wait for all of its ranks.
                clocks[ranks] = clocks[ranks].max() + seconds
                computing += seconds * group.cp_size
        assert outcome.seconds[step] == pytest.approx(clocks.max() + gradients, rel=1e-9)
        assert outcome.work[step] == pytest.approx(computing, rel=1e-9)
    assert len(sizes) > 1


def test_the_planner_knows_the_transfer_of_a_micro_batch_in_the_middle() -> None:
    """Of a rank's share of a global batch in twice as many micro-batches as stages."""
    case = scenario(wlb_tools.ParallelLayout(dp=2, pp=2, cp=2), num_micro_batches=4)
    share = case.tokens_per_batch // (2 * 2 * 4)
    sent = case.stage_seconds([share], attention_forward=[0.0], attention_backward=[0.0]).p2p
    assert planner_options(case, documents())["p2p_seconds"] == sent[0]
    assert sent[0] > 0
    # What stages wait for is a part of their micro-batches: a forward and a backward cross the one cut.
    waits = planner_options(dataclasses.replace(case, p2p_overlap=0.0), documents())
    assert waits["p2p_seconds"] == 0
    link, width = case.hardware.intra_node, MODEL.hidden_size * 2
    more = {name: waits[name] - planner_options(case, documents())[name] for name in ("micro_batch_seconds",)}
    assert more["micro_batch_seconds"] == pytest.approx(2 * (link.latency + case.hardware.launch_latency))
    linear = waits["cost_model"].linear_cost([1]) - planner_options(case, documents())["cost_model"].linear_cost([1])
    assert linear == pytest.approx(2 * width / link.bandwidth)


VIRTUAL = wlb_tools.ParallelLayout(dp=2, pp=2, cp=2, virtual_stages=2, recompute="full")


@pytest.mark.parametrize(
    ("layout", "schedule"), [(ODD, None), (VIRTUAL, None), (VIRTUAL, "zbv"), (VIRTUAL, "dualpipev")]
)
def test_everything_is_trained_in_time_and_in_memory(layout: wlb_tools.ParallelLayout, schedule: Any) -> None:
    lengths = documents(1500)
    count = 8 if schedule else None  # "dualpipev" takes no fewer
    options: dict[str, Any] = {"schedule": schedule, "num_micro_batches": count}
    case = scenario(layout, max_tokens=None, max_delay=4, noise=0.1, **options)
    holding = {"release": "adaptive", "delay_price": 0.001}
    variants = {
        "dynamic_cp": Variant(title="", packing="dynamic_cp"),
        "holding": Variant(title="", packing="dynamic_cp", packer=holding, split=8),
    }
    outcomes = simulate(lengths, case, variants=variants).outcomes
    planner = planner_options(case, lengths)
    for outcome in outcomes.values():
        assert isinstance(outcome, DynamicOutcome)
        assert (trained(outcome.run, lengths) == 1).all()
        np.testing.assert_allclose(sum(outcome.attribution.values()), outcome.seconds, rtol=1e-12)
        working = ("compute", "cp_wait", "cp_communication", "tp_communication")
        gpus = layout.pp * layout.dp * layout.cp
        np.testing.assert_allclose(sum(outcome.attribution[part] for part in working), outcome.work / gpus, rtol=1e-9)
        assert outcome.run.group_tokens.max() <= planner["max_tokens_per_rank"]
        assert outcome.memory.total.max() <= case.hardware.memory_bytes
        assert sum(outcome.cp_sizes.values()) == pytest.approx(1)
        least = 2 * layout.pp if schedule == "dualpipev" else layout.pp
        assert outcome.run.micro_batches.min() >= least, "torch takes no fewer"
        assert set(outcome.cp_sizes) <= {1, 2, 4}
        np.testing.assert_array_equal(
            np.bincount(outcome.run.group_step, weights=outcome.run.cp_size),
            outcome.run.micro_batches * layout.dp * layout.cp,
        )
    assert outcomes["dynamic_cp"].run.delay.max() == 0, "every document in the step that it arrives for"
    assert 0 < outcomes["holding"].run.delay.max() <= 4


def test_the_packer_in_front_has_micro_batches_of_its_own() -> None:
    """Interleaved schedules can have 7, one round, and not 14, three; the packer's are not those of the schedule."""
    case = scenario(wlb_tools.ParallelLayout(pp=4, cp=4, virtual_stages=2), num_micro_batches=7, max_tokens=None)
    finer = Variant(title="", packing="dynamic_cp", packer={"release": "adaptive"}, split=2)
    outcome = simulate(documents(), case, variants={"finer": finer}).baseline
    assert (trained(outcome.run, documents()) == 1).all()


def test_a_given_limit_is_shared_out_over_ranks() -> None:
    case = scenario(wlb_tools.ParallelLayout(dp=2, cp=2), max_tokens=6145)
    lengths = documents()
    assert planner_options(case, lengths)["max_tokens_per_rank"] == 3073
    stream = GlobalBatches(lengths[:50], np.array([0, 50]))
    options = planner_options(case, lengths)
    (step,) = dynamic_steps(stream, options)
    assert violations(step.plan, lengths[:50].tolist()) == []


def test_memory_counts_the_keys_of_the_largest_group() -> None:
    """More ranks share a document, more keys are gathered on each: fewer tokens fit."""
    lengths, layout = documents(), wlb_tools.ParallelLayout(dp=16, cp=2)
    case = Scenario(model=MODEL, layout=layout, hardware=wlb_tools.Hardware.preset("h100"), context=4096)
    assert planner_options(case, lengths)["max_tokens_per_rank"] < case.limit // 2


@pytest.mark.parametrize(
    ("changes", "argument"),
    [
        ({"layout": wlb_tools.ParallelLayout(pp=2)}, "layout"),
        ({"layout": wlb_tools.ParallelLayout(pp=2, cp=2), "schedule": "zb_h1"}, "schedule"),
        ({"layout": wlb_tools.ParallelLayout(pp=2, cp=2), "schedule": "interleaved_1f1b"}, "schedule"),
        ({"layout": wlb_tools.ParallelLayout(cp=3), "max_tokens": 4096}, "max_tokens"),
    ],
)
def test_clusters_that_dynamic_cp_cannot_plan_for(changes: dict[str, Any], argument: str) -> None:
    case = scenario(**changes)
    assert set(DEFAULT) - set(defaults(case)) == set(BOTH)
    assert "Dynamic-CP" in not_compared(case)[0]
    own = {"mine": Variant(title="mine", packing="dynamic_cp")}
    for variants in (BOTH, own):
        with pytest.raises(wlb.WlbError) as raised:
            simulate(documents(), case, variants=variants)
        assert raised.value.argument == argument
    assert {choice.kind for choice in tune(documents(100), case).by_plan} == set(KINDS) - set(BOTH)


def test_tuning_keeps_the_budget_and_uses_it() -> None:
    lengths = documents(1000)
    speeds = []
    for budget in (0.0, 0.3, 5.0):
        tuning = tune(lengths, scenario(max_tokens=None, max_mean_delay=budget, outlier_thresholds=None))
        within = [choice for choice in tuning.tried if choice.delay <= budget]
        assert tuning.best in within
        assert not any(
            choice.machinery == tuning.best.machinery
            and choice.delay < tuning.best.delay
            and choice.outcome.steady_seconds <= tuning.best.outcome.steady_seconds
            for choice in within
        )
        assert tuning.best == dataclasses.replace(tuning.best, outcome=tuning.baseline), "settings make a choice"
        fastest = min(choice.outcome.steady_seconds for choice in within)
        assert tuning.best.outcome.steady_seconds <= 1.003 * fastest
        if not budget:
            assert tuning.best.outcome.run.delay.max() == 0
        assert {choice.kind for choice in tuning.by_plan} == set(KINDS)
        assert tuning.simulation.outcomes[tuning.best.kind] is tuning.best.outcome
        speeds.append(tuning.best.outcome.tokens / tuning.best.outcome.steady_seconds)
    assert speeds[0] <= 1.003 * speeds[1] <= 1.003**2 * speeds[2]
    assert speeds[0] < speeds[2]


def test_what_is_fastest_by_tokens_may_cut_documents_and_pays_for_it_by_flops() -> None:
    # Many micro-batches, so that even ones gain little; no Dynamic-CP.
    case = scenario(wlb_tools.ParallelLayout(pp=2, cp=2), schedule="zb_h1", max_mean_delay=0, num_micro_batches=16)
    lengths = documents(600)
    tuned: dict[str, Tuning] = {by: tune(lengths, case, by=by) for by in get_args(Objective)}
    for by, tuning in tuned.items():
        shown = [choice for choice in (*tuning.by_plan, *tuning.tried) if choice.delay == 0]
        assert {choice.kind for choice in shown} >= set(CUTTING)
        trained = [MODEL.flops(choice.outcome.run.length).sum() if by == "flops" else 1.0 for choice in shown]
        speeds = [work / choice.outcome.steady_seconds for work, choice in zip(trained, shown, strict=True)]
        assert speeds[shown.index(tuning.best)] * 1.003 >= max(speeds)
    whole, cut = (MODEL.flops(of).sum() for of in (lengths, tuned["tokens"].baseline.run.length))
    released = next(choice for choice in tuned["flops"].by_plan if choice.kind == "wlb")
    gains = [released.speedup(tuned["flops"].baseline, by) for by in get_args(Objective)]
    assert gains[1] / gains[0] == pytest.approx(whole / cut)
    assert whole > 1.01 * cut, "the case shows the difference"
    assert tuned["tokens"].best.cuts
    with pytest.raises(wlb.WlbError, match="by = 'tokns': must be one of tokens, flops"):
        tune(lengths, case, by="tokns")  # type: ignore[arg-type]


def test_nothing_to_tune_on() -> None:
    for tries in (tune, lambda lengths, case: planner_options(case, lengths)):
        with pytest.raises(wlb.WlbError) as raised:
            tries([], scenario())
        assert raised.value.argument == "lengths"


def test_recomputation_is_in_the_packers_costs() -> None:
    layout = wlb_tools.ParallelLayout(dp=2, pp=2, recompute="full")
    efficiency = wlb_tools.Hardware.preset("h100").attention_efficiency
    for recompute in ("full", "selective"):
        expected = MODEL.cost_model(attention_efficiency=efficiency, recompute=recompute == "full")
        assert scenario(dataclasses.replace(layout, recompute=recompute)).packer_cost == expected


def test_a_measured_linear_part_counts_where_it_is_of_this_layer(tmp_path: Path) -> None:
    profile = example()
    linear = profile["linear"]
    model = wlb.ModelConfig(
        hidden_size=4096, ffn_hidden_size=1024, num_layers=2, num_heads=64, num_kv_heads=16, head_dim=128, vocab_size=10
    )
    layer = linear["layer"] | {"ffn_hidden_size": 512, "tp": 2}
    path = tmp_path / "mine.json"

    def case(linear: Any, tp: int = 2, model: wlb.ModelConfig = model) -> Scenario:
        path.write_text(json.dumps(profile | {"linear": linear}))
        layout = wlb_tools.ParallelLayout(tp=tp, cp=2)
        return Scenario(
            model=model,
            layout=layout,
            hardware=wlb_tools.Hardware.preset("h100"),
            context=4096,
            max_tokens=4096,
            kernel_model=path,
        )

    for other in (None, *(linear | {"layer": shape} for shape in (layer | {"tp": 4}, {}, None, "llama"))):
        assert case(other).linear is None
    whole = dataclasses.replace(model, ffn_hidden_size=11008, num_heads=32, num_kv_heads=8)
    assert case(linear, tp=1, model=whole).linear is not None, "the example is of that model"
    measured = case(linear | {"layer": layer})
    assert measured.attention.source.startswith("measured")
    assert measured.linear is not None
    stages = measured.stage_seconds([2048, 0], attention_forward=[0.0, 0.0], attention_backward=[0.0, 0.0])
    expected = wlb.CostModel.from_profile(path, passes="forward").linear_cost([2048])[0]
    assert (stages.seconds - stages.exposed_cp - stages.exposed_tp)[0, 0, 0] == pytest.approx(2 * expected, rel=0.01), (
        "two layers and a small output projection"
    )
    assert stages.seconds[1].sum() == 0
    alone = dataclasses.replace(measured, kernel_model=measured.attention)
    assert alone.linear is None, "a kernel model has no linear part"
