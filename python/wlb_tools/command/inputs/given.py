"""Documents with given costs: a file beside the source, with a row for each of its documents."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
from numpy.typing import NDArray

import wlb
from wlb._core import MAX_TOKENS
from wlb_tools.command.errors import CliError
from wlb_tools.command.inputs.documents import Documents
from wlb_tools.command.inputs.formats import load_numbers
from wlb_tools.command.inputs.model import Cost, superfluous
from wlb_tools.command.inputs.options import Reals, joined, options

Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Columns:
    """The costs in a file.

    Attributes:
        path: the file.
        rows: numbers [n, columns]; row i belongs to the document with id i.
        limits: the most that a micro-batch may have in each column; infinite if the column takes time.
    """

    path: Path
    rows: NDArray[np.generic]
    limits: tuple[float, ...]

    def of(self, documents: Documents) -> Floats:
        """float64[documents, columns]: what each costs.

        Raises:
            CliError: the number of rows is not that of documents, or a number is negative or not finite, or a column
                has only zeros.
        """
        count = documents.ids.size + documents.empty
        if len(self.rows) != count:
            empty = f", {documents.empty:,} empty ones among them" if documents.empty else ""
            raise CliError(
                f"{self.path}: has {len(self.rows):,} rows, and {documents.source} {count:,} documents{empty}"
            )
        nowhere = np.full(count, -1)
        try:  # checks all rows, so that an index in the error is a row of the file
            wlb.Packing.from_assignment(
                np.ones_like(nowhere), nowhere, num_micro_batches=1, max_tokens=MAX_TOKENS, costs=self.rows
            )
        except wlb.WlbError as error:
            raise CliError(f"{self.path}: {error}") from None
        return self.rows[documents.ids].astype(np.float64)

    def check_limits(self, costs: Floats, ids: NDArray[np.int64]) -> None:
        """Checks that every piece fits into a micro-batch.

        Raises:
            CliError: one does not fit; names its document.
        """
        above = costs > np.array(self.limits)
        if above.any():
            piece, column = np.argwhere(above)[0].tolist()
            raise CliError(
                f"--limits {joined(self.limits)}: document {ids[piece]} has {costs[piece, column]:g} in column"
                f" {column} of {self.path}, and fits into no micro-batch"
            )

    def in_words(self) -> str:
        """A sentence about the source of the costs."""
        timed = [str(column) for column, limit in enumerate(self.limits) if limit == math.inf]
        memory = [
            f"column {k} is memory, at most {limit:,g}" for k, limit in enumerate(self.limits) if limit < math.inf
        ]
        if len(self.limits) == 1:
            return f"Costs are those of {self.path}."
        sums = f": a step takes the sum over columns {', '.join(timed)} of its heaviest micro-batch in each"
        return f"Costs are those of {self.path}{sums if len(timed) > 1 else ''}{''.join(f'; {m}' for m in memory)}."


@options
class DocumentCosts(Cost):
    """Cost of documents, from their lengths or from a file.

    Args:
        costs: a .npy with the cost of each document, instead of a model's: float[n], or float[n, r] with a column for
            every resource that ranks wait for separately. Row i belongs to the document with id i.
        limits: with --costs: the most that a micro-batch may have in each column, such as inf,140000; a column with a
            limit is memory, and takes no time.
    """

    costs: Path | None = None
    limits: Annotated[tuple[float, ...] | None, Reals] = None

    def of_documents(self) -> wlb.CostModel | None:
        """The cost model; None if documents have given costs."""
        return super().of_documents() if self.costs is None else None

    def columns(self) -> Columns | None:
        """Cost columns of the file, if one is given.

        Raises:
            CliError: there are limits without costs, the file has no such array, or another option also says what
                documents cost.
            WlbError: limits do not go with the columns.
        """
        if self.costs is None:
            if self.limits is not None:
                raise CliError("--limits: are of the columns of --costs; give it too")
            return None
        for name in sorted(self.given & {"attention_efficiency", "cost_file", "gpu", "model_name"}):
            raise superfluous(name, "costs")
        rows = load_numbers(self.costs)
        if rows.ndim not in (1, 2) or rows.dtype.kind not in "fiu" or not rows.size:
            raise CliError(f"{self.costs}: {rows.dtype} of shape {rows.shape}: must be numbers [n] or [n, columns]")
        rows = rows.reshape(len(rows), -1)
        limits = (math.inf,) * rows.shape[1] if self.limits is None else self.limits
        wlb.Packer(
            num_micro_batches=1, max_tokens=1, cost_columns=rows.shape[1], limits=limits, release="fifo"
        )  # checks them
        return Columns(self.costs, rows, limits)
