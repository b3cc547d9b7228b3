"""A window's loader batches as the micro-batches that this rank will run."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from trainkit.core.division import weights_by_term
from trainkit.core.documents import count_documents, documents_option
from trainkit.core.nested import is_array
from trainkit.core.split.cutting import Cutter, MicroBatch
from trainkit.core.split.filling import shapes_of
from trainkit.core.split.micro_batching import MicroBatching
from trainkit.core.strategies import Strategies, Weight
from trainkit.core.terms import leading, telling_lengths
from trainkit.core.window import quotient, vector
from trainkit.errors import TrainkitError
from trainkit.lit.callback.said_weight import counts_rows, says_weights
from trainkit.lit.callback.table import say
from trainkit.lit.split.auto import AutoSizes, Hosts
from trainkit.lit.split.refusals import refuse_other_weights


@dataclass
class CutWindow:
    """A window that runs as micro-batches.

    Attributes:
        wholes: its loader batches, each with the number of its rows; a pool is one.
        parts: its micro-batches, the largest of each loader batch first. Their rows are
            counted through all of these.
        num_counting: how many of the parts count. Those behind only let all ranks run
            equally many: they repeat the last one, with weight 0.
        weights: what they weigh, by term; NaN until that is known.
        are_said: whether `training_step` says the weights.
        index: the micro-batch that is on its way to the device, or runs.
        batch: the one that runs, on the device.
        losses: for each term, the losses so far.
        extras: by micro-batch what was returned beside its loss.
        num_nothing: how many micro-batches returned None.
        logged: by hook and name the logs, each the values of all micro-batches.
    """

    wholes: list[tuple[Any, int]]
    parts: list[MicroBatch]
    num_counting: int
    weights: dict[str, list[Weight]]
    are_said: bool
    index: int = 0
    batch: Any = None
    losses: dict[str, list[Tensor]] = field(default_factory=dict)
    extras: dict[int, dict[str, Any]] = field(default_factory=dict)
    num_nothing: int = 0
    logged: dict[str, dict[str, list[list[Any]]]] = field(default_factory=dict)

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
        return sum([number for _, number in self.wholes])

    def share(self) -> Weight:
        """The micro-batch's part of the window's weight; of its rows, where
        `training_step` has still to say the weight."""
        if self.is_filler:
            return 0
        if self.are_said:
            return len(self.parts[self.index].rows) / self.num_rows
        return quotient(self.leading[self.index], sum(self.leading))

    def add(self, terms: Mapping[str, Tensor], extras: dict[str, Any] | None) -> Tensor:
        """Add what `training_step` has returned for a micro-batch; returns the loss in
        the first term, to report."""
        if extras is not None:
            self.extras[self.index] = extras
        values = []
        for name, term in terms.items():
            # The module may add the next losses to it in place, and on a GPU the next
            # step of a CUDA graph writes over it.
            values.append(term.detach().reshape(()).clone())
            self.losses.setdefault(name, []).append(values[-1])
        return values[0]

    def loss(self, strategies: Strategies) -> Tensor:
        """The loss of the window as one batch."""
        found: Tensor | None = None
        for name, losses in self.losses.items():
            if self.num_nothing:
                raise TrainkitError(
                    f"training_step: it returned None for {self.num_nothing} "
                    f"micro-batches of a window and a loss for {len(losses)}. "
                    f"Return a loss for all, one that weighs nothing where nothing "
                    f"counts, such as 0.0 * output.sum(), or None for all."
                )
            if strategies[name].loss_reduction != "mean":
                term = torch.stack(losses).sum()
            elif len(losses) == 1:
                term = losses[0]
            else:
                term = weighted_mean(losses, self.weights[name][: len(losses)])
            found = term if found is None else found + term
        assert found is not None
        return found


class MicroBatches:
    """Cuts loader batches and weighs the micro-batches.

    If forward passes communicate, all ranks make as many micro-batches as the one that
    needs most: the others repeat a micro-batch with weight 0.

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
        self._strategies, self._hosts = strategies, hosts
        self._limit = None if sizes is None else sizes.limit_for
        self._are_said = says_weights(strategies)
        self._weighs = weighs and not self._are_said
        self._is_first_over = False
        of_lengths = telling_lengths(strategies)
        self.cutter = Cutter(options, of_lengths, strategies, refuses_others=True)
        self._weighs_samples = counts_rows(leading(strategies))
        self._documents = documents_option(options, *strategies.values())

    def of(self, batches: Sequence[Any]) -> CutWindow:
        """The micro-batches of a window's loader batches, of which a pool is cut as
        one."""
        if self._options.pool is not None:
            batches = [self.cutter.join(batches)]
        parts, wholes, at = list[MicroBatch](), [], 0
        for number, batch in enumerate(batches):
            own, start = self.cutter.cut(batch, self._limit), at
            for part in own:
                at += len(part.rows)
                if number:
                    part.source = number
                    part.rows = [start + row for row in part.rows]
            parts += own
            wholes.append((batch, at - start))
        number = most = len(parts)
        if self._hosts is not None:
            (most,) = map(int, self._hosts.largest([number]))
        weights: dict[str, list[Weight]]
        if self._weighs:
            weights = weights_by_term(self._strategies, [part.batch for part in parts])
        else:
            weights = {term: [math.nan] * number for term in self._strategies}
        if missing := most - number:
            weights = {t: [*w, *[0] * missing] for t, w in weights.items()}
            parts = parts + parts[-1:] * missing
        if not self._is_first_over:
            self._look_at_first(batches, weights)
        return CutWindow(wholes, parts, number, weights, self._are_said)

    def _look_at_first(
        self, batches: Sequence[Any], weights: dict[str, list[Weight]]
    ) -> None:
        """Check the weights of the first window, and say what every micro-batch gets
        whole since it is not as long as its batch, and nobody has named it."""
        self._is_first_over = True
        # A list of samples has no weight before it is collated.
        if self._weighs and self._options.collate is None:
            refuse_other_weights(self._strategies, batches, weights)
        named = set(map(str, self._options.shared))
        fields = [e for e in self.cutter.read(batches[0]).shared if is_array(e.value)]
        shared = [repr(each.path) for each in fields if each.path not in named]
        if shared:
            row = ("split", f"every micro-batch gets all of {', '.join(shared)}")
            say(self._trainer, row)

    def counts(self, current: CutWindow) -> dict[str, Weight]:
        """The arguments of `Window.count`: tokens, padding among them, samples."""
        padded = real = 0
        parts = current.parts[: current.num_counting]
        for part in parts:
            padded += part.padded
            real += part.real
        if self._weighs_samples:
            samples = sum(current.leading)
        else:
            samples, wholes = 0, current.wholes
            if self._options.collate is not None:
                wholes = [(part.batch, len(part.rows)) for part in parts]
            for each, number in wholes:
                found = count_documents(each, self._documents)  # several share a row
                samples += number if found is None else int(found)
        # Equal: rows have no lengths.
        tokens = 0 if padded == current.num_rows else padded
        return {"padding": padded - real, "tokens": tokens, "samples": samples}


def weighted_mean(values: Sequence[Any], weights: Sequence[Weight]) -> Tensor:
    """The mean of numbers and 0-d tensors, in the dtype of the first; one that weighs
    nothing may be NaN. If all weigh nothing, they count alike."""
    device, dtype = like(values)
    if device.type == "cpu" and not any([isinstance(w, Tensor) for w in weights]):
        # Plain numbers: one tensor operation costs more than all of this.
        weights = weights if sum(weights) else [1] * len(values)
        pairs = zip(weights, values, strict=True)
        mean = sum([w * float(value) for w, value in pairs if w]) / sum(weights)
        return torch.tensor(mean, dtype=dtype)
    numbers, by = vector(values, device), vector(weights, device)
    total = by.sum()
    mean = numbers.where(by != 0, 0.0).dot(by) / total  # NaN * 0 is NaN
    return torch.where(total == 0, numbers.mean(), mean).to(dtype)


def like(values: Sequence[Any]) -> tuple[torch.device, torch.dtype]:
    """The device and the floating dtype for what is computed of several values."""
    default = torch.get_default_dtype()
    for each in values:
        if isinstance(each, Tensor):
            return each.device, each.dtype if each.is_floating_point() else default
    return torch.device("cpu"), default


def described(options: MicroBatching, *, is_step: bool) -> str:
    """How loader batches are cut, for the table before training.

    >>> described(MicroBatching(size=4), is_step=False)
    'each loader batch is cut into micro-batches of at most 4 rows'

    Args:
        options: how to cut.
        is_step: whether one loader batch makes an optimizer step; otherwise several.
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
        return f"every {options.pool} loader batches are one step, cut together {how}"
    return f"each loader batch is {'one step, ' * is_step}cut {how}"
