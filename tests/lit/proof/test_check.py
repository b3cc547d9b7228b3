"""`check` on modules with a known answer: verdict, place, cause and line."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

import trainkit
from tests.helpers import quiet_lightning
from tests.lit.fronts import ragged
from tests.lit.proof import wrongs, zoo
from tests.lit.proof.starting import plain_trainer
from tests.lit.proof.zoo import (
    Attending,
    ByHand,
    Images,
    Noisy,
    NormalisedTokens,
    Tokens,
    image_loader,
    token_loader,
)
from tests.zoo import OldPlain
from trainkit import (
    MicroBatching,
    PerClassWeight,
    PerSample,
    PerToken,
    Report,
    TrainkitError,
)

ROUNDING = 1e-12
TERMS = {"tokens": PerToken(), "rows": PerSample()}
SPLIT = MicroBatching(size=2)
MASKED = PerToken(mask="attention_mask")
TOTAL = PerToken(loss_reduction="total")
CLASSES = PerClassWeight(weight=[float(n) for n in range(1, zoo.VOCABULARY + 1)])


def check(module: Any, data: Any, *args: Any, **options: Any) -> Report:
    with quiet_lightning():
        return trainkit.check(module, data, *args, **options)


def check_quickly(module: Any, data: Any, *args: Any, **options: Any) -> Report:
    """With fewer rows, which tell fewer denominators apart."""
    return check(module, data, *args, **{"rows": 10, **options})


@pytest.mark.parametrize(
    ("module", "strategy", "place"),
    [
        (lambda: Images(zoo.mixup), PerSample(), "randperm at proof/zoo.py"),
        (lambda: wrongs.Dropping(by_row=False), PerToken(), "rand at proof/wrongs.py"),
    ],
)
def test_what_rows_share_is_a_draw(module: Any, strategy: Any, place: str) -> None:
    """The control: noise by row is exact."""
    made = module()
    data = image_loader() if isinstance(made, Images) else token_loader()
    report = check_quickly(made, data, strategy=strategy)
    assert not report.exact
    (cause,) = report.causes
    assert cause.kind == "randomness"
    assert cause.place.startswith(place)
    assert "draw in the data set" in cause.remedy[0]
    with pytest.raises(AssertionError, match="cannot say"):
        report.assert_exact()


@pytest.mark.parametrize("kind", [ByHand, Tokens])
def test_what_knows_nothing_of_trainkit_is_measured(kind: Any) -> None:
    """Two optimizers by hand, and plain accumulation."""
    if kind is ByHand:
        assert check_quickly(kind(), image_loader(), strategy=PerSample()).exact
    else:
        (cause,) = check_quickly(kind(), token_loader()).causes
        assert cause.remedy[0] == "accumulation = PerToken()"


def test_a_count_of_the_whole_batch_is_named() -> None:
    """Each part gets the number of the whole, so its loss is a share, as of a sum."""
    data = token_loader(zoo.counted)
    assert check(Tokens(zoo.by_host_count), data, strategy=PerToken()).exact
    report = check(
        Tokens(zoo.by_host_count), data, strategy=PerToken(), micro_batches=SPLIT
    )
    (cause,) = report.causes
    assert (cause.kind, cause.place) == ("host", "num_targets")


def test_padding_that_is_seen_is_not_trimmed_in_split_windows() -> None:
    """The control: loader batches of their own widths, above."""
    how: dict[str, Any] = {"strategy": PerToken(), "micro_batches": SPLIT}
    report = check(Attending(has_mask=False), token_loader(), **how)
    assert report.exact
    assert "micro-batches keep the loader batch's width" in report.notes[0]
    how["strategy"] = PerSample()
    report = check(Attending(has_mask=False), token_loader(), **how)
    assert [cause.kind for cause in report.causes] == ["denominator"]


@pytest.mark.parametrize(
    ("module", "kind"),
    [
        (wrongs.OwnDivision, "denominator"),
        (lambda: Attending(has_mask=False), "padding"),
    ],
)
def test_a_trainer_that_accumulates_split_windows_is_followed(
    module: Any, kind: str
) -> None:
    """The controls: steps of one loader batch, and a module to which both are alike."""
    how: dict[str, Any] = {"strategy": PerToken(), "micro_batches": SPLIT}
    two = {"trainer": plain_trainer(accumulate_grad_batches=2)}
    assert check(module(), token_loader(), **how).exact
    assert check(Tokens(), token_loader(), **how, **two).exact
    report = check(module(), token_loader(), **how, **two)
    assert not report.exact
    assert [cause.kind for cause in report.causes] == [kind]


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
    assert "left out: dropout" in str(report)


def test_module_of_the_older_package_is_checked() -> None:
    """Its Trainer is that package's, which takes no module of another."""
    module, data = OldPlain(), ragged([4, 4, 4])
    assert check_quickly(module, data, strategy=PerToken()).exact
    assert check_quickly(module, data, strategy=PerSample()).is_off


def test_a_number_is_no_cut() -> None:
    with pytest.raises(TrainkitError, match="micro_batches: must be a MicroBatching, "):
        trainkit.check(Tokens(), token_loader(), micro_batches=2)
