"""THIRD_PARTY_NOTICES.md: what is compiled into the engine, under which licence, with the texts that these ask for.

`python3 .ci/notices.py` writes it, from the crates that Cargo.lock names; `--check` fails where it is out of date.
Crates that only run while others compile are not in the wheel, and not in the file.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "THIRD_PARTY_NOTICES.md"
INTRODUCTION = """# Third-party notices

The engine (`wlb/_core`) is compiled from these crates. Where a crate may be used under the Apache License 2.0, it is;
its text is [LICENSE](LICENSE). The texts of the other licences follow. `python3 .ci/notices.py` writes this file.
"""


def compiled() -> list[dict[str, Any]]:
    """The crates of others whose code is in the engine, by name."""
    command = ["cargo", "metadata", "--format-version", "1", "--locked"]
    told = json.loads(subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT).stdout)
    packages = {package["id"]: package for package in told["packages"]}
    needs = {node["id"]: node["deps"] for node in told["resolve"]["nodes"]}
    waiting = [identity for identity, package in packages.items() if package["name"] == "wlb-python"]
    found: dict[str, dict[str, Any]] = {}
    while waiting:
        identity = waiting.pop()
        package = packages[identity]
        runs_in_the_compiler = any("proc-macro" in target["kind"] for target in package["targets"])
        if identity in found or runs_in_the_compiler:
            continue
        found[identity] = package
        waiting += [need["pkg"] for need in needs[identity] if any(kind["kind"] is None for kind in need["dep_kinds"])]
    others = [package for package in found.values() if package["source"]]
    return sorted(others, key=lambda package: (package["name"], package["version"]))


def page(packages: list[dict[str, Any]]) -> str:
    """The whole file."""
    lines = [INTRODUCTION, "| crate | licence |", "| --- | --- |"]
    lines += [f"| {package['name']} {package['version']} | {package['license']} |" for package in packages]
    for package in packages:
        if "Apache-2.0" in package["license"]:
            continue
        folder = Path(package["manifest_path"]).parent
        texts = sorted(path for path in folder.iterdir() if path.name.upper().startswith(("LICENSE", "COPYING")))
        mit = [path for path in texts if "MIT" in path.name]
        text = (mit or texts)[0].read_text().strip()
        lines += ["", f"## {package['name']} {package['version']}", "", "```text", text, "```"]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Writes the file, or compares it."""
    written = page(compiled())
    if "--check" not in sys.argv:
        PAGE.write_text(written)
    elif PAGE.read_text() != written:
        sys.exit(f"{PAGE.name} is out of date: run python3 .ci/notices.py")


if __name__ == "__main__":
    main()
