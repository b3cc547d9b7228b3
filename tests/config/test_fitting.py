"""A value fits a type as it is, not as a command line would read it."""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Optional, TypeVar, Union

import pytest
import torch
from lightning.pytorch import Trainer

from trainkit.config.check import _hints
from trainkit.config.fitting import fits, has_text


class Color(enum.Enum):
    RED = 1


class Word(str, enum.Enum):
    RED = "the red one"


@dataclass
class Sizes:
    width: int = 8


Free = TypeVar("Free")
Bound = TypeVar("Bound", bound=int)

TEXTS: list[tuple[Any, Any]] = [
    ("false", bool),
    ("yes", bool),
    ("8", int),
    ("0.1", float),
    ("null", Optional[int]),  # noqa: UP045
    ("1", Literal[1, 2]),
    ([1, "2"], list[int]),
    ("[1, 2]", list[int]),
    ([[1, "2"]], list[list[int]]),
    ([1, "2"], tuple[int, int]),
    ([1, "2"], tuple[int, ...]),
    (["1"], set[int]),
    ({"a": "1"}, dict[str, int]),
    ({"1": 2}, dict[int, int]),
    ("RED", Color),
    ("RED", Word),
    ("torch.nn.ReLU", type),
    ("torch.nn.ReLU", torch.nn.Module),
    ("torch.relu", Callable),
    ("torch.float32", torch.dtype),
    ("8", Sizes),
]


@pytest.mark.parametrize(("value", "hint"), TEXTS)
def test_a_text_is_no_other_thing(value: Any, hint: Any) -> None:
    kept = str(value)
    assert not fits(value, hint)
    assert has_text(value)
    assert str(value) == kept


@pytest.mark.parametrize(
    ("value", "hint"),
    [
        ("8", str),
        ("8", Any),
        ("8", object),
        ("8", int | str),
        ("8", Union[int, str]),  # noqa: UP007
        ("null", str | None),
        ("a", Path),
        ("a", str | Path),
        ("16", Literal[16, "16"]),
        ("16", Literal[16] | Literal["16", "bf16"] | None),
        (["1", 2], list[int | str]),
        (["1"], list[Any]),
        (["1"], list[Literal["1", "2"]]),
        (["1", 2], tuple[str | int, int]),
        ({"1": "2"}, dict[str, int | str]),
        ({"a": ["1"]}, dict[str, Any]),
        (["a"], Sequence[str]),
        (["a", "b"], set[str]),
        ("torch.relu", Callable | str),
        (1, float),
        ([1, 2], tuple[int, int]),
        ([1, 2], tuple[int, ...]),
        ([1, 2, 3], tuple[int, ...]),
        ("x", Free),
        (Color.RED, Color),
    ],
)
def test_what_may_be_a_text_is_left_alone(value: Any, hint: Any) -> None:
    assert fits(value, hint)


@pytest.mark.parametrize(
    ("hint", "expected"),
    [
        (None, True),
        (type(None), True),
        (Any, True),
        (int | None, True),
        (Literal["a", None], True),
        (Literal["a"] | Literal[None], True),
        (Free, True),
        (Bound, False),
        (int, False),
        (int | str, False),
        (Literal["a"], False),
    ],
)
def test_null(hint: Any, expected: bool) -> None:
    assert fits(None, hint) is expected


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("precision", "16", True),
        ("precision", "15", False),
        ("devices", "2", True),
        ("deterministic", "warn", True),
        ("deterministic", "false", False),
        ("val_check_interval", {"minutes": 5}, True),
        ("val_check_interval", {"minutes": "5"}, False),
        ("val_check_interval", "00:00:05:00", True),
        ("max_steps", "5", False),
    ],
)
def test_arguments_of_lightning(name: str, value: Any, expected: bool) -> None:
    assert fits(value, _hints(Trainer)[name]) is expected
