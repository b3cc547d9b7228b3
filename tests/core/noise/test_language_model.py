"""The noise scale of a language model, against all of its sequences' own gradients."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from tests.core.noise.simulated import as_if_equal
from trainkit import Accumulator, NoiseEstimate, NoiseMoments, PerToken

NUM_SEQUENCES, LONGEST, WIDTH = 2000, 32, 24
IGNORED = -100
CUT = [1, 9, 2, 8, 1, 7, 1, 3]


class Model(nn.Module):
    """One layer of attention on bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(128, WIDTH)
        self.place = nn.Parameter(0.1 * torch.randn(LONGEST, WIDTH))
        self.mix = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 128)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) + self.place[: ids.shape[-1]]
        q, k, v = self.mix(torch.tanh(x)).chunk(3, -1)
        scores = (q @ k.transpose(-1, -2)) / WIDTH**0.5
        later = torch.ones(ids.shape[-1], ids.shape[-1], dtype=torch.bool).triu(1)
        x = x + self.out(scores.masked_fill(later, -torch.inf).softmax(-1) @ v)
        return self.head(torch.tanh(x))


def sequences() -> tuple[Tensor, Tensor]:
    """Lines of the standard library: their bytes, and the next ones as labels."""
    source = Path(sysconfig.get_paths()["stdlib"], "inspect.py").read_text()
    lines = [line for line in source.splitlines() if len(line) > 4]
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(len(lines), generator=generator)[:NUM_SEQUENCES].tolist()
    ids = torch.zeros(len(order), LONGEST, dtype=torch.long)
    labels = torch.full((len(order), LONGEST), IGNORED)
    for row, place in enumerate(order):
        found = [min(ord(c), 127) for c in lines[place][: LONGEST + 1]]
        ids[row, : len(found) - 1] = torch.tensor(found[:-1])
        labels[row, : len(found) - 1] = torch.tensor(found[1:])
    return ids, labels


def loss_of(model: nn.Module, ids: Tensor, labels: Tensor, reduction: str) -> Tensor:
    logits = model(ids)
    return F.cross_entropy(
        logits.flatten(0, -2), labels.flatten(), reduction=reduction, ignore_index=-100
    )


def exact(model: nn.Module, ids: Tensor, labels: Tensor) -> float:
    """The noise scale, from the gradient of each sequence's sum of losses."""
    values = {name: p.detach() for name, p in model.named_parameters()}

    def one(values: dict[str, Tensor], row: Tensor, of: Tensor) -> Tensor:
        logits = functional_call(model, values, (row,))
        return F.cross_entropy(logits, of, reduction="sum", ignore_index=IGNORED)

    found = [
        vmap(grad(one), (None, 0, 0))(values, rows, of)
        for rows, of in zip(ids.split(100), labels.split(100), strict=True)
    ]
    u = torch.cat(
        [torch.cat([g.flatten(1) for g in each.values()], 1) for each in found]
    ).double()
    n = (labels != IGNORED).sum(1).double()
    size = len(n)
    square_of_sum, squares = u.sum(0).square().sum(), u.square().sum()
    # Without the pairs of a sequence with itself, which bias |G|^2.
    gradient = (square_of_sum - squares) / (n.sum() ** 2 - n.square().sum())
    noise = (squares - n.square().sum() * gradient) / size
    return float(noise / (n.mean() ** 2 * gradient))


@pytest.mark.parametrize("steps", [0, 150])
def test_within_a_fifth_after_a_hundred_windows(steps: int) -> None:
    torch.manual_seed(0)
    model, (ids, labels) = Model(), sequences()
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        rows = torch.randint(len(ids), (32,), generator=generator)
        optimizer.zero_grad()
        loss_of(model, ids[rows], labels[rows], "mean").backward()
        optimizer.step()
    truth = exact(model, ids, labels)

    accumulator = Accumulator(PerToken(), module=model)
    moments = NoiseMoments(accumulator, optimizer)
    for _ in range(100):
        moments.watch()
        window = torch.randint(len(ids), (32,), generator=generator)
        for rows in window.split(CUT):
            batch = {"labels": labels[rows]}
            loss = loss_of(model, ids[rows], labels[rows], "mean")
            accumulator.backward(loss, batch)
        moments.add(accumulator.finish(optimizer), samples=32)
        optimizer.zero_grad()
    found = moments.estimate()
    assert found is not None
    assert abs(found.samples / truth - 1) < 0.2
    assert found.low < truth < found.high
    if steps == 0:  # where the scale is far below the window, equal weights fail most
        equal = NoiseEstimate.of(as_if_equal(moments.table, len(CUT)).tolist())
        assert equal is not None
        assert abs(equal.samples / truth - 1) > 0.2
