"""What would give another gradient without a word is refused."""

from __future__ import annotations

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
from trainkit.core.inside import moment
from trainkit.core.inside.closeness import are_close
from trainkit.core.inside.trial import Trial
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
    monkeypatch.setattr(Trial, "has_mixed_gradients", lambda *_: False)
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
    monkeypatch.setattr(Trial, "has_mixed_gradients", lambda *_: False)
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
    with (
        Chunked(net, size=4),
        pytest.raises(TrainkitError, match="depends on other rows"),
    ):
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


# ---- rows that begin to see each other -----------------------------------------------


class Switched(Net):
    """Its rows see each other once a flag or a share is on."""

    mixes: bool = False

    def __init__(self) -> None:
        super().__init__()
        self.mixes, self.heat = False, 1.0

    def forward(self, x: Tensor, share: float = 0.0) -> Tensor:  # type: ignore[override]
        out = super().forward(x) * self.heat
        return out + (self.mixes + share) * out.mean(0)


@pytest.mark.parametrize(("begins", "found"), [(3, 4), (4, 4), (5, 8), (9, 16)])
def test_what_changes_on_the_way_is_found_within_twice_the_time(
    begins: int, found: int
) -> None:
    net = twin(Switched())
    with Chunked(net, size=4):
        for number in range(1, found):
            gradient(
                net, lambda n, on=number >= begins: nt_xent(n(X, 0.5 * on), LABELS)
            )
        with pytest.raises(TrainkitError, match="depends on other rows"):
            gradient(net, lambda n: nt_xent(n(X, 0.5), LABELS))


def test_a_flag_makes_another_kind_of_call_which_is_looked_at_at_once() -> None:
    net = twin(Switched())
    with Chunked(net, size=4):
        for _ in range(4):
            gradient(net, step)
        net.mixes = True
        with pytest.raises(TrainkitError, match="depends on other rows"):
            gradient(net, step)


def test_a_number_that_changes_before_the_backward_pass_is_put_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    net = twin(Switched())
    _, wanted = gradient(net, step)

    def found() -> Tensor:
        net.zero_grad()
        loss = step(net)
        net.heat = 0.5
        loss.backward()
        assert net.heat == 0.5
        net.heat = 1.0
        return torch.cat([p.grad.flatten() for p in net.parameters()])

    with Chunked(net, size=4, keep=0):
        for _ in range(4):
            assert off_by(found(), wanted) <= EXACT
        monkeypatch.setattr(moment, "put_back", lambda *_: None)
        assert off_by(found(), wanted) > NAIVE  # the control


def test_a_counter_is_as_before_once_rows_were_looked_at() -> None:
    class Counter(Net):
        def __init__(self) -> None:
            super().__init__()
            self.calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return super().forward(x)

    net = twin(Counter())
    with Chunked(net, size=4, keep=0):
        gradient(net, step)
    assert net.calls == 4  # once for each chunk


class Shaken(torch.autograd.Function):
    """Draws in its backward pass, as Shake-Shake does."""

    drawn: list[Tensor] = []

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *given: Tensor) -> Tensor:
        share = torch.rand(len(given[0]), 1)
        Shaken.drawn.append(share)
        return share * given[0]


def test_what_backward_passes_draw_is_never_the_same() -> None:
    net = twin(Between(Shaken.apply))
    with Chunked(net, size=4):
        step(net).backward()
        Shaken.drawn.clear()
        for _ in range(2):
            step(net).backward()
    numbers = torch.cat([each.flatten() for each in Shaken.drawn])
    # The second step looks at rows once more: their draws are put back.
    assert len(numbers[-32:].unique()) == 32


@pytest.mark.parametrize("place", ["tensor", "list", "dict"])
def test_a_term_left_in_an_attribute_is_refused(place: str) -> None:
    class Leaving(Net):
        left: Any = None

        def forward(self, x: Tensor) -> Tensor:
            out = super().forward(x)
            term = out.softmax(-1).mean(0).square().sum()
            self.left = {"tensor": term, "list": [term], "dict": {"a": term}}[place]
            return out

    net = twin(Leaving())
    with Chunked(net, size=4), pytest.raises(TrainkitError, match="leaves tensors"):
        net(X)


def test_a_table_that_no_row_changes_may_be_kept() -> None:
    class Caching(Net):
        table: Tensor | None = None

        def forward(self, x: Tensor) -> Tensor:
            if self.table is None or len(self.table) != x.shape[1]:
                self.table = torch.linspace(0, 1, x.shape[1], dtype=x.dtype)
            return super().forward(x + self.table)

    assert off(twin(Caching())) <= EXACT
