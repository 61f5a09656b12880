"""Times of micro-batches on stages: what they add up to, and what each assumption changes."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import wlb
import wlb_tools
from wlb.models import Attention, CountedBlock, FeedForward, Layer, Matrix
from wlb_tools.cluster.collectives import Communicator
from wlb_tools.cluster.memory import trained_per_rank

LLAMA = wlb.ModelConfig.preset("llama2-7b")
H100 = wlb_tools.Hardware.preset("h100")


def times(
    layout: wlb_tools.ParallelLayout, tokens: Any = (1000,), attention: Any = None, **options: Any
) -> wlb_tools.StageSeconds:
    zero = np.zeros(len(tokens)) if attention is None else np.asarray(attention)
    return wlb_tools.stage_seconds(
        tokens,
        attention_forward=zero,
        attention_backward=2.5 * zero,
        model=LLAMA,
        layout=layout,
        hardware=H100,
        **options,
    )


@given(st.integers(1, 200_000))
def test_one_gpu_takes_what_the_cost_model_says(tokens: int) -> None:
    cost = LLAMA.cost_model(flops_per_second=H100.flops_per_second)
    attention = LLAMA.cost_model(flops_per_second=H100.flops_per_second, passes="forward").attention_cost([tokens])
    result = times(wlb_tools.ParallelLayout(), [tokens], attention / LLAMA.num_layers)
    assert result.seconds.shape == (1, 1, 3)
    assert result.seconds.sum() == pytest.approx(float(cost.cost([tokens])[0]), rel=1e-9)
    assert result.exposed_cp.sum() == result.exposed_tp.sum() == result.p2p.sum() == 0


def test_stages_split_the_model_and_the_last_has_the_head() -> None:
    whole = times(wlb_tools.ParallelLayout(), attention=[0.01]).seconds
    for layout in (wlb_tools.ParallelLayout(pp=4), wlb_tools.ParallelLayout(pp=4, virtual_stages=2)):
        split = times(layout, attention=[0.01]).seconds
        assert split.shape == (1, layout.num_stages, 3)
        assert split.sum(axis=1) == pytest.approx(whole.sum(axis=1))
        head = split[0, -1] - split[0, 0]
        assert head == pytest.approx([2 * 1000 * 4096 * 32000 / H100.flops_per_second] * 3)
    uneven = times(wlb_tools.ParallelLayout(pp=2, stage_layers=(32, 0)), attention=[0.01])
    assert uneven.seconds[0, 1] == pytest.approx(head)


def test_a_measured_linear_part_replaces_flops() -> None:
    """Measured at the rate assumed: the same. Slower: by that. The output projection as much slower as its layer."""
    tokens = np.array([1000, 40_000])
    layout = wlb_tools.ParallelLayout(pp=4, tp=8, cp=2, virtual_stages=2, recompute="full")
    by_flops = times(layout, tokens, [0.001, 0.1])
    per_token = 2 * (4 * 4096**2 + 3 * 4096 * 11008) / (8 * H100.flops_per_second)
    forward = tokens * per_token
    same = times(layout, tokens, [0.001, 0.1], linear_forward=forward, linear_backward=2 * forward)
    assert same.seconds == pytest.approx(by_flops.seconds)

    slower = times(layout, tokens, [0.001, 0.1], linear_forward=1.5 * forward, linear_backward=6 * forward)
    layers, head = 4, 2 * 4096 * 32000 / (8 * H100.flops_per_second) * tokens
    added = slower.seconds - by_flops.seconds
    expected = layers * np.stack([0.5 * forward, (0.5 + 2) * forward, 2 * forward], axis=-1)  # the forward again
    assert added[:, 0] == pytest.approx(expected)
    assert added[:, -1] == pytest.approx(expected + head[:, None] * [0.5, 2, 2])
    assert slower.exposed_cp.tolist() == by_flops.exposed_cp.tolist()


def test_the_linear_part_of_a_profile(tmp_path: Path) -> None:
    """Seconds of one layer on one rank, as `wlb profile` writes them."""
    attention = {"tile": 128, "median_seconds": [[1e-6, 2e-6], [None, 3e-6]]}
    profile = {
        "format": "wlb.profile",
        "version": 1,
        "gpu": "none",
        "kernel": "none",
        "causal": True,
        "num_heads": 32,
        "num_kv_heads": 32,
        "head_dim": 128,
        "query_lengths": [128, 256],
        "key_lengths": [128, 256],
        "forward": attention,
        "backward": attention,
        "linear": {
            "tokens": [1000, 2000],
            "forward": {"median_seconds": [0.5, 1.0]},
            "backward": {"median_seconds": [2.0, 4.0]},
        },
    }
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(profile))
    tokens = [1500, 4000]
    linear: dict[str, Any] = {
        f"linear_{passes}": wlb.CostModel.from_profile(path, passes=passes).linear_cost(tokens)
        for passes in ("forward", "backward")
    }
    result = times(wlb_tools.ParallelLayout(pp=4), tokens, **linear)
    assert result.seconds[:, 0] == pytest.approx(8 * np.array([[0.75, 1.5, 1.5], [2.0, 4.0, 4.0]]))


def test_attention_has_no_gradient_of_weights() -> None:
    without, with_attention = (times(wlb_tools.ParallelLayout(), attention=[a]).seconds[0, 0] for a in (0.0, 0.01))
    assert with_attention - without == pytest.approx([0.32, 0.8, 0.0])


def test_communication_is_exposed_unless_hidden() -> None:
    layout = wlb_tools.ParallelLayout(tp=8, cp=2, pp=4)
    tokens = np.array([1000, 65536])
    full = times(layout, tokens)
    compute = times(layout, tokens, cp_overlap=1.0, tp_overlap=1.0)
    assert full.seconds == pytest.approx(compute.seconds + full.exposed_cp + full.exposed_tp)
    assert not compute.exposed_cp.any()
    assert not compute.exposed_tp.any()
    half = times(layout, tokens, cp_overlap=0.5)
    assert half.exposed_cp == pytest.approx(full.exposed_cp / 2)

    # 8 layers a stage; keys and values of 4 heads of 128 in bf16, and so are their gradients.
    cp = Communicator.along("cp", layout, H100)
    keys = 2 * 2 * tokens * 4 * 128
    assert full.exposed_cp[:, 0, 0] == pytest.approx(8 * cp.all_gather(keys * 2))
    assert full.exposed_cp[:, 0, 1] == pytest.approx(8 * (cp.all_gather(keys * 2) + cp.all_to_all(keys * 2)))
    tp = Communicator.along("tp", layout, H100)
    hidden = tokens * 4096 * 2
    assert full.exposed_tp[:, 0, 0] == pytest.approx(8 * 2 * (tp.all_gather(hidden) + tp.reduce_scatter(hidden)))
    assert not full.exposed_tp[:, :, 2].any()
    assert full.p2p == pytest.approx(Communicator.along("pp", layout, H100).neighbour(hidden / 8))


def test_what_a_layout_changes() -> None:
    layout = wlb_tools.ParallelLayout(tp=4, cp=2, pp=2)
    plain = times(layout, attention=[0.001])
    for recompute, extra in (("selective", 0.0), ("full", 1.0)):
        again = times(dataclasses.replace(layout, recompute=recompute), attention=[0.001])  # type: ignore[arg-type]
        layers = plain.seconds.copy()
        layers[:, -1] -= plain.seconds[:, -1] - plain.seconds[:, 0]  # without the head
        assert again.seconds[..., 1] == pytest.approx(plain.seconds[..., 1] + extra * layers[..., 0])
        assert again.seconds[..., [0, 2]].tolist() == plain.seconds[..., [0, 2]].tolist()
    without = times(dataclasses.replace(layout, sequence_parallel=False), attention=[0.001])
    assert (without.p2p > plain.p2p).all()


def test_keys_that_are_not_gathered_take_nothing() -> None:
    layout = wlb_tools.ParallelLayout(pp=2, cp=4, recompute="full")
    everything, half, none = (
        times(layout, (1000, 20_000), [0.01, 0.2], keys_gathered=of) for of in (None, [500, 10_000], [0, 0])
    )
    assert not none.exposed_cp.any()
    assert everything.seconds - everything.exposed_cp == pytest.approx(none.seconds)
    assert half.computing == pytest.approx(everything.computing)
    whole = times(layout, (500, 10_000), [0.01, 0.2])  # of which all are
    assert half.exposed_cp == pytest.approx(whole.exposed_cp)
    with pytest.raises(wlb.WlbError, match="keys_gathered"):
        times(layout, keys_gathered=[1, 2])
    with pytest.raises(wlb.WlbError, match=r"keys_gathered\[0\] = 1001: a rank has 1000 tokens"):
        times(layout, keys_gathered=[1001])


def test_gradients_go_home_of_the_keys_that_were_seen() -> None:
    """A micro-batch of 1,000 tokens a rank, by all-to-all: a rank keeps a quarter of what it exchanges."""
    layout = wlb_tools.ParallelLayout(pp=2, cp=4)
    cp = Communicator.along("cp", layout, H100)
    width = 2 * LLAMA.num_kv_heads * LLAMA.head_dim
    found = [times(layout, keys_gathered=[500], keys_moved=of).exposed_cp[0, 0] for of in (None, [1500], [600], [0])]
    assert found[0].tolist() == found[1].tolist()
    for moved, exposed in zip((1500, 1500, 600, 0), found, strict=True):
        home = cp.all_to_all(2 * width * moved * 4 / 3)
        assert exposed[1] - exposed[0] == pytest.approx(16 * home)
    with pytest.raises(wlb.WlbError, match=r"keys_moved\[0\] = 1501: other ranks send 1500 keys"):
        times(layout, keys_gathered=[500], keys_moved=[1501])


def test_the_receiving_stage_waits_for_what_nothing_hides_of_a_transfer() -> None:
    layout = wlb_tools.ParallelLayout(pp=4, cp=2)
    hidden, partly = (times(layout, (1000, 20_000), [0.01, 0.2], p2p_overlap=share) for share in (1.0, 0.25))
    assert not hidden.exposed_pp.any()
    waits = np.zeros((2, 4, 3))
    waits[:, 1:, 0] = 0.75 * hidden.p2p[:, None]  # all but the first receive an activation,
    waits[:, :3, 1] = 0.75 * hidden.p2p[:, None]  # all but the last a gradient
    assert partly.exposed_pp == pytest.approx(waits)
    assert partly.p2p == pytest.approx(hidden.p2p / 4)
    assert partly.seconds == pytest.approx(hidden.seconds + waits)
    assert partly.computing == pytest.approx(hidden.computing)
    with pytest.raises(wlb.WlbError, match="p2p_overlap"):
        times(layout, p2p_overlap=1.5)


def test_data_parallel_seconds() -> None:
    layout = wlb_tools.ParallelLayout(dp=4, cp=2, tp=8)
    group = Communicator.along("dp_cp", layout, H100)
    parameters = sum(trained_per_rank(LLAMA, layout))
    sharded = wlb_tools.data_parallel_seconds(LLAMA, layout, H100)
    assert sharded == pytest.approx(group.reduce_scatter(4 * parameters) + group.all_gather(2 * parameters))
    whole = wlb_tools.data_parallel_seconds(LLAMA, dataclasses.replace(layout, fsdp="none"), H100)
    assert whole == pytest.approx(group.all_reduce(4 * parameters))
    assert wlb_tools.data_parallel_seconds(LLAMA, wlb_tools.ParallelLayout(pp=4), H100).tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"tokens": [1, -1]}, r"tokens\[1\] = -1"),
        ({"tokens": [[1, 2]]}, "tokens has shape"),
        ({"tokens": [[1], [1, 2]]}, "tokens must be numbers in rows of the same length"),
        ({"linear_forward": [[1], [1, 2]], "linear_backward": [1, 1]}, "linear_forward must be numbers in rows"),
        ({"attention_forward": [0.1]}, r"attention_forward has shape \(1,\): must be \(2,\)"),
        ({"attention_backward": [0.1, np.nan]}, r"attention_backward\[1\] = nan"),
        ({"attention_forward": ["a", "b"]}, "attention_forward must be numbers"),
        ({"linear_forward": [0.1, 0.1]}, "linear_backward is missing: both passes"),
        ({"linear_forward": [0.1, 0.1], "linear_backward": [0.1, -1]}, r"linear_backward\[1\] = -1"),
        ({"cp_overlap": 1.5}, "cp_overlap = 1.5: must be from 0 to 1"),
        ({"tp_overlap": -1}, "tp_overlap = -1"),
        ({"cp_overlap": "1"}, "cp_overlap = '1': must be from 0 to 1"),
        ({"layout": wlb_tools.ParallelLayout(tp=3)}, "tp = 3: does not divide"),
    ],
)
def test_bad_input_is_named(changes: dict[str, Any], said: str) -> None:
    arguments = {
        "tokens": [1, 2],
        "attention_forward": [0.1, 0.1],
        "attention_backward": [0.1, 0.1],
        "model": LLAMA,
        "layout": wlb_tools.ParallelLayout(),
        "hardware": H100,
    } | changes
    with pytest.raises(wlb.WlbError, match=said):
        wlb_tools.stage_seconds(arguments.pop("tokens"), **arguments)


def test_layers_that_differ_take_their_own_time() -> None:
    """Each kind on a stage of its own takes what a model of that kind alone takes there."""
    layout = wlb_tools.ParallelLayout(pp=3, cp=2, tp=2, recompute="full")
    attention = Attention(num_heads=4, num_kv_heads=2, head_dim=16)
    state = CountedBlock(weights=(Matrix(64, 164), Matrix(64, 64)), other_flops=2816, num_heads=4)
    narrow, wide = FeedForward(width=64), FeedForward(width=640)
    kinds = (Layer((attention, narrow)), Layer((state,), norms=1), Layer((attention, wide)))
    tokens = [1000, 70_000]

    def stages(layers: tuple[Layer, ...], seconds: Any) -> wlb_tools.StageSeconds:
        model = wlb.ModelConfig(hidden_size=64, vocab_size=100, layers=layers)
        return wlb_tools.stage_seconds(
            tokens,
            attention_forward=seconds,
            attention_backward=2 * np.asarray(seconds),
            model=model,
            layout=layout,
            hardware=H100,
        )

    seconds = np.array([[0.1, 0.0, 0.2], [0.3, 0.0, 0.5]])
    unlike = stages(kinds, seconds)
    for stage in (0, 1):  # the last has the output projection
        alone = stages((kinds[stage],) * 3, seconds[:, stage])
        for part in ("seconds", "exposed_cp", "exposed_tp"):
            assert getattr(unlike, part)[:, stage] == pytest.approx(getattr(alone, part)[:, stage])
    assert not unlike.exposed_cp[:, 1].any()
    # One block a layer exchanges once, two twice.
    assert unlike.exposed_tp[:, 1, 0] == pytest.approx(unlike.exposed_tp[:, 0, 0] / 2)
    with pytest.raises(wlb.WlbError, match=r"attention_forward has shape \(2, 2\): must be \(2, 3\)"):
        stages(kinds, seconds[:, :2])


def test_heads_of_multi_token_prediction_are_on_the_last_stage() -> None:
    layer = Layer((Attention(num_heads=4, num_kv_heads=2, head_dim=16), FeedForward(width=64)))
    plain = wlb.ModelConfig(hidden_size=64, vocab_size=100, layers=(layer,) * 4)
    more = dataclasses.replace(plain, prediction_layers=(layer,))
    made = [
        wlb_tools.stage_seconds(
            [1000],
            attention_forward=[0.0],
            attention_backward=[0.0],
            model=model,
            layout=wlb_tools.ParallelLayout(pp=2),
            hardware=H100,
        ).seconds
        for model in (plain, more)
    ]
    assert made[1][:, 0] == pytest.approx(made[0][:, 0])
    added = (made[1] - made[0])[0, 1, 0] * H100.flops_per_second
    assert added == pytest.approx(1000 * (more.token_flops - plain.token_flops))
    other = dataclasses.replace(plain, prediction_layers=(Layer((FeedForward(width=64),)),))
    with pytest.raises(wlb.WlbError, match=r"prediction_layers\[0\] is of a kind that no other layer has"):
        wlb_tools.stage_seconds(
            [1],
            attention_forward=[0],
            attention_backward=[0],
            model=other,
            layout=wlb_tools.ParallelLayout(),
            hardware=H100,
        )
