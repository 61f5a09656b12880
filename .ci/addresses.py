"""Before a release is built: the project's addresses in its metadata, and README's links absolute.

    python .ci/addresses.py https://github.com/OWNER/NAME v1.2.3

README is the project's page on the package index, where a link to docs/ leads nowhere. Forks build with addresses of
their own, so that none stands in the sources. Changes README.md and pyproject.toml.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?://|#|mailto:)([^)\s]+)\)")


def absolute(markdown: str, project: str, ref: str) -> str:
    """The page with links and pictures that work everywhere."""

    def link(found: re.Match[str]) -> str:
        kind = "raw" if found[1] else "blob"
        return f"{found[1]}[{found[2]}]({project}/{kind}/{ref}/{found[3]})"

    # A picture may be the text of a link: from the inside out.
    before = ""
    while before != markdown:
        before, markdown = markdown, LINK.sub(link, markdown)
    return markdown


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
