"""Losses that are more than a mean: several terms, each divided by a total of its own;
and `TokenLoss`, cross entropy over whole logits, which holds those of one chunk."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.benchmarks.measuring import LiveBytes
from tests.core.common import (
    cross_entropy,
    cut,
    fresh_net,
    joined,
    kl_of,
    relative,
    run_window,
)
from tests.helpers import NAIVE, gradients, ragged_sequences
from tests.zoo.language_models import LowRank
from tests.zoo.modules import hooked
from trainkit import Accumulator, PerSample, PerToken, TokenLoss, TrainkitError, Uniform
from trainkit.core.terms import leading, named_strategies

# ---- several terms -------------------------------------------------------------------

SEQUENCES = ragged_sequences(17)
SIZES = (5, 1, 8, 3)


def strategies(ce: Any = "mean", kl: Any = "mean") -> dict[str, Any]:
    return {"ce": PerToken(loss_reduction=ce), "kl": PerSample(loss_reduction=kl)}


BOTH = strategies()


def terms_of(net: nn.Module, batch: Any, ce: Any = "mean", kl: Any = "mean") -> Any:
    """Cross entropy over tokens, and three times something over samples."""
    ce, kl = (kind if kind == "mean" else "sum" for kind in (ce, kl))
    return {"ce": cross_entropy(net, batch, ce), "kl": 3.0 * kl_of(net, batch, kl)}


CHANGES: dict[str, Any] = {
    "as they are": lambda ce, kl: {"ce": ce, "kl": kl},
    "ce alone": lambda ce, kl: {"ce": ce, "kl": 0 * kl},
    "kl alone": lambda ce, kl: {"ce": 0 * ce, "kl": kl},
    # `kl` goes back through the tensor that is the term `ce`: what comes from `kl` must
    # not be multiplied by the factor of `ce`.
    "entangled": lambda ce, kl: {"ce": ce, "kl": kl + 2.0 * ce},
    "one tensor twice": lambda ce, kl: {"ce": kl, "kl": kl},
    "a term without a gradient": lambda ce, kl: {"ce": ce, "kl": torch.tensor(2.0)},
    "one term by its name": lambda ce, kl: {"ce": ce},
    "one term": lambda ce, kl: ce,
}


def summed(terms: Any) -> Tensor:
    whole = terms if isinstance(terms, Tensor) else sum(terms.values())
    assert isinstance(whole, Tensor)
    return whole


@pytest.mark.parametrize("sizes", [SIZES, (1,) * 17, (17,)], ids=str)
@pytest.mark.parametrize(
    ("change", "ce", "kl"),
    [
        *((change, "mean", "mean") for change in CHANGES if change != "entangled"),
        *(("as they are", *kinds) for kinds in (("sum", "sum"), ("mean", "total"))),
        *(("as they are", *kinds) for kinds in (("total", "mean"), ("total", "sum"))),
        ("entangled", "total", "total"),
        ("entangled", "sum", "sum"),
    ],
)
def test_terms_equal_the_uncut_loss(change: str, ce: Any, kl: Any, sizes: Any) -> None:
    net, whole, batch = fresh_net(), fresh_net(), joined(cut(SEQUENCES, [17]))
    named = strategies(ce, kl) if "one term" not in change else {"ce": BOTH["ce"]}
    if change == "one tensor twice":
        named["ce"] = PerSample()
    accumulator = Accumulator(named)
    accumulator.expect(cut(SEQUENCES, sizes))
    for part in cut(SEQUENCES, sizes):
        accumulator.backward(CHANGES[change](*terms_of(net, part, ce, kl).values()))
    stats = accumulator.finish(net.parameters())
    expected = CHANGES[change](*terms_of(whole, batch, ce, kl).values())
    weights = {name: float(strategy.weight(batch)) for name, strategy in named.items()}
    for name, strategy in named.items():
        if strategy.loss_reduction == "sum":
            expected[name] = expected[name] / weights[name]
    summed(expected).backward()
    assert relative(gradients(net), gradients(whole)) <= 1e-12
    torch.testing.assert_close(stats.loss, summed(expected).detach())
    assert (stats.weight, stats.num_micro_batches) == (weights["ce"], len(sizes))


@pytest.mark.parametrize("strategy", BOTH.values(), ids=str)
def test_one_denominator_for_both_differs(strategy: Any) -> None:
    """The control: the sum of both terms, weighed by one strategy."""
    net, whole = fresh_net(), fresh_net()
    parts = cut(SEQUENCES, SIZES)
    run_window(net, parts, strategy, lambda n, b, _: summed(terms_of(n, b)))
    summed(terms_of(whole, joined(parts))).backward()
    assert relative(gradients(net), gradients(whole)) > NAIVE


@pytest.mark.filterwarnings("ignore:.*none of the window")
@pytest.mark.parametrize("ignored", [(1,), (0, 3), (0, 1, 2, 3)], ids=str)
def test_a_term_that_weighs_nothing_gives_nothing(ignored: tuple[int, ...]) -> None:
    """In some micro-batches, or in the whole window: its mean over nothing is NaN. The
    second term does not look at labels."""
    net, whole, batches = fresh_net(), fresh_net(), cut(SEQUENCES, SIZES)
    masks = [(batch["labels"] != -100).unsqueeze(-1) for batch in batches]
    for index in ignored:
        batches[index]["labels"].fill_(-100)
    accumulator = Accumulator(BOTH)
    accumulator.expect(batches)
    tokens = max(sum(int((b["labels"] != -100).sum()) for b in batches), 1)
    expected = torch.zeros((), dtype=torch.float64)
    for batch, mask in zip(batches, masks, strict=True):
        square = (net(batch["ids"]).square() * mask).sum((1, 2)).mean()
        accumulator.backward({"ce": cross_entropy(net, batch), "kl": square})
        square = (whole(batch["ids"]).square() * mask).sum()
        of_tokens = cross_entropy(whole, batch, "sum") / tokens
        expected = expected + of_tokens + square / len(SEQUENCES)
    stats = accumulator.finish(net.parameters())
    expected.backward()
    assert relative(gradients(net), gradients(whole)) <= 1e-12
    if tokens > 1:
        torch.testing.assert_close(stats.loss, expected.detach())


def test_a_window_without_weight_in_the_first_term_is_said_with_its_name() -> None:
    parameter = nn.Parameter(torch.ones(()))
    accumulator = Accumulator(BOTH, checks="now")
    accumulator.tell({"ce": [0], "kl": [1]})
    accumulator.backward({"ce": parameter * torch.nan, "kl": parameter * 3})
    with pytest.warns(UserWarning, match="weighs anything in the term 'ce'"):
        accumulator.finish([parameter])


# ---- what is refused -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda t: {"ce": t["ce"]}, r"the terms \['ce', 'kl'\], .* received \['ce'\]"),
        (lambda t: {**t, "l2": t["ce"]}, r"received \['ce', 'kl', 'l2'\]"),
        (lambda t: {"ce": t["ce"], "KL": t["kl"]}, r"received \['ce', 'KL'\]"),
        (lambda t: t["ce"], r"a dict of the terms \['ce', 'kl'\], .* received Tensor"),
        (lambda t: {**t, "kl": 1.0}, "loss term 'kl': must be a tensor .* 1.0"),
        (lambda t: {**t, "kl": t["kl"].expand(2)}, r"loss term 'kl': .* \[2\]"),
    ],
)
def test_terms_unlike_the_strategies_are_refused(change: Any, text: str) -> None:
    (batch,) = cut(SEQUENCES, [5])
    accumulator, terms = Accumulator(BOTH), terms_of(fresh_net(), batch)
    with pytest.raises(TrainkitError, match=r"Call expect\(\) with all micro-batches"):
        accumulator.backward(terms, batch)  # in a streamed window
    accumulator.expect([batch])
    with pytest.raises(TrainkitError, match=text):
        accumulator.backward(change(terms))


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({}, "a mapping must name the terms of the loss, and it is empty"),
        ({1: PerToken()}, "named by text, received 1"),
        ({"": PerToken()}, "named by text, received ''"),
        ({"ce": 3}, "must be an AccumulationStrategy, received 3"),
    ],
)
def test_wrong_strategies_are_refused(given: Any, text: str) -> None:
    with pytest.raises(TrainkitError, match=text):
        Accumulator(given)


def test_no_strategy_yet_is_refused() -> None:
    with pytest.raises(TrainkitError, match="the module has no strategy yet"):
        leading({})


def test_strategies_keep_their_order() -> None:
    """The first measures the window."""
    assert list(named_strategies({"b": Uniform(), "a": PerToken()})) == ["b", "a"]
    assert list(named_strategies(PerToken())) == [""]


# ---- TokenLoss -----------------------------------------------------------------------

WORDS, WIDTH = 40, 6


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


def gradients_of(loss: Tensor, model: nn.Module) -> list[Tensor]:
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
    found, expected = gradients_of(ours, model), gradients_of(whole, model)
    assert len(found) == len(expected) > 0
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-15)
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
    expected = gradients_of(model.whole(ids, labels) / 3, model)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-15)
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
        ours = gradients_of(model.loss(model.states(ids), labels), model)
        whole = gradients_of(model.whole(ids, labels), model)
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


def test_a_head_may_not_hold_what_trains_elsewhere() -> None:
    """It would get no gradient of the head; the control has it as a parameter."""
    forward = lambda self, x: F.linear(x, (self.held or [self.weight])[0])  # noqa: E731
    head: Any = hooked(nn.Linear, forward=forward)(2, 3)
    labels = torch.zeros(5).long()
    head.held, states = [nn.Parameter(torch.ones(3, 2))], torch.ones(5, 2)
    with pytest.raises(TrainkitError, match=r"TokenLoss head: .* shape \[3, 2\]"):
        TokenLoss(head)(states, labels)
    head.weight, head.held = head.held[0], None
    TokenLoss(head)(states, labels).backward()
