"""The options for cutting loader batches, checked where they are made."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Literal

from trainkit.core.inside.keep import checked_keep
from trainkit.core.nested import Path
from trainkit.core.plan.options import check_whole_number
from trainkit.errors import TrainkitError


class _Chosen:
    """A base class that is not a dataclass. Without one, jsonargparse takes a
    `class_path` only by an option that came with its version 4.46."""


@dataclass(frozen=True)
class MicroBatching(_Chosen):
    """How a loader batch is cut: on the host, or inside `training_step` (`inside=`).

    Cut on the host (a split window), each loader batch is one optimizer step.
    The gradient of the step does not depend on the cut, so rows of like length share a
    micro-batch, and columns that are padding in all of it are left out. With a budget
    of `tokens`, the rows, sorted by length, are cut where this is least:

        sum over micro-batches of  rows * (longest + attention * longest**2) + overhead

    >>> MicroBatching(tokens=4096).is_auto, MicroBatching().is_auto
    (False, True)

    Args:
        how: `"auto"`: micro-batches double over the first windows while that is faster,
            and are halved where memory runs out. `size` or `tokens` set the cut
            instead.
        size: the most rows in a micro-batch. Alone: as few micro-batches as that
            allows, with the least padding that so many can have.
        tokens: the most tokens in a micro-batch, with its padding: rows times the
            longest. With `size` as well, both limits hold.
        lengths: the path of a mask (0 is padding), or of the strategy's labels. Several
            paths if several groups of tensors are ragged, as in an encoder with a
            decoder. Default: `"attention_mask"` if there is one, otherwise the
            strategy's labels. In a list of samples, the path of each sample's length.
        ragged: further dimensions to trim, besides dimension 1:
            `{"mask4d": (2, 3)}`. An empty tuple: nothing of this field is trimmed.
        shared: paths of fields as long as the batch that every micro-batch gets whole
            all the same. What is not as long as the batch is always whole.
        trim: whether columns that are padding in a whole micro-batch are left out.
            Whether the model computes the same without them is measured on a copy, with
            the first batch that has padding; if it does not, nothing is trimmed.
        collate: the function that makes a batch from a list of samples, for a loader
            that yields lists (`collate_fn=list`).
        overhead: the cost of a micro-batch by itself, in padded tokens. Default: a
            quarter of the budget; half of it or all of it, if the cut would otherwise
            have over one micro-batch more than its tokens fill.
        attention: the cost of a row beyond its length, times its length squared.
        start: `"auto"`: the first size tried, in tokens, or in rows if batches have no
            lengths.
        inside: the inner cut. The loader batch is not cut: `training_step` runs once on
            all of it, and the submodules at these paths run in chunks of rows, without
            a graph, and once more with one in the backward pass. The loss may then be
            anything, and needs no strategy. `"auto"` finds the submodules, `"self"` is
            the module's own `forward`. With it, `size`, `tokens`, `lengths`, `start`
            are about chunks, and `shared` names arguments.
        keep: of the inner cut: how many chunks keep their graph and need no second
            pass: a number, the bytes that they may take (`"2GB"`), or `"auto"`.
    """

    how: Literal["auto"] = "auto"
    _: KW_ONLY
    size: int | None = None
    tokens: int | None = None
    lengths: Path | Sequence[Path] | None = None
    ragged: Mapping[Path, int | Sequence[int]] = field(default_factory=dict)
    shared: Sequence[Path] = ()
    trim: bool = True
    collate: Callable[[list[Any]], Any] | None = None
    overhead: float | None = None
    attention: float = 0.0
    start: int | None = None
    inside: str | Sequence[str] | None = None
    keep: int | str = "auto"

    def __post_init__(self) -> None:
        if self.how != "auto":
            raise TrainkitError(
                f"MicroBatching how: must be 'auto', received {self.how!r}. For a cut "
                f"of your own write MicroBatching(size=4) or (tokens=4096)."
            )
        for name in ("size", "tokens", "start"):
            if getattr(self, name) is not None:
                check_whole_number(f"MicroBatching {name}", getattr(self, name))
        self._check_auto()
        self._check_costs()
        self._check_fields()
        self._check_inside()

    @property
    def is_auto(self) -> bool:
        """Whether the size is to be found."""
        return self.size is None and self.tokens is None

    @property
    def length_paths(self) -> tuple[Path, ...]:
        """The paths of the lengths; empty if they are to be found."""
        if self.lengths is None:
            return ()
        is_one = isinstance(self.lengths, str | int)
        return (self.lengths,) if is_one else tuple(self.lengths)  # type: ignore[return-value,arg-type]

    def _check_auto(self) -> None:
        if self.start is not None and not self.is_auto:
            raise TrainkitError(
                f"MicroBatching start: is for 'auto', which finds the size, received "
                f"start={self.start} with size={self.size}, tokens={self.tokens}. "
                f"Leave out one or the other."
            )
        if self.overhead is not None and self.size is not None and self.tokens is None:
            raise TrainkitError(
                f"MicroBatching overhead: weighs padding against the number of "
                f"micro-batches, which size={self.size} alone already says, received "
                f"overhead={self.overhead}. Give tokens too, or leave it out."
            )

    def _check_costs(self) -> None:
        if self.overhead is not None:
            _check_cost("overhead", self.overhead, above_zero=True)
        _check_cost("attention", self.attention, above_zero=False)
        if not isinstance(self.trim, bool):
            raise TrainkitError(
                f"MicroBatching trim: must be True or False, received {self.trim!r}."
            )
        if self.collate is not None and not callable(self.collate):
            raise TrainkitError(
                f"MicroBatching collate: must be the function that makes a batch of a "
                f"list of samples, received {self.collate!r}."
            )

    def _check_fields(self) -> None:
        """Paths become plain tuples: configurations bring lists of their own kind."""
        if not isinstance(self.ragged, Mapping):
            raise TrainkitError(
                f"MicroBatching ragged: must map a path to the dimensions to trim, "
                f"received {self.ragged!r}. Write {{'mask4d': (2, 3)}}."
            )
        ragged = {path: _dims(path, dims) for path, dims in self.ragged.items()}
        object.__setattr__(self, "ragged", ragged)
        object.__setattr__(self, "shared", _paths("shared", self.shared))
        if self.lengths is not None:
            paths = _paths("lengths", self.lengths)
            is_one = isinstance(self.lengths, str | int)
            object.__setattr__(self, "lengths", paths[0] if is_one else paths)
        _paths("ragged", list(ragged))
        if self.collate is not None and (self.ragged or self.shared or not self.trim):
            raise TrainkitError(
                f"MicroBatching collate: samples are cut before there is a batch to "
                f"trim, received ragged={self.ragged}, shared={self.shared}, "
                f"trim={self.trim} with it. Leave these out."
            )

    def _check_inside(self) -> None:
        checked_keep(self.keep)
        if self.inside is None:
            if self.keep != "auto":
                raise TrainkitError(
                    f"MicroBatching keep: is for the inner cut, received "
                    f"keep={self.keep!r} without inside=. Name a submodule there."
                )
            return
        given: Any = self.inside
        several = isinstance(given, Sequence) and not isinstance(given, str)
        paths = list(given) if several else [given]
        if not paths or not all(isinstance(each, str) and each for each in paths):
            raise TrainkitError(
                f"MicroBatching inside: must be the path of a submodule or several, "
                f"received {self.inside!r}. Write 'net', ('image_encoder', "
                f"'text_encoder') or 'auto'."
            )
        if not isinstance(self.inside, str):
            object.__setattr__(self, "inside", tuple(paths))
        if self.collate is not None or self.ragged:
            raise TrainkitError(
                f"MicroBatching inside: the loader batch is not cut, received "
                f"collate={self.collate!r}, ragged={self.ragged} with it. Leave these "
                f"out."
            )


def is_inside(options: Any) -> bool:
    """Whether these are options of the inner cut."""
    return isinstance(options, MicroBatching) and options.inside is not None


def _check_cost(name: str, value: Any, *, above_zero: bool) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    fits = is_number and math.isfinite(value) and value >= 0
    if not fits or (above_zero and value == 0):
        rule = "above 0" if above_zero else "of at least 0"
        raise TrainkitError(
            f"MicroBatching {name}: must be a finite number {rule}, received "
            f"{value!r}. It is counted in padded tokens."
        )


def _paths(name: str, value: Any) -> tuple[Path, ...]:
    paths = (value,) if isinstance(value, str | int) else value
    fits = isinstance(paths, Sequence) and all(
        isinstance(path, str | int) and not isinstance(path, bool) and path != ""
        for path in paths
    )
    if not fits or (name == "lengths" and not paths):
        raise TrainkitError(
            f"MicroBatching {name}: must be dotted paths or indices of the batch, "
            f"received {value!r}. Write 'attention_mask', or ['mask', 'targets.mask']."
        )
    return tuple(paths)


def _dims(path: Path, value: Any) -> tuple[int, ...]:
    dims = (value,) if isinstance(value, int) else value
    fits = isinstance(dims, Sequence) and all(
        isinstance(dim, int) and not isinstance(dim, bool) and dim != 0 for dim in dims
    )
    if not fits or isinstance(value, str | bool):
        raise TrainkitError(
            f"MicroBatching ragged {path!r}: must be a dimension or several, none of "
            f"them 0, which holds the rows, received {value!r}. Write (2, 3)."
        )
    return tuple(dims)
