"""The sums of windows, measured by hooks, against those computed by hand."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor, Shard
from torch.utils.checkpoint import checkpoint

from tests.helpers import TokenNet, pad, ragged_sequences, token_loss
from trainkit import Accumulator, NoiseMoments, PerToken, TrainkitError, Uniform
from trainkit.core.noise.norms import refuse_shards, squared_norm

SAMPLES = ragged_sequences(30)
SIZES = (1, 7, 3, 4, 2, 3)
CLOSE = 1e-6


def micro_batches(sizes: tuple[int, ...] = SIZES) -> list[dict[str, Tensor]]:
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    return [pad(SAMPLES[end - n : end]) for end, n in zip(ends, sizes, strict=True)]


BATCHES = micro_batches()


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


class LowRank(nn.Module):
    """A frozen layer beside which two small ones train."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.net = TokenNet().requires_grad_(False)
        self.a, self.b = nn.Linear(13, 2, bias=False), nn.Linear(2, 13, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        logits = self.net(ids)
        return logits + self.b(self.a(logits))


NETS = {"plain": TokenNet, "tied and frozen": Tied, "low rank": LowRank}


def trained(net: nn.Module) -> list[nn.Parameter]:
    return [p for p in net.parameters() if p.requires_grad]


def by_hand(net: nn.Module, batches: list[Any], weights: list[float]) -> Tensor:
    """The contribution of each micro-batch, as rows."""
    rows = []
    for batch, weight in zip(batches, weights, strict=True):
        gradients = torch.autograd.grad(token_loss(net, batch), trained(net))
        rows.append(weight * torch.cat([g.double().flatten() for g in gradients]))
    return torch.stack(rows)


def expected(contributions: Tensor, weights: list[float], samples: float) -> Tensor:
    w = torch.tensor(weights, dtype=torch.float64)
    return torch.stack(
        [
            contributions.sum(0).square().sum(),
            contributions.square().sum(),
            w.sum().square(),
            w.square().sum(),
            w.sum(),
            torch.tensor(samples).double(),
            torch.ones(()).double(),
        ]
    )


def measure(
    net: nn.Module,
    batches: list[Any],
    *,
    told: bool = False,
    scaler: Any = None,
    strategy: Any = None,
    reduction: Any = "mean",
) -> tuple[Tensor, Tensor]:
    """The sums of one window, and its gradient."""
    strategy = strategy or PerToken(loss_reduction=reduction)
    optimizer = torch.optim.SGD(trained(net), lr=0.1)
    accumulator = Accumulator(strategy, module=net, scaler=scaler)
    moments = NoiseMoments(accumulator, optimizer)
    backward = None
    if scaler is not None:
        backward = lambda loss: scaler.scale(loss).backward()  # noqa: E731
    moments.watch()
    if told:
        accumulator.expect(batches)
    for batch in batches:
        penalty = torch.autograd.grad(token_loss(net, batch), trained(net))
        assert penalty  # another backward pass, which is not looked at
        loss = token_loss(net, batch, "mean" if reduction == "mean" else "sum")
        accumulator.backward(loss, batch, backward=backward)
    stats = accumulator.finish(optimizer)
    if scaler is not None:
        scaler.unscale_(optimizer)
    samples = sum(len(batch["ids"]) for batch in batches)
    moments.add(stats, samples=samples)
    gradient = torch.cat([p.grad.flatten() for p in trained(net) if p.grad is not None])
    return moments.table[-1], gradient


def off(found: Tensor, wanted: Tensor) -> float:
    return float((found / wanted - 1).abs().max())


@pytest.mark.parametrize("kind", NETS)
@pytest.mark.parametrize("told", [False, True])
def test_sums_are_those_by_hand(kind: str, told: bool) -> None:
    net, batches = NETS[kind](), micro_batches()
    weights = [float(PerToken().weight(batch)) for batch in batches]
    contributions = by_hand(net, batches, weights)
    row, _ = measure(net, batches, told=told)
    assert off(row, expected(contributions, weights, sum(SIZES))) < CLOSE
    alike = by_hand(net, batches, [1.0] * len(batches))  # the naive weights
    assert off(row[:2], expected(alike, weights, 1)[:2] * 25) > 0.1


@pytest.mark.parametrize("reduction", ["sum", "total"])
@pytest.mark.parametrize("told", [False, True])
def test_sums_of_losses_that_are_sums(reduction: str, told: bool) -> None:
    net, batches = TokenNet(), micro_batches()
    weights = [float(PerToken().weight(batch)) for batch in batches]
    contributions = by_hand(net, batches, weights)
    row, _ = measure(net, batches, told=told, reduction=reduction)
    assert off(row, expected(contributions, weights, sum(SIZES))) < CLOSE


def test_sums_where_all_micro_batches_count_alike() -> None:
    net, batches = TokenNet(), micro_batches()
    contributions = by_hand(net, batches, [1.0] * len(batches))
    row, _ = measure(net, batches, strategy=Uniform())
    wanted = expected(contributions, [1.0] * len(batches), sum(SIZES))
    assert off(row, wanted) < CLOSE


@pytest.mark.parametrize("told", [False, True])
def test_a_gradient_scaler_changes_nothing(told: bool) -> None:
    batches = micro_batches()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    row, _ = measure(TokenNet(), batches, told=told, scaler=scaler)
    plain, _ = measure(TokenNet(), batches, told=told)
    assert off(row, plain) < CLOSE


def test_gradients_not_yet_unscaled_need_the_scale() -> None:
    net, batches = TokenNet(), micro_batches()
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    accumulator = Accumulator(PerToken(), module=net, scaler=scaler)
    moments = NoiseMoments(accumulator, list(net.parameters()))
    rows = []
    for scale in (8.0, 1.0):
        moments.watch()
        for batch in batches:
            loss = token_loss(net, batch)
            accumulator.backward(loss, batch, backward=_scaled(scaler))
        stats = accumulator.finish(list(net.parameters()))
        moments.add(stats, samples=1, scale=scale)
        rows.append(moments.table[-1])
        net.zero_grad()
    plain, _ = measure(TokenNet(), batches)
    assert off(rows[0][:5], plain[:5]) < CLOSE
    assert off(rows[1][:1], plain[:1]) > 10


def _scaled(scaler: Any) -> Any:
    return lambda loss: scaler.scale(loss).backward()


def test_the_gradient_is_the_same_to_the_bit() -> None:
    batches = micro_batches()
    _, gradient = measure(TokenNet(), batches)
    net = TokenNet()
    accumulator = Accumulator(PerToken(), module=net)
    for batch in batches:
        accumulator.backward(token_loss(net, batch), batch)
    accumulator.finish(trained(net))
    plain = torch.cat([p.grad.flatten() for p in trained(net) if p.grad is not None])
    assert torch.equal(gradient, plain)
    assert all(not p._backward_hooks for p in net.parameters())


class Shared(nn.Module):
    """One layer in two checkpoints: reentrant ones add its gradient in two parts."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.embed, self.layer = nn.Embedding(13, 13), nn.Linear(13, 13)
        self._reentrant = reentrant

    def forward(self, ids: Tensor) -> Tensor:
        x: Any = self.embed(ids)
        for _ in range(2):
            x = checkpoint(self.layer, x, use_reentrant=self._reentrant)
        return x


def test_a_gradient_in_parts_is_not_measured() -> None:
    batches = micro_batches()
    torch.manual_seed(0)
    net = Shared(reentrant=False)
    row, _ = measure(net, batches)
    weights = [float(PerToken().weight(batch)) for batch in batches]
    wanted = expected(by_hand(net, batches, weights), weights, sum(SIZES))
    assert off(row, wanted) < CLOSE
    net = Shared(reentrant=True)
    accumulator = Accumulator(PerToken(), module=net)
    moments = NoiseMoments(accumulator, list(net.parameters()))
    moments.watch()
    for batch in batches:
        accumulator.backward(token_loss(net, batch), batch)
    moments.add(accumulator.finish(list(net.parameters())), samples=20)
    assert not moments.table[-1].any()
    assert "use_reentrant=False makes it one" in (moments.why_not or "")


def test_a_large_tensor_is_added_up_without_loss() -> None:
    """A CPU adds up ten million squares of float32 to a thousandth."""
    torch.manual_seed(0)
    gradient = torch.randn(2000, 5000) * torch.rand(2000, 1)
    exact = gradient.double().square().sum()
    assert abs(squared_norm([gradient]) / exact - 1) < CLOSE
    plain = torch.linalg.vector_norm(gradient).double().square()
    assert abs(plain / exact - 1) > 10 * CLOSE


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_numbers_of_16_bits_are_added_up_in_more(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    gradient = (300 * torch.randn(100, 1000)).to(dtype)
    exact = gradient.double().square().sum()
    assert abs(squared_norm([gradient]) / exact - 1) < CLOSE
    plain = torch.linalg.vector_norm(gradient).double().square()
    assert abs(plain / exact - 1) > 100 * CLOSE


def test_parameters_that_an_optimizer_gets_later_are_measured() -> None:
    """As finetuning adds them."""
    net, batches = TokenNet(), micro_batches()
    first, *others = net.parameters()
    optimizer = torch.optim.SGD([first], lr=0.0)
    accumulator = Accumulator(PerToken(), module=net)
    moments = NoiseMoments(accumulator, optimizer)
    rows = []
    for _ in range(2):
        moments.watch()
        for batch in batches:
            accumulator.backward(token_loss(net, batch), batch)
        moments.add(accumulator.finish(optimizer), samples=sum(SIZES))
        rows.append(moments.table[-1])
        net.zero_grad()
        if len(optimizer.param_groups) == 1:
            optimizer.add_param_group({"params": others})
    weights = [float(PerToken().weight(batch)) for batch in batches]
    wanted = expected(by_hand(net, batches, weights), weights, sum(SIZES))
    assert off(rows[1], wanted) < CLOSE
    assert off(rows[0][:2], wanted[:2]) > 0.01  # the control


# ---- what is kept --------------------------------------------------------------------


class Training:
    """A net whose windows can be measured."""

    def __init__(self, last: int = 160) -> None:
        self.net = TokenNet()
        self.accumulator = Accumulator(PerToken(), module=self.net, nonfinite="allow")
        self.moments = NoiseMoments(
            self.accumulator, list(self.net.parameters()), last=last
        )

    def run(self, *batches: dict[str, Tensor], factor: float = 1.0) -> None:
        for batch in batches:
            loss = factor * token_loss(self.net, batch)
            self.accumulator.backward(loss, batch)

    def added(self) -> Tensor:
        stats = self.accumulator.finish(list(self.net.parameters()))
        self.moments.add(stats, samples=sum(SIZES))
        self.net.zero_grad()
        return self.moments.table[-1]

    def window(self, factor: float = 1.0) -> Tensor:
        self.moments.watch()
        self.run(*BATCHES, factor=factor)
        return self.added()


def test_the_last_windows_are_kept_and_resumed() -> None:
    training, resumed = Training(last=3), Training(last=3)
    rows = [training.window(1 + n) for n in range(4)]
    assert torch.equal(training.moments.table, torch.stack(rows[1:]))
    resumed.moments.load_state_dict(copy.deepcopy(training.moments.state_dict()))
    for each in (training, resumed):
        each.window(9.0)
    assert torch.equal(training.moments.table, resumed.moments.table)


def test_a_pass_that_is_run_again_counts_once() -> None:
    training = Training()
    plain = training.window()
    training.moments.watch()
    training.run(*BATCHES[:2])
    kept = training.accumulator.window.copy()
    gradients = [
        p.grad.clone() for p in training.net.parameters() if p.grad is not None
    ]
    training.run(BATCHES[4])  # too much for the memory, say
    for parameter, gradient in zip(training.net.parameters(), gradients, strict=True):
        parameter.grad = gradient
    training.accumulator.rewind(kept)
    training.run(*BATCHES[2:])
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
        training = Training()
        for number in range(8):
            if has_broken and number == 3:
                assert not training.window(factor).any()
            training.window()
        found.append(training.moments.estimate())
    assert found[0] == found[1] is not None


def test_a_dropped_window_leaves_nothing() -> None:
    training = Training()
    plain = training.window()
    training.moments.watch()
    training.run(*BATCHES[:2])
    training.accumulator.drop()
    training.net.zero_grad()
    training.run(*BATCHES)
    assert torch.equal(training.added(), plain)


# ---- wrong use -----------------------------------------------------------------------


def test_wrong_use_is_refused() -> None:
    net, batches = TokenNet(), micro_batches()
    accumulator = Accumulator(PerToken(), module=net)
    with pytest.raises(TrainkitError, match="NoiseMoments last"):
        NoiseMoments(accumulator, net.parameters(), last=0)
    with pytest.raises(TrainkitError, match="A generator"):
        NoiseMoments(accumulator, ())
    moments = NoiseMoments(accumulator, net.parameters())
    accumulator.backward(token_loss(net, batches[0]), batches[0])
    stats = accumulator.finish(list(net.parameters()))
    with pytest.raises(TrainkitError, match="was not watched"):
        moments.add(stats, samples=1)
    moments.watch()
    with pytest.raises(TrainkitError, match="was not finished"):
        moments.add(stats, samples=1)
    assert moments.estimate() is None


def test_sharded_parameters_are_refused() -> None:
    """FSDP1 needs a GPU to run; its wrapper alone does not."""

    class Wrapped(FullyShardedDataParallel):
        def __init__(self, module: nn.Module) -> None:
            nn.Module.__init__(self)
            self._fsdp_wrapped_module = module

    net = TokenNet()
    accumulator = Accumulator(PerToken(), module=net)
    accumulator.module = Wrapped(net)
    with pytest.raises(TrainkitError, match="Wrapped shards them"):
        NoiseMoments(accumulator, net.parameters())
    of_two = DTensor.from_local(torch.ones(2), _mesh(), [Shard(0)], run_check=False)
    with pytest.raises(TrainkitError, match="DTensor shards them"):
        refuse_shards([of_two])
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    moments = NoiseMoments(Accumulator(PerToken(), module=net), optimizer)
    optimizer.param_groups[0]["params"] = [of_two]  # sharded since
    with pytest.raises(TrainkitError, match="DTensor shards them"):
        moments.watch()
    refuse_shards(net.parameters(), net)


def _mesh() -> DeviceMesh:
    return DeviceMesh("cpu", [0], _init_backend=False, _rank=0)


def test_several_terms_are_refused() -> None:
    terms = {"a": PerToken(), "b": Uniform()}
    net = TokenNet()
    with pytest.raises(TrainkitError, match=r"terms \['a', 'b'\]"):
        NoiseMoments(Accumulator(terms, module=net), net.parameters())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_measured_window_on_a_gpu_waits_for_nothing() -> None:
    net = TokenNet().cuda()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    accumulator = Accumulator(PerToken(), module=net)
    moments = NoiseMoments(accumulator, optimizer)
    batches = [{k: v.cuda() for k, v in batch.items()} for batch in micro_batches()]

    def window() -> None:
        moments.watch()
        for batch in batches:
            accumulator.backward(token_loss(net, batch), batch)
        moments.add(accumulator.finish(optimizer), samples=20)
        optimizer.step()

    window()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(6):
            window()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    row, _ = measure(TokenNet(), micro_batches())
    on_gpu, _ = measure(TokenNet().cuda(), batches)
    assert off(on_gpu.cpu(), row) < 1e-4
