"""Nested batches: paths, parts, and another batch of the same types.

A batch is a tensor, a mapping (dict, Hugging Face `BatchEncoding`), a list or tuple, a
named tuple, a dataclass, or any of these inside one another. A batch that is put
together again has the types of the one that was taken apart; the given one is not
touched.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import UserDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trainkit.errors import TrainkitError

Path = str | int
Build = Callable[[Iterator[Any]], Any]
IsWhole = Callable[[str, Any], bool]


def lookup(
    batch: Any,
    path: Path,
    *,
    role: str = "",
    fits: Callable[[Tensor], bool] = lambda tensor: True,
) -> Any:
    """Follow a dotted path (`"targets.labels"`, `"0.ids"`) or an index into a batch.

    >>> lookup({"targets": (10, 20)}, "targets.1")
    20

    Args:
        batch: any nesting.
        path: a dotted path, or an index.
        role: what an error calls it; it then names the tensors that would fit, too.
        fits: whether a tensor could be meant.

    Raises:
        TrainkitError: the path leads nowhere; the text shows the batch's structure.
    """
    if type(batch) is dict and path in batch:
        return batch[path]  # nearly every batch
    found = batch
    for part in [path] if isinstance(path, int) else path.split("."):
        try:
            found = _child(found, part)
        except (KeyError, IndexError, AttributeError, TypeError, ValueError):
            known = take_apart(batch)[0] if role else []
            tensors_of = [f for f in known if isinstance(f.value, Tensor) and f.path]
            names = [repr(p) for p, value in tensors_of if value.ndim and fits(value)]
            raise TrainkitError(
                f"{role and f'{role}: '}path {path!r}: the batch has nothing at "
                f"{part!r}. The batch is {describe(batch)}. Give a dotted path of "
                f"keys, indices or attributes that exists in it."
                + (f" What would fit: {', '.join(names)}." if names else "")
            ) from None
    return found


def lookup_tensor(
    batch: Any,
    path: Path,
    *,
    role: str,
    fits: Callable[[Tensor], bool] = lambda tensor: True,
) -> Tensor:
    """`lookup`, for a path that must lead to a tensor."""
    if type(batch) is dict and isinstance(found := batch.get(path), Tensor):
        return found  # nearly every batch
    found = lookup(batch, path, role=role, fits=fits)
    if not isinstance(found, Tensor):
        raise TrainkitError(
            f"{role} {path!r}: must be the path of a tensor, but leads to "
            f"{describe(found)} in the batch {describe(batch)}. Name the tensor itself."
        )
    return found


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

    >>> import torch
    >>> with_tensors({"x": torch.zeros(2), "y": [1]}, lambda tensor: tensor.shape)
    {'x': torch.Size([2]), 'y': [1]}
    """
    fields, build = take_apart(batch)
    return build(_converted(field.value, convert) for field in fields)


def _converted(value: Any, convert: Callable[[Tensor], Any]) -> Any:
    if isinstance(value, Tensor):
        return convert(value)
    if hasattr(value, "keys") and hasattr(value, "apply") and held_by(value):
        return copy.copy(value).apply(convert)  # a batch of torch_geometric
    return value


def leaves(
    batch: Any, is_whole: Callable[[Any], bool] = lambda value: False
) -> Iterator[Any]:
    """Everything in a nested batch that is not a container, in order; a container is
    not entered where `is_whole` says so."""
    parts = None if isinstance(batch, Tensor) else parts_of(batch)
    if parts is None or is_whole(batch):
        yield batch
        return
    for _, part in parts:
        yield from leaves(part, is_whole)


def tensors(batch: Any) -> Iterator[Tensor]:
    """All tensors of a nested batch, in order."""
    return (leaf for leaf in leaves(batch) if isinstance(leaf, Tensor))


def fields_of(batch: Any) -> Mapping[Any, Any] | None:
    """The named parts of a mapping, a dataclass or a named tuple."""
    if isinstance(batch, Mapping):
        return batch
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        return {f.name: getattr(batch, f.name) for f in dataclasses.fields(batch)}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return batch._asdict()  # type: ignore[attr-defined]  # a named tuple
    return None


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

    >>> import torch
    >>> is_array(torch.zeros(3)), is_array(torch.tensor(3.0)), is_array([3])
    (True, False, False)
    """
    if isinstance(value, Tensor):
        return value.ndim > 0
    return hasattr(value, "dtype") and bool(getattr(value, "shape", ()))


def is_dense(value: Any) -> bool:
    """Whether it is a tensor that is neither sparse nor nested."""
    is_strided = isinstance(value, Tensor) and value.layout is torch.strided
    return is_strided and not value.is_nested


def length_of(value: Any) -> int | None:
    """How many entries a list, an array or a dense tensor has; None for other values.

    >>> length_of([3, 4]), length_of(torch.zeros(3)), length_of("text")
    (2, 3, None)
    """
    if isinstance(value, Tensor):
        return value.shape[0] if is_dense(value) and value.ndim else None
    return len(value) if is_array(value) or is_list(value) else None


def is_list(value: Any) -> bool:
    """Whether it is a list or tuple whose places have no names."""
    return isinstance(value, list | tuple) and not hasattr(value, "_fields")


def held_by(value: Any) -> dict[str, Any]:
    """The attributes of an object that is no container, if it holds tensors; entries of
    its private mappings, in which torch_geometric keeps them, have their own names."""
    if isinstance(value, type) or not hasattr(value, "__dict__"):
        return {}
    held: dict[str, Any] = {}
    for name, attribute in vars(value).items():
        if not name.startswith("_"):
            held[name] = attribute
        elif isinstance(attribute, Mapping):
            held |= {str(key): each for key, each in attribute.items()}
        elif isinstance(attribute, Tensor):
            held[name] = attribute
    return held if any(True for _ in tensors(list(held.values()))) else {}


def are_equal(value: Any, other: Any) -> bool:
    """Whether two values are the same; arrays of several numbers are not, unless they
    are one.

    >>> import torch
    >>> are_equal([1, "a"], [1, "a"]), are_equal(1, 1.0)
    (True, False)
    >>> are_equal(torch.ones(2), torch.ones(2)), are_equal(torch.ones(2), torch.ones(3))
    (True, False)
    >>> array = torch.ones(2).numpy()
    >>> are_equal(array, array), are_equal(array, array.copy())
    (True, False)
    """
    if isinstance(value, Tensor) and isinstance(other, Tensor):
        return torch.equal(value, other)
    try:
        is_same = type(value) is type(other) and bool(value == other)
    except Exception:  # what compares as it likes
        return value is other
    return value is other or is_same


def describe(batch: Any, *, depth: int = 3) -> str:
    """The batch's structure in one line, for error messages.

    >>> import torch
    >>> describe({"x": torch.zeros(2, 3), "y": [1, "a"]})
    'dict(x: float32[2, 3], y: list(int, str))'
    """
    if isinstance(batch, Tensor):
        return f"{str(batch.dtype).removeprefix('torch.')}{list(batch.shape)}"
    name = type(batch).__name__
    fields = fields_of(batch)
    is_sequence = isinstance(batch, Sequence) and not isinstance(batch, str | bytes)
    if fields is None and not is_sequence:
        fields = held_by(batch) or None
    most = 8
    if fields is not None:
        inside = [f"{k}: {describe(v, depth=depth - 1)}" for k, v in fields.items()]
    elif is_sequence:
        inside = [describe(v, depth=depth - 1) for v in islice(batch, most)]
        if type(batch) is list and all("(" in each for each in inside):
            most = 2  # they are rows as a rule, with the same fields
    else:
        return name
    if depth <= 0:
        return f"{name}(...)"
    number = len(batch if fields is None else fields)
    more = [f"... {number - most} more"] if number > most else []
    return f"{name}({', '.join([*inside[:most], *more])})"


def _child(parent: Any, part: Path) -> Any:
    fields = fields_of(parent)
    if fields is not None and part in fields:
        return fields[part]
    if isinstance(parent, Sequence) and str(part).lstrip("-").isdigit():
        return parent[int(part)]
    if fields is not None and str(part).isdigit() and int(part) in fields:
        return fields[int(part)]
    return getattr(parent, str(part))
