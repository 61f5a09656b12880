"""Search for the fastest layout of a model on a number of GPUs, with micro-batches and a method that fit."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from wlb._choices import Passes
from wlb._core import DELAY_PRICE, MAX_MEAN_DELAY, MAX_WORLD_SIZE, WlbError, simulate_steps, split_documents
from wlb._errors import check_integer, error
from wlb._shown import explained
from wlb.models import ModelConfig
from wlb_tools.cluster.attention_seconds import segment_seconds
from wlb_tools.cluster.capacity import lacking_bytes, num_experts
from wlb_tools.cluster.hardware import Hardware
from wlb_tools.cluster.parallel import ParallelLayout
from wlb_tools.simulation.balance import Floats
from wlb_tools.simulation.planner import obstacle
from wlb_tools.simulation.run import simulate
from wlb_tools.simulation.scenario import Scenario
from wlb_tools.simulation.tuning import SPLITS, Choice, Kind, Objective, Settings

WITHOUT_WLB: tuple[Kind, ...] = ("original", "fixed_length", "per_document")
"""Kinds of plans without wlb; a gain is relative to the best of them on its best layout.

Transformer Engine shards each document of a packed sequence, too (`qkv_format="thd"`)."""

SIZES = ("tp", "cp", "pp", "dp", "virtual_stages", "ep")
"""Fields of a layout that are searched."""

RANKED = 5
"""Number of fastest layouts to find."""

_VIRTUAL_STAGES = (1, 2, 4, 8)
_SHARDED_ALIKE: tuple[Kind, ...] = ("per_document", "adaptive_cp")  # as "original", with one context-parallel rank
_PASSES: tuple[Passes, ...] = ("forward", "backward")


@dataclass(frozen=True)
class Refused:
    """Layouts that are impossible, and why."""

    counts: dict[str, int]  # by reason
    nearest: ParallelLayout | None  # of those that do not fit into memory, the one that lacks least
    lacking_bytes: float  # bytes that its fullest GPU lacks

    def sentences(self) -> list[str]:
        """The reasons in sentences."""
        sentences = [f"{count:,} {'layout' if count == 1 else 'layouts'}: {why}." for why, count in self.counts.items()]
        if self.nearest is not None:
            lacking = f"{self.lacking_bytes / 2**30:.1f} GiB"
            sentences.append(f"Nearest to fitting: {in_short(self.nearest)} lacks {lacking}.")
        return sentences


@explained
@dataclass(frozen=True)
class LayoutSearch:
    """Result of a search over layouts; times are those of a long stream, as in `Choice`."""

    by: Objective
    ranked: tuple[Choice, ...]  # the fastest layouts, each with its best plan; `outcome.scenario` has the layout
    without: Choice  # the best layout and plan without wlb
    own: Choice | None  # the best plan on the caller's layout
    own_without: Choice | None  # the best plan without wlb on the caller's layout
    refused: Refused
    layouts: int  # number of possible layouts
    candidates: int  # number of layouts, micro-batches and methods together
    simulated: int  # number of simulated candidates; the others cannot be faster than the last of `ranked`

    @property
    def best(self) -> Choice:
        """The fastest choice."""
        return self.ranked[0]

    def gain(self, over: Choice) -> float:
        """Speed of the best layout over another choice, by the objective."""
        return self.best.speedup(over.outcome, self.by)

    def gain_band(self, over: Choice) -> tuple[float, float]:
        """The least and the most of the gain of these two plans, if attention is faster or slower than assumed."""
        work = self.best.outcome.flops / over.outcome.flops if self.by == "flops" else 1.0
        least, most = self.best.speedup_band(over.outcome)
        return work * least, work * most

    def as_json(self) -> dict[str, Any]:
        """All results as plain JSON values."""

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
            "refused": self.refused.counts,
            "nearest": None if self.refused.nearest is None else in_short(self.refused.nearest),
            "lacking_bytes": self.refused.lacking_bytes,
            "layouts": self.layouts,
            "candidates": self.candidates,
            "simulated": self.simulated,
        }


def in_short(layout: ParallelLayout) -> str:
    """`tp 8 cp 2 pp 4 v 2 dp 1`, and ` ep 2` if experts are divided."""
    virtual = f" v {layout.virtual_stages}" if layout.virtual_stages > 1 else ""
    experts = f" ep {layout.ep}" if layout.ep > 1 else ""
    experts += f" expert_tp {layout.expert_tp}" if layout.expert_tp is not None else ""
    return f"tp {layout.tp} cp {layout.cp} pp {layout.pp}{virtual} dp {layout.dp}{experts}"


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
    progress: Callable[[str, int, int], None] | None = None,
    **scenario: Any,
) -> LayoutSearch:
    """The fastest layouts of a model on a number of GPUs, with micro-batches and a method for each.

    It tries all divisors of `gpus` as tensor-, context-, pipeline- and data-parallel sizes, with 1, 2, 4 or 8 stages of
    a pipeline rank, and all sizes of expert parallelism that divide the experts, as far as the model, the global batch,
    the schedule and the memory allow. On each layout it tries the original order, fixed lengths, per-document and
    adaptive sharding; whole documents with and without adaptive release, in 1, 2 or 4 times as many micro-batches as a
    global batch has contexts; and Dynamic-CP with and without release. Dynamic-CP divides context- and data-parallel
    ranks itself, so it is tried once for each of the other sizes, with the fewest context-parallel ranks.

    Candidates are simulated in the order of a bound on their time (`Bounds`). Those that by their bound cannot be among
    the fastest `RANKED` layouts are not simulated. By chance a plan of unequal work can be faster than its bound, so
    bounds are lowered by as much as that happened in simulated plans. Deterministic.

    Args:
        lengths: int[n] tokens of the documents in arrival order; longer ones are split at the context. A few global
            batches are enough; the search time grows with them.
        model: its sizes.
        hardware: the GPUs and links.
        gpus: number of GPUs.
        tokens_per_batch: of a global batch, rounded to whole contexts.
        context: most tokens of a document.
        template: fields of layouts other than sizes, such as `fsdp` and `recompute`; default: those of `own`, or the
            defaults of `wlb_tools.ParallelLayout`.
        own: the caller's layout, to compare with.
        by: see `tune`.
        max_mean_delay: iterations that a token may wait on average.
        progress: see `wlb_tools.simulate`.
        scenario: further arguments of `wlb_tools.Scenario`, such as `kernel_model` or `cp_overlap`.

    Raises:
        WlbError: see `wlb_tools.simulate`; no layout is possible, and why; `own` has another number of GPUs, or is
            impossible.

    Complexity:
        A pipeline of equal micro-batches for every candidate, some thousands on 1,024 GPUs, and a simulation for each
        candidate that is not ruled out, typically some tens.
    """
    check_integer("gpus", gpus, minimum=1, maximum=MAX_WORLD_SIZE)
    check_integer("tokens_per_batch", tokens_per_batch, minimum=context)
    if by not in get_args(Objective):
        raise error("by", f"= {by!r}: must be one of {', '.join(get_args(Objective))}", value=by)
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
    search = _Search(np.asarray(pieces, dtype=np.int64), options, by, progress or (lambda *_: None))
    return search.run(gpus, template or own or ParallelLayout(), own)


@dataclass(frozen=True)
class _Candidate:
    """A plan on a layout, and the least seconds that it takes for the whole stream, by the objective."""

    scenario: Scenario
    settings: Settings
    bound: float


class _Search:
    """One search."""

    def __init__(
        self,
        lengths: NDArray[np.int64],
        options: dict[str, Any],
        by: Objective,
        progress: Callable[[str, int, int], None],
    ) -> None:
        self._lengths, self._options, self._by, self._progress = lengths, options, by, progress
        self._model: ModelConfig = options["model"]
        self._contexts: int = options["num_micro_batches"]
        ends = lengths.cumsum()
        cuts = np.union1d(ends, np.arange(options["context"], int(ends[-1:].sum()), options["context"]))
        cut = np.diff(cuts, prepend=0)
        self._whole_flops, self._cut_flops = (float(self._model.flops(of).sum()) for of in (lengths, cut))
        self._bounds = Bounds(lengths, cut)
        self._refused: Counter[str] = Counter()
        self._nearest: tuple[float, ParallelLayout | None] = (math.inf, None)
        self._found: dict[tuple[ParallelLayout, Settings], Choice | None] = {}  # None: the plan is impossible
        self._tightness = 1.0  # least simulated time over its bound, if that is below 1

    def run(self, gpus: int, template: ParallelLayout, own: ParallelLayout | None) -> LayoutSearch:
        """The whole search."""
        self._progress("bounds", 0, 1)
        scenarios = [self._scenario(layout) for layout in self._layouts(gpus, template)]
        candidates = list(self._candidates(scenarios))
        if not candidates:
            reasons = " ".join(self._reasons().sentences())
            raise error("gpus", f"= {gpus}: no layout is possible. {reasons}", value=gpus)
        self._total = len(candidates)
        mine = [] if own is None else list(self._candidates([self._scenario(own)]))
        ranked = self._fastest(candidates, RANKED)
        without = self._fastest(_without_wlb(candidates), 1)
        made, made_without = self._fastest(mine, 1), self._fastest(_without_wlb(mine), 1)
        self._progress("done", self._total, self._total)
        return LayoutSearch(
            by=self._by,
            ranked=tuple(ranked),
            without=without[0],
            own=next(iter(made), None),
            own_without=next(iter(made_without), None),
            refused=self._reasons(),
            layouts=len(scenarios),
            candidates=self._total,
            simulated=sum(choice is not None for choice in self._found.values()),
        )

    def _layouts(self, gpus: int, template: ParallelLayout) -> Iterator[ParallelLayout]:
        """Possible layouts; impossible ones are counted."""
        experts = math.gcd(*num_experts(self._model)) or 1
        for tp in _divisors(gpus):
            for cp in _divisors(gpus // tp):
                for pp in _divisors(gpus // tp // cp):
                    dp = gpus // tp // cp // pp
                    for virtual in _VIRTUAL_STAGES if pp > 1 else (1,):
                        ranks = tp * dp * cp // math.gcd(tp * dp * cp, template.expert_tp or tp)
                        for ep in _divisors(math.gcd(ranks, experts)):
                            sizes: dict[str, Any] = dict(zip(SIZES, (tp, cp, pp, dp, virtual, ep), strict=True))
                            try:
                                layout = dataclasses.replace(template, stage_layers=None, **sizes)
                            except WlbError as reason:
                                self._refused[f"their ranks are no multiple of {reason.argument}"] += 1
                                continue
                            if (why := self._obstacle(layout)) is None:
                                yield layout
                            else:
                                self._refused[why] += 1

    def _obstacle(self, layout: ParallelLayout) -> str | None:
        """Why a layout is impossible."""
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
            self._nearest = min(self._nearest, (lacking, layout), key=lambda one: one[0])
            return "a micro-batch does not fit into memory"
        return None

    def _lacking(self, layout: ParallelLayout, split: int) -> float | None:
        """Bytes that a GPU lacks for micro-batches of one context; None: the schedule does not take their number."""
        options = {name: self._options[name] for name in ("schedule", "reserved_bytes") if name in self._options}
        per_rank = self._contexts * split // layout.dp
        hardware, tokens = self._options["hardware"], self._options.get("max_tokens") or self._options["context"]
        try:
            return lacking_bytes(self._model, layout, hardware, tokens=tokens, num_micro_batches=per_rank, **options)
        except WlbError:
            return None

    def _reasons(self) -> Refused:
        lacking, nearest = self._nearest
        return Refused(dict(sorted(self._refused.items())), nearest, 0.0 if nearest is None else lacking)

    def _scenario(self, layout: ParallelLayout) -> Scenario:
        """The scenario on a layout, with costs fitted to it unless the caller gave some."""
        scenario = Scenario(layout=layout, **self._options)
        if scenario.cost_model is not None:
            return scenario
        efficiency = self._bounds.fitted_efficiency(scenario)
        return dataclasses.replace(scenario, cost_model=scenario.flops(attention_efficiency=efficiency))

    def _candidates(self, scenarios: list[Scenario]) -> Iterator[_Candidate]:
        planned = set()
        for scenario in sorted(scenarios, key=lambda scenario: scenario.layout.cp):
            layout = scenario.layout
            others = (layout.tp, layout.pp, layout.virtual_stages, layout.ep)
            dynamic = others not in planned and obstacle(scenario) is None
            if dynamic:
                planned.add(others)
            for settings in self._settings(scenario, dynamic=dynamic):
                bound = self._bounds.seconds(scenario, settings)
                if self._by == "flops" and settings.kind in ("original", *_SHARDED_ALIKE):
                    bound *= self._whole_flops / self._cut_flops  # it is not yet known what fixed length will cut
                yield _Candidate(scenario, settings, bound)

    def _settings(self, scenario: Scenario, *, dynamic: bool) -> Iterator[Settings]:
        """Settings of plans that a layout allows."""
        prices = (None, DELAY_PRICE) if scenario.max_mean_delay else (None,)
        kinds: tuple[Kind, ...] = (*WITHOUT_WLB, "adaptive_cp")
        for kind in kinds:
            if scenario.layout.cp > 1 or kind not in _SHARDED_ALIKE:
                yield Settings(kind=kind, max_tokens=scenario.context)
        for split in SPLITS:
            if self._lacking(scenario.layout, split) == 0:
                most = scenario.setup(split=split).max_tokens
                for price in prices:
                    kind = "no_waiting" if price is None else "wlb"
                    yield Settings(kind=kind, max_tokens=most, delay_price=price, split=split)
        for price in prices if dynamic else ():
            kind = "dynamic_cp" if price is None else "wlb_dynamic_cp"
            yield Settings(kind=kind, max_tokens=scenario.limit, delay_price=price, strategy="per_document")

    def _fastest(self, candidates: Iterable[_Candidate], number: int) -> list[Choice]:
        """The fastest layouts, each with its best plan."""
        best: dict[ParallelLayout, Choice] = {}
        for done, candidate in enumerate(sorted(candidates, key=lambda candidate: candidate.bound)):
            times = sorted(map(self._seconds, best.values()))
            if len(times) >= number and candidate.bound * self._tightness > times[number - 1]:
                break
            layout = candidate.scenario.layout
            self._progress(in_short(layout), done, self._total)
            choice = self._simulated(candidate)
            if choice is None or choice.delay > candidate.scenario.max_mean_delay:
                continue
            if layout not in best or self._seconds(choice) < self._seconds(best[layout]):
                best[layout] = choice
        return sorted(best.values(), key=self._seconds)[:number]

    def _simulated(self, candidate: _Candidate) -> Choice | None:
        """The simulated candidate; None if its plan is impossible, which is counted."""
        scenario, settings = candidate.scenario, candidate.settings
        key = (scenario.layout, settings)
        if key in self._found:
            return self._found[key]
        try:
            outcome = simulate(self._lengths, scenario, variants={settings.kind: settings.variant}).baseline
        except WlbError as reason:
            self._refused[f"{settings.title} has no plan for it ({reason})"] += 1
            self._found[key] = None
            return None
        choice = self._found[key] = Choice(**vars(settings), outcome=outcome)
        self._tightness = min(self._tightness, self._seconds(choice) / candidate.bound)
        return choice

    def _seconds(self, choice: Choice) -> float:
        """Seconds of the stream. By FLOPs: scaled as if the FLOPs of uncut documents were trained."""
        work = self._whole_flops / choice.outcome.flops if self._by == "flops" else 1.0
        return work * choice.outcome.steady_seconds


class Bounds:
    """Least time of a plan: the mean work of its documents, spread evenly over ranks and micro-batches.

    Args:
        whole: int64[n] tokens of the documents.
        cut: int64[n] tokens of the same, cut where a context ends.
    """

    def __init__(self, whole: NDArray[np.int64], cut: NDArray[np.int64]) -> None:
        self._lengths = {False: whole, True: cut}
        self._attention: dict[tuple[int, bool], list[Floats]] = {}  # by tp
        self._masks: dict[int, float] = {}

    def fitted_efficiency(self, scenario: Scenario) -> float:
        """`Scenario.fitted_efficiency`; attention is timed once for each tp."""
        layout = scenario.layout
        if layout.tp not in self._masks:
            self._masks[layout.tp] = scenario.attention_seconds(self._lengths[False])
        return scenario.fitted_efficiency(self._lengths[False], attention_seconds=self._masks[layout.tp])

    def seconds(self, scenario: Scenario, settings: Settings) -> float:
        """The least seconds that a plan takes for the whole stream.

        It assumes that attention of whole documents is even on context-parallel ranks, that global batches are full and
        micro-batches equal, and that no keys are exchanged if only needed ones are gathered. For Dynamic-CP it is only
        the work, without bubble and exchange, because groups may have any size, and light micro-batches fill and drain
        the pipeline.
        """
        layout, tokens = scenario.layout, int(self._lengths[False].sum())
        count = int(scenario.micro_batches * (1 if settings.dynamic else settings.split))
        steps = tokens / scenario.tokens_per_batch
        forward, backward = (of / (steps * count * layout.cp) for of in self._of_passes(scenario, cut=settings.cuts))
        made = scenario.stage_seconds(
            [scenario.tokens_per_batch / count / layout.cp],
            attention_forward=forward[None],
            attention_backward=backward[None],
            keys_gathered=None if scenario.cp_keys == "all" else [0.0],
        )
        apart, per_rank = scenario.step_end, count // layout.dp
        if settings.dynamic:
            busy = (made.seconds - made.exposed_cp - made.exposed_pp)[0].sum()  # over stages and passes
            return steps * (float(busy) * per_rank / layout.pp + apart)
        seconds = made.seconds + scenario.exposed_dp(made.computing)
        simulated = simulate_steps(
            np.broadcast_to(seconds[0], (1, 1, per_rank, *made.seconds.shape[1:])),
            schedule=scenario.pipeline_schedule,
            num_stages=layout.pp,
            num_virtual_stages=layout.virtual_stages,
            p2p_seconds=np.broadcast_to(made.p2p[0], (1, 1, per_rank)),
        )
        return steps * (float(simulated.seconds[0]) + apart)

    def _of_passes(self, scenario: Scenario, *, cut: bool) -> list[Floats]:
        """Float64[kinds] each: seconds of all documents' attention in a layer of each kind, forward and backward."""
        key = (scenario.layout.tp, cut)
        if key not in self._attention:
            masks, weights = scenario.masks
            lengths = self._lengths[cut]
            self._attention[key] = [
                np.array(
                    [
                        float(segment_seconds(scenario.attention, lengths, lengths, mask, passes=passes).sum())
                        for mask in masks
                    ]
                )
                @ weights
                for passes in _PASSES
            ]
        return self._attention[key]


def _without_wlb(candidates: list[_Candidate]) -> list[_Candidate]:
    return [candidate for candidate in candidates if candidate.settings.kind in WITHOUT_WLB]


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]
