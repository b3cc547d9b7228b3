"""A check that no micro-batch writes into the fields that all of them get whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from trainkit.core._compat import versions_of
from trainkit.core.split.fields import Field, is_array, parts_of, take_apart
from trainkit.errors import TrainkitError

Leaves = dict[str, tuple[Any, int | bytes]]


class SharedFields:
    """Remembers the fields that every micro-batch gets, to find changes of them.

    If fields reach the device as copies, the loader batch's own stay unchanged and
    nothing is found. A tensor counts how often it was written into; an array does not,
    so its values are compared, in the first window alone.

    Args:
        fields: the loader batch's fields that are not cut.
        with_arrays: whether to compare arrays as well.
    """

    def __init__(self, fields: Sequence[Field], *, with_arrays: bool) -> None:
        self._fields = [
            field
            for field in fields
            if is_array(field.value)
            or isinstance(field.value, Tensor)
            or parts_of(field.value) is not None
        ]
        self._with_arrays = with_arrays
        self._before = self._leaves() if self._fields else {}

    def refuse_changed(self) -> None:
        """Refuse a change by the micro-batch that has just run."""
        if not self._fields:
            return
        after = self._leaves()
        for path in {**self._before, **after}:
            old, new = self._before.get(path), after.get(path)
            if old and new and old[0] is new[0] and old[1] == new[1]:
                continue
            is_tensor = new is not None and isinstance(new[0], Tensor)
            copied = "value.clone()" if is_tensor else "copy.deepcopy(value)"
            raise TrainkitError(
                f"MicroBatching: training_step, or a hook before it, writes into the "
                f"field {path!r}, which is not cut, so that every micro-batch gets the "
                f"same object and the next one would find it changed. Copy it there "
                f"first: value = {copied}."
            )

    def _leaves(self) -> Leaves:
        return {
            ".".join(filter(None, [field.path, inner.path])): (
                inner.value,
                self._state_of(inner.value),
            )
            for field in self._fields
            for inner in take_apart(field.value)[0]
        }

    def _state_of(self, value: Any) -> int | bytes:
        if isinstance(value, Tensor):
            return 0 if value.is_inference() else versions_of([value])[0]
        if self._with_arrays and is_array(value) and hasattr(value, "tobytes"):
            return value.tobytes()
        return 0
