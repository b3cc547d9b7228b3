"""Parameters stay the leaves that they are, also where float64 decides."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.helpers import raise_rank_errors, run_ranks, weights
from tests.lit.measure.starting import fit, images
from tests.lit.proof import zoo
from tests.lit.proof.zoo import Images
from trainkit import PerSample
from trainkit.lit.measure.at_start import ProofAtStart


def slightly_coupled(module: Any, maps: Tensor, batch: Any) -> Tensor:
    """With a balance across rows that float32 cannot tell from rounding."""
    logits = module.head(maps.mean((2, 3)))
    balance = logits.softmax(1).mean(0).square().sum()
    return F.cross_entropy(logits, batch[1]) + 0.02 * balance


def leaf_of(parameter: nn.Parameter) -> Any:
    """The node of the graph that adds up its gradient; hooks may hang on it."""
    return parameter.expand_as(parameter).grad_fn.next_functions[0][0]  # type: ignore


def asks_float64(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What float64 has said, collected."""
    found: list[Any] = []
    ask = ProofAtStart._in_float64

    def asked(self: Any, *args: Any) -> Any:
        found.append(ask(self, *args))
        return found[-1]

    monkeypatch.setattr(ProofAtStart, "_in_float64", asked)
    return found


class Recurrent(Images):
    """Lists hold its parameters too: torch's own, and one of the user's."""

    def __init__(self) -> None:
        super().__init__(slightly_coupled)
        self.memory: Any = nn.LSTM(8, 8)
        self.shown = [self.memory.weight_hh_l0]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        maps = self.net(batch[0])
        moved = self.memory(maps.flatten(2).permute(2, 0, 1))[0].mean(0)
        decay = 1e-3 * self.shown[0].square().sum()
        return self.loss(self, maps + moved[..., None, None], batch) + decay


@pytest.mark.parametrize("module", [lambda: Images(slightly_coupled), Recurrent])
def test_hooks_on_leaves_stay(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    found = asks_float64(monkeypatch)
    made = module()
    fired: list[Any] = []
    before = {name: leaf_of(each) for name, each in made.named_parameters()}
    for leaf in before.values():
        leaf.register_hook(lambda *gradients: fired.append(1))
    with pytest.warns(UserWarning, match="across the rows"):
        fit(made, images(), PerSample(), max_steps=1)
    assert len(found) == 1
    assert found[0][0] > 1e-6
    assert not {n for n, p in made.named_parameters() if leaf_of(p) is not before[n]}
    assert {p.dtype for p in made.parameters()} == {torch.float32}
    assert len(fired) >= 4 * len(before)  # loader batches; passes fire some too
    # the control: torch forgets a leaf with the dtype of its data
    made.head.bias.data = made.head.bias.data.double()
    assert leaf_of(made.head.bias) is not before["head.bias"]


class ByTheOptimizer(Images):
    """Reaches parameters that no module hands out."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        held = self.optimizers().param_groups[0]["params"]  # type: ignore[union-attr]
        decay = sum(each.square().sum() for each in held)
        return super().training_step(batch, batch_idx) + 1e-3 * decay


def test_parameters_that_are_reached_elsewhere_are_not_left_out(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Float64 would miss their gradients, so it does not decide."""
    fit(ByTheOptimizer(slightly_coupled), images(), PerSample())
    assert "may be more than rounding" in capsys.readouterr().out


def trained_on_a_rank(rank: int, world_size: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    rows = zoo.image_loader().dataset
    for proof in ("warn", "off"):
        torch.manual_seed(0)
        module = Images(slightly_coupled)
        loader = DataLoader(rows, batch_size=10)
        options = {"strategy": "ddp", "devices": world_size, "accumulate": 1}
        with warnings.catch_warnings(record=True) as alarms:
            warnings.simplefilter("always")
            fit(module, loader, PerSample(), proof=proof, **options)
        texts = [str(each.message) for each in alarms]
        found[proof] = weights(module), any("big batch" in text for text in texts)
    return found


def test_ranks_train_alike_after_float64_has_decided() -> None:
    one, other = raise_rank_errors(run_ranks(trained_on_a_rank, 2))
    assert (one["warn"][1], one["off"][1]) == (True, False)
    for ranks in (one, other):
        for proof in ("warn", "off"):
            assert torch.equal(ranks[proof][0], one["off"][0])
