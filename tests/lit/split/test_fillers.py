"""A row that fills a place weighs nothing under the strategy, or is refused."""

from __future__ import annotations

import random
import re
from typing import Any

import pytest
import torch
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor
from torch.utils.data import Dataset, default_collate

from tests.helpers import (
    NAIVE,
    deviation,
    raise_rank_errors,
    run_ranks,
    trainer,
    weights,
)
from tests.zoo.callbacks import told
from tests.zoo.modules import Rows, hooked
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

REFUSED = r"{}: a row with which ResumableLoader\(last='pad'\) .* it weighs 1\. "
NOTHING = WeighNothing(weight=0.0, labels=-100)
MASKED = PerSample(mask="weight")


def rows(number: int = 10) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(number, 3, generator=generator, dtype=torch.float64)
    one = {"weight": 1.0, "labels": 1}
    return [{"x": each, "y": each.exp().sum(), **one} for each in x]


def padded(number: int = 10, size: int = 4, **options: Any) -> ResumableLoader:
    how = {"last": "pad", "weigh_nothing": NOTHING, **options}
    return ResumableLoader(rows(number), size, **how)


class Weighted(Rows):
    """A mean over the rows that count, of one loader or of several together."""

    def loss_of(self, batch: Any) -> Tensor:
        if "x" not in batch:
            each = batch.values() if isinstance(batch, dict) else batch
            parts = [part for part in each if part is not None]
            batch = {name: torch.cat([p[name] for p in parts]) for name in parts[0]}
        errors = (self.net(batch["x"])[:, 0] - batch["y"]).square() * batch["weight"]
        return errors.sum() / batch["weight"].sum().clamp(min=1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss_of(batch)


def fit(
    by: Any = None,
    data: Any = None,
    *,
    kind: Any = Weighted,
    cut: Any = None,
    window: int = 3,
    proof: Any = "warn",
    **how: Any,
) -> Any:
    ours = [AccumulationCallback(by or PerSample(), micro_batching=cut, proof=proof)]
    ours = [] if issubclass(kind, AccumulationMixin) else ours
    data = padded() if data is None else data
    trainer(window, callbacks=ours, **how).fit(module := kind(), data)
    return module


def off(module: Any, number: int = 10) -> float:
    """From where the big batch ends."""
    big = fit(data=ResumableLoader(rows(number), number), window=1)
    return deviation(module, big, Weighted())


def strategy(name: str, weight: Any) -> Any:
    hook = {"weight": lambda self, batch: weight(batch)}
    return type(name, (AccumulationStrategy,), hook)()


def fails(batch: Any) -> Tensor:
    if not batch["weight"].any():
        raise KeyError("no rows")
    return batch["weight"].sum()


BY_ROWS = strategy("ByRows", lambda batch: len(batch["x"]))  # not known to be so


def makes_labels(self: Any, batch: Any, dataloader_idx: int) -> Any:
    return {**batch, "made": torch.where(batch["weight"] > 0, 1, -100)}


MAKING = hooked(Weighted, on_after_batch_transfer=makes_labels)
"""Labels are made on the device."""


class Manual(AccumulationMixin, Weighted):
    """Says weights itself."""

    accumulation = PerSample()
    automatic_optimization = False  # type: ignore[assignment]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer: Any = self.optimizers()
        self.accumulate(self.loss_of(batch), weight=batch["weight"].sum())
        if self.window_ends(batch_idx):
            self.finish_window()
            optimizer.step()
            optimizer.zero_grad()


def both(mode: Any) -> Any:
    """A loader of two, of which the second is filled."""
    whole = ResumableLoader(rows(12), 4)
    return lambda: CombinedLoader({"a": whole, "b": padded()}, mode)


def grouped() -> ResumableLoader:
    sampler = LengthGroupedSampler([1] * 10, batch_size=4)
    return ResumableLoader(rows(), batch_sampler=sampler, weigh_nothing=NOTHING)


def case(outcome: str, by: Any = None, data: Any = padded, **how: Any) -> Any:
    return outcome, {"by": by, "data": data, **how}


TERMS = {"ce": PerToken(), "kl": PerSample()}
IN_ONE: dict[str, Any] = {"cut": MicroBatching(size=3), "window": 1}
OF_LISTS = {**IN_ONE, "cut": MicroBatching(size=3, collate=default_collate)}
UNSEEN = r" .* this cannot be seen \("
CASES = [
    *[
        case("exact", by, lambda n=n: padded(10, n), **how)
        for by in (MASKED, PerToken())
        for n, how in ((4, {}), (12, IN_ONE))
    ],
    case("exact", MASKED, lambda: padded(10, 12, collate_fn=list), **OF_LISTS),
    case("refused PerSample", PerSample()),
    case("refused PerSample", PerSample(), lambda: padded(11), **IN_ONE),
    case("refused ByRows", BY_ROWS, lambda: padded(9), **IN_ONE),
    case("refused PerSample", TERMS, **IN_ONE),  # each term is looked at
    # Among several loaders, and with a hook, it may be another batch that counts.
    case("free", PerSample(mask="b.weight"), both("min_size")),
    case("free", PerSample(mask="b.weight"), both("max_size")),
    case(
        "told PerSample: .* it weighs 1", PerSample(size="b.x"), both("max_size_cycle")
    ),
    case("told and exact", PerToken(labels="made"), kind=MAKING),
    case(f"told Fails:{UNSEEN}KeyError", strategy("Fails", fails)),
    case("told and exact", kind=Manual),
    case("free", Uniform()),  # which is left to what is said of it
    case("free", limit_train_batches=2),  # the epoch ends before its fillers
    case("free", data=lambda: padded(8)),
    case("free", data=lambda: padded(last="weight")),
    case("free", data=lambda: padded(last="drop")),
    case("free", data=lambda: ResumableLoader(rows(12), 4)),
    case("free", data=grouped),
]


@pytest.mark.parametrize(("outcome", "case"), CASES)
def test_filler_weighs_nothing_or_is_refused(outcome: str, case: Any) -> None:
    how = {**case, "data": case["data"]()}
    kind, _, text = outcome.partition(" ")
    if kind == "refused":
        with pytest.raises(TrainkitError, match=REFUSED.format(text)):
            fit(**how)
        return
    with told() as said:
        module = fit(**how)
    said = [each for each in said if "ResumableLoader" in each]
    assert bool(said) == (kind == "told")
    if outcome == "told and exact":
        text = f"{REFUSED.format('PerSample')}|PerToken:{UNSEEN}TrainkitError"
    if kind == "told":
        assert re.match(text, said[0])
    if "exact" in outcome:
        assert off(module) < 1e-10


def test_fillers_that_count_are_off() -> None:
    """The control: a loader that says of none that it fills a place."""
    more = [{**each, "weight": 1.0} for each in (*rows(), *rows()[:2])]
    assert off(fit(data=ResumableLoader(more, 4))) > NAIVE


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


@pytest.mark.parametrize("num_workers", [0, 1])
def test_look_at_a_filler_draws_nothing_and_moves_no_row(num_workers: int) -> None:
    """Of two strategies, the fillers of one are looked at."""

    def trained(by: Any) -> Any:
        drawn, seen = list[float](), list[Tensor]()

        def training_step(self: Any, batch: Any, batch_idx: int) -> Any:
            drawn.append(float(torch.rand(())))
            seen.append(batch["x"].clone())
            return self.loss_of(batch)

        torch.manual_seed(1)
        how: dict[str, Any] = {"weigh_nothing": NOTHING, "num_workers": num_workers}
        data = ResumableLoader(drawing := Drawing(), 4, last="pad", shuffle=True, **how)
        kind = hooked(Weighted, training_step=training_step)
        fit(by, data, kind=kind, proof="off")  # whose rehearsals would be seen
        assert drawing.num_read == (0 if num_workers else 24)  # of two epochs
        return drawn, torch.cat(seen)

    (drawn, seen), (other, others) = trained(MASKED), trained(Uniform())
    assert drawn == other
    assert torch.equal(seen, others)


def on_ranks(rank: int, world: int) -> list[Any]:
    """Eleven rows in batches of two on two ranks leave three: one place is to fill.
    Nine leave one, for the first rank alone."""
    found: list[Any] = []
    how: dict[str, Any] = {"strategy": "ddp", "devices": world}
    for number, last in ((11, "pad"), (9, "weight"), (11, "weight")):
        for by in (MASKED, PerSample()):
            try:
                found.append(weights(fit(by, padded(number, 2, last=last), **how)))
            except TrainkitError as error:
                found.append(str(error))
    return found


def test_ranks_equal_the_big_batch_or_refuse() -> None:
    for found in raise_rank_errors(run_ranks(on_ranks, 2)):
        for index, number in ((0, 11), (2, 9), (4, 11), (5, 11)):
            assert off(found[index], number) < 1e-10
        assert re.match(REFUSED.format("PerSample"), found[1])
        assert re.match(r"PerSample: .*ResumableLoader\(weigh_nothing=\)", found[3])
