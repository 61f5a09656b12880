"""What `import wlb` gives: documented names, and nothing heavy."""

import ast
import inspect
import json
import subprocess
import sys
from pathlib import Path

import pytest

import wlb

STUB = ast.parse((Path(wlb.__file__).parent / "_core.pyi").read_text())
STUBBED_CLASSES = [node for node in STUB.body if isinstance(node, ast.ClassDef)]


@pytest.mark.parametrize("module", ["wlb", "wlb.testing.packer", "wlb.testing.sharding"])
def test_import_is_light(module: str) -> None:
    """The oracles are as light as the rest: only the strategies need hypothesis."""
    program = [sys.executable, "-c", f"import json, sys, {module}; print(json.dumps(list(sys.modules)))"]
    output = subprocess.run(program, check=True, capture_output=True, timeout=120).stdout
    loaded = {name.partition(".")[0] for name in json.loads(output)}
    assert "wlb" in loaded
    assert not loaded & {"torch", "matplotlib", "cyclopts", "jinja2", "rich", "hypothesis", "highspy", "scipy"}


@pytest.mark.parametrize("name", wlb.__all__)
def test_every_name_is_documented(name: str) -> None:
    value = getattr(wlb, name)
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


def test_errors_are_value_errors() -> None:
    assert issubclass(wlb.WlbError, ValueError)
    assert issubclass(wlb.StateError, wlb.WlbError)
    error = wlb.WlbError("raised in Python")
    assert (error.argument, error.index, error.value) == (None, None, None)


def test_the_build_says_what_it_is() -> None:
    assert wlb.BUILD_PROFILE in ("release", "debug")
    assert wlb.__version__.count(".") >= 2
