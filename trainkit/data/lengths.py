"""The lengths of rows: as numbers, or in a file that is written once."""

from __future__ import annotations

import os
from collections.abc import Iterable
from numbers import Integral
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from trainkit.core.plan.options import check_kind
from trainkit.errors import TrainkitError


def checked_lengths(
    name: str, lengths: Iterable[int] | Tensor | str | os.PathLike[str]
) -> list[int]:
    """The lengths as a list; refuse what is not the length of a row.

    Args:
        name: of the sampler that they are for.
        lengths: numbers, or the path of a file that `write_lengths` has written.
    """
    if isinstance(lengths, str | os.PathLike):
        lengths = _read(name, Path(lengths))
    given: Any = lengths
    given = given.tolist() if hasattr(given, "tolist") else given
    what = "a number for each row, or a file of them"
    check_kind(f"{name} lengths", given, Iterable, what)
    found = list(given)
    for row, length in enumerate(found):
        is_whole = isinstance(length, Integral) and not isinstance(length, bool)
        if not is_whole or length < 1:
            raise TrainkitError(
                f"{name} lengths: must be whole numbers of at least 1, received "
                f"{length!r} for row {row}. Leave empty rows out of the data."
            )
    # numpy's integers in a checkpoint would prevent loading it with weights_only.
    return [int(length) for length in found]


def write_lengths(path: str | os.PathLike[str], lengths: Iterable[int]) -> None:
    """Write lengths to a file, completely or not at all."""
    target = Path(path)
    part = target.with_name(target.name + ".part")
    with part.open("wb") as file:
        np.save(file, np.fromiter(lengths, dtype=np.int64))
    os.replace(part, target)


def _read(name: str, path: Path) -> Any:
    try:
        return np.load(path, allow_pickle=False)
    except (OSError, ValueError) as error:
        raise TrainkitError(
            f"{name} lengths: must be numbers, or a file of them that `trainkit "
            f"lengths` has written, received {str(path)!r} ({error})."
        ) from None
