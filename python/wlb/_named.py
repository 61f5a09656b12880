"""Errors of the engine for an option that does not exist: they name the option that was probably meant."""

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NoReturn

# Signatures of methods without an option.
_WITHOUT = (None, "()", "($self)", "($self, /)")


def name_options(parts: Iterable[object]) -> dict[str, Callable[..., Any]]:
    """Makes TypeErrors for unknown options name the nearest option of the function or method.

    Methods are replaced in their classes; constructors call `refuse_unknown`. A call without an error passes through
    one more frame of Python; the options of a function are asked only after an error.

    Args:
        parts: functions and classes of the engine; anything else is left alone.

    Returns:
        The functions by name, to export in place of the engine's.
    """
    functions = {}
    for part in parts:
        if inspect.isbuiltin(part):
            functions[part.__name__] = _named(part)
        elif isinstance(part, type) and not issubclass(part, BaseException):
            for name, member in list(vars(part).items()):
                if isinstance(member, staticmethod):
                    setattr(part, name, staticmethod(_named(member.__func__)))
                elif _has_options(member) and not name.startswith("__"):
                    setattr(part, name, _named(member))
    return functions


def refuse_unknown(function: Callable[..., Any], options: Mapping[str, object]) -> NoReturn:
    """Raises for the first of these options, which a constructor does not have.

    Raises:
        TypeError: it names the nearest option.
    """
    name = next(iter(options))
    message = f"{function.__name__}() got an unexpected keyword argument {name!r}"
    raise TypeError(f"{message}; did you mean {_nearest(name, _options(function))!r}?")


def _has_options(member: object) -> bool:
    return inspect.ismethoddescriptor(member) and getattr(member, "__text_signature__", None) not in _WITHOUT


def _named(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, with the nearest option in its TypeError for one that it does not have."""

    @functools.wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        try:
            return function(*args, **options)
        except TypeError as cause:
            known = _options(function)
            unknown = next((name for name in options if name not in known), None)
            if unknown is None or not known:
                raise
            raise TypeError(f"{cause}; did you mean {_nearest(unknown, known)!r}?") from None

    call.__module__ = "wlb"
    return call


def _options(function: Callable[..., Any]) -> list[str]:
    return [name for name in inspect.signature(function).parameters if name != "self"]


def _nearest(name: str, known: list[str]) -> str:
    from difflib import get_close_matches

    return get_close_matches(name, known, n=1, cutoff=0)[0]
