"""Makes options of dataclasses, which cyclopts reads: each field is an option with its name, type, default and help."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeVar, get_type_hints

from cyclopts import Parameter, Token

from wlb_tools.command.errors import CliError, option

if TYPE_CHECKING:
    from typing_extensions import dataclass_transform
else:

    def dataclass_transform(**_: object) -> Callable[[T], T]:
        """A stand-in for `typing.dataclass_transform` of Python 3.11, only for type checkers."""
        return lambda decorator: decorator


T = TypeVar("T", bound=type[Any])

Settings = dict[str, str | int | float | None]

PANELS = {"batches": "Global batches", "waiting": "Waiting", "methods": "Methods"}
"""Panels of the help to which several classes add options."""

BATCHES, WAITING = Parameter(group=PANELS["batches"]), Parameter(group=PANELS["waiting"])

CLUSTER, COST, DOCUMENTS, OUTPUT, GLOBAL_BATCHES, HELD = (
    Parameter(name="*", group=panel)
    for panel in ("Cluster", "Cost", "Documents", "Output", PANELS["batches"], PANELS["waiting"])
)
"""Panels of whole classes of options, each with its own name, in the signature of a command."""

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

    given: frozenset[str]
    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]

    def __new__(cls, **given: Any) -> Any:
        """Notes which fields were given."""
        made = super().__new__(cls)
        object.__setattr__(made, "given", frozenset(given))
        return made


@dataclass_transform(frozen_default=True, kw_only_default=True)
def options(cls: T) -> T:
    """Makes a class a frozen dataclass whose fields are options, each with its own name."""
    dataclasses.dataclass(frozen=True, kw_only=True)(cls)  # in place
    # Inherited fields have annotations as text, which only the module of their class can read.
    cls.__init__.__annotations__ = get_type_hints(cls, include_extras=True)
    return cls


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
                simple = value is None or isinstance(value, bool | int | float)
                found[name] = value if simple else joined(value) if isinstance(value, tuple) else str(value)
    return found


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
