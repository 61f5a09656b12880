"""Stand-ins for kernels that run along a row: causal_conv1d, mamba_ssm and flash-linear-attention's, on the CPU.

`install` puts modules of these names where Python finds them, before transformers looks for them: call it first in a
process of its own. The functions have the signatures of the real ones, and run transformers' own reference code for one
document after the other. So they show what a model hands over to its kernels; the kernels themselves they do not show.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from itertools import pairwise
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def install() -> None:
    """Makes the modules importable.

    Raises:
        RuntimeError: a model of transformers that looks for them is imported already, or a real one is.
    """
    late = [name for name in sys.modules if name.startswith("transformers.models.") and ".modeling_" in name]
    late += [name for name in FUNCTIONS if name.partition(".")[0] in sys.modules]
    if late:
        raise RuntimeError(f"{late[0]} is imported already: install stand-ins first, in a process of its own")
    for path, functions in FUNCTIONS.items():
        parts = path.split(".")
        for depth in range(1, len(parts) + 1):
            name = ".".join(parts[:depth])
            if name not in sys.modules:
                sys.modules[name] = ModuleType(name)
                if depth > 1:
                    setattr(sys.modules[".".join(parts[: depth - 1])], parts[depth - 1], sys.modules[name])
        for function in functions:
            setattr(sys.modules[path], function.__name__, function)


def begins_of(seq_idx: Tensor) -> list[int]:
    """Begins of the documents of a row, and its end, from the number of each token's document: int32 [1, tokens]."""
    assert seq_idx.dtype == torch.int32
    assert seq_idx.shape[0] == 1
    changes = (seq_idx[0].diff() != 0).nonzero().flatten() + 1
    return [0, *changes.tolist(), seq_idx.shape[1]]


def one_by_one(call: Callable[..., Any], begins: list[int] | None, dim: int, *along: Tensor) -> Any:
    """The results of a call for each document, joined along the tokens."""
    if begins is None:
        return call(*along)
    pairs = [(begin, end) for begin, end in pairwise(begins) if end > begin]
    return torch.cat([call(*(each.narrow(dim, a, b - a) for each in along)) for a, b in pairs], dim)


def reference(model: str, function: str) -> Callable[..., Any]:
    """The code of transformers for a kernel, which knows no documents."""
    wrapped = getattr(import_module(f"transformers.models.{model}.modeling_{model}"), function)
    found: Callable[..., Any] = wrapped.__wrapped__
    return found


# --- causal_conv1d ----------------------------------------------------------------------------------------------------


def causal_conv1d_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    seq_idx: Tensor | None = None,
    initial_states: Tensor | None = None,
    return_final_states: bool = False,
    final_states_out: Tensor | None = None,
    activation: str | None = None,
) -> Any:
    convolve = reference("bamba", "causal_conv1d_fn")
    begins = None if seq_idx is None else begins_of(seq_idx)
    return one_by_one(lambda part: convolve(part, weight, bias, activation=activation), begins, 2, x)


def causal_conv1d_update(*args: Any, **kwargs: Any) -> Any:
    raise NotImplementedError("only generation calls it")


# --- mamba_ssm --------------------------------------------------------------------------------------------------------


def mamba_chunk_scan_combined(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    seq_idx: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
    return_varlen_states: bool = False,
) -> Any:
    assert cu_seqlens is None
    scan = reference("bamba", "mamba2_chunk_scan")
    more: dict[str, Any] = {"D": D, "dt_bias": dt_bias, "dt_softplus": dt_softplus, "dt_limit": dt_limit}

    def call(x: Tensor, dt: Tensor, B: Tensor, C: Tensor) -> Any:
        return scan(x, dt, A, B, C, chunk_size, **more)

    out = one_by_one(call, None if seq_idx is None else begins_of(seq_idx), 1, x, dt, B, C).to(x.dtype)
    return out if z is None else out * F.silu(z)


def mamba_split_conv1d_scan_combined(
    zxbcdt: Tensor,
    conv1d_weight: Tensor,
    conv1d_bias: Tensor | None,
    dt_bias: Tensor,
    A: Tensor,
    D: Tensor,
    chunk_size: int,
    initial_states: Tensor | None = None,
    seq_idx: Tensor | None = None,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
    activation: str = "silu",
    rmsnorm_weight: Tensor | None = None,
    rmsnorm_eps: float = 1e-6,
    outproj_weight: Tensor | None = None,
    outproj_bias: Tensor | None = None,
    headdim: int | None = None,
    ngroups: int = 1,
    norm_before_gate: bool = True,
) -> Tensor:
    assert headdim is not None
    assert not norm_before_gate
    heads = A.shape[0]
    inner = heads * headdim
    states = (zxbcdt.shape[-1] - 2 * inner - heads) // (2 * ngroups)
    z, xbc, dt = zxbcdt.tensor_split([inner, 2 * inner + 2 * ngroups * states], -1)
    xbc = causal_conv1d_fn(xbc.transpose(1, 2), conv1d_weight, conv1d_bias, seq_idx, activation=activation)
    x, b, c = xbc.transpose(1, 2).split([inner, ngroups * states, ngroups * states], -1)
    x, b, c = x.unflatten(-1, (heads, headdim)), b.unflatten(-1, (ngroups, -1)), c.unflatten(-1, (ngroups, -1))
    scanned = mamba_chunk_scan_combined(
        x, dt, A, b, c, chunk_size, D, None, dt_bias, None, seq_idx, None, True, dt_limit
    )
    out = scanned.flatten(-2) * F.silu(z.float())
    if rmsnorm_weight is not None:
        grouped = out.float().unflatten(-1, (ngroups, -1))
        grouped = grouped * torch.rsqrt(grouped.square().mean(-1, keepdim=True) + rmsnorm_eps)
        out = grouped.flatten(-2) * rmsnorm_weight
    out = out.to(zxbcdt.dtype)
    return out if outproj_weight is None else F.linear(out, outproj_weight, outproj_bias)


def selective_scan_fn(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
) -> Any:
    scan = reference("zamba", "mamba_selective_scan")
    return scan(u, delta, A, B, C, D, z, delta_bias, delta_softplus, return_last_state)


def mamba_inner_fn(*args: Any, **kwargs: Any) -> Any:
    return None  # then layers run their parts one after the other


def selective_state_update(*args: Any, **kwargs: Any) -> Any:
    raise NotImplementedError("only generation calls it")


# --- flash-linear-attention -------------------------------------------------------------------------------------------


def delta_rule(name: str, model: str, function: str) -> Callable[..., Any]:
    """A kernel of this name, which runs a function of transformers on each document."""

    def kernel(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        scale: float | None = None,
        initial_state: Tensor | None = None,
        output_final_state: bool = False,
        use_qk_l2norm_in_kernel: bool = False,
        cu_seqlens: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        rule = reference(model, function)
        return by_lengths(rule, cu_seqlens, q, k, v, g, beta, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel)

    kernel.__name__ = kernel.__qualname__ = name
    return kernel


chunk_gated_delta_rule = delta_rule("chunk_gated_delta_rule", "qwen3_next", "torch_chunk_gated_delta_rule")
chunk_kda = delta_rule("chunk_kda", "kimi_linear", "chunk_kimi_delta_attention")


def by_lengths(rule: Callable[..., Any], cu_seqlens: Tensor | None, *along: Tensor, **options: Any) -> Any:
    begins = None if cu_seqlens is None else cu_seqlens.tolist()

    def call(*parts: Tensor) -> Tensor:
        out: Tensor = rule(*parts, chunk_size=16, **options)[0]
        return out

    return one_by_one(call, begins, 1, *along), None


def fused_recurrent_gated_delta_rule(*args: Any, **kwargs: Any) -> Any:
    raise NotImplementedError("only generation calls it")


def fused_recurrent_kda(*args: Any, **kwargs: Any) -> Any:
    raise NotImplementedError("only generation calls it")


FUNCTIONS: dict[str, list[Callable[..., Any]]] = {
    "causal_conv1d": [causal_conv1d_fn, causal_conv1d_update],
    "mamba_ssm.ops.triton.ssd_combined": [mamba_chunk_scan_combined, mamba_split_conv1d_scan_combined],
    "mamba_ssm.ops.triton.selective_state_update": [selective_state_update],
    "mamba_ssm.ops.selective_scan_interface": [selective_scan_fn, mamba_inner_fn],
    "fla.ops.gated_delta_rule": [chunk_gated_delta_rule, fused_recurrent_gated_delta_rule],
    "fla.ops.kda": [chunk_kda, fused_recurrent_kda],
}
