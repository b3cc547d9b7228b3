"""What would give another gradient without a word is refused, and what is unusual but
right is exact."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.core.inside.common import (
    CLASSES,
    EXACT,
    LABELS,
    NAIVE,
    WIDTH,
    Net,
    X,
    gradient,
    nt_xent,
    off,
    refused,
    step,
    twin,
)
from trainkit import Chunked, TrainkitError
from trainkit.core.inside.check import Trial

SEQUENCES = torch.randn(16, 7, WIDTH, dtype=torch.float64)


def function(backward: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """A function whose values are its argument, with a backward pass of its own."""

    class Own(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *given: Tensor) -> Any:
            return backward(given[0])

    return Own.apply  # type: ignore[return-value]


def between(change: Callable[[Tensor], Tensor]) -> Any:
    """A net that does something between its body and its head."""
    return twin(Net(lambda net, x: net.head(change(net.body(x)))))


# ---- a backward pass that sees rows --------------------------------------------------


class Balanced(torch.autograd.Function):
    """Adds a loss to a graph, as some mixtures of experts do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *given: Tensor) -> tuple[Tensor, Tensor]:
        return given[0], torch.ones_like(given[0].sum())


def hooked(h: Tensor) -> Tensor:
    if h.requires_grad:
        h.register_hook(lambda gradient: gradient / gradient.norm())
    return h


def centred(h: Tensor) -> Tensor:
    """Straight through: another gradient than its values say."""
    middle = h - h.mean(0)
    return h.detach() + middle - middle.detach()


def beside(h: Tensor) -> Tensor:
    """Nothing, whose gradient depends on rows."""
    return h.square().mean() - h.square().mean().detach()


MIXING: dict[str, Any] = {
    "normed": function(lambda given: given / given.norm()),
    "balanced": lambda h: Balanced.apply(h, 0.01 * h.mean(0).square().sum()),
    "hooked": hooked,
    "centred": centred,
}


@pytest.mark.parametrize(
    ("change", "arguments_alone"),
    [*((change, False) for change in MIXING), ("normed", True)],
)
def test_a_backward_pass_that_sees_rows_is_refused(
    change: str, arguments_alone: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    net: Any = between(MIXING[change])
    if arguments_alone:  # what is cut has no parameters
        net = nn.Sequential(nn.Linear(WIDTH, CLASSES), nn.Tanh()).double()
        plain = net[1].forward
        net[1].forward = lambda x: plain(MIXING[change](x))
    cut = net[1] if arguments_alone else net
    with pytest.raises(TrainkitError, match="is not the sum of their gradients"):
        off(net, of=cut)
    monkeypatch.setattr(Trial, "has_mixed_gradients", lambda *_: False)
    assert off(net, of=cut) > NAIVE  # the control: its forward pass shows nothing


def test_a_value_whose_gradient_sees_rows_is_refused(monkeypatch: Any) -> None:
    net = twin(Net(lambda net, x: (net.plain(x), beside(net.body(x)))))

    def both(net: Any) -> Tensor:
        out, more = net(X)
        return nt_xent(out, LABELS) + more

    with pytest.raises(TrainkitError, match="is not the sum of their gradients"):
        off(net, both)
    monkeypatch.setattr(Trial, "has_mixed_gradients", lambda *_: False)
    assert off(net, both) > NAIVE


def test_what_backward_passes_draw_is_never_the_same() -> None:
    """As in Shake-Shake."""
    drawn: list[Tensor] = []

    def shaken(given: Tensor) -> Tensor:
        drawn.append(torch.rand(len(given), 1))
        return drawn[-1] * given

    net = between(function(shaken))
    with Chunked(net, size=4):
        for _ in range(3):
            step(net).backward()
    numbers = torch.cat([each.flatten() for each in drawn])
    # The second step looks at rows once more: their draws are put back.
    assert len(numbers[-44:].unique()) == 44


# ---- what a forward pass moves -------------------------------------------------------


def decayed(mean: Tensor, x: Tensor) -> Tensor:
    return mean.mul_(0.9).add_(x.detach().mean(0))


MOVES: dict[str, tuple[Callable[[Any, Tensor], Any], str]] = {
    "buffer": (lambda net, x: decayed(net.mean, x), "moved mean"),
    "binding": (lambda net, x: setattr(net, "mean", 0.9 * net.mean), "moved mean"),
    "weight": (
        torch.no_grad()(lambda net, x: net.head.weight.clamp_(-1, 1)),
        r"moved head\.weight",
    ),
    "argument": (lambda net, x: x.mul_(2), "arguments in place"),
    # behind torch's back
    "data": (lambda net, x: decayed(net.mean.data, x), "moved mean"),
    "other data": (
        lambda net, x: setattr(net.mean, "data", decayed(net.mean.data.clone(), x)),
        "moved mean",
    ),
    "numpy": (lambda net, x: net.mean.numpy().__iadd__(0.1), "moved mean"),
}


def moving(net: Any, x: Tensor) -> Tensor:
    """Moves something, as its attribute says."""
    if net.move:
        MOVES[net.move][0](net, x)
    return net.plain(x + net.mean.detach() * 0)


@pytest.mark.parametrize("late", [0, 5])
@pytest.mark.parametrize("move", MOVES)
def test_a_forward_pass_that_moves_something_is_refused(move: str, late: int) -> None:
    net, x = twin(Net(moving, mean=torch.zeros(WIDTH), move="")), X.clone()
    with Chunked(net, size=8):
        for _ in range(late):
            nt_xent(net(x), LABELS).backward()
        net.move = move
        with pytest.raises(TrainkitError, match=MOVES[move][1]):
            net(x)
    assert torch.equal(x, X)


def test_an_argument_that_is_changed_in_a_later_call_is_refused() -> None:
    net = twin(Net(lambda net, x: net.plain(x.mul_(2) if net.moves else x), moves=[]))
    with Chunked(net, size=8):
        for _ in range(5):
            step(net)
        net.moves.append(True)  # which makes no other kind of call
        with pytest.raises(TrainkitError, match="must not change its arguments in pl"):
            net(X.clone())


def test_a_cache_that_grows_is_filled_before() -> None:
    def growing(net: Any, x: Tensor) -> Tensor:
        if len(net.table) < x.shape[1]:
            net.table = torch.linspace(0, 1, x.shape[1])
        return net.plain(x * net.table[: x.shape[1], None]).flatten(1)

    net, x = twin(Net(growing, table=torch.zeros(0))), SEQUENCES[:, :3]
    refused(net, "moved table. .* fill it before, by a call with the longest rows", x)
    net(SEQUENCES)
    assert off(net, lambda net: net(x).std()) <= EXACT


def test_parametrizations() -> None:
    net = twin(Net())
    nn.utils.parametrizations.weight_norm(net.head)
    assert off(net) <= EXACT
    with nn.utils.parametrize.cached():
        refused(net, "gradient in")
    net = twin(Net())
    nn.utils.spectral_norm(net.head)  # it leaves its weight, with its graph
    refused(net.eval(), "spectral_norm from torch.nn.utils.parametrizations")
    net = twin(Net())
    nn.utils.parametrizations.spectral_norm(net.head)
    refused(net, r"moved head.*_u")
    assert off(net.eval()) <= EXACT


# ---- rows that begin to see each other -----------------------------------------------


def switched(net: Any, x: Tensor, share: float = 0.0) -> Tensor:
    """Its rows see each other once a flag or a share is on."""
    out = net.plain(x)
    return out + (net.mixes + share) * out.mean(0)


@pytest.mark.parametrize(("begins", "found"), [(3, 4), (4, 4), (5, 8), (9, 16)])
def test_what_changes_is_found_within_twice_the_time(begins: int, found: int) -> None:
    net = twin(Net(switched, mixes=False))
    with Chunked(net, size=4):
        for number in range(1, found):
            share = 0.5 * (number >= begins)
            gradient(net, lambda n, share=share: nt_xent(n(X, share), LABELS))
        with pytest.raises(TrainkitError, match="depends on other rows"):
            gradient(net, lambda n: nt_xent(n(X, 0.5), LABELS))


def test_a_flag_makes_another_kind_of_call_which_is_looked_at_at_once() -> None:
    net = twin(Net(switched, mixes=False))
    with Chunked(net, size=4):
        for _ in range(4):
            gradient(net, step)
        net.mixes = True
        with pytest.raises(TrainkitError, match="depends on other rows"):
            gradient(net, step)


# ---- a generator of its own ----------------------------------------------------------


def private(net: Any, x: Tensor) -> Tensor:
    if not net.draws:
        return net.plain(x)
    if isinstance(net.own, np.random.Generator):
        return net.plain(x * torch.from_numpy(net.own.random((len(x), 1))))
    own = net.own[0] if isinstance(net.own, list) else net.own
    return net.plain(x * torch.rand((len(x), 1), generator=own, dtype=x.dtype))


OWN = [torch.Generator, lambda: [torch.Generator()], lambda: np.random.default_rng(5)]


@pytest.mark.parametrize("late", [0, 5])
@pytest.mark.parametrize("make", OWN)
def test_a_generator_of_its_own_is_refused(make: Any, late: int) -> None:
    net = twin(Net(private, own=make(), draws=not late))
    with Chunked(net, size=8):
        for _ in range(late):
            gradient(net, step)
        net.draws = True
        with pytest.raises(TrainkitError, match="another one each time"):
            step(net)


def test_transforms_of_torch_func_within_are_refused() -> None:
    def sloped(net: Any, x: Tensor) -> Tensor:
        slopes = torch.func.vmap(torch.func.jacrev(net.body))(x)
        return net.head(slopes.sum(-1))

    refused(twin(Net(sloped)), "does not run on fewer rows: .* saved tensor hooks")


# ---- unusual, and right --------------------------------------------------------------


def caching(net: Any, x: Tensor) -> Tensor:
    """It keeps a table that no row changes."""
    if net.table is None or len(net.table) != x.shape[1]:
        net.table = torch.linspace(0, 1, x.shape[1], dtype=x.dtype)
    return net.plain(x + net.table)


def only_trains(net: Any, x: Tensor) -> Tensor:
    if not net.training:
        raise RuntimeError("it only trains")
    return net.plain(x)


@torch.enable_grad()
def inner(weight: Tensor, x: Tensor) -> Tensor:
    loss = (x @ weight).tanh().sum()
    slope = torch.autograd.grad(loss, weight, create_graph=True)[0]
    return x @ (weight - 0.1 * slope / len(x))


def stepping(net: Any, x: Tensor) -> Tensor:
    """Its backward pass holds another one, over the same weight."""
    parts = [checkpoint(inner, net.w, row, use_reentrant=False) for row in x.split(1)]
    return torch.cat(parts)  # type: ignore[arg-type]


RIGHT: dict[str, Callable[[], Any]] = {
    "sparse operators": lambda: Net(
        lambda net, x: net.plain((net.mesh @ x.T).T), mesh=torch.eye(WIDTH).to_sparse()
    ),
    "a pass within": lambda: Net(stepping, w=nn.Parameter(torch.eye(WIDTH))),
    "a table": lambda: Net(caching, table=None),
    "another sign backwards": lambda: between(function(lambda given: -given)),
    "a leaf made anew": lambda: Net(
        lambda net, x: net.plain(x + torch.zeros_like(x).requires_grad_())
    ),
}


@pytest.mark.parametrize("kind", RIGHT)
def test_what_is_unusual_and_right_runs_without_a_word(kind: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert off(twin(RIGHT[kind]()), times=4) <= EXACT


def test_half_precision_within_is_no_mixing() -> None:
    def half(net: Any, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return net.plain(x).float()

    for seed in range(4):
        with Chunked(Net(half, seed=seed), size=4) as net:
            net(X.float())


def test_a_module_that_draws_and_cannot_evaluate() -> None:
    net = twin(Net(only_trains, dropout=0.5))
    with Chunked(net, size=4):
        gradient(net, step)


@pytest.mark.parametrize("held", [{"calls": 0}, {}])
def test_a_counter_is_as_before_once_rows_were_looked_at(held: dict[str, int]) -> None:
    def counting(net: Any, x: Tensor) -> Tensor:
        net.calls = getattr(net, "calls", 0) + 1
        return net.plain(x)

    net = twin(Net(counting, **held))
    with Chunked(net, size=4):
        gradient(net, step)
    assert net.calls == 6  # once for each chunk
