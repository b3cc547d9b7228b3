"""TorchScript of mixin modules."""

from __future__ import annotations

from functools import partial
from typing import Any

import lightning.pytorch as pl
import pytest
import pytorch_lightning as old
import torch

from trainkit import AccumulationMixin, PerSample

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


class Forward:
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.net = torch.nn.Linear(3, 2)
        self.example_input_array = torch.ones(1, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.net(x))


class New(AccumulationMixin, Forward, pl.LightningModule):
    accumulation = PerSample()


class Old(AccumulationMixin, Forward, old.LightningModule):  # type: ignore[misc]
    accumulation = PerSample()


class Unused(New):
    """With properties of its own that TorchScript must not see."""

    __jit_unused_properties__ = [*New.__jit_unused_properties__, "mine"]
    __jit_ignored_attributes__ = ["mine"]

    @property
    def mine(self) -> Any:
        return object()


class Overrides(New):
    @property
    def effective_batch(self) -> Any:
        return 3


class Below(Unused): ...


def with_hooks() -> Any:
    """With callbacks of its own."""
    module: Any = New()
    module.configure_callbacks, module.lr_scheduler_step = list, partial(print)
    return module


INPUT = torch.tensor([[1.0, -2.0, 3.0], [-1.0, 0.5, -3.0]])
BY: dict[str, Any] = {
    "to_torchscript": lambda module: module.to_torchscript(),
    "to_torchscript(trace)": lambda module: module.to_torchscript(method="trace"),
    "script": torch.jit.script,
    "trace": lambda module: torch.jit.trace(module, INPUT),
}
WAYS = [
    ("to_torchscript", False),
    ("to_torchscript", True),
    ("to_torchscript(trace)", False),  # Lightning's own fails where it is attached
    ("script", True),  # and these where it is not
    ("trace", True),
]


@pytest.mark.parametrize(
    ("kind", "way", "attached"),
    [
        *((New, *way) for way in WAYS),
        *((Old, *way) for way in WAYS[1:3]),
        *((Unused, *way) for way in WAYS[:1] + WAYS[4:]),
        *((Overrides, *way) for way in WAYS[2:4]),
        *((Below, *way) for way in WAYS[1:3]),
        (with_hooks, *WAYS[0]),
    ],
)
def test_torchscript_gives_what_the_module_gives(
    kind: Any, way: str, attached: bool
) -> None:
    module = kind()
    if attached:
        space: Any = old if kind is Old else pl
        how: dict[str, Any] = {"logger": False, "enable_checkpointing": False}
        module.trainer = space.Trainer(accelerator="cpu", **how)
    with torch.no_grad():
        scripted = BY[way](module)
    assert torch.equal(scripted(INPUT), module(INPUT))
    assert scripted(INPUT).any()


def test_the_property_still_says_why_it_is_not_known() -> None:
    module = New()
    with pytest.raises(RuntimeError, match="not attached to a `Trainer`"):
        _ = module.effective_batch
