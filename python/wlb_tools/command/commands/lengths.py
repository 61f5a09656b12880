"""`wlb lengths`: measures documents, and writes their lengths for other commands and for loaders."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import numpy as np
from cyclopts import Parameter

from wlb_tools.command.errors import CliError
from wlb_tools.command.inputs.documents import Documents
from wlb_tools.command.inputs.formats import LENGTHS_MARK, is_lengths
from wlb_tools.command.inputs.options import DOCUMENTS, OUTPUT
from wlb_tools.command.inputs.stream import Source, Texts
from wlb_tools.command.output.console import Printing
from wlb_tools.command.output.plan_files import at_once, write_names
from wlb_tools.command.output.report import Paragraphs, Report, Table
from wlb_tools.command.output.written import replaces

_CLASSES = 10  # of lengths, each up to twice the one before; shorter documents are in the first class


def lengths(
    sources: Source,
    /,
    *,
    texts: Annotated[Texts, DOCUMENTS] = Texts(),
    output: Annotated[Path, Parameter(name=("--output", "-o"))] = Path("lengths.npy"),
    printing: Annotated[Printing, OUTPUT] = Printing(),
) -> None:
    """Measures the documents of SOURCES once, and writes how long each is.

    The file is an int64[n] of tokens for every other command, for `wlb.pack` and for a loader. Row i belongs to
    document i, a row or file of SOURCES in their order. Empty documents are left out; then a second file, of the same
    name with .ids before its ending, has the document of each row. For a directory, line i of a third file, with
    .documents.txt, is the path of document i. The table shows which documents have the tokens and the attention: a
    document of d tokens has d (d + 1) / 2 pairs of tokens that attend.

    Args:
        output: file to write.
    """
    if output.suffix != ".npy":
        raise CliError(f"--output {output}: must end with .npy")
    if any(output.resolve() == Path(source).resolve() for source in sources):
        raise CliError(f"--output {output}: is one of SOURCES, and would be lost")
    replaced = replaces(output, is_lengths)
    others = [path for path in _others(output) if path.exists()]
    if others and not replaced:
        raise CliError(f"--output {output}: {others[0]} is there, and is of no {output.name}; give another name")
    before = [output, *others] if replaced else []
    with printing.progress() as bars:
        documents = texts.documents(sources, bars)
    files = _write(documents, output)
    sentences = [documents.in_words()]
    if documents.empty:
        sentences.append(f"{documents.empty:,} are empty, and left out: {files[1]} has the document of each row.")
    classes = _classes(documents)
    table = Table(
        "Where they lie",
        ("tokens up to", "documents", "of all", "of tokens", "of attention"),
        [
            (
                f"{row['up_to']:,}",
                f"{row['documents']:,}",
                *(f"{row[key]:.1%}" for key in ("of_documents", "of_tokens", "of_attention")),
            )
            for row in classes
        ],
    )
    report = Report(
        command="lengths",
        blocks=[Paragraphs(sentences), table],
        numbers={**documents.described, "classes": classes, "files": [str(file) for file in files]},
    )
    printing.give(report, files, replaced=[file for file in files if file in before])


def _others(output: Path) -> tuple[Path, Path]:
    """Files that may be written beside the one with the lengths."""
    return output.with_suffix(".ids.npy"), output.with_suffix(".documents.txt")


def _write(documents: Documents, output: Path) -> list[Path]:
    """Writes lengths, and the other files that are needed; returns their paths."""
    files, (ids, names) = [output], _others(output)
    for of_others in (ids, names):  # files that an earlier run wrote beside this one
        of_others.unlink(missing_ok=True)
    with at_once(output) as file:
        np.save(file, documents.lengths)
        file.write(LENGTHS_MARK)
    if documents.empty:
        files.append(ids)
        with at_once(ids) as file:
            np.save(file, documents.ids)
    if documents.names is not None:
        files.append(names)
        write_names(names, documents.names)
    return files


def _classes(documents: Documents) -> list[dict[str, float]]:
    """For each class of lengths: how many documents, and their shares of documents, tokens and attending pairs."""
    lengths = documents.lengths
    top = int(lengths.max() - 1).bit_length()
    bounds = [1 << power for power in range(max(0, top - _CLASSES + 1), top + 1)]
    place = np.searchsorted(bounds, lengths)
    real = lengths.astype(np.float64)
    weights = (None, real, real * (real + 1) / 2)
    counts, *sums = (np.bincount(place, weights=weight, minlength=len(bounds)) for weight in weights)
    return [
        {
            "up_to": bound,
            "documents": int(count),
            "of_documents": float(count / lengths.size),
            "of_tokens": float(tokens / sums[0].sum()),
            "of_attention": float(pairs / sums[1].sum()),
        }
        for bound, count, tokens, pairs in zip(bounds, counts, *sums, strict=True)
    ]
