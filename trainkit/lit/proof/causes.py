"""Why parts are not the whole: rehearsals with one thing changed at a time."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from torch import Tensor, nn

from trainkit.core._compat import has_gradient_hook
from trainkit.core.batch_norm.layers import BatchNorm, every_layer
from trainkit.core.said_weight import Weighed
from trainkit.core.strategies import Uniform
from trainkit.core.terms import ONE, leading
from trainkit.lit._compat import has_own
from trainkit.lit.proof import remedies
from trainkit.lit.proof.denominators import (
    SUM,
    UNIFORM,
    Candidate,
    best_fit,
    candidates,
    class_counts,
    line_of,
    off_by,
    two_denominators,
)
from trainkit.lit.proof.places import (
    Event,
    Located,
    first_that_sees_padding,
    locate,
    moved,
    record_events,
    values_of,
)
from trainkit.lit.proof.rehearse import PARAMETER_HOOKS, Taken, may_change_steps
from trainkit.lit.proof.remedies import BY_HAND, WITH_MIXIN
from trainkit.lit.proof.report import Cause
from trainkit.lit.proof.subject import Subject

HOOKS = (
    "backward", "on_before_backward", "on_after_backward", "on_before_optimizer_step",
    "optimizer_step", "configure_gradient_clipping", "on_before_zero_grad",
    "optimizer_zero_grad", "on_train_batch_start", "on_train_batch_end",
)  # fmt: skip
TRANSFERS = (
    "on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer",
)  # fmt: skip

MOST_COORDINATES = 200_000


class Causes:
    """Looks for the causes of a deviation.

    Args:
        subject: what was measured, and is off.
    """

    def __init__(self, subject: Subject) -> None:
        self._subject = subject
        self._most = subject.most_rounding
        self._sampled: dict[Any, Tensor] = {}
        self._is_split = False
        self.found: list[Cause] = []

    def look(self) -> list[Cause]:
        """The causes, in the order in which they were found."""
        if self._draws_unseen() or self._is_inner_cut():
            return self.found
        self._is_split = self._subject.is_split
        if self._is_split:  # its parts follow each other as loader batches do
            self._subject = replace(self._subject, options=None, has_batches=True)
        if self._is_sequence_known() and self._gap() > self._most:
            self._explain_gap()
        self._explain_parts()
        return self.found

    # ---- random numbers --------------------------------------------------------------

    def _draws_unseen(self) -> bool:
        """Find draws that rows cannot share, and fix them for what follows."""
        subject = self._subject
        whole = subject.whole()
        unlike = sorted(whole.draws.unlike)
        if unlike:
            self._subject = self._with(fixes_draws=True)
            is_all = self._window_off() <= self._most
            self.found += map(remedies.of_draws, unlike)
            return is_all
        if subject.whole(seed=1).off_from(whole) > self._most:
            self.found.append(remedies.UNSEEN_DRAWS)
            return True
        return False

    def _is_inner_cut(self) -> bool:
        """Whether chunks of rows are not all rows; else look at what is accumulated."""
        subject = self._subject
        options = subject.options
        if options is None or options.inside is None:
            return False
        alone = replace(subject, has_batches=False)
        if alone.window().off_from(alone.whole()) > self._most:
            self.found.append(remedies.of_chunks(", ".join(options.inside_paths)))
            return True
        self._subject = replace(subject, options=None)
        return not subject.has_batches

    # ---- micro-batches one after another ---------------------------------------------

    def _is_sequence_known(self) -> bool:
        """Whether it can be said what the window is if no part changes another."""
        strategies = self._subject.strategies
        has_one = not strategies or ONE in strategies
        says = has_one and strategies and isinstance(leading(strategies), Weighed)
        return has_one and not says and self._subject.has_batches

    def _gap(self) -> float:
        """How far the window is from its parts, each run by itself and weighed;
        infinitely far if it does not run."""
        subject = self._subject
        try:
            parts = self._alone()
            window = self._vector(subject.window())
        except Exception:  # a hook is missing that the step needs
            return float("inf")
        return off_by(window, parts, self._own_weights())

    def _explain_gap(self) -> None:
        before = self._subject
        self._subject = self._with(as_whole=True)
        if self._gap() <= self._most:
            self.found.append(remedies.NUMBERS)
            return
        self._subject = before
        for hook, place in self._hooks(HOOKS):
            self._subject = self._with(without=frozenset({hook}), as_whole=True)
            if self._gap() <= self._most:
                self.found.append(remedies.of_hook(place))
                return
            self._subject = before
        names = self._moved()
        is_automatic = before.module.automatic_optimization
        found = remedies.OWN_BACKWARD if is_automatic else remedies.MANUAL_BACKWARD
        self.found.append(remedies.of_state(names) if names else found)

    def _hooks(self, names: Sequence[str]) -> Iterator[tuple[str, str]]:
        """Hooks that somebody has overridden, callbacks with hooks of a step, and the
        hooks of parameters: what takes them away, and where they are."""
        module, trainer = self._subject.module, self._subject.trainer
        bases = (module, LightningModule), (trainer.datamodule, LightningDataModule)
        for owner, base in bases:
            for name in names if owner is not None else ():
                if hasattr(base, name) and has_own(owner, name):
                    yield name, f"{name} of {type(owner).__name__}"
        for callback in self._subject.rehearsals.callbacks:
            for name in names:
                if may_change_steps(callback) and _overrides(callback, name):
                    kind = type(callback).__name__
                    yield kind, f"{name} of {kind}"
        hooked = [n for n, p in module.named_parameters() if has_gradient_hook(p)]
        if hooked and names is HOOKS:
            yield PARAMETER_HOOKS, f"the hook of {hooked[0]}"

    def _moved(self) -> list[str]:
        """What a micro-batch moves in the module, by value."""
        held = self._with(change=lambda module: (module, values_of(module)))
        part = self._subject.parts[0]
        module, before = held.whole(part).result
        return moved(before, values_of(module))

    # ---- parts and the whole ---------------------------------------------------------

    def _explain_parts(self) -> None:
        """Find what keeps parts from adding up, then by which weights they do."""
        for _ in range(4):
            if self._least_off() <= self._most:
                self._explain_weights()
                return
            if not (self._is_padding() or self._is_transfer() or self._is_layer()):
                return

    def _least_off(self) -> float:
        """How far parts are from the whole with the best weights."""
        whole, parts = self._whole(), self._alone()
        ones = torch.ones(len(parts), dtype=torch.float64)
        return min(best_fit(whole, parts).off, off_by(whole, parts, ones))

    def _adds_up(self) -> bool:
        """Whether a variation runs, and its parts add up to the whole."""
        try:
            return self._least_off() <= self._most
        except Exception:
            return False

    def _is_padding(self) -> bool:
        subject = self._subject
        rows = subject.rows
        if subject.are_alike or not rows.can_widen:
            return False
        alike = self._subject = replace(subject, are_alike=True)
        if not self._adds_up():
            self._subject = subject
            return False
        part = min(
            subject.parts, key=lambda p: max(subject.rows.lengths()[r] for r in p)
        )
        own, wide = (self._events(each, part) for each in (subject, alike))
        place = first_that_sees_padding(wide, own, range(len(part)), len(part))
        self.found.append(remedies.of_padding(place))
        return True

    def _is_transfer(self) -> bool:
        before = self._subject
        for hook, place in self._hooks(TRANSFERS):
            self._subject = self._with(without=before.base.without | {hook})
            if self._adds_up():
                self.found.append(remedies.of_hook(place))
                return True
            self._subject = before
        return False

    def _is_layer(self) -> bool:
        """Find the first module whose rows differ; returns whether it is BatchNorm."""
        subject = self._subject
        norms = every_layer(subject.module)
        located = self._located()
        if norms and not isinstance(_at(subject.module, located.path), BatchNorm):
            self._subject = self._with(change=_in_eval)
            if self._adds_up():  # rows of its input stand in no order
                first = Located(next(iter(norms)), False, "", "")
                layer = norms[first.path]
                self.found.append(remedies.of_rows(first, layer, len(norms)))
                return True
            self._subject = subject
        if not located.path:
            if not (self._is_function() or self._has_two_denominators()):
                self.found.append(remedies.of_loss(located))
            return False
        layer = subject.module.get_submodule(located.path)
        self.found.append(remedies.of_rows(located, layer, len(norms)))
        if not isinstance(layer, BatchNorm):
            return False
        self._subject = self._with(change=_in_eval)
        return True

    def _located(self) -> Located:
        """Where rows see each other, at the width of the whole if that can be had."""
        subject, rows = self._subject, self._subject.rows
        alike = replace(subject, are_alike=rows.can_widen)
        of, part = subject.all_rows, max(subject.parts, key=len)
        places = [of.index(row) for row in part]
        try:
            events = self._events(alike, of), self._events(alike, part)
        except Exception:
            events = self._events(subject, of), self._events(subject, part)
        return locate(*events, places, len(of))

    def _events(self, subject: Subject, rows: Sequence[int]) -> list[Event]:
        def change(module: nn.Module) -> Any:
            if subject.base.change is not None:
                subject.base.change(module)
            return record_events(module)

        base = replace(subject.base, change=change)
        return replace(subject, base=base).whole(rows).result

    # ---- weights ---------------------------------------------------------------------

    def _explain_weights(self) -> None:
        """Name the weights with which the parts are the whole."""
        subject, whole, parts = self._subject, self._whole(), self._alone()
        if off_by(whole, parts, self._own_weights()) <= self._most:
            numbers = subject.rows.whole_numbers()
            if not self.found and numbers and self._is_split:
                self.found.append(remedies.of_host(numbers[0]))
            return
        fits = self._fitting(whole, parts)
        numbers = subject.rows.whole_numbers()
        if fits and fits[0] is SUM and numbers and self._is_split:
            self.found.append(remedies.of_host(numbers[0]))
        elif fits and fits[0] is SUM:
            own = leading(subject.strategies) if subject.strategies else None
            self.found.append(remedies.of_sum(self._said(), own))
        elif fits:
            self.found.append(self._ways_in(remedies.of_weights(fits, self._said())))
        elif not self._is_function():
            self._of_unknown(best_fit(whole, parts).weights)

    def _fitting(self, whole: Tensor, parts: Tensor) -> list[Candidate]:
        """The denominators that make the parts the whole, the simplest first."""
        number = len(parts)
        fits = []
        for candidate, counts, total in self._counted():
            if total and off_by(whole, parts, counts / total) <= self._most:
                fits.append(candidate)
        ones = torch.ones(number, dtype=torch.float64)
        fits += [SUM] * (off_by(whole, parts, ones) <= self._most)
        fits += [UNIFORM] * (off_by(whole, parts, ones / number) <= self._most)
        return sorted(fits, key=lambda each: each.simplicity)

    def _counted(self) -> Iterator[tuple[Candidate, Tensor, float]]:
        """What each part counts, and the whole, by each denominator."""
        subject = self._subject
        batches = [subject.batch(part) for part in subject.parts]
        whole = subject.batch(subject.all_rows)
        for each in candidates(whole, self._vectors()):
            try:
                counts = _numbers(each.weigh, batches)
                total = float(each.weigh(whole))
            except Exception:
                continue
            if abs(float(counts.sum()) - total) <= 1e-6 * max(abs(total), 1e-9):
                yield each, counts, total

    def _vectors(self) -> dict[str, Tensor]:
        """Weights of classes that the module may hold, by their path."""
        found: dict[str, Tensor] = {}
        for path, each in self._subject.module.named_modules():
            for name, value in {**vars(each), **each._buffers}.items():
                is_vector = isinstance(value, Tensor) and value.ndim == 1
                if is_vector and 1 < len(value) <= 4096 and bool((value >= 0).all()):
                    found[f"{path}.{name}".lstrip(".")] = value.detach().cpu().double()
        return found

    def _of_unknown(self, weights: Tensor) -> None:
        subject, batches = self._subject, []
        for part in subject.parts:
            batches.append(dict(class_counts(subject.batch(part))))
        for at in batches[0]:
            counts = torch.stack([each[at] for each in batches if at in each])
            seen = counts.sum(0) > 0
            last = int(seen.nonzero().max()) + 1
            counts = counts[:, :last]
            if len(counts) <= last or int(torch.linalg.matrix_rank(counts)) < last:
                continue
            solved = torch.linalg.lstsq(counts, weights[:, None]).solution[:, 0]
            if bool((solved > 0).all()) and torch.allclose(
                counts @ solved, weights, rtol=1e-6
            ):
                self.found.append(remedies.of_classes(solved.tolist(), at))
                return
        least = min((abs(float(w)) for w in weights if w), default=1.0)
        shares = ", ".join(f"{float(w) / least:.4g}" for w in weights)
        cause = remedies.of_unknown_weights(shares)
        self.found.append(self._ways_in(cause))

    def _is_function(self) -> bool:
        """Whether the loss is the square root or the logarithm of a mean."""
        subject, whole = self._subject, self._whole()
        taken = [subject.whole(part) for part in subject.parts]
        losses = [sum(each.losses) for each in taken]
        total = sum(subject.whole().losses)
        if not subject.module.automatic_optimization or not total:
            return False
        parts, values = self._alone(), torch.tensor(losses, dtype=torch.float64)
        scales = {
            "square root": values / total,
            "logarithm": (values - total).exp(),
        }
        for candidate, counts, number in self._counted():
            for function, scale in scales.items():
                weights = counts / number * scale if number else counts
                if off_by(whole, parts, weights) <= self._most:
                    self.found.append(remedies.of_function(function, candidate))
                    return True
        return False

    def _has_two_denominators(self) -> bool:
        """Whether the loss is made of two terms with a denominator each."""
        subject = self._subject
        groups = [sorted(itertools.chain(*subject.parts[n::4])) for n in range(4)]
        groups = [group for group in groups if group]
        if len(groups) < 4 or not subject.module.automatic_optimization:
            return False
        merged = replace(subject, parts=groups)
        gradients = {}
        for number in range(1, 5):
            for union in itertools.combinations(range(4), number):
                rows = sorted(row for n in union for row in groups[n])
                gradients[frozenset(union)] = self._vector(subject.whole(rows))
        own, self._subject = self._subject, merged
        counts = {c: v.tolist() for c, v, _ in self._counted() if c.simplicity <= 4}
        self._subject = own
        pair = two_denominators(gradients, counts, self._most)
        if pair is not None:
            self.found.append(remedies.of_two(*pair))
        return pair is not None

    # ---- help ------------------------------------------------------------------------

    def _with(self, **changes: Any) -> Subject:
        subject = self._subject
        return replace(subject, base=replace(subject.base, **changes))

    def _window_off(self) -> float:
        return self._subject.window().off_from(self._subject.whole())

    def _whole(self) -> Tensor:
        return self._vector(self._subject.whole())

    def _alone(self) -> Tensor:
        """The gradients of the parts, each run by itself."""
        subject = self._subject
        return torch.stack([self._vector(subject.whole(p)) for p in subject.parts])

    def _own_weights(self) -> Tensor:
        """By what the run weighs its parts."""
        subject, number = self._subject, len(self._subject.parts)
        ones = torch.ones(number, dtype=torch.float64)
        if not subject.strategies:
            return ones / number
        strategy = leading(subject.strategies)
        if strategy.loss_reduction == "total" and not isinstance(strategy, Uniform):
            return ones
        if isinstance(strategy, Weighed):
            return torch.full((number,), torch.nan, dtype=torch.float64)
        batches = [subject.batch(part) for part in subject.parts]
        weights = _numbers(strategy.weight, batches)
        return weights / weights.sum()

    def _vector(self, taken: Taken) -> Tensor:
        """Some coordinates of a gradient, the same ones each time."""
        if not self._sampled:
            total = sum(each.numel() for each in taken.gradients.values())
            share = min(1.0, MOST_COORDINATES / max(total, 1))
            generator = torch.Generator().manual_seed(0)
            for key, each in taken.gradients.items():
                number = max(1, int(share * each.numel()))
                at = torch.randint(each.numel(), (number,), generator=generator)
                self._sampled[key] = at if share < 1 else torch.arange(each.numel())
        found = [
            taken.gradients[key].flatten()[at.to(taken.gradients[key].device)]
            if key in taken.gradients
            else torch.zeros(len(at))
            for key, at in self._sampled.items()
        ]
        return torch.cat([each.double().cpu() for each in found])

    def _said(self) -> str:
        """What the parts were weighed by."""
        if not self._subject.strategies:
            return "plain accumulation, which weighs every micro-batch alike"
        strategy = leading(self._subject.strategies)
        if isinstance(strategy, Weighed):
            return "what self.weigh gets" if strategy.is_said else "what by= counts"
        return line_of(strategy)

    def _ways_in(self, cause: Cause) -> Cause:
        """A cause with the line that a module needs before a strategy counts in it."""
        module, more = self._subject.module, ""
        if hasattr(module, "accumulate"):
            return cause
        if not module.automatic_optimization:
            more = BY_HAND
        elif not self._subject.strategies:
            more = WITH_MIXIN
        return replace(cause, remedy=(*cause.remedy, *([more] if more else [])))


def _overrides(callback: Any, name: str) -> bool:
    return hasattr(callback, name) and has_own(callback, name)


def _numbers(weigh: Callable[[Any], Any], batches: Sequence[Any]) -> Tensor:
    return torch.tensor([float(weigh(each)) for each in batches], dtype=torch.float64)


def _at(module: nn.Module, path: str) -> nn.Module | None:
    return module.get_submodule(path) if path else None


def _in_eval(module: nn.Module) -> None:
    for each in module.modules():
        if isinstance(each, BatchNorm):
            each.eval()
            each.train = lambda mode=True, own=each: own  # type: ignore[method-assign]
