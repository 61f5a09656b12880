"""Loads tokenizers of all common kinds, to count the tokens of texts.

A file that a fine-tune saved may truncate and pad. Both are switched off, because all documents would have the same
length. Special tokens are not added; that is up to the trainer.
"""

from __future__ import annotations

import base64
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
from wlb_tools.command.inputs.cells import Measure

Chat = Callable[[list[dict[str, str]]], str]


@dataclass(frozen=True)
class Tokenizer:
    """A tokenizer that counts tokens.

    Args:
        measure: counts the tokens of texts.
        chat: makes text of messages by the tokenizer's template; None: it has none.
        name: a digest of its file.
    """

    measure: Measure
    chat: Chat | None
    name: str


def load_tokenizer(name: str) -> Tokenizer:
    """A tokenizer by its file, its folder, or its name on the hub.

    Args:
        name: a `tokenizer.json`; a sentencepiece or tiktoken file; a `tekken.json`; a folder with one of these; a name
            on the hub, taken from the local cache if it is there.

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
    content = path.read_bytes()
    digest = hashlib.blake2b(content, digest_size=16).hexdigest()
    kind = _kind(path, content)
    measure = {"tokenizers": _fast, "sentencepiece": _sentencepiece, "tiktoken": _tiktoken, "tekken": _tekken}[kind]
    chat, template = _chat(folder)
    return Tokenizer(measure(path, content), chat, f"{digest}-{template}")


_NAMES = ("tokenizer.json", "tekken.json", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model")


def _in_folder(folder: Path) -> Path:
    found = [folder / name for name in _NAMES if (folder / name).is_file()]
    found += sorted(folder.glob("*.tiktoken"))
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
        hub.hf_hub_download(name, "tokenizer_config.json")
        return Path(hub.hf_hub_download(name, "tokenizer.json"))
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
    tokenizer.no_truncation()
    tokenizer.no_padding()
    encode = getattr(tokenizer, "encode_batch_fast", tokenizer.encode_batch)

    def measure(texts: list[str]) -> NDArray[np.int64]:
        return _counts([len(each) for each in encode(_clean(texts), add_special_tokens=False)])

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


def _chat(folder: Path | None) -> tuple[Chat | None, str]:
    """The chat template of a folder, by transformers, and a digest of it."""
    if folder is None:
        return None, ""
    template = ""
    if (folder / "chat_template.jinja").is_file():
        template = (folder / "chat_template.jinja").read_text()
    elif (folder / "tokenizer_config.json").is_file():
        said = json.loads((folder / "tokenizer_config.json").read_bytes()).get("chat_template") or ""
        named = {each.get("name"): each.get("template") for each in said} if isinstance(said, list) else {}
        template = str(named.get("default", "")) if isinstance(said, list) else str(said)
    if not template:
        return None, ""

    made: list[Any] = []

    def chat(messages: list[dict[str, str]]) -> str:
        if not made:
            try:
                import transformers
            except ModuleNotFoundError:
                raise CliError("chats need the package transformers; run: pip install transformers") from None
            made.append(transformers.AutoTokenizer.from_pretrained(str(folder)))
        return str(made[0].apply_chat_template(messages, tokenize=False))

    return chat, hashlib.blake2b(template.encode(), digest_size=8).hexdigest()
