"""`python -m wlb_tools`, and the `wlb` command: Ctrl-C ends it quietly, even while it still imports `wlb`."""

# What `signal` wraps: importing that takes a hundredth of a second.
import _signal  # type: ignore[import-not-found]
import os
import sys

INTERRUPTED = 128 + _signal.SIGINT


class Interrupted(BaseException):
    """Ctrl-C. Not KeyboardInterrupt, which libraries catch and answer in words of their own."""


def main() -> None:
    """Runs the command and exits; on Ctrl-C with status 130 and at most one line."""
    # Nothing is to be put in order yet, and an import may swallow an exception.
    _signal.signal(_signal.SIGINT, _leave)
    from wlb_tools.command import load

    run = load()
    try:
        _signal.signal(_signal.SIGINT, _interrupt)
        run(sys.argv[1:])
    except Interrupted:
        print("wlb: interrupted", file=sys.stderr)
        sys.exit(INTERRUPTED)


def _interrupt(signum: int, frame: object) -> None:
    # What is under way gets one chance to put things in order.
    _signal.signal(_signal.SIGINT, _leave)
    raise Interrupted


def _leave(signum: int, frame: object) -> None:
    os._exit(INTERRUPTED)


if __name__ == "__main__":
    main()
