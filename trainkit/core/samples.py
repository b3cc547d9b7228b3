"""How many samples a batch holds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from trainkit.core.nested import describe, is_array, leaves, tensors
from trainkit.errors import TrainkitError

CHANNELS = (1, 3, 4)
"""How many channels an image may have."""


def leading_dimension(batch: Any) -> int:
    """The one length that all of the batch's tensors share in their first dimension.

    A list of samples decides nothing, and is refused if its tensors have other lengths.
    Without any tensor, objects that count their own samples decide, such as the batches
    of a graph library.

    Raises:
        TrainkitError: there is no such length, or more than one.
    """
    fields = list(leaves(batch, lambda e: isinstance(e, list) and are_samples(e)))
    lists = [each for each in fields if isinstance(each, list)]
    lengths = {e.shape[0] for e in fields if isinstance(e, Tensor) and e.ndim}
    inside = {t.shape[0] for each in lists for t in tensors(each) if t.ndim}
    if _is_transposed(batch) and len(batch[0]) not in lengths:
        lists, lengths = [batch], set()
    if lists and not (len(lengths) == 1 and inside == lengths):
        raise TrainkitError(
            f"PerSample: a list of samples has no leading dimension of its own, and "
            f"this is one: {describe(lists[0])}, in the batch {describe(batch)}. Name "
            f"a tensor or a list with one entry per sample: "
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


def _is_transposed(batch: Any) -> bool:
    """Whether these are samples as `tuple(zip(*samples))` makes them: one sequence for
    each field, one of them of plain values, which collating would make a tensor."""
    kinds = tuple | list
    if not isinstance(batch, kinds) or not batch:
        return False
    if not all(isinstance(e, kinds) and len(e) == len(batch[0]) for e in batch):
        return False
    plain = int | float | str
    return any(e and all(isinstance(value, plain) for value in e) for e in batch)


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
    if all(isinstance(each, Tensor) for each in batch):
        return len(batch) > 2 and all(
            each.ndim == 3 and each.shape[0] in CHANNELS and each.is_floating_point()
            for each in batch
        )
    nested = [each for each in batch if any(map(is_array, leaves(each)))]
    return bool(nested) and not any(is_array(e) or isinstance(e, list) for e in nested)
