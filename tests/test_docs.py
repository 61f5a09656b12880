"""README and docs do what they say: Python blocks run as pasted, commands and options exist, links lead somewhere."""

from __future__ import annotations

import contextlib
import importlib
import io
import multiprocessing
import os
import re
import shlex
import socket
import traceback
from collections.abc import Iterator
from importlib.util import find_spec
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
PAGES += [page for folder in ("trainers", "development") for page in sorted((ROOT / "docs" / folder).glob("*.md"))]
WRITTEN = sorted((ROOT / "docs" / "results").glob("*.md"))
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)")
MAKE = re.compile(r"\bmake ([a-z][a-z-]*)")


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def blocks(page: Path, language: str) -> Iterator[tuple[int, str]]:
    """Line on which a block's text begins, and the text."""
    text = page.read_text()
    for found in BLOCK.finditer(text):
        if found[1] == language:
            yield text.count("\n", 0, found.start(2)) + 1, found[2]


def pasted(page: Path) -> str:
    """All Python blocks of a page, each on the lines where it stands, so that tracebacks name them."""
    lines: list[str] = []
    for first, text in blocks(page, "python"):
        lines += [""] * (first - 1 - len(lines)) + text.splitlines()
    return "\n".join(lines) + "\n"


def prose(page: Path) -> str:
    """What is not in a block."""
    return BLOCK.sub("", page.read_text())


def commands() -> Iterator[tuple[str, list[str]]]:
    """Every command of a `console` block or of inline code, as words, with where it stands."""
    for page in PAGES:
        lines = [
            (first + i, line) for first, text in blocks(page, "console") for i, line in enumerate(text.split("\n"))
        ]
        shown = [(number, line[2:]) for number, line in lines if line.startswith("$ ")]
        inline = [(0, code) for code in re.findall(r"`([^`]+)`", prose(page))]
        for number, command in [*shown, *inline]:
            try:
                words = shlex.split(command, comments=True)
            except ValueError:  # an apostrophe: not a command
                continue
            yield f"{name_of(page)}:{number}", words


def needs_torch(page: Path) -> bool:
    return re.search(r"^import (torch|wlb\.torch)", pasted(page), re.MULTILINE) is not None


def run(page: Path, folder: Path, torchrun: dict[str, str], writer: Connection) -> None:
    """All blocks of a page as one script, in `folder`; sends the traceback, if there is one, and what was printed."""
    os.environ |= torchrun
    os.chdir(folder)
    failure, printed = "", io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            exec(compile(pasted(page), name_of(page), "exec"), {"__name__": "__main__"})
    except BaseException:
        failure = traceback.format_exc()
    writer.send((failure, printed.getvalue()))
    os._exit(0)


def run_on_ranks(page: Path, folder: Path, ranks: list[dict[str, str]]) -> str:
    """A forked process for each rank: to import torch anew would take most of the time. What the last one printed."""
    if needs_torch(page):
        pytest.importorskip("torch").set_num_threads(1)
        importlib.import_module("wlb.torch")
    context = multiprocessing.get_context("fork")
    processes = []
    for torchrun in ranks:
        reader, writer = context.Pipe(duplex=False)
        process = context.Process(target=run, args=(page, folder, torchrun, writer))
        process.start()
        writer.close()
        processes.append((process, reader))
    try:
        for _, reader in processes:
            assert reader.poll(500), "no answer"
            failure, printed = reader.recv()
            assert not failure, failure
    finally:
        for process, _ in processes:
            process.kill()
            process.join()
    return str(printed)


def output(page: Path) -> list[str]:
    """Blocks that are no program. Those for other programs are run by the tests of these, asking `block`."""
    tests = "".join(path.read_text() for path in (ROOT / "tests" / "trainers").glob("*.py"))
    asked = re.findall(r'\bblock\("([^"]+)"', tests)
    others = [found[2] for found in BLOCK.finditer(page.read_text()) if found[1] not in ("python", "console")]
    return [text for text in others if not any(words in text for words in asked)]


@pytest.mark.parametrize("page", [page for page in PAGES if pasted(page).strip()], ids=name_of)
def test_python_blocks_run_as_pasted(page: Path, tmp_path: Path) -> None:
    """In one process, in order, with nothing but what the page shows; and print what it says."""
    printed = run_on_ranks(page, tmp_path, [{}])
    for text in output(page):
        assert text in printed


def test_every_block_that_a_trainer_test_takes_is_there() -> None:
    tests = "".join(path.read_text() for path in sorted((ROOT / "tests" / "trainers").glob("*.py")))
    taken = re.findall(r'\bblock\("([^"]+)"(?:, "([^"]+)")?\)', tests)
    assert len(taken) > 8
    for words, page in taken:
        pages = (
            [ROOT / "docs" / page]
            if page
            else [*(ROOT / "docs").glob("trainers*.md"), *(ROOT / "docs").glob("trainers/*.md")]
        )
        text = "\n".join(each.read_text() for each in pages)
        assert sum(words in found[2] for found in BLOCK.finditer(text) if found[1]) == 1, f"{words!r} of {page}"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_no_block_is_left_out(page: Path) -> None:
    """What no Python of the page prints is a program that some test runs."""
    assert pasted(page).strip() or not output(page)


@pytest.mark.skipif(find_spec("torch") is None, reason="torch is not installed")
@pytest.mark.parametrize("page", ["docs/training.md", "docs/dynamic_cp.md"])
def test_blocks_run_under_torchrun_too(page: str, tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1]), "WORLD_SIZE": "2"}
    run_on_ranks(ROOT / page, tmp_path, [meeting | {"RANK": str(rank)} for rank in range(2)])


def test_commands_and_options_exist() -> None:
    for package in ("cyclopts", "jinja2", "rich", "matplotlib", "plotly"):
        pytest.importorskip(package)
    from wlb_tools.command.app import app

    seen = 0
    for where, words in commands():
        if words[:1] != ["wlb"] or len(words) < 2 or not re.fullmatch(r"[a-z]+", words[1]):
            continue
        assert words[1] in set(app), f"{where}: wlb has no {words[1]}"
        arguments = app[words[1]].assemble_argument_collection(default_parameter=app.default_parameter)
        known = {name for argument in arguments for name in argument.names}
        for option in (word.split("=")[0] for word in words[2:] if word.startswith("--")):
            assert option in known, f"{where}: wlb {words[1]} has no {option}"
        seen += 1
    assert seen > 20


def test_make_targets_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for page in PAGES:
        code = "\n".join([*re.findall(r"`([^`]+)`", prose(page)), *(text for _, text in blocks(page, "console"))])
        for target in MAKE.findall(code):
            assert target in targets, f"{name_of(page)}: there is no `make {target}`"


def test_tests_exist_and_have_what_is_selected() -> None:
    for where, words in commands():
        if words[:1] != ["pytest"]:
            continue
        assert (ROOT / words[1]).exists(), f"{where}: there is no {words[1]}"
        files = [ROOT / words[1]] if words[1].endswith(".py") else (ROOT / words[1]).glob("*.py")
        tests = re.findall(r"def test_(\w+)", "".join(file.read_text() for file in files))
        selected = words[words.index("-k") + 1].split(" or ") if "-k" in words else []
        for name in selected:
            assert any(name in test for test in tests), f"{where}: no test of {words[1]} is selected by {name}"


def module_of(words: list[str]) -> tuple[Path, list[str]] | None:
    """The file of ours that a command runs, and its options."""
    for at, word in enumerate(words):
        if re.fullmatch(r"examples/\w+\.py", word):
            return ROOT / word, words[at + 1 :]
        if word == "-m" and re.match(r"(benches|studies)\b", words[at + 1]):
            path = ROOT / words[at + 1].replace(".", "/")
            return path / "__main__.py" if path.is_dir() else path.with_suffix(".py"), words[at + 2 :]
    return None


def test_programs_exist_and_know_their_options() -> None:
    seen = 0
    for where, words in commands():
        found = module_of(words)
        if found is None:
            continue
        path, options = found
        assert path.exists(), f"{where}: there is no {path.relative_to(ROOT)}"
        source = "".join(file.read_text() for file in path.parent.glob("*.py"))
        for option in (word for word in options if word.startswith("--")):
            spelled = option[2:].removeprefix("empty-").replace("-", "_")  # cyclopts: an option that is emptied
            known = option in source or re.search(rf"\b(num_)?{spelled}(_size)?\b", source)
            assert known, f"{where}: {path.relative_to(ROOT)} has no {option}"
        seen += 1
    assert seen > 5


def anchors(page: Path) -> set[str]:
    """As GitHub makes them of headings."""
    headings = re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_links_lead_somewhere() -> None:
    for page in [*PAGES, *WRITTEN]:
        for link in LINK.findall(prose(page)):
            if "://" in link:
                continue
            path, _, anchor = link.partition("#")
            target = (page.parent / path).resolve() if path else page
            assert target.exists(), f"{name_of(page)}: {link} is not there"
            if anchor:
                assert anchor in anchors(target), f"{name_of(page)}: {link}: no such heading"


def test_lines_are_no_longer_than_a_screen() -> None:
    """120 characters, but in tables and blocks."""
    for page in PAGES:
        for line in prose(page).splitlines():
            assert len(line) <= 120 or line.startswith("|"), f"{name_of(page)}: {line}"


def test_comments_of_rust_are_no_longer_than_its_lines() -> None:
    """Rustfmt breaks code at `max_width`, and leaves comments as they are."""
    for path in [*ROOT.glob("rust/*/src/**/*.rs"), *ROOT.glob("rust/*/tests/**/*.rs")]:
        for line in path.read_text().splitlines():
            comment = line.lstrip()
            assert len(line) <= 120 or not comment.startswith("//") or comment.startswith("//! |"), f"{path}: {line}"


def test_the_reference_has_every_public_name() -> None:
    """In an order of its own: what most people call comes first."""
    import wlb

    page = (ROOT / "docs" / "reference" / "wlb.md").read_text()
    listed = re.search(r"members: \[(.*?)\]", page, re.DOTALL)
    assert listed is not None
    names = [name.strip() for name in listed[1].split(",")]
    by_hand = re.findall(r"^## `wlb\.(\w+)`$", page, re.MULTILINE)  # of overloads alone the site's reader knows nothing
    assert sorted(names + by_hand) == sorted({*wlb.__all__} - {"__version__"})
    assert names[0] == "pack"
