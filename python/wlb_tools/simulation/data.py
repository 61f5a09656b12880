"""Scenarios as data: tables of plain values, as TOML, JSON and a command's `--set` hold them."""

from __future__ import annotations

import dataclasses
import difflib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from wlb._core import CostModel
from wlb._errors import error
from wlb.models import ModelConfig, preset_named
from wlb_tools.cluster.hardware import Hardware, Link
from wlb_tools.cluster.parallel import ParallelLayout

D = TypeVar("D")

_OBJECTS = ("hardware", "selector", "overhead")
"""Fields of `Scenario` that are no plain values; `gpu` and the table `hardware` stand for the first."""


def read_toml(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The tables of a TOML file.

    Raises:
        WlbError: the file cannot be read, is no TOML, or Python is 3.10 and lacks the package tomli.
    """
    try:
        import tomllib
    except ModuleNotFoundError:  # Python 3.10
        try:
            import tomli as tomllib  # type: ignore[import-not-found, no-redef, unused-ignore]
        except ModuleNotFoundError:
            raise error("path", f"= {os.fspath(path)}: needs Python 3.11, or: pip install tomli") from None
    try:
        return dict(tomllib.loads(Path(path).read_text(encoding="utf-8")))
    except (OSError, UnicodeDecodeError) as problem:
        raise error("path", f"= {os.fspath(path)}: cannot be read: {problem}", value=path) from None
    except tomllib.TOMLDecodeError as problem:
        raise error("path", f"= {os.fspath(path)}: is no TOML: {problem}", value=path) from None


def arguments(data: Mapping[str, Any], of: type[Any], *, folder: str | os.PathLike[str] = "") -> dict[str, Any]:
    """Arguments of `Scenario` from its tables.

    Args:
        data: see `Scenario.from_dict`.
        of: the class whose fields these are.
        folder: where relative paths begin.

    Raises:
        WlbError: a setting is unknown, or as the classes of its parts.
    """
    rest = dict(data)
    given: dict[str, Any] = {
        "model": _model(rest.pop("model", None), Path(folder)),
        "hardware": _hardware(rest.pop("gpu", None), rest.pop("hardware", {})),
        "layout": filled(ParallelLayout, "layout", rest.pop("layout", {})),
    }
    if isinstance(path := rest.get("cost_model"), str):
        rest["cost_model"] = CostModel.from_json(_found(path, Path(folder)).read_text(encoding="utf-8"))
    if isinstance(path := rest.get("kernel_model"), str):
        rest["kernel_model"] = str(_found(path, Path(folder)))
    known = [field.name for field in dataclasses.fields(of) if field.name not in _OBJECTS]
    return given | _checked("", rest, known)


def filled(cls: type[D], table: str, values: Any, **more: Any) -> D:
    """An object of a class from a table; lists become tuples. `more` are further arguments.

    Raises:
        WlbError: a setting is unknown, or as the class.
    """
    if isinstance(values, cls):
        return values
    if not isinstance(values, Mapping):
        raise error(table, f"= {values!r}: must be a table of settings", value=values)
    known = [field.name for field in dataclasses.fields(cls)]  # type: ignore[arg-type]
    return cls(**more | _checked(f"{table}.", values, known))


def _checked(prefix: str, values: Mapping[str, Any], known: list[str]) -> dict[str, Any]:
    for name, value in values.items():
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            meant = f"; do you mean {prefix}{near[0]}?" if near else f"; known are {', '.join(known)}"
            raise error(f"{prefix}{name}", f"is no setting of a scenario{meant}", value=value)
    return {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}


def _found(path: str, folder: Path) -> Path:
    """The path beside the file that names it, or as it stands."""
    return folder / path if (folder / path).exists() else Path(path)


def _model(given: Any, folder: Path) -> ModelConfig:
    if isinstance(given, str):
        path = _found(given, folder)
        preset = None if path.exists() else preset_named(given)
        return ModelConfig.from_hugging_face(path) if preset is None else ModelConfig.preset(preset)
    if given is None:
        raise error("model", "is missing: a preset, a config.json, or a table of sizes")
    return filled(ModelConfig, "model", given)


def _hardware(gpu: Any, changes: Any) -> Hardware:
    if isinstance(changes, Hardware):
        return changes
    if not isinstance(gpu, str):
        raise error("gpu", f"= {gpu!r}: must be the name of a preset, such as 'h100'", value=gpu)
    if not isinstance(changes, Mapping):
        raise error("hardware", f"= {changes!r}: must be a table of settings", value=changes)
    preset = vars(Hardware.preset(gpu))
    links = {
        name: filled(Link, f"hardware.{name}", value, **vars(preset[name]))
        for name, value in changes.items()
        if isinstance(preset.get(name), Link) and isinstance(value, Mapping)
    }
    return filled(Hardware, "hardware", {**changes, **links}, **preset)
