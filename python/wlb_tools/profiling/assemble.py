"""Makes a profile from measurements, and tests the profile's model on segments that were left out."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

import wlb
from wlb._errors import error
from wlb._shown import explained
from wlb.profiles import read as read_profile
from wlb_tools.profiling.grid import LAUNCH, Shape

PASSES = ("forward", "backward")
QUANTILES = {"median": 50, "p10": 10, "p90": 90}


@dataclass(frozen=True)
class _Pass:
    """The samples of one pass, as seconds of a segment."""

    name: str
    launch: float

    @classmethod
    def of(cls, name: str, calls: Mapping[Shape, dict[str, Any]]) -> _Pass:
        """Takes the launch time from the smallest call, but at most half of the shortest other call."""
        shortest = min(_quantile(sample, name, 10) for shape, sample in calls.items() if shape != LAUNCH)
        return cls(name, min(_quantile(calls[LAUNCH], name, 50), shortest / 2))

    def segment(self, sample: dict[str, Any], quantile: float) -> float:
        return (_quantile(sample, self.name, quantile) - self.launch) / int(sample["segments_per_call"])


def _quantile(sample: dict[str, Any], name: str, quantile: float) -> float:
    return float(np.percentile(sample[f"{name}_call_seconds"], quantile))


def assemble(
    identity: dict[str, Any], layer: dict[str, Any], measured: Mapping[Shape, dict[str, Any]]
) -> dict[str, Any]:
    """A profile, as docs/semantics.md describes it, in plain JSON values.

    Args:
        identity: of the machine and the kernel.
        layer: of the linear part.
        measured: samples by shape; for every key length, either all query lengths of the grid or none.

    Raises:
        WlbError: no shape is left.
    """
    calls = {shape: sample for shape, sample in measured.items() if shape.kind != "layer"}
    queries, keys = (sorted({getattr(s, n) for s in calls if s.kind == "attention"}) for n in ("tokens", "keys"))
    tokens = sorted(shape.tokens for shape in measured if shape.kind == "layer")
    if not queries or not tokens:
        raise error("grid", "has no shape that fits into memory", value=None)
    clocks = [sample["clock_mhz"] for sample in measured.values() if sample["clock_mhz"] is not None]

    def table(pick: Callable[[dict[str, Any]], float]) -> list[list[float | None]]:
        return [[pick(calls[Shape("attention", q, k)]) if q <= k else None for k in keys] for q in queries]

    tiles = dict(zip(PASSES, identity["tiles"], strict=True))
    about = {name: value for name, value in identity.items() if name != "tiles"}
    profile: dict[str, Any] = {"format": "wlb.profile", "version": 1, **about}
    profile["clocks"] = {"sm_mhz": [min(clocks), float(np.median(clocks)), max(clocks)] if clocks else None}
    profile["query_lengths"], profile["key_lengths"] = queries, keys
    passes = [_Pass.of(name, calls) for name in PASSES]
    for part in passes:
        profile[part.name] = {"tile": tiles[part.name], "launch_seconds": part.launch}
        for label, quantile in QUANTILES.items():
            profile[part.name][f"{label}_seconds"] = table(partial(part.segment, quantile=quantile))
        profile[part.name]["segments_per_call"] = table(lambda sample: sample["segments_per_call"])
    profile["linear"] = {"tokens": tokens, "layer": layer}
    for name in PASSES:
        profile["linear"][name] = {
            f"{label}_seconds": [_quantile(measured[Shape("layer", count)], name, quantile) for count in tokens]
            for label, quantile in QUANTILES.items()
        }
    profile["held_out"] = [
        {"query_length": shape.tokens, "key_length": shape.keys}
        | {f"{part.name}_seconds": part.segment(sample, 50) for part in passes}
        for shape, sample in calls.items()
        if shape.kind == "held_out"
    ]
    return profile


@explained
@dataclass(frozen=True)
class HeldOutErrors:
    """Errors of a model on segments that were not used to make it: relative, forward plus backward."""

    relative: NDArray[np.float64]  # [held-out segments], signed: above 0 if the model predicts too much

    @property
    def median(self) -> float:
        """Median of the absolute errors."""
        return float(np.median(np.abs(self.relative)))

    @property
    def p95(self) -> float:
        """95th percentile of the absolute errors."""
        return float(np.percentile(np.abs(self.relative), 95))


def held_out_errors(profile: str | os.PathLike[str]) -> HeldOutErrors | None:
    """The errors of `wlb.KernelModel` on the segments that a profile holds out; None if it holds out none.

    Raises:
        WlbError: as `wlb.KernelModel.from_profile`.
    """
    model = wlb.KernelModel.from_profile(os.fspath(profile))
    held_out = json.loads(read_profile(profile)).get("held_out")
    if not held_out:
        return None
    queries, keys = ([segment[f"{name}_length"] for segment in held_out] for name in ("query", "key"))
    measured = np.array([sum(segment[f"{name}_seconds"] for name in PASSES) for segment in held_out])
    return HeldOutErrors(model.segment_seconds(queries, keys) / measured - 1)
