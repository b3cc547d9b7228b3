"""A loader that goes on at the very row."""

from __future__ import annotations

import contextlib
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch.utils.data import (
    BatchSampler,
    Dataset,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
)

from tests.data.sharing import rank_of
from tests.helpers import TokenModule, pad, ragged_sequences, trainer, weights
from tests.zoo.modules import Stream
from trainkit import (
    AccumulationCallback,
    PadCollate,
    PerToken,
    ResumableLoader,
    TokenBudgetSampler,
    TrainkitError,
)

NUM_ROWS = 23
STREAM = Stream(range(3))


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


LENGTHS = [1 + row * 7 % 11 for row in range(NUM_ROWS)]
KINDS = ["rows", "token budget"]


def loader(
    batch_size: int = 4,
    *,
    kind: str = "rows",
    number: int = NUM_ROWS,
    seed: int = 3,
    **options: Any,
) -> Any:
    if kind == "token budget":
        cutting = TokenBudgetSampler(LENGTHS, tokens=24, seed=seed)
        return ResumableLoader(Rows(), batch_sampler=cutting, **options)
    how = {"shuffle": True, "seed": seed, **options}
    return ResumableLoader(Rows(number), batch_size, **how)


def read(each: Any, epoch: int = 0, most: int | None = None) -> list[list[int]]:
    each.sampler.set_epoch(epoch)
    return [batch.tolist() for batch in itertools.islice(each, most)]


def going_on(first: Any, **how: Any) -> Any:
    """Another loader, with the state of the first, or with this state."""
    second = loader(**how)
    second.load_state_dict(first if isinstance(first, dict) else first.state_dict())
    return second


# ---- the order -----------------------------------------------------------------------


def test_workers_draw_by_seed_epoch_and_rank() -> None:
    """What `worker_init_fn` finds as torch's seed comes from the loader's generator;
    torch's own generator is left alone."""
    before = torch.get_rng_state()

    def drawn(rank: int, epoch: int = 0, **options: Any) -> int:
        with rank_of(rank, 2):
            each = loader(number=16, **options)
            read(each, epoch)
            return each.generator.initial_seed()

    assert drawn(0) == drawn(0)
    others = {drawn(0), drawn(1), drawn(0, epoch=1), drawn(0, seed=4)}
    assert len(others) == 4
    assert torch.equal(before, torch.get_rng_state())


# ---- going on ------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_resumed_epoch_equals_the_rest_and_loads_no_other_row(kind: str) -> None:
    whole, next_epoch = read(loader(kind=kind), 2), read(loader(kind=kind), 3)
    for given in range(len(whole) + 1):
        first = loader(kind=kind)
        assert read(first, epoch=2, most=given) == whole[:given]
        second = going_on(first, kind=kind)
        iter(second)  # as Lightning does before it says which epoch it is
        assert second.state_dict() == first.state_dict()
        assert read(second, epoch=2) == whole[given:]
        assert second.dataset.loaded == list(itertools.chain(*whole[given:]))
        assert read(second, epoch=3) == next_epoch


@pytest.mark.parametrize(
    ("persistent_workers", "kind"), [(True, "rows"), (False, "token budget")]
)
def test_what_workers_have_fetched_ahead_is_not_read(
    persistent_workers: bool, kind: str
) -> None:
    how: dict[str, Any] = {"kind": kind, "num_workers": 2, "prefetch_factor": 4}
    how["persistent_workers"] = persistent_workers
    whole = read(loader(kind=kind))
    first = loader(**how)
    assert read(first, most=2) == whole[:2]
    second = going_on(first, **how)
    assert read(second) == whole[2:]
    assert read(second, epoch=1) == read(loader(kind=kind), epoch=1)


def test_a_loader_that_has_ended_stays_ended_in_its_epoch() -> None:
    """Beside a longer one it does; its next pass begins anew, as where they cycle, or
    where nobody says which epoch it is. The next epoch may have another order."""
    first = loader()
    read(first, epoch=2)
    second = going_on(first)
    assert read(second, epoch=2) == []
    assert second.state_dict() == first.state_dict()
    assert read(second, epoch=2) == read(loader(), epoch=2)
    assert read(second, epoch=3) == read(loader(), epoch=3)
    assert [b.tolist() for b in going_on(first)] == read(loader(), epoch=2)
    other: dict[str, Any] = {"batch_size": 5, "seed": 9}
    assert read(going_on(first, **other), epoch=3) == read(loader(**other), epoch=3)


@pytest.mark.parametrize("most", [2, None])
def test_state_between_two_epochs_begins_the_second(most: int | None) -> None:
    """Beside a shorter one its last position was within the first."""
    first = loader()
    read(first, most=most)
    first.sampler.set_epoch(1)
    assert read(going_on(first), epoch=1) == read(loader(), epoch=1)


def test_position_belongs_to_its_epoch() -> None:
    """Fabric counts epochs from 0 in a loader that it has set up, also in a run that
    goes on: it would read the wrong rows."""
    first = loader()
    read(first, epoch=1, most=2)
    assert read(going_on(first), epoch=2) == read(loader(), epoch=2)
    text = r"saved in epoch 1, .* epoch 0\. .* Fabric"
    with pytest.raises(TrainkitError, match=text):
        read(going_on(first), epoch=0)


def test_look_at_a_batch_in_between_moves_nothing() -> None:
    whole, each = read(loader()), loader()
    under_way = iter(each)
    seen = [next(under_way), next(under_way)]
    assert next(iter(each)).tolist() == whole[0]
    seen.append(next(under_way))
    assert [b.tolist() for b in seen] + read(going_on(each)) == whole


# ---- ranks ---------------------------------------------------------------------------


@pytest.mark.parametrize(("batch_size", "num_ranks"), [(8, 1), (4, 2), (2, 4)])
def test_other_ranks_go_on_at_the_same_row(batch_size: int, num_ranks: int) -> None:
    with rank_of(0, 2):
        first = loader(number=32)
        read(first, most=2)
        state = first.state_dict()
    stretches = read(loader(8, number=32))
    rest = []
    for rank in range(num_ranks):
        with rank_of(rank, num_ranks):
            rest.append(read(going_on(state, batch_size=batch_size, number=32)))
    together = [sorted(itertools.chain(*parts)) for parts in zip(*rest, strict=True)]
    assert together == [sorted(stretch) for stretch in stretches[2:]]


def test_ranks_share_rows_and_leave_out_those_that_are_too_few_with_a_word() -> None:
    """Lightning puts no other sampler in the place of a `DistributedSampler`."""
    for kind in KINDS:
        assert isinstance(of_sequences(kind).sampler, DistributedSampler)
    text, read_by_rank = "the last 1 of 25 rows are too few for 3", []
    for rank in range(3):
        with rank_of(rank, 3):
            said = pytest.warns(UserWarning, match=text)
            with contextlib.nullcontext() if rank else said:
                read_by_rank += read(loader(number=25))
    rows = [row for batch in read_by_rank for row in batch]
    assert len(rows) == len(set(rows)) == 24


# ---- refusals ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "change", "text"),
    [
        ("rows", {"batch_size": 2}, r"batch_size x ranks: .* was 4 .* is 2 now"),
        ("rows", {"seed": 4}, r"seed: .* was 3 .* is 4 now"),
        ("rows", {"shuffle": False}, r"shuffle: .* was True .* is False now"),
        ("rows", {"number": 24}, r"dataset: .* was 23 .* is 24 now"),
        ("token budget", {"seed": 4}, "seed: must stay as it was"),
        ("token budget", {"kind": "rows"}, "batch_size x ranks: .* another sampler"),
        ("rows", {"kind": "token budget"}, "tokens: .* another sampler"),
    ],
)
def test_changes_within_an_epoch_are_refused(kind: str, change: Any, text: str) -> None:
    first = loader(kind=kind)
    read(first, most=2)
    state = first.state_dict()
    with pytest.raises(TrainkitError, match=text):
        going_on(state, **{"kind": kind, **change})
    with rank_of(0, 2), pytest.raises(TrainkitError, match="ranks: must stay as it"):
        going_on(state, kind=kind)
    read(first)
    going_on(first, **{"kind": kind, **change})  # at an epoch's end whatever you like


def test_a_state_and_rows_that_cannot_be_are_refused() -> None:
    with pytest.raises(TrainkitError, match="3 rows give not one batch of 4 on 1 rank"):
        read(loader(number=3, drop_last=True))
    with pytest.raises(TrainkitError, match="received one without batches, end, epoch"):
        loader().load_state_dict({"_num_yielded": 3})


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ({"dataset": STREAM}, "dataset: must have .* Stream. .* ResumableStream"),
        ({"batch_size": 0}, "batch_size: must be a whole number from 1 to .* 0"),
        ({"batch_size": None}, "batch_size: must be a whole number"),
        ({"seed": 1.5}, "seed: must be a whole number, received 1.5"),
        ({"sampler": RandomSampler(range(3))}, "it has its own .* RandomSampler"),
        ({"in_order": False}, "in_order: must be True, .* which rows were read"),
        (
            {"batch_sampler": BatchSampler(SequentialSampler(range(3)), 2, False)},
            "must be a TokenBudgetSampler or a WindowSampler, received BatchSam",
        ),
        (
            {"batch_sampler": TokenBudgetSampler([1], tokens=2), "shuffle": True},
            "cuts the batches by itself: .* apply to TokenBudgetSampler",
        ),
        (
            {"batch_sampler": TokenBudgetSampler([1, 2], tokens=2)},
            "needs the length of every row, received 2 lengths for 23 rows",
        ),
    ],
)
def test_options_are_checked(how: dict[str, Any], text: str) -> None:
    with pytest.raises(TrainkitError, match=text):
        ResumableLoader(**{"dataset": Rows(), **how})


# ---- in a Trainer --------------------------------------------------------------------

SEQUENCES = [{"ids": x, "labels": y} for x, y in ragged_sequences(24)]
NUM_TOKENS = [len(row["ids"]) for row in SEQUENCES]
PAD = PadCollate({"labels": -100})


def of_sequences(kind: str) -> ResumableLoader:
    if kind == "rows":
        return ResumableLoader(SEQUENCES, 4, shuffle=True, collate_fn=PAD)
    budget = TokenBudgetSampler(NUM_TOKENS, tokens=40)
    return ResumableLoader(SEQUENCES, batch_sampler=budget, collate_fn=PAD)


class Interrupted(Callback):
    """Ends a training after so many batches, as a kill would."""

    def __init__(self, after: int) -> None:
        self.after = after
        self.seen: list[Any] = []

    def on_train_batch_start(self, *args: Any, **kwargs: Any) -> None:
        if self.after and len(self.seen) == self.after:
            raise KeyboardInterrupt
        self.seen.append(args[2]["ids"].tolist())


def fit(kind: str, folder: Path, *, after: int = 0, resume: Any = None) -> Any:
    torch.manual_seed(0)
    module = TokenModule(dtype=torch.float64)
    seen = Interrupted(after)
    saving = ModelCheckpoint(folder, every_n_train_steps=1, save_last=True)
    fitting = trainer(
        2,
        callbacks=[seen, AccumulationCallback(PerToken()), saving],
        enable_checkpointing=True,
    )
    try:
        fitting.fit(module, of_sequences(kind), ckpt_path=resume)
    except (KeyboardInterrupt, SystemExit):
        assert after
    return module, seen.seen


@pytest.mark.filterwarnings("ignore:Checkpoint directory")
@pytest.mark.parametrize("kind", KINDS)
def test_lightning_goes_on_at_the_very_batch(kind: str, tmp_path: Path) -> None:
    whole, batches = fit(kind, tmp_path / "whole")
    each = len(of_sequences(kind))
    assert len(batches) == 2 * each
    assert batches[:each] != batches[each:]
    cut = each + 4  # in the second epoch, at a window's end
    _, before = fit(kind, tmp_path / "cut", after=cut)
    resumed, after = fit(kind, tmp_path / "cut", resume=tmp_path / "cut" / "last.ckpt")
    assert before + after == batches
    assert torch.equal(weights(resumed), weights(whole))


@pytest.mark.filterwarnings("ignore:You requested to overfit")
@pytest.mark.filterwarnings("ignore:.*sampler has shuffling enabled")
def test_overfit_batches_reads_the_same_rows_each_epoch() -> None:
    """Of a sampler by length Lightning would replace the order; it says so."""
    seen = Interrupted(0)
    each = ResumableLoader(ragged_sequences(10), 5, shuffle=True, collate_fn=pad)
    trainer(callbacks=[seen], overfit_batches=1).fit(TokenModule(), each)
    first, second = seen.seen
    assert first == second
    short = ResumableLoader(ragged_sequences(10), 4, drop_last=True, collate_fn=pad)
    trainer(callbacks=[seen := Interrupted(0)], overfit_batches=5).fit(
        TokenModule(), short
    )
    assert [len(ids) for ids in seen.seen] == [4, 4] * 2  # of the loader made anew
    with pytest.raises(TypeError, match="can't inject"):
        trainer(overfit_batches=1).fit(TokenModule(), of_sequences("token budget"))
