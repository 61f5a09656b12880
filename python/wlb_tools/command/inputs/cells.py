"""Lengths of the rows of a file, or of a batch of rows.

`wlb.reading.row_kinds` says which documents a row has, and `rules` what a trainer makes of them. This module counts: a
batch of Arrow at once where its columns allow it, else row by row. A value that is not like the others is refused with
its file, row and column.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from wlb._core import MAX_TOKENS
from wlb.reading.row_kinds import (
    Kind,
    Reading,
    Text,
    Tokens,
    documents,
    is_length_name,
    is_messages,
    masked_lengths,
    reading_of,
    reading_of_columns,
)  # fmt: skip
from wlb_tools.command.errors import CliError
from wlb_tools.command.inputs.rules import Rule
from wlb_tools.command.inputs.tokenizers import Measure, Tokenizer

Holds = Literal["text", "tokens", "lengths"]
Where = Callable[[int], str]
"""Names a row of a batch, for errors."""

_MOST = 10**8  # documents of a histogram

_KINDS: dict[Holds | None, tuple[Kind, ...] | None] = {
    None: None,
    "text": ("preference", "instruction", "pair", "rollouts", "chat", "text", "prompt"),
    "tokens": ("tokens",),
    "lengths": ("histogram", "lengths"),
}
_SAID: dict[Kind, str] = {
    "preference": "A row is a preference pair: two documents, the prompt with the chosen answer, then with the rejected"
    " one, as trainers of DPO and of rewards train them.",
    "prompt": "Rows are prompts alone; the answers that a model gives will make them longer.",
    "rollouts": "Each answer of a row is a document, with its prompt.",
    "histogram": "A row says how many documents have a length.",
}
"""Sentences about kinds of rows whose lengths need one."""


@dataclass(frozen=True)
class Wanted:
    """The fields to read from each row.

    field: names of columns with commas between, whose texts make one document; "": found by their names.
    holds: what the columns have, if their type could mean several things; None: the type decides.
    tokenizer: counts the tokens of texts; None: bytes of UTF-8.
    trainer: the trainer whose rule makes token sequences of documents; None: none of its rules.
    saw: "text" is added if text was measured, so that lengths count what the tokenizer counts, else "tokens".
    notes: sentences about what was read.
    """

    field: str = ""
    holds: Holds | None = None
    tokenizer: Tokenizer | None = None
    trainer: str | None = None
    saw: set[str] = dataclasses.field(default_factory=set, compare=False)
    notes: dict[str, None] = dataclasses.field(default_factory=dict, compare=False)

    @property
    def measure(self) -> Measure | None:
        """Counts tokens; None: bytes are counted."""
        return None if self.tokenizer is None else self.tokenizer.measure

    @property
    def name(self) -> str:
        """Identifies tokenizer, template and rule; lengths are cached under it."""
        return "" if self.tokenizer is None else f"{self.tokenizer.name}-{self.trainer or ''}"

    def fresh(self) -> Wanted:
        """A copy with these settings for another source, which has seen nothing yet."""
        return dataclasses.replace(self, saw=set(), notes={})

    def reading(self, names: Sequence[str], where: str) -> Reading:
        """How rows with these columns are read.

        Raises:
            CliError: the named columns do not exist; or none was given, and none or several could be meant.
        """
        there = [*names]
        if self.field:
            chosen = tuple(part.strip() for part in self.field.split(",") if part.strip())
            missing = [name for name in chosen if name not in there]
            if missing:
                raise CliError(
                    f"{where}: no column {missing[0]!r} (--field); its columns: {', '.join(there) or 'none'}"
                )
            if len(chosen) == 1 and (self.holds == "lengths" or (self.holds is None and is_length_name(chosen[0]))):
                return Reading("lengths", {"lengths": chosen[0]})
            return reading_of_columns(chosen, there)
        found = reading_of(there, _KINDS[self.holds])
        if found is None and len(there) == 1:
            found = Reading("lengths", {"lengths": there[0]}) if self.holds == "lengths" else None
            found = found or Reading("text", {}, (there[0],))
        if found is None:
            message = f"{where}: which of its columns has the documents is not clear: --field NAME; its columns:"
            raise CliError(f"{message} {', '.join(there) or 'none'}")
        return found

    def counts(self, texts: list[Any]) -> NDArray[np.int64]:
        """int64[n]: tokens, or bytes without a tokenizer."""
        if texts:
            self.saw.add("text")
        return utf8_lengths(texts) if self.measure is None else self.measure(texts)

    def unread(self, columns: Sequence[str]) -> None:
        """Notes columns with text that is not counted, unless the user chose the columns."""
        if columns and not self.field:
            self.notes[f"Not counted: {', '.join(map(repr, columns))}."] = None


def utf8_lengths(texts: list[str]) -> NDArray[np.int64]:
    """int64[n]: bytes of UTF-8. JSON may have half a surrogate pair, which UTF-8 cannot write."""
    return np.array([len(text.encode("utf-8", "surrogatepass")) for text in texts], dtype=np.int64)


def checked_lengths(values: Any, where: str, first_row: int = 0) -> NDArray[np.int64]:
    """Lengths, after a check that they are some.

    Raises:
        CliError: naming the row of a value that is no length.
    """
    array = np.asarray(values)
    if array.dtype.kind == "f":
        wrong = np.flatnonzero(~(np.isfinite(array) & (array == np.floor(array))))
        if wrong.size:
            row = int(wrong[0])
            raise CliError(f"{where}: row {first_row + row}: {array[row]} is no length: a whole number of tokens")
    elif array.dtype.kind not in "iu":
        raise CliError(f"{where}: holds {array.dtype}, not lengths: whole numbers of tokens")
    wrong = np.flatnonzero((array < 0) | (array > MAX_TOKENS))
    if wrong.size:
        row = int(wrong[0])
        message = f"{array[row]:.0f}: a length is from 0 to {MAX_TOKENS:,} tokens"
        raise CliError(f"{where}: row {first_row + row}: {message}")
    return array.astype(np.int64)


def histogram(lengths: NDArray[np.int64], counts: NDArray[np.int64], where: str) -> NDArray[np.int64]:
    """Lengths of documents from how often each length occurs.

    Raises:
        CliError: there are more documents than can be held.
    """
    if counts.sum(dtype=np.float64) > _MOST:
        raise CliError(
            f"{where}: says {counts.sum(dtype=np.float64):,.0f} documents; the most is {_MOST:,}: scale them down"
        )
    return np.repeat(lengths, counts)


# Tables.


def table_lengths(table: Any, reading: Reading, wanted: Wanted, path: Path, first_row: int) -> NDArray[np.int64]:
    """int64[documents]: those of a table or record batch of Arrow that has the columns of `reading`.

    Raises:
        CliError: a column has another type than it should, or a value is missing.
    """
    columns = {name: _plain(table.column(name)) for name in reading.names}
    for name in reading.columns.values() if reading.kind in ("lengths", "histogram") else ():
        if columns[name].null_count:
            row = int(np.flatnonzero(np.asarray(columns[name].is_null()))[0])
            raise CliError(f"{path}: row {first_row + row}: nothing in column {name!r} (null)")
    found = _at_once(columns, reading, wanted, path, first_row)
    if found is not None:
        return found
    values = {name: column.to_pylist() for name, column in columns.items()}
    rows = [dict(zip(values, row, strict=True)) for row in zip(*values.values(), strict=True)]
    return row_lengths(rows, reading, wanted, lambda row: f"{path}: row {first_row + row}")


def _plain(column: Any) -> Any:
    import pyarrow as pa

    if isinstance(column, pa.ChunkedArray):
        column = column.combine_chunks()
    if pa.types.is_dictionary(column.type):
        return column.dictionary_decode()
    return column.storage if isinstance(column, pa.ExtensionArray) else column


def _at_once(
    columns: Mapping[str, Any], reading: Reading, wanted: Wanted, path: Path, first_row: int
) -> NDArray[np.int64] | None:
    """Lengths that Arrow knows by itself: of numbers, of lists of ids, of bytes; None: rows must be looked at."""
    import pyarrow as pa
    import pyarrow.compute as pc

    types = pa.types
    if reading.kind in ("lengths", "histogram"):
        found = []
        for name in reading.columns.values():
            column, where = columns[name], f"{path}: column {name!r}"
            if not (types.is_integer(column.type) or types.is_floating(column.type)):
                raise CliError(f"{where} holds {column.type}, not lengths: whole numbers of tokens; another: --field")
            found.append(checked_lengths(column.to_numpy(zero_copy_only=False), where, first_row))
        return _of_numbers(found, reading, wanted, str(path))
    if any(column.null_count for column in columns.values()):
        return None
    for name, column in columns.items():
        if name not in reading.media:
            _check_type(column.type, name, path)
    every = [*columns.values()]
    if all(_is_list(each.type) and types.is_integer(each.type.value_type) for each in every) and wanted.holds != "text":
        if reading.kind not in ("tokens", "text") or "parts" in reading.columns:
            return None
        wanted.saw.add("tokens")
        if "mask" in reading.columns:
            mask = columns[reading.columns["mask"]]
            return None if types.is_fixed_size_list(mask.type) else masked_lengths(mask)
        return _sum([pc.list_value_length(each) for each in every])
    texts = all(types.is_string(each.type) or types.is_large_string(each.type) for each in every)
    if not texts or reading.kind not in ("text", "pair") or wanted.measure is not None or wanted.holds == "tokens":
        return None
    if reading.media or not {"system", "tools", "settings"}.isdisjoint(reading.columns):
        return None
    if reading.kind == "pair" and any(len(each) and is_messages(each[0].as_py()) for each in every):
        return None
    wanted.saw.add("text")
    return _sum([pc.binary_length(each) for each in every])


def _sum(columns: list[Any]) -> NDArray[np.int64]:
    return np.asarray(np.sum([np.asarray(each).astype(np.int64) for each in columns], axis=0))


def _of_numbers(found: list[NDArray[np.int64]], reading: Reading, wanted: Wanted, where: str) -> NDArray[np.int64]:
    wanted.saw.add("tokens")
    if reading.kind == "lengths":
        return found[0]
    wanted.notes[_SAID["histogram"]] = None
    return histogram(found[0], found[1], where)


def _is_list(type_: Any) -> bool:
    import pyarrow as pa

    types = pa.types
    return bool(types.is_list(type_) or types.is_large_list(type_) or types.is_fixed_size_list(type_))


def _check_type(type_: Any, name: str, path: Path) -> None:
    """Refuses columns of a type that has no documents, before any row is read."""
    import pyarrow as pa

    types = pa.types
    if types.is_integer(type_) or types.is_floating(type_):
        message = f"holds numbers ({type_}): --lengths, if they are lengths of documents"
        raise CliError(f"{path}: column {name!r} {message}; another column: --field")
    if types.is_temporal(type_) or types.is_boolean(type_) or types.is_decimal(type_):
        allowed = "text, lists of token ids, messages or lengths"
        raise CliError(f"{path}: column {name!r} is of type {type_}: must be {allowed}; another column: --field")


def has_text(type_: Any) -> bool:
    """Whether a column of this type of Arrow may have text."""
    import pyarrow as pa

    types = pa.types
    if _is_list(type_):
        return has_text(type_.value_type)
    if types.is_struct(type_):
        return any(has_text(type_.field(place).type) for place in range(type_.num_fields))
    if types.is_dictionary(type_):
        return has_text(type_.value_type)
    return bool(types.is_string(type_) or types.is_large_string(type_) or isinstance(type_, pa.BaseExtensionType))


def holds_text(value: Any) -> bool:
    """Whether a value has text, also inside lists and objects."""
    if isinstance(value, Mapping):
        return any(map(holds_text, value.values()))
    return bool(value) and (isinstance(value, str) or (isinstance(value, list) and any(map(holds_text, value))))


# Rows.


def row_lengths(rows: Sequence[Mapping[str, Any]], reading: Reading, wanted: Wanted, where: Where) -> NDArray[np.int64]:
    """int64[documents]: documents of rows, one after the other.

    Args:
        rows: values by column.
        reading: how they are read.
        wanted: tokenizer, trainer and the meaning of numbers.
        where: names a row, for errors.

    Raises:
        CliError: a value is missing, or is not of the type of those before it.
    """
    if not rows:
        return np.zeros(0, dtype=np.int64)
    if reading.kind in ("lengths", "histogram"):
        return _numbers(rows, reading, wanted, where)
    rule = Rule(wanted.tokenizer, wanted.trainer)
    if not rule.rename and "system" in reading.columns and reading.kind != "instruction":
        wanted.unread([reading.columns["system"]])
    if rule.plain and reading.kind == "text" and len(reading.names) == 1 and wanted.holds in (None, "text"):
        (name,) = reading.names
        plain = [row.get(name) for row in rows]
        if not wanted.saw - {"text"} and all(type(each) is str for each in plain):
            return wanted.counts(plain)
    texts: list[str] = []
    owners: list[int] = []
    added: list[int] = []
    for place, row in enumerate(rows):
        try:  # each row is named
            for made in documents(row, reading, rename=rule.rename, turns=rule.turns):
                kind = "tokens" if isinstance(made, Tokens) else "text"
                _check_kind(kind, wanted)
                pieces, more = ([], made.count) if isinstance(made, Tokens) else rule.pieces(made)
                if isinstance(made, Text) and wanted.tokenizer is not None:
                    wanted.unread([*made.beside])
                texts += pieces
                owners += [len(added)] * len(pieces)
                added.append(more)
        except (ValueError, TypeError, AttributeError) as cause:  # noqa: PERF203 - each names its row
            raise CliError(f"{where(place)}: {_told(cause, row, reading)}") from None
    lengths = np.array(added, dtype=np.int64)
    np.add.at(lengths, owners, wanted.counts(texts))
    for said in (_SAID.get(reading.kind, ""), *rule.notes()):
        if said:
            wanted.notes[said] = None
    return lengths


def _check_kind(kind: str, wanted: Wanted) -> None:
    if wanted.holds is not None and wanted.holds != kind:
        raise ValueError(f"holds {kind}, not {wanted.holds}: leave --{wanted.holds} out, or name another column")
    if wanted.saw - {kind}:
        raise ValueError(f"holds {kind}, where the rows before hold {next(iter(wanted.saw - {kind}))}")
    wanted.saw.add(kind)


def _told(cause: Exception, row: Mapping[str, Any], reading: Reading) -> str:
    """What is wrong with a row."""
    if isinstance(row, Mapping):
        for name in reading.names:
            value = row.get(name)
            if isinstance(value, int | float) and not isinstance(value, bool) and name not in reading.media:
                return f"column {name!r} holds a number: --lengths, if these are lengths of documents"
            if name not in row and "nothing in" in str(cause):
                return f"nothing in column {name!r} (--field); its columns: {', '.join(row) or 'none'}"
    return str(cause)


def _numbers(rows: Sequence[Mapping[str, Any]], reading: Reading, wanted: Wanted, where: Where) -> NDArray[np.int64]:
    found = []
    for name in reading.columns.values():
        values = []
        for place, row in enumerate(rows):
            value = row.get(name)
            if value is None or isinstance(value, bool) or not isinstance(value, int | float):
                raise CliError(f"{where(place)}: column {name!r} holds {value!r:.40}, no length")
            values.append(checked_lengths([value], where(place))[0])
        found.append(np.array(values, dtype=np.int64))
    return _of_numbers(found, reading, wanted, where(0))
