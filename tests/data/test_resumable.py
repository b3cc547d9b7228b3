"""A loader that goes on at the very row."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    TensorDataset,
)

from tests.helpers import TokenModule, pad, ragged_sequences, trainer
from trainkit.data.resumable import ResumableLoader
from trainkit.errors import TrainkitError

NUM_ROWS = 23


class Rows(Dataset[int]):
    """Numbers, and a list of those that were really loaded."""

    def __init__(self, number: int = NUM_ROWS) -> None:
        self.number = number
        self.loaded: list[int] = []

    def __len__(self) -> int:
        return self.number

    def __getitem__(self, row: int) -> int:
        self.loaded.append(row)
        return row


def loader(batch_size: int = 4, *, number: int = NUM_ROWS, **options: Any) -> Any:
    how = {"shuffle": True, "seed": 3, **options}
    return ResumableLoader(Rows(number), batch_size, **how)


def test_workers_draw_by_seed_epoch_and_rank(ranks: Any) -> None:
    """What `worker_init_fn` finds as torch's seed comes from the loader's generator."""

    def drawn(rank: int, epoch: int = 0, **options: Any) -> int:
        ranks(rank, 2)
        each = loader(number=16, **options)
        read(each, epoch)
        return each.generator.initial_seed()

    assert drawn(0) == drawn(0)
    others = {drawn(0), drawn(1), drawn(0, epoch=1), drawn(0, seed=4)}
    assert len(others) == 4


def read(each: Any, epoch: int = 0, most: int | None = None) -> list[list[int]]:
    each.sampler.set_epoch(epoch)
    return [batch.tolist() for batch in itertools.islice(each, most)]


# ---- the order -----------------------------------------------------------------------


@pytest.mark.parametrize("drop_last", [True, False])
def test_each_row_is_read_once_an_epoch(drop_last: bool) -> None:
    whole = sorted(itertools.chain(*read(loader(drop_last=drop_last))))
    assert len(whole) == len(set(whole)) == (20 if drop_last else 23)
    assert len(loader(drop_last=drop_last)) == (5 if drop_last else 6)


def test_order_is_that_of_seed_and_epoch() -> None:
    first, second = read(loader()), read(loader(), epoch=1)
    assert first == read(loader())
    assert first != second
    assert first != read(loader(seed=4))
    assert second != read(loader(seed=4))
    in_order = read(loader(shuffle=False), epoch=1)
    assert list(itertools.chain(*in_order)) == list(range(NUM_ROWS))


def test_global_generator_is_left_alone() -> None:
    before = torch.get_rng_state()
    read(loader())
    assert torch.equal(before, torch.get_rng_state())


def test_epoch_can_be_read_twice() -> None:
    each = loader()
    assert read(each) == read(each)


# ---- going on ------------------------------------------------------------------------


@pytest.mark.parametrize("given", range(6))
def test_resumed_epoch_equals_the_rest_and_loads_no_other_row(given: int) -> None:
    whole, next_epoch = read(loader(), epoch=2), read(loader(), epoch=3)
    first = loader()
    assert read(first, epoch=2, most=given) == whole[:given]
    second = loader()
    second.load_state_dict(first.state_dict())
    iter(second)  # as Lightning does before it says which epoch it is
    assert second.state_dict() == first.state_dict()
    assert read(second, epoch=2) == whole[given:]
    assert second.dataset.loaded == list(itertools.chain(*whole[given:]))
    assert read(second, epoch=3) == next_epoch


@pytest.mark.parametrize("persistent_workers", [True, False])
def test_what_workers_have_fetched_ahead_is_not_read(persistent_workers: bool) -> None:
    how: dict[str, Any] = {
        "num_workers": 2,
        "persistent_workers": persistent_workers,
        "prefetch_factor": 4,
    }
    whole = read(loader())
    first = loader(**how)
    assert read(first, most=2) == whole[:2]
    second = loader(**how)
    second.load_state_dict(first.state_dict())
    assert read(second) == whole[2:]
    assert read(second, epoch=1) == read(loader(), epoch=1)


def test_state_of_an_epochs_end_begins_the_next() -> None:
    first = loader()
    read(first)
    second = loader(batch_size=5, seed=9)  # nothing is left of the old order
    second.load_state_dict(first.state_dict())
    assert read(second, epoch=1) == read(loader(batch_size=5, seed=9), epoch=1)


def test_ended_loader_stays_ended_in_its_epoch() -> None:
    """Beside a longer one it does; its next pass begins anew, as where they cycle."""
    first = loader()
    read(first, epoch=2)
    second = loader()
    second.load_state_dict(first.state_dict())
    assert read(second, epoch=2) == []
    assert second.state_dict() == first.state_dict()
    assert read(second, epoch=2) == read(loader(), epoch=2)
    assert read(second, epoch=3) == read(loader(), epoch=3)


def test_state_of_an_epochs_end_begins_another_where_nobody_says_which() -> None:
    first, second = loader(shuffle=False), loader(shuffle=False)
    whole = [batch.tolist() for batch in first]
    second.load_state_dict(first.state_dict())
    assert [batch.tolist() for batch in second] == whole


def test_state_between_two_epochs_begins_the_second() -> None:
    """Beside a shorter one its last position was within the first."""
    for most in (2, None):
        first = loader()
        read(first, most=most)
        first.sampler.set_epoch(1)
        second = loader()
        second.load_state_dict(first.state_dict())
        assert read(second, epoch=1) == read(loader(), epoch=1)


def test_position_belongs_to_its_epoch() -> None:
    first = loader()
    read(first, epoch=1, most=2)
    second = loader()
    second.load_state_dict(first.state_dict())
    assert read(second, epoch=2) == read(loader(), epoch=2)


def test_earlier_epoch_than_that_of_the_state_is_refused() -> None:
    """Fabric counts epochs from 0 in a loader that it has set up, also in a run that
    goes on: it would read the wrong rows."""
    first = loader()
    read(first, epoch=2, most=2)
    second = loader()
    second.load_state_dict(first.state_dict())
    with pytest.raises(
        TrainkitError, match=r"saved in epoch 2, .* epoch 0\. .* Fabric"
    ):
        read(second, epoch=0)


def test_look_at_a_batch_in_between_moves_nothing() -> None:
    whole, each = read(loader()), loader()
    going_on = iter(each)
    seen = [next(going_on)]
    seen.append(next(going_on))
    assert next(iter(each)).tolist() == whole[0]
    seen.append(next(going_on))
    second = loader()
    second.load_state_dict(each.state_dict())
    assert [b.tolist() for b in seen] + read(second) == whole


def test_state_of_another_loader_is_refused() -> None:
    with pytest.raises(TrainkitError, match="received one without end, epoch, positi"):
        loader().load_state_dict({"_num_yielded": 3})


def test_twice_interrupted_epoch() -> None:
    whole, state, seen = read(loader()), None, []
    for _ in range(3):
        each = loader()
        if state is not None:
            each.load_state_dict(state)
        seen += read(each, most=2)
        state = each.state_dict()
    assert seen == whole


# ---- ranks ---------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("number", [16, 22, 23, 24, 29])
def test_ranks_share_each_row_once(ranks: Any, number: int, world_size: int) -> None:
    shares, left_out = [], 0
    for rank in range(world_size):
        ranks(rank, world_size)
        each = loader(number=number)
        left_out = number - each.sampler.end
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(each.sampler, "_has_warned", True)
            shares.append(read(each))
        assert len(each) == len(shares[-1])
    rows = sorted(row for share in shares for batch in share for row in batch)
    assert len(rows) == len(set(rows)) == number - left_out
    assert left_out < world_size
    assert len({len(share) for share in shares}) == 1


@pytest.mark.parametrize(("batch_size", "world_size"), [(8, 1), (4, 2), (2, 4)])
def test_other_number_of_ranks_goes_on_at_the_same_row(
    ranks: Any, batch_size: int, world_size: int
) -> None:
    ranks(0, 2)
    first = loader(number=32)
    read(first, most=2)
    state = first.state_dict()
    ranks(0, 1)
    stretches = read(loader(8, number=32))
    rest = []
    for rank in range(world_size):
        ranks(rank, world_size)
        each = loader(batch_size, number=32)
        each.load_state_dict(state)
        rest.append(read(each))
    together = [sorted(itertools.chain(*parts)) for parts in zip(*rest, strict=True)]
    assert together == [sorted(stretch) for stretch in stretches[2:]]


def test_rows_too_few_for_the_ranks_are_spoken_of(ranks: Any) -> None:
    ranks(0, 3)
    with pytest.warns(UserWarning, match="the last 1 of 25 rows are too few for 3"):
        read(loader(number=25))


# ---- refusals ------------------------------------------------------------------------


def test_changes_within_an_epoch_are_refused() -> None:
    first = loader()
    read(first, most=2)
    state = first.state_dict()
    for change, text in [
        ({"batch_size": 2}, r"batch_size x ranks: .* was 4 .* is 2 now"),
        ({"seed": 4}, r"seed: .* was 3 .* is 4 now"),
        ({"shuffle": False}, r"shuffle: .* was True .* is False now"),
        ({"number": 24}, r"dataset: .* was 23 .* is 24 now"),
    ]:
        with pytest.raises(TrainkitError, match=text):
            loader(**change).load_state_dict(state)


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ({"dataset": Stream()}, "dataset: must have a length .* received Stream"),
        ({"batch_size": 0}, "batch_size: must be a whole number from 1 to .* 0"),
        ({"batch_size": None}, "batch_size: must be a whole number"),
        ({"seed": 1.5}, "seed: must be a whole number, received 1.5"),
        ({"sampler": RandomSampler(range(3))}, "it has its own .* RandomSampler"),
        ({"in_order": False}, "in_order: must be True, .* which rows were read"),
    ],
)
def test_options_are_checked(how: dict[str, Any], text: str) -> None:
    with pytest.raises(TrainkitError, match=text):
        ResumableLoader(**{"dataset": Rows(), **how})


def test_no_full_batch_is_refused() -> None:
    with pytest.raises(TrainkitError, match="3 rows give not one batch of 4 on 1 rank"):
        read(loader(number=3, drop_last=True))


# ---- in a Trainer --------------------------------------------------------------------


class Seen(Callback):
    def __init__(self) -> None:
        self.batches: list[Any] = []

    def on_train_batch_start(self, *args: Any, **kwargs: Any) -> None:
        self.batches.append(args[2]["ids"])


def test_lightning_says_the_epoch() -> None:
    seen, sequences = Seen(), ragged_sequences(10)
    each = ResumableLoader(sequences, 5, shuffle=True, collate_fn=pad)
    trainer(callbacks=[seen]).fit(TokenModule(), each)
    assert len(seen.batches) == 4
    assert not torch.equal(seen.batches[0], seen.batches[2])
    assert each.state_dict()["epoch"] == 1


@pytest.mark.filterwarnings("ignore:You requested to overfit")
@pytest.mark.filterwarnings("ignore:.*sampler has shuffling enabled")
def test_overfit_batches_reads_the_same_rows_each_epoch() -> None:
    seen, sequences = Seen(), ragged_sequences(10)
    each = ResumableLoader(sequences, 5, shuffle=True, collate_fn=pad)
    trainer(callbacks=[seen], overfit_batches=1).fit(TokenModule(), each)
    assert len(seen.batches) == 2
    assert torch.equal(*seen.batches)


def test_plain_loader_begins_again() -> None:
    """Negative control: why all this is needed."""
    plain = DataLoader(TensorDataset(torch.arange(NUM_ROWS)), 4)
    assert not hasattr(plain, "load_state_dict")
