"""Batches by length: each row once, as many on every rank, the same when resumed."""

from __future__ import annotations

import io
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from tests.data.sharing import fillers, rank_of, read_by_all, real_rows
from trainkit import (
    LengthGroupedSampler,
    ResumableLoader,
    TokenBudgetSampler,
    TrainkitError,
)
from trainkit.data.length_sampler import LengthSampler, part

TOKENS = 64

KINDS: dict[str, Callable[..., LengthSampler]] = {
    "token budget": lambda lengths, **how: TokenBudgetSampler(
        lengths, tokens=TOKENS, **how
    ),
    "few rows": lambda lengths, **how: TokenBudgetSampler(
        lengths, tokens=TOKENS, size=3, **how
    ),
    "length grouped": lambda lengths, **how: LengthGroupedSampler(
        lengths, batch_size=4, pool=3, **how
    ),
}
LENGTHS = st.lists(st.integers(1, TOKENS), min_size=4, max_size=80)
EPOCHS = {"seed": st.integers(-3, 2**40), "epoch": st.integers(0, 5)}


def uneven(number: int = 40, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, TOKENS, (number,), generator=generator).tolist()


def short(number: int) -> list[int]:
    """So that every batch can be parted."""
    return [length // 4 + 1 for length in uneven(number)]


@pytest.mark.parametrize("kind", KINDS)
@given(lengths=LENGTHS, num_ranks=st.integers(1, 4), shuffle=st.booleans(), **EPOCHS)
@settings(max_examples=60, deadline=None)
def test_each_row_is_read_once_and_ranks_have_as_many_batches(
    kind: str, lengths: list[int], num_ranks: int, shuffle: bool, seed: int, epoch: int
) -> None:
    def make() -> LengthSampler:
        sampler = KINDS[kind](lengths, seed=seed, shuffle=shuffle)
        sampler.fills = True
        return sampler

    shares = read_by_all(make, num_ranks, epoch=epoch)
    assert real_rows(shares) == list(range(len(lengths)))
    num_batches = sum(map(len, shares))
    assert fillers(shares) == max(num_batches - len(lengths), 0), "only if need be"
    with rank_of(0, num_ranks):
        assert make().gives_fillers == (fillers(shares) > 0)
    for batch in itertools.chain(*shares):
        assert batch
        if kind != "length grouped":
            assert len(batch) * max(lengths[row] for row in batch) <= TOKENS
        assert len(batch) <= {"few rows": 3, "length grouped": 4}.get(kind, TOKENS)


@pytest.mark.parametrize("kind", KINDS)
@given(lengths=LENGTHS, num_ranks=st.integers(1, 4), **EPOCHS)
@settings(max_examples=30, deadline=None)
def test_drop_last_leaves_out_less_than_a_round(
    kind: str, lengths: list[int], num_ranks: int, seed: int, epoch: int
) -> None:
    def make(**how: Any) -> LengthSampler:
        return KINDS[kind](lengths, seed=seed, **how)

    shares = read_by_all(lambda: make(drop_last=True), num_ranks, epoch=epoch)
    rows = real_rows(shares)
    assert len(rows) == len(set(rows))
    num_batches = sum(map(len, shares))
    assert num_batches == make(drop_last=True).num_batches // num_ranks * num_ranks
    if kind == "length grouped":
        assert all(len(batch) == 4 for batch in itertools.chain(*shares))


@pytest.mark.parametrize("kind", KINDS)
@given(lengths=LENGTHS, num_ranks=st.integers(1, 3), given_out=st.integers(0, 9))
@settings(max_examples=40, deadline=None)
def test_resumed_epoch_is_the_rest(
    kind: str, lengths: list[int], num_ranks: int, given_out: int
) -> None:
    def make() -> LengthSampler:
        sampler = KINDS[kind](lengths, seed=3)
        sampler.fills = True
        return sampler

    whole = read_by_all(make, num_ranks, epoch=2)
    position = 0
    with rank_of(0, num_ranks):
        for _ in range(min(given_out, len(whole[0]))):
            position = make().after(position)
        assert make().end == len(whole[0]) * num_ranks
    rest = read_by_all(make, num_ranks, epoch=2, start=position)
    assert rest == [batches[given_out:] for batches in whole]


@pytest.mark.parametrize("kind", KINDS)
def test_rounds_hold_the_same_rows_on_any_number_of_ranks(kind: str) -> None:
    """So that two ranks with windows of two see what one sees with windows of four."""

    def make() -> LengthSampler:
        return KINDS[kind](short(96), seed=1)

    [alone] = read_by_all(make, 1)
    first, second = read_by_all(make, 2)
    dealt = list(itertools.chain(*zip(first, second, strict=True)))
    num_whole = len(alone) // 2 * 2
    assert dealt[:num_whole] == alone[:num_whole]


@pytest.mark.parametrize("kind", KINDS)
def test_order_is_that_of_seed_and_epoch(kind: str) -> None:
    def order(epoch: int = 0, **how: Any) -> Any:
        return read_by_all(lambda: KINDS[kind](uneven(), **how), 1, epoch=epoch)

    assert order(seed=1) == order(seed=1)
    drawn = [order(seed=1), order(seed=2), order(seed=1, epoch=1)]
    assert all(a != b for a, b in itertools.combinations(drawn, 2))
    assert order(shuffle=False) == order(shuffle=False, seed=5, epoch=4)
    assert [sorted(map(len, batches)) for [batches] in drawn] == [
        sorted(map(len, drawn[0][0]))
    ] * 3, "an epoch has as many batches as any other, of the same sizes"


def test_global_generator_is_left_alone() -> None:
    before = torch.get_rng_state()
    for kind in KINDS:
        list(KINDS[kind](uneven()))
    assert torch.equal(before, torch.get_rng_state())


def padding(lengths: list[int], batches: Any) -> float:
    """Computed over real tokens."""
    computed = sum(len(b) * max(lengths[row] for row in b) for b in batches)
    return computed / sum(lengths)


@pytest.mark.parametrize("kind", KINDS)
def test_padding_is_less_than_of_rows_at_random(kind: str) -> None:
    lengths = uneven(400)
    order = torch.randperm(400).tolist()
    at_random = padding(lengths, [order[n : n + 4] for n in range(0, 400, 4)])
    sampler: Any = (
        LengthGroupedSampler(lengths, batch_size=4)
        if kind == "length grouped"
        else KINDS[kind](lengths)
    )
    assert padding(lengths, sampler) < 1.1 < 1.3 < at_random


def test_budget_is_used() -> None:
    lengths = uneven(1000)
    [batches] = read_by_all(lambda: TokenBudgetSampler(lengths, tokens=512), 1)
    used = [len(b) * max(lengths[row] for row in b) / 512 for b in batches]
    assert sum(used) / len(used) > 0.85
    assert padding(lengths, batches) < 1.1, "and not by what only pads"


def test_rows_meet_others_in_each_epoch() -> None:
    """Negative control: in a fixed cut they never would."""
    lengths = short(400)
    for kind in KINDS:
        [first] = read_by_all(lambda kind=kind: KINDS[kind](lengths), 1)
        [second] = read_by_all(lambda kind=kind: KINDS[kind](lengths), 1, epoch=1)
        same = {frozenset(b) for b in first} & {frozenset(b) for b in second}
        assert len(same) < len(first) / 4
    [first] = read_by_all(lambda: KINDS["few rows"](lengths, shuffle=False), 1)
    [second] = read_by_all(
        lambda: KINDS["few rows"](lengths, shuffle=False), 1, epoch=1
    )
    assert first == second


@pytest.mark.parametrize("kind", KINDS)
def test_lightning_may_tell_the_epoch_of_a_plain_loader(kind: str) -> None:
    """It looks for `set_epoch` on `loader.batch_sampler.sampler`."""
    sampler = KINDS[kind](uneven())
    each: Any = DataLoader(uneven(), batch_sampler=sampler)  # type: ignore[arg-type]
    assert each.batch_sampler.sampler is sampler


# ---- too few rows, and refusals ------------------------------------------------------


def test_parted_until_every_rank_has_a_batch() -> None:
    assert part([[0, 1, 2]], 3, first=0) == [[0], [1], [2]]
    assert part([[0, 1]], 3, first=0) == [[0], [1]]


@pytest.mark.parametrize("kind", KINDS)
def test_fewer_rows_than_ranks_are_refused(kind: str) -> None:
    with rank_of(1, 4), pytest.raises(TrainkitError, match="Use fewer ranks"):
        list(KINDS[kind]([3, 4, 5]))
    with pytest.raises(TrainkitError, match="5 rows do not make 6 batches for 3 ranks"):
        read_by_all(lambda: TokenBudgetSampler([1, 1, 22, 30, 33], tokens=40), 3)


@pytest.mark.parametrize("kind", KINDS)
def test_no_rows_make_no_batches(kind: str) -> None:
    assert (len(KINDS[kind]([])), list(KINDS[kind]([]))) == (0, [])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("wrong", [[3, 0], [2, True], [1.5], [-1]])
def test_lengths_are_checked(kind: str, wrong: Any) -> None:
    text = rf"Sampler lengths: must be whole numbers .* received {wrong[-1]!r} for row"
    with pytest.raises(TrainkitError, match=text):
        KINDS[kind](wrong)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (
            lambda: TokenBudgetSampler([3, 70], tokens=64),
            r"must hold the longest row, received 64, and row 1 has 70\. Raise it",
        ),
        (lambda: TokenBudgetSampler([3], tokens=0), "tokens: must be a whole number"),
        (lambda: TokenBudgetSampler([3], tokens=9, size=0), "size: must be a whole"),
        (lambda: LengthGroupedSampler([3], batch_size=1.0), "batch_size: must be a"),  # type: ignore[arg-type]
        (lambda: LengthGroupedSampler([3], batch_size=1, pool=0), "pool: must be a"),
        (lambda: TokenBudgetSampler([3], tokens=9, seed="1"), "seed: must be a whole"),  # type: ignore[arg-type]
    ],
)
def test_options_are_checked(make: Callable[[], Any], text: str) -> None:
    with pytest.raises(TrainkitError, match=text):
        make()


def test_state_of_numpys_lengths_can_be_read_with_weights_alone() -> None:
    """As Lightning reads a checkpoint; numpy's numbers are refused there."""
    lengths = [*torch.arange(1, 5, dtype=torch.uint8).numpy()]
    each = ResumableLoader(
        range(4), batch_sampler=TokenBudgetSampler(lengths, tokens=4)
    )
    file = io.BytesIO()
    torch.save(each.state_dict(), file)
    file.seek(0)
    assert torch.load(file, weights_only=True)["sum of lengths"] == 10


def test_lengths_may_be_a_tensor_or_an_array() -> None:
    lengths = torch.tensor([3, 5, 2])
    for each in (lengths, lengths.numpy()):
        assert TokenBudgetSampler(each, tokens=9).lengths == [3, 5, 2]
