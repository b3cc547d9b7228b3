"""How each kind of call of a module is cut: found by running a few rows."""

from __future__ import annotations

import contextlib
import random
import warnings
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from trainkit.core.batch_norm.layers import listed, normalising_by_batch
from trainkit.core.inside.arguments import (
    Arguments,
    kinds_of,
    length_of,
    lists_of,
    reversed_list,
)
from trainkit.core.inside.checks import refuse_strangers, strangers
from trainkit.core.inside.chunks import Sizes
from trainkit.core.inside.compare import Compared
from trainkit.core.inside.cut import Around
from trainkit.core.inside.draws import Draws
from trainkit.core.inside.hints import refusal, shared_by_chunks
from trainkit.core.inside.left_behind import announcements, num_hooks
from trainkit.core.inside.moment import Moment
from trainkit.core.inside.probe import Probe
from trainkit.core.inside.rows import Plan, Unfit, multiples_of, settle
from trainkit.core.inside.settings import (
    Settings,
    changed,
    put_back,
    settings_of,
)
from trainkit.core.inside.sharded import refuse_flat
from trainkit.core.out_of_memory import is_out_of_memory, release
from trainkit.errors import TrainkitError

MOST_PAIRS = 32
"""So many pairs of chunks are compared with their rows at once."""

MOST_CHANGES = 32
"""After so many changes of numbers and words, few more are a reason to look again."""

MOST_PLANS = 99
"""How many kinds of calls are remembered."""


class Plans:
    """Finds how a module's calls are cut, and looks again from time to time.

    Args:
        module: which is cut.
        name: of it, for messages.
        draws: keeps its random states.

    Attributes:
        row_bytes: what the graph of a row holds.
        announced: what the last probe has found that is not all rows'.
        is_probing: whether rows run to be looked at.
        written: what these runs have put into their arguments.
        with_rows: the paths of the arguments that had rows.
    """

    def __init__(self, module: nn.Module, name: str, draws: Draws) -> None:
        self._module, self._name, self._draws = module, name, draws
        self.row_bytes = 0
        self.with_rows: set[str] = set()
        self._forget()

    def _forget(self) -> None:
        self._plans: dict[Any, tuple[Plan, int]] = {}
        self._num_probes = 0
        self.announced: list[str] = []
        self.is_probing = False
        self.written: set[str] = set()
        self._lengths: dict[str, set[tuple[int, int]]] = {}
        self._said: set[str] = set()
        self._settings: Settings = {}
        self._moving: set[Any] = set()
        self._changes: Counter[Any] = Counter()
        self._num_changes, self._is_brief = 0, False

    def __getstate__(self) -> dict[str, Any]:
        """A copy begins anew: what was seen is another module's."""
        other = object.__new__(type(self))
        other._forget()
        return vars(self) | vars(other)

    def find(
        self,
        call: Arguments,
        most: int | None,
        around: Around,
        *,
        probes: bool | None = None,
        is_sharded: bool = False,
        is_coupled: bool = False,
    ) -> Plan:
        """How a call is cut.

        Args:
            call: with its arguments.
            most: the most rows of a chunk; None for all.
            around: makes a context for each run.
            probes: whether to look again; default: as `wants_probe` says.
            is_sharded: whether FSDP2 shards parts of the module.
            is_coupled: whether BatchNorm sees all rows, but not now.
        """
        probes = self.wants_probe(call) if probes is None else probes
        key = self.key(call)
        plan, times = self._plans.get(key, (None, 0))
        if plan is None or probes:
            plan = self.probe(
                call, most, around, is_sharded=is_sharded, is_coupled=is_coupled
            )
            self._announce()
            if len(self._plans) >= MOST_PLANS:
                self._plans.clear()
        self._plans[key] = plan, times + 1
        return plan

    def _announce(self) -> None:
        for text in self.announced:
            if text not in self._said:
                self._said.add(text)
                warnings.warn(f"trainkit | {self._name}: {text}", stacklevel=2)

    def wants_probe(self, call: Arguments) -> bool:
        """Whether a call is looked at: since its kind is new, or was seen so often, or
        since a number or word on which it may depend has changed."""
        pairs = zip(call.paths, call.values, strict=True)
        numbers = {(self._module, p): x for p, x in pairs if type(x) in (int, float)}
        hooks = {(self._module, "hooks on layers"): num_hooks(self._module)}
        now = settings_of(self._module) | numbers | hooks
        moved = changed(self._settings, now) - self._moving if self._settings else set()
        self._settings = now
        self._changes.update(moved)
        _, times = self._plans.get(self.key(call), (None, 0))
        # What changes in each call is not looked at in each.
        is_new = any(_is_power_of_2(self._changes[k]) for k in moved)
        self._num_changes += is_new
        is_new &= self._num_changes <= MOST_CHANGES or _is_power_of_2(self._num_changes)
        self._is_brief = times == 1 and not is_new
        return is_probed(times) or is_new

    def key(self, call: Arguments) -> Any:
        """What a call has in common with others that are cut alike."""
        return (
            torch.is_grad_enabled(),
            *(each.training for each in self._module.modules()),
            *(each.requires_grad for each in self._module.parameters()),
            *zip(
                call.paths,
                kinds_of(call.values, call.paths, call.rows),
                multiples_of(call.values, max(call.rows, 1), call.shared),
                strict=True,
            ),
        )

    def probe(
        self,
        call: Arguments,
        most: int | None,
        around: Around,
        *,
        is_sharded: bool = False,
        is_coupled: bool = False,
    ) -> Plan:
        """Run a few rows, to see that they do not see each other."""
        module, name = self._module, self._name
        if (found := normalising_by_batch(module)) and not is_coupled:
            names = [each or "the module itself" for each in found]
            raise TrainkitError(
                f"{name}: its rows must not see each other, and BatchNorm normalises "
                f"by all rows of a batch: {listed(names)}. Freeze it, use "
                f'BatchNormGuard("exact"), or name a module without it.'
            )
        refuse_flat(module, name)
        moment, before = Moment(module, name, call.devices), settings_of(module)
        sums = moment.sums()

        def run(given: list[Any]) -> Any:
            with around(None, None):
                return call.run(given)

        probe = Probe(module, run, call.values, self._draws)
        probe.may_reenter = is_sharded  # whose chunks have backward passes of their own
        drawn: list[str] = []
        self.is_probing, self.written = True, set()
        try:
            with refusing(module, name, call, moment, probe):
                if call.rows <= 1:
                    raise Unfit("none of its arguments has rows")
                plan = settle(probe, call.values, call.rows, call.shared, most=most)
                moment.check_state()
                refuse_flat(module, name, probe.foreign)
                refuse_strangers(strangers(probe.foreign, moment.parameters), name)
                drawn = self._compare(call, plan, probe, most, is_brief=self._is_brief)
            moment.check_sums(sums)
        finally:
            self.is_probing = False
            probe.put_back()
            put_back(before, probe.moved)
            if torch.is_autocast_cache_enabled():
                torch.clear_autocast_cache()
        self.row_bytes = max(self.row_bytes, probe.row_bytes)
        self._moving |= probe.moved
        self._num_probes += 1
        left, written = sorted(probe.left), sorted(self.written)
        self.announced = [
            *announcements(module, name, left, drawn, written),
            *shared_by_chunks(call, plan),
        ]
        pairs = zip(call.paths, plan.multiples, strict=True)
        self.with_rows |= {path for path, multiple in pairs if multiple}
        return plan

    def _refuse_lists(self, call: Arguments, compared: Compared) -> None:
        """Refuse lists with an entry for each row, of which each chunk gets all; but
        for one that had as many entries with other numbers of rows."""
        for place, at in lists_of(call).items():
            length = length_of(call, at)
            seen = self._lengths.setdefault(place, set())
            is_constant = any(had == length and rows != call.rows for had, rows in seen)
            seen.add((length, call.rows))
            if length != call.rows or is_constant:
                continue
            if compared.uses(reversed_list(call, at)):
                raise Unfit("its outputs depend on a list that is not cut")

    def _compare(
        self,
        call: Arguments,
        plan: Plan,
        probe: Probe,
        most: int | None,
        *,
        is_brief: bool,
    ) -> list[str]:
        """Compare rows at once with chunks of them: the capacity of experts, say, does
        not show in a few rows. Returns what is drawn once for all rows."""
        compared, drawn = Compared(plan, probe, call.values, call.rows), []
        try:
            self._refuse_lists(call, compared)
            if is_brief:
                return drawn
            if probe.draws_in_training:
                drawn = compared.shared_draws()
            if not probe.may_reenter and torch.is_grad_enabled():
                compared.gradients(most)
            # Each time each chunk is compared with another one.
            chunks = Sizes(most or -(-call.rows // 2)).cut(0, call.rows)
            random.Random(self._num_probes).shuffle(chunks)
            pairs = zip(chunks[::2], [*chunks[1::2], chunks[0]], strict=False)
            for one, other in list(pairs)[:MOST_PAIRS]:
                compared.outputs(one, other)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            release(error)
        return drawn


@contextlib.contextmanager
def refusing(
    module: nn.Module,
    name: str,
    call: Arguments,
    moment: Moment | None = None,
    probe: Probe | None = None,
) -> Iterator[None]:
    """Within it, what shows that rows do not stand alone is an error for the user.

    Args:
        module: which is cut.
        name: of it.
        call: with its arguments.
        moment: what the module was like before.
        probe: has run it.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error.__cause__, TrainkitError):
            raise error.__cause__ from None
        is_own = isinstance(error, TrainkitError) and not isinstance(error, Unfit)
        if is_own or is_out_of_memory(error):
            raise
        if moment is not None:
            moment.check_state()  # what moves is why rows seem to see each other
        if probe is not None:
            refuse_flat(module, name, probe.leaves)
        reason = str(error)
        if not isinstance(error, Unfit):
            reason = f"it does not run on fewer rows: {type(error).__name__}: {error}"
        raise refusal(reason, call, module, name) from error


def is_probed(times: int) -> bool:
    """Whether a kind of call that was made so often is looked at again.

    >>> [n for n in range(300) if is_probed(n)]
    [0, 1, 63, 255]
    """
    number = times + 1
    is_power_of_4 = _is_power_of_2(number) and number.bit_length() % 2 == 1
    return times < 2 or (is_power_of_4 and number >= 64)


def _is_power_of_2(number: int) -> bool:
    return number & (number - 1) == 0
