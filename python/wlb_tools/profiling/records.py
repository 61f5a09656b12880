"""A file of measurements, one a line, which a run appends to and a later run continues."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from wlb._core import WlbError
from wlb._errors import error
from wlb_tools.profiling.grid import Shape

_FORMAT = {"format": "wlb.profile_records", "version": 1}


class Lines:
    """JSON objects, one a line. The first one identifies the others; a file of another run is refused."""

    def __init__(self, file: TextIO) -> None:
        self._file = file

    @classmethod
    def open(cls, path: Path, header: dict[str, Any]) -> tuple[Lines, list[Any]]:
        """Reads the file, or begins it. A last line that was cut off is dropped.

        Args:
            path: the file.
            header: its first line; has "format" and "version".

        Returns:
            The open file, and its lines after the first.

        Raises:
            WlbError: it is no file of that format, cannot be written, or belongs to another measurement, which is
                named.
        """
        try:
            text = path.read_text(encoding="utf-8") if path.exists() else ""
        except (OSError, ValueError) as problem:
            raise error("records", f"{str(path)!r} cannot be read: {problem}", value=str(path)) from problem
        complete = text[: text.rfind("\n") + 1]  # a line is complete once its end is written
        found = [_parse(path, number, line) for number, line in enumerate(complete.splitlines(), 1)]
        if found:
            # Compare with the header as JSON reads it: tuples become lists.
            _check_same(path, found[0], json.loads(json.dumps(header)))
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            file = path.open("r+" if path.exists() else "w", encoding="utf-8")
            file.seek(len(complete.encode()))
            file.truncate()
            lines = cls(file)
            if not found:
                lines.add(header)
        except OSError as problem:
            raise error("records", f"{str(path)!r} cannot be written: {problem}", value=str(path)) from problem
        return lines, found[1:]

    def add(self, line: dict[str, Any]) -> None:
        """Writes a line to disk, so that it survives the end of this process."""
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


class Records:
    """Measurements by shape and round; the first line of the file identifies the device."""

    def __init__(self, lines: Lines, found: dict[Shape, list[dict[str, Any]]]) -> None:
        self._lines, self._found = lines, found

    @classmethod
    def open(cls, path: Path, identity: dict[str, Any]) -> Records:
        """Reads the file, or begins it: see `Lines.open`.

        Args:
            path: the file.
            identity: of the machine and of the measurement.

        Raises:
            WlbError: it is no file of records, cannot be written, or belongs to another measurement, which is named.
        """
        lines, values = Lines.open(path, _FORMAT | identity)
        found: dict[Shape, list[dict[str, Any]]] = {}
        try:
            for number, value in enumerate(values, 2):
                shape, measured = _record(path, number, value)
                found.setdefault(shape, []).append(measured)
        except WlbError:
            lines.close()
            raise
        return cls(lines, found)

    def rounds(self, shape: Shape) -> int:
        """Number of measured rounds of a shape."""
        return len(self._found.get(shape, ()))

    def __getitem__(self, shape: Shape) -> dict[str, Any]:
        """The last measurement, with the samples of all others whose calls had as many segments."""
        rounds = self._found[shape]
        last = rounds[-1]
        alike = [one for one in rounds if one.get("segments_per_call") == last.get("segments_per_call")]
        return {
            name: [sample for one in alike for sample in one[name]] if isinstance(value, list) else value
            for name, value in last.items()
        }

    def add(self, shape: Shape, measured: dict[str, Any]) -> None:
        """Writes one measurement to disk, so that it survives the end of this process."""
        self._found.setdefault(shape, []).append(measured)
        self._lines.add({"shape": asdict(shape), "measured": measured})

    def __enter__(self) -> Records:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lines.close()


def _parse(path: Path, number: int, line: str) -> Any:
    try:
        return json.loads(line)
    except ValueError as problem:
        raise error("records", f"{str(path)!r}, line {number}: is not JSON", value=str(path)) from problem


def _record(path: Path, number: int, value: Any) -> tuple[Shape, dict[str, Any]]:
    try:
        return Shape(**value["shape"]), dict(value["measured"])
    except (KeyError, TypeError, ValueError) as problem:
        raise error("records", f"{str(path)!r}, line {number}: is not a record", value=str(path)) from problem


def _check_same(path: Path, found: Any, wanted: dict[str, Any]) -> None:
    """Refuses records with another identity, naming the first difference."""
    if not isinstance(found, dict) or any(found.get(name) != wanted[name] for name in _FORMAT):
        raise error("records", f"{str(path)!r} is not a file of records of this version", value=str(path))
    for name, value in wanted.items():
        if found.get(name) == value:
            continue
        theirs, ours = found.get(name), value
        if isinstance(theirs, dict) and isinstance(ours, dict):
            key = next(key for key in {**ours, **theirs} if theirs.get(key) != ours.get(key))
            name, theirs, ours = f"{name}.{key}", theirs.get(key), ours.get(key)
        message = f"{str(path)!r} was measured with {name} {theirs!r}, this is {ours!r}; move it away to begin anew"
        raise error("records", message, value=str(path))
