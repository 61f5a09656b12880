"""The documents of a configuration: with known lengths, as streams, or as one of torchtitan's data sets."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torchtitan.hf_datasets.text_datasets import DATASETS

from wlb._errors import error
from wlb.integrations.streams import streams_of
from wlb.torch.data import Documents
from wlb.torch.data.dataset import measured


def known(config: Any, tokenizer: Any) -> tuple[Documents, Any] | None:
    """The documents of a configuration and their lengths, int [documents]; None if it has streams.

    Raises:
        wlb.WlbError: it has no documents, several kinds of them, or a data set that torchtitan does not know.
    """
    given = [name for name in ("documents", "streams", "dataset") if _is_given(getattr(config, name))]
    if len(given) != 1:
        found = " and ".join(given) or "none of them"
        raise error("documents", f"streams or dataset: give one, not {found}", value=given)
    if given == ["streams"]:
        return None
    if given == ["dataset"]:
        texts = _registered(config, tokenizer)
        if not hasattr(texts, "__len__") or not hasattr(texts, "__getitem__"):
            return None
        return measured(_Tokenized(texts, _tokens(config, tokenizer)), config.lengths, "documents")
    return measured(config.documents, config.lengths, "documents")


def streams(config: Any, tokenizer: Any) -> Sequence[Any]:
    """The streams of a configuration without documents of known lengths, for `BalancedStream`."""
    if config.streams is None:
        return streams_of(_TokenStream(_registered(config, tokenizer), _tokens(config, tokenizer)), _as_they_are)
    if isinstance(config.streams, Sequence):
        return config.streams
    return streams_of(config.streams, _as_they_are)


def _is_given(value: Any) -> bool:
    return value is not None and not (isinstance(value, str) and not value)


def _registered(config: Any, tokenizer: Any) -> Any:
    name = config.dataset.lower()
    if name not in DATASETS:
        raise error("dataset", f"= {config.dataset!r}: torchtitan knows {', '.join(DATASETS)}", value=config.dataset)
    if not hasattr(tokenizer, "encode"):
        raise error("tokenizer", f"of a {type(tokenizer).__name__} cannot encode: data sets of text need one")
    entry = DATASETS[name]
    return entry.loader(config.dataset_path or entry.path)


def _tokens(config: Any, tokenizer: Any) -> Callable[[Any], list[int]]:
    text_of = DATASETS[config.dataset.lower()].sample_processor
    return lambda sample: tokenizer.encode(text_of(sample), add_bos=True, add_eos=True)


class _Tokenized(Sequence[NDArray[np.int64]]):
    """Texts as tokens, tokenised when they are read."""

    def __init__(self, texts: Any, tokens: Callable[[Any], list[int]]) -> None:
        self._texts, self._tokens = texts, tokens

    def __len__(self) -> int:
        return len(self._texts)

    def __getitem__(self, index: Any) -> Any:
        return np.array(self._tokens(self._texts[index]), np.int64)


class _TokenStream:
    """A stream of texts as a stream of tokens, with the shards and the state of the texts."""

    def __init__(self, texts: Any, tokens: Callable[[Any], list[int]]) -> None:
        self._texts, self._tokens = texts, tokens

    def __iter__(self) -> Iterator[dict[str, list[int]]]:
        for sample in self._texts:
            yield {"input_ids": self._tokens(sample)}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._texts, name)

    def shard(self, **which: int) -> _TokenStream:
        """The stream of one of `num_shards` shards."""
        return _TokenStream(self._texts.shard(**which), self._tokens)


def _as_they_are(features: list[Any]) -> Mapping[str, Any]:
    (feature,) = features
    return {name: feature[name] for name in ("input_ids", "labels") if name in feature}
