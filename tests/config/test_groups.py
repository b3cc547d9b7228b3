"""A class of another kind than its group is refused before anything is made."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest
from omegaconf import OmegaConf

from trainkit import TrainkitError
from trainkit.config import allow_targets
from trainkit.config.groups import check_kind, check_made, nodes_of

allow_targets("tests")


NET = {"_target_": "tests.config.test_groups.MyModule"}


def groups(**nodes: Any) -> Any:
    names = ("model", "data", "accumulation", "micro_batching", "schedule")
    names += ("lr_scaling", "batchnorm", "optimizer", "scheduler", "callbacks")
    whole = {**dict.fromkeys((*names, "logger")), "trainer": NET, **nodes}
    return OmegaConf.create(whole)


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


@pytest.mark.parametrize(
    ("group", "node", "text"),
    [
        ("model", {"depth": 1}, "model: must have a _target_, received depth"),
        ("trainer", None, "trainer: must have a _target_, received None"),
        ("accumulation", "per_token", "must have a _target_, received per_token"),
        (
            "schedule",
            {"size": 3},
            r"schedule\.size: needs an option .* '~schedule.size'",
        ),
        ("callbacks", {"_target_": MINE}, "callbacks: must hold entries by name"),
        ("logger", {"x": 1}, "logger.x: must have a _target_ or be null, received 1"),
        ("logger", {"x": {"a": 1}}, r"Write logger\.x\._target_=my_module"),
    ],
)
def test_what_describes_no_object_is_refused(group: str, node: Any, text: str) -> None:
    with pytest.raises(TrainkitError, match=text):
        list(nodes_of(groups(**{group: node})))


def test_empty_groups_describe_nothing() -> None:
    config = groups(model={"_target_": None}, callbacks={"x": None, "y": {**NET}})
    assert [key for key, _ in nodes_of(config)] == ["trainer", "callbacks.y"]


def test_what_a_function_has_returned_is_looked_at() -> None:
    with pytest.raises(TrainkitError, match=r"loggers.Logger, and mine has returned i"):
        check_made(3, "mine", key="logger.x")
    with pytest.raises(TrainkitError, match="LightningDataModule, and mine has"):
        check_made(3, "mine", key="data")
    check_made([3], "mine", key="data")  # a loader
    check_made(3, "mine", key="accumulation")  # looked at where it is attached


def test_a_module_of_the_other_package(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TrainkitError, match="LightningModule"):
        check("model", MINE)
    package: Any = types.ModuleType("pytorch_lightning")
    package.LightningModule = OtherModule
    monkeypatch.setitem(sys.modules, "pytorch_lightning", package)
    check("model", MINE)
