"""Translates Hydra's `_target_` into jsonargparse's `class_path`.

Both describe an object by its class and arguments, to any depth:

    {_target_: C, a: 1}    and    {class_path: C, init_args: {a: 1}}

The function takes and returns plain data, and imports nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainkit.errors import TrainkitError

OF_HYDRA = ("_target_", "_partial_", "_recursive_", "_convert_", "_args_")
"""What Hydra reads in a node, beside the arguments of its target."""


def to_class_path(node: Any) -> Any:
    """Write Hydra's `_target_` as jsonargparse's `class_path`.

    A `class_path` stays, so a file may mix both notations.

    - `_partial_` is left out: jsonargparse knows from the type of the parameter whether
      it needs an object or a callable that makes one.
    - `_convert_` is left out: jsonargparse always passes plain dicts and lists.
    - `???` (a value that must be given) is left out, and so counts as not given.
    - `_args_` and `_recursive_: false` are refused: jsonargparse has nothing similar.

    >>> to_class_path({"lr": 1, "accumulation": {"_target_": "trainkit.PerSample"}})
    {'lr': 1, 'accumulation': {'class_path': 'trainkit.PerSample'}}
    >>> to_class_path({"_target_": "trainkit.PerToken", "labels": 1})
    {'class_path': 'trainkit.PerToken', 'init_args': {'labels': 1}}

    Args:
        node: dicts, lists and plain values.

    Raises:
        TrainkitError: a target is not a dotted path, or an argument of Hydra has no
            counterpart.
    """
    if isinstance(node, list | tuple):
        return [to_class_path(each) for each in node]
    if not isinstance(node, Mapping):
        return node
    given = {name: each for name, each in node.items() if each != "???"}
    if "_target_" in given:
        return _target_as_class_path(given)
    return {name: to_class_path(each) for name, each in given.items()}


def _target_as_class_path(node: Mapping[str, Any]) -> dict[str, Any]:
    target = node["_target_"]
    for name, is_refused, rule in (
        ("_target_", not isinstance(target, str), "must be a dotted path"),
        ("_args_", bool(node.get("_args_")), "arguments must be given by name"),
        ("_recursive_", node.get("_recursive_") is False, "must be left out"),
    ):
        if is_refused:
            raise TrainkitError(
                f"{target} {name}: {rule}, since class_path has nothing similar, "
                f"received {node[name]!r}."
            )
    arguments = {n: to_class_path(v) for n, v in node.items() if n not in OF_HYDRA}
    made = {"class_path": target}
    return {**made, "init_args": arguments} if arguments else made
