"""Comments and docstrings carry no traces of a script that rewrapped them, and describe arguments alike."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCES = sorted(
    file
    for room in ("python", "tests", "benches", "studies", "examples")
    for file in (ROOT / room).rglob("*.py*")
    if file.suffix in (".py", ".pyi")
)
SECTION = re.compile(r"(Args|Attributes|Complexity|Example|Examples|Raises|Returns|Warns|Yields):")
LISTS = ("Args", "Attributes", "Raises", "Warns")
ARGUMENT = re.compile(r"    [\w*`., ]+?: (.)([a-z']*)(?![\w/`.-])")
# Words that have a capital letter wherever they stand.
NAMES = {"Arrow", "Hugging", "Lightning", "Megatron", "None", "Plotly", "Python", "True", "False"}


@functools.cache
def docstrings(file: Path) -> list[tuple[str, list[str]]]:
    """Where each docstring of a file begins, and its lines without their common indentation."""
    found = []
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                found.append((f"{file.relative_to(ROOT)}:{node.body[0].lineno}", text.splitlines()))
    return found


def indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def lonely(lines: list[str]) -> Iterator[str]:
    """Words that stand alone in a line between two lines of their paragraph."""
    for before, line, after in zip(lines, lines[1:], lines[2:], strict=False):
        alone = re.fullmatch(r"\s*[\w`.,;:'-]+", line) and len(before) > 70
        if alone and after.strip() and indent(line) == indent(after) and not re.match(r"\s*([-|>*]|\d\.)", after):
            yield line.strip()


def capitals(lines: list[str]) -> Iterator[str]:
    """Descriptions of arguments, attributes and errors that begin with a capital letter, of a word that is no name."""
    section = ""
    for line in lines:
        if line and not line.startswith(" "):
            heading = SECTION.fullmatch(line)
            section = heading[1] if heading else ""
        found = ARGUMENT.match(line)
        if section in LISTS and found and found[1].isupper():
            word = (found[1] + found[2]).split("'")[0]
            if word not in NAMES:
                yield line.strip()


@pytest.mark.parametrize(
    ("docstring", "words", "arguments"),
    [
        (["A.", "", "Args:", "    a: the first.", "    b: None is all. JSON.", "    c: JSON values."], [], []),
        (["A.", "", "Args:", "    a: The first.", "", "Returns:", "    b: The second."], [], ["a: The first."]),
        (["A.", "", "Attributes:", "    a: The first.", "", "Raises:", "    E: it is."], [], ["a: The first."]),
        ([f"A {'long ' * 20}line", "that", "goes on."], ["that"], []),
        ([f"A {'long ' * 20}line", "that.", "", "Goes on."], [], []),
    ],
)
def test_what_is_looked_for_is_found(docstring: list[str], words: list[str], arguments: list[str]) -> None:
    assert list(lonely(docstring)) == words
    assert list(capitals(docstring)) == arguments


def test_no_line_of_a_docstring_was_broken_after_a_word() -> None:
    found = [f"{place}: {word}" for file in SOURCES for place, lines in docstrings(file) for word in lonely(lines)]
    assert not found, "\n".join(found)


def test_descriptions_of_arguments_begin_with_a_small_letter() -> None:
    found = [f"{place}: {line}" for file in SOURCES for place, lines in docstrings(file) for line in capitals(lines)]
    assert not found, "\n".join(found)


def test_no_comment_is_commented_out() -> None:
    rust = [file for file in (ROOT / "rust").rglob("*.rs") if "target" not in file.parts]
    doubled = {".py": r"^\s*# +# ", ".rs": r"^\s*// +// "}  # in a documentation comment, `//` may be an example's
    found = [
        f"{file.relative_to(ROOT)}:{number}"
        for file in [*SOURCES, *rust]
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1)
        if re.match(doubled[file.suffix.removesuffix("i")], line)
    ]
    assert not found, "\n".join(found)
