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
from trainkit.core.terms import named_strategies

SEQUENCES = ragged_sequences(17)
SIZES = (5, 1, 8, 3)
BOTH = {"ce": PerToken(), "kl": PerSample()}
MEANS: dict[str, str] = {}
TOTAL = PerSample(loss_reduction="total")


def terms_of(net: nn.Module, batch: Any, reductions: Any = MEANS) -> dict[str, Tensor]:
    """Cross entropy over tokens, and three times something over samples."""
    ce = cross_entropy(net, batch, reductions.get("ce", "mean"))
    return {"ce": ce, "kl": 3.0 * kl_of(net, batch, reductions.get("kl", "mean"))}


def entangled(net: nn.Module, batch: Any, reductions: Any = MEANS) -> dict[str, Tensor]:
    """`kl` goes back through the tensor that is the term `ce`: what comes from `kl`
    must not be multiplied by the factor of `ce`."""
    terms = terms_of(net, batch, {"ce": "sum", "kl": "sum"})
    if reductions:
        return {"ce": terms["ce"], "kl": terms["kl"] + 2.0 * terms["ce"]}
    tokens, rows = (batch["labels"] != -100).sum(), len(batch["ids"])
    both = (terms["kl"] + 2.0 * terms["ce"]) / rows
    return {"ce": terms["ce"] / tokens, "kl": both}


def only(name: str) -> Any:
    """Only one of them is not zero: each has its own denominator."""
    return lambda *given: {k: v * (k == name) for k, v in terms_of(*given).items()}


def twice(net: nn.Module, batch: Any, reductions: Any = MEANS) -> dict[str, Tensor]:
    """The same tensor is two terms."""
    ce = cross_entropy(net, batch)
    return {"ce": ce, "kl": ce}


def constant(net: nn.Module, batch: Any, reductions: Any = MEANS) -> dict[str, Tensor]:
    """A term without a gradient is counted in the loss alone."""
    return {"ce": cross_entropy(net, batch), "kl": torch.tensor(2.0)}


def plain(net: nn.Module, batch: Any, reductions: Any = MEANS) -> Tensor:
    """A mapping of one strategy takes a plain loss, as well as its term."""
    return cross_entropy(net, batch)


def summed(terms: Any) -> Tensor:
    return terms if isinstance(terms, Tensor) else sum(terms.values())  # type: ignore[return-value]


def whole(terms: Any, reductions: Any = MEANS) -> tuple[Tensor, Tensor]:
    net = fresh_net()
    loss = summed(terms(net, joined(cut(SEQUENCES, [17])), reductions))
    loss.backward()
    return gradients(net), loss.detach()


def window(strategies: Any, terms: Any, batches: Any) -> tuple[Tensor, Any]:
    net, accumulator = fresh_net(), Accumulator(strategies)
    reductions = {k: s.loss_reduction for k, s in strategies.items()}
    reductions = {k: "mean" if r == "mean" else "sum" for k, r in reductions.items()}
    accumulator.expect(batches)
    for batch in batches:
        accumulator.backward(terms(net, batch, reductions))
    return gradients(net), accumulator.finish(net.parameters())


@pytest.mark.parametrize("sizes", [SIZES, (1,) * 17, (17,)], ids=str)
@pytest.mark.parametrize(
    ("strategies", "terms"),
    [
        (BOTH, terms_of),
        ({k: type(s)(loss_reduction="sum") for k, s in BOTH.items()}, terms_of),
        ({"ce": PerToken(), "kl": TOTAL}, terms_of),
        ({"ce": TOTAL, "kl": PerSample()}, terms_of),
        ({k: type(s)(loss_reduction="sum") for k, s in BOTH.items()}, entangled),
        (BOTH, only("ce")),
        (BOTH, only("kl")),
        ({"ce": PerToken(), "kl": PerToken()}, twice),
        (BOTH, constant),
        ({"ce": PerToken()}, plain),
        ({"ce": PerToken()}, lambda *given: {"ce": plain(*given)}),
    ],
)
def test_terms_equal_the_uncut_loss(strategies: Any, terms: Any, sizes: Any) -> None:
    found, stats = window(strategies, terms, cut(SEQUENCES, sizes))
    totals = {k: "sum" for k, s in strategies.items() if s.loss_reduction == "total"}
    gradient, loss = whole(terms, totals)
    assert relative(found, gradient) <= 1e-12
    torch.testing.assert_close(stats.loss, loss)
    tokens = int((joined(cut(SEQUENCES, [17]))["labels"] != -100).sum())
    is_by_tokens = isinstance(next(iter(strategies.values())), PerToken)
    assert int(stats.weight) == (tokens if is_by_tokens else 17)
    assert int(stats.num_micro_batches) == len(sizes)


@pytest.mark.parametrize("strategy", BOTH.values(), ids=str)
def test_one_denominator_for_both_differs(strategy: Any) -> None:
    """The control: the sum of both terms, weighed by one strategy."""
    net = fresh_net()

    def loss(net: nn.Module, batch: Any, reduction: str) -> Tensor:
        return summed(terms_of(net, batch))

    run_window(net, cut(SEQUENCES, SIZES), strategy, loss)
    assert relative(gradients(net), whole(terms_of)[0]) > NAIVE


def with_square(
    net: nn.Module, batch: Any, reductions: Any = MEANS
) -> dict[str, Tensor]:
    """The second term does not look at labels."""
    square = (net(batch["ids"]).square() * batch["valid"]).sum((1, 2))
    second = square.sum() if reductions.get("kl") == "sum" else square.mean()
    return {"ce": cross_entropy(net, batch, reductions.get("ce", "mean")), "kl": second}


@pytest.mark.filterwarnings("ignore:.*none of the window")
@pytest.mark.parametrize("ignored", [(1,), (0, 3), (0, 1, 2, 3)], ids=str)
def test_a_term_that_weighs_nothing_gives_nothing(ignored: tuple[int, ...]) -> None:
    """In some micro-batches, or in the whole window: its mean over nothing is NaN."""
    batches = cut(SEQUENCES, SIZES)
    for index, batch in enumerate(batches):
        batch["valid"] = (batch["labels"] != -100).unsqueeze(-1)
        if index in ignored:
            batch["labels"] = torch.full_like(batch["labels"], -100)
    found, stats = window(BOTH, with_square, batches)
    net, tokens = fresh_net(), sum(int((b["labels"] != -100).sum()) for b in batches)
    sums = [with_square(net, batch, {"ce": "sum", "kl": "sum"}) for batch in batches]
    ce, kl = (torch.stack([terms[name] for terms in sums]).sum() for name in BOTH)
    expected = ce / max(tokens, 1) + kl / len(SEQUENCES)
    expected.backward()
    assert relative(found, gradients(net)) <= 1e-12
    if tokens:
        torch.testing.assert_close(stats.loss, expected.detach())


def test_a_window_without_weight_in_the_first_term_is_said_with_its_name() -> None:
    parameter = nn.Parameter(torch.ones(()))
    accumulator = Accumulator(BOTH, checks="now")
    accumulator.expect(weights={"ce": [0], "kl": [1]})
    accumulator.backward({"ce": parameter * torch.nan, "kl": parameter * 3})
    with pytest.warns(UserWarning, match="weighs anything in the term 'ce'"):
        accumulator.finish([parameter])


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
    accumulator.expect([batch])
    with pytest.raises(TrainkitError, match=text):
        accumulator.backward(change(terms))
    with pytest.raises(TrainkitError, match=r"Call expect\(\) with all micro-batches"):
        Accumulator(BOTH).backward(terms, batch)  # a streamed window


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


def test_strategies_keep_their_order() -> None:
    """The first measures the window."""
    assert list(named_strategies({"b": Uniform(), "a": PerToken()})) == ["b", "a"]
    assert list(named_strategies(PerToken())) == [""]


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
