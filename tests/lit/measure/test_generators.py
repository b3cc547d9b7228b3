"""Generators in the user's code stay what they are while passes replay their draws."""

from __future__ import annotations

import functools
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.lit.measure.starting import fit, said, tokens
from tests.lit.proof.zoo import Tokens
from trainkit import PerToken

FIRST = "from random import Random, gauss\nfrom numpy.random import default_rng, rand\n"
OWN_FILES = ("random", "numpy.random._generator", "numpy.random.mtrand")
KINDS = (random.Random, np.random.Generator, np.random.RandomState)


class Own(random.Random):
    """A class of generators of the user's own."""


@functools.lru_cache
def lazily() -> tuple[Any, ...]:
    return random.Random(0), np.random.default_rng(0), np.random.RandomState(0)


class Store:
    def __init__(self) -> None:
        self.function = len  # so that nothing of it is put back
        self.kept: list[Any] = []


class Drawing(Tokens):
    """Draws a number for each row from generators of all kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.python, self.own = random.Random(1), Own(1)
        self.numpys, self.legacy = np.random.default_rng(1), np.random.RandomState(1)
        self.store = Store()

    def held(self) -> tuple[Any, ...]:
        return self.python, self.own, self.numpys, self.legacy

    def features(self, batch: dict[str, Any]) -> Tensor:
        rows = len(batch["ids"])
        assert all(isinstance(each, KINDS) for each in self.held())
        assert np.random.default_rng(self.numpys) is self.numpys
        drawn: Any = self.numpys.normal(size=rows) + self.legacy.rand(rows)
        drawn += [self.python.random() + self.own.gauss(0, 1) for _ in range(rows)]
        return super().features(batch) * torch.tensor(drawn).float()[:, None, None]


class Making(Drawing):
    """Makes generators, and lets a file be imported, in each step."""

    def features(self, batch: dict[str, Any]) -> Tensor:
        import first_in_a_pass  # type: ignore  # noqa: F401

        own: Any = np.random.default_rng(seed=0), Own(0), np.random.RandomState(0)
        self.store.kept += [*own, *lazily(), *self.held()]
        return super().features(batch)


def test_generators_of_all_kinds_are_replayed(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "first_in_a_pass.py").write_text(FIRST)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "first_in_a_pass", raising=False)
    for kind in (Drawing, Making):
        made = kind()
        held = made.held()
        kinds = [type(each) for each in held]
        fit(made, tokens(), PerToken(), max_steps=1)
        assert said(capsys).startswith("exact on 5 of your rows")
        assert all(a is b for a, b in zip(made.held(), held, strict=True))
        assert [type(each) for each in held] == kinds
        assert not vars(made.python).keys() - {"gauss_next"}
    first = sys.modules["first_in_a_pass"]
    assert first.Random is random.Random
    assert first.gauss == random.gauss
    assert first.default_rng is np.random.default_rng
    assert first.rand == np.random.rand
    assert all(type(each).__module__ in OWN_FILES for each in lazily())
    # What was kept of a module's own generator draws as that does.
    state = made.numpys.bit_generator.state
    *_, numpys, _ = made.store.kept[:10]
    drawn = numpys.normal()
    made.numpys.bit_generator.state = state
    assert drawn == made.numpys.normal()


class FromMade(Tokens):
    def __init__(self, maker: Any) -> None:
        super().__init__()
        self.maker = maker

    def features(self, batch: dict[str, Any]) -> Tensor:
        own = self.maker()
        drawn = torch.tensor([own.normal(0, 1) for _ in batch["ids"]]).float()
        return super().features(batch) * drawn[:, None, None]


class Normal(random.Random):
    def normal(self, mean: float, spread: float) -> float:
        return self.gauss(mean, spread)


@pytest.mark.parametrize(
    "maker",
    [
        lambda: np.random.default_rng(0),
        lambda: np.random.default_rng(seed=[1, 2]),
        lambda: np.random.RandomState(3),
        lambda: np.random.Generator(np.random.Philox(4)),
        lambda: Normal(5),
    ],
)
def test_a_generator_made_in_the_step_is_the_reason(
    capsys: pytest.CaptureFixture[str], maker: Any
) -> None:
    """And no layer or loss is. The control above draws from generators that exist."""
    fit(FromMade(maker), tokens(), PerToken())
    text = said(capsys)
    assert text.startswith("not measured: training_step draws by a generator made at ")
    assert "test_generators.py" in text
