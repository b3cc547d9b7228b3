"""A loader batch as the micro-batches that this rank will run."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from trainkit.core.division import weights_by_term
from trainkit.core.documents import count_documents, documents_option
from trainkit.core.nested import describe, is_array
from trainkit.core.said_weight import Weighed
from trainkit.core.split.cutting import Cutter, MicroBatch
from trainkit.core.split.layout import nothing_of, shapes_of
from trainkit.core.split.micro_batching import MicroBatching
from trainkit.core.strategies import Strategies, Uniform, Weight
from trainkit.core.terms import ONE, leading, telling_lengths
from trainkit.core.window import quotient
from trainkit.errors import TrainkitError
from trainkit.lit.callback.said_weight import counts_rows, says_weights
from trainkit.lit.callback.table import say
from trainkit.lit.split.auto import AutoSizes, Hosts
from trainkit.lit.split.pools import num_cuts


@dataclass
class CutBatch:
    """A loader batch that runs as micro-batches.

    Attributes:
        parts: its micro-batches, the largest first.
        num_counting: how many of the parts count. Those behind only let all ranks run
            equally many: they repeat the last one, with weight 0.
        weights: what they weigh, by term; NaN until that is known.
        are_said: whether `training_step` says the weights.
        trims: whether columns that are only padding in a part are left out.
        documents: what tells documents apart.
        weighs_samples: whether the leading weights are numbers of samples.
        is_told: whether the total of the window is known beforehand.
        num_expected: how many micro-batches the window will have on this rank.
        is_forward_only: whether there are no backward passes.
        arrived: all of them on the device, where they travel before the first one runs.
        index: the micro-batch that is on its way to the device, or runs.
        batch: the one that runs, on the device.
        terms: for each term, the losses so far.
        extras: what was returned beside each loss; None beside a plain one.
        num_nothing: how many micro-batches returned None.
    """

    parts: list[MicroBatch]
    num_counting: int
    weights: dict[str, list[Weight]]
    are_said: bool
    trims: bool
    is_told: bool
    num_expected: int
    documents: str = "auto"
    weighs_samples: bool = False
    is_forward_only: bool = False
    arrived: list[Any] = field(default_factory=list)
    index: int = 0
    batch: Any = None
    terms: dict[str, list[Tensor]] = field(default_factory=dict)
    extras: list[dict[str, Any] | None] = field(default_factory=list)
    num_nothing: int = 0

    @property
    def is_filler(self) -> bool:
        """Whether the micro-batch only lets all ranks run equally many."""
        return self.index >= self.num_counting

    @property
    def leading(self) -> list[Weight]:
        """The weights in the first term."""
        return next(iter(self.weights.values()))

    @property
    def num_rows(self) -> int:
        return sum([len(each.rows) for each in self.parts[: self.num_counting]])

    def weigh(self, strategies: Strategies, batches: Sequence[Any]) -> None:
        """Weigh the micro-batches that count."""
        weights = weights_by_term(strategies, batches[: self.num_counting])
        for term, each in weights.items():
            self.weights[term][: self.num_counting] = each

    def share(self) -> Weight:
        """The micro-batch's part of the loader batch's weight; of its rows, where
        `training_step` has still to say the weight."""
        if self.is_filler:
            return 0
        if self.are_said:
            return len(self.parts[self.index].rows) / self.num_rows
        return quotient(self.leading[self.index], sum(self.leading))

    def add(self, terms: dict[str, Tensor], extras: dict[str, Any] | None) -> None:
        """Add what `training_step` has returned for a micro-batch."""
        part = self.parts[self.index]
        if extras and part.num_fillers:
            number = len(part.rows) + part.num_fillers
            extras = {
                name: value[: len(part.rows)] if _has_entries(value, number) else value
                for name, value in extras.items()
            }
        self.extras.append(extras)
        for name, value in terms.items():
            self.terms.setdefault(name, []).append(value.reshape(()))

    def counts(self) -> dict[str, Weight]:
        """The arguments of `Window.count`: tokens, padding among them, samples."""
        padded = real = samples = 0
        for each in self.parts[: self.num_counting]:
            padded, real = padded + each.padded, real + each.real
            if not self.weighs_samples:
                documents = count_documents(each.bare, self.documents)  # several a row
                samples += len(each.rows) if documents is None else int(documents)
        if self.weighs_samples:
            samples = sum(self.leading)
        num_rows = self.num_rows
        tokens = 0 if padded == num_rows else padded  # equal: rows have no lengths
        return {"padding": padded - real, "tokens": tokens, "samples": samples}


class MicroBatches:
    """Cuts loader batches and weighs the micro-batches.

    If forward passes communicate, all ranks make as many micro-batches as the one that
    needs most: they cut finer, and when rows run out, they repeat a micro-batch with
    weight 0.

    Args:
        options: how to cut.
        trainer: in `fit`.
        strategies: weigh micro-batches.
        sizes: find the limit for a micro-batch, for `"auto"`.
        hosts: of the ranks that must run equally many, if they must.
        weighs: whether they are weighed on the host, before they travel.

    Attributes:
        cutter: cuts.
    """

    def __init__(
        self,
        options: MicroBatching,
        trainer: Any,
        strategies: Strategies,
        sizes: AutoSizes | None,
        hosts: Hosts | None,
        *,
        weighs: bool,
    ) -> None:
        self._options, self._trainer = options, trainer
        self._sizes, self._hosts, self._weighs = sizes, hosts, weighs
        self._has_said_too_long = self._is_verified = False
        of_lengths = telling_lengths(strategies)
        self.cutter = Cutter(self._options, of_lengths, nothing_of(strategies))
        self._strategies = strategies
        self._weighs_samples = counts_rows(leading(strategies))
        self._documents = documents_option(options, *strategies.values())
        self._may_count_fillers = self._options.shapes is not None
        self._are_said = says_weights(strategies)

    def of(self, batch: Any, *, trim: bool) -> CutBatch:
        """The micro-batches of a loader batch; `trim` leaves out columns that are only
        padding in one."""
        limit = None
        if self._sizes is not None:
            limit = self._sizes.limit_for(self.cutter.measure(batch))
        parts = self.cutter.cut(batch, limit, trim=trim)
        number = most = len(parts)
        if self._hosts is not None:
            (most,) = map(int, self._hosts.largest([number]))
            if number < most:
                parts = self.cutter.cut(batch, limit, at_least=most, trim=trim)
                number = len(parts)
        if self.cutter.longest_over_budget is not None and limit is None:
            self._say_too_long(self.cutter.longest_over_budget)
        num_loader_batches = num_cuts(self._trainer, self._options)
        unknown = [*[math.nan] * number, *[0] * (most - number)]
        current = CutBatch(
            parts + parts[-1:] * (most - number),
            number,
            {term: [*unknown] for term in self._strategies},
            self._are_said,
            trim,
            num_loader_batches == 1 and not self._are_said,
            num_loader_batches * most,
            self._documents,
            self._weighs_samples,
        )
        if self._weighs and not self._are_said:
            current.weigh(self._strategies, [each.batch for each in parts])
        if self._may_count_fillers:
            self._refuse_fillers_that_count(parts)
            # Loader batches may fill their shapes for a while, but documents seldom.
            has_some = any(each.num_fillers for each in parts)
            are_joined = self.cutter.measure(batch).are_joined
            self._may_count_fillers = not (has_some or are_joined)
        if not self._is_verified:
            self._is_verified = True
            if self._weighs:
                self._verify(batch, current.weights)
            self._say_shared()
        return current

    def _refuse_fillers_that_count(self, parts: Sequence[MicroBatch]) -> None:
        """Refuse a strategy that counts what fills, before a step with such a row."""
        for strategy in self._strategies.values():
            for each in parts:
                filled, bare = map(strategy.weight, (each.batch, each.bare))
                if not math.isclose(float(filled), float(bare), rel_tol=1e-9):
                    raise TrainkitError(
                        f"MicroBatching shapes: rows and columns that fill a "
                        f"micro-batch must weigh nothing under "
                        f"{type(strategy).__name__}, and a micro-batch weighs "
                        f"{float(filled):g} with them, {float(bare):g} without. "
                        f"training_step's mean would count them as well. Use "
                        f"PerToken(), or PerSample(mask='weights') with a weight for "
                        f"each row, by which the loss is a weighted mean; or leave "
                        f"shapes out."
                    )

    def _verify(self, batch: Any, weights: dict[str, list[Weight]]) -> None:
        """Refuse weights of the parts that do not add up to the loader batch's. A list
        of samples has no weight before it is collated."""
        for term, strategy in self._strategies.items():
            is_known = not isinstance(strategy, Uniform | Weighed)
            if not is_known or self._options.collate is not None:
                continue
            in_parts = sum(map(float, weights[term]))
            in_all = float(strategy.weight(batch))
            if not math.isclose(in_parts, in_all, rel_tol=1e-6, abs_tol=1e-9):
                raise TrainkitError(
                    f"{type(strategy).__name__}: what micro-batches weigh must add up "
                    f"to what their batch weighs, and {len(weights[term])} of them "
                    f"weigh {in_parts:g} together, the batch {in_all:g}. The batch is "
                    f"{describe(batch)}. Let weight() return a sum over rows."
                )

    def _say_shared(self) -> None:
        """Say once what every micro-batch gets whole, since it is not as long as the
        batch has rows, and nobody has named it."""
        named = set(map(str, self._options.shared))
        fields = [each for each in self.cutter.shared if is_array(each.value)]
        shared = [repr(each.path) for each in fields if each.path not in named]
        if shared and self._trainer.is_global_zero:
            row = ("split", f"every micro-batch gets all of {', '.join(shared)}")
            say(self._trainer, row)

    def _say_too_long(self, longest: int) -> None:
        if not self._has_said_too_long:
            self._has_said_too_long = True
            warnings.warn(
                f"MicroBatching: a sample of {longest} tokens alone exceeds the "
                f"budget, and a sample cannot be cut, so it makes a micro-batch of its "
                f"own. The step is that of its batch; if memory does not suffice, "
                f"shorten such samples.",
                stacklevel=2,
            )


def _has_entries(value: Any, number: int) -> bool:
    has_places = isinstance(value, list) or isinstance(value, Tensor) and value.ndim
    return bool(has_places) and len(value) == number


def described(options: MicroBatching, *, is_step: bool, term: str = ONE) -> str:
    """How loader batches are cut, for the table before training.

    >>> described(MicroBatching(size=4), is_step=False)
    'each loader batch is cut into micro-batches of at most 4 rows; logged means \
weighed as the loss'
    >>> described(MicroBatching(size=4), is_step=True, term="ce").split("; ")[1]
    "logged means weighed as the term 'ce', where no weight= is given"

    Args:
        options: how to cut.
        is_step: whether one loader batch makes an optimizer step; otherwise several.
        term: as which a logged mean is weighed that is no term, and has no `weight=`.
    """
    if options.is_auto:
        how = "into micro-batches that double while that is faster"
    else:
        limits = {options.unit: options.size, "tokens": options.tokens}
        said = [f"{limit} {unit}" for unit, limit in limits.items() if limit]
        how = f"into micro-batches of at most {' and '.join(said)}"
        if options.shapes is not None:
            pairs = [f"{rows} x {columns}" for rows, columns in shapes_of(options)]
            how += f", filled to {', '.join(pairs)} (rows x columns)"
    if options.pool is not None:
        what = f"every {options.pool} loader batches are one step, cut together"
    else:
        what = f"each loader batch {'is one step,' if is_step else 'is'} cut"
    one = f"the term {term!r}, where no weight= is given"
    weighed = "the loss" if term == ONE else one
    return f"{what} {how}; logged means weighed as {weighed}"
