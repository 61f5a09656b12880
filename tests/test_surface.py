"""What `import wlb` gives: documented names, and nothing heavy."""

import ast
import dataclasses
import doctest
import inspect
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, get_args

import pytest

import wlb
import wlb_tools
from wlb import _choices, _core

ROOT = Path(__file__).parents[1]
STUB = ast.parse((Path(wlb.__file__).parent / "_core.pyi").read_text())
STUBBED_CLASSES = [node for node in STUB.body if isinstance(node, ast.ClassDef)]
RESULTS = [
    wlb.Bounds,
    wlb.PackerMetrics,
    wlb.PipelineSteps,
    wlb.PipelineTimeline,
    wlb.TunedPoint,
    wlb.TuneResult,
]


NOT_PLANNING = {
    *("torch", "matplotlib", "plotly", "cyclopts", "jinja2", "rich", "hypothesis", "highspy", "scipy", "wlb_tools"),
    *("wlb.models", "wlb.timings", "wlb.ledger", "wlb.torch"),
    *("importlib.metadata", "importlib.resources", "tempfile", "json", "csv", "inspect", "typing_extensions"),
}
"""Modules that `import wlb` loads only where numpy does."""


def loaded(module: str) -> set[str]:
    program = [sys.executable, "-c", f"import sys, {module}; print(*sys.modules, sep='\\n')"]
    names = subprocess.run(program, check=True, capture_output=True, text=True, timeout=500).stdout.split()
    return {part for name in names for part in (name, name.partition(".")[0])}


def test_import_is_light() -> None:
    """`python -m benches.imports` has the milliseconds."""
    found = loaded("wlb")
    assert "wlb._core" in found
    assert not (found - loaded("numpy.typing")) & NOT_PLANNING


def test_what_is_loaded_when_used_is_there() -> None:
    program = (
        "import sys, wlb; assert 'wlb.models' not in sys.modules;"
        "assert {'ModelConfig', 'models', 'timings'} <= {*dir(wlb)};"
        "wlb.ModelConfig.preset('llama2-7b'); wlb.models.Layer; wlb.timings.read; from wlb import *; ModelConfig"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=500)
    assert wlb.ModelConfig is wlb.models.ModelConfig
    with pytest.raises(AttributeError, match="module 'wlb' has no attribute 'nothing'"):
        wlb.nothing  # type: ignore[attr-defined]  # noqa: B018


@pytest.mark.parametrize(("house", "name"), [(house, name) for house in (wlb, wlb_tools) for name in house.__all__])
def test_every_name_is_documented(house: ModuleType, name: str) -> None:
    value = getattr(house, name)
    if not isinstance(value, str):
        documentation = inspect.getdoc(value)
        assert documentation
        assert len(documentation) > 20


@pytest.mark.parametrize("stub", STUBBED_CLASSES, ids=lambda stub: stub.name)
def test_every_member_is_documented(stub: ast.ClassDef) -> None:
    assert stub.name in wlb.__all__
    for member in stub.body:
        if isinstance(member, ast.FunctionDef) and not member.name.startswith("_"):
            assert inspect.getdoc(getattr(getattr(wlb, stub.name), member.name)), member.name


@pytest.mark.parametrize("result", RESULTS, ids=lambda result: result.__name__)
def test_every_field_of_a_result_is_documented(result: type[Any]) -> None:
    fields = [field.name for field in dataclasses.fields(result) if not field.name.startswith("_")]
    documented = re.findall(r"^    (\w+): .", inspect.getdoc(result) or "", re.MULTILINE)
    assert fields
    assert documented == [name for name in ("KINDS",) if hasattr(result, name)] + fields
    for name, member in vars(result).items():
        if not name.startswith("_") and (callable(member) or isinstance(member, property)):
            assert inspect.getdoc(member), name


CHOICES = {
    "GENERATIONS": "Generation",
    "GROUP_SIZES": "GroupSizes",
    "LEFTOVER": "Leftover",
    "METHODS": "Method",
    "ON_BACKLOG": "OnBacklog",
    "OVERSIZE": "Oversize",
    "PASSES": "Passes",
    "RELEASES": "Release",
    "ROUND_ORDERS": "RoundOrder",
    "ROUND_OVERSIZE": "RoundOversize",
    "ROUND_TOGETHER": "RoundTogether",
    "SCHEDULES": "Schedule",
    "STEP_SAMPLES": "StepSamples",
    "STRATEGIES": "Strategy",
    "STREAM_METHODS": "StreamMethod",
    "SYNCS": "Sync",
    "TOGETHER": "Together",
    "UNITS": "Unit",
}


def test_choices_are_typed_as_the_core_has_them() -> None:
    core = {name for name, value in vars(_core).items() if isinstance(value, tuple)}
    assert core == set(CHOICES)
    for name, choice in CHOICES.items():
        assert getattr(_core, name) == get_args(getattr(_choices, choice))


def test_the_tools_have_no_other_names() -> None:
    with pytest.raises(AttributeError, match="'wlb_tools' has no attribute 'pack'"):
        wlb_tools.pack  # noqa: B018


def test_errors_are_value_errors() -> None:
    assert issubclass(wlb.WlbError, ValueError)
    assert issubclass(wlb.StateError, wlb.WlbError)
    error = wlb.WlbError("raised in Python")
    assert (error.argument, error.index, error.value) == (None, None, None)


def test_the_build_says_what_it_is() -> None:
    assert wlb.BUILD_PROFILE in ("release", "debug")
    assert wlb.__version__.count(".") >= 2


def test_the_engine_imports_nothing_of_the_package() -> None:
    """What it needs from Python is passed down to it: an import from Rust would be a circle that no lint sees."""
    bindings = Path(__file__).parents[1] / "rust" / "wlb-python" / "src"
    assert [path.name for path in bindings.rglob("*.rs") if 'import("wlb' in path.read_text()] == []


def with_runtime_docstrings(stub: str) -> str:
    """The stub with the docstrings that the engine has at run time, so that an editor's hover shows them."""
    lines = stub.splitlines()
    for node, value, depth in reversed(list(documented(ast.parse(stub)))):
        text = inspect.getdoc(value)
        assert text, node.name
        indent = " " * 4 * (depth + 1)
        body = node.body[0]
        constant = body.value.value if isinstance(body, ast.Expr) and isinstance(body.value, ast.Constant) else None
        documentation = [f'{indent}"""{text.splitlines()[0]}']
        documentation += [f"{indent}{line}" if line else "" for line in text.splitlines()[1:]]
        if len(documentation) == 1:
            documentation[0] += '"""'
        else:
            documentation.append(f'{indent}"""')
        if isinstance(constant, str):
            assert body.end_lineno is not None
            lines[body.lineno - 1 : body.end_lineno] = documentation
        elif constant is ...:
            lines[body.lineno - 1] = lines[body.lineno - 1].removesuffix(" ...")
            lines[body.lineno : body.lineno] = documentation
        else:
            first = body.lineno - 1 - len(getattr(body, "decorator_list", []))
            lines[first:first] = documentation
    return "\n".join(lines) + "\n"


def documented(stub: ast.Module) -> Iterator[tuple[ast.ClassDef | ast.FunctionDef, Any, int]]:
    """Public classes, functions, methods and properties of the stub in their order, with what they are at run time."""
    for node in stub.body:
        if isinstance(node, ast.ClassDef) and node.name in wlb.__all__:
            owner = getattr(wlb, node.name)
            yield node, owner, 0
            seen = set()
            for member in node.body:
                if isinstance(member, ast.FunctionDef) and not member.name.startswith("_") and member.name not in seen:
                    seen.add(member.name)  # the first of overloads has the docstring
                    yield member, getattr(owner, member.name), 1
        elif isinstance(node, ast.FunctionDef) and node.name in wlb.__all__:
            yield node, getattr(wlb, node.name), 0


def test_docstrings_reach_editors() -> None:
    """The stub has the engine's docstrings; `WLB_STUB=write` writes them there."""
    path = ROOT / "python" / "wlb" / "_core.pyi"
    written = with_runtime_docstrings(path.read_text())
    if os.environ.get("WLB_STUB") == "write":
        path.write_text(written)
    assert path.read_text() == written


METHODS_WITHOUT_EXAMPLES = {
    "CostModel.attention_cost",  # as `cost`
    "CostModel.from_json",  # in `to_json`
    "CostModel.linear_cost",  # as `cost`
    "KernelModel.from_profile",  # as `CostModel.from_profile`
    "Packer.copy",
    "Packer.drain",  # in `flush`
    "Packer.empty_copy",
    "Packer.from_state_dict",  # in `state_dict`
    "Packer.metrics",
    "Packing.digest",
    "PrefixForest.digest",
    "Shard.digest",
}

EXAMPLES = {
    node.name if depth == 0 else f"{value.__qualname__}": value
    for node, value, depth in documented(STUB)
    if callable(value) and not (inspect.isclass(value) and ">>>" not in (inspect.getdoc(value) or ""))
}


@pytest.mark.parametrize("name", sorted(EXAMPLES))
def test_examples_of_docstrings_print_what_they_say(name: str) -> None:
    text = inspect.getdoc(EXAMPLES[name]) or ""
    assert (">>>" in text) != (name in METHODS_WITHOUT_EXAMPLES), name
    said: list[str] = []
    runner = doctest.DocTestRunner()
    runner.run(doctest.DocTestParser().get_doctest(text, {}, name, None, 0), out=said.append)
    assert not runner.failures, "".join(said)


def test_examples_stand_in_a_section_that_the_site_prints_as_code() -> None:
    """Under `Example:` mkdocstrings takes the lines for prose, and `>>>` for quotations."""
    files = [path for path in (ROOT / "python").rglob("*.py*") if path.suffix in {".py", ".pyi"}]
    wrong = [str(path) for path in files if any(line.strip() == "Example:" for line in path.read_text().splitlines())]
    assert not wrong
