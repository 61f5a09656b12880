"""Checks of what works on this machine. Each check tries it and reports what it found."""

from __future__ import annotations

import contextlib
import hashlib
import importlib
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

import wlb
import wlb_tools
from wlb.integrations.versions import OLDEST

if TYPE_CHECKING:
    import torch

PLANS: Final = "0618a8ce523c7281241f6690ecb4f3055491ec35fb3240008db233b61966cb32"
"""The result of `digest_of_plans` on every machine with this version of wlb."""

_EXTRAS: Final = ("", "cli", "tokenizers", "torch", "testing")
"""Extras of wlb that users need; the first stands for wlb itself."""

_DOCUMENTS: Final = (1, 700, 33, 1, 260, 5)
"""Lengths of the documents on which attention is tried."""

_ALLOWED: Final = {"float32": 1e-5, "float16": 3e-3, "bfloat16": 2e-2}
"""Largest error, relative to the norm: a few times that of rounding. A mask at a wrong place gives a tenth or more."""


@dataclass(frozen=True)
class Package:
    """A package that wlb uses, or that uses wlb.

    Attributes:
        name: in the package index.
        installed: its version; None: not installed.
        needed: supported versions.
        use: an extra of wlb, a trainer, or wlb itself.
        works: whether a supported version is installed.
    """

    name: str
    installed: str | None
    needed: str
    use: str
    works: bool


@dataclass(frozen=True)
class Attention:
    """A kernel, compared with attention of each document in float64.

    Attributes:
        device: where it ran.
        kernel: what ran.
        dtype: of the inputs.
        forward: the output's error, relative to its norm.
        backward: the largest error of the three gradients, relative to their norms.
        allowed: the largest allowed value of both.
    """

    device: str
    kernel: str
    dtype: str
    forward: float
    backward: float
    allowed: float

    @property
    def right(self) -> bool:
        """Whether both errors are allowed."""
        return self.forward <= self.allowed and self.backward <= self.allowed


def digest_of_plans() -> str:
    """Digest of plans of every kind for fixed documents. Machines of one run must have the same digest.

    Complexity:
        Some milliseconds.
    """
    lengths = 1 + 131_071 // (1 + np.arange(20_000) ** 2 % 499)
    cost = wlb_tools.Hardware.preset("h100").cost_model(wlb.ModelConfig.preset("llama2-7b"))
    limits: dict[str, Any] = {"num_micro_batches": 16, "max_tokens": 196_608, "cost_model": cost}
    packer = wlb.Packer(release="adaptive", max_delay=16, max_document_tokens=131_072, **limits)
    found = hashlib.sha256()
    offsets = wlb.batch_offsets(lengths, tokens_per_batch=16 * 131_072)
    for begin, end in zip(offsets[:8].tolist(), offsets[1:9].tolist(), strict=True):
        batch = lengths[begin:end]
        plan = packer.push(batch)
        refined = wlb.pack(batch, method="refined", **limits)
        groups = wlb.plan_dynamic_cp(batch, world_size=16, num_stages=2, max_tokens_per_rank=196_608, cost_model=cost)
        shard = wlb.shard(plan.micro_batches[0].lengths, cp_size=8)
        for one in (plan, refined, groups, shard):
            found.update(one.digest().encode())
    return found.hexdigest()


def packages() -> Iterator[Package]:
    """Packages of wlb's extras, then the trainers."""
    for text in requires("wlb") or ():
        needed = Requirement(text)
        extras = [extra for extra in _EXTRAS if needed.marker is None or needed.marker.evaluate({"extra": extra})]
        if extras and needed.name != "wlb":
            yield _package(needed.name, needed.specifier, f"wlb[{extras[0]}]" if extras[0] else "wlb")
    for name, oldest in OLDEST.items():
        yield _package(name, SpecifierSet(f">={oldest}"), "a trainer")


def _package(name: str, needed: SpecifierSet, use: str) -> Package:
    try:
        installed = version(name)
    except PackageNotFoundError:
        return Package(name, None, str(needed), use, works=False)
    return Package(name, installed, str(needed), use, works=needed.contains(installed, prereleases=True))


def broken_kernels() -> Iterator[str]:
    """flash-attn packages that are installed but cannot be imported; attention would silently run without them.

    Needs torch.
    """
    from wlb.torch.attention.kernels import FLASH_ATTN_2, FLASH_ATTN_3, FLASH_ATTN_4

    # flash-attn 2 and 4 share a package and either may be installed alone; the parts of 4 that 2 has do not run.
    modules = [FLASH_ATTN_2, FLASH_ATTN_3]
    with contextlib.suppress(PackageNotFoundError):
        modules += [FLASH_ATTN_4] if version("flash-attn-4") else []
    for module in modules:
        if find_spec(module.partition(".")[0]) is None:
            continue
        try:
            importlib.import_module(module)
        except Exception as error:  # an import may fail in any way
            missing = error.name if isinstance(error, ModuleNotFoundError) else None
            if missing is None or not f"{module}.".startswith(f"{missing}."):
                yield f"{module} is installed and cannot be imported: {error}. Build it for the torch that is here."


def attention() -> Iterator[Attention]:
    """Tests every kernel of the first GPU and of the CPU; needs torch."""
    import torch

    from wlb.torch.attention import kernels

    devices = [("cpu", torch.float32)]
    if torch.cuda.is_available():
        devices = [("cuda", torch.bfloat16), ("cuda", torch.float16), ("cuda", torch.float32), *devices]
    for device, dtype in devices:
        q = torch.empty((1, 1, 64), dtype=dtype, device=device)
        tried = set()
        for name in ("auto", "flash_attn", "varlen", "reference"):
            try:
                kernel = kernels.choose(name, q, scale=1.0, alibi_slopes=None, alibi_aligned=True)
            except wlb.WlbError:  # it does not support this device, or is not installed
                continue
            if type(kernel) not in tried:
                tried.add(type(kernel))
                yield _attention(name, type(kernel).__name__, dtype, torch.device(device))


def _attention(name: Any, title: str, dtype: torch.dtype, device: torch.device) -> Attention:
    import torch

    from wlb.torch.attention import context_parallel_attention

    shard = wlb.shard(_DOCUMENTS, cp_size=1)
    order = torch.from_numpy(shard.rank(0).token_indices.copy()).to(device)
    random, tokens = torch.Generator().manual_seed(0), sum(_DOCUMENTS)
    shapes = [(tokens, heads, 64) for heads in (4, 2, 2, 4)]  # queries, keys, values, gradient of the output
    *given, d_out = (torch.randn(shape, generator=random).to(device, dtype) for shape in shapes)

    mine = [x[order].requires_grad_() for x in given]
    out: Any = context_parallel_attention(mine[0], mine[1], mine[2], shard, kernel=name)
    out.backward(d_out[order])
    exact: list[Any] = [x.double().cpu().requires_grad_() for x in given]
    expected: Any = torch.cat(
        [_causal(*documents) for documents in zip(*(x.split(_DOCUMENTS) for x in exact), strict=True)]
    )
    expected.backward(d_out.double().cpu())

    def off(ours: Any, theirs: Any) -> float:
        return float((ours.double().cpu() - theirs[order.cpu()]).norm() / theirs.norm())

    backward = max(off(one.grad, other.grad) for one, other in zip(mine, exact, strict=True))
    kind = str(dtype).removeprefix("torch.")
    return Attention(str(device), title, kind, off(out.detach(), expected.detach()), backward, _ALLOWED[kind])


def _causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Attention of one document, `[tokens, heads, head_dim]`, by torch's own function."""
    from torch.nn.functional import scaled_dot_product_attention

    group = q.shape[1] // k.shape[1]
    q, k, v = q.transpose(0, 1), *(x.transpose(0, 1).repeat_interleave(group, dim=0) for x in (k, v))
    return scaled_dot_product_attention(q, k, v, is_causal=True).transpose(0, 1)
