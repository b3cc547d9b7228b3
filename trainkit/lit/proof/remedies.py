"""Causes in words, each with what to do about it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from trainkit.core.batch_norm.layers import listed
from trainkit.core.proof.candidates import CONSTANT, SUM, UNIFORM, Candidate, line_of
from trainkit.core.proof.weights import Explained
from trainkit.core.split.fields import take_apart
from trainkit.core.strategies import (
    AccumulationStrategy,
    PerSample,
    PerToken,
    Strategies,
)
from trainkit.core.weighed import Weighed
from trainkit.lit.measure.by_hand import has_mixin
from trainkit.lit.measure.terms import Pass
from trainkit.lit.proof.events import Located
from trainkit.lit.proof.findings import Cause

DENOMINATOR, LOSS, ROWS = "denominator", "loss", "rows"
STEP = "training_step"
OFTEN_MEANT = 4  # a candidate's simplicity
NOT_YOURS = "for a module that is not yours: AccumulationCallback(Weighed(by=...))"
WITH_MIXIN = (
    "where it stands: in a class of (AccumulationMixin, LightningModule); or, for a "
    "module that is not yours, in Trainer(callbacks=[AccumulationCallback(...)])"
)
BY_HAND = (
    "self.accumulate(loss, batch, optimizer=...)  # of AccumulationMixin, in place of "
    "self.manual_backward(loss)"
)
PLAINLY = "plain accumulation"
GIVEN = "what self.accumulate gets"
NO_STRATEGY = "no strategy can make it exact; the inner cut can"
INSIDE = 'micro_batching = MicroBatching(size=8, inside="auto")'


def of_weights(
    term: str,
    explained: Explained,
    strategy: AccumulationStrategy | None,
    batch: Any,
    *,
    is_given: bool = False,
) -> Cause:
    """The loss divides by something else than the strategy counts, or than its backward
    call is given as a weight."""
    said = _said(strategy, is_given=is_given)
    unlike = f", and not by {said}"
    if said == PLAINLY:
        unlike = f"; {said} divides by the number of micro-batches"
    which = f"the term {term!r}" if term and not term.isdigit() else "the loss"
    if not explained.classes:
        return _of_unknown_weights(which, explained)
    first, *others = explained.classes
    if explained.function:
        first_line, *more = lines_for(first)
        return Cause(
            LOSS,
            STEP,
            f"{which} is the {explained.function} of a mean over {_counted(first)}; no "
            f"weights of micro-batches make that exact",
            (f"return the mean itself from training_step, with {first_line}", *more),
        )
    if first is SUM:
        return _of_sum(which, said, strategy, batch)
    if first is UNIFORM:
        return _denominator(
            f"{which} weighs every micro-batch alike, and {said} does not",
            ("accumulation = Uniform()",),
        )
    if first.seen is not None:
        return _denominator(
            f"{which} divides by {_counted(first)}, which no field of the batch "
            f"counts{unlike}",
            lines_for(first),
        )
    return _denominator(
        f"{which} divides by what {first.line} counts{unlike}{_equal(others)}",
        lines_for(first),
    )


def _said(strategy: AccumulationStrategy | None, *, is_given: bool) -> str:
    """What the parts were weighed by."""
    if isinstance(strategy, Weighed):
        return "what self.weigh gets" if strategy.is_said else "what by= counts"
    if is_given:
        return GIVEN
    return PLAINLY if strategy is None else line_of(strategy)


def _equal(others: Sequence[Candidate]) -> str:
    """The candidates that are often meant, and count as much as the simplest."""
    lines = [e.line for e in others if e.simplicity <= OFTEN_MEANT and e is not SUM]
    if not lines:
        return ""
    count = "counts" if len(lines) == 1 else "count"
    return f" (on these rows {' and '.join(lines[:2])} {count} as much)"


def _denominator(text: str, remedy: tuple[str, ...]) -> Cause:
    return Cause(DENOMINATOR, STEP, text, remedy)


def lines_for(candidate: Candidate) -> tuple[str, ...]:
    """What to write, so that windows are divided by a candidate."""
    if candidate.seen is None:
        return (_assigned(candidate.line),)
    return (
        "accumulation = Weighed()",
        f"self.weigh({candidate.seen[1]})  # in training_step, with what "
        f"{candidate.line} gets",
        NOT_YOURS,
    )


def _assigned(strategy: str) -> str:
    """The line that sets a strategy; one that names the module stands in a method."""
    if "self." in strategy:
        return f"self.accumulation = {strategy}  # in __init__, at its end"
    return f"accumulation = {strategy}"


def with_ways_in(
    cause: Cause, module: Any, whole: Pass, strategies: Strategies
) -> Cause:
    """A cause with the line that a module needs before a strategy counts in it."""
    lines, more, text = " ".join(cause.remedy), (), cause.text
    if "accumulation = " not in lines and "micro_batching = " not in lines:
        return cause
    is_plain = any(term.is_plain for term in whole.terms)
    if not module.automatic_optimization and (is_plain or not has_mixin(module)):
        more = (BY_HAND,)
        text = text.replace(GIVEN, "self.manual_backward, which weighs nothing")
    elif not (strategies or has_mixin(module)):
        more = (WITH_MIXIN,)
    return replace(cause, text=text, remedy=(*cause.remedy, *more))


def _counted(candidate: Candidate) -> str:
    if candidate.seen is None:
        return candidate.line
    return f"{candidate.seen[0]} in {candidate.line}"


def _of_sum(
    which: str, said: str, strategy: AccumulationStrategy | None, batch: Any
) -> Cause:
    counts = _host_counts(batch)
    if counts:
        return Cause(
            "host",
            counts[0],
            f"{which} adds up as a sum, or it divides by the number at "
            f"{counts[0]!r}, which counts the whole batch and is not cut",
            (
                f"divide by the part's own count in place of {counts[0]!r}",
                'or, if it is meant as a sum: loss_reduction="total"',
            ),
        )
    kept = strategy if isinstance(strategy, PerSample | PerToken) else PerSample()
    line = line_of(replace(kept, loss_reduction="total"))
    return _denominator(
        f"{which} is a sum over rows, and {said} takes it for a mean",
        (_assigned(line.replace("'total'", '"total"')),),
    )


def _host_counts(batch: Any) -> list[str]:
    """The paths of single numbers of a batch that may count its rows or tokens."""
    found = []
    for path, value in take_apart(batch)[0]:
        number: Any = value
        if isinstance(value, Tensor):
            number = value.item() if value.ndim == 0 else None
        if type(number) in (int, float) and path and number > 1:
            found.append(path)
    return found


def _of_unknown_weights(which: str, explained: Explained) -> Cause:
    shares = ""
    if explained.is_clear:
        smallest = min((abs(float(w)) for w in explained.weights if w), default=1.0)
        each = (f"{float(w) / smallest:.4g}" for w in explained.weights)
        shares = f"; they are as {', '.join(each)}"
    return _denominator(
        f"the parts of {which} add up to the whole, but with weights that nothing in "
        f"the batch counts{shares}",
        (
            "accumulation = Weighed(), and in training_step self.weigh(n) with the "
            "number that the loss divides by",
            NOT_YOURS,
        ),
    )


def of_two_denominators(one: Candidate, other: Candidate) -> Cause:
    """The loss has two terms, and no strategy divides by both denominators."""
    terms = " and of ".join(_term(each) for each in (one, other))
    if CONSTANT in (one, other):
        return _denominator(
            f"the loss is made of {terms}; each micro-batch adds the latter anew",
            (
                "return the mean over rows from training_step, to which a constant may "
                "be added, or give the decay to the optimizer (weight_decay=...)",
            ),
        )
    strategies = [_strategy_line(each) for each in (one, other)]
    unseen = [each.line for each in (one, other) if each.seen is not None]
    counted = (
        f"for PerSample(mask='count'), let the data set count for each row what "
        f"{' and '.join(unseen)} divides by, as the field 'count'"
    )
    return _denominator(
        f"the loss is made of {terms}",
        (
            'return {"loss": {"one": first, "other": second}} from training_step',
            _assigned(f'{{"one": {strategies[0]}, "other": {strategies[1]}}}'),
            'micro_batching = MicroBatching("auto")',
            *([counted] if unseen else []),
        ),
    )


def _term(candidate: Candidate) -> str:
    if candidate is SUM:
        return "a sum over rows"
    if candidate is CONSTANT:
        return candidate.line
    return f"a mean over {_counted(candidate)}"


def _strategy_line(candidate: Candidate) -> str:
    if candidate is SUM:
        return 'PerSample(loss_reduction="total")'
    return candidate.line if candidate.seen is None else "PerSample(mask='count')"


def of_rows(located: Located, layer: nn.Module, num_norms: int) -> Cause:
    """A module's output for a row changes with the other rows."""
    name = type(layer).__name__
    if isinstance(layer, _NormBase):
        more = f" (the first of {num_norms} such layers)" if num_norms > 1 else ""
        return Cause(
            ROWS,
            located.path,
            f"{name} normalises each micro-batch by itself{more}",
            (
                f'BatchNormGuard("exact"), and the loader yields whole windows, which '
                f"are cut: {INSIDE}",
                'or BatchNormGuard("group_norm"), or "freeze" for a net that is '
                "trained already; both change the model",
            ),
        )
    where = "before" if located.is_before else "in"
    return Cause(
        ROWS,
        located.path,
        f"{where} {name}, a row gets another value when other rows are beside it; "
        f"{NO_STRATEGY}",
        (INSIDE, "or let no operation mix rows"),
    )


def of_loss(located: Located) -> Cause:
    """The rows agree up to the loss, which looks across them."""
    after = f" after {located.after}" if located.after else ""
    return Cause(
        LOSS,
        located.of_loss or STEP,
        f"all modules treat rows apart, and the loss{after} looks across them, as "
        f"contrastive, Dice or batch-normalised losses do; {NO_STRATEGY}",
        (INSIDE, "with accumulate_grad_batches=1 and larger loader batches"),
    )


def of_small_parts() -> Cause:
    """The loss computes something else for parts of one row."""
    return Cause(
        LOSS,
        STEP,
        "parts of several rows are the whole and parts of one row are not, so it "
        "computes something else for them",
        ("look for a branch or a standard deviation that needs several rows",),
    )


def of_order(place: str, off: float, *, steps: bool) -> Cause:
    """A hook works on the gradient of each micro-batch."""
    text = (
        "it steps an optimizer within the backward pass of each micro-batch"
        if steps
        else f"it changes the gradient of each micro-batch before the window's is "
        f"complete, and is not linear: the step is off by {off:.1e}"
    )
    return Cause(
        "order",
        place,
        text,
        (
            "move it to on_before_optimizer_step",
            "or, if it clips: Trainer(gradient_clip_val=...)",
        ),
    )


def of_precision(precision: str, why: str) -> Cause:
    return Cause(
        "precision",
        STEP,
        f"it runs in {precision} only, where rounding hides deviations below 5e-2, so "
        f"nobody can say that it is exact. In float32: {why}",
        ("let training_step run in float32 for the check",),
        hides=True,
    )


def of_padding(place: str, is_split: bool) -> Cause:
    remedy = (
        ("MicroBatching(..., trim=False)",)
        if is_split
        else ("pad all rows to one length in the collate function",)
    )
    return Cause(
        "padding",
        place,
        "outputs of a row change with the length that it is padded to",
        (*remedy, "or mask padding in this module"),
    )


def of_state(names: Sequence[str], off: float) -> Cause:
    """What a micro-batch leaves behind changes the gradient of the next one.

    Args:
        names: of what moves; none where they are not known.
        off: how far the next micro-batch's gradient is off.
    """
    first, *others = names or ("running statistics, or an object that is not known",)
    also = f", and so {listed(others, at_most=3)}" if others else ""
    move = "move the update to on_before_optimizer_step or on_train_batch_end"
    if ".parametrizations." in first:
        move = (
            "this parametrization, such as spectral norm, moves in each forward pass: "
            "no strategy can make it exact, and its estimate is what differs"
        )
    return Cause(
        "state",
        first,
        f"training_step moves it in each micro-batch, not once a step{also}; the next "
        f"micro-batch's gradient is off by {off:.1e}",
        (move if names else "normalise by something else than running statistics",),
    )


def of_turns() -> Cause:
    """Micro-batches under way at once change something for each other."""
    return Cause(
        "turns",
        STEP,
        "micro-batches that share BatchNorm's statistics wait for each other where "
        "they call the net, and what one of them sets around that call, another one "
        "under way finds set",
        (INSIDE, "or set it in on_train_batch_start, for all of them alike"),
    )
