"""Makes options of dataclasses: every field is an option with its name, type, default and help.

`options(of=...)` takes the fields of a class of the library, so that they are declared only there. `plain` makes an
object of that class from the options, and the class checks its values. cyclopts reads the classes.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
import re
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeVar, get_type_hints

from cyclopts import Parameter, Token
from docstring_parser import parse

from wlb_tools.command.errors import CliError, option

if TYPE_CHECKING:
    from typing_extensions import dataclass_transform
else:

    def dataclass_transform(**_: object) -> Callable[[T], T]:
        """A stand-in for `typing.dataclass_transform` of Python 3.11, only for type checkers."""
        return lambda decorator: decorator


T = TypeVar("T", bound=type[Any])
P = TypeVar("P")

Settings = dict[str, str | int | float | None]

PANELS = {"batches": "Global batches", "waiting": "Waiting", "methods": "Methods"}
"""Panels of the help to which several classes add options."""

BATCHES = Parameter(group=PANELS["batches"])

NotAnOption = Parameter(parse=False)
"""For fields that are no options."""

CommandLine = Annotated[str, NotAnOption]
"""The typed command; commands with a parameter of this type receive it."""

Flag = Parameter(negative="")
"""A switch that has no form to turn it off."""


class Options:
    """Base of classes whose fields are options.

    Attributes:
        given: fields that were given on the command line; the others have their defaults.
    """

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """A field that `options` took from a class of the library."""

    given: frozenset[str]
    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]

    def __new__(cls, **given: Any) -> Any:
        """Notes which fields were given."""
        made = super().__new__(cls)
        object.__setattr__(made, "given", frozenset(given))
        return made


@dataclass_transform(frozen_default=True, kw_only_default=True)
def options(
    group: str, *, of: type[Any] | None = None, without: Sequence[str] = (), **elsewhere: Sequence[str]
) -> Callable[[T], T]:
    """Makes a class a frozen dataclass whose fields are options, each with its own name, in one panel of the help.

    Args:
        group: the panel.
        of: a dataclass of the library whose fields become options, too, with their types, defaults and help, except
            those that the class has or inherits.
        without: fields of `of` that do not become options.
        elsewhere: fields that belong to other panels, by panel.
    """

    def decorate(cls: T) -> T:
        if of is not None:
            _take(cls, of, without)
        dataclasses.dataclass(frozen=True, kw_only=True)(cls)  # in place
        hints = get_type_hints(cls, include_extras=True)
        for panel, names in elsewhere.items():
            for name in names:
                hints[name] = cls.__annotations__[name] = Annotated[hints[name], Parameter(group=PANELS[panel])]
        # Inherited fields have annotations as text, which only the module of their class can read.
        cls.__init__.__annotations__ = hints
        decorated: T = Parameter(name="*", group=group)(cls)
        del decorated.__cyclopts__.parameters[:-1]  # the panels of base classes
        return decorated

    return decorate


def _take(cls: type[Any], of: type[Any], without: Sequence[str]) -> None:
    """Declares the fields of a dataclass in another class that does not have them, with their help.

    Both classes have docstrings with arguments.
    """
    taken = {name for base in cls.__mro__[1:] for name in getattr(base, "__dataclass_fields__", ())} | {*without}
    hints = get_type_hints(of, include_extras=True)
    told, own = ({one.arg_name: one.description for one in parse(each.__doc__ or "").params} for each in (of, cls))
    lines = [inspect.cleandoc(cls.__doc__ or "")]
    for field in dataclasses.fields(of):
        if field.name in taken:
            continue
        if field.name not in cls.__annotations__:
            cls.__annotations__[field.name] = hints[field.name]
            setattr(cls, field.name, field.default)
        if field.name not in own:
            lines.append(f"    {field.name}: {' '.join((told[field.name] or '').split())}")
    cls.__doc__ = "\n".join(lines)


def values_of(given: Options, cls: type[Any]) -> dict[str, Any]:
    """Values of the options that are fields of a library class."""
    ours = {field.name for field in dataclasses.fields(given)}
    return {field.name: getattr(given, field.name) for field in dataclasses.fields(cls) if field.name in ours}


def plain(given: Options, cls: type[P], **changes: Any) -> P:
    """An object of the library's class from the options that are its fields; `changes` override them."""
    return cls(**values_of(given, cls) | changes)


def joined(values: Iterable[object]) -> str:
    """Values as an option takes them, with commas between."""
    return ",".join(f"{value:g}" if isinstance(value, float) else str(value) for value in values)


def settings(*given: Options) -> Settings:
    """Options by name, with underscores, as plain JSON values."""
    found: Settings = {}
    for options_ in given:
        hints = get_type_hints(type(options_), include_extras=True)
        for field in dataclasses.fields(options_):
            value = getattr(options_, field.name)
            if isinstance(value, Options):
                found |= settings(value)
            elif NotAnOption not in getattr(hints[field.name], "__metadata__", ()):
                name = option(field.name).replace("-", "_")
                shown = _shown(hints[field.name])
                value = value if shown is None else float(shown(value))
                simple = value is None or isinstance(value, bool | int | float)
                found[name] = value if simple else joined(value) if isinstance(value, tuple) else str(value)
    return found


def _shown(hint: Any) -> Callable[[Any], str] | None:
    """The function that shows an option whose unit differs from its field's; None if there is none."""
    found = [each.show_default for each in getattr(hint, "__metadata__", ()) if isinstance(each, Parameter)]
    return next((shown for shown in found if callable(shown)), None)


def commas(of_text: Callable[[str], Any], what: str, **more: Any) -> Parameter:
    """An option of several values with commas between; `more` are further arguments of the parameter."""

    def convert(type_: object, tokens: Sequence[Token]) -> tuple[Any, ...]:
        token = tokens[0]
        try:
            return tuple(of_text(part) for part in token.value.split(",") if part.strip())
        except ValueError:
            raise CliError(f"{token.keyword} {token.value}: give {what}") from None

    return Parameter(converter=convert, n_tokens=1, negative="", **more)


Numbers = commas(int, "whole numbers with commas between, such as 49152,98304")
"""Whole numbers with commas between."""

Reals = commas(float, "numbers with commas between, such as 0.4,2.1")
"""Numbers with commas between."""


def tokens_of(text: str) -> int:
    """A number of tokens: 8192, 8k (of 1,024) or 4M (of 1,048,576).

    Raises:
        ValueError: it is no such number.
    """
    unit = {"K": 1 << 10, "M": 1 << 20}.get(text[-1:].upper(), 1)
    return int(text.replace("_", "") if unit == 1 else text[:-1]) * unit


def _tokens(type_: object, tokens: Sequence[Token]) -> int:
    token = tokens[0]
    try:
        found = tokens_of(token.value)
    except ValueError:
        message = "must be a number of tokens, such as 8192, 8k or 4M"
        raise CliError(f"{token.keyword} {token.value}: {message}") from None
    if found < 1:
        raise CliError(f"{token.keyword} {token.value}: must be at least 1")
    return found


Tokens = Parameter(converter=_tokens)
"""A number of tokens, as 8192, 8k or 4M."""


@dataclasses.dataclass(frozen=True)
class GlobalBatch:
    """The size of a global batch, in tokens or in samples of a context window each."""

    count: int
    unit: Literal["tokens", "samples"]

    def __str__(self) -> str:
        """The option's value."""
        return f"{self.count}{self.unit}"


def _global_batch(type_: object, tokens: Sequence[Token]) -> GlobalBatch:
    token = tokens[0]
    found = re.fullmatch(r"(.*?)\s*(tokens|samples|sequences|)", token.value.strip(), re.DOTALL)
    number, unit = found.groups() if found else ("", "")
    try:
        count = tokens_of(number)
    except ValueError:
        count = 0
    if count < 1:
        raise CliError(f"{token.keyword} {token.value}: must be tokens, such as 4M, or samples, such as 256samples")
    return GlobalBatch(count, "samples" if unit in ("samples", "sequences") else "tokens")


GlobalBatchSize = Parameter(converter=_global_batch, n_tokens=1, accepts_keys=False)
"""A size of a global batch, as 4M (tokens), 4194304tokens or 256samples."""


def scaled(option: str, value: float, unit: int) -> int:
    """Converts an option in contexts or GiB to tokens or bytes."""
    if not math.isfinite(value * unit):
        raise CliError(f"{option} {value}: must be a finite number")
    return int(value * unit)
