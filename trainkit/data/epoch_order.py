"""The base of trainkit's samplers: an order that only seed and epoch decide."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sized
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.utils.data import DistributedSampler

from trainkit.errors import TrainkitError


class EpochOrder(DistributedSampler[Any], ABC):
    """The base of trainkit's samplers: an order of rows that the ranks share.

    It is a `DistributedSampler` so that Lightning does not replace it. It looks up the
    ranks when rows are read, not when it is made. A position counts what all ranks have
    been given in the epoch; each sampler chooses the unit.

    Attributes:
        epoch: the epoch whose order it gives.
        is_told: whether `set_epoch` has been called since the last resume.
        start: the position from which the next pass begins.
        fills: whether a rank without a row may be given a filler.
    """

    def __init__(
        self, dataset: Any, *, shuffle: bool, seed: int, process_group: Any = None
    ) -> None:
        check_seed(type(self).__name__, seed)
        super().__init__(
            dataset, num_replicas=1, rank=0, shuffle=bool(shuffle), seed=seed
        )
        self.process_group = process_group
        self.is_told = False
        self.start = 0
        self.fills = False

    @property
    def ranks(self) -> tuple[int, int]:
        """This rank's index, and how many ranks share the rows."""
        if not (dist.is_available() and dist.is_initialized()):
            return 0, 1
        group = self.process_group
        return dist.get_rank(group), dist.get_world_size(group)

    @property
    def num_rows(self) -> int:
        return len(cast(Sized, self.dataset))

    @property
    @abstractmethod
    def end(self) -> int:
        """The position at which an epoch ends."""

    @property
    @abstractmethod
    def gives_fillers(self) -> bool:
        """Whether an epoch has fillers, on this rank or on another."""

    @abstractmethod
    def after(self, position: int) -> int:
        """The position after one more batch on every rank."""

    def described(self) -> dict[str, Any]:
        """The options that must not change while a position is to keep its meaning."""
        return {"shuffle": self.shuffle, "seed": self.seed}

    def set_epoch(self, epoch: int) -> None:
        """Choose the order, as Lightning does before each epoch."""
        self.epoch, self.is_told = epoch, True

    def seed_for(self, *parts: int) -> int:
        """A seed that differs with the epoch and with each of the parts."""
        seed = self.seed
        for part in (self.epoch, *parts):
            seed = seed * 1_000_003 + part
        return seed % 2**63

    def permuted(self, number: int, *parts: int) -> list[int]:
        """The numbers 0, 1, ... in this epoch's order, shuffled or not."""
        if not self.shuffle:
            return list(range(number))
        generator = torch.Generator().manual_seed(self.seed_for(*parts))
        return torch.randperm(number, generator=generator).tolist()


def check_seed(name: str, seed: object) -> None:
    """Refuse a seed that is not a whole number."""
    if not isinstance(seed, int) or isinstance(seed, bool):
        raise TrainkitError(f"{name} seed: must be a whole number, received {seed!r}.")
