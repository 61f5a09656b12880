"""Variants to compare: a way to pack documents, and a way to shard them.

An entry of `VARIANTS` is part of every comparison.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, Literal, get_args

from wlb._choices import Sync
from wlb._core import WlbError
from wlb._errors import check_integer, error
from wlb._shown import explained
from wlb_tools.simulation.methods import Setup, Step, fixed_length, original, var_length, whole
from wlb_tools.simulation.planner import obstacle
from wlb_tools.simulation.scenario import Scenario
from wlb_tools.simulation.stream import GlobalBatches

Packing = Literal["original", "whole", "fixed_length", "var_length", "dynamic_cp"]
Strategy = Literal["per_sequence", "per_document", "adaptive"]

_OF_PACKER = ("release", "delay_price", "method", "max_step_cost")


@explained
@dataclass(frozen=True, kw_only=True)
class Variant:
    """A method.

    Args:
        title: for reports.
        packing: "original": in order of arrival, cut every context; "whole": in order of arrival, uncut;
            "fixed_length": greedy with cuts; "var_length": whole documents, outliers wait in queues; "dynamic_cp":
            whole documents, each on a group of ranks that `wlb.plan_dynamic_cp` chooses, sharded one by one, with costs
            of its own.
        strategies: how a micro-batch is sharded over context-parallel ranks. Among several, the one whose slowest rank
            is predicted to be fastest is chosen for each micro-batch (the paper chooses between the first two;
            "adaptive" also knows a hybrid of them).
        static: whether the strategy with which the whole run is faster is chosen for all micro-batches.
        window: global batches that "fixed_length" packs at a time.
        dealt: whether the micro-batches of a step go to data-parallel ranks by their costs (`wlb.Packing.deal`) under
            "original", instead of in order.
        packer: further arguments of `wlb.Packer` (`release`, `delay_price`, `method`, `max_step_cost`, unless the
            scenario has one), for "var_length". With a release rule, no thresholds are given. For "dynamic_cp": those
            of a packer whose releases are planned; without, nothing waits.
        max_early: iterations that long documents may come before their turn, for `packer` with release="adaptive", as
            `wlb.torch.BalancedBatchSampler` reads them.
        fitted: whether the packer gets the cluster's ratio of attention to the rest, with communication, instead of
            `Scenario.cost_model`; see `Scenario.fitted_efficiency`.
        waits: whether outliers wait in queues, where no release rule is given.
        split: factor on the micro-batches of a global batch if documents stay whole, with a smaller default of `S_max`
            if memory needs it; for "dynamic_cp" of the packer.
        sync: where the packer is told that ranks wait for each other; None: where they do.
    """

    title: str
    packing: Packing = "original"
    strategies: tuple[Strategy, ...] = ("per_sequence",)
    static: bool = False
    window: int = 1
    dealt: bool = True
    packer: Mapping[str, Any] = field(default_factory=dict)
    max_early: int = 0
    fitted: bool = False
    waits: bool = True
    split: int | Fraction = 1
    sync: Sync | None = None

    def __post_init__(self) -> None:
        if self.packing not in get_args(Packing):
            raise error(
                "packing", f"= {self.packing!r}: must be one of {', '.join(get_args(Packing))}", value=self.packing
            )
        for index, strategy in enumerate(self.strategies):
            if strategy not in get_args(Strategy):
                message = f"= {strategy!r}: must be one of {', '.join(get_args(Strategy))}"
                raise error("strategies", message, index=index, value=strategy)
        if not self.strategies:
            raise error("strategies", "must not be empty", value=self.strategies)
        if self.window < 1:
            raise error("window", f"= {self.window}: must be at least 1", value=self.window)
        if self.split <= 0:
            raise error("split", f"= {self.split}: must be positive", value=self.split)
        check_integer("max_early", self.max_early, minimum=0, maximum=1024)
        reads = self.packing in ("var_length", "dynamic_cp") and self.packer.get("release") == "adaptive"
        if self.max_early and not reads:
            message = f"= {self.max_early}: needs packing 'var_length' or 'dynamic_cp' with "
            message += "packer={'release': 'adaptive'}"
            raise error("max_early", message, value=self.max_early)
        for name in self.packer:
            if name not in _OF_PACKER:
                raise error("packer", f"has {name}: must be among {', '.join(_OF_PACKER)}", value=self.packer[name])

    def obstacle(self, scenario: Scenario) -> WlbError | None:
        """Why a cluster does not support this method; None if it does.

        Its schedule does not support `split` times the micro-batches, one context of each does not fit into memory, or
        Dynamic-CP cannot be planned.
        """
        if self.dynamic:
            return obstacle(scenario)
        try:
            scenario.setup(split=self.split)
        except WlbError as reason:
            return reason
        return None

    def arriving(self, stream: GlobalBatches, setup: Setup) -> GlobalBatches:
        """The stream as this method receives it: in full global batches if it cuts documents."""
        return stream.full(setup.tokens_per_batch) if self.cuts else stream

    def steps(self, stream: GlobalBatches, setup: Setup, thresholds: tuple[int, ...]) -> Iterator[Step]:
        """The global batches as they are trained."""
        if self.packing == "original":
            return original(stream, setup, dealt=self.dealt)
        if self.packing == "whole":
            return whole(stream, setup)
        if self.packing == "fixed_length":
            return fixed_length(stream, setup, self.window)
        levels = thresholds if self.queued else ()
        return var_length(stream, setup, levels, self.packer, max_early=self.max_early)

    @property
    def cuts(self) -> bool:
        """Whether documents are cut."""
        return self.packing in ("original", "fixed_length")

    @property
    def dynamic(self) -> bool:
        """Whether the ranks of a micro-batch are divided into groups."""
        return self.packing == "dynamic_cp"

    @property
    def queued(self) -> bool:
        """Whether documents wait in queues with thresholds."""
        return self.waits and self.packing == "var_length" and self.packer.get("release", "fifo") == "fifo"

    @property
    def packing_key(self) -> tuple[Any, ...]:
        """A key that is equal for variants that pack alike."""
        return (
            self.packing,
            self.window,
            tuple(sorted(self.packer.items())),
            self.max_early,
            self.fitted,
            self.waits,
            self.split,
            self.sync,
            self.dealt,
        )


_WLB: dict[str, Any] = {"packing": "var_length", "strategies": ("adaptive",)}
_ADAPTIVE = {"release": "adaptive"}

VARIANTS: dict[str, Variant] = {
    "original": Variant(title="original order"),
    "fixed_length": Variant(
        title="fixed length", packing="fixed_length", strategies=("per_sequence", "per_document"), static=True
    ),
    "per_document": Variant(title="original order, per-document CP", strategies=("per_document",)),
    "adaptive_cp": Variant(title="original order, adaptive CP", strategies=("adaptive",)),
    "wlb_llm_packing": Variant(title="WLB-LLM, packing alone", packing="var_length"),
    "wlb_llm": Variant(title="WLB-LLM", **_WLB),
    "wlb_llm_fitted": Variant(title="WLB-LLM, fitted costs", **_WLB, fitted=True),
    "wlb": Variant(title="wlb", **_WLB, fitted=True, packer=_ADAPTIVE),
    "finer": Variant(title="wlb, finer", **_WLB, fitted=True, packer=_ADAPTIVE, split=2),
    "dynamic_cp": Variant(title="Dynamic-CP", packing="dynamic_cp"),
    "wlb_dynamic_cp": Variant(title="wlb + Dynamic-CP", packing="dynamic_cp", packer=_ADAPTIVE),
    "refined": Variant(title="WLB-LLM, refined", **_WLB, fitted=True, packer={"method": "refined"}),
    "as_they_come": Variant(title="original order, not dealt", dealt=False),
    "whole": Variant(title="original order, uncut", packing="whole"),
    "no_waiting": Variant(title="wlb, nothing waits", **_WLB, fitted=True, waits=False),
    "early": Variant(title="wlb, early", **_WLB, fitted=True, packer=_ADAPTIVE, max_early=4),
}
"""Variants by name, the baseline first. Those of the paper (section 7.1, figure 13) are "original", "fixed_length",
each optimisation alone and all of them. Then come ours: a packer with the cluster's costs; with these, another
release rule; with that, twice as many micro-batches; Dynamic-CP with nothing waiting, and with that rule. All of
them deal micro-batches to data-parallel ranks by cost. The last five show the effect of refining full micro-batches,
of dealing alone, of uncut documents, of packing without queues, and of long documents read up to four iterations
before their turn."""

_BY_NAME_ONLY = ("refined", "as_they_come", "whole", "no_waiting", "early")
DEFAULT = tuple(name for name in VARIANTS if name not in _BY_NAME_ONLY)
"""Variants of a default comparison: the paper's methods, and ours that a user could choose instead of WLB-LLM."""


def defaults(scenario: Scenario) -> tuple[str, ...]:
    """Names of `DEFAULT`, without variants that the cluster does not support."""
    missing = obstacles(scenario)
    return tuple(name for name in DEFAULT if name not in missing)


def obstacles(scenario: Scenario) -> dict[str, WlbError]:
    """Methods of `DEFAULT` that the cluster cannot run, with the reason."""
    found = {name: VARIANTS[name].obstacle(scenario) for name in DEFAULT}
    return {name: reason for name, reason in found.items() if reason is not None}


def chosen(names: Mapping[str, Variant] | Sequence[str]) -> dict[str, Variant]:
    """Variants by name, or own ones.

    Raises:
        WlbError: there is no such name, one is given twice, or none is given.
    """
    if not names:
        raise error("variants", "must not be empty", value=names)
    if isinstance(names, Mapping):
        return dict(names)
    for index, name in enumerate(names):
        if name not in VARIANTS:
            raise error("variants", f"= {name!r}: must be one of {', '.join(VARIANTS)}", index=index, value=name)
        if name in names[:index]:
            raise error("variants", f"= {name!r}: is given twice", index=index, value=name)
    return {name: VARIANTS[name] for name in names}
