"""Threads of other projects that have no better place, each as a test."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.core.common import (
    average_window,
    big_batch,
    fresh_net,
    padded,
    relative,
    run_window,
)
from tests.helpers import NAIVE, TokenNet, ragged_sequences, token_loss
from trainkit import Accumulator, PerSample, PerToken

SAMPLES = ragged_sequences(16)


def cut(size: int) -> list[dict[str, Tensor]]:
    return [padded(SAMPLES[i : i + size]) for i in range(0, len(SAMPLES), size)]


@pytest.mark.parametrize("size", [16, 8, 4, 2, 1])
def test_loss_and_gradient_do_not_grow_with_the_number_of_micro_batches(
    size: int,
) -> None:
    """A loss or a gradient multiplied by N: transformers#47688, #35856, #43595,
    axolotl#2262; a sum where a mean was meant: fastai#3023."""
    reference, loss = big_batch(fresh_net(), padded(SAMPLES))
    net = fresh_net()
    stats = run_window(net, cut(size), PerToken())
    found = torch.cat(
        [p.grad.flatten() for p in net.parameters() if p.grad is not None]
    )
    assert relative(found, reference) <= 1e-12
    assert float(stats.loss) == pytest.approx(float(loss), rel=1e-12)


def probabilities(net: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    """Log-probabilities and labels of the tokens that count."""
    labels = batch["labels"].flatten()
    logits = net(batch["ids"]).flatten(0, 1)[labels != -100]
    return logits.log_softmax(-1), labels[labels != -100]


def focal(log_p: Tensor, labels: Tensor) -> Tensor:
    chosen = log_p.gather(1, labels[:, None]).squeeze(1)
    return -((1 - chosen.exp()) ** 2 * chosen)


def one_hot(log_p: Tensor, labels: Tensor) -> Tensor:
    return F.one_hot(labels, log_p.shape[1]).to(log_p.dtype)


TOKEN_LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "nll": lambda p, y: F.nll_loss(p, y, reduction="none"),
    "focal": focal,
    "mse": lambda p, y: (p.exp() - one_hot(p, y)).square().sum(1),
    "huber": lambda p, y: F.huber_loss(p, one_hot(p, y), reduction="none").sum(1),
    "kl": lambda p, y: F.kl_div(p, (one_hot(p, y) + 0.1) / 2, reduction="none").sum(1),
    "hinge": lambda p, y: F.multi_margin_loss(p, y, reduction="none"),
}


@pytest.mark.parametrize("name", TOKEN_LOSSES)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_every_loss_path_equals_big_batch(name: str, reduction: Any) -> None:
    """One loss branch of several that forgets the normaliser: TRL#4935, #5828."""

    def loss(net: nn.Module, batch: Any, reduction: str) -> Tensor:
        losses = TOKEN_LOSSES[name](*probabilities(net, batch))
        return losses.mean() if reduction == "mean" else losses.sum()

    reference, value = big_batch(fresh_net(), padded(SAMPLES), loss)
    net = fresh_net()
    stats = run_window(net, cut(3), PerToken(loss_reduction=reduction), loss)
    found = torch.cat(
        [p.grad.flatten() for p in net.parameters() if p.grad is not None]
    )
    assert relative(found, reference) <= 1e-12
    assert float(stats.loss) == pytest.approx(float(value), rel=1e-12)
    assert relative(average_window(fresh_net(), cut(3), loss), reference) > NAIVE


def test_labels_of_a_masked_model_count_from_the_first_position() -> None:
    """Not every model shifts: unsloth-zoo#1217."""
    labels = torch.tensor([[3, -100, -100, 5], [7, -100, 2, -100]])
    assert int(PerToken().weight({"labels": labels})) == 4
    assert int(PerToken(shift=True).weight({"labels": labels})) == 2


def test_data_parallel_module_weighs_as_its_inner_one() -> None:
    """transformers#37474, #40799."""
    reference, _ = big_batch(fresh_net(), padded(SAMPLES))
    net = fresh_net()
    run_window(nn.DataParallel(net), cut(3), PerToken())
    found = torch.cat(
        [p.grad.flatten() for p in net.parameters() if p.grad is not None]
    )
    assert relative(found, reference) <= 1e-12


def test_parameters_that_are_not_passed_keep_their_gradient() -> None:
    """Variables that overwrite with their gradient (fp8 scales) must not be divided:
    keras#19534."""
    net: TokenNet = fresh_net()
    accumulator = Accumulator(PerSample())
    scale = nn.Parameter(torch.ones((), dtype=torch.float64))
    for batch in cut(5):
        accumulator.backward(token_loss(net, batch) + 0.0 * scale, batch)
    scale.grad = torch.full_like(scale, 7.0)
    accumulator.finish(net.parameters())
    assert float(scale.grad) == 7.0
