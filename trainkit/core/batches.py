"""Finding things in a batch, however it is nested.

A batch is a tensor, a mapping (dict, Hugging Face `BatchEncoding`), a sequence (tuple,
list, named tuple), a dataclass, or any of these inside one another.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from trainkit.errors import TrainkitError

Path = str | int


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
    """`lookup`, for a place that must hold a tensor; `role` names it in the error."""
    found = lookup(batch, path)
    if not isinstance(found, Tensor):
        raise TrainkitError(
            f"{role} {path!r}: must be the path of a tensor, but leads to "
            f"{describe(found)} in the batch {describe(batch)}. Name the tensor itself."
        )
    return found


def leading_dimension(batch: Any) -> int:
    """The one length that all of the batch's tensors share in their first dimension.

    Raises:
        TrainkitError: there is no such length, or more than one.
    """
    if _holds_samples(batch):
        raise TrainkitError(
            f"PerSample: a list of samples has no leading dimension of its own: "
            f"{describe(batch)}. Name what has one entry per sample, a tensor or a "
            f"list: PerSample(size='path.to.it')."
        )
    lengths = {t.shape[0] for t in tensors(batch) if t.ndim > 0}
    if len(lengths) != 1:
        found = f"has {sorted(lengths)}" if lengths else "has no tensor with a length"
        raise TrainkitError(
            f"PerSample: cannot tell how many samples the batch holds: its tensors "
            f"must share one leading dimension, but the batch {found}. The batch is "
            f"{describe(batch)}. Name the tensor whose length counts: "
            f"PerSample(size='path.to.tensor')."
        )
    return lengths.pop()


def _holds_samples(batch: Any) -> bool:
    """Whether a list in the batch is one of samples, not of fields."""
    if not isinstance(batch, list):
        return any(map(_holds_samples, _children(batch)))
    return are_samples(batch) or any(map(_holds_samples, batch))


def are_samples(batch: Sequence[Any]) -> bool:
    """Whether these are samples, not fields.

    Collating makes lists of fields, of tensors or of lists; only samples come as a list
    of mappings or tuples, or of images each with its few channels first.
    """
    nested = [each for each in batch if any(True for _ in tensors(each))]
    are_records = bool(nested) and all(
        not isinstance(each, Tensor | list) for each in nested
    )
    are_images = len(batch) > 2 and all(
        isinstance(each, Tensor)
        and each.is_floating_point()
        and each.ndim == 3
        and each.shape[0] in (1, 3, 4)
        for each in batch
    )
    return are_records or are_images


def tensors(batch: Any) -> Iterator[Tensor]:
    """All tensors of a nested batch, in order."""
    if isinstance(batch, Tensor):
        yield batch
    else:
        for child in _children(batch):
            yield from tensors(child)


def describe(batch: Any, *, depth: int = 3) -> str:
    """The batch's structure in one line, for error messages.

    >>> import torch
    >>> describe({"x": torch.zeros(2, 3), "y": [1, "a"]})
    'dict(x: float32[2, 3], y: list(int, str))'
    """
    if isinstance(batch, Tensor):
        return f"{str(batch.dtype).removeprefix('torch.')}{list(batch.shape)}"
    name = type(batch).__name__
    fields = _fields(batch)
    if fields is not None:
        inside = [f"{k}: {describe(v, depth=depth - 1)}" for k, v in fields.items()]
    elif _is_sequence(batch):
        inside = [describe(v, depth=depth - 1) for v in batch]
    else:
        return name
    if depth <= 0:
        return f"{name}(...)"
    shown = [*inside[:8], f"... {len(inside) - 8} more"] if len(inside) > 8 else inside
    return f"{name}({', '.join(shown)})"


def _child(parent: Any, part: Path) -> Any:
    fields = _fields(parent)
    if fields is not None and part in fields:
        return fields[part]
    if _is_sequence(parent) and str(part).lstrip("-").isdigit():
        return parent[int(part)]
    if fields is not None and str(part).isdigit() and int(part) in fields:
        return fields[int(part)]
    return getattr(parent, str(part))


def _children(batch: Any) -> Sequence[Any]:
    if isinstance(batch, Tensor):
        return ()
    fields = _fields(batch)
    if fields is not None:
        return list(fields.values())
    return batch if _is_sequence(batch) else ()


def _fields(batch: Any) -> Mapping[Any, Any] | None:
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
