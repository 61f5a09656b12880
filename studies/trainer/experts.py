"""A dropless mixture of experts over packed documents: `[tokens, hidden]`, its experts on one rank or on several.

A router looks at a token's state, which depends on the token's own document alone, and every expert takes all tokens
that choose it: so what a token is packed with, and on how many ranks, changes neither its experts nor the loss.

Expert parallelism: each of `ep` neighbours among the dp x cp ranks has its share of the experts. An all-to-all brings
every token to its experts, another one brings what they say back. Ranks may have different numbers of tokens, and none:
all of a group take part, in every micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard


class Router(nn.Module):
    """Softmax scores, the `experts_per_token` highest of them, scaled to a sum of 1.

    The choice, not its weights, adds a bias to the scores, which `ExpertLoad.level` moves after each step (DeepSeek-V3,
    section 2.1.2: balance without an auxiliary loss).
    """

    bias: Tensor

    def __init__(self, hidden_size: int, num_experts: int, experts_per_token: int) -> None:
        super().__init__()
        self.experts_per_token = experts_per_token
        self.weight = nn.Parameter(torch.empty(num_experts, hidden_size))
        self.register_buffer("bias", torch.zeros(num_experts))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Gives weights, float32[tokens, experts_per_token], and experts, int64 of the same shape."""
        scores = F.linear(x.float(), self.weight.float()).softmax(-1)
        chosen = (scores.detach() + self.bias).topk(self.experts_per_token).indices
        weights = scores.gather(1, chosen)
        return weights / weights.sum(-1, keepdim=True), chosen


class Experts(nn.Module):
    """SwiGLU networks, their matrices stacked: [experts, out, in]."""

    def __init__(self, hidden_size: int, ffn_hidden_size: int, num_experts: int) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.empty(num_experts, ffn_hidden_size, hidden_size))
        self.w2 = nn.Parameter(torch.empty(num_experts, hidden_size, ffn_hidden_size))
        self.w3 = nn.Parameter(torch.empty(num_experts, ffn_hidden_size, hidden_size))

    def forward(self, x: Tensor, counts: list[int]) -> Tensor:
        """Float[rows, hidden]: the first `counts[0]` rows go through this rank's first expert, and so on."""
        # `unbind`, since the gradient of w[expert] would be as large as all of w, for each expert.
        matrices = [(w.to_local() if isinstance(w, DTensor) else w).unbind() for w in (self.w1, self.w2, self.w3)]
        parts = zip(x.split(counts), *matrices, strict=True)
        return torch.cat([F.linear(F.silu(F.linear(rows, w1)) * F.linear(rows, w3), w2) for rows, w1, w2, w3 in parts])


class Mixture(nn.Module):
    """Router and experts, in the place of a feed-forward block."""

    def __init__(self, hidden_size: int, ffn_hidden_size: int, num_experts: int, experts_per_token: int) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.router = Router(hidden_size, num_experts, experts_per_token)
        self.experts = Experts(hidden_size, ffn_hidden_size, num_experts)
        self.group: dist.ProcessGroup | None = None  # the ranks among which experts are divided

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.router(x)
        # Visits of a token to an expert, sorted by expert.
        by_expert = chosen.flatten().argsort(stable=True)
        counts = torch.bincount(chosen.flatten(), minlength=self.num_experts)
        visits = x[by_expert // self.router.experts_per_token]
        if self.group is None:
            answers = self.experts(visits, counts.tolist())
        else:
            answers = self._elsewhere(visits, counts, self.group)
        by_token = answers[by_expert.argsort()].unflatten(0, chosen.shape)
        return (by_token * weights.to(x.dtype)[..., None]).sum(1)

    def _elsewhere(self, visits: Tensor, counts: Tensor, group: dist.ProcessGroup) -> Tensor:
        """Every visit to the rank of its expert, and its answer back."""
        theirs = torch.empty_like(counts)
        dist.all_to_all_single(theirs, counts, group=group)
        here = theirs.view(group.size(), -1)  # [who sends, experts of this rank]
        sent = counts.view(group.size(), -1).sum(1).tolist()
        received = here.sum(1).tolist()
        visits = AllToAll.apply(visits, sent, received, group)
        # They come by sender, each sender's by expert; an expert takes those of all senders together.
        expert = torch.arange(here.shape[1], device=visits.device).repeat(group.size())
        by_expert = expert.repeat_interleave(theirs).argsort(stable=True)
        answers = self.experts(visits[by_expert], here.sum(0).tolist())
        result: Tensor = AllToAll.apply(answers[by_expert.argsort()], received, sent, group)
        return result

    def divide(self, mesh: DeviceMesh) -> None:
        """Keeps this rank's share of the experts; `mesh` is the ep dimension."""
        self.group = mesh.get_group()
        for name, whole in list(self.experts.named_parameters()):
            share = whole.detach().chunk(mesh.size())[mesh.get_local_rank()].clone()
            setattr(self.experts, name, nn.Parameter(DTensor.from_local(share, mesh, [Shard(0)])))


class AllToAll(torch.autograd.Function):
    """Rows to each rank of a group, as many as one likes; their gradients go the same way back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.sent, ctx.received, ctx.group = sent, received, group
        result = x.new_empty(sum(received), *x.shape[1:])
        dist.all_to_all_single(result, x.contiguous(), received, sent, group=group)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return AllToAll.apply(gradient, ctx.received, ctx.sent, ctx.group), None, None, None


# --- what goes where -------------------------------------------------------------------------------------------------

_recomputing = False


def contexts_of_checkpoint() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """For `torch.utils.checkpoint.checkpoint(context_fn=)`: what is computed again is not counted again."""
    return nullcontext(), _not_counted()


@contextmanager
def _not_counted() -> Iterator[None]:
    global _recomputing
    _recomputing = True
    try:
        yield
    finally:
        _recomputing = False


@dataclass(frozen=True)
class Load:
    """Of one global batch; a visit is a token at one of its experts. The same on all ranks.

    Attributes:
        visits: int64[layers, experts], over all ranks: it depends on neither layout nor packing, but for
            near-ties that rounding decides, which bfloat16 shows after a few steps.
        tokens: int64[ranks, layers, micro-batches]: of each dp x cp rank, before they are sent.
        arrived: int64[ranks, layers, micro-batches]: visits to experts of that rank.
        ep: ranks among which experts are divided; neighbours.
    """

    visits: Tensor
    tokens: Tensor
    arrived: Tensor
    ep: int

    @property
    def imbalance(self) -> float:
        """Visits to the busiest expert over those to the mean one, of all layers together."""
        return _largest_over_mean(self.visits, 1)

    @property
    def rank_imbalance(self) -> float:
        """The same of the ranks of an ep group: they wait for the busiest in each layer of each micro-batch."""
        return _largest_over_mean(self.arrived.unflatten(0, (-1, self.ep)), 1)

    @property
    def token_imbalance(self) -> float:
        """What of that is there before any routing: tokens of the fullest rank of an ep group over the mean."""
        return _largest_over_mean(self.tokens.unflatten(0, (-1, self.ep)), 1)

    def row(self) -> dict[str, Any]:
        """For the log."""
        return {
            "expert_imbalance": self.imbalance,
            "expert_rank_imbalance": self.rank_imbalance,
            "token_imbalance": self.token_imbalance,
            "expert_visits": self.visits.tolist(),
            "expert_rank_visits": self.arrived.sum((1, 2)).tolist(),
        }


def _largest_over_mean(counts: Tensor, dim: int) -> float:
    total = int(counts.sum())
    return int(counts.amax(dim).sum()) * counts.shape[dim] / total if total else 1.0


class ExpertLoad:
    """Counts visits on this rank's stages from now on.

    Args:
        stages: modules with `layers` by number; those with a `Mixture` as `ffn` are counted.
        num_layers: of the whole model.
        ranks: the dp x cp ranks.
        pipeline: the pp ranks.
        ep: ranks among which experts are divided.
    """

    def __init__(
        self, stages: Iterable[Any], *, num_layers: int, ranks: DeviceMesh, pipeline: DeviceMesh, ep: int
    ) -> None:
        layers = {int(name): block.ffn for stage in stages for name, block in stage.layers.items()}
        self._mixtures: dict[int, Mixture] = {n: ffn for n, ffn in layers.items() if isinstance(ffn, Mixture)}
        self._shape = (num_layers, max((mixture.num_experts for mixture in self._mixtures.values()), default=1))
        self._ranks, self._pipeline, self._ep = ranks, pipeline, ep
        self._chosen: dict[int, list[Tensor]] = {n: [] for n in self._mixtures}
        self._arrived: dict[int, list[int]] = {n: [] for n in self._mixtures}
        for n, mixture in self._mixtures.items():
            mixture.router.register_forward_hook(lambda _, inputs, output, n=n: self._count(self._chosen[n], output[1]))
            mixture.experts.register_forward_hook(
                lambda _, inputs, output, n=n: self._count(self._arrived[n], len(inputs[0]))
            )

    @staticmethod
    def _count(where: list[Any], what: Any) -> None:
        if not _recomputing:
            where.append(what)

    def step(self, num_micro_batches: int, device: torch.device) -> Load:
        """What the micro-batches since the last call did. Collective, of all ranks."""
        (layers, experts), m = self._shape, num_micro_batches
        table = torch.zeros(layers, experts + 2 * m, dtype=torch.int64, device=device)
        for n in self._mixtures:
            chosen = self._chosen[n]
            table[n, :experts] = torch.bincount(torch.cat(chosen).flatten(), minlength=experts)
            table[n, experts : experts + m] = torch.tensor([len(tokens) for tokens in chosen])
            table[n, experts + m :] = torch.tensor(self._arrived[n])
            chosen.clear()
            self._arrived[n].clear()
        dist.all_reduce(table, group=self._pipeline.get_group())
        tables = torch.empty(self._ranks.size() * layers, experts + 2 * m, dtype=torch.int64, device=device)
        dist.all_gather_into_tensor(tables, table, group=self._ranks.get_group())
        visits, tokens, arrived = tables.unflatten(0, (-1, layers)).split([experts, m, m], dim=2)
        return Load(visits.sum(0).cpu(), tokens.cpu(), arrived.cpu(), self._ep)

    def level(self, load: Load, rate: float) -> None:
        """Moves the bias of every expert by `rate`, up where it had fewer visits than the mean, else down.

        Visits are those of the global batch, so that no bias depends on the layout or the packing.
        """
        for n, mixture in self._mixtures.items():
            visits = load.visits[n].double()
            mixture.router.bias += rate * (visits.mean() - visits).sign().to(mixture.router.bias)
