"""Why parts are not the whole: one experiment for each cause."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from torch.nn.modules.batchnorm import _NormBase

from trainkit.core.generators import read_states, write_states
from trainkit.core.proof.gradients import size_of
from trainkit.core.proof.weights import Explained, explain, two_denominators
from trainkit.core.strategies import AccumulationStrategy
from trainkit.lit.proof import of_draws, remedies
from trainkit.lit.proof.events import Located, locate, recorded
from trainkit.lit.proof.findings import Cause
from trainkit.lit.proof.measure import (
    MOST_TOLERATED,
    Make,
    Measurements,
    Parts,
    strategy_of,
)
from trainkit.lit.proof.padding import first_that_sees_padding
from trainkit.lit.proof.state import moved, values_of

MOST_ROUNDS = 6
NOWHERE = Located("", False, "", "", 0, 0)


class Causes:
    """Looks for causes; what one experiment finds is neutralised for the next.

    Args:
        found: the measurements; they are made again as causes are neutralised.
        strategies: by term; empty for plain accumulation.

    Attributes:
        causes: what was found.
        notes: what holds in expectation only, and what could not be seen.
    """

    def __init__(
        self, found: Measurements, strategies: Mapping[str, AccumulationStrategy]
    ) -> None:
        self._found = found
        self._strategies = strategies
        rows = found.rows
        self._make: Make = rows.padded_alike if rows.can_cut else rows.as_run
        self.causes: list[Cause] = []
        self.notes: list[str] = []

    def look(self, *, is_off: bool) -> None:
        """Run the experiments; those about the deviation only if there is one."""
        found = self._found
        if found.repeated > max(MOST_TOLERATED, found.tolerance):
            unlike = sorted(found.passes.draws.unlike)
            self.causes.append(of_draws.of_other_draws(found.repeated, unlike))
            return
        self._look_for_a_way(found.parts if is_off else found.parts[:2])
        self._look_at_state()
        self._look_at_draws()
        if is_off:
            beside = found.passes.beside
            self._look_for_reasons()
            found.passes.beside = beside

    def _look_for_reasons(self) -> None:
        found = self._found
        self._look_at_deviation()
        if not self._has_deviation:
            # Parts of several rows are exact, and single ones are not.
            found.parts = [[row] for row in found.all_rows]
            explained = self._explained(found.rows.as_run)
            explained = explained or self._explained(self._make) or {}
            alone = [found.of(rows, found.rows.as_run) for rows in found.parts]
            is_finite = all(math.isfinite(size_of(each.gradient)) for each in alone)
            is_known = explained and all(each.classes for each in explained.values())
            if not is_finite or not is_known:
                self.causes.append(remedies.of_small_parts())
            else:
                self._look_at_deviation()
        if not self._has_deviation:
            self.causes.append(remedies.of_small_parts())

    @property
    def _has_deviation(self) -> bool:
        return any(cause.kind != "state" for cause in self.causes)

    def _look_at_deviation(self) -> None:
        explained = self._explained_without_layers()
        if explained is not None and not self._look_at_padding():
            self._compare_weights(explained)

    def _look_for_a_way(self, parts: Parts) -> None:
        """A model may refuse rows that are padded more than the longest of them."""
        if self._make == self._found.rows.as_run:
            return
        try:
            for rows in parts:
                self._found.of(rows, self._make)
        except Exception as error:
            self._make = self._found.rows.as_run
            self.notes.append(
                f"training_step fails on parts that are padded as the whole is, so "
                f"they were batched anew: {error}"
            )

    # ---- state and randomness --------------------------------------------------------

    def _look_at_state(self) -> None:
        """What the pass over a part moves, and whether the next part feels it."""
        found, module = self._found, self._found.passes.module
        if len(found.parts) < 2:
            return
        one, other = found.parts[:2]
        fresh = found.of(other, self._make)
        drawn = read_states(module.device)
        before = values_of(module)
        found.passes.run(self._make(one), one, keep_state=True)
        names = moved(before, values_of(module))
        write_states(drawn, module.device)  # draws are another cause
        after = found.passes.run(self._make(other), other)
        size = size_of(fresh.gradient) or 1.0
        off = size_of(after.gradient - fresh.gradient) / size
        parameters = dict(module.named_parameters())
        # One that trains may be made in the first pass, and then it stays.
        frozen = [
            n for n in names if n in parameters and not parameters[n].requires_grad
        ]
        if off > found.tolerance or frozen:
            self.causes.append(remedies.of_state(names, off))
        elif names:
            self.notes.append(
                f"training_step moves {_listed(names)}, which changed no gradient here"
            )

    def _look_at_draws(self) -> None:
        seen, redrawn = self._found.whole.seen, self._found.rows.redrawn
        draws = self._found.passes.draws
        if redrawn:
            self.notes.append(
                f"{redrawn!r} of a row depends on the batch that it is collated in, so "
                f"parts were cut from one batch"
            )
        if seen.dropouts:
            self.notes.append(
                f"dropout was left out: a window equals the big batch in expectation "
                f"({_listed(sorted(seen.dropouts))})"
            )
        if drawn := sorted(draws.by_row - draws.unlike):
            self.notes.append(
                f"random numbers were drawn for all rows at once: a window equals the "
                f"big batch in expectation ({_listed(drawn)})"
            )
        if draws.unlike:
            self.notes.append(
                f"these draws cannot be replayed by row: "
                f"{_listed(sorted(draws.unlike))}"
            )

    # ---- rows that see each other ----------------------------------------------------

    def _explained_without_layers(self) -> dict[str, Explained] | None:
        """The weights of each term, once layers that look across rows are neutral."""
        for _ in range(MOST_ROUNDS):
            explained = self._explained(self._make)
            if explained is not None:
                return explained
            if self._found.passes.beside is not None:
                self._run_apart()
            elif not self._neutralise(self._located()):
                return None
        return None

    def _run_apart(self) -> None:
        """Let parts run by themselves, without BatchNorm, and see whether that is all
        that they lacked."""
        found, passes = self._found, self._found.passes
        passes.beside = None
        modules = passes.module.modules()
        passes.in_eval = [each for each in modules if isinstance(each, _NormBase)]
        found.again()
        if self._explained(self._make) is not None:
            self.causes.append(remedies.of_turns())

    def _explained(self, make: Make) -> dict[str, Explained] | None:
        found = self._found
        known = found.counts(found.parts, make)
        explained = {}
        for name, measured in found.terms(found.parts, make).items():
            each = explain(measured, known, found.tolerance)
            if each is None:
                return None
            explained[name] = each
        return explained

    def _neutralise(self, located: Located) -> bool:
        """Name a cause, and whether it could be taken away."""
        found, passes = self._found, self._found.passes
        layer = passes.module.get_submodule(located.path) if located.path else None
        if located.unaligned:
            self.notes.append(
                f"{located.unaligned} of {located.total} inputs and outputs could not "
                f"be compared by rows"
            )
        if isinstance(layer, _NormBase) and layer.training and not passes.in_eval:
            self.causes.append(remedies.of_rows(located, layer, self._num_norms()))
            modules = passes.module.modules()
            passes.in_eval = [each for each in modules if isinstance(each, _NormBase)]
            found.again()
            return True
        if located.unaligned and not passes.in_eval and self._is_hidden_norm():
            return True
        if passes.draws.unlike:
            return self._is_sampling(located)
        if found.whole.seen.hooks and not passes.without_hooks:
            return self._is_early_hook(located)
        if layer is None:
            self.causes.append(self._of_loss(located))
            return False
        if located.path not in {cause.place for cause in self.causes}:
            self.causes.append(remedies.of_rows(located, layer, 0))
        self.notes.append("more may be behind it")
        return False

    def _is_hidden_norm(self) -> bool:
        """Whether BatchNorm that no event shows, as on the nodes of graphs, is a cause
        that was taken away."""
        found, passes = self._found, self._found.passes
        named = dict(passes.module.named_modules())
        norms = [p for p, m in named.items() if isinstance(m, _NormBase) and m.training]
        if not norms:
            return False
        before = found.best_fit(self._make)
        number = self._num_norms()
        passes.in_eval = [named[path] for path in norms]
        found.again()
        if found.best_fit(self._make) < 0.5 * before:
            located = Located(norms[0], False, "", "", 0, 0)
            self.causes.append(remedies.of_rows(located, named[norms[0]], number))
            return True
        passes.in_eval = []
        found.again()
        return False

    def _is_sampling(self, located: Located) -> bool:
        """Whether draws across the rows are a cause that could be taken away; what
        cannot be is named, and is not taken for another cause."""
        found, draws = self._found, self._found.passes.draws
        unlike = sorted(draws.unlike)
        if draws.identity:
            self.causes.append(of_draws.of_unlike_draws(unlike, located))
            return False
        draws.identity = True
        found.again()
        if self._explained(self._make) is None and self._located() == located:
            draws.identity = False
            found.again()
            self.causes.append(of_draws.of_unlike_draws(unlike, located))
            return False
        self.causes.append(of_draws.of_sampling(unlike))
        draws.unlike.clear()
        return True

    def _is_early_hook(self, located: Located) -> bool:
        """Whether hooks that `training_step` registers are a cause, and were taken
        away; if not, the next round looks for another one."""
        found, passes = self._found, self._found.passes
        lines = sorted(found.whole.seen.hooks)
        before = found.best_fit(self._make)
        passes.without_hooks = True
        found.again()
        if found.best_fit(self._make) < 0.5 * before:
            place = ", ".join(lines)
            self.causes.append(remedies.of_order(place, before, steps=False))
        return True

    def _num_norms(self) -> int:
        modules = self._found.passes.module.modules()
        return sum(isinstance(each, _NormBase) and each.training for each in modules)

    def _of_loss(self, located: Located) -> Cause:
        """The rows agree up to the loss, so the loss itself looks across them."""
        pair = self._two_denominators()
        if pair is not None:
            return remedies.of_two_denominators(*pair)
        return remedies.of_loss(located)

    def _located(self) -> Located:
        found, passes = self._found, self._found.passes
        rows = max(found.parts, key=len)
        with recorded(passes.module) as whole:
            passes.run(found.batch, found.all_rows)
        with recorded(passes.module) as part:
            passes.run(self._make(rows), rows)
        return locate(whole, part, rows, len(found.all_rows))

    def _two_denominators(self) -> Any:
        found = self._found
        if len(found.whole.terms) != 1 or len(found.all_rows) < 8:
            return None
        parts = _merged(found.parts, 4)
        unions = [
            frozenset(n for n in range(4) if number >> n & 1) for number in range(1, 16)
        ]
        gradients = {
            union: found.of(
                sorted(row for n in union for row in parts[n]), self._make
            ).gradient
            for union in unions
        }
        counts = found.counts(parts, self._make)
        distinct = {}
        for candidate, each in counts.items():
            shares = tuple((each.parts / each.parts.sum()).round(decimals=9).tolist())
            distinct.setdefault(shares, (candidate, each.parts.tolist()))
        single = found.best_fit(self._make)
        tolerance = min(max(found.tolerance, 1e-6), 0.01 * single)
        return two_denominators(gradients, dict(distinct.values()), tolerance)

    # ---- padding and weights ---------------------------------------------------------

    def _look_at_padding(self) -> bool:
        """Whether parts that are padded less than the whole are off for that."""
        found = self._found
        if self._make == found.rows.as_run or not found.rows.can_cut:
            return False
        if self._explained(found.rows.as_run) is not None:
            return False
        unlike = sorted(found.passes.draws.unlike)
        if unlike:
            self.causes.append(of_draws.of_unlike_draws(unlike, NOWHERE))
            return True
        place = first_that_sees_padding(found)
        self.causes.append(remedies.of_padding(place, found.rows.is_split))
        return True

    def _compare_weights(self, explained: Mapping[str, Explained]) -> None:
        found = self._found
        make = found.rows.as_run
        with_run = self._explained(make) or explained
        for name, each in with_run.items():
            weights = found.weights(name, self._strategies, found.parts, make)
            measured = found.terms(found.parts, make)[name]
            if measured.off_by(weights) > found.tolerance:
                strategy = strategy_of(name, self._strategies)
                is_given = found.of(found.parts[0], make).weight(name) is not None
                cause = remedies.of_weights(
                    name, each, strategy, found.batch, is_given=is_given
                )
                self.causes += [cause] if cause not in self.causes else []


def _merged(parts: Sequence[Sequence[int]], number: int) -> list[list[int]]:
    merged: list[list[int]] = [[] for _ in range(number)]
    for index, part in enumerate(parts):
        merged[index % number].extend(part)
    return [sorted(each) for each in merged]


def _listed(names: Sequence[str], most: int = 3) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
