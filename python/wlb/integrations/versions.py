"""Which versions of other packages this is for."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from packaging.version import Version

from wlb._errors import error


def check_version(package: str, oldest: str) -> None:
    """Refuses a package that has not what is needed.

    Args:
        package: its name in the package index.
        oldest: the first version that has it.

    Raises:
        wlb.WlbError: it is missing, or older.
    """
    try:
        found = version(package)
    except PackageNotFoundError:
        raise error(package, f"is not installed: {oldest} or newer is needed") from None
    if Version(found) < Version(oldest):
        raise error(package, f"is {found}: {oldest} or newer is needed", value=found)
