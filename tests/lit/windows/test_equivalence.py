"""Training in micro-batches equals training with the big batch, whoever looks."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, wraps
from itertools import cycle
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Checkpoint, LambdaCallback
from torch import Tensor

from tests.helpers import (
    NAIVE,
    OPTIMIZERS,
    TOLERANCE,
    deviation,
    gradients,
    ragged_sequences,
    trainer,
    weights,
)
from tests.lit.fronts import (
    EQUAL,
    LOSSES,
    RAGGED,
    SEQUENCES,
    WINDOW,
    Clip,
    Run,
    assert_big_batch,
    big_batch,
    clip_options,
    fit,
    make_strategy,
    merged,
    micro_batches,
    ragged,
    train,
)
from tests.zoo.callbacks import Gradients
from tests.zoo.modules import OldMixed, OldPlain, Plain, hooked, old_trainer, on_front
from trainkit import (
    AccumulationCallback,
    Accumulator,
    MicroBatching,
    PerSample,
    PerToken,
    PlainComparison,
    TrainkitError,
    WindowMonitor,
)

EXACT = TOLERANCE[torch.float64]
MORE = ragged_sequences(40)
STRATEGIES = ["PerSample", "PerToken", "Uniform"]
FRONTS = ["mixin", "callback", "mixin"]
NAMES = list(OPTIMIZERS)
CLIPS: list[Clip] = ["norm", "value", None]
SQUARE = [
    (strategy, FRONTS[j], NAMES[(i + j) % 3], CLIPS[(i + 2 * j) % 3])
    for i, strategy in enumerate(STRATEGIES)
    for j in range(3)
]
"""Two orthogonal Latin squares: each pair of values of two columns stands once."""
TURNS = cycle(["mean", "sum"])
GRID: list[Any] = [
    *((*row, next(TURNS), torch.float64) for row in SQUARE),
    *((*row[:2], "sgd", row[3], next(TURNS), torch.float32) for row in SQUARE[::4]),
]


def data_for(strategy: str) -> tuple[Any, ...]:
    sizes = EQUAL if strategy == "Uniform" else RAGGED
    return MORE[: sum(sizes)], sizes, LOSSES[strategy]


@cache
def reference(strategy: str, optimizer: str, clip: Clip, dtype: torch.dtype) -> Run:
    return big_batch(*data_for(strategy), optimizer=optimizer, clip=clip, dtype=dtype)


@cache
def plainly(strategy: str, optimizer: str, clip: Clip) -> Run:
    """Plain Lightning, which divides by the number of micro-batches."""
    data, how = data_for(strategy), {"optimizer": optimizer, "clip": clip}
    return train("plain", make_strategy(strategy), *data, **how)


@pytest.mark.parametrize(
    ("strategy", "front", "optimizer", "clip", "reduction", "dtype"), GRID
)
def test_every_front_equals_big_batch(
    strategy: str, front: str, optimizer: str, clip: Clip, reduction: Any, dtype: Any
) -> None:
    """Weights after one and after two epochs, and every window's loss. Plain Lightning
    does not (pytorch-lightning#20350, #19987). With equal batches only the length of
    the short window's gradient is wrong there, which clipping to a norm hides."""
    of, data = (strategy, optimizer, clip), data_for(strategy)
    by = make_strategy(strategy, reduction)
    run = train(front, by, *data, optimizer=optimizer, clip=clip, dtype=dtype)
    expected = reference(*of, dtype)
    assert max(run.deviations(expected)) <= TOLERANCE[dtype]
    close = 1e-9 if dtype == torch.float64 else 1e-4
    assert run.losses == pytest.approx(expected.losses, rel=close)
    off = plainly(*of).deviations(reference(*of, torch.float64))
    is_hidden = strategy == "Uniform" and clip == "norm"
    assert (off[-1] > NAIVE) is not is_hidden


@pytest.mark.parametrize(
    ("optimizer", "clip"), [*zip(["momentum", "sgd", "adamw"], CLIPS, strict=True)]
)
def test_torch_reference_equals_lightning_with_big_batches(
    optimizer: str, clip: Clip
) -> None:
    """The reference loop is what Lightning does without accumulation; and clipping
    changes what is trained, or the grid would prove nothing of it."""
    made, how = {"optimizer": optimizer}, {"window": 1, **clip_options(clip)}
    fitted = fit("plain", sizes=merged(RAGGED), made=made, **how)
    expected = big_batch(SEQUENCES, optimizer=optimizer, clip=clip)
    start = expected.start
    assert deviation(fitted.lightning_module, expected.end, start) <= EXACT
    if clip and optimizer == "sgd":
        free = big_batch(SEQUENCES, optimizer=optimizer).end
        assert deviation(expected.end, free, start) > 0.1


def test_steps_counted_equals_number_of_windows() -> None:
    """pytorch-lightning#1549, NeMo-Automodel#2257, keras#19990: no window is lost and
    no step is taken inside one; Adam's counter agrees."""
    fitted = fit("mixin", made={"optimizer": "adamw"})
    counters = [float(s["step"]) for s in fitted.optimizers[0].state.values()]
    assert fitted.global_step == 2 * 3
    assert set(counters) == {6.0}


def test_a_backward_of_ones_own_equals_the_big_batch() -> None:
    """It starts from the loss alone, and drops the gradient that a pass begins with
    elsewhere."""
    assert_big_batch(hooked(Plain, backward=lambda _, loss, *args, **how: go(loss)))


def go(loss: Tensor) -> None:
    loss.backward()


@pytest.mark.parametrize("front", ["mixin", "callback", "plain"])
def test_pytorch_lightning_equals_big_batch(front: str) -> None:
    """The other namespace, whose classes are not the same; without trainkit it is off,
    too."""
    module: Any = OldMixed() if front == "mixin" else OldPlain()
    ours: Any = [AccumulationCallback(PerToken())] if front == "callback" else []
    start, clip = weights(module), clip_options("norm")
    fitted = old_trainer(WINDOW, callbacks=ours, **clip)
    fitted.fit(module, micro_batches(SEQUENCES))
    expected = big_batch(SEQUENCES, optimizer="momentum", clip="norm")
    assert (deviation(module, expected.end, start) <= EXACT) is (front != "plain")


# ---- a batch is weighed as `training_step` gets it -----------------------------------


def hide(batch: Any) -> None:
    """Some labels do not count, more of them in long rows."""
    batch["labels"][:, 3:] = -100


BY_ITSELF = hooked(Plain, on_train_batch_start=lambda module, batch, _: hide(batch))


def hides(*args: Any) -> None:
    """As a hook of a callback."""
    hide(args[2])


@pytest.mark.parametrize(
    ("kind", "callbacks"),
    [(BY_ITSELF, list), (Plain, lambda: [LambdaCallback(on_train_batch_start=hides)])],
    ids=["module", "callback"],
)
def test_batch_edited_before_its_step_equals_the_big_batch(
    kind: Any, callbacks: Any
) -> None:
    """Also where others look at batches and losses."""
    fits = assert_big_batch(kind, callbacks=callbacks)
    others = [*callbacks(), WindowMonitor(1), PlainComparison()]
    watched = fit("callback", kind, *others).lightning_module
    assert torch.equal(weights(watched), weights(fits["callback"].lightning_module))


def test_training_step_is_asked_for_no_argument() -> None:
    """A new argument breaks those who override the method: transformers#36331."""
    bare = hooked(Plain, training_step=lambda module, batch: module.loss_of(batch))
    assert_big_batch(bare)


class LastGradients(Gradients, Checkpoint):
    """One that Lightning sorts behind all others."""


def are_same(seen: list[Tensor], expected: list[Tensor]) -> bool:
    assert len(seen) == len(expected)
    pairs = zip(seen, expected, strict=True)
    return all(torch.allclose(a, b, rtol=1e-10, atol=1e-12) for a, b in pairs)


@pytest.mark.parametrize(
    ("front", "reader"),
    [
        ("mixin", Gradients),
        ("before", LastGradients),
        ("after", Gradients),
        ("plain", Gradients),
    ],
)
def test_gradient_seen_by_any_callback_equals_big_batch(
    front: str, reader: type[Gradients]
) -> None:
    """Wherever it stands in the list (keras#20241's smaller last batch included), and
    the others keep their order. Plain Lightning shows another."""
    is_callback = front in ("before", "after")
    module, ours = on_front("callback" if is_callback else front)
    first, second = reader(), Gradients()
    listed = [*ours, first, second] if front == "after" else [first, second, *ours]
    how: dict[str, Any] = {"enable_checkpointing": reader is LastGradients}
    fitted: Any = trainer(WINDOW, max_epochs=1, callbacks=listed, **how)
    fitted.fit(module, ragged(RAGGED))
    exact = big_batch(SEQUENCES, epochs=1).gradients
    for each in (first, second):
        assert are_same(each.seen, exact) is (front != "plain")
    in_order = [first, second] if reader is Gradients else [second, first]
    assert [c for c in fitted.callbacks if isinstance(c, Gradients)] == in_order
    assert fitted.callbacks[: len(ours)] == ours


@pytest.mark.parametrize("front", ["mixin", "callback", "plain"])
@pytest.mark.parametrize("clip", ["norm", "value"])
def test_gradient_seen_by_module_hooks_equals_big_batch(clip: Clip, front: str) -> None:
    """Clipping comes once, after the division (nano-world-model#22, keras#19990); the
    hook before it sees the exact gradient (transformers#35204)."""
    seen: dict[str, list[Tensor]] = {"before": [], "after": []}

    def before(self: Plain, optimizer: Any) -> None:
        seen["before"].append(gradients(self).clone())

    def clips(self: Plain, *args: Any, **how: Any) -> None:
        Plain.configure_gradient_clipping(self, *args, **how)
        seen["after"].append(gradients(self).clone())

    hooks = {"on_before_optimizer_step": before, "configure_gradient_clipping": clips}
    reading = hooked(Plain, **hooks)
    made = {"options": {"proof": "off"}}  # whose copies have these hooks too
    fit(front, reading, max_epochs=1, made=made, **clip_options(clip))
    big = big_batch(SEQUENCES, clip=clip, epochs=1)
    assert are_same(seen["before"], big.gradients) is (front != "plain")
    assert are_same(seen["after"], big.clipped) is (front != "plain")
    assert (big.gradients[0] - big.clipped[0]).norm() > 0.01


# ---- whoever listens to a backward pass, or runs it by itself ------------------------

SEEN: list[str] = []


def noted(name: str) -> Callable[..., None]:
    return lambda *args: SEEN.append(name)


def own_backward(self: Any, loss: Any, *args: Any, **kwargs: Any) -> None:
    SEEN.append("backward")
    loss.backward(*args, **kwargs)


@wraps(pl.LightningModule.backward)
def wrapped_backward(self: Any, loss: Any, *args: Any, **kwargs: Any) -> None:
    loss.backward()


class Patching(pl.Callback):
    """Gives the module another `backward`, once training has begun."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        pl_module.backward = lambda loss, *args, **kwargs: loss.backward()


class Again(pl.Callback):
    """Runs a pass of its own before that of each micro-batch."""

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Any) -> None:
        loss.backward(retain_graph=True)


def listening() -> list[Any]:
    names = "on_before_backward", "on_after_backward"
    return [LambdaCallback(**{name: noted(name) for name in names})]


WAYS: dict[str, tuple[Any, Callable[[], list[Any]], set[str]]] = {
    "nobody": (Plain, list, set()),
    "a callback": (Plain, listening, {"on_before_backward", "on_after_backward"}),
    "the module": (
        hooked(Plain, on_after_backward=noted("module")), list, {"module"},
    ),
    "its own backward": (hooked(Plain, backward=own_backward), list, {"backward"}),
    "a wrapped one": (hooked(Plain, backward=wrapped_backward), list, set()),
    "a late one": (Plain, lambda: [Patching()], set()),
}  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
def test_windows_equal_the_big_batch_whoever_listens(way: str) -> None:
    kind, callbacks, names = WAYS[way]
    SEEN.clear()
    assert_big_batch(kind, callbacks=callbacks)
    assert set(SEEN) == names


class Late(pl.Callback):
    """Brings a listener once training has begun."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        trainer.callbacks += listening()

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        pl_module.on_after_backward = noted("module")


@pytest.mark.filterwarnings("ignore:accumulation. an open window:UserWarning")
@pytest.mark.parametrize(("cut", "window"), [(None, 4), (MicroBatching(size=3), 1)])
def test_a_second_pass_of_a_loss_is_refused(cut: Any, window: int) -> None:
    with pytest.raises(TrainkitError, match="was weighted twice or not at all"):
        fit("callback", Plain, Again(), made={"cut": cut}, window=window, max_epochs=1)


@pytest.mark.parametrize(("cut", "window"), [(None, 4), (MicroBatching(size=3), 1)])
def test_hooks_that_come_late_are_called(cut: Any, window: int) -> None:
    SEEN.clear()
    fit("callback", Plain, Late(), made={"cut": cut}, window=window, max_epochs=1)
    names = {"on_before_backward", "on_after_backward", "module"}
    assert {name: SEEN.count(name) > 1 for name in names} == dict.fromkeys(names, True)


@pytest.mark.parametrize("of", [(3, 1), (torch.tensor(3.0), torch.tensor(1))])
@pytest.mark.parametrize("told", [False, True])
@pytest.mark.parametrize("shape", [(), (1,)])
def test_a_pass_begins_with_the_gradient_that_a_hook_would_make(
    of: Any, told: bool, shape: Any
) -> None:
    """`backward()` without an argument of its own, and with one, which needs a hook;
    numbers and tensors as weights, losses of no dimension and of one."""
    found = []
    for own in (None, torch.Tensor.backward):
        parameter = torch.ones(2, dtype=torch.float64, requires_grad=True)
        accumulator = Accumulator(PerSample())
        if told:
            accumulator.tell({"": of})
        for factor, weight in zip((2.0, 7.0), of, strict=True):
            loss = (factor * parameter).mean().reshape(shape)
            accumulator.backward(loss, weight=weight, backward=own)
        stats = accumulator.finish([parameter])
        assert parameter.grad is not None
        found.append((parameter.grad.tolist(), float(stats.loss)))
    assert found[0] == found[1] == ([1.625, 1.625], 3.25)
