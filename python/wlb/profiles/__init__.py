"""Measured profiles: JSON files, one per GPU and attention kernel.

`wlb.KernelModel.from_profile` and `wlb.CostModel.from_profile` read them; docs/semantics.md has the format.
"""

from __future__ import annotations

import os

from wlb._core import WlbError

__all__ = ["names", "read"]


def names() -> list[str]:
    """Names of the profiles that come with wlb, sorted."""
    from importlib import resources  # takes a hundredth of a second, and planning needs none

    files = resources.files(__name__).iterdir()
    return sorted(file.name.removesuffix(".json") for file in files if file.name.endswith(".json"))


def read(path_or_name: str | os.PathLike[str]) -> str:
    """The text of a profile.

    Args:
        path_or_name: path of a ``.json`` file, or a name in `names`.

    Raises:
        WlbError: there is no such file, or it cannot be read as text.
    """
    from importlib import resources

    name = os.fspath(path_or_name)
    try:
        if name in names():
            return resources.files(__name__).joinpath(f"{name}.json").read_text(encoding="utf-8")
        with open(name, encoding="utf-8") as file:
            return file.read()
    except (OSError, ValueError) as error:
        came_with_wlb = ", ".join(names()) or "none"
        refusal = WlbError(f"profile: cannot read {name!r} ({error}); profiles that came with wlb: {came_with_wlb}")
        refusal.argument, refusal.value = "path_or_name", name
        raise refusal from error
