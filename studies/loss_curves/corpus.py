"""Documents with a real tail of lengths: every function of the Python library of this interpreter, as token ids.

Whole files would need a context of a hundred thousand bytes before only few fill it. Functions have the same shape of
tail at lengths that a small model trains on in seconds.
"""

from __future__ import annotations

import ast
import hashlib
import sysconfig
import textwrap
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

import wlb
from wlb.torch.data.permutation import Permutation

HELD_OUT = 20  # every so many-th file is never trained


@dataclass(frozen=True)
class Corpus:
    """Token ids of the documents to train, and of those of files that are never trained."""

    trained: list[NDArray[np.int16]]
    held_out: list[NDArray[np.int16]]

    @property
    def lengths(self) -> NDArray[np.int64]:
        """int64 [documents]: tokens of each document to train."""
        return np.array([document.size for document in self.trained], np.int64)

    @property
    def fingerprint(self) -> str:
        """Equal for the same tokens: another Python has another library."""
        digest = hashlib.sha256()
        for document in [*self.trained, *self.held_out]:
            digest.update(document.tobytes())
        return digest.hexdigest()[:16]

    def filled_by(self, share: float) -> int:
        """The context, in tokens, that this share of the documents fills."""
        return int(np.quantile(self.lengths, 1 - share, method="higher"))

    def in_order(self, seed: int, context: int, tokens_per_batch: int, batches: int) -> list[NDArray[np.int16]]:
        """The documents of a run in order of arrival: exactly so many global batches of whole documents.

        What is longer than the context is cut here, before anything is packed: every way of packing gets the same.
        """
        order = Permutation(len(self.trained), seed=seed, epoch=0)(np.arange(len(self.trained)))
        lengths = self.lengths[order]
        documents, starts, cut = wlb.split_documents(lengths, max_document_tokens=context)
        offsets = wlb.batch_offsets(cut, tokens_per_batch=tokens_per_batch)
        if offsets.size - 1 <= batches:  # the last one may not be full
            raise SystemExit(f"the corpus has {offsets.size - 2} full global batches, fewer than --batches {batches}")
        some = slice(0, int(offsets[batches]))
        rows = zip(order[documents[some]].tolist(), starts[some].tolist(), cut[some].tolist(), strict=True)
        return [self.trained[document][start : start + length] for document, start, length in rows]

    def to_evaluate(self, context: int, tokens: int) -> list[NDArray[np.int16]]:
        """Held-out documents, drawn once for all runs, of about so many tokens; cut as those that are trained."""
        order = Permutation(len(self.held_out), seed=0, epoch=0)(np.arange(len(self.held_out)))
        taken: list[NDArray[np.int16]] = []
        for number in order.tolist():
            document = self.held_out[number]
            taken += [document[start : start + context] for start in range(0, document.size, context)]
            tokens -= document.size
            if tokens <= 0:
                break
        return taken


def read(folder: Path | None, vocab_size: int, cache: Path) -> Corpus:
    """The functions below `folder` (default: Python's own library), in a byte-level BPE made of them.

    Args:
        folder: Where the files are.
        vocab_size: Different tokens, the end mark included.
        cache: Tokens are kept here, for parsing takes half a minute.
    """
    folder = folder or Path(sysconfig.get_path("stdlib"))
    name = hashlib.sha256(f"{folder.resolve()} {vocab_size}".encode()).hexdigest()[:16]
    kept = cache / f"corpus-{name}.npz"
    if not kept.exists():
        texts: dict[bool, list[str]] = {False: [], True: []}
        paths = sorted(path for path in folder.rglob("*.py") if "site-packages" not in path.parts)
        for number, path in enumerate(paths):
            texts[number % HELD_OUT == 0] += functions(path)
        tokenizer = byte_pairs(texts[False], vocab_size)
        arrays: dict[str, NDArray[np.int16]] = {}
        for name, some in (("trained", texts[False]), ("held_out", texts[True])):
            different = list(dict.fromkeys(some))
            end = vocab_size - 1
            tokens = [np.array([*found.ids, end], np.int16) for found in tokenizer.encode_batch_fast(different)]
            if not tokens:
                raise SystemExit(f"{folder}: too few Python files with functions")
            arrays[name], arrays[f"{name}_sizes"] = np.concatenate(tokens), np.array([x.size for x in tokens])
        cache.mkdir(parents=True, exist_ok=True)
        np.savez_compressed(kept.with_suffix(".new.npz"), **arrays)  # type: ignore[arg-type]
        kept.with_suffix(".new.npz").replace(kept)
    with np.load(kept) as found:
        parts = {part: np.split(found[part], found[f"{part}_sizes"].cumsum()[:-1]) for part in ("trained", "held_out")}
    return Corpus(**parts)


def functions(path: Path) -> Iterator[str]:
    """The source of every function and method of a file; those inside functions are part of them."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the sources, such as invalid escapes in tests of Python itself
            source = path.read_text(encoding="utf-8")
            tree = ast.parse(source)
    except (SyntaxError, ValueError):  # files that are meant to be broken, for tests
        return
    lines = source.splitlines(keepends=True)
    inside: list[ast.AST] = [tree]
    while inside:
        node = inside.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield textwrap.dedent("".join(lines[node.lineno - 1 : node.end_lineno]))
        else:
            inside += reversed([child for child in ast.iter_child_nodes(node) if isinstance(child, ast.stmt)])


def byte_pairs(texts: list[str], vocab_size: int) -> Tokenizer:
    """A byte-level BPE of a tenth of the documents: enough for merges that are common in all of them."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - 1,  # one more is the end mark
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts[:: max(1, min(10, len(texts) // 100))], trainer)
    return tokenizer
