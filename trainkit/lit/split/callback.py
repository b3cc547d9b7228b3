"""The window callback of a module whose loader batches may be cut."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch.distributed as dist
from torch import Tensor

from trainkit.core.accumulator import Accumulator
from trainkit.core.joins.inside import JoinedChunks
from trainkit.core.joins.layers import Sharing
from trainkit.core.joins.steps import JoinedSteps
from trainkit.core.refusals import refuse_static_graph
from trainkit.core.split.micro_batching import MicroBatching
from trainkit.core.split.search import SizeSearch
from trainkit.core.window_stats import WindowStats
from trainkit.lit.callback.said_weight import refuse_said_terms
from trainkit.lit.callback.table import Row
from trainkit.lit.inside.cuts import InsideCuts
from trainkit.lit.inside.refusals import refuse_several_unweighed
from trainkit.lit.split import refusals
from trainkit.lit.split.fillers import refuse_fillers_that_count
from trainkit.lit.split.sizes import AutoSizes, FixedSizes
from trainkit.lit.split.windows import SplitWindows
from trainkit.lit.windows.callback import WindowCallback

KEY = "trainkit_micro_batching"
"""The size that was found, in a checkpoint."""


class SplitCallback(WindowCallback):
    """Cuts loader batches if `micro_batching` is set; otherwise acts as its parent.

    Attributes:
        micro_batching: how to cut them, if they are to be cut.
        split: cuts the loader batches of this `fit`, if they are to be cut.
    """

    micro_batching: MicroBatching | None = None

    def _forget(self) -> None:
        super()._forget()
        self.split: SplitWindows | None = None
        self.inside: InsideCuts | None = None
        self._found: Any = None
        self._host_group: Any = None
        self._shown: int | None = None
        self._joined, self.sharing = ExitStack(), None
        self._chunks: JoinedChunks | None = None

    def _show_as(self, other: Any) -> None:
        super()._show_as(other)
        self._shown = other.micro_batch_size

    @property
    def is_split(self) -> bool:
        return self._split_options is not None

    @property
    def _split_options(self) -> MicroBatching | None:
        """How loader batches are cut on the host; None if they are not."""
        options = self.micro_batching
        return None if options is None or options.inside is not None else options

    @property
    def micro_batch_size(self) -> int | None:
        if self.inside is not None:
            return self.inside.size
        return self._shown if self.split is None else self.split.sizes.shown

    @property
    def fills_up(self) -> bool:
        """Whether the present micro-batch only lets all ranks run equally many."""
        current = None if self.split is None else self.split.current
        micro_batch = None if current is None else current.micro_batch
        return micro_batch is not None and micro_batch.is_filler

    # ---- before and after training ---------------------------------------------------

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        refusals.refuse_wrong_type(self.micro_batching)
        options = self._split_options
        if self.micro_batching is not None and options is None:
            self.inside = InsideCuts(pl_module, self.micro_batching)
            self.inside.load_state_dict(self._found or {})
            self.inside.start()
        if not self.has_strategy:
            refuse_several_unweighed(trainer, pl_module, self)
        refuse_said_terms(self.strategies)
        refuse_fillers_that_count(trainer, pl_module, self.strategies, options)
        super().on_train_start(trainer, pl_module)
        if options is None:
            refusals.refuse_untold_terms(self.strategies)
            return
        accumulator = self.accumulators[0]
        refuse_static_graph(accumulator.ranks.ddp, 2)  # it may be cut
        sizes = self._sizes(trainer, pl_module, options, accumulator)
        self.split = SplitWindows(trainer, pl_module, options, self, sizes)
        self.split.start()

    def _sizes(
        self, trainer: Any, pl_module: Any, options: MicroBatching, accumulator: Any
    ) -> FixedSizes | AutoSizes:
        if not options.is_auto:
            return FixedSizes()
        ranks = accumulator.ranks
        communicates = refusals.communicates_in_forward(pl_module, ranks)
        refusals.refuse_auto_between_ranks(trainer, communicates)
        if ranks.size > 1:
            self._host_group = dist.new_group(backend="gloo")
        search = SizeSearch(start=options.start)
        if self._found is not None:
            search.load_state_dict(self._found)
        return AutoSizes(search, ranks, self._host_group, pl_module.device)

    def table_rows(self, trainer: Any, pl_module: Any) -> list[Row]:
        rows = super().table_rows(trainer, pl_module)
        if self._split_options is not None:
            is_step = trainer.accumulate_grad_batches == 1
            rows.append(("split", describe(self._split_options, is_step=is_step)))
        if self.inside is not None:
            row = self.inside.table_row(
                has_strategy=self.has_strategy, num_ranks=trainer.world_size
            )
            rows.append(row)
        return rows

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        super().on_train_epoch_end(trainer, pl_module)
        if self.split is not None:
            self.split.read_late()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        super().on_train_end(trainer, pl_module)
        if self.split is not None:
            self.split.read_late()
        self._stop()

    def on_exception(
        self, trainer: Any, pl_module: Any, exception: BaseException
    ) -> None:
        super().on_exception(trainer, pl_module, exception)
        self._stop()

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        super().teardown(trainer, pl_module, stage)
        self._host_group = None
        self._stop()

    def join_statistics(self, trainer: Any, pl_module: Any, memory: Any) -> None:
        ranks = self.accumulators[0].ranks
        self.sharing = sharing = Sharing(ranks)
        if self.split is not None:
            refusals.refuse_auto_between_ranks(
                trainer, self.split.sizes.catches and ranks.size > 1
            )
            self.split.join(JoinedSteps(pl_module, memory, sharing))
            return
        self._chunks = joined = JoinedChunks(pl_module, memory, sharing)
        joined.install()
        self._joined.callback(joined.remove)
        if self.inside is not None:
            self.inside.couple(joined)

    @contextmanager
    def bare(self) -> Iterator[None]:
        joined = [self._chunks, None if self.split is None else self.split.joined]
        taken = [*filter(None, joined), *(self.inside.cuts if self.inside else ())]
        for each in reversed(taken):
            each.remove()
        try:
            yield
        finally:
            for each in taken:
                each.install()

    @property
    def micro_batch_now(self) -> tuple[int, Sequence[int]] | None:
        current = None if self.split is None else self.split.current
        if current is None or current.at is None:
            return None
        numbers = [n for n, m in enumerate(current.micro_batches) if m is current.at]
        return numbers[0], current.at.cut.rows

    def _stop(self) -> None:
        self._joined.close()
        if self.split is not None:
            self.split.stop()
        if self.inside is not None:
            self.inside.stop()

    # ---- a loader batch --------------------------------------------------------------

    def take_calls(self, trainer: Any, pl_module: Any) -> None:
        if self._split_options is None:  # else each of its parts is weighed
            super().take_calls(trainer, pl_module)

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Tensor) -> None:
        if self.split is None:
            super().on_before_backward(trainer, pl_module, loss)
        else:
            self.weigh(loss)

    def weigh(self, loss: Tensor, *, as_seed: bool = False) -> Tensor | None:
        """Weigh a micro-batch's loss before its backward pass in a split window."""
        assert self.split is not None
        self._batch_is_unfinished = True
        return self.split.weigh(loss, as_seed=as_seed)

    def on_before_zero_grad(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        if self.split is not None and self.accumulators[0].is_open:
            self.split.stash_gradients(optimizer)
        else:
            super().on_before_zero_grad(trainer, pl_module, optimizer)

    def _finish(
        self, trainer: Any, accumulator: Accumulator, parameters: list[Tensor]
    ) -> WindowStats:
        if self.split is None:
            return super()._finish(trainer, accumulator, parameters)
        self._num_closed = 1  # a closure that runs again runs all of them again
        return accumulator.finish(
            parameters, slots=self.slots(), is_apart=self.split.is_apart
        )

    def _num_loader_batches(self) -> int | None:
        if self.split is None:
            return None
        return self.split.num_loader_batches * self.accumulators[0].ranks.size

    def slots(self) -> int:
        """How many single weights of each rank a closing window has room for."""
        accumulator = self.accumulators[0]
        told = accumulator.window.told
        if told is not None:
            return self._slots(accumulator, told.most_micro_batches())
        # Ranks do not know each other's numbers, and must ask for as many.
        is_alone = accumulator.ranks.size == 1
        return self._slots(accumulator, accumulator.num_micro_batches) * is_alone

    def forget_means(self) -> None:
        """Drop the sums of `log_exact` in the batch, which is run again."""

    def _num_torn(self) -> int:
        if self.split is None or not self._batch_is_unfinished:
            return super()._num_torn()
        return self.split.num_loader_batches

    # ---- checkpoints -----------------------------------------------------------------

    def on_save_checkpoint(
        self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]
    ) -> None:
        super().on_save_checkpoint(trainer, pl_module, checkpoint)
        if self.split is not None and isinstance(self.split.sizes, AutoSizes):
            checkpoint[KEY] = self.split.sizes.search.state_dict()
        if self.inside is not None:
            checkpoint[KEY] = self.inside.state_dict()

    def on_load_checkpoint(
        self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]
    ) -> None:
        super().on_load_checkpoint(trainer, pl_module, checkpoint)
        self._found = checkpoint.get(KEY)


def describe(options: MicroBatching, *, is_step: bool) -> str:
    """How loader batches are cut, for the table before training.

    >>> describe(MicroBatching(size=4), is_step=False)
    'each loader batch is cut into micro-batches of at most 4 rows; logged means \
weighed as the loss'

    Args:
        options: how they are cut.
        is_step: whether one loader batch makes an optimizer step; otherwise several.
    """
    if options.is_auto:
        how = "into micro-batches that double while that is faster"
    else:
        limits = {"rows": options.size, "tokens": options.tokens}
        said = [f"{limit} {unit}" for unit, limit in limits.items() if limit]
        how = f"into micro-batches of at most {' and '.join(said)}"
    is_what = "is one step," if is_step else "is"
    return f"each loader batch {is_what} cut {how}; logged means weighed as the loss"
