"""Hooks that work on a micro-batch's gradient before the window's is complete."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from trainkit.core._compat import has_gradient_hook, without_gradient_hooks
from trainkit.core.batch_norm.layers import listed
from trainkit.core.proof.gradients import added, size_of
from trainkit.lit._compat import has_own
from trainkit.lit.proof import remedies
from trainkit.lit.proof.findings import Cause, Cut
from trainkit.lit.proof.measure import THRESHOLDS, Measurements
from trainkit.lit.proof.report import Report
from trainkit.lit.rerun.quietly import muted
from trainkit.lit.rerun.snapshot import kept

HOOKS = ("on_before_backward", "on_after_backward", "backward")

Gradients = Sequence[Tensor | None]


@dataclass(frozen=True)
class Halves:
    """The gradients of a window of two micro-batches, as its hooks get them."""

    sizes: tuple[int, int]
    gradients: tuple[Gradients, Gradients]


class _Steps(Exception):
    """An optimizer was about to step."""


class EarlyHooks:
    """Measures whether hooks of gradients make another step of a window than of one
    batch.

    Each hook runs on the gradients of two micro-batches, one after the other, and on
    their sum. A hook that is linear makes no difference.

    Args:
        module: in `fit`.
        callbacks: those of the Trainer that is to train.
    """

    def __init__(self, module: Any, callbacks: Sequence[Any]) -> None:
        self._module = module
        self._named = [(n, p) for n, p in module.named_parameters() if p.requires_grad]
        self._parameters = [parameter for _, parameter in self._named]
        self._hooked = [n for n, p in self._named if has_gradient_hook(p)]
        self._owners = [
            (owner, hook)
            for owner in (module, *callbacks)
            for hook in HOOKS
            if hasattr(owner, hook)
            and has_own(owner, hook)
            and not getattr(owner, hook).__module__.startswith("trainkit.")
        ]

    def halves(self, found: Measurements) -> Halves | None:
        """The gradients that the hooks are to get; None where there are no hooks."""
        if not (self._hooked or self._owners):
            return None
        middle = len(found.all_rows) // 2
        parts = found.all_rows[:middle], found.all_rows[middle:]
        make = found.rows.as_run
        one, other = (found.passes.gradients(make(rows), rows) for rows in parts)
        return Halves((len(parts[0]), len(parts[1])), (one, other))

    def added_to(self, report: Report, halves: Halves | None, scale: float) -> Report:
        """A report with what the hooks do.

        Args:
            report: of the gradients without hooks.
            halves: of the window.
            scale: what the run multiplies a micro-batch's share of the gradient by.
        """
        if halves is None:
            return report
        causes: list[Cause] = []
        notes: list[str] = []
        worst = 0.0
        for place, hooks in self._places():
            try:
                off, names = self._off_by(halves, hooks, scale)
            except _Steps:
                causes.append(remedies.of_order(place, 1.0, steps=True))
                worst = max(worst, 1.0)
                continue
            except Exception as error:
                notes.append(f"{place} could not be run for the check: {error}")
                continue
            if off > self._tolerance:
                where = place if hooks else listed(names, at_most=3)
                causes.append(remedies.of_order(where, off, steps=False))
                worst = max(worst, off)
            else:
                notes.append(
                    f"{place} runs once for each micro-batch; it is linear in these "
                    f"gradients, or only reads them, so it changes nothing here"
                )
        cuts = report.cuts
        if causes:
            cuts = (*cuts, Cut("with early hooks", halves.sizes, worst))
        return replace(
            report,
            exact=report.exact and not causes,
            deviation=max(report.deviation, worst),
            cuts=cuts,
            causes=(*report.causes, *causes),
            notes=(*report.notes, *notes),
        )

    @property
    def _tolerance(self) -> float:
        kinds = {parameter.dtype for parameter in self._parameters}
        return max(THRESHOLDS.get(kind, THRESHOLDS[None]) for kind in kinds)

    def _places(self) -> Iterator[tuple[str, dict[str, Callable[..., Any]]]]:
        """Each place of a hook, with the methods that run around a backward pass."""
        if self._hooked:
            yield f"the hook of {listed(self._hooked, at_most=2)}", {}
        for owner, hook in self._owners:
            method: Callable[..., Any] = getattr(owner, hook)
            yield (
                f"{hook} of {type(owner).__name__}",
                {hook: self._bound(owner, method)},
            )

    def _bound(self, owner: Any, method: Callable[..., Any]) -> Callable[..., Any]:
        if isinstance(owner, nn.Module):
            return method
        return lambda *args: method(self._module.trainer, self._module, *args)

    def _off_by(
        self,
        halves: Halves,
        hooks: dict[str, Callable[..., Any]],
        scale: float,
    ) -> tuple[float, list[str]]:
        """How far off the step is, and the parameters whose gradients are."""
        rows = sum(halves.sizes)
        shares = [
            [None if g is None else size / rows * g for g in gradients]
            for size, gradients in zip(halves.sizes, halves.gradients, strict=True)
        ]
        pairs = zip(*shares, strict=True)
        whole = [added(one, other) for one, other in pairs]
        without = contextlib.nullcontext()
        if hooks:
            without = without_gradient_hooks(self._parameters)
        with without, muted(self._module), self._put_back():
            window = self._stepped(shares, hooks, scale)
            once = self._stepped([whole], hooks, 1.0)
        triples = zip(self._named, window, once, strict=True)
        offs = [(name, size_of(a - b), size_of(b)) for (name, _), a, b in triples]
        names = [n for n, off, size in offs if off > self._tolerance * (size or 1)]
        size = math.hypot(*(size for _, _, size in offs)) or 1.0
        return math.hypot(*(off for _, off, _ in offs)) / size, names

    def _stepped(
        self,
        micro_batches: Sequence[Gradients],
        hooks: dict[str, Callable[..., Any]],
        scale: float,
    ) -> list[Tensor]:
        """The gradients after backward passes that bring these, with their hooks."""
        for parameter in self._parameters:
            parameter.grad = None
        for gradients in micro_batches:
            pairs = zip(self._parameters, gradients, strict=True)
            terms = [(p * (scale * g).to(p)).sum() for p, g in pairs if g is not None]
            loss = torch.stack([term.double() for term in terms]).sum()
            for name, hook in hooks.items():
                if name == "on_before_backward":
                    hook(loss)
            hooks.get("backward", torch.Tensor.backward)(loss)
            if "on_after_backward" in hooks:
                hooks["on_after_backward"]()
        return [
            torch.zeros_like(p, dtype=torch.float64)
            if p.grad is None
            else p.grad.double() / scale
            for p in self._parameters
        ]

    @contextlib.contextmanager
    def _put_back(self) -> Iterator[None]:
        """Parameters, buffers, attributes and gradients; no optimizer steps."""
        values = [(p, p.grad, p.detach().clone()) for p in self._parameters]
        owners = [each for each, _ in self._owners if each is not self._module]
        before = kept(self._module, *owners, others=owners, device=self._module.device)
        with torch.enable_grad(), before:
            refusing = register_optimizer_step_pre_hook(_refuse_step)
            try:
                yield
            finally:
                refusing.remove()
                for parameter, gradient, value in values:
                    parameter.grad = gradient
                    parameter.data.copy_(value)


def _refuse_step(*args: Any) -> None:
    raise _Steps
