"""The accumulator: one window after another, in any training loop."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from trainkit.core.checks import Checks, Nonfinite, Watch
from trainkit.core.gradients import (
    HALF,
    gradients_of,
    load_partial,
    parameters_of,
    save_partial,
    scale_,
    sum_over_ranks_,
)
from trainkit.core.ranks import Aggregation, Ranks, Shared, find_ranks, num_running
from trainkit.core.strategies import AccumulationStrategy, Weight, check_reduction
from trainkit.core.window import (
    COUNT,
    DIVISOR,
    WEIGHT,
    Window,
    WindowStats,
    merged,
    scalar,
    totals_dtype,
)
from trainkit.errors import TrainkitError

HEADROOM = 256
"""Under a gradient scaler, how much heavier a run's first window may be than its first
micro-batch lets expect before half precision overflows and a step is lost."""


class Accumulator:
    r"""Makes the gradient of a window that of one big batch.

        gradient = sum_i w_i * grad(mean loss of micro-batch i) / sum_i w_i

    over the whole window, all ranks. While the window is open, the gradient of
    micro-batch i is added as w_i / r, where r is one number that all ranks share; when
    it closes, the sum is multiplied once by r / sum_i w_i.

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
        strategy: says what a micro-batch weighs.
        module: what trains. Shows what the backend does to gradients across ranks, and
            which gradients `state_dict` holds.
        aggregation: what the backend does to gradients across ranks: leaves their
            `"mean"` (DDP, FSDP), their `"sum"`, or does nothing (`"none"`: `finish`
            adds them up itself). `"auto"` reads it from `module`.
        process_group: the data-parallel ranks; default: the module's, or all.
        checks: `"late"` costs nothing and complains one window late; `"now"` waits for
            the device once a window and refuses before the step is taken.
        nonfinite: a loss that is NaN or infinite and weighs something: `"raise"`;
            `"allow"` it, for a gradient scaler that skips the step; or `"skip"` the
            micro-batch, its weight left out (waits for the device at each loss).

    Raises:
        TrainkitError: several ranks are running, and how they aggregate is unknown.
    """

    def __init__(
        self,
        strategy: AccumulationStrategy,
        *,
        module: Any = None,
        aggregation: Aggregation = "auto",
        process_group: Any = None,
        checks: Checks = "late",
        nonfinite: Nonfinite = "raise",
    ) -> None:
        if not isinstance(strategy, AccumulationStrategy):
            raise TrainkitError(
                f"strategy: must be an AccumulationStrategy, received {strategy!r}. "
                f"Pass an object, such as PerToken(), not its class or name."
            )
        check_reduction(strategy)
        self.strategy = strategy
        self.ranks = find_ranks(module, aggregation, process_group)
        self._num_running = num_running()
        self.watch = Watch(checks, nonfinite)
        self.num_windows = 0
        self._module = module
        self._window = Window()
        self._reference: Tensor | None = None  # r
        self._inverses: dict[Any, Tensor] = {}
        self._announced: Shared | None = None
        if nonfinite == "skip" and self.ranks.backend_sums:
            raise TrainkitError(
                "nonfinite='skip': not possible where backward passes communicate "
                f"(aggregation={self.ranks.aggregation!r} over {self.ranks.size} "
                "ranks), since a rank that skips one leaves the others waiting. Use "
                "'raise', or 'allow' with a gradient scaler."
            )

    @property
    def num_micro_batches(self) -> int:
        """How many micro-batches the open window holds, a checkpoint's included."""
        carried = self._window.carried
        before = 0 if carried is None else int(carried[COUNT])
        return before + len(self._window.losses)

    @property
    def is_open(self) -> bool:
        """Whether gradients are waiting to be divided."""
        return self._window.is_open

    def backward(
        self,
        loss: Tensor,
        batch: Any = None,
        *,
        weight: Weight | None = None,
        backward: Callable[[Tensor], Any] | None = None,
        last: bool = False,
    ) -> None:
        """Run a micro-batch's backward pass, weighted.

        Args:
            loss: what the strategy's `loss_reduction` says, undivided.
            batch: what the strategy weighs.
            weight: the weight itself, in place of `batch`.
            backward: runs the backward pass, such as `fabric.backward` or
                `lambda loss: scaler.scale(loss).backward()`.
            last: the window ends with this micro-batch: its totals then travel between
                ranks during the backward pass. Optional; all ranks say it alike.
        """
        _refuse_dividing_backward(backward)
        weight = self.strategy.weight(batch) if weight is None else weight
        if self.watch.nonfinite == "skip" and not bool(loss.isfinite()):
            self._window.add(0, 0, loss.new_zeros(()), 1)
            return
        handle = self.weigh(loss, weight)
        if last:
            self.announce()
        try:
            (backward or Tensor.backward)(loss)
        finally:
            handle.remove()

    def weigh(
        self,
        loss: Tensor,
        weight: Weight,
        *,
        divided_by: int = 1,
        value: Tensor | None = None,
        expected: int = 1,
    ) -> Any:
        """Weight the backward pass that is about to run on `loss`, and count it.

        For a loop that runs backward passes by itself; `backward` is this and the pass.

        Args:
            loss: what the pass starts from.
            weight: what the micro-batch weighs.
            divided_by: what the loop has divided the loss by.
            value: the loss to report, where that is not `loss` (a scaler's factor).
            expected: how many micro-batches the window will have on this rank; only
                for the size of the sums while it is open.

        Returns:
            A handle whose `remove()` takes the weighting off again.
        """
        self._refuse_before_backward(loss)
        weight = _checked(weight)
        by_mean = self.strategy.loss_reduction == "mean"
        if self._reference is None:
            self._reference = self._agree_on_reference(weight, expected, loss.device)
        inverse = self._inverse_reference(loss.dtype, divided_by)
        factor = inverse * weight if by_mean else inverse
        applied: Weight = weight
        if by_mean and loss.dtype in HALF:
            applied = factor.to(loss.dtype) / inverse
        # clone: the next step of a CUDA graph writes over this one's loss
        shown, shown_divided_by = (loss.detach().clone(), divided_by)
        if value is not None:
            shown, shown_divided_by = (value, 1)
        self._window.add(weight, applied, shown, shown_divided_by)

        def weighted(gradient: Tensor) -> Tensor:
            product = gradient * factor
            same = product.dtype == gradient.dtype
            return product if same else product.to(gradient.dtype)

        return loss.register_hook(weighted)

    def count_padding(self, padding: Weight, tokens: Weight) -> None:
        """Count tokens that only pad, for `WindowStats.padding`."""
        self._window.padding.append(padding)
        self._window.tokens.append(tokens)

    def announce(self, *, slots: int = 0) -> None:
        """Send this rank's totals to the others: the window is complete.

        Args:
            slots: also send up to so many single weights, the same number on all ranks.
        """
        row = self._window.row(
            self._device(), self.strategy.loss_reduction, slots=slots
        )
        self._announced = self.ranks.share(row)

    def finish(self, optimizer_or_parameters: Any, *, slots: int = 0) -> WindowStats:
        """Close the window: its gradients become those of the big batch.

        To be called by every rank, before clipping and before `optimizer.step()`.

        Args:
            optimizer_or_parameters: whose gradients. Others are left as they are.
            slots: as for `announce`, if that was not called.

        Raises:
            TrainkitError: the window is empty; or, with `checks="late"`, an earlier
                window must stop the run.
        """
        parameters = parameters_of(optimizer_or_parameters)
        if num_running() != self._num_running:
            raise TrainkitError(
                f"Accumulator: {self._num_running} ranks were running when it was "
                f"made, and now {num_running()} are. Make it after the ranks have "
                f"started (init_process_group, fabric.launch)."
            )
        if not self.is_open and (self.ranks.size == 1 or self.ranks.backend_sums):
            raise TrainkitError(
                "finish(): the window is empty, so it has no gradient. Call "
                "backward() at least once before it; where ranks communicate in "
                "their backward passes, every one of them needs a micro-batch, if "
                "only one of weight 0."
            )
        if self._announced is None:
            self.announce(slots=slots)
        assert self._announced is not None
        table = self._announced.wait()
        totals = table[0] if self.ranks.size == 1 else table.sum(0)
        stats = WindowStats(table, totals)
        step, self.num_windows = self.num_windows, self.num_windows + 1
        self.drop()
        self.watch.submit(step, table)
        self._divide(parameters, totals)
        return stats

    def drop(self) -> int:
        """Forget the open window; say how many micro-batches it held.

        Its gradients stay in the parameters: zero them.
        """
        held = self.num_micro_batches
        self._window = Window()
        self._announced = None
        return held

    def state_dict(self, *, over_ranks: bool = False) -> dict[str, Any]:
        """The open window, for a checkpoint inside it.

        Holds the partial gradients too, if `module` is the module that trains.

        Args:
            over_ranks: False saves this rank's part, to be loaded by this rank. True
                adds up the parts of all ranks, for one checkpoint that any number of
                ranks can load; every rank must then call it.
        """
        state: dict[str, Any] = {
            "rank": None if over_ranks else self.ranks.index,
            "num_windows": self.num_windows,
            "reference": None if self._reference is None else self._reference.cpu(),
            "totals": None,
            "gradients": {},
        }
        # A rank without a micro-batch takes part as well, or the others would wait.
        ranks = self.ranks if over_ranks else Ranks()
        row = self._window.row(self._device(), self.strategy.loss_reduction)
        own = row.new_zeros(()) if self._reference is None else self._reference.to(row)
        table = ranks.share(torch.cat([row, own.unsqueeze(0)])).wait()
        totals, common = merged(table), table[:, -1].amax()
        if bool(totals[COUNT]):
            state["totals"] = totals.cpu()
            # With aggregation="none", ranks have different r in their first window.
            state["reference"] = common.cpu()
            if isinstance(self._module, nn.Module):
                named = _inside_wrappers(self._module).named_parameters()
                state["gradients"] = save_partial(named, ranks, scale=own / common)
                if totals[WEIGHT] > 0 and not state["gradients"]:
                    raise TrainkitError(
                        "state_dict: the window is open, and no parameter of `module` "
                        "has a gradient. Is it the module that trains? Under FSDP, "
                        "save after a backward pass with "
                        "set_requires_gradient_sync(True)."
                    )
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on inside the window that `state_dict` saved."""
        is_whole = state["rank"] is None
        if state["totals"] is not None and state["rank"] not in (
            None,
            self.ranks.index,
        ):
            raise TrainkitError(
                f"state_dict: it holds the open window of rank {state['rank']}, and "
                f"this is rank {self.ranks.index}: the law needs each rank's own part. "
                f"Save one state for each rank, or one with over_ranks=True."
            )
        self.drop()
        self.watch.forget()
        self.num_windows = state["num_windows"]
        self._reference = state["reference"]
        self._inverses = {}
        is_mine = not is_whole or self.ranks.index == 0
        if state["totals"] is not None:
            # Open on every rank, with zeros on all but one: they must act alike.
            self._window.carried = state["totals"] * is_mine
        if state["gradients"] and isinstance(self._module, nn.Module):
            named = _inside_wrappers(self._module).named_parameters()
            ranks = self.ranks if is_whole else None
            load_partial(named, state["gradients"], ranks)

    def _divide(self, parameters: list[Tensor], totals: Tensor) -> None:
        if self._reference is not None:
            reference = self._reference.to(totals.device)
            # 0 where nothing weighs anything: 0 / 0 must not reach a gradient.
            scale = (self.ranks.multiplier * reference / totals[DIVISOR]).nan_to_num(
                nan=0.0, posinf=0.0, neginf=0.0
            )
            scale_(gradients_of(parameters), scale)
        if self.ranks.size > 1 and not self.ranks.backend_sums:
            sum_over_ranks_(parameters, self.ranks)
        if self.num_windows < 8 or self.num_windows % 16 == 0:
            # r only keeps the sums near the size of a mean gradient: it need not
            # follow every window, but all ranks must change it at the same one.
            mean = totals[WEIGHT] / self.ranks.size
            self._reference = _power_of_two(mean, self._reference)
            self._inverses = {}

    def _inverse_reference(self, dtype: torch.dtype, divided_by: int) -> Tensor:
        """divided_by / r, in the loss's precision, but never in half: r is a power of
        two, so that w / r is exact where w is."""
        key = (dtype, divided_by)
        if key not in self._inverses:
            assert self._reference is not None
            inverse = divided_by / self._reference
            wide = inverse.dtype if dtype in HALF else dtype
            self._inverses[key] = inverse.to(wide)
        return self._inverses[key]

    def _agree_on_reference(
        self, weight: Weight, expected: int, device: torch.device
    ) -> Tensor:
        """The first window's r, from its first micro-batches.

        Later windows take the last one's weight, which all ranks know. Where backward
        passes communicate, every rank comes here in its first one.
        """
        first = scalar(weight, device) * expected
        if self.watch.nonfinite == "allow":
            first = first * HEADROOM
        if self.ranks.backend_sums:
            first = self.ranks.sum_(first) / self.ranks.size
        return _power_of_two(first, None)

    def _device(self) -> torch.device:
        """Where the ranks meet: with the losses, or with what the group can carry."""
        if self._window.losses:
            return self._window.losses[-1].device
        if isinstance(self._module, nn.Module):
            return next(
                (p.device for p in self._module.parameters()), _default_device()
            )
        if self._reference is not None:
            return self._reference.device
        return _default_device()

    def _refuse_before_backward(self, loss: Tensor) -> None:
        if self._announced is not None:
            raise TrainkitError(
                "backward(): the window was announced as complete (last=True), and "
                "another micro-batch came before finish(). Say last=True only for "
                "the window's last one."
            )
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            shown = list(loss.shape) if isinstance(loss, Tensor) else loss
            raise TrainkitError(
                f"loss: must be a tensor with one element, received {shown!r}. Reduce "
                f"it to what the strategy says: "
                f"loss_reduction={self.strategy.loss_reduction!r}."
            )
        if not loss.requires_grad:
            raise TrainkitError(
                "loss: must depend on parameters that require a gradient, and does "
                "not. Is it computed under torch.no_grad(), detached, or is the whole "
                "model frozen?"
            )
        ddp = self.ranks.ddp
        if ddp is not None and ddp.static_graph and self.num_micro_batches:
            raise TrainkitError(
                "static_graph=True: DDP cannot run a window of several micro-batches "
                "with it (its first backward passes fail inside torch). Make the DDP "
                "module with static_graph=False."
            )


def _power_of_two(number: Tensor, otherwise: Tensor | None) -> Tensor:
    """The power of two nearest to a positive number, else what it was before.

    It falls by halves only: the window after an epoch's short last one is a full one.
    """
    nearest = number.log2().round().exp2()
    if otherwise is None:
        return torch.where(nearest > 0, nearest, 1.0)
    before = otherwise.to(number.device)
    return torch.where(nearest > 0, nearest.maximum(before / 2), before)


def _checked(weight: Any) -> Weight:
    """A weight as a Python number or a 0-d tensor; never waits for a tensor."""
    if isinstance(weight, Tensor):
        if weight.numel() != 1:
            raise TrainkitError(
                f"weight: must be one number for a micro-batch, received a tensor of "
                f"shape {list(weight.shape)}. Sum it in the strategy's weight()."
            )
        # A copy, in the dtype of the totals: a buffer that the loop fills again would
        # change what the window holds.
        dtype = totals_dtype(weight.device)
        return weight.detach().reshape(()).to(dtype, copy=True)
    if hasattr(weight, "item"):  # numpy's numbers
        weight = weight.item()
    if not isinstance(weight, int | float):
        raise TrainkitError(
            f"weight: must be a number or a 0-d tensor, received "
            f"{type(weight).__name__}. Look at the strategy's weight()."
        )
    if not math.isfinite(weight) or weight < 0:
        raise TrainkitError(
            f"weight: must be finite and not negative, received {weight}. Look at the "
            f"strategy's weight() and at what it sums."
        )
    return weight


def _refuse_dividing_backward(backward: Any) -> None:
    """Accelerate's `backward` divides by its own number of accumulation steps
    (accelerate#3533); with one step it divides by one."""
    owner = getattr(backward, "__self__", None)
    if not type(owner).__module__.startswith("accelerate."):
        return
    steps = getattr(owner, "gradient_accumulation_steps", 1)
    if steps != 1:
        raise TrainkitError(
            f"backward=accelerator.backward: it divides the loss by its own "
            f"gradient_accumulation_steps={steps}, and the window is divided already. "
            f"Make Accelerator(gradient_accumulation_steps=1) and pass its backward."
        )


def _inside_wrappers(module: nn.Module) -> nn.Module:
    """The user's own module, whose parameter names do not depend on the ranks."""
    while True:
        inner: nn.Module | None = module._modules.get("_orig_mod")  # torch.compile
        if inner is None:
            inner = module._modules.get("_forward_module")  # Fabric
        if isinstance(module, DistributedDataParallel):
            inner = module.module
        if inner is None:
            return module
        module = inner


def _default_device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
