"""Batch Renormalization (Ioffe 2017, arXiv 1702.03275)."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from trainkit.core.batch_norm.renorm import BatchRenorm

SHAPES = {1: (7, 5), 2: (6, 5, 4, 3), 3: (4, 5, 2, 3, 2)}
NORMS: dict[int, Any] = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}


def data(dims: int, *, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(SHAPES[dims], generator=generator, dtype=torch.float64)
    return (2 * x + 0.7).requires_grad_()


def pair(dims: int, **options: Any) -> tuple[nn.Module, BatchRenorm]:
    """A BatchNorm with statistics and weights of its own, and a BatchRenorm with the
    same."""
    shared = {k: options.pop(k) for k in ("momentum", "affine") if k in options}
    norm = NORMS[dims](5, **shared).double()
    with torch.no_grad(), torch.random.fork_rng():
        torch.manual_seed(3)
        for tensor in norm.parameters():
            tensor.normal_()
        norm.running_mean.normal_()
        norm.running_var.uniform_(0.5, 2)
        norm.num_batches_tracked.fill_(4)
    renorm = BatchRenorm(5, **shared, **options).double()
    renorm.load_state_dict(norm.state_dict())
    return norm, renorm


def result(layer: nn.Module, x: Tensor) -> list[Tensor]:
    """What comes out, the gradients, and the statistics afterwards."""
    y = layer(x)
    torch.manual_seed(0)
    sources = [x, *layer.parameters()]
    slopes = torch.autograd.grad((y * torch.randn_like(y)).sum(), sources)
    return [y, *slopes, *layer.buffers()]


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("momentum", [0.1, 1.0, None])
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_renorm_without_corrections_equals_batch_norm(
    dims: int, momentum: float | None, affine: bool
) -> None:
    norm, renorm = pair(dims, momentum=momentum, affine=affine, r_max=1.0, d_max=0.0)
    for found, wanted in zip(
        result(renorm, data(dims)), result(norm, data(dims)), strict=True
    ):
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dims", [1, 2, 3])
def test_renorm_without_limits_equals_inference(dims: int) -> None:
    norm, renorm = pair(dims, r_max=1e9, d_max=1e9)
    x = data(dims)
    found, wanted = renorm(x), norm.eval()(x)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


def test_renorm_with_limits_equals_neither() -> None:
    """The negative control of both."""
    norm, renorm = pair(2, r_max=1.2, d_max=0.2)
    x = data(2)
    y = renorm(x)
    assert (y - copy.deepcopy(norm)(x)).abs().max() > 1e-2
    assert (y - norm.eval()(x)).abs().max() > 1e-2


def by_hand(layer: BatchRenorm, x: Tensor, r_max: float, d_max: float) -> Tensor:
    """The paper's formulas, r and d detached as it says."""
    over, each = (0, *range(2, x.ndim)), (1, -1, *[1] * (x.ndim - 2))
    mean = x.mean(over)
    std = ((x - mean.view(each)).square().mean(over) + layer.eps).sqrt()
    running_std = (layer.running_var + layer.eps).sqrt()
    r = (std / running_std).detach().clamp(1 / r_max, r_max)
    d = ((mean - layer.running_mean) / running_std).detach().clamp(-d_max, d_max)
    y = (x - mean.view(each)) / std.view(each) * r.view(each) + d.view(each)
    if layer.affine:
        y = y * layer.weight.view(each) + layer.bias.view(each)
    return y


@pytest.mark.parametrize("limits", [(1.0, 0.0), (1.1, 0.1), (1.5, 1.0), (3.0, 5.0)])
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_renorm_equals_the_formula_with_gradients(
    dims: int, affine: bool, limits: tuple[float, float]
) -> None:
    r_max, d_max = limits
    _, renorm = pair(dims, affine=affine, r_max=r_max, d_max=d_max)
    x = data(dims)
    twin = copy.deepcopy(renorm)
    wanted = by_hand(twin, x, r_max, d_max)
    slope = torch.randn_like(wanted)
    slopes = torch.autograd.grad((wanted * slope).sum(), [x, *twin.parameters()])
    found = renorm(x)
    ours = torch.autograd.grad((found * slope).sum(), [x, *renorm.parameters()])
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    for mine, theirs in zip(ours, slopes, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-12)


def test_gradient_through_the_corrections_would_differ() -> None:
    """The negative control of the detached r and d: with them the layer would be
    inference's affine map, whose gradient is one number a channel."""
    norm, renorm = pair(2, r_max=1e9, d_max=1e9, affine=False)
    x = data(2)
    y = renorm(x)
    torch.manual_seed(0)
    slope = torch.randn_like(y)
    ours = torch.autograd.grad((y * slope).sum(), x)[0]
    through = torch.autograd.grad((norm.eval()(x) * slope).sum(), x)[0]
    assert (ours - through).abs().max() > 1e-2


@pytest.mark.parametrize("seen", [0, 1, 5, 10, 25])
def test_limits_open_evenly_over_the_ramp(seen: int) -> None:
    _, renorm = pair(2, r_max=3.0, d_max=5.0, ramp=10)
    renorm.num_batches_tracked.fill_(seen)
    renorm.running_mean.fill_(-40.0)
    share = min(seen / 10, 1)
    x = data(2)
    wanted = by_hand(renorm, x, 1 + share * 2, share * 5)
    torch.testing.assert_close(renorm(x), wanted)


def test_first_forward_pass_is_not_corrected_without_a_ramp_either() -> None:
    """There are no running statistics yet that one could correct to."""
    renorm = BatchRenorm(5).double()
    x = data(2)
    torch.testing.assert_close(renorm(x), nn.BatchNorm2d(5).double()(x))
    assert (renorm(x) - nn.BatchNorm2d(5).double()(x)).abs().max() > 1e-3


@pytest.mark.parametrize("momentum", [0.1, None])
def test_statistics_after_many_batches_equal_those_of_batch_norm(
    momentum: float | None,
) -> None:
    norm, renorm = pair(2, momentum=momentum)
    for seed in range(9):
        norm(data(2, seed=seed))
        renorm(data(2, seed=seed))
    for mine, theirs in zip(renorm.buffers(), norm.buffers(), strict=True):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_keeps_its_dtype_and_float_statistics(dtype) -> None:
    renorm = BatchRenorm(5)
    x = data(2).detach().to(dtype)
    assert renorm(x).dtype == dtype
    wanted = nn.BatchNorm2d(5)
    wanted(x.float())
    torch.testing.assert_close(renorm.running_mean, wanted.running_mean)
    torch.testing.assert_close(renorm.running_var, wanted.running_var)


def test_autocast_equals_full_precision_roughly() -> None:
    net = nn.Sequential(nn.Conv2d(5, 5, 1), BatchRenorm(5))
    twin = copy.deepcopy(net)
    x = data(2).detach().float()
    with torch.autocast("cpu", torch.bfloat16):
        y = net(x)
        y.sum().backward()
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y.float(), twin(x), rtol=0.1, atol=0.1)
    assert net[1].running_var.dtype == torch.float32


def test_half_precision_layer_runs_and_learns() -> None:
    renorm = BatchRenorm(5).to(torch.bfloat16)
    for _ in range(2):
        renorm(data(2).to(torch.bfloat16)).sum().backward()
    assert renorm.running_mean.dtype == torch.bfloat16
    assert renorm.weight.grad is not None


def test_evaluation_equals_batch_norm_also_in_half_precision() -> None:
    norm, renorm = pair(2)
    x = data(2)
    assert torch.equal(renorm.eval()(x), norm.eval()(x))
    norm, renorm = norm.float(), renorm.float()
    half = x.detach().to(torch.bfloat16)
    assert torch.equal(renorm(half), norm(half))


@pytest.mark.parametrize("affine", [True, False])
def test_state_dicts_of_both_fit_each_other(affine: bool) -> None:
    norm, renorm = pair(2, affine=affine)
    renorm(data(2))
    norm.load_state_dict(renorm.state_dict())
    x = data(2)
    assert torch.equal(norm.eval()(x), renorm.eval()(x))


def test_one_value_per_channel_equals_inference_within_the_limits() -> None:
    """Where torch refuses: what is left is d, and that is inference."""
    norm, renorm = pair(1, r_max=3.0, d_max=50.0)
    x = data(1)[:1]
    torch.testing.assert_close(renorm(x), norm.eval()(x))
    with pytest.raises(ValueError, match="Expected more than 1 value per channel"):
        norm.train()(x)


def test_vector_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"BatchRenorm: must be \(N, C, ...\), received shape"
    ):
        BatchRenorm(5)(torch.randn(5))


def test_forward_pass_reads_nothing_on_the_host() -> None:
    """On the meta device any reading of a value raises."""
    for momentum in (0.1, None):
        renorm = BatchRenorm(5, momentum=momentum, ramp=10, device="meta")
        renorm(torch.empty(SHAPES[2], device="meta"))
    with pytest.raises(RuntimeError, match="meta"):
        torch.empty((), device="meta").item()
