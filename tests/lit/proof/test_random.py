"""No false alarm, and no wrong strategy called exact, on modules made at random."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import trainkit
from tests.helpers import quiet_lightning
from tests.zoo import causes
from tests.zoo.causes import WIDTH, Tokens, token_loader
from trainkit import MicroBatching, PerSample, PerToken

LOSSES: list[tuple[Any, Any]] = [
    (causes.token_mean, PerToken()),
    (causes.shifted, PerToken(shift=True)),
    (causes.row_mean, PerSample()),
    (causes.token_sum, PerToken(loss_reduction="total")),
    (causes.masked, PerToken(mask="attention_mask")),
]
CUTS = [None, MicroBatching(size=3), MicroBatching(tokens=30)]


class Drawn(Tokens):
    """An architecture that treats rows and padding apart."""

    def __init__(self, draw: random.Random, loss: Any) -> None:
        super().__init__(loss)
        activation = draw.choice([nn.ReLU, nn.GELU, nn.Tanh, nn.SiLU])
        self.body = nn.Sequential(nn.Linear(WIDTH, 16), activation())
        self.kind = draw.choice(["gru", "lstm", "attention", "convolution", "gate"])
        dropout = draw.choice([0.0, 0.2])
        self.gate = nn.Parameter(torch.zeros(1))
        self.middle: Any = {
            "gru": lambda: nn.GRU(16, 16, batch_first=True),
            "lstm": lambda: nn.LSTM(16, 16, 2, batch_first=True, dropout=dropout),
            "attention": lambda: nn.TransformerEncoderLayer(
                16, 4, 16, dropout=dropout, batch_first=True
            ),
            "convolution": lambda: nn.Conv1d(16, 16, 1),
            "gate": lambda: nn.Sequential(nn.LayerNorm(16), nn.Dropout(dropout)),
        }[self.kind]()

    def features(self, batch: dict[str, Any]) -> Tensor:
        hidden = super().features(batch)
        if self.kind in ("gru", "lstm"):
            return self.middle(hidden)[0]
        if self.kind == "attention":
            padding = batch["attention_mask"] == 0
            return self.middle(hidden, src_key_padding_mask=padding)
        if self.kind == "convolution":
            return self.middle(hidden.transpose(1, 2)).transpose(1, 2)
        return hidden + self.gate * self.middle(hidden)


@pytest.mark.parametrize("seed", range(10))
def test_verdicts_are_right(seed: int) -> None:
    draw = random.Random(seed)
    torch.manual_seed(seed)
    loss, right = LOSSES[seed % len(LOSSES)]
    wrong = draw.choice([s for s in (PerToken(), PerSample()) if s != right])
    module, cut = Drawn(draw, loss), CUTS[seed % len(CUTS)]
    with quiet_lightning():
        found = [
            trainkit.check(
                module, token_loader(), strategy=each, micro_batches=cut, rows=10
            )
            for each in (right, wrong)
        ]
    assert [report.exact for report in found] == [True, False], module.kind
    assert found[0].deviation < 1e-12
    assert found[1].deviation > 1e-4
    assert [cause.kind for cause in found[1].causes] == ["denominator"]
