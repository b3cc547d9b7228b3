"""What a window's sum in float32 gains and costs, beside bfloat16 parameters.

    python -m tests.benchmarks.wide_gradients [--steps 50] [--rounds 5]

Windows of 64 ragged micro-batches. Gained: the gradient's error against the float64 sum
of the same micro-batch gradients, and how far training ends from one all in float32, as
a share of the distance travelled. Paid: time, as the median over rounds of ratios
within a round, and memory.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.benchmarks.measuring import Transformer, asked
from tests.benchmarks.step_cost import transformer
from tests.helpers import deviation, gradients, weights
from trainkit.core.wide_gradients import WideGradients

MICRO_BATCHES = 64
Batch = tuple[Tensor, Tensor]
Fill = Callable[[nn.Module, list[Batch]], None]


def small() -> nn.Module:
    """A transformer quick enough for thousands of micro-batches."""
    how: Any = {"nhead": 2, "dim_feedforward": 64, "dropout": 0.0}
    return Transformer(64, 64, width=32, layers=1, **how)


def make_window(vocabulary: int, generator: torch.Generator) -> list[Batch]:
    """Micro-batches of 2 to 64 tokens, with a rule to learn."""
    lengths = torch.randint(1, 33, (MICRO_BATCHES,), generator=generator).tolist()
    ids = [torch.randint(0, vocabulary, (2, n), generator=generator) for n in lengths]
    return [(i, (3 * i + 1) % vocabulary) for i in ids]


def mean_loss(net: nn.Module, batch: Batch) -> Tensor:
    ids, labels = batch
    return F.cross_entropy(net(ids).flatten(0, 1).float(), labels.flatten())


def window_weight(window: list[Batch]) -> int:
    return sum(labels.numel() for _, labels in window)


# ---- two ways to fill a window -------------------------------------------------------


def fill_by_autograd(net: nn.Module, window: list[Batch]) -> None:
    """Each micro-batch scaled exactly; autograd adds in the parameters' dtype."""
    total = window_weight(window)
    for batch in window:
        (mean_loss(net, batch) * (batch[1].numel() / total)).backward()


def fill_wide(net: nn.Module, window: list[Batch]) -> None:
    wide = WideGradients(net.parameters())
    for batch in window:
        (mean_loss(net, batch) * batch[1].numel()).backward()
        wide.take()
    wide.hand_over(torch.tensor(1 / window_weight(window), dtype=torch.float64))


FILLS: dict[str, Fill] = {"autograd": fill_by_autograd, "float32 sums": fill_wide}


# ---- gained --------------------------------------------------------------------------


def exact_gradient(net: nn.Module, window: list[Batch]) -> Tensor:
    total = torch.zeros(())
    for batch in window:
        net.zero_grad()
        (mean_loss(net, batch) * batch[1].numel()).backward()
        total = total + gradients(net) / window_weight(window)
    net.zero_grad()
    return total


def gradient_error(fill: Fill, net: nn.Module, window: list[Batch]) -> float:
    expected = exact_gradient(net, window)
    fill(net, window)
    found = gradients(net)
    net.zero_grad()
    return float((found - expected).norm() / expected.norm())


def train(
    net: nn.Module,
    fill: Fill,
    optimizer: str,
    windows: list[list[Batch]],
    *,
    keeps_masters: bool = False,
) -> tuple[Tensor, float]:
    """The weights at the end, and the mean loss of the last ten windows.

    Args:
        net: what trains.
        fill: how its windows are filled.
        optimizer: its name in `torch.optim`.
        windows: one for each step.
        keeps_masters: step weights in float32, of which those of the net are a copy.
    """
    stepped = copy.deepcopy(net).float() if keeps_masters else net
    make: Callable[..., torch.optim.Optimizer] = getattr(torch.optim, optimizer)
    steps = make(stepped.parameters(), lr={"SGD": 0.5, "AdamW": 3e-3}[optimizer])
    losses = []
    for window in windows:
        net.zero_grad()
        fill(net, window)
        for own, master in zip(net.parameters(), stepped.parameters(), strict=True):
            master.grad = None if own.grad is None else own.grad.to(master.dtype)
        steps.step()
        net.load_state_dict(stepped.state_dict())
        with torch.no_grad():
            losses.append(float(mean_loss(net, window[0])))
    return weights(stepped), sum(losses[-10:]) / len(losses[-10:])


def print_gain(steps: int) -> None:
    generator = torch.Generator().manual_seed(0)
    windows = [make_window(64, generator) for _ in range(steps)]
    start = small().bfloat16()
    print(f"gradient of {MICRO_BATCHES} micro-batches in bfloat16, relative error")
    for name, fill in FILLS.items():
        errors = [gradient_error(fill, start, w) for w in windows[:5]]
        print(f"  {name:14}{median(errors):10.5f}   (one rounding: at most 0.00195)")
    for optimizer in ("SGD", "AdamW"):
        whole = copy.deepcopy(start).float()
        reference, loss = train(whole, fill_by_autograd, optimizer, windows)
        print(f"{steps} steps of {optimizer}, float32 throughout: loss {loss:.4f}")
        for keeps_masters in (False, True):
            print(f"  stepped in {'float32' if keeps_masters else 'bfloat16'}")
            for name, fill in FILLS.items():
                net = copy.deepcopy(start)
                how: Any = {"keeps_masters": keeps_masters}
                found, loss = train(net, fill, optimizer, windows, **how)
                share = deviation(found, reference, start)
                print(f"    {name:14}weights off by {share:6.2%}, loss {loss:.4f}")


# ---- paid ----------------------------------------------------------------------------


def seconds(fill: Fill, net: nn.Module, window: list[Batch]) -> float:
    net.zero_grad()
    started = time.perf_counter()
    fill(net, window)
    return time.perf_counter() - started


def most_bytes(net: nn.Module, window: list[Batch]) -> tuple[int, int]:
    """What gradients take at most without sums in float32, and with them."""
    fill_by_autograd(net, window[:2])
    alone = sum(p.grad.nbytes for p in net.parameters() if p.grad is not None)
    net.zero_grad()
    wide = WideGradients(net.parameters())
    mean_loss(net, window[0]).backward()
    wide.take()
    mean_loss(net, window[1]).backward()
    held = [t.grad for t in [*net.parameters(), *wide.stand_ins]]
    return alone, sum(g.nbytes for g in held if g is not None)


def print_price(rounds: int) -> None:
    window = make_window(512, torch.Generator().manual_seed(0))
    net = transformer().bfloat16()
    ratios = []
    for index in range(rounds + 1):  # the first round only warms up
        taken = {name: seconds(fill, net, window) for name, fill in FILLS.items()}
        if index:
            ratios.append(taken["float32 sums"] / taken["autograd"])
    print("price on the 2-layer transformer of step_cost, over autograd's own sums")
    print(f"  time of a window    {median(ratios):.2f}")
    size = sum(p.numel() for p in net.parameters())
    alone, held = (b / size for b in most_bytes(net, window))
    print(f"  bytes of gradients  {held:.0f} a parameter, over {alone:.0f}")


def main() -> None:
    options = asked(__doc__, steps=50, rounds=5)
    torch.manual_seed(0)
    torch.set_num_threads(1)
    print_gain(options.steps)
    print_price(options.rounds)


if __name__ == "__main__":
    main()
