"""Why parts are not the whole: rehearsals with one thing changed at a time.

A variation is a function of a subject. It gives ways to run the same rows, each with
what is the cause if it makes a difference vanish.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from lightning.pytorch import LightningDataModule, LightningModule
from torch import nn

from trainkit.core._compat import has_gradient_hook
from trainkit.core.batch_norm.layers import BatchNorm, every_layer, listed
from trainkit.core.said_weight import Weighed
from trainkit.core.split.micro_batching import is_inside
from trainkit.core.terms import ONE
from trainkit.lit._compat import has_own, replaced
from trainkit.lit.proof.rehearse import may_change_steps
from trainkit.lit.proof.report import Cause
from trainkit.lit.proof.subject import Subject
from trainkit.lit.proof.taken import Event, first_unlike, moved, values_of
from trainkit.lit.proof.weights import (
    denominator,
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

Ways = Iterator[tuple[Subject, Callable[[], Cause]]]


def look(subject: Subject, found: list[Cause]) -> None:
    """Look for the causes of a deviation, first in how micro-batches follow each other,
    then in how parts differ from the whole, then in what they weigh.

    A variation that makes a difference vanish stays while the next one is looked for.

    Args:
        subject: what was measured, and is off.
        found: is filled with the causes, in the order in which they are found.
    """
    unlike = {*subject.as_one.draws.unlike, *subject.as_run.draws.unlike}
    found += [cause("draws", place) for place in sorted(unlike)]
    if unlike:  # behind which there may be more
        return
    if subject.whole(seed=1).off_from(subject.as_one) > subject.most_rounding:
        found.append(cause("unseen draws"))
        return
    numbers = subject.rows.whole_numbers() if subject.is_split else []
    if subject.options is not None and is_inside(subject.options):
        if replace(subject, has_batches=False).off() > subject.most_rounding:
            found.append(cause("chunks", ", ".join(subject.options.inside_paths)))
            return
        if not subject.has_batches:
            return
        subject = replace(subject, options=None)
    elif subject.is_split:  # its parts follow each other as loader batches do
        subject = replace(subject, options=None, has_batches=True)
    subject = _explain_order(subject, found)
    varied = _explained(_apart, PARTS, subject, found)
    if varied is None:
        found.append(_of_place(subject))
    elif not varied.alone.off(varied.weights) <= subject.most_rounding:
        number = numbers[0] if numbers else ""
        found.append(denominator(varied, number) or unknown(varied))
    elif numbers and not found:
        found.append(cause("host", numbers[0]))


def _vanishes(off: Callable[[Subject], float], subject: Subject) -> bool:
    """Whether a variation runs, and nothing is off."""
    try:
        return off(subject) <= subject.most_rounding
    except Exception:  # it lacks a hook that the step needs
        return False


def _explained(
    off: Callable[[Subject], float],
    variations: Sequence[Callable[[Subject], Ways]],
    subject: Subject,
    found: list[Cause],
) -> Subject | None:
    """A subject if nothing is off, or the first way to run it in which nothing is; then
    its cause is found."""
    if _vanishes(off, subject):
        return subject
    for variation in variations:
        for varied, of_varied in variation(subject):
            if _vanishes(off, varied):
                found.append(of_varied())
                return varied
    return None


# ---- micro-batches one after another -------------------------------------------------


def _gap(subject: Subject) -> float:
    """How far the window is from its parts, each run by itself and weighed."""
    alone = subject.alone
    return alone.off(subject.weights, subject.as_run.vector(alone.sizes))


def _explain_order(subject: Subject, found: list[Cause]) -> Subject:
    """Find what makes a window another one than its parts, each run by itself."""
    is_said = isinstance(subject.strategy, Weighed)
    is_one = not subject.strategies or ONE in subject.strategies
    if is_said or not (is_one and subject.has_batches):
        return subject
    varied = _explained(_gap, ORDER, subject, found)
    if varied is not None:
        return varied
    held = subject.changed(lambda module: (module, values_of(module)))
    module, before = held.whole(subject.parts[0]).result
    names = moved(before, values_of(module))
    is_automatic = subject.module.automatic_optimization
    other = cause("own backward" if is_automatic else "manual backward")
    found.append(_of_state(*names) if names else other)
    return subject


def _of_state(first: str, *others: str) -> Cause:
    also = f", and so {listed([*others], at_most=3)}" if others else ""
    return cause("state", first, also=also)


def _numbers(subject: Subject) -> Ways:
    """The numbers of the Trainer and of the batch are those of the big batch."""
    yield subject.changed(_as_whole), partial(cause, "numbers")


def _hooks_of_a_step(subject: Subject) -> Ways:
    """Hooks that may change gradients or state are taken away."""
    as_whole = subject.changed(_as_whole)
    for name, place in _hooks(subject, HOOKS):
        is_around = "on_train_batch" in place or "zero_grad" in place
        of_hook = partial(_of_state if is_around else partial(cause, "hook"), place)
        yield as_whole.varied(without=frozenset({name})), of_hook
    parameters = subject.module.named_parameters()
    for name in [n for n, p in parameters if has_gradient_hook(p)][:1]:
        place = f"the hook of {name}"
        yield as_whole.changed(_without_hooks), partial(cause, "hook", place)


def _hooks(subject: Subject, names: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Hooks that somebody has overridden, and callbacks with hooks of a step: what
    takes them away, and where they are."""
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


# ---- parts and the whole -------------------------------------------------------------


def _apart(subject: Subject) -> float:
    """How far the parts are from the whole, however they are weighed."""
    return subject.alone.least_off()


def _widths(subject: Subject) -> Ways:
    """All parts are as wide as the whole."""
    wide = replace(subject, rows=subject.rows.wide)
    if wide.rows is not subject.rows:
        yield wide, lambda: cause("padding", _place_of_padding(wide, subject))


def _transfers(subject: Subject) -> Ways:
    """Hooks that may look across the rows of a batch are taken away."""
    for name, place in _hooks(subject, TRANSFERS):
        without = subject.rehearsal.without | {name}
        yield subject.varied(without=without), partial(cause, "transfer", place)


def _fields(subject: Subject) -> Ways:
    """A field that is cut, since it is as long as the batch has rows, stays whole."""
    for path in subject.rows.divided:
        whole = replace(subject, rows=subject.rows.with_whole(path))
        yield whole, partial(cause, "cut by chance", path)


def _batch_norm(subject: Subject) -> Ways:
    """BatchNorm does not look at the batch."""
    norms = every_layer(subject.module)
    if norms:
        (path, layer), number = next(iter(norms.items())), len(norms)
        event = Event(path, True, ())
        yield subject.changed(_in_eval), partial(_of_rows, event, layer, number)


def _in_eval(module: nn.Module) -> None:
    for each in module.modules():
        if isinstance(each, BatchNorm):
            each.eval()
            each.train = lambda mode=True, own=each: own  # type: ignore[method-assign]


ORDER = _numbers, _hooks_of_a_step
PARTS = _widths, _transfers, _fields, _batch_norm


def _place_of_padding(wide: Subject, subject: Subject) -> str:
    """The first module whose outputs change with the padding of its rows."""
    lengths = subject.rows.lengths
    part = min(subject.parts, key=lambda rows: max(lengths[row] for row in rows))
    both = wide.events(part), subject.events(part)
    event = first_unlike(*both, range(len(part)), len(part))
    return STEP if event is None else event.path


def _of_rows(event: Event, layer: nn.Module, number: int = 1) -> Cause:
    more = f" (the first of {number} such layers)" if number > 1 else ""
    name = "BatchNorm" if isinstance(layer, BatchNorm) else "rows"
    where, kind = "in" if event.is_output else "before", type(layer).__name__
    return cause(name, event.path, layer=kind, more=more, where=where)


def _of_place(subject: Subject) -> Cause:
    """The first module whose rows see each other, or else what is in the loss."""
    of, part = subject.all_rows, max(subject.parts, key=len)
    alike = replace(subject, rows=subject.rows.wide)
    try:
        whole, events = alike.events(of), alike.events(part)
    except Exception:  # it takes no other width
        whole, events = subject.events(of), subject.events(part)
    event = first_unlike(whole, events, [of.index(row) for row in part], len(of))
    if event is not None:
        return _of_rows(event, subject.module.get_submodule(event.path))
    after = f" after {whole[-1].path}" if whole else ""
    found = denominator(subject) or two_denominators(subject)
    return found or cause("loss", after=after)
