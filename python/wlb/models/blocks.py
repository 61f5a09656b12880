"""The parts of a block of a layer: matrices, masks, kept activations.

A block lists its parts once: its matrices, its other parameters, the (query, key) pairs that it computes, and the work
of its recurrence. Parameters, FLOPs and memory are sums over these.

FLOPs are those of the model's own mathematics, forward: two for each multiply-add of a matrix product, a convolution or
a state. As is customary, element-wise work (norms, gates, rotations, softmax) is not counted. Work that only an
implementation adds is not counted either: pairs that a mask hides, experts that a token does not visit, and products
inside the chunks in which kernels compute a recurrence.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from typing import ClassVar, Literal

from wlb._core import MAX_TOKENS
from wlb._errors import check_bool, check_integer
from wlb._shown import explained


@explained
@dataclass(frozen=True, order=True)
class Mask:
    """The keys of its own document that a query sees, itself included.

    ``full``: all keys up to its own; ``window``: the last `size` up to its own; ``chunk``: those up to its own in its
    chunk of `size` tokens; ``bidirectional``: the whole document or image; ``bidirectional_window``: its square of at
    most `size` patches of an image. A window or chunk of at least 2^31 - 1 tokens, which no document fills, is
    ``full``.
    """

    kind: Literal["full", "window", "chunk", "bidirectional", "bidirectional_window"] = "full"
    size: int = 0

    def __post_init__(self) -> None:
        """Turns a window or chunk that no document fills into ``full``."""
        if self.kind in ("window", "chunk") and self.size >= MAX_TOKENS:
            object.__setattr__(self, "kind", "full")
            object.__setattr__(self, "size", 0)


@explained
@dataclass(frozen=True)
class Matrix:
    """Weights that a token's row is multiplied by."""

    rows: int
    columns: int
    bias: bool = False
    copies: int = 1  # experts
    used: int = 1  # copies that one token visits; or how often it meets the matrix
    split: bool = True  # tensor parallelism divides it
    router: bool = False  # chooses experts
    parts: int = 1  # matrices with the same input that are stored as one, such as those of keys and values

    def parameters(self, copies: int) -> int:
        """Parameters of this part if there are `copies` copies."""
        return copies * (self.rows + self.bias) * self.columns


@dataclass(frozen=True)
class Kept:
    """Numbers that a block keeps for the backward pass of one token, besides its input.

    Tensor parallelism divides all of them but `rows`. They have the dtype of activations, except `statistics`.
    """

    values: int = 0
    recomputed: int = 0  # results of element-wise work, which selective recomputation computes again
    unfused: int = 0  # part of `recomputed` that a fused kernel never keeps
    statistics: int = 0  # float32
    rows: int = 0  # narrow rows and copies, whole on every tensor-parallel rank


class Block(ABC):
    """A part of a layer that turns rows of width `hidden` into rows of width `hidden`."""

    _divided: ClassVar[tuple[str, ...]] = ()
    """Fields that tensor parallelism must divide."""

    def __post_init__(self) -> None:
        """Checks that every field is a size; a kind with optional fields checks them itself."""
        self._check()

    @abstractmethod
    def matrices(self, hidden: int) -> tuple[Matrix, ...]:
        """Every matrix of the block."""

    def vectors(self, hidden: int) -> int:
        """Parameters in no matrix: norms, decays, sinks. Tensor parallelism is assumed not to divide them."""
        return 0

    def pairs(self) -> tuple[tuple[Mask, int], ...]:
        """The masks of the block, and the FLOPs of each (query, key) pair under them."""
        return ()

    def recurrence(self) -> int:
        """FLOPs of a token outside matrices: convolutions, and reading and writing a state."""
        return 0

    @abstractmethod
    def kept(self, hidden: int, *, kv_copies: float = 1) -> Kept:
        """Bytes that the block keeps for the backward pass; copies of keys by tensor parallelism count."""

    @property
    def exchanged(self) -> int:
        """Numbers of a token that context-parallel ranks send each other: keys and values, or their common source."""
        return 0

    @property
    def divisors(self) -> dict[str, int]:
        """Sizes that the tensor-parallel degree must divide, by name."""
        return {name: getattr(self, name) for name in self._divided}

    def parameters(self, hidden: int, *, active: bool = False) -> int:
        """Parameters of the block; with `active`, those that one token visits."""
        matrices = sum(m.parameters(min(m.used, m.copies) if active else m.copies) for m in self.matrices(hidden))
        return matrices + self.vectors(hidden)

    def token_flops(self, hidden: int) -> int:
        """Forward FLOPs of one token, besides its pairs."""
        return sum(2 * m.used * m.rows * m.columns for m in self.matrices(hidden)) + self.recurrence()

    def _check(self, *optional: str) -> None:
        """Refuses a field that is no size; fields in `optional` may be 0."""
        for each in fields(self):  # type: ignore[arg-type]
            value = getattr(self, each.name)
            if each.type == "int":
                check_integer(each.name, value, minimum=0 if each.name in optional else 1)
            elif each.type == "bool":
                check_bool(each.name, value)
