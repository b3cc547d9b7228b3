"""Windows that were told beforehand, over several ranks, in a plain loop."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel as DDP

from tests.core.common import fresh_net
from tests.core.conftest import OnRanks
from tests.core.test_ddp import WINDOWS as ALL_WINDOWS
from tests.core.test_ddp import dealt, together
from tests.helpers import (
    deviation,
    gradients,
    weights,
)
from trainkit import Accumulator, PerSample, PerToken, TrainkitError
from trainkit.core._compat import (
    has_reduced,
    owe_forward_messages,
    send_forward_messages,
)

EXACT = 1e-10
WINDOWS = [ALL_WINDOWS[0], ALL_WINDOWS[1], ALL_WINDOWS[3]]
BOTH = {"ce": PerToken(), "spread": PerSample()}


def terms_of(net: Any, batch: Any) -> dict[str, Tensor]:
    """The mean over tokens, and over samples."""
    logits = net(batch["ids"])
    ce = F.cross_entropy(
        logits.flatten(0, 1), batch["labels"].flatten(), reduction="sum"
    )
    valid = batch["labels"] != -100
    each = (logits.square().sum(2) * valid).sum(1) / valid.sum(1).clamp(1)
    return {"ce": ce / valid.sum().clamp(1), "spread": each.mean()}


def train_told(rank: int, world: int, aggregation: str) -> Any:
    net = fresh_net()
    model: Any = net if aggregation == "none" else DDP(net)
    if aggregation == "none":
        accumulator = Accumulator(BOTH, aggregation="none")  # finish() adds up
    else:
        accumulator = Accumulator(BOTH, module=model)
    steps = torch.optim.SGD(net.parameters(), lr=0.3)
    losses = []
    for window in dealt(WINDOWS, world):
        steps.zero_grad()
        accumulator.expect(window[rank])
        for index, batch in enumerate(window[rank]):
            is_last = index == len(window[rank]) - 1
            with nullcontext() if aggregation == "none" or is_last else model.no_sync():
                accumulator.backward(terms_of(model, batch))
        losses.append(float(accumulator.finish(steps).loss))
        steps.step()
    return weights(net), losses


@pytest.mark.parametrize("aggregation", ["mean", "none"])
def test_terms_over_ranks_equal_one_process(
    aggregation: str, on_ranks: OnRanks
) -> None:
    results = on_ranks(train_told, 2, aggregation)
    net, start = fresh_net(), weights(fresh_net())
    steps = torch.optim.SGD(net.parameters(), lr=0.3)
    expected = []
    for window in dealt(WINDOWS, 2):
        steps.zero_grad()
        terms = terms_of(net, together(window))
        total = terms["ce"] + terms["spread"]
        total.backward()
        steps.step()
        expected.append(total.item())
    for found, losses in results:
        assert deviation(found, weights(net), start) <= EXACT
        assert losses == pytest.approx(expected, rel=1e-10)


# ---- what DDP does between the passes ------------------------------------------------


class Buffered(torch.nn.Module):
    """Two layers, of which a pass may use one, and a buffer."""

    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = torch.nn.Linear(2, 1).double()
        self.second = torch.nn.Linear(2, 1).double()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor, both: bool) -> Tensor:
        total = self.first(x).sum()
        return total + self.second(x).sum() if both else total


def unfinished(rank: int, world: int) -> tuple[str, bool, bool]:
    net = Buffered()
    ddp = DDP(net)
    accumulator = Accumulator(PerSample(), module=ddp)
    x = torch.ones(3, 2, dtype=torch.float64)
    accumulator.expect([x, x])
    before = has_reduced(ddp)
    with ddp.no_sync():
        accumulator.backward(ddp(x, True), x)
    accumulator.backward(ddp(x, False), x)
    with pytest.raises(TrainkitError) as error:
        accumulator.finish(net.parameters())
    return str(error.value), before, has_reduced(ddp)


def test_a_reduction_that_ddp_has_not_finished_is_refused_before_the_step(
    on_ranks: OnRanks,
) -> None:
    """A parameter that only an earlier, unsynchronised pass has used: torch would say
    so in the next forward pass, when each rank has stepped with its own gradient."""
    for text, before, after in on_ranks(unfinished, 2):
        assert "DDPStrategy(find_unused_parameters=True)" in text
        assert before
        assert not after


def messages(rank: int, world: int) -> list[Any]:
    net = Buffered()
    ddp = DDP(net)
    x = torch.ones(3, 2, dtype=torch.float64)
    seen: list[Any] = []
    for _ in range(2):  # the second time with DDP's rebuilt buckets
        net.count.fill_(rank + 5)
        ddp.zero_grad()
        send_forward_messages(ddp)
        seen.append(float(net.count))
        net.count.fill_(rank + 7)
        with ddp.no_sync():
            if rank == 0:  # nothing waits for the other rank
                ddp(x, True)
        seen.append(float(net.count))
        owe_forward_messages(ddp)
        ddp(x * (rank + 1), True).backward()
        seen += [float(net.count), gradients(net).tolist()]
    return seen


def test_messages_of_a_forward_pass_are_sent_before_it_and_not_in_it(
    on_ranks: OnRanks,
) -> None:
    """Of the first rank's buffers, and once of the order of the buckets."""
    first, second = on_ranks(messages, 2)
    assert first[0] == second[0] == first[4] == second[4] == 5.0
    assert (first[1], second[1]) == (7.0, 8.0)
    assert first[2] == second[2] == 7.0
    assert first[3] == second[3] == first[7] == second[7]
