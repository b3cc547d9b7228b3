"""The plan of a window: each row once, and no rank waits."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainkit.data.window_plan import fitted, planned, rounds_needed


def log_normal(number: int, seed: int = 0) -> list[int]:
    lengths = np.random.default_rng(seed).lognormal(5, 1, number)
    return np.clip(lengths, 8, 2048).astype(int).tolist()


def cubed(number: int, seed: int = 0) -> list[int]:
    drawn = np.random.default_rng(seed).random(number)
    return (1 + 1023 * drawn**3).astype(int).tolist()


def computed(lengths: list[int], batch: list[int], flattened: bool = False) -> int:
    own = [lengths[row] for row in batch]
    return sum(own) if flattened else len(own) * max(own)


def slowest(lengths: list[int], rounds: Any, *, flattened: bool = False) -> float:
    """What the slowest rank computes, times the ranks, over the real tokens."""
    table = [[computed(lengths, batch, flattened) for batch in each] for each in rounds]
    return max(map(sum, zip(*table, strict=True))) * len(table[0]) / sum(lengths)


@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=70),
    num_ranks=st.integers(1, 5),
    more=st.integers(0, 2),
    attention=st.sampled_from([0.0, 0.02]),
    flattened=st.booleans(),
)
@settings(max_examples=200)
def test_each_row_once_and_within_the_budget(
    lengths: list[int], num_ranks: int, more: int, attention: float, flattened: bool
) -> None:
    how: Any = {"num_ranks": num_ranks, "tokens": 64, "flattened": flattened}
    rounds = rounds_needed(lengths, **how) + more
    if rounds * num_ranks > len(lengths):
        return
    found = planned(lengths, rounds=rounds, attention=attention, **how)
    assert [len(each) for each in found] == [num_ranks] * rounds
    batches = [batch for each in found for batch in each]
    assert sorted(itertools.chain(*batches)) == list(range(len(lengths)))
    sizes = [computed(lengths, batch, flattened) for batch in batches]
    assert 0 < min(sizes) <= max(sizes) <= 64
    if rounds > 1 and not more:
        assert rounds_needed(lengths, **how) == rounds


@given(
    lengths=st.lists(st.integers(1, 30), min_size=4, max_size=11),
    number=st.integers(1, 4),
    attention=st.sampled_from([0.0, 0.1]),
)
@settings(max_examples=150)
def test_dearest_run_costs_as_little_as_any_cut_allows(
    lengths: list[int], number: int, attention: float
) -> None:
    """Compared with all cuts of the sorted rows."""
    in_order = sorted(lengths, reverse=True)

    def dearest(cuts: tuple[int, ...]) -> float:
        ends = zip([0, *cuts], [*cuts, len(lengths)], strict=True)
        return max(
            (stop - start) * (in_order[start] + attention * in_order[start] ** 2)
            for start, stop in ends
        )

    places = range(1, len(lengths))
    best = min(map(dearest, itertools.combinations(places, number - 1)))
    how: Any = {"num_ranks": 1, "rounds": number, "tokens": 10**6}
    found = planned(lengths, attention=attention, **how)
    # Rounds stand in the order of their costs, which are those of sorted runs.
    costs = [
        len(batch) * max(lengths[r] + attention * lengths[r] ** 2 for r in batch)
        for [batch] in found
    ]
    assert sum(len(batch) for [batch] in found) == len(lengths)
    assert best <= max(costs) <= best * 1.01


@pytest.mark.parametrize("lengths_of", [log_normal, cubed])
@pytest.mark.parametrize(
    ("num_ranks", "number", "padded", "flat"),
    [(8, 512, 1.12, 1.03), (8, 1024, 1.06, 1.01), (64, 1024, 1.13, 1.08)],
)
def test_slowest_rank_computes_hardly_more_than_the_real_tokens(
    lengths_of: Any, num_ranks: int, number: int, padded: float, flat: float
) -> None:
    """The control: ranks that cut their own rows, each as well as it can."""
    for seed in range(4):
        lengths = lengths_of(number, seed)
        for flattened, most in ((False, padded), (True, flat)):
            how: Any = {"tokens": 4096, "flattened": flattened}
            rounds = rounds_needed(lengths, num_ranks=num_ranks, **how)
            plan = planned(lengths, num_ranks=num_ranks, rounds=rounds, **how)
            assert slowest(lengths, plan, flattened=flattened) <= most
        alone, how = [], {"num_ranks": 1, "tokens": 4096}
        for rank in range(num_ranks):
            mine = lengths[rank::num_ranks]
            own = planned(mine, rounds=rounds_needed(mine, **how), **how)
            alone.append(sum(computed(mine, batch) for [batch] in own))
        assert max(alone) * num_ranks / sum(lengths) > 1.25


def test_attention_makes_micro_batches_of_long_rows_smaller() -> None:
    lengths = [100] * 8 + [10] * 80

    def most(attention: float, flattened: bool) -> int:
        how: Any = {"num_ranks": 2, "rounds": 5, "tokens": 5000}
        found = planned(lengths, attention=attention, flattened=flattened, **how)
        batches = [batch for each in found for batch in each]
        return max(sum(lengths[row] ** 2 for row in batch) for batch in batches)

    assert (most(0.0, False), most(1.0, False)) == (20_000, 10_000)
    assert (most(0.0, True), most(1.0, True)) == (10_600, 10_000)


def test_cost_is_found_from_times() -> None:
    generator = np.random.default_rng(0)
    tokens = generator.uniform(3000, 4096, 100)
    squares = tokens * generator.uniform(50, 900, 100)
    seconds = 2e-6 * tokens + 3e-9 * squares
    times = np.stack([tokens, squares, seconds], 1)
    assert fitted(times.tolist()) == pytest.approx(1.5e-3)
    times[:, 2] = 1e-6 * tokens - 1e-9 * squares
    assert fitted(times.tolist()) == 0
