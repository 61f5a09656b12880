"""Counts the forward FLOPs of a model, module by module, on torch's meta device.

The meta device holds shapes and no values. So data decides nothing there: a mask hides no pair, and every entry of a
selection counts.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

_OF_WEIGHTS = ("mm", "addmm", "convolution")
_NO_WORK = re.compile(r"rotary|rope", re.IGNORECASE)
"""Modules that compute the rotation's angles by a product."""


@dataclass(frozen=True)
class Work:
    """Forward FLOPs of a document of `n` tokens: `pair * n**2 + token * n + rest`."""

    pair: float = 0
    token: int = 0
    rest: int = 0

    def __add__(self, other: Work) -> Work:
        return Work(self.pair + other.pair, self.token + other.token, self.rest + other.rest)

    def __sub__(self, other: Work) -> Work:
        return Work(self.pair - other.pair, self.token - other.token, self.rest - other.rest)


def _fit(flops: Sequence[int], unit: int, operation: str) -> Work:
    """The polynomial through the FLOPs of documents of one, two and three units."""
    one, two, three = flops
    if operation == "convolution":  # its padding, which is dropped, is no token's work
        return Work(0, (two - one) // unit)
    pair = (three - 2 * two + one) / (2 * unit**2)
    token = round((two - one) / unit - 3 * unit * pair)
    rest = round(one - pair * unit**2 - token * unit)
    if operation in _OF_WEIGHTS and not pair and rest <= token:  # a row before the document, such as Zaya's
        rest = 0
    return Work(pair, token, rest)


@dataclass
class Forward:
    """Forward FLOPs of every module of a model."""

    root: Any  # the module that ran
    streams: int  # residual streams: numbers of a token that a layer receives, over the width of one
    counted: Mapping[str, Mapping[str, Work]]  # by the path of the module below the root, and by the operation
    paths: dict[int, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.paths = {id(module): path for path, module in self.root.named_modules()}

    def work(self, module: Any, *, of_weights: bool = False) -> Work:
        """What a module computes in all its calls, with the modules inside.

        Args:
            module: a module of the model.
            of_weights: only products of two matrices and convolutions, not what the code computes of activations alone.
        """
        path = self.paths.get(id(module))
        if path is not None and _NO_WORK.search(path.rpartition(".")[2]):
            return Work()
        if (
            path is None or path not in self.counted
        ):  # a list or a wrapper that is not called, or a module that did not run
            inner = (self.work(child, of_weights=of_weights) for child in module.children())
            return sum(inner, Work())
        found = self.counted[path].items()
        total = sum((work for name, work in found if not of_weights or name in _OF_WEIGHTS), Work())
        angles = (child for name, child in module.named_modules() if _NO_WORK.search(name.rpartition(".")[2]))
        return total - sum((self._of(child, of_weights) for child in angles), Work())

    def _of(self, angles: Any, of_weights: bool) -> Work:
        counted = self.counted.get(self.paths.get(id(angles), "not run"), {})
        return sum((work for name, work in counted.items() if not of_weights or name in _OF_WEIGHTS), Work())

    def own(self, module: Any, *, of_weights: bool = False) -> Work:
        """What a module computes, without the modules inside."""
        inner = (self.work(child, of_weights=of_weights) for child in module.children())
        return self.work(module, of_weights=of_weights) - sum(inner, Work())


class _Masks(dict[str, Any]):
    """Gives one mask for every kind of layer."""

    def __init__(self, mask: Any) -> None:
        super().__init__()
        self._mask = mask

    def __contains__(self, kind: object) -> bool:
        return True

    def __getitem__(self, kind: str) -> Any:
        return self._mask

    def get(self, kind: str, default: Any = None) -> Any:
        """The mask."""
        return self._mask


def run(model: Any, inner: Any, layer: Any, *, hidden: int, unit: int) -> Forward | None:
    """Runs three documents through a model, or through the module that holds its layers if it cannot run.

    Args:
        model: the model, on the meta device.
        inner: the module that holds its layers.
        layer: a layer, whose input has the residual streams.
        hidden: width of one residual stream.
        unit: the documents have one, two and three times as many tokens: a multiple of blocks of keys.

    Returns:
        None: neither runs without data.
    """
    widths: list[int] = []

    def note(module: Any, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        rows = given[0] if given else named.get("hidden_states")
        if rows is not None:
            widths.append(rows.numel() // hidden)

    handle = layer.register_forward_pre_hook(note, with_kwargs=True)
    try:
        for root in (model, inner):
            for way, given in enumerate(_ways(root is model, hidden, unit)):
                first = _table(root, given)
                if first is None:
                    continue
                further = [_table(root, _ways(root is model, hidden, times * unit)[way]) for times in (2, 3)]
                if None in further:
                    continue
                streams = widths[-1] // (3 * unit) if widths else 1
                return Forward(root, max(1, streams), _by_module(root, [first, *further], unit))
    finally:
        handle.remove()
    return None


def _ways(whole: bool, hidden: int, tokens: int) -> list[dict[str, Any]]:
    """Arguments of a forward of one document: models differ in the masks and positions that they take."""
    import torch

    with torch.device("meta"):
        text = {"input_ids": torch.zeros((1, tokens), dtype=torch.long)}
        rows = {"inputs_embeds": torch.zeros((1, tokens, hidden))}
        pairs = torch.ones((1, 1, tokens, tokens), dtype=torch.bool)
        each = torch.ones((1, tokens), dtype=torch.long)
        positions = {"position_ids": torch.zeros((3, 1, tokens), dtype=torch.long)}
    masks: list[dict[str, Any]] = [{"attention_mask": mask} for mask in (pairs, _Masks(pairs), each, None)]
    given = text if whole else rows
    lengths = {"attention_mask": each, "lengths": torch.tensor([tokens])}  # XLM reads their values
    return [given | mask for mask in masks] + [given | masks[0] | positions, given | lengths]


def _table(root: Any, given: dict[str, Any]) -> dict[str, dict[str, int]] | None:
    """FLOPs by module and operation; None: the model cannot run with these arguments."""
    import torch
    import torch.fx.experimental._config as meta
    from torch.utils.flop_counter import FlopCounterMode

    try:
        # There are no values to select by, so every entry counts as selected.
        every = meta.patch(meta_nonzero_assume_all_nonzero=True)  # type: ignore[attr-defined]
        with every, torch.no_grad(), FlopCounterMode(display=False) as counter:
            root(**given, use_cache=False)
    except Exception:  # without data, a model's code may raise anything
        return None
    return {
        path: {str(operation).rpartition(".")[2]: flops for operation, flops in found.items()}
        for path, found in counter.get_flop_counts().items()
    }


def _by_module(root: Any, tables: Sequence[Any], unit: int) -> dict[str, dict[str, Work]]:
    top = type(root).__name__
    paths: set[str] = {path for table in tables for path in table}
    return {
        path.removeprefix(top).removeprefix("."): {
            operation: _fit([table.get(path, {}).get(operation, 0) for table in tables], unit, operation)
            for operation in {name for table in tables for name in table.get(path, {})}
        }
        for path in paths
        if path == top or path.startswith(f"{top}.")
    }
