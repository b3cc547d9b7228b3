"""A nested batch taken apart into its fields, and put together again.

A batch that is put together has the types of the one that was taken apart, whatever the
nesting (dict and other mappings, list, tuple, named tuple, dataclass). The given batch
is not touched.
"""

from __future__ import annotations

import copy
from collections import UserDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trainkit.core.batches import (
    are_samples,
    describe,
    fields_of,
    own_count,
    tensors,
)
from trainkit.errors import TrainkitError

Build = Callable[[Iterator[Any]], Any]
IsWhole = Callable[[str, Any], bool]


class Field(NamedTuple):
    """A part of a batch that is not nested any further."""

    path: str
    value: Any


def take_apart(
    batch: Any, is_whole: IsWhole | None = None
) -> tuple[list[Field], Build]:
    """The fields of a batch, and what builds a batch like it from other values.

    >>> fields, build = take_apart({"x": 1, "y": (2, 3)})
    >>> [field.path for field in fields]
    ['x', 'y.0', 'y.1']
    >>> build(iter("abc"))
    {'x': 'a', 'y': ('b', 'c')}

    Args:
        batch: any nesting.
        is_whole: whether a container at a path is one field; default: none is.

    Returns:
        The fields in order, and a function of an iterator over as many values.
    """
    fields: list[Field] = []
    return fields, _walk(batch, "", is_whole, fields)


def _walk(
    value: Any, path: str, is_whole: IsWhole | None, fields: list[Field]
) -> Build:
    # No closure that calls itself: such a cycle would keep batches from being freed.
    parts = None if isinstance(value, Tensor) else parts_of(value)
    if parts is None or (is_whole is not None and is_whole(path, value)):
        fields.append(Field(path, value))
        return next
    prefix = f"{path}." if path else ""
    builds = [_walk(part, f"{prefix}{key}", is_whole, fields) for key, part in parts]
    keys = [key for key, _ in parts]
    return lambda values: _remake(value, keys, [build(values) for build in builds])


def with_tensors(batch: Any, convert: Callable[[Tensor], Any]) -> Any:
    """A batch like another, with each tensor replaced by what `convert` makes of it.

    >>> with_tensors({"x": torch.zeros(2), "y": [1]}, lambda tensor: tensor.shape)
    {'x': torch.Size([2]), 'y': [1]}
    """
    fields, build = take_apart(batch)
    return build(_converted(field.value, convert) for field in fields)


def _converted(value: Any, convert: Callable[[Tensor], Any]) -> Any:
    if isinstance(value, Tensor):
        return convert(value)
    if holds_named_tensors(value) and hasattr(value, "apply"):
        return copy.copy(value).apply(convert)  # a batch of torch_geometric
    return value


def holds_named_tensors(value: Any) -> bool:
    """Whether an object that is no mapping has tensors by key, as graphs have them.

    >>> holds_named_tensors({"x": torch.zeros(2)}), holds_named_tensors("text")
    (False, False)
    """
    if isinstance(value, Mapping | Tensor | type):
        return False
    if not (callable(getattr(value, "keys", None)) and hasattr(value, "__getitem__")):
        return False
    return any(isinstance(value[key], Tensor) for key in value.keys())


def parts_of(value: Any) -> list[tuple[Any, Any]] | None:
    """The named or numbered parts of a container; None for any other value."""
    fields = fields_of(value)
    if fields is not None:
        return list(fields.items())
    return list(enumerate(value)) if isinstance(value, list | tuple) else None


def _remake(value: Any, keys: Sequence[Any], parts: list[Any]) -> Any:
    """A container like another, with other parts."""
    kind = type(value)
    if isinstance(value, dict | UserDict):  # also OrderedDict, BatchEncoding
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
    """Whether it is a tensor or an array like numpy's, with at least one dimension.

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
    """Whether a tensor or an array is anywhere in it."""
    parts = [field.value for field in take_apart(value)[0]]
    return any(isinstance(part, Tensor) or is_array(part) for part in parts)


def common_rows(batch: Any, shared: Collection[int]) -> set[int]:
    """The leading lengths of a batch's tensors, or of its other arrays if it has no
    tensor; lists of samples inside it do not count.

    Args:
        batch: any nesting.
        shared: ids of objects that do not count either.
    """

    def is_whole(path: str, value: Any) -> bool:
        is_inside = value is not batch
        return id(value) in shared or (
            is_inside and is_list(value) and are_samples(value)
        )

    found: dict[bool, set[int]] = {True: set(), False: set()}
    for _, value in take_apart(batch, is_whole)[0]:
        if id(value) not in shared and is_array(value):
            found[isinstance(value, Tensor)].add(value.shape[0])
    return found[True] or found[False]


def named(path: str) -> str:
    """The name of a field for error messages."""
    return f"field {path!r}" if path else "the batch"


def check_divisible(field: Field, batch: Any) -> None:
    """Refuse a field that may hold rows and that nobody knows how to cut."""
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
