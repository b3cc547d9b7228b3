"""Half precision equals the big batch up to its rounding."""

from __future__ import annotations

import pytest
import torch

from tests.helpers import NAIVE, TOLERANCE, deviation, trainer
from tests.lit.fronts import WINDOW, Mixed, big_batch, micro_batches, windows_of
from tests.lit.windows.half import SEQUENCES, START, Heavy, fit, half, precise
from trainkit import AccumulationCallback, PerToken

DTYPE = {
    "bf16-mixed": torch.bfloat16,
    "bf16-true": torch.bfloat16,
    "16-mixed": torch.float16,
    "16-true": torch.float16,
}


# AdamW's eps of 1e-8 is 0 in float16, with or without trainkit.
@pytest.mark.parametrize(
    ("precision", "optimizer"),
    [
        ("bf16-mixed", "sgd"),
        ("bf16-mixed", "adamw"),
        ("bf16-true", "momentum"),
        ("16-mixed", "sgd"),
        ("16-mixed", "adamw"),
        ("16-true", "momentum"),
    ],
)
def test_half_precision_equals_big_batch(precision: str, optimizer: str) -> None:
    """Up to the rounding of its dtype, the same for weights of 1 and of 5,000."""
    reference = half(optimizer=optimizer)
    fit(reference, precision, window=1)
    naive = half(optimizer=optimizer)
    fit(naive, precision)
    tolerance = TOLERANCE[DTYPE[precision]]
    if optimizer == "adamw":
        tolerance *= 3  # it takes the sign of what rounding leaves of small gradients
    for strategy in (PerToken(), Heavy()):
        module = half(optimizer=optimizer)
        fit(module, precision, AccumulationCallback(strategy))
        off = deviation(module, reference, START)
        assert off <= tolerance
        assert deviation(naive, reference, START) > max(NAIVE, 3 * off)


@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed"])
def test_mixed_precision_equals_float32_big_batch(precision: str) -> None:
    expected = big_batch(SEQUENCES, dtype=torch.float32)
    module = half()
    fit(module, precision, AccumulationCallback(Heavy()))
    tolerance = TOLERANCE[DTYPE[precision]]
    assert deviation(module, expected.end, START) <= tolerance


@pytest.mark.parametrize("clip", ["norm", "value"])
def test_clipping_comes_after_unscaling(clip: str) -> None:
    """pytorch-lightning#9599, #9694, #18089: a clip at 0.1 is one at 0.1, not at
    0.1 / 65536."""
    options = {"gradient_clip_val": 0.1, "gradient_clip_algorithm": clip}
    modules = [half(Mixed), half(Mixed)]
    for module, precision in zip(modules, ["16-mixed", "32-true"], strict=True):
        fitted = trainer(WINDOW, **options, **precise(precision))
        fitted.fit(module, micro_batches(SEQUENCES))
    mixed, full = modules
    assert deviation(mixed, full, START) <= TOLERANCE[torch.float16]


def test_window_loss_under_a_scaler_is_the_loss() -> None:
    """Without the scaler's factor, undivided."""
    module = half(Mixed)
    fitted = trainer(WINDOW, max_epochs=1, max_steps=1, **precise("16-mixed"))
    fitted.fit(module, micro_batches(SEQUENCES))
    window = windows_of(fitted).last_window
    assert window is not None
    expected = big_batch(SEQUENCES, epochs=1, dtype=torch.float32).losses[0]
    assert float(window.loss) == pytest.approx(expected, rel=1e-2)
