"""What a ledger holds equals the sums over its windows."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.zoo.callbacks import SENT
from trainkit.core.ledger import Closed, FirstWindows, Ledger
from trainkit.core.window import COLUMNS, WindowStats

RANKS = 3


def windows(number: int, *, reduction: Any = "mean") -> list[WindowStats]:
    """Windows of three ranks; some have kept their single weights as well."""
    generator = torch.Generator().manual_seed(number)
    made = []
    for i in range(number):
        columns = len(COLUMNS) + i % 3
        table = torch.rand(RANKS, columns, generator=generator, dtype=torch.float64)
        made.append(WindowStats(table, table.sum(0), reduction))
    return made


def entered(made: list[WindowStats], ledger: Ledger | None = None) -> Ledger:
    ledger = Ledger() if ledger is None else ledger
    ledger.enter([Closed(0, stats, counts_samples=True) for stats in made])
    return ledger


def numbers(ledger: Ledger) -> list[float]:
    account = ledger.of()
    assert account is not None
    held = [float(account.weight), float(account.samples)]
    return [account.num_windows, *held, *account.extremes.tolist()]


def test_an_account_equals_sums_and_extremes_by_hand() -> None:
    made = windows(7)
    weights = [float(each.weight) for each in made]
    samples = [float(each.samples) for each in made]
    losses = [float(made[0].loss), float(made[-1].loss)]
    by_hand = [7, sum(weights), sum(samples), min(weights), max(weights), *losses]
    assert numbers(entered(made)) == pytest.approx(by_hand, rel=1e-15)


@pytest.mark.parametrize("again", [*SENT.values(), copy.copy])
def test_a_copy_continues_alone(again: Callable[[Ledger], Ledger]) -> None:
    made = windows(9, reduction="total")
    whole = numbers(entered(made))
    ledger = entered(made[:4])
    before = numbers(ledger)
    continued = numbers(entered(made[4:], again(ledger)))
    assert continued == pytest.approx(whole, rel=1e-14)
    assert numbers(ledger) == before


def test_samples_are_unknown_after_a_window_that_counted_none() -> None:
    ledger = entered(windows(2))
    ledger.enter([Closed(0, windows(1)[0], counts_samples=False)])
    entered(windows(2), ledger)
    account = ledger.of()
    assert account is not None
    assert math.isnan(account.samples)
    assert account.weight > 0


def test_a_saved_account_does_not_depend_on_the_order_of_columns() -> None:
    ledger, resumed = entered(windows(3)), Ledger()
    saved = ledger.state_dict()
    backwards = dict(reversed(saved[0]["sums"].items()))
    resumed.load_state_dict({0: {**saved[0], "sums": backwards}})
    assert numbers(resumed) == numbers(ledger)
    in_some_order = [*saved[0]["sums"].values()]
    resumed.load_state_dict({0: {**saved[0], "sums": in_some_order}})
    assert resumed.of() is None  # it begins anew


def test_an_optimizer_without_windows_has_no_account() -> None:
    assert entered(windows(2)).of(1) is None


def test_windows_entered_at_once_or_one_by_one_give_one_account() -> None:
    made, one_by_one = windows(7), Ledger()
    for stats in made:
        entered([stats], one_by_one)
    both = numbers(entered(made)), numbers(one_by_one)
    assert both[0] == pytest.approx(both[1], rel=1e-15)


def test_first_windows_measure_eight_and_resume_with_one_loader() -> None:
    made = windows(11)
    weight = sum(float(each.weight) for each in made[:8])
    straight = FirstWindows()
    assert straight.is_empty
    closed = [Closed(0, stats, True, num_batches=2) for stats in made]
    straight.enter(closed)
    assert len(straight) == 8
    assert straight.micro_batch("weight") == pytest.approx(weight / 16)
    begun, resumed, other = FirstWindows(), FirstWindows(), FirstWindows()
    begun.enter(closed[:3])
    resumed.load_state_dict(begun.state_dict())
    resumed.enter(closed[3:])
    assert resumed.micro_batch("weight") == straight.micro_batch("weight")
    other.loader_size = 4
    other.load_state_dict(begun.state_dict())
    assert len(other) == 0
