"""Batches that are lists of samples: they are cut first and collated afterwards."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from trainkit.core.batches import (
    KnownPairs,
    Path,
    are_samples,
    describe,
    lookup,
    may_be_samples,
    tensors,
)
from trainkit.core.split.fields import is_array, is_list, parts_of
from trainkit.core.split.micro_batching import MicroBatching
from trainkit.core.split.rows import Group, Rows
from trainkit.errors import TrainkitError


def rows_of_samples(samples: Any, options: MicroBatching) -> Rows:
    """How many samples there are, and how long each is.

    With a path, a sample's length is the number or the length of what is there in the
    sample. Without one, it is the longest leading dimension in the sample. Samples in
    which nothing has a length are cut by their number.

    Raises:
        TrainkitError: the batch is no list of samples.
    """
    if not is_list(samples):
        raise TrainkitError(
            f"MicroBatching collate: is for a loader that yields a list of samples, "
            f"received {describe(samples)}. Give the loader collate_fn=list, or leave "
            f"out collate."
        )
    if options.length_paths:
        columns = [_lengths_at(samples, path) for path in options.length_paths]
    else:
        found = [_longest(sample) for sample in samples]
        columns = [found] if all(each is not None for each in found) else []
    groups = []
    for lengths in columns:
        spans = [(0, max(1, length or 1)) for length in lengths]
        groups.append(Group.make(max((stop for _, stop in spans), default=1), spans))
    return Rows(len(samples), groups)


def check_no_samples(batch: Any, known: KnownPairs) -> None:
    """Refuse a batch that is or may be a list of samples, where nothing collates it.

    Args:
        batch: the loader batch.
        known: see `may_be_samples`.
    """
    if not isinstance(batch, list):
        return
    has_containers = any(parts_of(each) is not None for each in batch)
    if (
        are_samples(batch)
        or may_be_samples(batch, known)
        or (has_containers and not any(True for _ in tensors(batch)))
    ):
        raise TrainkitError(
            f"MicroBatching: a list of samples is cut before it is collated, so the "
            f"function that collates is needed, and this is one, or may be: "
            f"{describe(batch)}. Say MicroBatching(collate=your_collate_fn), or "
            f"PerSample(size='') if training_step takes lists; if these are fields, "
            f"not samples, PerSample(size=0), or name what tells their rows in "
            f"lengths=, or make the batch a tuple or a dict."
        )


def _lengths_at(samples: Sequence[Any], path: Path) -> list[int]:
    lengths = []
    for number, sample in enumerate(samples):
        found = lookup(sample, path)
        length = _length_of(found)
        if length is None or length < 0:
            raise TrainkitError(
                f"MicroBatching lengths {str(path)!r}: must lead to a length of at "
                f"least 0, or to something with one, but leads to {describe(found)} in "
                f"sample {number}, {describe(sample)}."
            )
        lengths.append(length)
    return lengths


def _length_of(value: Any) -> int | None:
    if is_array(value):
        return value.shape[0]
    if isinstance(value, Tensor) or hasattr(value, "dtype"):
        number = value.item()
        return int(number) if float(number).is_integer() else None
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    return len(value) if isinstance(value, str | bytes | list | tuple) else None


def _longest(value: Any) -> int | None:
    """The longest leading dimension of the tensors and lists of a sample."""
    if is_array(value):
        return value.shape[0]
    parts = parts_of(value)
    if parts is None:
        return None
    found = [_longest(part) for _, part in parts]
    if isinstance(value, list) and all(each is None for each in found):
        return len(value)  # token ids
    return max((length for length in found if length is not None), default=None)
