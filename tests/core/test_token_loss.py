"""`TokenLoss` is cross entropy over whole logits, and holds those of one chunk."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.benchmarks.measuring import LiveBytes
from trainkit import Accumulator, PerToken, TokenLoss, TrainkitError

WORDS, WIDTH = 40, 6


class LowRank(nn.Module):
    """A frozen layer and what is added to it, as LoRA does."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.down = nn.Linear(layer.in_features, 2, bias=False, dtype=torch.float64)
        self.up = nn.Linear(2, layer.out_features, bias=False, dtype=torch.float64)

    def forward(self, states: Tensor) -> Tensor:
        return self.layer(states) + self.up(self.down(states))


class Model(nn.Module):
    """Word by word, from ids to logits."""

    def __init__(self, head: str = "linear", **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(WORDS, WIDTH, dtype=torch.float64)
        layer = nn.Linear(WIDTH, WORDS, bias=head != "tied", dtype=torch.float64)
        if head == "tied":
            layer.weight = self.embed.weight
        layer.requires_grad_(head != "frozen")
        made = LowRank(layer) if head == "low rank" else layer
        self.loss = TokenLoss(made, **options)

    def states(self, ids: Tensor) -> Tensor:
        return torch.tanh(self.embed(ids))

    def whole(self, ids: Tensor, labels: Tensor) -> Tensor:
        """What it must be."""
        return F.cross_entropy(
            self.loss.head(self.states(ids)).flatten(0, 1),
            labels.flatten(),
            reduction=self.loss.reduction,
            ignore_index=self.loss.ignore_index,
            label_smoothing=self.loss.label_smoothing,
        )


def data() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    ids, labels = torch.randint(1, WORDS, (2, 3, 11)).unbind()
    labels[0, 4:] = -100
    return ids, labels


def gradients(loss: Tensor, model: nn.Module) -> list[Tensor]:
    model.zero_grad()
    (3 * loss).backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


CASES: dict[str, dict[str, Any]] = {
    "a linear head": {},
    "one token a chunk": {"size": 1},
    "one chunk": {"size": 1024},
    "a tied head": {"head": "tied"},
    "a frozen head": {"head": "frozen"},
    "low rank": {"head": "low rank"},
    "smoothed": {"label_smoothing": 0.1},
    "a sum": {"reduction": "sum"},
    "another label is ignored": {"ignore_index": 7},
}


@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradients_are_those_of_whole_logits(name: str) -> None:
    """The control: chunks that each take their own mean."""
    model, (ids, labels) = Model(**{"size": 5, **CASES[name]}), data()
    if model.loss.ignore_index == 7:
        labels[labels == -100] = 7
    ours, whole = model.loss(model.states(ids), labels), model.whole(ids, labels)
    torch.testing.assert_close(ours, whole, rtol=1e-14, atol=0)
    found, expected = gradients(ours, model), gradients(whole, model)
    assert len(found) == len(expected) > 0
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-15)
    rows = [model.whole(ids[n : n + 1], labels[n : n + 1]) for n in range(len(ids))]
    naive = torch.stack(rows).sum() / (1 if model.loss.reduction == "sum" else len(ids))
    is_alike = torch.allclose(naive, whole, rtol=1e-6)
    assert is_alike is (model.loss.reduction == "sum")


def test_labels_that_are_all_ignored_change_no_window() -> None:
    """One micro-batch of three has none that counts. The control: its mean is 0 / 0."""
    model, (ids, labels) = Model(size=5), data()
    labels[1] = -100
    accumulator = Accumulator(PerToken(), module=model)
    for n in range(3):
        row = {"labels": labels[n : n + 1]}
        loss = model.loss(model.states(ids[n : n + 1]), row["labels"])
        accumulator.backward(loss, row)
    accumulator.finish(model.parameters())
    accumulator.check()
    found = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    expected = gradients(model.whole(ids, labels) / 3, model)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-15)
    assert model.whole(ids[1:2], labels[1:2]).isnan()


def test_each_state_can_predict_the_next_token() -> None:
    model, (ids, labels) = Model(size=5), data()
    states = model.states(ids)
    shifted = model.loss(states[:, :-1], labels[:, 1:])
    assert torch.equal(model.loss(states, labels, shift=True), shifted)


def test_without_gradients_nothing_is_made() -> None:
    model, (ids, labels) = Model(size=5), data()
    with torch.no_grad():
        loss = model.loss(model.states(ids), labels)
    assert not loss.requires_grad
    torch.testing.assert_close(loss, model.whole(ids, labels).detach())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast_and_half_precision_round_as_whole_logits_do(dtype: Any) -> None:
    model, (ids, labels) = Model(size=5).float(), data()
    with torch.autocast("cpu", dtype, enabled=dtype is torch.bfloat16):
        ours = gradients(model.loss(model.states(ids), labels), model)
        whole = gradients(model.whole(ids, labels), model)
    for one, other in zip(ours, whole, strict=True):
        assert one.dtype == torch.float32
        off = float((one - other).norm() / other.norm())
        assert off < (1e-6 if dtype is torch.float32 else 2e-2)


def test_logits_of_one_chunk_exist_at_a_time() -> None:
    """The control: whole logits, which hold twenty times as much."""
    peaks, words, tokens = [], 2000, 640
    for size in (32, tokens):
        head, states = nn.Linear(8, words), torch.randn(tokens, 8, requires_grad=True)
        labels, live = torch.randint(words, (tokens,)), LiveBytes()
        with live:
            TokenLoss(head, size=size)(states, labels).backward()
        peaks.append(live.peak)
    assert peaks[0] < 0.15 * peaks[1]


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"size": 0}, "size: must be a whole number"),
    ({"label_smoothing": 2.0}, "label_smoothing: must be a share from 0 to 1"),
    ({"label_smoothing": None}, "label_smoothing: must be a number, received None"),
    ({"ignore_index": 1.5}, "ignore_index: must be a whole number, received 1.5"),
    ({"reduction": "none"}, "reduction: must be"),
    ({"head": torch.zeros(3, 4)}, "head: must be a module"),
]


@pytest.mark.parametrize(("options", "text"), REFUSED)
def test_wrong_options_are_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(TrainkitError, match=f"TokenLoss {text}"):
        TokenLoss(**{"head": nn.Linear(2, 3), **options})


def test_second_derivatives_are_refused_and_never_left_out() -> None:
    """The control: a penalty on gradients has none of its own, silently."""
    states = torch.randn(5, 2, requires_grad=True)
    loss = TokenLoss(nn.Linear(2, 3))(states, torch.zeros(5).long())
    with pytest.raises(TrainkitError, match="create_graph=True"):
        torch.autograd.grad(loss, states, create_graph=True)


def test_labels_of_another_shape_are_refused() -> None:
    with pytest.raises(TrainkitError, match=r"labels of shape \[4\]"):
        TokenLoss(nn.Linear(2, 3))(torch.zeros(5, 2), torch.zeros(4).long())
