"""How the pages of commands look, in a browser where there is one, and by their text everywhere."""

from __future__ import annotations

import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.tools.pages.browser import Browser, installed

pytest.importorskip("matplotlib")

from wlb_tools.command.output.figures import style
from wlb_tools.command.output.figures.timeline import legible

LOOK = Path(__file__).with_name("look.js").read_text()
READABLE = 4.5
"""Least contrast of a text with what is behind it (WCAG 2, AA)."""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    if installed() is None:
        pytest.skip("no chromium on this machine")
    browser = Browser(tmp_path_factory.mktemp("browser"))
    yield browser
    browser.close()


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_pages_read_well(browser: Browser, pages: dict[str, Path], width: int, dark: bool) -> None:
    """No text below 11 px or a contrast of 4.5, nothing cut, no text over another, tables scroll inside."""
    for name, page in pages.items():
        browser.open(page, width=width, dark=dark)
        found: dict[str, Any] = browser.evaluate(LOOK)
        assert found["looked"] > 50, name
        assert (found["ground"] < 0.05) == dark, f"{name}: luminance of the page {found['ground']}"
        assert found["faults"] == [], f"{name}: {found['faults'][:10]}"


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("body { font-size: 10px }", "small"),
        ("p { color: #aaaaaa }", "pale"),
        (".scroll { overflow: visible }", "the page is"),
        ("svg { width: 600px }", "cut"),
        ("figure.wide { display: block } figure.narrow { display: none }", "small"),
    ],
)
def test_the_look_finds_faults(browser: Browser, pages: dict[str, Path], tmp_path: Path, fault: str, said: str) -> None:
    page = tmp_path / "page.html"
    page.write_text(pages["demo"].read_text().replace("</style>", f"{fault}</style>"))
    browser.open(page, width=390, dark=False)
    assert any(said in line for line in browser.evaluate(LOOK)["faults"])


def test_texts_of_pictures_are_large_enough(pages: dict[str, Path]) -> None:
    """Pictures have a layout for each of two widths, in which a point is a pixel and no text is below 11 of them."""
    for name, page in pages.items():
        html = page.read_text()
        boxes = [float(width) for width in re.findall(r'<svg[^>]*viewBox="0 0 ([\d.]+)', html)]
        assert len(boxes) == 2 * html.count('<figure class="wide">')
        for wide, narrow in zip(boxes[::2], boxes[1::2], strict=True):
            assert wide <= 13 * 72 + 1, name  # from 980 px on
            assert narrow <= 390 - 2 * 16, name
        sizes = [float(size) for size in re.findall(r"<text[^>]*font-size: ([\d.]+)px", html)]
        assert bool(sizes) == bool(boxes), name
        assert min(sizes, default=11) >= 11, name


def test_tables_scroll_inside(pages: dict[str, Path]) -> None:
    for page in pages.values():
        html = page.read_text()
        assert html.count("<table>") == html.count('<div class="scroll"><table>') > 0
        assert "prefers-color-scheme: dark" in html


def luminance(colour: str) -> float:
    values = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    linear = np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)
    return float(linear @ (0.2126, 0.7152, 0.0722))


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_colours_of_texts_have_contrast(dark: bool) -> None:
    def shown(colour: str) -> str:
        return style.DARK[colour] if dark else colour

    for ink in (style.INK, style.SOFT, style.WLB, style.ORIGINAL):
        for ground in (style.PAPER, style.IDLE):  # the page, and rows that stand out
            assert contrast(shown(ink), shown(ground)) >= READABLE, (ink, ground)
    for bar in (style.WLB, style.ORIGINAL):  # numbers stand on them
        assert contrast(shown(style.PAPER), shown(bar)) >= READABLE


def test_numbers_on_bars_have_contrast() -> None:
    """The colours of all passes, of up to eight stages of a rank."""
    from wlb_tools.command.output.figures.timeline import colours_of

    kinds, paler = np.repeat(np.arange(4), 9), np.tile(np.linspace(0, 0.45, 9), 4)
    colours = colours_of(kinds, paler)
    for colour, ink in zip(colours, legible(colours), strict=True):
        bar = "#" + "".join(f"{round(255 * part):02x}" for part in colour)
        assert contrast(bar, str(ink)) >= READABLE, bar


class _Painted(HTMLParser):
    """Classes of the headlines of a page, with their text."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, str]] = []
        self._open = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "div" and (of := dict(attrs).get("class")) in ("better", "worse", ""):
            self.found.append((of or "", ""))
            self._open = True

    def handle_endtag(self, tag: str) -> None:
        self._open &= tag != "div"

    def handle_data(self, data: str) -> None:
        if self._open:
            kind, text = self.found[-1]
            self.found[-1] = kind, text + data


def test_worse_is_not_painted_like_better(pages: dict[str, Path]) -> None:
    def painted(name: str) -> dict[str, str]:
        parser = _Painted()
        parser.feed(pages[name].read_text())
        return {text.split("\n")[0]: kind for kind, text in parser.found}

    seen = {kind for name in pages for kind in painted(name).values()}
    assert {"better", "worse"} <= seen
    for name in pages:
        for text, kind in painted(name).items():
            before, after, label = re.findall(r"([\d.,]+)%? → ([\d.,]+)%?\s*(.*)", text)[0]
            one, other = (float(number.replace(",", "")) for number in (before, after))
            more = label.startswith("tokens/s")
            expected = "" if one == other else "better" if (other > one) == more else "worse"
            assert kind == expected, (name, text)
    # What is shown against a faster baseline.
    slower = {label: kind for label, kind in painted("slower").items() if "tokens/s" in label}
    assert list(slower.values()) == ["worse"]
