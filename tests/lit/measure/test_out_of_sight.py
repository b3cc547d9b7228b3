"""What stands in slots, cells and functions is put back; what cannot be, is said."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.lit.measure.starting import fit, said, tokens
from tests.lit.proof.zoo import Tokens
from trainkit import PerToken
from trainkit.lit.rerun import snapshot


class Slots:
    __slots__ = ("number",)

    def __init__(self) -> None:
        self.number = 0


def counter() -> Callable[[], int]:
    number = 0

    def count() -> int:
        nonlocal number
        number += 1
        return number

    return count


def function() -> int:
    vars(function)["number"] = vars(function).get("number", 0) + 1
    return vars(function)["number"]


def default(held: list[int] = []) -> int:  # noqa: B006
    held.append(0)
    return len(held)


def cached(number: int) -> int:
    CALLED.append(number)
    return len(CALLED)


def start() -> None:
    """All of this file as it is when it is imported."""
    global COUNT, CACHED, FULL, NUMBERS, HELD
    CALLED.clear()
    COUNT, HELD, NUMBERS = counter(), Slots(), iter(range(1000))
    CACHED, FULL = functools.cache(cached), functools.lru_cache(1)(cached)
    vars(function).clear()
    default.__defaults__ = ([],)


CALLED: list[int] = []
COUNT: Callable[[], int]
CACHED: Any
FULL: Any
NUMBERS: Any
HELD: Slots


class Moving(Tokens):
    """Its gradient is multiplied by a number that moves with each step."""

    def __init__(self, move: Callable[[Any], int]) -> None:
        super().__init__()
        self.move, self.own, self.count = move, Slots(), counter()

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Any:
        self.batch_idx = batch_idx
        return super().training_step(batch, batch_idx) * self.move(self)


def of_slots(held: Any) -> int:
    held.number += 1
    return held.number


def filled(_: Any) -> int:
    FULL(1)
    return FULL(2)


MOVES: dict[str, Callable[[Any], int]] = {
    "slots": lambda module: of_slots(module.own),
    "slots in a file": lambda module: of_slots(HELD),
    "a cell": lambda module: module.count(),
    "a cell in a file": lambda module: COUNT(),
    "a function's attribute": lambda module: function(),
    "a default": lambda module: default(),
    "an empty cache": lambda module: CACHED(module.batch_idx),
    "an iterator in a file": lambda module: next(NUMBERS) + 1,
}


def trained(move: Callable[[Any], int], proof: str) -> list[Tensor]:
    start()
    torch.manual_seed(0)
    module = Moving(move)
    fit(module, tokens(), PerToken(), proof=proof)
    return list(module.state_dict().values())


def is_same(move: Callable[[Any], int]) -> bool:
    pairs = zip(trained(move, "warn"), trained(move, "off"), strict=True)
    return all(torch.equal(one, other) for one, other in pairs)


@pytest.mark.parametrize("name", MOVES)
def test_training_is_as_without_the_proof(
    capsys: pytest.CaptureFixture[str], name: str
) -> None:
    assert is_same(MOVES[name])
    line = said(capsys)
    if name == "an iterator in a file":
        assert line.startswith("not measured: training_step: it takes from NUMBERS")
    else:
        assert line.startswith("exact on 5 of your rows")


@pytest.mark.filterwarnings("ignore:proof")
@pytest.mark.parametrize("name", [n for n in MOVES if "iterator" not in n])
def test_it_would_not_be_if_nothing_were_put_back(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    if "cache" in name:  # of which nothing else knows
        monkeypatch.setattr(snapshot, "cache_keeper", lambda function: dict)
    else:
        monkeypatch.setattr(snapshot.Snapshot, "restore", lambda self: None)
    assert not is_same(MOVES[name])


def test_a_cache_that_cannot_be_put_back_is_said(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fitted(max_entries: int) -> str:
        global FULL
        start()
        FULL = functools.lru_cache(max_entries)(cached)
        FULL(0)
        fit(Moving(filled), tokens(), PerToken())
        return said(capsys)

    with pytest.warns(UserWarning, match="has changed this training: .*lru.*: cached"):
        line = fitted(1)
    assert line.startswith("not measured: a full or cleared functools.lru_cache")
    assert fitted(3).startswith("exact")  # and no warning


class Holding(Tokens):
    held: Any

    def __init__(self, held: Any) -> None:
        super().__init__()
        self.held = held


@pytest.mark.parametrize("holds", [lambda each: [each], lambda each: {"a": (each,)}])
def test_an_iterator_within_an_attribute_is_seen_before_anything_runs(
    capsys: pytest.CaptureFixture[str], holds: Any
) -> None:
    fit(Holding(holds([itertools.count()])), tokens(), PerToken())
    line = said(capsys)
    assert line.startswith("not measured: held is an iterator, or holds one")
    fit(Holding(holds([0])), tokens(), PerToken())
    assert said(capsys).startswith("exact")
