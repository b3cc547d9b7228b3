"""A checkpoint is that of a run without scaling, and a resumed run draws one curve."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback

from tests.helpers import trainer
from tests.lit.rates.scaled import (
    EXACT,
    REFERENCE,
    WINDOW,
    Scheduled,
    adamw,
    data,
    deviation,
    fit,
    linear,
    plain,
    times,
)
from tests.zoo.callbacks import Saving
from trainkit import AccumulationCallback, AccumulationSchedule, LRScaling, Uniform

pytestmark = pytest.mark.filterwarnings(
    "ignore:The epoch parameter in `scheduler.step:UserWarning",
    "ignore:To get the last learning rate computed:UserWarning",
    "ignore:Detected call of `lr_scheduler.step:UserWarning",
    "ignore:You're resuming from a checkpoint that ended before:UserWarning",
    "ignore:checkpoint. taken inside a window:UserWarning",
    "ignore:checkpoint. it was taken inside a window:UserWarning",
    "ignore:the loader starts again:UserWarning",
    "ignore:Be aware that when using `ckpt_path`:UserWarning",
)
SCHEDULERS = [
    "CosineAnnealingLR",  # with a closed form
    "OneCycleLR-cos",  # with rates of its own
    "SequentialLR-nested",
    "ExponentialLR",  # goes on from the rate of the group
]


def by_sde(**how: Any) -> LRScaling:
    options = {"reference_batch": REFERENCE, "weight_decay": "linear", **how}
    return LRScaling("adam-sde", **options)


def by_gain(noise_scale: float = 5.0, **how: Any) -> LRScaling:
    options = {"reference_batch": REFERENCE, "weight_decay": "time-scale", **how}
    return LRScaling("gain", noise_scale=noise_scale, **options)


@pytest.mark.parametrize(
    ("name", "hook"),
    [
        ("CosineAnnealingLR", "on_train_start"),
        ("OneCycleLR-cos", "on_train_epoch_start"),
        ("SequentialLR-nested", "on_train_batch_start"),
        ("ExponentialLR", "on_before_optimizer_step"),
        ("OneCycleLR-cos", "on_train_batch_end"),
        ("CosineAnnealingLR", "on_train_epoch_end"),
        ("ExponentialLR", "on_train_end"),
        ("SequentialLR-nested", "after"),
    ],
)
def test_checkpoint_equals_that_of_a_run_without_scaling(
    tmp_path: Path, name: str, hook: str
) -> None:
    """Whatever moment it is saved at: so a run can resume with other scaling, or none,
    and is never scaled twice."""

    def saved(*callbacks: Any) -> dict[str, Any]:
        path = tmp_path / f"{len(callbacks)}.ckpt"
        hooks = {} if hook == "after" else {hook: lambda t, *_: t.save_checkpoint(path)}
        saves: Any = LambdaCallback(**hooks)
        module = Scheduled(name, optimizer=adamw)
        made = trainer(WINDOW, callbacks=[*callbacks, saves], max_epochs=1)
        made.fit(module, data())
        if hook == "after":
            made.save_checkpoint(path)
        return torch.load(path, weights_only=True)

    scaled, unscaled = saved(by_sde(warmup_steps=3)), saved()
    found, expected = (
        {
            "groups": [each["param_groups"] for each in state["optimizer_states"]],
            "schedulers": state["lr_schedulers"],
        }
        for state in (scaled, unscaled)
    )
    assert found == expected
    assert not torch.equal(  # the control: it trained otherwise
        scaled["state_dict"]["weight.0"], unscaled["state_dict"]["weight.0"]
    ) or hook in ("on_train_start", "on_train_epoch_start", "on_train_batch_start")


SCALINGS: dict[str, Any] = {
    "none": lambda: (),
    "linear": lambda: (linear(),),
    "another reference": lambda: (linear(reference_batch=12),),
    "sde": lambda: (by_sde(),),
    "sde, warmed up": lambda: (by_sde(warmup_steps=3),),
    "half-life": lambda: (LRScaling("half-life", reference_batch=1),),
    "gain": lambda: (by_gain(),),
    "another noise": lambda: (by_gain(70.0),),
}


def run(name: str, scaling: str, *callbacks: Any, **how: Any) -> Any:
    """Windows of 1, 4 and 2, from the steps 0, 3 and 6 on; with a warm-up always of 2,
    which Lightning divides."""
    ours, window = [*SCALINGS[scaling](), *callbacks], WINDOW
    if "warm" not in scaling:
        schedule = AccumulationSchedule({0: 1, 3: 4, 6: 2}, unit="step")
        ours, window = [AccumulationCallback(Uniform()), schedule, *ours], 1
    return fit(Scheduled(name, optimizer=adamw), *ours, window=window, **how)


STOPS = (0, 1, 2, 7, 8, 9, 12, 13, 17)
"""Batches after which runs are resumed."""


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory: Any) -> Any:
    """Trains without a stop, once, and saves after each batch."""

    @cache
    def trained(name: str, scaling: str) -> tuple[Any, Path]:
        folder = tmp_path_factory.mktemp("whole")

        def save(trainer: Any, *args: Any) -> None:
            at = trainer.fit_loop.epoch_loop.total_batch_idx
            if at in STOPS:
                trainer.save_checkpoint(folder / f"{at}.ckpt")

        return run(name, scaling, LambdaCallback(on_train_batch_end=save)), folder

    return trained


@pytest.mark.parametrize(
    ("name", "before", "then", "after"),
    [
        ("OneCycleLR-cos", *each)
        for each in (
            ("linear", "linear", 2),
            ("gain", "gain", 8),
            ("sde", "sde", 13),
            ("gain", "gain", 18),
            ("none", "linear", 9),
            ("linear", "none", 9),
            ("linear", "another reference", 8),
            ("sde", "half-life", 8),
            ("half-life", "gain", 13),
            ("gain", "another noise", 2),
            ("another noise", "sde", 18),
        )
    ]
    # At the edge of a window and inside one, within a warm-up and after it.
    + [
        (name, *["sde, warmed up"] * 2, after)
        for number, name in enumerate(SCHEDULERS)
        for after in ((1, 2, 9, 10) if number < 2 else (3, 14))
    ],
)
def test_resumed_with_any_scaling_equals_a_whole_run_with_it(
    whole_run: Any, name: str, before: str, then: str, after: int
) -> None:
    """What the first rule has done leaves no trace."""
    stop = after - 1
    rest = run(name, then, ckpt_path=whole_run(name, before)[1] / f"{stop}.ckpt")
    whole = whole_run(name, then)[0]
    count = len(rest.curve)
    assert 0 < count
    assert rest.curve == whole.curve[-count:]
    assert rest.groups == whole.groups[-count:]
    if "warm" not in then:
        assert count < len(whole.curve)
    else:
        assert count == len(whole.curve) - after // WINDOW
        factors = [min(1 + step / 3, 2) for step in range(10)]
        assert deviation(whole.curve, times(plain(name, 10), factors)) <= EXACT


def test_run_resumed_twice_with_another_window_equals_its_factor(
    tmp_path: Path,
) -> None:
    paths = [tmp_path / "one.ckpt", tmp_path / "two.ckpt"]
    name = "OneCycleLR-cos"
    fit(Scheduled(name), linear(), Saving(paths[0], 5))
    fit(Scheduled(name), linear(), Saving(paths[1], 9), ckpt_path=paths[0])
    rest = fit(Scheduled(name), linear(), window=5, ckpt_path=paths[1]).curve
    assert deviation(rest, times(plain(name, 7)[5:], [10.0] * 2)) <= EXACT
