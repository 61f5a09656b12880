"""Contents of a row of a file: text, token ids, a length, a chat, or a prompt and its completion.

Every format is read as columns of Arrow; this module turns a column into lengths. If a value is not like the others, it
is refused with its file, row and column.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from wlb._core import MAX_TOKENS
from wlb_tools.command.errors import CliError

Measure = Callable[[list[str]], NDArray[np.int64]]
Holds = Literal["text", "tokens", "lengths"]
Kind = Literal["text", "tokens", "lengths", "messages"]

TEXTS = ("text", "content", "document", "body")
TOKENS = ("input_ids", "tokens", "token_ids")
LENGTHS = ("length", "lengths", "num_tokens", "n_tokens", "token_count", "seq_len", "seqlen")
CHATS = ("messages", "conversations", "conversation")
PAIRS = (("prompt", "completion"), ("prompt", "response"), ("instruction", "output"), ("question", "answer"))


@dataclass(frozen=True)
class Wanted:
    """The fields to read from each row.

    field: names of columns with commas between, whose texts make one document; "": found by their names.
    holds: what the columns have, if their type could mean several things; None: the type decides.
    measure: counts the tokens of texts; None: bytes of UTF-8.
    chat: makes text of a list of messages by a tokenizer's template; None: there is no template.
    no_chat: reason why there is none.
    name: identifies tokenizer and template; lengths are cached under it.
    saw: "text" is added if text was measured, so that lengths count what `measure` counts.
    """

    field: str = ""
    holds: Holds | None = None
    measure: Measure | None = None
    chat: Callable[[list[dict[str, str]]], str] | None = None
    no_chat: str = "give --tokenizer, a folder with a chat template"
    name: str = ""
    saw: set[str] = dataclasses.field(default_factory=set, compare=False)

    def columns(self, names: Sequence[str], where: str) -> tuple[str, ...]:
        """The columns to read among those of a file.

        Raises:
            CliError: they do not exist; or none was given, and none or several of the file's could be meant.
        """
        there = [*names]
        if self.field:
            chosen = tuple(part.strip() for part in self.field.split(",") if part.strip())
            missing = [name for name in chosen if name not in there]
            if missing:
                raise CliError(
                    f"{where}: no column {missing[0]!r} (--field); its columns: {', '.join(there) or 'none'}"
                )
            return chosen
        by_kind = {"tokens": (TOKENS,), "lengths": (LENGTHS,), "text": (TEXTS,)}
        for known in by_kind[self.holds] if self.holds else (TEXTS, TOKENS, CHATS):
            found = [name for name in known if name in there]
            if found:
                return (found[0],)
        if self.holds in (None, "text"):
            for pair in PAIRS:
                if all(name in there for name in pair):
                    return pair
        if self.holds is None:
            found = [name for name in LENGTHS if name in there]
            if found:
                return (found[0],)
        if len(there) == 1:
            return (there[0],)
        message = f"{where}: which of its columns has the documents is not clear: --field NAME; its columns:"
        raise CliError(f"{message} {', '.join(there) or 'none'}")


def utf8_lengths(texts: list[str]) -> NDArray[np.int64]:
    """int64[n]: bytes of UTF-8. JSON may have half a surrogate pair, which UTF-8 cannot write."""
    return np.array([len(text.encode("utf-8", "surrogatepass")) for text in texts], dtype=np.int64)


def measured(wanted: Wanted, texts: list[str]) -> NDArray[np.int64]:
    """int64[n]: tokens, or bytes without a tokenizer."""
    if texts:
        wanted.saw.add("text")
    return utf8_lengths(texts) if wanted.measure is None else wanted.measure(texts)


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


def table_lengths(batch: Any, columns: Sequence[str], wanted: Wanted, path: Path, first_row: int) -> NDArray[np.int64]:
    """int64[rows]: the documents of a record batch of Arrow.

    Raises:
        CliError: a column has another type than it should, or a value is missing.
    """
    arrays = [batch.column(name) for name in columns]
    for name, array in zip(columns, arrays, strict=True):
        if array.null_count:
            row = first_row + int(np.flatnonzero(np.asarray(array.is_null()))[0])
            raise CliError(f"{path}: row {row}, column {name!r}: nothing is there (null); leave that row out")
    if len(arrays) > 1:
        return _together(arrays, columns, wanted, path, first_row)
    return _column(arrays[0], columns[0], wanted, path, first_row)


def _column(array: Any, name: str, wanted: Wanted, path: Path, first_row: int) -> NDArray[np.int64]:
    import pyarrow as pa
    import pyarrow.compute as pc

    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    kind, where = _kind(array.type, name, wanted, path), f"{path}: column {name!r}"
    if kind == "text":
        if wanted.measure is None:
            wanted.saw.add("text")
            return np.asarray(pc.binary_length(array)).astype(np.int64)
        return measured(wanted, array.to_pylist())
    if kind == "tokens":
        return np.asarray(pc.list_value_length(array)).astype(np.int64)
    if kind == "lengths":
        return checked_lengths(array.to_numpy(zero_copy_only=False), where, first_row)
    return _chats(array.to_pylist(), wanted, where, first_row)


def _kind(type_: Any, name: str, wanted: Wanted, path: Path) -> Kind:
    import pyarrow as pa

    types, where = pa.types, f"{path}: column {name!r}"
    is_list = types.is_list(type_) or types.is_large_list(type_) or types.is_fixed_size_list(type_)
    if types.is_string(type_) or types.is_large_string(type_) or types.is_string_view(type_):
        found: Kind = "text"
    elif is_list and types.is_integer(type_.value_type):
        found = "tokens"
    elif is_list and (types.is_struct(type_.value_type) or types.is_map(type_.value_type)):
        found = "messages"
    elif types.is_integer(type_) or types.is_floating(type_):
        if wanted.holds != "lengths" and name not in LENGTHS:
            raise CliError(f"{where} holds numbers ({type_}): --lengths, if they are lengths of documents")
        found = "lengths"
    else:
        allowed = "text, lists of token ids, lists of messages or lengths"
        raise CliError(f"{where} is of type {type_}: must be {allowed}; another column: --field")
    if wanted.holds is not None and wanted.holds != found:
        raise CliError(f"{where} holds {found}, not {wanted.holds}: leave --{wanted.holds} out, or name another column")
    return found


def _together(
    arrays: Sequence[Any], columns: Sequence[str], wanted: Wanted, path: Path, first_row: int
) -> NDArray[np.int64]:
    """Texts of one row in the order of the columns; token ids one list after the other."""
    kinds = {_kind(array.type, name, wanted, path) for array, name in zip(arrays, columns, strict=True)}
    if kinds == {"tokens"}:
        parts = [_column(array, name, wanted, path, first_row) for array, name in zip(arrays, columns, strict=True)]
        return np.asarray(np.sum(parts, axis=0))
    if kinds != {"text"}:
        raise CliError(f"{path}: columns {', '.join(columns)} hold {' and '.join(sorted(kinds))}: must all be text")
    rows = zip(*(array.to_pylist() for array in arrays), strict=True)
    return measured(wanted, ["".join(row) for row in rows])


_ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bing": "assistant"}
"""Names of roles in ShareGPT's files."""


def _chats(rows: Sequence[Any], wanted: Wanted, where: str, first_row: int) -> NDArray[np.int64]:
    if wanted.chat is None:
        raise CliError(f"{where} holds chats, which a tokenizer's template makes text of: {wanted.no_chat}")
    texts = []
    for row, messages in enumerate(rows, start=first_row):
        plain = []
        for message in messages:
            role = message.get("role", message.get("from")) if isinstance(message, dict) else None
            content = message.get("content", message.get("value")) if isinstance(message, dict) else None
            if not isinstance(role, str) or not isinstance(content, str):
                raise CliError(f"{where}: row {row}: a message without role and content as text: {message!r:.80}")
            plain.append({"role": _ROLES.get(role, role), "content": content})
        try:
            texts.append(wanted.chat(plain))
        except Exception as cause:  # whatever the template raises
            raise CliError(f"{where}: row {row}: the chat template refuses it: {cause}") from None
    return measured(wanted, texts)


def object_lengths(
    records: Sequence[Any], columns: Sequence[str], wanted: Wanted, path: Path, rows: Sequence[int]
) -> NDArray[np.int64]:
    """int64[n]: documents of JSON objects.

    Args:
        records: the objects.
        columns: keys to read.
        wanted: what to read.
        path: of the file.
        rows: lines or positions of the objects, for errors.

    Raises:
        CliError: a key is missing, or its value has another type than in the first object.
    """
    if not records:
        return np.zeros(0, dtype=np.int64)
    values = []
    for record, row in zip(records, rows, strict=True):
        parts = []
        for name in columns:
            if not isinstance(record, dict) or record.get(name) is None:
                fields = ", ".join(record) if isinstance(record, dict) else "none, it is not an object"
                raise CliError(f"{path}:{row}: nothing in field {name!r} (--field); its fields: {fields}")
            parts.append(record[name])
        values.append(parts)
    firsts = [
        _object_kind(value, name, wanted, f"{path}:{rows[0]}") for value, name in zip(values[0], columns, strict=True)
    ]
    for parts, row in zip(values, rows, strict=True):
        for part, first, name in zip(parts, firsts, columns, strict=True):
            kind = _object_kind(part, name, wanted, f"{path}:{row}")
            if kind != first:
                message = f"field {name!r} holds {kind}, where the lines before hold {first}"
                raise CliError(f"{path}:{row}: {message}")
    if len({*firsts}) > 1:
        raise CliError(f"{path}: fields {', '.join(columns)} hold {' and '.join(sorted({*firsts}))}: must all be text")
    kind = firsts[0]
    if kind == "text":
        return measured(wanted, ["".join(parts) for parts in values])
    if kind == "tokens":
        return np.array([sum(len(part) for part in parts) for parts in values], dtype=np.int64)
    if len(columns) > 1:
        raise CliError(f"{path}: fields {', '.join(columns)} hold {kind}: several must be text")
    if kind == "lengths":
        return np.array(
            [checked_lengths([parts[0]], f"{path}:{row}")[0] for parts, row in zip(values, rows, strict=True)],
            dtype=np.int64,
        )
    return _chats([parts[0] for parts in values], wanted, f"{path}: field {columns[0]!r}", rows[0])


def _object_kind(value: Any, name: str, wanted: Wanted, where: str) -> Kind:
    if isinstance(value, str):
        found: Kind = "text"
    elif isinstance(value, (bool, dict)):
        raise CliError(f"{where}: field {name!r} holds {type(value).__name__}: must be text, token ids or messages")
    elif isinstance(value, int | float):
        if wanted.holds != "lengths" and name not in LENGTHS:
            raise CliError(f"{where}: field {name!r} holds a number: --lengths, if these are lengths of documents")
        found = "lengths"
    elif isinstance(value, list) and all(type(each) is int for each in value):
        found = "tokens"
    elif isinstance(value, list) and all(isinstance(each, dict) for each in value):
        found = "messages"
    else:
        raise CliError(f"{where}: field {name!r} holds a list of several types: must be token ids or messages")
    if wanted.holds is not None and wanted.holds != found:
        raise CliError(f"{where}: field {name!r} holds {found}, not {wanted.holds}: leave --{wanted.holds} out")
    return found
