"""Lengths of rows as a function of batches, for `map` of datasets and `map_batches` of Ray Data."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from wlb_tools.command.inputs.cells import Wanted, has_text, holds_text, row_lengths, table_lengths
from wlb_tools.command.inputs.tokenizers import load_tokenizer


class RowLengths:
    """Lengths of the documents of batches of rows, as `wlb lengths` counts them.

    An object is small and can be pickled: each process loads the tokenizer when it counts for the first time. Give it
    to `Dataset.map(..., batched=True)` of datasets, or to `Dataset.map_batches(..., batch_format="pyarrow")` of Ray.

    Args:
        tokenizer: as `--tokenizer` of `wlb lengths`; None: bytes of UTF-8 are counted.
        trainer: as `--trainer`: "trl", "axolotl" or "llamafactory"; None: the chat template alone.
        field: as `--field`: columns with commas between; "": found by their names.

    Raises:
        CliError: the tokenizer does not load, or a row cannot be read; names the row of the batch and its column.

    Complexity:
        O(tokens) a batch.

    Examples:
        >>> lengths = wlb_tools.RowLengths()
        >>> lengths({"prompt": ["one", "two"], "completion": [" two", ""]})
        {'length': [7, 3]}
    """

    def __init__(self, tokenizer: str | Path | None = None, *, trainer: str | None = None, field: str = "") -> None:
        self.tokenizer, self.trainer, self.field = tokenizer, trainer, field

    def __call__(self, batch: Any) -> Any:
        """The column `length`, int64 [documents], of a table of Arrow, or of a mapping of columns to lists.

        A preference pair gives two lengths, and each rollout one, in the order of rows.
        """
        loaded = None if self.tokenizer is None else _loaded(str(self.tokenizer))
        wanted = Wanted(field=self.field, tokenizer=loaded, trainer=self.trainer)
        if isinstance(batch, Mapping):
            columns: Mapping[str, Sequence[Any]] = batch
            reading = wanted.reading([*columns], "batch")
            wanted.unread([name for name in reading.unread([*columns]) if any(map(holds_text, columns[name]))])
            rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
            made: Any = {"length": row_lengths(rows, reading, wanted, lambda row: f"batch: row {row}").tolist()}
        else:
            import pyarrow as pa

            reading = wanted.reading(batch.column_names, "batch")
            wanted.unread(
                [name for name in reading.unread(batch.column_names) if has_text(batch.schema.field(name).type)]
            )
            made = pa.table({"length": table_lengths(batch, reading, wanted, Path("batch"), 0)})
        for note in wanted.notes:
            warnings.warn(note, stacklevel=2)
        return made


_loaded = functools.lru_cache(4)(load_tokenizer)
