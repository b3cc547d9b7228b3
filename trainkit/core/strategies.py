"""Strategies: how much a micro-batch weighs.

The weight must be the denominator of the loss: what `training_step` divided by to get
its mean. Then weight * mean is the sum again, and sums can be added up.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from trainkit.core.document_fields import KNOWN
from trainkit.core.documents import count_documents
from trainkit.core.nested import (
    Path,
    describe,
    lookup,
    lookup_tensor,
)
from trainkit.core.plan.options import check_choice, check_kind
from trainkit.core.samples import leading_dimension
from trainkit.errors import TrainkitError

LossReduction = Literal["mean", "sum", "total"]
Weight = int | float | Tensor


class AccumulationStrategy(ABC):
    """Says what a micro-batch weighs; a subclass with one method is a strategy.

    >>> class ByClass(AccumulationStrategy):  # cross entropy with class weights
    ...     def __init__(self, class_weights):
    ...         self.class_weights = class_weights
    ...     def weight(self, batch):
    ...         return self.class_weights[batch["labels"]].sum()

    Attributes:
        loss_reduction: what `training_step` returns. `"mean"`: the mean over what the
            weight counts. `"sum"`: the sum over it, which is divided by the window's
            weight, so that the step follows the mean. `"total"`: a sum that stays a
            sum; nothing is divided, for any cut and number of ranks.
    """

    loss_reduction: LossReduction = "mean"

    @abstractmethod
    def weight(self, batch: Any) -> Weight:
        """What the micro-batch weighs: a number, or a 0-d tensor on any device.

        A tensor stays where it is; nothing waits for its value.
        """


Strategies = Mapping[str, AccumulationStrategy]
"""A strategy for each term of a loss, by name; the only term of a loss is named ""."""


@dataclass(frozen=True, kw_only=True)
class PerSample(AccumulationStrategy):
    """The weight of a micro-batch is its number of samples.

    >>> import torch
    >>> PerSample().weight({"x": torch.zeros(3, 5), "y": torch.zeros(3)})
    3

    Args:
        size: path of the tensor (or list) whose length counts; `""` is the batch
            itself, if that is a list of samples. Default: the leading dimension that
            all tensors of the batch share, or the number in a graph library's batch.
        mask: path of a tensor of 0/1 or real-valued sample weights, whose sum is the
            weight.
        documents: what tells documents apart that share a row; they are samples then.
            `"auto"`: offsets, numbers, a mask or positions, as transformers and its
            collators name them. The path of such a field; or `"off"`: rows count.
        loss_reduction: what `training_step` returns: `"mean"`; `"sum"`, which is
            divided by the window's weight; or `"total"`, a sum that stays a sum.
    """

    size: Path | None = None
    mask: Path | None = None
    documents: str = "auto"
    loss_reduction: LossReduction = "mean"

    def __post_init__(self) -> None:
        _check_options(self, *(["mask"] if self.size == "" else ["size", "mask"]))
        if self.size is not None and self.mask is not None:
            raise TrainkitError(
                f"PerSample: size and mask exclude each other, received size="
                f"{self.size!r} and mask={self.mask!r}. Keep the mask: its sum is the "
                f"weight."
            )

    def weight(self, batch: Any) -> Weight:
        if self.mask is not None:
            return _total(lookup_tensor(batch, self.mask, role="PerSample mask"))
        if self.size is None:
            found = _counted(batch, self.documents)
            return leading_dimension(batch) if found is None else found
        role = "PerSample size"
        found = batch if self.size == "" else lookup(batch, self.size, role=role)
        has_rows = isinstance(found, Tensor) and found.ndim > 0
        if not has_rows and not isinstance(found, list | tuple):
            raise TrainkitError(
                f"PerSample size {self.size!r}: must lead to a tensor or a list with "
                f"one entry per sample, received {describe(found)}."
            )
        return len(found)


@dataclass(frozen=True)
class PerToken(AccumulationStrategy):
    """The weight of a micro-batch is its number of labels that count.

    >>> import torch
    >>> PerToken().weight({"labels": torch.tensor([[5, 7, -100], [5, -100, -100]])})
    tensor(3)

    Args:
        labels: dotted path or index of the labels in the batch.
        ignore_index: the label that does not count, as in `cross_entropy`.
        shift: True for a causal model that shifts inside, as in `transformers`: the
            first label of each row is then not a target and does not count.
        mask: path of a tensor of 0/1 or real-valued token weights, whose sum is the
            weight; the labels are then not used.
        documents: what tells documents apart that share a row, for the proof and for
            cuts; as for `PerSample`. It changes no weight.
        loss_reduction: what `training_step` returns: `"mean"`; `"sum"`, which is
            divided by the window's weight; or `"total"`, a sum that stays a sum.
    """

    labels: Path = "labels"
    _: KW_ONLY
    ignore_index: int = -100
    shift: bool = False
    mask: Path | None = None
    documents: str = "auto"
    loss_reduction: LossReduction = "mean"

    def __post_init__(self) -> None:
        _check_options(self, "labels", "mask")
        check_kind("PerToken shift", self.shift, bool, "True or False")
        if isinstance(self.ignore_index, bool) or not isinstance(
            self.ignore_index, int
        ):
            raise TrainkitError(
                f"PerToken ignore_index: must be an integer label, received "
                f"{self.ignore_index!r}. cross_entropy's own default is -100."
            )

    def weight(self, batch: Any) -> Weight:
        if self.mask is not None:
            mask = lookup_tensor(batch, self.mask, role="PerToken mask")
            return _total(self._targets(mask, "mask"))
        return torch.count_nonzero(self.found(batch) != self.ignore_index)

    def found(self, batch: Any) -> Tensor:
        """The labels of a batch that are targets, in int64."""
        role = "PerToken labels"
        labels = lookup_tensor(batch, self.labels, role=role, fits=_are_labels)
        if labels.is_floating_point() or labels.is_complex():
            raise TrainkitError(
                f"PerToken labels {self.labels!r}: must hold integers to be compared "
                f"with ignore_index, received {labels.dtype}. Name the label tensor, "
                f"or a mask: PerToken(mask='path.to.mask')."
            )
        targets = self._targets(labels, "labels")
        # In int64: in a narrower type, ignore_index could wrap around.
        return targets if targets.dtype is torch.int64 else targets.long()

    def _targets(self, tensor: Tensor, role: str) -> Tensor:
        """The positions that are targets of the loss."""
        if tensor.ndim == 0:
            raise TrainkitError(
                f"PerToken {role}: must have one entry per token, but is a single "
                f"number. Name the tensor of labels or token weights."
            )
        return tensor[..., 1:] if self.shift else tensor


@dataclass(frozen=True)
class Uniform(AccumulationStrategy):
    """The weight of every micro-batch is 1, so gradients are averaged.

    This equals the big batch only if all micro-batches are of one size, which is not
    checked. It is for comparison, or for batches that are all alike.
    """

    def weight(self, batch: Any) -> Weight:
        return 1


def num_samples(batch: Any, documents: str = "auto") -> Weight:
    """How many samples a batch holds, which are documents where these share rows; NaN
    if that cannot be counted.

    Args:
        batch: any nesting of tensors.
        documents: what tells documents apart, as `find_documents` takes it.
    """
    found = _counted(batch, documents)
    try:
        return leading_dimension(batch) if found is None else found
    except TrainkitError:
        return math.nan


def _counted(batch: Any, documents: str) -> Weight | None:
    """The documents of a batch, or the rows of one that plainly has nothing else."""
    length = plain_length(batch, documents)
    return count_documents(batch, documents) if length is None else length


def plain_length(batch: Any, documents: str) -> int | None:
    """The length of a batch that plainly has no documents: of nothing but tensors of
    one length, none of which has a name that tells some apart."""
    names = batch if type(batch) is dict else ()
    is_plain = documents == "off" or documents == "auto" and KNOWN.isdisjoint(names)
    return length_of_tensors(batch) if is_plain else None


def length_of_tensors(batch: Any) -> int | None:
    """The one length of a dict, a tuple or a pair of tensors, as nearly every batch is;
    None where there is more to look at, such as longer lists, which may be samples."""
    kind, lengths = type(batch), set[int]()
    is_plain = kind is tuple or (kind is list and len(batch) <= 2)
    for each in batch.values() if kind is dict else batch if is_plain else ():
        if not isinstance(each, Tensor):
            return None
        if each.ndim:
            lengths.add(each.shape[0])
    return lengths.pop() if len(lengths) == 1 else None


def check_strategy(strategy: Any) -> None:
    """Refuse what is not a strategy, or has an unknown `loss_reduction`."""
    if not isinstance(strategy, AccumulationStrategy):
        raise TrainkitError(
            f"strategy: must be an AccumulationStrategy, received {strategy!r}. Pass "
            f"an object, such as PerToken(), not its class or name."
        )
    check_reduction(strategy)


def check_reduction(strategy: AccumulationStrategy) -> None:
    """Refuse an unknown `loss_reduction`."""
    name = f"{type(strategy).__name__} loss_reduction"
    check_choice(name, strategy.loss_reduction, get_args(LossReduction))


def kind_of(strategy: AccumulationStrategy) -> str:
    """The name of a strategy's kind; weights of different kinds cannot be added up."""
    return f"{type(strategy).__qualname__} ({strategy.loss_reduction})"


def checked_weight(
    weight: Any,
    *,
    name: str = "weight",
    hint: str = "Check the strategy's weight() and what it sums.",
) -> Weight:
    """A weight as a Python number or a 0-d tensor; never waits for a tensor.

    Args:
        weight: what was received.
        name: what an error calls it.
        hint: what an error says to do.
    """
    if weight.__class__ is int and weight >= 0:
        return weight  # nearly every weight
    if isinstance(weight, Tensor):
        if weight.numel() != 1 or weight.is_complex():
            raise TrainkitError(
                f"{name}: must be one number for a micro-batch, received a tensor of "
                f"{weight.dtype} and shape {list(weight.shape)}. {hint}"
            )
        flat = weight.detach() if weight.requires_grad else weight
        flat = flat.reshape(()) if flat.ndim else flat
        # A copy, in the dtype of the totals: a buffer that the loop fills again would
        # change what the window holds.
        return flat.to(torch.float32 if flat.is_mps else torch.float64, copy=True)
    if getattr(weight, "size", None) == 1:  # numpy's numbers
        weight = weight.item()
    if not isinstance(weight, int | float):
        raise TrainkitError(
            f"{name}: must be a number or a 0-d tensor, received "
            f"{type(weight).__name__}. {hint}"
        )
    if not math.isfinite(weight) or weight < 0:
        raise TrainkitError(
            f"{name}: must be finite and not negative, received {weight}. {hint}"
        )
    return weight


def _check_options(strategy: PerSample | PerToken, *paths: str) -> None:
    """Refuse an unknown `loss_reduction`, and what is no path; all but `labels` may be
    left out."""
    check_reduction(strategy)
    kind, documents = type(strategy).__name__, strategy.documents
    if not isinstance(documents, str) or not documents:
        raise TrainkitError(
            f"{kind} documents: must be 'auto', 'off' or the path of the field that "
            f"tells them apart, received {documents!r}. For example "
            f"documents='position_ids'."
        )
    for name in paths:
        path = getattr(strategy, name)
        is_path = isinstance(path, str | int) and path != ""
        is_path = is_path and not isinstance(path, bool)
        if not is_path and (path is not None or name == "labels"):
            raise TrainkitError(
                f"{kind} {name}: must be a dotted path or an index into the batch, "
                f"received {path!r}. For example {name}='targets.ids'."
            )


def _are_labels(tensor: Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex())


def _total(mask: Tensor) -> Tensor:
    # In the mask's own half precision, 1001 ones would make 1000.
    if mask.is_floating_point():
        return mask.sum(dtype=torch.float32 if mask.is_mps else torch.float64)
    return mask.sum()
