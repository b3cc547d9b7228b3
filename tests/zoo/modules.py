"""Small modules and data that many tests train; `callbacks` watches them.

`Plain` knows nothing of trainkit. `Mixed` is the same with the mixin. `on_front` makes
either, with the callbacks that belong to it, so that plain Lightning, which is the
control, is one more value of a column. What only one test needs is a hook, which
`hooked` puts on a class and Lightning's `LambdaCallback` on a callback.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, TypeVar

import lightning.pytorch as pl
import pytorch_lightning as old_pl
import torch
import torch.nn.functional as F
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import Replicate
from torch.utils.data import IterableDataset

from tests.helpers import OPTIMIZERS, QUIET, TokenNet, pad
from trainkit import (
    AccumulationCallback,
    AccumulationMixin,
    MicroBatching,
    PerSample,
    PerToken,
)

# ---- losses --------------------------------------------------------------------------


def plain_token_loss(net: nn.Module, batch: Any, reduction: str = "mean") -> Tensor:
    """Cross entropy over the labels that count, in the net's own dtype."""
    logits = net(batch["ids"]).flatten(0, 1)
    return F.cross_entropy(logits, batch["labels"].flatten(), reduction=reduction)


def sample_loss(net: nn.Module, batch: Any, reduction: str = "mean") -> Tensor:
    """The mean over tokens of each sequence, then the mean or sum over sequences."""
    losses = F.cross_entropy(
        net(batch["ids"]).transpose(1, 2), batch["labels"], reduction="none"
    )
    valid = batch["labels"] != -100
    each = (losses * valid).sum(1) / valid.sum(1)
    return each.mean() if reduction == "mean" else each.sum()


# ---- modules -------------------------------------------------------------------------


class Plain(pl.LightningModule):
    """Learns tokens, and knows nothing of trainkit.

    Args:
        loss: a function of the net, a batch and a reduction.
        optimizer: a name in `OPTIMIZERS`, or a function of the parameters.
        reduction: "mean" or "sum".
        dtype: of the parameters.
        scheduler: "step" or "epoch", where there is to be one that moves so often.
    """

    def __init__(
        self,
        loss: Callable[..., Tensor] = plain_token_loss,
        *,
        optimizer: str | Callable[[Any], Any] = "sgd",
        reduction: str = "mean",
        dtype: torch.dtype = torch.float64,
        scheduler: str | None = None,
    ) -> None:
        super().__init__()
        self.net = TokenNet(dtype=dtype)
        self.loss = loss
        self.optimizer_name: Any = optimizer
        self.reduction = reduction
        self.scheduler = scheduler

    def loss_of(self, batch: Any) -> Tensor:
        """The loss of a batch."""
        return self.loss(self.net, batch, self.reduction)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss_of(batch)

    def configure_optimizers(self) -> Any:
        name = self.optimizer_name
        make: Any = name if callable(name) else OPTIMIZERS[name]
        optimizer = make(self.parameters())
        if self.scheduler is None:
            return optimizer
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 100)
        config = {"scheduler": scheduler, "interval": self.scheduler}
        return {"optimizer": optimizer, "lr_scheduler": config}


class Mixed(AccumulationMixin, Plain):
    """The same with the mixin; by tokens, if no strategy is given."""

    accumulation = PerToken()

    def __init__(
        self,
        loss: Callable[..., Tensor] = plain_token_loss,
        *,
        strategy: Any = None,
        cut: MicroBatching | None = None,
        **how: Any,
    ) -> None:
        super().__init__(loss, **how)
        if strategy is not None:
            self.accumulation = strategy
        if cut is not None:
            self.micro_batching = cut


class Manual(Mixed):
    """Closes its windows itself, each as long as the Trainer says.

    Attributes:
        clip: the norm to which gradients are clipped.
        apart: whether ranks exchange gradients with a window's last batch alone.
    """

    clip: float | None = None
    apart = False

    def __init__(self, *args: Any, **how: Any) -> None:
        super().__init__(*args, **how)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        ends = self.window_ends(batch_idx)
        block = getattr(self.trainer.strategy, "block_backward_sync", nullcontext)
        with block() if self.apart and not ends else nullcontext():
            self.accumulate(self.loss_of(batch), batch)
        if ends:
            self.finish_window()
            if self.clip is not None:
                self.clip_gradients(optimizer, gradient_clip_val=self.clip)
            optimizer.step()
            optimizer.zero_grad()


class Gan(AccumulationMixin, pl.LightningModule):
    """A generator in windows of two batches, a discriminator in windows of three.

    The generator's loss runs through the discriminator, and the other way round not.
    """

    accumulation = PerToken()
    lengths = (2, 3)

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        with torch.random.fork_rng():
            torch.manual_seed(3)
            self.generator = nn.Linear(1, 4, dtype=torch.float64)
            self.discriminator = nn.Linear(4, 1, dtype=torch.float64)

    def loss(self, batch: Any, index: int) -> Tensor:
        """The generator's loss (0), or the discriminator's (1)."""
        made = self.generator(batch["ids"].unsqueeze(-1).double() / 13)
        made = made.detach() if index == 1 else made
        target = 1.0 if index == 0 else 0.3
        error = (self.discriminator(torch.tanh(made)).squeeze(-1) - target).square()
        return error[batch["labels"] != -100].mean()

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for index, optimizer in enumerate(self.optimizers()):  # type: ignore[arg-type]
            self.toggle_optimizer(optimizer)
            self.accumulate(self.loss(batch, index), batch, optimizer=optimizer)
            is_full = (batch_idx + 1) % self.lengths[index] == 0
            if is_full or self.trainer.is_last_batch:
                self.finish_window(optimizer)
                optimizer.step()
                optimizer.zero_grad()
            self.untoggle_optimizer(optimizer)

    def configure_optimizers(self) -> Any:
        return [
            torch.optim.Adam(self.generator.parameters(), lr=0.05),
            torch.optim.Adam(self.discriminator.parameters(), lr=0.05),
        ]


class Terms(Mixed):
    """Two terms with totals of their own: one over tokens, and one over samples.

    Attributes:
        coefficients: of the two terms.
        is_whole: whether their sum is returned, as of a batch that is not cut.
    """

    accumulation = {"tokens": PerToken(), "samples": PerSample()}
    coefficients = (1.0, 3.0)
    is_whole = False

    def terms_of(self, batch: Any) -> dict[str, Tensor]:
        """Each term of the loss."""
        found = (plain_token_loss(self.net, batch), sample_loss(self.net, batch))
        each = [c * f for c, f in zip(self.coefficients, found, strict=True)]
        return dict(zip(("tokens", "samples"), each, strict=True))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        terms = self.terms_of(batch)
        return sum(terms.values()) if self.is_whole else {"loss": terms}


class Rows(pl.LightningModule):
    """Learns rows of numbers, with BatchNorm or without; a mean over the rows.

    Args:
        width: numbers in a row.
        norm: whether there is a BatchNorm layer.
        dtype: of the parameters.
    """

    def __init__(
        self, width: int = 3, *, norm: bool = False, dtype: torch.dtype = torch.float64
    ) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            between = nn.BatchNorm1d(5) if norm else nn.Tanh()
            self.net = nn.Sequential(nn.Linear(width, 5), between, nn.Linear(5, 1))
        self.to(dtype)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.net(batch).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


class Sharded(Plain):
    """FSDP2 over the data-parallel ranks, the head split over the others."""

    def configure_model(self) -> None:
        mesh = self.device_mesh
        if mesh is None or any(isinstance(p, DTensor) for p in self.parameters()):
            return
        if mesh["tensor_parallel"].size() > 1:
            split = ColwiseParallel(output_layouts=Replicate())
            parallelize_module(self.net, mesh["tensor_parallel"], {"head": split})
        if mesh["data_parallel"].size() > 1:
            fully_shard(self.net, mesh=mesh["data_parallel"])


def whole(module: nn.Module) -> Tensor:
    """All parameters as one vector, gathered from their shards."""
    shards = module.parameters()
    full = [p.full_tensor() if isinstance(p, DTensor) else p for p in shards]
    return torch.cat([p.detach().double().flatten() for p in full])


class OldPlain(old_pl.LightningModule):
    """As `Plain`, of the package named `pytorch_lightning`."""

    def __init__(self, optimizer: str = "momentum") -> None:
        super().__init__()
        self.net = TokenNet(dtype=torch.float64)
        self.optimizer_name = optimizer

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return plain_token_loss(self.net, batch)

    def configure_optimizers(self) -> Any:
        return OPTIMIZERS[self.optimizer_name](self.parameters())


# Made by hand: pyright takes the two packages' LightningModules for rivals.
OldMixed: Any = type(
    "OldMixed", (AccumulationMixin, OldPlain), {"accumulation": PerToken()}
)


def old_trainer(accumulate: int = 1, **options: Any) -> old_pl.Trainer:
    """As `tests.helpers.trainer`, of the package named `pytorch_lightning`."""
    return old_pl.Trainer(accumulate_grad_batches=accumulate, **{**QUIET, **options})


Made = TypeVar("Made", bound=type)


def hooked(kind: Made, **hooks: Any) -> Made:
    """A subclass of the same name with these functions, or attributes, of its own."""
    return type(kind.__name__, (kind,), {"__module__": kind.__module__, **hooks})  # type: ignore[return-value]


def by_hand(kind: Made) -> Made:
    """The same training by manual optimization: with the mixin in windows of the
    Trainer's size, else in one step for each batch."""

    def training_step(self: Any, batch: Any, batch_idx: int) -> None:
        loss: Any = kind.training_step(self, batch, batch_idx)  # type: ignore[attr-defined]
        is_ours, optimizer = isinstance(self, AccumulationMixin), self.optimizers()
        if is_ours:
            self.accumulate(loss, batch)
            if not self.window_ends(batch_idx):
                return
            self.finish_window()
        else:
            self.manual_backward(loss)
        optimizer.step()
        optimizer.zero_grad()

    return hooked(kind, automatic_optimization=False, training_step=training_step)


def on_front(
    front: str,
    kind: Callable[..., Any] = Plain,
    *,
    strategy: Any = None,
    cut: MicroBatching | None = None,
    options: Mapping[str, Any] | None = None,
    **how: Any,
) -> tuple[Any, list[Any]]:
    """A module that trains by "plain" Lightning, the "callback" or the "mixin".

    Args:
        front: which.
        kind: a class that knows nothing of trainkit.
        strategy: by tokens, if none is given.
        cut: how loader batches are cut.
        options: of the callback, or attributes of the mixin.
        how: what `kind` is made of.

    Returns:
        The module and its callbacks.
    """
    chosen, options = strategy or PerToken(), dict(options or {})
    if front == "plain":
        return kind(**how), []
    if front == "callback":
        ours = AccumulationCallback(chosen, micro_batching=cut, **options)
        return kind(**how), [ours]
    assert front == "mixin"
    assert isinstance(kind, type)
    name = f"Mixed{kind.__name__}"
    module: Any = type(name, (AccumulationMixin, kind), {"accumulation": chosen})(**how)
    for option, value in {"micro_batching": cut, **options}.items():
        setattr(module, option, value)
    return module, []


# ---- data ----------------------------------------------------------------------------


def pad_and_mask(samples: Sequence[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    """Collate ragged sequences, with a mask of what is no padding."""
    batch = pad(samples)
    return {**batch, "attention_mask": (batch["labels"] != -100).long()}


class Stream(IterableDataset[Any]):
    """Rows, or batches, that are there already; it does not say how many."""

    def __init__(self, given: Any) -> None:
        self.given = given

    def __iter__(self) -> Iterator[Any]:
        return iter(self.given)


def scaled(init_scale: float = 2.0**10, **options: Any) -> dict[str, Any]:
    """Options of a Trainer for `16-mixed` with a real gradient scaler, on the CPU."""
    scaler: Any = torch.amp.GradScaler("cpu", init_scale=init_scale, **options)
    return {"plugins": MixedPrecision("16-mixed", "cpu", scaler=scaler)}
