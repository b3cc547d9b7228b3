"""One plan for a window over all ranks: each row once, and no rank waits."""

from __future__ import annotations

import io
import itertools
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.data.sharing import Batches, fillers, real_rows
from trainkit import ResumableLoader, TrainkitError, WindowSampler
from trainkit.data.length_sampler import write_lengths
from trainkit.data.window_plan import WINDOWS, fitted, planned, rounds_needed


def log_normal(number: int, seed: int = 0) -> list[int]:
    lengths = np.random.default_rng(seed).lognormal(5, 1, number)
    return np.clip(lengths, 8, 2048).astype(int).tolist()


def cubed(number: int, seed: int = 0) -> list[int]:
    return (
        (1 + 1023 * np.random.default_rng(seed).random(number) ** 3)
        .astype(int)
        .tolist()
    )


def computed(lengths: list[int], batch: list[int], *, flattened: bool) -> int:
    own = [lengths[row] for row in batch]
    return sum(own) if flattened else len(own) * max(own)


def slowest(lengths: list[int], rounds: Any, *, flattened: bool = False) -> float:
    """What the slowest rank computes, times the ranks, over the real tokens."""
    table = [
        [computed(lengths, batch, flattened=flattened) for batch in each]
        for each in rounds
    ]
    return max(map(sum, zip(*table, strict=True))) * len(table[0]) / sum(lengths)


# ---- the plan of a window ------------------------------------------------------------


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
    sizes = [computed(lengths, batch, flattened=flattened) for batch in batches]
    assert 0 < min(sizes) <= max(sizes) <= 64
    if rounds > 1 and not more:
        assert rounds_needed(lengths, **how | {"tokens": 64}) == rounds


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
    found = planned(
        lengths, num_ranks=1, rounds=number, tokens=10**6, attention=attention
    )
    stops = list(itertools.accumulate(len(batch) for [batch] in found))
    # Rounds stand in the order of their costs, which are those of sorted runs.
    costs = [
        len(batch) * max(lengths[r] + attention * lengths[r] ** 2 for r in batch)
        for [batch] in found
    ]
    assert stops[-1] == len(lengths)
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
        alone = []
        for rank in range(num_ranks):
            mine = lengths[rank::num_ranks]
            rounds = rounds_needed(mine, num_ranks=1, tokens=4096)
            [*batches] = planned(mine, num_ranks=1, rounds=rounds, tokens=4096)
            alone.append(
                sum(computed(mine, batch, flattened=False) for [batch] in batches)
            )
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


# ---- the sampler ---------------------------------------------------------------------

LENGTHS = log_normal(1000)


def all_ranks(num_ranks: int, *, start: int = 0, epoch: int = 0, **how: Any) -> Any:
    """The micro-batches of each rank, and a sampler."""
    shares: list[Batches] = []
    sampler: Any = None
    fills = how.pop("fills", False)
    for rank in range(num_ranks):
        sampler = WindowSampler(
            **{"lengths": LENGTHS, "num_replicas": num_ranks, "rank": rank, **how}
        )
        sampler.fills = fills
        sampler.set_epoch(epoch)
        sampler.start = start
        shares.append(list(sampler))
        assert start or len(shares[-1]) == len(sampler)
    assert len({len(each) for each in shares}) == 1
    return shares, sampler


@given(
    number=st.integers(0, 120),
    window=st.integers(8, 50),
    num_ranks=st.integers(1, 4),
    epoch=st.integers(0, 3),
    flattened=st.booleans(),
    drop_last=st.booleans(),
)
@settings(max_examples=120, deadline=None)
def test_windows_are_the_order_and_each_row_is_read_once(
    number: int,
    window: int,
    num_ranks: int,
    epoch: int,
    flattened: bool,
    drop_last: bool,
) -> None:
    lengths = [1 + row * 7 % 40 for row in range(number)]
    how = {"lengths": lengths, "window": window, "drop_last": drop_last, "seed": 3}
    shares, sampler = all_ranks(
        num_ranks, tokens=300, flattened=flattened, fills=True, epoch=epoch, **how
    )
    kept = number // window * window if drop_last else number
    order = sampler.permuted(number)[:kept]
    assert real_rows(shares) == sorted(order)
    rounds = list(zip(*shares, strict=True))
    for first in range(0, kept, window):
        of_window = sorted(order[first : first + window])
        count = 0
        found: list[int] = []
        while count < sampler.micro_batches and rounds and len(found) < len(of_window):
            found += [r for batch in rounds.pop(0) for r in batch if type(r) is int]
            count += 1
        assert sorted(found) == of_window
        assert count == sampler.micro_batches or len(of_window) < window
    left = kept % window
    assert fillers(shares) == (num_ranks - left if 0 < left < num_ranks else 0)
    assert sampler.gives_fillers == (0 < left < num_ranks)


def test_windows_have_the_same_rows_on_any_number_of_ranks() -> None:
    windows = []
    for num_ranks in (1, 2, 8):
        shares, sampler = all_ranks(num_ranks, window=250)
        k = sampler.micro_batches
        windows.append(
            [
                sorted(r for share in shares for b in share[n : n + k] for r in b)
                for n in range(0, 4 * k, k)
            ]
        )
    assert windows[0] == windows[1] == windows[2]
    assert len(windows[0][0]) == 250


def test_resumed_epoch_is_the_rest() -> None:
    for flattened in (False, True):
        how: Any = {"window": 300, "epoch": 2, "flattened": flattened}
        whole, _ = all_ranks(2, **how)
        for start in (1, 4, len(whole[0]) - 1, len(whole[0])):
            rest, _ = all_ranks(2, start=start, **how)
            assert rest == [each[start:] for each in whole]


def loader(num_ranks: int, rank: int = 0, **how: Any) -> ResumableLoader:
    plan = WindowSampler(
        LENGTHS, **{"num_replicas": num_ranks, "rank": rank, "window": 250, **how}
    )
    return ResumableLoader(range(1000), batch_sampler=plan, collate_fn=list)


def read(each: Any, epoch: int, most: int | None = None) -> Batches:
    each.sampler.set_epoch(epoch)
    return [list(batch) for batch in itertools.islice(each, most)]


def test_state_counts_windows_so_that_ranks_may_change_between_them() -> None:
    two = [loader(2, rank) for rank in range(2)]
    k = two[0].batch_sampler.micro_batches  # type: ignore[union-attr]
    done = [r for each in two for batch in read(each, 1, 2 * k) for r in batch]
    for tokens in (4096, 3000):
        eight = [loader(8, rank, tokens=tokens) for rank in range(8)]
        for each in eight:
            each.load_state_dict(two[0].state_dict())
            plan: Any = each.batch_sampler
            assert each.batches_read == 2 * plan.micro_batches != 2 * k
            again = loader(8, tokens=tokens)
            again.load_state_dict(each.state_dict())
            assert again.state_dict() == each.state_dict()
        rest = [r for each in eight for batch in read(each, 1) for r in batch]
        assert len(done) == len(rest) == 500
        assert sorted(done + rest) == list(range(1000))


CHANGES: dict[str, dict[str, Any]] = {
    "none": {},
    "ranks": {"num_ranks": 3},
    "one rank": {"num_ranks": 1},
    "tokens": {"tokens": 3000},
    "flattened": {"flattened": True},
    "cost": {"cost": 0.1},
}


@pytest.mark.parametrize("change", CHANGES)
def test_rest_of_a_window_is_planned_anew_where_the_plan_changes(change: str) -> None:
    """Once, and then back again within the same window; the window keeps its rows."""
    how = {"num_ranks": 2, **CHANGES[change]}
    number = how.pop("num_ranks")
    done: list[int] = []
    first: list[Any] = [loader(2, rank) for rank in range(2)]
    k = first[0].batch_sampler.micro_batches  # type: ignore[union-attr]
    done += [r for each in first for batch in read(each, 0, k + 3) for r in batch]
    state = first[0].state_dict()
    then = [loader(number, rank, **how) for rank in range(number)]
    for each in then:
        each.load_state_dict(state)
    own = then[0].batch_sampler.micro_batches  # type: ignore[union-attr]
    position = then[0].batches_read or 0
    assert own < position < 2 * own
    done += [r for each in then for batch in read(each, 0, 1) for r in batch]
    back = [loader(2, rank) for rank in range(2)]
    for each in back:
        each.load_state_dict(then[0].state_dict())
    left = 2 * k - (back[0].batches_read or 0)
    assert 0 < left < k
    rest = [read(each, 0) for each in back]
    of_window = [r for each in rest for batch in each[:left] for r in batch]
    order = first[0].sampler.permuted(1000)
    assert sorted(done + of_window) == sorted(order[:500])
    others = [r for each in rest for batch in each[left:] for r in batch]
    assert sorted(others) == sorted(order[500:])
    if change == "none":
        assert rest == [read(loader(2, rank), 0)[k + 4 :] for rank in range(2)]


def test_window_may_not_change_within_an_epoch_nor_a_rest_be_too_small() -> None:
    first = loader(2)
    read(first, 0, 1)
    with pytest.raises(TrainkitError, match="window: must stay as it was within an"):
        loader(2, window=200).load_state_dict(first.state_dict())
    with pytest.raises(TrainkitError, match="rows .* are left, too few to be shared"):
        loader(2, tokens=10**6).load_state_dict(first.state_dict())


def test_state_of_an_ended_epoch_begins_the_next_with_any_plan() -> None:
    first = loader(2)
    read(first, 0)
    for other in (loader(1), loader(2, window=100), loader(2, flattened=True)):
        other.load_state_dict(first.state_dict())
        state = other.state_dict()
        assert state["position"] >= state["end"]
        assert len(read(other, 1)) == len(other)
    ended = {
        name: value for name, value in first.state_dict().items() if name != "plan"
    }
    other = loader(2)
    other.load_state_dict(ended)  # of another sampler
    assert len(read(other, 1)) == len(other)


def test_state_loads_with_weights_only() -> None:
    file = io.BytesIO()
    torch.save(loader(2, cost="measured").state_dict(), file)
    file.seek(0)
    assert torch.load(file, weights_only=True)["plan"]["ranks"] == 2


# ---- how many micro-batches ----------------------------------------------------------


def test_as_few_micro_batches_as_keep_to_the_budget(monkeypatch: Any) -> None:
    for num_ranks, flattened in itertools.product((1, 4), (False, True)):
        how: Any = {"window": 64, "flattened": flattened, "num_replicas": num_ranks}
        sampler = WindowSampler(LENGTHS, rank=0, **how)

        def longest(each: WindowSampler, epoch: int = 0) -> int:
            each.set_epoch(epoch)
            return max(
                computed(LENGTHS, batch, flattened=each.flattened)
                for batch in each.batches()
            )

        assert all(longest(sampler, epoch) <= 4096 for epoch in range(5))
        fewer = WindowSampler(
            LENGTHS, rank=0, micro_batches=sampler.micro_batches - 1 or 1, **how
        )
        if fewer.micro_batches < sampler.micro_batches:
            with pytest.warns(UserWarning, match="The step is exact"):
                assert any(longest(fewer, epoch) > 4096 for epoch in range(200))
    monkeypatch.setattr("trainkit.data.window_sampler.ROWS_TRIED", 63)
    assert WindowSampler(LENGTHS, num_replicas=1, rank=0, window=64).micro_batches > 1


def test_window_above_the_budget_is_said_once_with_the_remedy() -> None:
    how: Any = {"window": 250, "micro_batches": 1}
    sampler = WindowSampler(LENGTHS, num_replicas=2, rank=0, **how)
    text = "window 0 of epoch 0 has .* above 4,096, .* give micro_batches=2"
    with pytest.warns(UserWarning, match=text) as said:
        assert list(sampler) == list(sampler)
    assert len(said) == 1


def test_ranks_are_those_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    sampler = WindowSampler(LENGTHS, window=250)
    assert sampler.num_ranks == 4
    with pytest.raises(TrainkitError, match="was 4 when .* Give num_replicas=1"):
        list(sampler)


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ({"window": 0}, "WindowSampler window: must be a whole number"),
        ({"tokens": 1.5}, "WindowSampler tokens: must be a whole number"),
        ({"micro_batches": -1}, "micro_batches: must be a whole number"),
        ({"tokens": 2000}, r"must hold the longest row, received 2,000, and row \d+"),
        ({"window": 7}, "must have a row for each of 8 .* received 7. Raise"),
        ({"rank": 8}, "rank: must be below num_replicas=8, received 8"),
        ({"rank": "0"}, "rank: must be below num_replicas=8, received '0'"),
        ({"num_replicas": 0}, "num_replicas: must be a whole number"),
        ({"cost": -1}, "cost: must be a number of at least 0"),
        ({"cost": math.nan}, "cost: must be"),
        ({"cost": "tokens"}, "cost: must be"),
        ({"seed": 0.5}, "seed: must be a whole number"),
        ({"lengths": "no.npy"}, "a file of them that `trainkit lengths` has written"),
        (
            {"lengths": 3},
            "lengths: must be a number for each .* received 3",
        ),
        ({"lengths": [0]}, "must be whole numbers of at least 1, received 0"),
    ],
)
def test_options_are_checked(how: dict[str, Any], text: str) -> None:
    with pytest.raises(TrainkitError, match=text):
        WindowSampler(**{"lengths": LENGTHS, "num_replicas": 8, **how})


def test_a_row_for_each_micro_batch_is_enough() -> None:
    sampler = WindowSampler(LENGTHS, window=8, num_replicas=8, rank=0, drop_last=True)
    assert {len(rows) for rows in sampler} == {1}


def test_rows_too_few_for_the_ranks_are_refused_and_the_remedies_help() -> None:
    how: Any = {"lengths": LENGTHS[:253], "window": 250, "num_ranks": 8}
    with pytest.raises(TrainkitError, match="lacks 5 for 8 ranks.*weigh_nothing="):
        all_ranks(**how)
    assert len(real_rows(all_ranks(drop_last=True, **how)[0])) == 250
    shares, _ = all_ranks(fills=True, **how)
    assert real_rows(shares) == list(range(253))
    assert fillers(shares) == 5


def test_lengths_are_read_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "lengths.npy"
    write_lengths(path, LENGTHS)
    assert WindowSampler(str(path), num_replicas=2).lengths == LENGTHS
    assert [each.name for each in tmp_path.iterdir()] == ["lengths.npy"]


# ---- the measured cost ---------------------------------------------------------------


def test_cost_is_found_from_times() -> None:
    generator = np.random.default_rng(0)
    tokens = generator.uniform(3000, 4096, 100)
    squares = tokens * generator.uniform(50, 900, 100)
    seconds = 2e-6 * tokens + 3e-9 * squares
    times = np.stack([tokens, squares, seconds], 1)
    assert fitted(times.tolist()) == pytest.approx(1.5e-3)
    times[:, 2] = 1e-6 * tokens - 1e-9 * squares
    assert fitted(times.tolist()) == 0


@pytest.mark.parametrize("prefetch", [None, 25])
def test_measured_cost_plans_later_windows_and_is_saved(
    prefetch: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]
    monkeypatch.setattr("trainkit.data.window_plan._now", lambda: clock[0])
    lengths = log_normal(6000)
    dataset = range(6000)

    def made(**how: Any) -> ResumableLoader:
        plan = WindowSampler(
            lengths, window=200, num_replicas=2, rank=0, **{"cost": "measured", **how}
        )
        return ResumableLoader(dataset, batch_sampler=plan, collate_fn=list, **reads)

    reads: Any = {"num_workers": 1, "prefetch_factor": prefetch} if prefetch else {}
    train, reads = made(), {}
    plan: Any = train.batch_sampler
    k = plan.micro_batches
    ahead = (prefetch or 0) // k  # windows that the worker has read
    seen: list[Any] = []
    state: Any = None
    for batch in train:
        own = [max(lengths[row] for row in batch)] * len(batch)
        seconds = 1e-6 * sum(own) + 2e-9 * sum(n**2 for n in own)
        # Validation, once a window, says nothing about it.
        clock[0] += seconds + 10.0 * (len(seen) % k == k - 1)
        seen.append(batch)
        if len(seen) == (WINDOWS + 3 + ahead) * k:
            state = train.state_dict()
    by_tokens, by_cost = read(made(cost=0.0), 0), read(made(cost=0.002), 0)
    since = (WINDOWS + 2 + ahead) * k  # one to become warm, and one read ahead
    assert seen[:since] == by_tokens[:since]
    assert state["plan"]["cost"] == pytest.approx([0, 0.002, 0, WINDOWS + 2 + ahead])
    assert [sorted(b) for b in seen[since:]] == [sorted(b) for b in by_cost[since:]]
    assert by_cost[since:] != by_tokens[since:]
    again = made()
    again.load_state_dict(state)
    assert read(again, 0) == seen[since + k :]


def test_passes_that_take_turns_while_times_are_taken() -> None:
    """Each place is timed once, and none is missed."""
    train = loader(2, cost="measured")
    first, second = iter(train), iter(train)
    whole = list(itertools.chain(*zip(first, second, strict=True)))
    assert whole[::2] == whole[1::2] == read(loader(2), 0)
