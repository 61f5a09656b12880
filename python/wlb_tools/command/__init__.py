"""The `wlb` command.

Its packages (cyclopts, jinja2, matplotlib, plotly, rich) are optional and only imported when the command runs:
`import wlb` needs none of them.
"""

import sys
from collections.abc import Callable, Sequence
from importlib.util import find_spec


def load() -> Callable[[Sequence[str]], None]:
    """Imports what the command needs; returns the function that runs it on the words after `wlb`, and exits."""
    missing = [name for name in ("cyclopts", "jinja2", "matplotlib", "plotly", "rich") if find_spec(name) is None]
    if missing:
        print(f"wlb: {', '.join(missing)} not installed; run: pip install {' '.join(missing)}", file=sys.stderr)
        sys.exit(2)
    from wlb_tools.command.app import run

    return run


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command and exits; `argv` are the words after `wlb`, by default those of the process."""
    load()(sys.argv[1:] if argv is None else argv)
