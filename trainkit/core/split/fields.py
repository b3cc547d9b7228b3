"""A nested batch taken apart into its fields, and put together again.

Whatever the nesting (dict and other mappings, list, tuple, named tuple, dataclass),
what is put together has the types of what was taken apart; the given batch is not
touched.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import UserDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trainkit.core.batches import are_samples, describe, own_count, tensors
from trainkit.errors import TrainkitError

Build = Callable[[Iterator[Any]], Any]


class Field(NamedTuple):
    """A part of a batch that is not nested any further."""

    path: str
    value: Any


def take_apart(
    batch: Any, is_whole: Callable[[str, Any], bool]
) -> tuple[list[Field], Build]:
    """The fields of a batch, and what builds one like it from other values.

    >>> fields, build = take_apart({"x": 1, "y": (2, 3)}, lambda path, value: False)
    >>> [field.path for field in fields]
    ['x', 'y.0', 'y.1']
    >>> build(iter("abc"))
    {'x': 'a', 'y': ('b', 'c')}

    Args:
        batch: any nesting.
        is_whole: whether a list, tuple or mapping at a path is one field.

    Returns:
        The fields in order, and a function of an iterator over as many values.
    """
    fields: list[Field] = []
    return fields, _walk(batch, "", is_whole, fields)


def _walk(
    value: Any, path: str, is_whole: Callable[[str, Any], bool], fields: list[Field]
) -> Build:
    # No closure that calls itself: such a cycle would keep batches from being freed.
    parts = None if isinstance(value, Tensor) else parts_of(value)
    if parts is None or is_whole(path, value):
        fields.append(Field(path, value))
        return next
    prefix = f"{path}." if path else ""
    builds = [_walk(part, f"{prefix}{key}", is_whole, fields) for key, part in parts]
    keys = [key for key, _ in parts]
    return lambda values: _remake(value, keys, [build(values) for build in builds])


def parts_of(value: Any) -> list[tuple[Any, Any]] | None:
    """The named or numbered parts of a container; None for any other value."""
    if isinstance(value, Mapping):
        return list(value.items())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [(f.name, getattr(value, f.name)) for f in dataclasses.fields(value)]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return list(zip(value._fields, value, strict=True))  # type: ignore[attr-defined]
    if isinstance(value, list | tuple):
        return list(enumerate(value))
    return None


def _remake(value: Any, keys: Sequence[Any], parts: list[Any]) -> Any:
    """A container like another, with other parts."""
    kind = type(value)
    if kind is dict:
        return dict(zip(keys, parts, strict=True))
    if kind is list:
        return parts
    if isinstance(value, dict | UserDict):  # OrderedDict, BatchEncoding
        made = copy.copy(value)
        for key, part in zip(keys, parts, strict=True):
            made[key] = part
        return made
    if isinstance(value, Mapping):
        return kind(dict(zip(keys, parts, strict=True)))  # type: ignore[call-arg]
    if isinstance(value, tuple) and hasattr(value, "_make"):
        return kind._make(parts)  # type: ignore[attr-defined]  # a named tuple
    if isinstance(value, list | tuple):
        return kind(parts)  # type: ignore[call-arg]
    made = copy.copy(value)  # a dataclass; its own __init__ may want other arguments
    for key, part in zip(keys, parts, strict=True):
        object.__setattr__(made, key, part)  # also where it is frozen
    return made


def is_array(value: Any) -> bool:
    """Whether it is a tensor or an array of numpy's kind, with at least one dimension.

    >>> is_array(torch.zeros(3)), is_array(torch.tensor(3.0)), is_array([3])
    (True, False, False)
    """
    if isinstance(value, Tensor):
        return value.ndim > 0
    return hasattr(value, "dtype") and bool(getattr(value, "shape", ()))


def is_list(value: Any) -> bool:
    """Whether it is a list or tuple whose places have no names."""
    return isinstance(value, list | tuple) and not hasattr(value, "_fields")


def holds_arrays(value: Any) -> bool:
    """Whether there is a tensor or an array anywhere in it."""
    if isinstance(value, Tensor) or is_array(value):
        return True
    parts = parts_of(value)
    return parts is not None and any(holds_arrays(part) for _, part in parts)


def common_rows(batch: Any, shared: Collection[int]) -> set[int]:
    """The leading lengths of a batch's tensors, those of records apart; of other arrays
    only where there is no tensor."""
    found: dict[bool, set[int]] = {True: set(), False: set()}
    _add_rows(batch, shared, found)
    return found[True] or found[False]


def _add_rows(batch: Any, shared: Collection[int], found: dict[bool, set[int]]) -> None:
    if id(batch) in shared:
        return
    if isinstance(batch, Tensor) or is_array(batch):
        if batch.ndim:
            found[isinstance(batch, Tensor)].add(batch.shape[0])
        return
    for _, part in parts_of(batch) or ():
        if not (is_list(part) and are_samples(part)):
            _add_rows(part, shared, found)


def named(path: str) -> str:
    """A field for error messages."""
    return f"field {path!r}" if path else "the batch"


def check_divisible(field: Field, batch: Any) -> None:
    """Refuse what holds tensors and cannot be cut: what it would lose is unknown."""
    value = field.value
    if isinstance(value, Tensor):
        if value.is_nested or value.layout is not torch.strided:
            kind = "nested" if value.is_nested else str(value.layout)
            raise TrainkitError(
                f"MicroBatching: {named(field.path)} is a {kind} tensor, whose rows "
                f"cannot be told apart. Make it dense, or name it in shared= if every "
                f"micro-batch is to have all of it."
            )
    elif hasattr(value, "__dict__") and not isinstance(value, type):
        holds_tensors = any(True for _ in tensors(list(vars(value).values())))
        if not holds_tensors and own_count(value) is None:
            return
        holds = "holds tensors" if holds_tensors else "counts samples of its own"
        raise TrainkitError(
            f"MicroBatching: {named(field.path)} is a {type(value).__name__}, which "
            f"{holds} and which nothing says how to cut, in the batch "
            f"{describe(batch)}. Let the loader yield lists of samples "
            f"(collate_fn=list) and name what makes a batch of them, such as "
            f"MicroBatching(collate=Batch.from_data_list) for torch_geometric or "
            f"collate=dgl.batch; or make it a dict or a dataclass; or name it in "
            f"shared=."
        )
