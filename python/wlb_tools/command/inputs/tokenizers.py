"""Loads tokenizers of all common kinds, to count the tokens of texts.

A file that a fine-tune saved may truncate and pad. Both are switched off, because all documents would have the same
length. Special tokens are not added; that is up to the trainer.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import importlib.util
import json
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wlb_tools.command.errors import CliError, first_line

Measure = Callable[[list[str]], NDArray[np.int64]]


@dataclass(frozen=True)
class Tokenizer:
    """A tokenizer that counts tokens.

    Args:
        measure: counts the tokens of texts, without special tokens.
        name: a digest of its file and of its template.
        title: its name, for reports.
        folder: a folder that transformers loads, with a configuration and maybe a template; None: a file alone.
    """

    measure: Measure
    name: str
    title: str
    folder: Path | None = None

    def whole(self, what: str) -> Any:
        """The tokenizer as transformers loads it, with its special tokens and its template.

        Raises:
            ValueError: there is a file alone, and no configuration.
        """
        if self.folder is None:
            raise ValueError(f"{what} need a whole tokenizer, and {self.title} is a file alone: give its folder")
        return _auto(self.folder)

    def template(self) -> str:
        """The chat template that is used by default; "" if there is none."""
        found = self.whole("conversations").chat_template
        return str(found.get("default", "") if isinstance(found, dict) else found or "")

    def takes_parts(self) -> bool:
        """Whether the template takes content in parts, and not text alone."""
        return self.folder is not None and _takes_parts(self.folder)

    def processor(self) -> Any:
        """The model's processor of images and audio; None if the folder has none."""
        names = ("preprocessor_config.json", "processor_config.json")
        return (
            _processor(self.folder) if self.folder and any((self.folder / name).is_file() for name in names) else None
        )


@functools.lru_cache(8)
def _auto(folder: Path) -> Any:
    try:
        import transformers
    except ModuleNotFoundError:
        raise CliError(
            "chat templates and trainers' rules need the package transformers: pip install transformers"
        ) from None
    for name, packages in _NEEDS.items():
        needed = (folder / name).is_file() and not (folder / "tokenizer.json").is_file()
        for package, module in packages.items() if needed else ():
            if not _is_there(module):
                raise CliError(f"--tokenizer {folder / name} needs the package {package}; run: pip install {package}")
    try:
        return transformers.AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False)
    except Exception as cause:  # of many types
        raise CliError(f"--tokenizer {folder}: transformers cannot load it: {first_line(cause)}") from None


@functools.lru_cache(8)
def _takes_parts(folder: Path) -> bool:
    part = {"type": "text", "text": "wlb"}
    try:
        said = _auto(folder).apply_chat_template([{"role": "user", "content": [part]}], tokenize=False)
    except Exception:  # whatever the template raises
        return False
    return "wlb" in said and "'type'" not in said and '"type"' not in said


@functools.lru_cache(8)
def _processor(folder: Path) -> Any:
    import transformers

    try:
        load: Any = transformers.AutoProcessor.from_pretrained
        return load(str(folder), trust_remote_code=False)
    except Exception as cause:  # of many types
        raise CliError(f"--tokenizer {folder}: transformers cannot load its processor: {first_line(cause)}") from None


def load_tokenizer(name: str) -> Tokenizer:
    """A tokenizer by its file, its folder, or its name on the hub.

    Args:
        name: a `tokenizer.json`; a `tekken.json` or a file of sentencepiece; a folder with one of these, or with any
            tokenizer of transformers; a name on the hub, taken from the local cache if it is there.

    Raises:
        CliError: there is no such file, or it cannot be loaded; says what is missing.
    """
    path = Path(name)
    folder: Path | None = None
    if path.is_dir():
        folder, path = path, _in_folder(path)
    elif not path.is_file():
        path = _from_hub(name)
        folder = path.parent
    elif path.name in _NAMES:
        folder = path.parent
    digest = hashlib.blake2b(digest_size=16)
    if folder is not None and any((folder / each).is_file() for each in _CONFIGURED):
        digest.update(_version())
        for each in sorted(folder.iterdir()):
            if each.is_file() and each.suffix in _READ:
                digest.update(f"{each.name}\n".encode() + each.read_bytes())
        return Tokenizer(_by_transformers(folder), digest.hexdigest(), folder.name, folder)
    content = path.read_bytes()
    known_as = _known_as(path, content)
    digest.update(content + (b"" if known_as == _NAMES[0] else _version()))
    measure = _fast(path) if known_as == _NAMES[0] else _alone(path, known_as)
    return Tokenizer(measure, digest.hexdigest(), path.name)


_CONFIGURED = ("tokenizer_config.json", "chat_template.jinja", "preprocessor_config.json", "special_tokens_map.json")
"""Files beside a tokenizer by which transformers loads it."""

_SENTENCEPIECE = {"sentencepiece": "sentencepiece", "protobuf": "google.protobuf"}
_NEEDS = {"tekken.json": {"mistral-common": "mistral_common"}} | dict.fromkeys(
    ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model"), _SENTENCEPIECE
)
"""Packages, and their modules, with which transformers reads a tokenizer of this name."""

_NAMES = ("tokenizer.json", *_NEEDS)


_VOCABULARIES = ("vocab.json", "merges.txt", "vocab.txt", "added_tokens.json", "*.tiktoken")
_READ = (".json", ".jinja", ".model", ".txt", ".tiktoken", ".bpe", ".vocab")
"""Endings of what transformers reads of a tokenizer; a model's weights may lie beside it."""


def _is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # nor the package that it is in
        return False


def _version() -> bytes:
    """The version of transformers, which counts; b"" without it."""
    try:
        return importlib.metadata.version("transformers").encode()
    except importlib.metadata.PackageNotFoundError:
        return b""


def _in_folder(folder: Path) -> Path:
    found = [folder / name for name in _NAMES if (folder / name).is_file()]
    if not found and (folder / "tokenizer_config.json").is_file():
        return folder / "tokenizer_config.json"  # a tokenizer of other files, which transformers knows
    found += sorted(folder.glob("*.tiktoken"))
    if not found:
        raise CliError(f"--tokenizer {folder}: has none of {', '.join(_NAMES)}, tokenizer_config.json")
    return found[0]


def _from_hub(name: str) -> Path:
    if name.count("/") > 1 or name.endswith((".json", ".model", ".tiktoken", "/")):
        raise CliError(f"--tokenizer {name}: no such tokenizer file")
    try:
        import huggingface_hub as hub
    except ImportError:
        message = "no such tokenizer file; for names on the hub: pip install huggingface_hub"
        raise CliError(f"--tokenizer {name}: {message}") from None
    for each in _NAMES:
        if isinstance(found := hub.try_to_load_from_cache(name, each), str):
            return Path(found)
    if "/" not in name:
        raise CliError(f"--tokenizer {name}: no such tokenizer file")
    hub.utils.logging.set_verbosity(50)  # its retries are not ours to tell
    try:
        return _in_folder(Path(hub.snapshot_download(name, allow_patterns=[*_NAMES, *_CONFIGURED, *_VOCABULARIES])))
    except CliError:
        raise
    except Exception as cause:  # of many types: no network, unknown name, no permission
        message = f"no such tokenizer file, nor in the hub's cache, nor to be had: {first_line(cause)}"
        raise CliError(f"--tokenizer {name}: {message}") from None


def _known_as(path: Path, content: bytes) -> str:
    """The name under which transformers knows such a file, by what is in it."""
    if content.lstrip()[:1] == b"{":
        try:
            said = json.loads(content)
        except ValueError as problem:
            raise CliError(f"--tokenizer {path}: not a tokenizer file: not JSON: {problem}") from None
        if "vocab" in said and "pattern" in (said.get("config") or {}):
            return "tekken.json"
        if "model" in said:
            return "tokenizer.json"
        more = ": give the tokenizer.json beside it" if path.name == "tokenizer_config.json" else ""
        raise CliError(f"--tokenizer {path}: not a tokenizer file: it has no model{more}")
    if content[:1] == b"\x0a":
        return "tokenizer.model"
    parts = content.split(b"\n", 1)[0].split()
    if len(parts) == 2 and parts[1].isdigit():
        message = "a file of tiktoken does not say how text is cut before it is merged: give the folder of the model"
        raise CliError(f"--tokenizer {path}: {message}, with its tokenizer_config.json, or a tokenizer.json")
    raise CliError(f"--tokenizer {path}: not a tokenizer file: neither JSON, nor of sentencepiece, nor of tiktoken")


def _counts(lengths: Sequence[int]) -> NDArray[np.int64]:
    return np.array(lengths, dtype=np.int64)


def _clean(texts: list[str]) -> list[str]:
    """Texts without half surrogate pairs, which JSON may have and UTF-8 cannot."""
    try:
        "".join(texts).encode()
    except UnicodeEncodeError:
        return [text.encode("utf-8", "replace").decode() for text in texts]
    return texts


def _fast(path: Path) -> Measure:
    try:
        import tokenizers
    except ModuleNotFoundError:
        message = "needs the package tokenizers; run: pip install tokenizers"
        raise CliError(f"--tokenizer {path} {message}") from None
    try:
        return _measure_fast(tokenizers.Tokenizer.from_file(str(path)))
    except Exception as error:  # the package raises bare Exception
        raise CliError(f"--tokenizer {path}: not a tokenizer file: {error}") from None


def _measure_fast(tokenizer: Any) -> Measure:
    tokenizer.no_truncation()
    tokenizer.no_padding()
    encode = getattr(tokenizer, "encode_batch_fast", tokenizer.encode_batch)

    def measure(texts: list[str]) -> NDArray[np.int64]:
        return _counts([len(each) for each in encode(_clean(texts), add_special_tokens=False)])

    return measure


def _alone(path: Path, known_as: str) -> Measure:
    """Counts by the tokenizer that transformers makes of one file, in a folder that has nothing else."""
    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(path, Path(folder, known_as))
        try:
            return _measure_of(_auto(Path(folder)))
        except CliError as problem:
            raise CliError(
                str(problem).replace(str(Path(folder, known_as)), folder).replace(folder, str(path))
            ) from None


def _by_transformers(folder: Path) -> Measure:
    """Counts by the tokenizer that transformers loads, when it is first used."""
    made: list[Measure] = []

    def measure(texts: list[str]) -> NDArray[np.int64]:
        if texts and not made:
            made.append(_measure_of(_auto(folder)))
        return made[0](texts) if texts else _counts([])

    return measure


def _measure_of(tokenizer: Any) -> Measure:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        return _measure_fast(backend)

    def slow(texts: list[str]) -> NDArray[np.int64]:
        found = tokenizer(_clean(texts), add_special_tokens=False, truncation=False, verbose=False)["input_ids"]
        return _counts([len(each) for each in found])

    return slow
