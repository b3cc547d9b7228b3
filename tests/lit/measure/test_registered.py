"""What a first pass registers or moves out of sight is put back, or not measured."""

from __future__ import annotations

import copy
import functools
import itertools
import random
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

import trainkit
from tests.helpers import quiet_lightning
from tests.lit.measure.starting import fit, images, said, tokens
from tests.lit.proof import zoo
from tests.lit.proof.zoo import Images, Tokens
from trainkit import PerSample, PerToken, TrainkitError
from trainkit.lit.measure.found import Found, exact_text


class Capturing(Tokens):
    """Installs a hook in its first pass, and notes that it did."""

    installed = False

    def features(self, batch: dict[str, Any]) -> Tensor:
        if not self.installed:
            self.installed, self.seen = True, []
            self.body.register_forward_hook(lambda *a: self.seen.append(1))
        hidden = super().features(batch)
        return hidden * len(self.seen)


class Buffering(Tokens):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", None)

    def features(self, batch: dict[str, Any]) -> Tensor:
        hidden = super().features(batch)
        if self.mean is None:
            self.mean: Any = hidden.detach().mean()
        return hidden - self.mean


class Decaying(Tokens):
    def features(self, batch: dict[str, Any]) -> Tensor:
        optimizer: Any = self.optimizers()
        optimizer.param_groups[0]["lr"] *= 0.9
        return super().features(batch)


class Hidden(Tokens):
    """A teacher in a tuple, whose statistics move."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = (nn.BatchNorm1d(16),)

    def features(self, batch: dict[str, Any]) -> Tensor:
        hidden = super().features(batch)
        self.teacher[0](hidden.detach().flatten(0, 1))
        return hidden


class Lazy(ModuleType):
    def __getattr__(self, name: str) -> Any:
        raise ImportError("lazily") if name == "__file__" else AttributeError(name)


NUMBER = 0
GENERATOR = random.Random(0)
STORE: dict[str, Any] = {}
LAZY = Lazy("lazy")


class Elsewhere(Tokens):
    """What it moves stands in its file, its class, an object in an object, a set, or is
    written through NumPy."""

    number = 0

    def __init__(self) -> None:
        super().__init__()
        global NUMBER
        Elsewhere.number = NUMBER = 0
        GENERATOR.seed(0)
        STORE.clear()
        self.outer = SimpleNamespace(inner=SimpleNamespace(number=0))
        self.ids = set(range(0, 4000, 8)) - set(range(0, 3900, 8)) | {24577, 1, 8193}
        self.written = (torch.zeros(3),)

    def features(self, batch: dict[str, Any]) -> Tensor:
        global NUMBER
        NUMBER += 1
        Elsewhere.number += 1
        self.outer.inner.number += 1
        self.written[0].detach().numpy()[0] += 1
        own = STORE.setdefault("made in the first pass", random.Random(1))
        assert type(copy.deepcopy(own)) is type(own)
        self.__class__.made = getattr(self.__class__, "made", 0) + 1  # type: ignore
        moved = NUMBER + self.number + self.outer.inner.number + own.random()
        moved += float(self.written[0][0])
        for each in self.ids:
            moved = 0.9 * moved + 1e-4 * each
        return super().features(batch) * (moved + GENERATOR.random())


@pytest.mark.filterwarnings(
    "ignore:proof. a window", "ignore:training_step has changed"
)
@pytest.mark.parametrize("module", [Capturing, Buffering, Decaying, Hidden, Elsewhere])
def test_training_is_as_without_the_proof(module: Any) -> None:
    def trained(proof: str) -> list[Any]:
        torch.manual_seed(0)
        made = module()
        fit(made, tokens(), PerToken(), proof=proof)
        others = [made.teacher[0].running_mean] if module is Hidden else []
        if module is Elsewhere:
            (generator,) = STORE.values()
            assert type(generator) is random.Random
            others = [Elsewhere.__dict__["made"], Elsewhere.number, NUMBER]
            del Elsewhere.made  # type: ignore[attr-defined]
        rate = made.trainer.optimizers[0].param_groups[0]["lr"]
        return [*made.state_dict().values(), *others, rate]

    pairs = zip(trained("warn"), trained("off"), strict=True)
    for one, other in pairs:
        assert torch.equal(torch.as_tensor(one), torch.as_tensor(other))


def steps_first(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: value.T for name, value in zoo.padded(rows).items()}


class Iterating(Tokens):
    def __init__(self) -> None:
        super().__init__()
        self.numbers = itertools.count()


class Endless(Tokens):
    def features(self, batch: dict[str, Any]) -> Tensor:
        while random.random() < len(batch["ids"]) < 8:
            pass
        return super().features(batch)


@pytest.mark.parametrize(
    ("module", "collate", "text"),
    [
        (Tokens, steps_first, "the first dimension of the batch is"),
        (Iterating, zoo.padded, "numbers is an iterator"),
        (Endless, zoo.padded, "draws more than 20000 times by random at"),
    ],
)
def test_what_would_mislead_is_not_measured(
    capsys: pytest.CaptureFixture[str], module: Any, collate: Any, text: str
) -> None:
    data = DataLoader(zoo.sequences(), 16, collate_fn=collate)  # type: ignore[arg-type]
    fit(module(), data, PerToken())
    assert text in said(capsys)


@pytest.mark.parametrize("share", [1.0, 0.1, 0.01])
def test_a_small_term_across_rows_is_noticed(share: float) -> None:
    def loss(module: Any, maps: Tensor, batch: Any) -> Tensor:
        logits = module.head(maps.mean((2, 3)))
        balance = logits.softmax(1).mean(0).square().sum()
        return F.cross_entropy(logits, batch[1]) + share * balance

    with pytest.warns(UserWarning, match="across the rows"):
        fit(Images(loss), images(), PerSample())


@pytest.mark.parametrize("share", [3e-5, 1e-4])
def test_a_small_term_is_not_taken_for_a_denominator(share: float) -> None:
    """With the best weights, the window of this one is off by less than 1e-6."""

    def loss(module: Any, maps: Tensor, batch: Any) -> Tensor:
        logits = module.head(maps.mean((2, 3)))
        losses = F.cross_entropy(logits, batch[1], reduction="none")
        return losses.mean() + share * losses.logsumexp(0)

    with pytest.warns(UserWarning, match="across the rows"):
        fit(Images(loss), images(), PerSample())


@pytest.mark.parametrize("share", [1e-4, 3e-4])
def test_a_denominator_that_is_off_a_little_is_named(share: float) -> None:
    def loss(module: Any, maps: Tensor, batch: Any) -> Tensor:
        weights = batch[2] + share * batch[0].mean((1, 2, 3))
        return zoo.sample_weighted(module, maps, [*batch[:2], weights])

    with pytest.warns(UserWarning, match="does not divide by what PerSample"):
        fit(Images(loss), images(), PerSample(mask=2))


class Narrow(Images):
    """Something in it knows no float64."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        assert self.head.weight.dtype is torch.float32
        return super().training_step(batch, batch_idx)


def test_what_float64_cannot_decide_is_not_called_exact(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def loss(module: Any, maps: Tensor, batch: Any) -> Tensor:
        logits = module.head(maps.mean((2, 3)))
        balance = logits.softmax(1).mean(0).square().sum()
        return F.cross_entropy(logits, batch[1]) + 0.02 * balance

    fit(Narrow(loss), images(), PerSample())
    assert "may be more than rounding" in said(capsys)
    torch.manual_seed(0)  # as before the first one
    with pytest.raises(TrainkitError, match="may be more than rounding"):
        fit(Narrow(loss), images(), PerSample(), proof="require")


def test_float64_decides_where_float32_cannot() -> None:
    found = Found(2e-5, 0.0, rounding=5e-8, most=3e-5, num_rows=5)
    assert found.is_open
    exact, other = found.decided(4e-16, ""), found.decided(2e-5, "")
    assert exact.off <= exact.most
    assert "off by 2e-05 in float32, and by 4e-16 in float64" in exact_text(exact, 2e-5)
    assert other.off > other.most


def test_check_leaves_no_wide_constants_in_caches() -> None:
    @functools.lru_cache
    def scale(length: int) -> Tensor:
        return torch.ones(length, 1)

    class Caching(Tokens):
        def features(self, batch: dict[str, Any]) -> Tensor:
            return super().features(batch) * scale(batch["ids"].shape[1])

    with quiet_lightning():
        trainkit.check(Caching(), tokens(), strategy=PerToken()).assert_exact()
    assert scale.cache_info().currsize == 0
    fit(Caching(), tokens(), PerToken())
    assert scale(5).dtype == torch.float32


def test_check_replays_what_a_transfer_hook_draws() -> None:
    class Augmented(Images):
        def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            return [batch[0] + torch.randn_like(batch[0]), *batch[1:]]

    with quiet_lightning():
        report = trainkit.check(
            Augmented(zoo.classified), images(), strategy=PerSample()
        )
    report.assert_exact()
