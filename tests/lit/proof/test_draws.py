"""Random numbers that are replayed by row, and those that are named as a cause."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from random import gauss
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.lit.proof import zoo
from tests.lit.proof.test_check import check_quickly as check
from tests.lit.proof.zoo import Images, image_loader
from trainkit import PerSample

NUMPYS = np.random.default_rng(3)
PYTHONS = random.Random(4)

Noise = Callable[[Any, Tensor], Any]


class Noisy(Images):
    """Adds to each image what it draws."""

    def __init__(
        self,
        noise: Noise,
        loss: Any = zoo.classified,
        norm: Callable[[int], nn.Module] = lambda width: nn.GroupNorm(2, width),
    ) -> None:
        super().__init__(loss, norm)
        self.noise = noise
        self.numpys = np.random.default_rng(1)
        self.torchs = torch.Generator().manual_seed(3)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        images = batch[0] + self.noise(self, batch[0])
        return self.loss(self, self.net(images), (images, *batch[1:]))


def of_rows(values: Any) -> Tensor:
    """One number for each image."""
    return torch.as_tensor(values)[:, None, None, None]


def dropped(module: Any, images: Tensor) -> Tensor:
    features: Tensor = module.net(images)
    return F.dropout(features, 0.5).mean((1, 2, 3), keepdim=True)


BY_ROW: dict[str, Noise] = {
    "numpy rand": lambda m, x: of_rows(np.random.rand(len(x))),
    "numpy normal": lambda m, x: torch.as_tensor(np.random.normal(0, 1, x.shape)),
    "numpy choice": lambda m, x: of_rows(np.random.choice([0.0, 1.0], size=len(x))),
    "numpy, for all rows": lambda m, x: np.random.beta(1, 1) * x,
    "numpy, the module's": lambda m, x: of_rows(m.numpys.normal(size=len(x))),
    "numpy, the file's": lambda m, x: of_rows(NUMPYS.standard_normal(len(x))),
    "python": lambda m, x: of_rows([random.random() for _ in x]),
    "python, imported": lambda m, x: of_rows([gauss(0, 1) for _ in x]),
    "python, the file's": lambda m, x: of_rows([PYTHONS.random() for _ in x]),
    "torch, the module's": lambda m, x: of_rows(
        torch.randn(len(x), generator=m.torchs)
    ),
    "torch, row by row": lambda m, x: torch.stack([torch.randn(3, 6, 6) for _ in x]),
    "torch, for all rows": lambda m, x: torch.randn(10).sum() * torch.randn(3, 6, 6),
    "torch, 10 layers": lambda m, x: sum(
        of_rows(torch.randn(len(x))) for _ in "n" * 10
    ),
    "multinomial": lambda m, x: of_rows(
        torch.multinomial(torch.ones(len(x), 5), 2).sum(1)
    ),
    "normal": lambda m, x: torch.normal(x, torch.ones_like(x)),
    "gumbel": lambda m, x: F.gumbel_softmax(x, dim=1),
    "two views": lambda m, x: torch.randn(2 * len(x), 1, 1, 1).view(2, -1, 1, 1, 1)[1],
    "a distribution": lambda m, x: of_rows(
        torch.distributions.Beta(1.0, 1.0).sample((len(x),))
    ),
    "in place": lambda m, x: torch.empty_like(x).bernoulli_(0.3),
    "computed anew": lambda m, x: checkpoint(dropped, m, x, use_reentrant=False),
    "computed anew, reentrant": lambda m, x: checkpoint(
        dropped, m, x.clone().requires_grad_(), use_reentrant=True
    ),
}


@pytest.mark.parametrize("noise", BY_ROW.values(), ids=BY_ROW)
def test_draws_are_replayed_by_row(noise: Noise) -> None:
    """The control is below: draws across rows are not exact."""
    report = check(Noisy(noise), image_loader(), strategy=PerSample())
    report.assert_exact()
    assert report.deviation < 1e-12
    assert any("in expectation" in note for note in report.notes)


def shuffled(module: Any, images: Tensor) -> Tensor:
    order = list(range(len(images)))
    random.shuffle(order)
    return images[order]


ACROSS_ROWS: dict[str, Noise] = {
    "permutation": lambda m, x: x[np.random.permutation(len(x))],
    "shuffle": shuffled,
    "sample": lambda m, x: x[random.sample(range(len(x)), len(x))],
    "randint": lambda m, x: x[torch.randint(0, len(x), (len(x),))],
    "multinomial": lambda m, x: x[torch.multinomial(torch.ones(len(x)), len(x))],
    "numpy's generator": lambda m, x: of_rows(
        np.random.hypergeometric(5, 5, 3, size=len(x))
    ),
}


@pytest.fixture
def seeded() -> Iterator[None]:
    """As most scripts begin."""
    state = np.random.get_state()
    np.random.seed(1)
    yield
    np.random.set_state(state)


@pytest.mark.usefixtures("seeded")
@pytest.mark.parametrize("name", ACROSS_ROWS)
@pytest.mark.parametrize("loss", [zoo.classified, zoo.dice])
def test_other_draws_are_the_cause_and_not_taken_for_another(
    name: str, loss: Any
) -> None:
    module = Noisy(ACROSS_ROWS[name], loss)
    report = check(module, image_loader(), strategy=PerSample())
    assert not report.exact
    cause = report.causes[0]
    assert cause.kind == "randomness"
    if name == "numpy's generator":  # whose kind of draw is not seen
        assert "whose generator is not known here" in cause.text
        return
    assert cause.place.startswith(f"{name} at proof/test_draws.py")
    others = report.causes[1:]
    is_taken_away = name in ("permutation", "shuffle")  # others stay in the way
    assert len(others) == (is_taken_away and loss is zoo.dice)


MADE_ANEW: list[Noise] = [
    lambda m, x: np.random.default_rng(len(x)).random(x.shape),
    lambda m, x: (lambda own: of_rows([own.random() for _ in x]))(
        random.Random(len(x))
    ),
]


@pytest.mark.parametrize("noise", MADE_ANEW)
@pytest.mark.parametrize("loss", [zoo.classified, zoo.dice])
def test_generators_made_in_the_step_are_named(noise: Noise, loss: Any) -> None:
    """A generator that the step begins anew draws other numbers in each batch."""
    report = check(Noisy(noise, loss), image_loader(), strategy=PerSample())
    assert str(report).startswith("verdict             cannot say on 10 rows")
    (cause,) = report.causes
    assert cause.kind == "randomness"
    assert cause.place.startswith("a generator made at proof/test_draws.py")


@pytest.mark.parametrize(
    "noise",
    [
        lambda m, x: torch.func.vmap(
            lambda each: torch.rand_like(each), randomness="different"
        )(x),
        lambda m, x: torch.native_dropout(x, 0.5, True)[0],
    ],
)
def test_draws_that_are_not_seen_leave_no_verdict(noise: Noise) -> None:
    report = check(Noisy(noise), image_loader(), strategy=PerSample())
    assert not report.exact
    assert str(report).startswith("verdict             cannot say on 10 rows")
    (cause,) = report.causes
    assert cause.kind == "randomness"


@pytest.mark.parametrize(
    ("name", "how", "is_named"),
    [
        ("numpy rand", {"norm": nn.BatchNorm2d}, lambda c: c.place == "net.1"),
        (
            "python",
            {"loss": zoo.sample_weighted},
            lambda c: c.remedy == ("accumulation = PerSample(mask=2)",),
        ),
        (
            "torch, the module's",
            {"loss": zoo.dice},
            lambda c: "the loss after net" in c.text,
        ),
    ],
)
def test_draws_hide_no_other_cause(name: str, how: Any, is_named: Any) -> None:
    module = Noisy(BY_ROW[name], **how)
    (cause,) = check(module, image_loader(), strategy=PerSample()).causes
    assert is_named(cause), cause


def numpys_state() -> Any:
    state: Any = np.random.get_state()
    return state[1].tolist()


def test_generators_are_as_before() -> None:
    module = Noisy(BY_ROW["python, the file's"])
    before = PYTHONS.getstate(), random.getstate(), numpys_state()
    functions = random.random, np.random.rand, globals()["gauss"], NUMPYS, module.numpys
    check(module, image_loader(), strategy=PerSample())
    check(Noisy(ACROSS_ROWS["shuffle"]), image_loader(), strategy=PerSample())
    after = PYTHONS.getstate(), random.getstate(), numpys_state()
    assert before == after
    now = random.random, np.random.rand, globals()["gauss"], NUMPYS, module.numpys
    assert all(one is other for one, other in zip(functions, now, strict=True))
