"""Does packing change which expert a token goes to? Not in a dropless mixture of experts; with a capacity, it does.

    python -m studies.moe

A router looks at one token's state, and that depends on the token's own document alone: attention does not cross
documents, positions restart. So whatever a token is packed with, a dropless mixture sends it to the same experts. A
mixture with a capacity drops the tokens that come last for a full expert, and who comes last depends on the packing.

The model is untrained: a random router chooses as arbitrarily as any.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
from cyclopts import Parameter, run
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

# The trainer of the examples: its model, documents and baselines.
sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

import wlb
from corpus import read_corpus
from llama import Attention, AttentionOptions, LlamaConfig, rotary
from wlb.torch.data import PackedBatch, collate


class Experts(nn.Module):
    """Top-k routing; every expert is one matrix, for its output only has to depend on the choice."""

    def __init__(self, hidden: int, num_experts: int, top_k: int, capacity_factor: float | None) -> None:
        super().__init__()
        self.top_k, self.capacity_factor = top_k, capacity_factor
        self.router = nn.Linear(hidden, num_experts, bias=False)
        self.experts = nn.Parameter(torch.randn(num_experts, hidden, hidden) * hidden**-0.5)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Gives the new states and the experts of each token: int64 [tokens, top_k], -1 where it was dropped."""
        weights, chosen = self.router(x).softmax(-1).topk(self.top_k)
        kept = self.kept(chosen)
        out = torch.zeros_like(x)
        for expert, matrix in enumerate(self.experts):
            token, slot = torch.nonzero((chosen == expert) & kept, as_tuple=True)
            out.index_add_(0, token, weights[token, slot, None] * (x[token] @ matrix))
        return out, chosen.where(kept, -1)

    def kept(self, chosen: Tensor) -> Tensor:
        """Which choices an expert has room for: the first to come, as many as `capacity_factor` times the mean."""
        if self.capacity_factor is None:
            return torch.ones_like(chosen, dtype=torch.bool)
        num_experts = self.router.out_features
        capacity = int(self.capacity_factor * chosen.numel() / num_experts)
        taken = nn.functional.one_hot(chosen.flatten(), num_experts).cumsum(0)
        place = taken.gather(1, chosen.flatten()[:, None]).view_as(chosen)
        return place <= capacity


class Mixture(nn.Module):
    """A decoder whose feed-forward networks are mixtures of experts."""

    def __init__(self, config: LlamaConfig, *, num_experts: int, top_k: int, capacity_factor: float | None) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        self.attention = nn.ModuleList(Attention(config, AttentionOptions()) for _ in range(config.num_layers))
        self.experts = nn.ModuleList(
            Experts(config.hidden_size, num_experts, top_k, capacity_factor) for _ in range(config.num_layers)
        )

    @torch.no_grad()
    def routes(self, batch: PackedBatch) -> Tensor:
        """int64 [tokens, layers, top_k]: where each token went."""
        norm = nn.RMSNorm(self.config.hidden_size, elementwise_affine=False)
        rope = rotary(batch.position_ids, self.config)
        x = self.embedding(batch.tokens)
        chosen = []
        for attention, experts in zip(self.attention, self.experts, strict=True):
            x = x + attention(norm(x), rope, batch.shard)
            out, routes = experts(norm(x))
            x = x + out
            chosen.append(routes)
        return torch.stack(chosen, dim=1)


def routes_by_document(model: Mixture, documents: list[np.ndarray], micro_batches: list[list[int]]) -> list[Tensor]:
    """Where the tokens of each document go, when they are packed like this."""
    result: list[Tensor] = [torch.empty(0)] * len(documents)
    for numbers in micro_batches:
        batch = collate([documents[number] for number in numbers])
        parts = model.routes(batch).split(batch.shard.lengths.tolist())
        for number, part in zip(numbers, parts, strict=True):
            result[number] = part
    return result


def main(
    documents: Annotated[int, Parameter(help="Documents, the first of Python's library.")] = 24,
    longest: Annotated[int, Parameter(help="Tokens of a document at most.")] = 2000,
    seed: Annotated[int, Parameter(help="Of the weights.")] = 0,
) -> None:
    """Shows that packing changes no token's expert in a dropless mixture, and does in one with a capacity."""
    torch.manual_seed(seed)
    corpus = read_corpus(None)
    texts = [corpus[number][:longest] for number in range(min(documents, len(corpus)))]
    lengths = [len(text) for text in texts]
    config = LlamaConfig(hidden_size=64, ffn_hidden_size=64, num_layers=2, vocab_size=corpus.vocab_size)
    cost = wlb.CostModel.from_flops(**config.shape())
    alone = [[number] for number in range(len(texts))]
    packings = {
        "in order of arrival, 4 micro-batches": [part.tolist() for part in np.array_split(np.arange(len(texts)), 4)],
        "wlb, 4 micro-batches": [
            batch.document_ids.tolist()
            for batch in wlb.pack(lengths, num_micro_batches=4, max_tokens=sum(lengths), cost_model=cost)
        ],
        "wlb, 2 micro-batches": [
            batch.document_ids.tolist()
            for batch in wlb.pack(lengths, num_micro_batches=2, max_tokens=sum(lengths), cost_model=cost)
        ],
    }
    table = Table("packing", "dropless", "capacity 1.25", title="Tokens with another expert than in a document alone")
    changed: dict[str, list[str]] = {name: [] for name in packings}
    for capacity_factor in (None, 1.25):
        torch.manual_seed(seed)
        model = Mixture(config, num_experts=8, top_k=2, capacity_factor=capacity_factor)
        reference = torch.cat(routes_by_document(model, texts, alone))
        for name, micro_batches in packings.items():
            routes = torch.cat(routes_by_document(model, texts, micro_batches))
            share = (routes != reference).flatten(1).any(1).sum().item()
            changed[name].append(f"{share:,} of {len(routes):,}")
    for name, cells in changed.items():
        table.add_row(name, *cells)
    Console().print(table)


if __name__ == "__main__":
    run(main)
