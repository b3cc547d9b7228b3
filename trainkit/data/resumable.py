"""A loader that goes on at the very row where an interrupted run stopped."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, SequentialSampler

from trainkit.data.row_sampler import RowSampler
from trainkit.errors import TrainkitError


class ResumableLoader(DataLoader[Any]):
    """A `DataLoader` whose state Lightning saves and restores by itself.

        train = ResumableLoader(dataset, 32, shuffle=True, seed=1, num_workers=4)

    A resumed run reads the next batch without loading those before it. Batches that
    workers have fetched ahead do not count as read. The order depends on seed and epoch
    alone; several ranks share the rows without a sampler of their own, and no row is
    read twice to make them even. It draws nothing from torch's global generator.

    What is exact: a resume within an epoch on any number of ranks, as long as
    batch_size times ranks stays the same (32 on one rank, 16 on two); at an epoch's end
    whatever you like. Other changes are refused. In a loop of your own, call
    `loader.sampler.set_epoch(epoch)` before each epoch, as Lightning does.

    What cannot go on exactly is what worker processes draw at random for each row: they
    start anew. Draw it from a generator that is seeded by the row.

    Args:
        dataset: with a length and rows by index.
        batch_size: rows of a batch on one rank.
        shuffle: whether each epoch has an order of its own.
        seed: of the orders, and of the workers.
        drop_last: leave out the last batch if it is not full on every rank.
        process_group: the ranks that share the rows, where it is not all of them.
        **options: `num_workers`, `collate_fn` and all others of `DataLoader`.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int = 1,
        *,
        shuffle: bool = False,
        seed: int = 0,
        drop_last: bool = False,
        process_group: Any = None,
        **options: Any,
    ) -> None:
        _check(dataset, batch_size, seed)
        if _takes_no_other_order(options):
            shuffle = False
        self._rows = RowSampler(
            dataset,
            batch_size=batch_size,
            shuffle=bool(shuffle),
            seed=seed,
            drop_last=drop_last,
            process_group=process_group,
        )
        options.setdefault("generator", torch.Generator())
        # The sampler leaves out what is not full: it knows the other ranks too.
        super().__init__(dataset, batch_size, sampler=self._rows, **options)
        self.shuffle = shuffle
        self.seed = seed
        self._num_read = 0
        self._resumed: dict[str, Any] | None = None

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        # A generator, so that nothing begins before the first batch is asked for:
        # Lightning calls iter() before it says which epoch it is.
        self._num_read = self._rows.first_row = self._take_start()
        seed = self._rows.seed_for(self._rows.ranks[0])
        assert self.generator is not None
        self.generator.manual_seed(seed)  # the workers' seeds come from it
        stretch, num_rows = self._rows.stretch, self._rows.num_rows
        for batch in super().__iter__():
            self._num_read = min(self._num_read + stretch, num_rows)
            yield batch

    def state_dict(self) -> dict[str, Any]:
        """How many rows of which epoch all ranks have been given, and of what order."""
        if self._resumed is not None:
            return dict(self._resumed)
        return {
            "epoch": self._rows.epoch,
            "num_read": self._num_read,
            "num_rows": self._rows.num_rows,
            **self._described(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on after the rows that were read; refuses where they cannot be told."""
        if 0 < state_dict["num_read"] < state_dict["num_rows"]:
            for name, value in self._described().items():
                if state_dict[name] != value:
                    _refuse_change(name, state_dict[name], value)
        self._rows.epoch = state_dict["epoch"]
        self._resumed = dict(state_dict)

    def _described(self) -> dict[str, Any]:
        return {
            "dataset": len(self.dataset),  # type: ignore[arg-type]
            "shuffle": self._rows.shuffle,
            "seed": self._rows.seed,
            "batch_size x ranks": self._rows.stretch,
        }

    def _take_start(self) -> int:
        """From which row on the epoch that now begins is read."""
        state, self._resumed = self._resumed, None
        if state is None or state["epoch"] != self._rows.epoch:
            return 0
        return state["num_read"] if state["num_read"] < state["num_rows"] else 0


def _check(dataset: Any, batch_size: Any, seed: Any) -> None:
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        raise TrainkitError(
            f"ResumableLoader dataset: must have a length and rows by index, received "
            f"{type(dataset).__name__}. For a stream use a loader with a state of its "
            f"own, such as torchdata's StatefulDataLoader."
        )
    for name, value, least in (("batch_size", batch_size, 1), ("seed", seed, None)):
        is_whole = isinstance(value, int) and not isinstance(value, bool)
        if not is_whole or (least is not None and value < least):
            rule = "a whole number" + (f" of at least {least}" if least else "")
            raise TrainkitError(
                f"ResumableLoader {name}: must be {rule}, received {value!r}."
            )


def _takes_no_other_order(options: dict[str, Any]) -> bool:
    """Whether the rows are to be read as they stand: Lightning makes a loader anew
    with a `SequentialSampler` for `overfit_batches`."""
    sampler = options.pop("sampler", None)
    batches = options.pop("batch_sampler", None)
    is_plain = sampler is None or isinstance(sampler, SequentialSampler | RowSampler)
    if batches is not None or not is_plain:
        raise TrainkitError(
            f"ResumableLoader: it has its own sampler and takes no other, received "
            f"{type(batches or sampler).__name__}. Use a DataLoader for prediction, "
            f"where Lightning passes one, and torchdata's StatefulDataLoader for a "
            f"sampler of your own."
        )
    return isinstance(sampler, SequentialSampler)


def _refuse_change(name: str, saved: Any, now: Any) -> None:
    raise TrainkitError(
        f"ResumableLoader {name}: must stay as it was within an epoch, was {saved} "
        f"when the checkpoint was written and is {now} now. Set it back, or begin a "
        f"run of its own (from weights alone, or a checkpoint of an epoch's end)."
    )
