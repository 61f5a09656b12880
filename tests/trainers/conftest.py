"""One thread for torch in the test process, as in tests/torch, and what trainers ask their environment for.

With `--may-skip`, as `make test-trainers` has it, what ran is printed, and a skip of anything else fails the run.
"""

from __future__ import annotations

import os
import subprocess
from collections import Counter, defaultdict
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.torch import processes

torch.set_num_threads(1)
os.environ |= processes.ENVIRONMENT

# Whose trainer each file runs.
PACKAGES = {
    "test_accelerate.py": "accelerate",
    "test_arrow.py": "datasets",
    "test_async_grpo.py": "trl",
    "test_axolotl.py": "axolotl",
    "test_balance.py": "transformers",
    "test_columns.py": "transformers",
    "test_fillers.py": "transformers",
    "test_grain.py": "grain",
    "test_huggingface.py": "transformers",
    "test_lightning.py": "lightning",
    "test_lightning_resumes.py": "lightning",
    "test_live.py": "transformers",
    "test_llamafactory.py": "llamafactory",
    "test_loggers.py": "tensorboard",
    "test_megatron_data.py": "megatron-core",
    "test_megatron_fillers.py": "megatron-core",
    "test_megatron_pretrain.py": "megatron-core",
    "test_megatron_resumes.py": "megatron-core",
    "test_megatron_training.py": "megatron-core",
    "test_resumes.py": "transformers",
    "test_rl_means.py": "trl",
    "test_streams.py": "datasets",
    "test_torchtitan.py": "torchtitan",
    "test_transferqueue.py": "transferqueue",
    "test_trl.py": "trl",
    "test_verl.py": "verl",
}
# Trainers that are read from checkouts, and the variables that name these.
CHECKOUTS = {
    "test_rl_slots.py": (
        "WLB_SLIME",
        "WLB_NEMO_RL",
        "WLB_AREAL",
        "WLB_PRIME_RL",
        "WLB_TORCHTITAN",
        "WLB_SKYRL",
        "WLB_OPENRLHF",
    ),
    "test_torchtitan_packing.py": ("WLB_TORCHTITAN",),
}


def pytest_addoption(parser: pytest.Parser) -> None:
    text = "packages, or parts of tests' names or reasons, that may be skipped, with commas; any other skip fails"
    parser.addoption("--may-skip", default=None, metavar="NAMES", help=text)


def pytest_configure(config: pytest.Config) -> None:
    names = config.getoption("--may-skip", None)
    if names is not None:
        config.pluginmanager.register(_WhatRan([name for name in names.split(",") if name]), "what-ran")


class _WhatRan:
    """Counts what ran of each file, and remembers what did not."""

    def __init__(self, may_skip: list[str]) -> None:
        self._may_skip = may_skip
        self._counts: dict[str, Counter[str]] = defaultdict(Counter)
        self._skipped: list[tuple[str, str]] = []

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.skipped:  # a whole file
            self._note(report)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.skipped:
            self._note(report)
        elif report.when == "call" or report.failed:
            self._counts[_file(report.nodeid)][report.outcome] += 1

    def _note(self, report: Any) -> None:
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        self._counts[_file(report.nodeid)]["skipped"] += 1
        self._skipped.append((report.nodeid, reason.removeprefix("Skipped: ")))

    def _unexpected(self) -> list[tuple[str, str]]:
        return [
            (test, why)
            for test, why in self._skipped
            if not any(name in f"{PACKAGES.get(_file(test), '')} {test} {why}" for name in self._may_skip)
        ]

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        terminalreporter.section("what ran")
        for file, counts in sorted(self._counts.items()):
            package = PACKAGES.get(file, "torch")
            version = _commits(CHECKOUTS[file]) if file in CHECKOUTS else f"{package} {_version(package):12}"
            outcomes = ", ".join(f"{number} {outcome}" for outcome, number in sorted(counts.items()))
            terminalreporter.line(f"{file:30} {version} {outcomes}")
        for test, why in self._unexpected():
            terminalreporter.line(f"FAILED: {test} was skipped, and --may-skip does not name it: {why}", red=True)

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self._unexpected():
            session.exitstatus = pytest.ExitCode.TESTS_FAILED


def _file(test: str) -> str:
    return Path(test.partition("::")[0]).name


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "(missing)"


def _commits(variables: tuple[str, ...]) -> str:
    """What the variables name, and which commits."""
    found = []
    for variable in variables:
        folder, said = os.environ.get(variable, ""), "(missing)"
        if folder and Path(folder).is_dir():
            command = ["git", "-C", folder, "describe", "--always", "--exclude", "*"]
            said = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip() or "(no commit)"
        found.append(f"{variable.removeprefix('WLB_').lower()} {said}")
    return ", ".join(found)
