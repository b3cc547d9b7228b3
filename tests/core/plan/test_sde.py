"""The rules' theorem: a batch k times as large draws the same random trajectory.

Malladi et al. 2022 (arXiv 2205.10287): with small rates SGD and Adam follow a
stochastic differential equation, which stays the same at k times the batch, 1 / k as
many steps and the rule's hyperparameters. So the weights of many runs agree in their
means and variances at equal numbers of samples. The model is a quadratic whose
gradients carry noise of variance 1 / batch, simulated for all runs at once.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from trainkit.core.plan.scaling import RULES, Factor

RUNS = 5_000
K = 4
CURVATURE = torch.tensor([1.0, 0.3], dtype=torch.float64)
SDE = RULES["adam-sde"]

Step = Callable[[Tensor, Tensor], Tensor]


def simulate(step: Step, *, k: float, steps: int, noise: float) -> list[Tensor]:
    """The weights of all runs at k times the batch, at four numbers of samples."""
    generator = torch.Generator().manual_seed(int(k > 1))
    weights = torch.ones(RUNS, len(CURVATURE), dtype=torch.float64)
    seen, count = [], round(steps / k)
    for number in range(1, count + 1):
        z = torch.randn(weights.shape, generator=generator, dtype=torch.float64)
        gradient = CURVATURE * weights + noise / math.sqrt(k) * z
        weights = weights - step(weights, gradient)
        if number % (count // 4) == 0:
            seen.append(weights)
    return seen


@functools.cache
def sgd(k: float, factor: float) -> list[Tensor]:
    return simulate(lambda _, g: 0.002 * factor * g, k=k, steps=1200, noise=2.0)


@functools.cache
def adam(k: float, factor: float, follows: bool = True) -> list[Tensor]:
    """Adam as torch's, without its correction of the first steps: the moments begin
    where they settle, since the theorem speaks of what follows."""
    lr, beta1, beta2, eps, noise = 0.001 * factor, 0.98, 0.995, 3.0, 10.0
    if follows:
        assert SDE.beta1 is not None
        assert SDE.beta2 is not None
        assert SDE.eps is not None
        beta1, beta2, eps = SDE.beta1(beta1, k), SDE.beta2(beta2, k), SDE.eps(eps, k)
    first = CURVATURE.expand(RUNS, -1)
    second = first**2 + noise**2 / k

    def step(weights: Tensor, gradient: Tensor) -> Tensor:
        nonlocal first, second
        first = beta1 * first + (1 - beta1) * gradient
        second = beta2 * second + (1 - beta2) * gradient**2
        return lr * first / (second.sqrt() + eps)

    return simulate(step, k=k, steps=2400, noise=noise)


def distance(large: list[Tensor], small: list[Tensor]) -> float:
    """The largest difference of a mean or variance, in standard errors of it."""
    found = []
    for a, b in zip(large, small, strict=True):
        error_of_mean = ((a.var(0) + b.var(0)) / RUNS).sqrt()
        found.append((a.mean(0) - b.mean(0)).abs() / error_of_mean)
        fourths = [((x - x.mean(0)) ** 4).mean(0) - x.var(0) ** 2 for x in (a, b)]
        error_of_variance = ((fourths[0] + fourths[1]) / RUNS).sqrt()
        found.append((a.var(0) - b.var(0)).abs() / error_of_variance)
    return float(torch.stack(found).max())


@pytest.mark.parametrize(
    ("run", "factor", "least", "most"),
    [
        (sgd, RULES["linear"].lr, 0, 4),
        (sgd, RULES["sqrt"].lr, 40, math.inf),
        (sgd, RULES["none"].lr, 40, math.inf),
        (adam, SDE.lr, 0, 5),
        # The linear rule is SGD's: Adam has divided the noise away.
        (adam, RULES["linear"].lr, 40, math.inf),
        (adam, RULES["none"].lr, 40, math.inf),
        # eps and the moments belong to the rule.
        (functools.partial(adam, follows=False), SDE.lr, 10, math.inf),
    ],
)
def test_k_times_the_batch_equals_in_distribution_under_its_own_rule_alone(
    run: Callable[..., list[Tensor]], factor: Factor, least: float, most: float
) -> None:
    large, small = run(K, factor(K)), run(1, 1)
    assert least <= distance(large, small) <= most
    if most < math.inf:
        ratio = float((large[-1].var(0) / small[-1].var(0)).mean())
        assert ratio == pytest.approx(1, abs=0.03 if run is sgd else 0.1)
