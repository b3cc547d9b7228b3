"""NoiseScale in trainings: its sums, its rows, its refusals; nothing else changes."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from tests.core.inside.common import batch as rows_of_batch
from tests.core.noise.test_moments import Shared
from tests.helpers import (
    TokenModule,
    loader,
    pad,
    ragged_sequences,
    raise_rank_errors,
    rank_loader,
    run_cases,
    token_loss,
    trainer,
    weights,
)
from tests.lit.fronts import RAGGED, micro_batches
from tests.lit.inside.common import Foreign
from tests.zoo.callbacks import Saving, Table
from tests.zoo.modules import Gan, Manual, hooked, scaled
from trainkit import (
    AccumulationCallback,
    MicroBatching,
    NoiseScale,
    PerSample,
    PerToken,
    ResumableLoader,
)
from trainkit.errors import TrainkitError
from trainkit.lit.noise import _numbers, is_measured

CLOSE = 1e-6
DATA = ragged_sequences(sum(RAGGED))

pytestmark = [
    pytest.mark.filterwarnings("ignore:accumulation. an open window"),
    pytest.mark.filterwarnings("ignore:.*under a gradient scaler"),
]


class KeepTable(pl.Callback):
    """Keeps the sums of each measured window, which the training frees at its end."""

    table: Tensor

    def __init__(self) -> None:
        self.noise = NoiseScale(1)

    def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
        if self.noise._moments is not None:
            self.table = self.noise._moments.table


def weighed(net: Any, batch: Any) -> tuple[float, Tensor]:
    """The weight of a micro-batch, and its gradient times that."""
    found = torch.autograd.grad(token_loss(net, batch), list(net.parameters()))
    weight = float((batch["labels"] != -100).sum())
    return weight, weight * torch.cat([g.double().flatten() for g in found])


def sums(parts: list[tuple[float, Tensor]]) -> list[float]:
    """What is measured of a window of these."""
    w = torch.tensor([weight for weight, _ in parts]).double()
    u = torch.stack([contribution for _, contribution in parts])
    total = u.sum(0).square().sum(), u.square().sum()
    return [*map(float, total), float(w.sum() ** 2), float(w @ w), float(w.sum())]


class ByHand(pl.Callback):
    """The sums of each window, from a backward pass of each micro-batch of its own."""

    def __init__(self, cut: int | None) -> None:
        self.cut, self.rows = cut, []
        self._open: list[tuple[float, Tensor]] = []

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        size = self.cut or len(batch["ids"])
        parts = zip(*[batch[k].split(size) for k in ("ids", "labels")], strict=True)
        for ids, labels in parts:
            batch = {"ids": ids, "labels": labels}
            self._open.append(weighed(pl_module.net, batch))

    def on_before_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        self.rows.append(sums(self._open))
        self._open = []


class Fused(TokenModule):
    """Its gradients are still scaled when the window is measured."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01, fused=True)


SCALER = {"init_scale": 256.0, "growth_interval": 3}
WAYS: dict[str, dict[str, Any]] = {
    "streamed": {"accumulate": 4},
    "split": {"sizes": (20, 11, 7), "cut": 4},
    "split, several batches": {"accumulate": 2, "sizes": (20, 11, 7), "cut": 4},
    "scaler": {"accumulate": 4, "scaled": True},
    "split and scaler": {"sizes": (20, 11, 7), "cut": 4, "scaled": True},
    "fused, scaled": {"accumulate": 4, "scaled": True, "kind": Fused},
    "bfloat16": {"accumulate": 4, "precision": "bf16-true"},
}


def fit(
    way: dict[str, Any], *callbacks: Any, module: Any = None, **options: Any
) -> TokenModule:
    """Train in one of the ways; a module of ours brings its own callback."""
    way = dict(way)
    cut, sizes = way.pop("cut", None), way.pop("sizes", RAGGED)
    micro = None if cut is None else MicroBatching(size=cut, trim=False)
    if way.pop("scaled", False):
        options |= scaled(**SCALER)
    kind = way.pop("kind", TokenModule)
    ours = [] if module else [AccumulationCallback(PerToken(), micro_batching=micro)]
    module = module or kind(optimizer="adamw")
    fit = trainer(callbacks=[*callbacks, *ours], **way, **options)
    fit.fit(module, micro_batches(DATA, sizes))
    return module


def sums_of(way: dict[str, Any], *others: Any, **options: Any) -> Tensor:
    kept = KeepTable()
    fit(way, *others, kept, kept.noise, **options)
    return kept.table


@pytest.mark.parametrize("way", ["streamed", "split", "split, several batches"])
def test_sums_are_those_by_hand(way: str) -> None:
    hand = ByHand(WAYS[way].get("cut"))
    found = sums_of(WAYS[way], hand)
    wanted = torch.tensor(hand.rows, dtype=torch.float64)
    assert len(found) == len(wanted) >= 4
    assert (found[:, :5] / wanted - 1).abs().max() < CLOSE
    assert found[:, 5].sum() == 2 * len(DATA)


def test_what_another_callback_does_to_the_gradient_comes_later() -> None:
    def halve(trainer: Any, pl_module: Any, optimizer: Any) -> None:
        for parameter in pl_module.parameters():
            parameter.grad *= 0.5

    halves = LambdaCallback(on_before_optimizer_step=halve)
    plain, halved = (sums_of(WAYS["streamed"], *each) for each in ([], [halves]))
    assert torch.equal(plain[0], halved[0])
    assert not torch.equal(plain[1], halved[1])  # it trained with half


@pytest.mark.parametrize("way", ["scaler", "split and scaler", "fused, scaled"])
def test_a_scaler_changes_nothing_but_rounding(way: str) -> None:
    with_it, without = sums_of(WAYS[way]), sums_of({**WAYS[way], "scaled": False})
    # Forward passes are in float16.
    assert (with_it[:, :5] / without[:, :5] - 1).abs().max() < 0.05


@pytest.mark.parametrize("way", WAYS)
def test_a_training_with_it_is_the_training_without_it(way: str) -> None:
    with_it, without = fit(WAYS[way], NoiseScale(1)), fit(WAYS[way])
    assert torch.equal(weights(with_it), weights(without))
    assert all(not p._backward_hooks for p in with_it.parameters())


def test_an_error_leaves_no_hook_behind() -> None:
    def fail(*args: Any) -> None:
        assert all(p._backward_hooks for p in module.parameters())  # the control
        raise RuntimeError("a fault")

    module = TokenModule()
    own = AccumulationCallback(PerToken(), proof="off")  # it would meet the error
    fails = LambdaCallback(on_train_batch_end=fail)
    with pytest.raises(RuntimeError, match="a fault"):
        fit(WAYS["streamed"], own, NoiseScale(1), fails, module=module)
    assert all(not p._backward_hooks for p in module.parameters())


# ---- rows ----------------------------------------------------------------------------


def test_one_of_every_n_windows_is_a_row_that_callbacks_see() -> None:
    table, seen = Table(), []

    def look(trainer: Any, *args: Any) -> None:
        seen.append("window/noise_scale" in trainer.callback_metrics)

    reader = LambdaCallback(on_train_batch_end=look)
    options: Any = {"max_epochs": 18, "logger": table, "log_every_n_steps": 1}
    fit(WAYS["streamed"], reader, NoiseScale(2), **options)
    assert (seen[0], seen[-1]) == (False, True)
    rows = {int(row["step"]): row for row in table.rows if "window/noise_scale" in row}
    # Steps are counted from 0 here; the first four measured windows are too few.
    assert [*rows] == [step for step in range(54) if is_measured(step, 2)][4:]
    assert any(step % 3 == 2 for step in rows)  # short windows
    for step, row in rows.items():
        scale = row["window/noise_scale"]
        assert row["window/noise_scale_low"] < scale
        assert scale < row.get("window/noise_scale_high", math.inf)
        samples = sum(RAGGED[step % 3 * 4 :][:4])
        assert row["window/efficiency"] == pytest.approx(scale / (scale + samples))


@pytest.mark.parametrize("noise", [[0.5] * 6, [0.0] * 4 + [1.5] * 2])
def test_a_row_has_what_is_known_and_its_own_windows_progress(noise: Any) -> None:
    blocks = [[1.0, each, 16.0, 4.0, 4.0, 4.0, 1.0] for each in noise]
    row = _numbers([*blocks, [0.0, 0.0, 0.0, 0.0, 0.0, 64.0, 0.0]])
    assert row["window/noise_scale"] == pytest.approx(2)
    assert row["window/efficiency"] == pytest.approx(2 / 66)
    assert ("window/noise_scale_high" in row) == (noise[0] == 0.5)


@pytest.mark.parametrize("every", [2, 7, 10])
def test_no_place_in_an_epoch_is_left_out(every: int) -> None:
    windows = range(200 * every)
    measured = [number for number in windows if is_measured(number, every)]
    assert [number // every for number in measured] == list(range(200))
    for length in (2, every):  # windows of an epoch
        places = [sum(n % length == place for n in measured) for place in range(length)]
        assert min(places) > 0.5 * 200 / length
    each_nth = {n % every for n in windows if (n + 1) % every == 0}
    assert each_nth == {every - 1}  # the control
    assert all(is_measured(number, 1) for number in range(20))


# ---- resumed -------------------------------------------------------------------------


Validates = hooked(TokenModule, validation_step=lambda self, batch, batch_idx: None)


def shuffled_sums(*others: Any, validates: Any = None, resume: Any = None) -> Tensor:
    kept, module = KeepTable(), Validates(optimizer="adamw")
    own = AccumulationCallback(PerToken())
    fit = trainer(4, callbacks=[kept, kept.noise, own, *others], max_epochs=3)
    rows = ResumableLoader(DATA, 4, shuffle=True, collate_fn=pad)
    if validates:
        fit.validate(Validates(), rows, ckpt_path=validates, verbose=False)
    fit.fit(module, rows, ckpt_path=resume)
    return kept.table


@pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no")
def test_a_resumed_run_has_the_same_sums_to_the_bit(tmp_path: Path) -> None:
    """But for the window in which it was saved. A checkpoint that is only validated is
    not resumed."""
    places = {11: 3, 13: 9, 14: 4, 19: 9}
    savers = [Saving(tmp_path / f"{at}.ckpt", at) for at in places]
    straight = shuffled_sums(*savers)
    assert len(straight) == 9
    for saver, open_one in zip(savers, places.values(), strict=True):
        others = [n for n in range(9) if n != open_one]
        assert torch.equal(shuffled_sums(resume=saver.path), straight[others])
    assert torch.equal(shuffled_sums(validates=savers[2].path), straight)


# ---- manual optimization, and where it cannot be -------------------------------------


@pytest.mark.parametrize("is_scaled", [False, True])
def test_manual_optimization_is_measured_before_it_clips(is_scaled: bool) -> None:
    options: Any = scaled(**SCALER) if is_scaled else {}
    kinds = [hooked(Manual, clip=clip) for clip in (None, 1e-3)]
    both = [kind(optimizer="adamw") for kind in kinds]
    own: Any = {"accumulate": 4}
    plain, clipped = (sums_of(own, module=each, **options) for each in both)
    assert torch.equal(plain[0], clipped[0])
    assert not torch.equal(plain[1], clipped[1])  # it was clipped
    of_callback = TokenModule(optimizer="adamw")
    of_callback.net = Manual().net
    ours = AccumulationCallback(PerToken())
    streamed = sums_of(WAYS["streamed"], ours, module=of_callback)
    assert (plain[0] / streamed[0] - 1).abs().max() < (0.05 if is_scaled else CLOSE)


INSIDE = MicroBatching(size=4, inside="net")
REFUSED: dict[str, tuple[Any, int, list[Any]]] = {
    "each window is one micro-batch of one": (
        *(TokenModule, 1, [AccumulationCallback(PerToken())]),
    ),
    "one optimizer, and there are 2": (Gan, 1, []),
    "neither is there": (TokenModule, 4, []),
    "runs a loader batch in one backward": (
        *(Foreign, 2, [AccumulationCallback(PerSample(), micro_batching=INSIDE)]),
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_where_it_cannot_be_it_refuses_or_says_so(what: str, capsys: Any) -> None:
    make, accumulate, ours = REFUSED[what]
    data: Any = loader(DATA, 4)
    if make is Foreign:
        data = DataLoader(TensorDataset(*rows_of_batch(44)), 11)
    with pytest.raises(TrainkitError, match=f"NoiseScale: .*{what}"):
        trainer(accumulate, callbacks=[NoiseScale(), *ours]).fit(make(), data)
    noise = NoiseScale(if_impossible="say")
    trainer(accumulate, callbacks=[noise, *ours]).fit(make(), data)
    assert what in capsys.readouterr().out
    assert what in (noise.why_not or "")
    assert noise.estimate is None


def test_what_training_shows_to_be_impossible_is_said_at_its_end(capsys: Any) -> None:
    module, noise = TokenModule(), NoiseScale(1)
    module.net = Shared(reentrant=True)  # type: ignore[assignment]
    ours = [noise, AccumulationCallback(PerToken())]
    trainer(4, callbacks=ours).fit(module, loader(DATA, 4))
    assert noise.estimate is None
    assert "not measured: it takes 5 measured windows" in capsys.readouterr().out


def test_wrong_arguments_are_refused() -> None:
    for wrong in (0, -1, 1.5):
        with pytest.raises(TrainkitError, match="every_n_steps"):
            NoiseScale(wrong)  # type: ignore[arg-type]
    with pytest.raises(TrainkitError, match=r"\['raise', 'say'\], received 'warn'"):
        NoiseScale(if_impossible="warn")  # type: ignore[arg-type]
    two = [NoiseScale(), NoiseScale(), AccumulationCallback(PerToken())]
    with pytest.raises(TrainkitError, match="two of them"):
        trainer(4, callbacks=two).fit(TokenModule(), loader(DATA, 4))


# ---- two ranks -----------------------------------------------------------------------

WORLD, BATCH = 2, 4
SHARED = ragged_sequences(48)
ON_RANKS: dict[str, dict[str, Any]] = {
    "streamed": {"accumulate": 3},
    "one micro-batch each": {},
    "split in several batches": {"batch": 8, "cut": 4, "accumulate": 2},
}


def train(rank: int, world: int, way: str, measured: bool) -> tuple[Tensor, Any, bool]:
    """The weights in the end, the sums, and whether the ranks have the same ones."""
    cut, kept = ON_RANKS[way].get("cut"), KeepTable()
    micro = None if cut is None else MicroBatching(size=cut, trim=False)
    own = AccumulationCallback(PerToken(), micro_batching=micro)
    module = TokenModule(dtype=torch.float64)
    ddp: Any = {"strategy": "ddp", "devices": world, "use_distributed_sampler": False}
    ddp["callbacks"] = [kept, kept.noise, own] if measured else [own]
    fit = trainer(ON_RANKS[way].get("accumulate", 1), **ddp)
    fit.fit(module, rank_loader(SHARED, ON_RANKS[way].get("batch", BATCH), rank, world))
    table = kept.table if measured else torch.zeros(1)
    all_tables = [torch.empty_like(table) for _ in range(world)]
    torch.distributed.all_gather(all_tables, table)
    return weights(module), table, torch.equal(*all_tables)


@pytest.fixture(scope="module")
def ends() -> dict[Any, list[Any]]:
    cases: Any = {(way, m): (train, way, m) for way in ON_RANKS for m in (True, False)}
    return run_cases(WORLD, cases)


def by_hand(way: str) -> Tensor:
    """The sums of the first window, by one process."""
    net = TokenModule(dtype=torch.float64).net
    size = ON_RANKS[way].get("batch", BATCH) * ON_RANKS[way].get("accumulate", 1)
    batches = [
        pad(SHARED[rank::WORLD][start : start + BATCH])
        for rank in range(WORLD)
        for start in range(0, size, BATCH)
    ]
    found = sums([weighed(net, batch) for batch in batches])
    return torch.tensor([*found, size * WORLD, 1], dtype=torch.float64)


@pytest.mark.parametrize("way", ON_RANKS)
def test_sums_are_those_of_all_ranks_and_the_training_is_the_same_to_the_bit(
    way: str, ends: dict[Any, list[Any]]
) -> None:
    with_it, without = (raise_rank_errors(ends[way, m]) for m in (True, False))
    assert (with_it[0][1][0] / by_hand(way) - 1).abs().max() < 1e-6
    for one, other in zip(with_it, without, strict=True):
        assert one[2]
        assert torch.equal(one[0], other[0])
