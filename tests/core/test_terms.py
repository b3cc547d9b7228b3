"""A loss of several terms, each divided by a total of its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

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
from trainkit import Accumulator, PerSample, PerToken, TrainkitError, Uniform
from trainkit.core.terms import leading, named_strategies

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
    accumulator.expect(weights={"ce": [0], "kl": [1]})
    accumulator.backward({"ce": parameter * torch.nan, "kl": parameter * 3})
    with pytest.warns(UserWarning, match="weighs anything in the term 'ce'"):
        accumulator.finish([parameter])


@pytest.mark.parametrize("is_cast", [True, False])
def test_terms_of_half_precision_are_announced(is_cast: bool) -> None:
    """Shares of 1/3 and 2/3 of each term: bfloat16 rounds them, float32 does not."""
    parameter = nn.Parameter(torch.ones((), dtype=torch.bfloat16))
    accumulator = Accumulator({"a": Uniform(), "b": Uniform()})
    accumulator.expect(weights={"a": [1, 2], "b": [1, 2]})

    def run() -> None:
        for _ in range(2):
            term = parameter.float() if is_cast else parameter * 1
            accumulator.backward({"a": term, "b": term * 0})
        accumulator.finish([parameter])

    text = r"loss terms a, b: they are torch.bfloat16, which rounds .* 0\.0039 of it"
    if is_cast:
        run()
    else:
        with pytest.warns(UserWarning, match=text) as caught:
            run()
        assert len(caught) == 1
    assert parameter.grad is not None
    assert float(parameter.grad) == pytest.approx(1, abs=0.004)


# ---- what is refused -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda t: {"ce": t["ce"]}, r"terms are \['ce'\], and there are strategies"),
        (lambda t: {**t, "l2": t["ce"]}, r"\['ce', 'kl', 'l2'\]"),
        (lambda t: {"ce": t["ce"], "KL": t["kl"]}, r"\['KL', 'ce'\]"),
        (lambda t: t["ce"], "strategies for the terms .* received Tensor"),
        (lambda t: {**t, "kl": 1.0}, "loss term 'kl': must be a tensor .* 1.0"),
        (lambda t: {**t, "kl": t["kl"].expand(2)}, r"loss term 'kl': .* \[2\]"),
    ],
)
def test_other_terms_than_there_are_strategies_are_refused(
    change: Any, text: str
) -> None:
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
