"""Recalibrating takes its rows beside training, from any kind of loader."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    Sampler,
    TensorDataset,
    default_collate,
)

from tests.lit.batch_norm.fits import (
    FEW,
    At,
    ConvModule,
    FromWhereItWas,
    Validated,
    batches,
    dataset,
    fit,
    reference,
    two_layers,
)
from tests.zoo.modules import hooked
from tests.zoo.small_resnet import furthest, of_big_batch, statistics
from trainkit import BatchNormGuard, ResumableLoader

pytestmark = [
    pytest.mark.filterwarnings("ignore:accumulation. an open window"),
    pytest.mark.filterwarnings("ignore:accumulate_grad_batches=.*has only"),
]

EXACT = 1e-10


class Notes(ConvModule):
    """Writes down the rows of training, and those of recalibrating by themselves."""

    def __init__(self, *net: Any) -> None:
        super().__init__(*net)
        # In an object of its own, which is not put back.
        self.notes = SimpleNamespace(seen=[], recalibrated=[])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = self.pair(batch)
        notes = self.notes
        (notes.seen if torch.is_grad_enabled() else notes.recalibrated).append(x)
        return F.cross_entropy(self.net(x), y)

    def pair(self, batch: Any) -> Any:
        return batch


class ValidatedNotes(Notes, Validated): ...


# ---- loaders -------------------------------------------------------------------------


class Stream(IterableDataset):
    """Counts by itself where it is, as one that can be resumed does."""

    def __init__(self) -> None:
        self.rows = [dataset(FEW)[i] for i in range(FEW)]
        self.given = 0

    def __iter__(self) -> Iterator[Any]:
        self.given = 0
        while self.given < len(self.rows):
            self.given += 1
            yield self.rows[self.given - 1]


class Shuffles(Sampler[int]):
    """Draws from a generator of Python's own."""

    def __init__(self) -> None:
        self.draw = random.Random(3)

    def __len__(self) -> int:
        return FEW

    def __iter__(self) -> Iterator[int]:
        return iter(self.draw.sample(range(FEW), FEW))


class Locks(RandomSampler):
    """Holds what cannot be copied."""

    def __init__(self) -> None:
        super().__init__(range(FEW))
        self.lock = threading.Lock()


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(8)


def by_fours() -> BatchSampler:
    return BatchSampler(RandomSampler(range(FEW), generator=seeded()), 4, False)


LOADERS: dict[str, Any] = {
    "own generator": lambda: batches(FEW, shuffle=True, generator=seeded()),
    "two workers": lambda: batches(FEW, shuffle=True, num_workers=2),
    "own batch sampler": lambda: DataLoader(dataset(FEW), batch_sampler=by_fours()),
    "own sampler": lambda: batches(FEW, sampler=Shuffles()),
    "own sampler, not to be copied": lambda: batches(FEW, sampler=Locks()),
    "stream with a persistent worker": lambda: DataLoader(
        Stream(), batch_size=4, num_workers=1, persistent_workers=True
    ),
    "of one's own, with a state": lambda: FromWhereItWas(0, FEW),
}


class Drawing(Notes):
    """Draws more in each pass over the data."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        torch.rand(1 + len(self.notes.recalibrated))
        return super().training_step(batch, batch_idx)


def noisy(rows: list[Any]) -> Any:
    x, y = default_collate(rows)
    return x + torch.randn_like(x), y


def test_all_passes_see_the_same_rows_whatever_the_forward_pass_draws() -> None:
    data = DataLoader(dataset(FEW), batch_size=4, collate_fn=noisy)
    module = Drawing()
    fit("recalibrate", module=module, data=data, max_epochs=1)
    seen, number = module.notes.recalibrated, len(data)
    assert len(seen) >= 3 * number
    for place, x in enumerate(seen):
        assert torch.equal(x, seen[place % number])


@pytest.mark.parametrize("kind", LOADERS)
def test_training_sees_the_same_rows_in_the_same_order(kind: str) -> None:
    """Validation in mid-epoch, when the loader is under way. And the statistics at the
    end equal those of all rows."""
    ends = []
    for policy in ("recalibrate", "ignore"):
        torch.manual_seed(4)
        how: Any = {"val_check_interval": 4 if kind == "two workers" else 2}
        how |= {"data": LOADERS[kind](), "val": batches(batch_size=27)}
        ends.append(fit(policy, module=ValidatedNotes(two_layers), **how))
    mine, plain = ends
    wanted = reference(mine, dataset(FEW).tensors[0])
    assert furthest(statistics(mine.net), wanted) <= EXACT
    assert mine.notes.recalibrated
    assert len(mine.notes.seen) == 8
    assert all(map(torch.equal, mine.notes.seen, plain.notes.seen))
    assert all(map(torch.equal, mine.parameters(), plain.parameters()))


class Pairs(Notes):
    """Of two loaders: trains on one, or on both."""

    def pair(self, batch: Any) -> Any:
        one, other = batch.values() if isinstance(batch, dict) else batch
        if other is None:
            return one
        return torch.cat([one[0], other[0]]), torch.cat([one[1], other[1]])


@pytest.mark.parametrize("is_shortest", [True, False])
def test_several_loaders_are_put_together_as_in_training(is_shortest: bool) -> None:
    two = [batches(12, shuffle=True), batches(20, batch_size=5)]
    data: Any = dict(zip("ab", two, strict=True))
    data = CombinedLoader(two, "min_size") if is_shortest else data
    module = fit("recalibrate", module=Pairs(), data=data)
    num = 3 if is_shortest else 4
    assert len(module.notes.seen) == 2 * num
    rows = torch.cat(module.notes.recalibrated[-num:])
    assert len(rows) == {3: 12 + 15, 4: 16 + 20}[num]
    assert furthest(statistics(module.net), of_big_batch(module.net, rows)) <= EXACT


@pytest.mark.parametrize(
    ("num_batches", "shuffle"), [(1, True), (3, True), (3, False), (50, False)]
)
def test_part_of_the_rows_is_their_beginning(num_batches: int, shuffle: bool) -> None:
    guard = BatchNormGuard("recalibrate", num_batches=num_batches)
    module = fit(guard, module=Notes(), data=batches(shuffle=shuffle))
    used = min(num_batches, 7)
    rows = torch.cat(module.notes.recalibrated[-used:])
    assert len({float(row.sum()) for row in rows}) == min(4 * num_batches, 27)
    assert furthest(statistics(module.net), of_big_batch(module.net, rows)) <= EXACT
    first = torch.cat(list(dataset().tensors[0].split(4))[:used])
    assert torch.equal(rows, first) is not shuffle


class NotToBeCopied(TensorDataset):
    def __deepcopy__(self, memo: Any) -> Any:
        raise AssertionError("the data were copied")


@pytest.mark.parametrize("weigh_nothing", [None, lambda row: row])
def test_data_of_a_loader_that_fills_are_not_copied(weigh_nothing: Any) -> None:
    rows = NotToBeCopied(*dataset().tensors)
    data = ResumableLoader(rows, 4, weigh_nothing=weigh_nothing)
    module = fit("recalibrate", module=Notes(), data=data, max_epochs=1)
    assert module.notes.recalibrated


# ---- what runs -----------------------------------------------------------------------


def only_batch(self: Any, batch: Any) -> Any:
    return F.cross_entropy(self.net(batch[0]), batch[1])


class Compiled(ConvModule):
    def __init__(self) -> None:
        super().__init__(two_layers)
        self.plain = self.net
        self.net = torch.compile(self.net, backend="eager")


class Half(ConvModule):
    def __init__(self) -> None:
        super().__init__()
        self.float()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        y = self.net(batch[0].float())
        assert y.dtype == torch.bfloat16
        return F.cross_entropy(y, batch[1])


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch's own, while compiling
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize(
    ("make", "how"),
    [
        (hooked(ConvModule, training_step=only_batch), {"exact": True}),
        (Compiled, {}),
        (Half, {"precision": "bf16-mixed"}),
    ],
)
def test_any_step_runs(make: Any, how: Any) -> None:
    module = fit("recalibrate", module=make(), **how)
    net = module.plain if make is Compiled else module.net
    found = statistics(net)
    kind, limit = (torch.float32, 0.2) if make is Half else (torch.float64, EXACT)
    assert {each.dtype for each in found.values()} == {kind}
    assert furthest(found, of_big_batch(net, dataset().tensors[0].to(kind))) <= limit


class Augments(Validated):
    """As Lightning's documentation shows it."""

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return 2 * batch[0], batch[1]

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return (batch[0] + 5 if self.trainer.training else batch[0]), batch[1]


def test_rows_are_changed_as_in_training_before_a_validation_too() -> None:
    off: list[float] = []

    def look(trainer: Any, module: Any) -> None:
        if not trainer.sanity_checking:
            assert trainer.validating
            rows = 2 * dataset().tensors[0] + 5
            wanted = of_big_batch(module.net, rows)
            off.append(furthest(statistics(module.net), wanted))

    hook = At("on_validation_epoch_start", look)
    fit("recalibrate", hook, module=Augments(), val=batches(batch_size=27))
    assert len(off) == 2
    assert max(off) <= EXACT
