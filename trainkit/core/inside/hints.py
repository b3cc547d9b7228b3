"""What to do about a module that does not run in chunks of rows as it should."""

from __future__ import annotations

import contextlib
import re
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from trainkit.core.batch_norm.layers import listed
from trainkit.core.inside.arguments import Arguments, length_of, lists_of
from trainkit.core.inside.rows import Plan, multiples_of
from trainkit.errors import TrainkitError

SHARED = "or list in shared= the arguments that all rows need"
BY_REASON = {
    r"is an? \w*Cache": "Pass use_cache=False to it, or name a module within it{}",
    "does not require grad": "Chunks run without a graph first: within its forward, "
    "wrap what calls autograd.grad in torch.enable_grad(), with an input that "
    "requires_grad_() there",
    r"of shape \[\], has no rows": "Compute that outside of it, and name a module "
    "within it that makes the hidden states{}",
    "does not run": f"If it runs uncut, name a module within it{{}}, {SHARED}",
    "": f"Name a module within it{{}}, or one around it, {SHARED}",
}
"""What to do, by a pattern of the reason; the first that fits. {} is for names."""

SHARE = 0.1
"""A submodule that holds less of the parameters is not worth a name."""


def refusal(
    reason: str, call: Arguments, module: nn.Module, name: str
) -> TrainkitError:
    """The error of a call that cannot run in chunks of rows.

    Args:
        reason: why.
        call: its arguments.
        module: which was called.
        name: of the module, for messages.
    """
    paths = call.paths
    if len(paths) > 9:  # a list is one argument
        paths = list(dict.fromkeys(re.sub(r"(\.\d+)+$", "", each) for each in paths))
    hints = [*_of_arguments(call), *_of_layers(module, name, reason)]
    if not hints:
        hint = next(text for at, text in BY_REASON.items() if re.search(at, reason))
        within = [repr(each) for each in paths_within(module, name)]
        hints = [hint.format(within and f", such as {' and '.join(within)}" or "")]
    return TrainkitError(
        f"{name}: it cannot run in chunks of rows: {reason.rstrip('.')}. Its arguments "
        f"are {listed(paths, at_most=9)}, of {call.rows} rows. {'. '.join(hints)}."
    )


def paths_within(module: nn.Module, name: str) -> list[str]:
    """The paths of a module's large submodules, at most three; if some have submodules
    of their own, of these.

    Args:
        module: whose submodules they are.
        name: its own path.
    """
    before = "" if name == "self" or "(" in name else f"{name}."
    children = [
        (sum(p.numel() for p in child.parameters()), f"{before}{path}", child)
        for path, child in module.named_children()
        if type(child).forward is not nn.Module.forward
    ]
    least = SHARE * sum(p.numel() for p in module.parameters())
    large = [(path, child) for size, path, child in children if size > least]
    deep = [(path, child) for path, child in large if list(child.children())]
    return [path for path, _ in deep or large][:3]


def _of_arguments(call: Arguments) -> Iterator[str]:
    lists: dict[str, list[Any]] = defaultdict(list)
    others = set()
    for path, value in zip(call.paths, call.values, strict=True):
        place, _, last = path.rpartition(".")
        if place and last.isdigit():
            lists[place].append(value)
        elif isinstance(value, Tensor) and value.ndim:
            others.add(len(value))
        if last == "batch_sizes":
            yield (
                f"{place or 'An argument'} is a PackedSequence, whose rows cannot be "
                f"cut: pass the padded tensor and the lengths, and pack them inside "
                f"the module"
            )
    for place, at in lists_of(call).items():
        if length_of(call, at) == call.rows:
            yield (
                f"{place} has {call.rows} entries, as many as there are rows, and each "
                f"chunk gets all of them: make it one tensor"
            )
    for place, values in lists.items():
        kinds = {type(each) for each in values}
        if kinds == {Tensor} and len(values) > 1 and call.rows not in others:
            yield (
                f"{place} is a list of {len(values)} tensors: if they are samples, "
                f"stack them into one tensor"
            )


def _of_layers(module: nn.Module, name: str, reason: str) -> Iterator[str]:
    layers = [
        path or name
        for path, each in module.named_modules()
        if getattr(each, "batch_first", True) is False
    ]
    if layers and "depend" in reason and "shape []" not in reason:
        yield (
            f"Rows must be dimension 0 of its arguments. Where they are dimension 1, "
            f"as in {listed(layers, at_most=2)}, use batch_first=True, or transpose "
            f"inside the module"
        )


def shared_by_chunks(call: Arguments, plan: Plan) -> Iterator[str]:
    """Tells of arguments with as many rows as the others, of which each chunk gets all.

    Args:
        call: the arguments.
        plan: which of them are cut.
    """
    could = multiples_of(call.values, call.rows, call.shared)
    entries = zip(call.paths, call.values, could, plan.multiples, strict=True)
    whole = [
        path
        for path, value, one, own in entries
        if one == 1 and not own and not _is_small(value)
    ]
    if whole:
        yield (
            f"every chunk gets all {call.rows} rows of {listed(whole)}, since one "
            f"row's outputs need them, and computes on them anew. Name the modules "
            f"within it that see each row alone, or list the argument in shared= if "
            f"that is meant."
        )


def _is_small(value: Tensor) -> bool:
    """Whether it may be a table or a mask, from which nothing dear is computed."""
    is_table = value.ndim < 3 and value.is_floating_point()
    return is_table or value.ndim < 2 or value.shape[1:] == value.shape[:1]


@contextlib.contextmanager
def noted(text: str) -> Iterator[None]:
    """An error that is raised meanwhile gets a note, where Python knows notes."""
    try:
        yield
    except Exception as error:
        getattr(error, "add_note", lambda _: None)(text)
        raise
