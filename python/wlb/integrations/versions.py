"""Versions of other packages that the integrations support."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import Final

from packaging.version import Version

from wlb._errors import error

OLDEST: Final = {
    "accelerate": "1.1",
    "axolotl": "0.19",
    "grain": "0.2.18",
    "lightning": "2.5",
    "llamafactory": "0.9.5.dev0",  # the first for transformers 5
    "megatron-core": "0.16",  # the first whose rows name their ranks
    "torchtitan": "0.3.0",
    "transformers": "5.0",
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
