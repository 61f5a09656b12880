"""Keys and options of a launch file's text: TOML, JSON, YAML, a shell script, a list of arguments."""

from __future__ import annotations

import contextlib
import itertools
import json
import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import wlb
from wlb_tools.command.errors import CliError
from wlb_tools.simulation.data import read_toml

WAY_OUT = (
    "put echo before torchrun, run the script, and give what it prints:"
    " bash pretrain.sh > arguments.txt; wlb simulate --from arguments.txt"
)


def tables(path: Path, text: str) -> dict[str, Any] | None:
    """The keys of TOML, JSON or YAML, known by what is in it; None: it is a script or a list of arguments.

    Raises:
        CliError: the ending of its name says one of these, and it is none.
    """
    if path.suffix == ".toml":
        try:
            return read_toml(path)
        except wlb.WlbError as problem:
            raise CliError(f"--from {problem.args[0].removeprefix('path = ')}") from None
    if path.suffix == ".json":
        return json_of(path, text)
    if path.suffix in (".yaml", ".yml"):
        return _yaml(path, text)
    if text.lstrip().startswith("{"):
        return json_of(path, text)
    reads: tuple[Callable[[], dict[str, Any]], ...] = (lambda: read_toml(path), lambda: _yaml(path, text))
    for read in reads:
        with contextlib.suppress(CliError, wlb.WlbError):
            content = read()
            if (
                any(isinstance(value, Mapping) for value in content.values())
                or {"base_model", "stage"} & content.keys()
            ):
                return content
    return None


def json_of(path: Path, text: str) -> dict[str, Any]:
    """The keys of JSON; none if it is no object.

    Raises:
        CliError: it is no JSON.
    """
    try:
        content = json.loads(text)
    except ValueError as problem:
        raise CliError(f"--from {path}: {path} is no JSON: {problem}") from None
    return content if isinstance(content, dict) else {}


def _yaml(path: Path, text: str) -> dict[str, Any]:
    try:
        import yaml
    except ModuleNotFoundError:
        raise CliError(f"--from {path}: needs the package pyyaml; run: pip install pyyaml") from None
    try:
        content = yaml.safe_load(text)
    except yaml.YAMLError as problem:
        raise CliError(f"--from {path}: is no YAML: {problem}") from None
    if not isinstance(content, dict):
        raise CliError(f"--from {path}: is no YAML of keys and values")
    return content


def flat(content: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Keys of all levels, joined by dots, and their values."""
    for name, value in content.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


_SEVERAL = ("recompute-modules",)
"""Options of Megatron with several values."""


def flags_of(path: Path, text: str) -> tuple[dict[str, str], dict[str, str]]:
    """Options and variables of a shell script or of a list of arguments; variables and arrays are put in.

    Raises:
        CliError: the script sources another file, whose variables are unknown here.
    """
    variables: dict[str, str] = {}
    words: list[str] = []
    for line in re.sub(r"\\\n", " ", text).splitlines():
        line = re.sub(r"(^|\s)#.*", "", line).strip()
        if re.match(r"(source|\.)\s+\S", line):
            raise CliError(f"--from {path}: sources another file ({line}); {WAY_OUT}")
        found = re.match(r"(?:export\s+)?([A-Za-z_]\w*)=\(?(.*?)\)?$", line)
        if found and not line.startswith("--"):
            name, value = found.groups()
            value = _filled(value.strip().strip("\"'"), variables)
            if not value.startswith("--"):
                variables[name] = value
                continue
            line = value
        line = _filled(line, variables)
        try:
            words += shlex.split(line.strip("()"), comments=True)
        except ValueError:
            words += line.split()
    flags: dict[str, str] = {}
    words = [part for word in words for part in (word.split() if word.startswith("--") and " " in word else [word])]
    for place, word in enumerate(words):
        if not word.startswith("--") or len(word) < 3:
            continue
        name, has, value = word[2:].partition("=")
        following = words[place + 1] if place + 1 < len(words) else "--"
        value = value if has else "" if following.startswith("--") else following
        if name.replace("_", "-") in _SEVERAL and value and not has:
            value = " ".join(itertools.takewhile(lambda word: not word.startswith("-"), words[place + 1 :]))
        flags[name.replace("_", "-")] = value
    return flags, variables


def _filled(text: str, variables: Mapping[str, str]) -> str:
    """Text in which `$NAME`, `${NAME}` and `${NAME:-default}` are put in."""

    def value(found: re.Match[str]) -> str:
        name, default = found.group(1) or found.group(3), found.group(2)
        return variables.get(name, default if default is not None else found.group(0))

    return re.sub(r"\$\{(\w+)(?::-([^}]*))?\}|\$(\w+)", value, text)
