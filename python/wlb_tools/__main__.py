"""`python -m wlb_tools`, and the `wlb` command: Ctrl-C ends it quietly, even while it still imports `wlb`."""

# The module behind `signal`, whose import would take a hundredth of a second.
import _signal  # type: ignore[import-not-found]
import os
import sys

INTERRUPTED = 128 + _signal.SIGINT


class Interrupted(BaseException):
    """Ctrl-C. Not a KeyboardInterrupt, which libraries catch and answer with their own messages."""


def main() -> None:
    """Runs the command and exits; on Ctrl-C with status 130 and at most one line."""
    # Nothing needs to be cleaned up yet, and an import may swallow an exception.
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
    # The running command gets one chance to clean up.
    _signal.signal(_signal.SIGINT, _leave)
    raise Interrupted


def _leave(signum: int, frame: object) -> None:
    os._exit(INTERRUPTED)


if __name__ == "__main__":
    main()
