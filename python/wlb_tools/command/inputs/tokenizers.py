"""Loads tokenizers of all common kinds, to count the tokens of texts.

A file that a fine-tune saved may truncate and pad. Both are switched off, because all documents would have the same
length. Special tokens are not added; that is up to the trainer.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from os import cpu_count
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wlb_tools.command.errors import CliError

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
    try:
        return transformers.AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False)
    except Exception as cause:  # of many types
        raise CliError(f"--tokenizer {folder}: transformers cannot load it: {_said(cause)}") from None


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
        raise CliError(f"--tokenizer {folder}: transformers cannot load its processor: {_said(cause)}") from None


def _said(cause: BaseException) -> str:
    return next((line for line in str(cause).splitlines() if line.strip()), type(cause).__name__)


def load_tokenizer(name: str) -> Tokenizer:
    """A tokenizer by its file, its folder, or its name on the hub.

    Args:
        name: a `tokenizer.json`; a sentencepiece or tiktoken file; a `tekken.json`; a folder with one of these, or with
            any tokenizer of transformers; a name on the hub, taken from the local cache if it is there.

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
        for each in (*_CONFIGURED, path.name):
            digest.update((folder / each).read_bytes() if (folder / each).is_file() else b"-")
        return Tokenizer(_by_transformers(folder), digest.hexdigest(), folder.name, folder)
    content = path.read_bytes()
    digest.update(content)
    kind = _kind(path, content)
    measure = {"tokenizers": _fast, "sentencepiece": _sentencepiece, "tiktoken": _tiktoken, "tekken": _tekken}[kind]
    return Tokenizer(measure(path, content), digest.hexdigest(), path.name)


_CONFIGURED = ("tokenizer_config.json", "chat_template.jinja", "preprocessor_config.json", "special_tokens_map.json")
"""Files beside a tokenizer by which transformers loads it."""

_NAMES = ("tokenizer.json", "tekken.json", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model")


def _in_folder(folder: Path) -> Path:
    found = [folder / name for name in _NAMES if (folder / name).is_file()]
    found += sorted(folder.glob("*.tiktoken"))
    if not found and (folder / "tokenizer_config.json").is_file():
        return folder / "tokenizer_config.json"  # a tokenizer of other files, which transformers knows
    if not found:
        raise CliError(f"--tokenizer {folder}: has none of {', '.join(_NAMES)}, *.tiktoken")
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
        return _in_folder(Path(hub.snapshot_download(name, allow_patterns=[*_NAMES, *_CONFIGURED])))
    except CliError:
        raise
    except Exception as cause:  # of many types: no network, unknown name, no permission
        said = next((line for line in str(cause).splitlines() if line.strip()), type(cause).__name__)
        raise CliError(
            f"--tokenizer {name}: no such tokenizer file, nor in the hub's cache, nor to be had: {said}"
        ) from None


def _kind(path: Path, content: bytes) -> str:
    if content.lstrip()[:1] == b"{":
        try:
            said = json.loads(content)
        except ValueError as problem:
            raise CliError(f"--tokenizer {path}: not a tokenizer file: not JSON: {problem}") from None
        if (
            isinstance(said, dict)
            and isinstance(said.get("config"), dict)
            and "vocab" in said
            and "pattern" in said["config"]
        ):
            return "tekken"
        if isinstance(said, dict) and "model" in said:
            return "tokenizers"
        more = ": give the tokenizer.json beside it" if path.name == "tokenizer_config.json" else ""
        raise CliError(f"--tokenizer {path}: not a tokenizer file: it has no model{more}")
    parts = content.split(b"\n", 1)[0].split()
    if len(parts) == 2 and parts[1].isdigit():
        return "tiktoken"
    if content[:1] == b"\x0a":
        return "sentencepiece"
    message = "not a tokenizer file: neither JSON, nor of sentencepiece, nor of tiktoken"
    raise CliError(f"--tokenizer {path}: {message}")


def _needs(package: str, path: Path) -> CliError:
    return CliError(f"--tokenizer {path} needs the package {package}; run: pip install {package}")


def _counts(lengths: Sequence[int]) -> NDArray[np.int64]:
    return np.array(lengths, dtype=np.int64)


def _clean(texts: list[str]) -> list[str]:
    """Texts without half surrogate pairs, which JSON may have and UTF-8 cannot."""
    try:
        "".join(texts).encode()
    except UnicodeEncodeError:
        return [text.encode("utf-8", "replace").decode() for text in texts]
    return texts


def _fast(path: Path, content: bytes) -> Measure:
    try:
        import tokenizers
    except ModuleNotFoundError:
        raise _needs("tokenizers", path) from None
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the package raises bare Exception
        raise CliError(f"--tokenizer {path}: not a tokenizer file: {error}") from None
    return _measure_fast(tokenizer)


def _measure_fast(tokenizer: Any) -> Measure:
    tokenizer.no_truncation()
    tokenizer.no_padding()
    encode = getattr(tokenizer, "encode_batch_fast", tokenizer.encode_batch)

    def measure(texts: list[str]) -> NDArray[np.int64]:
        return _counts([len(each) for each in encode(_clean(texts), add_special_tokens=False)])

    return measure


def _by_transformers(folder: Path) -> Measure:
    """Counts by the tokenizer that transformers loads, when it is first used."""
    made: list[Measure] = []

    def slow(texts: list[str]) -> NDArray[np.int64]:
        found = _auto(folder)(_clean(texts), add_special_tokens=False, truncation=False, verbose=False)["input_ids"]
        return _counts([len(each) for each in found])

    def measure(texts: list[str]) -> NDArray[np.int64]:
        if not made:
            backend = getattr(_auto(folder), "backend_tokenizer", None)
            made.append(slow if backend is None else _measure_fast(backend))
        return made[0](texts) if texts else _counts([])

    return measure


def _sentencepiece(path: Path, content: bytes) -> Measure:
    try:
        import sentencepiece
    except ModuleNotFoundError:
        raise _needs("sentencepiece", path) from None
    try:
        processor = sentencepiece.SentencePieceProcessor(model_proto=content)
    except Exception as error:  # RuntimeError, or OSError
        raise CliError(f"--tokenizer {path}: not a tokenizer file of sentencepiece: {error}") from None

    def measure(texts: list[str]) -> NDArray[np.int64]:
        return _counts([len(each) for each in processor.encode(_clean(texts), num_threads=cpu_count() or 1)])

    return measure


# tiktoken's own encodings cut text like this before merging; a file of ranks does not say with which it was made.
_CL100K = (
    r"""'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s*[\r\n]|"""
    r"""\s+(?!\S)|\s"""
)
_O200K = "|".join(
    (
        r"""[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?""",
        r"""[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?""",
        r"""\p{N}{1,3}""",
        r""" ?[^\s\p{L}\p{N}]+[\r\n/]*""",
        r"""\s*[\r\n]+""",
        r"""\s+(?!\S)""",
        r"""\s+""",
    )
)
_LLAMA3 = (
    r"""(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"""
    r"""\s+(?!\S)|\s+"""
)
_QWEN = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_GPT2 = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""
_PATTERNS = {"cl100k_base": _CL100K, "o200k_base": _O200K, "qwen": _QWEN, "r50k_base": _GPT2, "p50k_base": _GPT2}
_BY_SIZE = {100256: _CL100K, 199998: _O200K, 128000: _LLAMA3, 151643: _QWEN, 50256: _GPT2, 50280: _GPT2}


def _tiktoken(path: Path, content: bytes) -> Measure:
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(content.splitlines(), start=1):
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except ValueError:  # noqa: PERF203 - each names its line
            if line.strip():
                raise CliError(
                    f"--tokenizer {path}:{number}: not a tokenizer file of tiktoken: {line[:40]!r}"
                ) from None
    pattern = next((each for name, each in _PATTERNS.items() if name in path.name), _BY_SIZE.get(len(ranks)))
    if pattern is None:
        names = ", ".join(_PATTERNS)
        message = (
            f"has {len(ranks):,} ranks and does not say how text is cut before them; a name with one of {names} does"
        )
        raise CliError(f"--tokenizer {path}: {message}")
    return _by_ranks(path, ranks, pattern)


def _tekken(path: Path, content: bytes) -> Measure:
    said = json.loads(content)
    config = said["config"]
    try:
        size = int(config["default_vocab_size"]) - int(config["default_num_special_tokens"])
        ranks = {base64.b64decode(each["token_bytes"]): int(each["rank"]) for each in said["vocab"][:size]}
    except (KeyError, TypeError, ValueError) as problem:
        raise CliError(f"--tokenizer {path}: not a whole tekken.json: {problem!r}") from None
    return _by_ranks(path, ranks, config["pattern"])


def _by_ranks(path: Path, ranks: dict[bytes, int], pattern: str) -> Measure:
    try:
        import tiktoken
    except ModuleNotFoundError:
        raise _needs("tiktoken", path) from None
    try:
        encoding = tiktoken.Encoding(path.name, pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
    except Exception as error:  # from its Rust: an invalid pattern, ranks that do not fit
        raise CliError(f"--tokenizer {path}: not a tokenizer file of tiktoken: {error}") from None
    threads = ThreadPoolExecutor(cpu_count() or 1)

    def count(text: str) -> int:
        return len(encoding.encode_ordinary(text))

    def measure(texts: list[str]) -> NDArray[np.int64]:
        return _counts([*threads.map(count, _clean(texts), chunksize=max(1, len(texts) // 64))])

    return measure
