"""A resumed run goes on with the same curve, and never scales twice."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest

from tests.core.plan.schedulers import MAKERS, deviation
from tests.helpers import trainer
from tests.lit.rates.scaled import (
    EXACT,
    REFERENCE,
    WINDOW,
    Saves,
    Scheduled,
    adamw,
    data,
    fit,
    linear,
    plain,
    times,
)
from trainkit import AccumulationCallback, Uniform
from trainkit.lit.rates.lr_scaling import LRScaling
from trainkit.lit.schedule.callback import AccumulationSchedule

pytestmark = pytest.mark.filterwarnings(
    "ignore:The epoch parameter in `scheduler.step:UserWarning",
    "ignore:To get the last learning rate computed:UserWarning",
    "ignore:Detected call of `lr_scheduler.step:UserWarning",
    "ignore:You're resuming from a checkpoint that ended before:UserWarning",
    "ignore:checkpoint. taken inside a window:UserWarning",
    "ignore:checkpoint. it was taken inside a window:UserWarning",
    "ignore:the loader starts again:UserWarning",
)
# Lightning steps ReduceLROnPlateau after the hook in which a checkpoint is saved.
KINDS = {name.partition("-")[0]: name for name in MAKERS}
RESUMABLE = [name for name in KINDS.values() if name != "ReduceLROnPlateau"]
"""One of each class: what a checkpoint holds is a class's own."""
BOTH = ["CosineAnnealingLR", "OneCycleLR-cos", "SequentialLR-nested"]
"""With a closed form, with rates of its own, and with schedulers within."""


def interrupted(
    path: Path, after: int, first: list[Any], second: list[Any], **module: Any
) -> tuple[Any, Any]:
    """One run that saves after so many batches, and one that goes on from there."""
    module = {"name": "CosineAnnealingLR", **module}
    whole = fit(Scheduled(**module), *first, Saves(path, after))
    return whole, fit(Scheduled(**module), *second, ckpt_path=path)


AFTER = [2, 9, 14]


@pytest.mark.parametrize(
    ("name", "after"),
    dict.fromkeys(
        [
            *zip(RESUMABLE, itertools.cycle(AFTER), strict=False),
            *itertools.product(BOTH[:2], AFTER),
        ]
    ),
)
def test_resumed_curve_equals_the_uninterrupted_one(
    tmp_path: Path, name: str, after: int
) -> None:
    """At the edge of a window and inside one."""
    path = tmp_path / "one.ckpt"
    whole, rest = interrupted(path, after, [linear()], [linear()], name=name)
    assert deviation(whole.curve, times(plain(name, 10), [4.0] * 10)) <= EXACT
    assert rest.curve == whole.curve[after // WINDOW :]


PLACES = [1, 2, 3, 8, 9, 10, 11, 14, 15, 19]


def warmed_up(*callbacks: Any, **how: Any) -> Any:
    scaling = LRScaling(
        "adam-sde", reference_batch=REFERENCE, weight_decay="linear", warmup_steps=7
    )
    module = Scheduled("CosineAnnealingLR", optimizer=adamw)
    return fit(module, scaling, *callbacks, **how)


@pytest.fixture(scope="module")
def saved_everywhere(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """One run, and the folder of its checkpoints, one for each of the places."""
    folder = tmp_path_factory.mktemp("places")
    return warmed_up(*(Saves(folder / f"{n}.ckpt", n) for n in PLACES)), folder


@pytest.mark.parametrize("after", PLACES)
def test_resumed_curve_equals_the_uninterrupted_one_at_any_batch(
    saved_everywhere: tuple[Any, Path], after: int
) -> None:
    whole, folder = saved_everywhere
    rest = warmed_up(ckpt_path=folder / f"{after}.ckpt")
    assert deviation(rest.curve, whole.curve[after // WINDOW :]) <= EXACT
    for found, expected in zip(rest.groups, whole.groups[after // WINDOW :]):  # noqa: B905
        assert found["betas"] == pytest.approx(expected["betas"], rel=EXACT)
        assert found["eps"] == pytest.approx(expected["eps"], rel=EXACT)
        assert found["weight_decay"] == expected["weight_decay"]


@pytest.mark.parametrize("name", dict.fromkeys([*RESUMABLE[::4], *BOTH]))
def test_checkpoint_of_an_unscaled_run_is_scaled_once(
    tmp_path: Path, name: str
) -> None:
    path = tmp_path / "one.ckpt"
    whole, rest = interrupted(path, 6, [], [linear()], name=name)
    assert deviation(rest.curve, times(whole.curve[3:], [4.0] * 7)) <= EXACT


@pytest.mark.parametrize("name", dict.fromkeys([*RESUMABLE[2::4], *BOTH]))
def test_resumed_with_another_reference_equals_its_factor(
    tmp_path: Path, name: str
) -> None:
    path = tmp_path / "one.ckpt"
    second = linear(reference_batch=12)
    whole, rest = interrupted(path, 6, [linear()], [second], name=name)
    assert deviation(rest.curve, times(plain(name, 10)[3:], [0.5] * 7)) <= EXACT
    assert len(rest.curve) == 7


def test_resumed_with_another_window_equals_its_factor(tmp_path: Path) -> None:
    path = tmp_path / "one.ckpt"
    fit(Scheduled("OneCycleLR-cos"), linear(), Saves(path, 10))
    rest = fit(Scheduled("OneCycleLR-cos"), linear(), window=5, ckpt_path=path).curve
    assert deviation(rest, times(plain("OneCycleLR-cos", 7)[5:], [10.0] * 2)) <= EXACT


@pytest.mark.parametrize("after", [2, 8, 13, 18])
def test_resumed_over_a_schedule_equals_the_uninterrupted_one(
    tmp_path: Path, after: int
) -> None:
    path = tmp_path / "one.ckpt"

    def callbacks() -> list[Any]:
        schedule = AccumulationSchedule({0: 1, 3: 4, 6: 2}, unit="step")
        return [AccumulationCallback(Uniform()), schedule, linear()]

    whole = Scheduled("OneCycleLR-cos")
    fit(whole, *callbacks(), Saves(path, after), window=1)
    rest = Scheduled("OneCycleLR-cos")
    fit(rest, *callbacks(), ckpt_path=path, window=1)
    assert 0 < len(rest.curve) < len(whole.curve)
    assert rest.curve == whole.curve[-len(rest.curve) :]


# ---- with other rules ----------------------------------------------------------------

RULES = ["linear", "sqrt", "none", "half-life", "adam-sde"]


def by_rule(rule: Any, *more: Any, **how: Any) -> Any:
    decay: Any = {"adam-sde": "sqrt", "linear": "linear"}.get(rule, "none")
    scaling = LRScaling(rule, reference_batch=REFERENCE, weight_decay=decay)
    return fit(Scheduled(BOTH[0], optimizer=adamw), scaling, *more, **how)


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    """A run by each rule, and the checkpoint that it has saved after six batches."""
    folder = tmp_path_factory.mktemp("rules")

    @cache
    def run(rule: str) -> tuple[Any, Path]:
        path = folder / f"{rule}.ckpt"
        return by_rule(rule, Saves(path, 6)), path

    return run


@pytest.mark.parametrize(
    ("before", "after"),
    # What the first rule did is taken back, then the second is applied: two each.
    [(RULES[n], RULES[(n + apart) % 5]) for n in range(5) for apart in (1, 3)],
)
def test_resumed_with_another_rule_equals_that_rule(
    unbroken: Any, before: str, after: str
) -> None:
    """Moments that the first rule has changed are taken back."""
    rest = by_rule(after, ckpt_path=unbroken(before)[1])
    expected, _ = unbroken(after)
    assert deviation(rest.curve, expected.curve[3:]) <= EXACT
    for key in ("betas", "eps", "weight_decay"):
        assert rest.groups[-1][key] == pytest.approx(expected.groups[-1][key])


# ---- saved at odd times --------------------------------------------------------------


@pytest.mark.parametrize("hook", ["on_train_start", "on_train_epoch_start", "after"])
def test_checkpoint_saved_around_training_is_scaled_once(
    tmp_path: Path, hook: str
) -> None:
    path = tmp_path / "one.ckpt"

    class SavesThen(pl.Callback):
        def save(self, trainer: Any, pl_module: Any) -> None:
            trainer.save_checkpoint(path)

    saves = SavesThen()
    if hook != "after":
        setattr(saves, hook, saves.save)
    made = trainer(WINDOW, callbacks=[linear(), saves], max_epochs=1)
    made.fit(Scheduled("OneCycleLR-cos"), data())
    if hook == "after":
        made.save_checkpoint(path)
    rest = fit(Scheduled("OneCycleLR-cos"), linear(), ckpt_path=path).curve
    expected = times(plain("OneCycleLR-cos", 10), [4.0] * 10)[-len(rest) :]
    assert len(rest) == (5 if hook == "after" else 10)
    assert deviation(rest, expected) <= EXACT


def test_run_resumed_twice_is_scaled_once(tmp_path: Path) -> None:
    paths = [tmp_path / "one.ckpt", tmp_path / "two.ckpt"]
    fit(Scheduled("OneCycleLR-cos"), linear(), Saves(paths[0], 6))
    fit(Scheduled("OneCycleLR-cos"), linear(), Saves(paths[1], 6), ckpt_path=paths[0])
    rest = fit(Scheduled("OneCycleLR-cos"), linear(), ckpt_path=paths[1]).curve
    expected = times(plain("OneCycleLR-cos", 10)[6:], [4.0] * 4)
    assert deviation(rest, expected) <= EXACT
