"""Divisors that no field of the batch counts, and weights that are given by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.lit.proof.test_check import check
from tests.lit.proof.zoo import Tokens, token_loader, token_sum
from trainkit import AccumulationMixin, PerToken


def own_labels(batch: dict[str, Any]) -> Tensor:
    """Labels that training_step makes by itself: every token after one above 6."""
    ids = batch["ids"]
    follows = F.pad(ids[:, :-1] > 6, (1, 0)) & (ids != 0)
    follows[:, 1] = True
    return torch.where(follows, ids, -100)


def made_inside(module: Any, logits: Tensor, batch: dict[str, Any]) -> Tensor:
    return F.cross_entropy(logits.transpose(1, 2), own_labels(batch))


def made_and_weighted(module: Any, logits: Tensor, batch: dict[str, Any]) -> Tensor:
    weight = torch.linspace(1, 2, logits.shape[-1])
    return F.cross_entropy(logits.transpose(1, 2), own_labels(batch), weight)


def selected(module: Any, logits: Tensor, batch: dict[str, Any]) -> Tensor:
    labels = own_labels(batch)
    losses = F.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
    return losses[labels != -100].mean()


def divided(module: Any, logits: Tensor, batch: dict[str, Any]) -> Tensor:
    labels = own_labels(batch)
    losses = F.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
    return losses.sum() / (labels != -100).sum()


@pytest.mark.parametrize(
    ("loss", "place", "text", "line"),
    [
        (
            made_inside,
            "cross_entropy",
            "its counted labels",
            "self.weigh((target != -100).sum())",
        ),
        (
            made_and_weighted,
            "cross_entropy",
            "weight=",
            "self.weigh(weight[target[target != -100]].sum())",
        ),
        (selected, "mean", "its entries", "self.weigh(losses.numel())"),
        (divided, "the division", "the number right of it", "self.weigh(divisor)"),
    ],
)
def test_a_divisor_that_no_field_counts_is_named(
    loss: Any, place: str, text: str, line: str
) -> None:
    report = check(Tokens(loss), token_loader(), strategy=PerToken())
    (cause,) = report.causes
    assert cause.kind == "denominator"
    assert cause.place == "training_step"
    assert text in cause.text
    assert f"in {place} at proof/test_divisors.py:" in cause.text
    assert cause.remedy[0] == "accumulation = Weighed()"
    assert line in cause.remedy[1]


def sum_and_decay(module: Any, logits: Tensor, batch: dict[str, Any]) -> Tensor:
    decay: Any = sum(each.square().sum() for each in module.parameters())
    return token_sum(module, logits, batch) + 0.01 * decay


@pytest.mark.parametrize(
    ("loss", "text"),
    [
        (token_sum, None),
        (sum_and_decay, "a sum over rows and of what no row changes"),
    ],
)
def test_a_decay_within_a_sum_is_told_apart(loss: Any, text: str | None) -> None:
    strategy = PerToken(loss_reduction="total")
    report = check(Tokens(loss), token_loader(), strategy=strategy)
    assert report.exact == (text is None)
    if text is not None:
        (cause,) = report.causes
        assert cause.kind == "denominator"
        assert text in cause.text


def largest(module: Any, logits: Tensor, batch: dict[str, Any]) -> Tensor:
    losses = F.cross_entropy(logits.transpose(1, 2), batch["labels"], reduction="none")
    return losses.max()


def test_a_maximum_is_no_mean_with_unknown_weights() -> None:
    (cause,) = check(Tokens(largest), token_loader(), strategy=PerToken()).causes
    assert cause.kind == "loss"


class AloneOtherwise(Tokens):
    """Trains a single row in another way than several."""

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return 2 * loss if len(batch["ids"]) == 1 else loss


def test_a_branch_for_single_rows_is_named() -> None:
    report = check(AloneOtherwise(), token_loader(), strategy=PerToken())
    assert not report.exact
    (cause,) = report.causes
    assert "parts of one row are not" in cause.text


class ByHand(AccumulationMixin, Tokens):
    """Says its weights itself, as a function of the labels and the batch."""

    def __init__(self, give: Any) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.accumulation = PerToken()
        self.give = give

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        logits, labels = self.head(self.features(batch)), own_labels(batch)
        loss = F.cross_entropy(logits.transpose(1, 2), labels)
        self.accumulate(loss, **self.give(labels, batch))
        if self.window_ends(batch_idx):
            self.finish_window()
            self.optimizers().step()  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "give",
    [
        lambda labels, batch: {"weight": (labels != -100).sum()},
        lambda labels, batch: {"batch": {"labels": labels}},
    ],
)
def test_weights_that_are_given_by_hand_count_as_in_the_run(give: Any) -> None:
    """The control: other weights, below."""
    check(ByHand(give), token_loader()).assert_exact()


@pytest.mark.parametrize(
    ("give", "text"),
    [
        (lambda labels, batch: {"weight": len(labels)}, "what self.accumulate gets"),
        (lambda labels, batch: {"batch": batch}, "PerToken()"),
    ],
)
def test_wrong_weights_that_are_given_by_hand_are_explained(
    give: Any, text: str
) -> None:
    report = check(ByHand(give), token_loader())
    assert report.deviation > 1e-3
    (cause,) = report.causes
    assert cause.kind == "denominator"
    assert text in cause.text
