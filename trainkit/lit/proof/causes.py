"""Why parts are not the whole: rehearsals with one thing changed at a time."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from lightning.pytorch import LightningDataModule, LightningModule
from torch import nn

from trainkit.core._compat import has_gradient_hook
from trainkit.core.batch_norm.layers import BatchNorm, every_layer, listed
from trainkit.core.said_weight import Weighed
from trainkit.core.terms import ONE, leading
from trainkit.lit._compat import has_own, replaced
from trainkit.lit.proof.places import (
    Event,
    first_unlike,
    moved,
    record_events,
    values_of,
)
from trainkit.lit.proof.rehearse import may_change_steps
from trainkit.lit.proof.report import Cause
from trainkit.lit.proof.subject import Subject
from trainkit.lit.proof.taken import Taken
from trainkit.lit.proof.weights import (
    Alone,
    denominator,
    own_weights,
    two_denominators,
    unknown,
)
from trainkit.lit.proof.words import STEP, cause

HOOKS = (
    "backward", "on_before_backward", "on_after_backward", "on_before_optimizer_step",
    "optimizer_step", "configure_gradient_clipping", "on_before_zero_grad",
    "optimizer_zero_grad", "on_train_batch_start", "on_train_batch_end",
)  # fmt: skip
TRANSFERS = (
    "on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer",
)  # fmt: skip

PARAMETERS = "hooks of parameters"

Variations = Iterator[tuple[Subject, Callable[[], Cause]]]
"""Ways to run the same rows, each with what is the cause if it makes the difference
vanish."""


class Causes:
    """Looks for the causes of a deviation.

    A variation that makes the difference vanish is a cause. It stays while the next
    one is looked for.

    Args:
        subject: what was measured, and is off.
        whole: its rows as one batch.
        window: they as the run's own window.

    Attributes:
        found: the causes, in the order in which they were found.
    """

    def __init__(self, subject: Subject, whole: Taken, window: Taken) -> None:
        self._measured, self._whole, self._window = subject, whole, window
        self._subject, self._most = subject, subject.most_rounding
        self._is_split = subject.is_split
        self._alones: dict[Subject, Alone] = {}
        self.found: list[Cause] = []

    def look(self) -> None:
        """Look until the parts are the whole, or nothing more is found."""
        if self._draws_unseen() or self._is_inner_cut():
            return
        if self._is_split:  # its parts follow each other as loader batches do
            self._subject = replace(self._subject, options=None, has_batches=True)
        self._explain_order()
        self._explain_parts()

    def _vanishes(self, off: Callable[[Subject], float], subject: Subject) -> bool:
        """Whether a variation runs, and nothing is off; then it stays."""
        try:
            vanishes = off(subject) <= self._most
        except Exception:  # it lacks a hook that the step needs
            return False
        if vanishes:
            self._subject = subject
        return vanishes

    def _alone(self, subject: Subject) -> Alone:
        """The gradients of a subject's parts, which run once."""
        if subject not in self._alones:
            whole = self._whole if subject is self._measured else None
            self._alones[subject] = Alone.of(subject, whole)
        return self._alones[subject]

    def _gap(self, subject: Subject) -> float:
        """How far the window is from its parts, each run by itself and weighed."""
        alone, is_measured = self._alone(subject), subject is self._measured
        window = self._window if is_measured else subject.window()
        return alone.off(own_weights(subject), alone.vector(window))

    def _apart(self, subject: Subject) -> float:
        """How far the parts are from the whole, however they are weighed."""
        return self._alone(subject).least_off()

    # ---- before all else -------------------------------------------------------------

    def _draws_unseen(self) -> bool:
        """Find draws that rows share, behind which there may be more."""
        unlike = {*self._whole.draws.unlike, *self._window.draws.unlike}
        self.found += [cause("draws", place) for place in sorted(unlike)]
        if unlike:
            return True
        if self._subject.whole(seed=1).off_from(self._whole) > self._most:
            self.found.append(cause("unseen draws"))
            return True
        return False

    def _is_inner_cut(self) -> bool:
        """Whether chunks of rows are not all rows; else look at what is accumulated."""
        subject = self._subject
        if subject.options is None or subject.is_split:
            return False
        if replace(subject, has_batches=False).off() > self._most:
            paths = ", ".join(subject.options.inside_paths)
            self.found.append(cause("chunks", paths))
            return True
        self._subject = replace(subject, options=None)
        return not subject.has_batches

    # ---- micro-batches one after another ---------------------------------------------

    def _explain_order(self) -> None:
        """Find what makes a window another one than its parts, each run by itself."""
        subject = self._subject
        strategies = subject.strategies
        is_one = not strategies or ONE in strategies
        if not (is_one and subject.has_batches):
            return
        if strategies and isinstance(leading(strategies), Weighed):
            return
        as_whole = subject.changed(_as_whole)
        variations = [(subject, None), (as_whole, cause("numbers"))]
        for name, place in _hooks(subject, HOOKS):
            without = as_whole.varied(without=frozenset({name}))
            if name == PARAMETERS:
                without = as_whole.changed(_without_hooks)
            is_around = "on_train_batch" in place or "zero_grad" in place
            of_hook = _of_state(place) if is_around else cause("hook", place)
            variations.append((without, of_hook))
        for variation, found in variations:
            if self._vanishes(self._gap, variation):
                self.found += [] if found is None else [found]
                return
        names = _moved(subject)
        is_automatic = subject.module.automatic_optimization
        other = cause("own backward" if is_automatic else "manual backward")
        self.found.append(_of_state(*names) if names else other)

    # ---- parts and the whole ---------------------------------------------------------

    def _explain_parts(self) -> None:
        """Find what keeps parts from adding up, then by which weights they do."""
        for _ in range(4):
            if self._vanishes(self._apart, self._subject):
                self._explain_weights()
                return
            for variation, found in self._variations():
                if self._vanishes(self._apart, variation):
                    self.found.append(found())
                    break
            else:
                if not self._is_in_batch_norm():
                    return

    def _variations(self) -> Variations:
        """What may keep parts from adding up: widths, transfers, BatchNorm."""
        subject = self._subject
        if subject.rows.can_widen and not subject.are_alike:
            alike = replace(subject, are_alike=True)
            yield alike, lambda: cause("padding", _place_of_padding(subject))
        for name, place in _hooks(subject, TRANSFERS):
            without = subject.rehearsal.without | {name}
            found = functools.partial(cause, "transfer", place)
            yield subject.varied(without=without), found
        for path in subject.rows.divided if self._is_split else ():
            whole = replace(subject, rows=subject.rows.with_whole(path))
            yield whole, functools.partial(cause, "cut by chance", path)
        norms = every_layer(subject.module)
        if norms and _in_eval not in subject.rehearsal.changes:
            in_eval = subject.changed(_in_eval)
            (path, layer), number = next(iter(norms.items())), len(norms)
            yield in_eval, lambda: _of_rows(Event(path, True, ()), layer, number)

    def _is_in_batch_norm(self) -> bool:
        """Find the first module whose rows see each other, or else explain the loss;
        returns whether it is BatchNorm, without which one can look on."""
        subject = self._subject
        whole, part, places = self._both()
        event = first_unlike(whole, part, places, len(subject.all_rows))
        if event is None:
            found = denominator(subject, self._alone(subject), self._most)
            found = found or two_denominators(subject, self._whole, self._most)
            after = f" after {whole[-1].path}" if whole else ""
            self.found.append(found or cause("loss", after=after))
            return False
        layer = subject.module.get_submodule(event.path)
        self.found.append(_of_rows(event, layer))
        if not isinstance(layer, BatchNorm) or _in_eval in subject.rehearsal.changes:
            return False
        self._subject = subject.changed(_in_eval)
        return True

    def _both(self) -> tuple[list[Event], list[Event], list[int]]:
        """The events of all rows, those of a part, and which places it has; as wide as
        the whole, if that can be had."""
        subject = self._subject
        of, part = subject.all_rows, max(subject.parts, key=len)
        places = [of.index(row) for row in part]
        alike = replace(subject, are_alike=subject.rows.can_widen)
        try:
            return _events(alike, of), _events(alike, part), places
        except Exception:
            return _events(subject, of), _events(subject, part), places

    def _explain_weights(self) -> None:
        """Name the weights with which the parts are the whole."""
        subject = self._subject
        alone = self._alone(subject)
        numbers = subject.rows.whole_numbers() if self._is_split else []
        number = numbers[0] if numbers else ""
        if alone.off(own_weights(subject)) <= self._most:
            if number and not self.found:
                self.found.append(cause("host", number))
            return
        found = denominator(subject, alone, self._most, number)
        self.found.append(found or unknown(subject, alone))


def _of_state(first: str, *others: str) -> Cause:
    also = f", and so {listed([*others], at_most=3)}" if others else ""
    return cause("state", first, also=also)


def _of_rows(event: Event, layer: nn.Module, number: int = 1) -> Cause:
    more = f" (the first of {number} such layers)" if number > 1 else ""
    name = "BatchNorm" if isinstance(layer, BatchNorm) else "rows"
    where, kind = "in" if event.is_output else "before", type(layer).__name__
    return cause(name, event.path, layer=kind, more=more, where=where)


def _events(subject: Subject, rows: Sequence[int]) -> list[Event]:
    return subject.changed(record_events).whole(rows).result


def _place_of_padding(subject: Subject) -> str:
    """The first module whose outputs change with the padding of its rows."""
    lengths = subject.rows.lengths()
    part = min(subject.parts, key=lambda rows: max(lengths[row] for row in rows))
    wide = _events(replace(subject, are_alike=True), part)
    event = first_unlike(wide, _events(subject, part), range(len(part)), len(part))
    return STEP if event is None else event.path


def _moved(subject: Subject) -> list[str]:
    """What a micro-batch moves in the module, by value."""
    held = subject.changed(lambda module: (module, values_of(module)))
    module, before = held.whole(subject.parts[0]).result
    return moved(before, values_of(module))


def _hooks(subject: Subject, names: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Hooks that somebody has overridden, callbacks with hooks of a step, and the
    hooks of parameters: what takes them away, and where they are."""
    module, data = subject.module, subject.trainer.datamodule
    for owner, base in (module, LightningModule), (data, LightningDataModule):
        for name in names if owner is not None else ():
            if hasattr(base, name) and has_own(owner, name):
                yield name, f"{name} of {type(owner).__name__}"
    for callback in filter(may_change_steps, subject.rehearsal.callbacks or ()):
        for name in names:
            if hasattr(callback, name) and has_own(callback, name):
                kind = type(callback).__name__
                yield kind, f"{name} of {kind}"
    hooked = [n for n, p in module.named_parameters() if has_gradient_hook(p)]
    if hooked and names is HOOKS:
        yield PARAMETERS, f"the hook of {hooked[0]}"


class _AsWhole:
    """A Trainer with the numbers that it has for the big batch."""

    accumulate_grad_batches = num_training_batches = 1

    def __init__(self, trainer: Any) -> None:
        self._own = trainer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)


def _as_whole(module: Any) -> None:
    """Let `training_step` find the numbers of the big batch."""
    step = module.training_step

    @functools.wraps(step)
    def run(*args: Any, **kwargs: Any) -> Any:
        args = tuple(0 if type(each) is int else each for each in args)
        kwargs.update({"batch_idx": 0} if "batch_idx" in kwargs else {})
        with replaced(module, _trainer=_AsWhole(module._trainer)):
            return step(*args, **kwargs)

    vars(module)["training_step"] = run


def _without_hooks(module: Any) -> None:
    """Take the hooks of parameters away."""
    for parameter in module.parameters():
        parameter._backward_hooks = None
        parameter._post_accumulate_grad_hooks = None


def _in_eval(module: nn.Module) -> None:
    for each in module.modules():
        if isinstance(each, BatchNorm):
            each.eval()
            each.train = lambda mode=True, own=each: own  # type: ignore[method-assign]
