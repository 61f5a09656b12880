"""A file of measurements, one a line, that a run adds to and a later run goes on from."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from wlb._errors import error
from wlb.torch.profiling.grid import Shape

_FORMAT = {"format": "wlb.profile_records", "version": 1}


class Records:
    """What was measured, by shape and round. The first line says on what: another run on something else is refused."""

    def __init__(self, file: TextIO, found: dict[Shape, list[dict[str, Any]]]) -> None:
        self._file, self._found = file, found

    @classmethod
    def open(cls, path: Path, identity: dict[str, Any]) -> Records:
        """Reads the file, or begins it. A last line that was cut off in the middle is dropped.

        Args:
            path: the file.
            identity: of the machine and of what is measured.

        Raises:
            WlbError: it is no file of records, cannot be written, or is of something else: says of what.
        """
        header = _FORMAT | identity
        try:
            text = path.read_text(encoding="utf-8") if path.exists() else ""
        except (OSError, ValueError) as problem:
            raise error("records", f"{str(path)!r} cannot be read: {problem}", value=str(path)) from problem
        complete = text[: text.rfind("\n") + 1]  # a line is complete once its end is written
        lines = complete.splitlines()
        if lines:
            # As JSON gives it back: tuples are lists there.
            _check_same(path, _parse(path, 1, lines[0]), json.loads(json.dumps(header)))
        found: dict[Shape, list[dict[str, Any]]] = {}
        for number, line in enumerate(lines[1:], 2):
            shape, measured = _record(path, number, line)
            found.setdefault(shape, []).append(measured)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            file = path.open("r+" if path.exists() else "w", encoding="utf-8")
            file.seek(len(complete.encode()))
            file.truncate()
            records = cls(file, found)
            if not lines:
                records._write(header)
        except OSError as problem:
            raise error("records", f"{str(path)!r} cannot be written: {problem}", value=str(path)) from problem
        return records

    def rounds(self, shape: Shape) -> int:
        """How often it was measured."""
        return len(self._found.get(shape, ()))

    def __getitem__(self, shape: Shape) -> dict[str, Any]:
        """The last measurement, with the samples of all others whose calls were as large."""
        rounds = self._found[shape]
        last = rounds[-1]
        alike = [one for one in rounds if one.get("segments_per_call") == last.get("segments_per_call")]
        return {
            name: [sample for one in alike for sample in one[name]] if isinstance(value, list) else value
            for name, value in last.items()
        }

    def add(self, shape: Shape, measured: dict[str, Any]) -> None:
        """Writes one measurement, so that it outlives this process."""
        self._found.setdefault(shape, []).append(measured)
        self._write({"shape": asdict(shape), "measured": measured})

    def _write(self, line: dict[str, Any]) -> None:
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()

    def __enter__(self) -> Records:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()


def _parse(path: Path, number: int, line: str) -> Any:
    try:
        return json.loads(line)
    except ValueError as problem:
        raise error("records", f"{str(path)!r}, line {number}: is not JSON", value=str(path)) from problem


def _record(path: Path, number: int, line: str) -> tuple[Shape, dict[str, Any]]:
    value = _parse(path, number, line)
    try:
        return Shape(**value["shape"]), dict(value["measured"])
    except (KeyError, TypeError, ValueError) as problem:
        raise error("records", f"{str(path)!r}, line {number}: is not a record", value=str(path)) from problem


def _check_same(path: Path, found: Any, wanted: dict[str, Any]) -> None:
    """Refuses records that say another thing, naming the first that differs."""
    if not isinstance(found, dict) or {name: found.get(name) for name in _FORMAT} != _FORMAT:
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
