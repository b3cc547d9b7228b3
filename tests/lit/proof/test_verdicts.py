"""Modules with a known answer: what the proof says at the start of a run, and what
`check` says, with the cause and the line to paste."""

from __future__ import annotations

import re
import warnings
from typing import Any

import pytest
import torch
from torch import nn

import trainkit
from tests.helpers import quiet_lightning
from tests.lit.proof import wrongs, zoo
from tests.lit.proof.starting import (
    ALARM,
    CLASSES,
    SPLIT,
    fit,
    images,
    images_by_class,
    padded_to_14,
    said,
    tokens,
)
from tests.lit.proof.zoo import Attending, Images, Noisy, Positioned, Tokens, TwoTerms
from trainkit import (
    AccumulationMixin,
    MicroBatching,
    PerSample,
    PerToken,
    TrainkitError,
    Uniform,
)

ROUNDING = 1e-12
IMAGES, BATCH_NORM = (lambda: Images(zoo.classified), lambda: Images(
    zoo.classified, nn.BatchNorm2d
))  # fmt: skip
INSIDE = MicroBatching(inside="net", size=4)
TERMS = {"tokens": PerToken(), "rows": PerSample()}
MASKED, TOTAL = PerToken(mask="attention_mask"), PerToken(loss_reduction="total")

EXACT: dict[str, tuple[Any, ...]] = {
    "tokens": (Tokens, tokens, PerToken()),
    "in few rows": (Tokens, lambda: tokens(2), PerToken()),
    "split": (Tokens, tokens, PerToken(), SPLIT),
    "split by tokens": (Tokens, tokens, PerToken(), MicroBatching(tokens=40)),
    "shifted": (lambda: Tokens(zoo.shifted), tokens, PerToken(shift=True)),
    "masked": (lambda: Tokens(zoo.masked), tokens, MASKED),
    "rows": (lambda: Tokens(zoo.row_mean), tokens, PerSample()),
    "a total": (lambda: Tokens(zoo.token_sum), tokens, TOTAL),
    "a sum": (lambda: Tokens(zoo.token_sum), tokens, PerToken(loss_reduction="sum")),
    "classes": (lambda: Tokens(zoo.class_weighted), tokens, CLASSES),
    "dropout and noise": (Noisy, tokens, PerToken()),
    "dropout and noise, split": (Noisy, tokens, PerToken(), SPLIT),
    "own generator": (lambda: wrongs.Dropping(by_row=True), tokens, PerToken()),
    "own generator, split": (lambda: wrongs.Dropping(by_row=True), tokens,
     PerToken(), SPLIT),
    "attention": (lambda: Attending(has_mask=True), tokens, PerToken()),
    "not trimmed": (lambda: Attending(has_mask=False), tokens, PerToken(), SPLIT),
    "positions": (Positioned, tokens, PerToken()),
    "one width": (Positioned, lambda: tokens(collate=padded_to_14), PerToken()),
    "images": (IMAGES, images, PerSample()),
    "alike": (IMAGES, lambda: images(15), Uniform()),
    "one class": (IMAGES, images_by_class, PerSample()),
    "weights of rows": (lambda: Images(zoo.sample_weighted), images,
     PerSample(mask=2)),
    "one length": (Tokens, lambda: tokens(8, rows=wrongs.all_labels()), PerToken()),
    "one length in all": (wrongs.Bidirectional, lambda: tokens(4,
     rows=wrongs.all_labels()[:6] * 4), PerToken()),
    "one row": (Tokens, lambda: tokens(1), PerToken()),
    "one image": (IMAGES, lambda: images(1), PerSample()),
    "random collate": (Tokens, lambda: tokens(collate=wrongs.masked_at_random),
     PerToken()),
    "terms": (TwoTerms, tokens, TERMS, SPLIT),
    "linear hooks": (wrongs.Scales, tokens, PerToken()),
    "the loader's size": (wrongs.OverLoaderSize, lambda: images(15), PerSample()),
    "noise by row": (lambda: wrongs.Scaling(by_row=True), images, PerSample()),
    "by hand": (wrongs.ByHand, images),
    "said": (wrongs.Saying, tokens),
    "inner cut": (lambda: Images(zoo.nt_xent), images, None, INSIDE),
    "found inner cut": (lambda: Images(zoo.nt_xent), images, None,
     MicroBatching(inside="auto", size=4)),
}  # fmt: skip


def checked(module: Any, data: Any, strategy: Any = None, cut: Any = None) -> Any:
    """With a few rows, as a run would."""
    with quiet_lightning():
        how = {"strategy": strategy, "micro_batches": cut, "rows": 10}
        return trainkit.check(module, data, **how)


@pytest.mark.parametrize("name", EXACT)
def test_what_is_exact_is_called_exact_and_required(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The control: the wrong ones below."""
    module, data, *how = EXACT[name]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "MicroBatching: the model sees its padding")
        fit(module(), data(), *how, proof="require")
    found = re.match(r"exact on \d of your rows: off by (\S+) in f", said(capsys))
    assert found is not None
    assert float(found[1]) < 1e-6
    report = checked(module(), data(), *how)
    report.assert_exact()
    assert report.deviation < ROUNDING
    assert report.causes == ()
    assert report.precision == "float64"


# The kind of the cause, what is said, and a line to paste.
OFF: dict[str, tuple[Any, ...]] = {
    "another count": (Tokens, tokens, PerSample(), None,
     "denominator", "PerToken() counts", "= PerToken()"),
    "another count, split": (Tokens, tokens, PerSample(), SPLIT,
     "denominator", "PerToken() counts", "= PerToken()"),
    "alike": (Tokens, tokens, Uniform(), None,
     "denominator", "PerToken() counts", "= PerToken()"),
    "no shift": (lambda: Tokens(zoo.shifted), tokens, PerToken(), None,
     "denominator", "PerToken(shift=True) counts", "= PerToken(shift=True)"),
    "no mask": (lambda: Tokens(zoo.masked), tokens, PerToken(), None,
     "denominator", "attention_mask", "= PerToken(mask='attention_mask')"),
    "rows": (lambda: Tokens(zoo.row_mean), tokens, PerToken(), None,
     "denominator", "PerSample() counts", "= PerSample()"),
    "a sum": (lambda: Tokens(zoo.token_sum), tokens, PerToken(), None,
     "denominator", "sum over rows", 'loss_reduction="total"'),
    "no classes": (wrongs.ClassWeighted, images, PerSample(), None,
     "denominator", "PerClassWeight", "weight=[1.0, 2.0, 3.0, 4.0, 5.0], labels=1"),
    "classes of tokens": (lambda: Tokens(zoo.class_weighted), tokens, PerToken(), None,
     "denominator", "PerClassWeight", "13.0], labels='labels'"),
    "one class": (wrongs.ClassWeighted, images_by_class, PerSample(), None,
     "denominator", "PerClassWeight", "weight=[1.0, 2.0"),
    "weights of rows": (lambda: Images(zoo.sample_weighted), images, PerSample(), None,
     "denominator", "mask=2", "= PerSample(mask=2)"),
    "unlike sizes": (IMAGES, images, Uniform(), None,
     "denominator", "PerSample() counts", "= PerSample()"),
    "BatchNorm": (BATCH_NORM, images, PerSample(), None,
     "rows", "BatchNorm2d normalises", "BatchNormGuard"),
    "BatchNorm, split": (BATCH_NORM, images, PerSample(), SPLIT,
     "rows", "(net.1)", "BatchNormGuard"),
    "BatchNorm of tokens": (zoo.NormalisedTokens, tokens, PerToken(), None,
     "rows", "(norm)", "BatchNormGuard"),
    "Dice": (lambda: Images(zoo.dice), images, PerSample(), None,
     "loss", "looks across", 'inside="auto"'),
    "NT-Xent": (lambda: Images(zoo.nt_xent), images, PerSample(), None,
     "loss", "looks across", 'inside="auto"'),
    "VICReg": (lambda: Images(zoo.vicreg), images, PerSample(), None,
     "loss", "looks across", 'inside="auto"'),
    "a balance": (lambda: Tokens(zoo.balanced), tokens, PerToken(), None,
     "loss", "looks across", 'inside="auto"'),
    "a focal loss": (lambda: Tokens(zoo.focal_over_batch), tokens, PerToken(), None,
     "loss", "looks across", 'inside="auto"'),
    "two terms": (lambda: Tokens(zoo.two_means), tokens, PerToken(), None,
     "loss", "across", "terms by name"),
    "a root": (lambda: Tokens(zoo.root), tokens, PerToken(), None,
     "loss", "square root", "return the mean itself"),
    "own division": (wrongs.OwnDivision, tokens, PerToken(), None,
     "denominator", "accumulate_grad", "return the mean loss"),
    "over batches": (wrongs.OverBatches, tokens, PerToken(), None,
     "denominator", "num_training", "return the mean loss"),
    "by index": (wrongs.ByIndex, tokens, PerToken(), None,
     "denominator", "batch_idx", "return the mean loss"),
    "a second pass": (wrongs.SecondPass, tokens, PerToken(), None,
     "order", "backward of", "on_before_optimizer_step"),
    "backward in step": (wrongs.BackwardInStep, tokens, PerToken(), None,
     "order", ".backward", "the sum of all losses"),
    "early clipping": (wrongs.ClipsEarly, tokens, PerToken(), None,
     "order", "on_after_back", "gradient_clip_val"),
    "hooks": (wrongs.Clamps, tokens, PerToken(), None,
     "order", "hook of embed.weight", "on_before_optimizer_step"),
    "own step": (wrongs.DividesInStep, tokens, PerToken(), None,
     "order", "optimizer_step", ""),
    "set before": (wrongs.SetsBefore, tokens, PerToken(), None, "loss", "across", ""),
    "transfer": (wrongs.Centring, images, PerSample(), None,
     "rows", "on_after_batch_transfer", 'inside="auto"'),
    "forward hook": (wrongs.CentringHook, tokens, PerToken(), None,
     "rows", "body", 'inside="auto"'),
    "padding": (wrongs.Bidirectional, tokens, PerToken(), None,
     "padding", "(lstm)", "mask padding"),
    "padding of attention": (lambda: Attending(has_mask=False), tokens, PerToken(),
     None, "padding", "(layer.self_attn)", "mask padding"),
    "padding that is pooled": (zoo.Pooling, tokens, PerSample(), None,
     "padding", "(head)", "mask padding"),
    "padding of floats": (wrongs.Speech, lambda: tokens(collate=wrongs.spoken),
     PerSample(), None, "padding", "padded to", "mask padding"),
    "left padding": (Positioned, lambda: tokens(collate=zoo.padded_left), PerToken(),
     None, "padding", "(body", "mask padding"),
    "one length, another count": (Tokens, lambda: tokens(4, rows=wrongs.all_labels()),
     PerSample(), None, "denominator", "PerToken() counts", "= PerToken()"),
    "one length, padding seen": (wrongs.Bidirectional, lambda: tokens(4,
     rows=wrongs.one_length(zoo.sequences())), PerToken(), None,
     "padding", "padded to", "mask padding"),
    "one length, left padding": (Positioned, lambda: tokens(4,
     rows=wrongs.one_length(zoo.sequences()), collate=zoo.padded_left), PerToken(),
     None, "padding", "padded to", "mask padding"),
    "a target": (wrongs.Bootstrap, images, PerSample(), None,
     "state", "on_train_batch_end", "on_before_optimizer_step"),
    "a copy": (zoo.WithMomentumCopy, tokens, MASKED, None,
     "state", "(target.weight)", "on_before_optimizer_step"),
    "a centre": (zoo.WithCentre, tokens, PerToken(), None,
     "state", "(centre)", "on_before_optimizer_step"),
    "by hand": (lambda: wrongs.ByHandUniform(zoo.sample_weighted), images, None, None,
     "denominator", "mask=2", "= PerSample(mask=2)"),
    "said": (wrongs.SayingRows, tokens, None, None,
     "denominator", "what self.weigh gets", "= PerToken()"),
}  # fmt: skip


@pytest.mark.parametrize("name", OFF)
def test_what_is_not_exact_is_explained_and_refused_before_anything_moves(
    name: str,
) -> None:
    module, data, strategy, cut, kind, text, line = OFF[name]
    made = module()
    if isinstance(made, AccumulationMixin):
        made.accumulation_proof = "require"
    before = [each.detach().clone() for each in made.parameters()]
    with pytest.raises(TrainkitError, match=f'proof="require": .*{ALARM}') as caught:
        fit(made, data(), strategy, cut, proof="require")
    assert text in str(caught.value)
    pairs = zip(before, made.parameters(), strict=True)
    assert all(torch.equal(*pair) for pair in pairs)
    report = checked(module(), data(), strategy, cut)
    assert [each.kind for each in report.causes] == [kind]
    assert text in report.causes[0].with_place
    assert line in "\n".join(report.causes[0].remedy)
    assert report.deviation > 1e-8
    with pytest.raises(AssertionError, match="not the big batch"):
        report.assert_exact()


def test_what_is_not_exact_is_said_and_warned_of_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    module, data, strategy, cut, _, cause, _ = OFF["another count"]
    with pytest.warns(UserWarning, match=ALARM) as caught:
        fit(module(), data(), strategy, cut)
    (text,) = (str(w.message) for w in caught if ALARM in str(w.message))
    assert cause in text
    assert f"proof: {said(capsys)}" == text
