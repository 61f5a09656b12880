"""In which line of code each thread of this process is.

`sys._current_frames` would tell it too. But a frame of a thread that goes on may be freed while another one follows its
`f_back`, if making the outer frame's object lets a collection run: what is read then is some other object (seen under
Python 3.11), or ends the process. faulthandler makes no objects: it writes while it holds the GIL, and all stand still.
"""

from __future__ import annotations

import faulthandler
import linecache
import re
import sysconfig
import tempfile
from pathlib import Path
from typing import Final, NamedTuple

import torch

_HERE: Final = Path(__file__).parent
_THREAD: Final = re.compile(r"(?:Current thread|Thread) 0x([0-9a-f]+)")
_LINE: Final = re.compile(r'  File "(.*)", line (\S+) in (.*)')


class Line(NamedTuple):
    """A line of code that a thread is in."""

    file: str
    number: str
    function: str


def stacks() -> dict[int, list[Line]]:
    """The lines that threads are in, innermost first, by `threading.get_ident()`.

    At most 100 threads, the youngest, and 100 lines of each; none at all if no temporary file can be made.

    Complexity:
        O(lines), up to 50 us each and with the GIL: it is for when something went wrong.
    """
    try:
        with tempfile.TemporaryFile() as file:
            faulthandler.dump_traceback(file, all_threads=True)
            file.seek(0)
            text = file.read().decode("ascii", "replace")
    except OSError:
        return {}
    found: dict[int, list[Line]] = {}
    lines: list[Line] = []
    for row in text.splitlines():
        if (thread := _THREAD.match(row)) is not None:
            lines = found[int(thread[1], 16)] = []
        elif (line := _LINE.fullmatch(row)) is not None:
            lines.append(Line(*line.groups()))
    return found


def waits(lines: list[Line]) -> bool | None:
    """Whether a thread waits for other ranks; None where that cannot be seen, in torch's own C++ or nowhere."""
    if not lines:
        return None
    innermost = lines[0].file
    if innermost.startswith(_COLLECTIVES):
        return True
    if innermost.startswith(_TORCH):
        return None
    if any(line.file in _WAITS_IN_WLB for line in lines):
        return True
    # A `Work` waits in C++: the innermost line is that of whoever called it.
    if lines[0].number.isdigit() and ".wait(" in linecache.getline(innermost, int(lines[0].number)):
        return True if innermost.startswith(_WLB) else None
    return False


def where(lines: list[Line]) -> str:
    """The innermost line that is neither torch's nor of the standard library."""
    users = (line for line in lines if not line.file.startswith((_TORCH, _LIBRARY)))
    line = next(users, lines[0] if lines else None)
    return "" if line is None else f"{line.file}:{line.number} in {line.function}"


def _written(path: Path, *, folder: bool = False) -> str:
    """A path as faulthandler writes it."""
    return f"{path}{'/' if folder else ''}".encode("ascii", "backslashreplace").decode()


_TORCH: Final = _written(Path(torch.__file__).parent, folder=True)
_WLB: Final = _written(_HERE, folder=True)
_LIBRARY: Final = _written(Path(sysconfig.get_path("stdlib")), folder=True)
_COLLECTIVES: Final = (
    _written(Path(torch.__file__).parent / "distributed", folder=True),
    _written(_HERE / "data" / "peers.py"),
)
_WAITS_IN_WLB: Final = tuple(_written(_HERE / name) for name in ("failures.py", "heartbeat.py"))
