"""Settings of launch files, each against numbers computed by hand: experts, FP8, offload, recomputation, HSDP, LoRA."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import wlb
import wlb_tools
from wlb_tools.cluster.collectives import Communicator
from wlb_tools.cluster.memory import activation_bytes, adapter_parameters, in_flight, units_of_stages
from wlb_tools.cluster.offload import offload_seconds

LLAMA = wlb.ModelConfig.preset("llama2-7b")
H100 = wlb_tools.Hardware.preset("h100")
A100 = wlb_tools.Hardware.preset("a100")
EMBEDDING = 32000 * 4096
LAYER = 4 * 4096**2 + 3 * 4096 * 11008 + 2 * 4096
"""Parameters of a layer of Llama 2 7B."""
LINEAR = 2 * (4 * 4096**2 + 3 * 4096 * 11008)
"""Forward FLOPs of a token in a layer's matrices."""

# 64 experts of 3 x 1024 x 512, and 8 of them for a token.
EXPERT = 3 * 1024 * 512
ATTENTION = 4 * 1024**2
MOE = wlb.ModelConfig(
    hidden_size=1024,
    num_layers=4,
    num_heads=16,
    vocab_size=1000,
    ffn_hidden_size=512,
    num_experts=64,
    experts_per_token=8,
)


def seconds(layout: wlb_tools.ParallelLayout, model: wlb.ModelConfig = LLAMA, **options: Any) -> Any:
    options = {"tokens": [4096], "attention_forward": [0.001], "attention_backward": [0.002]} | options
    return wlb_tools.stage_seconds(**options, model=model, layout=layout, hardware=H100)


# Expert tensor parallelism apart from tp.


def test_experts_that_are_whole_although_other_matrices_are_split() -> None:
    """Eight ranks, tp 4 x dp 2: each has eight whole experts, and a quarter of every other matrix."""
    layout = wlb_tools.ParallelLayout(tp=4, dp=2, ep=8, expert_tp=1)
    memory = wlb_tools.memory_per_rank(MOE, layout, 0)
    norms, router = 2 * 1024, 1024 * 64
    rest = 4 * (ATTENTION / 4 + norms + router) + 2 * 1000 * 1024 / 4 + 1024
    experts = 4 * 8 * EXPERT
    assert memory.parameters.tolist() == [2 * (rest + experts)]
    assert memory.gradients.tolist() == [4 * (rest + experts)]
    assert memory.optimizer.tolist() == [12 * (rest / 2 + experts)], "no other rank has these experts"

    found = seconds(layout, MOE)
    hidden = 4096 * 1024 * 2  # bytes of all tokens, of which a rank has a quarter
    tp, ep = (Communicator.along(axis, layout, H100) for axis in ("tp", "ep"))
    assert (ep.size, ep.nodes) == (8, 1)
    # Attention's block gathers and scatters; the experts' does not.
    assert found.exposed_tp[0, 0, 0] == pytest.approx(4 * (tp.all_gather(hidden) + tp.reduce_scatter(hidden)))
    assert found.exposed_ep[0, 0, 0] == pytest.approx(4 * 2 * ep.all_to_all(8 * hidden / 4))
    # A rank computes as much as if every expert were split.
    split = seconds(wlb_tools.ParallelLayout(tp=4, dp=2, ep=2), MOE)
    assert found.computing == pytest.approx(split.computing)
    # Rows of a quarter of the tokens, instead of all of them; and twice that on their way.
    rows = 2 * 8 * 1024
    kept = [activation_bytes(MOE, each) for each in (layout, wlb_tools.ParallelLayout(tp=4, dp=2, ep=2))]
    assert kept[1] - kept[0] == rows * 3 / 4
    one = wlb_tools.memory_per_rank(MOE, layout, 1).workspace
    other = wlb_tools.memory_per_rank(MOE, dataclasses.replace(layout, ep=2, expert_tp=None), 1).workspace
    assert other - one == pytest.approx([2 * rows * 3 / 4])


def test_experts_that_are_split_although_nothing_else_is() -> None:
    layout = wlb_tools.ParallelLayout(dp=4, ep=2, expert_tp=2)
    memory = wlb_tools.memory_per_rank(MOE, layout, 0)
    rest = 4 * (ATTENTION + 2 * 1024 + 1024 * 64) + 2 * 1000 * 1024 + 1024
    assert memory.parameters.tolist() == [2 * (rest + 4 * 64 * EXPERT / 4)]
    found, hidden = seconds(layout, MOE), 4096 * 1024 * 2
    etp = Communicator.along("etp", layout, H100)
    moved = etp.all_gather(2 * hidden) + etp.reduce_scatter(2 * hidden)
    assert found.exposed_tp[0, 0, 0] == pytest.approx(4 * 8 * moved)
    assert layout.ranks_of_experts == 4


@given(
    st.sampled_from([1, 2, 4, 8]),
    st.sampled_from([1, 2, 4, 8]),
    st.sampled_from([1, 2, 4, 8]),
    st.sampled_from([1, 2]),
    st.sampled_from([1, 2]),
    st.integers(1, 9),
)
def test_groups_are_those_of_megatron(tp: int, etp: int, ep: int, pp: int, replicas: int, node: int) -> None:
    """Beside lists of ranks in Megatron's order: tp, ep, dp, pp of experts, and tp, dp, pp of everything else."""
    dp = 8
    stage = tp * dp
    if stage % (etp * ep) or ((etp * ep) % tp and tp % (etp * ep)) or (stage // (etp * ep)) % replicas:
        with pytest.raises(wlb.WlbError, match=r"expert_tp|dp_replicate"):
            wlb_tools.ParallelLayout(tp=tp, dp=dp, pp=pp, ep=ep, expert_tp=etp, dp_replicate=replicas)
        return
    layout = wlb_tools.ParallelLayout(tp=tp, dp=dp, pp=pp, ep=ep, expert_tp=etp, dp_replicate=replicas)
    experts = np.arange(stage * pp).reshape(pp, -1, ep, etp)
    same = np.moveaxis(experts, 1, -1)
    others = np.moveaxis(np.arange(stage * pp).reshape(pp, replicas, dp // replicas, tp), 2, -1)
    groups: dict[Any, np.ndarray] = {
        "etp": experts,
        "ep": np.moveaxis(experts, 2, -1),
        "edp": same,
        "expert_shard": same.reshape(pp, ep, etp, replicas, -1),
        "shard": others,
        "replicate": np.moveaxis(others, 1, -1),
    }
    for axis, ranks in groups.items():
        lists = ranks.reshape(-1, ranks.shape[-1])
        assert layout.size(axis) == lists.shape[1]
        assert layout.nodes(axis, gpus_per_node=node) == max(np.unique(each // node).size for each in lists)


# FP8.


def test_fp8_in_memory() -> None:
    layout = wlb_tools.ParallelLayout(tp=2)
    layers, norms = 32 * LAYER, 32 * 2 * 4096
    per_rank = (layers - norms) / 2 + norms
    ends = 2 * EMBEDDING / 2 + 4096
    found = {
        fp8: wlb_tools.memory_per_rank(LLAMA, dataclasses.replace(layout, fp8=fp8), 0).parameters[0]
        for fp8 in ("none", "matmul", "parameters")
    }
    assert found["none"] == 2 * (per_rank + ends)
    assert found["matmul"] == 2 * (per_rank + ends) + 2 * per_rank, "weights as they are and transposed, beside"
    assert found["parameters"] == 2 * per_rank + 2 * ends, "these two copies alone"
    shared = wlb_tools.ParallelLayout(dp=8, fsdp="zero3", fp8="parameters")
    memory = wlb_tools.memory_per_rank(LLAMA, shared, 0)
    assert memory.parameters[0] == 2 * LLAMA.num_parameters / 8
    assert memory.gathered_parameters[0] == max(LAYER * (2 * 1 + 4), EMBEDDING * (2 * 2 + 4))


def test_fp8_in_time() -> None:
    """Matrices of layers take 1 / 1.4 of the time; the output projection and attention take as long as before."""
    plain, fast = (seconds(wlb_tools.ParallelLayout(fp8=fp8)).seconds[0, 0] for fp8 in ("none", "matmul"))
    linear = 32 * 4096 * LINEAR / H100.flops_per_second
    assert plain - fast == pytest.approx([linear * (1 - 1 / 1.4)] * 3)
    # Parameters in FP8 are gathered in FP8; gradients are not.
    layout = wlb_tools.ParallelLayout(dp=8, fsdp="zero2")
    group = Communicator.along("dp_cp", layout, H100)
    rest = 2 * EMBEDDING + 4096
    for fp8, width in (("matmul", 2), ("parameters", 1)):
        found = wlb_tools.data_parallel_seconds(LLAMA, dataclasses.replace(layout, fp8=fp8), H100)  # type: ignore[arg-type]
        sent = group.all_gather(32 * LAYER * width + rest * 2)
        assert found == pytest.approx([group.reduce_scatter(4 * LLAMA.num_parameters) + sent])
    zero3 = wlb_tools.ParallelLayout(dp=8, fsdp="zero3", fp8="parameters")
    assert {unit.width for stage in units_of_stages(LLAMA, zero3) for unit in stage} == {1, 2}
    with pytest.raises(wlb.WlbError, match="fp8 = 'matmul': a100 has no FP8 matrix products"):
        wlb_tools.Scenario(
            model=LLAMA, layout=wlb_tools.ParallelLayout(tp=8, fp8="matmul"), hardware=A100, context=4096
        )


# An optimizer on the CPU.


def test_an_offloaded_optimizer() -> None:
    layout = wlb_tools.ParallelLayout(dp=4, fsdp="zero1", offload_optimizer=0.75)
    memory = wlb_tools.memory_per_rank(LLAMA, layout, 0)
    assert memory.optimizer.tolist() == [12 * LLAMA.num_parameters / 4 / 4]
    assert memory.gradients.tolist() == [4 * LLAMA.num_parameters]
    moved = 0.75 * LLAMA.num_parameters / 4
    # 4 bytes of a gradient go, 2 of a parameter come; the CPU reads 4 + 12 and writes 12 + 2.
    expected = moved * 6 / 48e9 + moved * 30 / 61e9
    assert offload_seconds(LLAMA, layout, H100) == pytest.approx([expected])
    scenario = {
        share: wlb_tools.Scenario(
            model=LLAMA,
            layout=dataclasses.replace(layout, offload_optimizer=share, fsdp="zero2", recompute="full"),
            hardware=H100,
            context=4096,
        )
        for share in (0.0, 0.75)
    }
    assert scenario[0.75].step_end - scenario[0.0].step_end == pytest.approx(expected)
    assert not offload_seconds(LLAMA, wlb_tools.ParallelLayout(dp=4), H100).any()


# Recomputing a part.


def test_some_layers_are_recomputed() -> None:
    """Three of the eight layers of each stage keep their input alone, and run forward once more."""
    layout = wlb_tools.ParallelLayout(pp=4, recompute="full", recompute_layers=3)
    whole = activation_bytes(LLAMA, dataclasses.replace(layout, recompute="none", recompute_layers=None))
    memory = wlb_tools.memory_per_rank(LLAMA, layout, 1000)
    assert memory.activations.tolist() == pytest.approx(1000 * in_flight(layout) * (3 * 2 * 4096 + 5 * whole))
    plain, some, all_ = (
        seconds(each).seconds[0]
        for each in (
            wlb_tools.ParallelLayout(pp=4),
            layout,
            dataclasses.replace(layout, recompute_layers=None),
        )
    )
    forward = 4096 * LINEAR / H100.flops_per_second + 0.001
    assert some - plain == pytest.approx(np.broadcast_to([0, 3 * forward, 0], (4, 3)))
    assert all_ - plain == pytest.approx(np.broadcast_to([0, 8 * forward, 0], (4, 3)))
    many = dataclasses.replace(layout, recompute_layers=100)
    assert seconds(many).seconds.tolist() == [all_.tolist()]


def test_attention_alone_is_recomputed() -> None:
    """It gathers keys again and takes its forward again, and saves four bytes for each head."""
    layout = wlb_tools.ParallelLayout(cp=2, recompute="attention")
    plain, again = seconds(wlb_tools.ParallelLayout(cp=2)), seconds(layout)
    gathered = plain.exposed_cp[0, 0, 0]
    assert gathered > 0
    assert (again.seconds - plain.seconds)[0, 0] == pytest.approx([0, 32 * 0.001 + gathered, 0])
    assert (again.exposed_cp - plain.exposed_cp)[0, 0] == pytest.approx([0, gathered, 0])
    assert activation_bytes(LLAMA, wlb_tools.ParallelLayout()) - activation_bytes(LLAMA, layout) == 4 * 32


def test_costs_count_what_is_repeated() -> None:
    def cost(**options: Any) -> wlb.CostModel:
        layout = wlb_tools.ParallelLayout(tp=8, pp=4, **options)
        return wlb_tools.Scenario(model=LLAMA, layout=layout, hardware=H100, context=4096).flops(
            attention_efficiency=0.5
        )

    plain, full = cost(), cost(recompute="full")
    some, attention = cost(recompute="full", recompute_layers=2), cost(recompute="attention")
    for of in ("attention_cost", "linear_cost"):
        once, twice, part = (float(getattr(each, of)([1000])[0]) for each in (plain, full, some))
        assert part == pytest.approx(once + (twice - once) * 2 / 8)
    assert attention.linear_cost([1000]) == pytest.approx(plain.linear_cost([1000]))
    assert attention.attention_cost([1000]) == pytest.approx(full.attention_cost([1000]))
    lengths = np.array([1000, 4000])
    scenario = wlb_tools.Scenario(
        model=LLAMA,
        layout=wlb_tools.ParallelLayout(tp=8, pp=4, recompute="attention", recompute_layers=4),
        hardware=H100,
        context=4096,
    )
    forward, backward = (
        scenario.attention.segment_seconds(lengths, lengths, passes=passes).sum() for passes in ("forward", "backward")
    )
    assert scenario.attention_seconds(lengths) == pytest.approx(48 * forward + 32 * backward)


# HSDP.


def test_replicas_that_share_state_out_inside() -> None:
    """Sixteen ranks as two groups of eight, a node each."""
    layout = wlb_tools.ParallelLayout(dp=16, fsdp="zero3", dp_replicate=2)
    memory = wlb_tools.memory_per_rank(LLAMA, layout, 0)
    assert memory.parameters.tolist() == [2 * LLAMA.num_parameters / 8]
    assert memory.gradients.tolist() == [4 * LLAMA.num_parameters / 8]
    assert memory.optimizer.tolist() == [12 * LLAMA.num_parameters / 8]
    shard = Communicator(size=8, nodes=1, hardware=H100)
    copies = Communicator(size=2, nodes=2, hardware=H100)
    once = wlb_tools.ParallelLayout(dp=16, fsdp="zero2", dp_replicate=2)
    parameters = LLAMA.num_parameters
    expected = shard.reduce_scatter(4 * parameters) + copies.all_reduce(4 * parameters / 8)
    expected += shard.all_gather(2 * parameters)
    assert wlb_tools.data_parallel_seconds(LLAMA, once, H100) == pytest.approx([expected])


# LoRA.


def test_adapters() -> None:
    """PEFT says 39,976,960 trainable parameters of Llama 2 7B with rank 16 on all seven matrices."""
    layer = next(iter(LLAMA.kinds))
    adapters = adapter_parameters(layer, 4096, 16)
    assert 32 * adapters == 39_976_960
    layout = wlb_tools.ParallelLayout(dp=4, fsdp="zero2", lora_rank=16)
    memory = wlb_tools.memory_per_rank(LLAMA, layout, 0)
    trained = 39_976_960
    assert memory.parameters.tolist() == [2 * (LLAMA.num_parameters + trained)]
    assert memory.gradients.tolist() == [4 * trained / 4]
    assert memory.optimizer.tolist() == [12 * trained / 4]
    group = Communicator.along("dp_cp", layout, H100)
    expected = group.reduce_scatter(4 * trained) + group.all_gather(2 * trained)
    assert wlb_tools.data_parallel_seconds(LLAMA, layout, H100) == pytest.approx([expected])

    plain, found = seconds(wlb_tools.ParallelLayout()).seconds[0, 0], seconds(layout).seconds[0, 0]
    rate = H100.flops_per_second / 4096
    beside = 32 * 2 * adapters / rate
    frozen = (32 * LINEAR + 2 * EMBEDDING) / rate
    assert found - plain == pytest.approx([beside, beside, beside - frozen])
    zero3 = wlb_tools.ParallelLayout(dp=4, fsdp="zero3", lora_rank=16)
    gathered = wlb_tools.memory_per_rank(LLAMA, zero3, 0).gathered_parameters
    assert gathered.tolist() == [max(LAYER * 2 * 2 + 4 * adapters, EMBEDDING * 2 * 2)]
    scenario = wlb_tools.Scenario(
        model=LLAMA, layout=dataclasses.replace(zero3, recompute="full"), hardware=H100, context=4096
    )
    assert scenario.model_flops([100]) == pytest.approx(LLAMA.flops([100]) - 100 * LLAMA.token_flops)


def test_routers_and_routed_experts_have_no_adapters() -> None:
    layer = next(iter(MOE.kinds))
    assert adapter_parameters(layer, 1024, 8) == 8 * 4 * (1024 + 1024)
    memory = wlb_tools.memory_per_rank(MOE, wlb_tools.ParallelLayout(dp=2, ep=2, lora_rank=8), 0)
    assert memory.gradients.tolist() == [4 * 4 * 8 * 4 * 2048]


@pytest.mark.parametrize(
    ("layout", "model", "said"),
    [
        ({"tp": 2, "dp": 3, "ep": 4, "expert_tp": 1}, None, r"expert_tp x ep = 4 does not divide tp x dp x cp = 6"),
        ({"tp": 6, "ep": 2, "dp": 2, "expert_tp": 2}, None, "expert_tp x ep = 4 neither divides nor is a multiple of"),
        ({"tp": 2, "expert_tp": 1, "sequence_parallel": False}, None, "needs sequence_parallel"),
        ({"tp": 2, "expert_tp": 1}, LLAMA, "llama2-7b has no experts"),
        ({"dp": 2, "expert_tp": 0}, None, "expert_tp = 0: must be at least 1"),
        ({"dp": 8, "expert_tp": 8, "tp": 4, "ep": 1}, dataclasses.replace(MOE, ffn_hidden_size=500), "expert_tp = 8"),
        ({"fp8": "weights"}, None, "fp8 = 'weights': must be one of none, matmul, parameters"),
        ({"fp8": "matmul", "dtype": "float32"}, None, "goes with dtype = 'bfloat16'"),
        ({"recompute_layers": 2}, None, "recompute = 'none' computes no layer again"),
        ({"offload_optimizer": 1.5}, None, "offload_optimizer = 1.5: must be from 0 to 1"),
        ({"dp": 4, "dp_replicate": 3}, None, "dp_replicate = 3: does not divide dp x cp = 4 ranks"),
        ({"dp": 4, "dp_replicate": 2, "fsdp": "none"}, None, "shares nothing out"),
        ({"dp": 4, "ep": 4, "dp_replicate": 2}, None, "does not divide the 1 ranks that hold the same experts"),
        ({"lora_rank": -1}, None, "lora_rank = -1"),
    ],
)
def test_what_cannot_be_is_named(layout: dict[str, Any], model: wlb.ModelConfig | None, said: str) -> None:
    with pytest.raises(wlb.WlbError, match=said):
        wlb_tools.ParallelLayout(**layout).check(model=model)
