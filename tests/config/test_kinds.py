"""A class of another kind than its group is refused before anything is made."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest
from omegaconf import OmegaConf

from trainkit import TrainkitError
from trainkit.config import allow_targets
from trainkit.config.kinds import check_kinds

allow_targets("tests")


def check(**groups: Any) -> None:
    names = ("model", "trainer", "schedule", "lr_scaling", "batchnorm")
    empty = dict.fromkeys((*names, "callbacks", "logger"))
    check_kinds(OmegaConf.create({**empty, **groups}))


class OtherModule:
    """Stands for the LightningModule of the other package."""


class MyModule(OtherModule):
    pass


def make_anything() -> None:
    raise AssertionError("must not be called")


MINE = {"_target_": "tests.config.test_kinds.MyModule"}
MADE = {"_target_": "tests.config.test_kinds.make_anything"}
UNIFORM = {"_target_": "trainkit.Uniform"}


@pytest.mark.parametrize(
    ("groups", "text"),
    [
        (
            {"model": UNIFORM},
            r"model._target_: must be a subclass of .*LightningModule",
        ),
        ({"trainer": UNIFORM}, r"trainer._target_: must be a subclass of .*Trainer"),
        ({"batchnorm": UNIFORM}, r"batchnorm._target_: .*Callback, or a function"),
        ({"callbacks": {"x": UNIFORM}}, r"callbacks.x._target_: .*'trainkit.Uniform'"),
        ({"logger": {"x": UNIFORM}}, r"logger.x._target_: .*loggers.Logger"),
    ],
)
def test_another_kind_is_named(groups: dict[str, Any], text: str) -> None:
    with pytest.raises(TrainkitError, match=text):
        check(**groups)


@pytest.mark.parametrize(
    "groups",
    [
        {"model": {"_target_": "lightning.pytorch.demos.boring_classes.BoringModel"}},
        {"trainer": {"_target_": "lightning.pytorch.Trainer"}},
        {"schedule": {"_target_": "trainkit.AccumulationSchedule.ramp"}},
        {"callbacks": {"x": {"_target_": "trainkit.WindowMonitor"}, "y": None}},
        {"logger": {"x": {"_target_": "trainkit.MetricsCSVLogger"}}},
        {"model": MADE, "callbacks": {"x": MADE}, "logger": {"x": MADE}},
        {"callbacks": {}, "logger": {}},
    ],
)
def test_the_right_kind_is_left_alone(groups: dict[str, Any]) -> None:
    check(**groups)


def test_a_module_of_the_other_package(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TrainkitError, match="LightningModule"):
        check(model=MINE)
    package: Any = types.ModuleType("pytorch_lightning")
    package.LightningModule = OtherModule
    monkeypatch.setitem(sys.modules, "pytorch_lightning", package)
    check(model=MINE)
