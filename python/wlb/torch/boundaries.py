"""Finds what tells the layers of a model where the documents of a row begin, by reading the source of the layers.

Convolutions and recurrent states run along a row. They stop where a document begins if their kernels are told, by one
of two arguments: `seq_idx`, int32 [1, tokens], the number of each token's document; or `cu_seqlens`, int32
[documents + 1]. The kernels are in packages of their own, without which transformers runs code that knows no documents.
Which argument a layer takes, and whether it arrives there, stands in the source of the layer and of what calls it.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import FunctionType
from typing import Any, Final, TypeGuard
from weakref import WeakKeyDictionary

from torch import nn

_TOLD: Final = ("seq_idx", "cu_seqlens")  # how kernels are told where documents begin; the first one is preferred
_READ: Final = frozenset({*_TOLD, "cu_seq_lens_q", "position_ids", "position_indices"})  # what layers make these from
_STATES: Final = frozenset({"get_recurrent_state", "update_recurrent_state", "get_linear_cache", "set_linear_cache"})
_WINDOWS: Final = frozenset({"get_conv_state", "update_conv_state"})  # methods of transformers' caches
_WRAPPED: Final = frozenset({"implementation", "torch_function", "package", "func_name"})  # in transformers' decorator
_ONE_TOKEN: Final = ("update", "recurrent")  # parts of names of kernels that only generation calls
_DISTRIBUTIONS: Final = {"fla": "flash-linear-attention"}  # names in the package index, where they are others
_COMPILED: Final = frozenset({"causal-conv1d", "mamba-ssm"})  # against the torch that is installed


@dataclass(frozen=True)
class Kernel:
    """A kernel that runs along a row, as one layer calls it.

    Attributes:
        name: its function.
        package: its name in the package index.
        takes: the arguments by which the installed function can be told where documents begin; None if it is missing.
        given: those that the layer's call names.
        passed: whether the call hands on all further arguments of the row.
    """

    name: str
    package: str
    takes: frozenset[str] | None
    given: frozenset[str]
    passed: bool

    @property
    def is_told(self) -> bool:
        """Whether something tells it where documents begin, if that arrives at the layer."""
        if self.takes is None:
            return self.passed or bool(self.given)
        return bool(self.takes if self.passed else self.takes & self.given)

    @property
    def needs(self) -> frozenset[str]:
        """The argument of a row that it gets under its own name."""
        if not self.passed or not self.takes or self.takes & self.given:
            return frozenset()
        return frozenset({next(name for name in _TOLD if name in self.takes)})


@dataclass(frozen=True)
class RowLayer:
    """A class of layers in which a token depends on earlier ones through a convolution or a state.

    Attributes:
        name: the name of the class.
        kernels: what its forward pass calls.
        reads: arguments of a row from which it finds documents by itself.
        has_state: whether it carries a state, not only the last few tokens.
    """

    name: str
    kernels: tuple[Kernel, ...]
    reads: frozenset[str]
    has_state: bool

    @property
    def needs(self) -> frozenset[str]:
        """Arguments of a row without which it would not know documents."""
        return self.reads.union(*(kernel.needs for kernel in self.kernels))

    @property
    def missing(self) -> frozenset[str]:
        """Packages without which it cannot keep documents apart."""
        return frozenset(kernel.package for kernel in self.kernels if kernel.takes is None)

    @property
    def untold(self) -> str:
        """Why it cannot know where documents begin; empty if it can."""
        for kernel in self.kernels:
            if not kernel.is_told:
                return f"whose {kernel.name} ({kernel.package}) is not told where documents begin"
        return "" if self.kernels or self.reads else "which is not told where documents begin"


@dataclass(frozen=True)
class _Source:
    """What stands in the source of a class."""

    layer: RowLayer | None
    kept_back: frozenset[str]  # attributes that it calls without handing on arguments of the row
    unplaced: bool  # whether it makes masks of attention without positions


_NOTHING: Final = _Source(None, frozenset(), False)
_sources: WeakKeyDictionary[type, _Source] = WeakKeyDictionary()
_by_lengths: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()  # whether a model takes `cu_seqlens`


def row_layer(kind: type[nn.Module]) -> RowLayer | None:
    """What is known of a class of layers; None if it has neither a convolution nor a state along the row.

    Complexity:
        O(its source), once for each class.
    """
    return _source(kind).layer


def row_layers(model: nn.Module) -> list[RowLayer]:
    """Classes of layers of a model that look along the row, by name.

    Complexity:
        O(modules).
    """
    found = {layer for module in model.modules() if (layer := row_layer(type(module)))}
    return sorted(found, key=lambda layer: layer.name)


def against_rows(model: nn.Module) -> str:
    """The reason why layers of a model cannot keep the documents of a row apart, with the way out; empty if none.

    Complexity:
        O(modules).
    """
    kept_back = dict(_kept_back(model))
    for module in model.modules():
        layer = row_layer(type(module))
        if layer is None:
            continue
        wrong = layer.untold
        if not wrong and id(module) in kept_back:
            wrong = f"but {kept_back[id(module)]} does not hand on what tells it where documents begin"
        if wrong:
            return (
                f"has {layer.name}, {wrong}: documents would see each other in a row. Nothing keeps them apart in this "
                "model; train it without packing, or take one whose layers all take seq_idx or cu_seqlens"
            )
    missing = {package: layer.name for layer in row_layers(model) for package in layer.missing}
    if missing and not any(getattr(module, "_use_kernels", False) for module in model.modules()):
        names = " ".join(sorted(missing))
        built = " --no-build-isolation" if _COMPILED & missing.keys() else ""
        return (
            f"has {', '.join(sorted(set(missing.values())))}, which keeps the documents of a row apart only by kernels "
            f"that are not installed: pip install {names}{built}"
        )
    return ""


def told(model: nn.Module, row: Mapping[str, Any]) -> dict[str, Any]:
    """A row of `PackedBatch.as_hf`, and `cu_seqlens` if layers of the model take documents' begins by that name.

    Other models must not get it: some give their kernels `cu_seqlens` by themselves, and images have their own.

    Complexity:
        O(modules), once for each model.
    """
    if model not in _by_lengths:
        _by_lengths[model] = any("cu_seqlens" in layer.needs for layer in row_layers(model))
    wanted = _by_lengths[model] and "cu_seq_lens_q" in row
    return dict(row) | ({"cu_seqlens": row["cu_seq_lens_q"]} if wanted else {})


def unplaced_masks(model: nn.Module, *, flash: bool = False) -> list[str]:
    """Classes of a model that make masks of attention without position ids, so that these do not know documents.

    Args:
        model: with its configuration.
        flash: whether to name those that run flash attention too, which needs no mask: it is told `cu_seq_lens_q`.

    Complexity:
        O(modules).
    """
    found = set()
    for module in model.modules():
        attention = str(getattr(getattr(module, "config", None), "_attn_implementation", ""))
        if _source(type(module)).unplaced and (flash or "flash" not in attention):
            found.add(type(module).__name__)
    return sorted(found)


def _kept_back(model: nn.Module) -> Iterator[tuple[int, str]]:
    """Layers, by identity, at which arguments of the row do not arrive, and the class that does not hand them on."""
    for module in model.modules():
        names = _source(type(module)).kept_back
        for name, child in module.named_children() if names else ():
            if name in names and _takes(child):
                yield from ((id(layer), type(module).__name__) for layer in child.modules())


def _takes(module: nn.Module) -> bool:
    """Whether a forward pass takes arguments of the row, so that a call can leave them out."""
    parameters = inspect.signature(type(module).forward).parameters.values()
    return any(each.kind is each.VAR_KEYWORD or each.name in _READ for each in parameters)


def _source(kind: type[nn.Module]) -> _Source:
    if kind not in _sources:
        _sources[kind] = _read(kind)
    return _sources[kind]


def _read(kind: type) -> _Source:
    kernels: set[Kernel] = set()
    names: set[str] = set()
    reads: set[str] = set()
    calls: dict[str, bool] = {}  # of children: whether arguments of the row are handed on
    unplaced = False
    for function, tree in _functions(kind):
        names.update(function.__code__.co_names)
        reads |= _arguments_read(tree)
        makes_masks, placed = False, False
        for node in ast.walk(tree):
            if isinstance(node, ast.Dict):
                placed |= any(isinstance(key, ast.Constant) and key.value == "position_ids" for key in node.keys)
            if not isinstance(node, ast.Call):
                continue
            words = {word.arg for word in node.keywords if word.arg} | {
                argument.id for argument in node.args if isinstance(argument, ast.Name)
            }
            passed = any(word.arg is None for word in node.keywords)
            if _is_own(node.func):
                child = node.func.attr
                calls[child] = calls.get(child, False) or passed or bool(words & _READ)
            if isinstance(node.func, ast.Name):
                if node.func.id.startswith("create_") and node.func.id.endswith("causal_mask"):
                    makes_masks, placed = True, placed or "position_ids" in words
                found = _kernel(function.__globals__.get(node.func.id))
                if found is not None and not any(part in found[0] for part in _ONE_TOKEN):
                    name, package, takes = found
                    package = _DISTRIBUTIONS.get(package, package.replace("_", "-"))
                    kernels.add(Kernel(name, package, takes, frozenset(words & set(_TOLD)), passed))
        unplaced |= makes_masks and not placed
    layer = None
    if kernels or names & (_STATES | _WINDOWS):
        ordered = tuple(sorted(kernels, key=lambda kernel: (kernel.name, kernel.passed)))
        has_state = bool(names & _STATES) or any("conv1d_fn" not in kernel.name for kernel in ordered)
        layer = RowLayer(kind.__name__, ordered, frozenset(reads), has_state)
    return _Source(layer, frozenset(name for name, handed in calls.items() if not handed), unplaced)


def _functions(kind: type) -> Iterator[tuple[FunctionType, ast.AST]]:
    """The forward pass of a class of modules, and the methods that it calls, with their sources."""
    waiting, seen = ["forward"], {"forward"}
    while waiting:
        function = inspect.unwrap(getattr(kind, waiting.pop(), None) or _nothing)
        if not isinstance(function, FunctionType) or function.__module__.partition(".")[0] == "torch":
            continue
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
        except (OSError, SyntaxError, TypeError):
            continue  # without its source nothing is known of it
        yield function, tree
        called = {node.func.attr for node in ast.walk(tree) if isinstance(node, ast.Call) and _is_own(node.func)}
        waiting += sorted(called - seen)
        seen |= called


def _nothing() -> None:
    """Stands for a method that a class does not have."""


def _is_own(node: ast.expr) -> TypeGuard[ast.Attribute]:
    """Whether it is an attribute of `self`."""
    return isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"


def _arguments_read(tree: ast.AST) -> set[str]:
    """Arguments of a row that a function takes by name, as a parameter or out of its further arguments."""
    found: set[Any] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.arg):
            found.add(node.arg)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in ("get", "pop"):
            found |= {each.value for each in node.args[:1] if isinstance(each, ast.Constant)}
        if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
            found.add(node.slice.value)
    return found & _READ


def _kernel(value: Any) -> tuple[str, str, frozenset[str] | None] | None:
    """Name, package and arguments of a function that transformers exchanges for a kernel; None for other values.

    With the package `kernels` the function is inside of a module.
    """
    function = type(value).forward if isinstance(value, nn.Module) else value
    for _ in range(4):
        if not isinstance(function, FunctionType):
            return None
        cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
        inside = {name: cell.cell_contents for name, cell in cells.items()}
        if inside.keys() >= _WRAPPED:
            installed = inside["implementation"] is not inside["torch_function"]
            takes = frozenset(inspect.signature(inside["implementation"]).parameters) & frozenset(_TOLD)
            return inside["func_name"], inside["package"], takes if installed else None
        function = next((each for each in inside.values() if isinstance(each, FunctionType)), None)
    return None
