"""Bytes of a GPU: limits, monotony, and `max_tokens` against the bytes themselves."""

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

import wlb
from wlb.hardware import GIB
from wlb.memory import activation_bytes, in_flight, parameters_per_rank

LLAMA = wlb.ModelConfig.preset("llama2-7b")
SMALL = wlb.ModelConfig(
    hidden_size=1024, ffn_hidden_size=2816, num_layers=16, num_heads=16, num_kv_heads=4, vocab_size=32000
)
H100 = wlb.Hardware.preset("h100")

layouts = st.builds(
    wlb.ParallelLayout,
    dp=st.sampled_from([1, 2]),
    pp=st.sampled_from([2, 4]),
    cp=st.sampled_from([1, 2, 4]),
    tp=st.sampled_from([1, 2, 8]),
    virtual_stages=st.sampled_from([1, 2]),
    fsdp=st.sampled_from(["none", "zero1", "zero2", "zero3"]),
    recompute=st.sampled_from(["none", "selective", "full"]),
    sequence_parallel=st.booleans(),
    fused_ffn=st.booleans(),
    fused_loss=st.booleans(),
)


def test_the_formula_of_the_paper() -> None:
    """34 bytes a hidden unit for GPT, of which 2 are dropout masks; statistics of norms and softmax are left out."""
    gpt = wlb.ModelConfig(
        hidden_size=4096, ffn_hidden_size=4 * 4096, num_layers=1, num_heads=32, vocab_size=100, gated_ffn=False
    )
    kept = activation_bytes(gpt, wlb.ParallelLayout())
    assert kept - 8 - 4 * 32 == (34 - 2) * 4096


def test_one_gpu_holds_18_bytes_a_parameter() -> None:
    memory = wlb.memory_per_rank(LLAMA, wlb.ParallelLayout(), 0)
    held = memory.total - memory.reserved
    assert held.tolist() == [18 * LLAMA.num_parameters]


@given(layouts)
def test_ranks_share_out_all_parameters(layout: wlb.ParallelLayout) -> None:
    """Summed over tensor and pipeline ranks there is every parameter, and norms as often as there are ranks."""
    norms = (2 * SMALL.num_layers + 1) * SMALL.hidden_size
    copies = max(0, layout.tp - SMALL.num_kv_heads)
    copied = copies * 2 * SMALL.num_layers * SMALL.hidden_size * SMALL.head_dim
    total = parameters_per_rank(SMALL, layout).sum() * layout.tp
    assert total == pytest.approx(SMALL.num_parameters + (layout.tp - 1) * norms + copied, rel=1e-12)


@given(layouts, st.integers(0, 10**6))
def test_more_ranks_and_every_saving_need_no_more(layout: wlb.ParallelLayout, tokens: int) -> None:
    total = wlb.memory_per_rank(SMALL, layout, tokens).total
    savings: list[dict[str, Any]] = [
        {"recompute": "full"} if layout.recompute != "full" else {},
        {"fused_loss": True},
        {"fused_ffn": True},
        {"sequence_parallel": True},
        {"dp": 2 * layout.dp},
        {"fsdp": {"none": "zero1", "zero1": "zero2"}.get(layout.fsdp, layout.fsdp)},
    ]
    if layout.recompute == "full":
        savings.pop(0)  # already saves what can be saved
    for saving in savings:
        saved = wlb.memory_per_rank(SMALL, dataclasses.replace(layout, **saving), tokens)
        # Full recomputation holds one layer anew while it works on it.
        extra = saved.workspace if "recompute" in saving else 0
        assert (saved.total - extra <= total * (1 + 1e-12)).all(), saving


@given(layouts, st.integers(0, 2**20), st.integers(0, 2**20))
def test_linear_in_tokens_and_of_any_shape(layout: wlb.ParallelLayout, a: int, b: int) -> None:
    memory = wlb.memory_per_rank(SMALL, layout, np.array([[0, a], [b, a + b]]))
    assert memory.total.shape == (2, 2, layout.pp)
    assert memory.parameters.shape == (layout.pp,)
    growth = memory.total - memory.total[0, 0]
    assert growth[0, 1] + growth[1, 0] == pytest.approx(growth[1, 1], rel=1e-9, abs=1)


def test_in_flight() -> None:
    assert in_flight(wlb.ParallelLayout(pp=4)).tolist() == [4, 3, 2, 1]
    assert in_flight(wlb.ParallelLayout(pp=4), num_micro_batches=2).tolist() == [2, 2, 2, 1]
    # Korthikanti et al., section 4.2.3: interleaving multiplies the first stage by 1 + (p - 1) / (p v).
    interleaved = in_flight(wlb.ParallelLayout(pp=4, virtual_stages=2))
    assert interleaved[0] == 4 * (1 + 3 / 8)
    assert interleaved.tolist() == [5.5, 4.5, 3.5, 2.5]


@pytest.mark.parametrize("virtual_stages", [1, 2, 4])
@pytest.mark.parametrize("num_micro_batches", [4, 8, 20])
def test_in_flight_by_playing_the_schedule(virtual_stages: int, num_micro_batches: int) -> None:
    """Warm-up forwards, then one forward and one backward in turn: the most forwards without their backward."""
    p, v, m = 4, virtual_stages, num_micro_batches
    for rank, expected in enumerate(in_flight(wlb.ParallelLayout(pp=p, virtual_stages=v), num_micro_batches=m)):
        warm_up = min(p - rank - 1 if v == 1 else 2 * (p - rank - 1) + (v - 1) * p, m * v)
        steady = [1, -1] * (m * v - warm_up)
        held = np.cumsum([1] * warm_up + steady)
        assert held.max() / v == expected


@given(layouts, st.integers(2, 400))
def test_max_tokens_is_the_most_that_fit(layout: wlb.ParallelLayout, gibibytes: int) -> None:
    hardware = dataclasses.replace(H100, memory_bytes=gibibytes * GIB)
    fits = (wlb.memory_per_rank(SMALL, layout, layout.cp).total <= hardware.memory_bytes).all()
    assume(fits)
    most = wlb.max_tokens(SMALL, layout, hardware)
    for tokens, fit in ((most - layout.cp, True), (most + layout.cp, False)):
        assert (wlb.memory_per_rank(SMALL, layout, tokens).total <= hardware.memory_bytes).all() == fit


def test_what_does_not_fit_says_by_how_much_and_what_would() -> None:
    layout = wlb.ParallelLayout(tp=8, cp=4, pp=4, virtual_stages=2)
    model = wlb.ModelConfig.preset("wlb-llm-30b")
    with pytest.raises(wlb.WlbError) as caught:
        wlb.max_tokens(model, layout, H100, at_least=131072)
    needed = wlb.memory_per_rank(model, layout, 131072).total
    over = (needed.max() - H100.memory_bytes) / GIB
    message = str(caught.value)
    assert f"{over:.1f} GiB more than the 79.6 GiB of h100" in message
    assert "pipeline rank 0" in message
    # Each setting that it names does fit, alone; the same number of GPUs comes first.
    assert "it would fit with fsdp='zero2', or with recompute='selective', or with tp=16 (256 GPUs)" in message
    for change in ({"fsdp": "zero2"}, {"recompute": "selective"}, {"tp": 16}):
        changed = dataclasses.replace(layout, **change)  # type: ignore[arg-type]
        assert wlb.max_tokens(model, changed, H100, at_least=131072) >= 131072
    assert caught.value.argument == "layout"


def test_several_changes_where_one_does_not_do() -> None:
    layout = wlb.ParallelLayout(dp=8, fsdp="none")
    with pytest.raises(wlb.WlbError, match="it would fit with fsdp='zero1' and recompute='full', or with"):
        wlb.max_tokens(LLAMA, layout, H100, at_least=32768)
    nothing = dataclasses.replace(H100, memory_bytes=2**20)
    with pytest.raises(wlb.WlbError, match="nor would it on 8 times as many GPUs"):
        wlb.max_tokens(LLAMA, wlb.ParallelLayout(), nothing)


def test_bad_numbers_are_named() -> None:
    with pytest.raises(wlb.WlbError, match=r"tokens\[1\] = -5: must not be negative") as caught:
        wlb.memory_per_rank(LLAMA, wlb.ParallelLayout(), [1, -5])
    assert (caught.value.index, caught.value.value) == (1, -5)
    with pytest.raises(wlb.WlbError, match="reserved_bytes = -1"):
        wlb.memory_per_rank(LLAMA, wlb.ParallelLayout(), 1, reserved_bytes=-1)
    with pytest.raises(wlb.WlbError, match="tp = 3: does not divide"):
        wlb.max_tokens(LLAMA, wlb.ParallelLayout(tp=3), H100)
