"""A sequence VAE: a mean over characters and one over names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from recipes.multi_term import Names, NameVAE
from recipes.multi_term.multi_term import NAME, collate, read_names
from tests.helpers import NAIVE, TOLERANCE
from tests.recipes.debugging import run_debug
from tests.recipes.exact import doubled, off, whole_gradient, window_gradient
from trainkit import PerSample, PerToken, Uniform

LONG = [b"visit_AugAssign", b"_flatten_literal_params", b"format_exception_only"]
SHORT = [b"get", b"_eof", b"run", b"a", b"seek", b"tell", b"Queue"]


def loss_of(module: Any, batch: Any) -> Any:
    return module.training_step(batch, 0)


@pytest.fixture
def vae(monkeypatch: pytest.MonkeyPatch) -> NameVAE:
    torch.manual_seed(0)
    monkeypatch.setattr(NameVAE, "log", lambda self, *args, **kwargs: None)
    return NameVAE(width=8, latent=4, beta=1.0).double()


def cut(names: list[bytes], *sizes: int) -> tuple[Any, list[Any]]:
    """A batch, and its rows in micro-batches with less padding."""
    rows, data = list(enumerate(names)), Names(latent=4)
    ends = torch.tensor([0, *sizes]).cumsum(0).tolist()
    cuts = [rows[a:b] for a, b in zip(ends, ends[1:], strict=False)]
    whole, *parts = (
        doubled(data.with_noise(collate(each), epoch=0)) for each in (rows, *cuts)
    )
    return whole, parts


def test_window_equals_the_big_batch(vae: NameVAE) -> None:
    """Both terms, however the names are cut: the noise is cut with them."""
    for sizes in ((3, 7), (1, 4, 5), (10,)):
        whole, parts = cut(LONG + SHORT, *sizes)
        reference = whole_gradient(
            vae, lambda module, batch: loss_of(module, batch)["loss"], whole
        )
        found = window_gradient(
            vae,
            lambda module, batch: loss_of(module, batch)["loss"],
            parts,
            vae.accumulation,
        )
        assert off(found, reference) <= TOLERANCE[torch.float64]


@pytest.mark.parametrize("strategy", [PerToken(), PerSample(), Uniform()], ids=repr)
def test_one_strategy_for_both_terms_differs(vae: NameVAE, strategy: Any) -> None:
    """Negative control."""
    vae.accumulation = strategy
    whole, parts = cut(LONG + SHORT, 3, 7)
    reference = whole_gradient(vae, loss_of, whole)
    assert off(window_gradient(vae, loss_of, parts, strategy), reference) > NAIVE


def test_padding_changes_nothing(vae: NameVAE) -> None:
    """The encoder reads its state after each name's own last character."""
    (alone, _), (padded, _) = cut(SHORT, 7), cut(SHORT + LONG, 10)
    means = [vae.encode(batch)[0][: len(SHORT)] for batch in (alone, padded)]
    torch.testing.assert_close(*means)


def test_names_are_those_of_functions_and_classes() -> None:
    source = (
        b"class A(B):\n    async def f_1(self):\n        define = 1\n  def g(): ..."
    )
    assert NAME.findall(source) == [b"A", b"f_1", b"g"]
    names = read_names()
    assert len(names) > 3000
    assert names == sorted(set(names))
    assert max(max(name) for name in names) < 128  # what the embedding knows


def test_each_label_is_the_next_character_and_the_end_is_one() -> None:
    batch = collate([(0, b"ab"), (1, b"c")])
    assert batch["ids"].tolist() == [[10, 97, 98], [10, 99, 0]]
    assert batch["labels"].tolist() == [[97, 98, 10], [99, 10, -100]]
    assert batch["row"].tolist() == [0, 1]


def test_training_and_validation_share_no_name() -> None:
    data = Names()
    data.setup("fit")
    assert len(data.val_rows) == 400
    assert not {name for _, name in data.val_rows} & {n for _, n in data.train_rows}


def test_noise_is_that_of_the_row_wherever_it_is_read() -> None:
    """With noise of the batch, two ranks would train something else than one."""
    data = Names(latent=4)
    data.setup("fit")
    rows = data.train_rows
    whole, rest = (collate(each) for each in (rows[:6], rows[4:6]))
    drawn = data.with_noise(whole, epoch=1)["noise"]
    assert torch.equal(drawn[4:], data.with_noise(rest, epoch=1)["noise"])
    assert not torch.equal(drawn, data.with_noise(whole, epoch=2)["noise"])
    assert len(drawn.unique()) == drawn.numel()


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.filterwarnings("ignore:NameVAE. its own strategy")
def test_debug_size_trains(
    own: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    metrics = run_debug(
        "multi_term", tmp_path, *([] if own else ["accumulation=per_sample"])
    )
    length = (metrics["val/bound"] - metrics["val/kl"]) / metrics["val/ce"]
    assert 5 < length < 20  # characters of a name, with its end
    assert ("train/kl" in metrics) is own
