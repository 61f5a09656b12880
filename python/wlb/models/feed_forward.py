"""Feed-forward blocks: dense, or of experts."""

from __future__ import annotations

from dataclasses import dataclass

from wlb._errors import error
from wlb._shown import explained
from wlb.models.blocks import Block, Kept, Matrix


@explained
@dataclass(frozen=True, kw_only=True)
class FeedForward(Block):
    """A feed-forward block, dense or with experts: a token visits some routed experts and all shared ones.

    Args:
        width: width of the block; of one expert if there are several.
        gated: three matrices (SwiGLU), else two.
        bias: they have biases.
        num_experts: routed experts; 1: a dense block.
        experts_per_token: experts that a token visits.
        router_bias: the router has a bias.
        shared_width: width of all shared experts together, which every token visits; 0: none.
        shared_gate: the output of the shared experts is multiplied by a gate (Qwen2-MoE).
        latent_size: width of the rows that experts work on, with one projection before them and one after
            (Nemotron-H); 0: the layer's own rows.

    Raises:
        WlbError: naming the first size that makes no sense.
    """

    width: int
    gated: bool = True
    bias: bool = False
    num_experts: int = 1
    experts_per_token: int = 1
    router_bias: bool = False
    shared_width: int = 0
    shared_gate: bool = False
    latent_size: int = 0

    def __post_init__(self) -> None:
        self._check("shared_width", "latent_size")
        if self.experts_per_token > self.num_experts:
            message = f"= {self.experts_per_token}: there are {self.num_experts} experts"
            raise error("experts_per_token", message, value=self.experts_per_token)

    @property
    def inner(self) -> int:
        """Values of a token inside: of all experts that it visits."""
        return self.experts_per_token * self.width + self.shared_width

    def visit_width(self, hidden: int) -> int:
        """Numbers of a token that are sent to its experts, one row for each; as many come back. 0 without experts."""
        return self.experts_per_token * (self.latent_size or hidden) if self.num_experts > 1 else 0

    def expert_parameters(self, hidden: int) -> int:
        """Parameters of all routed experts, which expert parallelism divides."""
        return sum(m.parameters(m.copies) for m in self.matrices(hidden) if m.copies > 1)

    def expert_flops(self, hidden: int) -> int:
        """Forward FLOPs of one token in the routed experts that it visits."""
        return sum(2 * m.used * m.rows * m.columns for m in self.matrices(hidden) if m.copies > 1)

    def kept(self, hidden: int, *, kv_copies: float = 1) -> Kept:
        """Gate and up, and their product; with experts, also a copy of the input for each."""
        values, gate, copies = (1 + self.gated) * self.inner, self.gated * self.inner, self.visit_width(hidden)
        return Kept(values, recomputed=self.inner, unfused=gate, rows=copies)

    @property
    def divisors(self) -> dict[str, int]:
        """The widths."""
        return {"ffn_hidden_size": self.width} | ({"shared_width": self.shared_width} if self.shared_width else {})

    def matrices(self, hidden: int) -> tuple[Matrix, ...]:
        """Up, gate and down; router; the shared expert."""
        up = 1 + self.gated
        copies = self.num_experts, self.experts_per_token
        rows = self.latent_size or hidden
        found = [
            Matrix(rows, up * self.width, self.bias, *copies, parts=up),
            Matrix(self.width, rows, self.bias, *copies),
        ]
        if self.latent_size:
            found += [Matrix(hidden, rows, self.bias, split=False), Matrix(rows, hidden, self.bias, split=False)]
        if self.num_experts > 1:
            found.append(Matrix(hidden, self.num_experts, self.router_bias, split=False, router=True))
        if self.shared_width:
            found.append(Matrix(hidden, up * self.shared_width, self.bias, parts=up))
            found.append(Matrix(self.shared_width, hidden, self.bias))
        if self.shared_gate:
            found.append(Matrix(hidden, 1, split=False, router=True))
        return tuple(found)
