"""Running statistics forget as slowly as the big batch's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import StochasticWeightAveraging
from torch import nn

from tests.core.batch_norm.nets import momenta
from tests.lit.batch_norm.fits import (
    At,
    ConvModule,
    ConvNet,
    batches,
    fit,
)
from trainkit import (
    AccumulationMixin,
    AccumulationSchedule,
    BatchNormGuard,
    PerSample,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore:accumulation. an open window"),
    pytest.mark.filterwarnings("ignore:accumulate_grad_batches=.*has only"),
    pytest.mark.filterwarnings("ignore:Found 1 module"),
]

START = 1e6
"""A mean so far off that what is left of it is the product of all decays."""


class Still(ConvModule):
    """Does not learn, so that the running mean moves by its momentum alone."""

    def __init__(self, net: Any = ConvNet) -> None:
        super().__init__(net, lr=0.0)
        for layer in (self.net.bn1, self.net.bn2, self.net.bn3):
            layer.running_mean.fill_(START)

    def left(self) -> list[float]:
        """What is left of the running means that training began with."""
        layers = (self.net.bn1, self.net.bn2, self.net.bn3)
        return [float(layer.running_mean.mean()) / START for layer in layers]


def zeroed(net: Any = ConvNet) -> Still:
    """Every layer's input is zero, so that the decay is seen to the last digit."""
    module = Still(net)
    for layer in (module.net.conv1, module.net.conv2, module.net.flat):
        nn.init.zeros_(layer.weight)
        nn.init.zeros_(layer.bias)
    return module


class Manual(AccumulationMixin, Still):
    """Steps by itself."""

    accumulation = PerSample()

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.accumulate(loss, batch)
        if self.window_ends(batch_idx):
            self.finish_window()
            optimizer: Any = self.optimizers()
            optimizer.step()
            optimizer.zero_grad()


def synchronised() -> Any:
    return nn.SyncBatchNorm.convert_sync_batchnorm(ConvNet())


def schedule(sizes: dict[int, int], unit: Any) -> list[Any]:
    return [AccumulationSchedule(sizes, unit=unit)]


FORGETS: dict[str, tuple[int | None, float, dict[str, Any]]] = {
    # Steps (None: as many as were taken), momentum, and how it is trained. An epoch has
    # seven batches: most sizes leave a short last window, a step as well.
    "1": (14, 0.1, {"accumulate": 1}),
    "2": (8, 0.5, {"accumulate": 2}),
    "3": (6, 0.01, {}),
    "5": (4, 1.0, {"accumulate": 5}),
    "7": (2, 0.9, {"accumulate": 7}),
    "3, large": (6, 0.9, {}),
    "3, all": (6, 1.0, {}),
    "1, large": (14, 0.9, {"accumulate": 1}),
    "without a callback": (6, 0.1, {"exact": False}),
    "synchronised": (6, 0.1, {"module": lambda: zeroed(synchronised)}),
    "by hand": (6, 0.1, {"module": Manual, "exact": False}),
    "by epochs": (7, 0.1, {"accumulate": 1, "of": schedule({0: 3, 1: 2}, "epoch")}),
    "by steps": (  # 1 1 4 1, then 5 2
        6,
        0.1,
        {"accumulate": 1, "of": schedule({0: 1, 2: 4, 3: 5}, "step")},
    ),
    "back and forth": (
        None,
        0.1,
        {"accumulate": 1, "of": schedule({0: 2, 1: 3, 5: 1}, "step")},
    ),
    **{
        f"{n} of the epoch": (2 * -(-n // 3), 0.1, {"limit_train_batches": n})
        for n in (1, 2, 4, 5)
    },
}


@pytest.mark.parametrize("name", FORGETS)
def test_decay_equals_the_big_batchs(name: str) -> None:
    steps, momentum, how = FORGETS[name]
    taken: list[int] = []
    count = At("on_train_end", lambda t, m: taken.append(t.global_step))
    module = how.get("module", zeroed)()
    for layer in (module.net.bn1, module.net.bn2, module.net.bn3):
        layer.momentum = momentum
    options = {k: v for k, v in how.items() if k not in ("module", "of")}
    fit("momentum", *how.get("of", []), count, module=module, **options)
    assert taken == [steps or taken[0]]
    wanted = (1 - momentum) ** taken[0]
    limit = 1e-5 if name == "by hand" else 1e-12
    assert module.left() == pytest.approx([wanted] * 3, abs=limit)


@pytest.mark.parametrize("exact", [True, False])
def test_decay_without_the_guard_is_that_of_every_micro_batch(exact: bool) -> None:
    """The negative control: giotto-deep#75, DeepLearningExamples#625."""
    module = fit(module=zeroed(), exact=exact)
    assert module.left() == pytest.approx([0.9**14] * 3, abs=1e-12)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of each batch of one run's second epoch."""
    folder = tmp_path_factory.mktemp("saved")

    def save(trainer: Any, module: Any) -> None:
        batch = trainer.fit_loop.epoch_loop.total_batch_idx
        if batch > 6:
            trainer.save_checkpoint(folder / f"{batch}.ckpt")

    fit("momentum", At("on_train_batch_end", save), module=zeroed())
    return folder


@pytest.mark.parametrize("stop", range(1, 8))
@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended")
def test_decay_of_a_resumed_run_equals_that_of_an_unbroken_one(
    saved: Path, stop: int
) -> None:
    """Resumed at every batch of the second epoch, in mid-window too."""
    path = saved / f"{6 + stop}.ckpt"
    module = zeroed()
    fit("momentum", module=module, data=FromWhereItWas(stop), ckpt_path=path)
    assert module.left() == pytest.approx([0.9**6] * 3, abs=1e-12)
    assert set(momenta(module.net).values()) == {0.1}


class FromWhereItWas:
    """Gives the rest of the epoch."""

    def __init__(self, given: int) -> None:
        self.given = given

    def __len__(self) -> int:
        return 7

    def __iter__(self) -> Any:
        given, self.given = self.given, 0
        return iter(list(batches())[given:])

    def state_dict(self) -> dict[str, int]:
        return {}

    def load_state_dict(self, state: Any) -> None: ...


def test_layers_of_the_plain_mean_are_left_alone() -> None:
    def plain() -> ConvNet:
        net = ConvNet()
        net.bn2.momentum = None
        return net

    seen: list[Any] = []
    look = At("on_train_batch_end", lambda t, m: seen.append(momenta(m.net)))
    module = fit("momentum", look, module=ConvModule(plain))
    twin = fit(module=ConvModule(plain))
    assert {each["bn2"] for each in seen} == {None}
    three, one = 1 - 0.9 ** (1 / 3), 0.1
    epoch = [three] * 6 + [one]
    assert [each["bn1"] for each in seen] == pytest.approx(epoch * 2)
    assert torch.equal(module.net.bn2.running_mean, twin.net.bn2.running_mean)


def test_momentum_is_given_back_after_fit_and_between_two() -> None:
    module = ConvModule()
    module.net.bn1.momentum = 0.3
    wanted = momenta(module.net)
    guard = BatchNormGuard("momentum")
    starts: list[Any] = []
    look = At("on_fit_start", lambda t, m: starts.append(momenta(m.net)))
    for _ in range(2):
        fit(guard, look, module=module)
        assert momenta(module.net) == wanted
    assert starts == [wanted, wanted]


def test_momentum_is_given_back_after_an_exception() -> None:
    def fail(trainer: Any, module: Any) -> None:
        assert set(momenta(module.net).values()) != {0.1}
        raise KeyError("a user's mistake")

    module = ConvModule()
    with pytest.raises(KeyError, match="a user's mistake"):
        fit("momentum", At("on_train_batch_end", fail), module=module)
    assert set(momenta(module.net).values()) == {0.1}


def test_momentum_that_the_user_has_changed_stays_theirs() -> None:
    def change(trainer: Any, module: Any) -> None:
        module.net.bn1.momentum = 0.25

    module = fit("momentum", At("on_train_epoch_end", change))
    assert momenta(module.net) == {"bn1": 0.25, "bn2": 0.1, "bn3": 0.1}


@pytest.mark.filterwarnings("ignore:Swapping scheduler")
def test_stochastic_weight_averaging_keeps_its_plain_mean() -> None:
    """Its last epoch computes the plain mean of all batches, with momentum=None."""
    seen: list[Any] = []
    look = At(
        "on_train_batch_end",
        lambda t, m: seen.append((t.current_epoch, momenta(m.net)["bn1"])),
    )
    ends = []
    for policy in ("momentum", None):
        averaging = StochasticWeightAveraging(0.05, swa_epoch_start=2)
        module = fit(policy, look, averaging, max_epochs=4)
        ends.append(module)
        last = max(epoch for epoch, _ in seen)
        assert {m for epoch, m in seen if epoch == last} == {None}
        assert set(momenta(module.net).values()) == {0.1}
        seen.clear()
    # In training nothing is normalised by running statistics: both learn the same.
    for mine, plain in zip(ends[0].parameters(), ends[1].parameters(), strict=True):
        assert torch.equal(mine, plain)
    torch.testing.assert_close(
        ends[0].net.bn3.running_mean, ends[1].net.bn3.running_mean
    )


@pytest.mark.parametrize(
    ("momenta_", "text"),
    [
        ((0.5, 0.1, 0.1), "3 layers momentum 0.1 -> 1 - 0.9^(1/N), 0.5 -> 1 - 0.5^(1/"),
        ((None, None, None), "momentum=None, the plain mean of all"),
    ],
)
def test_table_names_the_momenta(momenta_: Any, text: str, capsys: Any) -> None:
    module = ConvModule()
    for name, each in zip(("bn1", "bn2", "bn3"), momenta_, strict=True):
        getattr(module.net, name).momentum = each
    fit("momentum", module=module)
    assert text in capsys.readouterr().out
