"""Versions of other packages that the integrations support, and functions of theirs that wlb's stand in for."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType
from typing import Any, Final

from packaging.version import Version

from wlb._core import CostModel
from wlb._errors import error

OLDEST: Final = {
    "accelerate": "1.2",
    "axolotl": "0.19",
    "grain": "0.2.18",
    "lightning": "2.5",
    "llamafactory": "0.9.5.dev0",  # the first for transformers 5
    "megatron-core": "0.16",  # the first whose rows name their ranks
    "torchtitan": "0.3.0",
    "transferqueue": "0.1.11",
    "transformers": "5.6",
    "trl": "1.0",
    "verl": "0.9",
}
"""The first supported version of each package, by its name in the package index."""


def check_version(package: str) -> None:
    """Refuses a package that is missing or too old.

    Args:
        package: one of `OLDEST`.

    Raises:
        wlb.WlbError: it is missing, or older.
    """
    oldest = OLDEST[package]
    try:
        found = version(package)
    except PackageNotFoundError:
        raise error(package, f"is not installed: {oldest} or newer is needed") from None
    if Version(found) < Version(oldest):
        raise error(package, f"is {found}: {oldest} or newer is needed", value=found)


def needed(package: str, module: str, cost_model: object) -> ModuleType:
    """The module of a package whose functions wlb replaces, for a model with these costs.

    Raises:
        wlb.WlbError: it cannot be imported, or `cost_model` is none.
    """
    try:
        found = importlib.import_module(module)
    except ImportError as missing:
        raise error(package, f"is needed, and cannot be imported: {missing}") from missing
    if not isinstance(cost_model, CostModel):
        raise error("cost_model", f"= {cost_model!r}: must be a CostModel", value=cost_model)
    return found


def check_signature(package: str, theirs: object, ours: Callable[..., Any], expected_as: str) -> None:
    """Refuses a version of a package whose function takes other arguments than wlb's function in its place.

    Args:
        package: its name in the package index.
        theirs: the function, or None if that version has none.
        ours: wlb's function, with the same name and arguments.
        expected_as: the version that has these arguments, for the message.

    Raises:
        wlb.WlbError: it names the version and both lists of arguments.
    """
    expected = list(inspect.signature(ours).parameters)
    found = list(inspect.signature(theirs).parameters) if callable(theirs) else None
    if found == expected:
        return
    try:
        installed = version(package)
    except PackageNotFoundError:
        installed = "of no known version"
    message = (
        f"{installed} has {ours.__name__}({'missing' if found is None else ', '.join(found)}), but wlb expects "
        f"({', '.join(expected)}), {expected_as}: install that, or a wlb that supports this version"
    )
    raise error(package, message, value=installed)


def when_imported(name: str, action: Callable[[ModuleType], None]) -> None:
    """Calls a function with a module: now, if the module is loaded, else right after its first import."""
    if name in sys.modules:
        action(sys.modules[name])
        return
    _IMPORTS.waiting[name] = action
    if _IMPORTS not in sys.meta_path:
        sys.meta_path.insert(0, _IMPORTS)


class _Imports(MetaPathFinder):
    """Finds modules as Python does, and calls a function with those that are waited for."""

    def __init__(self) -> None:
        self.waiting: dict[str, Callable[[ModuleType], None]] = {}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        action = self.waiting.get(fullname)
        spec = None if action is None else PathFinder.find_spec(fullname, path, target)
        if action is None or spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def then(module: ModuleType) -> None:
            execute(module)
            action(module)
            self.waiting.pop(fullname, None)

        spec.loader.exec_module = then  # type: ignore[method-assign]
        return spec


_IMPORTS = _Imports()
