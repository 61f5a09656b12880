"""Which torchtitan this is for."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import Final

from packaging.version import Version

from wlb._errors import error

_OLDEST: Final = "0.3.0"


def check_version() -> None:
    """Refuses a torchtitan that has not what is needed.

    Raises:
        wlb.WlbError: It is missing, or older.
    """
    try:
        found = version("torchtitan")
    except PackageNotFoundError:
        raise error("torchtitan", f"is not installed: {_OLDEST} or newer is needed") from None
    if Version(found) < Version(_OLDEST):
        raise error("torchtitan", f"is {found}: {_OLDEST} or newer is needed", value=found)
