"""The input of the stages of a pipeline for one micro-batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

import wlb
from wlb._errors import error, is_integer
from wlb._shown import explained
from wlb.torch.data.forest import ForestBatch


@explained
@dataclass(frozen=True, kw_only=True)
class PipelineMicroBatch:
    """One micro-batch as one (DP, CP) rank sees it. All ranks of a pipeline are given the same.

    Attributes:
        tokens: tokens on this rank; 0 is allowed, since a CP rank may get none. It decides the shapes of all
            activations.
        args: positional arguments of the first stage's module, at least one; other stages ignore them. Tensors are
            `[tokens, ...]`.
        kwargs: keyword arguments of every stage's module, derived from the plan: position ids, `cu_seqlens`, the shard.
            They may be any Python objects; they are not sent, and get no gradients.
        target: second argument of the loss function, which only the last stage calls. A tensor is `[tokens, ...]`. For
            a forest it is the `ForestBatch`, whose edges `token_normalized_loss` takes.
    """

    tokens: int
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    target: Any = None


def check(micro_batches: Sequence[PipelineMicroBatch]) -> None:
    """Refuses micro-batches that contradict themselves.

    It looks at all arguments, including those that this rank does not use, so that all ranks refuse alike.

    Raises:
        WlbError: a count that is no count; no args for the first stage; or a tensor or shard with another number of
            tokens, such as that of another step.
    """
    if not micro_batches:
        raise error("micro_batches", "is empty", value=0)
    for index, micro_batch in enumerate(micro_batches):

        def refuse(message: str, value: object, index: int = index) -> wlb.WlbError:
            return error("micro_batches", message, index=index, value=value)

        if not isinstance(micro_batch, PipelineMicroBatch):
            name = type(micro_batch).__name__
            raise refuse(f"is a {name}, not a PipelineMicroBatch", micro_batch)
        tokens = micro_batch.tokens
        if not is_integer(tokens) or tokens < 0:
            raise refuse(f"has tokens={tokens!r}, not a count", tokens)
        if not micro_batch.args:
            raise refuse("has no args for the first stage", ())
        given = (
            *((f"args[{i}]", arg) for i, arg in enumerate(micro_batch.args)),
            ("target", micro_batch.target),
        )
        for name, value in (*given, *micro_batch.kwargs.items()):
            if isinstance(value, ForestBatch) and value.tokens.numel() != tokens:
                count = value.tokens.numel()
                raise refuse(f"has {tokens} tokens, but its {name} has {count}", count)
        for name, value in given:
            if isinstance(value, torch.Tensor) and (value.ndim == 0 or value.shape[0] != tokens):
                raise refuse(f"has {tokens} tokens, but its {name} is {list(value.shape)}", tuple(value.shape))
        for name, value in micro_batch.kwargs.items():
            if isinstance(value, wlb.RankShard) and value.num_tokens != tokens:
                raise refuse(f"has {tokens} tokens, but its {name} has {value.num_tokens}", value.num_tokens)
            if isinstance(value, wlb.Shard) and tokens not in value.tokens_per_rank:
                counts = value.tokens_per_rank.tolist()
                raise refuse(f"has {tokens} tokens, but its {name} gives the ranks {counts}", counts)


def has_forest(micro_batches: Sequence[PipelineMicroBatch]) -> bool:
    """Whether some of them are of a forest, as far as their arguments show."""
    return any(
        isinstance(value, ForestBatch) or (isinstance(value, wlb.Shard | wlb.RankShard) and value.forest is not None)
        for micro_batch in micro_batches
        for value in (*micro_batch.args, micro_batch.target, *micro_batch.kwargs.values())
    )
