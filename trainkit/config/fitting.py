"""A check whether a value has the type that a signature asks for."""

from __future__ import annotations

import os
import types
from copy import deepcopy
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

from jsonargparse import ArgumentError, ArgumentParser, Namespace

_UNIONS = (Union, types.UnionType)
_PLAIN = (bool, int, float, str)


def fits(value: Any, hint: Any) -> bool:
    """Whether a value has a type, without any conversion.

    Args:
        value: a plain value, without nodes of a configuration.
        hint: a type. A value fits if its type cannot be checked.

    >>> fits(8, int), fits("8", int), fits("8", int | str)
    (True, False, True)
    >>> fits(None, Literal["a", None]), fits([1, "2"], list[int])
    (True, False)
    """
    if value is None:  # the parser would read it as "not given"
        return _takes_none(hint)
    if hint in (Any, object):
        return True
    if get_origin(hint) is Literal:
        return any(
            type(value) is type(each) and value == each for each in get_args(hint)
        )
    if type(value) in _PLAIN and type(value) in (hint, *_parts(hint)):
        return True  # to make a parser takes long
    try:
        read = _read(value, hint)
    except ArgumentError:
        return False
    # The parser converts texts; Hydra passes them to the target unchanged.
    return _keeps_texts(value, read) or _fits_in_parts(value, hint)


def remedy_for_text(value: Any, hint: Any) -> str:
    """Advice about a text that could be read as the type; else an empty text.

    >>> print(remedy_for_text("8", int)[:43])
    The text is not converted. Write it without
    """
    try:
        read = _read(value, hint)
    except ArgumentError:
        return ""
    if isinstance(value, str) and not isinstance(
        read, bool | int | float | complex | list | tuple | set | dict | None
    ):
        return (
            "The text is not converted to the object that it names. Name the object by "
            "_target_, with _partial_: true for the class or function itself."
        )
    return (
        "The text is not converted. Write it without quotes, or put ${oc.decode:...} "
        "around its source."
    )


def _parts(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in _UNIONS else ()


def _takes_none(hint: Any) -> bool:
    if isinstance(hint, TypeVar):
        if hint.__bound__ is not None:
            return _takes_none(hint.__bound__)
        return not hint.__constraints__ or any(map(_takes_none, hint.__constraints__))
    if get_origin(hint) in (*_UNIONS, Literal):
        return any(map(_takes_none, get_args(hint)))
    return hint in (Any, None, object, types.NoneType)


def _read(value: Any, hint: Any) -> Any:
    """The value that a command line would make of it.

    Raises:
        ArgumentError: it has another type.
    """
    parser = ArgumentParser(exit_on_error=False)
    try:
        parser.add_argument("--value", type=hint)
    except ValueError:
        return value  # the type cannot be checked
    # The parser changes the lists and dicts that it receives.
    return parser.parse_object({"value": deepcopy(value)}).value


def _keeps_texts(value: Any, read: Any) -> bool:
    if isinstance(value, str):
        return isinstance(read, os.PathLike) or read == value
    if isinstance(value, list):
        if isinstance(read, set | frozenset):
            return all(each in read for each in value)
        return all(map(_keeps_texts, value, read))
    if isinstance(value, dict) and not isinstance(read, Namespace):
        return all(
            name in read and _keeps_texts(each, read[name])
            for name, each in value.items()
        )
    return True


def _fits_in_parts(value: Any, hint: Any) -> bool:
    """Whether a value fits a part of its type, as "1" fits `int | str`, although the
    parser prefers the number."""
    kinds = get_args(hint)
    if _parts(hint):
        return any(fits(value, each) for each in kinds)
    if isinstance(value, list) and kinds[1:] == (...,):
        return all(fits(each, kinds[0]) for each in value)
    if isinstance(value, list) and kinds:
        if len(kinds) == len(value):
            return all(map(fits, value, kinds))
        return all(fits(each, kinds[0]) for each in value)
    if isinstance(value, dict) and len(kinds) == 2:
        return all(fits(n, kinds[0]) and fits(v, kinds[1]) for n, v in value.items())
    return False
