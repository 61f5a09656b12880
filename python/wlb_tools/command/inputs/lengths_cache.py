"""A cache of lengths of tokenized files, by the content of the file and of the tokenizer."""

from __future__ import annotations

import hashlib
import os
import zipfile
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from wlb_tools.command.inputs.cells import Wanted

_VERSION = b"2"  # changes if rows get other lengths


class LengthsCache:
    """Lengths by content, in the user's cache folder: `$XDG_CACHE_HOME/wlb/lengths`, else `~/.cache/wlb/lengths`.

    Args:
        folder: another place.
    """

    def __init__(self, folder: Path | None = None) -> None:
        home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        self._folder = folder or Path(home) / "wlb" / "lengths"
        self._keys: dict[Path, str] = {}

    def find(self, path: Path, wanted: Wanted) -> tuple[NDArray[np.int64], list[str]] | None:
        """Lengths of the file's documents of text, and sentences about them; None: not in the cache."""
        if wanted.measure is None or not path.is_file():
            return None
        try:
            with np.load(self._folder / f"{self._key(path, wanted)}.npz", allow_pickle=False) as kept:
                return kept["lengths"], kept["notes"].tolist()
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
            return None

    def keep(self, path: Path, wanted: Wanted, lengths: NDArray[np.int64], notes: list[str]) -> None:
        """Adds lengths to the cache, if its folder can be written to."""
        kept = self._folder / f"{self._key(path, wanted)}.npz"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            new = kept.with_suffix(f".{os.getpid()}.tmp")
            with new.open("wb") as file:
                np.savez(file, lengths=lengths, notes=np.array(notes, dtype=np.str_))
            new.replace(kept)
        except OSError:
            return

    def _key(self, path: Path, wanted: Wanted) -> str:
        if path not in self._keys:
            with path.open("rb") as file:
                content = hashlib.file_digest(file, "blake2b") if hasattr(hashlib, "file_digest") else _digest(path)
            said = f"{wanted.name}\0{wanted.field}\0{wanted.holds}\0{''.join(path.suffixes)}".encode()
            self._keys[path] = hashlib.blake2b(_VERSION + content.digest() + said, digest_size=20).hexdigest()
        return self._keys[path]


def _digest(path: Path) -> hashlib.blake2b:
    """Hash of a file, for Python older than 3.11."""
    found = hashlib.blake2b()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            found.update(block)
    return found
