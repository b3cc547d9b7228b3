"""Documents in one row: the padded batch's gradient, unless the model makes a cache."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import trainkit
from recipes.packed_lm import PackedLM, Texts
from recipes.packed_lm.packed_lm import Padded
from tests.cli.training import summary_of
from tests.helpers import NAIVE, TOLERANCE
from tests.recipes.debugging import small
from tests.recipes.exact import off, whole_gradient, window_is_off_by
from trainkit import PackCollate, PerSample, PerToken, TrainkitError

# A Llama takes its norms in float32, whatever its parameters are.
EXACT = TOLERANCE[torch.float32]
STRATEGY = PerToken(shift=True)


@pytest.fixture(scope="module")
def rows(cache: Path) -> list[list[int]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(cache))
        made = Texts(num_train=60, num_val=8, vocab_size=300, max_length=60)
        made.setup("fit")
        return sorted(made.train_rows, key=len)[::5]  # of unlike lengths


class Model(PackedLM):
    def configure_optimizers(self) -> Any:  # the configuration has one
        return torch.optim.SGD(self.parameters(), lr=0.1)


def model(**options: Any) -> PackedLM:
    torch.manual_seed(0)
    made = Model(vocab_size=300, hidden_size=16, num_layers=1, num_heads=2, **options)
    return made.double()


def gradient(module: PackedLM, collate: Any, rows: list[Any]) -> torch.Tensor:
    return whole_gradient(module, PackedLM.loss_of, collate(rows))


def test_documents_in_one_row_have_the_padded_batch_s_gradient(rows: list[Any]) -> None:
    """The control: the same model with a cache, which is its default."""
    padded = gradient(model(), Padded(), rows[:6])
    for collate in (PackCollate(), PackCollate(length=60)):
        assert off(gradient(model(), collate, rows[:6]), padded) < EXACT
    leaks = gradient(model(use_cache=True), PackCollate(), rows[:6])
    assert off(leaks, padded) > NAIVE


def test_windows_of_rows_equal_one_row(rows: list[Any]) -> None:
    of: Any = (rows[:6], PackCollate())
    assert window_is_off_by(model(), STRATEGY, *of, cuts=(2, 1, 3)) < EXACT
    assert window_is_off_by(model(), PerSample(), *of, cuts=(2, 1, 3)) > NAIVE


@pytest.mark.parametrize("has_cache", [False, True])
def test_the_proof_finds_the_cache(has_cache: bool, rows: list[Any]) -> None:
    batch = PackCollate()(rows[:8])
    report = trainkit.check(model(use_cache=has_cache), batch)
    assert report.exact is not has_cache
    if has_cache:
        (cause,) = report.causes
        assert cause.kind == "documents"
        assert cause.place.startswith("model.model.layers.0.self_attn (between")
        assert cause.remedy[0] == "model.config.use_cache = False"


def test_another_layout_is_refused() -> None:
    with pytest.raises(TrainkitError, match="must be one of flattened, packed, padded"):
        Texts(layout="flat")  # type: ignore[arg-type]


def test_the_debug_size_trains(run_train: Callable[..., Path]) -> None:
    run = run_train(*small("packed_lm"))
    summary = summary_of(run)
    assert summary["status"] == "finished"
    assert 0 < summary["metrics"]["val/loss"] < 6
