"""The options for cutting loader batches, checked where they are made."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal

from trainkit.core.nested import Path
from trainkit.core.plan.options import check_whole_number
from trainkit.errors import TrainkitError


class _Chosen:
    """A base class that is not a dataclass. Without one, jsonargparse takes a
    `class_path` only by an option that came with its version 4.46."""


SELF = "self"
"""The path of the module's own `forward`, for `inside=`."""


@dataclass(frozen=True)
class MicroBatching(_Chosen):
    """How a loader batch is cut: on the host, or inside `training_step` (`inside=`).

    Cut on the host (a split window), each loader batch is one optimizer step.
    The gradient of the step does not depend on the cut, so rows of like length share a
    micro-batch, and columns that are padding in all of it are left out. With a budget
    of `tokens`, the rows, sorted by length, are cut where this is least:

        sum over micro-batches of  rows * longest + a share of the budget

    >>> MicroBatching(tokens=4096).is_auto, MicroBatching().is_auto
    (False, True)

    Args:
        how: `"auto"`: micro-batches double over the first windows while that is faster,
            and are halved where memory runs out. Gradients are then added up over ranks
            when the window closes, past communication hooks of DDP. `size` or `tokens`
            set the cut instead: for rows that come sorted from short to long, say.
        size: the most rows in a micro-batch. Alone: as few micro-batches as that
            allows, with the least padding that so many can have.
        tokens: the most tokens in a micro-batch, with its padding: rows times the
            longest. A longer row is alone. With `size` as well, both limits hold.
        lengths: the path of a mask (0 is padding), or of the strategy's labels. Several
            paths if several groups of tensors are ragged, as in an encoder with a
            decoder. Default: `"attention_mask"` if there is one, otherwise the
            strategy's labels. In a list of samples, the path of each sample's length,
            without which they are cut by their number.
        shared: paths of fields as long as the batch that every micro-batch gets whole
            all the same. What is not as long as the batch is always whole.
        trim: whether columns that are padding in a whole micro-batch are left out.
            Whether the model computes the same without them is measured on a copy, with
            the first batch, of which some rows are made to end earlier if none has
            padding; if it does not, nothing is trimmed.
        collate: the function that makes a batch from a list of samples, for a loader
            that yields lists (`collate_fn=list`).
        documents: what tells documents apart that share a row. `"auto"`: a flattened
            batch, of one row, is cut between its documents, if offsets, numbers, a mask
            or positions tell them apart; packed rows are cut by rows. The path of such
            a field: rows are taken apart into documents. `"off"`: rows are cut. With
            `inside`, its last part is the name of an argument.
        shapes: with a budget of tokens: the most shapes that micro-batches have in a
            run, for compiled models; they are filled with rows and columns that weigh
            nothing. The widths, such as `(512, 256, 128)`, of which the greatest holds
            the longest row; each shape has as many rows as the budget allows. A number:
            widths of the budget, a fourth of it, a sixteenth, and so on. Of a flattened
            batch they are the tokens of a row: the budget, half of it, a fourth.
        pool: how many loader batches, padded ones or lists of samples, are cut together
            and make one optimizer step, for loaders whose rows' lengths are not known
            before. They wait on the host until the last has come. The Trainer's
            `accumulate_grad_batches` is set.
        inside: the inner cut. The loader batch is not cut: `training_step` runs once on
            all of it, and the submodules at these paths run in chunks of rows, or of
            the documents of one row that an argument tells apart, without a graph, and
            once more with one in the backward pass. The loss may then be
            anything, and needs no strategy. `"auto"` finds the submodules, `"self"` is
            the module's own `forward`. With it, `size`, `tokens`, `lengths` are
            about chunks, and `shared` names arguments.
    """

    how: Literal["auto"] = "auto"
    _: KW_ONLY
    size: int | None = None
    tokens: int | None = None
    lengths: Path | Sequence[Path] | None = None
    shared: Sequence[Path] = ()
    trim: bool = True
    collate: Callable[[list[Any]], Any] | None = None
    documents: str = "auto"
    shapes: int | Sequence[int] | None = None
    pool: int | None = None
    inside: str | Sequence[str] | None = None

    def __post_init__(self) -> None:
        for name, (fits, rule) in _RULES.items():
            if not fits(getattr(self, name)):
                raise TrainkitError(
                    f"MicroBatching {name}: must be {rule}, received "
                    f"{getattr(self, name)!r}."
                )
        for name in ("size", "tokens", "pool"):
            if getattr(self, name) is not None:
                check_whole_number(f"MicroBatching {name}", getattr(self, name))
        # Configurations bring lists of their own kind.
        object.__setattr__(self, "shared", _several(self.shared))
        if self.shapes is not None:
            self._check_shapes(self.shapes)
        for name in ("lengths", "inside"):
            if not isinstance(value := getattr(self, name), str | int | None):
                object.__setattr__(self, name, tuple(value))
        of_batch = ("shared", "trim")
        self._exclude("collate", of_batch, "samples are cut before there is a batch")
        of_shapes = ("collate", "trim")
        self._exclude("shapes", of_shapes, "micro-batches are filled to few widths")
        of_host = ("collate", "shapes", "pool")
        self._exclude("inside", of_host, "the loader batch is not cut")

    @property
    def unit(self) -> str:
        """What `size` counts, as far as it is known before a batch is seen."""
        return "rows" if self.documents in ("auto", "off") else "documents"

    @property
    def is_auto(self) -> bool:
        """Whether the size is to be found."""
        return self.size is None and self.tokens is None

    @property
    def inside_paths(self) -> tuple[str, ...]:
        """The paths that `inside` names."""
        return () if self.inside is None else _several(self.inside)

    @property
    def length_paths(self) -> tuple[Path, ...]:
        """The paths of the lengths; empty if they are to be found."""
        return () if self.lengths is None else _several(self.lengths)

    def _check_shapes(self, shapes: int | Sequence[int]) -> None:
        several = _several(shapes)
        for each in several:
            check_whole_number("MicroBatching shapes", each)
        if not isinstance(shapes, int):
            object.__setattr__(self, "shapes", several)
        budget = self.tokens
        if budget is None or not isinstance(shapes, int) and max(several) > budget:
            raise TrainkitError(
                f"MicroBatching shapes: must be a number of shapes, or their widths, "
                f"none above the budget tokens=, as MicroBatching(tokens=4096, "
                f"shapes=(512, 256, 128)), received shapes={shapes!r} and "
                f"tokens={budget!r}."
            )

    def _exclude(self, name: str, others: Sequence[str], why: str) -> None:
        """Refuse an option beside others."""
        given = {each: getattr(self, each) for each in (name, *others)}
        for each, value in [*given.items()]:
            if value in (type(self).__dataclass_fields__[each].default, ()):
                del given[each]
        if name in given and len(given) > 1:
            options = ", ".join(f"{n}={value!r}" for n, value in given.items())
            raise TrainkitError(
                f"MicroBatching {name}: {why}, received {options}. Leave out one or "
                f"the other."
            )


def is_inside(options: Any) -> bool:
    """Whether these are options of the inner cut."""
    return isinstance(options, MicroBatching) and options.inside is not None


def _several(value: Any) -> tuple[Any, ...]:
    """One or several as a tuple; what is no sequence is one."""
    is_several = isinstance(value, Sequence) and not isinstance(value, str)
    return tuple(value) if is_several else (value,)


def _are(kind: Any, values: Any, *, least: int = 0) -> bool:
    """Whether one value or several are of a kind; true and false are no numbers."""
    found = _several(values)
    are_alike = all(isinstance(e, kind) and not isinstance(e, bool) for e in found)
    return are_alike and "" not in found and len(found) >= least


_PATHS = "dotted paths or indices of the batch, as 'mask' or ['mask', 'targets.mask']"
_RULES: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "how": (
        lambda how: how == "auto",
        "'auto'; for a cut of your own write MicroBatching(size=4) or (tokens=4096)",
    ),
    "lengths": (lambda paths: paths is None or _are(str | int, paths, least=1), _PATHS),
    "shared": (lambda paths: _are(str | int, paths), _PATHS),
    "documents": (
        lambda documents: isinstance(documents, str) and documents != "",
        "'auto', 'off', or the path of the field that tells documents apart",
    ),
    "trim": (lambda trim: isinstance(trim, bool), "True or False"),
    "collate": (
        lambda collate: collate is None or callable(collate),
        "the function that makes a batch of a list of samples",
    ),
    "shapes": (
        lambda shapes: shapes is None or _are(int, shapes, least=1),
        "a number of shapes, or their widths, as (512, 256, 128)",
    ),
    "inside": (
        lambda paths: paths is None or _are(str, paths, least=1),
        "the path of a submodule or several, as 'net', ('image_encoder', "
        "'text_encoder') or 'auto'",
    ),
}
"""What an option must be, and how to say it."""
