"""What stands around a call: arguments, outputs, modes, hooks, copies, other calls."""

from __future__ import annotations

import copy
import pickle
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.core.tape.common import EXACT, gradients, images, off_by, state, summed
from tests.core.tape.ways import Case, Trap
from tests.zoo.conv_nets import ResNet, pooled
from trainkit import exact_batch_norm
from trainkit.core.tape.rows import NumberOfRows, chunk_sizes
from trainkit.errors import TrainkitError

X = images(9)


def pair(make: Any = Trap) -> tuple[Any, Any, Any]:
    """A net, one like it, and the first in chunks."""
    torch.manual_seed(0)
    own = make().double()
    big = copy.deepcopy(own)
    return own, big, exact_batch_norm(own, size=4)


def compare(make: Any, call: Any = lambda net, x: net(x), x: Tensor = X) -> None:
    own, big, net = pair(make)
    for _ in range(2):
        for each in (big, net):
            torch.manual_seed(1)
            summed([call(each, x)]).backward()
    assert off_by(gradients(own), gradients(big)) <= EXACT
    assert off_by(state(own), state(big)) <= EXACT


# ---- arguments and outputs -----------------------------------------------------------


class Sequence(nn.Module):
    """Layers of torch between two BatchNorms over the steps of sequences."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        parts: dict[str, Any] = {
            "lstm": lambda: nn.LSTM(5, 5, 2, batch_first=True),
            "gru": lambda: nn.GRU(5, 5),
            "encoder": lambda: nn.TransformerEncoderLayer(5, 1, 9, batch_first=True),
            "embedding": lambda: nn.Embedding(9, 5),
        }
        self.kind, self.part = kind, parts[kind]()
        if kind == "encoder":
            self.part.dropout.p = self.part.dropout1.p = self.part.dropout2.p = 0.0
            self.part.self_attn.dropout = 0.0
        self.one, self.two = nn.BatchNorm1d(5), nn.BatchNorm1d(5)

    def forward(self, x: Tensor) -> Tensor:
        if self.kind != "embedding":
            x = self.one(x.transpose(1, 2)).transpose(1, 2)
        if self.kind == "gru":
            x = self.part(x.transpose(0, 1))[0].transpose(0, 1)
        else:
            found = self.part(x)
            x = found[0] if self.kind == "lstm" else found
        return self.two(x.transpose(1, 2)).square().mean(2)


@pytest.mark.parametrize("kind", ["lstm", "gru", "encoder", "embedding"])
def test_layers_of_torch(kind: str) -> None:
    x = torch.randn(9, 6, 5, dtype=torch.float64)
    words = torch.arange(54).view(9, 6) % 9
    compare(lambda: Sequence(kind), x=words if kind == "embedding" else x)


def test_arguments_with_rows_and_without() -> None:
    class Takes(Trap):
        def forward(self, x: Any, scale: Any = None) -> Any:
            hidden = self.one(x["x"]) * x["w"][:, None, None, None]
            return self.fc(pooled(self.two(hidden * scale)))

    scale = torch.rand(4, 1, 1, dtype=torch.float64, requires_grad=True)
    weights = torch.linspace(0, 1, 9, dtype=torch.float64)
    batch = {"x": X, "w": weights, "name": "any"}
    compare(Takes, lambda net, x: net(batch, scale=scale))
    assert scale.grad is not None


@dataclass
class Output:
    out: Tensor
    number: int
    more: list[Any]


def test_outputs_are_those_of_the_batch() -> None:
    class Gives(Trap):
        def forward(self, x: Tensor) -> Any:
            hidden = self.one(x)
            self.number = x.shape[0]
            best = hidden > 0
            return Output(super().forward(x), x.shape[0], [hidden, x, best, None, "a"])

    own, big, net = pair(Gives)
    found, wanted = net(X), big(X)
    mean = Case(lambda net, x: x.mean(), is_whole=True).make()
    with pytest.raises(TrainkitError, match="returns a tensor of shape"):
        exact_batch_norm(mean, size=4)(X)
    assert found.number == wanted.number == own.number == 9
    assert type(found.number) is int
    assert int(own.number) == own.number + 0 == 9
    assert len(torch.zeros(own.number)) == 9
    assert found.more[1] is X
    assert found.more[3:] == [None, "a"]
    assert torch.equal(found.more[2], wanted.more[2])
    assert not found.more[2].requires_grad
    for each in (found, wanted):
        summed([each.out, each.more[0]]).backward()
    assert off_by(gradients(own), gradients(big)) <= EXACT


# ---- modes ---------------------------------------------------------------------------


def test_without_gradients_and_in_evaluation() -> None:
    own, big, net = pair()
    with torch.no_grad():
        assert off_by([net(X)], [big(X)]) <= EXACT
    assert off_by(state(own), state(big)) <= EXACT
    net.eval()
    assert off_by([net(X)], [big.eval()(X)]) <= EXACT
    net.train()
    for each in (net, big):
        each.train()
    with torch.inference_mode():
        assert off_by([net(X)], [big(X)]) <= EXACT
    assert off_by(state(own), state(big)) <= EXACT
    with pytest.raises(TrainkitError, match=r"transform of torch\.func"):
        torch.func.grad(lambda x: net(x).sum())(X)


def test_a_forward_that_sets_the_mode_itself() -> None:
    class Trains(Trap):
        def forward(self, x: Tensor) -> Any:
            with torch.enable_grad():
                return super().forward(x)

    own, big, net = pair(Trains)
    for each in (net, big):
        with torch.no_grad():
            out = each(X)
        summed([out]).backward()
    assert off_by(gradients(own), gradients(big)) <= EXACT


def with_other_type(net: Any, x: Tensor) -> Tensor:
    torch.set_default_dtype(torch.float64)
    x = x + torch.zeros(x.shape[0], 1, 1, 1)
    torch.set_default_dtype(torch.float32)
    return x


def with_other_dimensions(net: Any, x: Tensor) -> Tensor:
    return x * x.mean((1, 2, 3))[:, None].squeeze()[..., None, None, None]


@pytest.mark.parametrize(
    ("between", "said"),
    [
        (with_other_type, "zeros returns float32"),
        (with_other_dimensions, r"squeeze .* \[2\] for 2 rows, \[\] for 1"),
    ],
)
def test_types_that_differ_between_chunks_are_refused(between: Any, said: str) -> None:
    own = Case(between).make()
    with pytest.raises(TrainkitError, match=said):
        exact_batch_norm(own, size=2)(X)


def test_what_trains_may_change_between_calls() -> None:
    own, big, net = pair()
    for is_on in (False, True):
        for each in (own, big):
            each.one.requires_grad_(is_on)
            each.zero_grad()
        for each in (net, big):
            each(X).square().sum().backward()
        assert off_by(gradients(own), gradients(big)) <= EXACT
        for each in (own, big):
            each.two[1].eval()


def test_autocast_around_a_call_leaves_no_weights_without_a_graph() -> None:
    own, big, net = pair(lambda: Trap().float())
    own.float()
    big.float()
    for each, called in ((own, net), (big, big)):
        with torch.autocast("cpu", torch.bfloat16):
            out = called(X.float())
            again = F.linear(out[:, :4], each.fc.weight)
        (out.float().square().sum() + again.float().square().sum()).backward()
        assert out.dtype == torch.bfloat16
    assert off_by(gradients(own), gradients(big)) <= 2e-2


def test_modes_that_a_forward_sets_end_with_it() -> None:
    class Sets(Trap):
        def forward(self, x: Tensor) -> Any:
            hidden = self.two(self.one(x)).float()
            with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
                return F.linear(pooled(hidden), self.fc.weight.float())

    own, _, net = pair(Sets)
    assert net(X).dtype == torch.bfloat16
    assert not torch.is_autocast_enabled("cpu")
    assert torch.is_grad_enabled()
    assert F.linear(torch.ones(1, 4), own.fc.weight.float()).dtype == torch.float32


@pytest.mark.parametrize("kind", ["sync", "eval", "spectral"])
def test_other_layers(kind: str) -> None:
    def make() -> nn.Module:
        net: Any = ResNet(per_stage=1)
        if kind == "sync":
            return nn.SyncBatchNorm.convert_sync_batchnorm(net)
        if kind == "spectral":
            nn.utils.parametrizations.spectral_norm(net.conv1)
        else:
            net.bn1.eval()
        return net

    compare(make)


# ---- the backward pass ---------------------------------------------------------------


def test_two_calls_and_a_graph_that_is_kept() -> None:
    own, big, net = pair()
    for each in (net, big):
        loss = summed([each(X), each(2 * X + 1)])
        loss.backward(retain_graph=True)
        loss.backward()
    assert off_by(gradients(own), gradients(big)) <= EXACT
    loss = summed([net(X)])
    loss.backward()
    with pytest.raises(RuntimeError, match="a second time"):
        loss.backward()
    x = X.clone().requires_grad_()  # else it would be taken for a constant
    with pytest.raises(TrainkitError, match="create_graph=True asks for"):
        torch.autograd.grad(net(x).sum(), x, create_graph=True)


@pytest.mark.parametrize("what", ["weight", "argument", "buffer"])
def test_what_is_changed_before_the_backward_pass_is_refused(what: str) -> None:
    own, _, net = pair()
    own.two[1].eval()
    x = X.clone()
    loss = summed([net(x)])
    changed = {"weight": own.fc.weight, "argument": x, "buffer": own.two[1].running_var}
    with torch.no_grad():
        changed[what].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_weights_whose_data_is_exchanged_are_those_of_the_forward_pass() -> None:
    own, big, net = pair()
    losses = [summed([each(X)]) for each in (net, big)]
    for each, loss in zip((own, big), losses, strict=True):
        each.fc.weight.data = each.fc.weight.data * 2
        loss.backward()
    assert off_by(gradients(own), gradients(big)) <= EXACT


def test_hooks_of_parameters_see_one_gradient() -> None:
    own, _, net = pair()
    calls = []
    for each in own.parameters():
        each.register_hook(lambda gradient: calls.append("before"))
        each.register_post_accumulate_grad_hook(lambda parameter: calls.append("after"))
    summed([net(X)]).backward()
    assert len(calls) == 2 * len(list(own.parameters()))


def test_a_checkpoint_around_a_call() -> None:
    own, big, net = pair()
    x = X.clone().requires_grad_()
    summed([checkpoint(net, x, use_reentrant=False)]).backward()  # type: ignore[list-item]
    summed([big(X)]).backward()
    assert off_by(gradients(own), gradients(big)) <= EXACT


# ---- the module ----------------------------------------------------------------------


def test_copies_run_themselves() -> None:
    own, _, net = pair(ResNet)
    other, loaded = copy.deepcopy(own), pickle.loads(pickle.dumps(own))
    for each in (net, other, loaded):
        summed([each(X)]).backward()
    for each in (other, loaded):
        assert vars(each)["forward"].module is each
        assert off_by(gradients(each), gradients(own)) == 0


def test_one_within_another_runs_with_it() -> None:
    own = nn.Sequential(Trap(), nn.Linear(5, 5)).double()
    big = copy.deepcopy(own)
    exact_batch_norm(own[0], size=2)
    net = exact_batch_norm(own, size=4)
    for each in (net, big):
        summed([each(X)]).backward()
    assert off_by(gradients(own), gradients(big)) <= EXACT


def test_threads_do_not_see_each_other() -> None:

    def run() -> None:
        for _ in range(5):
            compare(Trap)

    with ThreadPoolExecutor(2) as pool:
        for each in [pool.submit(run) for _ in range(2)]:
            each.result()


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("why", ["scripted", "compiled", "hooks", "lazy"])
def test_modules_that_hide_their_operations_are_refused(why: str) -> None:
    own = Trap().double()
    if why == "scripted":
        own.two[2] = torch.jit.script(nn.Tanh())
    elif why == "compiled":
        own.two[2] = torch.compile(nn.Tanh())
    elif why == "lazy":
        own.two[2] = nn.LazyBatchNorm2d(affine=False)
    else:
        own.fc.register_full_backward_hook(lambda *given: None)
    with pytest.raises(TrainkitError, match=why):
        exact_batch_norm(own, size=4)(X)


def test_options() -> None:
    own = Trap()
    with exact_batch_norm(own, size=4) as net:
        assert net is own
        assert "forward" in vars(own)
    assert "forward" not in vars(own)
    with pytest.raises(TrainkitError, match="size"):
        exact_batch_norm(Trap(), size=0)
    with pytest.raises(TrainkitError, match="must be given a torch module"):
        exact_batch_norm("net", size=4)  # type: ignore[arg-type]


# ---- numbers of rows -----------------------------------------------------------------


def test_numbers_of_rows() -> None:
    for rows in range(1, 40):
        for size in range(1, 12):
            sizes = chunk_sizes(rows, size)
            assert sum(sizes) == rows
            assert max(sizes) <= max(size, 2)
            assert len(sizes) == 1 or sizes[0] == sizes[-1] + 1
    rows: Any = NumberOfRows(4, 3, 11)
    assert (rows * 2 + 1).each == (9, 7, 23)
    assert (2 * rows // 2 % 100 - 1).each == (3, 2, 10)
    assert rows > 2
    assert rows - rows == 0
    assert f"{rows}" == "11"
    assert {rows: 1}[NumberOfRows(4, 3, 11)] == 1
    for of in (float, int, lambda n: n / 2, lambda n: n > 5, lambda n: 0.5 * n):
        with pytest.raises(TrainkitError, match="number of rows"):
            of(rows)
