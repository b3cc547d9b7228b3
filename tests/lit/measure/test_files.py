"""What stands in the user's files and classes is put back, however odd they are."""

from __future__ import annotations

import enum
import sys
from collections import Counter, defaultdict
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.lit.measure.starting import fit, said, tokens
from tests.lit.proof.zoo import Tokens
from trainkit import PerToken
from trainkit.lit.rerun.snapshot import Snapshot

COUNTER: Counter[str] = Counter()
LISTS: defaultdict[str, list[int]] = defaultdict(list)
SPACE = SimpleNamespace(number=0, inner=SimpleNamespace(number=0))
NESTED: dict[str, list[int]] = {"calls": []}
TENSOR = torch.zeros(1)
MODULE = nn.BatchNorm1d(1)


class Config:
    number = 0

    class Inner:
        number = 0


class Stage(enum.IntEnum):
    FIRST = 0
    LATER = 1


class Refusing(type):
    """Of classes whose attributes Python code must not set."""

    def __setattr__(cls, name: str, value: Any) -> None:
        raise TypeError(name)


class Guarded(metaclass=Refusing):
    number = 0


class Moving(Tokens):
    stage = Stage.FIRST
    seen: list[Any] = []

    def features(self, batch: dict[str, Any]) -> Tensor:
        global TENSOR
        Moving.seen = [*self.seen, *state()]
        COUNTER["calls"] += 1
        LISTS["calls"].append(1)
        NESTED["calls"].append(1)
        SPACE.number += 1
        SPACE.inner.number += 1
        TENSOR = TENSOR + 1
        MODULE.momentum = (MODULE.momentum or 0.0) + 1
        Config.number += 1
        Config.Inner.number += 1
        type.__setattr__(Guarded, "number", Guarded.number + 1)
        Moving.stage = Stage.LATER
        return super().features(batch)


def state() -> list[Any]:
    return [
        dict(COUNTER),
        {name: len(values) for name, values in LISTS.items()},
        len(NESTED["calls"]),
        (SPACE.number, SPACE.inner.number),
        float(TENSOR),
        MODULE.momentum,
        (Config.number, Config.Inner.number, Guarded.number),
        Moving.stage,
    ]


def begin_again() -> None:
    global TENSOR
    TENSOR = torch.zeros(1)
    COUNTER.clear()
    LISTS.clear()
    NESTED["calls"].clear()
    SPACE.number = SPACE.inner.number = Config.number = Config.Inner.number = 0
    MODULE.momentum = 0.1
    type.__setattr__(Guarded, "number", 0)
    Moving.stage, Moving.seen = Stage.FIRST, []


def test_files_and_classes_are_as_before() -> None:
    def trained(proof: str) -> list[Any]:
        begin_again()
        fit(Moving(), tokens(), PerToken(), proof=proof)
        return [*Moving.seen, *state()]

    plain = trained("off")
    assert trained("warn") == plain
    assert plain[:8] != plain[8:16]  # the control: each step moves all of it


class Odd:
    """Whatever is asked of it fails."""

    __hash__ = None  # type: ignore[assignment]

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(name)

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("__eq__")

    @property
    def __class__(self) -> Any:  # type: ignore[override]
        raise RuntimeError("__class__")

    @property
    def __dict__(self) -> Any:  # type: ignore[override]
        raise RuntimeError("__dict__")


class Slots:
    __slots__ = ("number",)


def odd_names() -> dict[str, Any]:
    by_path, nameless, unnamed = (ModuleType(f"odd_{n}") for n in range(3))
    by_path.__file__ = Path("/nowhere/odd.py")  # type: ignore[assignment]
    nameless.__name__ = None  # type: ignore[assignment]
    del unnamed.__name__
    nameless.__file__ = unnamed.__file__ = "/nowhere/odd.py"

    def homeless() -> None: ...

    homeless.__module__ = 3  # type: ignore[assignment]
    class_of_none = type("Odd", (), {"__module__": None})
    class_of_odd = type("Odd", (), {"__module__": "tests.no_module"})
    values = (by_path, nameless, unnamed, homeless, class_of_none, class_of_odd)
    return {f"ODD_{n}": value for n, value in enumerate((*values, Odd(), Slots()))}


def test_odd_names_do_not_end_the_proof(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tests.no_module", Odd())  # type: ignore
    for name, value in odd_names().items():
        monkeypatch.setitem(globals(), name, value)
    monkeypatch.setitem(globals(), "ODD_IN_LIST", [Odd(), {"odd": Odd()}])
    fit(Moving(), tokens(), PerToken())
    assert said(capsys).startswith("exact on 5 of your rows")


def test_one_failure_leaves_the_rest_put_back() -> None:
    frozen, after = np.zeros(1), [0]
    module = nn.Module()
    module.frozen, module.after = frozen, after  # type: ignore[assignment]
    snapshot = Snapshot(module)
    frozen += 1
    after.append(1)
    frozen.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        snapshot.restore()
    assert after == [0]
