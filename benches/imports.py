"""How long `import wlb` takes over numpy, and `import wlb.torch` over torch.

    python -m benches.imports

A new process imports what is needed, then the module, and says how long each took. The middle of several processes is
shown, and the ratio of both together to what is needed, in the same process. Without torch the second line is left out,
by name.
"""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from statistics import median

PAIRS = {"wlb": ("numpy", 15, "0.03 s wanted"), "wlb.torch": ("torch", 5, "1.15 times wanted")}
"""For each module: what it needs first, the number of processes that import it, and the goal."""

PROGRAM = """
import time
began = time.perf_counter()
import {needs}
between = time.perf_counter()
import {module}
print(between - began, time.perf_counter() - between)
"""


def seconds(module: str, needs: str) -> tuple[float, float]:
    """Seconds of importing what a module needs, and then of importing the module, in a new process."""
    program = [sys.executable, "-c", PROGRAM.format(module=module, needs=needs)]
    said = subprocess.run(program, check=True, capture_output=True, text=True).stdout
    first, second = map(float, said.split())
    return first, second


def main() -> None:
    """Prints a line for each."""
    for module, (needs, times, goal) in PAIRS.items():
        if find_spec(needs) is None:
            print(f"import {module}: left out, {needs} is not installed")
            continue
        seconds(module, needs)  # writes bytecode
        pairs = [seconds(module, needs) for _ in range(times)]
        more = median(second for _, second in pairs)
        ratio = median((first + second) / first for first, second in pairs)
        print(f"import {module}: {more:.3f} s over {needs}, {ratio:.3f} times {needs}'s ({goal})")


if __name__ == "__main__":
    main()
