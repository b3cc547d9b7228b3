"""What may stand in a group, and that an object of another kind is refused."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
from omegaconf import OmegaConf

from trainkit import (
    AccumulationSchedule,
    MetricsCSVLogger,
    TrainkitError,
    WindowMonitor,
)
from trainkit.config.groups import check_made, nodes_of

NET = {"_target_": "tests.config.test_groups.MyModule"}


def groups(**nodes: Any) -> Any:
    names = ("model", "data", "accumulation", "micro_batching", "schedule")
    names += ("lr_scaling", "batchnorm", "optimizer", "scheduler", "callbacks")
    whole = {**dict.fromkeys((*names, "logger")), "trainer": NET, **nodes}
    return OmegaConf.create(whole)


class OtherModule:
    """Stands for the LightningModule of the other package."""


class MyModule(OtherModule):
    pass


MINE = "tests.config.test_groups.MyModule"


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


@pytest.mark.parametrize(
    ("key", "kind", "right"),
    [
        ("model", "LightningModule", BoringModel()),
        ("trainer", "Trainer", Trainer(accelerator="cpu", logger=False)),
        ("schedule", "Callback", AccumulationSchedule({0: 2})),
        ("callbacks.x", "Callback", WindowMonitor()),
        ("logger.x", "loggers.Logger", MetricsCSVLogger("x")),
        ("data", "LightningDataModule", [3]),  # a loader
    ],
)
def test_another_kind_is_named_and_the_right_one_left_alone(
    key: str, kind: str, right: Any
) -> None:
    said = rf"{key}._target_: must make an object of .*\.{kind}, .* has made .* int"
    with pytest.raises(TrainkitError, match=said):
        check_made(3, "mine", key=key)
    check_made(right, "mine", key=key)
    check_made(3, "mine", key="accumulation")  # looked at where it is attached


def test_a_module_of_the_other_package(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TrainkitError, match="LightningModule"):
        check_made(MyModule(), MINE, key="model")
    package: Any = types.ModuleType("pytorch_lightning")
    package.LightningModule = OtherModule
    monkeypatch.setitem(sys.modules, "pytorch_lightning", package)
    check_made(MyModule(), MINE, key="model")
