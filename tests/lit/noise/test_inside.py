"""The noise scale with the inner cut: a chunk of rows is a micro-batch."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.helpers import trainer, weights
from tests.lit.noise.keep import KeepTable
from trainkit import AccumulationCallback, MicroBatching, NoiseScale, PerSample
from trainkit.core.inside.sums import LARGE

ROWS, WIDTH, CHUNK = 96, 220, 8
HIDDEN = 300
assert WIDTH * HIDDEN > LARGE, "a layer's gradient must be added as it arrives"


class Towers(pl.LightningModule):
    """Two encoders of the same rows, whose loss looks across them."""

    def __init__(self, how: str = "one") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.how = how
        self.net, self.other = self._tower(), self._tower()
        self.head = nn.Linear(6, 6)
        self.double()

    def _tower(self) -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, 6))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        left = self.head(self.net(torch.cat([x, x]) if self.how == "both" else x))
        if self.how == "twice":
            left = left + self.net(y)
        scores = left[: len(x)] @ self.other(y).T
        return nn.functional.cross_entropy(scores, torch.arange(len(x)))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(*batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def fit(
    how: str = "one",
    *,
    inside: Any = "net",
    batch: int = 32,
    noise: NoiseScale | None = None,
    hand: Any = None,
    **options: Any,
) -> Towers:
    module = Towers(how)
    torch.manual_seed(1)
    x = torch.randn(ROWS, WIDTH, dtype=torch.float64)
    data = TensorDataset(x, x + 0.1 * torch.randn_like(x))
    cut = MicroBatching(size=CHUNK, inside=inside, keep=options.pop("keep", 0))
    strategy = options.pop("strategy", None)
    own = AccumulationCallback(strategy, micro_batching=cut)
    measured = [] if noise is None else [noise]
    fit = trainer(
        options.pop("accumulate", 1),
        callbacks=[*([hand] if hand else []), *measured, own],
        max_epochs=2,
        **options,
    )
    fit.fit(module, DataLoader(data, batch_size=batch))
    return module


class ByHand(pl.Callback):
    """The share of each chunk in the gradient of the towers, row by row of a batch."""

    def __init__(self, paths: tuple[str, ...], kept: KeepTable) -> None:
        self.paths, self.rows, self.kept = paths, [], kept

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        plain = Towers(pl_module.how)
        plain.load_state_dict(pl_module.state_dict())
        x, y = (each.split(CHUNK) for each in batch)
        left, right = [[plain.get_submodule(p)(c) for c in cs] for p, cs in _both(x, y)]
        scores = plain.head(torch.cat(left)) @ torch.cat(right).T
        loss = nn.functional.cross_entropy(scores, torch.arange(len(batch[0])))
        outputs = {"net": left, "other": right}
        given = {
            path: torch.autograd.grad(loss, outputs[path], retain_graph=True)
            for path in self.paths
        }
        shares = []
        for chunk in range(len(x)):
            found = []
            for path in self.paths:
                parameters = list(plain.get_submodule(path).parameters())
                found += torch.autograd.grad(
                    outputs[path][chunk],
                    parameters,
                    given[path][chunk],
                    retain_graph=True,
                )
            shares.append(len(batch[0]) * torch.cat([g.flatten() for g in found]))
        u = torch.stack(shares)
        self.rows.append(torch.stack([u.sum(0).square().sum(), u.square().sum()]))

    def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
        self.kept.on_train_batch_end()


def _both(x: Any, y: Any) -> list[tuple[str, Any]]:
    return [("net", x), ("other", y)]


@pytest.mark.parametrize("paths", [("net",), ("net", "other")])
@pytest.mark.parametrize("keep", [0, 2])
def test_sums_are_those_by_hand(paths: tuple[str, ...], keep: int) -> None:
    noise = NoiseScale(1)
    hand = ByHand(paths, KeepTable(noise))
    fit(inside=paths, noise=noise, hand=hand, keep=keep)
    found, wanted = hand.kept.table, torch.stack(hand.rows)
    assert len(found) == len(wanted) == 6
    assert (found[:, :2] / wanted - 1).abs().max() < 1e-6
    chunks = torch.tensor([32.0**2, 4 * CHUNK**2, 32, 32, 1], dtype=torch.float64)
    assert torch.equal(found[0, 2:], chunks)


def test_windows_of_several_loader_batches_add_up() -> None:
    tables = []
    for batch, accumulate in ((32, 1), (32, 3)):
        noise = NoiseScale(1)
        kept = KeepTable(noise)
        hand = ByHand(("net",), kept)
        fit(
            noise=noise,
            hand=hand,
            batch=batch,
            accumulate=accumulate,
            strategy=PerSample(),
        )
        tables.append((kept.table, torch.stack(hand.rows)))
    for table, rows in tables:
        each = rows.view(len(table), -1, 2).sum(1)
        assert (table[:, :2] / each - 1).abs().max() < 1e-6
    assert tables[1][0][0, 5] == 96
    assert tables[1][0][0, 6] == 1


def test_the_training_is_the_same_to_the_bit() -> None:
    assert torch.equal(weights(fit(noise=NoiseScale(1))), weights(fit()))


@pytest.mark.parametrize(
    ("how", "inside", "why"),
    [
        ("both", "net", "net gets 64 rows of 32 samples"),
        ("both", ("net", "other"), "other and net run in chunks of different rows"),
        ("twice", "net", "net is called several times in a step"),
    ],
)
def test_chunks_that_share_samples_are_not_measured(
    how: str, inside: Any, why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    noise = NoiseScale(1)
    fit(how, inside=inside, noise=noise)
    assert noise.estimate is None
    assert why in (noise.why_not or "")
    assert capsys.readouterr().out.count(why) == 1


@pytest.mark.parametrize("batch", [32, CHUNK])
def test_where_nothing_was_measured_the_end_says_so(
    batch: int, capsys: pytest.CaptureFixture[str]
) -> None:
    noise = NoiseScale(1)
    fit(noise=noise, batch=batch)
    is_measured = batch > CHUNK  # otherwise a batch is one chunk
    assert (noise.estimate is not None) == is_measured
    assert ("not measured: it takes 5 measured" in capsys.readouterr().out) != (
        is_measured
    )
