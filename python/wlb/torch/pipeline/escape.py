"""Makes a stage that fails raise its own exception at once."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager


class _Escape(BaseException):
    """Carries an exception through torch's schedules.

    A schedule that catches an `Exception` first waits for what it has sent. Its peers wait for this rank and may never
    receive it: the rank would raise only after the timeout.
    """


@contextmanager
def escaping() -> Iterator[None]:
    """For the computation of a stage: an exception passes through torch's schedule without being caught there."""
    try:
        yield
    except Exception as reason:
        raise _Escape from _unwrapped(reason)


@contextmanager
def escaped() -> Iterator[None]:
    """For a schedule: raises the exception that a stage raised inside `escaping`."""
    try:
        yield
    except _Escape as escape:
        own = escape.__cause__
        assert own is not None
    else:
        return
    raise own


def _unwrapped(reason: Exception) -> BaseException:
    """The module's own exception: torch makes it the cause of a `RuntimeError` that names stage and inputs."""
    own, text = reason.__cause__, str(reason)
    if own is None or not ("failed to run forward" in text or "Failed to run stage backward" in text):
        return reason
    if sys.version_info >= (3, 11):
        own.add_note(inspect.cleandoc(text))
    return own
