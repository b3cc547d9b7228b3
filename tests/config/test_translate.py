"""Hydra's notation and jsonargparse's say the same."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainkit import TrainkitError
from trainkit.config.translate import PARTIAL_KEYS, to_class_path, to_target

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


def with_partials(node: Any, key: object = None) -> Any:
    """`_partial_: true` on every node that stands under one of `PARTIAL_KEYS`."""
    if isinstance(node, dict):
        walked = {name: with_partials(value, name) for name, value in node.items()}
        if "_target_" in node and key in PARTIAL_KEYS:
            walked["_partial_"] = True
        return walked
    return [with_partials(each) for each in node] if isinstance(node, list) else node


@given(st.recursive(LEAVES, hydra_nodes, max_leaves=20))
def test_a_hydra_node_comes_back_as_it_was(node: Any) -> None:
    node = with_partials(node)
    assert to_target(to_class_path(node)) == node


@given(st.recursive(LEAVES, class_path_nodes, max_leaves=20))
def test_a_class_path_node_comes_back_as_it_was(node: Any) -> None:
    assert to_class_path(to_target(node)) == node


@given(st.recursive(LEAVES, class_path_nodes, max_leaves=20))
def test_what_is_a_class_path_already_stays(node: Any) -> None:
    assert to_class_path(node) == node


@given(st.recursive(LEAVES, hydra_nodes, max_leaves=20))
def test_what_is_a_target_already_stays(node: Any) -> None:
    assert to_target(node) == node


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


def test_partial_stands_under_the_keys_that_are_named() -> None:
    node = {"optimizer": {"class_path": "O"}, "make_head": {"class_path": "H"}}
    assert to_target(node, partial=["make_head"]) == {
        "optimizer": {"_target_": "O"},
        "make_head": {"_target_": "H", "_partial_": True},
    }


def test_a_dict_that_has_more_than_a_class_path_is_no_node() -> None:
    record = {"class_path": "runs/7", "score": 0.5}
    assert to_target(record) == record


def test_dict_kwargs_are_arguments_too() -> None:
    node = {"class_path": "C", "init_args": {"a": 1}, "dict_kwargs": {"b": 2}}
    assert to_target(node) == {"_target_": "C", "a": 1, "b": 2}


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


@pytest.mark.parametrize(
    ("node", "text"),
    [
        (
            {"class_path": "C", "init_args": {"_target_": 1}},
            "C _target_: Hydra reserves",
        ),
        (
            {"class_path": "C", "init_args": {"a": 1}, "dict_kwargs": {"a": 2}},
            "C a: given twice, received 2 in dict_kwargs",
        ),
    ],
)
def test_what_hydra_cannot_say_is_refused(node: Any, text: str) -> None:
    with pytest.raises(TrainkitError, match=text):
        to_target({"deep": [node]})


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
