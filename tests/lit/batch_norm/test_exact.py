"""BatchNormGuard("exact") trains as the whole batch does."""

from __future__ import annotations

import warnings
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.lit.batch_norm.exact_fits import CLASSES, Images, apart, exact, fit
from tests.lit.batch_norm.exact_fits import loader as batches
from trainkit import (
    AccumulationCallback,
    AccumulationMixin,
    BatchNormGuard,
    LRScaling,
    MicroBatching,
    NoiseScale,
    PerSample,
    TrainkitError,
    WindowMonitor,
)

CUTS = {
    "split": MicroBatching(size=4),
    "single rows": MicroBatching(size=1),
    "inside": MicroBatching(inside="net", size=4),
    "inside, found": MicroBatching(inside="auto", size=3),
}


@pytest.fixture(scope="module")
def whole() -> tuple[Images, pl.Trainer]:
    """Trained on whole batches, by plain Lightning."""
    module = Images()
    return module, fit(module)


def numbers(fitted: pl.Trainer) -> dict[str, float]:
    """What was logged last."""
    return {name: float(value) for name, value in fitted.callback_metrics.items()}


@pytest.mark.parametrize("cut", CUTS)
def test_training_equals_whole_batches(
    cut: str, whole: tuple[Images, pl.Trainer]
) -> None:
    module = Images()
    fitted = fit(module, *exact(CUTS[cut]))
    reference, plain = whole
    assert apart(module, reference) <= 1e-10
    assert int(module.net.norm.num_batches_tracked) == 12  # type: ignore[union-attr, arg-type]
    assert numbers(fitted) == pytest.approx(numbers(plain), rel=1e-6)
    assert numbers(fitted)["loss"] == pytest.approx(numbers(plain)["loss"], rel=1e-10)
    assert not [n for n, m in module.named_modules() if "forward" in vars(m)]


@pytest.mark.parametrize("cut", ["split", "single rows"])
def test_plain_accumulation_does_not(
    cut: str, whole: tuple[Images, pl.Trainer]
) -> None:
    module, start = Images(), Images()
    fit(module, AccumulationCallback(PerSample(), micro_batching=CUTS[cut]))
    assert apart(module, whole[0]) > 0.1 * apart(whole[0], start)


@pytest.mark.parametrize("cut", ["split", "inside"])
def test_windows_of_a_schedule_clipping_and_rates(cut: str) -> None:
    """What others do with a step is as with whole batches."""
    trained = []
    for callbacks in ([], exact(CUTS[cut])):
        module = Images()
        more: list[Any] = [LRScaling("sqrt", reference_batch=5)] if callbacks else []
        more += [WindowMonitor(every_n_steps=1)] if callbacks else []
        if not callbacks:
            module.configure_optimizers = lambda m=module: torch.optim.SGD(  # type: ignore[method-assign]
                m.parameters(), lr=0.1 * 2**0.5, momentum=0.9
            )
        fit(module, *callbacks, *more, gradient_clip_val=0.05)
        trained.append(module)
    assert apart(*trained) <= 1e-10


class Bare(pl.LightningModule):
    """Its layers stand in the module itself, some are called in the step."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.stem = nn.Conv2d(3, 5, 3)
        self.norm = nn.BatchNorm2d(5)
        self.inner = nn.Linear(5, 5)
        self.twice = nn.BatchNorm1d(5)
        self.head = nn.Linear(5, CLASSES)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(self.norm(self.stem(x))).mean((2, 3))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.log("seen", batch[0].sum(), reduce_fx="sum", on_epoch=True)
        hidden = self(batch[0])
        more = self.twice(self.inner(hidden))
        hidden = hidden + self.twice(more.square())
        return F.cross_entropy(self.head(hidden), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_layers_called_in_the_step_itself() -> None:
    whole, module = Bare(), Bare()
    plain = fit(whole)
    fitted = fit(module, *exact(CUTS["split"]))
    assert apart(module, whole) <= 1e-10
    assert numbers(fitted) == pytest.approx(numbers(plain), rel=1e-9)


class Mixed(AccumulationMixin, Images):
    accumulation = PerSample()
    micro_batching = MicroBatching(size=4)


def test_mixin_module(whole: tuple[Images, pl.Trainer]) -> None:
    module = Mixed()
    fit(module, BatchNormGuard("exact"))
    assert apart(module, whole[0]) <= 1e-10


class Listed(Images):
    """Its blocks stand in a list, which itself is never called."""

    def __init__(self) -> None:
        super().__init__(nn.Identity())
        blocks = [
            nn.Sequential(nn.Conv2d(c, 5, 3, padding=1), nn.BatchNorm2d(5), nn.Tanh())
            for c in (3, 5)
        ]
        self.blocks, self.head = nn.ModuleList(blocks), nn.Linear(5, CLASSES)
        self.double()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        hidden = batch[0]
        for block in self.blocks:
            hidden = block(hidden)
        return F.cross_entropy(self.head(hidden.mean((2, 3))), batch[1])


def test_blocks_of_a_list_are_cut_one_by_one(capsys: Any) -> None:
    whole, module = Listed(), Listed()
    fit(whole)
    fit(module, *exact(CUTS["split"]))
    assert apart(module, whole) <= 1e-10
    assert "blocks.0, blocks.1 in chunks of at most 4 rows" in capsys.readouterr().out


def test_a_size_that_no_batch_exceeds_is_not_warned_of() -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*ran whole")
        fit(Images(), *exact(MicroBatching(size=64)), epochs=1)


class Hooks(pl.Callback):
    """Notes the gradient's size at each hook around a backward pass."""

    def __init__(self) -> None:
        self.before, self.after, self.steps = 0, 0, list[float]()

    def on_before_backward(self, *of: Any, **named: Any) -> None:
        self.before += 1

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        self.after += 1

    def on_before_optimizer_step(
        self, trainer: Any, pl_module: Any, optimizer: Any
    ) -> None:
        self.steps.append(float(pl_module.net.first.weight.grad.norm()))


def test_hooks_run_once_a_step() -> None:
    plain, hooks, module = Hooks(), Hooks(), Images()
    fit(Images(), plain, epochs=1)
    fit(module, *exact(CUTS["split"]), hooks, epochs=1)
    assert (hooks.before, hooks.after) == (plain.before, plain.after) == (3, 3)
    assert hooks.steps == pytest.approx(plain.steps, rel=1e-9)


def test_frozen_layers_and_other_norms_stay_as_they_are() -> None:
    def made() -> Images:
        torch.manual_seed(4)
        net = nn.Sequential(
            nn.Conv2d(3, 4, 3),
            nn.BatchNorm2d(4),
            nn.InstanceNorm2d(4, affine=True),
            nn.GroupNorm(2, 4),
            nn.BatchNorm2d(4),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.BatchNorm1d(4, affine=False, track_running_stats=False),
            nn.Linear(4, CLASSES),
        )
        module = Images(net)
        module.net[4].eval()  # type: ignore[index]
        for parameter in module.net[0].parameters():  # type: ignore[index]
            parameter.requires_grad_(False)
        return module

    whole, module = made(), made()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*in eval mode")
        fit(whole)
        fit(module, *exact(CUTS["split"]))
    start, before = dict(made().named_buffers()), dict(whole.named_buffers())
    for name, value in module.named_buffers():
        if name.startswith("net.4."):
            assert torch.equal(value, start[name])
        assert torch.allclose(value.double(), before[name].double(), atol=1e-10)
    assert apart(module.net[8], whole.net[8]) <= 1e-10  # type: ignore[index]


class Thawed(pl.Callback):
    """Lets the layers evaluate until the second epoch begins."""

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        for layer in pl_module.modules():
            if isinstance(layer, nn.modules.batchnorm._BatchNorm):
                layer.train(trainer.current_epoch > 0)


def without_statistics() -> Images:
    torch.manual_seed(4)
    return Images(
        nn.Sequential(
            nn.Conv2d(3, 4, 3),
            nn.BatchNorm2d(4, track_running_stats=False),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(4, CLASSES),
        )
    )


def evaluating() -> Images:
    module = Images()
    module.net.eval()
    return module


@pytest.mark.filterwarnings("ignore:Found .* in eval mode")
@pytest.mark.parametrize("cut", ["split", "inside"])
@pytest.mark.parametrize("make", [evaluating, without_statistics])
def test_it_is_looked_at_in_each_window_which_layers_train(make: Any, cut: str) -> None:
    """Frozen at first, unfrozen later; without running statistics. The control: cut
    alike, without exact statistics."""
    whole, module, naive = make(), make(), make()
    fit(whole, Thawed())
    fit(module, Thawed(), *exact(CUTS[cut]))
    assert apart(module, whole) <= 1e-10
    parts = AccumulationCallback(PerSample(), micro_batching=CUTS["split"])
    fit(naive, Thawed(), parts)
    assert apart(naive, whole) > 1e-3


@pytest.mark.filterwarnings("ignore:Found .* in eval mode")
@pytest.mark.filterwarnings("ignore:.*open window .* was dropped")
@pytest.mark.parametrize("make", [evaluating, without_statistics])
def test_windows_of_several_loader_batches_are_refused_once_layers_train(
    make: Any,
) -> None:
    with pytest.raises(TrainkitError, match="made by 2 loader batches"):
        fit(make(), Thawed(), *exact(CUTS["split"]), window=2)


def test_noise_scale_says_that_it_cannot_measure() -> None:
    noise = NoiseScale(every_n_steps=1, if_impossible="say")
    fit(Images(), *exact(CUTS["split"]), noise, epochs=1)
    assert noise.why_not is not None
    assert "have no gradient of their own" in noise.why_not


def test_state_dict_has_the_same_names() -> None:
    names: list[list[str]] = []

    class Look(pl.Callback):
        def on_train_batch_end(
            self, trainer: Any, pl_module: Any, *of: Any, **named: Any
        ) -> None:
            names.append(list(pl_module.state_dict()))

    module = Images()
    fit(module, *exact(CUTS["split"]), Look(), epochs=1)
    assert names[0] == list(Images().state_dict())


def test_precision_of_half() -> None:
    """In bfloat16 the window is as far from float64 as the whole batch is, over several
    nets: how one of them is rounded is decided by the processor."""

    def run(seed: int, precision: Any, *callbacks: pl.Callback) -> Images:
        module = Images()
        torch.manual_seed(seed)
        for parameter in module.parameters():
            parameter.data.add_(0.05 * torch.randn_like(parameter))
        if precision == "64-true":
            fit(module, epochs=1, precision=precision)
            return module
        floats = [(x.float(), y) for x, y in batches()]
        data: Any = DataLoader(floats, batch_size=None)  # type: ignore[arg-type]
        fit(module.float(), *callbacks, batches=data, epochs=1, precision=precision)
        return module

    whole, exactly, naive = 0.0, 0.0, 0.0
    for seed in range(5):
        true = run(seed, "64-true")
        whole += apart(run(seed, "bf16-mixed"), true) ** 2
        exactly += apart(run(seed, "bf16-mixed", *exact(CUTS["split"])), true) ** 2
        parts = AccumulationCallback(PerSample(), micro_batching=CUTS["split"])
        naive += apart(run(seed, "bf16-mixed", parts), true) ** 2
    assert exactly <= 2**2 * whole
    assert naive > 3**2 * exactly
