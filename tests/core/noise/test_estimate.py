"""The noise scale: of simulated windows, whose truth is known, and of a language model,
against all of its sequences' own gradients; read from a run, and what is advised."""

from __future__ import annotations

import json
import math
import sysconfig
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from trainkit import Accumulator, NoiseEstimate, NoiseMoments, PerToken, TrainkitError
from trainkit.core.noise import estimate
from trainkit.core.noise.advice import advice, read_noise_scale
from trainkit.core.noise.estimate import COLUMNS, per_sample
from trainkit.core.plan.scaling import gain

DIMENSIONS = 64
LENGTHS = 2.0 ** torch.arange(7, dtype=torch.float64)


@dataclass(frozen=True)
class Setting:
    """A kind of window, of a quadratic loss drawn sample by sample.

    A sample of n tokens contributes n G plus noise of variance n^1.5, which is between
    independent tokens (n) and tokens that all say the same (n^2).

    Attributes:
        micro_batches: in a window, on all ranks.
        samples: in a micro-batch.
        ratio: the noise scale over the window.
        is_ragged: whether samples have 1, 2, 4 ... or 64 tokens; else one.
    """

    micro_batches: int
    samples: int
    ratio: float
    is_ragged: bool

    @property
    def noise_scale(self) -> float:
        return self.ratio * self.micro_batches * self.samples

    def windows(self, number: int, seed: int) -> Tensor:
        """The sums of so many windows."""
        generator = torch.Generator().manual_seed(seed)
        shape = number, self.micro_batches, self.samples
        lengths = torch.ones(shape, dtype=torch.float64)
        mean = noise = 1.0
        if self.is_ragged:
            lengths = LENGTHS[torch.randint(len(LENGTHS), shape, generator=generator)]
            mean, noise = float(LENGTHS.mean()), float((LENGTHS**1.5).mean())
        # T = noise_scale * mean^2 * |G|^2, with |G| = 1
        variance = self.noise_scale * mean**2 / noise / DIMENSIONS
        weights = lengths.sum(-1)
        spread = ((lengths**1.5).sum(-1) * variance).sqrt()
        contributions = spread[..., None] * torch.randn(
            *shape[:2], DIMENSIONS, generator=generator, dtype=torch.float64
        )
        contributions[..., 0] += weights
        columns = [
            contributions.sum(1).square().sum(-1),
            contributions.square().sum((-1, -2)),
            weights.sum(-1).square(),
            weights.square().sum(-1),
            weights.sum(-1),
            torch.full((number,), shape[1] * shape[2]).double(),
            torch.ones(number).double(),
        ]
        return torch.stack(columns, -1)


def as_if_equal(windows: Tensor, micro_batches: int) -> Tensor:
    """The sums by the formula for equal micro-batches, as in fairscale and AdaptDL."""
    equal = windows.clone()
    equal[:, 3] = windows[:, 2] / micro_batches
    return equal


def estimate_of(windows: Tensor) -> Any:
    """A `NoiseEstimate`, or None."""
    return NoiseEstimate.of(windows.tolist())


EQUAL = [Setting(2, 4, 0.25, False), Setting(8, 4, 8, False)]
RAGGED = [Setting(2, 1, 1, True), Setting(4, 1, 0.25, True)]
LARGE = [Setting(16, 1, 8, True)]
BIAS, COVERED = 0.03, (0.85, 0.95)


@pytest.mark.parametrize("setting", [*EQUAL, *RAGGED, *LARGE], ids=str)
def test_it_is_unbiased_and_its_interval_covers_the_truth(setting: Setting) -> None:
    found = [estimate_of(setting.windows(60, seed)) for seed in range(400)]
    truth = setting.noise_scale
    assert abs(fmean(truth / each.samples for each in found) - 1) < BIAS
    covered = sum(each.low <= truth <= each.high for each in found) / 400
    assert COVERED[0] <= covered <= COVERED[1]


@pytest.mark.parametrize("setting", RAGGED, ids=str)
def test_the_formula_for_equal_micro_batches_is_far_off(setting: Setting) -> None:
    all_windows = (setting.windows(60, seed) for seed in range(100))
    equal = [as_if_equal(each, setting.micro_batches) for each in all_windows]
    found = [e for e in map(estimate_of, equal) if e is not None]
    assert abs(fmean(setting.noise_scale / e.samples for e in found) - 1) > 0.2


def test_of_windows_too_few_or_of_one_micro_batch_there_is_none() -> None:
    setting = Setting(4, 4, 1, False)
    assert estimate_of(setting.windows(4, 0)) is None
    assert estimate_of(setting.windows(5, 0)) is not None
    assert estimate_of(Setting(1, 4, 1, False).windows(40, 0)) is None


@pytest.mark.parametrize("zeros", [len(COLUMNS), COLUMNS.index("samples")])
def test_a_window_not_seen_or_without_weight_does_not_count(zeros: int) -> None:
    windows = Setting(4, 4, 1, False).windows(40, 0)
    some = windows.clone()
    some[::2, :zeros] = 0
    found, of_half = estimate_of(some), estimate_of(windows[1::2])
    assert found.num_windows == 20
    assert found.samples == pytest.approx(of_half.samples)


def test_long_gradients_at_the_beginning_do_not_outweigh_later_ones() -> None:
    """As a training begins: 40 windows whose gradients are 10 times as long, and whose
    noise scale is a 16th of the later one."""
    early, late = Setting(8, 2, 0.125, False), Setting(8, 2, 2, False)
    begin = early.windows(40, 1)
    begin[:, :2] *= 100
    windows = torch.cat([begin, late.windows(120, 2)])
    found, later = estimate_of(windows), estimate_of(windows[40:])
    assert found.samples == pytest.approx(later.samples, rel=0.5)
    with mock.patch.object(estimate, "_in_units", lambda windows: windows):
        plain = estimate_of(windows)
    assert plain.samples < 0.2 * later.samples  # the control


def test_without_an_upper_end_it_is_at_least_the_lower_one() -> None:
    noisy = [0.0, 100.0, 16.0, 4.0, 4.0, 4.0, 1.0]
    blocks = [[90.0 + 15 * (i % 3), *noisy[1:]] for i in range(12)]
    found = estimate_of(torch.tensor(blocks, dtype=torch.float64))
    assert 0 < found.low < found.samples
    assert found.high == math.inf
    assert not found.is_bounded
    assert NoiseEstimate.of_facts(found.facts()) == found


def test_without_any_noise_it_is_zero() -> None:
    exact = [16.0, 4.0, 16.0, 4.0, 4.0, 4.0, 1.0]
    found = estimate_of(torch.tensor([exact] * 10, dtype=torch.float64))
    assert (found.low, found.samples, found.high) == (0, 0, 0)
    assert len(COLUMNS) == len(exact)


def test_rescaled_gradients_and_weights_change_nothing() -> None:
    windows = Setting(4, 2, 2, True).windows(50, 3)
    scaled = windows.clone()
    scaled[:, :2] *= 1e-18
    scaled[:, 2:4] *= 100
    scaled[:, 4] *= 10
    one, other = estimate_of(windows), estimate_of(scaled)
    assert one.samples == pytest.approx(other.samples, rel=1e-9)
    assert one.high == pytest.approx(other.high, rel=1e-9)
    assert other.weight == pytest.approx(10 * one.weight)


def test_what_a_window_gains() -> None:
    assert per_sample(210, 512) == pytest.approx(210 / 722)
    assert per_sample(math.inf, 64) == 1
    assert per_sample(0, 64) == 0
    assert gain(1e9, 16, 64) == pytest.approx(4, rel=1e-6)  # far below it: linear
    assert gain(40, 16, 1e9) == pytest.approx(gain(40, 16, 1e12), rel=1e-6)  # level
    assert gain(40, 16, 64) < 4 * 0.6


# ---- a language model ----------------------------------------------------------------

NUM_SEQUENCES, LONGEST, WIDTH, IGNORED = 1000, 24, 16, -100
CUT = [1, 9, 2, 8, 1, 7, 1, 3]


class Model(nn.Module):
    """It predicts each byte from the average of those so far."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(128, WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 128)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        so_far = x.cumsum(-2) / torch.arange(1, ids.shape[-1] + 1)[:, None]
        return self.head(torch.tanh(x + self.mix(torch.tanh(so_far))))


def sequences() -> tuple[Tensor, Tensor]:
    """Lines of the standard library: their bytes, and the next ones as labels."""
    source = Path(sysconfig.get_paths()["stdlib"], "inspect.py").read_text()
    lines = [line for line in source.splitlines() if len(line) > 4][:NUM_SEQUENCES]
    ids = torch.zeros(len(lines), LONGEST, dtype=torch.long)
    labels = torch.full((len(lines), LONGEST), IGNORED)
    for row, line in enumerate(lines):
        found = torch.tensor([min(ord(c), 127) for c in line[: LONGEST + 1]])
        ids[row, : len(found) - 1] = found[:-1]
        labels[row, : len(found) - 1] = found[1:]
    return ids, labels


def exact(model: nn.Module, ids: Tensor, labels: Tensor) -> float:
    """The noise scale, from the gradient of each sequence's sum of losses."""
    values = {name: p.detach() for name, p in model.named_parameters()}

    def one(values: dict[str, Tensor], row: Tensor, of: Tensor) -> Tensor:
        logits = functional_call(model, values, (row,))
        return F.cross_entropy(logits, of, reduction="sum")

    found = vmap(grad(one), (None, 0, 0))(values, ids, labels)
    u = torch.cat([g.flatten(1) for g in found.values()], 1).double()
    n = (labels != IGNORED).sum(1).double()
    square_of_sum, squares = u.sum(0).square().sum(), u.square().sum()
    # Without the pairs of a sequence with itself, which bias |G|^2.
    gradient = (square_of_sum - squares) / (n.sum() ** 2 - n.square().sum())
    noise = (squares - n.square().sum() * gradient) / len(n)
    return float(noise / (n.mean() ** 2 * gradient))


def test_within_a_fifth_after_a_hundred_windows() -> None:
    torch.manual_seed(0)
    model, (ids, labels) = Model(), sequences()
    truth = exact(model, ids, labels)
    accumulator = Accumulator(PerToken(), module=model)
    moments = NoiseMoments(accumulator, model.parameters())
    for _ in range(100):
        moments.watch()
        for rows in torch.randint(len(ids), (32,)).split(CUT):
            logits = model(ids[rows]).flatten(0, 1)
            loss = F.cross_entropy(logits, labels[rows].flatten())
            accumulator.backward(loss, {"labels": labels[rows]})
        moments.add(accumulator.finish([*model.parameters()]), samples=32)
        model.zero_grad()
    found: Any = moments.estimate()
    assert abs(found.samples / truth - 1) < 0.2
    assert found.low < truth < found.high
    equal = estimate_of(as_if_equal(moments.table, len(CUT)))
    assert abs(equal.samples / truth - 1) > 0.2  # the control


# ---- read from an earlier run --------------------------------------------------------

ONE = NoiseEstimate(210.0, 160.0, 280.0, 512.0, 1.0, 120)


AT_LEAST = {"noise_scale": {**ONE.facts(), "samples": None, "high": None}}


def folder(path: Path, summary: Any) -> Path:
    text = summary if isinstance(summary, str) else json.dumps(summary)
    (path / "summary.json").write_text(text)
    return path


def test_what_a_run_has_written_is_what_is_read(tmp_path: Path) -> None:
    assert read_noise_scale(folder(tmp_path, {"noise_scale": ONE.facts()})) == ONE
    assert read_noise_scale(str(tmp_path)) == ONE


@pytest.mark.parametrize(
    ("summary", "said"),
    [
        (None, "No such file .*summary.json"),
        *((text, "line 1 column") for text in ("", "{")),
        ("[]", "'list' object has no"),
        ('{"noise_scale": NaN}', "'float' object has no"),
        ({}, r"measured none. Train with callbacks=\[NoiseScale\(\)\]"),
        ({"noise_scale": None, "advice": []}, r"measured none. Train with"),
        ({"noise_scale": {"samples": 1.0}}, "missing"),
        ({"noise_scale": [210]}, "'list' object has no"),
        ({"noise_scale": {**ONE.facts(), "low": -1.0}}, "at least -1"),
        ({"noise_scale": {**ONE.facts(), "samples": "9"}}, "'<=' not supported"),
        (AT_LEAST, r"after 120 windows it knows at least 160\. Train"),
        ({"noise_scale": {**ONE.facts(), "high": None}}, r"knows at least 160\. Tra"),
        ({"noise_scale": {**ONE.facts(), "samples": 0, "low": 0}}, "at least 0"),
    ],
)
def test_a_run_that_does_not_know_it_is_refused(
    summary: Any, said: str, tmp_path: Path
) -> None:
    run = tmp_path if summary is None else folder(tmp_path, summary)
    rule = "the folder of a run that has ended and measured it, with both ends of its"
    with pytest.raises(TrainkitError, match=f"{rule} .* received '{run}': .*{said}"):
        read_noise_scale(run)


# ---- two lines of advice -------------------------------------------------------------


def said(estimate: NoiseEstimate, unit: str = "samples") -> list[str]:
    return [f"{label}: {text}" for label, text in advice(estimate, unit)]


def test_the_lines_are_the_prescribed_ones() -> None:
    assert said(ONE) == [
        "noise scale: 210 samples (160 to 280, 90 %), over the last 120 measured "
        "windows",
        "window of 512: above the noise scale, so a larger one hardly helps: twice as "
        "large takes 15 % fewer steps and 71 % more samples to the same loss, by the "
        "estimate of a simple model",
    ]


@pytest.mark.parametrize(
    ("window", "what"),
    [
        (40.0, "below the noise scale, so a larger one on more devices saves time"),
        (159.0, "below the noise scale"),
        (160.0, "near the noise scale, so keep it"),
        (280.0, "near the noise scale, so keep it"),
        (281.0, "above the noise scale, so a larger one hardly helps"),
    ],
)
def test_the_window_is_judged_by_the_interval(window: float, what: str) -> None:
    estimate = replace(ONE, window=window)
    line = said(estimate)[1]
    assert what in line
    # https://arxiv.org/abs/1812.06162: steps go as 1 + B / W, samples as W + B
    fewer = 1 - (1 + 210 / (2 * window)) / (1 + 210 / window)
    more = (2 * window + 210) / (window + 210) - 1
    assert f"takes {fewer:.0%}".replace("%", " %") in line
    assert f"and {more:.0%}".replace("%", " %") in line


def test_tokens_stand_beside_samples_only_where_weights_are_tokens() -> None:
    heavy = NoiseEstimate(210.0, 160.0, 280.0, 512.0, 100.0, 120)
    first = said(heavy, "tokens")[0]
    assert "210 samples (160 to 280, 90 %), 21,000 tokens (16,000 to 28,000," in first
    assert said(heavy) == said(ONE) == said(ONE, "tokens")  # the controls


def test_without_an_upper_end_it_is_at_least() -> None:
    for samples in (900.0, math.inf):
        estimate = NoiseEstimate(samples, 160.0, math.inf, 512.0, 100.0, 20)
        lines = said(estimate, "tokens")
        begin = "noise scale: at least 160 samples, at least 16,000 tokens, over"
        assert lines[0].startswith(begin)
        assert "near the noise scale, so keep it" in lines[1]  # it may be far above
        assert "takes at least 12 % fewer steps and at most 76 % more" in lines[1]
        assert "inf" not in " ".join(lines)
        assert "900" not in " ".join(lines)


UNITS = st.sampled_from(["tokens", ""])


@given(st.floats(0, 1e9), st.floats(1, 10), st.floats(1, 1e9), UNITS)
def test_nothing_is_called_optimal(
    samples: float, wide: float, window: float, unit: str
) -> None:
    estimate = NoiseEstimate(samples, samples / wide, samples * wide, window, 7.0, 9)
    text = " ".join(said(estimate, unit)).lower()
    assert "optim" not in text
    assert "best" not in text
    assert "nan" not in text
