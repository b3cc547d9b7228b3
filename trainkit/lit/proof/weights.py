"""By which weights parts of the rows, each run by itself, are the whole."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from trainkit.core.said_weight import Weighed
from trainkit.core.strategies import PerSample, PerToken
from trainkit.lit.proof.denominators import (
    OFTEN_MEANT,
    SUM,
    UNIFORM,
    Candidate,
    candidates,
    class_counts,
    class_weights_of,
    line_of,
)
from trainkit.lit.proof.report import Cause
from trainkit.lit.proof.subject import Subject
from trainkit.lit.proof.taken import Alone
from trainkit.lit.proof.words import BY_HAND, STEP, TOTAL, WITH_MIXIN, cause


def denominator(subject: Subject, number: str = "") -> Cause | None:
    """What the loss divides by; None if nothing in the batch makes the parts the whole.

    Args:
        subject: the rows, and how they are run.
        number: the path of a number of the batch that is not cut, if there is one.
    """
    fits = _fitting(subject)
    if not fits:
        return None
    (first, function), said, line = fits[0], _said(subject), _line(fits[0][0].line)
    if function:
        return cause("function", function=function, line=first.line, strategy=line)
    if first is SUM and number:
        return cause("host", number)
    if first is SUM:
        own = subject.strategy
        kept = own if isinstance(own, PerSample | PerToken) else PerSample()
        total = line_of(replace(kept, loss_reduction="total"))
        line = _line(total.replace("'total'", '"total"'))
        return cause("sum", said=said, strategy=line)
    others = [each for each, function in fits[1:] if not function]
    meant = [each.line for each in others if each.simplicity <= OFTEN_MEANT]
    lines = " and ".join([each for each in meant if each != SUM.line][:2])
    also = f" (on these rows {lines} count as much)" if lines else ""
    how = {"line": first.line, "said": said, "also": also, "strategy": line}
    return cause("another", STEP, *_ways_in(subject), **how)


def unknown(subject: Subject) -> Cause:
    """Weights that make the parts the whole, and that nothing in the batch counts."""
    weights = subject.alone.best()
    found = _of_classes(subject, weights)
    if found is not None:
        return found
    clear = weights.where(weights.abs() > 1e-9 * weights.abs().max(), 0).tolist()
    least = min((abs(each) for each in clear if each), default=1.0)
    shares = ", ".join(f"{each / least:.4g}" for each in clear)
    return cause("unknown", STEP, *_ways_in(subject), shares=shares)


def _of_classes(subject: Subject, weights: Tensor) -> Cause | None:
    """Weights of classes that the labels of the parts add up to; None if none do."""
    batches = [class_counts(subject.rows.make(part)) for part in subject.parts]
    for at in batches[0]:
        counts = torch.stack([each[at] for each in batches if at in each])
        counts = counts[:, : int(counts.sum(0).nonzero().max()) + 1]
        if len(counts) <= counts.shape[1] or len(counts) < len(weights):
            continue
        if int(torch.linalg.matrix_rank(counts)) < counts.shape[1]:
            continue
        solved = torch.linalg.lstsq(counts, weights[:, None]).solution[:, 0]
        is_right = torch.allclose(counts @ solved, weights, rtol=1e-6)
        if is_right and bool((solved > 0).all()):
            numbers = [round(each, 6) for each in (solved / solved.min()).tolist()]
            line = f"PerClassWeight(weight={numbers}, labels={at!r})"
            how = {"line": line, "said": _said(subject), "also": ""}
            return cause("another", **how, strategy=_line(line))
    return None


def _fitting(subject: Subject) -> list[tuple[Candidate, str]]:
    """Denominators that make the parts the whole, the simplest first, and what the loss
    is of a mean over each; "" if it is the mean."""
    alone, most = subject.alone, subject.most_rounding
    ones = torch.ones(len(alone.parts), dtype=torch.float64)
    scales = {"": ones}
    if alone.loss:
        scales["square root"] = alone.losses / alone.loss
        scales["logarithm"] = (alone.losses - alone.loss).exp()
    weights = {(UNIFORM, ""): ones / len(ones)}
    if int((torch.linalg.vector_norm(alone.parts, dim=1) > 0).sum()) > 1:
        weights[SUM, ""] = ones  # of a single part each mean over it is the sum, too
    for candidate, counts, total in _counted(subject):
        for function, scale in scales.items():
            weights[candidate, function] = counts / total * scale
    found = [fit for fit, each in weights.items() if alone.off(each) <= most]
    return sorted(found, key=lambda fit: (fit[1] != "", fit[0].simplicity))


def _counted(subject: Subject) -> Iterator[tuple[Candidate, Tensor, float]]:
    """What each part counts, and the whole, by each denominator."""
    batches = [subject.rows.make(part) for part in subject.parts]
    whole = subject.rows.make(subject.all_rows)
    for each in candidates(whole, class_weights_of(subject.module)):
        try:
            numbers = [each.weigh(batch) for batch in batches]
            total = each.weigh(whole)
        except Exception:
            continue
        counts = torch.tensor(numbers, dtype=torch.float64)
        if total and abs(float(counts.sum()) - total) <= 1e-6 * abs(total):
            yield each, counts, total


def two_denominators(subject: Subject) -> Cause | None:
    """Two terms of a loss that make up the gradients of all unions of four parts, each
    with a denominator of its own. A term may be a sum."""
    groups = [sorted(itertools.chain(*subject.parts[n::4])) for n in range(4)]
    if not all(groups) or not subject.module.automatic_optimization:
        return None
    sizes = range(1, 5)
    unions = [u for size in sizes for u in itertools.combinations(range(4), size)]
    rows = [sorted(row for n in union for row in groups[n]) for union in unions]
    taken = [subject.whole(each) for each in rows]
    gradients = Alone.of(subject.as_one, taken).parts
    members = torch.tensor([[n in u for n in range(4)] for u in unions]).double()
    columns = {
        candidate: members / (members @ counts)[:, None]
        for candidate, counts, _ in _counted(replace(subject, parts=groups))
        if candidate.simplicity <= OFTEN_MEANT and bool((counts > 0).all())
    }
    columns[SUM] = members
    size, found = float(torch.linalg.matrix_norm(gradients)), []
    for one, other in itertools.combinations(columns, 2):
        basis = torch.cat([columns[one], columns[other]], 1)
        inside = basis @ torch.linalg.lstsq(basis, gradients, driver="gelsd").solution
        off = float(torch.linalg.matrix_norm(gradients - inside)) / size
        if off <= subject.most_rounding:
            simplicity = one.simplicity + other.simplicity
            found.append((simplicity, one, other))
    if not found:
        return None
    one, other = min(found, key=lambda each: each[0])[1:]
    terms = [
        each.line if each.strategy is None else f"a mean over {each.line}"
        for each in (one, other)
    ]
    lines = [TOTAL if each is SUM else each.line for each in (one, other)]
    return cause("two", one=terms[0], other=terms[1], first=lines[0], second=lines[1])


def _said(subject: Subject) -> str:
    """What the parts were weighed by."""
    strategy = subject.strategy
    if strategy is None:
        return "plain accumulation, which weighs every micro-batch alike"
    if isinstance(strategy, Weighed):
        return "what self.weigh gets" if strategy.is_said else "what by= counts"
    return line_of(strategy)


def _ways_in(subject: Subject) -> list[str]:
    """The line that a module needs before a strategy counts in it."""
    if hasattr(subject.module, "accumulate"):
        return []
    if not subject.module.automatic_optimization:
        return [BY_HAND]
    return [] if subject.strategies else [WITH_MIXIN]


def _line(line: str) -> str:
    """The line that chooses a strategy."""
    if "self." in line:
        return f"self.accumulation = {line}  # in __init__, at its end"
    return f"accumulation = {line}"
