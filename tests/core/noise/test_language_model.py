"""The noise scale of a language model, against all of its sequences' own gradients."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from tests.core.noise.simulated import as_if_equal
from trainkit import Accumulator, NoiseEstimate, NoiseMoments, PerToken

NUM_SEQUENCES, LONGEST, WIDTH, IGNORED = 1000, 24, 16, -100
CUT = [1, 9, 2, 8, 1, 7, 1, 3]


class Model(nn.Module):
    """It predicts each byte from the average of those so far."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(128, WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 128)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        so_far = x.cumsum(-2) / torch.arange(1, ids.shape[-1] + 1)[:, None]
        return self.head(torch.tanh(x + self.mix(torch.tanh(so_far))))


def sequences() -> tuple[Tensor, Tensor]:
    """Lines of the standard library: their bytes, and the next ones as labels."""
    source = Path(sysconfig.get_paths()["stdlib"], "inspect.py").read_text()
    lines = [line for line in source.splitlines() if len(line) > 4][:NUM_SEQUENCES]
    ids = torch.zeros(len(lines), LONGEST, dtype=torch.long)
    labels = torch.full((len(lines), LONGEST), IGNORED)
    for row, line in enumerate(lines):
        found = torch.tensor([min(ord(c), 127) for c in line[: LONGEST + 1]])
        ids[row, : len(found) - 1], labels[row, : len(found) - 1] = (
            found[:-1],
            found[1:],
        )
    return ids, labels


def exact(model: nn.Module, ids: Tensor, labels: Tensor) -> float:
    """The noise scale, from the gradient of each sequence's sum of losses."""
    values = {name: p.detach() for name, p in model.named_parameters()}

    def one(values: dict[str, Tensor], row: Tensor, of: Tensor) -> Tensor:
        return F.cross_entropy(
            functional_call(model, values, (row,)), of, reduction="sum"
        )

    found = vmap(grad(one), (None, 0, 0))(values, ids, labels)
    u = torch.cat([g.flatten(1) for g in found.values()], 1).double()
    n = (labels != IGNORED).sum(1).double()
    square_of_sum, squares = u.sum(0).square().sum(), u.square().sum()
    # Without the pairs of a sequence with itself, which bias |G|^2.
    gradient = (square_of_sum - squares) / (n.sum() ** 2 - n.square().sum())
    noise = (squares - n.square().sum() * gradient) / len(n)
    return float(noise / (n.mean() ** 2 * gradient))


def test_within_a_fifth_after_a_hundred_windows() -> None:
    torch.manual_seed(0)
    model, (ids, labels) = Model(), sequences()
    truth = exact(model, ids, labels)
    accumulator = Accumulator(PerToken(), module=model)
    moments = NoiseMoments(accumulator, model.parameters())
    for _ in range(100):
        moments.watch()
        for rows in torch.randint(len(ids), (32,)).split(CUT):
            logits = model(ids[rows]).flatten(0, 1)
            loss = F.cross_entropy(logits, labels[rows].flatten())
            accumulator.backward(loss, {"labels": labels[rows]})
        moments.add(accumulator.finish([*model.parameters()]), samples=32)
        model.zero_grad()
    found = moments.estimate()
    assert found is not None
    assert abs(found.samples / truth - 1) < 0.2
    assert found.low < truth < found.high
    equal = NoiseEstimate.of(as_if_equal(moments.table, len(CUT)).tolist())
    assert equal is not None
    assert abs(equal.samples / truth - 1) > 0.2  # the control
