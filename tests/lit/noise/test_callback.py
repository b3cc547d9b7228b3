"""NoiseScale in trainings: its sums, its rows, its refusals; nothing else changes."""

from __future__ import annotations

import copy
import math
import pickle
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor

from tests.helpers import (
    TokenModule,
    loader,
    ragged_sequences,
    token_loss,
    trainer,
    weights,
)
from tests.lit.fronts import RAGGED, micro_batches
from tests.lit.noise.keep import KeepTable
from trainkit import (
    AccumulationCallback,
    AccumulationMixin,
    MicroBatching,
    NoiseScale,
    PerToken,
    Uniform,
)
from trainkit.errors import TrainkitError
from trainkit.lit import MetricsCSVLogger
from trainkit.lit.noise.callback import _numbers, is_measured

CLOSE = 1e-6
DATA = ragged_sequences(sum(RAGGED))

pytestmark = pytest.mark.filterwarnings("ignore:accumulation. an open window")


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
            loss = token_loss(pl_module.net, {"ids": ids, "labels": labels})
            found = torch.autograd.grad(loss, list(pl_module.parameters()))
            weight = float((labels != -100).sum())
            flat = torch.cat([g.double().flatten() for g in found])
            self._open.append((weight, weight * flat))

    def on_before_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        done, self._open = self._open, []
        w = torch.tensor([weight for weight, _ in done]).double()
        u = torch.stack([contribution for _, contribution in done])
        total = u.sum(0).square().sum(), u.square().sum()
        self.rows.append([*map(float, total), float(w.sum() ** 2), float(w @ w)])


class Fused(TokenModule):
    """Its gradients are still scaled when the window is measured."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01, fused=True)


WAYS: dict[str, dict[str, Any]] = {
    "streamed": {"accumulate": 4},
    "split": {"sizes": (20, 11, 7), "cut": 4},
    "split, several batches": {"accumulate": 2, "sizes": (20, 11, 7), "cut": 4},
    "scaler": {"accumulate": 4, "scaled": "adamw"},
    "split and scaler": {"sizes": (20, 11, 7), "cut": 4, "scaled": "adamw"},
    "fused, scaled": {"accumulate": 4, "scaled": "fused"},
    "bfloat16": {"accumulate": 4, "precision": "bf16-true"},
}


def fit(
    way: dict[str, Any],
    *callbacks: Any,
    module: Any = None,
    epochs: int = 2,
    strategy: Any = None,
    **options: Any,
) -> TokenModule:
    way = dict(way)
    cut, sizes = way.pop("cut", None), way.pop("sizes", RAGGED)
    micro = None if cut is None else MicroBatching(size=cut, trim=False)
    scaled = way.pop("scaled", None)
    if scaled is not None:
        scaler: Any = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=3)
        options["plugins"] = MixedPrecision("16-mixed", device="cpu", scaler=scaler)
    module = module or (
        Fused() if scaled == "fused" else TokenModule(optimizer="adamw")
    )
    own = AccumulationCallback(strategy or PerToken(), micro_batching=micro)
    fit = trainer(
        way.pop("accumulate", 1),
        callbacks=[*callbacks, own],
        max_epochs=epochs,
        **way,
        **options,
    )
    fit.fit(module, micro_batches(DATA, sizes))
    return module


@pytest.mark.parametrize("way", ["streamed", "split", "split, several batches"])
def test_sums_are_those_by_hand(way: str) -> None:
    noise, hand = NoiseScale(1), ByHand(WAYS[way].get("cut"))
    kept = KeepTable(noise)
    fit(WAYS[way], kept, noise, hand)
    wanted = torch.tensor(hand.rows, dtype=torch.float64)
    found = kept.table[:, :4]
    assert len(found) == len(wanted) >= 4
    assert (found / wanted - 1).abs().max() < CLOSE
    assert kept.table[:, 5].sum() == 2 * len(DATA)


class Halves(pl.Callback):
    """Changes the gradient before each step."""

    def on_before_optimizer_step(
        self, trainer: Any, pl_module: Any, optimizer: Any
    ) -> None:
        for parameter in pl_module.parameters():
            parameter.grad *= 0.5


def test_what_another_callback_does_to_the_gradient_comes_later() -> None:
    tables = []
    for others in ([], [Halves()]):
        noise = NoiseScale(1)
        kept = KeepTable(noise)
        fit(WAYS["streamed"], *others, kept, noise, epochs=1)
        tables.append(kept.table)
    assert torch.equal(tables[0][0], tables[1][0])
    assert not torch.equal(tables[0][1], tables[1][1])  # it trained with half


@pytest.mark.filterwarnings("ignore:.*under a gradient scaler")
@pytest.mark.parametrize("way", ["scaler", "split and scaler", "fused, scaled"])
def test_a_scaler_changes_nothing_but_rounding(way: str) -> None:
    tables = []
    for each in ({**WAYS[way], "scaled": None}, WAYS[way]):
        noise = NoiseScale(1)
        kept = KeepTable(noise)
        fit(each, kept, noise, module=Fused() if way[0] == "f" else None)
        tables.append(kept.table[:, :5])
    assert (tables[0] / tables[1] - 1).abs().max() < 0.05  # float16 in forward passes


@pytest.mark.filterwarnings("ignore:.*under a gradient scaler")
@pytest.mark.parametrize("way", WAYS)
def test_a_training_with_it_is_the_training_without_it(way: str) -> None:
    with_it, without = fit(WAYS[way], NoiseScale(1)), fit(WAYS[way])
    assert torch.equal(weights(with_it), weights(without))
    assert all(not p._backward_hooks for p in with_it.parameters())


def test_an_error_leaves_no_hook_behind() -> None:
    class Fails(pl.Callback):
        def on_train_batch_end(self, trainer: Any, *args: Any, **kwargs: Any) -> None:
            assert all(p._backward_hooks for p in module.parameters())  # the control
            raise RuntimeError("a fault")

    module = TokenModule()
    with pytest.raises(RuntimeError, match="a fault"):
        fit(WAYS["streamed"], NoiseScale(1), Fails(), module=module)
    assert all(not p._backward_hooks for p in module.parameters())


def rows_of(folder: Path) -> dict[int, dict[str, float]]:
    lines = [
        line.split(",") for line in (folder / "metrics.csv").read_text().splitlines()
    ]
    names = lines[0]
    step = names.index("step")
    return {
        int(line[step]): {n: float(v) for n, v in zip(names, line, strict=True) if v}
        for line in lines[1:]
    }


def test_one_of_every_n_windows_is_a_row(tmp_path: Path) -> None:
    fit(
        WAYS["streamed"],
        NoiseScale(2),
        epochs=18,
        logger=MetricsCSVLogger(tmp_path),
        log_every_n_steps=1,
    )
    rows = rows_of(tmp_path)
    named = {step for step, row in rows.items() if "window/noise_scale_low" in row}
    # Steps are counted from 0 here; the first four measured windows are too few.
    measured = [step for step in range(54) if is_measured(step, 2)]
    assert named == set(measured[4:])
    short = [step for step in named if step % 3 == 2]
    assert short
    for step in named:
        row = rows[step]
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
    nth = [number for number in windows if (number + 1) % every == 0]
    for length in (2, every):  # windows of an epoch
        places = [0] * length
        for number in measured:
            places[number % length] += 1
        assert min(places) > 0.5 * 200 / length
        if every % length == 0:  # the control
            assert {number % length for number in nth} == {length - 1}
    assert all(is_measured(number, 1) for number in range(20))


def test_callbacks_see_it(tmp_path: Path) -> None:
    seen = []

    class Reader(pl.Callback):
        def on_train_batch_end(self, trainer: Any, *args: Any, **kwargs: Any) -> None:
            seen.append("window/noise_scale" in trainer.callback_metrics)

    fit(WAYS["streamed"], Reader(), NoiseScale(1), epochs=3)
    assert seen[-1]
    assert not seen[0]


def test_a_copy_and_a_pickle_hold_the_estimate_alone() -> None:
    noise = NoiseScale(1)
    fit(WAYS["streamed"], noise, epochs=3)
    assert noise.estimate is not None
    for other in (copy.deepcopy(noise), pickle.loads(pickle.dumps(noise))):
        assert other.estimate == noise.estimate


# ---- where it cannot be --------------------------------------------------------------


class Manual(AccumulationMixin, TokenModule):
    """Optimizes by hand, with one optimizer."""

    accumulation = PerToken()

    def __init__(self, optimizers: int = 1, *, clip_at: float = 0.0) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.num, self.clip_at, self.was_clipped = optimizers, clip_at, False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        first, *_ = _listed(self.optimizers())
        self.accumulate(token_loss(self.net, batch), batch, optimizer=first)
        if self.window_ends(batch_idx, every=4):
            self.finish_window(first)
            before = _gradient(self).clone()
            self.clip_gradients(first, self.clip_at, "norm")
            self.was_clipped = not torch.equal(before, _gradient(self))
            first.step()
            first.zero_grad()

    def configure_optimizers(self) -> Any:
        if self.num == 1:
            return torch.optim.AdamW(self.parameters(), lr=0.01)
        nets = self.net.embed, self.net.head
        return [torch.optim.AdamW(net.parameters(), lr=0.01) for net in nets]


def _gradient(module: TokenModule) -> Tensor:
    gradient = module.net.head.weight.grad
    assert gradient is not None
    return gradient


def _listed(optimizers: Any) -> list[Any]:
    return optimizers if isinstance(optimizers, list) else [optimizers]


def test_manual_optimization_is_measured_too() -> None:
    noise, of_callback = NoiseScale(1), NoiseScale(1)
    fit_ = trainer(1, callbacks=[noise], max_epochs=3)
    fit_.fit(Manual(), micro_batches(DATA, RAGGED))
    fit(WAYS["streamed"], of_callback, epochs=3)
    assert noise.estimate is not None
    assert of_callback.estimate is not None
    assert noise.estimate.samples == pytest.approx(of_callback.estimate.samples)


@pytest.mark.filterwarnings("ignore:.*under a gradient scaler")
@pytest.mark.parametrize("scaled", [False, True])
def test_clipping_in_training_step_comes_after_the_measuring(scaled: bool) -> None:
    tables = {}
    for clip_at in (0.0, 1e-3):
        noise = NoiseScale(1)
        kept, module = KeepTable(noise), Manual(clip_at=clip_at)
        own: dict[str, Any] = {}
        if scaled:
            scaler: Any = torch.amp.GradScaler("cpu", init_scale=256.0)
            own["plugins"] = MixedPrecision("16-mixed", device="cpu", scaler=scaler)
        trainer(1, callbacks=[noise, kept], **own).fit(
            module, micro_batches(DATA, RAGGED)
        )
        assert module.was_clipped == (clip_at > 0)
        tables[clip_at] = kept.table[0]
    assert torch.equal(*tables.values())
    noise = NoiseScale(1)
    kept = KeepTable(noise)
    fit(WAYS["streamed"], kept, noise, epochs=1)
    assert (tables[0.0] / kept.table[0] - 1).abs().max() < (0.05 if scaled else CLOSE)


def refused(what: str) -> tuple[Any, dict[str, Any]]:
    one, alone = {"accumulate": 1}, AccumulationCallback(PerToken())
    if what == "each window is one micro-batch of one rank":
        return TokenModule(), {**one, "callbacks": [alone]}
    if what == "one optimizer, and there are 2":
        return Manual(2), {**one, "callbacks": []}
    assert what == "neither is there"
    return TokenModule(), {"accumulate": 4, "callbacks": []}


@pytest.mark.parametrize(
    "what",
    [
        "each window is one micro-batch of one rank",
        "one optimizer, and there are 2",
        "neither is there",
    ],
)
def test_where_it_cannot_be_it_refuses_or_says_so(
    what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    module, options = refused(what)
    own = options.pop("callbacks")
    with pytest.raises(TrainkitError, match=f"NoiseScale: .*{what}"):
        trainer(options["accumulate"], callbacks=[NoiseScale(), *own]).fit(
            module, loader(DATA, 4)
        )
    noise = NoiseScale(if_impossible="say")
    module, options = refused(what)
    trainer(options["accumulate"], callbacks=[noise, *options["callbacks"]]).fit(
        module, loader(DATA, 4)
    )
    assert what in capsys.readouterr().out
    assert what in (noise.why_not or "")
    assert noise.estimate is None


def test_wrong_arguments_are_refused() -> None:
    for wrong in (0, -1, 1.5):
        with pytest.raises(TrainkitError, match="every_n_steps"):
            NoiseScale(wrong)  # type: ignore[arg-type]
    with pytest.raises(TrainkitError, match=r"\['raise', 'say'\], received 'warn'"):
        NoiseScale(if_impossible="warn")  # type: ignore[arg-type]
    two = [NoiseScale(), NoiseScale(), AccumulationCallback(Uniform())]
    with pytest.raises(TrainkitError, match="two of them"):
        trainer(4, callbacks=two).fit(TokenModule(), loader(DATA, 4))
