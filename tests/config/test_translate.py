"""What Hydra's notation says, jsonargparse's says too."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainkit import TrainkitError
from trainkit.config.translate import to_class_path

NAMES = st.sampled_from(["a", "b", "init_args", "class_path", "model", "lr_scheduler"])
PATHS = st.sampled_from(["trainkit.PerToken", "torch.optim.SGD", "my.module.Net"])
LEAVES = st.none() | st.booleans() | st.integers() | st.text() | st.floats(-1, 1)


def containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    plain_names = st.sampled_from(["a", "b", "model"])  # a dict that is no node
    return st.lists(inner, max_size=3) | st.dictionaries(plain_names, inner, max_size=3)


def hydra_nodes(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    arguments = st.dictionaries(NAMES, inner, max_size=3)
    node = st.builds(lambda path, rest: {"_target_": path, **rest}, PATHS, arguments)
    return containers(inner) | node


def class_path_nodes(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    arguments = st.dictionaries(NAMES, inner, min_size=1, max_size=3)
    return (
        containers(inner)
        | st.builds(lambda path: {"class_path": path}, PATHS)
        | st.builds(
            lambda path, rest: {"class_path": path, "init_args": rest}, PATHS, arguments
        )
    )


def made(node: Any) -> Any:
    """What either notation describes: a class with its arguments, to any depth."""
    if isinstance(node, list):
        return [made(each) for each in node]
    if not isinstance(node, dict):
        return node
    if "_target_" in node:
        target, arguments = node["_target_"], {**node}
        del arguments["_target_"]
    elif "class_path" in node:
        target, arguments = node["class_path"], node.get("init_args", {})
    else:
        target, arguments = None, node
    return target, {name: made(each) for name, each in arguments.items()}


@given(st.recursive(LEAVES, hydra_nodes, max_leaves=20))
def test_a_hydra_node_describes_the_same_object(node: Any) -> None:
    assert made(to_class_path(node)) == made(node)


@given(st.recursive(LEAVES, class_path_nodes, max_leaves=20))
def test_what_is_a_class_path_already_stays(node: Any) -> None:
    assert to_class_path(node) == node


def test_a_file_may_mix_both() -> None:
    mixed = {
        "class_path": "my.Net",
        "init_args": {"loss": {"_target_": "my.Loss", "weights": [{"_target_": "W"}]}},
    }
    assert to_class_path(mixed) == {
        "class_path": "my.Net",
        "init_args": {
            "loss": {
                "class_path": "my.Loss",
                "init_args": {"weights": [{"class_path": "W"}]},
            }
        },
    }


def test_the_original_is_left_alone() -> None:
    inner = {"_target_": "my.Loss"}
    node = {"_target_": "my.Net", "loss": inner}
    made = to_class_path(node)
    made["init_args"]["loss"]["class_path"] = "other"
    assert node == {"_target_": "my.Net", "loss": {"_target_": "my.Loss"}}


def test_what_hydra_says_of_the_making_is_left_out() -> None:
    node = {"_target_": "my.Net", "_partial_": True, "_convert_": "all", "_args_": []}
    assert to_class_path({**node, "_recursive_": True}) == {"class_path": "my.Net"}


def test_a_value_that_must_be_given_is_not_given() -> None:
    node = {"_target_": "my.Net", "width": "???", "depth": 2, "inner": {"a": "???"}}
    arguments = {"depth": 2, "inner": {}}
    assert to_class_path(node) == {"class_path": "my.Net", "init_args": arguments}


@pytest.mark.parametrize(
    ("node", "text"),
    [
        ({"_target_": 3}, "_target_: must be a dotted path, .* received 3"),
        ({"_target_": "C", "_args_": [1]}, r"C _args_: .* by name, .* received \[1"),
        ({"_target_": "C", "_recursive_": False}, "C _recursive_: .* received False"),
    ],
)
def test_what_class_path_cannot_say_is_refused(node: Any, text: str) -> None:
    with pytest.raises(TrainkitError, match=text):
        to_class_path([{"deep": node}])


def test_translating_imports_neither_side() -> None:
    program = (
        "import sys, trainkit.config.translate as t\n"
        "t.to_class_path({'_target_': 'torch.optim.SGD'})\n"
        "print([n for n in ('torch', 'hydra', 'jsonargparse') if n in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=240
    )
    assert done.stdout.strip() == "[]", done.stderr
