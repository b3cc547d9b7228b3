"""`trainkit lengths`: write the lengths of a data set's rows, for samplers that ask."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trainkit.cli.composition import aside, built, words_behind
from trainkit.cli.console import Arguments, say_loading
from trainkit.errors import TrainkitError

_ABOUT = """\
Write the lengths of a data set's rows to a file. After `trainkit lengths` stand the
words with which one would train. Give the file to a sampler as `lengths=`:
TokenBudgetSampler or WindowSampler.
"""
_EXAMPLES = """\
examples:
  trainkit lengths train experiment=completions
  trainkit lengths --dataset train_rows --out data/lengths.npy train data=my_data
"""


def main(argv: list[str]) -> int:
    """Run `trainkit lengths`, and return the exit status."""
    options, words = _parse(argv)
    say_loading("lengths", argv)
    from tqdm import tqdm

    from trainkit.data.length_sampler import write_lengths

    target = Path(options.out)
    if not target.parent.is_dir():
        raise TrainkitError(
            f"trainkit lengths --out: must be a file in a folder that exists, received "
            f"{options.out}."
        )
    door: Any = words[0]
    with aside(door) as folder:
        rows = _rows(*built("trainkit lengths", words, folder), options.dataset)
        numbers = tqdm(range(len(rows)), "lengths", unit=" rows")
        found = [length_of(rows[n], options.field) for n in numbers]
    if not found:
        raise TrainkitError(
            "trainkit lengths: the data set must have rows, and is empty."
        )
    write_lengths(target, found)
    total = f"{sum(found):,} tokens, the longest row has {max(found):,}"
    print(f"trainkit | lengths: {target}, {len(found):,} rows, {total}")
    return 0


def _parse(argv: list[str]) -> tuple[Any, list[str]]:
    parser = Arguments(prog="trainkit lengths", description=_ABOUT, epilog=_EXAMPLES)
    parser.usage = "trainkit lengths [options] train|fit ..."
    add = parser.add_argument
    out = "the file (default lengths.npy)"
    add("--out", default="lengths.npy", metavar="FILE", help=out)
    field = "the path of a row's field that has its length (default input_ids)"
    add("--field", metavar="PATH", help=field)
    dataset = (
        "the data module's attribute with the rows (default: those of "
        "train_dataloader(), which may need the file itself)"
    )
    add("--dataset", metavar="NAME", help=dataset)
    return words_behind(parser, argv, example="train experiment=completions")


def _rows(trainer: Any, module: Any, data: Any, name: str | None) -> Any:
    """The data set that is trained on."""
    owner = module if data is None else data
    owner.trainer = trainer  # which a hook may look at
    owner.prepare_data()
    owner.setup("fit")
    if name is None:
        rows = getattr(owner.train_dataloader(), "dataset", None)
    else:
        rows = getattr(owner, name, None)
    if not hasattr(rows, "__len__") or not hasattr(rows, "__getitem__"):
        where = name or "train_dataloader().dataset"
        raise TrainkitError(
            f"trainkit lengths: must find rows by index, and "
            f"{type(owner).__name__}.{where} is {type(rows).__name__}. Name the "
            f"attribute that has them: --dataset NAME. A stream has no lengths before "
            f"it is read: MicroBatching(tokens=4096, pool=8) cuts it."
        )
    return rows


def length_of(row: Any, field: str | None) -> int:
    """The length of what stands at a path of a row; None: `input_ids`, or the row."""
    from trainkit.core.nested import describe, fields_of, is_array, lookup

    fields = fields_of(row)
    if field is not None:
        value: Any = lookup(row, field)
    elif fields is not None:
        value = fields.get("input_ids")
        if len(getattr(value, "shape", ())) > 1:
            value = None  # a batch of one row
    else:
        are_fields = isinstance(row, list | tuple) and any(map(is_array, row))
        value = None if are_fields else row
    try:
        return len(value)
    except TypeError:
        raise TrainkitError(
            f"trainkit lengths --field: must name what has a row's length, and "
            f"{field or 'input_ids'!r} of a row has none. The row is {describe(row)}."
        ) from None
