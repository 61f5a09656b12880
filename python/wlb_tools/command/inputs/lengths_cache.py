"""A cache of lengths of tokenized files, by the content of the file and of the tokenizer."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from wlb_tools.command.inputs.cells import Wanted

_VERSION = b"1"  # changes if rows get other lengths


class LengthsCache:
    """Lengths by content, in the user's cache folder: `$XDG_CACHE_HOME/wlb/lengths`, else `~/.cache/wlb/lengths`.

    Args:
        folder: another place.
    """

    def __init__(self, folder: Path | None = None) -> None:
        home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        self._folder = folder or Path(home) / "wlb" / "lengths"
        self._keys: dict[Path, str] = {}

    def find(self, path: Path, wanted: Wanted) -> tuple[NDArray[np.int64], bool] | None:
        """Lengths of the file's documents, and whether they are of text; None: not in the cache."""
        if wanted.measure is None or not path.is_file():
            return None
        kept = self._folder / f"{self._key(path, wanted)}.npy"
        try:
            return np.load(kept, allow_pickle=False), False
        except (OSError, ValueError):
            return None

    def keep(self, path: Path, wanted: Wanted, lengths: NDArray[np.int64]) -> None:
        """Adds lengths to the cache, if its folder can be written to."""
        kept = self._folder / f"{self._key(path, wanted)}.npy"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            new = kept.with_suffix(f".{os.getpid()}.tmp")
            with new.open("wb") as file:
                np.save(file, lengths)
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
