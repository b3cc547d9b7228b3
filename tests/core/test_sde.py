"""The rules' theorem: a batch k times as large draws the same random trajectory.

Malladi et al. 2022 (arXiv 2205.10287): with small rates SGD and Adam follow a
stochastic differential equation, which stays the same at k times the batch, 1 / k as
many steps and the rule's hyperparameters. So the weights of many runs agree in their
means and variances at equal numbers of samples. The model is a quadratic whose
gradients carry noise of variance 1 / batch, simulated for all runs at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from trainkit.core import scaling

RUNS = 5_000
K = 4
CURVATURE = torch.tensor([1.0, 0.3], dtype=torch.float64)
START = 1.0


class Moments:
    """Mean and variance over the runs at some times, with their standard errors."""

    def __init__(self) -> None:
        self.means: list[Tensor] = []
        self.variances: list[Tensor] = []
        self.fourths: list[Tensor] = []

    def look(self, weights: Tensor) -> None:
        self.means.append(weights.mean(0))
        self.variances.append(weights.var(0))
        self.fourths.append(((weights - weights.mean(0)) ** 4).mean(0))

    def distance(self, other: Moments) -> float:
        """The largest difference, in standard errors of it."""
        mine, theirs = self._table(), other._table()
        errors = (mine[1] ** 2 + theirs[1] ** 2).sqrt()
        return float(((mine[0] - theirs[0]).abs() / errors).max())

    def ratio_of_variances(self, other: Moments) -> float:
        return float((self.variances[-1] / other.variances[-1]).mean())

    def _table(self) -> tuple[Tensor, Tensor]:
        means, variances, fourths = map(
            torch.stack, (self.means, self.variances, self.fourths)
        )
        of_means = (variances / RUNS).sqrt()
        of_variances = ((fourths - variances**2) / RUNS).sqrt()
        return torch.cat([means, variances]), torch.cat([of_means, of_variances])


Step = Callable[[Tensor, Tensor, int], Tensor]


def simulate(step: Step, *, k: float, steps: int, noise: float, seed: int) -> Moments:
    """Runs at k times the batch, seen at four times of equal numbers of samples."""
    generator = torch.Generator().manual_seed(seed)
    weights = torch.full((RUNS, len(CURVATURE)), START, dtype=torch.float64)
    moments = Moments()
    count = round(steps / k)
    for number in range(1, count + 1):
        z = torch.randn(weights.shape, generator=generator, dtype=torch.float64)
        weights = weights - step(
            weights, CURVATURE * weights + noise / math.sqrt(k) * z, number
        )
        if number % (count // 4) == 0:
            moments.look(weights)
    return moments


def sgd(lr: float) -> Step:
    return lambda weights, gradient, number: lr * gradient


class AdamStep:
    """Adam as torch's, without its correction of the first steps: the moments begin
    where they settle, since the theorem speaks of what follows."""

    def __init__(self, lr: float, beta1: float, beta2: float, eps: float, k: float):
        self.lr, self.beta1, self.beta2, self.eps = lr, beta1, beta2, eps
        self.first: Any = None
        self.second: Any = None
        self.k = k

    def __call__(self, weights: Tensor, gradient: Tensor, number: int) -> Tensor:
        if self.first is None:
            self.first = CURVATURE * weights
            self.second = self.first**2 + ADAM_NOISE**2 / self.k
        self.first = self.beta1 * self.first + (1 - self.beta1) * gradient
        self.second = self.beta2 * self.second + (1 - self.beta2) * gradient**2
        return self.lr * self.first / (self.second.sqrt() + self.eps)


SGD = {"steps": 1200, "noise": 2.0}
SGD_LR = 0.002


def sgd_moments(k: float, factor: float, seed: int) -> Moments:
    return simulate(sgd(SGD_LR * factor), k=k, seed=seed, **SGD)


@pytest.fixture(scope="module")
def small_sgd() -> Moments:
    return sgd_moments(1, 1, seed=0)


def test_sgd_at_k_times_the_batch_equals_in_distribution(small_sgd: Moments) -> None:
    large = sgd_moments(K, scaling.linear_factor(K), seed=1)
    assert large.distance(small_sgd) <= 4
    assert large.ratio_of_variances(small_sgd) == pytest.approx(1, abs=0.03)


@pytest.mark.parametrize("rule", [lambda k: 1.0, scaling.sqrt_factor])
def test_sgd_under_another_rule_differs(small_sgd: Moments, rule: Any) -> None:
    assert sgd_moments(K, rule(K), seed=1).distance(small_sgd) >= 40


ADAM_NOISE = 10.0
ADAM = {"steps": 2400, "noise": ADAM_NOISE}
ADAM_LR, BETA1, BETA2, EPS = 0.001, 0.98, 0.995, 3.0


def adam_moments(k: float, factor: float, seed: int, *, moments: bool = True) -> Any:
    beta1, beta2, eps = BETA1, BETA2, EPS
    if moments:
        beta1, beta2 = scaling.sde_beta(beta1, k), scaling.sde_beta(beta2, k)
        eps = scaling.sde_eps(eps, k)
    step = AdamStep(ADAM_LR * factor, beta1, beta2, eps, k)
    return simulate(step, k=k, seed=seed, **ADAM)


@pytest.fixture(scope="module")
def small_adam() -> Moments:
    return adam_moments(1, 1, seed=0)


def test_adam_at_k_times_the_batch_equals_in_distribution(small_adam: Moments) -> None:
    large = adam_moments(K, scaling.sqrt_factor(K), seed=1)
    assert large.distance(small_adam) <= 5
    assert large.ratio_of_variances(small_adam) == pytest.approx(1, abs=0.1)


@pytest.mark.parametrize("rule", [lambda k: 1.0, scaling.linear_factor])
def test_adam_under_another_rule_differs(small_adam: Moments, rule: Any) -> None:
    """The linear rule is SGD's: Adam has divided the noise away."""
    assert adam_moments(K, rule(K), seed=1).distance(small_adam) >= 40


def test_adam_with_the_rate_alone_differs(small_adam: Moments) -> None:
    """eps and the moments belong to the rule."""
    large = adam_moments(K, scaling.sqrt_factor(K), seed=1, moments=False)
    assert large.distance(small_adam) >= 10
