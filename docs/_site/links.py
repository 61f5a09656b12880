"""For the site: the README on its front page, links that leave docs/ as plain text, and every page as Markdown, too.

`llms.txt` lists the pages with their first sentences (https://llmstxt.org).
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

LINK = re.compile(r"(?<!!)\[([^\]]+)\]\((\.\./[^)\s]+)\)")
pages: dict[str, tuple[str, str, str]] = {}
"""By address: title, first sentence, text."""


README = "<!-- the README, to where it says what to read on -->"


def front(docs: Path) -> str:
    """What the README says, with links as they are on the site."""
    text = (docs.parent / "README.md").read_text().partition("\n")[2].partition("## Read on")[0]
    return re.sub(r"\]\((?!https?:|#)([^)\s]+)\)", lambda link: f"]({_on_site(link[1])})", text).strip()


def _on_site(path: str) -> str:
    return path.removeprefix("docs/") if path.startswith("docs/") else f"../{path}"


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    """The page without links to files that are not on the site; kept for `on_post_build`."""
    docs = Path(config["docs_dir"]).resolve()
    markdown = markdown.replace(README, front(docs))
    folder = (docs / page.file.src_uri).parent

    def inside(link: re.Match[str]) -> str:
        path = (folder / link[2].partition("#")[0]).resolve()
        return link[0] if path.is_relative_to(docs) else f"{link[1]} (`{path.relative_to(docs.parent)}`)"

    markdown = LINK.sub(inside, markdown)
    prose = re.sub(r"^(#|\||!\[|:::).*$", "", re.sub(r"```.*?```", "", markdown, flags=re.DOTALL), flags=re.MULTILINE)
    lines = [line for line in markdown.split("\n") if line.strip()]
    title = next((line.lstrip("# ") for line in lines if line.startswith("# ")), page.file.src_uri)
    after = prose.strip().split("\n\n")
    first = next((" ".join(part.split()) for part in after if part.strip() and not part.startswith("Written ")), "")
    pages[page.file.src_uri] = (title, first.split(". ")[0].rstrip("."), markdown)
    return markdown


def on_post_build(config: Any, **_: Any) -> None:
    """Writes the Markdown pages and `llms.txt` beside the site."""
    site = Path(config["site_dir"])
    lines = [f"# {config['site_name']}", "", f"> {config['site_description']}", "", "## Pages", ""]
    for address, (title, first, text) in pages.items():
        path = site / address
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        lines.append(f"- [{title}]({address}): {first}" if first else f"- [{title}]({address})")
    (site / "llms.txt").write_text("\n".join(lines) + "\n")
