"""What the means and quotients of a training step divide by, seen in their calls."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from trainkit.lit.measure.place import place

OF_LABELS = frozenset(("cross_entropy", "nll_loss"))
OF_ENTRIES = frozenset(
    "mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy kl_div "
    "binary_cross_entropy_with_logits poisson_nll_loss gaussian_nll_loss "
    "cosine_embedding_loss margin_ranking_loss triplet_margin_loss".split()
)
QUOTIENTS = frozenset("div div_ true_divide __truediv__ __itruediv__".split())
ORDER = ("input", "target", "weight", "size_average", "ignore_index", "reduce")
SIMPLICITY = 7
"""Any field of the batch that counts as much is named first."""


@dataclass(frozen=True)
class Divisor:
    """A number that a call divides by.

    Attributes:
        total: its value.
        text: what it is, in words.
        line: how to write it.
    """

    total: float
    text: str
    line: str


def no_count(batch: Any) -> float:
    """A divisor is seen in a pass; no batch shows it."""
    raise NotImplementedError


class Denominators(dict[str, Divisor]):
    """The divisors of a pass, by the line and by how often it has divided before."""

    def __init__(self) -> None:
        super().__init__()
        self._times: Counter[str] = Counter()

    def see(self, name: str, args: Any, kwargs: Any) -> None:
        """Look at a call of torch."""
        if name in OF_LABELS:
            self._add(name, _of_labels(args, kwargs))
        elif name in OF_ENTRIES and kwargs.get("reduction", "mean") == "mean":
            entries = Divisor(
                args[0].numel() if args else 0, "its entries", "losses.numel()"
            )
            self._add(name, entries)
        elif name == "mean" and len(args) == 1 and not kwargs.keys() - {"dtype"}:
            self._add(name, Divisor(args[0].numel(), "its entries", "losses.numel()"))
        elif name in QUOTIENTS and len(args) > 1:
            by = args[1]
            if isinstance(by, Tensor) and by.numel() == 1 and not by.requires_grad:
                number = Divisor(float(by), "the number right of it", "divisor")
                self._add("the division", number)
            elif isinstance(by, int | float):
                number = Divisor(float(by), "the number right of it", "divisor")
                self._add("the division", number)

    def _add(self, name: str, divisor: Divisor | None) -> None:
        if divisor is None or not divisor.total:
            return
        line = f"{name} at {place()}"
        self._times[line] += 1
        times = self._times[line]
        self[line if times == 1 else f"{line}, call {times},"] = divisor


def _of_labels(args: Any, kwargs: Any) -> Divisor | None:
    given = dict(zip(ORDER, args, strict=False)) | kwargs
    target, weight = given["target"], given.get("weight")
    if given.get("reduction", "mean") != "mean":
        return None
    if target.is_floating_point():
        classes = given["input"].shape[1 if given["input"].ndim > 1 else 0]
        return Divisor(target.numel() / classes, "its rows", "len(target)")
    ignored = given.get("ignore_index", -100)
    counted = target != ignored
    if weight is None:
        return Divisor(
            float(counted.sum()),
            "its counted labels",
            f"(target != {ignored}).sum()",
        )
    return Divisor(
        float(weight[target[counted]].double().sum()),
        "the class weights of its labels (weight=...)",
        f"weight[target[target != {ignored}]].sum()",
    )
