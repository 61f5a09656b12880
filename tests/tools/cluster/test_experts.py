"""Expert parallelism on a cluster: by hand-computed numbers, and beside sums over every rank."""

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
from wlb_tools.cluster.memory import RankMemory, trained_per_rank

# 64 experts of 3 x 1024 x 512, and 8 of them for a token.
SIZES: dict[str, Any] = {"hidden_size": 1024, "num_layers": 4, "num_heads": 16, "vocab_size": 1000}
MOE = wlb.ModelConfig(ffn_hidden_size=512, num_experts=64, experts_per_token=8, **SIZES)
DENSE = wlb.ModelConfig(ffn_hidden_size=4096, **SIZES)
H100 = wlb_tools.Hardware.preset("h100")
EXPERT = 3 * 1024 * 512

layouts = st.builds(
    lambda dp, cp, pp, tp, exponent, **options: wlb_tools.ParallelLayout(
        dp=dp, cp=cp, pp=pp, tp=tp, ep=min(2**exponent, dp * cp), **options
    ),
    dp=st.sampled_from([1, 2, 8]),
    cp=st.sampled_from([1, 2, 4]),
    pp=st.sampled_from([1, 2, 4]),
    tp=st.sampled_from([1, 2, 8]),
    exponent=st.integers(0, 5),
    fsdp=st.sampled_from(["none", "zero1", "zero2", "zero3"]),
)


def all_bytes(memory: RankMemory) -> np.ndarray:
    return np.array([memory.parameters, memory.gradients, memory.optimizer])


@given(layouts)
def test_ranks_hold_every_expert(layout: wlb_tools.ParallelLayout) -> None:
    """Summed over the tp and ep ranks of all stages there is every expert once; of the rest ep changes nothing."""
    rest, experts = trained_per_rank(MOE, layout)
    assert experts.sum() * layout.tp * layout.ep == pytest.approx(4 * 64 * EXPERT, rel=1e-12)
    whole = dataclasses.replace(layout, ep=1)
    assert rest == pytest.approx(trained_per_rank(MOE, whole)[0], rel=1e-12)


def test_memory_by_hand() -> None:
    """Eight dp x cp ranks, ep 4: a quarter of the experts, whose optimizer two ranks share out."""
    layout = wlb_tools.ParallelLayout(dp=4, cp=2, ep=4, fsdp="zero1")
    found = wlb_tools.memory_per_rank(MOE, layout, 0)
    rest = MOE.num_parameters - 4 * 64 * EXPERT
    experts = 4 * 16 * EXPERT
    assert found.parameters.tolist() == [2 * (rest + experts)]
    assert found.gradients.tolist() == [4 * (rest + experts)]
    assert found.optimizer.tolist() == [12 * (rest / 8 + experts / 2)]
    shared = wlb_tools.memory_per_rank(MOE, dataclasses.replace(layout, fsdp="zero3"), 0)
    assert shared.parameters.tolist() == [2 * (rest / 8 + experts / 2)]
    # Two layers' parameters and one's gradients, gathered whole; but every expert is where it is, if no other has it.
    layer = float(found.parameters[0] / 2 - 2 * MOE.vocab_size * MOE.hidden_size - MOE.hidden_size) / 4
    assert shared.gathered_parameters.tolist() == pytest.approx([layer * (2 * 2 + 4)])
    lonely = dataclasses.replace(layout, ep=8, fsdp="zero3")
    layer -= 16 * EXPERT
    assert wlb_tools.memory_per_rank(MOE, lonely, 0).gathered_parameters.tolist() == [layer * (2 * 2 + 4)]
    # Rows to experts and back: 8 rows of 1,024 numbers of 2 bytes, sent and received.
    alone = dataclasses.replace(layout, ep=1)
    more = wlb_tools.memory_per_rank(MOE, layout, 2).workspace - wlb_tools.memory_per_rank(MOE, alone, 2).workspace
    assert more.tolist() == [2 * 8 * 1024 * 2]


@given(layouts)
def test_fully_sharded_states_take_as_much_however_experts_are_divided(layout: wlb_tools.ParallelLayout) -> None:
    """What ZeRO shares out ends up on dp x cp ranks evenly, with ep or without it; what it does not, ep makes less."""
    with_ep, without = (
        all_bytes(wlb_tools.memory_per_rank(MOE, dataclasses.replace(layout, ep=ep), 0)) for ep in (layout.ep, 1)
    )
    level = ("none", "zero1", "zero2", "zero3").index(layout.fsdp)
    for row, shared_from in enumerate((3, 2, 1)):
        if level >= shared_from:
            assert with_ep[row] == pytest.approx(without[row], rel=1e-12)
        else:
            assert (with_ep[row] <= without[row]).all()
            assert (with_ep[row] < without[row]).any() or layout.ep == 1


def test_an_all_to_all_by_hand() -> None:
    """16 ranks on two nodes: of 1,600 bytes a rank keeps 100, sends 700 by NVLink and 800 by its network card."""
    link, card, launch = H100.intra_node, H100.inter_node, H100.launch_latency
    two = Communicator(size=16, nodes=2, hardware=H100)
    assert two.all_to_all(1600) == pytest.approx(launch + card.latency + 800 / card.bandwidth)
    slow = dataclasses.replace(H100, intra_node=dataclasses.replace(link, bandwidth=1.0))
    found = Communicator(size=16, nodes=2, hardware=slow).all_to_all(1600)
    assert found == pytest.approx(launch + card.latency + 700)
    one = Communicator(size=8, nodes=1, hardware=H100)
    assert one.all_to_all([800, 0]) == pytest.approx([launch + link.latency + 700 / link.bandwidth, 0])
    assert Communicator(size=1, nodes=1, hardware=H100).all_to_all(800) == 0


def seconds(layout: wlb_tools.ParallelLayout, model: wlb.ModelConfig = MOE, **options: Any) -> Any:
    options = {"tokens": [4096], "attention_forward": [0.001], "attention_backward": [0.002]} | options
    return wlb_tools.stage_seconds(**options, model=model, layout=layout, hardware=H100)


def test_stages_by_hand() -> None:
    """Ep 8 in a node of 8: every token's 8 rows of 2,048 bytes go there and come back, forward and backward."""
    layout = wlb_tools.ParallelLayout(dp=8, ep=8)
    alone, found = seconds(wlb_tools.ParallelLayout(dp=8)), seconds(layout)
    each_way = H100.launch_latency + H100.intra_node.latency + 7 / 8 * 4096 * 8 * 2048 / H100.intra_node.bandwidth
    assert found.exposed_ep[0, 0] == pytest.approx([4 * 2 * each_way, 4 * 2 * each_way, 0])
    assert found.seconds == pytest.approx(alone.seconds + found.exposed_ep)
    assert not alone.exposed_ep.any()
    hidden = seconds(layout, ep_overlap=0.75)
    assert hidden.exposed_ep == pytest.approx(found.exposed_ep / 4)
    again = seconds(dataclasses.replace(layout, recompute="full"))
    assert again.exposed_ep[0, 0] == pytest.approx([8 * each_way, 16 * each_way, 0])

    # Other ranks have 1,000 tokens more on average, and the fullest twice as many: their visits come here.
    uneven = seconds(layout, visiting_tokens=[5096], fullest_tokens=[8192])
    visits = 4 * 1000 * 8 * 2 * EXPERT / H100.flops_per_second
    compute = uneven.seconds - uneven.exposed_ep - (alone.seconds - alone.exposed_ep)
    assert compute[0, 0] == pytest.approx([visits] * 3)
    twice = each_way + 7 / 8 * 4096 * 8 * 2048 / H100.intra_node.bandwidth
    assert uneven.exposed_ep[0, 0] == pytest.approx([8 * twice, 8 * twice, 0])

    # The busiest rank has a half more than its share, of visits and of rows that arrive.
    skewed = seconds(layout, expert_imbalance=1.5)
    compute = skewed.seconds - skewed.exposed_ep - alone.seconds
    assert compute[0, 0] == pytest.approx([4 * 2048 * 8 * 2 * EXPERT / H100.flops_per_second] * 3)
    assert seconds(wlb_tools.ParallelLayout(dp=8), expert_imbalance=1.5).seconds.tolist() == alone.seconds.tolist()


def test_tensor_parallel_ranks_send_their_share_and_gather_what_arrived() -> None:
    layout = wlb_tools.ParallelLayout(dp=2, tp=4, ep=2)
    found = seconds(layout)
    tp = Communicator.along("tp", layout, H100)
    hidden = 4096 * 1024 * 2
    # Attention's block moves a row of each token, the experts' block eight.
    rows = 1 + 8
    assert found.exposed_tp[0, 0, 0] == pytest.approx(4 * rows * (tp.all_gather(hidden) + tp.reduce_scatter(hidden)))
    sent = Communicator.along("ep", layout, H100).all_to_all(8 * hidden / 4)
    assert found.exposed_ep[0, 0, 0] == pytest.approx(4 * 2 * sent)
    whole = seconds(dataclasses.replace(layout, sequence_parallel=False))
    sent = Communicator.along("ep", layout, H100).all_to_all(8 * hidden)
    assert whole.exposed_ep[0, 0, 0] == pytest.approx(4 * 2 * sent)


def test_gradients_of_experts_are_summed_among_those_that_hold_them() -> None:
    layout = wlb_tools.ParallelLayout(dp=16, tp=4, ep=4)
    (rest, experts), group = trained_per_rank(MOE, layout), Communicator.along("edp", layout, H100)
    assert (group.size, group.nodes) == (4, 4)  # every 16th of 64 ranks, of which 8 are in a node
    both = Communicator.along("dp_cp", layout, H100)
    expected = both.reduce_scatter(4 * rest) + both.all_gather(2 * rest)
    expected += group.reduce_scatter(4 * experts) + group.all_gather(2 * experts)
    assert wlb_tools.data_parallel_seconds(MOE, layout, H100) == pytest.approx(expected)
    assert (
        wlb_tools.data_parallel_seconds(MOE, layout, H100) < wlb_tools.data_parallel_seconds(MOE, whole(layout), H100)
    ).all()


def whole(layout: wlb_tools.ParallelLayout) -> wlb_tools.ParallelLayout:
    return dataclasses.replace(layout, ep=1)


@given(layouts, st.sampled_from([4, 8]))
def test_nodes_of_ep_groups(layout: wlb_tools.ParallelLayout, gpus_per_node: int) -> None:
    """Beside a list of all ranks, tp fastest."""
    for axis in ("ep", "edp"):
        nodes = []
        for tp in range(layout.tp):
            for stage in range(layout.pp):
                both = [(stage * layout.dp * layout.cp + r) * layout.tp + tp for r in range(layout.dp * layout.cp)]
                ep = layout.ep
                groups = (
                    [both[i : i + ep] for i in range(0, len(both), ep)]
                    if axis == "ep"
                    else [both[i::ep] for i in range(ep)]
                )
                nodes += [len({rank // gpus_per_node for rank in group}) for group in groups]
                assert {len(group) for group in groups} == {layout.size(axis)}  # type: ignore[arg-type]
        assert layout.nodes(axis, gpus_per_node=gpus_per_node) == max(nodes)  # type: ignore[arg-type]


def test_a_model_that_does_not_fit_may_divide_its_experts() -> None:
    big = wlb.ModelConfig(ffn_hidden_size=2048, num_experts=64, experts_per_token=4, **SIZES | {"num_layers": 24})
    layout = wlb_tools.ParallelLayout(dp=8, fsdp="none")
    with pytest.raises(wlb.WlbError, match=r"or with ep=4"):
        wlb_tools.max_tokens(big, layout, H100, at_least=8192)
    assert wlb_tools.max_tokens(big, dataclasses.replace(layout, ep=4), H100, at_least=8192) >= 8192


@pytest.mark.parametrize(
    ("layout", "model", "said"),
    [
        ({"ep": 0}, None, "ep = 0"),
        ({"dp": 3, "cp": 2, "ep": 4}, None, "ep = 4: does not divide dp x cp = 6 ranks"),
        ({"dp": 2, "ep": 2}, DENSE, "ep = 2: does not divide num_experts = 1"),
        ({"dp": 12, "ep": 6}, MOE, "ep = 6: does not divide num_experts = 64"),
    ],
)
def test_what_cannot_be_is_named(layout: dict[str, Any], model: wlb.ModelConfig | None, said: str) -> None:
    with pytest.raises(wlb.WlbError, match=said):
        wlb_tools.ParallelLayout(**layout).check(model=model)
    with pytest.raises(wlb.WlbError, match=r"expert_imbalance = 0.5: the most over the mean is at least 1"):
        seconds(wlb_tools.ParallelLayout(), expert_imbalance=0.5)
