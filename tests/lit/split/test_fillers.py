"""A row that only fills a place on a rank weighs nothing, or is refused."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor

from tests.helpers import (
    NAIVE,
    deviation,
    raise_rank_errors,
    run_ranks,
    trainer,
    weights,
)
from tests.zoo.modules import Rows
from trainkit import (
    AccumulationCallback,
    AccumulationMixin,
    AccumulationStrategy,
    MicroBatching,
    PerSample,
    PerToken,
    ResumableLoader,
    TrainkitError,
    Uniform,
    WeighNothing,
)

NOTHING = WeighNothing(weight=0.0, labels=-100)
MASKED = PerSample(mask="weight")


def rows(number: int) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(number, 3, generator=generator, dtype=torch.float64)
    one = {"weight": 1.0, "labels": 1}
    return [{"x": each, "y": each.exp().sum(), **one} for each in x]


class Weighted(Rows):
    """A mean over the rows that count."""

    def loss_of(self, batch: Any) -> Tensor:
        errors = (self.net(batch["x"])[:, 0] - batch["y"]).square() * batch["weight"]
        return errors.sum() / batch["weight"].sum().clamp(min=1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss_of(batch)


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


class ByRows(AccumulationStrategy):
    """Counts rows by itself."""

    def weight(self, batch: Any) -> int:
        return len(batch["x"])


def fit(
    by: Any, data: Any, *, kind: Any = Weighted, cut: Any = None, **how: Any
) -> Any:
    ours = [AccumulationCallback(by, micro_batching=cut)] if kind is Weighted else []
    window = how.pop("window", 1 if cut else 3)
    trainer(window, callbacks=ours, **how).fit(module := kind(), data)
    return weights(module)


def big(number: int, size: int | None = None) -> Any:
    """Where big batches end, or the one of the epoch."""
    return fit(PerSample(), ResumableLoader(rows(number), size or number), window=1)


CUT: dict[str, Any] = {"cut": MicroBatching(size=1)}
TERMS = {"ce": PerToken(), "kl": PerSample()}
CASES: list[tuple[str, Any, dict[str, Any]]] = [
    ("exact", MASKED, {}),
    ("exact", PerToken(), {}),
    ("exact", PerToken(), CUT),
    ("exact", None, {"kind": Manual}),
    ("PerSample", PerSample(), {}),
    ("ByRows", ByRows(), {}),
    ("PerSample", TERMS, CUT),  # each term is looked at
    ("another", Uniform(), {}),  # which is left to what is said of it
    ("another", PerSample(), {"limit_train_batches": 2}),  # it ends before fillers
]
"""What becomes of nine rows in batches of two on two ranks, which leave the second rank
without one: the strategy that is refused, or how the weights end."""


def on_ranks(rank: int, world: int) -> list[Any]:
    found: list[Any] = []
    for _, by, how in CASES:
        data = ResumableLoader(rows(9), 2, weigh_nothing=NOTHING)
        try:
            found.append(fit(by, data, strategy="ddp", devices=world, **how))
        except TrainkitError as error:
            found.append(str(error))
    # The controls: a filler that counts; and a rank with fewer rows needs none.
    data = ResumableLoader(rows(9), 2, weigh_nothing=lambda row: row)
    found.append(fit(PerToken(), data, strategy="ddp", devices=world))
    data = ResumableLoader(rows(11), 2, weigh_nothing=NOTHING)
    found.append(fit(PerSample(), data, strategy="ddp", devices=world))
    return found


def test_fillers_weigh_nothing_or_are_refused() -> None:
    for found in raise_rank_errors(run_ranks(on_ranks, 2)):
        *found, counting, needless = found
        for (outcome, _, how), ended in zip(CASES, found, strict=True):
            if outcome == "exact":  # a split window is a loader batch of all ranks
                whole = big(9, 4 if "cut" in how else None)
                assert deviation(ended, whole, weights(Weighted())) < 1e-10
            elif outcome != "another":
                text = rf"{outcome}: .*ResumableLoader\(weigh_nothing=\)"
                assert re.match(text, ended)
        assert deviation(counting, big(9), weights(Weighted())) > NAIVE
        assert deviation(needless, big(11), weights(Weighted())) < 1e-10
