"""Parameters of a built model's modules as matrices, with the number of times that a document's token meets each."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from wlb.models.blocks import Matrix
from wlb.models.forward import Forward

_EXPERT = re.compile(r"^((?:.*\.)?(?:\w*_)?experts?)\.\d+(\..*)?$")


@dataclass
class Weight:
    """Parameters that are counted together: a matrix with its bias and copies, or one that is no matrix."""

    name: str
    count: int  # number of parameters, with the bias and all copies
    ids: set[int]  # `id` of each parameter
    matrix: Matrix | None = None
    uncounted: int = (
        0  # forward FLOPs of a token that the run counts and the model does not need, such as idle experts'
    )
    channels: int = 0  # of a convolution, which is what `count` is of

    @property
    def other(self) -> int:
        """Number of parameters that are not in the matrix."""
        return self.count - (self.matrix.parameters(self.matrix.copies) if self.matrix else 0)


def matrices(weights: Iterable[Weight]) -> tuple[Matrix, ...]:
    """The matrices among the weights."""
    return tuple(each.matrix for each in weights if each.matrix is not None)


def vectors(weights: Sequence[Weight]) -> int:
    """Number of parameters that are in no matrix."""
    return sum(each.other for each in weights)


def flops(found: Iterable[Matrix]) -> int:
    """Forward FLOPs of a token in these matrices."""
    return sum(2 * m.used * m.rows * m.columns for m in found)


def weights(
    modules: Iterable[tuple[str, Any]], forward: Forward, *, hidden: int, visited: int, idle: bool
) -> list[Weight]:
    """Counts every parameter once. A bias joins its matrix, and experts that are separate modules join one matrix.

    Args:
        modules: path and module; their parameters are counted, with those of the modules inside.
        forward: what each module computes.
        hidden: width of a row of the residual stream.
        visited: experts that a token visits, where the run enters all of them.
        idle: whether the run passes over experts.
    """
    found: list[Weight] = []
    seen: set[int] = set()
    experts: dict[tuple[str, int, int, int], Weight] = {}
    for path, module in modules:
        for name, inner in module.named_modules(prefix=path):
            own = {each: value for each, value in inner.named_parameters(recurse=False) if id(value) not in seen}
            seen.update(id(value) for value in own.values())
            for each in _of_module(name, inner, own, forward, hidden):
                expert = _EXPERT.match(each.name)
                if expert is None or each.matrix is None or each.matrix.copies > 1 or "shared" in expert.group(1):
                    found.append(each)
                    continue
                matrix = each.matrix
                key = (f"{expert.group(1)}{expert.group(2) or ''}", matrix.rows, matrix.columns, each.other)
                first = experts.setdefault(key, each)
                if first is each:
                    found.append(each)
                    continue
                assert first.matrix is not None
                first.matrix = dataclasses.replace(
                    first.matrix, copies=first.matrix.copies + 1, used=first.matrix.used + matrix.used
                )
                first.count += each.count
                first.ids |= each.ids
    for each in found:
        if each.matrix is not None and each.matrix.copies > 1:
            _visit(each, each.matrix, visited, idle=idle)
    return found


def _visit(weight: Weight, matrix: Matrix, visited: int, *, idle: bool) -> None:
    """A token visits as many experts as the run says, unless it enters all of them, or was made to enter none."""
    if not (matrix.used >= matrix.copies or (idle and not matrix.used)):
        return
    visits = min(visited, matrix.copies)
    weight.uncounted = 2 * (matrix.used - visits) * matrix.rows * matrix.columns
    weight.matrix = dataclasses.replace(matrix, used=visits)


def _of_module(name: str, inner: Any, own: dict[str, Any], forward: Forward, hidden: int) -> Iterator[Weight]:
    """The module's own parameters, without those of the modules inside."""
    from torch import nn

    rest = dict(own)
    weight = own.get("weight")
    if weight is not None and isinstance(inner, (nn.Conv1d, nn.Conv2d)):
        del rest["weight"]
        yield Weight(name, weight.numel(), {id(weight)}, channels=weight.shape[0])
    shaped = {each: value for each, value in rest.items() if isinstance(inner, nn.Linear) or _is_matrix(each, value)}
    shaped = {each: value for each, value in shaped.items() if value.dim() > 1}
    transposed = type(inner).__name__ == "Conv1D" or getattr(inner, "is_transposed", False)
    counted = 0 if isinstance(inner, nn.Embedding) else forward.own(inner).token
    stacked = "xpert" in f"{type(inner).__name__}{name}"
    sizes = {each: _sizes(value, hidden, stacked=stacked, transposed=transposed) for each, value in shaped.items()}
    for each, (copies, rows, columns) in sizes.items():
        before, after = (columns, rows) if re.search(r"down|w2|out", each) else (rows, columns)
        if copies > 1 and after == hidden != before:  # experts of either orientation
            sizes[each] = copies, columns, rows
    once = sum(2 * rows * columns for _, rows, columns in sizes.values())
    used = counted // once if once else 0
    for each, (copies, rows, columns) in sizes.items():
        value = shaped[each]
        full = f"{name}.{each}" if name and each != "weight" else name or each
        bias = rest.get("bias" if each == "weight" else f"{each}_bias")
        with_bias = bias is not None and bias.numel() == copies * columns
        split = not re.search(r"router|(^|\.)gate$", name)
        count, ids = value.numel(), {id(value)}
        if with_bias and bias is not None:
            count, ids = count + bias.numel(), ids | {id(bias)}
        yield Weight(full, count, ids, Matrix(rows, columns, with_bias, copies, used, split, router=not split))
        rest = {other: kept for other, kept in rest.items() if id(kept) not in ids}
    for each, value in rest.items():
        yield Weight(f"{name}.{each}" if name else each, value.numel(), {id(value)})


def _is_matrix(name: str, value: Any) -> bool:
    """Whether rows are multiplied by it. A table of a state's decays has two dimensions as well."""
    if value.dim() not in (2, 3) or 1 in value.shape[-2:]:
        return False
    named = name in ("weight", "fn") or name.endswith(("_proj", "_weight", ".weight", "_gate"))
    return value.dim() == 3 or named


def _sizes(value: Any, hidden: int, *, stacked: bool, transposed: bool) -> tuple[int, int, int]:
    """Copies, rows and columns. Three dimensions are of experts, or of heads, each with its part of a row."""
    if value.dim() == 3 and not stacked:
        first, second, third = value.shape
        if third == hidden != first:
            return 1, first * second, third
        return (1, first, second * third) if first == hidden else (1, second, first * third)
    rows, columns = value.shape[-2:] if transposed else reversed(value.shape[-2:])
    return value.shape[0] if value.dim() == 3 else 1, rows, columns
