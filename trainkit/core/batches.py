"""Finding tensors, fields and sizes in a batch, however it is nested.

A batch is a tensor, a mapping (dict, Hugging Face `BatchEncoding`), a sequence (tuple,
list, named tuple), a dataclass, or any of these inside one another.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from trainkit.errors import TrainkitError

Path = str | int

KnownPairs = set[tuple[int, torch.dtype]]
"""Lists of tensors that are known to hold fields, by number of entries and dtype."""

CHANNELS = (1, 3, 4)
"""How many channels an image may have."""


def lookup(batch: Any, path: Path) -> Any:
    """Follow a dotted path (`"targets.labels"`, `"0.ids"`) or an index into a batch.

    >>> lookup({"targets": (10, 20)}, "targets.1")
    20

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
            raise TrainkitError(
                f"path {path!r}: the batch has nothing at {part!r}. The batch is "
                f"{describe(batch)}. Give a dotted path of keys, indices or "
                f"attributes that exists in it."
            ) from None
    return found


def lookup_tensor(batch: Any, path: Path, *, role: str) -> Tensor:
    """`lookup`, for a path that must lead to a tensor; `role` names it in the error."""
    found = lookup(batch, path)
    if not isinstance(found, Tensor):
        raise TrainkitError(
            f"{role} {path!r}: must be the path of a tensor, but leads to "
            f"{describe(found)} in the batch {describe(batch)}. Name the tensor itself."
        )
    return found


def num_samples(batch: Any) -> float:
    """How many samples a batch holds; NaN if that cannot be counted."""
    if isinstance(batch, list) and all(getattr(x, "ndim", 0) == 2 for x in batch):
        batch = tuple(batch)  # ids, mask and labels; only a strategy must know for sure
    try:
        return leading_dimension(batch)
    except TrainkitError:
        return math.nan


def leading_dimension(batch: Any, known: KnownPairs | None = None) -> int:
    """The one length that all of the batch's tensors share in their first dimension.

    A list that may hold samples counts as fields only if its tensors have as many rows
    as those outside it. Without any tensor, objects that count their own samples
    decide, such as the batches of a graph library.

    Args:
        batch: a batch with any nesting.
        known: see `may_be_samples`.

    Raises:
        TrainkitError: there is no such length, or more than one.
    """
    lists: list[Any] = []
    lengths = _leading(batch, lists, set() if known is None else known)
    inside = {t.shape[0] for each in lists for t in tensors(each) if t.ndim > 0}
    if _is_transposed(batch) and len(batch[0]) not in lengths:
        lists, lengths = [batch], set()
    if lists and not (len(lengths) == 1 and inside == lengths):
        raise TrainkitError(
            f"PerSample: a list of samples has no leading dimension of its own, and "
            f"this is one, or may be: {describe(lists[0])}, in the batch "
            f"{describe(batch)}. Name a tensor or a list with one entry per sample: "
            f"PerSample(size='path.to.it'). If the batch is a list of fields, size=0 "
            f"is its first field; if it is a list of samples, size='' is the list."
        )
    if not lengths:
        counts = map(own_count, leaves(batch))
        lengths = {count for count in counts if count is not None}
    if len(lengths) != 1:
        found = f"has {sorted(lengths)}" if lengths else "has no tensor with a length"
        raise TrainkitError(
            f"PerSample: cannot tell how many samples the batch holds: its tensors "
            f"must share one leading dimension, but the batch {found}. The batch is "
            f"{describe(batch)}. Name the tensor whose length counts: "
            f"PerSample(size='path.to.tensor'). If the batch is a list of samples, "
            f"size='' counts its entries."
        )
    return lengths.pop()


def _leading(batch: Any, lists: list[Any], known: KnownPairs) -> set[int]:
    """The lengths of tensors outside of lists that may be samples, which it collects
    in `lists`."""
    if isinstance(batch, Tensor):
        return {batch.shape[0]} if batch.ndim else set()
    if isinstance(batch, list) and (are_samples(batch) or may_be_samples(batch, known)):
        lists.append(batch)
        return set()
    found: set[int] = set()
    for child in _children(batch) or ():
        found |= _leading(child, lists, known)
    return found


def _is_transposed(batch: Any) -> bool:
    """Whether these are samples as `tuple(zip(*samples))` makes them: one sequence for
    each field, one of them of plain values, which collating would make a tensor."""
    kinds = tuple | list
    if not isinstance(batch, kinds) or not batch:
        return False
    if not all(
        isinstance(each, kinds) and len(each) == len(batch[0]) for each in batch
    ):
        return False
    return any(
        bool(each) and all(isinstance(value, int | float | str) for value in each)
        for each in batch
    )


def own_count(value: Any) -> int | None:
    """How many samples an object counts itself: a batch of torch_geometric has
    `num_graphs`, one of dgl has `batch_size`."""
    for name in ("num_graphs", "batch_size"):
        try:
            count = getattr(value, name, None)
        except ValueError:  # a batch of torch_geometric that cannot infer it
            continue
        if isinstance(count, int) and not isinstance(count, bool):
            return count
    return None


def are_samples(batch: Sequence[Any]) -> bool:
    """Whether these are samples, not fields.

    Collating makes lists of fields, which are tensors or lists. Only samples come as a
    list of mappings or tuples, or as a list of images with few channels, those first.
    """
    nested = [each for each in batch if any(True for _ in tensors(each))]
    are_records = bool(nested) and all(
        not isinstance(each, Tensor | list) for each in nested
    )
    are_images = len(batch) > 2 and all(
        isinstance(each, Tensor)
        and each.is_floating_point()
        and each.ndim == 3
        and each.shape[0] in CHANNELS
        for each in batch
    )
    return are_records or are_images


def may_be_samples(batch: Any, known: KnownPairs) -> bool:
    """Whether a list of tensors that are all alike may be a list of samples.

    Collating makes such lists of fields too. Two matrices are taken for fields; vectors
    and two images with their few channels first may be samples. Two fields of three
    rows look like two images, so a list that was once seen with another number of rows
    is known to hold fields.

    Args:
        batch: whatever a batch holds.
        known: the lists that are known to hold fields, by their number of entries and
            dtype; it is added to.
    """
    if not isinstance(batch, list) or len(batch) < 2:
        return False
    first = batch[0]
    if not isinstance(first, Tensor) or not first.ndim:
        return False
    if not all(
        isinstance(each, Tensor)
        and each.shape == first.shape
        and each.dtype == first.dtype
        for each in batch
    ):
        return False
    if first.ndim == 1 or len(batch) > 2:
        return True
    if first.ndim != 3 or min(first.shape[1:]) < 8:
        return False
    if first.shape[0] not in CHANNELS:
        known.add((len(batch), first.dtype))
    return (len(batch), first.dtype) not in known


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


def leaves(batch: Any) -> Iterator[Any]:
    """Everything in a nested batch that is not a container, in order."""
    children = _children(batch)
    if children is None:
        yield batch
        return
    for child in children:
        yield from leaves(child)


def tensors(batch: Any) -> Iterator[Tensor]:
    """All tensors of a nested batch, in order."""
    return (leaf for leaf in leaves(batch) if isinstance(leaf, Tensor))


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
    if fields is None and not _is_sequence(batch):
        fields = held_by(batch) or None
    most = 8
    if fields is not None:
        inside = [f"{k}: {describe(v, depth=depth - 1)}" for k, v in fields.items()]
    elif _is_sequence(batch):
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
    if _is_sequence(parent) and str(part).lstrip("-").isdigit():
        return parent[int(part)]
    if fields is not None and str(part).isdigit() and int(part) in fields:
        return fields[int(part)]
    return getattr(parent, str(part))


def _children(batch: Any) -> Sequence[Any] | None:
    """The parts of a container; None for any other value."""
    if isinstance(batch, Tensor):
        return None
    fields = fields_of(batch)
    if fields is not None:
        return list(fields.values())
    return batch if _is_sequence(batch) else None


def fields_of(batch: Any) -> Mapping[Any, Any] | None:
    """The named parts of a mapping, a dataclass or a named tuple."""
    if isinstance(batch, Mapping):
        return batch
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        return {f.name: getattr(batch, f.name) for f in dataclasses.fields(batch)}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return batch._asdict()  # type: ignore[attr-defined]  # a named tuple
    return None


def _is_sequence(batch: Any) -> bool:
    return isinstance(batch, Sequence) and not isinstance(batch, str | bytes)
