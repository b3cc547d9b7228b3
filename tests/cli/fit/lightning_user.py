"""What a user of the Lightning CLI brings, and the CLI in this process."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor

from tests.helpers import (
    QUIET,
    TokenNet,
    loader,
    pad,
    ragged_sequences,
    token_loss,
    trainer,
    weights,
)
from trainkit import (
    AccumulationCallback,
    AccumulationMixin,
    AccumulationStrategy,
    ResumableLoader,
    Uniform,
)
from trainkit.cli.fit.cli import TrainkitCLI

SEQUENCES = ragged_sequences(22)
BATCH = 3
WINDOW = 4


class Net(pl.LightningModule):
    """A module that knows nothing of trainkit."""

    def __init__(self, lr: float = 0.5) -> None:
        super().__init__()
        self.net = TokenNet()
        self.lr = lr

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return token_loss(self.net, batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val/loss", token_loss(self.net, batch), batch_size=len(batch["ids"]))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


class MixinNet(AccumulationMixin, Net):
    """The same, with a strategy of its own choice."""

    accumulation = Uniform()


class Configured(Net):
    """Takes its strategy as an argument."""

    def __init__(
        self, strategy: AccumulationStrategy | None = None, lr: float = 0.5
    ) -> None:
        super().__init__(lr)
        self.strategy = strategy


class WithoutOptimizer(pl.LightningModule):
    """Leaves its optimizer to the command line."""

    def __init__(self) -> None:
        super().__init__()
        self.net = TokenNet()


class Data(pl.LightningDataModule):
    """Ragged sequences."""

    def __init__(self, batch_size: int = BATCH) -> None:
        super().__init__()
        self.batch_size = batch_size

    def train_dataloader(self) -> Any:
        return loader(SEQUENCES, self.batch_size)

    def val_dataloader(self) -> Any:
        return loader(SEQUENCES, self.batch_size)


class ResumableData(Data):
    """Shuffled, and goes on within an epoch."""

    def train_dataloader(self) -> Any:
        return ResumableLoader(
            SEQUENCES, batch_size=self.batch_size, shuffle=True, collate_fn=pad
        )


def count_tokens(module: Any, batch: Any) -> int:
    """What `Net` divides by."""
    return int((batch["labels"] != -100).sum())


class ByRow(AccumulationStrategy):
    """A strategy that trainkit does not have."""

    def __init__(self, *, factor: float = 1.0) -> None:
        self.factor = factor

    def weight(self, batch: Any) -> float:
        return self.factor * len(batch["ids"]) ** 2


USER = "tests.cli.fit.lightning_user"


def quiet(**more: Any) -> list[str]:
    options = {**QUIET, "accumulate_grad_batches": WINDOW, **more}
    words = [f"--trainer.{name}={str(v).lower()}" for name, v in options.items()]
    return ["--seed_everything=3", *words]


def make(*args: str, model: Any = Net, data: Any = Data, **options: Any) -> TrainkitCLI:
    """Everything but the training."""
    return TrainkitCLI(
        model,
        data,
        run=False,
        save_config_callback=None,
        args=[*quiet(), *args],
        **options,
    )


def fitted(*args: str, model: Any = Net) -> Tensor:
    return weights(fit(*quiet(), *args, model=model).model)


def fit(*args: str, model: Any = Net) -> TrainkitCLI:
    """Several in one folder, with no logger to number their saved configs."""
    options = {"save_config_kwargs": {"overwrite": True}}
    return TrainkitCLI(model, Data, args=["fit", *args], **options)


@functools.cache
def by_hand(strategy: AccumulationStrategy | None, *callbacks: Any) -> Tensor:
    module = Net()
    ours = [] if strategy is None else [AccumulationCallback(strategy)]
    run = trainer(
        1 if callbacks else WINDOW, max_epochs=2, callbacks=[*ours, *callbacks]
    )
    run.fit(module, datamodule=Data())
    return weights(module)


def strategy_of(cli: TrainkitCLI) -> AccumulationStrategy | None:
    found = only(cli, AccumulationCallback)
    return found[0].strategy if found else None


def callbacks_of(cli: TrainkitCLI) -> list[Any]:
    run: Any = cli.trainer
    return run.callbacks


def only(cli: TrainkitCLI, kind: type) -> list[Any]:
    return [c for c in callbacks_of(cli) if isinstance(c, kind)]


def written(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)
