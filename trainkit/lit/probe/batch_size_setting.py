"""The place where a user keeps the batch size, to read it and to write it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch.utils.data import DataLoader

from trainkit.core.plan.options import check_whole_number
from trainkit.data.row_sampler import RowSampler
from trainkit.errors import TrainkitError
from trainkit.lit._compat import write_batch_size
from trainkit.lit.batch_size.effective import loader_batch_size
from trainkit.lit.probe.refusals import BY_HAND


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
        size = loader_batch_size(self.owner) if self.name is None else (
            getattr(self.owner, self.name, None)
        )  # fmt: skip
        if size is None:
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
    if not isinstance(loader, DataLoader):
        raise TrainkitError(
            f"find_micro_batch: needs a LightningDataModule or one DataLoader, "
            f"received {type(loader).__name__}. {BY_HAND}"
        )
    if loader_batch_size(loader) is None:
        cut_by = type(loader.batch_sampler).__name__
        how = "batch_size=None" if loader.batch_sampler is None else cut_by
        raise TrainkitError(
            f"find_micro_batch: the batches of {type(loader).__name__} are cut by "
            f"{how}, so it has no batch size to find. Give it batch_size=. {BY_HAND}"
        )
