"""What a reproduction gives: rows with the paper's number beside ours, and how ours came about."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from studies.paper.inputs import Point

Kind = Literal["measured", "simulated", "emulated"]
"""measured: taken with a clock, or counted, on this machine; simulated: a predicted time of the paper's cluster;
emulated: a predicted time under another protocol than the paper's, as near as what was published allows."""


@dataclass(frozen=True)
class Row:
    """One number of the paper, and ours.

    `low` and `high` are the least and greatest over the sweep of inputs, or over samples where `ours` is measured.
    """

    quantity: str  # what the number is; rows of one quantity stand together
    name: str
    kind: Kind
    paper: float | None  # None: not published as a number
    ours: float
    low: float | None = None
    high: float | None = None
    low_at: str = ""  # the point of the sweep that gave `low`
    high_at: str = ""
    ratio: bool = True  # over 1: a speed-up, an imbalance; not seconds or TFLOP/s

    @property
    def recovered(self) -> float | None:
        """The share of what the paper's number is above 1 that ours is above 1; None where that says nothing."""
        if self.paper is None or self.paper == 1 or not self.ratio:
            return None
        return (self.ours - 1) / (self.paper - 1)

    @property
    def width(self) -> float | None:
        """Of the band."""
        return None if self.low is None or self.high is None else self.high - self.low

    @property
    def inside(self) -> bool | None:
        """Whether the paper's number is in our band; None without one or the other."""
        if self.paper is None or self.low is None or self.high is None:
            return None
        return self.low <= self.paper <= self.high


@dataclass(frozen=True)
class Facts:
    """A small table of computed reasons; the first column names the row."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Result:
    """A table or figure of the paper."""

    name: str  # "table2", "fig12", ...
    title: str
    rows: tuple[Row, ...]
    notes: tuple[str, ...] = ()  # what was found, and where ours differs and why
    facts: tuple[Facts, ...] = ()
    influence: Mapping[str, tuple[float, float]] = field(default_factory=dict)  # by input: least, greatest `influenced`
    influenced: str = ""  # the row that `influence` is about

    def as_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "name": self.name,
            "title": self.title,
            "rows": [
                vars(row) | {name: getattr(row, name) for name in ("inside", "recovered", "width")} for row in self.rows
            ],
            "notes": list(self.notes),
            "facts": [vars(facts) for facts in self.facts],
            "influenced": self.influenced,
            "influence": {name: list(values) for name, values in self.influence.items()},
        }


Series = Mapping[str, float]
"""A number by the label of a point of the sweep; the first is the central one."""


def row(quantity: str, name: str, kind: Kind, paper: float | None, series: Series, *, ratio: bool = True) -> Row:
    """A row from a number at every point of a sweep."""
    low, high = min(series, key=lambda at: series[at]), max(series, key=lambda at: series[at])
    central = next(iter(series.values()))
    return Row(quantity, name, kind, paper, central, series[low], series[high], low, high, ratio)


def influence(points: Iterable[Point], series: Series) -> dict[str, tuple[float, float]]:
    """The range of a number over the values of every input alone, the central one included, widest first."""
    central = next(iter(series.values()))
    ranges: dict[str, tuple[float, float]] = {}
    for point in points:
        if point.swept is not None:
            low, high = ranges.get(point.swept, (central, central))
            value = series[point.label]
            ranges[point.swept] = (min(low, value), max(high, value))
    return dict(sorted(ranges.items(), key=lambda item: item[1][0] - item[1][1]))


def holds_at(points: Sequence[Point], holds: Sequence[bool]) -> str:
    """At how many points of a sweep something holds, and where not if that is shorter to say."""
    exceptions = [point.label for point, one in zip(points, holds, strict=True) if not one]
    text = f"at {sum(holds)} of {len(holds)} points of the sweep"
    if not exceptions:
        return text
    if exceptions[0] == "central" and len(exceptions) > 1:
        return f"{text}, not at the central one"
    return f"{text}, not at {'; '.join(exceptions)}" if len(exceptions) <= 3 else text
