"""A small Llama (RMSNorm, RoPE, grouped-query attention, SwiGLU) over packed documents: `[tokens, hidden]`.

Packing changes three things in a model. Positions come with the micro-batch, because each document begins at 0.
Attention takes the shard, which says where documents begin and which tokens this rank has. And there is no batch
dimension: a micro-batch is one run of tokens, as long as its documents are.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import wlb
import wlb.torch as wt


@dataclass(frozen=True)
class LlamaConfig:
    """Shape of the model, in the words of `wlb.CostModel.from_flops`.

    Args:
        hidden_size: hidden size.
        ffn_hidden_size: hidden size of the feed-forward network.
        num_layers: layers.
        num_heads: query heads.
        num_kv_heads: key and value heads.
        vocab_size: different tokens.
        rope_theta: base of the rotary embedding.
        norm_eps: added to the variance in norms.
        tie_word_embeddings: whether the head is the embedding: one weight, of which a pipeline's first and last stage
            have a copy each.
    """

    hidden_size: int = 128
    ffn_hidden_size: int = 352
    num_layers: int = 4
    num_heads: int = 8
    num_kv_heads: int = 4
    vocab_size: int = 257
    rope_theta: float = 500_000.0
    norm_eps: float = 1e-5
    tie_word_embeddings: bool = False

    @property
    def head_dim(self) -> int:
        """Size of a head of queries, keys and values."""
        return self.hidden_size // self.num_heads

    def shape(self) -> dict[str, int]:
        """Arguments of `wlb.CostModel.from_flops`."""
        names = ("hidden_size", "ffn_hidden_size", "num_layers", "num_heads", "num_kv_heads", "vocab_size")
        return {name: getattr(self, name) for name in names}


def rotary(position_ids: Tensor, config: LlamaConfig) -> tuple[Tensor, Tensor]:
    """Cosine and sine, float32 [tokens, 1, head_dim / 2], of positions inside the document."""
    exponents = torch.arange(0, config.head_dim, 2, device=position_ids.device, dtype=torch.float32) / config.head_dim
    angles = position_ids.float()[:, None] / config.rope_theta**exponents
    return angles.cos()[:, None], angles.sin()[:, None]


def rotate(x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    """Rotates the halves of each head: `x` is [tokens, heads, head_dim]."""
    cos, sin = rope
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


class Attention(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.wq = nn.Linear(config.hidden_size, config.num_heads * config.head_dim, bias=False)
        self.wk = nn.Linear(config.hidden_size, config.num_kv_heads * config.head_dim, bias=False)
        self.wv = nn.Linear(config.hidden_size, config.num_kv_heads * config.head_dim, bias=False)
        self.wo = nn.Linear(config.num_heads * config.head_dim, config.hidden_size, bias=False)

    def forward(
        self, x: Tensor, rope: tuple[Tensor, Tensor], shard: wlb.Shard, group: dist.ProcessGroup | None = None
    ) -> Tensor:
        q, k, v = (w(x).unflatten(-1, (-1, self.head_dim)) for w in (self.wq, self.wk, self.wv))
        attended = wt.context_parallel_attention(rotate(q, rope), rotate(k, rope), v, shard, group=group)
        return self.wo(attended.flatten(1))


class FeedForward(nn.Module):
    def __init__(self, hidden_size: int, ffn_hidden_size: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(hidden_size, ffn_hidden_size, bias=False)
        self.w2 = nn.Linear(ffn_hidden_size, hidden_size, bias=False)
        self.w3 = nn.Linear(hidden_size, ffn_hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.attention = Attention(config)
        self.ffn_norm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.ffn = FeedForward(config.hidden_size, config.ffn_hidden_size)

    def forward(
        self, x: Tensor, rope: tuple[Tensor, Tensor], shard: wlb.Shard, group: dist.ProcessGroup | None
    ) -> Tensor:
        x = x + self.attention(self.attention_norm(x), rope, shard, group)
        return x + self.ffn(self.ffn_norm(x))


class LlamaStage(nn.Module):
    """Some consecutive layers. The first stage embeds, the last one gives logits; stage 0 of 1 is the whole model.

    Parameters have the names that they have in the whole model, so a checkpoint fits any number of stages.
    """

    def __init__(self, config: LlamaConfig, *, stage: int = 0, num_stages: int = 1) -> None:
        super().__init__()
        self.config = config
        self.is_first, self.is_last = stage == 0, stage == num_stages - 1
        first, end = (config.num_layers * s // num_stages for s in (stage, stage + 1))
        if self.is_first:
            self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleDict({str(layer): Block(config) for layer in range(first, end)})
        if self.is_last:
            self.norm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
            self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings and self.is_first and self.is_last:
            self.head.weight = self.embedding.weight

    @property
    def tied_weight(self) -> nn.Parameter | None:
        """This stage's copy of the weight that is embedding and head, for `wlb.torch.TiedWeights`."""
        if not self.config.tie_word_embeddings:
            return None
        return self.embedding.weight if self.is_first else self.head.weight if self.is_last else None

    def forward(
        self, x: Tensor, *, position_ids: Tensor, shard: wlb.Shard, group: dist.ProcessGroup | None = None
    ) -> Tensor:
        """One micro-batch on one context-parallel rank.

        Args:
            x: int64[tokens] on the first stage, else float[tokens, hidden].
            position_ids: int64[tokens], inside the documents.
            shard: how the micro-batch is divided over context-parallel ranks.
            group: the context-parallel ranks that hold it; None for one alone.

        Returns:
            Float[tokens, hidden], or on the last stage logits [tokens, vocabulary].
        """
        rope = rotary(position_ids, self.config)
        if self.is_first:
            x = self.embedding(x)
        for block in self.layers.values():
            x = block(x, rope, shard, group)
        return self.head(self.norm(x)) if self.is_last else x

    @torch.no_grad()
    def initialize(self, seed: int) -> None:
        """Sets weights that depend on their names and the seed alone: however the model is split, they are the same."""
        for name, parameter in self.named_parameters():
            if name.endswith("norm.weight"):
                parameter.fill_(1.0)
                continue
            generator = torch.Generator().manual_seed(seed * 2**32 + zlib.crc32(name.encode()))
            std = self.config.hidden_size**-0.5
            if name.removesuffix(".weight").endswith(("wo", "w2")):
                std /= (2 * self.config.num_layers) ** 0.5
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)
