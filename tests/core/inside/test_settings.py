"""Numbers, hooks and draws on which a forward depends, and that change on the way."""

from __future__ import annotations

import random
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.core.inside.common import (
    EXACT,
    NAIVE,
    Net,
    batch,
    gradient,
    nt_xent,
    off_by,
    twin,
)
from trainkit import Chunked
from trainkit.core.inside import moment
from trainkit.errors import TrainkitError

X, LABELS = batch(16)


def step(net: Any, *more: Any) -> Tensor:
    return nt_xent(net(X, *more), LABELS)


class Switched(Net):
    """Its rows see each other once a flag is on."""

    mixes: bool = False

    def __init__(self) -> None:
        super().__init__()
        self.mixes, self.heat = False, 1.0

    def forward(self, x: Tensor, share: float = 0.0) -> Tensor:  # type: ignore[override]
        out = super().forward(x) * self.heat
        return out + (self.mixes + share) * out.mean(0)


def test_a_flag_that_changes_is_a_reason_to_look_again() -> None:
    net = twin(Switched())
    with Chunked(net, size=4):
        for _ in range(5):
            gradient(net, step)
        net.mixes = True
        with pytest.raises(TrainkitError, match="depends on other rows"):
            gradient(net, step)


def test_so_is_a_number_that_is_an_argument() -> None:
    net = twin(Switched())
    with Chunked(net, size=4):
        for _ in range(5):
            gradient(net, lambda n: step(n, 0.0))
        with pytest.raises(TrainkitError, match="depends on other rows"):
            gradient(net, lambda n: step(n, 0.5))


def test_a_number_that_changes_in_each_call_is_not_looked_at_in_each() -> None:
    class Counted(Switched):
        calls = 0

        def forward(self, x: Tensor, share: float = 0.0) -> Tensor:  # type: ignore[override]
            type(self).calls += 1
            return super().forward(x, share)

    net = twin(Counted())
    with Chunked(net, size=4):
        before = 0
        for number in range(40):
            net.heat = 1 - number / 100
            before = Counted.calls
            gradient(net, step)
    assert Counted.calls - before < 10  # the last one: two passes of four chunks


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


def test_a_counter_of_the_forward_is_told_and_probes_do_not_count() -> None:
    class Counter(Net):
        def __init__(self) -> None:
            super().__init__()
            self.calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return super().forward(x)

    net = twin(Counter())
    with Chunked(net, size=4, keep=0), pytest.warns(UserWarning, match="in calls, wh"):
        gradient(net, step)
    assert net.calls == 4  # once for each chunk


# ---- hooks ---------------------------------------------------------------------------


def test_a_hook_on_a_parameter_that_comes_after_the_forward_sees_the_sum() -> None:
    net, seen = twin(Net()), []
    _, wanted = gradient(net, step)
    with Chunked(net, size=4):
        for _ in range(3):
            gradient(net, step)
        net.zero_grad()
        loss = step(net)
        hook = net.head.weight.register_hook(seen.append)
        loss.backward()
        hook.remove()
    (found,) = seen
    assert (
        off_by(torch.cat([p.grad.flatten() for p in net.parameters()]), wanted) <= EXACT
    )
    assert off_by(found, net.head.weight.grad) <= EXACT


@pytest.mark.filterwarnings("ignore:Full backward hook")
def test_a_backward_hook_within_is_told_whenever_it_comes() -> None:
    net = twin(Net())
    with Chunked(net, size=4):
        for _ in range(3):
            gradient(net, step)
        net.body.register_full_backward_hook(lambda *_: None)
        with pytest.warns(UserWarning, match="hooks of body run for each chunk"):
            gradient(net, step)
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message="trainkit")
            gradient(net, step)  # said once


# ---- draws ---------------------------------------------------------------------------


class Dropping(Net):
    """Leaves out a layer of all rows, or of some."""

    def __init__(self, how: str) -> None:
        super().__init__(dropout=0.3)
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "rows":
            keeps = (torch.rand(len(x), 1) < 0.5).to(x)
        elif self.how == "each row":
            keeps = torch.stack([torch.rand(1) < 0.5 for _ in x]).to(x)
        elif self.how == "torch":
            keeps = (torch.rand(1) < 0.5).to(x)
        else:
            keeps = torch.tensor(random.random() < 0.5).to(x)
        return super().forward(x * keeps)


def warned(net: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as heard, Chunked(net, size=4):
        warnings.simplefilter("always")
        net(X)
    return [str(each.message) for each in heard]


@pytest.mark.parametrize(
    ("how", "what"), [("torch", "aten.rand.default of shape [1]"), ("host", "random")]
)
def test_a_coin_for_all_rows_is_told(how: str, what: str) -> None:
    (text,) = warned(twin(Dropping(how)))
    assert f"random numbers that do not belong to a row: {what}. All rows" in text


@pytest.mark.parametrize("how", ["rows", "each row"])
def test_draws_of_rows_are_not(how: str) -> None:
    assert not warned(twin(Dropping(how)))


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
    class Shaking(Net):
        def forward(self, x: Tensor) -> Tensor:
            return self.head(Shaken.apply(self.body(x)))  # type: ignore[no-any-return]

    net = twin(Shaking())
    with Chunked(net, size=4):
        step(net).backward()
        Shaken.drawn.clear()
        for _ in range(2):
            step(net).backward()
    numbers = torch.cat([each.flatten() for each in Shaken.drawn])
    # The second step looks at rows once more: their draws are put back.
    assert len(numbers[-32:].unique()) == 32
