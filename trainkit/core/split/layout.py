"""The structure of a loader batch, read before it is cut."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from trainkit.core.batches import KnownPairs, describe, lookup
from trainkit.core.split.fields import (
    Build,
    Field,
    check_divisible,
    common_rows,
    holds_arrays,
    is_array,
    is_list,
    named,
    take_apart,
)
from trainkit.core.split.lengths import (
    UnclearLengths,
    as_tensor,
    attention_mask,
    group_of_path,
    group_of_targets,
    spans_of,
    targets_of,
)
from trainkit.core.split.micro_batching import MicroBatching
from trainkit.core.split.rows import Group, Rows, merged
from trainkit.core.split.samples import check_no_samples
from trainkit.core.split.trimming import Trimming, Trims, is_table
from trainkit.core.strategies import AccumulationStrategy, PerSample
from trainkit.errors import TrainkitError


@dataclass(frozen=True)
class Layout:
    """The structure of a batch: its fields, rows, and what to trim.

    Attributes:
        fields: its parts, in order.
        build: makes a batch like it from as many other values.
        cut: the fields that are cut, by their number; every micro-batch gets the others
            whole.
        rows: the batch's rows.
        trims: which dimensions to trim, by the field's number.
    """

    fields: Sequence[Field]
    build: Build
    cut: Mapping[int, Field]
    rows: Rows
    trims: Mapping[int, Trims]

    def untrimmed(self) -> Layout:
        """A copy of this layout that gives every micro-batch all columns."""
        groups = [group.untrimmed() for group in self.rows.groups]
        return replace(self, rows=replace(self.rows, groups=groups), trims={})


class LayoutReader:
    """Reads batches, and remembers which of their lists hold rows.

    Args:
        options: where lengths are, what is shared, what else is ragged.
        strategy: knows how many rows there are, and which labels count.

    Attributes:
        trims: whether columns that are padding are left out.
    """

    def __init__(self, options: MicroBatching, strategy: AccumulationStrategy) -> None:
        self._options = options
        self._strategy = strategy
        self.trims = options.trim
        self._trimming = Trimming(options.ragged, strategy)  # type: ignore[arg-type]
        self._has_read = False
        self._known: KnownPairs = set()
        self._are_rows: dict[str, bool] = {}  # lists, by path
        self._targets: tuple[Tensor, Tensor] | None = None  # of the batch being read

    def read(self, batch: Any) -> Layout:
        """Read one batch.

        Raises:
            TrainkitError: its number of rows is unclear; the text shows its structure.
        """
        shared = {id(lookup(batch, path)) for path in self._options.shared}
        self._targets = targets_of(batch, self._strategy)
        num_rows = self._num_rows(batch, shared)
        fields, build = take_apart(
            batch, lambda path, value: self._is_whole(path, value, num_rows, shared)
        )
        has_rows = [self._has_rows(f, batch, num_rows, shared) for f in fields]
        cut = {i: field for i, field in enumerate(fields) if has_rows[i]}
        rows, trims = self._rows(batch, cut, num_rows)
        self._targets = None
        return Layout(fields, build, cut, rows, trims)

    def _num_rows(self, batch: Any, shared: set[int]) -> int:
        if self._options.length_paths:
            return as_tensor(batch, self._options.length_paths[0]).shape[0]
        mask = attention_mask(batch)
        if mask is not None:
            return mask.shape[0]
        if isinstance(self._strategy, PerSample) and self._strategy.size is not None:
            return int(self._strategy.weight(batch))
        if self._targets is not None:
            return self._targets[0].shape[0]
        check_no_samples(batch, self._known)
        found = common_rows(batch, shared)
        if len(found) != 1:
            for field in take_apart(batch, lambda path, value: id(value) in shared)[0]:
                if id(field.value) not in shared:
                    check_divisible(field, batch)
            has = f"has {sorted(found)}" if found else "has no tensor with rows"
            raise TrainkitError(
                f"MicroBatching: cannot tell the rows of the batch: its tensors must "
                f"share one leading dimension, but the batch {has}. The batch is "
                f"{describe(batch)}. Name what every micro-batch gets whole in "
                f"shared=, what tells the rows' lengths in lengths=, or for a list of "
                f"samples the function that collates: collate=.{_no_count(found)}"
            )
        return found.pop()

    def _is_whole(self, path: str, value: Any, num_rows: int, shared: set[int]) -> bool:
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
            self._are_rows[path] = False
        elif path not in self._are_rows and num_rows > 1 and holds_arrays(value):
            if common_rows(value, ()) == {num_rows} and all(map(holds_arrays, value)):
                raise TrainkitError(_fields_or_rows(path, value))
            self._are_rows[path] = True
        return self._are_rows.get(path, True)

    def _has_rows(
        self, field: Field, batch: Any, num_rows: int, shared: set[int]
    ) -> bool:
        value = field.value
        if id(value) in shared:
            return False
        check_divisible(field, batch)
        if is_list(value):
            return True
        if not is_array(value):
            return False
        if value.shape[0] != num_rows:
            if not isinstance(value, Tensor):
                return False  # an index, names
            raise TrainkitError(
                f"MicroBatching: {named(field.path)} has {value.shape[0]} rows, but "
                f"the batch has {num_rows}: {describe(batch)}. If every micro-batch is "
                f"to have all of it, name it in shared=; if it holds the rows in "
                f"another dimension, or comes from a loader of another batch size, "
                f"bring them to dimension 0 of {num_rows} rows."
                f"{_no_count({value.shape[0]})}"
            )
        return True

    def _rows(
        self, batch: Any, cut: Mapping[int, Field], num_rows: int
    ) -> tuple[Rows, Mapping[int, Trims]]:
        """The rows' lengths, and what to trim."""
        self._masks: set[int] = set()
        try:
            groups = self._groups(batch, list(cut.values()), num_rows)
        except UnclearLengths as unclear:
            # In mid-training two lengths may differ for the first time.
            if not self._has_read or not unclear.padded_lengths:
                raise
            path = self._options.length_paths[0]
            self._trimming.say(f"lengths {path!r} fit several tensors", "", batch)
            full = [
                (length, [(0, length)] * num_rows) for length in unclear.padded_lengths
            ]
            return Rows(num_rows, [Group.make(*each) for each in full]), {}
        self._has_read = True
        groups = [group for group in groups if group.padded_length]
        if len(groups) > 1:
            groups = merged(groups)
        trims = None
        if self.trims and groups:
            trims = self._trimming.of(batch, cut, groups, self._targets, self._masks)
        if trims is None:
            groups = [group.untrimmed() for group in groups]
        return Rows(num_rows, groups), trims or {}

    def _groups(self, batch: Any, cut: Sequence[Field], num_rows: int) -> list[Group]:
        if not num_rows:
            return []
        if self._options.length_paths:
            columns = self._trimming.columns(batch, cut, num_rows)
            paths = self._options.length_paths
            self._masks.update(id(lookup(batch, path)) for path in paths)
            return [
                group_of_path(batch, path, self._strategy, columns, num_rows)
                for path in paths
            ]
        mask = attention_mask(batch)
        # Alone it may belong to a part that the model adds, such as a prefix.
        if mask is not None and any(
            is_table(field.value, num_rows)
            and field.value.shape[1] == mask.shape[1]
            and field.value is not mask
            for field in cut
        ):
            self._masks.add(id(mask))
            return [Group.make(mask.shape[1], spans_of(mask))]
        targets = self._targets
        if targets is None or targets[0].ndim > 2:  # a map of labels is no sequence
            return []
        return [group_of_targets(*targets, cut)]


def _no_count(lengths: Collection[int]) -> str:
    """A hint for a tensor of one number, which may be a count."""
    if 1 not in lengths:
        return ""
    return " A count that the loss is divided by is made in training_step, not shared."


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
