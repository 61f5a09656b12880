"""Times of micro-batches on this rank, forward and backward, measured without waiting for the device."""

from __future__ import annotations

import json
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

import wlb
from wlb._errors import check_integer, error
from wlb._shown import explained

Span: TypeAlias = float | tuple[Any, Any]
"""Seconds by the clock, or the device events before and after."""

_off_duty: ContextVar[bool] = ContextVar("off_duty", default=False)


@contextmanager
def untimed() -> Iterator[None]:
    """Inside this context, calls of a model are not counted as micro-batches by the hooks of a `StepTimer`."""
    before = _off_duty.set(True)
    try:
        yield
    finally:
        _off_duty.reset(before)


@explained
@dataclass(frozen=True, eq=False)
class TimedStep:
    """Seconds of one step's micro-batches on this rank.

    Attributes:
        number: The step, as it was named, or counted from 0.
        seconds: float64 [micro-batches of this rank]: forward and backward of each; NaN for one that was not timed.
        lengths: Tokens of the documents of each; empty where the step was ended without them.
        ranks: Number of context-parallel ranks that shared each, for a dynamic plan; else empty.
    """

    number: int
    seconds: NDArray[np.float64]
    lengths: tuple[NDArray[np.int64], ...] = ()
    ranks: tuple[int, ...] = ()


class StepTimer:
    """Times each micro-batch of a step on this rank: all that it computes there, forward and backward.

    On CUDA it records two events around each part and reads them once they are complete, so that neither the device nor
    the host ever waits for it; elsewhere it reads the clock. One use costs some microseconds.

    A timer must know what belongs to a micro-batch; micro-batches are numbered from 0 in every step, in the order of
    `step.micro_batches`. There are three ways:

        with timer.micro_batch(index):    # in a loop of your own, around forward and backward
            ...
        timer.attach_stages(stages)       # stages of a pipeline, where forwards and backwards alternate
        timer.attach(model)               # hooks, for a loop that you do not own; the n-th forward is micro-batch n

    Call `timer.end_step(step)` after each step. Then `timer.read()` returns the steps whose times are known.

    Waiting inside a part counts as its time, for example for keys and values of a slower context-parallel rank. Waiting
    between pipeline stages does not.

    Args:
        device: Where the micro-batches are computed; by default CUDA where there is one.
    """

    def __init__(self, device: torch.device | str | None = None) -> None:
        kind = torch.device(device).type if device is not None else "cuda" if torch.cuda.is_available() else "cpu"
        if kind not in ("cpu", "cuda"):
            raise error("device", f"= {kind!r}: is timed on cpu and cuda", value=kind)
        self._part: type[_ClockPart] | type[_EventPart] = _EventPart if kind == "cuda" else _ClockPart
        self._spans: dict[int, list[Span]] = {}
        self._ended: deque[tuple[TimedStep, dict[int, list[Span]]]] = deque()
        self._forwards = 0  # of a model with hooks, in this step
        self._steps = 0
        self._optimizers: list[_Hooks] = []  # that end steps by themselves

    def micro_batch(self, index: int) -> AbstractContextManager[None]:
        """Times its body as part of micro-batch `index` of this step. It may be entered several times, not nested.

        A part that raises is not counted.

        Raises:
            WlbError: `index` is negative, or no integer.
        """
        check_integer("index", index, minimum=0)
        return self._part(self._spans.setdefault(index, []))

    def attach_stages(self, stages: Iterable[Any]) -> None:
        """Times what pipeline stages compute (`VarlenPipelineStage`), the loss on the last one included."""
        for stage in stages:
            stage.timer = self.micro_batch

    def attach(self, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> Callable[[], None]:
        """Times a model by hooks: each call of it, and its backward pass from the gradient of its output on.

        The n-th call with gradients in a step is micro-batch n. What runs between the two passes (a loss outside of the
        model) is not seen.

        Args:
            model: The outermost module, as the loop calls it.
            optimizer: Its `step` ends the timed step, for loops to which no line can be added. Not for use with a
                `CostTracker`, which ends steps itself.

        Returns:
            A function that removes the hooks.
        """
        hooks = _Hooks(self, model)
        if optimizer is not None:
            hooks.handles.append(optimizer.register_step_post_hook(lambda *_: self._end_step(None, None)))
            self._optimizers.append(hooks)

        def remove() -> None:
            hooks.remove()
            self._optimizers = [other for other in self._optimizers if other is not hooks]

        return remove

    def next_forward(self) -> int:
        """The micro-batch that begins now, where they are only counted."""
        self._forwards += 1
        return self._forwards - 1

    def end_step(self, step: Any = None, *, lengths: Sequence[ArrayLike] | None = None) -> None:
        """Ends a step: later calls belong to the next.

        Args:
            step: A `Step` or `DynamicCpStep`, for its number and the lengths of its micro-batches.
            lengths: Instead of `step`: int [documents] for each micro-batch, if a log is to be written.

        Raises:
            WlbError: A micro-batch was timed that the step does not have; an attached optimizer has ended the step
                already; or the step is of a forest, whose nodes are no documents.
        """
        if self._optimizers:
            message = "was ended by the optimizer already: attach the model without the optimizer"
            raise error("step", message, value=self._steps)
        self._end_step(step, lengths)

    def _end_step(self, step: Any, lengths: Sequence[ArrayLike] | None) -> None:
        number = self._steps
        ranks: tuple[int, ...] = ()
        if step is not None:
            number = int(step.number)
            if hasattr(step, "groups"):
                lengths, ranks = [group.lengths for group in step.groups], tuple(len(group) for group in step.groups)
            elif isinstance(step.packing, wlb.ForestPlan):
                message = (
                    f"{number} is of a forest: costs are fitted to documents, not to nodes behind others. End it with "
                    "end_step() alone, which keeps its seconds"
                )
                raise error("step", message, value=number)
            else:
                lengths = [step.packing[index].lengths for index in step.indices.tolist()]
        arrays = tuple(np.asarray(row, np.int64) for row in lengths or ())
        spans, self._spans, self._forwards = self._spans, {}, 0
        self._steps = number + 1
        if arrays and spans and max(spans) >= len(arrays):
            message = f"has {len(arrays)} micro-batches, and micro-batch {max(spans)} was timed"
            raise error("step", message, value=number)
        self._ended.append((TimedStep(number, np.empty(0), arrays, ranks), spans))

    def read(self) -> list[TimedStep]:
        """The ended steps whose times are all known, oldest first; each is given once. Waits for nothing."""
        steps = []
        while self._ended:
            ended, spans = self._ended[0]
            if not all(_is_complete(span) for parts in spans.values() for span in parts):
                break
            self._ended.popleft()
            seconds = np.full(len(ended.lengths) or max(spans, default=-1) + 1, np.nan)
            for index, parts in spans.items():
                if parts:
                    seconds[index] = sum(map(_seconds, parts))
            steps.append(replace(ended, seconds=seconds))
        return steps

    def write(self, path: str | os.PathLike[str]) -> int:
        """Appends the steps of `read` to a log for `wlb fit`, one JSON object a micro-batch. Returns their number.

        Raises:
            WlbError: A step was ended without the lengths of its micro-batches.
        """
        rows = []
        for step in self.read():
            if step.seconds.size and not step.lengths:
                raise error(
                    "path", f"cannot tell of step {step.number}: it was ended without lengths", value=step.number
                )
            for index, (seconds, lengths) in enumerate(zip(step.seconds.tolist(), step.lengths, strict=True)):
                if seconds == seconds:
                    row = {"step": step.number, "micro_batch": index, "seconds": seconds, "lengths": lengths.tolist()}
                    shared = {"ranks": step.ranks[index]} if step.ranks else {}
                    rows.append(json.dumps({**row, **shared}) + "\n")
        with Path(path).open("a") as log:
            log.write("".join(rows))
        return len(rows)


class _ClockPart:
    __slots__ = ("_parts", "_started")

    def __init__(self, parts: list[Span]) -> None:
        self._parts = parts

    def __enter__(self) -> None:
        self._started = time.perf_counter()

    def __exit__(self, failure: object, *_: object) -> None:
        if failure is None:
            self._parts.append(time.perf_counter() - self._started)


class _EventPart:
    __slots__ = ("_parts", "_started")

    def __init__(self, parts: list[Span]) -> None:
        self._parts = parts

    def __enter__(self) -> None:
        self._started = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self._started.record()

    def __exit__(self, failure: object, *_: object) -> None:
        if failure is not None:
            return
        ended = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        ended.record()
        self._parts.append((self._started, ended))


def _is_complete(span: Span) -> bool:
    return isinstance(span, float) or bool(span[1].query())


def _seconds(span: Span) -> float:
    return span if isinstance(span, float) else 1e-3 * float(span[0].elapsed_time(span[1]))


class _Hooks:
    """Hooks of one model."""

    def __init__(self, timer: StepTimer, model: nn.Module) -> None:
        self._timer = timer
        self._forward: list[tuple[int, AbstractContextManager[None]]] = []  # the call that runs
        self.handles: list[RemovableHandle] = [
            model.register_forward_pre_hook(self._before),
            model.register_forward_hook(self._after, always_call=True),
        ]

    def remove(self) -> None:
        for handle in self.handles:
            handle.remove()

    def _before(self, *_: Any) -> None:
        # A call inside a backward pass is a recomputed one, whose time is in that pass already.
        if torch.is_grad_enabled() and not torch._C._current_graph_task_id() + 1 and not _off_duty.get():
            index = self._timer.next_forward()
            part = self._timer.micro_batch(index)
            part.__enter__()
            self._forward.append((index, part))

    def _after(self, model: nn.Module, inputs: Any, output: Any) -> None:
        if not self._forward:
            return
        index, part = self._forward.pop()
        part.__exit__(None, None, None)
        began: list[AbstractContextManager[None]] = []

        def end() -> None:
            began.pop().__exit__(None, None, None)

        def begin(gradient: Tensor) -> None:
            if not began:
                backward = self._timer.micro_batch(index)
                backward.__enter__()
                began.append(backward)
                torch.autograd.Variable._execution_engine.queue_callback(end)

        for tensor in _tensors(output):
            if tensor.requires_grad:
                tensor.register_hook(begin)  # type: ignore[no-untyped-call]


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        return [tensor for item in value.values() for tensor in _tensors(item)]
    if isinstance(value, list | tuple):
        return [tensor for item in value for tensor in _tensors(item)]
    return []
