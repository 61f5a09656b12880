"""What the pages of commands say, and how they look, by their text."""

from __future__ import annotations

import itertools
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

import wlb

pytest.importorskip("matplotlib")

from wlb_tools.command.output.figures import style

READABLE = 4.5
"""Least contrast of a text with what is behind it (WCAG 2, AA)."""


def test_bars_tell_what_the_simulation_says() -> None:
    """Rank, pass, micro-batch and times of every bar are those of the timelines, in the order that is asked for."""
    from wlb_tools.command.output.figures.interactive import MOST_OPS, interactive_timelines
    from wlb_tools.simulation.outcome import Contents

    costs = np.random.default_rng(2).lognormal(size=(2, 6))
    every = [wlb.simulate_pipeline(row, num_stages=2, p2p_seconds=0.01) for row in costs]
    contents = [[Contents(tokens=9, documents=2, longest=5, cp_size=1)] * 6] * 2
    picture = interactive_timelines(every, contents, title="", pipelines="DP", numbers=[1, 0])
    assert picture is not None
    told: dict[tuple[int, int, str, int], tuple[float, float]] = {}
    order = []
    for bars in picture.data:
        for text, base, width in zip(bars.get("hovertext", ()), bars["base"], bars["x"], strict=False):
            dp, pp, kind, micro_batch = re.findall(r"DP (\d) · PP (\d): (\w+) of micro-batch (\d)", text)[0]
            assert "9 tokens in 2 documents, the longest 5" in text
            told[int(dp), int(pp), kind, int(micro_batch)] = (base, base + width)
            order.append(int(dp))
    assert list(dict.fromkeys(order)) == [1, 0]
    ops = {
        (dp, int(rank), of.KINDS[kind], int(micro_batch)): (start, end)
        for dp, of in enumerate(every)
        for rank, kind, micro_batch, start, end in zip(
            of.ranks, of.kinds, of.micro_batches, of.starts, of.ends, strict=True
        )
    }
    assert told.keys() == ops.keys()
    for op, times in told.items():
        assert times == pytest.approx(ops[op], rel=1e-4), op
    many = [wlb.simulate_pipeline(np.ones(MOST_OPS), num_stages=2)]
    assert interactive_timelines(many, [[contents[0][0]] * MOST_OPS], title="", pipelines="DP", numbers=[0]) is None


def test_texts_of_pictures_are_large_enough(pages: dict[str, Path]) -> None:
    """Pictures have a layout for each of two widths, in which a point is a pixel and no text is below 11 of them."""
    for name, page in pages.items():
        html = page.read_text()
        boxes = [float(width) for width in re.findall(r'<svg[^>]*viewBox="0 0 ([\d.]+)', html)]  # static ones
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


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_bars_of_passes_have_contrast(dark: bool) -> None:
    """With the page, with what is idle, and with the numbers on them, which have the page's colour."""
    for bar in itertools.chain(*style.PASSES):
        for ground in (style.PAPER, style.IDLE):
            shown = [style.DARK[colour] if dark else colour for colour in (bar, ground)]
            assert contrast(*shown) >= READABLE, shown


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_marks_and_lines_have_contrast(dark: bool) -> None:
    """At least 3, which is for what is no text (WCAG 2, 1.4.11); and no two kinds of plans look the same."""
    marks = [*style.METHODS, style.WLB, style.ORIGINAL, style.ADAPTIVE]
    shown = [style.DARK.get(mark, mark) if dark else mark for mark in marks]
    paper = style.DARK[style.PAPER] if dark else style.PAPER
    assert min(contrast(mark, paper) for mark in shown) >= 3
    assert len({*shown[: len(style.METHODS)]}) == len(style.METHODS)


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
            more = label.startswith(("tokens/s", "speed"))
            expected = "" if one == other else "better" if (other > one) == more else "worse"
            assert kind == expected, (name, text)
    # What is shown against a faster baseline.
    slower = {label: kind for label, kind in painted("slower").items() if "tokens/s" in label}
    assert list(slower.values()) == ["worse"]
