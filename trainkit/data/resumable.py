"""A loader that resumes with the row at which an interrupted run stopped."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import torch
from torch.utils.data import DataLoader, IterableDataset, SequentialSampler

from trainkit.core.plan.options import check_whole_number
from trainkit.data.filler import Filled
from trainkit.data.length_sampler import LengthSampler
from trainkit.data.row_sampler import EpochOrder, RowSampler
from trainkit.data.window_sampler import WindowSampler
from trainkit.errors import TrainkitError


class ResumableLoader(DataLoader[Any]):
    """A `DataLoader` whose state Lightning saves and restores.

        train = ResumableLoader(dataset, 32, shuffle=True, seed=1, num_workers=4)

    Where `configure_optimizers` reads `trainer.estimated_stepping_batches`, Lightning
    alone loses that state, and an epoch that resumes would begin at its first row. Then
    `ExactResume` is needed, or another callback of trainkit that resumes runs.

    A resumed run reads the next batch without loading earlier ones. Batches that
    workers have fetched ahead do not count as read. Only seed and epoch decide the
    order. Several ranks share the rows without another sampler, and no row is read
    twice to make ranks even. It draws nothing from torch's global generator.

    An epoch's last rows may not fill a batch on every rank. They are read as they are,
    and the strategy weighs them; `drop_last` leaves them out. If there are fewer of
    them than ranks, the ranks without one read a filler, a row that `weigh_nothing` has
    changed. Without `weigh_nothing` such rows are left out, with a warning.

        ResumableLoader(rows, 32, weigh_nothing=WeighNothing(labels=-100))

    A resume within an epoch is exact on any number of ranks if batch_size times ranks
    does not change (32 on one rank, 16 on two), and with a `WindowSampler` in any case.
    With another `batch_sampler` the number of ranks must not change. At the
    end of an epoch you may change anything. Other changes are refused. If a loader
    beside a longer one in a `CombinedLoader` had ended in the epoch that resumes, it
    stays ended, or cycles if the combination cycles.

    In a loop of your own, call `loader.sampler.set_epoch(epoch)` before each epoch, as
    Lightning does. Do so with Fabric too, and leave the loader out of
    `setup_dataloaders`, which counts epochs from 0.

    Its state is the place of the last batch that was read from it. If something other
    than training reads batches (validation, or a look at samples), give it another
    loader: a checkpoint would hold that place.

    Random numbers that worker processes draw for each row cannot resume exactly, since
    the workers start anew. Draw them from a generator that is seeded by the row.

    Args:
        dataset: a dataset with a length and rows by index.
        batch_size: rows in a batch on one rank.
        shuffle: whether each epoch has its own order.
        seed: the seed of the orders and of the workers.
        weigh_nothing: returns a row changed so that it weighs nothing, for fillers.
        drop_last: leave out last rows that do not fill a batch on every rank.
        batch_sampler: a `TokenBudgetSampler` or `WindowSampler`, in place of all
            options above except `dataset` and `weigh_nothing`.
        process_group: the ranks that share the rows; default: all.
        **options: `num_workers`, `collate_fn` and all other options of `DataLoader`.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int = 1,
        *,
        shuffle: bool = False,
        seed: int = 0,
        weigh_nothing: Callable[[Any], Any] | None = None,
        drop_last: bool = False,
        batch_sampler: LengthSampler | None = None,
        process_group: Any = None,
        **options: Any,
    ) -> None:
        _check(dataset, batch_size)
        keeps_dataset_order = _keeps_dataset_order(options)
        if batch_sampler is None:
            order: EpochOrder = RowSampler(
                dataset,
                batch_size=batch_size,
                shuffle=bool(shuffle) and not keeps_dataset_order,
                seed=seed,
                drop_last=bool(drop_last),
                process_group=process_group,
            )
            # No drop_last here: the sampler does it, since it knows the other ranks.
            how: dict[str, Any] = {"batch_size": batch_size, "sampler": order}
        else:
            given = (batch_size, shuffle, seed, drop_last)
            _check_batch_sampler(batch_sampler, dataset, given, process_group)
            order, how = batch_sampler, {"batch_sampler": batch_sampler}
        order.fills = weigh_nothing is not None
        if weigh_nothing is not None and not isinstance(dataset, Filled):
            dataset = Filled(dataset, weigh_nothing)
        options.setdefault("generator", torch.Generator())
        super().__init__(dataset, **how, **options)
        # Lightning calls `set_epoch` on this, and asks it for the ranks.
        self.__dict__["sampler"] = self._order = order
        # Lightning reads options by their names when it makes the loader anew.
        self.__dict__["drop_last"] = bool(drop_last)
        self.shuffle, self.seed = order.shuffle, order.seed
        self.weigh_nothing = weigh_nothing
        self.process_group = process_group
        self._place = (0, 0)  # the epoch and position of the last batch read
        self._resumed: dict[str, Any] | None = None

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        # A generator, so that nothing begins before the first batch is asked for:
        # Lightning calls iter() before set_epoch().
        order = self._order
        epoch, position = order.epoch, self._take_start()
        self._place, order.start = (epoch, position), position
        assert self.generator is not None
        # It gives the workers their seeds.
        self.generator.manual_seed(order.seed_for(order.ranks[0]))
        for batch in super().__iter__():
            # This pass's own count: another pass may have read a batch in between.
            position += 1
            self._place = (epoch, position)
            with order.timed(position, self.num_workers * (self.prefetch_factor or 0)):
                yield batch

    @property
    def batches_read(self) -> int | None:
        """How many batches of the epoch this rank has read, with a `WindowSampler`:
        on another number of ranks Lightning would not know it; else None."""
        counts = isinstance(self._order, WindowSampler)
        return self.state_dict()["batches"] if counts else None

    @property
    def gives_fillers(self) -> bool:
        """Whether an epoch has fillers, on this rank or on another."""
        return self._order.gives_fillers

    def state_dict(self) -> dict[str, Any]:
        """The epoch, the batches of it that are read, and the options of the order."""
        if self._resumed is not None:
            return dict(self._resumed)
        epoch, position = self._place
        if epoch != self._order.epoch:
            position = 0  # set_epoch() has only announced the epoch
        return {
            "epoch": self._order.epoch,
            "batches": position,
            "end": self._order.end,
            **self._order.described(),
            **self._order.plan(position),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resume after the rows that were read; refuse a state that does not fit."""
        missing = {"epoch", "batches", "end"} - state_dict.keys()
        if missing:
            _refuse(
                "load_state_dict",
                f"needs a state that a ResumableLoader has saved, received one without "
                f"{', '.join(sorted(missing))}. Use the loader that the checkpoint was "
                f"written with, or begin a new run.",
            )
        if 0 < state_dict["batches"] < state_dict["end"]:
            for name, value in self._order.described().items():
                saved = state_dict.get(name, "another sampler")
                if saved != value:
                    _refuse(
                        name,
                        f"must stay as it was within an epoch, was {saved} when the "
                        f"checkpoint was written and is {value} now. Set it back, or "
                        f"begin a new run (from the weights alone, or from a "
                        f"checkpoint of an epoch's end).",
                    )
        self._order.epoch, self._order.is_told = state_dict["epoch"], False
        self._resumed = self._order.adapted(dict(state_dict))

    def _take_start(self) -> int:
        """The position from which to read the epoch that now begins."""
        state, self._resumed = self._resumed, None
        epoch = self._order.epoch
        if state is None or state["epoch"] < epoch:
            return 0
        if state["epoch"] > epoch:
            _refuse(
                "set_epoch",
                f"was saved in epoch {state['epoch']}, but set_epoch() announced epoch "
                f"{epoch}. Call loader.sampler.set_epoch({state['epoch']}) before the "
                f"epoch that resumes. With Fabric leave this loader out of "
                f"setup_dataloaders, which counts epochs from 0, and move batches by "
                f"fabric.to_device.",
            )
        if state["batches"] < state["end"]:
            return state["batches"]
        # The epoch may resume because of a longer loader beside this one, which has
        # ended. If set_epoch() was not called, another epoch begins.
        return self._order.end if self._order.is_told else 0


def _refuse(option: str, rule: str) -> NoReturn:
    raise TrainkitError(f"ResumableLoader {option}: {rule}")


def _check(dataset: Any, batch_size: Any) -> None:
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        _refuse(
            "dataset",
            f"must have a length and rows by index, received {type(dataset).__name__}. "
            f"For a stream use ResumableStream(loader) around torchdata's "
            f"StatefulDataLoader, of a dataset with state_dict and load_state_dict.",
        )
    check_whole_number("ResumableLoader batch_size", batch_size)


def _check_batch_sampler(
    batch_sampler: Any, dataset: Any, given: tuple[Any, ...], process_group: Any
) -> None:
    """Refuse a sampler that cannot resume, and options that would cut batches too."""
    kind = type(batch_sampler).__name__
    if not isinstance(batch_sampler, LengthSampler):
        _refuse(
            "batch_sampler",
            f"must be a TokenBudgetSampler or a WindowSampler, received {kind}. Use a "
            f"DataLoader for prediction, where Lightning passes one of its own, and "
            f"torchdata's StatefulDataLoader for another.",
        )
    if given != (1, False, 0, False) or process_group is not None:
        _refuse(
            "batch_sampler",
            f"cuts the batches by itself: batch_size, shuffle, seed, drop_last "
            f"and process_group cannot be given with it. Give those that apply to "
            f"{kind}.",
        )
    if len(batch_sampler.lengths) != len(dataset):
        _refuse(
            "batch_sampler",
            f"needs the length of every row, received {len(batch_sampler.lengths)} "
            f"lengths for {len(dataset)} rows.",
        )


def _keeps_dataset_order(options: dict[str, Any]) -> bool:
    """Whether rows must be read in the dataset's order: for `overfit_batches` Lightning
    makes the loader anew with a `SequentialSampler`. Other samplers are refused."""
    sampler = options.pop("sampler", None)
    if sampler is not None and not isinstance(sampler, SequentialSampler | RowSampler):
        _refuse(
            "sampler",
            f"it has its own and takes no other, received {type(sampler).__name__}. "
            f"For prediction, where Lightning passes a sampler, use a DataLoader. For "
            f"a sampler of your own, use torchdata's StatefulDataLoader.",
        )
    if not options.get("in_order", True):
        _refuse(
            "in_order",
            "must be True, since a resumed run needs to know which rows were read, "
            "received False. Leave it out.",
        )
    return isinstance(sampler, SequentialSampler)
