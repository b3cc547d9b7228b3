"""What the finder needs of a training: one batch size, and where it is kept."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.utils.data import DataLoader

from trainkit.core.plan.options import check_whole_number
from trainkit.data.row_sampler import RowSampler
from trainkit.errors import TrainkitError
from trainkit.lit._compat import starts_processes_for_fit, write_batch_size
from trainkit.lit.batch_size import loader_batch_size
from trainkit.lit.callback.base import has_callback

BY_HAND = "Choose it by hand: trainkit plan --target ... --max-micro-batch ..."

SCHEDULES = ("GradientAccumulationScheduler", "AccumulationSchedule")


@dataclass(frozen=True)
class Setting:
    """The batch size of a module, a data module or a DataLoader.

    Attributes:
        owner: the object that holds it.
        name: its attribute, or key in `hparams`; None if the owner is a DataLoader.
    """

    owner: Any
    name: str | None

    @property
    def text(self) -> str:
        kind = type(self.owner).__name__
        return kind if self.name is None else f"{kind}.{self.name}"

    def read(self) -> Any:
        if self.name is None:
            size = loader_batch_size(self.owner)
        elif (size := getattr(self.owner, self.name, None)) is None:
            size = self.owner.hparams[self.name]
        name = f"find_micro_batch {self.text}"
        check_whole_number(name, size, hint="It is where the search begins.")
        return size

    def write(self, size: int) -> None:
        if self.name is None:
            write_batch_size(self.owner, size)
            if isinstance(self.owner.sampler, RowSampler):
                self.owner.sampler.batch_size = size  # it deals out rows in batches
            return
        if self.name in getattr(self.owner, "hparams", {}):
            self.owner.hparams[self.name] = size
        if getattr(self.owner, self.name, size) == size:
            return  # the attribute may be a property that reads hparams
        try:
            setattr(self.owner, self.name, size)
        except AttributeError as error:
            raise TrainkitError(
                f"find_micro_batch: {self.text} cannot be set: {error}. Make it a "
                f"plain attribute that train_dataloader() reads."
            ) from error

    def refuse_unread(self, loader: Any) -> None:
        """Refuse a training loader that does not use this size."""
        refuse_own_batches(loader)
        written, used = self.read(), loader_batch_size(loader)
        if used != written:
            raise TrainkitError(
                f"find_micro_batch: {self.text} was set to {written}, but the "
                f"training loader's batch size is {used}. Let train_dataloader() use "
                f"it: DataLoader(..., batch_size=self.{self.name})."
            )


def find_setting(module: Any, data: Any, name: str) -> Setting:
    """The place where the batch size of the training loader is kept.

    Args:
        module: the LightningModule, which has `train_dataloader` if `data` is None.
        data: a LightningDataModule, a DataLoader, or None.
        name: the name of the attribute.

    Raises:
        TrainkitError: there is no such place.
    """
    owner = module if data is None else data
    if not hasattr(owner, "train_dataloader"):
        refuse_own_batches(data)
        return Setting(data, None)
    if hasattr(owner, name) or name in getattr(owner, "hparams", {}):
        return Setting(owner, name)
    raise TrainkitError(
        f"find_micro_batch: {type(owner).__name__} has neither {name} nor "
        f"hparams.{name}, so there is no setting for the size. Write self.{name} = ... "
        f"in its __init__ and DataLoader(..., batch_size=self.{name}) in "
        f"train_dataloader(), or give its name: attribute='...'."
    )


def refuse_own_batches(loader: Any) -> None:
    """Refuse a loader that has no batch size."""
    received = type(loader).__name__
    if isinstance(loader, DataLoader):
        if loader_batch_size(loader) is not None:
            return
        cut_by = type(loader.batch_sampler).__name__
        how = "batch_size=None" if loader.batch_sampler is None else cut_by
        received += f", whose batches are cut by {how}"
    raise TrainkitError(
        f"find_micro_batch: needs a LightningDataModule or one DataLoader with "
        f"batch_size=, received {received}. {BY_HAND}"
    )


def refuse(trainer: Any, module: Any) -> None:
    """Refuse what cuts batches or communicates by itself.

    Raises:
        TrainkitError: there is no size to find with this module, callback or backend.
    """
    for why in _why_not(trainer, module):
        raise TrainkitError(f"find_micro_batch: {why}. {BY_HAND}")


def _why_not(trainer: Any, module: Any) -> Iterator[str]:
    name, strategy = type(module).__name__, trainer.strategy
    for owner in (module, *trainer.callbacks):
        if getattr(owner, "micro_batching", None) is not None:
            yield (
                f"{type(owner).__name__}.micro_batching cuts loader batches by itself, "
                f"and MicroBatching('auto') finds the size of the cut"
            )
        if has_callback([owner], *SCHEDULES):
            yield (
                f"{type(owner).__name__} changes accumulate_grad_batches during "
                f"training, so there is no single effective batch to keep"
            )
    if not module.automatic_optimization:
        yield f"{name} optimizes manually, and decides itself how long its windows are"
    if starts_processes_for_fit(strategy):
        yield (
            f"{type(strategy).__name__} trains in processes that end with fit, and "
            f"what they find is lost with them; strategy='ddp' keeps it"
        )
    for each in _communicating(strategy, module) if trainer.world_size > 1 else ():
        yield (
            f"on {trainer.world_size} ranks {each} communicates within a pass, and a "
            f"rank that runs out of memory there leaves the others waiting"
        )


def _communicating(strategy: Any, module: Any) -> Iterator[str]:
    if "DDPStrategy" not in {cls.__name__ for cls in type(strategy).__mro__}:
        yield type(strategy).__name__
    if any(isinstance(each, nn.SyncBatchNorm) for each in module.modules()):
        yield "SyncBatchNorm"
    if getattr(strategy.model, "static_graph", False):
        yield "DDP with static_graph=True"
