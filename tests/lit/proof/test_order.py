"""Hooks that work on a micro-batch's gradient: measured, and named with their place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch import Tensor, nn

from tests.lit.proof.test_check import SPLIT
from tests.lit.proof.test_check import check_quickly as check
from tests.lit.proof.trainers import plain_trainer
from tests.lit.proof.zoo import Tokens, token_loader
from trainkit import PerSample, PerToken

CLIP_AT = 0.01


class Hooked(Tokens):
    """Its last layer's weight has a hook."""

    def __init__(self, register: str, hook: Callable[..., Any]) -> None:
        super().__init__()
        getattr(self.head.weight, register)(hook)


class ClipsEarly(Tokens):
    def on_after_backward(self) -> None:
        nn.utils.clip_grad_norm_(self.parameters(), CLIP_AT)


class ClipsInBackward(Tokens):
    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        loss.backward()
        nn.utils.clip_grad_norm_(self.parameters(), CLIP_AT)


class Clips(Callback):
    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        nn.utils.clip_grad_value_(pl_module.parameters(), CLIP_AT / 10)


class Reads(Callback):
    def __init__(self) -> None:
        self.seen = 0

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        self.seen += 1
        pl_module.log("size", pl_module.head.weight.grad.norm())


def clamped(gradient: Tensor) -> Tensor:
    return gradient.clamp(-CLIP_AT, CLIP_AT)


def clamp_accumulated(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.clamp_(-CLIP_AT, CLIP_AT)


def masked(gradient: Tensor) -> Tensor:
    return gradient * (torch.arange(16) > 4)


class StepsEarly(Tokens):
    def __init__(self) -> None:
        super().__init__()
        self.early = torch.optim.Adam([self.head.weight])
        self.head.weight.register_post_accumulate_grad_hook(self.step)

    def step(self, parameter: Tensor) -> None:
        self.early.step()
        self.early.zero_grad()


class ClipsFeatures(Tokens):
    """Registers its hooks in each training step."""

    def features(self, batch: Any) -> Tensor:
        hidden = super().features(batch)
        hidden.register_hook(lambda gradient: gradient.clamp(-(CLIP_AT**2), CLIP_AT**2))
        return hidden


class HooksInStep(Tokens):
    def features(self, batch: Any) -> Tensor:
        if not self.head.weight._backward_hooks:
            self.head.weight.register_hook(clamped)
        return super().features(batch)


@pytest.mark.parametrize("module", [ClipsFeatures, HooksInStep])
def test_a_hook_that_training_step_registers_is_named_with_its_line(
    module: Any,
) -> None:
    made = module()
    report = check(made, token_loader(), strategy=PerToken())
    (cause,) = report.causes
    assert cause.kind == "order"
    assert cause.place.startswith("register_hook at proof/test_order.py:")
    assert not made.head.weight._backward_hooks  # none is left behind


@pytest.mark.parametrize("cut", [None, SPLIT])
@pytest.mark.parametrize(
    ("module", "callbacks", "place"),
    [
        (lambda: Hooked("register_hook", clamped), [], "head.weight"),
        (
            lambda: Hooked("register_post_accumulate_grad_hook", clamp_accumulated),
            [],
            "head.weight",
        ),
        (StepsEarly, [], "the hook of head.weight"),
        (ClipsEarly, [], "on_after_backward of ClipsEarly"),
        (ClipsInBackward, [], "backward of ClipsInBackward"),
        (Tokens, [Clips()], "on_after_backward of Clips"),
    ],
)
def test_a_hook_that_is_not_linear_is_a_cause(
    module: Any, callbacks: list[Callback], place: str, cut: Any
) -> None:
    """The control is below: a linear one."""
    trainer = plain_trainer(callbacks=callbacks)
    report = check(
        module(),
        token_loader(),
        strategy=PerToken(),
        trainer=trainer,
        micro_batches=cut,
    )
    assert not report.exact
    (cause,) = report.causes
    assert (cause.kind, cause.place) == ("order", place)
    assert cause.remedy[0] == "move it to on_before_optimizer_step"
    assert report.deviation > 1e-2
    assert report.cuts[0].deviation is not None
    assert report.cuts[0].deviation < 1e-12  # without the hook


def test_a_hook_that_is_linear_is_exact_and_noted() -> None:
    reads = Reads()
    module = Hooked("register_hook", masked)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    report = check(
        module, token_loader(), strategy=PerToken(), trainer=plain_trainer([reads])
    )
    report.assert_exact()
    assert [note.partition(" runs once")[0] for note in report.notes] == [
        "the hook of head.weight",
        "on_after_backward of Reads",
    ]
    assert reads.seen == 0  # as before
    after = module.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert all(parameter.grad is None for parameter in module.parameters())


def test_a_hook_hides_no_other_cause() -> None:
    module = Hooked("register_hook", clamped)
    report = check(module, token_loader(), strategy=PerSample())
    assert [cause.kind for cause in report.causes] == ["denominator", "order"]
    module = Hooked("register_hook", masked)
    report = check(module, token_loader(), strategy=PerSample())
    assert [cause.kind for cause in report.causes] == ["denominator"]


def test_an_optimizer_within_backward_takes_no_step() -> None:
    module = StepsEarly()
    before = module.head.weight.detach().clone()
    check(module, token_loader(), strategy=PerToken())
    assert torch.equal(module.head.weight, before)
    assert not module.early.state
