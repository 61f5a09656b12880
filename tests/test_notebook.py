"""The notebook among the examples runs, cell by cell, and is readable as one."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("matplotlib")

NOTEBOOK = Path(__file__).parents[1] / "examples" / "look.ipynb"


def run(cells: list[str]) -> list[Any]:
    """What the last expression of each cell gives, as Jupyter shows it."""
    names: dict[str, Any] = {"__name__": "__main__"}
    shown = []
    for source in cells:
        body = ast.parse(source).body
        last = body.pop() if body and isinstance(body[-1], ast.Expr) else None
        exec(compile(ast.Module(body, []), str(NOTEBOOK), "exec"), names)
        shown.append(
            eval(compile(ast.Expression(last.value), str(NOTEBOOK), "eval"), names)
            if isinstance(last, ast.Expr)
            else None
        )
    return shown


def test_the_notebook_runs() -> None:
    notebook = json.loads(NOTEBOOK.read_text())
    assert notebook["nbformat"] == 4
    shown = run(["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"])
    kinds = [type(each).__name__ for each in shown]
    assert kinds == ["str", "Figure", "Figure", "str", "Figure", "Figure", "Simulation", "Figure"]
    simulation = shown[6]
    assert simulation.speedup("wlb_dynamic_cp") > 1.1  # a case that gains
    for each in shown:
        if type(each).__name__ == "Figure":
            assert each._repr_png_().startswith(b"\x89PNG")
        elif hasattr(each, "_repr_html_"):
            assert each._repr_html_().startswith("<table>")


def test_the_notebook_holds_no_results() -> None:
    """They would grow old: each reader makes their own."""
    for cell in json.loads(NOTEBOOK.read_text())["cells"]:
        if cell["cell_type"] == "code":
            assert cell["outputs"] == []
            assert cell["execution_count"] is None
