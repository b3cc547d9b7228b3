"""The accumulator: one window after another, in any training loop."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from trainkit.core import refusals
from trainkit.core.checks import Checks, Watch
from trainkit.core.division import Division, Told, weights_by_term
from trainkit.core.gradients import GradientSum
from trainkit.core.ranks import Aggregation, averaged_by_ddp, find_ranks
from trainkit.core.state import load_state, save_state
from trainkit.core.strategies import (
    AccumulationStrategy,
    Strategies,
    Weight,
    checked_weight,
)
from trainkit.core.terms import Joined, join, leading, named_strategies, terms_of
from trainkit.core.wide_gradients import WideGradients
from trainkit.core.window import Window, WindowStats, default_device, read
from trainkit.errors import TrainkitError


class Accumulator:
    r"""Gives a window of micro-batches the gradient of one big batch.

        gradient = sum_i w_i * grad(mean loss of micro-batch i) / sum_i w_i

    The sums are over the whole window, on all ranks. While the window is open, each
    gradient is multiplied by w_i / r, where r is one number that all ranks share. When
    it closes, their sum is multiplied once by r / sum_i w_i. If `expect` has announced
    the window, each gradient is multiplied by w_i / sum_i w_i at once.

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
        strategy: says what a micro-batch weighs. For a loss of several terms, a
            mapping with a strategy for each, by name; `expect` must then announce each
            window.
        module: the module that trains, wrapped and sharded as it will be. It shows what
            the backend does to gradients across ranks, and which gradients `state_dict`
            holds.
        aggregation: what the backend does to gradients across ranks: leaves their
            `"mean"` (DDP, FSDP), their `"sum"`, or does nothing (`"none"`: `finish`
            adds them up itself). `"auto"` reads it from `module`.
        process_group: the data-parallel ranks; default: the module's, or all.
        checks: `"late"` costs nothing and complains one window late. `"now"` waits for
            the device once a window, and refuses before the step is taken.
        scaler: the gradient scaler of the loop, if it has one. It skips a step that is
            not finite, which stops the run without one, and its factor may change
            inside a window if it serves several accumulators.
        wide_gradients: keep the window's gradient in float32 beside parameters of half
            precision, and round it once when the window closes; needs `module`.

    Gradients that exist when a window opens become part of it: zero them first.

    Raises:
        TrainkitError: several ranks are running, and how they aggregate is unknown.
    """

    def __init__(
        self,
        strategy: AccumulationStrategy | Strategies,
        *,
        module: Any = None,
        aggregation: Aggregation = "auto",
        process_group: Any = None,
        checks: Checks = "late",
        scaler: Any = None,
        wide_gradients: bool = False,
    ) -> None:
        self.ranks = find_ranks(module, aggregation, process_group)
        self.gradients = GradientSum(module, self.ranks)
        self.module, self._has_module = module, isinstance(module, nn.Module)
        self.division = Division(self.ranks, scaler)
        self.num_windows = 0
        self.strategies: Strategies = named_strategies(strategy)
        self.strategy = leading(self.strategies)
        self.watch = Watch(
            checks,
            self.strategies,
            self.gradients.are_finite,
            has_scaler=self.division.has_scaler,
        )
        self._close()
        self._had_started = dist.is_initialized()
        self._reads_hooks = aggregation in ("auto", "sum")
        self._averaged = averaged_by_ddp(module, aggregation)
        if wide_gradients:
            if not self._has_module:
                raise TrainkitError(
                    f"wide_gradients=True: needs the module whose parameters get sums "
                    f"in float32, received module={type(module).__name__}. Pass the "
                    f"module that trains, wrapped as it will be."
                )
            training = self.gradients.parameters
            self.gradients.wide = WideGradients(training, ranks=self.ranks)

    def backward(
        self,
        loss: Tensor | Mapping[str, Tensor],
        batch: Any = None,
        *,
        weight: Weight | None = None,
        backward: Callable[[Tensor], Any] | None = None,
    ) -> None:
        """Run a micro-batch's backward pass, weighted.

        Args:
            loss: the mean or sum that the strategy's `loss_reduction` names, undivided.
                With several strategies, a mapping of the terms by name.
            batch: what the strategy weighs. Not needed after `expect`.
            weight: the weight itself, in place of `batch`.
            backward: runs the backward pass, such as `fabric.backward` or
                `lambda loss: scaler.scale(loss).backward()`.
        """
        refusals.refuse_dividing_backward(backward)
        window = self.window
        if len(self.strategies) > 1:
            loss = self.join(loss)
        else:
            if isinstance(loss, Mapping):
                (loss,) = terms_of(loss, self.strategies).values()
            if weight is None and self.told is None:
                weight = self.strategy.weight(batch)
        if backward is None:
            seed: Any = self.seed(loss, weight)
            window.is_torn = True
            loss.backward(**seed)
        else:
            handle = self.weigh(loss, weight)
            window.is_torn = True
            try:
                backward(loss)
            finally:
                handle.remove()
        window.is_torn = False
        self.gradients.add()

    def join(self, loss: Any) -> Tensor:
        """Return the terms of the next announced micro-batch as one loss, each divided
        by its own total; its backward pass must then be weighed."""
        multiplier = self.ranks.multiplier
        self._joined = join(loss, self.told, self.strategies, multiplier)
        return self._joined.loss

    def weigh(
        self, loss: Tensor, weight: Weight | None = None, **how: Any
    ) -> RemovableHandle:
        """Weight the backward pass that is about to run on a loss, with the arguments
        of `enter`, for a loop that then calls `gradients.add()`; returns a handle whose
        `remove()` ends the weighting."""
        factor, window = self.enter(loss, weight, **how), self.window

        def weighted(gradient: Tensor) -> Tensor:
            window.num_passes += 1
            return gradient if factor is None else gradient * factor

        return loss.register_hook(weighted)

    def seed(
        self, loss: Tensor, weight: Weight | None = None, **how: Any
    ) -> dict[str, Tensor]:
        """As `weigh`, where `loss.backward` is sure to get what this returns: its
        `gradient`, to start with. It costs a third of a hook.

        The pass counts as run. So the caller must run it once, with this gradient, and
        nobody else may run one from this loss: it would not be noticed.
        """
        factor = self.enter(loss, weight, **how)
        self.window.num_passes += 1
        if factor is None:
            return {}
        if isinstance(factor, Tensor):
            return {"gradient": factor.expand_as(loss)}
        alike = {"dtype": loss.dtype, "device": loss.device}
        return {"gradient": torch.full(loss.shape, factor, **alike)}

    def enter(
        self,
        loss: Tensor,
        weight: Weight | None = None,
        *,
        value: Tensor | None = None,
        divided_by: int = 1,
        expected: int = 1,
    ) -> Weight | None:
        """Count a micro-batch, and return what its gradient is to be multiplied by;
        None is 1.

        Args:
            loss: where its backward pass starts.
            weight: what it weighs; not needed after `expect`.
            value: the loss to report, if it is not `loss` (which a scaler may have
                multiplied): it is divided alike, and must not be written over.
            divided_by: what the loop has divided the loss by.
            expected: how many micro-batches the window will have on this rank, which
                sets the size of the sums while it is open.
        """
        window, division, ranks = self.window, self.division, self.ranks
        is_loss = isinstance(loss, Tensor) and loss.numel() == 1 and loss.requires_grad
        if window.is_torn or not is_loss or ranks.ddp is not None:
            refusals.refuse_backward(window, ranks, loss)
            # Lightning takes care of it itself, and passes no module.
            window.is_apart = self._has_module and ranks.holds_back_gradients
        self.gradients.begin(window)
        division.device = loss.device
        joined, told = self._joined, self.told
        if told is not None and joined is None and not told.suits(loss, window):
            told = None  # it is divided when it closes
        if not division.is_open:
            division.open(told, window.reduction, loss.device)
        if joined is not None:  # its terms have factors of their own
            window.add(read(joined.value), joined.weight, joined.weight)
            self._joined = None
            return None
        weight = self._next_weight(weight)
        if told is None and division.reference is None:
            division.agree(weight, expected, loss.device)
        factor, applied = division.factor(loss, weight, window.reduction, divided_by)
        reported = read(loss if value is None else value)
        if isinstance(reported, Tensor):
            # clone: the next step of a CUDA graph writes over this one's loss
            reported = loss.detach().clone() if value is None else value
            reported = reported.reshape(())
        window.add(reported, weight, applied, divided_by)
        return factor

    def _next_weight(self, weight: Weight | None) -> Weight:
        """What the micro-batch that begins weighs."""
        if self.told is not None:
            return self.told.next_weights()[self.told.leading]
        near = read(weight)  # checked when the window closes, as one on a device is
        return checked_weight(weight) if near is weight else near

    @property
    def is_open(self) -> bool:
        """Whether gradients are waiting to be divided."""
        return self.window.is_open

    @property
    def num_micro_batches(self) -> int:
        """How many micro-batches the open window has, with those of a checkpoint."""
        return self.window.num_micro_batches

    def expect(self, batches: Iterable[Any]) -> None:
        """Announce all micro-batches that this rank will run in the next window.

        Their weights are summed before the first forward pass, and travel between the
        ranks while it computes. `backward` then uses them in this order.

        Args:
            batches: what the strategies weigh, one for each micro-batch.
        """
        self.tell(weights_by_term(self.strategies, batches))

    def tell(self, weights: Mapping[str, Sequence[Weight]]) -> None:
        """Announce the next window, as `expect` does, by weights that were checked."""
        if self.window.is_open or self.told is not None:
            raise TrainkitError(
                f"expect(): must announce a window before it begins, and the open one "
                f"has already been announced or has micro-batches "
                f"({len(self.window.entries)}). Call it once, before the window's "
                f"first backward(); drop() forgets a window."
            )
        told = Told(weights, self.ranks, self.device)
        if self.ranks.ddp is not None:
            refusals.refuse_static_graph(self.ranks.ddp, told.num_micro_batches)
        self.told = told

    def drop(self) -> int:
        """Forget the open window, and return how many micro-batches it had.

        Its gradients stay in the parameters: zero them.
        """
        held = self.num_micro_batches
        self._close()
        self.gradients.drop()
        return held

    def finish(
        self, optimizer_or_parameters: Any, *, is_apart: bool = False
    ) -> WindowStats:
        """Close the window: its gradients become those of the big batch.

        Every rank must call it, before clipping and before `optimizer.step()`.

        Args:
            optimizer_or_parameters: whose gradients. Others are left as they are.
            is_apart: True if no backward pass of the window has communicated, so that
                the ranks' gradients must be brought together here.

        Raises:
            TrainkitError: the window is empty; or, with `checks="late"`, an earlier
                window must stop the run.
        """
        window, gradients, step = self.window, self.gradients, self.num_windows
        owners, is_written = optimizer_or_parameters, self.division.has_scaler
        found = gradients.end(window, owners, may_be_written=is_written)
        window.refuse_division(is_apart=is_apart)
        if self.told is not None:
            self.told.refuse_unfinished()
        self._refuse_ranks(is_apart=is_apart)
        row = window.row(self.device)
        table, totals = row.unsqueeze(0), row
        if self.ranks.size > 1:
            table = self.ranks.gather_rows(row)
            totals = table.sum(0)
        if gradients.norms is not None:
            gradients.norms.close(window, self.division.unit(totals.device))
        scale = self.division.scale(window, totals, step)
        self._close()
        self.num_windows = step + 1
        self.watch.submit(step, table, gradients=found)
        gradients.divide(found, scale, is_apart=is_apart)
        return WindowStats(table, totals, window.reduction)

    def _refuse_ranks(self, *, is_apart: bool) -> None:
        """Refuse ranks whose gradients would not be the window's."""
        ranks, gradients = self.ranks, self.gradients
        if not self._had_started and dist.is_initialized():
            if (number := dist.get_world_size()) > 1:
                raise TrainkitError(
                    f"Accumulator: the number of running ranks was 1 when it was made, "
                    f"and is {number} now. Make it after the ranks have started "
                    f"(init_process_group, fabric.launch)."
                )
        if not self.window.is_open and (ranks.size == 1 or ranks.backend_sums):
            raise TrainkitError(
                "finish(): the window is empty, so it has no gradient. Call backward() "
                "at least once before it. If ranks communicate in their backward "
                "passes, each of them needs a micro-batch, which may have weight 0."
            )
        if self._averaged is not None and ranks.backend_sums:
            if ranks.ddp is not None and not is_apart:
                refusals.refuse_unfinished_reduction(ranks.ddp)
            refusals.refuse_unreduced(self._averaged, self.module, gradients.parameters)
        if self._reads_hooks:
            self._reads_hooks = False
            refusals.check_hooks(ranks)

    def check(self) -> None:
        """Check all closed windows, the last one too; waits for the device."""
        self.gradients.zeroed.read(wait=True)
        self.watch.read_all()

    def state_dict(self, *, over_ranks: bool = False) -> dict[str, Any]:
        """The open window, for a checkpoint inside it.

        It has the partial gradients too, if `module` is the module that trains.

        Args:
            over_ranks: False saves this rank's part, which this rank must load. True
                adds up the parts of all ranks, for one checkpoint that any number of
                ranks can load; every rank must then call it.
        """
        return save_state(self, over_ranks=over_ranks)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume inside the window that `state_dict` saved."""
        load_state(self, state)

    def _close(self) -> None:
        has_one = len(self.strategies) == 1
        self.window = Window(self.strategy.loss_reduction if has_one else "sum")
        self.told: Told | None = None
        self._joined: Joined | None = None
        self.division.close()
        self.gradients.forget()

    @property
    def device(self) -> torch.device:
        """The device on which the ranks exchange their totals."""
        if self.window.entries and self.division.device is not None:
            return self.division.device
        if isinstance(self.module, nn.Module):
            return next((p.device for p in self.module.parameters()), default_device())
        return self.division.device or default_device()
