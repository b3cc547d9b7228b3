"""A loader that resumes at the very row where an interrupted run stopped."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, SequentialSampler

from trainkit.core.whole_number import check_whole_number
from trainkit.data.epoch_order import EpochOrder, check_seed
from trainkit.data.filler import Filled
from trainkit.data.length_sampler import LengthSampler
from trainkit.data.row_sampler import Last, RowSampler, check_last
from trainkit.errors import TrainkitError


class ResumableLoader(DataLoader[Any]):
    """A `DataLoader` whose state Lightning saves and restores by itself.

        train = ResumableLoader(dataset, 32, shuffle=True, seed=1, num_workers=4)

    A resumed run reads the next batch without loading those before it. Batches that
    workers have fetched ahead do not count as read. The order depends on seed and epoch
    alone; several ranks share the rows without a sampler of their own, and no row is
    read twice to make them even. It draws nothing from torch's global generator.

    What becomes of an epoch's last rows, where they do not fill a batch on every rank,
    is said by `last`. "weight", the default, reads them as they are: the strategy
    weighs what is there. "drop" leaves them out. "pad" fills the batch up, so that all
    are of one shape. Fillers are rows that `weigh_nothing` has changed; where there are
    fewer rows than ranks, the others read one filler each, so that every rank has as
    many batches. Without `weigh_nothing` such rows, fewer than there are ranks, are
    left out, which is said.

        ResumableLoader(rows, 32, weigh_nothing=WeighNothing(labels=-100))

    What is exact: a resume within an epoch on any number of ranks, as long as
    batch_size times ranks stays the same (32 on one rank, 16 on two); with a
    `batch_sampler` on the same number of ranks; at an epoch's end whatever you like.
    Other changes are refused. Beside a longer loader, in a `CombinedLoader`, one that
    has ended in the epoch that resumes stays ended, and cycles where that cycles.

    In a loop of your own, call `loader.sampler.set_epoch(epoch)` before each epoch, as
    Lightning does; with Fabric too, and leave the loader out of `setup_dataloaders`,
    which counts epochs from 0.

    Its state is that of the last batch read of it. Where something else than the
    training reads batches, a validation or a look at samples, give that a loader of its
    own, or its place is what a checkpoint taken then holds.

    Random numbers that worker processes draw for each row cannot resume exactly: the
    workers start anew. Draw them from a generator that is seeded by the row.

    Args:
        dataset: with a length and rows by index.
        batch_size: rows of a batch on one rank.
        shuffle: whether each epoch has an order of its own.
        seed: of the orders, and of the workers.
        last: "weight", "pad" or "drop".
        weigh_nothing: makes of a row one that weighs nothing, for places to be filled.
        drop_last: the same as `last="drop"`.
        batch_sampler: a `TokenBudgetSampler` or `LengthGroupedSampler`, in place of all
            options above but `dataset` and `weigh_nothing`.
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
        last: Last = "weight",
        weigh_nothing: Callable[[Any], Any] | None = None,
        drop_last: bool = False,
        batch_sampler: LengthSampler | None = None,
        process_group: Any = None,
        **options: Any,
    ) -> None:
        _check(dataset, batch_size, seed)
        check_last(last, weigh_nothing, drop_last=drop_last)
        takes_order_as_it_is = _takes_no_other_order(options)
        _check_in_order(options)
        if batch_sampler is None:
            order: EpochOrder = RowSampler(
                dataset,
                batch_size=batch_size,
                shuffle=bool(shuffle) and not takes_order_as_it_is,
                seed=seed,
                last="drop" if drop_last else last,
                process_group=process_group,
            )
            # The sampler leaves out what is not full: it knows the other ranks too.
            how: dict[str, Any] = {"batch_size": batch_size, "sampler": order}
        else:
            given = (batch_size, shuffle, seed, last, drop_last)
            _check_batch_sampler(batch_sampler, dataset, given, process_group)
            order, how = batch_sampler, {"batch_sampler": batch_sampler}
        order.fills = weigh_nothing is not None
        if weigh_nothing is not None and not isinstance(dataset, Filled):
            dataset = Filled(dataset, weigh_nothing)
        options.setdefault("generator", torch.Generator())
        super().__init__(dataset, **how, **options)
        # Where Lightning looks for the object that knows the epoch and the ranks.
        self.__dict__["sampler"] = self._order = order
        # Under their own names, as Lightning reads them to make a loader anew.
        self.shuffle, self.seed = order.shuffle, order.seed
        self.last, self.weigh_nothing = last, weigh_nothing
        self.process_group = process_group
        self._place = (0, 0)  # the epoch and position of the last batch read
        self._resumed: dict[str, Any] | None = None

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        # A generator, so that nothing begins before the first batch is asked for:
        # Lightning calls iter() before it says which epoch it is.
        order = self._order
        epoch, position = order.epoch, self._take_start()
        self._place, order.start = (epoch, position), position
        assert self.generator is not None
        # The workers' seeds come from it.
        self.generator.manual_seed(order.seed_for(order.ranks[0]))
        for batch in super().__iter__():
            # Of this pass: another one may have looked at a batch in between.
            position = order.after(position)
            self._place = (epoch, position)
            yield batch

    @property
    def gives_fillers(self) -> bool:
        """Whether an epoch has places to fill, on this rank or on another."""
        return self._order.gives_fillers

    def state_dict(self) -> dict[str, Any]:
        """How far all ranks have read in which epoch, and in what order."""
        if self._resumed is not None:
            return dict(self._resumed)
        epoch, position = self._place
        return {
            "epoch": self._order.epoch,
            # Of an epoch that has only been announced nothing is read.
            "position": position if epoch == self._order.epoch else 0,
            "end": self._order.end,
            **self._order.described(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resume after the rows that were read; refuse a state that does not fit."""
        _check_state(state_dict)
        if 0 < state_dict["position"] < state_dict["end"]:
            for name, value in self._order.described().items():
                saved = state_dict.get(name, "another sampler")
                if saved != value:
                    _refuse_change(name, saved, value)
        self._order.epoch, self._order.is_told = state_dict["epoch"], False
        self._resumed = dict(state_dict)

    def _take_start(self) -> int:
        """From which position on the epoch that now begins is read."""
        state, self._resumed = self._resumed, None
        epoch = self._order.epoch
        if state is None or state["epoch"] < epoch:
            return 0
        if state["epoch"] > epoch:
            _refuse_earlier(epoch, saved=state["epoch"])
        if state["position"] < state["end"]:
            return state["position"]
        # Beside a longer loader an epoch may resume in which this one has ended. Where
        # nobody has said which epoch it is, another one begins.
        return self._order.end if self._order.is_told else 0


def _check(dataset: Any, batch_size: Any, seed: Any) -> None:
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        raise TrainkitError(
            f"ResumableLoader dataset: must have a length and rows by index, received "
            f"{type(dataset).__name__}. For a stream use a loader with a state of its "
            f"own, such as torchdata's StatefulDataLoader."
        )
    check_whole_number("ResumableLoader batch_size", batch_size)
    check_seed("ResumableLoader", seed)


def _check_batch_sampler(
    batch_sampler: Any, dataset: Any, given: tuple[Any, ...], process_group: Any
) -> None:
    """Refuse batches that cannot be resumed, or that something else is to cut too."""
    if not isinstance(batch_sampler, LengthSampler):
        raise TrainkitError(
            f"ResumableLoader batch_sampler: must be a TokenBudgetSampler or a "
            f"LengthGroupedSampler, received {type(batch_sampler).__name__}. Use a "
            f"DataLoader for prediction, where Lightning passes one of its own, and "
            f"torchdata's StatefulDataLoader for another."
        )
    if given != (1, False, 0, "weight", False) or process_group is not None:
        raise TrainkitError(
            f"ResumableLoader batch_sampler: cuts the batches by itself, so that "
            f"batch_size, shuffle, seed, last, drop_last and process_group cannot be "
            f"given with it. Give them to {type(batch_sampler).__name__}, which has "
            f"those that apply."
        )
    if len(batch_sampler.lengths) != len(dataset):
        raise TrainkitError(
            f"ResumableLoader batch_sampler: needs the length of every row, received "
            f"{len(batch_sampler.lengths)} lengths for {len(dataset)} rows."
        )


def _takes_no_other_order(options: dict[str, Any]) -> bool:
    """Whether rows are to be read in the dataset's order: Lightning makes a loader anew
    with a `SequentialSampler` for `overfit_batches`."""
    sampler = options.pop("sampler", None)
    if sampler is not None and not isinstance(sampler, SequentialSampler | RowSampler):
        raise TrainkitError(
            f"ResumableLoader sampler: it has its own and takes no other, received "
            f"{type(sampler).__name__}. Use a DataLoader for prediction, where "
            f"Lightning passes one, and torchdata's StatefulDataLoader for a sampler "
            f"of your own."
        )
    return isinstance(sampler, SequentialSampler)


def _check_in_order(options: dict[str, Any]) -> None:
    """Only where batches come in the order of their rows is a count of them a place."""
    if not options.get("in_order", True):
        raise TrainkitError(
            "ResumableLoader in_order: must be True, since a resumed run needs to know "
            "which rows were read, received False. Leave it out."
        )


def _check_state(state_dict: dict[str, Any]) -> None:
    missing = {"epoch", "position", "end"} - state_dict.keys()
    if missing:
        raise TrainkitError(
            f"ResumableLoader load_state_dict: needs a state that a ResumableLoader "
            f"has saved, received one without {', '.join(sorted(missing))}. Use the "
            f"loader that the checkpoint was written with, or begin a run of its own."
        )


def _refuse_earlier(epoch: int, *, saved: int) -> None:
    raise TrainkitError(
        f"ResumableLoader: was saved in epoch {saved}, but set_epoch() announced "
        f"epoch {epoch}. Call loader.sampler.set_epoch({saved}) before the epoch that "
        f"resumes. With Fabric leave this loader out of setup_dataloaders: it counts "
        f"epochs from 0 (it deals rows to the ranks by itself), and move batches by "
        f"fabric.to_device."
    )


def _refuse_change(name: str, saved: Any, now: Any) -> None:
    raise TrainkitError(
        f"ResumableLoader {name}: must stay as it was within an epoch, was {saved} "
        f"when the checkpoint was written and is {now} now. Set it back, or begin a "
        f"run of its own (from weights alone, or a checkpoint of an epoch's end)."
    )
