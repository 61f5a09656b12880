"""`PackedSeqParams` and slices against Megatron-Core itself, as far as it runs without a GPU."""

import dataclasses
import inspect
from typing import Any

import numpy as np
import processes
import pytest
import torch
import torch.distributed as dist
from megatron.core import utils
from megatron.core.models.common.embeddings.rope_utils import apply_rotary_pos_emb
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import get_batch_on_this_cp_rank
from torch import Tensor

import wlb
from wlb.integrations import megatron

LENGTHS = np.array([1, 300, 129, 2, 8, 61])
COST = wlb.CostModel(attention=1.0, linear=100.0)


def planned(cp_size: int) -> wlb.Shard:
    multiple = megatron.required_multiple(cp_size=cp_size)
    return wlb.shard(megatron.padded_lengths(LENGTHS, pad_multiple=multiple), cp_size=cp_size, strategy="per_document")


def test_max_tokens_holds_after_padding_and_no_token_is_lost() -> None:
    rng = np.random.default_rng(0)
    multiple = megatron.required_multiple(cp_size=4, tp_size=2)
    assert multiple == 16
    packer = wlb.Packer(
        num_micro_batches=4,
        max_tokens=4096,
        cost_model=COST,
        outlier_thresholds=(1024,),
        max_document_tokens=1024,
        oversize="split",
    )
    lengths = rng.integers(1, 1500, 8 * 15)
    batches = rng.permutation(len(lengths)).reshape(8, 15)
    plans = [packer.push(megatron.padded_lengths(lengths[ids], pad_multiple=multiple), ids=ids) for ids in batches]
    assert any(
        not set(mine.document_ids) <= set(ids) for plan, ids in zip(plans, batches, strict=True) for mine in plan
    )
    seen = np.zeros(len(lengths), np.int64)
    for micro_batch in (micro_batch for plan in [*plans, *packer.flush()] for micro_batch in plan):
        shard = wlb.shard(micro_batch.lengths, cp_size=4, strategy="per_document")
        real = megatron.real_lengths(micro_batch, lengths[micro_batch.document_ids], pad_multiple=multiple)
        np.add.at(seen, micro_batch.document_ids, real)
        batch = {"tokens": megatron.pad(torch.ones(int(real.sum())), shard, lengths=real, fill=0)[None]}
        slices = [megatron.slice_for_rank(batch, shard, cp_rank=rank)["tokens"] for rank in range(4)]
        assert sum(int(part.sum()) for part in slices) == real.sum()
        params = megatron.packed_seq_params(shard, lengths=real)
        assert params.cu_seqlens_q[-1] == real.sum()
        assert params.cu_seqlens_q_padded[-1] == micro_batch.tokens <= 4096
    np.testing.assert_array_equal(seen, lengths)


@pytest.mark.skipif(
    not hasattr(utils, "get_thd_batch_on_this_cp_rank"), reason="this megatron-core has no such builder"
)
def test_fields_equal_megatrons_own() -> None:
    shard = planned(1)
    ours = megatron.packed_seq_params(shard)
    cu_seqlens = torch.tensor([0, *np.cumsum(LENGTHS)], dtype=torch.int32)
    batch = {"tokens": torch.arange(int(LENGTHS.sum()))[None]}
    longest = torch.tensor([LENGTHS.max()])
    _, theirs = utils.get_thd_batch_on_this_cp_rank(batch, cu_seqlens, cu_seqlens, longest, cp_size=1, cp_rank=0)
    for field in dataclasses.fields(PackedSeqParams):
        mine, expected = getattr(ours, field.name), getattr(theirs, field.name)
        if isinstance(expected, Tensor):
            assert mine.dtype == expected.dtype
            assert mine.equal(expected)
        else:
            assert type(mine) is type(expected)
            assert mine == expected
    assert ours.cu_seqlens_q_padded is ours.cu_seqlens_q  # no padding: told by identity


def test_padding_is_told_apart() -> None:
    shard = planned(4)
    params = megatron.packed_seq_params(shard, lengths=LENGTHS, local_cp_size=4)
    assert params.cu_seqlens_q.diff().tolist() == LENGTHS.tolist()
    assert params.cu_seqlens_kv_padded.diff().tolist() == [8, 304, 136, 8, 8, 64]
    assert (params.max_seqlen_q, params.max_seqlen_kv, params.local_cp_size) == (304, 304, 4)
    tokens = torch.arange(1, int(LENGTHS.sum()) + 1)
    padded = megatron.pad(tokens, shard, lengths=LENGTHS, fill=0)
    for documents in (params.cu_seqlens_q_padded[:-1] + params.cu_seqlens_q.diff() - 1).tolist():
        assert padded[documents] > 0
    assert padded[megatron.padded_positions(shard, lengths=LENGTHS)].equal(tokens)
    assert int((padded > 0).sum()) == len(tokens)
    assert padded.split(shard.lengths.tolist())[1][:300].equal(tokens[1:301])


def on_rank(rank: int) -> dict[str, Any]:
    """What Megatron-Core takes from each document, and its rotary embedding of this rank's tokens."""
    group = dist.group.WORLD
    assert group is not None
    shard = planned(group.size())
    tokens = torch.arange(shard.num_tokens)[None]
    ours = megatron.slice_for_rank({"tokens": tokens, "attention_mask": None}, shard, cp_rank=rank)
    known = inspect.signature(get_batch_on_this_cp_rank).parameters
    others = {"is_hybrid_cp": False} if "is_hybrid_cp" in known else {}  # later versions want it
    theirs = [
        get_batch_on_this_cp_rank({"tokens": document}, cp_group=group, **others)["tokens"]
        for document in tokens.split(shard.lengths.tolist(), dim=1)
    ]

    config = TransformerConfig(num_layers=1, hidden_size=16, num_attention_heads=2, apply_rope_fusion=False)
    params = megatron.packed_seq_params(shard, lengths=LENGTHS)
    rotary = RotaryEmbedding(8, rotary_percent=1.0, use_cpu_initialization=True, cp_group=group)
    table = rotary.get_freqs_non_repeated(params.max_seqlen_q).repeat(1, 2)[:, None, None]  # its forward wants a GPU
    torch.manual_seed(0)
    query = torch.randn(shard.num_tokens, 2, 8)
    mine = query[ours["tokens"][0]]
    rotated = apply_rotary_pos_emb(mine, table, config=config, cu_seqlens=params.cu_seqlens_q_padded, cp_group=group)
    positions = torch.from_numpy(shard.rank(rank).position_ids)
    expected = apply_rotary_pos_emb(mine[:, None], table[positions], config=config, cp_group=group)[:, 0]
    return {
        "sliced": ours["tokens"].equal(torch.cat(theirs, dim=1)),
        "none": ours["attention_mask"] is None,
        "rotary": (rotated - expected).abs().max().item(),
        "moved": (rotated - mine).abs().max().item(),
    }


@pytest.mark.parametrize("cp_size", [2, 4])
def test_ranks_hold_what_megatron_takes(cp_size: int) -> None:
    for result in processes.run(cp_size, on_rank):
        assert result["sliced"]
        assert result["none"]
        assert result["rotary"] == 0.0
        assert result["moved"] > 0.1


@pytest.mark.parametrize(
    ("call", "argument", "index"),
    [
        (lambda: megatron.required_multiple(cp_size=0), "cp_size", None),
        (lambda: megatron.padded_lengths([1], pad_multiple=0), "pad_multiple", None),
        (lambda: megatron.packed_seq_params(wlb.shard([8, 9], cp_size=2, strategy="per_document")), "shard", 1),
        (lambda: megatron.packed_seq_params(wlb.shard([8, 8], cp_size=2, strategy="per_sequence")), "shard", None),
        (lambda: megatron.packed_seq_params(planned(2), lengths=[1]), "lengths", None),
        (
            lambda: megatron.packed_seq_params(wlb.shard([8, 8], cp_size=2, strategy="per_document"), lengths=[8, 9]),
            "lengths",
            1,
        ),
        (
            lambda: megatron.packed_seq_params(wlb.shard([8, 8], cp_size=2, strategy="per_document"), lengths=[0, 8]),
            "lengths",
            0,
        ),
        (lambda: megatron.packed_seq_params(planned(2), no_such_field=1), "no_such_field", None),
        (
            lambda: megatron.pad(
                torch.zeros(3), wlb.shard([8], cp_size=2, strategy="per_document"), lengths=[7], fill=0
            ),
            "values",
            None,
        ),
        (
            lambda: megatron.slice_for_rank(
                {"x": torch.zeros(8)}, wlb.shard([8], cp_size=2, strategy="per_document"), cp_rank=0
            ),
            "batch",
            None,
        ),
        (lambda: megatron.real_lengths(micro_batch([16, 8]), [13], pad_multiple=8), "document_lengths", None),
        (lambda: megatron.real_lengths(micro_batch([16, 8]), [8, 8], pad_multiple=8), "document_lengths", 0),
        (lambda: megatron.real_lengths(micro_batch([16, 8]), [13, 0], pad_multiple=8), "document_lengths", 1),
    ],
)
def test_bad_input_is_named(call: Any, argument: str, index: int | None) -> None:
    with pytest.raises(wlb.WlbError) as refused:
        call()
    assert (refused.value.argument, refused.value.index) == (argument, index)


def micro_batch(lengths: list[int]) -> wlb.MicroBatch:
    return wlb.pack(lengths, num_micro_batches=1, max_tokens=64, cost_model=COST)[0]
