"""Shards in torch's own context-parallel FlexAttention, over real process groups; forward, all it has on CPU."""

from typing import Any

import numpy as np
import pytest
import torch
import torch._dynamo  # FlexAttention imports it: once here, instead of in each process
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental._attention import (
    _context_parallel_shard,
    _ContextParallel,
    _HeadTailLoadBalancer,
    context_parallel_unshard,
)
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import wlb
from tests.torch import processes
from wlb.integrations.torch_cp import ShardLoadBalancer, document_mask, padded_lengths

LENGTHS = [1, 300, 2, 61]  # 148 tokens of padding follow
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 8


class Flex(torch.nn.Module):
    def forward(self, query: Tensor, key: Tensor, value: Tensor, block_mask: Any) -> Any:
        return flex_attention(query, key, value, block_mask=block_mask, enable_gqa=True)


def dense(query: Tensor, key: Tensor, value: Tensor, lengths: list[int], causal: bool) -> Tensor:
    """Document by document, with all its scores."""
    outputs = []
    for q, k, v in zip(*(tensor.split(lengths, dim=2) for tensor in (query, key, value)), strict=True):
        outputs.append(torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True))
    return torch.cat(outputs, dim=2)


def qkv(tokens: int) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(1, heads, tokens, HEAD_DIM) for heads in (HEADS, KV_HEADS, KV_HEADS)]


def attend(rank: int, cp_size: int, strategy: str, causal: bool) -> dict[str, Any]:
    torch.compiler.set_stance("force_eager")  # a mask of these sizes is made faster than it is compiled
    mesh = init_device_mesh("cpu", (cp_size,))
    lengths = padded_lengths(LENGTHS, cp_size=cp_size)
    options = {"hybrid_threshold": 200} if strategy == "hybrid" else {}
    shard = wlb.shard(lengths, cp_size=cp_size, strategy=strategy, causal=causal, **options)
    balancer = ShardLoadBalancer(shard, mesh)
    tokens = shard.num_tokens
    mask = create_block_mask(document_mask(shard, device="cpu"), 1, 1, tokens, tokens, device="cpu")
    query, key, value = qkv(tokens)
    positions = torch.arange(tokens)[None]
    buffers = [query, key, value, positions, mask]
    *mine, my_positions, my_mask = _context_parallel_shard(mesh, buffers, [2, 2, 2, 1, 2], load_balancer=balancer)

    flex = Flex()
    _ContextParallel(seq_dim=2, attention_type=_ContextParallel.AttentionType.FLEX)._apply(flex, mesh)
    with torch.no_grad():
        output = flex(*mine, my_mask)
    output, restored = context_parallel_unshard(mesh, [output, my_positions], [2, 1], load_balancer=balancer)
    expected = dense(query.double(), key.double(), value.double(), shard.lengths.tolist(), causal)
    return {
        "error": ((output - expected).abs().max() / expected.abs().max()).item(),
        "positions": my_positions[0].numpy(),
        "restored": restored.equal(positions),
    }


@pytest.mark.parametrize(
    ("cp_size", "strategy", "causal"),
    [(2, "per_document", True), (4, "per_document", True), (2, "per_document", False), (2, "hybrid", True)],
)
def test_forward_equals_the_dense_reference(cp_size: int, strategy: str, causal: bool) -> None:
    results = processes.run(cp_size, attend, cp_size, strategy, causal)
    shard = wlb.shard(
        padded_lengths(LENGTHS, cp_size=cp_size),
        cp_size=cp_size,
        strategy=strategy,
        causal=causal,
        **({"hybrid_threshold": 200} if strategy == "hybrid" else {}),
    )
    for rank, result in enumerate(results):
        assert result["error"] < 1e-6
        assert result["restored"]
        np.testing.assert_array_equal(result["positions"], shard.rank(rank).token_indices)


def work_of_both(rank: int) -> list[tuple[int, int, int]]:
    """Scores that this rank computes by our balancer, and by torch's."""
    torch.compiler.set_stance("force_eager")
    mesh = init_device_mesh("cpu", (2,))
    shard = wlb.shard([3000, 1096], cp_size=2)
    tokens = shard.num_tokens
    mask = create_block_mask(document_mask(shard, device="cpu"), 1, 1, tokens, tokens, device="cpu")
    documents = torch.repeat_interleave(torch.arange(len(shard.lengths)), torch.from_numpy(shard.lengths))
    work = []
    for balancer in (ShardLoadBalancer(shard, mesh), _HeadTailLoadBalancer(tokens, 2, "cpu")):
        index = torch.arange(tokens)
        mine, my_mask = _context_parallel_shard(mesh, [index, mask], [0, 2], load_balancer=balancer)
        same = documents[mine][:, None] == documents[None]
        pairs = int((same & (mine[:, None] >= index[None])).sum())
        assert isinstance(my_mask.full_kv_num_blocks, Tensor)
        work.append((pairs, int(my_mask.kv_num_blocks.sum() + my_mask.full_kv_num_blocks.sum())))
    return work


def test_more_even_than_torch() -> None:
    ours, theirs = np.array(processes.run(2, work_of_both)).swapaxes(0, 1)
    shard = wlb.shard([3000, 1096], cp_size=2)
    np.testing.assert_array_equal(ours[:, 0], shard.pairs_per_rank)
    assert ours[0, 0] == ours[1, 0]  # 2 * cp_size divides every length
    assert theirs[:, 0].max() > 1.3 * theirs[:, 0].mean()
    assert ours[:, 1].max() < theirs[:, 1].max()  # whole blocks are what FlexAttention computes


def refuse(rank: int) -> list[Any]:
    mesh = init_device_mesh("cpu", (2,))
    unequal = wlb.shard([5, 6], cp_size=2)
    other = wlb.shard([8], cp_size=4)
    messages = []
    for shard in (unequal, other):
        with pytest.raises(wlb.WlbError) as refused:
            ShardLoadBalancer(shard, mesh)
        messages.append((refused.value.argument, refused.value.index, refused.value.value))
    with pytest.raises(wlb.WlbError, match="alone"):
        ShardLoadBalancer(other, init_device_mesh("cpu", (2, 1)))
    return messages


def test_refuses_what_torch_would_cut_elsewhere() -> None:
    tokens = wlb.shard([5, 6], cp_size=2).tokens_per_rank
    assert sorted(tokens) == [5, 6]
    for messages in processes.run(2, refuse):
        assert messages == [("shard", 1, int(tokens[1])), ("shard", None, 4)]


def test_padding_fills_up_to_whole_blocks_and_no_more() -> None:
    assert padded_lengths(LENGTHS, cp_size=2).tolist() == [*LENGTHS, 148]
    assert padded_lengths([100, 156], cp_size=2).tolist() == [100, 156]
    assert padded_lengths([3], cp_size=2, block_size=2).tolist() == [3, 1]
    for arguments in ({"cp_size": 0}, {"cp_size": 2, "block_size": 0}, {"cp_size": 2.5}):
        with pytest.raises(wlb.WlbError):
            padded_lengths([1], **arguments)
    assert padded_lengths([], cp_size=2).tolist() == []
    for lengths, index in (([1.7, 2.2], None), ([-5, 3], 0), ([[1, 2]], None), ([[1], [1, 2]], None), (["1"], None)):
        with pytest.raises(wlb.WlbError) as raised:
            padded_lengths(lengths, cp_size=2)
        assert (raised.value.argument, raised.value.index) == ("lengths", index)
