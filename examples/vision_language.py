"""A tiny vision-language model on one CPU: documents with images of unequal size, packed by two columns of costs.

    python examples/vision_language.py            # prints a line for each step
    python examples/vision_language.py --steps 3

The encoder runs on all images of a micro-batch, every patch attending to all of its image. A merger makes one token of
four patches, and the language model reads image and text under a causal mask, each document by itself. Where the
encoders of all ranks must be done before the language model begins, a step waits for the slowest of both in turn: so
each document brings two costs. Beside them, the same documents packed by the sum of the two.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

import wlb

WIDTH, HEADS, PATCH, VOCABULARY, MERGED = 32, 4, 12, 64, 4


@dataclass(frozen=True)
class Document:
    """An image, which may have no patches, and the text behind it."""

    patches: Tensor  # float[p, PATCH]
    text: Tensor  # int[t]

    @property
    def length(self) -> int:
        """Tokens that the language model reads."""
        return len(self.patches) // MERGED + len(self.text)


class Block(nn.Module):
    """Attention inside each part of a packed sequence, and a feed-forward block."""

    def __init__(self, *, causal: bool) -> None:
        super().__init__()
        self.causal = causal
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)])
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.ffn = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor, lengths: list[int]) -> Tensor:
        """`x` is float[sum(lengths), WIDTH]."""
        parts = self.qkv(self.norms[0](x)).split(lengths)
        attended = []
        for part in parts:
            q, k, v = part.view(-1, 3, HEADS, WIDTH // HEADS).permute(1, 2, 0, 3)
            mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
            attended.append(mixed.transpose(0, 1).reshape(-1, WIDTH))
        x = x + self.out(torch.cat([x[:0], *attended]))  # there may be no images at all
        return x + self.ffn(self.norms[1](x))


class VisionLanguage(nn.Module):
    """Encoder, merger, language model; one block each."""

    def __init__(self) -> None:
        super().__init__()
        self.patch, self.encoder = nn.Linear(PATCH, WIDTH), Block(causal=False)
        self.merger = nn.Linear(MERGED * WIDTH, WIDTH)
        self.words, self.language = nn.Embedding(VOCABULARY, WIDTH), Block(causal=True)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, documents: list[Document]) -> Tensor:
        """Sum over the text of the loss of each next token; 0 without documents."""
        if not documents:
            return 0.0 * self.head.weight.sum()
        sizes = [len(document.patches) for document in documents]
        patches = self.encoder(self.patch(torch.cat([d.patches for d in documents])), [size for size in sizes if size])
        merged = self.merger(patches.view(-1, MERGED * WIDTH)).split([size // MERGED for size in sizes])
        texts = [self.words(document.text) for document in documents]
        read = torch.cat([part for pair in zip(merged, texts, strict=True) for part in pair])
        lengths = [document.length for document in documents]
        parts = self.head(self.language(read, lengths)).split(lengths)
        losses = [
            functional.cross_entropy(part[-len(document.text) : -1], document.text[1:], reduction="sum")
            for part, document in zip(parts, documents, strict=True)
        ]
        return torch.stack(losses).sum()


def documents(count: int, seed: int) -> list[Document]:
    """Two in five have an image; sizes are log-uniform."""
    rng = np.random.default_rng(seed)

    def size(least: int, most: int) -> int:
        return int(np.exp(rng.uniform(np.log(least), np.log(most))))

    def document() -> Document:
        patches = MERGED * size(4, 64) if rng.random() < 0.4 else 0
        image = torch.from_numpy(rng.normal(size=(patches, PATCH)).astype(np.float32))
        return Document(image, torch.from_numpy(rng.integers(0, VOCABULARY, size(8, 128))))

    return [document() for _ in range(count)]


def costs(batch: list[Document]) -> NDArray[np.float64]:
    """FLOPs of each document in the encoder and in the language model. float64[n, 2]."""
    shape = {"hidden_size": WIDTH, "ffn_hidden_size": 4 * WIDTH, "num_layers": 1, "num_heads": HEADS}
    encoder = wlb.CostModel.from_flops(**shape, vocab_size=PATCH, gated_ffn=False, causal=False)
    language = wlb.CostModel.from_flops(**shape, vocab_size=VOCABULARY, gated_ffn=False)
    patches = np.array([len(document.patches) for document in batch])
    lengths = np.array([document.length for document in batch])
    images = np.where(patches > 0, encoder.cost(np.maximum(patches, 1)), 0.0)
    return np.stack([images, language.cost(lengths)], axis=1)


def plan(batch: list[Document], micro_batches: int) -> tuple[wlb.Packing, wlb.Packing]:
    """The step by two columns, and by their sum; both scored in two columns."""
    lengths = np.array([document.length for document in batch])
    of_documents = costs(batch)
    most = int(1.25 * lengths.sum() / micro_batches) + int(lengths.max())
    packing = wlb.pack(lengths, costs=of_documents, num_micro_batches=micro_batches, max_tokens=most, method="refined")
    by_sum = wlb.pack(
        lengths, costs=of_documents.sum(axis=1), num_micro_batches=micro_batches, max_tokens=most, method="refined"
    )
    scored = wlb.Packing.from_assignment(
        lengths, by_sum.assignment, costs=of_documents, num_micro_batches=micro_batches, max_tokens=most
    )
    return packing, scored


def train_step(model: VisionLanguage, batch: list[Document], packing: wlb.Packing) -> float:
    """Gradients of the mean loss of a token, micro-batch by micro-batch. Gives that loss."""
    tokens = sum(len(document.text) - 1 for document in batch)
    total = 0.0
    for micro_batch in packing:
        loss = model([batch[document] for document in micro_batch.document_ids.tolist()]) / tokens
        loss.backward()
        total += float(loss.detach())
    return total


def main() -> None:
    """Trains for some steps."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--documents", type=int, default=256, help="of a step")
    parser.add_argument("--micro-batches", type=int, default=8)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    model = VisionLanguage()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(arguments.steps):
        batch = documents(arguments.documents, seed=step)
        packing, by_sum = plan(batch, arguments.micro_batches)
        loss = train_step(model, batch, packing)
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}: loss {loss:.3f}, imbalance {packing.imbalance:.4f}, by the sum {by_sum.imbalance:.4f}")


if __name__ == "__main__":
    main()
