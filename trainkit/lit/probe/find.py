"""The search for the micro-batch of streamed windows, before training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from trainkit.core.plan.effective_batch import BatchPlan
from trainkit.core.plan.options import check_whole_number
from trainkit.errors import TrainkitError
from trainkit.lit.callback.table import Row, show
from trainkit.lit.probe.attempt import Finder, Trial
from trainkit.lit.probe.fit_aside import Aside, refuse_other_kinds
from trainkit.lit.probe.setting import BY_HAND, find_setting, refuse
from trainkit.lit.proof.report import NotMeasured


@dataclass(frozen=True)
class FoundMicroBatch:
    """The micro-batch that `find_micro_batch` has chosen, and the result of each size.

    Attributes:
        plan: the micro-batch and how many make a window; its `max_micro_batch` is the
            micro-batch that was chosen.
        trials: the sizes tried, smallest first.
    """

    plan: BatchPlan
    trials: tuple[Trial, ...]

    @property
    def micro_batch(self) -> int:
        """The loader's new batch size."""
        return self.plan.micro_batch

    @property
    def accumulate(self) -> int:
        """The new value of `trainer.accumulate_grad_batches`."""
        return self.plan.accumulate

    def tried(self) -> list[Row]:
        """The sizes tried, as rows of a table."""
        return [(f"micro-batch {each.size}", str(each)) for each in self.trials]

    def rows(self) -> list[Row]:
        """The sizes tried and the chosen one, as rows of a table."""
        plan = self.plan
        target = "exactly the target" if plan.exact else f"target {plan.target}"
        made = f"{plan.micro_batch} x accumulation {plan.accumulate}"
        chosen = f"{made} x ranks {plan.world_size} = {plan.effective} ({target})"
        return [*self.tried(), ("chosen", chosen)]


def find_micro_batch(
    trainer: Any,
    module: Any,
    datamodule: Any = None,
    *,
    target: int = 512,
    max_micro_batch: int | None = None,
    margin: float = 0.1,
    attribute: str = "batch_size",
    verbose: bool = True,
) -> FoundMicroBatch:
    """Find the largest micro-batch that fits, for a given effective batch.

        find_micro_batch(trainer, module, datamodule, target=512)
        trainer.fit(module, datamodule)

    Sizes that can make up the target are tried on rows of the training loader, on all
    ranks at once: forward, backward, optimizer step, and again beside the optimizer's
    state. They are the longest rows, and a tenth more of them than the size needs.
    (Twice as many rows are read, and at least 64. How long a row is, is counted before
    padding.) The search begins at the present size. No size is timed: on most devices a
    larger one is faster until memory ends; `max_micro_batch` ends the search earlier.

    Then the loader's batch size and `trainer.accumulate_grad_batches` are set; `fit`
    trains as if you had written these two by hand. All else runs on copies of Trainer,
    module and data module: their hooks up to the first batch, `configure_optimizers`,
    and the attempts. Loggers and callbacks see nothing. Options of the Trainer that
    count loader batches are not changed, and what a callback holds on the device, such
    as an average of the weights, is not there: a greater `margin` leaves room for it.
    A module that is compiled as a whole is tried as it was written.

    Args:
        trainer: as it will train.
        module: the module that it will train.
        datamodule: a LightningDataModule or the training DataLoader. Leave it out if
            the module has `train_dataloader`.
        target: the samples that one optimizer step should see, over all ranks.
        max_micro_batch: the largest size to try.
        margin: how many more rows than a size says must fit, as a share of it.
        attribute: the name under which the data module or the module keeps the batch
            size, as an attribute or in `hparams`.
        verbose: print a table on the first rank.

    Raises:
        TrainkitError: one row alone does not fit, or no size can be found: the batch
            size has no setting, the loader is not a plain DataLoader, a forward or
            backward pass communicates, or the module cannot be copied.
    """
    check_whole_number("find_micro_batch target", target)
    if max_micro_batch is not None:
        check_whole_number("find_micro_batch max_micro_batch", max_micro_batch)
    if not 0 <= margin < 1:
        raise TrainkitError(
            f"find_micro_batch margin: must be a share from 0 to below 1, received "
            f"{margin!r}. 0.1 tries a size with a tenth more rows."
        )
    refuse_other_kinds("find_micro_batch", trainer, module)
    refuse(trainer, module)
    setting = find_setting(module, datamodule, attribute)
    start = setting.read()
    module.cpu()  # where fit leaves it: its copy alone is on the device
    try:
        aside = Aside(trainer, module, datamodule)
        written = find_setting(aside.module, aside.data, attribute)
        # Another size, to see whether the loader uses it; and small: one batch is read.
        written.write(2 if start == 1 else 1)
        finder = Finder(written, target, start, max_micro_batch, margin)
        aside.fit(finder)
    except NotMeasured as error:
        raise TrainkitError(
            f"find_micro_batch: sizes are tried on a copy of the module, and {error}. "
            f"{BY_HAND}"
        ) from error
    if finder.plan is None:
        raise TrainkitError(
            "find_micro_batch: the Trainer ran no batch, so no size could be tried. "
            "Look for limit_train_batches=0, an empty loader, or max_epochs and "
            "max_steps that are reached already."
        )
    found = FoundMicroBatch(finder.plan, tuple(finder.trials))
    setting.write(found.micro_batch)
    trainer.accumulate_grad_batches = found.accumulate
    if verbose and trainer.is_global_zero:
        show(found.rows())
    return found
