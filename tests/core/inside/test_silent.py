"""What would give another gradient without a word is refused, or told."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.core.inside.common import (
    EXACT,
    NAIVE,
    WIDTH,
    Net,
    batch,
    gradient,
    nt_xent,
    off_by,
    twin,
)
from trainkit import Chunked
from trainkit.core.inside import joined
from trainkit.core.inside.compare import Compared
from trainkit.core.inside.rows import are_close
from trainkit.errors import TrainkitError

X, LABELS = batch(16)


def step(net: Any) -> Tensor:
    return nt_xent(net(X), LABELS)


def off(net: nn.Module, make: Callable[[Any], Tensor] = step, size: int = 4) -> float:
    """How far the gradient of chunks is from that of all rows."""
    _, wanted = gradient(net, make)
    with Chunked(net, size=size):
        _, found = gradient(net, make)
    return off_by(found, wanted)


# ---- a backward pass that sees rows --------------------------------------------------


class Normed(torch.autograd.Function):
    """Its gradient has length 1 over all rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *given: Tensor) -> Tensor:
        return given[0] / given[0].norm()


class Balanced(torch.autograd.Function):
    """Adds a loss to a graph, as some mixtures of experts do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *given: Tensor) -> tuple[Tensor, Tensor]:
        return given[0], torch.ones_like(given[0].sum())


def normed(h: Tensor) -> Tensor:
    return Normed.apply(h)  # type: ignore[no-any-return]


def balanced(h: Tensor) -> Tensor:
    return Balanced.apply(h, 0.01 * h.mean(0).square().sum())  # type: ignore[no-any-return]


def hooked(h: Tensor) -> Tensor:
    if h.requires_grad:
        h.register_hook(lambda gradient: gradient / gradient.norm())
    return h


def centred(h: Tensor) -> Tensor:
    """Straight through: another gradient than its values say."""
    middle = h - h.mean(0)
    return h.detach() + middle - middle.detach()


class Between(Net):
    """Does something between its body and its head."""

    def __init__(self, change: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.change = change

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.change(self.body(x)))


CHANGES = [normed, balanced, hooked, centred]


@pytest.mark.parametrize("change", CHANGES)
def test_a_backward_pass_that_sees_rows_is_refused(
    change: Callable[[Tensor], Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    net = twin(Between(change))
    with pytest.raises(TrainkitError, match="is not the sum of their gradients"):
        off(net)
    monkeypatch.setattr(Compared, "gradients", lambda *_: None)
    assert off(net) > NAIVE  # the control: its forward pass shows nothing


def test_so_is_that_of_a_module_whose_arguments_alone_train(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Only(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return normed(x).tanh()

    net = nn.ModuleDict({"one": nn.Linear(WIDTH, 8), "two": Only()}).double()

    def found() -> float:
        _, wanted = gradient(net, lambda n: nt_xent(n["two"](n["one"](X)), LABELS))
        with Chunked(net["two"], size=4):
            _, cut = gradient(net, lambda n: nt_xent(n["two"](n["one"](X)), LABELS))
        return off_by(cut, wanted)

    with pytest.raises(TrainkitError, match="is not the sum of their gradients"):
        found()
    monkeypatch.setattr(Compared, "gradients", lambda *_: None)
    assert found() > NAIVE


def test_gradients_of_rows_that_are_their_own_pass() -> None:
    class Reversed(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *given: Tensor) -> Tensor:
            return -given[0]

    assert off(twin(Between(Reversed.apply))) <= EXACT
    assert off(twin(Net(dropout=0.0)).float(), lambda n: n(X.float()).std()) <= 2e-5


# ---- masks, places and pairs ---------------------------------------------------------


@pytest.mark.parametrize("mask", [-1e9, -torch.inf, torch.finfo(torch.float32).min])
def test_a_mask_does_not_say_what_rounding_is(mask: float) -> None:
    one = torch.randn(8, 5)
    one[:, 3] = mask
    other = one.clone()
    assert are_close(one, other * (1 + 1e-7))
    other[2, 1] += 1e-3
    assert not are_close(one, other)


def test_many_large_values_are_no_mask() -> None:
    one = 1e8 * torch.randn(8, 5)
    assert are_close(one, one + 10)
    assert not are_close(one, one * 1.001)


class Trimmed(Net):
    """Leaves out what is padding in all rows, and takes the mean of the rest."""

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x[:, : lengths.max()]).mean(1)


def test_links_between_rows_of_any_two_chunks_are_found() -> None:
    net, lengths = twin(Trimmed()), torch.full((16,), 5)
    lengths[8:12] = 3  # all rows of the third chunk
    x = torch.randn(16, 5, WIDTH, dtype=torch.float64)
    with Chunked(net, size=4), pytest.raises(TrainkitError, match="for 8 rows is not"):
        net(x, lengths)


# ---- outputs without rows ------------------------------------------------------------


class Warming(Net):
    """Returns a number of all its rows; it is 0 at first."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.zeros(())

    def forward(self, x: Tensor) -> Any:
        out = super().forward(x)
        return out, self.weight * out.square().mean()


def warmed(net: Any) -> Tensor:
    out, more = net(X)
    return nt_xent(out, LABELS) + more


def test_a_number_of_all_rows_is_refused_in_any_call() -> None:
    net = twin(Warming())
    with Chunked(net, size=4):
        for _ in range(6):
            gradient(net, warmed)
        net.weight = torch.ones(())
        with pytest.raises(TrainkitError, match=r"'1' has no rows, and must be the"):
            gradient(net, warmed)


def test_on_a_device_the_next_call_says_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joined, "AT_HAND", ())
    net = twin(Warming())
    with Chunked(net, size=4):
        for _ in range(6):
            gradient(net, warmed)
        net.weight = torch.ones(())
        gradient(net, warmed)  # nobody has waited
        with pytest.raises(TrainkitError, match="in the call before this one"):
            gradient(net, warmed)
        net.weight = torch.zeros(())
        gradient(net, warmed)  # said once


# ---- state ---------------------------------------------------------------------------


class Behind(Net):
    """Moves a buffer behind torch's back."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        found, mean = x.detach().mean(0), self.get_buffer("mean")
        if self.how == "data":
            mean.data.mul_(0.9).add_(found)
        elif self.how == "other data":
            mean.data = 0.9 * mean.data + found
        else:
            mean.numpy()[...] += found.numpy()
        return super().forward(x)


@pytest.mark.parametrize("how", ["data", "other data", "numpy"])
def test_buffers_that_move_behind_the_back_of_torch_are_refused(how: str) -> None:
    net = twin(Behind(how))
    with Chunked(net, size=4), pytest.raises(TrainkitError, match="it moved mean"):
        net(X)


# ---- what a forward puts into its arguments ------------------------------------------


def told(act: Callable[[], object]) -> list[str]:
    """The warnings of something."""
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        act()
    return [str(each.message) for each in heard]


class Writing(Net):
    """Puts something into its argument."""

    def __init__(self, returns: bool = False) -> None:
        super().__init__()
        self.returns = returns

    def forward(self, given: Any) -> Any:  # pyright: ignore
        given["body"] = self.body(given["x"])
        return given if self.returns else self.head(given["body"])


class Context:
    """Collects numbers."""

    def __init__(self) -> None:
        self.found: list[float] = []


class Noting(Net):
    """Notes a number of its rows in an object."""

    def forward(self, x: Tensor, context: Any) -> Tensor:  # type: ignore[override]
        context.found.append(float(x.mean()))
        return super().forward(x)


def test_what_a_forward_puts_into_its_arguments_is_told() -> None:
    def run(net: Any, *given: Any) -> list[str]:
        with Chunked(net, size=4):
            return told(lambda: net(*given))

    (text,) = run(twin(Writing()), {"x": X})
    assert "puts values into its arguments, ['body']" in text.replace('"', "'")
    assert not run(twin(Writing(returns=True)), {"x": X})  # it is there
    (text,) = run(twin(Noting()), X, Context())
    assert "Context" in text


def test_a_pair_of_numbers_is_no_list_of_two_rows() -> None:
    class Sized(Net):
        def forward(self, x: Tensor, size: tuple[int, int]) -> Tensor:  # type: ignore[override]
            return super().forward(x) * (size[0] - size[1])

    net = twin(Sized())
    with Chunked(net, size=1):
        net(X, (3, 5))
        net(X[:2], (3, 5))
    with Chunked(net, size=1), pytest.raises(TrainkitError, match="size has 2 entries"):
        net(X[:2], (3, 5))  # it cannot be told
    with Chunked(net, size=1, shared=["size"]):
        net(X[:2], (3, 5))
