"""Advice of the library in the words of a command: overrides, or options.

The library speaks Python, as `MicroBatching(size=8)`. Who trains from a shell has no
place to write that, but `micro_batching=size micro_batching.size=8`.
"""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

from trainkit.errors import TrainkitError

Door = Literal["train", "fit"]
"""The command at which a training was asked for."""

_GROUPS = {
    "MicroBatching": ("micro_batching", "how"),
    "BatchNormGuard": ("batchnorm", "policy"),
    "LRScaling": ("lr_scaling", "rule"),
    "PerToken": ("accumulation", "labels"),
    "PerSample": ("accumulation", ""),
    "PerClassWeight": ("accumulation", "weight"),
    "Weighed": ("accumulation", "by"),
    "Uniform": ("accumulation", ""),
}
"""The group of each class, and the name of its first argument."""

_ARGUMENTS = r"\((?:[^()]|\([^()]*\))*\)"
# {"name": PerToken(), ...} has no override.
_CALL = re.compile(
    rf"(?:(?:self\.)?[a-z_]+ = )?(?<!\": )\b((?:{'|'.join(_GROUPS)}){_ARGUMENTS})"
)
_TRAINER = re.compile(r"(?<![\w.])(accumulate_grad_batches=\d+)")
_WORD = re.compile(r"(?<![\w.])(checks|proof)=(['\"])(\w+)\2")
_CHECK = re.compile(r"trainkit\.check\(module, data\)")


def in_words(door: Door, text: str) -> str:
    """A text whose calls in Python are written as the command takes them.

    >>> in_words("train", 'Cut it: MicroBatching(size=8, inside="auto").')
    'Cut it: micro_batching=inside micro_batching.size=8 micro_batching.inside=auto.'
    >>> in_words("fit", "accumulation = PerToken('targets')")
    '--accumulation=PerToken --accumulation.labels=targets'
    """
    said = _CALL.sub(lambda found: _of(door, found[1]) or found[0], text)
    begin = "--" if door == "fit" else ""
    said = _TRAINER.sub(rf"{begin}trainer.\1", _WORD.sub(rf"{begin}\1=\3", said))
    return _CHECK.sub(f"`trainkit check {door} ...` with the same words", said)


@contextmanager
def spoken(door: Door) -> Iterator[None]:
    """Give errors, warnings and rows of tables in the words of a command."""
    from trainkit.lit.callback.table import wording

    show: Any = warnings.showwarning

    def showwarning(message: Any, category: Any, *place: Any, **more: Any) -> None:
        said = in_words(door, str(message))
        changed = message if said == str(message) else category(said)
        show(changed, category, *place, **more)

    before = wording.set(lambda text: in_words(door, text))
    warnings.showwarning = showwarning
    try:
        yield
    except TrainkitError as error:
        error.args = (in_words(door, str(error)),)
        raise
    finally:
        wording.reset(before)
        if warnings.showwarning is showwarning:
            warnings.showwarning = show


def _of(door: Door, call: str) -> str:
    """The words of one call; empty if its arguments have none."""
    try:
        tree: Any = ast.parse(call, mode="eval").body
    except SyntaxError:
        return ""
    name = tree.func.id
    group, first = _GROUPS[name]
    if len(tree.args) > bool(first):
        return ""
    options = dict(zip([first], tree.args, strict=False))
    options |= {str(each.arg): each.value for each in tree.keywords}
    if any(isinstance(each, ast.Lambda | ast.Call) for each in options.values()):
        return ""
    values = {key: _text(each) for key, each in options.items()}
    words = _chosen(door, name, group, values)
    begin = f"--{group}" if door == "fit" else group
    words += [f"{begin}.{key}={each}" for key, each in values.items()]
    return " ".join(words)


def _chosen(door: Door, name: str, group: str, values: dict[str, str]) -> list[str]:
    """The word that chooses the object; what it says already leaves `values`."""
    if group == "accumulation":
        snake = re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()
        return [f"--{group}={name}"] if door == "fit" else [f"{group}={snake}"]
    if door == "fit":
        return []
    if name == "MicroBatching":
        values.pop("how", None)
        kinds = ("inside", "tokens", "size")
        return [f"{group}={next((k for k in kinds if k in values), 'auto')}"]
    return [f"{group}={values.pop(_GROUPS[name][1], '...')}"]


def _text(value: ast.expr) -> str:
    """A value without spaces, as a shell and Hydra read it."""
    if isinstance(value, ast.Constant):
        if value.value is None or isinstance(value.value, bool):
            return "null" if value.value is None else str(value.value).lower()
        return "..." if value.value is ... else str(value.value)
    return ast.unparse(value).replace(" ", "").replace("'", "")
