"""`check` on modules with a known answer: verdict, place, cause and line."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

import trainkit
from tests.helpers import quiet_lightning
from tests.lit.proof import zoo
from tests.lit.proof.zoo import (
    Attending,
    ByHand,
    Images,
    Noisy,
    NormalisedTokens,
    Pooling,
    Positioned,
    Tokens,
    TwoTerms,
    WithCentre,
    WithMomentumCopy,
    image_loader,
    token_loader,
)
from trainkit import (
    MicroBatching,
    PerClassWeight,
    PerSample,
    PerToken,
    Report,
    Uniform,
)

ROUNDING = 1e-12
TERMS = {"tokens": PerToken(), "rows": PerSample()}
SPLIT = MicroBatching(size=2)
MASKED = PerToken(mask="attention_mask")
CLASSES = PerClassWeight(weight=[float(n) for n in range(1, zoo.VOCABULARY + 1)])


def check(module: Any, data: Any, *args: Any, **options: Any) -> Report:
    with quiet_lightning():
        return trainkit.check(module, data, *args, **options)


def check_quickly(module: Any, data: Any, *args: Any, **options: Any) -> Report:
    """With fewer rows, which tell fewer denominators apart."""
    return check(module, data, *args, **{"rows": 10, **options})


@pytest.mark.parametrize(
    ("module", "data", "strategy", "micro_batches"),
    [
        (lambda: Tokens(), token_loader, PerToken(), None),
        (lambda: Tokens(), token_loader, PerToken(), SPLIT),
        (lambda: Tokens(), token_loader, PerToken(), MicroBatching(tokens=30)),
        (lambda: Tokens(zoo.shifted), token_loader, PerToken(shift=True), None),
        (
            lambda: Tokens(zoo.masked),
            token_loader,
            PerToken(mask="attention_mask"),
            None,
        ),
        (lambda: Tokens(zoo.row_mean), token_loader, PerSample(), None),
        (
            lambda: Tokens(zoo.token_sum),
            token_loader,
            PerToken(loss_reduction="total"),
            None,
        ),
        (lambda: Tokens(zoo.class_weighted), token_loader, CLASSES, None),
        (lambda: Noisy(), token_loader, PerToken(), None),
        (lambda: Noisy(), token_loader, PerToken(), SPLIT),
        (lambda: Attending(has_mask=True), token_loader, PerToken(), None),
        (lambda: Positioned(), token_loader, PerToken(), None),
        (lambda: Images(zoo.classified), image_loader, PerSample(), None),
        (lambda: Images(zoo.sample_weighted), image_loader, PerSample(mask=2), None),
        (lambda: ByHand(), image_loader, PerSample(), None),
        (lambda: TwoTerms(), token_loader, TERMS, SPLIT),
    ],
)
def test_what_is_exact_is_called_exact(
    module: Any, data: Any, strategy: Any, micro_batches: Any
) -> None:
    """The control: plain accumulation of the same parts, or its own line below."""
    how = {"strategy": strategy, "micro_batches": micro_batches}
    report = check_quickly(module(), data(), **how)
    report.assert_exact()
    assert report.deviation < ROUNDING
    assert report.causes == ()
    assert report.precision == "float64"


@pytest.mark.parametrize(
    ("module", "data", "strategy", "kind", "place", "line"),
    [
        # the denominator
        (lambda: Tokens(), token_loader, None, "denominator", "", "= PerToken()"),
        (
            lambda: Tokens(),
            token_loader,
            PerSample(),
            "denominator",
            "",
            "= PerToken()",
        ),
        (lambda: Tokens(), token_loader, Uniform(), "denominator", "", "= PerToken()"),
        (
            lambda: Tokens(zoo.shifted),
            token_loader,
            PerToken(),
            "denominator",
            "",
            "= PerToken(shift=True)",
        ),
        (
            lambda: Tokens(zoo.masked),
            token_loader,
            PerToken(),
            "denominator",
            "",
            "= PerToken(mask='attention_mask')",
        ),
        (
            lambda: Tokens(zoo.row_mean),
            token_loader,
            PerToken(),
            "denominator",
            "",
            "= PerSample()",
        ),
        (
            lambda: Images(zoo.sample_weighted),
            image_loader,
            PerSample(),
            "denominator",
            "",
            "= PerSample(mask=2)",
        ),
        (
            lambda: Tokens(zoo.class_weighted),
            token_loader,
            PerToken(),
            "denominator",
            "",
            "= PerClassWeight(weight=self.class_weights, labels='labels')",
        ),
        (
            lambda: Tokens(zoo.token_sum),
            token_loader,
            PerToken(),
            "denominator",
            "",
            'loss_reduction="total"',
        ),
        (
            lambda: Tokens(zoo.root),
            token_loader,
            PerToken(),
            "loss",
            "training_step",
            "return the mean itself",
        ),
        (
            lambda: Tokens(zoo.two_means),
            token_loader,
            PerToken(),
            "denominator",
            "",
            '"one": PerSample(), "other": PerToken()',
        ),
        # rows that see each other
        (
            lambda: NormalisedTokens(),
            token_loader,
            PerToken(),
            "rows",
            "norm",
            "BatchNormGuard",
        ),
        (
            lambda: Images(zoo.classified, nn.BatchNorm2d),
            image_loader,
            PerSample(),
            "rows",
            "net.1",
            "BatchNormGuard",
        ),
        *(
            (
                lambda loss=loss: Images(loss),
                image_loader,
                PerSample(),
                "loss",
                "training_step",
                'inside="auto"',
            )
            for loss in (zoo.dice, zoo.nt_xent, zoo.vicreg)
        ),
        *(
            (
                lambda loss=loss: Tokens(loss),
                token_loader,
                PerToken(),
                "loss",
                "training_step",
                'inside="auto"',
            )
            for loss in (zoo.balanced, zoo.focal_over_batch)
        ),
        (
            lambda: Images(zoo.mixup),
            image_loader,
            PerSample(),
            "randomness",
            "randperm at proof/zoo.py",
            "draw in the data set",
        ),
        # padding
        (
            lambda: Attending(has_mask=False),
            token_loader,
            PerToken(),
            "padding",
            "layer.self_attn",
            "mask padding",
        ),
        (
            lambda: Positioned(),
            lambda: token_loader(zoo.padded_left),
            PerToken(),
            "padding",
            "body",
            "mask padding",
        ),
        (
            lambda: Pooling(),
            token_loader,
            PerSample(),
            "padding",
            "head",
            "mask padding",
        ),
        # state
        (
            lambda: WithMomentumCopy(),
            token_loader,
            PerToken(mask="attention_mask"),
            "state",
            "target.weight",
            "on_before_optimizer_step",
        ),
        (
            lambda: WithCentre(),
            token_loader,
            PerToken(),
            "state",
            "centre",
            "on_before_optimizer_step",
        ),
    ],
)
def test_what_is_not_exact_is_explained(
    module: Any, data: Any, strategy: Any, kind: str, place: str, line: str
) -> None:
    report = check_quickly(module(), data(), strategy=strategy)
    assert not report.exact
    (cause,) = report.causes
    assert cause.kind == kind
    assert cause.place.startswith(place)
    assert line in "\n".join(cause.remedy)
    if kind != "state":
        assert report.deviation > 1e-3
        assert report.parameters[0][1] > 1e-3
    with pytest.raises(AssertionError, match="not the big batch"):
        report.assert_exact()


def test_a_count_of_the_whole_batch_is_named() -> None:
    """Each part gets the number of the whole, so its loss is a share, as of a sum."""
    data = token_loader(zoo.counted)
    assert check(Tokens(zoo.by_host_count), data, strategy=PerToken()).exact
    report = check(
        Tokens(zoo.by_host_count), data, strategy=PerToken(), micro_batches=SPLIT
    )
    (cause,) = report.causes
    assert (cause.kind, cause.place) == ("host", "num_targets")


def test_several_causes_are_all_found() -> None:
    module = Images(zoo.mixup, nn.BatchNorm2d)
    report = check(module, image_loader(), strategy=PerSample())
    assert [cause.kind for cause in report.causes] == ["randomness", "rows"]
    report = check(NormalisedTokens(), token_loader(), strategy=PerSample())
    assert [cause.kind for cause in report.causes] == [
        "rows",
        "denominator",
    ]


def test_dropout_and_noise_are_told_apart_from_causes() -> None:
    report = check(Noisy(), token_loader(), strategy=PerSample())
    (cause,) = report.causes
    assert cause.remedy == ("accumulation = PerToken()",)
    assert any("left out: dropout" in note for note in report.notes)
