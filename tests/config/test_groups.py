"""A class of another kind than its group is refused before anything is made."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest
from omegaconf import OmegaConf

from trainkit import TrainkitError
from trainkit.config import allow_targets
from trainkit.config.groups import check_kind

allow_targets("tests")


def check(key: str, target: str) -> None:
    check_kind(OmegaConf.create({"_target_": target}), key=key)


class OtherModule:
    """Stands for the LightningModule of the other package."""


class MyModule(OtherModule):
    pass


def make_anything() -> None:
    raise AssertionError("must not be called")


MINE = "tests.config.test_groups.MyModule"
MADE = "tests.config.test_groups.make_anything"


@pytest.mark.parametrize(
    ("key", "kind", "right"),
    [
        (
            "model",
            "LightningModule",
            "lightning.pytorch.demos.boring_classes.BoringModel",
        ),
        ("trainer", "Trainer", "lightning.pytorch.Trainer"),
        ("schedule", "Callback", "trainkit.AccumulationSchedule.ramp"),
        ("batchnorm", "Callback", "trainkit.BatchNormGuard"),
        ("callbacks.x", "Callback", "trainkit.WindowMonitor"),
        ("logger.x", "loggers.Logger", "trainkit.MetricsCSVLogger"),
    ],
)
def test_another_kind_is_named_and_the_right_one_left_alone(
    key: str, kind: str, right: str
) -> None:
    with pytest.raises(
        TrainkitError,
        match=rf"{key}._target_: must be a subclass of .*\.{kind}, or a function .*"
        "'trainkit.Uniform'",
    ):
        check(key, "trainkit.Uniform")
    check(key, right)
    check(key, MADE)  # what a function returns is looked at later


def test_a_module_of_the_other_package(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TrainkitError, match="LightningModule"):
        check("model", MINE)
    package: Any = types.ModuleType("pytorch_lightning")
    package.LightningModule = OtherModule
    monkeypatch.setitem(sys.modules, "pytorch_lightning", package)
    check("model", MINE)
