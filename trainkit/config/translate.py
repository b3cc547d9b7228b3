"""Translates between Hydra's `_target_` and jsonargparse's `class_path`.

Both describe an object by its class and arguments, to any depth:

    {_target_: C, a: 1}    and    {class_path: C, init_args: {a: 1}}

The functions take and return plain data, and import nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from trainkit.errors import TrainkitError

TARGET = "_target_"
PARTIAL = "_partial_"
CLASS_PATH = "class_path"

PARTIAL_KEYS = ("optimizer", "scheduler", "lr_scheduler")
"""Keys under which Hydra needs `_partial_: true`, since the parameters or the optimizer
come later."""

_OF_CLASS_PATH = {CLASS_PATH, "init_args", "dict_kwargs"}
OF_HYDRA = (TARGET, PARTIAL, "_recursive_", "_convert_", "_args_")


def to_class_path(node: Any) -> Any:
    """Write Hydra's `_target_` as jsonargparse's `class_path`.

    A `class_path` stays, so a file may mix both notations.

    - `_partial_` is left out: jsonargparse knows from the type of the parameter whether
      it needs an object or a callable that makes one. `to_target` puts it back.
    - `_convert_` is left out: jsonargparse always passes plain dicts and lists.
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
    if isinstance(node, Mapping) and TARGET in node:
        return _target_as_class_path(node)
    return _inside(node, to_class_path)


def to_target(node: Any, *, partial: Collection[str] = PARTIAL_KEYS) -> Any:
    """Write jsonargparse's `class_path` as Hydra's `_target_`.

    The inverse of `to_class_path`, for nodes that have `_partial_: true` under the keys
    of `partial` only, and that contain no defaults of Hydra's.

    >>> to_target({"class_path": "trainkit.PerToken", "init_args": {"labels": 1}})
    {'_target_': 'trainkit.PerToken', 'labels': 1}
    >>> to_target({"optimizer": {"class_path": "torch.optim.SGD"}})
    {'optimizer': {'_target_': 'torch.optim.SGD', '_partial_': True}}

    Args:
        node: dicts, lists and plain values.
        partial: the keys of nodes that need `_partial_: true`, since they receive
            more arguments later. `class_path` has no such mark.

    Raises:
        TrainkitError: an argument has a name that Hydra reserves, or is given twice.
    """

    def walk(inner: Any, key: object = None) -> Any:
        if _is_class_path(inner):
            return _class_path_as_target(inner, walk, is_partial=key in partial)
        if isinstance(inner, Mapping):
            return {name: walk(value, name) for name, value in inner.items()}
        return _inside(inner, walk)

    return walk(node)


def _inside(node: Any, function: Callable[[Any], Any]) -> Any:
    if isinstance(node, Mapping):
        return {name: function(value) for name, value in node.items()}
    if isinstance(node, list | tuple):
        return [function(value) for value in node]
    return node


def _target_as_class_path(node: Mapping[str, Any]) -> dict[str, Any]:
    target = node[TARGET]
    for name, is_refused, rule in (
        (TARGET, not isinstance(target, str), "must be a dotted path"),
        ("_args_", bool(node.get("_args_")), "arguments must be given by name"),
        ("_recursive_", node.get("_recursive_") is False, "must be left out"),
    ):
        if is_refused:
            raise TrainkitError(
                f"{target} {name}: {rule}, since class_path has nothing similar, "
                f"received {node[name]!r}."
            )
    arguments = {n: to_class_path(v) for n, v in node.items() if n not in OF_HYDRA}
    made: dict[str, Any] = {CLASS_PATH: target}
    return {**made, "init_args": arguments} if arguments else made


def _is_class_path(node: Any) -> bool:
    return (
        isinstance(node, Mapping)
        and isinstance(node.get(CLASS_PATH), str)
        and _OF_CLASS_PATH.issuperset(node)
    )


def _class_path_as_target(
    node: Mapping[str, Any], walk: Callable[..., Any], *, is_partial: bool
) -> dict[str, Any]:
    path = node[CLASS_PATH]
    made: dict[str, Any] = {TARGET: path}
    if is_partial:
        made[PARTIAL] = True
    for source in ("init_args", "dict_kwargs"):
        for name, value in (node.get(source) or {}).items():
            if name in OF_HYDRA or name in made:
                why = "Hydra reserves this name" if name in OF_HYDRA else "given twice"
                raise TrainkitError(
                    f"{path} {name}: {why}, received {value!r} in {source}. Rename the "
                    f"argument, or remove one."
                )
            made[name] = walk(value, name)
    return made
