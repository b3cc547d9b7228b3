"""A label that is ignored by a number below zero is no index of a kernel."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.data import DataLoader

from tests.lit.proof.starting import fit, said
from trainkit import PerSample
from trainkit.lit.proof.bounds import CHECKED, refuse_below_zero

FOUR, ONE = torch.full((2,), 4), torch.ones(2, dtype=torch.long)
TABLE, ROWS = torch.ones(3, 4), torch.ones(2, 3)
CALLS: dict[str, Any] = {
    "embedding": lambda i: F.embedding(i, TABLE),
    "by name": lambda i: F.embedding(weight=TABLE, input=i),
    "a layer": lambda i: nn.Embedding.from_pretrained(TABLE)(i),
    "a bag": lambda i: F.embedding_bag(i[:, None], TABLE),
    "one hot": lambda i: F.one_hot(i, 3),
    "cross entropy": lambda i: F.cross_entropy(ROWS, i),
    "nanoGPT": lambda i: F.cross_entropy(ROWS, i - 99, ignore_index=-1),
    "nll": lambda i: F.nll_loss(ROWS, i, ignore_index=-1),
    "margin": lambda i: F.multi_margin_loss(ROWS, i),
    "ctc": lambda i: F.ctc_loss(torch.ones(4, 2, 3), i[:, None], FOUR, ONE),
    "gather": lambda i: ROWS.gather(1, i[:, None]),
    "select": lambda i: torch.index_select(TABLE, 0, i),
    "scatter": lambda i: torch.zeros(2, 3).scatter_(1, i[:, None], 1),
    "index": lambda i: TABLE[i],
    "a column": lambda i: ROWS[torch.arange(2), i],
}


class Refusing(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.has_refused = False

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func in CHECKED:
            try:
                refuse_below_zero(func, args, kwargs or {})
            except IndexError:
                self.has_refused = True
                raise
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_it_is_refused_before_the_kernel_gets_it(call: Any) -> None:
    ignored = torch.tensor([1, -100])
    if call is CALLS["cross entropy"]:
        ignored = torch.tensor([1, -1])  # -100 is what it ignores itself
    with Refusing() as mode, pytest.raises(IndexError, match="got an index below"):
        call(ignored)
    assert mode.has_refused


@pytest.mark.parametrize(
    "call",
    [
        lambda: F.cross_entropy(ROWS, torch.tensor([1, -100])),
        lambda: F.cross_entropy(ROWS, torch.tensor([1, -1]), None, None, -1),
        lambda: F.cross_entropy(ROWS, ROWS.softmax(1) - 2),
        lambda: F.nll_loss(ROWS, torch.tensor([1, -1]), ignore_index=-1),
        lambda: TABLE[torch.tensor([0, -3])],
        lambda: torch.ones(2, 3, 100)[..., torch.tensor([-50])],
        lambda: torch.ones(2, 100)[:, None, torch.tensor([-50])],
        lambda: TABLE[..., None, torch.tensor([True, False, True, False])],
        lambda: TABLE[torch.tensor([], dtype=torch.long)],
        lambda: F.embedding(torch.tensor([[0, 2]]), TABLE),
        lambda: torch.func.vmap(lambda i: TABLE[i])(torch.tensor([0, 2])),
    ],
)
def test_what_is_allowed_runs(call: Any) -> None:
    with Refusing():
        call()


class Speech(LightningModule):
    """A net with a CTC loss, which writes anywhere for a label below zero."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(3, 5)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        scores = self.head(batch["x"]).log_softmax(-1).transpose(0, 1)
        frames = torch.full((len(batch["y"]),), 8)
        return F.ctc_loss(scores, batch["y"], frames, batch["lengths"])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_labels_of_a_ctc_loss_are_never_below_zero(
    capsys: pytest.CaptureFixture[str],
) -> None:
    draw = torch.Generator().manual_seed(0)
    data: Any = [
        {
            "x": torch.randn(8, 3, generator=draw),
            "y": torch.randint(1, 5, (3,), generator=draw),
            "lengths": torch.tensor(1 + row % 3),
        }
        for row in range(24)
    ]
    fit(Speech(), DataLoader(data, batch_size=4), PerSample())
    text = said(capsys)
    assert text.startswith("not measured: these rows all count alike")
    assert "refuses a label of -100, which would tell them apart" in text
