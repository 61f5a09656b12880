"""Why a simulation comes out as it does, computed from its parts."""

from __future__ import annotations

import itertools

import wlb
from wlb.simulation import Outcome
from wlb.simulation.outcome import IDLE

FLUSH_WARNING = 0.02
"""A larger share of the time at the end of the stream says more about the stream's length than about a method."""

_PAPER_ORDER = ("per_document", "adaptive_cp", "packing", "wlb")


def explanation(simulation: wlb.Simulation, shown: str) -> list[str]:
    """What each kind of method could win of the baseline's time, what that costs, and what the stream's end does."""
    before, after = simulation.baseline, simulation.outcomes[shown]
    sentences = [_room(simulation, before)]
    if after is not before:
        sentences.append(_whole_documents(before, after, simulation.speedup(shown)))
        sentences += _more_micro_batches(before, after)
    if all(name in simulation.outcomes for name in _PAPER_ORDER):
        sentences.append(_order(simulation))
    return [*sentences, *_stream_end(simulation)]


def _room(simulation: wlb.Simulation, outcome: Outcome) -> str:
    share = {name: float(part.sum()) / outcome.total_seconds for name, part in outcome.attribution.items()}
    communication = sum(share[f"{axis}_communication"] for axis in ("cp", "tp", "ep", "dp"))
    idle = sum(share[name] for name in IDLE)
    floor = simulation.scenario.equal_bubble
    stays = min(idle, (1 - idle - share["dp_communication"]) * floor / (1 - floor))
    return (
        f"Of {outcome.title}'s time {communication:.1%} is communication that nothing hides, and {idle:.1%} idle, of"
        f" which {stays:.1%} would stay with as many micro-batches of equal time. Evening out micro-batches can win the"
        f" other {idle - stays:.1%}; sharding the {share['cp_wait']:.1%} in which GPUs wait for the slowest"
        " context-parallel rank, and what the pipeline idles because of them."
    )


def _whole_documents(before: Outcome, after: Outcome, speedup: float) -> str:
    more = after.flops / before.flops - 1
    cut = [outcome.summary()["documents_cut"] for outcome in (before, after)]
    mfu = after.model_flops_utilization / before.model_flops_utilization
    return (
        f"{before.title} cuts {cut[0]:,} documents, {after.title} {cut[1]:,}: that is {more:+.1%} FLOPs for the same"
        f" tokens. By FLOPs (MFU) {after.title} is {mfu:.3f} times as fast, by tokens {speedup:.3f}."
    )


def _more_micro_batches(before: Outcome, after: Outcome) -> list[str]:
    """What else than balance makes a method fast: a shorter bubble, and less communication between fewer ranks."""
    if after.micro_batches == before.micro_batches and after.cp_sizes == before.cp_sizes:
        return []
    idle, communication = (
        [
            sum(float(outcome.attribution[part].sum()) for part in parts) / outcome.total_seconds
            for outcome in (before, after)
        ]
        for parts in (IDLE, ("cp_communication",))
    )
    sentence = (
        f"{after.title} makes {after.micro_batches:.3g} micro-batches of a step where {before.title} has"
        f" {before.micro_batches:.3g}: {idle[1]:.1%} of its time is idle, not {idle[0]:.1%}."
    )
    if after.cp_sizes == before.cp_sizes:
        return [sentence]
    sizes = ", ".join(f"{share:.1%} on {size}" for size, share in after.cp_sizes.items())
    return [
        f"{sentence} Tokens by the ranks that share their documents: {sizes}; {communication[1]:.1%} of its time is"
        f" communication between them, not {communication[0]:.1%}."
    ]


def _order(simulation: wlb.Simulation) -> str:
    speeds = [simulation.speedup(name) for name in _PAPER_ORDER]
    holds = all(a < b for a, b in itertools.pairwise(speeds))
    found = ", ".join(
        f"{simulation.outcomes[name].title} {speed:.3f}" for name, speed in zip(_PAPER_ORDER, speeds, strict=True)
    )
    return f"The paper's order of gains, {found}, {'holds' if holds else 'does not hold'} here."


def _stream_end(simulation: wlb.Simulation) -> list[str]:
    shares = {outcome.title: outcome.flush_share for outcome in simulation.outcomes.values()}
    title, most = max(shares.items(), key=lambda item: item[1])
    sentences = [
        f"Steps at the end of the stream, small and uneven, take from {min(shares.values()):.1%} to {most:.1%}"
        f" of the time ({title})."
    ]
    if most > FLUSH_WARNING:
        sentences.append(
            f"Warning: above {FLUSH_WARNING:.0%} the comparison says more about the length of this stream than about"
            " the methods; give it more documents or --steps."
        )
    return sentences
