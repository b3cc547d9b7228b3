"""What of a batch has rows, and how long they are: one declared rule.

A tensor, array or list as long as the batch has rows is cut. Everything else is shared
by all micro-batches, and so is what `shared=` names. Lengths come from a mask or from
the strategy's labels, by name. A field that is cut and as wide as a mask is trimmed to
the columns that a micro-batch needs; whether the model computes the same without the
others is measured before training.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from trainkit.core.batches import are_samples, own_count
from trainkit.core.nested import (
    Build,
    Field,
    Path,
    describe,
    is_array,
    is_list,
    leaves,
    lookup,
    parts_of,
    take_apart,
    tensors,
)
from trainkit.core.split.micro_batching import MicroBatching
from trainkit.core.split.partition import Span
from trainkit.core.split.rows import Group, Rows
from trainkit.core.strategies import AccumulationStrategy, PerSample, PerToken
from trainkit.errors import TrainkitError


@dataclass(frozen=True)
class Layout:
    """The structure of a batch: its fields, rows, and what to trim.

    Attributes:
        fields: its parts, in order.
        build: makes a batch like it from as many other values.
        cut: the numbers of the fields that are cut.
        rows: the batch's rows.
        trims: which dimensions to trim, each with the number of the group whose columns
            it has, by the field's number.
    """

    fields: Sequence[Field]
    build: Build
    cut: Collection[int]
    rows: Rows
    trims: Mapping[int, Sequence[tuple[int, int]]]

    def untrimmed(self) -> Layout:
        """A copy of this layout that gives every micro-batch all columns."""
        full = [
            Group(g.padded_length, [(0, g.padded_length)] * len(g.spans))
            for g in self.rows.groups
        ]
        return replace(self, rows=replace(self.rows, groups=full), trims={})


@dataclass(frozen=True)
class _Counted:
    """A mask or labels, and where they count."""

    tensor: Tensor
    counts: Tensor
    are_labels: bool

    @property
    def width(self) -> int:
        return self.tensor.shape[1] if self.tensor.ndim > 1 else 0

    def spans(self, *, from_first: bool) -> list[Span | None]:
        """The columns of each row, to the last that counts; None where none does.

        Args:
            from_first: whether each row begins at column 0 whatever counts.
        """
        marks = self.counts.flatten(2).any(2) if self.counts.ndim > 2 else self.counts
        marks = marks.to(torch.uint8)  # argmax knows no bool
        columns = zip(
            marks.argmax(1).tolist(),
            marks.flip(1).argmax(1).tolist(),
            marks.any(1).tolist(),
            strict=True,
        )
        return [
            (0 if from_first else first, self.width - after) if some else None
            for first, after, some in columns
        ]


class LayoutReader:
    """Reads batches, by names that do not change from one to the next.

    Args:
        options: where lengths are, what is shared, what else is ragged.
        strategy: knows how many rows there are, and which labels count.
    """

    def __init__(self, options: MicroBatching, strategy: AccumulationStrategy) -> None:
        self._options, self._strategy = options, strategy
        self._holds_rows: dict[str, bool] = {}  # lists, by path
        self._has_one_width: set[str] = set()  # fields that are no sequences

    def read(self, batch: Any) -> Layout:
        """Read one batch.

        Raises:
            TrainkitError: its number of rows is unclear; the text shows its structure.
        """
        shared = {id(lookup(batch, path)) for path in self._options.shared}
        counted = self._counted(batch)
        num_rows = self._num_rows(batch, counted, shared)
        fields, build = take_apart(
            batch, lambda path, value: self._is_whole(path, value, num_rows, shared)
        )
        cut = []
        for number, each in enumerate(fields):
            if id(each.value) in shared:
                continue
            _check_divisible(each, batch)
            if _length(each.value) == num_rows:
                cut.append(number)
        groups = self._groups(batch, counted, num_rows)
        trims = self._trims(batch, fields, cut, groups) if groups else {}
        layout = Layout(fields, build, cut, Rows(num_rows, groups), trims)
        return layout if self._options.trim else layout.untrimmed()

    # ---- rows ------------------------------------------------------------------------

    def _num_rows(
        self, batch: Any, counted: Sequence[_Counted], shared: Collection[int]
    ) -> int:
        if isinstance(self._strategy, PerSample) and self._strategy.size is not None:
            return int(self._strategy.weight(batch))
        if counted:
            return len(counted[0].tensor)
        _check_no_samples(batch)
        found = _common_rows(batch, shared)
        if len(found) == 1:
            return found.pop()
        for each in take_apart(batch, lambda path, value: id(value) in shared)[0]:
            if id(each.value) not in shared:
                _check_divisible(each, batch)
        has = f"has {sorted(found)}" if found else "has no tensor with rows"
        raise TrainkitError(
            f"MicroBatching: cannot tell the rows of the batch: its tensors must share "
            f"one leading dimension, but the batch {has}. The batch is "
            f"{describe(batch)}. Name what every micro-batch gets whole in shared=, or "
            f"what has a row for each sample: PerSample(size='path.to.it'); for a list "
            f"of samples, the function that collates: collate=."
        )

    def _is_whole(
        self, path: str, value: Any, num_rows: int, shared: Collection[int]
    ) -> bool:
        """Whether a container is shared, or is a list with one entry for each row.

        Two tensors in a list may be two fields, or two rows that hold a tensor each. A
        list whose length once differed from the number of rows holds fields.
        """
        if id(value) in shared:
            return True
        if not is_list(value):
            return False
        if not path:
            return isinstance(self._strategy, PerSample) and self._strategy.size == ""
        if len(value) != num_rows:
            self._holds_rows[path] = False
        elif path not in self._holds_rows and num_rows > 1:
            own = [_common_rows(each, ()) for each in value]
            if all(each == {num_rows} for each in own):
                raise TrainkitError(_fields_or_rows(path, value))
            self._holds_rows[path] = True
        return self._holds_rows.get(path, True)

    # ---- lengths ---------------------------------------------------------------------

    def _counted(self, batch: Any) -> list[_Counted]:
        """Masks or labels, by the names that the options or the strategy give. What
        counts is kept, also where a mask of the labels' width leaves it out."""
        labels = self._labels(batch)
        if self._options.length_paths:
            found = [self._at(batch, path) for path in self._options.length_paths]
        else:
            mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
            if not isinstance(mask, Tensor) or mask.ndim != 2 or _is_added(mask):
                return [] if labels is None else [labels]
            found = [_Counted(mask, mask != 0, False)]
        if labels is None or any(each.tensor is labels.tensor for each in found):
            return found
        joins = labels.width in {each.width for each in found}
        return [*found, labels] if joins else found

    def _labels(self, batch: Any) -> _Counted | None:
        """The strategy's labels or token weights, if it has any."""
        strategy = self._strategy
        if not isinstance(strategy, PerToken):
            return None
        try:
            path = strategy.labels if strategy.mask is None else strategy.mask
            found = lookup(batch, path)
        except TrainkitError:
            return None  # weight() says so
        if not isinstance(found, Tensor) or found.is_nested or found.ndim not in (1, 2):
            return None  # a map of labels is no sequence
        if strategy.mask is not None:
            return _Counted(found, found != 0, False)
        return _Counted(found, found.long() != strategy.ignore_index, True)

    def _groups(
        self, batch: Any, counted: Sequence[_Counted], num_rows: int
    ) -> list[Group]:
        for each in counted if self._options.length_paths else ():
            if len(each.tensor) != num_rows:
                raise TrainkitError(
                    f"MicroBatching lengths: must have an entry for each of the "
                    f"{num_rows} rows of the batch, but has {len(each.tensor)}, in the "
                    f"batch {describe(batch)}."
                )
        fits = [e for e in counted if len(e.tensor) == num_rows and e.width]
        masks = {each.width for each in fits if not each.are_labels}
        fits = fits if num_rows else []
        # Before a row's first label may be a prompt, which only a mask shows.
        spans = [(e.width, e.spans(from_first=e.width not in masks)) for e in fits]
        groups = []
        for each in fits:
            if each.are_labels and each.width in masks:
                continue  # a tensor's group is known by its width, and has both
            # A row without a label can be of any length; one of a mask is empty.
            empty = (0, 1 if each.width in masks else each.width)
            equal = [own for width, own in spans if width == each.width]
            columns = [_union(row) or empty for row in zip(*equal, strict=True)]
            groups.append(Group(each.width, columns))
        return groups

    def _at(self, batch: Any, path: Path) -> _Counted:
        found, own = lookup(batch, path), self._labels(batch)
        if own is not None and own.tensor is found:
            return own
        is_mask = isinstance(found, Tensor) and found.ndim > 1 and not found.is_nested
        if not is_mask or found.is_complex() or _is_added(found):
            raise TrainkitError(
                f"MicroBatching lengths {str(path)!r}: must be the path of a mask, "
                f"rows by columns, with 0 for padding, or of the strategy's labels, "
                f"but leads to {describe(found)} in the batch {describe(batch)}. Of "
                f"lengths in numbers, make a mask in the collate function: "
                f"torch.arange(longest) < lengths[:, None]."
            )
        return _Counted(found, found != 0, False)

    def _trims(
        self,
        batch: Any,
        fields: Sequence[Field],
        cut: Collection[int],
        groups: Sequence[Group],
    ) -> dict[int, list[tuple[int, int]]]:
        """The dimensions as wide as a mask: dimension 1, and those in `ragged=`. A
        field that once had another width is not trimmed where it has it by chance."""
        widths = {group.padded_length: number for number, group in enumerate(groups)}
        ragged: Mapping[Path, Any] = self._options.ragged
        named = {id(lookup(batch, path)): dims for path, dims in ragged.items()}
        trims = {}
        for number in cut:
            path, value = fields[number]
            shape: Any = getattr(value, "shape", ())
            extra = named.get(id(value))
            dims = {dim % len(shape) for dim in extra or ()}
            for dim in dims:
                if shape[dim] not in widths:
                    raise TrainkitError(_other_width(path, dim, shape, widths, batch))
            if extra is None and len(shape) > 1 and shape[1] not in widths:
                self._has_one_width.add(path)
            is_ragged = len(shape) > 1 and shape[1] in widths
            if is_ragged and extra != () and path not in self._has_one_width:
                dims.add(1)
            if dims:
                trims[number] = [(d, widths[shape[d]]) for d in sorted(dims)]
        return trims


def _union(spans: Sequence[Span | None]) -> Span | None:
    found = [span for span in spans if span is not None]
    if not found:
        return None
    return min(start for start, _ in found), max(stop for _, stop in found)


def _common_rows(batch: Any, shared: Collection[int]) -> set[int]:
    """The leading lengths of a batch's tensors, or of its other arrays if it has no
    tensor; lists of samples inside it do not count."""

    def is_whole(path: str, value: Any) -> bool:
        is_inner = value is not batch and is_list(value)
        return id(value) in shared or is_inner and are_samples(value)

    found: dict[bool, set[int]] = {True: set(), False: set()}
    for _, value in take_apart(batch, is_whole)[0]:
        if id(value) not in shared and is_array(value):
            found[isinstance(value, Tensor)].add(value.shape[0])
    return found[True] or found[False]


def _length(value: Any) -> int | None:
    if is_list(value):
        return len(value)
    return value.shape[0] if is_array(value) else None


def _is_added(mask: Tensor) -> bool:
    return mask.is_floating_point() and bool((mask < 0).any())


def _check_divisible(each: Field, batch: Any) -> None:
    """Refuse a field that may hold rows and that nobody knows how to cut."""
    value = each.value
    name = f"field {each.path!r}" if each.path else "the batch"
    if isinstance(value, Tensor):
        if value.is_nested or value.layout is not torch.strided:
            kind = "nested" if value.is_nested else str(value.layout)
            raise TrainkitError(
                f"MicroBatching: {name} is a {kind} tensor, whose rows cannot be told "
                f"apart. Make it dense, or name it in shared= if every micro-batch is "
                f"to have all of it."
            )
    elif hasattr(value, "__dict__") and not isinstance(value, type):
        holds_tensors = any(True for _ in tensors(list(vars(value).values())))
        if not holds_tensors and own_count(value) is None:
            return
        holds = "holds tensors" if holds_tensors else "counts samples of its own"
        raise TrainkitError(
            f"MicroBatching: {name} is a {type(value).__name__}, which {holds} and "
            f"which nothing says how to cut, in the batch {describe(batch)}. Let the "
            f"loader yield lists of samples (collate_fn=list) and name what makes a "
            f"batch of them, such as MicroBatching(collate=Batch.from_data_list) for "
            f"torch_geometric or collate=dgl.batch; or make it a dict or a dataclass; "
            f"or name it in shared=."
        )


def _check_no_samples(batch: Any) -> None:
    """Refuse a batch that is a list of samples, where nothing collates it."""
    if not isinstance(batch, list):
        return
    has_containers = any(parts_of(each) is not None for each in batch)
    has_tensors = any(isinstance(leaf, Tensor) for leaf in leaves(batch))
    if are_samples(batch) or has_containers and not has_tensors:
        raise TrainkitError(
            f"MicroBatching: a list of samples is cut before it is collated, so the "
            f"function that collates is needed, and this is one: {describe(batch)}. "
            f"Say MicroBatching(collate=your_collate_fn), or PerSample(size='') if "
            f"training_step takes lists; if these are fields, not samples, "
            f"PerSample(size=0), or make the batch a tuple or a dict."
        )


def _fields_or_rows(path: str, value: Any) -> str:
    number = len(value)
    entries = "tensors" if all(map(is_array, value)) else "entries"
    return (
        f"MicroBatching: field {path!r} is a list of {number} {entries} of {number} "
        f"rows each, and the batch has as many rows, so that it may be one of fields "
        f"or one of rows: {describe(value)}. Put fields into a dict, or rows into one "
        f"padded tensor; or begin with a batch of another size, after which it is "
        f"known."
    )


def _other_width(
    path: str, dim: int, shape: Sequence[int], widths: Mapping[int, int], batch: Any
) -> str:
    return (
        f"MicroBatching: dimension {dim} of field {path!r} is ragged, so it must be as "
        f"long as the lengths say, {sorted(widths)}, but is {shape[dim]}, in the batch "
        f"{describe(batch)}. If dimension 1 is no sequence, say MicroBatching(ragged="
        f"{{{path!r}: ()}}); to give every micro-batch all columns, trim=False."
    )
