"""The accumulator in a plain loop: its rules, and models that others wrote."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import Tensor, nn
from transformers import BatchEncoding, LlamaConfig, LlamaForCausalLM

from tests.core.common import GivenWeight, fresh_net, padded, relative, run_window
from tests.helpers import NAIVE, VOCABULARY, gradients, ragged_sequences, token_loss
from trainkit import Accumulator, PerSample, PerToken, TrainkitError

SAMPLES = ragged_sequences(10)


def parameter() -> nn.Parameter:
    return nn.Parameter(torch.ones((), dtype=torch.float64))


# ---- rules ---------------------------------------------------------------------------


def test_finishing_an_empty_window_is_refused() -> None:
    p = parameter()
    accumulator = Accumulator(GivenWeight())
    for _ in range(2):
        with pytest.raises(TrainkitError, match=r"finish\(\): the window is empty"):
            accumulator.finish([p])
        accumulator.backward(p * 1, 1)
        accumulator.finish([p])


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda p: torch.stack([p, p]), r"one element, received \[2\].*='mean'"),
        (lambda p: 3.0, "one element, received 3.0"),
        (lambda p: p.detach() * 1, "must depend on parameters.*no_grad"),
        (lambda p: None, "one element, received None"),
    ],
)
def test_loss_that_is_none_is_refused(make: Callable[[Any], Any], text: str) -> None:
    accumulator = Accumulator(GivenWeight())
    with pytest.raises(TrainkitError, match=text):
        accumulator.backward(make(parameter()), 1)
    assert not accumulator.is_open


def test_dropped_window_leaves_no_trace() -> None:
    """transformers#22098: nothing of one epoch's tail in the next one's first step."""
    net, reference = fresh_net(), fresh_net()
    accumulator = Accumulator(PerToken())
    for samples in (SAMPLES[:2], SAMPLES[2:4]):
        batch = padded(samples)
        accumulator.backward(token_loss(net, batch), batch)
    assert accumulator.is_open
    assert accumulator.drop() == 2
    assert not accumulator.is_open
    net.zero_grad()
    stats = run_window(net, [padded(SAMPLES[4:])], accumulator)
    token_loss(reference, padded(SAMPLES[4:])).backward()
    assert stats.num_micro_batches == 1
    assert relative(gradients(net), gradients(reference)) <= 1e-12


def test_two_windows_side_by_side_share_no_totals() -> None:
    """One loss of a discriminator and one of a generator for each batch."""
    d, g = parameter(), parameter()
    of_d, of_g = Accumulator(GivenWeight()), Accumulator(GivenWeight())
    for weight_d, weight_g in ((1, 5), (3, 2)):
        of_d.backward(d * weight_d, weight_d)
        of_g.backward(g * weight_g, weight_g)
    assert of_d.finish([d]).weight == 4
    assert of_g.finish([g]).weight == 7
    assert float(d.grad) == (1 + 9) / 4  # type: ignore[arg-type]
    assert float(g.grad) == pytest.approx(29 / 7)  # type: ignore[arg-type]


def test_given_backward_equals_the_own_one() -> None:
    p, q = parameter(), parameter()
    for target, backward in ((p, None), (q, lambda loss: loss.backward())):
        accumulator = Accumulator(GivenWeight())
        for weight in (2, 3):
            accumulator.backward(target * weight, weight=weight, backward=backward)
        accumulator.finish([target])
    assert float(p.grad) == float(q.grad) == (4 + 9) / 5  # type: ignore[arg-type]


def test_loss_can_be_used_again_after_its_backward_pass() -> None:
    """The weighting is taken off: a second pass is the user's own."""
    p = parameter()
    accumulator = Accumulator(GivenWeight())
    loss = p * 2
    accumulator.backward(loss, 3, backward=lambda x: x.backward(retain_graph=True))
    accumulator.finish([p])
    p.grad = None
    loss.backward()
    assert float(p.grad) == 2  # type: ignore[arg-type]


def test_weighting_is_taken_off_after_a_backward_pass_that_failed() -> None:
    p = parameter()
    accumulator = Accumulator(GivenWeight())

    def fails(loss: Tensor) -> None:
        raise RuntimeError("out of memory")

    loss = p * 2
    with pytest.raises(RuntimeError, match="out of memory"):
        accumulator.backward(loss, 3, backward=fails)
    accumulator.drop()
    loss.backward()
    assert float(p.grad) == 2  # type: ignore[arg-type]


def test_backward_that_divides_is_refused() -> None:
    """accelerate#3533: the trainer divides and the loss is divided too."""
    p = parameter()
    accumulator = Accumulator(GivenWeight())
    divides = Accelerator(cpu=True, gradient_accumulation_steps=4)
    text = r"accelerator.backward: .*steps=4.*gradient_accumulation_steps=1"
    with pytest.raises(TrainkitError, match=text):
        accumulator.backward(p * 2, 3, backward=divides.backward)
    divides.gradient_accumulation_steps = 1
    for weight in (1, 3):
        accumulator.backward(p * weight, weight, backward=divides.backward)
    accumulator.finish([p])
    assert float(p.grad) == 2.5  # type: ignore[arg-type]


# ---- models that others wrote --------------------------------------------------------


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
    )
    return LlamaForCausalLM(config).double()


def encoding(samples: Any) -> BatchEncoding:
    batch = padded(samples)
    mask = torch.zeros_like(batch["ids"])
    for row, (ids, _) in enumerate(samples):
        mask[row, : len(ids)] = 1
    labels = torch.where(mask == 1, batch["ids"], -100)
    return BatchEncoding(
        {"input_ids": batch["ids"], "attention_mask": mask, "labels": labels}
    )


LONG = [s for s in ragged_sequences(40, longest=16) if len(s[0]) > 1][:12]


@pytest.mark.parametrize("shift", [True, False])
def test_causal_model_equals_big_batch_only_with_shift(shift: bool) -> None:
    """transformers#34191, #46204: a model that shifts inside has no target at position
    0; to count labels there is the control, off by one for each row."""
    net, reference = llama(), llama()
    accumulator = Accumulator(PerToken(shift=shift))
    for samples in (LONG[:1], LONG[1:9], LONG[9:]):
        batch = encoding(samples)
        accumulator.backward(net(**batch).loss, batch)
    stats = accumulator.finish(net.parameters())
    loss = reference(**encoding(LONG)).loss
    loss.backward()
    off = relative(gradients(net), gradients(reference))
    if shift:
        assert off <= 1e-6  # its loss is computed in float32
        torch.testing.assert_close(float(stats.loss), loss.item(), rtol=1e-6, atol=0)
    else:
        assert off > NAIVE / 10


def test_compiled_model_equals_big_batch() -> None:
    net, reference = fresh_net(), fresh_net()
    compiled = torch.compile(net, backend="aot_eager", dynamic=True)
    cut = [padded(SAMPLES[:3]), padded(SAMPLES[3:])]
    accumulator = Accumulator(PerToken())
    for batch in cut:
        accumulator.backward(token_loss(compiled, batch), batch)  # type: ignore[arg-type]
    accumulator.finish(net.parameters())
    token_loss(reference, padded(SAMPLES)).backward()
    assert relative(gradients(net), gradients(reference)) <= 1e-12


def test_checkpointed_model_equals_big_batch() -> None:
    """Activations recomputed in the backward pass change nothing."""
    from torch.utils.checkpoint import checkpoint

    net, reference = fresh_net(), fresh_net()

    def loss(module: nn.Module, batch: Any, reduction: str) -> Tensor:
        value = checkpoint(token_loss, module, batch, reduction, use_reentrant=False)
        assert isinstance(value, Tensor)
        return value

    run_window(net, [padded(SAMPLES[:3]), padded(SAMPLES[3:])], PerToken(), loss)
    token_loss(reference, padded(SAMPLES)).backward()
    assert relative(gradients(net), gradients(reference)) <= 1e-12


def test_window_with_a_failed_backward_pass_is_refused_until_dropped() -> None:
    """Out of memory, caught, and on: nobody knows what was added."""
    p = parameter()
    accumulator = Accumulator(GivenWeight())

    def fails(loss: Tensor) -> None:
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        accumulator.backward(p * 2, 3, backward=fails)
    for refused in (
        lambda: accumulator.backward(p * 2, 3),
        lambda: accumulator.finish([p]),
    ):
        with pytest.raises(TrainkitError, match=r"has failed.*Call drop\(\)"):
            refused()
    accumulator.drop()
    p.grad = None
    accumulator.backward(p * 2, 3)
    accumulator.finish([p])
    assert float(p.grad) == 2  # type: ignore[arg-type]


def test_gradients_zeroed_inside_a_window_are_refused() -> None:
    p = parameter()
    optimizer = torch.optim.SGD([p], lr=0.1)
    accumulator = Accumulator(GivenWeight())
    accumulator.backward(p * 2, 3)
    accumulator.finish(optimizer)
    optimizer.zero_grad()
    accumulator.backward(p * 2, 3)
    optimizer.zero_grad()
    with pytest.raises(
        TrainkitError, match="the gradients of the 1 micro-batches in it"
    ):
        accumulator.backward(p * 2, 3)


@pytest.mark.parametrize("passes", [0, 2])
def test_pass_that_does_not_start_from_the_loss_is_refused(passes: int) -> None:
    """An override of `LightningModule.backward` that goes its own way, say."""
    p = parameter()
    accumulator = Accumulator(GivenWeight())

    def own_way(loss: Tensor) -> None:
        for _ in range(passes):
            loss.backward(retain_graph=True)

    accumulator.backward(p * 2, 3, backward=own_way)
    with pytest.raises(TrainkitError, match=f"1 losses were weighted, and {passes} ba"):
        accumulator.finish([p])


def test_windows_that_share_a_scaler_equal_the_law() -> None:
    scaler: Any = torch.amp.GradScaler("cpu", init_scale=16.0, growth_interval=1)
    ps = [parameter(), parameter()]
    steps = [torch.optim.SGD([p], lr=0.0) for p in ps]
    both = [Accumulator(GivenWeight(), scaler=scaler) for _ in ps]
    seen: list[list[float]] = [[], []]
    for index in range(8):
        for which, every in enumerate((1, 4)):
            p, optimizer, accumulator = ps[which], steps[which], both[which]
            accumulator.backward(
                2 * p, 1 + index, backward=lambda loss: scaler.scale(loss).backward()
            )
            if (index + 1) % every == 0:
                accumulator.finish(optimizer)
                scaler.unscale_(optimizer)
                seen[which].append(float(p.grad))  # type: ignore[arg-type]
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
    assert seen == [[2.0] * 8, [2.0] * 2]


def test_skipped_first_micro_batch_leaves_the_window_open() -> None:
    p = parameter()
    accumulator = Accumulator(GivenWeight(), nonfinite="skip")
    for _ in range(2):
        p.grad = None
        accumulator.backward(p * float("nan"), 5)
        accumulator.backward(p * 2, 3)
        accumulator.backward(p * 4, 1)
        accumulator.finish([p])
        assert float(p.grad) == 2.5  # type: ignore[arg-type]


def test_parameters_that_the_first_micro_batches_do_not_use_equal_the_law() -> None:
    """One of two heads, say; nothing has been zeroed."""
    trunk, head = parameter(), parameter()
    accumulator = Accumulator(GivenWeight())
    for _ in range(2):
        trunk.grad = head.grad = None
        accumulator.backward(trunk * 2, 3)
        accumulator.backward(trunk * head * 4, 1)
        accumulator.finish([head])
        assert float(head.grad) == 1.0  # type: ignore[arg-type]


def test_open_window_keeps_the_scalers_factor() -> None:
    """Half precision would lose gradients without it."""
    p = parameter()
    scaler: Any = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    accumulator = Accumulator(GivenWeight(), scaler=scaler)
    for _ in range(2):
        p.grad = None
        for _ in range(2):
            accumulator.backward(
                p * 3, 5, backward=lambda loss: scaler.scale(loss).backward()
            )
        assert 2.0**8 < float(p.grad) < 2.0**20  # type: ignore[arg-type]
        accumulator.finish([p])
        assert float(p.grad) == 3 * 2.0**16  # type: ignore[arg-type]


def test_weightless_beginning_in_half_precision_equals_the_law() -> None:
    """Nothing is known of the weights to come, and they must not overflow."""
    p = torch.nn.Parameter(torch.ones((), dtype=torch.float16))
    accumulator = Accumulator(GivenWeight())
    for weight in (0, 100_000, 60_000):
        accumulator.backward(p * 3, weight)
    accumulator.finish([p])
    assert float(p.grad) == 3.0  # type: ignore[arg-type]


@pytest.mark.parametrize("trains", [True, False])
def test_parameters_that_are_frozen_or_unfrozen_inside_a_window_are_refused(
    trains: bool,
) -> None:
    """Their gradient would be that of a part of the window."""
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    net[0].requires_grad_(trains)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    accumulator = Accumulator(PerSample(), module=net)
    accumulator.gradients.parameters = list(net.parameters())
    for change in (False, True):  # between two windows, and inside of one
        for number, x in enumerate(torch.randn(4, 2).split(2)):
            if number and change:
                net[0].requires_grad_(not trains)
            accumulator.backward(net(x).square().mean(), x)
        if change:
            with pytest.raises(TrainkitError, match="requires_grad: it has changed"):
                accumulator.finish(optimizer)
        else:
            accumulator.finish(optimizer)
            optimizer.zero_grad()
