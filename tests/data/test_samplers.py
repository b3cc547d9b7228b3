"""Each row once, as many batches on every rank, and the same when resumed."""

from __future__ import annotations

import io
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import BatchSampler

from tests.data.sharing import fillers, rank_of, read_by_all, real_rows
from trainkit import ResumableLoader, TokenBudgetSampler, TrainkitError
from trainkit.data.row_sampler import RowSampler

TOKENS = 64


def by_rows(lengths: Any, size: int, *, fills: bool = True, **how: Any) -> BatchSampler:
    """As a loader uses it, and without a word of rows that are left out."""
    options: Any = {"shuffle": True, "seed": 0, **how}
    sampler = RowSampler(range(len(lengths)), batch_size=size, **options)
    sampler.fills, sampler._has_warned = fills, True
    return BatchSampler(sampler, size, drop_last=False)


def budget(
    lengths: Any, size: int | None, *, fills: bool = True, **how: Any
) -> TokenBudgetSampler:
    sampler = TokenBudgetSampler(lengths, tokens=TOKENS, size=size, **how)
    sampler.fills = fills
    return sampler


KINDS: dict[str, Callable[..., Any]] = {
    "rows": by_rows,
    "token budget": lambda lengths, size, **how: budget(lengths, None, **how),
    "few rows": budget,
}
BY_LENGTH = ["token budget", "few rows"]
CASES: dict[str, Any] = {
    "lengths": st.lists(st.integers(1, TOKENS), min_size=1, max_size=60),
    "size": st.integers(1, 7),
    "num_ranks": st.integers(1, 4),
    "seed": st.integers(-3, 2**40),
    "epoch": st.integers(0, 5),
}


def uneven(number: int = 40) -> list[int]:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(1, TOKENS, (number,), generator=generator).tolist()


def short(number: int) -> list[int]:
    """So that every batch can be parted."""
    return [length // 4 + 1 for length in uneven(number)]


def lacking(kind: str, num_rows: int, size: int, num_ranks: int, batches: int) -> int:
    """How many places rows are too few for."""
    left = num_rows % (size * num_ranks)
    if kind in BY_LENGTH:
        return max(batches - num_rows, 0)
    return max(num_ranks - left, 0) if left else 0


@pytest.mark.parametrize("kind", KINDS)
@given(shuffle=st.booleans(), **CASES)
@settings(max_examples=80)
def test_each_row_is_read_once_and_ranks_have_as_many_batches(
    kind: str,
    lengths: list[int],
    size: int,
    num_ranks: int,
    shuffle: bool,
    seed: int,
    epoch: int,
) -> None:
    def make(fills: bool = True) -> Any:
        return KINDS[kind](lengths, size, fills=fills, seed=seed, shuffle=shuffle)

    shares = read_by_all(make, num_ranks, epoch=epoch)
    assert real_rows(shares) == list(range(len(lengths)))
    num_batches = sum(map(len, shares))
    expected = lacking(kind, len(lengths), size, num_ranks, num_batches)
    assert fillers(shares) == expected
    with rank_of(0, num_ranks):
        assert make().sampler.gives_fillers == (expected > 0)
        assert not make(fills=False).sampler.gives_fillers
    for batch in itertools.chain(*shares):
        assert 1 <= len(batch) <= (TOKENS if kind == "token budget" else size)
        if kind in BY_LENGTH:
            assert len(batch) * max(lengths[row] for row in batch) <= TOKENS


@pytest.mark.parametrize("kind", KINDS)
@given(**CASES)
@settings(max_examples=50)
def test_drop_last_leaves_out_less_than_a_round(
    kind: str, lengths: list[int], size: int, num_ranks: int, seed: int, epoch: int
) -> None:
    def make() -> Any:
        return KINDS[kind](lengths, size, seed=seed, drop_last=True)

    stretch = size * num_ranks
    if kind not in BY_LENGTH and len(lengths) < stretch:
        with pytest.raises(TrainkitError, match="give not one batch"):
            read_by_all(make, num_ranks)
        return
    shares = read_by_all(make, num_ranks, epoch=epoch)
    rows, num_batches = real_rows(shares), sum(map(len, shares))
    assert len(rows) == len(set(rows))
    if kind in BY_LENGTH:
        [alone] = read_by_all(make, 1, epoch=epoch)
        assert num_batches == len(alone) // num_ranks * num_ranks
    else:
        assert len(rows) == len(lengths) // stretch * stretch
    if kind not in ("token budget", "few rows"):
        assert all(len(batch) == size for batch in itertools.chain(*shares))


@pytest.mark.parametrize("kind", KINDS)
@given(given_out=st.integers(0, 9), **CASES)
@settings(max_examples=50)
def test_resumed_epoch_is_the_rest(
    kind: str,
    lengths: list[int],
    size: int,
    num_ranks: int,
    given_out: int,
    seed: int,
    epoch: int,
) -> None:
    def make() -> Any:
        return KINDS[kind](lengths, size, seed=seed)

    whole = read_by_all(make, num_ranks, epoch=epoch)
    position = 0
    with rank_of(0, num_ranks):
        order = make().sampler
        for _ in range(min(given_out, len(whole[0]))):
            position += 1
        assert (position == order.end) == (given_out >= len(whole[0]))
    rest = read_by_all(make, num_ranks, epoch=epoch, start=position)
    assert rest == [batches[given_out:] for batches in whole]


@pytest.mark.parametrize("kind", BY_LENGTH)
def test_rounds_hold_the_same_rows_on_any_number_of_ranks(kind: str) -> None:
    """So that two ranks with windows of two see what one sees with windows of four."""

    def make() -> Any:
        return KINDS[kind](short(96), 4, seed=1)

    [alone] = read_by_all(make, 1)
    first, second = read_by_all(make, 2)
    dealt = list(itertools.chain(*zip(first, second, strict=True)))
    num_whole = len(alone) // 2 * 2
    assert dealt[:num_whole] == alone[:num_whole]


@pytest.mark.parametrize("kind", KINDS)
def test_order_is_that_of_seed_and_epoch(kind: str) -> None:
    def order(epoch: int = 0, **how: Any) -> Any:
        return read_by_all(lambda: KINDS[kind](uneven(), 4, **how), 1, epoch=epoch)

    assert order(seed=1) == order(seed=1)
    drawn = [order(seed=1), order(seed=2), order(seed=1, epoch=1)]
    assert all(a != b for a, b in itertools.combinations(drawn, 2))
    assert order(shuffle=False) == order(shuffle=False, seed=5, epoch=4)
    sizes = [sorted(map(len, batches)) for [batches] in drawn]
    alike = "an epoch has as many batches as any other, of the same sizes"
    assert sizes == 3 * sizes[:1], alike


def padding(lengths: list[int], batches: Any) -> float:
    """Computed over real tokens."""
    computed = sum(len(b) * max(lengths[row] for row in b) for b in batches)
    return computed / sum(lengths)


@pytest.mark.parametrize("kind", BY_LENGTH)
def test_padding_is_less_than_of_rows_at_random(kind: str) -> None:
    lengths = uneven(400)
    order = torch.randperm(400).tolist()
    at_random = padding(lengths, [order[n : n + 4] for n in range(0, 400, 4)])
    assert padding(lengths, KINDS[kind](lengths, 3)) < 1.1 < 1.3 < at_random
    lengths = uneven(1000)
    budget = TokenBudgetSampler(lengths, tokens=512)
    used = [len(batch) * max(lengths[row] for row in batch) / 512 for batch in budget]
    assert sum(used) / len(used) > 0.85


@pytest.mark.parametrize("kind", KINDS)
def test_rows_meet_others_in_each_epoch(kind: str) -> None:
    """The control: without shuffling they never would."""

    def cut(epoch: int, shuffle: bool) -> list[frozenset[int]]:
        [batches] = read_by_all(
            lambda: KINDS[kind](short(400), 4, shuffle=shuffle), 1, epoch=epoch
        )
        return [frozenset(map(int, batch)) for batch in batches]

    first = cut(0, True)
    assert len({*first} & {*cut(1, True)}) < len(first) / 4
    assert cut(0, False) == cut(1, False)


def test_rank_is_looked_up_when_rows_are_read() -> None:
    sampler = RowSampler(range(8), batch_size=2, shuffle=False, seed=0)
    with rank_of(1, 2):
        assert list(sampler) == [2, 3, 6, 7]
    assert list(sampler) == list(range(8))


# ---- too few rows, and refusals ------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_fewer_rows_than_ranks_are_refused_and_the_remedy_helps(kind: str) -> None:
    def make(fills: bool) -> Any:
        return KINDS[kind]([3, 4, 5], 4, fills=fills)

    with pytest.raises(TrainkitError, match=r"(?i)use fewer ranks.* weigh_nothing="):
        read_by_all(lambda: make(False), 4)
    assert real_rows(read_by_all(lambda: make(True), 4)) == [0, 1, 2]
    assert (len(KINDS[kind]([], 4)), list(KINDS[kind]([], 4))) == (0, [])


@pytest.mark.parametrize("wrong", [[3, 0], [2, True], [1.5], [-1]])
def test_lengths_are_checked(wrong: Any) -> None:
    text = rf"Sampler lengths: must be whole numbers .* received {wrong[-1]!r} for row"
    for kind in BY_LENGTH:
        with pytest.raises(TrainkitError, match=text):
            KINDS[kind](wrong, 4)


def of_budget(lengths: Any = (3,), **how: Any) -> Callable[[], Any]:
    return lambda: TokenBudgetSampler(lengths, **{"tokens": 64, **how})


FIVE_ROWS = of_budget([1, 1, 22, 30, 33], tokens=40)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: read_by_all(FIVE_ROWS, 3), "5 rows do not make 6 batches for 3 ranks"),
        (of_budget([3, 70]), r"must hold the longest row, received 64, and row 1 has"),
        (of_budget(tokens=0), "tokens: must be a whole number"),
        (of_budget(size=0), "size: must be a whole"),
        (of_budget(seed="1"), "seed: must be a whole"),
    ],
)
def test_options_are_checked(make: Callable[[], Any], text: str) -> None:
    with pytest.raises(TrainkitError, match=text):
        make()


def test_lengths_may_be_a_tensor_or_an_array_and_stay_out_of_checkpoints() -> None:
    """Lightning reads one with `weights_only`, which refuses numpy's numbers."""
    lengths = torch.tensor([3, 5, 2])
    for each in (lengths, lengths.numpy(), [*lengths.to(torch.uint8).numpy()]):
        sampler = TokenBudgetSampler(each, tokens=9)
        assert sampler.lengths == [3, 5, 2]
        file = io.BytesIO()
        torch.save(ResumableLoader(range(3), batch_sampler=sampler).state_dict(), file)
        file.seek(0)
        assert torch.load(file, weights_only=True)["sum of lengths"] == 10
