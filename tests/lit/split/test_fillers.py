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


def off(module: Any, number: int = 10, data: Any = None) -> float:
    """From where the big batch ends."""
    data = data or ResumableLoader(rows(number), number)
    end = module if isinstance(module, Tensor) else weights(module)
    return deviation(end, fit(data=data, window=1), Weighted())


def strategy(name: str, weight: Any) -> Any:
    hook = {"weight": lambda self, batch: weight(batch)}
    return type(name, (AccumulationStrategy,), hook)()


def fails(batch: Any) -> Tensor:
    if not batch["weight"].any():
        raise KeyError("no rows")
    return batch["weight"].sum()


BY_ROWS = strategy("ByRows", lambda batch: len(batch["x"]))  # not known to be so


def making(self: Any, batch: Any, dataloader_idx: int) -> Any:
    """Labels are made on the device."""
    return {**batch, "made": torch.where(batch["weight"] > 0, 1, -100)}


class Manual(AccumulationMixin, Weighted):
    """Says weights itself."""

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


def both(mode: Any) -> Any:
    """A loader of two, of which the second is filled."""
    pair = lambda: {"a": ResumableLoader(rows(12), 4), "b": padded()}  # noqa: E731
    return lambda: CombinedLoader(pair(), mode)


def grouped() -> ResumableLoader:
    sampler = LengthGroupedSampler([1] * 10, batch_size=4)
    return ResumableLoader(rows(), batch_sampler=sampler, weigh_nothing=NOTHING)


def case(outcome: str, by: Any = None, data: Any = padded, **how: Any) -> Any:
    return outcome, {"by": by, "data": data, **how}


TERMS = {"ce": PerToken(), "kl": PerSample()}
IN_ONE: dict[str, Any] = {"cut": MicroBatching(size=3), "window": 1}
UNSEEN = r" .* this cannot be seen \("
CASES = [
    *[case("exact", by) for by in (MASKED, PerToken())],
    *[
        case("exact", by, lambda: padded(10, 12), **IN_ONE)
        for by in (MASKED, PerToken())
    ],
    *[
        case(f"refused {type(by).__name__}", by, lambda n=n: padded(n), **how)
        for by, n, how in (
            (PerSample(), 10, {}),
            (PerSample(), 11, IN_ONE),
            (BY_ROWS, 9, IN_ONE),
        )
    ],
    case(
        "exact",
        MASKED,
        lambda: padded(10, 12, collate_fn=list),
        cut=MicroBatching(size=3, collate=default_collate),
        window=1,
    ),
    case("refused PerSample", TERMS, **IN_ONE),  # each term is looked at
    # Among several loaders, and with a hook, it may be another batch that counts.
    *[
        case("free", PerSample(mask="b.weight"), both(m))
        for m in ("min_size", "max_size")
    ],
    case(
        "told PerSample: .* it weighs 1", PerSample(size="b.x"), both("max_size_cycle")
    ),
    case(
        "told and exact",
        PerToken(labels="made"),
        kind=hooked(Weighted, on_after_batch_transfer=making),
    ),
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
def test_filler_weighs_nothing_or_is_refused(
    outcome: str, case: dict[str, Any]
) -> None:
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
    found = []
    for by in (MASKED, Uniform()):
        drawn: list[float] = []
        seen: list[Tensor] = []

        def training_step(
            self: Any, batch: Any, batch_idx: int, to: Any = (drawn, seen)
        ) -> Any:
            to[0].append(float(torch.rand(())))
            to[1].append(batch["x"].clone())
            return self.loss_of(batch)

        torch.manual_seed(1)
        how: dict[str, Any] = {"shuffle": True, "num_workers": num_workers}
        data = ResumableLoader(
            drawing := Drawing(), 4, last="pad", weigh_nothing=NOTHING, **how
        )
        kind = hooked(Weighted, training_step=training_step)
        fit(by, data, kind=kind, proof="off")  # whose rehearsals would be seen
        found.append((drawn, torch.cat(seen), drawing.num_read))
    assert found[0][0] == found[1][0]
    assert torch.equal(found[0][1], found[1][1])
    assert found[0][2] == found[1][2] == (0 if num_workers else 24)  # of two epochs


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
