"""Before a release is built: the project's addresses in its metadata, and README's links absolute.

    python .ci/addresses.py https://github.com/OWNER/NAME v1.2.3

README is the project's page on the package index, where a link to docs/ leads nowhere. Forks build with addresses of
their own, so that none stands in the sources. Changes README.md and pyproject.toml.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ADDRESS = r"(?!https?://|#|mailto:)([^)\s]+)"
PICTURE, LINK = re.compile(rf"(!\[[^\]]*\]\(){ADDRESS}\)"), re.compile(rf"(\]\(){ADDRESS}\)")


def absolute(markdown: str, project: str, ref: str) -> str:
    """The page with links and pictures that work everywhere."""
    markdown = PICTURE.sub(rf"\1{project}/raw/{ref}/\2)", markdown)
    return LINK.sub(rf"\1{project}/blob/{ref}/\2)", markdown)


def with_addresses(pyproject: str, project: str, ref: str) -> str:
    """The metadata with the project's pages."""
    pages = {
        "Homepage": project,
        "Documentation": f"{project}/blob/{ref}/docs/index.md",
        "Changelog": f"{project}/blob/{ref}/CHANGELOG.md",
        "Issues": f"{project}/issues",
    }
    lines = "".join(f'{name} = "{address}"\n' for name, address in pages.items())
    return pyproject.replace("[project.scripts]\n", f"[project.urls]\n{lines}\n[project.scripts]\n", 1)


def main() -> None:
    """Changes both files."""
    project, ref = sys.argv[1:]
    for name, change in {"README.md": absolute, "pyproject.toml": with_addresses}.items():
        path = Path(name)
        path.write_text(change(path.read_text(), project, ref))


if __name__ == "__main__":
    main()
