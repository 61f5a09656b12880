"""What a release is made of agrees with itself."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def addresses() -> ModuleType:
    spec = importlib.util.spec_from_file_location("addresses", ROOT / ".ci" / "addresses.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_links_of_a_released_readme_lead_out_of_it(addresses: ModuleType) -> None:
    page = addresses.absolute((ROOT / "README.md").read_text(), "https://example.org/o/n", "v1")
    links = re.findall(r"\]\(([^)\s]+)\)", page)
    assert len(links) > 10
    assert all(link.startswith(("https://", "#")) for link in links), links
    assert "](https://example.org/o/n/raw/v1/docs/demo.png)" in page
    assert (
        addresses.absolute("[![a](b.png)](c.md)", "https://h", "r")
        == "[![a](https://h/raw/r/b.png)](https://h/blob/r/c.md)"
    )


@pytest.mark.skipif(sys.version_info < (3, 11), reason="tomllib")
def test_metadata_of_a_release_name_its_pages(addresses: ModuleType) -> None:
    import tomllib

    changed = addresses.with_addresses((ROOT / "pyproject.toml").read_text(), "https://example.org/o/n", "v1")
    project = tomllib.loads(changed)["project"]
    assert project["urls"]["Issues"] == "https://example.org/o/n/issues"
    assert project["scripts"] == {"wlb": "wlb_tools.__main__:main"}


def test_versions_agree() -> None:
    def version(name: str, pattern: str) -> str:
        found = re.search(pattern, (ROOT / name).read_text(), re.MULTILINE)
        assert found, name
        return found[1]

    cut = version("Cargo.toml", r'^version = "([^"]+)"')
    assert version("CITATION.cff", r"^version: (\S+)") == cut
    assert version("CHANGELOG.md", r"^## (\S+) \(\d{4}-\d\d-\d\d\)$") == cut
    released = version("CHANGELOG.md", r"^## \S+ \((\d{4}-\d\d-\d\d)\)$")
    assert version("CITATION.cff", r"^date-released: (\S+)") == released
