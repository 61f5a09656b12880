"""Tokenizers of every kind that people have count what their own packages count."""

from __future__ import annotations

import base64
import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from wlb_tools.command.errors import CliError
from wlb_tools.command.inputs.documents import read_documents, wanted
from wlb_tools.command.inputs.lengths_cache import LengthsCache
from wlb_tools.command.inputs.tokenizers import load_tokenizer
from wlb_tools.command.output.console import progress

tokenizers = pytest.importorskip("tokenizers")

TEXTS = ["the quick brown fox", "jumps over", "the lazy dog " * 40, "é and ß", "\ud800 half a pair"]


@pytest.fixture
def made(tmp_path: Path) -> Any:
    """A byte-level BPE tokenizer, trained on the texts."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS[:4], trainer)
    return tokenizer


def counts(tokenizer: Any) -> list[int]:
    clean = [text.encode("utf-8", "replace").decode() for text in TEXTS]
    return [len(each.ids) for each in tokenizer.encode_batch(clean, add_special_tokens=False)]


def test_saved_truncation_and_padding_are_switched_off(made: Any, tmp_path: Path) -> None:
    expected = counts(made)
    made.enable_truncation(8)
    made.enable_padding(length=64)
    made.save(str(tmp_path / "tokenizer.json"))
    assert load_tokenizer(str(tmp_path / "tokenizer.json")).measure(TEXTS).tolist() == expected
    assert load_tokenizer(str(tmp_path)).measure(TEXTS).tolist() == expected, "a folder"
    assert len(set(expected)) > 3, "without that all would be 64"


def test_a_name_in_the_hubs_cache(made: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub.constants as constants

    snapshot = tmp_path / "models--some--name" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    made.save(str(snapshot / "tokenizer.json"))
    (tmp_path / "models--some--name" / "refs").mkdir()
    (tmp_path / "models--some--name" / "refs" / "main").write_text("abc")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert load_tokenizer("some/name").measure(TEXTS).tolist() == counts(made)
    with pytest.raises(CliError, match="--tokenizer other/name: no such tokenizer file, nor in the hub's cache"):
        load_tokenizer("other/name")


def test_sentencepiece(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    sentencepiece = pytest.importorskip("sentencepiece")
    (tmp_path / "corpus.txt").write_text("\n".join(TEXTS[:4]))
    sentencepiece.SentencePieceTrainer.train(
        input=str(tmp_path / "corpus.txt"), model_prefix=str(tmp_path / "tokenizer"), vocab_size=33, minloglevel=2
    )
    whole = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "tokenizer.model"))
    expected = [len(whole.encode(text)) for text in TEXTS[:4]]
    assert load_tokenizer(str(tmp_path / "tokenizer.model")).measure(TEXTS[:4]).tolist() == expected
    assert load_tokenizer(str(tmp_path)).measure(TEXTS[:4]).tolist() == expected
    (tmp_path / "tokenizer.model").rename(tmp_path / "mine.spm")
    assert load_tokenizer(str(tmp_path / "mine.spm")).measure(TEXTS[:4]).tolist() == expected, "any name"
    (tmp_path / "tokenizer.model").write_bytes((tmp_path / "mine.spm").read_bytes()[:100])
    with pytest.raises(CliError, match=r"--tokenizer .*tokenizer\.model: transformers cannot load it"):
        load_tokenizer(str(tmp_path / "tokenizer.model"))


def test_tekken(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("mistral_common")
    tiktoken = pytest.importorskip("tiktoken")
    ranks = {bytes([n]): n for n in range(256)} | {b"th": 256, b"the": 257, b" the": 258}
    pattern = r"[^\s]+|\s+"
    vocabulary = [
        {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": None}
        for token, rank in ranks.items()
    ]
    config = {"pattern": pattern, "num_vocab_tokens": 259, "default_vocab_size": 269, "version": "v3"}
    whole = {"config": config | {"default_num_special_tokens": 10}, "vocab": vocabulary}
    (tmp_path / "tekken.json").write_text(json.dumps(whole))
    encoding = tiktoken.Encoding("x", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
    expected = [len(encoding.encode_ordinary(text)) for text in TEXTS[:4]]
    for path in (tmp_path, tmp_path / "tekken.json"):
        assert load_tokenizer(str(path)).measure(TEXTS[:4]).tolist() == expected


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("tokenizer.json", "{", "not a tokenizer file: not JSON"),
        ("tokenizer.json", "{}", "not a tokenizer file: it has no model"),
        ("tokenizer_config.json", "{}", "give the tokenizer.json beside it"),
        ("tokenizer.json", '{"model": {"type": "none"}}', "not a tokenizer file"),
        ("vocab.bpe", "#version: 0.2\n", "neither JSON, nor of sentencepiece, nor of tiktoken"),
        ("mine.tiktoken", "dGg= 0\ndGhl 1\n", "tiktoken does not say how text is cut before it is merged"),
    ],
)
def test_what_does_not_load_is_refused_by_name(name: str, content: str, said: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(CliError, match=said) as caught:
        load_tokenizer(str(tmp_path / name))
    assert name in str(caught.value)
    (tmp_path / "empty").mkdir()
    with pytest.raises(CliError, match=r"has none of tokenizer\.json"):
        load_tokenizer(str(tmp_path / "empty"))


def test_lengths_are_kept_by_content(made: Any, tmp_path: Path) -> None:
    made.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS[:4]))
    calls = 0

    def read(tokenizer: str = "tokenizer.json") -> list[int]:
        wants = wanted(tokenizer=tmp_path / tokenizer)
        assert wants.tokenizer is not None
        inner = wants.tokenizer.measure

        def counting(texts: list[str]) -> np.ndarray:
            nonlocal calls
            calls += 1
            return inner(texts)

        wants = dataclasses.replace(wants, tokenizer=dataclasses.replace(wants.tokenizer, measure=counting))
        with progress(quiet=True) as bars:
            found = read_documents(
                [str(tmp_path / "texts.jsonl")],
                wanted=wants,
                pattern=None,
                cache=LengthsCache(tmp_path / "cache"),
                progress=bars,
            )
        return found.lengths.tolist()

    first = read()
    assert calls == 1
    assert read() == first == counts(made)[:4]
    assert calls == 1, "kept"
    (tmp_path / "texts.jsonl").write_text(json.dumps({"text": "another"}) + "\n")
    assert read() != first
    assert calls == 2, "another content"
    made.add_tokens(["another"])
    made.save(str(tmp_path / "other.json"))
    read("other.json")
    assert calls == 3, "another tokenizer"


def test_a_chat_template_of_a_folder(made: Any, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    made.save(str(tmp_path / "tokenizer.json"))
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": template}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    messages = [{"role": "user", "content": "the fox"}, {"role": "assistant", "content": "jumps"}]
    (tmp_path / "chats.jsonl").write_text(json.dumps({"messages": messages}) + "\n")
    with progress(quiet=True) as bars:
        found = read_documents(
            [str(tmp_path / "chats.jsonl")], wanted=wanted(tokenizer=tmp_path), pattern=None, cache=None, progress=bars
        )
    assert found.lengths.tolist() == [len(made.encode("<user>the fox<assistant>jumps").ids)]
    (tmp_path / "tokenizer_config.json").unlink()
    with progress(quiet=True) as bars, pytest.raises(CliError, match="is a file alone: give its folder"):
        read_documents(
            [str(tmp_path / "chats.jsonl")], wanted=wanted(tokenizer=tmp_path), pattern=None, cache=None, progress=bars
        )
