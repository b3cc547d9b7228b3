"""The accumulator: one window after another, in any training loop."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from trainkit.core import refusals
from trainkit.core.checks import Checks, Nonfinite, Watch
from trainkit.core.gradients import (
    are_finite,
    gradients_of,
    parameters_of,
    scale_,
    sum_over_ranks_,
)
from trainkit.core.ranks import (
    Aggregation,
    Ranks,
    averaged_by_ddp,
    find_ranks,
    num_running,
)
from trainkit.core.state import load_weights, load_window, save_weights, save_window
from trainkit.core.strategies import AccumulationStrategy, Weight, kind_of
from trainkit.core.terms import leading, named_strategies
from trainkit.core.weighing import Weighing
from trainkit.core.window_stats import DIVISOR, WEIGHT, WindowStats
from trainkit.errors import TrainkitError


class Accumulator(Weighing):
    r"""Makes the gradient of a window that of one big batch.

        gradient = sum_i w_i * grad(mean loss of micro-batch i) / sum_i w_i

    over the whole window, all ranks. While the window is open, the gradient of
    micro-batch i is added as w_i / r, where r is one number that all ranks share; when
    it closes, the sum is multiplied once by r / sum_i w_i. A window that `expect` has
    told beforehand has each gradient added as w_i / sum_i w_i at once.

    >>> import torch
    >>> from trainkit import PerSample
    >>> model = torch.nn.Linear(2, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> accumulator = Accumulator(PerSample())
    >>> for x in torch.randn(5, 2).split(2):  # micro-batches of 2, 2 and 1 samples
    ...     accumulator.backward(model(x).square().mean(), x)
    >>> stats = accumulator.finish(optimizer)
    >>> int(stats.weight)
    5
    >>> optimizer.step()

    Args:
        strategy: says what a micro-batch weighs; a mapping of several, by name, for a
            loss of several terms, whose windows `expect` must tell beforehand.
        module: what trains, wrapped and sharded as it will be. Shows what the backend
            does to gradients across ranks, and which gradients `state_dict` holds.
        aggregation: what the backend does to gradients across ranks: leaves their
            `"mean"` (DDP, FSDP), their `"sum"`, or does nothing (`"none"`: `finish`
            adds them up itself). `"auto"` reads it from `module`.
        process_group: the data-parallel ranks; default: the module's, or all.
        checks: `"late"` costs nothing and complains one window late; `"now"` waits for
            the device once a window and refuses before the step is taken.
        nonfinite: a loss that is NaN or infinite and weighs something: `"raise"`;
            `"allow"` it, for a gradient scaler that skips the step (the default where
            there is one); or `"skip"` the micro-batch, its weight left out (waits for
            the device at each loss).
        scaler: the gradient scaler of the loop, if it has one. Needed where it serves
            several accumulators, whose windows its factor may change in.
        wide_gradients: keep the window's gradient in float32 beside parameters of half
            precision, and round it once when the window closes; needs `module`.

    Gradients that are there when a window opens become part of it: zero them first.

    Attributes:
        parameters: whose gradients the windows are; known when one has been finished.

    Raises:
        TrainkitError: several ranks are running, and how they aggregate is unknown.
    """

    def __init__(
        self,
        strategy: AccumulationStrategy | Mapping[str, AccumulationStrategy],
        *,
        module: Any = None,
        aggregation: Aggregation = "auto",
        process_group: Any = None,
        checks: Checks = "late",
        nonfinite: Nonfinite | None = None,
        scaler: Any = None,
        wide_gradients: bool = False,
    ) -> None:
        nonfinite = nonfinite or ("raise" if scaler is None else "allow")
        super().__init__(
            strategy,
            module=module,
            ranks=find_ranks(module, aggregation, process_group),
            nonfinite=nonfinite,
            scaler=scaler,
        )
        self._num_running = num_running()
        self.watch = Watch(
            checks,
            nonfinite,
            self._has_lost_gradients,
        )
        self.watch.measure_by(self.strategies)
        self.num_windows = 0
        self._reads_hooks = aggregation == "auto"
        self._averaged = averaged_by_ddp(module)
        self._is_looked_at = False
        if wide_gradients:
            refusals.refuse_wide_without_module(module)
            self.keep_wide(partial(_trained, module))
        if nonfinite == "skip":
            refusals.refuse_skips_between_ranks(self.ranks)

    def backward(
        self,
        loss: Tensor | Mapping[str, Tensor],
        batch: Any = None,
        *,
        weight: Weight | None = None,
        backward: Callable[[Tensor], Any] | None = None,
        last: bool = False,
    ) -> None:
        """Run a micro-batch's backward pass, weighted.

        Args:
            loss: what the strategy's `loss_reduction` says, undivided; with several
                strategies, the terms by name.
            batch: what the strategy weighs. Not needed after `expect`.
            weight: the weight itself, in place of `batch`.
            backward: runs the backward pass, such as `fabric.backward` or
                `lambda loss: scaler.scale(loss).backward()`.
            last: the window ends with this micro-batch: its totals then travel between
                ranks during the backward pass. Optional; all ranks say it alike.
        """
        refusals.refuse_dividing_backward(backward)
        if self._window.expected is not None or len(self.strategies) > 1:
            loss, weight = self.take(loss)
        else:
            weight = self.strategy.weight(batch) if weight is None else weight
        refusals.refuse_loss(loss, self.strategy.loss_reduction)
        assert isinstance(loss, Tensor)
        if self.watch.nonfinite == "skip" and not bool(loss.isfinite()):
            self._window.skip(loss)
            return
        handle = self.weigh(loss, weight)
        if last:
            self.announce()
        self._window.is_torn = True
        try:
            (backward or Tensor.backward)(loss)
            self._window.is_torn = False
            self.passed()
        finally:
            handle.remove()

    def weigh_by(
        self, strategy: AccumulationStrategy | Mapping[str, AccumulationStrategy]
    ) -> None:
        """Weigh by another strategy, from the window on that opens next."""
        if self._window.is_open or self._window.expected is not None:
            raise TrainkitError(
                f"strategy: the open window (micro-batches so far: "
                f"{self.num_micro_batches}) was weighed by {kind_of(self.strategy)}, "
                f"and what another strategy weighs cannot be added to it. Change it "
                f"between two windows: at the start of an epoch, say, or after the "
                f"optimizer's step."
            )
        self.strategies = named_strategies(strategy)
        self.strategy = leading(self.strategies)
        self.watch.measure_by(self.strategies)

    def announce(self, *, slots: int = 0) -> None:
        """Send this rank's totals to the others: the window is complete.

        Args:
            slots: also send up to so many single weights, the same number on all ranks.
        """
        row = self._window.row(self._device(), self._reduction, slots=slots)
        self._window.announced = self.ranks.share(row)

    def finish(
        self, optimizer_or_parameters: Any, *, slots: int = 0, is_apart: bool = False
    ) -> WindowStats:
        """Close the window: its gradients become those of the big batch.

        To be called by every rank, before clipping and before `optimizer.step()`.

        Args:
            optimizer_or_parameters: whose gradients. Others are left as they are.
            slots: as for `announce`, if that was not called.
            is_apart: True where no backward pass of the window has communicated, so
                that the ranks' gradients are brought together here.

        Raises:
            TrainkitError: the window is empty; or, with `checks="late"`, an earlier
                window must stop the run.
        """
        parameters = self.parameters = parameters_of(optimizer_or_parameters)
        self._refuse_before_division(parameters, is_apart)
        if self._window.announced is None:
            self.announce(slots=slots)
        assert self._window.announced is not None
        table = self._window.announced.wait()
        totals = table[0] if self.ranks.size == 1 else table.sum(0)
        stats = WindowStats(table, totals, self._reduction)
        step, self.num_windows = self.num_windows, self.num_windows + 1
        from_opening = self._factor.to_opening(totals.device)
        is_divided = self._window.is_divided
        self._close()
        self._is_first = False
        self.watch.submit(step, table, are_finite=self._are_finite(parameters))
        scale = None if is_divided else self._scale(totals, from_opening)
        rest = parameters
        if self.wide is not None:
            self.wide.hand_over(scale)
            rest = self.wide.others(parameters)
        if scale is not None:
            scale_(gradients_of(rest), scale)
        if self.ranks.size > 1 and (is_apart or not self.ranks.backend_sums):
            times = 1 / self.ranks.multiplier
            sum_over_ranks_(rest, self.ranks, times=times)
        if not is_divided:
            self._reference.follow(step, totals[WEIGHT])
        return stats

    def _has_lost_gradients(self) -> bool:
        return not are_finite(self.parameters)

    def _are_finite(self, parameters: list[Tensor]) -> Tensor | None:
        """Whether gradients of float16 are, where no scaler asks: their sum overflows
        at 65,504, and no loss tells."""
        if self._nonfinite == "allow":
            return None
        narrow = [g for g in gradients_of(parameters) if g.dtype is torch.float16]
        return (
            torch.stack([g.isfinite().all() for g in narrow]).all() if narrow else None
        )

    def state_dict(self, *, over_ranks: bool = False) -> dict[str, Any]:
        """The open window, for a checkpoint inside it.

        Holds the partial gradients too, if `module` is the module that trains.

        Args:
            over_ranks: False saves this rank's part, to be loaded by this rank. True
                adds up the parts of all ranks, for one checkpoint that any number of
                ranks can load; every rank must then call it.
        """
        row = self._window.row(self._device(), self._reduction)
        ranks = self.ranks if over_ranks else Ranks()
        return {
            "rank": None if over_ranks else self.ranks.index,
            "num_windows": self.num_windows,
            "strategy": kind_of(self.strategy),
            "weights": save_weights(self._window.single(row.device), ranks),
            **save_window(
                row,
                self._reference.value,
                self._factor.opening,
                self._module,
                ranks,
                wide=self.wide,
            ),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on inside the window that `state_dict` saved."""
        whose = (None, self.ranks.index)
        if state["totals"] is not None and state["rank"] not in whose:
            raise TrainkitError(
                f"state_dict: it holds the open window of rank {state['rank']}, and "
                f"this is rank {self.ranks.index}: the law needs each rank's own part. "
                f"Save one state for each rank, or one with over_ranks=True."
            )
        if state["totals"] is not None and state["strategy"] != kind_of(self.strategy):
            raise TrainkitError(
                f"state_dict: its open window was weighed by {state['strategy']}, and "
                f"this accumulator weighs by {kind_of(self.strategy)}, which cannot be "
                f"added up. Resume with the same, or from between two windows."
            )
        self.drop()
        self.watch.forget()
        self.num_windows = state["num_windows"]
        self._reference.set(state["reference"])
        self._factor.opening = state["factor"]
        is_whole = state["rank"] is None
        ranks = self.ranks if is_whole else Ranks()
        self._window.carried = load_window(state, self._module, ranks, wide=self.wide)
        self._window.carried_weights = load_weights(state.get("weights"), ranks)

    def check(self) -> None:
        """Look at all windows closed so far; waits for the device.

        With `checks="late"` a window is looked at when a later one closes. Call this
        after the last one.
        """
        self._read_zeroed(wait=True)
        self.watch.read_all()

    def _scale(self, totals: Tensor, to_opening: Tensor | None) -> Tensor | None:
        """What the sums of an open window are divided by, as a factor."""
        reference = self._reference.value
        if reference is None:
            return None
        scale = reference.to(totals.device)
        if self._reduction != "total":
            scale = scale / totals[DIVISOR]
        if self.ranks.multiplier != 1:
            scale = scale * self.ranks.multiplier
        if to_opening is not None:
            scale = scale / to_opening  # into the scaler's factor of now
        # 0 where nothing weighs anything: 0 / 0 must not reach a gradient.
        return scale.nan_to_num_(0.0, 0.0, 0.0)

    def _refuse_before_division(self, parameters: list[Tensor], is_apart: bool) -> None:
        if not self._factor.has_scaler:  # it has unscaled them: written into them
            self._look_at_left()
        refusals.refuse_division(self._window, is_apart)
        refusals.refuse_late_start(self._num_running, num_running())
        if self.ranks.size == 1 or self.ranks.backend_sums:
            refusals.refuse_empty(self._window)
        ddp = self.ranks.ddp
        if ddp is None or not self.ranks.backend_sums:
            return
        if not is_apart:
            refusals.refuse_unfinished_reduction(ddp)
        refusals.refuse_unreduced(self._averaged, parameters)
        if self._reads_hooks and not self._is_looked_at:
            self._is_looked_at = True
            refusals.look_at_hooks(ddp)


def _trained(module: Any) -> list[Tensor]:
    return [p for p in module.parameters() if p.requires_grad]
