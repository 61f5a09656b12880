"""The fastest way to spread a model over so many GPUs: layouts, micro-batches and methods that fit into memory."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from wlb._core import DELAY_PRICE, MAX_MEAN_DELAY, MAX_WORLD_SIZE, WlbError, split_documents
from wlb._errors import check_integer, error
from wlb.models import ModelConfig
from wlb_tools.cluster.capacity import lacking_bytes, num_experts
from wlb_tools.cluster.hardware import Hardware
from wlb_tools.cluster.parallel import ParallelLayout
from wlb_tools.simulation.bounds import Bounds
from wlb_tools.simulation.planner import obstacle
from wlb_tools.simulation.run import simulate
from wlb_tools.simulation.scenario import Scenario
from wlb_tools.simulation.tuning import KINDS, SPLITS, Choice, Kind, Objective, Settings

WITHOUT_WLB: tuple[Kind, ...] = ("plain", "fixed", "per_document")
"""Kinds that need nothing of wlb: what a gain is honestly measured against, on the best layout for them.

Sharding each document of a packed sequence is what Transformer Engine does with one (`qkv_format="thd"`)."""

_CUT_ALIKE: tuple[Kind, ...] = ("plain", "per_document", "adaptive_cp")
"""Kinds that cut documents every context, and differ in how they shard them alone."""

RANKED = 5
"""So many of the fastest layouts are found: what by its bound is slower than the last of them is not simulated."""

SIZES = ("tp", "cp", "pp", "dp", "virtual_stages", "ep")
"""Fields of a layout that are searched."""

VIRTUAL_STAGES = (1, 2, 4, 8)
"""Stages of a pipeline rank that are tried."""

_DYNAMIC: tuple[Kind, ...] = ("dynamic_cp", "wlb_dynamic_cp")


@dataclass(frozen=True)
class Refused:
    """Layouts that cannot be, and why."""

    counts: dict[str, int]  # by reason
    nearest: ParallelLayout | None  # of those that do not fit into memory, the one that lacks least
    lacking_bytes: float  # of its fullest GPU

    def sentences(self) -> list[str]:
        """In words."""
        sentences = [f"{count:,} {'layout' if count == 1 else 'layouts'}: {why}." for why, count in self.counts.items()]
        if self.nearest is not None:
            sentences.append(
                f"Nearest to fitting: {in_short(self.nearest)} lacks {self.lacking_bytes / 2**30:.1f} GiB."
            )
        return sentences


@dataclass(frozen=True)
class LayoutSearch:
    """What was found; times are those of a long stream, as in :class:`Choice`."""

    by: Objective
    ranked: tuple[Choice, ...]  # the fastest layouts, each with its best plan; `outcome.scenario` has the layout
    without: Choice  # the best layout and plan without wlb
    own: Choice | None  # the best plan on the layout that the caller has
    own_without: Choice | None  # the best one there without wlb
    refused: Refused
    layouts: int  # that are possible
    candidates: int  # layouts, micro-batches and methods together
    simulated: int  # of these; the others cannot be faster than the last of `ranked`
    tightness: float  # least simulated time over its bound: below 1 the bound was none, and was lowered by as much
    again: Callable[[Objective], LayoutSearch] = field(repr=False, compare=False)
    """The same search by another objective; what was simulated is not simulated again. A pickle does not hold it."""

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"again": _not_kept}

    @property
    def best(self) -> Choice:
        """The fastest."""
        return self.ranked[0]

    def seconds(self, choice: Choice) -> float:
        """Of a global batch, the mean of a long stream; by FLOPs for as many of them as whole documents have."""
        return _seconds(choice, self.by, self._whole)

    @property
    def _whole(self) -> float:
        return max(choice.outcome.flops for choice in (*self.ranked, self.without))

    def gain(self, over: Choice) -> float:
        """How many times as fast the best is, by the objective."""
        return self.seconds(over) / self.seconds(self.best)

    def gain_band(self, over: Choice) -> tuple[float, float]:
        """The least and the most of it: the same two plans were attention faster or slower than assumed."""
        work = self.best.outcome.flops / over.outcome.flops if self.by == "flops" else 1.0
        least, most = self.best.speedup_band(over.outcome)
        return work * least, work * most

    def as_json(self) -> dict[str, Any]:
        """Everything in numbers, as plain JSON values."""

        def row(choice: Choice | None) -> dict[str, Any] | None:
            if choice is None:
                return None
            layout = choice.outcome.scenario.layout
            return {
                "layout": {name: getattr(layout, name) for name in SIZES},
                "gain": self.gain(choice),
                "gain_band": list(self.gain_band(choice)),
                **choice.summary(self.without.outcome),
            }

        return {
            "by": self.by,
            "best": row(self.best),
            "ranked": [row(choice) for choice in self.ranked],
            "without_wlb": row(self.without),
            "own": row(self.own),
            "own_without_wlb": row(self.own_without),
            "refused": dict(self.refused.counts),
            "nearest": None if self.refused.nearest is None else in_short(self.refused.nearest),
            "lacking_bytes": self.refused.lacking_bytes,
            "layouts": self.layouts,
            "candidates": self.candidates,
            "simulated": self.simulated,
            "bound_tightness": self.tightness,
        }


def in_short(layout: ParallelLayout) -> str:
    """`tp 8 cp 2 pp 4 v 2 dp 1`, and ` ep 2` where experts are divided."""
    virtual = f" v {layout.virtual_stages}" if layout.virtual_stages > 1 else ""
    experts = f" ep {layout.ep}" if layout.ep > 1 else ""
    return f"tp {layout.tp} cp {layout.cp} pp {layout.pp}{virtual} dp {layout.dp}{experts}"


@dataclass(frozen=True)
class _Candidate:
    """A plan on a layout, and seconds of the whole stream that it takes at least."""

    scenario: Scenario
    settings: Settings
    bound: float


def search_layouts(
    lengths: ArrayLike,
    *,
    model: ModelConfig,
    hardware: Hardware,
    gpus: int,
    tokens_per_batch: int,
    context: int = 131072,
    template: ParallelLayout | None = None,
    own: ParallelLayout | None = None,
    by: Objective = "tokens",
    max_mean_delay: float = MAX_MEAN_DELAY,
    prune: bool = True,
    progress: Callable[[str, int, int], None] | None = None,
    **scenario: Any,
) -> LayoutSearch:
    """The fastest layouts of a model on so many GPUs, with micro-batches and a method for each.

    Tried are all divisors of `gpus` as tensor-, context-, pipeline- and data-parallel sizes, with 1, 2, 4 or 8 stages
    of a pipeline rank, and all sizes of expert parallelism that divide the experts that there are, as far as the model,
    the global batch, the schedule and the memory allow; on each Plain-4D, Fixed-4D, per-document and adaptive sharding
    (with several context-parallel ranks), whole documents
    with and without adaptive release in as many micro-batches as the global batch has contexts, or 2 or 4 times as
    many, and Dynamic-CP with and without release. Dynamic-CP divides context- and data-parallel ranks itself: it is
    tried once for each of the other sizes, with the fewest context-parallel ranks.

    What is promising comes first, by a bound: the mean work of the documents, spread evenly over all ranks and
    micro-batches, through the pipeline. What cannot be among the fastest :data:`RANKED` layouts by this bound is not
    simulated. Plans of unequal work can fall below it by chance; so it is lowered by as much as any simulated plan
    did. Deterministic.

    Args:
        lengths: int[n] tokens of the documents in arrival order; longer ones are split at the context. Some global
            batches are enough, and time grows with them.
        model: its shape.
        hardware: what it runs on.
        gpus: how many.
        tokens_per_batch: of a global batch; as many contexts as it holds.
        context: tokens of the longest document.
        template: everything of a layout but its sizes: `fsdp`, `recompute` and the like; default: as
            :class:`wlb_tools.ParallelLayout` has them, or as `own`.
        own: the layout that the caller has, to compare with.
        by: see :func:`tune`.
        max_mean_delay: iterations that a token may wait on average.
        prune: whether bounds are used; without, everything is simulated.
        progress: see :func:`wlb_tools.simulate`.
        scenario: further arguments of :class:`wlb_tools.Scenario`, such as `profile`, `cost_model` or `cp_overlap`.

    Raises:
        WlbError: see :func:`wlb_tools.simulate`; no layout is possible, and why; `own` has another number of GPUs, or
            cannot be.

    Complexity:
        A pipeline of equal micro-batches for every candidate, some thousands on 1,024 GPUs, and a simulation for each
        that is not ruled out, typically some tens.
    """
    check_integer("gpus", gpus, minimum=1, maximum=MAX_WORLD_SIZE)
    check_integer("tokens_per_batch", tokens_per_batch, minimum=context)
    if own is not None:
        own.check(model=model, world_size=gpus)
    _, _, pieces = split_documents(lengths, max_document_tokens=context)
    options = {
        "model": model,
        "hardware": hardware,
        "context": context,
        "num_micro_batches": tokens_per_batch // context,
        "outlier_thresholds": (),
        "max_mean_delay": max_mean_delay,
        **scenario,
    }
    search = _Search(np.asarray(pieces, dtype=np.int64), options, progress or (lambda *_: None))
    return search.run(by, gpus, template or own or ParallelLayout(), own, prune=prune)


def _not_kept(by: Objective) -> LayoutSearch:
    raise error("by", "asks what a search that was pickled does not hold: search again", value=by)


class _Search:
    """One search, by one objective after the other."""

    def __init__(
        self,
        lengths: NDArray[np.int64],
        options: dict[str, Any],
        progress: Callable[[str, int, int], None],
    ) -> None:
        self._lengths, self._options, self._progress = lengths, options, progress
        self._model: ModelConfig = options["model"]
        self._experts = math.gcd(*num_experts(self._model)) or 1
        self._contexts: int = options["num_micro_batches"]
        context: int = options["context"]
        ends = lengths.cumsum()
        cuts = np.union1d(ends, np.arange(context, int(ends[-1:].sum()), context))
        self._cut = np.diff(cuts, prepend=0)
        self._whole_flops, self._cut_flops = (float(self._model.flops(of).sum()) for of in (lengths, self._cut))
        self._bounds = Bounds(lengths, self._cut)
        self._found: dict[tuple[ParallelLayout, Settings], Choice] = {}
        self._failed: dict[tuple[ParallelLayout, Settings], str] = {}

    def run(
        self, by: Objective, gpus: int, template: ParallelLayout, own: ParallelLayout | None, *, prune: bool
    ) -> LayoutSearch:
        """Everything."""
        if by not in get_args(Objective):
            raise error("by", f"= {by!r}: must be one of {', '.join(get_args(Objective))}", value=by)
        self._by = by
        self._counts: Counter[str] = Counter()
        self._nearest: tuple[float, ParallelLayout] | None = None
        self._needed: set[tuple[ParallelLayout, Settings]] = set()  # of what is simulated
        self._tightness = math.inf
        self._progress("bounds", 0, 1)
        scenarios = [self._scenario(layout) for layout in self._layouts(gpus, template)]
        candidates = sorted(self._candidates(scenarios), key=lambda candidate: candidate.bound)
        if not candidates:
            refused = " ".join(self._refused().sentences())
            raise error("gpus", f"= {gpus}: no layout is possible. {refused}", value=gpus)
        self._total = len(candidates)
        if not prune:
            candidates = [dataclasses.replace(candidate, bound=0.0) for candidate in candidates]
        # Every layout's best, and the best without wlb.
        ranked = self._best_of_layouts(candidates, RANKED)
        without = self._best_of_layouts([c for c in candidates if c.settings.kind in WITHOUT_WLB], 1)[0]
        mine = None if own is None else list(self._candidates([self._scenario(own)]))
        made = [] if mine is None else self._best_of_layouts(mine, 1)
        simple = [candidate for candidate in mine or [] if candidate.settings.kind in WITHOUT_WLB]
        made_without = self._best_of_layouts(simple, 1) if simple else []
        self._progress("done", self._total, self._total)
        return LayoutSearch(
            by=self._by,
            ranked=tuple(ranked),
            without=without,
            own=made[0] if made else None,
            own_without=made_without[0] if made_without else None,
            refused=self._refused(),
            layouts=len(scenarios),
            candidates=self._total,
            simulated=len(self._needed - self._failed.keys()),
            tightness=self._tightness,
            again=lambda by: self.run(by, gpus, template, own, prune=prune),
        )

    def _layouts(self, gpus: int, template: ParallelLayout) -> Iterator[ParallelLayout]:
        """Those that are possible; the others are counted."""
        for tp in _divisors(gpus):
            for cp in _divisors(gpus // tp):
                for pp in _divisors(gpus // tp // cp):
                    for virtual in VIRTUAL_STAGES if pp > 1 else (1,):
                        dp = gpus // tp // cp // pp
                        sizes: dict[str, Any] = {"tp": tp, "cp": cp, "pp": pp, "dp": dp, "virtual_stages": virtual}
                        for ep in _divisors(math.gcd(dp * cp, self._experts)):
                            layout = dataclasses.replace(template, stage_layers=None, **sizes, ep=ep)
                            why = self._obstacle(layout)
                            if why is None:
                                yield layout
                            else:
                                self._counts[why] += 1

    def _obstacle(self, layout: ParallelLayout) -> str | None:
        """Why a layout cannot be."""
        try:
            layout.check(model=self._model)
        except WlbError as reason:
            return "their tp does not divide the model" if reason.argument == "tp" else "more stages than layers"
        if self._contexts % layout.dp:
            return f"their dp does not divide the {self._contexts:,} contexts of a global batch"
        lacking = self._lacking(layout, split=1)
        if lacking is None:
            return "the schedule cannot have their stages and micro-batches"
        if lacking > 0:
            if self._nearest is None or lacking < self._nearest[0]:
                self._nearest = (lacking, layout)
            return "a micro-batch does not fit into memory"
        return None

    def _lacking(self, layout: ParallelLayout, split: int) -> float | None:
        """Bytes that a GPU lacks for micro-batches of one context; None: the schedule cannot have so many of them."""
        options = {name: self._options[name] for name in ("schedule", "reserved_bytes") if name in self._options}
        per_rank = self._contexts * split // layout.dp
        hardware, tokens = self._options["hardware"], self._options.get("max_tokens") or self._options["context"]
        try:
            return lacking_bytes(self._model, layout, hardware, tokens=tokens, num_micro_batches=per_rank, **options)
        except WlbError:
            return None

    def _scenario(self, layout: ParallelLayout) -> Scenario:
        """On a layout, with costs fitted to it unless the caller gave some."""
        scenario = Scenario(layout=layout, **self._options)
        if scenario.cost_model is not None:
            return scenario
        efficiency = self._bounds.fitted_efficiency(scenario)
        return dataclasses.replace(scenario, cost_model=scenario.flops(attention_efficiency=efficiency))

    def _candidates(self, scenarios: list[Scenario]) -> Iterator[_Candidate]:
        planned = set()
        for scenario in sorted(scenarios, key=lambda scenario: scenario.layout.cp):
            layout = scenario.layout
            kinds: tuple[Kind, ...] = (*WITHOUT_WLB, "adaptive_cp")
            for kind in kinds:
                if layout.cp > 1 or kind not in _CUT_ALIKE[1:]:  # for one rank there is one way to shard
                    yield self._candidate(scenario, Settings(kind=kind, max_tokens=scenario.context))
            for split in SPLITS:
                if self._lacking(layout, split) != 0:
                    continue
                most = scenario.setup(split=split).max_tokens
                for price in (None, DELAY_PRICE) if scenario.max_mean_delay else (None,):
                    kind = "no_waiting" if price is None else "adaptive_release"
                    settings = Settings(kind=kind, max_tokens=most, delay_price=price, split=split)
                    yield self._candidate(scenario, settings)
            others = (layout.tp, layout.pp, layout.virtual_stages, layout.ep)
            if others not in planned and obstacle(scenario) is None:
                planned.add(others)
                for kind in _DYNAMIC if scenario.max_mean_delay else _DYNAMIC[:1]:
                    price = DELAY_PRICE if kind == "wlb_dynamic_cp" else None
                    settings = Settings(
                        kind=kind, max_tokens=scenario.limit, delay_price=price, strategy="per_document"
                    )
                    yield self._candidate(scenario, settings)

    def _candidate(self, scenario: Scenario, settings: Settings) -> _Candidate:
        bound = self._bounds.seconds(scenario, settings)
        if self._by == "flops" and settings.kind in _CUT_ALIKE:  # what Fixed-4D cuts is not known yet
            bound *= self._whole_flops / self._cut_flops
        return _Candidate(scenario, settings, bound)

    def _best_of_layouts(self, candidates: list[_Candidate], number: int) -> list[Choice]:
        """The fastest layouts, each with its best plan."""
        best: dict[ParallelLayout, Choice] = {}
        for done, candidate in enumerate(sorted(candidates, key=lambda candidate: candidate.bound)):
            times = sorted(_seconds(choice, self._by, self._whole_flops) for choice in best.values())
            if len(times) >= number and candidate.bound * min(1.0, self._tightness) > times[number - 1]:
                break
            layout = candidate.scenario.layout
            self._progress(in_short(layout), done, self._total)
            choice = self._simulated(candidate)
            if choice is None:
                continue
            if choice.delay > candidate.scenario.max_mean_delay:
                continue
            if layout not in best or self._faster(choice, best[layout]):
                best[layout] = choice
        ranked = sorted(best.values(), key=lambda choice: _seconds(choice, self._by, self._whole_flops))
        return ranked[:number]

    def _faster(self, choice: Choice, than: Choice) -> bool:
        one, other = (_seconds(each, self._by, self._whole_flops) for each in (choice, than))
        return one < other

    def _simulated(self, candidate: _Candidate) -> Choice | None:
        """None where the plan cannot be, which is counted."""
        scenario, settings = candidate.scenario, candidate.settings
        key = (scenario.layout, settings)
        if key not in self._found and key not in self._failed:
            try:
                outcome = simulate(self._lengths, scenario, variants={settings.kind: settings.variant}).baseline
                self._found[key] = Choice(**vars(settings), outcome=outcome)
            except WlbError as reason:
                self._failed[key] = f"{KINDS[settings.kind]} has no plan for it ({reason})"
        if key in self._needed:
            return self._found.get(key)
        self._needed.add(key)
        if key in self._failed:
            self._counts[self._failed[key]] += 1
            return None
        choice = self._found[key]
        if candidate.bound:
            self._tightness = min(self._tightness, _seconds(choice, self._by, self._whole_flops) / candidate.bound)
        return choice

    def _refused(self) -> Refused:
        lacking, nearest = self._nearest or (0.0, None)
        return Refused(dict(sorted(self._counts.items())), nearest, lacking)


def _seconds(choice: Choice, by: Objective, whole_flops: float) -> float:
    """Seconds of the stream. By FLOPs: as if as many FLOPs were trained as uncut documents have."""
    work = whole_flops / choice.outcome.flops if by == "flops" else 1.0
    return work * choice.outcome.steady_seconds


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]
