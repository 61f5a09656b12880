"""Bytes of a GPU: limits, monotony, and `max_tokens` against the bytes themselves."""

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

import wlb
import wlb_tools
from benches import attention as bench
from wlb._choices import Schedule
from wlb.models import Attention, CountedBlock, FeedForward, LatentAttention, Layer, Matrix
from wlb.torch.attention import keys
from wlb_tools.cluster.hardware import GIB
from wlb_tools.cluster.memory import (
    GATHERED,
    activation_bytes,
    exchanged_width,
    in_flight,
    ranks_of_stages,
    trained_per_rank,
)

LLAMA = wlb.ModelConfig.preset("llama2-7b")
SMALL = wlb.ModelConfig(
    hidden_size=1024, ffn_hidden_size=2816, num_layers=16, num_heads=16, num_kv_heads=4, vocab_size=32000
)
H100 = wlb_tools.Hardware.preset("h100")
HYBRID = (
    Layer((Attention(num_heads=4, num_kv_heads=2, head_dim=16, qk_norm="head"), FeedForward(width=96))),
    Layer(
        (
            CountedBlock(
                weights=(Matrix(64, 128), Matrix(64, 8), Matrix(32, 64)),
                other_parameters=400,
                other_flops=3840,
                channels=96,
                num_heads=4,
            ),
            FeedForward(width=32, num_experts=4, experts_per_token=2, shared_width=16),
        )
    ),
    Layer(
        (LatentAttention(num_heads=4, kv_rank=24, key_dim=16, rope_dim=8, value_dim=8), FeedForward(width=80)), norms=4
    ),
    Layer(
        (CountedBlock(weights=(Matrix(64, 164), Matrix(64, 64)), other_flops=2816, channels=96, num_heads=4),), norms=1
    ),
)
SCHEDULES: list[tuple[Schedule, int]] = [
    ("gpipe", 1),
    ("1f1b", 1),
    ("zb_h1", 1),
    ("zb_h2", 1),
    ("interleaved_1f1b", 2),
    ("interleaved_1f1b", 4),
    ("interleaved_zero_bubble", 2),
    ("zbv", 2),
]

layouts = st.builds(
    wlb_tools.ParallelLayout,
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
    kept = activation_bytes(gpt, wlb_tools.ParallelLayout())
    assert kept - 8 - 4 * 32 == (34 - 2) * 4096


def test_one_gpu_holds_18_bytes_a_parameter() -> None:
    memory = wlb_tools.memory_per_rank(LLAMA, wlb_tools.ParallelLayout(), 0)
    held = memory.total - memory.reserved
    assert held.tolist() == [18 * LLAMA.num_parameters]


@given(layouts)
def test_ranks_share_out_all_parameters(layout: wlb_tools.ParallelLayout) -> None:
    """Summed over tensor and pipeline ranks there is every parameter, and norms as often as there are ranks."""
    norms = (2 * SMALL.num_layers + 1) * SMALL.hidden_size
    copies = max(0, layout.tp - SMALL.num_kv_heads)
    copied = copies * 2 * SMALL.num_layers * SMALL.hidden_size * SMALL.head_dim
    total = np.sum(trained_per_rank(SMALL, layout)) * layout.tp
    assert total == pytest.approx(SMALL.num_parameters + (layout.tp - 1) * norms + copied, rel=1e-12)


@given(layouts, st.integers(0, 10**6))
def test_more_ranks_and_every_saving_need_no_more(layout: wlb_tools.ParallelLayout, tokens: int) -> None:
    total = wlb_tools.memory_per_rank(SMALL, layout, tokens).total
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
        saved = wlb_tools.memory_per_rank(SMALL, dataclasses.replace(layout, **saving), tokens)
        # Full recomputation holds one layer anew while it works on it.
        extra = saved.workspace if "recompute" in saving else 0
        assert (saved.total - extra <= total * (1 + 1e-12)).all(), saving


@given(layouts, st.integers(0, 2**20), st.integers(0, 2**20))
def test_linear_in_tokens_and_of_any_shape(layout: wlb_tools.ParallelLayout, a: int, b: int) -> None:
    memory = wlb_tools.memory_per_rank(SMALL, layout, np.array([[0, a], [b, a + b]]))
    assert memory.total.shape == (2, 2, layout.pp)
    assert memory.parameters.shape == (layout.pp,)
    growth = memory.total - memory.total[0, 0]
    parts = growth[0, 1] + growth[1, 0]
    if layout.cp == 1:
        assert parts == pytest.approx(growth[1, 1], rel=1e-9, abs=1)
    else:  # of many keys only some heads are gathered at a time
        assert (growth[1, 1] <= parts * (1 + 1e-9) + 1).all()


def test_gathered_keys_by_hand() -> None:
    """Llama's 8 key heads of 128: a token's keys and values have 4 KiB in bfloat16, a head's 512 bytes."""
    model = wlb.ModelConfig.preset("llama3-8b")
    layout = wlb_tools.ParallelLayout(cp=4)

    def gathered(tokens: int, layout: wlb_tools.ParallelLayout = layout) -> float:
        without = wlb_tools.memory_per_rank(model, dataclasses.replace(layout, cp=1), tokens // layout.cp).workspace
        return float((wlb_tools.memory_per_rank(model, layout, tokens).workspace - without)[0])

    assert gathered(32_768) == 4 * 32_768 * 4096  # all heads together: 128 MiB arrive
    assert gathered(131_072) == pytest.approx(6.5 * 2**28)  # two parts of 4 heads
    assert gathered(1 << 20) == pytest.approx(6.5 * 2**29)  # head by head, of 512 MiB each
    assert gathered(131_072, wlb_tools.ParallelLayout(cp=4, tp=8)) == 4 * 131_072 * 512  # one head a rank


@pytest.mark.parametrize(("cp", "kv_heads"), [(4, 32), (8, 8), (8, 4), (2, 8)])
def test_gathered_keys_take_what_attention_was_counted_to_hold(cp: int, kv_heads: int) -> None:
    """Beside the gradients of this rank's own queries, keys and values; every document cut for all ranks."""
    lengths = bench.context(1 << 17)
    shard = wlb.shard(lengths, cp_size=cp, strategy="per_document")
    layer = bench.Layer("all_gather", kv_heads=kv_heads)
    tokens = (1 << 17) // cp
    own = 2 * 128 * tokens * (layer.heads + 2 * kv_heads)
    counted = max(bench.counted(layer, shard, rank)["backward"]["peak"] for rank in (0, cp - 1)) - own
    attention = Attention(num_heads=32, num_kv_heads=kv_heads, head_dim=128)
    one = wlb.ModelConfig(hidden_size=4096, vocab_size=256, layers=(Layer((attention,)),))
    said = wlb_tools.memory_per_rank(one, wlb_tools.ParallelLayout(cp=cp), 1 << 17).workspace[0]
    said -= wlb_tools.memory_per_rank(one, wlb_tools.ParallelLayout(), tokens).workspace[0]
    assert 0.99 * counted <= said <= 1.3 * counted
    assert GATHERED == keys.GATHERED


def test_in_flight() -> None:
    assert in_flight(wlb_tools.ParallelLayout(pp=4)).tolist() == [4, 3, 2, 1]
    assert in_flight(wlb_tools.ParallelLayout(pp=4), num_micro_batches=2).tolist() == [2, 2, 2, 1]
    # Korthikanti et al., section 4.2.3: interleaving multiplies the first stage by 1 + (p - 1) / (p v).
    interleaved = in_flight(wlb_tools.ParallelLayout(pp=4, virtual_stages=2))
    assert interleaved[0] == 4 * (1 + 3 / 8)
    assert interleaved.tolist() == [5.5, 4.5, 3.5, 2.5]


@pytest.mark.parametrize("num_micro_batches", [*range(1, 9), 10, 12, 15, 20])
def test_in_flight_is_what_the_schedules_hold(num_micro_batches: int) -> None:
    """Played here op by op: the most forwards without their weight gradient; p that divides m, or not."""
    p, m = 4, num_micro_batches
    for schedule, v in SCHEDULES:
        layout = wlb_tools.ParallelLayout(pp=p, virtual_stages=v)
        options: dict[str, Any] = {"schedule": schedule, "num_stages": p, "num_virtual_stages": v}
        try:
            timeline = wlb.simulate_pipeline(np.ones(m), **options)
        except wlb.WlbError:
            assert m % max(1, m // p)
            with pytest.raises(wlb.WlbError, match="num_micro_batches"):
                in_flight(layout, schedule=schedule, num_micro_batches=m)
            continue
        signs = np.array([1, -1, 0, -1])[timeline.kinds]
        held = [np.cumsum(signs[timeline.ranks == rank]).max() / v for rank in range(p)]
        assert in_flight(layout, schedule=schedule, num_micro_batches=m).tolist() == held
        ranks = ranks_of_stages(layout, schedule=schedule)
        assert {(s, int(ranks[s])) for s in range(p * v)} == set(
            zip(timeline.stages.tolist(), timeline.ranks.tolist(), strict=True)
        )
        if schedule != "gpipe" and m % p == 0:
            assert (in_flight(layout, schedule=schedule) >= held).all()


def test_interleaved_rounds_that_p_does_not_divide_hold_more() -> None:
    layout = wlb_tools.ParallelLayout(pp=4, virtual_stages=2)
    peaks = {m: in_flight(layout, num_micro_batches=m).max() for m in (4, 6, 7, 8)}
    assert peaks == {4: 4, 6: 6, 7: 7, 8: 5.5}
    layout = wlb_tools.ParallelLayout(tp=8, cp=2, pp=4, virtual_stages=2)
    limits = [wlb_tools.max_tokens(LLAMA, layout, H100, num_micro_batches=m) for m in (8, 6, 7)]
    assert limits == sorted(limits, reverse=True)
    held = [7 * limits[2]] * 4  # on the first rank
    assert wlb_tools.memory_per_rank(LLAMA, layout, limits[2], held_tokens=held).total[0] <= H100.memory_bytes


def test_zbv_has_both_ends_of_the_model_on_one_rank() -> None:
    layout = wlb_tools.ParallelLayout(tp=8, cp=2, pp=4, virtual_stages=2, stage_layers=(1, 2, 3, 4, 5, 6, 7, 4))
    assert ranks_of_stages(layout, schedule="zbv").tolist() == [0, 1, 2, 3, 3, 2, 1, 0]
    parameters = sum(trained_per_rank(LLAMA, layout, schedule="zbv"))
    assert parameters[1] == parameters[2] == parameters[3]  # nine layers each
    embeddings = 2 * LLAMA.vocab_size * LLAMA.hidden_size / 8 + LLAMA.hidden_size
    assert parameters[0] == pytest.approx(parameters[1] * 5 / 9 + embeddings)
    assert parameters.sum() == pytest.approx(np.sum(trained_per_rank(LLAMA, layout)))
    memory = wlb_tools.memory_per_rank(LLAMA, layout, 1000, schedule="zbv", num_micro_batches=12)
    assert memory.logits[0] > 0
    assert not memory.logits[1:].any()

    tied = dataclasses.replace(LLAMA, tied_embeddings=True)
    one_copy = np.sum(trained_per_rank(tied, layout, schedule="zbv"))
    assert np.sum(trained_per_rank(tied, layout)) - one_copy == tied.vocab_size * tied.hidden_size / 8


def test_a_schedule_that_holds_less_fits_more() -> None:
    """Of equal stages, ZB-V holds as much as 1F1B on every rank; the limit is the most that fits, no less."""
    layout = wlb_tools.ParallelLayout(tp=8, cp=2, pp=4, virtual_stages=2)
    limits = {}
    for schedule in ("zbv", "interleaved_1f1b"):
        options: dict[str, Any] = {"schedule": schedule, "num_micro_batches": 12}
        most = limits[schedule] = wlb_tools.max_tokens(LLAMA, layout, H100, **options)
        for tokens, fit in ((most, True), (most + 2, False)):
            assert (wlb_tools.memory_per_rank(LLAMA, layout, tokens, **options).total <= H100.memory_bytes).all() == fit
    assert limits["zbv"] > 1.25 * limits["interleaved_1f1b"]
    options = {"schedule": "gpipe", "num_micro_batches": 64, "at_least": 65536}
    with pytest.raises(wlb.WlbError, match=r"it would fit with schedule='1f1b'"):
        wlb_tools.max_tokens(LLAMA, wlb_tools.ParallelLayout(tp=8, cp=2, pp=4), H100, **options)
    with pytest.raises(wlb.WlbError, match="num_micro_batches is needed: gpipe"):
        in_flight(wlb_tools.ParallelLayout(pp=4), schedule="gpipe")


@given(layouts, st.integers(2, 400))
def test_max_tokens_is_the_most_that_fit(layout: wlb_tools.ParallelLayout, gibibytes: int) -> None:
    hardware = dataclasses.replace(H100, memory_bytes=gibibytes * GIB)
    fits = (wlb_tools.memory_per_rank(SMALL, layout, layout.cp).total <= hardware.memory_bytes).all()
    assume(fits)
    most = wlb_tools.max_tokens(SMALL, layout, hardware)
    for tokens, fit in ((most - layout.cp, True), (most + layout.cp, False)):
        assert (wlb_tools.memory_per_rank(SMALL, layout, tokens).total <= hardware.memory_bytes).all() == fit


def test_what_does_not_fit_says_by_how_much_and_what_would() -> None:
    layout = wlb_tools.ParallelLayout(tp=8, cp=4, pp=4, virtual_stages=2)
    model = wlb.ModelConfig.preset("wlb-llm-30b")
    with pytest.raises(wlb.WlbError) as caught:
        wlb_tools.max_tokens(model, layout, H100, at_least=131072)
    needed = wlb_tools.memory_per_rank(model, layout, 131072).total
    over = (needed.max() - H100.memory_bytes) / GIB
    message = str(caught.value)
    assert f"{over:.1f} GiB more than the 79.6 GiB of h100" in message
    assert "pipeline rank 0" in message
    # Each setting that it names does fit, alone; the same number of GPUs comes first.
    assert "it would fit with fsdp='zero2', or with recompute='selective', or with tp=16 (256 GPUs)" in message
    for change in ({"fsdp": "zero2"}, {"recompute": "selective"}, {"tp": 16}):
        changed = dataclasses.replace(layout, **change)  # type: ignore[arg-type]
        assert wlb_tools.max_tokens(model, changed, H100, at_least=131072) >= 131072
    assert caught.value.argument == "layout"


def test_several_changes_where_one_does_not_do() -> None:
    layout = wlb_tools.ParallelLayout(dp=8, fsdp="none")
    with pytest.raises(wlb.WlbError, match="it would fit with fsdp='zero1' and recompute='full', or with"):
        wlb_tools.max_tokens(LLAMA, layout, H100, at_least=32768)
    little = dataclasses.replace(H100, memory_bytes=2**20)
    with pytest.raises(wlb.WlbError, match="nor would it on 8 times as many GPUs"):
        wlb_tools.max_tokens(LLAMA, wlb_tools.ParallelLayout(), little, reserved_bytes=0)


def test_reserving_all_of_a_gpu_is_not_the_layouts_fault() -> None:
    for reserved in (80 * GIB, H100.memory_bytes):
        with pytest.raises(wlb.WlbError, match=r"leaves nothing of the 79.6 GiB of h100") as caught:
            wlb_tools.max_tokens(LLAMA, wlb_tools.ParallelLayout(tp=8), H100, reserved_bytes=reserved)
        assert (caught.value.argument, caught.value.value) == ("reserved_bytes", reserved)


def test_bad_numbers_are_named() -> None:
    with pytest.raises(wlb.WlbError, match=r"tokens\[1\] = -5: must be finite and not negative") as caught:
        wlb_tools.memory_per_rank(LLAMA, wlb_tools.ParallelLayout(), [1, -5])
    assert (caught.value.index, caught.value.value) == (1, -5)
    with pytest.raises(wlb.WlbError, match="tokens must be numbers in rows of the same length"):
        wlb_tools.memory_per_rank(LLAMA, wlb_tools.ParallelLayout(), [[1], [1, 2]])  # type: ignore[list-item]
    with pytest.raises(wlb.WlbError, match="reserved_bytes = -1"):
        wlb_tools.memory_per_rank(LLAMA, wlb_tools.ParallelLayout(), 1, reserved_bytes=-1)
    with pytest.raises(wlb.WlbError, match="tp = 3: does not divide"):
        wlb_tools.max_tokens(LLAMA, wlb_tools.ParallelLayout(tp=3), H100)


def test_layers_one_by_one_take_what_sizes_say() -> None:
    one_by_one = wlb.ModelConfig(hidden_size=1024, vocab_size=32000, layers=SMALL.stack)
    for layout in (
        wlb_tools.ParallelLayout(),
        wlb_tools.ParallelLayout(pp=4, tp=8, cp=2, fsdp="zero3", recompute="full"),
    ):
        given, said = (wlb_tools.memory_per_rank(model, layout, 50_000) for model in (one_by_one, SMALL))
        for field in dataclasses.fields(given):
            assert getattr(given, field.name).tolist() == getattr(said, field.name).tolist()


def test_every_kind_of_layer_is_shared_out() -> None:
    """Summed over ranks there is every parameter; what tensor parallelism does not divide as often as there are."""
    hybrid = wlb.ModelConfig(hidden_size=64, vocab_size=256, layers=HYBRID, prediction_layers=HYBRID[-1:])
    for pp in (1, 2, 4):
        assert np.sum(trained_per_rank(hybrid, wlb_tools.ParallelLayout(pp=pp))) == hybrid.num_parameters
    blocks = [block for layer in (*HYBRID, HYBRID[-1]) for block in layer.blocks]
    whole = sum(block.vectors(64) for block in blocks)
    whole += sum(m.parameters(m.copies) for block in blocks for m in block.matrices(64) if not m.split)
    norms = (sum(layer.norms for layer in (*HYBRID, HYBRID[-1])) + 1 + 3) * 64
    split = np.sum(trained_per_rank(hybrid, wlb_tools.ParallelLayout(tp=2, pp=2))) * 2
    assert split == hybrid.num_parameters + whole + norms


def test_stages_keep_what_their_layers_keep() -> None:
    """Eight layers of four kinds on four ranks, two each; the workspace is of the layer that needs most."""
    model = wlb.ModelConfig(hidden_size=64, vocab_size=256, layers=tuple(layer for layer in HYBRID for _ in "ab"))
    layout = wlb_tools.ParallelLayout(pp=4, cp=2)
    kept = [2 * activation_bytes(model, layout, layer) for layer in HYBRID]
    assert len(set(kept)) == 4
    memory = wlb_tools.memory_per_rank(model, layout, 1000)
    assert memory.activations.tolist() == [500 * held * bytes_ for held, bytes_ in zip([4, 3, 2, 1], kept, strict=True)]
    # Keys and values of heads are gathered; of latent attention the narrow row; of states nothing grows with tokens.
    widths = [exchanged_width(layer, layout) for layer in HYBRID]
    assert widths == [2 * 2 * 16, 0, 24 + 8, 0]
    alone = [wlb.ModelConfig(hidden_size=64, vocab_size=256, layers=(layer,)) for layer in HYBRID]
    most = max(wlb_tools.memory_per_rank(one, wlb_tools.ParallelLayout(cp=2), 1000).workspace[0] for one in alone)
    assert memory.workspace.tolist() == [most] * 4


def test_layouts_that_a_block_cannot_have() -> None:
    model = wlb.ModelConfig(hidden_size=64, vocab_size=256, layers=HYBRID)
    with pytest.raises(wlb.WlbError, match="tp = 8: does not divide num_heads = 4"):
        wlb_tools.ParallelLayout(tp=8).check(model=model)
    heads = wlb.ModelConfig(hidden_size=64, vocab_size=256, layers=HYBRID[1:2])
    with pytest.raises(wlb.WlbError, match="tp = 8: does not divide num_heads = 4"):
        wlb_tools.ParallelLayout(tp=8).check(model=heads)
