"""Documents whose answers are learnt in another piece than their prompts are seen get one warning."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import wlb
import wlb.torch as wt

COST = wlb.CostModel(attention=1.0, linear=1.0)
LIMIT = 8


def rows(prompts: list[int], size: int = 20) -> list[dict[str, Any]]:
    """Documents with so many tokens of prompt, and short ones between."""
    found = []
    for prompt in prompts:
        found.append({"input_ids": [*range(size)], "labels": [-100] * prompt + [*range(prompt, size)]})
        found.append({"input_ids": [1, 2, 3], "labels": [-100, -100, 3]})
    return found


class Stream:
    def __init__(self, documents: list[Any]) -> None:
        self.documents = documents

    def __iter__(self) -> Iterator[Any]:
        return iter(self.documents)


def loaded(documents: list[Any], **options: Any) -> None:
    sizes = {"max_tokens": 40, "tokens_per_batch": 60, "max_document_tokens": LIMIT, "cost_model": COST}
    list(wt.balanced_loader(documents, **sizes | options))


def streamed(documents: list[Any], **options: Any) -> None:
    limits = {"num_micro_batches": 2, "max_tokens": 40, "max_document_tokens": LIMIT, "oversize": "split"}
    packer = wlb.Packer(cost_model=COST, **limits | options)
    parts = [Stream(documents[::2]), Stream(documents[1::2])]
    list(wt.BalancedStream(parts, packer=packer, collate_fn=wt.collate, weights=[1, 1]))


def warned(read: Callable[..., None], documents: list[Any], **options: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        read(documents, **options)
    return [str(each.message) for each in found if "prompt" in str(each.message)]


def test_their_number_is_named_with_the_ways_out() -> None:
    [message] = warned(loaded, rows([5, 0, 9, 1, 19]))
    assert message.startswith("3 of 5 documents with more than max_document_tokens = 8 tokens begin with a prompt")
    assert 'oversize="truncate" or "error", or raise max_document_tokens' in message


def test_a_few_of_many_are_looked_at() -> None:
    [message] = warned(loaded, rows([5] * 100))
    assert message.startswith("64 of 64 (of 100) documents")


def test_streams_name_the_first() -> None:
    [message] = warned(streamed, rows([0, 5, 9]))
    assert message.startswith("streams[0][1] has more than max_document_tokens = 8 tokens, begins with a prompt")


@pytest.mark.parametrize("read", [loaded, streamed])
def test_others_are_passed_over(read: Any) -> None:
    assert warned(read, rows([5, 9]), oversize="truncate") == []
    assert warned(read, rows([0, 1])) == [], "all of it is learnt"
    learnt_at_once = [row | {"labels": [label if at < 7 else -100 for at, label in enumerate(row["labels"])]}
                      for row in rows([5])]  # fmt: skip
    assert warned(read, learnt_at_once) == [], "the answer sees its prompt"
