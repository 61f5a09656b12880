"""The `wlb` command.

Its packages (typer, rich, matplotlib) are optional and only imported when the command runs: `import wlb`
needs none of them.
"""

import sys
from collections.abc import Sequence
from importlib.util import find_spec


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command and exits; `argv` are the words after `wlb`, by default those of the process."""
    missing = [name for name in ("typer", "rich", "matplotlib") if find_spec(name) is None]
    if missing:
        print(f'wlb: {", ".join(missing)} not installed; run: pip install "wlb[cli]"', file=sys.stderr)
        sys.exit(2)
    from wlb.cli.app import run

    run(sys.argv[1:] if argv is None else argv)
