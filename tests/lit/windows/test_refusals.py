"""What cannot be exact is refused, with a text that says what to do."""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.strategies import SingleDeviceStrategy

from tests.helpers import deviation, loader, trainer, weights
from tests.lit.fronts import SEQUENCES, WINDOW, fit
from tests.lit.windows.test_windows import Fetching, without
from tests.zoo.modules import Manual, Plain, hooked, on_front, scaled
from trainkit import MicroBatching, PerToken, Uniform
from trainkit.errors import TrainkitError

pytestmark = [
    pytest.mark.filterwarnings("ignore:accumulation. an open window"),
    pytest.mark.filterwarnings("ignore:`training_step` returned `None`"),
    pytest.mark.filterwarnings("ignore:.*`dataloader_iter`:UserWarning"),
    pytest.mark.filterwarnings("ignore:`LightningModule.configure_optimizers` ret"),
]
START = weights(Plain())


class AccumulatesItself(SingleDeviceStrategy):
    """As DeepSpeed does (transformers#35808, lightning#6170)."""

    handles_gradient_accumulation = True  # type: ignore[assignment]  # a property


class Twice(torch.optim.SGD):
    """Looks at its closure again, as line searches and SAM do."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        assert closure is not None
        closure()
        return super().step(closure)


def lbfgs(parameters: Any) -> torch.optim.Optimizer:
    """Its closure runs several times in a step."""
    return torch.optim.LBFGS(parameters, lr=0.1, max_iter=4)


def twice(parameters: Any) -> torch.optim.Optimizer:
    return Twice(parameters, lr=0.5)


def bypasses(self: Any, epoch: int, index: int, optimizer: Any, closure: Any) -> None:
    """Steps with the torch optimizer itself, past Lightning's hooks."""
    closure()
    optimizer.optimizer.step()


def sidesteps(self: Any, epoch: int, index: int, optimizer: Any, closure: Any) -> None:
    optimizer.optimizer.step(closure=closure)


NONE_LAST = {"kind": without(3), "max_epochs": 1, **scaled(16.0)}
ROWS: dict[str, tuple[str, dict[str, Any]]] = {
    "backend": (
        "strategy AccumulatesItself: it accumulates gradients by itself",
        {"strategy": AccumulatesItself},
    ),
    "LBFGS": (
        "^LBFGS: it ran its closure twice .* the last of the window's 2 loader batches",
        {"made": {"optimizer": lbfgs}, "window": 2},
    ),
    "LBFGS in split windows": (
        "^LBFGS: it ran its closure twice .* the last of the window's 2 loader batches",
        {"made": {"optimizer": lbfgs, "cut": MicroBatching(size=2)}, "window": 2},
    ),
    "LBFGS in pools": (
        "^LBFGS: it ran its closure twice .* window's 2 .* leave pool= out",
        {
            "made": {"optimizer": lbfgs, "cut": MicroBatching(tokens=40, pool=2)},
            "window": 2,
        },
    ),
    "closure": (
        "^Twice: it ran its closure twice in one step",
        {"made": {"optimizer": twice}, "window": 2},
    ),
    **{
        step.__name__: (
            r"SGD.step\(\): its window of 4 micro-batches has not been divided",
            {"kind": hooked(Plain, optimizer_step=step)},
        )
        for step in (bypasses, sidesteps)
    },
    "batches unseen": (
        "it fetches its batches itself, so PerToken cannot weigh them",
        {"kind": Fetching, "window": 1},
    ),
    "batches unseen in windows": (
        "by an index that lags behind, .* accumulate_grad_batches is 2",
        {"kind": Fetching, "window": 2, "made": {"strategy": Uniform()}},
    ),
    # Lightning would skip the whole window without a word.
    "None on the last": ("training_step: it returned None on the last", NONE_LAST),
    "no optimizer": (
        "configure_optimizers: it returned no optimizer",
        {"kind": hooked(Plain, configure_optimizers=lambda self: None)},
    ),
    "no labels": (
        r"path 'targets.ids'.*dict\(ids: int64",
        {"made": {"strategy": PerToken(labels="targets.ids")}},
    ),
}


@pytest.mark.parametrize(
    ("name", "front"), [*zip(ROWS, cycle(["mixin", "callback"]), strict=False)]
)
def test_what_cannot_be_exact_is_refused(name: str, front: str) -> None:
    """Plain Lightning trains on in silence."""
    text, how = ROWS[name]
    if "strategy" in how:
        how = {"strategy": how["strategy"](torch.device("cpu"))}
    with pytest.raises(TrainkitError, match=text):
        fit(front, **how)
    if "strategy" not in how:
        made = {k: v for k, v in how.get("made", {}).items() if k != "strategy"}
        fit("plain", **{**how, "made": made})


def test_an_undivided_step_is_refused_before_it_moves_a_weight() -> None:
    module, ours = on_front("callback", hooked(Plain, optimizer_step=bypasses))
    with pytest.raises(TrainkitError, match="has not been divided"):
        trainer(2, callbacks=ours).fit(module, loader(SEQUENCES, 4))
    assert torch.equal(weights(module), START)


def test_manual_optimization_without_the_mixin_is_refused() -> None:
    by_hand = hooked(Plain, automatic_optimization=False)
    with pytest.raises(TrainkitError, match="Plain: with automatic_optimization=False"):
        fit("callback", by_hand, window=1)


def test_ranks_without_torch_distributed_are_refused(monkeypatch: Any) -> None:
    """As torch_xla has them."""
    monkeypatch.setattr(Trainer, "world_size", 8)
    with pytest.raises(TrainkitError, match="it runs 8 ranks without torch.distribu"):
        fit("callback")


@pytest.mark.parametrize("make", [lbfgs, twice])
def test_closure_that_repeats_in_windows_of_one_equals_plain_lightning(
    make: Any,
) -> None:
    fits = [
        fit(front, made={"optimizer": make}, window=1, max_epochs=1)
        for front in ("mixin", "callback", "plain")
    ]
    *ours, plain = (each.lightning_module for each in fits)
    assert max(deviation(each, plain, START) for each in ours) <= 1e-10


def test_a_loop_that_is_run_outside_of_fit_is_told_so() -> None:
    module, ours = on_front("callback")
    with pytest.raises(TrainkitError, match="Plain: .* outside of fit. Call tr"):
        ours[0].on_train_epoch_start(trainer(2), module)


ZEROINGS: dict[str, Callable[[Any], None]] = {
    "module": lambda m: m.zero_grad(set_to_none=False),
    "net": lambda m: m.net.zero_grad(),
    "optimizer": lambda m: m.optimizers().zero_grad(set_to_none=False),
}
GONE = r"the gradients of the \d micro-batches in it are gone"


@pytest.mark.parametrize(
    ("front", "zeroing"),
    [*zip(["callback", "mixin", "split"], ZEROINGS, strict=True), ("manual", "net")],
)
def test_zeroing_inside_a_window_is_refused(front: str, zeroing: str) -> None:
    """In automatic optimization 1.9 of the distance travelled, in manual 0.52."""
    is_manual = front == "manual"
    kind = Manual if is_manual else Plain

    def training_step(self: Any, batch: Any, batch_idx: int) -> Any:
        self.calls += 1
        if self.calls == 3:
            ZEROINGS[zeroing](self)
        return kind.training_step(self, batch, batch_idx)

    zeroes = hooked(kind, training_step=training_step, calls=0)
    cut = MicroBatching(size=2) if front == "split" else None
    name = "mixin" if cut else front
    module, ours = (zeroes(), []) if is_manual else on_front(name, zeroes, cut=cut)
    fitted = trainer(1 if cut else WINDOW, callbacks=ours)
    with pytest.raises(TrainkitError, match=GONE):
        fitted.fit(module, loader(SEQUENCES, 8 if cut else 4))


def test_zeroing_after_the_last_backward_is_refused_too() -> None:
    zeroes = LambdaCallback(
        on_after_backward=lambda trainer, module: module.zero_grad(set_to_none=False)
    )
    with pytest.raises(TrainkitError, match=GONE):
        fit("callback", Plain, zeroes, window=1)
