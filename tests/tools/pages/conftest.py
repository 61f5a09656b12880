"""The pages that commands write, made once."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

COMMANDS = {
    "demo": ("demo", "--steps", "8"),
    "pack": ("pack", "--dp-size", "2"),
    "waiting": ("tune", "--steps", "8"),
    "cluster": ("tune", "--steps", "3", "--tp", "8", "--set", "layout.virtual_stages=2"),
    "layout": ("tune", "--steps", "2", "--gpus", "8", "--global-batch", "32k", "--model", "llama3-8b"),
    "simulate": ("simulate", "--steps", "6", "--dp", "2", "--micro-batches", "8"),
    "slower": ("simulate", "--steps", "4", "--variants", "wlb_dynamic_cp,original"),
    "advise": ("advise", "--steps", "4"),
}


@pytest.fixture(scope="session")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A page of every command that writes one, by name."""
    for package in ("cyclopts", "jinja2", "rich", "matplotlib", "plotly"):
        pytest.importorskip(package)
    from wlb_tools.command import main

    folder, before = tmp_path_factory.mktemp("pages"), Path.cwd()
    lengths = np.random.default_rng(0).lognormal(5.5, 1.2, 1500)
    np.save(folder / "lengths.npy", np.clip(lengths, 1, 4096).astype(np.int64))
    os.chdir(folder)
    try:
        for name, (command, *options) in COMMANDS.items():
            words = [command, "lengths.npy", "--context", "2048", "--quiet", "--output", name, *options]
            with pytest.raises(SystemExit) as end:
                main([*words, "--oversize", "split"])
            assert not end.value.code, name
    finally:
        os.chdir(before)
    return {name: folder / name / f"{command}.html" for name, (command, *_) in COMMANDS.items()}
