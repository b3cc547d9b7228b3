"""The sums of windows, measured by hooks, against those computed by hand."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.utils.checkpoint import checkpoint

from tests.core.common import waiting_is_an_error
from tests.helpers import TokenNet, gradients, pad, ragged_sequences, token_loss
from trainkit import Accumulator, NoiseMoments, PerToken, TrainkitError, Uniform
from trainkit.core.noise.moments import squared_norm
from trainkit.core.ranks import Ranks

SIZES = (1, 7, 3, 4, 2, 3)
ROWS = iter(ragged_sequences(30))
BATCHES = [pad([next(ROWS) for _ in range(size)]) for size in SIZES]
TOKENS = [float(PerToken().weight(batch)) for batch in BATCHES]
CLOSE = 1e-6


class Tied(nn.Module):
    """Its embedding is its head, and a part of it is frozen."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.embed = nn.Embedding(13, 8)
        self.frozen = nn.Linear(8, 8)
        self.frozen.requires_grad_(False)

    def forward(self, ids: Tensor) -> Tensor:
        return torch.tanh(self.frozen(self.embed(ids))) @ self.embed.weight.T


class Shared(nn.Module):
    """One layer in two checkpoints: reentrant ones add its gradient in two parts."""

    def __init__(self, *, reentrant: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.layer = nn.Embedding(13, 13), nn.Linear(13, 13)
        self._reentrant = reentrant

    def forward(self, ids: Tensor) -> Tensor:
        x: Any = self.embed(ids)
        for _ in range(2):
            x = checkpoint(self.layer, x, use_reentrant=self._reentrant)
        return x


def trained(net: nn.Module) -> list[nn.Parameter]:
    return [p for p in net.parameters() if p.requires_grad]


def by_hand(net: nn.Module, weights: list[float]) -> Tensor:
    """The sums of a window of all batches, from a backward pass of each."""
    rows = []
    for batch, weight in zip(BATCHES, weights, strict=True):
        found = torch.autograd.grad(token_loss(net, batch), trained(net))
        rows.append(weight * torch.cat([g.double().flatten() for g in found]))
    u, w = torch.stack(rows), torch.tensor(weights, dtype=torch.float64)
    sums = [u.sum(0).square().sum(), u.square().sum(), w.sum() ** 2, w @ w, w.sum()]
    return torch.stack([*sums, torch.tensor(float(sum(SIZES))), torch.ones(())])


class Training:
    """A net whose windows can be measured."""

    def __init__(
        self, net: nn.Module | None = None, strategy: Any = None, **how: Any
    ) -> None:
        self.net = net or TokenNet()
        self.scaler = how.pop("scaler", None)
        self.reduction = getattr(strategy, "loss_reduction", "mean")
        strategy = strategy or PerToken()
        self.optimizer = torch.optim.SGD(trained(self.net), lr=0.1)
        options: Any = {"module": self.net, "scaler": self.scaler}
        self.accumulator = Accumulator(strategy, **options)
        self.moments = NoiseMoments(self.accumulator, self.optimizer)

    def _backward(self, loss: Tensor) -> None:
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()

    def run(self, *batches: dict[str, Tensor], factor: float = 1.0) -> None:
        reduction = "mean" if self.reduction == "mean" else "sum"
        for batch in batches:
            if not isinstance(self.net, Shared):
                # Another pass, as of a gradient penalty, is not looked at.
                torch.autograd.grad(token_loss(self.net, batch), trained(self.net))
            loss = factor * token_loss(self.net, batch, reduction)
            self.accumulator.backward(loss, batch, backward=self._backward)

    def added(self, *, unscales: bool = True, **how: Any) -> Tensor:
        stats = self.accumulator.finish(self.optimizer)
        if self.scaler is not None and unscales:
            self.scaler.unscale_(self.optimizer)
        self.moments.add(stats, samples=sum(SIZES), **how)
        if self.scaler is not None and unscales:
            self.scaler.update()
        self.gradient = gradients(self.net)
        self.net.zero_grad()
        return self.moments.table[-1]

    def window(self, factor: float = 1.0, *, told: bool = False, **how: Any) -> Tensor:
        self.moments.watch()
        if told:
            self.accumulator.expect(BATCHES)
        self.run(*BATCHES, factor=factor)
        return self.added(**how)


def off(found: Tensor, wanted: Tensor) -> float:
    return float((found / wanted - 1).abs().max())


def a_scaler() -> Any:
    return torch.amp.GradScaler("cpu", init_scale=1024.0)


WAYS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "plain": (TokenNet, PerToken(), {}),
    "tied and frozen": (Tied, PerToken(), {}),
    "checkpoints": (Shared, PerToken(), {}),
    "sum": (TokenNet, PerToken(loss_reduction="sum"), {}),
    "total": (TokenNet, PerToken(loss_reduction="total"), {}),
    "all count alike": (TokenNet, Uniform(), {}),
    "scaler": (TokenNet, PerToken(), {"scaler": a_scaler}),
}


@pytest.mark.parametrize("told", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_sums_are_those_by_hand(way: str, told: bool) -> None:
    make, strategy, made = WAYS[way]
    options = {name: of() for name, of in made.items()}
    weights = [1.0] * len(BATCHES) if isinstance(strategy, Uniform) else TOKENS
    row = Training(make(), strategy, **options).window(told=told)
    assert off(row, by_hand(make(), weights)) < CLOSE
    naive = TOKENS if isinstance(strategy, Uniform) else [5.0] * len(BATCHES)
    assert off(row[:2], by_hand(make(), naive)[:2]) > 0.1


def test_gradients_not_yet_unscaled_need_the_scale() -> None:
    rows = [
        Training(scaler=a_scaler()).window(unscales=False, scale=scale)
        for scale in (1024.0, 1.0)
    ]
    assert off(rows[0], by_hand(TokenNet(), TOKENS)) < CLOSE
    assert off(rows[0][:1], rows[1][:1]) > 0.9


def test_the_gradient_is_the_same_to_the_bit() -> None:
    measured, plain = Training(), Training()
    measured.window()
    plain.run(*BATCHES)
    plain.accumulator.finish(plain.optimizer)
    assert torch.equal(measured.gradient, gradients(plain.net))
    assert all(not p._backward_hooks for p in measured.net.parameters())


def test_a_gradient_in_parts_is_not_measured() -> None:
    training = Training(Shared(reentrant=True))
    assert not training.window().any()


def test_a_pass_of_which_no_hook_sees_anything_is_not_measured() -> None:
    """As where a backend steps parameters of its own in place of the module's."""
    training = Training()
    training.moments.watch()
    for hook in training.moments._hooks:
        hook.remove()
    training.run(*BATCHES)
    assert not training.added().any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_large_tensors_and_few_bits_are_added_up_without_loss(dtype: Any) -> None:
    """A CPU adds up ten million squares of float32 to a thousandth."""
    torch.manual_seed(0)
    shape = (2000, 5000) if dtype == torch.float32 else (100, 1000)
    gradient = (300 * torch.randn(shape) * torch.rand(shape[0], 1)).to(dtype)
    exact = gradient.double().square().sum()
    assert abs(squared_norm([gradient]) / exact - 1) < CLOSE
    plain = torch.linalg.vector_norm(gradient).double().square()
    assert abs(plain / exact - 1) > 10 * CLOSE


def test_parameters_that_an_optimizer_gets_later_are_measured() -> None:
    """As finetuning adds them."""
    training, wanted = Training(), by_hand(TokenNet(), TOKENS)
    training.optimizer.param_groups[0]["params"] = list(training.net.parameters())[:1]
    first = training.window()
    others = list(training.net.parameters())[1:]
    training.optimizer.add_param_group({"params": others})
    assert off(training.window(), wanted) < CLOSE
    assert off(first[:2], wanted[:2]) > 0.01  # the control


# ---- what is kept --------------------------------------------------------------------


def test_the_last_windows_are_kept_and_resumed(monkeypatch: Any) -> None:
    monkeypatch.setattr("trainkit.core.noise.moments.LAST", 3)
    training, resumed = Training(), Training()
    rows = [training.window(1 + n) for n in range(4)]
    assert torch.equal(training.moments.table, torch.stack(rows[1:]))
    resumed.moments.load_state_dict(copy.deepcopy(training.moments.state_dict()))
    for each in (training, resumed):
        each.window(9.0)
    assert torch.equal(training.moments.table, resumed.moments.table)


def test_a_pass_that_is_dropped_does_not_count() -> None:
    training = Training()
    plain = training.window()
    training.moments.watch()
    training.run(*BATCHES[:2])
    training.accumulator.drop()
    training.net.zero_grad()
    training.run(*BATCHES)
    assert torch.equal(training.added(), plain)


@pytest.mark.parametrize("is_resumed", [False, True])
def test_a_window_whose_beginning_was_not_seen_does_not_count(is_resumed: bool) -> None:
    """It is watched too late, or carried over by a checkpoint."""
    training = Training()
    training.run(BATCHES[0])
    if is_resumed:
        state, training = training.accumulator.state_dict(), Training()
        training.accumulator.load_state_dict(state)
    training.moments.watch()
    training.run(*BATCHES[1:])
    assert not training.added().any()
    assert training.window().all()  # the control


@pytest.mark.parametrize("factor", [torch.inf, torch.nan])
def test_a_window_without_finite_gradients_does_not_count(factor: float) -> None:
    """As a gradient scaler's first ones may be."""
    found = []
    for has_broken in (False, True):
        training = Training(scaler=a_scaler())
        for number in range(8):
            if has_broken and number == 3:
                assert not training.window(factor).any()
            training.window()
        found.append(training.moments.estimate())
    assert found[0] == found[1] is not None


# ---- wrong use -----------------------------------------------------------------------


def test_wrong_use_is_refused() -> None:
    net = TokenNet()
    accumulator = Accumulator(PerToken(), module=net)
    terms = Accumulator({"a": PerToken(), "b": Uniform()}, module=net)
    with pytest.raises(TrainkitError, match=r"terms \['a', 'b'\]"):
        NoiseMoments(terms, net.parameters())
    with pytest.raises(TrainkitError, match="A generator"):
        NoiseMoments(accumulator, ())
    moments = NoiseMoments(accumulator, net.parameters())
    accumulator.backward(token_loss(net, BATCHES[0]), BATCHES[0])
    stats = accumulator.finish(list(net.parameters()))
    with pytest.raises(TrainkitError, match="was not watched"):
        moments.add(stats, samples=1)
    moments.watch()
    with pytest.raises(TrainkitError, match="was not finished"):
        moments.add(stats, samples=1)
    assert moments.estimate() is None


def test_sharded_parameters_are_refused() -> None:
    training = Training()
    training.accumulator.ranks = Ranks("mean", size=2)  # as of FSDP
    with pytest.raises(TrainkitError, match="must be whole on each rank, and a backe"):
        NoiseMoments(training.accumulator, training.optimizer)
    training.accumulator.ranks = Ranks()
    mesh = DeviceMesh("cpu", [0], _init_backend=False, _rank=0)
    of_two = DTensor.from_local(torch.ones(2), mesh, [Shard(0)], run_check=False)
    training.optimizer.param_groups[0]["params"] = [of_two]  # sharded since
    with pytest.raises(TrainkitError, match="must be whole on each rank"):
        training.moments.watch()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_measured_window_on_a_gpu_waits_for_nothing() -> None:
    training = Training(TokenNet().cuda())
    batches = [{k: v.cuda() for k, v in batch.items()} for batch in BATCHES]

    def window() -> Tensor:
        training.moments.watch()
        training.run(*batches)
        return training.added()

    window()
    with waiting_is_an_error():
        for _ in range(6):
            window()
    assert off(window().cpu(), Training().window()) < 1e-4
