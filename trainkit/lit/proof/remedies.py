"""Causes in words, each with what to do about it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from torch import nn

from trainkit.core.batch_norm.layers import BatchNorm, listed
from trainkit.core.class_weights import PerClassWeight
from trainkit.core.said_weight import Weighed
from trainkit.core.strategies import PerSample, PerToken
from trainkit.lit.proof.denominators import CONSTANT, SUM, UNIFORM, Candidate, line_of
from trainkit.lit.proof.places import Located
from trainkit.lit.proof.report import Cause

INSIDE = 'micro_batching = MicroBatching(size=8, inside="auto")'
STEP = "training_step"
OFTEN_MEANT = 4  # a candidate's simplicity
NO_STRATEGY = "no strategy can make it exact; the inner cut can"
WITH_MIXIN = (
    "where it stands: in a class of (AccumulationMixin, LightningModule); or, for a "
    "module that is not yours, in Trainer(callbacks=[AccumulationCallback(...)])"
)
BY_HAND = (
    "self.accumulate(loss, batch, optimizer=...)  # of AccumulationMixin, in place of "
    "self.manual_backward(loss)"
)


def _denominator(text: str, *remedy: str) -> Cause:
    return Cause("denominator", STEP, text, remedy)


NUMBERS = _denominator(
    "the loss depends on the Trainer's accumulate_grad_batches or "
    "num_training_batches, or on batch_idx, which the big batch has otherwise",
    "return the mean loss itself: trainkit divides the window once",
)
MANUAL_BACKWARD = _denominator(
    "self.manual_backward weighs no micro-batch, and divides no window", BY_HAND
)
OWN_BACKWARD = Cause(
    "order",
    STEP,
    "gradients arrive beside the window's backward pass, as by a .backward() within "
    "training_step",
    ("return the sum of all losses from training_step",),
)
UNSEEN_DRAWS = Cause(
    "randomness",
    STEP,
    "two steps over the same rows differ: it draws from Python's or NumPy's generator, "
    "or from one of its own",
    ("draw with torch, one number for each row",),
)


def of_draws(place: str) -> Cause:
    return Cause(
        "randomness",
        place,
        "it draws what rows of a batch share, so two windows of the same rows differ, "
        "and so does the big batch",
        ("draw in the data set, or for each row by itself",),
    )


def of_chunks(place: str) -> Cause:
    """Chunks of a submodule's rows are not all its rows."""
    return Cause(
        "rows",
        place,
        "chunks of rows do not give what all rows give: a row's output depends on "
        "other rows, or on how many there are",
        ("name a module within it that treats rows apart, in inside=",),
    )


def of_host(place: str) -> Cause:
    """The loss divides by a number of the batch that is not cut."""
    return Cause(
        "host",
        place,
        f"the loss adds up as a sum, or it divides by the number at {place!r}, which "
        f"counts the whole batch and is not cut",
        (
            f"divide by the part's own count in place of {place!r}",
            'or, if it is meant as a sum: loss_reduction="total"',
        ),
    )


def of_state(names: Sequence[str]) -> Cause:
    """What a micro-batch leaves behind changes the next one's gradient."""
    first, *others = names
    also = f", and so {listed(others, at_most=3)}" if others else ""
    move = "move the update to on_before_optimizer_step"
    if ".parametrizations." in first:
        move = (
            "this parametrization, such as spectral norm, moves in each forward pass: "
            "no strategy can make it exact, and its estimate is what differs"
        )
    text = f"each micro-batch moves it, not each step{also}"
    return Cause("state", first, text, (move,))


def of_padding(place: str) -> Cause:
    return Cause(
        "padding",
        place,
        "outputs of a row change with the length that it is padded to",
        (
            "pad all rows to one length in the collate function",
            "or mask padding in this module",
        ),
    )


def of_precision(precision: str, why: str) -> Cause:
    return Cause(
        "precision",
        STEP,
        f"it runs in {precision} only, where rounding hides deviations below 5e-2, so "
        f"nobody can say that it is exact. In float32: {why}",
        ("let training_step run in float32 for the check",),
    )


def of_two(one: Candidate, other: Candidate) -> Cause:
    """The loss has two terms, and no strategy divides by both denominators."""
    terms = " and of ".join(map(_term, (one, other)))
    if CONSTANT in (one, other):
        return _denominator(
            f"the loss is made of {terms}; each micro-batch adds the latter anew",
            "return the mean over rows from training_step, to which a constant may be "
            "added, or give the decay to the optimizer (weight_decay=...)",
        )
    total = 'PerSample(loss_reduction="total")'
    lines = [total if each is SUM else each.line for each in (one, other)]
    return _denominator(
        f"the loss is made of {terms}",
        'return {"loss": {"one": first, "other": second}} from training_step',
        f'accumulation = {{"one": {lines[0]}, "other": {lines[1]}}}',
        'micro_batching = MicroBatching("auto")',
    )


def _term(candidate: Candidate) -> str:
    if candidate is SUM:
        return "a sum over rows"
    return candidate.line if candidate is CONSTANT else f"a mean over {candidate.line}"


def of_strategy(strategy: Any, line: str = "") -> str:
    """The line that chooses a strategy."""
    line = line or line_of(strategy)
    if "self." not in line:
        return f"accumulation = {line}"
    said = f"self.accumulation = {line}  # in __init__, at its end"
    if isinstance(strategy, PerClassWeight):
        numbers = [round(float(each), 6) for each in strategy.class_weights]
        said += f"; with its numbers: PerClassWeight(weight={numbers})"
    return said


def of_weights(fits: Sequence[Candidate], said: str) -> Cause:
    """The loss divides by something else than the strategy counts."""
    first, *others = fits
    if first is UNIFORM:
        text = f"the loss weighs every micro-batch alike, and {said} does not"
    else:
        lines = [e.line for e in others if e.simplicity <= OFTEN_MEANT]
        lines = [line for line in lines if line != SUM.line][:2]
        also = f" (on these rows {' and '.join(lines)} count as much)" * bool(lines)
        text = f"the loss divides by what {first.line} counts, and not by {said}"
        text += also
    return _denominator(text, of_strategy(first.strategy, first.line))


def of_sum(said: str, own: Any) -> Cause:
    """The loss is a sum."""
    kept = own if isinstance(own, PerSample | PerToken) else PerSample()
    total = dataclasses.replace(kept, loss_reduction="total")
    line = line_of(total).replace("'total'", '"total"')
    text = f"the loss is a sum over rows, and {said} takes it for a mean"
    return _denominator(text, of_strategy(total, line))


def of_unknown_weights(shares: str) -> Cause:
    return _denominator(
        f"the parts of the loss add up to the whole, but with weights that nothing "
        f"in the batch counts; they are as {shares}",
        f"{of_strategy(Weighed())}, and in training_step self.weigh(n) with the "
        f"number that the loss divides by",
        "for a module that is not yours: AccumulationCallback(Weighed(by=...))",
    )


def of_classes(weights: Sequence[float], at: Any) -> Cause:
    """The loss divides by weights of classes."""
    smallest = min((w for w in weights if w > 0), default=1.0)
    numbers = [round(float(w / smallest), 6) for w in weights]
    strategy = PerClassWeight(weight=numbers, labels=at)
    line = f"PerClassWeight(weight={numbers}, labels={at!r})"
    text = f"the loss divides by the sum of class weights, which are as {numbers}"
    return _denominator(text, of_strategy(strategy, line))


def of_function(function: str, fit: Candidate) -> Cause:
    said = of_strategy(fit.strategy, fit.line)
    return Cause(
        "loss",
        STEP,
        f"the loss is the {function} of a mean over {fit.line}; no weights of "
        f"micro-batches make that exact",
        (f"return the mean itself from training_step, with {said}",),
    )


def of_rows(located: Located, layer: nn.Module, num_norms: int) -> Cause:
    """A module's output for a row changes with the other rows."""
    name, inside = type(layer).__name__, INSIDE
    if isinstance(layer, BatchNorm):
        more = f" (the first of {num_norms} such layers)" if num_norms > 1 else ""
        exact, *others = (
            f'BatchNormGuard("{policy}")'
            for policy in ("exact", "group_norm", "freeze")
        )
        return Cause(
            "rows",
            located.path,
            f"{name} normalises each micro-batch by itself{more}",
            (
                f"{exact}, and the loader yields whole windows, which are cut: "
                f"{inside}",
                f"or {' or '.join(others)}, for a net that is trained already; "
                f"these change the model",
            ),
        )
    where = "before" if located.is_before else "in"
    return Cause(
        "rows",
        located.path,
        f"{where} {name}, a row gets another value when other rows are beside it; "
        f"{NO_STRATEGY}",
        (inside, "or let no operation mix rows"),
    )


def of_loss(located: Located) -> Cause:
    """The rows agree up to the loss, which looks across them."""
    after = f" after {located.after}" if located.after else ""
    return Cause(
        "loss",
        located.of_loss or STEP,
        f"all modules treat rows apart, and the loss{after} looks across them, as "
        f"contrastive, Dice or batch-normalised losses do; {NO_STRATEGY}",
        (
            INSIDE,
            "with accumulate_grad_batches=1 and larger loader batches",
        ),
    )


def of_hook(place: str) -> Cause:
    """A hook does to each micro-batch what is meant for a step."""
    if "batch_transfer" in place or "transfer_batch" in place:
        text = f"this hook looks across the rows of a loader batch; {NO_STRATEGY}"
        return Cause("rows", place, text, (INSIDE,))
    if "on_train_batch" in place or "zero_grad" in place:
        return of_state([place])
    return Cause(
        "order",
        place,
        "it changes the gradient of each micro-batch, before the window's is complete",
        (
            "move it to on_before_optimizer_step",
            "or, if it clips: Trainer(gradient_clip_val=...)",
        ),
    )
