"""Documents in one row, cut or not, train what the padded big batch trains."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import LambdaCallback
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.helpers import NAIVE, deviation, raise_rank_errors, run_ranks, trainer
from tests.helpers import weights as weights_of
from trainkit import (
    AccumulationCallback,
    MicroBatching,
    PackCollate,
    PadCollate,
    PerSample,
    PerToken,
    ResumableLoader,
    TokenLoss,
    WindowMonitor,
)

WORDS, WIDTH, BIG = 30, 8, 12
GENERATOR = torch.Generator().manual_seed(0)
DOCUMENTS: Any = [
    {"input_ids": torch.randint(3, WORDS, (int(n),), generator=GENERATOR)}
    for n in torch.randint(2, 16, (2 * BIG,), generator=GENERATOR)
]


def padded(rows: list[Any]) -> dict[str, Tensor]:
    """The rows side by side, as `PackCollate` has them one behind the other."""
    rows = [
        {
            "input_ids": row["input_ids"],
            "labels": F.pad(row["input_ids"][1:], (1, 0), value=-100),
            "position_ids": torch.arange(len(row["input_ids"])),
        }
        for row in rows
    ]
    return PadCollate({"labels": -100})(rows)


class Model(LightningModule):
    """Attends within documents, which positions tell apart; counts tokens or rows."""

    def __init__(self, by: str = "tokens", *, is_sum: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.by, self.is_sum = by, is_sum
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.values = nn.Linear(WIDTH, WIDTH)
        self.head = TokenLoss(nn.Linear(WIDTH, WORDS), size=16, reduction="sum")
        self.double()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        ids, labels = batch["input_ids"], batch["labels"]
        number = (batch["position_ids"] == 0).cumsum(1)
        sees = (number[:, :, None] == number[:, None, :]).tril()
        states = self.embed(ids)
        values = self.values(states)
        states = F.scaled_dot_product_attention(states, values, values, attn_mask=sees)
        targets, states, of = labels[:, 1:], states[:, :-1], number[:, 1:]
        if self.by == "tokens":
            total, count = self.head(states, targets), (targets != -100).sum()
        else:
            total, count = self.of_documents(states, targets, of)
        return total if self.is_sum else total / count

    def of_documents(
        self, states: Tensor, targets: Tensor, number: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The sum of the documents' own means, and how many they are."""
        losses = F.cross_entropy(
            self.head.head(states).transpose(1, 2), targets, reduction="none"
        )
        counts, rows = targets != -100, torch.arange(len(number))[:, None]
        number = number + rows * number.numel()  # other numbers in another row
        which = number[counts].unique()
        means = [losses[counts & (number == each)].mean() for each in which]
        return torch.stack(means).sum(), torch.tensor(len(means))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.02)


def train(
    collate: Any,
    size: int,
    strategy: Any = None,
    cut: MicroBatching | None = None,
    accumulate: int = 1,
    callbacks: Any = (),
    module: Any = None,
    rows: Any = None,
) -> Any:
    """Train two epochs; without a strategy, by plain Lightning; with rows of its own,
    on one of two ranks."""
    ours = [AccumulationCallback(strategy, micro_batching=cut)] if strategy else []
    ddp = {"strategy": "ddp", "devices": 2, "use_distributed_sampler": False}
    options: dict[str, Any] = ddp if rows else {}
    pl = trainer(accumulate, callbacks=[*ours, *callbacks], **options)
    kind: Any = DataLoader if rows else ResumableLoader
    loader = kind(rows or DOCUMENTS, size, collate_fn=collate)
    pl.fit(module := module or Model(), loader)
    return module


PACK = PackCollate()
TOKENS, ROWS = PerToken(shift=True), PerSample()
SIZE, BUDGET, AUTO = MicroBatching(size=4), MicroBatching(tokens=30), MicroBatching()
APART = MicroBatching(size=4, documents="position_ids")
WAYS: dict[str, dict[str, Any]] = {
    "windows": {"size": 4, "accumulate": 3},
    "cut by documents": {"size": BIG, "cut": SIZE},
    "cut by tokens": {"size": BIG, "cut": BUDGET},
    "cut by itself": {"size": BIG, "cut": AUTO},
    "windows that are cut": {"size": 6, "accumulate": 2, "cut": BUDGET},
    "filled rows": {"size": 4, "accumulate": 3, "collate": PackCollate(length=70)},
    "few shapes": {"size": 4, "accumulate": 3,
     "collate": PackCollate(lengths=(80, 40, 20))},
    "cut into few shapes": {"size": BIG, "cut": MicroBatching(tokens=40, shapes=3)},
    "packs cut by rows": {"size": BIG, "cut": MicroBatching(size=2),
     "collate": PackCollate(length=20)},
    "packs taken apart": {"size": BIG, "cut": APART,
     "collate": PackCollate(length=20)},
}  # fmt: skip
BY: dict[str, tuple[Any, dict[str, Any]]] = {
    "tokens": (TOKENS, {"by": "tokens"}),
    "documents": (ROWS, {"by": "documents"}),
    "sums": (PerToken(shift=True, loss_reduction="sum"), {"is_sum": True}),
}


@cache
def whole(by: str) -> Tensor:
    """What the padded big batch trains."""
    module = AddedUp() if by == "both" else Model(by if by != "sums" else "tokens")
    return weights_of(train(padded, BIG, module=module))


FEW_WAYS = ("windows", "cut by tokens", "packs taken apart")
CASES = [(way, "tokens") for way in WAYS]
CASES += [*((way, "documents") for way in FEW_WAYS), ("cut by tokens", "sums")]


@pytest.mark.parametrize(("way", "by"), CASES)
def test_documents_train_as_the_padded_big_batch(way: str, by: str) -> None:
    """The other strategy is the control."""
    strategy, made = BY[by]
    how = {"collate": PACK, **WAYS[way]}
    ours, start = train(strategy=strategy, module=Model(**made), **how), Model()
    assert deviation(ours, whole(by), start) <= 1e-10
    other = {"tokens": ROWS, "documents": TOKENS}.get(by)
    if other is not None:
        naive = train(strategy=other, module=Model(**made), **how)
        assert deviation(naive, whole(by), start) > NAIVE


@pytest.mark.parametrize(
    ("cut", "strategy", "unit"),
    [
        (SIZE, ROWS, "rows"),
        (APART, ROWS, "documents"),
        (SIZE, PerSample(documents="position_ids"), "documents"),
        (MicroBatching(size=4, documents="off"), ROWS, "rows"),
    ],
)
def test_the_table_says_what_a_size_counts(
    cut: Any, strategy: Any, unit: str, capsys: pytest.CaptureFixture[str]
) -> None:
    packs = PackCollate(length=20)
    train(packs, BIG, strategy, cut, module=Model("documents"))
    assert f"micro-batches of at most 4 {unit}\n" in capsys.readouterr().out


class WithTerms(Model):
    """A mean over tokens and a mean over documents."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        means = {}
        for self.by in ("tokens", "documents"):
            means[self.by] = super().training_step(batch, batch_idx)
        return {"loss": means}


class AddedUp(WithTerms):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        means = super().training_step(batch, batch_idx)["loss"].values()
        return torch.stack([*means]).sum()


@pytest.mark.parametrize("cut", [BUDGET, APART], ids=["tokens", "apart"])
def test_terms_with_denominators_of_their_own_are_cut_between_documents(
    cut: MicroBatching,
) -> None:
    """The control: both divided by what the other one counts."""
    collate = PackCollate(length=20) if cut is APART else PACK
    for strategies, is_exact in (
        ({"tokens": TOKENS, "documents": ROWS}, True),
        ({"tokens": ROWS, "documents": TOKENS}, False),
    ):
        ours = train(collate, BIG, strategies, cut, module=WithTerms())
        off = deviation(ours, whole("both"), Model())
        assert off <= 1e-10 if is_exact else off > NAIVE


@pytest.mark.parametrize("cut", [None, MicroBatching(size=2)], ids=["stream", "cut"])
@pytest.mark.parametrize("documents", ["off", "position_ids"])
def test_counts_in_logs_tell_documents_apart_as_the_strategy_does(
    cut: MicroBatching | None, documents: str
) -> None:
    packs, seen = PackCollate(length=20), list[float]()

    def read(pl: Any, *of: Any) -> None:
        seen.append(float(pl.callback_metrics["window/samples_seen"]))

    callbacks = WindowMonitor(every_n_steps=1), LambdaCallback(on_train_batch_end=read)
    strategy = PerToken(shift=True, documents=documents)
    train(packs, BIG, strategy, cut, callbacks=callbacks)
    rows = len(packs(DOCUMENTS[:BIG])["input_ids"])
    assert rows < BIG
    assert seen[0] == (rows if documents == "off" else BIG)


def _on_ranks(rank: int, world: int) -> dict[str, Tensor]:
    found = {}
    for way in FEW_WAYS:
        how = {"collate": PACK, **WAYS[way], "size": WAYS[way]["size"] // world}
        module = train(strategy=TOKENS, rows=DOCUMENTS[rank::world], **how)
        found[way] = weights_of(module)
    return found


def test_documents_on_two_ranks_train_as_the_padded_big_batch() -> None:
    one, other = raise_rank_errors(run_ranks(_on_ranks, 2))
    for way in FEW_WAYS:
        assert torch.equal(one[way], other[way])
        assert deviation(one[way], whole("tokens"), Model()) <= 1e-10, way
