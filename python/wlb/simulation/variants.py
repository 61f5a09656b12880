"""What can be compared: a way to pack, and a way to shard what was packed.

One entry of :data:`VARIANTS` makes a method part of every comparison.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from wlb._errors import error
from wlb.simulation.plans import GlobalBatches, Setup, Step, fixed_length, original, var_length

Packing = Literal["original", "fixed_length", "var_length"]
Strategy = Literal["per_sequence", "per_document", "adaptive"]


@dataclass(frozen=True, kw_only=True)
class Variant:
    """A method.

    Args:
        title: for reports.
        packing: "original": as documents arrive, cut every context; "fixed_length": greedy with cuts;
            "var_length": whole documents, outliers wait in queues.
        strategies: how a micro-batch is sharded over context-parallel ranks. Of several, the one whose slowest rank is
            predicted to be fastest, for each micro-batch (the paper chooses between the first two; "adaptive" also
            knows the hybrid of them).
        window: global batches that "fixed_length" packs at a time.
        packer: further arguments of :class:`wlb.Packer`, for "var_length". With a release rule of its own no thresholds
            are given.
        fitted: the packer is told the cluster's ratio of attention to the rest, communication included, instead of
            `Scenario.cost_model`; see :meth:`Scenario.fitted_efficiency`.
        placed: the micro-batches of a step go to ranks and into order by :func:`wlb.order_micro_batches`.
    """

    title: str
    packing: Packing = "original"
    strategies: tuple[Strategy, ...] = ("per_sequence",)
    window: int = 1
    packer: Mapping[str, Any] = field(default_factory=dict)
    fitted: bool = False
    placed: bool = False

    def steps(
        self, stream: GlobalBatches, setup: Setup, thresholds: tuple[int, ...], max_delay: int | None
    ) -> Iterator[Step]:
        """The global batches as they are trained."""
        if self.packing == "original":
            return original(stream, setup)
        if self.packing == "fixed_length":
            return fixed_length(stream, setup, self.window)
        return var_length(stream, setup, thresholds if self.queued else (), max_delay, self.packer)

    @property
    def queued(self) -> bool:
        """Whether documents wait in queues with thresholds."""
        return self.packing == "var_length" and self.packer.get("release", "fifo") == "fifo"

    @property
    def packing_key(self) -> tuple[Any, ...]:
        """Equal for variants that pack alike."""
        return (self.packing, self.window, tuple(sorted(self.packer.items())), self.fitted, self.placed)


VARIANTS: dict[str, Variant] = {
    "plain": Variant(title="Plain-4D"),
    "fixed": Variant(title="Fixed-4D", packing="fixed_length"),
    "per_document": Variant(title="per-document CP", strategies=("per_document",)),
    "adaptive_cp": Variant(title="adaptive CP", strategies=("adaptive",)),
    "packing": Variant(title="packing", packing="var_length"),
    "wlb": Variant(title="WLB", packing="var_length", strategies=("adaptive",)),
    "placement": Variant(title="placement", placed=True),
    "wlb_fitted": Variant(title="WLB, fitted costs", packing="var_length", strategies=("adaptive",), fitted=True),
}
"""By name, the baseline first. The paper's (section 7.1, figure 13) are Plain-4D, Fixed-4D, each optimisation alone and
all of them; then ours: micro-batches placed for the schedule, and a packer that knows the cluster's costs."""


def chosen(names: Mapping[str, Variant] | tuple[str, ...] | list[str]) -> dict[str, Variant]:
    """Variants by name, or own ones.

    Raises:
        WlbError: there is no such name, or none is given.
    """
    if not names:
        raise error("variants", "must not be empty", value=names)
    if isinstance(names, Mapping):
        return dict(names)
    for index, name in enumerate(names):
        if name not in VARIANTS:
            raise error("variants", f"= {name!r}: must be one of {', '.join(VARIANTS)}", index=index, value=name)
    return {name: VARIANTS[name] for name in names}
