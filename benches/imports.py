"""How long `import wlb` takes over numpy, and `import wlb.torch` over torch.

    python -m benches.imports

Each is imported in processes of its own, in turns; the least of their times is taken. Python's own start is in all of
them. Without torch the second line is left out, by name.
"""

from __future__ import annotations

import subprocess
import sys
import time
from importlib.util import find_spec
from statistics import median

TIMES = 15
PAIRS = {"wlb": ("numpy", 0.03), "wlb.torch": ("torch", None)}
"""What each needs, and the seconds that it may take over that."""


def seconds(module: str) -> float:
    """Of a new process that imports a module."""
    began = time.perf_counter()
    subprocess.run([sys.executable, "-c", f"import {module}"], check=True)
    return time.perf_counter() - began


def compared(module: str, needs: str, times: int) -> tuple[float, float, float]:
    """Least seconds of what it needs and of itself; the median of their ratios, pair by pair."""
    seconds(module)  # writes bytecode
    pairs = [(seconds(needs), seconds(module)) for _ in range(times)]
    before, after = (min(each) for each in zip(*pairs, strict=True))
    return before, after, median(b / a for a, b in pairs)


def main() -> None:
    """Prints a line for each."""
    for module, (needs, most) in PAIRS.items():
        if find_spec(needs) is None:
            print(f"import {module}: left out, {needs} is not installed")
            continue
        before, after, ratio = compared(module, needs, TIMES if needs == "numpy" else TIMES // 3)
        goal = "" if most is None else f", {most:g} s wanted"
        print(
            f"import {module}: {after:.3f} s, {after - before:.3f} s over {needs}{goal}; {after / before:.3f} times"
            f" {needs}'s, in the median {ratio:.3f}"
        )


if __name__ == "__main__":
    main()
