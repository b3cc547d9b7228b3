"""A model average under `ema_decay` equals one whose decay is raised by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn, get_ema_multi_avg_fn

from tests.helpers import trainer, weights
from tests.lit.rates.scaled import REFERENCE, WINDOW, Saves, Scheduled, data, fit
from trainkit import AccumulationCallback, Uniform
from trainkit.errors import TrainkitError
from trainkit.lit.rates.ema import ModelAverages
from trainkit.lit.rates.lr_scaling import LRScaling
from trainkit.lit.schedule.callback import AccumulationSchedule

DECAY, K = 0.9, 4
pytestmark = pytest.mark.filterwarnings(
    "ignore:You're resuming from a checkpoint that ended before:UserWarning"
)


def scaling(where: Any = True) -> LRScaling:
    return LRScaling("none", reference_batch=REFERENCE, ema_decay=where)


class Kept(EMAWeightAveraging):
    """Remembers the average, which Lightning swaps in at the end."""

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        assert self._average_model is not None
        self.average = weights(self._average_model.module)
        super().on_train_end(trainer, pl_module)


def averaged(decay: float, *callbacks: Any, **how: Any) -> torch.Tensor:
    kept = Kept(decay=decay)
    fit(Scheduled(None), kept, *callbacks, **how)
    return kept.average


def test_lightnings_average_equals_one_of_decay_to_the_k() -> None:
    reference = averaged(DECAY**K)
    assert torch.allclose(averaged(DECAY, scaling()), reference, rtol=1e-12)
    assert not torch.allclose(averaged(DECAY), reference, rtol=1e-3)


def test_lightnings_average_follows_a_schedule() -> None:
    def schedule() -> list[Any]:
        made = AccumulationSchedule({0: 1, 6: 4}, unit="step")
        return [AccumulationCallback(Uniform()), made]

    class Raised(Kept):
        def on_train_batch_start(
            self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
        ) -> None:
            k = int(trainer.accumulate_grad_batches) * 3 / REFERENCE
            assert self._average_model is not None
            self._average_model.avg_fn = get_ema_avg_fn(DECAY**k)

    by_hand = Raised(decay=DECAY)
    fit(Scheduled(None), by_hand, *schedule(), window=1)
    found = averaged(DECAY, *schedule(), scaling(), window=1)
    assert torch.allclose(found, by_hand.average, rtol=1e-12)


def test_resumed_average_equals_the_uninterrupted_one(tmp_path: Path) -> None:
    path = tmp_path / "one.ckpt"
    whole = averaged(DECAY, scaling(), Saves(path, 6))
    rest = averaged(DECAY, scaling(), ckpt_path=path)
    assert torch.allclose(rest, whole, rtol=1e-12)


FUNCTIONS: dict[str, Any] = {
    "avg_fn": get_ema_avg_fn,
    "multi_avg_fn": get_ema_multi_avg_fn,
}


class Averages(Scheduled):
    """Keeps an `AveragedModel` of torch's."""

    def __init__(self, key: str, decay: float) -> None:
        super().__init__(None)
        options: dict[str, Any] = {key: FUNCTIONS[key](decay)}
        self.average = AveragedModel(self.weight, **options)
        self.average.requires_grad_(False)

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.average.update_parameters(self.weight)


@pytest.mark.parametrize("key", FUNCTIONS)
def test_torchs_average_equals_one_of_decay_to_the_k(key: str) -> None:
    by_hand = fit(Averages(key, DECAY**K))
    module = fit(Averages(key, DECAY), scaling())
    without = fit(Averages(key, DECAY))
    reference = weights(by_hand.average)
    assert torch.allclose(weights(module.average), reference, rtol=1e-12)
    assert not torch.allclose(weights(without.average), reference, rtol=1e-3)
    assert decay_of(module.average, key) == DECAY


def decay_of(model: Any, key: str) -> float:
    """One update from 0 towards 1 is 1 - decay."""
    one, zero = torch.ones(1, dtype=torch.float64), torch.zeros(1, dtype=torch.float64)
    if key == "avg_fn":
        return 1 - float(getattr(model, key)(zero, one, 1))
    getattr(model, key)([zero], [one], 1)
    return round(1 - float(zero), 12)


class Teacher(torch.nn.Module):
    def __init__(self, decay: Any) -> None:
        super().__init__()
        if isinstance(decay, float):
            self.decay: Any = decay
        else:
            self.register_buffer("decay", decay)
        self.register_buffer("value", torch.zeros(2, dtype=torch.float64))


class Teaches(Scheduled):
    """A decay of the module's own."""

    def __init__(self, decay: Any) -> None:
        super().__init__(None)
        self.teacher = Teacher(decay)
        self.decays: list[float] = []

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        decay = float(self.teacher.decay)
        self.decays.append(decay)
        value: Any = self.teacher.value
        value.mul_(decay).add_((1 - decay) * self.weight[0].detach())


def buffer() -> torch.Tensor:
    return torch.tensor(DECAY, dtype=torch.float64)


@pytest.mark.parametrize("kind", ["float", "buffer"])
def test_decay_by_a_path_equals_one_to_the_k(kind: str, tmp_path: Path) -> None:
    """Also resumed, and left behind as it was found."""

    def made() -> Teaches:
        return Teaches(buffer() if kind == "buffer" else DECAY)

    path = tmp_path / "one.ckpt"
    module = fit(made(), scaling("teacher.decay"), Saves(path, 6))
    assert module.decays == pytest.approx([DECAY**K] * 10, rel=1e-12)
    assert float(module.teacher.decay) == pytest.approx(DECAY, rel=1e-12)
    resumed = fit(made(), scaling("teacher.decay"), ckpt_path=path)
    assert resumed.decays == pytest.approx([DECAY**K] * 7, rel=1e-12)
    assert torch.allclose(resumed.teacher.value, module.teacher.value, rtol=1e-12)


def test_buffer_is_the_same_object_throughout() -> None:
    module = Teaches(buffer())
    before = module.teacher.decay
    assert fit(module, scaling("teacher.decay")).teacher.decay is before


@pytest.mark.parametrize("kind", ["float", "buffer"])
def test_decay_of_a_checkpoint_saved_after_training_is_raised_once(
    kind: str, tmp_path: Path
) -> None:
    """By then the module holds its own decay again."""

    def made() -> Teaches:
        return Teaches(buffer() if kind == "buffer" else DECAY)

    path = tmp_path / "one.ckpt"
    callbacks = [scaling("teacher.decay")]
    first = trainer(WINDOW, callbacks=callbacks, max_epochs=1)  # type: ignore[arg-type]
    first.fit(made(), data())
    first.save_checkpoint(path)
    module = fit(made(), scaling("teacher.decay"), ckpt_path=path)
    assert module.decays == pytest.approx([DECAY**K] * 5, rel=1e-12)


@pytest.mark.parametrize("kind", ["float", "buffer"])
def test_decay_is_restored_after_an_exception(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "one.ckpt"

    class SavesOnException(pl.Callback):
        def on_exception(
            self, trainer: Any, pl_module: Any, exception: BaseException
        ) -> None:
            trainer.save_checkpoint(path)

    class Fails(Teaches):
        def on_train_epoch_end(self) -> None:
            if not path.exists():
                raise KeyError("a user's mistake")

    module = Fails(buffer() if kind == "buffer" else DECAY)
    with pytest.raises(KeyError):
        fit(module, scaling("teacher.decay"), SavesOnException())
    assert float(module.teacher.decay) == pytest.approx(DECAY, rel=1e-12)
    module.decays.clear()
    fit(module, scaling("teacher.decay"), ckpt_path=path)
    assert module.decays == pytest.approx([DECAY**K] * 5, rel=1e-12)


# ---- what it says --------------------------------------------------------------------


def test_average_stands_in_the_plan(capsys: Any) -> None:
    averaged(DECAY, scaling())
    assert "model average: decay 0.9 -> 0.6561" in capsys.readouterr().out


def test_missing_average_is_refused() -> None:
    with pytest.raises(TrainkitError, match="ema_decay=True: no moving average was"):
        fit(Scheduled(None), scaling())


def test_average_without_a_decay_is_refused() -> None:
    """torch's own default is an equal mean, in which no decay stands."""
    module = Scheduled(None)
    module.average = AveragedModel(module.weight).requires_grad_(False)
    with pytest.raises(TrainkitError, match="ema_decay=True: no moving average was"):
        fit(module, scaling())


@pytest.mark.parametrize("path", ["teacher.no", "no.decay", "teacher.decay.no"])
def test_path_to_nothing_is_refused(path: str) -> None:
    with pytest.raises(TrainkitError, match=f"ema_decay='{path}': Teaches has nothing"):
        fit(Teaches(DECAY), scaling(path))


def test_path_to_another_thing_is_refused() -> None:
    with pytest.raises(TrainkitError, match="must lead to a number or a tensor, and"):
        fit(Teaches(DECAY), scaling("teacher"))


def test_average_goes_by_ratios() -> None:
    """2 and then 6 are 2 and 3 times as much."""
    module = Teaches(buffer())
    averages = ModelAverages(trainer(), module, "teacher.decay", saved_k=1.0)
    for k in (2.0, 6.0, 0.5):
        averages.follow(k)
        assert float(module.teacher.decay) == pytest.approx(DECAY**k, rel=1e-12)
        assert averages.k == k
