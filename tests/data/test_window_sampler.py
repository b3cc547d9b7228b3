"""The sampler of planned windows: read on any ranks, resumed, and measured."""

from __future__ import annotations

import io
import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.data.sharing import Batches, fillers, real_rows
from tests.data.test_window_plan import computed, log_normal
from trainkit import ResumableLoader, TrainkitError, WindowSampler
from trainkit.data.length_sampler import write_lengths
from trainkit.data.window_sampler import WINDOWS_TIMED as WINDOWS

LENGTHS = log_normal(1000)


def all_ranks(num_ranks: int, *, start: int = 0, epoch: int = 0, **how: Any) -> Any:
    """The micro-batches of each rank, and a sampler."""
    shares: list[Batches] = []
    sampler: Any = None
    fills = how.pop("fills", False)
    for rank in range(num_ranks):
        options = {"lengths": LENGTHS, "num_replicas": num_ranks, "rank": rank, **how}
        sampler = WindowSampler(**options)
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
    how: Any = {"lengths": lengths, "window": window, "drop_last": drop_last, "seed": 3}
    how |= {"tokens": 300, "flattened": flattened, "fills": True}
    shares, sampler = all_ranks(num_ranks, epoch=epoch, **how)
    kept = number // window * window if drop_last else number
    order = sampler.permuted(number)[:kept]
    assert real_rows(shares) == sorted(order)
    rounds = list(zip(*shares, strict=True))
    for first in range(0, kept, window):
        of_window = sorted(order[first : first + window])
        count, found = 0, list[int]()
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
        starts = range(0, 4 * k, k)
        windows.append([real_rows([s[n : n + k] for s in shares]) for n in starts])
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
    options = {"num_replicas": num_ranks, "rank": rank, "window": 250, **how}
    plan = WindowSampler(LENGTHS, **options)
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
        assert state["batches"] >= state["end"]
        assert len(read(other, 1)) == len(other)
    ended = first.state_dict()
    del ended["plan"]
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
            batches = itertools.chain(*each.rounds(0))
            return max(computed(LENGTHS, b, each.flattened) for b in batches)

        assert all(longest(sampler, epoch) <= 4096 for epoch in range(5))
        how["micro_batches"] = sampler.micro_batches - 1 or 1
        fewer = WindowSampler(LENGTHS, rank=0, **how)
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
        ({"lengths": 3}, "lengths: must be a number for each .* received 3"),
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


@pytest.mark.parametrize("prefetch", [None, 25])
def test_measured_cost_plans_later_windows_and_is_saved(
    prefetch: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]
    monkeypatch.setattr("trainkit.data.window_sampler.now", lambda: clock[0])
    lengths = log_normal(6000)

    def made(cost: Any = "measured") -> ResumableLoader:
        plan = WindowSampler(lengths, window=200, num_replicas=2, rank=0, cost=cost)
        rows = range(6000)
        return ResumableLoader(rows, batch_sampler=plan, collate_fn=list, **reads)

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
