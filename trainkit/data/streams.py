"""A wrapper that lets a loader with a state resume after the batch trained on."""

from __future__ import annotations

import copy
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from torch.utils.data import (
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from trainkit.data.row_sampler import of_all_ranks, rank_and_size
from trainkit.errors import TrainkitError

_NOTHING = object()


class ResumableStream:
    """Wraps a loader, and saves the state of the batch that training was given.

        stream = StatefulDataLoader(dataset, 32, num_workers=4)
        trainer.fit(module, ResumableStream(stream), ckpt_path="last")

    The loader is any that can be iterated and has `state_dict` and `load_state_dict`:
    torchdata's `StatefulDataLoader`, litData's `StreamingDataLoader`, a dataset of
    Hugging Face, or one of your own. Of a loader without a length Lightning reads one
    batch ahead, so the loader's own state is one batch too far, and a resumed run
    would leave that batch out. The wrapper keeps the states of the last two
    batches. `ExactResume`, `AccumulationCallback`, `AccumulationMixin` and the other
    callbacks of trainkit that save runs tell it which of the two training was given.
    In Lightning without any of them, a warning says so. In a loop of your own it needs
    none, and saves the state of the batch that `next()` has returned.

    It knows one pass at a time: to continue an earlier pass is refused. So give
    validation a loader of its own. Each rank saves a state of its own, and the number
    of ranks must not change. For a dataset with rows by index, `ResumableLoader` needs
    no state of two batches, and divides the rows among the ranks.

    Lightning's epoch reaches the loader, its sampler or its dataset, the first of them
    that has a `set_epoch`. Attributes that it lacks are the loader's.

    Args:
        loader: what it wraps; its state must be the place after the batch that it has
            last returned.
    """

    def __init__(self, loader: Any) -> None:
        needed = ("__iter__", "state_dict", "load_state_dict")
        lacks = [name for name in needed if not hasattr(loader, name)]
        if lacks:
            _refuse(
                "loader",
                f"must have {', '.join(needed)}, received {type(loader).__name__} "
                f"without {' and '.join(lacks)}. For rows by index use "
                f"ResumableLoader, for a stream torchdata's StatefulDataLoader.",
            )
        self.loader = loader
        self.is_waiting: Callable[[Any], bool] | None = None
        """Whether a batch waits to be trained on; a callback sets it."""
        self.is_alone: Callable[[], bool] = lambda: False
        """Whether other ranks may not be saving, as after an error; so too."""
        self._epoch: int | None = None  # None: nobody counts epochs
        self._epoch_loaded: int | None = None
        self._last: Any = _NOTHING
        self._before: Any = _NOTHING  # the place before the last batch,
        self._after: Any = _NOTHING  # and after it
        self._is_loaded = False  # and nothing has been read since
        self._is_over = False  # and nothing follows in the pass
        self._pass: Any = None
        self._warned: set[str] = set()
        self._is_litdata = is_litdata(loader)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "loader":
            raise AttributeError(name)
        return getattr(self.loader, name)

    def __copy__(self) -> NoReturn:
        raise TypeError("a ResumableStream knows one pass at a time")

    def __len__(self) -> int:
        return len(self.loader)  # a TypeError, where it has none

    @property
    def sampler(self) -> Any:
        """What Lightning calls `set_epoch` on."""
        return self

    @property
    def batch_sampler(self) -> Any:
        """The loader's, if it has one: where Lightning finds a sampler, as to validate,
        it looks for this as well."""
        return self._part("batch_sampler")

    @property
    def _iterator(self) -> Any:
        """The loader's iterator, which Lightning sets to None to end its workers."""
        return getattr(self.loader, "_iterator", None)

    @_iterator.setter
    def _iterator(self, value: Any) -> None:
        self._pass = None
        if hasattr(self.loader, "_iterator"):
            self.loader._iterator = value

    def set_epoch(self, epoch: int) -> None:
        """Tell the loader, its sampler or its dataset which epoch begins."""
        self._epoch = epoch
        for owner in (self.loader, *map(self._part, ("sampler", "dataset"))):
            if callable(getattr(owner, "set_epoch", None)):
                owner.set_epoch(epoch)
                return

    def __iter__(self) -> Iterator[Any]:
        # Here and not with the first batch: what the loader draws at random must be
        # drawn before ExactResume restores the generators.
        self._refuse_same_rows()
        if self._is_litdata and not self._is_loaded:
            # It resumes until a pass has ended, and Lightning lets none end.
            self.loader.restore = False
        self._pass = batches = iter(self.loader)
        self._is_over = False
        if not self._is_loaded:
            self._note(_NOTHING)
        return self._read(batches)

    def _read(self, batches: Iterator[Any]) -> Iterator[Any]:
        is_resumed, is_over = self._is_loaded, True
        for batch in batches:
            is_over = False
            self._note(batch)
            yield batch
            if self._pass is not batches:
                _refuse(
                    "iter",
                    "knows one pass at a time, and another has begun since this one "
                    "returned a batch. Give validation, or whatever else reads, a "
                    "loader of its own.",
                )
        self._note(_NOTHING)
        self._is_over = True
        if is_resumed and is_over and self._epoch != self._epoch_loaded:
            # The checkpoint is of an epoch's last batch, and this is the next epoch.
            yield from self

    def state_dict(self) -> dict[str, Any]:
        """The place after the batch that training was given, of each rank."""
        if self.is_waiting is None and not self._has_length and _lightning_asks():
            self._warn(
                "no callback of trainkit says which batch Lightning has trained on, "
                "and Lightning may have read one ahead, which a resumed run would "
                "leave out. Add trainkit.ExactResume() to the callbacks."
            )
        if self._after is _NOTHING:
            place = copy.deepcopy(self.loader.state_dict())
        else:
            is_ahead = self.is_waiting is not None and self.is_waiting(self._last)
            place = self._before if is_ahead else self._after
        self._warn_without_state()
        return {
            "epoch": self._epoch,
            "places": of_all_ranks(place, alone=self.is_alone()),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resume after the batch that training was given."""
        if "places" not in state_dict:
            _refuse(
                "load_state_dict",
                "needs a state that a ResumableStream has saved, received one without "
                "places. Use the loader that the checkpoint was written with, or begin "
                "a new run.",
            )
        rank, size = rank_and_size()
        places, epoch = state_dict["places"], state_dict["epoch"]
        if len(places) != size:
            _refuse(
                "load_state_dict",
                f"has a place for each rank, so their number must stay, was "
                f"{len(places)} when the checkpoint was written and is {size} now. Use "
                f"as many ranks, or begin a new run.",
            )
        if places[rank] is None:
            _refuse(
                "load_state_dict",
                f"needs the place of each rank, and that of rank {rank} is not in the "
                f"checkpoint, which another rank wrote alone, after an error. Resume "
                f"from an earlier one.",
            )
        if epoch is not None:
            self.set_epoch(epoch)
        self._epoch_loaded = epoch
        self._last, self._pass, self._is_loaded = _NOTHING, None, True
        self._before = self._after = places[rank]
        if self._is_litdata:  # whose dataset saves its own count of epochs
            self.loader.dataset.set_epoch(places[rank]["current_epoch"])
        self.loader.load_state_dict(copy.deepcopy(places[rank]))

    def begin_epoch(self, epoch: int) -> bool:
        """Tell which epoch begins, where a batch, or the end, may have been read ahead
        as of another one; returns whether the stream must be iterated anew."""
        is_read = self._last is not _NOTHING or self._is_over
        if not epoch or self._epoch == epoch or not is_read:
            return False
        self.set_epoch(epoch)
        if self._last is not _NOTHING:  # back to before that batch
            self._last, self._pass, self._is_loaded = _NOTHING, None, True
            self._epoch_loaded, self._after = epoch, self._before
            self.loader.load_state_dict(copy.deepcopy(self._before))
        return True

    def _note(self, batch: Any) -> None:
        """Note the loader's place; copied, since its state may be a live object."""
        self._last, self._before, self._is_loaded = batch, self._after, False
        self._after = copy.deepcopy(self.loader.state_dict())

    def _part(self, name: str) -> Any:
        return getattr(self.loader, name, None)

    @property
    def _has_length(self) -> bool:
        try:
            len(self)
        except (TypeError, NotImplementedError):
            return False
        return True

    def _warn(self, text: str) -> None:
        if text not in self._warned:
            self._warned.add(text)
            warnings.warn(f"ResumableStream: {text}", stacklevel=3)

    def _warn_without_state(self) -> None:
        dataset = self._part("dataset")
        if isinstance(dataset, IterableDataset) and not hasattr(dataset, "state_dict"):
            self._warn(
                f"the {type(dataset).__name__} has no state_dict of its own, so a run "
                f"reads it from its beginning to find its place, and one that is "
                f"resumed twice within an epoch reads other rows. Give the dataset "
                f"state_dict and load_state_dict."
            )

    def _refuse_same_rows(self) -> None:
        loader = self.loader
        if rank_and_size()[1] == 1 or not isinstance(loader, DataLoader):
            return
        if isinstance(loader.sampler, RandomSampler | SequentialSampler):
            _refuse(
                "sampler",
                f"must divide the rows among the ranks, received a "
                f"{type(loader.sampler).__name__}: every rank would read all rows, "
                f"since Lightning changes no wrapped loader. Pass the loader a "
                f"DistributedSampler, or use ResumableLoader.",
            )


def is_litdata(loader: Any) -> bool:
    """Whether it is litData's loader, which resumes in a way of its own."""
    kinds = (kind.__module__ for kind in type(loader).__mro__)
    return any(name.startswith("litdata.") for name in kinds)


def _refuse(option: str, rule: str) -> NoReturn:
    raise TrainkitError(f"ResumableStream {option}: {rule}")


def _lightning_asks() -> bool:
    """Whether Lightning asks for the state, and no loop that reads batch by batch."""
    asks = sys._getframe(2).f_globals.get("__name__", "")
    return asks.endswith(".utilities.combined_loader")
