"""Few shapes: what a compiled model sees, trained as the padded big batch."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, ClassVar

import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback
from torch import nn
from torch.utils.data import DataLoader

from tests.helpers import NAIVE, deviation, trainer
from tests.lit.split.common import (
    SEQUENCES,
    START,
    Split,
    assert_as_whole,
    fit,
    off,
    samples,
)
from tests.zoo.modules import hooked, pad_and_mask
from trainkit import (
    MicroBatching,
    PerSample,
    PerToken,
    TrainkitError,
    Uniform,
    Weighed,
    check,
)
from trainkit.core.split.filling import shapes_of
from trainkit.lit.callback.base import is_rehearsal

THREE = MicroBatching(tokens=48, shapes=3)
WIDTHS = MicroBatching(tokens=48, shapes=(24, 12, 6))


class Watched(Split):
    """Keeps the shapes of what it trains on, where nothing puts them back."""

    shapes: ClassVar[set[tuple[int, ...]]] = set()

    def on_fit_start(self) -> None:
        self.shapes.clear()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if not is_rehearsal(self.trainer):
            self.shapes.add(tuple(batch["ids"].shape))
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("cut", [THREE, WIDTHS], ids=["three", "widths"])
@pytest.mark.parametrize("window", [1, 2])
def test_few_shapes_train_as_the_padded_big_batch(cut: Any, window: int) -> None:
    """Also where windows have several loader batches; the control has more shapes."""
    ours, plain = Watched(cut=cut), Watched(cut=MicroBatching(tokens=48))
    assert off(ours, Split(cut=None), window=window) <= 1e-12
    assert ours.shapes <= {*shapes_of(cut)}
    assert off(plain, Split(cut=None), window=window) <= 1e-12
    assert len(plain.shapes) > 2 * len(shapes_of(cut))


def test_callbacks_and_logs_see_what_they_see_of_whole_batches() -> None:
    assert_as_whole(cut=THREE, tolerance=1e-12)


def with_weights(rows: Any) -> dict[str, Any]:
    return {**pad_and_mask(rows), "weight": 1.0 + torch.arange(len(rows)).double() % 3}


def weighted_mean(self: Any, batch: Any, batch_idx: int) -> Any:
    """A mean over rows with weights, and each row's loss beside it."""
    logits = self.net(batch["ids"]).transpose(1, 2)
    losses = nn.functional.cross_entropy(logits, batch["labels"], reduction="none")
    each, weight = losses.sum(1), batch["weight"]
    loss = (each * weight).sum() / weight.sum()
    return {"loss": loss, "each": each.detach(), "names": [*range(len(each))]}


@pytest.mark.parametrize("is_right", [True, False])
def test_rows_with_weights_of_their_own_may_be_filled(is_right: bool) -> None:
    """And what is returned for each row has no entry for one that fills. The control
    weighs labels."""
    data = samples(16, with_weights)
    strategy: Any = PerSample(mask="weight") if is_right else PerToken()
    returned: list[Any] = []
    keep = LambdaCallback(on_train_batch_end=lambda *args: returned.append(args[2]))
    kind = hooked(Split, training_step=weighted_mean, proof="off")
    whole, ours = kind(cut=None), kind(cut=THREE, strategy=strategy)
    fit(whole, data=data)
    fit(ours, keep, data=data)
    found = deviation(ours, whole, START)
    assert found <= 1e-12 if is_right else found > NAIVE
    assert [len(each["each"]) for each in returned] == [16, 16, 8] * 2


@pytest.mark.parametrize("cut", [THREE, MicroBatching(tokens=48)], ids=["few", "many"])
def test_nothing_is_compiled_after_the_first_micro_batch_of_each_shape(
    cut: MicroBatching,
) -> None:
    """The control: without `shapes=`, nearly every micro-batch has another shape."""
    torch._dynamo.reset()
    compiled: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        compiled.append(inputs)
        return graph.forward

    module = Watched(cut=cut)
    module.proof = "off"
    net = torch.compile(module.net, backend=backend, dynamic=False)

    def on_epoch_end(trainer: Any, module: Any) -> None:
        torch._dynamo.config.error_on_recompile = cut is THREE

    module.loss = lambda _, batch, reduction="mean": Split().loss(net, batch, reduction)
    try:
        with torch._dynamo.config.patch(recompile_limit=64):
            fit(module, LambdaCallback(on_train_epoch_end=on_epoch_end))
    finally:
        torch._dynamo.config.error_on_recompile = False
        torch._dynamo.reset()
    assert len(compiled) == len(module.shapes)
    assert (len(compiled) <= 3) == (cut is THREE)


# ---- refused -------------------------------------------------------------------------


def test_strategy_is_refused_when_rows_first_fill_a_micro_batch() -> None:
    """Loader batches that are full before are trained on as ever."""
    full = [next(each for each in SEQUENCES if len(each[0]) > 16)] * 4
    width = len(full[0][0])
    cut = MicroBatching(tokens=2 * width, shapes=(width,))
    module = Split(cut=cut, strategy=PerSample())
    module.proof, data = "off", [pad_and_mask(full), pad_and_mask(full[:3])]
    fitting = trainer(1, max_epochs=1)
    with pytest.raises(TrainkitError, match="PerSample has neither a mask nor labels"):
        fitting.fit(module, DataLoader(data, batch_size=None))  # type: ignore[arg-type]
    assert fitting.global_step == 1


class Unweighted(Split):
    """Its strategy weighs rows, and its loss does not."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        hidden = self.net(batch["ids"]) * batch["attention_mask"][..., None]
        return hidden.sum((1, 2)).square().mean()


@pytest.mark.filterwarnings("ignore:.*proof")
def test_proof_measures_with_rows_that_fill() -> None:
    rows = [each for each in SEQUENCES if len(each[0]) > 9][:10]
    batch = {**pad_and_mask(rows), "weight": torch.ones(len(rows))}
    cut = MicroBatching(tokens=80, shapes=(20,))
    module = Unweighted(cut=cut, strategy=PerSample(mask="weight"))
    data = DataLoader([batch], batch_size=None)  # type: ignore[arg-type]
    assert not check(module, data).exact
    module.micro_batching = MicroBatching(tokens=80)
    assert check(module, data).exact


class SeesPadding(Split):
    """Its loss is right, but a token sees the mean of its row's columns."""

    def __init__(self, **how: Any) -> None:
        super().__init__(**how)
        self.net.embed.register_forward_hook(lambda m, i, o: o + o.mean(1)[:, None])


UNPROVEN = hooked(Split, proof="off")


@pytest.mark.filterwarnings("ignore:trainkit . micro_batching. Uniform")
@pytest.mark.parametrize(
    ("kind", "strategy", "text"),
    [
        *[
            (UNPROVEN, strategy, "must weigh nothing, and .* has neither a mask nor")
            for strategy in (Uniform(), Weighed(), {"a": PerToken(), "b": PerSample()})
        ],
        (SeesPadding, PerToken(), "shapes: the model sees its padding"),
    ],
)
def test_what_would_count_what_fills_is_refused(
    kind: Any, strategy: Any, text: str
) -> None:
    with pytest.raises(TrainkitError, match=text):
        fit(kind(cut=THREE, strategy=strategy))


def test_the_proof_finds_that_it_sees_columns_that_fill() -> None:
    """Where no loader batch has padding, it is rehearsed all the same."""
    rows = [each for each in SEQUENCES if len(each[0]) >= 9]
    rows = [(ids[:9], labels[:9]) for ids, labels in rows]
    data = DataLoader(rows, 7, collate_fn=pad_and_mask)  # type: ignore[arg-type]
    refused = pytest.raises(TrainkitError, match="fill a micro-batch")
    for kind, outcome in ((Split, nullcontext()), (SeesPadding, refused)):
        with outcome:
            fit(hooked(kind, proof="require")(cut=THREE), data=data)
