"""One option has one name in each way in, and `check` takes what the module says."""

from __future__ import annotations

import inspect
import itertools
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningDataModule

import trainkit
from tests.helpers import trainer
from tests.lit.fronts import RAGGED, ragged, windows_of
from tests.lit.proof.starting import plain_trainer
from tests.lit.proof.test_check import SPLIT, check_quickly
from tests.zoo import causes
from tests.zoo.causes import Images, Tokens, image_loader, token_loader
from tests.zoo.modules import Mixed, hooked
from trainkit import (
    AccumulationCallback,
    AccumulationMixin,
    Accumulator,
    MicroBatching,
    PerSample,
    PerToken,
    TrainkitError,
    Uniform,
)
from trainkit.lit.proof.subject import as_given

OTHERWISE = {"accumulation_aggregation": "aggregation", "accumulation": "strategy"}
"""A graph network has an `aggregation` of its own, with the very same values, and it
would change gradients without a word."""
OF_A_LOOP = {"module", "process_group", "scaler"}
"""The Trainer and its parts show them."""
OF_A_TRAINER = {"micro_batching", "hold_schedulers", "proof"}
"""A loop cuts its batches, moves its schedulers and takes its steps itself."""
OTHERS: dict[str, Any] = {
    "accumulation": Uniform(),
    "micro_batching": MicroBatching(size=2),
    "checks": "now",
    "wide_gradients": True,
    "hold_schedulers": True,
    "proof": "off",
    "accumulation_aggregation": "sum",
}
"""Each option of the mixin with a value that is not the default."""


def arguments(made: Any) -> dict[str, Any]:
    found = list(inspect.signature(made.__init__).parameters.values())[1:]
    return {each.name: each.default for each in found}


def test_all_have_the_same_options() -> None:
    """And the same defaults."""
    names = set(AccumulationMixin.__annotations__)
    assert names == set(OTHERS)
    mixin = {OTHERWISE.get(n, n): getattr(AccumulationMixin, n) for n in names}
    callback, loop = arguments(AccumulationCallback), arguments(Accumulator)
    assert mixin == callback
    del callback["strategy"], loop["strategy"]
    assert set(callback) - set(loop) == OF_A_TRAINER
    assert set(loop) - set(callback) == OF_A_LOOP
    assert all(callback[name] == loop[name] for name in set(callback) & set(loop))


def seen_of(said: dict[str, Any]) -> dict[str, Any]:
    """What the callback that a mixin module brings has been told by it."""
    module: Any = Mixed()
    for option, value in said.items():
        setattr(module, option, value)
    fitted = trainer(max_steps=1)
    fitted.fit(module, ragged(RAGGED))
    return seen(windows_of(fitted))


def seen(each: Any) -> dict[str, Any]:
    """What a callback has been told."""
    found = {n: getattr(each, OTHERWISE.get(n, n), None) for n in OTHERS}
    return found | {"accumulation": list(each.strategies.values())}


@pytest.mark.filterwarnings("ignore:.*Uniform.. weighs micro-batches alike")
def test_what_the_mixin_says_is_what_the_callback_is_told() -> None:
    told = {OTHERWISE.get(name, name): said for name, said in OTHERS.items()}
    callback, nothing = seen(AccumulationCallback(**told)), seen_of({})
    assert seen_of(OTHERS) == callback
    assert all(nothing[name] != callback[name] for name in OTHERS)  # the control


def test_the_strategy_may_be_named() -> None:
    for said in (PerSample(), {"ce": PerToken(), "kl": PerSample()}):
        one, other = AccumulationCallback(said), AccumulationCallback(strategy=said)
        assert one.strategies == other.strategies
    with pytest.raises(TrainkitError, match="must say what .*, received None"):
        AccumulationCallback()


def test_an_attribute_of_ones_own_with_an_options_name_is_refused() -> None:
    for name in ("checks", "proof"):
        module = hooked(Mixed, **{name: lambda self: None})()
        with pytest.raises(TrainkitError, match=f"{name}: must be"):
            trainer(max_steps=1).fit(module, ragged(RAGGED))


# ---- what check is given -------------------------------------------------------------


def fails(module: Any, logits: torch.Tensor, batch: Any) -> Any:
    raise KeyError("a user's mistake")


def test_an_error_of_the_step_is_raised_as_it_is() -> None:
    with pytest.raises(KeyError, match="a user's mistake"):
        check_quickly(Tokens(fails), token_loader(), strategy=PerToken())


class Unending:
    """Has no length."""

    def __iter__(self) -> Any:
        return itertools.cycle(image_loader())


class OfMany(Unending):
    """A class of one's own around loaders."""

    loaders = ()

    def __len__(self) -> int:
        return 4


class Indexed:
    """Gives batches by their number, as a sequence of Keras does."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        return [*image_loader()][index]


@pytest.mark.parametrize(
    ("data", "num_rows"),
    [
        (lambda: next(iter(image_loader())), 4),
        (hooked(LightningDataModule, train_dataloader=lambda _: image_loader()), 10),
        (Unending, 4),
        (OfMany, 4),
        (Indexed, 4),
    ],
)
def test_data_are_a_batch_or_what_yields_batches(data: Any, num_rows: int) -> None:
    module = Images(causes.classified)
    report = check_quickly(module, data(), strategy=PerSample())
    assert report.exact
    assert report.num_rows == num_rows


class DrawsBefore(Tokens):
    """Draws when no micro-batch is under way."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.noise = torch.rand(len(batch["ids"]))


@pytest.mark.parametrize("micro_batches", [None, SPLIT])
def test_what_a_hook_draws_before_a_micro_batch_is_no_harm(micro_batches: Any) -> None:
    how: dict[str, Any] = {"strategy": PerToken(), "micro_batches": micro_batches}
    assert check_quickly(DrawsBefore(), token_loader(), **how).exact


class Unread(Tokens):
    """Without the mixin nothing reads these."""

    accumulation, micro_batching = PerSample(), SPLIT


class Read(trainkit.AccumulationMixin, Tokens):
    accumulation, micro_batching = PerToken(), SPLIT


def by_callback(*args: Any, **how: Any) -> Any:
    return {"trainer": plain_trainer([trainkit.AccumulationCallback(*args, **how)])}


INNER = MicroBatching(size=2, inside="head")


@pytest.mark.parametrize(
    ("module", "how", "strategy", "size", "inside"),
    [
        (Read, {}, PerToken(), SPLIT.size, None),
        (Read, {"strategy": PerSample()}, PerSample(), SPLIT.size, None),
        (Read, {"micro_batches": INNER}, PerToken(), INNER.size, "head"),
        (Unread, {}, None, None, None),
        (Unread, by_callback(PerToken()), PerToken(), None, None),
        (
            Unread,
            by_callback(PerToken(), micro_batching=SPLIT),
            PerToken(),
            SPLIT.size,
            None,
        ),
        (Unread, by_callback(micro_batching=INNER), None, INNER.size, "head"),
    ],
)
def test_what_is_not_given_is_that_of_the_module_or_its_callback(
    module: Any, how: Any, strategy: Any, size: Any, inside: Any, monkeypatch: Any
) -> None:
    subjects: list[Any] = []

    def noted(subject: Any, *more: Any) -> trainkit.Report:
        subjects.append(subject)
        return trainkit.Report.of_nothing("")

    monkeypatch.setattr("trainkit.lit.front.check.measured", noted)
    check_quickly(module(), token_loader(), **how)
    (subject,) = subjects
    assert as_given(subject.strategies) == strategy
    assert getattr(subject.options, "size", None) == size
    assert getattr(subject.options, "inside", None) == inside
