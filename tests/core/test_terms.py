"""A loss of several terms, each divided by a total of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.helpers import NAIVE, TokenNet, gradients, pad, ragged_sequences
from trainkit import Accumulator, PerSample, PerToken, Uniform
from trainkit.core.terms import named_strategies
from trainkit.errors import TrainkitError

Batch = Mapping[str, Tensor]
SIZES = (5, 1, 8, 3)
SEQUENCES = ragged_sequences(sum(SIZES))
BOTH = {"ce": PerToken(), "kl": PerSample()}
SUMS = {
    "ce": PerToken(loss_reduction="sum"),
    "kl": PerSample(loss_reduction="sum"),
}


def batches(sizes: tuple[int, ...] = SIZES) -> list[dict[str, Tensor]]:
    stops = torch.tensor((0, *sizes)).cumsum(0).tolist()
    return [pad(SEQUENCES[a:b]) for a, b in zip(stops, stops[1:], strict=False)]


def ce_of(
    net: nn.Module, batch: Mapping[str, Tensor], reduction: str = "mean"
) -> Tensor:
    logits = net(batch["ids"]).flatten(0, 1)
    return F.cross_entropy(logits, batch["labels"].flatten(), reduction=reduction)


def kl_of(
    net: nn.Module, batch: Mapping[str, Tensor], reduction: str = "mean"
) -> Tensor:
    """Something of each sample: how far its mean output is from a uniform one."""
    valid = (batch["labels"] != -100).unsqueeze(-1)
    mean = (net(batch["ids"]) * valid).sum(1) / valid.sum(1)
    each = -F.log_softmax(mean, -1).mean(-1)
    return each.mean() if reduction == "mean" else each.sum()


def terms_of(
    net: nn.Module, batch: Any, reduction: str = "mean", *, beta: float = 3.0
) -> dict[str, Tensor]:
    kl = kl_of(net, batch, reduction)
    return {"ce": ce_of(net, batch, reduction), "kl": beta * kl}


def whole_gradient(terms: Any = terms_of, sizes: tuple[int, ...] = SIZES) -> Tensor:
    net = TokenNet(dtype=torch.float64)
    whole = terms(net, pad(SEQUENCES[: sum(sizes)]))
    torch.stack(list(whole.values())).sum().backward()
    return gradients(net)


def told_gradient(
    strategies: Any = BOTH, terms: Any = terms_of, sizes: tuple[int, ...] = SIZES
) -> tuple[Tensor, Any]:
    net = TokenNet(dtype=torch.float64)
    accumulator = Accumulator(strategies)
    accumulator.expect(batches(sizes))
    for batch in batches(sizes):
        accumulator.backward(terms(net, batch))
    stats = accumulator.finish(net.parameters())
    return gradients(net), stats


def off(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize("sizes", [SIZES, (1,) * 17, (17,), (16, 1)])
def test_terms_equal_uncut_loss(sizes: tuple[int, ...]) -> None:
    found, _ = told_gradient(sizes=sizes)
    assert off(found, whole_gradient(sizes=sizes)) <= 1e-12


def test_terms_that_are_sums_equal_uncut_means() -> None:
    def sums(net: Any, batch: Any) -> dict[str, Tensor]:
        return terms_of(net, batch, "sum")

    assert off(told_gradient(SUMS, sums)[0], whole_gradient()) <= 1e-12


@pytest.mark.parametrize("name", ["ce", "kl"])
def test_each_term_alone_equals_its_uncut_mean(name: str) -> None:
    """Only one of them is nonzero: each has its own denominator."""

    def only(net: Any, batch: Any) -> dict[str, Tensor]:
        return {k: v * (k == name) for k, v in terms_of(net, batch).items()}

    assert off(told_gradient(terms=only)[0], whole_gradient(only)) <= 1e-12


@pytest.mark.parametrize("strategy", [PerToken(), PerSample()], ids=str)
def test_one_denominator_for_both_differs(strategy: Any) -> None:
    """Negative control: the sum of both terms, weighed by one strategy."""
    net = TokenNet(dtype=torch.float64)
    accumulator = Accumulator(strategy)
    for batch in batches():
        accumulator.backward(sum(terms_of(net, batch).values()), batch)  # type: ignore[arg-type]
    accumulator.finish(net.parameters())
    assert off(gradients(net), whole_gradient()) > NAIVE


def test_loss_of_the_window_is_that_of_the_whole() -> None:
    net = TokenNet(dtype=torch.float64)
    _, stats = told_gradient()
    expected = sum(terms_of(net, pad(SEQUENCES)).values())
    torch.testing.assert_close(stats.loss, expected.detach())  # type: ignore[union-attr]
    tokens = int((pad(SEQUENCES)["labels"] != -100).sum())
    assert (int(stats.weight), int(stats.num_micro_batches)) == (tokens, len(SIZES))


def test_a_term_that_is_made_of_another_keeps_its_own_factor() -> None:
    """`kl` goes back through the tensor that is the term `ce`: what comes from `kl`
    must not be multiplied by the factor of `ce`."""

    def entangled(net: Any, batch: Any) -> dict[str, Tensor]:
        ce = ce_of(net, batch, "sum")
        return {"ce": ce, "both": kl_of(net, batch, "sum") + 2.0 * ce}

    strategies = {
        "ce": PerToken(loss_reduction="sum"),
        "both": PerSample(loss_reduction="sum"),
    }
    found, _ = told_gradient(strategies, entangled)
    net = TokenNet(dtype=torch.float64)
    batch = pad(SEQUENCES)
    terms = entangled(net, batch)
    tokens = (batch["labels"] != -100).sum()
    (terms["ce"] / tokens + terms["both"] / len(SEQUENCES)).backward()
    assert off(found, gradients(net)) <= 1e-12


def test_the_same_tensor_may_be_two_terms() -> None:
    def same(net: Any, batch: Any) -> dict[str, Tensor]:
        ce = ce_of(net, batch)
        return {"ce": ce, "kl": ce}

    found, _ = told_gradient({"ce": PerToken(), "kl": PerToken()}, same)
    assert off(found, whole_gradient(same)) <= 1e-12


def test_a_term_without_a_gradient_is_counted_in_the_loss_alone() -> None:
    def constant(net: Any, batch: Any) -> dict[str, Tensor]:
        return {"ce": ce_of(net, batch), "kl": torch.tensor(2.0)}

    found, stats = told_gradient(terms=constant)
    only_ce = whole_gradient(lambda net, batch: {"ce": ce_of(net, batch)})
    assert off(found, only_ce) <= 1e-12
    net = TokenNet(dtype=torch.float64)
    torch.testing.assert_close(stats.loss, ce_of(net, pad(SEQUENCES)).detach() + 2)


def without_labels(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return {**batch, "labels": torch.full_like(batch["labels"], -100)}


def square(net: nn.Module, batch: Batch) -> Tensor:
    """Something of each sample that does not look at labels."""
    valid = (batch["rows"] != -100).unsqueeze(-1)
    return (net(batch["ids"]).square() * valid).sum((1, 2)).mean()


@pytest.mark.parametrize("ignored", [(1,), (0, 3), (0, 1, 2, 3)], ids=str)
def test_a_term_that_weighs_nothing_gives_nothing(ignored: tuple[int, ...]) -> None:
    """In some micro-batches, or in the whole window: its mean over nothing is NaN."""
    given = [{**batch, "rows": batch["labels"]} for batch in batches()]
    made = [without_labels(b) if i in ignored else b for i, b in enumerate(given)]
    net, other = TokenNet(dtype=torch.float64), TokenNet(dtype=torch.float64)
    accumulator = Accumulator(BOTH)
    accumulator.expect(made)
    for batch in made:
        accumulator.backward({"ce": ce_of(net, batch), "kl": square(net, batch)})
    stats = accumulator.finish(net.parameters())
    tokens = max(1, sum(int((b["labels"] != -100).sum()) for b in made))
    ce = [ce_of(other, batch, "sum") for batch in made]
    kl = [square(other, batch) * len(batch["ids"]) for batch in made]
    expected = sum(ce) / tokens + sum(kl) / sum(SIZES)
    expected.backward()  # type: ignore[union-attr]
    assert off(gradients(net), gradients(other)) <= 1e-12
    if len(ignored) < len(SIZES):
        torch.testing.assert_close(stats.loss, expected.detach())  # type: ignore[union-attr]


# ---- what is refused -----------------------------------------------------------------


def test_terms_in_a_streamed_window_are_refused() -> None:
    net, (batch, *_) = TokenNet(), batches()
    with pytest.raises(TrainkitError, match="expect"):
        Accumulator(BOTH).backward(terms_of(net, batch), batch)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (
            lambda t: {"ce": t["ce"]},
            r"its terms are \['ce'\], and there are strategies",
        ),
        (lambda t: {**t, "l2": t["ce"]}, r"\['ce', 'kl', 'l2'\]"),
        (lambda t: {"ce": t["ce"], "KL": t["kl"]}, r"\['KL', 'ce'\]"),
        (lambda t: t["ce"], "terms"),
        (lambda t: {**t, "kl": 1.0}, "loss term 'kl': must be a tensor .* 1.0"),
        (lambda t: {**t, "kl": t["kl"].expand(2)}, r"loss term 'kl': .* \[2\]"),
    ],
)
def test_wrong_terms_are_refused(change: Any, text: str) -> None:
    net, (batch, *_) = TokenNet(), batches()
    accumulator = Accumulator(BOTH)
    accumulator.expect([batch])
    with pytest.raises(TrainkitError, match=text):
        accumulator.backward(change(terms_of(net, batch)))


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({}, "a mapping must name the terms of the loss, and it is empty"),
        ({1: PerToken()}, "named by text, received 1"),
        ({"": PerToken()}, "named by text, received ''"),
        ({"ce": 3}, "3"),
    ],
)
def test_wrong_strategies_are_refused(given: Any, text: str) -> None:
    with pytest.raises(TrainkitError, match=text):
        Accumulator(given)


def test_a_mapping_of_one_strategy_takes_a_plain_loss_or_its_term() -> None:
    one = {"ce": PerToken()}
    plain, _ = told_gradient(one, ce_of)
    named, _ = told_gradient(one, lambda net, batch: {"ce": ce_of(net, batch)})
    assert torch.equal(plain, named)
    assert off(plain, whole_gradient(lambda n, b: {"ce": ce_of(n, b)})) <= 1e-12


def test_strategies_keep_their_order() -> None:
    """The first measures the window."""
    named = named_strategies({"b": Uniform(), "a": PerToken()})
    assert list(named) == ["b", "a"]
    assert list(named_strategies(PerToken())) == [""]


@pytest.mark.parametrize("is_cast", [True, False])
def test_terms_of_half_precision_are_announced(is_cast: bool) -> None:
    """Shares of 1/3 and 2/3 of each term: bfloat16 rounds them, float32 does not."""
    parameter = torch.nn.Parameter(torch.ones((), dtype=torch.bfloat16))
    accumulator = Accumulator({"a": Uniform(), "b": Uniform()})
    accumulator.expect(weights={"a": [1, 2], "b": [1, 2]})

    def window() -> None:
        for _ in range(2):
            term = parameter.float() if is_cast else parameter * 1
            accumulator.backward({"a": term, "b": term * 0})
        accumulator.finish([parameter])

    text = r"loss terms a, b: they are torch.bfloat16, which rounds .* 0\.0039 of it"
    if is_cast:
        window()
    else:
        with pytest.warns(UserWarning, match=text) as caught:
            window()
        assert len(caught) == 1
    assert parameter.grad is not None
    assert float(parameter.grad) == pytest.approx(1, abs=0.004)
