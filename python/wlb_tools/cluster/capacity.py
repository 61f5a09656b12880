"""Number of tokens that fit into a GPU, and what to change if they are too few."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from wlb._choices import Schedule
from wlb._core import WlbError
from wlb._errors import check_integer, error
from wlb.models import FeedForward, ModelConfig
from wlb_tools.cluster.hardware import GIB, Hardware
from wlb_tools.cluster.memory import RESERVED_BYTES, RankMemory, memory_per_rank
from wlb_tools.cluster.parallel import ParallelLayout, default_schedule


def max_tokens(
    model: ModelConfig,
    layout: ParallelLayout,
    hardware: Hardware,
    *,
    schedule: Schedule | None = None,
    num_micro_batches: int | Callable[[ParallelLayout], int] | None = None,
    reserved_bytes: int = RESERVED_BYTES,
    at_least: int = 1,
) -> int:
    """The most tokens that every micro-batch may have, on all context-parallel ranks together: the paper's `S_max`.

    Even if all micro-batches under way have this size, no rank runs out of memory.

    Args:
        model: its sizes.
        layout: the layout on GPUs.
        hardware: with `memory_bytes`.
        schedule: of the pipeline; default: 1F1B, interleaved if the layout has virtual stages.
        num_micro_batches: as in `wlb_tools.memory_per_rank`; or a function of a layout that returns it, so that the
            advised changes fit with the number that they then have.
        reserved_bytes: as in `wlb_tools.memory_per_rank`.
        at_least: number of tokens that a micro-batch must be able to have, such as the context window.

    Raises:
        WlbError: that many do not fit; names the rank, the missing GiB, and the smallest changes with which they would
            fit, first on the same GPUs, then on more. Or no memory is left, or the schedule does not support the
            layout.
    """
    layout.check(model=model)
    check_integer("at_least", at_least, minimum=0)
    check_integer("reserved_bytes", reserved_bytes, minimum=0)
    if reserved_bytes >= hardware.memory_bytes:
        message = (
            f"= {reserved_bytes} ({reserved_bytes / GIB:.1f} GiB): leaves nothing of the"
            f" {hardware.memory_bytes / GIB:.1f} GiB of {hardware.name}"
        )
        raise error("reserved_bytes", message, value=reserved_bytes)

    def memory(layout: ParallelLayout, tokens: ArrayLike, schedule: Schedule | None = schedule) -> RankMemory:
        return memory_per_rank(
            model,
            layout,
            tokens,
            schedule=schedule,
            num_micro_batches=num_micro_batches(layout) if callable(num_micro_batches) else num_micro_batches,
            reserved_bytes=reserved_bytes,
        )

    def fits(layout: ParallelLayout, schedule: Schedule | None = schedule) -> bool:
        try:
            return bool((memory(layout, at_least, schedule).total <= hardware.memory_bytes).all())
        except WlbError:  # a schedule that does not support this layout
            return False

    most, needed = _most_tokens(functools.partial(memory, layout), hardware, at_least)
    if most >= at_least:
        return most

    rank = int(needed.argmax())
    message = (
        f"layout does not fit: {at_least:,} tokens of {model.name} need {needed[rank] / GIB:.1f} GiB on pipeline rank"
        f" {rank}, {(needed[rank] - hardware.memory_bytes) / GIB:.1f} GiB more than the"
        f" {hardware.memory_bytes / GIB:.1f} GiB of {hardware.name}"
    )
    found = [change for more_gpus in (False, True) for change in _least_changes(model, layout, more_gpus, fits)]
    default = default_schedule(layout)
    if schedule not in (None, default) and fits(layout, default):
        found.insert(0, Change({"schedule": default}))
    raise DoesNotFit(message, found, layout)


def lacking_bytes(
    model: ModelConfig,
    layout: ParallelLayout,
    hardware: Hardware,
    *,
    tokens: int,
    num_micro_batches: int | None = None,
    schedule: Schedule | None = None,
    reserved_bytes: int = RESERVED_BYTES,
) -> float:
    """Bytes that the fullest GPU lacks for micro-batches of `tokens` tokens; 0 if they fit.

    Args:
        model: its sizes.
        layout: the layout on GPUs.
        hardware: with `memory_bytes`.
        tokens: of a micro-batch, on all context-parallel ranks together.
        num_micro_batches: as in `wlb_tools.memory_per_rank`.
        schedule: as in `wlb_tools.memory_per_rank`.
        reserved_bytes: as in `wlb_tools.memory_per_rank`.

    Raises:
        WlbError: as `wlb_tools.memory_per_rank`.
    """
    options: dict[str, Any] = {"schedule": schedule, "num_micro_batches": num_micro_batches}
    memory = functools.partial(memory_per_rank, model, layout, reserved_bytes=reserved_bytes, **options)
    most, needed = _most_tokens(memory, hardware, tokens)
    return 0.0 if most >= tokens else float(needed.max()) - hardware.memory_bytes


def _most_tokens(
    memory: Callable[[ArrayLike], RankMemory], hardware: Hardware, tokens: int
) -> tuple[int, NDArray[np.float64]]:
    """Most tokens that fit, below 0 if not even the parameters fit; and float64[pp], the bytes that `tokens` need."""
    one, needed = memory(1), memory(tokens).total
    room = hardware.memory_bytes - memory(0).total
    # The workspace grows ever slower, so that as many fit as if it grew as from the first token on, and maybe more.
    most = int(np.floor((room / (one.activations + one.workspace + one.logits)).min()))
    beyond = int(np.floor((room / (one.activations + one.logits)).min())) + 1 if most >= 0 else most
    while beyond - most > 1:
        tried = np.unique(np.linspace(most, beyond, 66).astype(np.int64))[1:-1]
        fit = (memory(tried).total <= hardware.memory_bytes).all(axis=-1)
        most = int(tried[fit][-1]) if fit.any() else most
        beyond = int(tried[~fit][0]) if not fit.all() else beyond
    return most, needed


@dataclass(frozen=True)
class Change:
    """Settings that would make a model fit."""

    settings: Mapping[str, object]
    gpus: int | None = None  # number of GPUs, if more are needed


class DoesNotFit(WlbError):
    """A model does not fit into memory.

    Attributes:
        changes: the smallest changes with which it would fit; empty if none was found.
    """

    def __init__(self, problem: str, changes: Sequence[Change], layout: ParallelLayout) -> None:
        self._problem, self.changes = problem, tuple(changes)
        super().__init__(self.worded(lambda name, value: f"{name}={value!r}"))
        self.argument, self.index, self.value = "layout", None, layout

    def __reduce__(self) -> tuple[object, ...]:
        """Lets exceptions be copied and sent."""
        return type(self), (self._problem, self.changes, self.value)

    def worded(self, setting: Callable[[str, object], str]) -> str:
        """The message, with settings written by `setting(name, value)` as keyword arguments or as options."""
        if not self.changes:
            return f"{self._problem}; nor would it on 8 times as many GPUs along every axis"
        options = (
            " and ".join(setting(name, value) for name, value in change.settings.items())
            + (f" ({change.gpus} GPUs)" if change.gpus else "")
            for change in self.changes
        )
        return f"{self._problem}; it would fit with {', or with '.join(options)}"


_SAVINGS: dict[str, tuple[object, ...]] = {
    "fsdp": ("none", "zero1", "zero2", "zero3"),
    "recompute": ("attention", "none", "selective", "full"),
    "fused_loss": (False, True),
    "fused_ffn": (False, True),
    "sequence_parallel": (False, True),
}
"""Settings that save memory on the same GPUs; the value that costs most time comes last."""

_AXES = ("tp", "cp", "pp", "dp")
"""Axes that may grow by factors of 2, 4 and 8; "ep" may on the same GPUs."""

_SHOWN = 3


def _least_changes(
    model: ModelConfig,
    layout: ParallelLayout,
    more_gpus: bool,
    fits: Callable[[ParallelLayout], bool],
) -> list[Change]:
    """The smallest changes with which a layout fits: few settings, few GPUs, small steps."""
    savings = [*_SAVINGS, *(["ep"] if any(num_experts(model)) else [])]
    settings = [*savings, *_AXES] if more_gpus else savings
    for count in range(1, len(settings) + 1):
        options: list[tuple[int, Change]] = []
        for names in itertools.combinations(settings, count):
            if more_gpus and set(_AXES).isdisjoint(names):
                continue
            changed = next((changed for changed in _changed(model, layout, names) if fits(changed)), None)
            if changed is not None:
                saving = {name: getattr(changed, name) for name in names}
                options.append((changed.world_size, Change(saving, changed.world_size if more_gpus else None)))
        if options:
            return [change for _, change in sorted(options, key=lambda option: option[0])[:_SHOWN]]
    return []


def num_experts(model: ModelConfig) -> list[int]:
    """Number of experts of each kind of layer with routed experts."""
    blocks = (block for layer in model.kinds for block in layer.of_kind(FeedForward))
    return [block.num_experts for block in blocks if block.num_experts > 1]


def _changed(model: ModelConfig, layout: ParallelLayout, names: tuple[str, ...]) -> Iterator[ParallelLayout]:
    """The layouts that the model allows in which each of these settings saves more; those with fewest GPUs first."""
    values: list[tuple[object, ...]] = []
    for name in names:
        now = getattr(layout, name)
        if name in _AXES or name == "ep":
            values.append(tuple(now * factor for factor in (2, 4, 8)))
        else:
            values.append(_SAVINGS[name][_SAVINGS[name].index(now) + 1 :])
    possible = []
    for choice in itertools.product(*values):
        try:
            changed = dataclasses.replace(layout, **dict(zip(names, choice, strict=True)))  # type: ignore[arg-type]
            changed.check(model=model)
        except WlbError:
            continue
        possible.append(changed)
    yield from sorted(possible, key=lambda changed: changed.world_size)
