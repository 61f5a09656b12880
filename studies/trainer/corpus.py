"""Real documents as token ids: bytes, or what a Hugging Face tokenizer makes of them."""

from __future__ import annotations

import sysconfig
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

END_OF_DOCUMENT = 256  # bytes are 0 to 255


class ByteFiles:
    """Every file is a document: its bytes, and an end mark. Read when they are asked for."""

    vocab_size = END_OF_DOCUMENT + 1

    def __init__(self, paths: list[Path]) -> None:
        self.paths = paths
        self.lengths = np.array([path.stat().st_size + 1 for path in paths], np.int64)

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> NDArray[np.int16]:
        content = np.fromfile(self.paths[index], np.uint8)
        return np.append(content.astype(np.int16), np.int16(END_OF_DOCUMENT))


class TokenizedFiles:
    """Every file is a document, tokenized once at the start; in memory, so for examples only."""

    def __init__(self, paths: list[Path], tokenizer_file: Path) -> None:
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(tokenizer_file))
        # The end mark is a token of its own: tokenizer files do not say which of theirs it is.
        self.vocab_size = tokenizer.get_vocab_size() + 1
        texts = [path.read_text(encoding="utf-8", errors="replace") for path in paths]
        encodings = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        self.documents = [np.array([*encoding.ids, self.vocab_size - 1], np.int32) for encoding in encodings]
        self.lengths = np.array([document.size for document in self.documents], np.int64)

    def __len__(self) -> int:
        return len(self.documents)

    def __getitem__(self, index: int) -> NDArray[np.int32]:
        return self.documents[index]


def read_corpus(folder: Path | None, *, pattern: str = "*.py", tokenizer_file: Path | None = None) -> Any:
    """The files below `folder` that match; by default the Python library of this interpreter.

    Returns:
        A map-style data set of token ids, with `lengths` (int64 [documents]) and `vocab_size`.
    """
    folder = folder or Path(sysconfig.get_path("stdlib"))
    paths = sorted(path for path in folder.rglob(pattern) if path.is_file() and "site-packages" not in path.parts)
    if not paths:
        raise SystemExit(f"{folder}: no files that match {pattern}")
    return ByteFiles(paths) if tokenizer_file is None else TokenizedFiles(paths, tokenizer_file)
