"""What forward and steps set in attributes, while micro-batches run in turns."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.utils.prune as prune
from torch import Tensor, nn
from torchmetrics import MeanMetric

from tests.core.joins.common import EXACT, gradients, off_by, state, summed
from tests.core.joins.steps import SIZES, X, compare, run, simple
from tests.core.tape.nets import pooled
from tests.core.tape.traps import Trap
from trainkit.core.joins.exact import exact_batch_norm
from trainkit.errors import TrainkitError


class Masked(Trap):
    """The mask of a micro-batch is read behind a layer."""

    def forward(self, x: Tensor) -> Any:
        self.mask = (x.mean(1, keepdim=True) > 0).to(x)
        hidden = self.one(x)
        return self.fc(pooled(self.two(hidden * self.mask)))


class Counted(Trap):
    """It counts its layers."""

    def forward(self, x: Tensor) -> Any:
        self.number = 0
        for part in (self.one, self.two):
            self.number += 1
            x = part(x) * self.number
        return self.fc(pooled(x))


class Listed(Trap):
    """It lists what its layers give, and shares a dict with a part."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Tensor] = []
        self.shared: dict[str, Tensor] = {}
        self.one.shared = self.shared  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Any:
        self.shared["sign"] = x.mean((1, 2, 3)).sign()[:, None, None, None]
        for part in (self.one, self.two):
            x = part(x)
            self.found.append(pooled(x))
        sign: Any = self.one.shared  # type: ignore[assignment]
        total = self.fc(self.found[0] + self.found[1]) + pooled(sign["sign"])
        self.found.clear()
        self.shared.clear()
        return total


@pytest.mark.parametrize("size", [None, 4])
@pytest.mark.parametrize("memory", ["auto", "device", "flat"])
@pytest.mark.parametrize("make", [Masked, Counted, Listed])
@pytest.mark.filterwarnings("ignore:exact BatchNorm. .* cannot run in segments")
@pytest.mark.filterwarnings("ignore:.* its forward leaves values in")
def test_each_micro_batch_has_its_own_attributes(
    make: Callable[[], Trap], memory: Any, size: Any
) -> None:
    torch.manual_seed(2)
    own = make().double()
    big = copy.deepcopy(own)
    net = exact_batch_norm(own, memory=memory, size=size)
    for _ in range(2):
        summed([big(X)]).backward()
        run(net, simple(net)) if size is None else summed([net(X)]).backward()
    assert off_by(gradients(own), gradients(big)) <= EXACT
    assert off_by(state(own), state(big)) <= EXACT


@pytest.mark.filterwarnings("ignore:.* its forward leaves values in mask")
def test_an_attribute_that_comes_later_is_said() -> None:
    class Later(Masked):
        has_mask = False

        def forward(self, x: Tensor) -> Any:
            return super().forward(x) if self.has_mask else Trap.forward(self, x)

    own = Later().double()
    net = exact_batch_norm(own, memory="device")
    even = X[:6].split(2)
    for _ in range(3):
        run(net, simple(net), even)
    own.has_mask = True
    with pytest.warns(UserWarning, match="has set mask, which it had not set before"):
        run(net, simple(net), even)
    own.zero_grad()
    big = copy.deepcopy(own)
    summed([big(X)]).backward()
    run(net, simple(net))
    assert off_by(gradients(own), gradients(big)) <= EXACT


# ---- what steps set ------------------------------------------------------------------


class Two(nn.Module):
    """A part with layers, a part without, and numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.extra = Trap(), nn.Linear(5, 5)
        self.scale, self.flag, self.calls, self.number = 1.0, False, 0, 0
        self.before: list[int] = []
        self.after: list[int] = []
        self.stack: list[Any] = []
        self.context: dict[str, Tensor] = {}
        self.state = SimpleNamespace(mean=None)
        self.table = torch.ones(1, dtype=torch.float64)


def sets_mask(two: Any, x: Tensor) -> Tensor:
    two.mask = x.mean((1, 2, 3)).sign()[:, None]
    return two.net(x) * two.mask


def toggles_scale(two: Any, x: Tensor) -> Tensor:
    two.scale = 2.0
    out = two.net(x) * two.scale
    two.scale = 1.0
    return out


def toggles_count(two: Any, x: Tensor) -> Tensor:
    before, two.calls = two.calls, 7
    out = two.net(x)
    two.calls = before
    return out


def toggles_modes(two: Any, x: Tensor) -> Tensor:
    two.net.one[1].track_running_stats ^= True
    out = two.net(x)
    two.net.one[1].track_running_stats ^= True
    return out


def freezes(two: Any, x: Tensor) -> Tensor:
    two.extra.requires_grad_(False)
    out = two.extra(two.net(x))
    two.extra.requires_grad_(True)
    return out


def swaps_weights(two: Any, x: Tensor) -> Tensor:
    two.extra.weight.data = two.extra.weight.data * 2
    return two.extra(two.net(x))


def sets_in_objects(two: Any, x: Tensor) -> Tensor:
    mean = x.mean((1, 2, 3))[:, None]
    two.context["mean"], two.state.mean = mean, mean + 1
    two.stack.append([mean])
    out = two.net(x) * two.context["mean"] + two.state.mean
    return out + two.stack[-1][0] + len(two.stack)


def sets_number(two: Any, x: Tensor) -> Tensor:
    two.number = int((x > 0).sum())
    return two.net(x) * two.number


def collects(two: Any, x: Tensor) -> Tensor:
    two.before.append(len(x))
    out = two.net(x)
    two.after.append(len(x))
    return out


def sets_modes(two: Any, x: Tensor) -> Tensor:
    two.extra.eval()
    return two.extra(two.net(x))


OWN = [
    *(sets_mask, toggles_scale, toggles_count, freezes, sets_in_objects, sets_number),
    *(collects, sets_modes),
]


@pytest.mark.parametrize("what", OWN)
def test_each_step_finds_what_it_has_set_before_a_call(what: Any) -> None:
    def step(two: Any) -> Callable[[Tensor], Tensor]:
        return lambda x: summed([what(two, x)])

    two = Two().double()
    per_row = what not in (sets_number, sets_in_objects)
    if per_row:
        compare(two, step, "device")
    else:  # a sum over rows of each micro-batch, by the net's outputs over all
        torch.manual_seed(5)
        own, big = Two().double(), Two().double()
        big.load_state_dict(own.state_dict())
        outputs = big.net(X).split(SIZES)
        given = iter(outputs)
        cached = copy.copy(big)
        object.__setattr__(cached, "net", lambda x: next(given))
        vars(cached)["_modules"] = {}
        torch.stack([step(cached)(x) for x in X.split(SIZES)]).sum().backward()
        own.stack, own.context = [], {}
        run(exact_batch_norm(own, memory="device"), step(own))
        assert off_by(gradients(own), gradients(big)) <= EXACT
    if what is collects:
        assert two.before == two.after == SIZES


def sets_condition(two: Any, x: Tensor) -> Tensor:
    two.net.condition = x.mean()
    return two.net(x)


def fills(two: Any, x: Tensor) -> Tensor:
    two.table.fill_(float(x.mean()))
    return two.net(x) * two.table


REFUSED = {
    fills: "table before it calls net",
    sets_condition: r"net\.condition before it calls net",
    toggles_modes: r"net\.one\.1\.track_running_stats before",
    swaps_weights: r"extra\.weight before",
}


@pytest.mark.parametrize(("what", "text"), REFUSED.items())
def test_what_a_step_sets_before_a_call_is_refused(what: Any, text: str) -> None:
    two = Two().double()
    net = exact_batch_norm(two, memory="device")
    with pytest.raises(TrainkitError, match=text):
        run(net, lambda x: summed([what(two, x)]))


def test_what_a_step_counts_and_sets_behind_a_call_is_right() -> None:
    def step(two: Any) -> Callable[[Tensor], Tensor]:
        def run_one(x: Tensor) -> Tensor:
            two.calls += 1
            out = two.extra(two.net(x))
            two.last, two.flag = out.detach(), not two.flag
            return summed([out])

        return run_one

    two = Two().double()
    compare(two, step, "device")
    assert (two.calls, two.flag) == (len(SIZES), len(SIZES) % 2 == 1)


# ---- what is left alone --------------------------------------------------------------


@pytest.mark.parametrize("memory", ["device", "flat"])
def test_metrics_and_what_steps_collect_are_left_alone(memory: Any) -> None:
    """The module that is called holds both, as a LightningModule does that calls
    itself."""
    own: Any = Trap().double()
    own.mean, own.rows, own.seen = MeanMetric(), [], 0
    net = exact_batch_norm(own, memory=memory)

    def step(x: Tensor) -> Tensor:
        out = net(x)
        own.mean.update(out.detach().mean())
        own.rows.append(len(x))
        own.seen += len(x)
        return summed([out])

    for number in (1, 2, 3, 4):
        run(net, step)
        assert own.rows == SIZES * number
        assert own.seen == len(X) * number
        assert int(own.mean.weight) == len(SIZES) * number
    assert len(list(own.modules())) > 5


@pytest.mark.parametrize("memory", ["device", "flat"])
@pytest.mark.parametrize("how", ["prune", "weight_norm"])
@pytest.mark.filterwarnings("ignore:exact BatchNorm. .* cannot run in segments")
@pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated")
def test_weights_that_are_computed_before_each_use(how: str, memory: Any) -> None:
    own = Trap().double()
    if how == "prune":
        prune.l1_unstructured(own.two[0], "weight", amount=0.3)
    else:
        nn.utils.weight_norm(own.two[0])
    big = Trap().double()
    if how == "prune":
        prune.l1_unstructured(big.two[0], "weight", amount=0.3)
    else:
        nn.utils.weight_norm(big.two[0])
    big.load_state_dict(own.state_dict())
    net = exact_batch_norm(own, memory=memory)
    for _ in range(2):
        summed([big(X)]).backward()
        run(net, simple(net))
    assert off_by(gradients(own), gradients(big)) <= EXACT


def test_an_attribute_that_forward_adds_up_is_said() -> None:
    class Sums(Trap):
        seen = 0

        def forward(self, x: Tensor) -> Any:
            self.seen += len(x)
            return super().forward(x)

    net = exact_batch_norm(Sums().double(), memory="device")
    run(net, simple(net))
    with pytest.warns(UserWarning, match="its forward leaves values in seen"):
        run(net, simple(net))


def test_a_tensor_that_forward_adds_to_in_place_is_refused() -> None:
    class Sums(Trap):
        def forward(self, x: Tensor) -> Any:
            self.total += float(x.detach().sum())
            return super().forward(x)

    own: Any = Sums().double()
    own.total = torch.zeros(1)
    net = exact_batch_norm(own, memory="device")
    with pytest.raises(TrainkitError, match="changes total in place"):
        run(net, simple(net))


def test_a_dict_that_is_made_in_each_forward_is_not_remembered() -> None:
    class Makes(Trap):
        def forward(self, x: Tensor) -> Any:
            self.context = {"mean": x.mean((1, 2, 3))[:, None]}
            return super().forward(x) * self.context["mean"]

    own: Any = Makes().double()
    big = copy.deepcopy(own)
    net = exact_batch_norm(own, memory="device")
    known = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(6):
            summed([big(X)]).backward()
            run(net, simple(net))
            (engine,) = net._joined.engines
            known.append(len(engine.attributes._known))
    assert off_by(gradients(own), gradients(big)) <= EXACT
    assert known == [1] * 6
    assert all("had not set before" not in str(each.message) for each in caught)


def test_only_pairs_of_weights_are_taken_for_computed_ones() -> None:
    """A parameter `mask_v` alone does not hide an attribute `mask`."""

    class Alone(Masked):
        def __init__(self) -> None:
            super().__init__()
            self.mask_v = nn.Parameter(torch.zeros(1))

    own = Alone().double()
    big = copy.deepcopy(own)
    net = exact_batch_norm(own, memory="device")
    summed([big(X)]).backward()
    run(net, simple(net))
    assert off_by(gradients(own), gradients(big)) <= EXACT


@pytest.mark.filterwarnings("ignore:.* its forward leaves values in")
def test_a_step_finds_what_the_net_has_set_in_its_call_and_the_next_call_too() -> None:
    class Remembers(Trap):
        last: Any = None

        def forward(self, x: Tensor) -> Any:
            x = x if self.last is None else x + self.last
            self.last = x.detach().mean((1, 2, 3), keepdim=True)
            return super().forward(x)

    def step(both: Any) -> Callable[[Tensor], Tensor]:
        def run_one(x: Tensor) -> Tensor:
            net = both["net"]
            first = net(x)
            return summed([first * net.last.flatten(1), net(x * 2)])

        return run_one

    torch.manual_seed(3)
    own = nn.ModuleDict({"net": Remembers()}).double()
    net = compare(own, step, "device")
    assert net._joined._own._own == {}  # nothing is held behind a window


def test_weights_whose_data_is_exchanged_are_refused() -> None:
    class Swaps(Trap):
        def between(self, x: Tensor) -> Tensor:
            self.fc.weight.data = self.fc.weight.data * 2
            return x

    net = exact_batch_norm(Swaps().double(), memory="device")
    with pytest.raises(TrainkitError, match=r"exchange the data .* fc\.weight"):
        run(net, simple(net))


def test_wrappers_may_be_removed_in_any_order() -> None:
    own = Trap().double()
    one, other = exact_batch_norm(own), exact_batch_norm(own)
    one.remove()
    other.remove()
    assert not any("forward" in vars(each) for each in own.modules())
