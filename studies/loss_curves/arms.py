"""The ways of packing that are compared: each makes steps of the same documents in the same order of arrival.

For what is learnt only the documents of a step matter, and where they are cut: attention stays inside a document, and
the loss is a mean over the tokens of a step. Which micro-batch holds a document decides how level the work is.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

import wlb
from benches.common import CONTEXT, llama_7b
from wlb.torch.data import BalancedBatchSampler, Piece
from wlb_tools.simulation.methods import next_fit

MAX_MEAN_DELAY: Final = 0.6  # iterations: thresholds and price are tuned for it, as `wlb tune` does

Lengths = NDArray[np.int64]
Step = list[list[Piece]]  # micro-batches, each of parts of documents


@dataclass(frozen=True)
class Packs:
    """What all ways of packing have in common.

    Attributes:
        micro_batches: Of a global batch.
        context: Tokens; no document is longer.
    """

    micro_batches: int
    context: int

    @property
    def tokens_per_batch(self) -> int:
        """Tokens of a global batch."""
        return self.micro_batches * self.context

    @property
    def max_tokens(self) -> int:
        """Of a micro-batch of whole documents: half as much again as the context."""
        return self.context * 3 // 2

    @functools.cached_property
    def cost_model(self) -> wlb.CostModel:
        """Work of a 7B model at 128K, scaled to this context: in the small model attention is a rounding error."""
        large = llama_7b(0.55).terms
        scale = CONTEXT / self.context
        return wlb.CostModel(attention=large["pairs"] * scale**2, linear=large["tokens"] * scale)

    def tuning(self) -> dict[str, Any]:
        """Arguments of `wlb.tune`."""
        return {
            "num_micro_batches": self.micro_batches,
            "max_tokens": self.max_tokens,
            "cost_model": self.cost_model,
            "max_mean_delay": MAX_MEAN_DELAY,
            "max_document_tokens": self.context,
            "tokens_per_batch": self.tokens_per_batch,
        }

    def work(self, step: Step) -> NDArray[np.float64]:
        """float64 [micro_batches]: cost of each micro-batch of a step."""
        return np.array([self.cost_model.cost([piece.length for piece in batch]).sum() for batch in step if batch])


Arm = Callable[[Lengths, Packs], list[Step]]


def global_batches(lengths: Lengths, packs: Packs) -> Iterator[tuple[int, int]]:
    """First and end of the documents of each global batch, in order of arrival."""
    offsets = wlb.batch_offsets(lengths, tokens_per_batch=packs.tokens_per_batch).tolist()
    return itertools.pairwise(offsets)


def in_order(lengths: Lengths, packs: Packs, *, method: Any = "original", window: int = 1) -> list[Step]:
    """`wlb.pack`, `window` global batches at a time: the packing of Plain-4D and of Fixed-4D."""
    batches = list(global_batches(lengths, packs))
    steps: list[Step] = []
    for index in range(0, len(batches), window):
        some = batches[index : index + window]
        first, end = some[0][0], some[-1][1]
        packing = wlb.pack(
            lengths[first:end],
            num_micro_batches=packs.micro_batches,
            max_tokens=packs.context,
            cost_model=packs.cost_model,
            method=method,
            global_batches=len(some),
        )
        made = [pieces(batch, first) for batch in packing]
        steps += [made[start : start + packs.micro_batches] for start in range(0, len(made), packs.micro_batches)]
    return steps


def pieces(batch: wlb.MicroBatch, first: int) -> list[Piece]:
    """The parts of documents in a micro-batch, whose documents count from `first`."""
    rows = zip((batch.document_ids + first).tolist(), batch.starts.tolist(), batch.lengths.tolist(), strict=True)
    return [Piece(*row) for row in rows]


def streamed(
    lengths: Lengths, packs: Packs, *, tune: Callable[..., dict[str, Any]], min_step_tokens: int | None = None
) -> list[Step]:
    """`wlb.Packer` behind the sampler that trainers use; at the end it trains all that waits, in further steps."""
    packer = wlb.Packer(
        num_micro_batches=packs.micro_batches,
        max_tokens=packs.max_tokens,
        cost_model=packs.cost_model,
        max_document_tokens=packs.context,
        **tune(lengths, packs),
    )
    sampler = BalancedBatchSampler(
        lengths, packer=packer, dp_rank=0, dp_size=1, shuffle=False, min_step_tokens=min_step_tokens
    )
    made = [
        [part if isinstance(part, Piece) else Piece(part, 0, int(lengths[part])) for part in batch] for batch in sampler
    ]
    return [made[start : start + packs.micro_batches] for start in range(0, len(made), packs.micro_batches)]


def queues(lengths: Lengths, packs: Packs, *, count: int) -> dict[str, Any]:
    """Thresholds of so many queues, tuned on these documents."""
    found = wlb.tune(lengths, num_queues=count, **packs.tuning())
    return {"release": "fifo", "outlier_thresholds": found.thresholds}


def price(lengths: Lengths, packs: Packs) -> dict[str, Any]:
    """The price of delay, tuned on these documents."""
    return {"release": "adaptive", "delay_price": wlb.tune(lengths, **packs.tuning()).delay_price}


def dynamic_cp(lengths: Lengths, packs: Packs) -> list[Step]:
    """Every global batch, in order of arrival and whole, planned for as many ranks as it has micro-batches."""
    steps: list[Step] = []
    for first, end in global_batches(lengths, packs):
        plan = wlb.plan_dynamic_cp(
            lengths[first:end],
            world_size=packs.micro_batches,
            num_stages=packs.micro_batches,
            max_tokens_per_rank=-(-packs.context // 4) * 3 // 2,
            cost_model=packs.cost_model,
        )
        steps.append(
            [
                [
                    Piece(first + document, 0, length)
                    for group in batch
                    for document, length in zip(group.document_ids.tolist(), group.lengths.tolist(), strict=True)
                ]
                for batch in plan
            ]
        )
    return steps


def sizes_of(lengths: Lengths, packs: Packs, *, arm: Arm) -> list[Step]:
    """Whole documents in order of arrival, but every step has about as many tokens as that of another arm.

    So the difference to that arm is the order of documents alone, and the difference to equal steps the sizes alone.
    """
    sizes = [sum(piece.length for batch in step for piece in batch) for step in arm(lengths, packs)]
    ends = lengths.cumsum()
    # Up to where the tokens before the end of a step are nearest: errors do not add up.
    bounds = np.searchsorted(ends - lengths / 2, np.cumsum(sizes))
    steps: list[Step] = []
    for first, end in zip([0, *bounds[:-1].tolist()], bounds.tolist(), strict=True):
        if first == end:
            continue
        owner = next_fit(lengths[first:end], packs.max_tokens)
        step: Step = [[] for _ in range(int(owner[-1]) + 1)]
        for document, batch in enumerate(owner.tolist(), start=first):
            step[batch].append(Piece(document, 0, int(lengths[document])))
        steps.append(step)
    return steps


def _arms() -> dict[str, Arm]:
    arms: dict[str, Arm] = {"original": in_order}
    for window in (1, 2, 4, 8):
        arms[f"fixed {window}"] = functools.partial(in_order, method="fixed_length", window=window)
    for count in (1, 2, 3):
        arms[f"queues {count}"] = functools.partial(streamed, tune=functools.partial(queues, count=count))
    arms["adaptive"] = functools.partial(streamed, tune=price)
    arms["Dynamic-CP"] = dynamic_cp
    for like in ("queues 2", "adaptive"):
        arms[f"sizes of {like}"] = functools.partial(sizes_of, arm=arms[like])
    return arms


def _remedies() -> dict[str, Arm]:
    """Ways to keep steps of more equal size, or to bear with unequal ones (`BY_TOKENS`)."""
    return {
        "adaptive, price 4": functools.partial(streamed, tune=lambda *_: {"release": "adaptive", "delay_price": 4.0}),
        "adaptive, half at least": lambda lengths, packs: streamed(
            lengths, packs, tune=price, min_step_tokens=packs.tokens_per_batch // 2
        ),
        "adaptive, rate by tokens": ARMS["adaptive"],
        "queues 2, rate by tokens": ARMS["queues 2"],
    }


ARMS: Final = _arms()
REMEDIES: Final = _remedies()
BY_TOKENS: Final = {name for name in REMEDIES if name.endswith("rate by tokens")}  # how they train, see `training.run`
REFERENCE: Final = "original"
