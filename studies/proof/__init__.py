"""``make proof``: is training faster on a clock, and does the simulation say by how much?

A small model, whose attention weighs as a 7B model's does at 128K, trains on the lengths of real documents, scaled to
its context, under every method. The plans are those of `wlb_tools.simulate`; the clock, not a cost model, grades
them:

- *processes*: each plan is trained by the example trainer on as many processes as the layout has ranks;
- *slices*: layouts of more ranks than there are processors. What each rank computes of each micro-batch runs and is
  timed alone, and the times are put together in the order of the schedule.

Beside both stands what the simulation predicts from a profile of this machine and a probe of its links.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from cyclopts import Parameter
from cyclopts.types import NonNegativeInt, PositiveInt
from numpy.typing import NDArray

import wlb
import wlb_tools
from studies.trainer.llama import LlamaConfig
from wlb_tools.cluster import Overhead
from wlb_tools.simulation import VARIANTS, Outcome, Variant
from wlb_tools.simulation.variants import chosen

CONTEXT_OF_7B = 131_072
HEAD_DIM = 64


def unaligned(length: int) -> int:
    """A length beside a round one, as nearly all documents have: of it a CPU's attention takes as long as of them.

    Where rows of scores are a multiple of 16 long, some hundred tokens or fewer, it takes some per cents less.
    """
    return max(1, length - 1)


def uneven(tokens: int, many: int) -> list[int]:
    """Lengths of so many documents with about so many tokens, the longest nearly 16 times the shortest.

    Attention to documents of one length finds its blocks of memory where those of the last were, which are in the
    caches. Few micro-batches have such documents.
    """
    weights = 16.0 ** (-np.arange(many) / many)
    return [unaligned(int(length)) for length in tokens * weights / weights.sum()]


_FIXED: dict[str, Any] = {"packing": "fixed_length", "strategies": ("per_sequence", "per_document"), "static": True}
METHODS: dict[str, Variant] = {
    "original": VARIANTS["plain"],
    "original, uncut": VARIANTS["whole"],
    **{
        f"fixed, {window} batch{'es' * (window > 1)}": Variant(title="", window=window, **_FIXED)
        for window in (1, 2, 4, 8)
    },
    "queues": VARIANTS["wlb_fitted"],
    "adaptive": VARIANTS["adaptive_release"],
    "finer": VARIANTS["finer"],
    "finer, 4 times": replace(VARIANTS["finer"], split=4),
    "finer, 4 times, steps of 2": replace(
        VARIANTS["finer"], split=4, packer={**VARIANTS["finer"].packer, "max_step_cost": 2.0}
    ),
    "Dynamic-CP": VARIANTS["dynamic_cp"],
    "adaptive + Dynamic-CP": VARIANTS["wlb_dynamic_cp"],
}
"""What is compared, the baseline first; *finer* makes 2 micro-batches of one. The packers that wait are told the costs
that the profile shows. The last of *finer* bounds the work of a step: twice the mean global batch's."""


@dataclass(frozen=True)
class Layout:
    """Ranks, as `dp2pp2cp2` names them."""

    name: str

    @cached_property
    def sizes(self) -> dict[str, int]:
        """Of dp, pp and cp."""
        found = re.findall(r"(dp|pp|cp)([1-9][0-9]*)", self.name)
        if not found or "".join(map("".join, found)) != self.name or len(dict(found)) < len(found):
            raise SystemExit(f"--layouts {self.name}: a layout is named like pp2 or dp2pp2cp2")
        return {"dp": 1, "pp": 1, "cp": 1} | {name: int(size) for name, size in found}

    @property
    def world_size(self) -> int:
        """All ranks."""
        return int(np.prod(list(self.sizes.values())))

    def __str__(self) -> str:
        return " x ".join(f"{name} {size}" for name, size in self.sizes.items() if size > 1) or "1 rank"


@dataclass(frozen=True, kw_only=True)
class Bench:
    """What all runs have in common.

    Args:
        hidden: width of the model; its feed-forward block is 2.69 times as wide, as LLaMA2-7B's.
        layers: of the model.
        context: longest document that is trained uncut, tokens; 32 for each of hidden is a 7B model's ratio at 128K.
        batches: global batches of the stream.
        micro_batches: of a global batch, over dp ranks; for each, as many as pipeline ranks unless it is given.
        memory: most tokens of a micro-batch, in contexts.
        seed: of the order of documents and of the weights.
        bytes_per_number: 4 in float32, 2 in bfloat16; the device decides.
    """

    hidden: PositiveInt = 128
    layers: PositiveInt = 2
    context: PositiveInt = 4096
    batches: PositiveInt = 16
    micro_batches: PositiveInt | None = None
    memory: Annotated[float, Parameter(parse=False)] = 2.0
    seed: NonNegativeInt = 0
    bytes_per_number: Annotated[int, Parameter(parse=False)] = 4

    @property
    def config(self) -> LlamaConfig:
        """The model as the trainer takes it; its tokens are bytes."""
        heads = max(1, self.hidden // HEAD_DIM)
        return LlamaConfig(
            hidden_size=self.hidden,
            ffn_hidden_size=self.hidden * 43 // 16,
            num_layers=self.layers,
            num_heads=heads,
            num_kv_heads=heads,
        )

    @property
    def model(self) -> wlb.ModelConfig:
        """The same for wlb."""
        return wlb.ModelConfig(**self.config.shape(), name=f"hidden {self.hidden}, {self.layers} layers")

    def scaled(self, lengths: NDArray[np.int64], window: int) -> NDArray[np.int64]:
        """Documents as long in this context as `lengths` are in `window`, in a random order; enough for the stream.

        The sample is taken once around if there are too few.
        """
        _, _, pieces = wlb.split_documents(lengths, max_document_tokens=window)
        here = np.maximum(1, np.round(pieces * (self.context / window)).astype(np.int64))
        return here[np.random.default_rng(self.seed).permutation(here.size)]

    def stream(self, scaled: NDArray[np.int64], scenario: wlb_tools.Scenario) -> NDArray[np.int64]:
        """So many of them as make `batches` global batches."""
        offsets = wlb.batch_offsets(scaled, tokens_per_batch=scenario.tokens_per_batch)
        if offsets.size <= self.batches:
            raise SystemExit(
                f"the documents make {offsets.size - 1} global batches of {scenario.tokens_per_batch:,} tokens,"
                f" fewer than --batches {self.batches}"
            )
        return scaled[: offsets[self.batches]]

    def micro_batches_of(self, layout: Layout) -> int:
        """Of a data-parallel rank in a step."""
        return self.micro_batches or layout.sizes["pp"]

    def scenario(
        self, layout: Layout, hardware: wlb_tools.Hardware, profile: Path, overhead: Overhead | None = None
    ) -> wlb_tools.Scenario:
        """This model on these ranks."""
        sizes = layout.sizes
        return wlb_tools.Scenario(
            model=self.model,
            # As the trainer shards: parameters are gathered, and gradients summed, once a step.
            layout=wlb_tools.ParallelLayout(
                **sizes, fsdp="zero2", dtype="float32" if self.bytes_per_number == 4 else "bfloat16"
            ),
            hardware=hardware,
            context=self.context,
            kernel_model=profile,
            overhead=overhead or Overhead(),
            max_tokens=int(self.memory * self.context),
            cp_keys="needed",  # as the trainer's attention does
            p2p_overlap=0.0,  # the trainer's 1F1B sends and receives at once, and waits for both
            num_micro_batches=None if self.micro_batches is None else self.micro_batches * sizes["dp"],
        )

    def simulate(self, scaled: NDArray[np.int64], scenario: wlb_tools.Scenario, names: list[str]) -> dict[str, Outcome]:
        """Every method's plan of the stream and its predicted times; without the methods that the ranks cannot run."""
        wanted = {name: METHODS[name] for name in names}
        possible = {name: variant for name, variant in wanted.items() if variant.obstacle(scenario) is None}
        stream = self.stream(scaled, scenario)
        return dict(wlb_tools.simulate(stream, scenario, variants=chosen(possible)).outcomes)


def placed(outcome: Outcome) -> Iterator[list[list[Any]]]:
    """Step by step, what every rank of a pipeline stage trains: parts [dp * cp, micro-batches], in their order."""
    parts = list(outcome.parts())
    for step in range(len(outcome.run.digests)):
        yield [[parts[index] for index in row] for row in outcome.placement(step).tolist()]
