"""Runs the pieces, in order, within a budget: see `studies.gpu`.

    python -m studies.gpu                          # everything, in as many runs of nine minutes as it takes
    python -m studies.gpu parity transports        # some of it
    python -m studies.gpu --lengths wheels_py.npy --lengths man_man.npy attention step

Exits with 0 once all is done, with 3 where the budget ended first: run it again. Writes gpu.md beside the records.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np
import torch

import wlb
from studies.gpu import attention, page, parity, profiles, step, training, transports
from studies.gpu.items import Budget, Done, Item, Row, machine_of

PIECES = (
    "parity",
    "transports",
    "training",
    "sanitizer",
    *(f"profile-{name}" for name in profiles.MODELS),
    "attention",
    "step",
)
SHIPPED = "nvidia-h200-varlenkernel-torch-2-11-0-h32-kv8-d128"
"""The profile that the records in the tree were measured with."""
NOT_DONE = 3
MICRO_BATCHES = 2


class Suite:
    """A run over the pieces."""

    def __init__(self, given: argparse.Namespace) -> None:
        gpu = torch.cuda.is_available() and not given.cpu
        self.device = torch.device("cuda" if gpu else "cpu")
        if not gpu:
            torch.set_num_threads(1)
        self.folder: Path = given.out
        self.folder.mkdir(parents=True, exist_ok=True)
        self.budget = Budget(given.budget)
        self._paths: list[Path] = given.lengths
        self.pages: list[str] = []

    def run(self, name: str) -> bool:
        """A piece; whether all of it is done."""
        if name.startswith("profile-"):
            return self._profile(name.removeprefix("profile-"))
        work: dict[str, Callable[[], Iterable[Item]]] = {
            "parity": lambda: parity.items(self.device),
            "transports": lambda: transports.items(self.device),
            "training": lambda: training.items(self.device),
            "sanitizer": self._sanitizer,
            "attention": lambda: attention.items(self._layer(), self._lengths(), MICRO_BATCHES),
            "step": lambda: step.items(step.Trained(self.device), next(iter(self._lengths().values()))),
        }
        with Done(self.folder / f"{name}.jsonl", self._identity(name)) as done:
            finished = done.all(work[name](), self.budget, lambda item: _say(f"{name}: {item}"))
            self._report(name, done.rows, finished)
        return finished

    def _identity(self, name: str) -> Row:
        about = machine_of(self.device)
        if name == "attention":
            about["model"] = self._model().source
        if name in ("attention", "step"):
            about["lengths"] = {name: int(lengths.sum()) for name, lengths in self._lengths().items()}
        return about

    def _profile(self, name: str) -> bool:
        path = self.folder / f"profile-{name}.json"
        found = json.loads(path.read_text()) if path.exists() else None
        if found is None:
            found = profiles.measured(name, self.folder, self.device, self.budget, _say)
        if found is None:
            self.pages += ["", f"## profile-{name}: not done"]
            return False
        path.write_text(json.dumps(found))
        self.pages += ["", f"## profile-{name}", "", f"`{found}`"]
        return True

    def _sanitizer(self) -> Iterator[Item]:
        tool = shutil.which("compute-sanitizer")
        if self.device.type == "cuda" and tool is not None:
            yield "tiny parity", lambda: self._sanitized(tool)

    def _sanitized(self, tool: str) -> Row:
        command = [tool, "--error-exitcode", "9", sys.executable, "-m", "studies.gpu", "--tiny"]
        ran = subprocess.run(
            command, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=480, check=False
        )
        return {"ok": ran.returncode == 0, "exit": ran.returncode, "said": (ran.stdout + ran.stderr)[-2000:]}

    def _measured(self, name: str) -> Path | None:
        """The profile of a model, where it is done."""
        path = self.folder / f"profile-{name}.json"
        return self.folder / json.loads(path.read_text())["profile"] if path.exists() else None

    def _model(self) -> wlb.KernelModel:
        """Measured here, where it is; of a GPU otherwise the analytic one, of a CPU that of an H100."""
        measured = self._measured(profiles.MODELS[0])
        if measured is not None:
            return wlb.KernelModel.from_profile(measured)
        heads, head_dim = (32, 128) if self.device.type == "cuda" else (2, 64)
        return wlb.KernelModel.analytic("h100", num_heads=heads, head_dim=head_dim)

    def _layer(self) -> attention.Layer:
        return attention.Layer.of(self.device, self._model())

    def _lengths(self) -> dict[str, attention.Lengths]:
        if not self._paths:
            drawn = np.random.default_rng(0).lognormal(7.5, 1.6, 40_000)
            return {"log-normal": drawn.astype(np.int64).clip(1, 131072)}
        return {path.stem: np.load(path).astype(np.int64) for path in self._paths}

    def _report(self, name: str, rows: dict[str, Row], finished: bool) -> None:
        failed = [item for item, row in rows.items() if "error" in row or row.get("ok") is False]
        lines = [f"## {name}: {len(rows)} items, {len(failed)} failed{'' if finished else ', not all done'}", ""]
        lines += [f"- {item}: `{str(rows[item].get('error', rows[item]))[:400]}`" for item in failed]
        self.pages += ["", *lines]

    def page(self) -> str:
        """What all records say so far."""
        return page.text(self.folder, self._measured(profiles.MODELS[0]), self._measured("step"))


def _say(what: str) -> None:
    print(what, file=sys.stderr, flush=True)


def main() -> int:
    """The command; what it exits with."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pieces", nargs="*", metavar="PIECE", help=f"of {', '.join(PIECES)}; default: all")
    parser.add_argument("--out", type=Path, default=Path("wlb-gpu"), help="where records go, and a run goes on from")
    parser.add_argument("--budget", type=float, default=540.0, help="seconds that this run may take")
    parser.add_argument("--lengths", type=Path, action="append", default=[], help=".npy of document lengths; several")
    parser.add_argument("--cpu", action="store_true", help="small sizes on the CPU, to see that it runs")
    parser.add_argument("--tiny", action="store_true", help="a part of the parity alone; nothing is written")
    parser.add_argument("--report", type=Path, metavar="FOLDER", help="only write the page of the records in a folder")
    parser.add_argument("--page", type=Path, default=Path("gpu.md"), help="with it: where; a picture stands beside it")
    given = parser.parse_args()
    if given.report is not None:
        given.page.write_text(page.text(given.report, SHIPPED, given.report / "step-profile.json"))
        page.picture(given.report, given.page.with_suffix(".png"))
        return 0
    if given.tiny:
        device = torch.device("cuda" if torch.cuda.is_available() and not given.cpu else "cpu")
        return int(not all(work()["ok"] for _, work in parity.items(device, tiny=True)))
    for name in given.pieces:
        if name not in PIECES:
            parser.error(f"{name}: must be one of {', '.join(PIECES)}")
    suite = Suite(given)
    finished = True
    for name in given.pieces or PIECES:
        finished = suite.run(name) and finished
    print("\n".join(suite.pages))
    (suite.folder / "gpu.md").write_text(suite.page())
    return 0 if finished else NOT_DONE


if __name__ == "__main__":
    sys.exit(main())
