"""A warning about counts of the whole batch that every micro-batch gets."""

from __future__ import annotations

import math
import warnings
from collections.abc import Container, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from trainkit.core.batches import Path
from trainkit.core.split.fields import is_list, named, parts_of


def announce_whole_counts(
    whole: Any, part: Any, counts: Mapping[int, str], shared: Sequence[Path]
) -> bool:
    """Warn of a number that counts the loader batch and is unchanged in a micro-batch.

    A loss that is divided by it, or multiplied by one over it, is a mean over the whole
    batch, and is weighed by the micro-batch's share once more.

    Args:
        whole: the loader batch.
        part: a micro-batch of fewer rows.
        counts: the names of what the batch has, by their number.
        shared: the paths that the user wants to be whole.

    Returns:
        Whether there was such a number.
    """
    for path, number, count in whole_counts(whole, part, counts, shared):
        seen, divided = str(count), "divided"
        if number < 1:
            seen, divided = f"1 / {count}", "multiplied"
        warnings.warn(
            f"MicroBatching: {named(path)} is {seen}, as the whole batch has {count} "
            f"{counts[count]}, and every micro-batch gets it as it is. A loss "
            f"{divided} by it is divided once too often: the strategy weighs means "
            f"over what a micro-batch holds. Count in training_step what it gets; if "
            f"no loss is {divided} by this number, say so: "
            f"MicroBatching(shared=[{path!r}]).",
            stacklevel=2,
        )
        return True
    return False


def whole_counts(
    whole: Any, part: Any, counts: Container[int], shared: Sequence[Path] = ()
) -> Iterator[tuple[str, float, int]]:
    """The numbers that count a batch and are unchanged in a part of it: the path, the
    number, and what it or one over it counts.

    Args:
        whole: a batch.
        part: fewer rows of it.
        counts: what the batch has.
        shared: paths that do not matter.
    """
    allowed = set(map(str, shared))
    for path, number in _same_numbers(whole, part, ""):
        count = _count(number)
        if count is not None and count > 1 and count in counts and path not in allowed:
            yield path, number, count


def _count(number: float) -> int | None:
    """The number, or one over it, if this is whole as far as float32 can tell."""
    if 1e-9 < number < 1:
        whole = round(1 / number)
        return whole if math.isclose(number * whole, 1, rel_tol=1e-6) else None
    return int(number) if float(number).is_integer() else None


def _same_numbers(whole: Any, part: Any, path: str) -> Iterator[tuple[str, float]]:
    """The numbers that both batches hold at one place, each with its path."""
    number = _number(part)
    if number is not None:
        if number == _number(whole):
            yield path, number
        return
    parts, others = parts_of(part), parts_of(whole)
    if parts is None or others is None or len(parts) != len(others):
        return  # not in the loader batch, or in a list that is cut
    prefix = f"{path}." if path else ""
    for (key, each), (_, other) in zip(parts, others, strict=True):
        yield from _same_numbers(other, each, f"{prefix}{key}")
    if not is_list(part) and hasattr(part, "__dict__"):
        keys = {key for key, _ in parts}
        for key, each in vars(part).items():
            if key not in keys and _number(each) is not None:
                other = vars(whole).get(key)
                yield from _same_numbers(other, each, f"{prefix}{key}")


def _number(value: Any) -> float | None:
    """A finite number: Python's, numpy's, or a 0-d tensor on the host."""
    if isinstance(value, Tensor):
        if value.ndim or not value.is_cpu or value.is_complex():
            return None
        value = value.item()
    elif hasattr(value, "dtype") and getattr(value, "shape", None) == ():
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return value if math.isfinite(value) else None
