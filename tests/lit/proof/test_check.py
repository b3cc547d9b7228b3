"""`check` on modules with a known answer: verdict, place, cause and line."""

from __future__ import annotations

import os
import random
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from torch import nn
from torch.utils.data import DataLoader

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
    AccumulationCallback,
    MicroBatching,
    PerClassWeight,
    PerSample,
    PerToken,
    Report,
    TrainkitError,
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
    report = check(module(), data(), strategy=strategy, micro_batches=micro_batches)
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
            "denominator",
            "",
            "return the mean itself",
        ),
        (
            lambda: Tokens(zoo.two_means),
            token_loader,
            PerToken(),
            "two denominators",
            "",
            '"one": PerSample(), "other": PerToken()',
        ),
        # rows that see each other
        (
            lambda: NormalisedTokens(),
            token_loader,
            PerToken(),
            "rows see each other",
            "norm",
            "BatchNormGuard",
        ),
        (
            lambda: Images(zoo.classified, nn.BatchNorm2d),
            image_loader,
            PerSample(),
            "rows see each other",
            "net.1",
            "BatchNormGuard",
        ),
        *(
            (
                lambda loss=loss: Images(loss),
                image_loader,
                PerSample(),
                "rows see each other",
                place,
                "in whole batches",
            )
            for loss, place in (
                (zoo.dice, "after net"),
                (zoo.nt_xent, "after net"),
                (zoo.vicreg, "after head"),
            )
        ),
        *(
            (
                lambda loss=loss: Tokens(loss),
                token_loader,
                PerToken(),
                "rows see each other",
                "after head",
                "in whole batches",
            )
            for loss in (zoo.balanced, zoo.focal_over_batch)
        ),
        (
            lambda: Images(zoo.mixup),
            image_loader,
            PerSample(),
            "sampling",
            "randperm at proof/zoo.py",
            "draw in the data set",
        ),
        # padding
        (
            lambda: Attending(has_mask=False),
            token_loader,
            PerToken(),
            "padding is seen",
            "layer.self_attn",
            "mask padding",
        ),
        (
            lambda: Positioned(),
            lambda: token_loader(zoo.padded_left),
            PerToken(),
            "padding is seen",
            "body",
            "mask padding",
        ),
        (
            lambda: Pooling(),
            token_loader,
            PerSample(),
            "padding is seen",
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
    report = check(module(), data(), strategy=strategy)
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
    assert (cause.kind, cause.place) == ("data on the host", "num_targets")


def test_several_causes_are_all_found() -> None:
    module = Images(zoo.mixup, nn.BatchNorm2d)
    report = check(module, image_loader(), strategy=PerSample())
    assert [cause.kind for cause in report.causes] == [
        "rows see each other",
        "sampling",
    ]
    report = check(NormalisedTokens(), token_loader(), strategy=PerSample())
    assert [cause.kind for cause in report.causes] == [
        "rows see each other",
        "denominator",
    ]


def test_dropout_and_noise_are_told_apart_from_causes() -> None:
    report = check(Noisy(), token_loader(), strategy=PerSample())
    (cause,) = report.causes
    assert cause.remedy == ("accumulation = PerToken()",)
    assert any("dropout was left out" in note for note in report.notes)
    assert any("drawn for all rows at once" in note for note in report.notes)


def unrepeatable(module: Any, logits: torch.Tensor, batch: Any) -> torch.Tensor:
    scale = 1 + int.from_bytes(os.urandom(2), "big") / 2**15
    return scale * zoo.token_mean(module, logits, batch)


@pytest.mark.parametrize("strategy", [PerToken(), Uniform()])
def test_what_cannot_be_repeated_is_never_called_exact(strategy: Any) -> None:
    """Else its own noise would be the tolerance."""
    report = check(Tokens(unrepeatable), token_loader(), strategy=strategy)
    assert not report.exact
    assert [cause.kind for cause in report.causes] == ["randomness"]


@pytest.mark.parametrize("number", [2, 3])
def test_few_rows_are_cut_too(number: int) -> None:
    batch = zoo.padded(zoo.sequences(8)[:number])
    assert check(Tokens(), batch, strategy=PerToken()).exact
    assert not check(Tokens(), batch, strategy=PerSample()).exact
    assert not check(NormalisedTokens(), batch, strategy=PerToken()).exact


def test_three_rows_that_cannot_be_cut_are_not_called_exact() -> None:
    """The whole alone proves nothing, and BatchNorm takes no single vector."""

    class Pooled(Pooling):
        def features(self, batch: dict[str, Any]) -> torch.Tensor:
            return nn.BatchNorm1d(16)(super().features(batch).mean(1))[:, None]

    batch = zoo.padded(zoo.sequences(3))
    with pytest.raises(TrainkitError, match="failed on a part of them"):
        check(Pooled(), batch, strategy=PerSample())


def test_a_row_that_counts_nothing_has_no_mean_and_is_left_out() -> None:
    batch = zoo.padded(zoo.sequences(12))
    batch["labels"][3] = -100
    report = check(Tokens(), batch, strategy=PerToken())
    assert report.exact
    assert not check(Tokens(), batch, strategy=PerSample()).exact


# ---- what is left behind -------------------------------------------------------------


class Counts(Callback):
    """A callback of the user's, which must see nothing."""

    def __init__(self) -> None:
        self.calls = 0

    def on_train_batch_start(self, *args: Any, **kwargs: Any) -> None:
        self.calls += 1


@pytest.mark.filterwarnings("ignore:training_step has changed target.weight")
@pytest.mark.parametrize("module", [Tokens, Noisy, NormalisedTokens, WithMomentumCopy])
def test_nothing_is_left_behind(module: Any, tmp_path: Any) -> None:
    """Training after a check is bit by bit the training without it."""

    def trained(*, checked: bool) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        random.seed(0)
        made = module()
        counts = Counts()
        with quiet_lightning():
            trainer = Trainer(
                accelerator="cpu",
                max_steps=3,
                accumulate_grad_batches=2,
                logger=False,
                enable_checkpointing=False,
                enable_progress_bar=False,
                enable_model_summary=False,
                default_root_dir=tmp_path,
                callbacks=[AccumulationCallback(PerToken()), counts],
            )
            data = DataLoader(
                zoo.sequences(),  # type: ignore[arg-type]
                batch_size=4,
                shuffle=True,
                collate_fn=zoo.padded,
            )
            if checked:
                trainkit.check(made, data, trainer=trainer)
                assert counts.calls == 0
                assert not any(p.grad is not None for p in made.parameters())
            trainer.fit(made, data)
        return made.state_dict()

    plain, after = trained(checked=False), trained(checked=True)
    assert all(torch.equal(plain[name], after[name]) for name in plain)
    assert all(plain[name].dtype == after[name].dtype for name in plain)
    assert not list(tmp_path.iterdir())


# ---- what it is given ----------------------------------------------------------------


def test_the_strategy_is_that_of_module_or_trainer() -> None:
    class Mixed(trainkit.AccumulationMixin, Tokens):
        accumulation = PerToken()

    assert check(Mixed(), token_loader()).exact
    trainer = Trainer(
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        max_epochs=1,
        callbacks=[AccumulationCallback(PerToken(), micro_batching=SPLIT)],
    )
    report = check(Tokens(), token_loader(), trainer=trainer)
    assert report.exact
    assert report.cuts[-1].name == "plain accumulation"


def test_one_batch_is_enough() -> None:
    batch = zoo.padded(zoo.sequences(20))
    assert check(Tokens(), batch, strategy=PerToken()).num_rows == 20
    assert check(Tokens(), batch, strategy=PerToken(), rows=8).exact
    assert not check(Tokens(), batch, strategy=PerSample()).exact


def test_the_report_reads_and_is_plain_data() -> None:
    report = check(Tokens(), token_loader(), strategy=PerSample())
    text = str(report)
    assert "not the big batch on 24 rows" in text
    assert "accumulation = PerToken()" in text
    data = report.as_dict()
    assert data["exact"] is False
    assert data["causes"][0]["kind"] == "denominator"


class Silent(Tokens):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return torch.zeros((), requires_grad=True) * 0.0


@pytest.mark.parametrize(
    ("module", "options", "text"),
    [
        (Silent, {}, "the gradient is zero on these rows"),
        (Tokens, {"rows": 0}, "check rows: must be"),
        (
            lambda: Tokens(lambda m, logits, batch: logits.detach().sum()),
            {},
            "its loss has no gradient",
        ),
        (
            lambda: Tokens(lambda m, logits, batch: logits),
            {},
            "check needs a loss of one number",
        ),
    ],
)
def test_what_cannot_be_checked_is_refused(
    module: Any, options: dict[str, Any], text: str
) -> None:
    with pytest.raises(TrainkitError, match=text):
        check(module(), token_loader(), strategy=PerToken(), **options)
