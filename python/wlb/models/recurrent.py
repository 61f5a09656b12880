"""Linear attention and state spaces: blocks that carry a state from token to token."""

from __future__ import annotations

from dataclasses import dataclass

from wlb._shown import explained
from wlb.models.blocks import Block, Kept, Matrix


@explained
@dataclass(frozen=True, kw_only=True)
class GatedDeltaNet(Block):
    """Linear attention with a gated delta rule (Qwen3-Next): a state of `key_dim x value_dim` for each value head.

    A token reads the state at its key, adds the outer product of the key and the error of that reading, and reads the
    state at its query: three products with the state.

    Args:
        num_key_heads: heads of queries and keys.
        num_value_heads: heads of values.
        key_dim: width of a key.
        value_dim: width of a value.
        conv_kernel: tokens that the convolution before it spans.

    Raises:
        WlbError: naming the first size that makes no sense.
    """

    _divided = ("num_key_heads", "num_value_heads")

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    conv_kernel: int

    @property
    def value_width(self) -> int:
        """Width of all value heads together."""
        return self.num_value_heads * self.value_dim

    @property
    def conv_channels(self) -> int:
        """Queries, keys and values."""
        return 2 * self.num_key_heads * self.key_dim + self.value_width

    @property
    def state(self) -> int:
        """Numbers that the block carries from token to token."""
        return self.num_value_heads * self.key_dim * self.value_dim

    def matrices(self, hidden: int) -> tuple[Matrix, ...]:
        """Queries, keys, values and the output's gate; decay and write strength; output."""
        return (
            Matrix(hidden, self.conv_channels + self.value_width),
            Matrix(hidden, 2 * self.num_value_heads),
            Matrix(self.value_width, hidden),
        )

    def kept(self, hidden: int, *, kv_copies: float = 1) -> Kept:
        """Keeps input and output of the convolution, gate, output, normalised gated output, decay and strength."""
        return Kept(
            2 * self.conv_channels + 2 * self.value_width,
            recomputed=self.value_width,
            statistics=2 * self.num_value_heads,
        )

    def vectors(self, hidden: int) -> int:
        """Convolution, decays, and the norm of a head."""
        return self.conv_kernel * self.conv_channels + 2 * self.num_value_heads + self.value_dim

    def recurrence(self) -> int:
        """Convolution, and three products with the state."""
        return 2 * self.conv_kernel * self.conv_channels + 6 * self.state


@dataclass(frozen=True, kw_only=True)
class _SquareStates(Block):
    """Heads of one width, each with a state of that width squared."""

    _divided = ("num_heads",)

    num_heads: int
    head_dim: int

    @property
    def value_width(self) -> int:
        """Width of all heads together."""
        return self.num_heads * self.head_dim

    @property
    def state(self) -> int:
        """Numbers that the block carries from token to token."""
        return self.num_heads * self.head_dim**2


@explained
@dataclass(frozen=True, kw_only=True)
class KimiDeltaAttention(_SquareStates):
    """Kimi's delta attention: a gated delta rule that decays each channel of a key by itself.

    Args:
        num_heads: heads of queries, keys and values.
        head_dim: width of each; also the rank of the two gates.
        conv_kernel: tokens that the convolution before it spans.

    Raises:
        WlbError: naming the first size that makes no sense.
    """

    conv_kernel: int

    @property
    def conv_channels(self) -> int:
        """Queries, keys and values."""
        return 3 * self.value_width

    def matrices(self, hidden: int) -> tuple[Matrix, ...]:
        """Queries, keys and values; the two gates through narrow rows; write strength; output."""
        width, rank = self.value_width, self.head_dim
        gate = (Matrix(hidden, rank, split=False), Matrix(rank, width))
        return (Matrix(hidden, 3 * width, parts=3), *gate, *gate, Matrix(hidden, self.num_heads), Matrix(width, hidden))

    def kept(self, hidden: int, *, kv_copies: float = 1) -> Kept:
        """Keeps input and output of the convolution, both gates, output, normalised gated output and strength."""
        width = self.value_width
        values = 2 * self.conv_channels + 3 * width
        return Kept(values, recomputed=width, statistics=self.num_heads, rows=2 * self.head_dim)

    def vectors(self, hidden: int) -> int:
        """Convolution, decays, and the norm of a head."""
        return self.conv_kernel * self.conv_channels + self.value_width + self.num_heads + self.head_dim

    def recurrence(self) -> int:
        """Convolution, and three products with the state."""
        return 2 * self.conv_kernel * self.conv_channels + 6 * self.state


@explained
@dataclass(frozen=True, kw_only=True)
class LightningAttention(_SquareStates):
    """Linear attention with a fixed decay for each head (MiniMax): a state of `head_dim x head_dim`.

    Args:
        num_heads: heads of queries, keys and values.
        head_dim: width of each.

    Raises:
        WlbError: naming the first size that makes no sense.
    """

    def matrices(self, hidden: int) -> tuple[Matrix, ...]:
        """Queries, keys and values; the output's gate; output."""
        width = self.value_width
        return (Matrix(hidden, 3 * width, parts=3), Matrix(hidden, width), Matrix(width, hidden))

    def kept(self, hidden: int, *, kv_copies: float = 1) -> Kept:
        """Queries, keys and values before and after their activation, the output, its gate, and their product."""
        width = self.value_width
        return Kept(5 * width, recomputed=5 * width)

    def vectors(self, hidden: int) -> int:
        """The norm of all heads."""
        return self.value_width

    def recurrence(self) -> int:
        """The outer product of key and value is added to the state, which is read at the query."""
        return 4 * self.state


@explained
@dataclass(frozen=True, kw_only=True)
class Mamba1(Block):
    """A selective state space, channel by channel (Mamba).

    Args:
        inner: channels.
        state_size: numbers in the state of a channel.
        conv_kernel: tokens that the convolution before it spans.
        step_rank: width of the row that step sizes are computed from.
        bias: the first and the last projection have biases.
        conv_bias: the convolution has one.
        norms: step sizes, inputs and outputs of the state are normalised (Jamba).

    Raises:
        WlbError: naming the first size that makes no sense.
    """

    _divided = ("inner",)

    inner: int
    state_size: int
    conv_kernel: int
    step_rank: int
    bias: bool = False
    conv_bias: bool = True
    norms: bool = False

    @property
    def state(self) -> int:
        """Numbers that the block carries from token to token."""
        return self.inner * self.state_size

    def matrices(self, hidden: int) -> tuple[Matrix, ...]:
        """Channels and their gate; step size, input and output of the state; step sizes of all channels; output."""
        return (
            Matrix(hidden, 2 * self.inner, self.bias),
            Matrix(self.inner, self.step_rank + 2 * self.state_size),
            Matrix(self.step_rank, self.inner, bias=True),
            Matrix(self.inner, hidden, self.bias),
        )

    def kept(self, hidden: int, *, kv_copies: float = 1) -> Kept:
        """Keeps input and output of the convolution, gate, step sizes, output, gated output and narrow rows."""
        return Kept(5 * self.inner, recomputed=self.inner, rows=self.step_rank + 2 * self.state_size)

    def vectors(self, hidden: int) -> int:
        """Convolution, decays, skip and norms."""
        norms = self.norms * (self.step_rank + 2 * self.state_size)
        return (self.conv_kernel + self.conv_bias + self.state_size + 1) * self.inner + norms

    def recurrence(self) -> int:
        """Convolution; the state is written and read."""
        return 2 * self.conv_kernel * self.inner + 4 * self.state


@explained
@dataclass(frozen=True, kw_only=True)
class Mamba2(Block):
    """A state space with one decay for each head (Mamba-2): a state of `head_dim x state_size`.

    Args:
        num_heads: heads.
        head_dim: width of each.
        state_size: of the state, beside the head's width.
        num_groups: heads of one group share inputs and outputs of the state.
        conv_kernel: tokens that the convolution before it spans.
        bias: the first and the last projection have biases.
        conv_bias: the convolution has one.
        norm: the output is normalised before its projection.

    Raises:
        WlbError: naming the first size that makes no sense.
    """

    _divided = ("num_heads",)

    num_heads: int
    head_dim: int
    state_size: int
    num_groups: int
    conv_kernel: int
    bias: bool = False
    conv_bias: bool = True
    norm: bool = True

    @property
    def inner(self) -> int:
        """Width of all heads."""
        return self.num_heads * self.head_dim

    @property
    def conv_channels(self) -> int:
        """Heads, inputs and outputs of the state."""
        return self.inner + 2 * self.num_groups * self.state_size

    @property
    def state(self) -> int:
        """Numbers that the block carries from token to token."""
        return self.inner * self.state_size

    def matrices(self, hidden: int) -> tuple[Matrix, ...]:
        """Gate, heads, inputs and outputs of the state, step sizes; output."""
        width = self.inner + self.conv_channels + self.num_heads
        return (Matrix(hidden, width, self.bias), Matrix(self.inner, hidden, self.bias))

    def kept(self, hidden: int, *, kv_copies: float = 1) -> Kept:
        """Keeps input and output of the convolution, gate, output, gated normalised output and step sizes."""
        values = 2 * self.conv_channels + 2 * self.inner
        return Kept(values, recomputed=self.inner, statistics=self.num_heads)

    def vectors(self, hidden: int) -> int:
        """Convolution, step sizes, decays, skip and norm."""
        return (self.conv_kernel + self.conv_bias) * self.conv_channels + 3 * self.num_heads + self.norm * self.inner

    def recurrence(self) -> int:
        """Convolution; the state is written and read."""
        return 2 * self.conv_kernel * self.conv_channels + 4 * self.state
