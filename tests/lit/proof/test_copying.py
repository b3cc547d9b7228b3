"""The copy that a proof runs: it shares nothing that training writes, and is exact."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric

from tests.helpers import trainer
from tests.lit.proof.starting import fit, plain_trainer, said, tokens
from tests.lit.proof.test_check import check_quickly
from tests.zoo import causes
from tests.zoo.causes import NormalisedTokens, Tokens, token_loader
from trainkit import (
    AccumulationCallback,
    PerSample,
    PerToken,
    Report,
    TrainkitError,
)
from trainkit.lit.proof import copying, rehearse
from trainkit.lit.proof.copying import Copies, move_weights, read_apart


class Rich(Tokens):
    """Holds of everything a little."""

    def __init__(self) -> None:
        super().__init__()
        self.data = DataLoader(causes.sequences(4), batch_size=2)  # type: ignore[arg-type]
        self.graph = self.head.weight * 2
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.tied = self.head.weight
        self.backend = math
        self.calls: list[int] = []
        self.generator = torch.Generator().manual_seed(3)
        own = math
        self.head.register_forward_hook(lambda *_: self.calls.append(own.ceil(1)))
        self.head.weight.register_hook(lambda g: g * len(self.calls))


def copied(module: Any, *, shares: bool = True) -> Copies:
    return Copies(plain_trainer(), module, shares=shares)


def test_a_copy_is_its_own() -> None:
    module, fabric = Rich(), Fabric(accelerator="cpu")
    module.fabric = fabric
    copy = copied(module).module
    assert copy._fabric is None
    assert copy.data is module.data
    assert copy.backend is math
    assert torch.equal(copy.graph, module.graph)
    assert copy.graph.is_leaf
    assert copy.tied is copy.head.weight is not module.head.weight
    batch = causes.padded(causes.sequences(3))
    copy.training_step(batch, 0).backward()
    assert module.calls == []
    assert copy.calls == [1]
    assert module.head.weight.grad is None


class Measured(Tokens):
    """Logs metric objects, which Lightning finds again by their identity."""

    def __init__(self) -> None:
        super().__init__()
        self.training_mean, self.mean = MeanMetric(), MeanMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.training_mean.update(loss.detach())
        self.log("train/mean", self.training_mean)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.mean.update(super().training_step(batch, batch_idx))
        self.log("val/mean", self.mean)


def test_metrics_that_were_logged_before_are_found_in_the_copy(capsys: Any) -> None:
    """By the validation before training, say."""
    own = AccumulationCallback(PerToken())
    pl = trainer(2, max_epochs=1, num_sanity_val_steps=1, callbacks=[own])
    pl.fit(Measured(), tokens(), tokens())
    assert said(capsys).startswith("exact on")


def test_hooks_close_over_the_copy() -> None:
    """The control: as they are, they would work with the module itself."""
    module = Rich()
    copy = copied(module).module
    copy.calls.extend([1, 1])
    (copy.head.weight.sum() * 1.0).backward()
    assert torch.equal(copy.head.weight.grad, torch.full_like(copy.head.weight, 2.0))


class Sized(tuple[int, ...]):
    """Has a length of its own, as the representations of e3nn do."""

    def __len__(self) -> int:
        raise NotImplementedError


def test_a_length_of_its_own_is_not_asked_for() -> None:
    module = Rich()
    module.sizes = Sized((1, 2))  # type: ignore[assignment]
    assert tuple.__len__(copied(module).module.sizes) == 2


class ByDefault(Tokens):
    """Has a function with a submodule as a default, which no copy has its own of."""

    def __init__(self) -> None:
        super().__init__()
        self.own = lambda x, net=self.head: net(x)

    def features(self, batch: Any) -> Tensor:
        hidden = super().features(batch)
        return hidden + self.own(hidden).mean()


def test_a_copy_that_trains_the_module_itself_is_refused() -> None:
    """The control: its gradients are as they were."""
    module = ByDefault()
    with pytest.raises(TrainkitError, match="in the copy refers to the module itself"):
        fit(module, tokens(), PerToken(), proof="require")
    assert module.head.weight.grad is None


def test_large_frozen_parameters_are_shared(monkeypatch: Any) -> None:
    monkeypatch.setattr(copying, "LARGE", 10)
    module = Rich()
    copies = copied(module)
    assert copies.module.frozen.weight is module.frozen.weight
    assert copies.module.frozen.bias is not module.frozen.bias
    assert copied(module, shares=False).module.frozen.weight is not module.frozen.weight
    before = module.frozen.weight.clone()
    move_weights(copies.module, copies.shared)
    assert torch.equal(module.frozen.weight, before)
    assert not torch.equal(copies.module.head.weight, module.head.weight)


class Following(Tokens):
    """Moves a frozen copy in each step."""

    def __init__(self, write: Any) -> None:
        super().__init__()
        self.target = nn.Linear(16, 16).requires_grad_(False)
        self.write = write

    def features(self, batch: Any) -> Tensor:
        hidden = super().features(batch)
        with torch.no_grad():
            self.write(self.target.weight)
        return hidden


@pytest.mark.filterwarnings("ignore:training_step has changed target.weight")
@pytest.mark.parametrize(
    "write",
    [
        lambda weight: weight.mul_(0.5),
        lambda weight: weight.data.add_(1),
        lambda weight: weight.copy_(torch.zeros(16, 16)),
        lambda weight: weight.data.mul_(2.0),
    ],
)
def test_a_shared_parameter_is_never_written(
    write: Any, monkeypatch: Any, capsys: Any
) -> None:
    monkeypatch.setattr(copying, "LARGE", 10)
    trained = []
    for proof in ("require", "off"):
        torch.manual_seed(1)
        module = Following(write)
        fit(module, tokens(), PerToken(), proof=proof, limit_train_batches=2)
        trained.append(module.target.weight.clone())
    assert torch.equal(*trained)
    assert said(capsys).startswith("exact on")


@pytest.mark.filterwarnings("ignore:proof. a window of this training")
@pytest.mark.parametrize("precision", ["bf16-true", "32-true"])
def test_a_frozen_parameter_keeps_its_dtype(precision: Any, monkeypatch: Any) -> None:
    """A rehearsal in float32 or float64 turns the copy's, and not the run's own."""
    monkeypatch.setattr(copying, "LARGE", 10)
    module = Following(lambda weight: None)
    was_off = PerSample()  # is measured again in float64
    fit(module, tokens(), was_off, precision=precision, limit_train_batches=2)
    assert {p.dtype for p in module.parameters()} == {module.head.weight.dtype}


def test_moved_weights_are_alike_in_each_copy() -> None:
    module = Rich()
    nn.init.zeros_(module.head.bias)
    module.head.weight.data.mul_(100)
    first, second = copied(module), copied(module)
    for each in (first, second):
        move_weights(each.module, each.shared)
    one, other = first.module, second.module
    assert all(map(torch.equal, one.parameters(), other.parameters()))
    assert 0.005 < float(one.head.bias.detach().std()) < 0.1
    own = module.head.weight.detach()
    off = one.head.weight.detach() - own
    assert 0.01 < float(off.std() / own.std()) < 0.2


def test_a_data_set_is_read_apart_down_to_four_objects() -> None:
    own: Any = None
    for _ in range(6):
        own = SimpleNamespace(inner=own)
    copy, is_shared = read_apart(own), []
    while own is not None:
        is_shared.append(copy is own)
        own, copy = own.inner, copy.inner
    assert is_shared == 4 * [False] + 2 * [True]


def test_what_stands_in_two_places_of_a_data_set_does_so_in_its_copy() -> None:
    """A method knows the copy."""

    class Data:
        def __init__(self) -> None:
            self.words: Any = SimpleNamespace(known=0)
            self.same, self.rows = self.words, SimpleNamespace(words=self.words)
            self.collate = self.count

        def count(self) -> int:
            return self.words.known

    own = Data()
    copy = read_apart(own)
    copy.words.known = 5
    assert copy.words is copy.same is copy.rows.words
    assert (copy.collate(), own.collate()) == (5, 0)


def test_an_open_file_is_shared_and_a_loaders_workers_are_not() -> None:
    loader: Any = DataLoader([1, 2])  # type: ignore[arg-type]
    with open(__file__) as file:
        loader._iterator, loader.source = iter(loader), SimpleNamespace(file=file)
        again = read_apart(loader)
    assert again.source is not loader.source
    assert again.source.file is file
    assert again._iterator is None
    assert loader._iterator is not None


# ---- half precision: the verdict is on exact arithmetic, what is lost is shown -------


def report_of(module: Any, by: Any = None, **options: Any) -> Report:
    """What a check says of a Trainer with these options."""
    own = plain_trainer(**options)
    return check_quickly(module, token_loader(), strategy=by or PerToken(), trainer=own)


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true", "16-true"])
def test_rounding_alone_is_exact_and_hides_no_cause(precision: str) -> None:
    report = report_of(Tokens(), precision=precision)
    report.assert_exact()
    assert report.deviation < 1e-12
    assert f"left out: precision {precision}" in str(report)
    (cause,) = report_of(Tokens(), PerSample(), precision=precision).causes
    assert cause.remedy == ("accumulation = PerToken()",)
    (cause,) = report_of(NormalisedTokens(), precision=precision).causes
    assert cause.place == "norm"


def test_a_gradient_scaler_is_as_before() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    scaler.scale(torch.ones(()))
    before = scaler.state_dict()
    plugin = MixedPrecision("16-mixed", "cpu", scaler)
    assert report_of(Tokens(), plugins=[plugin]).exact
    assert scaler.state_dict() == before


class OnlyIn(Tokens):
    """Has an operation that knows one dtype."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.only = dtype

    def features(self, batch: dict[str, Any]) -> Tensor:
        hidden = super().features(batch)
        if hidden.dtype is not self.only:
            raise RuntimeError(f"this kernel knows {self.only} only")
        return hidden


def test_what_runs_in_half_precision_only_is_never_called_exact() -> None:
    report = report_of(OnlyIn(torch.bfloat16), precision="bf16-true")
    assert not report.exact
    (cause,) = report.causes
    assert cause.kind == "precision"
    assert "not measured: it runs in bf16-true only" in str(report)


def test_what_knows_no_float64_is_measured_in_float32() -> None:
    report = report_of(OnlyIn(torch.float32), precision="bf16-mixed")
    assert report.exact
    assert report.precision == "float32"
    assert 1e-9 < report.deviation < 1e-5
    assert not report_of(OnlyIn(torch.float32), PerSample()).exact


class Casts(Tokens):
    """Names the type of its features."""

    def __init__(self, cast: Any) -> None:
        super().__init__()
        self.cast = cast

    def features(self, batch: dict[str, Any]) -> Tensor:
        return self.cast(super().features(batch))


@pytest.mark.parametrize(
    "cast",
    [
        Tensor.float,
        lambda x: x.type(torch.float32),
        lambda x: x.to("cpu", torch.float32),
        lambda x: x.to(device="cpu", dtype=torch.float32),
    ],
)
def test_a_step_that_names_float32_is_measured_in_float64(cast: Any) -> None:
    report = report_of(Casts(cast))
    assert (report.exact, report.precision) == (True, "float64")


def test_a_copy_in_float64_takes_at_most_a_gibibyte(monkeypatch: Any) -> None:
    assert 8 * rehearse.MOST_WIDE == 2**30
    monkeypatch.setattr(rehearse, "MOST_WIDE", 100)
    report = report_of(Tokens())
    assert (report.exact, report.precision) == (True, "float32")
