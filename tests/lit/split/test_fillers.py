"""A row that fills a place weighs nothing under the strategy, or is refused."""

from __future__ import annotations

import random
import re
from functools import partial
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor, nn
from torch.utils.data import Dataset

from tests.helpers import (
    NAIVE,
    TOLERANCE,
    deviation,
    raise_rank_errors,
    run_ranks,
    trainer,
    weights,
)
from trainkit import (
    AccumulationCallback,
    AccumulationMixin,
    AccumulationStrategy,
    LengthGroupedSampler,
    MicroBatching,
    PerSample,
    PerToken,
    ResumableLoader,
    TrainkitError,
    Uniform,
    WeighNothing,
)

pytestmark = pytest.mark.filterwarnings("ignore:accumulate_grad_batches=.*has only")

REFUSED = r"PerSample: a row with which ResumableLoader\(last='pad'\) .* it weighs 1\. "
NOTHING = WeighNothing(weight=0.0, labels=-100)


def rows(number: int = 10) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(number, 3, generator=generator, dtype=torch.float64)
    one = {"weight": 1.0, "labels": 1}
    return [{"x": each, "y": each.exp().sum(), **one} for each in x]


def padded(number: int = 10, size: int = 4, **options: Any) -> ResumableLoader:
    how = {"last": "pad", "weigh_nothing": NOTHING, **options}
    return ResumableLoader(rows(number), size, **how)


class Weighted(pl.LightningModule):
    """A mean over the rows that count."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(3, 1).double()
        with torch.no_grad():
            self.net.weight.fill_(0.1)
            self.net.bias.zero_()

    def loss_of(self, batch: Any) -> Tensor:
        errors = (self.net(batch["x"])[:, 0] - batch["y"]).square() * batch["weight"]
        return errors.sum() / batch["weight"].sum().clamp(min=1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss_of(batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.02)


def fit(
    weighed_by: Any = None,
    data: Any = None,
    *,
    module: Any = None,
    cut: Any = None,
    **how: Any,
) -> Any:
    module = module or Weighted()
    weighed_by = weighed_by or PerSample()
    ours = [AccumulationCallback(weighed_by, micro_batching=cut)]
    if isinstance(module, AccumulationMixin):
        ours = []
    data = padded() if data is None else data
    trainer(how.pop("accumulate", 3), callbacks=ours, **how).fit(module, data)
    return module


def big_batch() -> Any:
    return fit(data=ResumableLoader(rows(), 10), accumulate=1)


# ---- the law -------------------------------------------------------------------------


def test_fillers_that_weigh_nothing_equal_the_big_batch() -> None:
    big = big_batch()
    for strategy in (PerSample(mask="weight"), PerToken()):
        assert deviation(fit(strategy), big, Weighted()) < TOLERANCE[torch.float64]
        cut = MicroBatching(size=3)
        split = fit(strategy, padded(10, 12), cut=cut, accumulate=1)
        assert deviation(split, big, Weighted()) < TOLERANCE[torch.float64]


class Rows(AccumulationStrategy):
    """As `PerSample()`, and not known to be."""

    def weight(self, batch: Any) -> int:
        return len(batch["x"])


def test_fillers_that_count_are_off(monkeypatch: Any) -> None:
    """The negative control: without the refusal."""
    path = "trainkit.lit.windows.callback.refuse_fillers_that_count"
    monkeypatch.setattr(path, lambda *args: None)
    assert deviation(fit(), big_batch(), Weighted()) > NAIVE


@pytest.mark.parametrize("number", [10, 9, 11])
@pytest.mark.parametrize(
    ("strategy", "name"), [(PerSample(), "PerSample"), (Rows(), "Rows")]
)
def test_filler_that_counts_is_refused(strategy: Any, name: str, number: int) -> None:
    with pytest.raises(TrainkitError, match=REFUSED.replace("PerSample", name, 1)):
        fit(strategy, padded(number))
    with pytest.raises(TrainkitError, match=REFUSED.replace("PerSample", name, 1)):
        fit(strategy, padded(number), cut=MicroBatching(size=2), accumulate=1)


def test_each_term_is_looked_at() -> None:
    terms = {"ce": PerToken(), "kl": PerSample()}
    with pytest.raises(TrainkitError, match=REFUSED):
        fit(terms, cut=MicroBatching(size=2), accumulate=1)


@pytest.mark.parametrize(
    "data",
    [
        lambda: padded(8),
        lambda: padded(last="weight"),
        lambda: padded(last="drop"),
        lambda: ResumableLoader(rows(), 4),
        lambda: ResumableLoader(
            rows(),
            batch_sampler=LengthGroupedSampler([1] * 10, batch_size=4),
            weigh_nothing=NOTHING,
        ),
    ],
)
def test_loader_that_fills_no_place_is_not_refused(data: Any) -> None:
    fit(data=data())


def test_epoch_that_ends_before_its_fillers_is_not_refused() -> None:
    fit(limit_train_batches=2)


def test_uniform_is_left_to_what_is_said_of_it() -> None:
    fit(Uniform())


# ---- several loaders -----------------------------------------------------------------


class Two(Weighted):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        each = batch.values() if isinstance(batch, dict) else batch
        return sum(self.loss_of(one) for one in each if one is not None)


@pytest.mark.parametrize("of", [dict, list, tuple])
@pytest.mark.parametrize("mode", ["max_size", "min_size", "max_size_cycle"])
def test_filler_of_one_of_several_loaders_is_refused(mode: Any, of: Any) -> None:
    both: Any = {"a": ResumableLoader(rows(12), 4), "b": padded(10)}
    path = "b" if of is dict else "1"
    both = both if of is dict else of(both.values())
    with pytest.raises(TrainkitError, match=REFUSED):
        fit(PerSample(size=f"{path}.x"), CombinedLoader(both, mode), module=Two())
    mask = PerSample(mask=f"{path}.weight")
    fit(mask, CombinedLoader(both, mode), module=Two())


class OfBoth(AccumulationStrategy):
    """Relies on a batch of each loader, which there is where none ends before all."""

    def weight(self, batch: Any) -> Tensor:
        return batch["a"]["weight"].sum() + batch["b"]["weight"].sum()


class Together(Weighted):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        parts = (batch["a"], batch["b"])
        joined = {name: torch.cat([p[name] for p in parts]) for name in parts[0]}
        return self.loss_of(joined)


@pytest.mark.parametrize("mode", ["min_size", "max_size_cycle"])
def test_strategy_that_relies_on_all_loaders_hears_nothing(mode: Any) -> None:
    both = {"a": padded(10), "b": padded(9)}
    module = fit(OfBoth(), CombinedLoader(both, mode), module=Together())
    together = ResumableLoader(rows(10) + rows(9), 19)
    assert deviation(module, fit(data=together, accumulate=1), Weighted()) < 1e-12
    plain = {"a": padded(10), "b": ResumableLoader(rows(12), 4)}
    fit(OfBoth(), CombinedLoader(plain, mode), module=Together())  # without a word


def test_strategy_that_fails_where_a_loader_has_ended_is_spoken_of() -> None:
    both = {"a": padded(10), "b": padded(9)}
    with pytest.warns(UserWarning, match="OfBoth: .* this cannot be seen"):
        fit(OfBoth(), CombinedLoader(both, "max_size"), module=Together())


# ---- what cannot be weighed, and what must not change --------------------------------


class OnDevice(Weighted):
    """Its labels are made there."""

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        torch.rand(3)
        return {**batch, "made": torch.where(batch["weight"] > 0, 1, self.filler)}

    filler = -100


def test_labels_that_a_hook_makes_are_seen() -> None:
    fit(PerToken(labels="made"), module=OnDevice())
    module = OnDevice()
    module.filler = 7
    with pytest.raises(TrainkitError, match=r"PerToken: a row .* it weighs 1\."):
        fit(PerToken(labels="made"), module=module)


class Fails(AccumulationStrategy):
    def weight(self, batch: Any) -> Tensor:
        if not batch["weight"].any():
            raise KeyError("no rows")
        return batch["weight"].sum()


def test_filler_that_cannot_be_weighed_is_spoken_of() -> None:
    with pytest.warns(UserWarning, match=r"Fails: .* this cannot be seen \(KeyError"):
        fit(Fails())


class Manual(AccumulationMixin, Weighted):
    accumulation = PerSample()

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer: Any = self.optimizers()
        self.accumulate(self.loss_of(batch), weight=batch["weight"].sum())
        if self.window_ends(batch_idx):
            self.finish_window()
            optimizer.step()
            optimizer.zero_grad()


def test_manual_optimization_may_say_weights_itself() -> None:
    with pytest.warns(UserWarning, match=REFUSED):
        module = fit(module=Manual())
    assert deviation(module, big_batch(), Weighted()) < TOLERANCE[torch.float64]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_look_at_a_filler_draws_nothing_and_moves_no_row(num_workers: int) -> None:
    class Draws(OnDevice):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            drawn.append(float(torch.rand(())))
            seen.append(batch["x"].clone())
            return super().training_step(batch, batch_idx)

    found = []
    for strategy in (PerToken(labels="made"), Uniform()):  # of which one is looked at
        drawn: list[float] = []
        seen: list[Tensor] = []
        torch.manual_seed(1)
        data = padded(shuffle=True, num_workers=num_workers)
        fit(strategy, data, module=Draws())
        found.append((drawn, torch.cat(seen)))
    assert found[0][0] == found[1][0]
    assert torch.equal(found[0][1], found[1][1])


class Drawing(Dataset[Any]):
    """Draws from a generator of its own, and counts."""

    def __init__(self) -> None:
        self.rows = rows()
        self.draws, self.num_read = random.Random(0), 0

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        self.num_read += 1
        row = self.rows[index]
        return {**row, "x": row["x"] + self.draws.random(), "labels": self.num_read}


def test_look_at_a_filler_leaves_the_data_set_as_it_is() -> None:
    found = []
    for strategy in (PerSample(mask="weight"), Uniform()):  # of which one is looked at
        drawing = Drawing()
        data = ResumableLoader(drawing, 4, last="pad", weigh_nothing=NOTHING)
        module = Weighted()
        seen: list[Tensor] = []
        module.training_step = partial(_seen, module, seen)  # type: ignore[assignment]
        fit(strategy, data, module=module)
        found.append((torch.cat(seen), drawing.num_read))
    assert torch.equal(found[0][0], found[1][0])
    assert found[0][1] == found[1][1] == 24  # of two epochs


def _seen(module: Any, seen: list[Tensor], batch: Any, batch_idx: int) -> Any:
    seen.append(batch["x"].clone())
    return module.loss_of(batch)


# ---- ranks ---------------------------------------------------------------------------


def on_ranks(rank: int, world: int) -> list[Any]:
    """Eleven rows in batches of two on two ranks leave three: one place is to fill.
    Nine leave one, for the first rank alone."""
    found: list[Any] = []
    how: dict[str, Any] = {"strategy": "ddp", "devices": world}
    for number, last in ((11, "pad"), (9, "weight"), (11, "weight")):
        for strategy in (PerSample(mask="weight"), PerSample()):
            try:
                module = fit(strategy, padded(number, 2, last=last), **how)
            except TrainkitError as error:
                found.append(str(error))
            else:
                found.append(weights(module))
    return found


def test_ranks_equal_the_big_batch_or_refuse() -> None:
    for found in raise_rank_errors(run_ranks(on_ranks, 2)):
        for index, number in ((0, 11), (2, 9), (4, 11), (5, 11)):
            big = fit(data=ResumableLoader(rows(number), number), accumulate=1)
            off = deviation(found[index], big, Weighted())
            assert off < TOLERANCE[torch.float64]
        assert re.match(REFUSED, found[1])
        assert re.match(r"PerSample: .*ResumableLoader\(weigh_nothing=\)", found[3])
