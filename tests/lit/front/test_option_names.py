"""One option has one name, on the mixin, on the callback and in a loop of one's own."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
from lightning.pytorch import Trainer

from tests.lit.fronts import Mixed
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
from trainkit.lit.front.mixin_callback import MixinCallback

LONGER = {"accumulation_checks", "accumulation_wide_gradients", "accumulation_proof"}
"""For a module that has attributes of the shorter names for itself."""
OTHERWISE = {"accumulation_aggregation": "aggregation"}
"""A graph network has an `aggregation` of its own, with the very same values, and it
would change gradients without a word."""
OF_A_LOOP = {
    "module": "the Trainer has it",
    "process_group": "the Trainer's strategy shows it",
    "nonfinite": "it follows from the Trainer's gradient scaler",
    "scaler": "the Trainer's precision plugin has it",
}
OF_A_TRAINER = {
    "micro_batching": "a loop cuts its batches itself",
    "hold_schedulers": "a loop moves its schedulers itself",
    "proof": "a loop's batches and steps are its own",
}
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


def test_mixin_and_callback_have_the_same_options() -> None:
    names = set(AccumulationMixin.__annotations__)
    assert names == set(OTHERS) | LONGER
    assert all(getattr(AccumulationMixin, name) is None for name in LONGER)
    mixin = {
        OTHERWISE.get(name, name): getattr(AccumulationMixin, name)
        for name in names - LONGER
    }
    callback = arguments(AccumulationCallback)
    assert callback.pop("strategy") is None  # as the accumulator calls it
    assert mixin == callback  # the defaults too


def test_callback_and_accumulator_have_the_same_options() -> None:
    callback, loop = arguments(AccumulationCallback), arguments(Accumulator)
    del callback["accumulation"], callback["strategy"], loop["strategy"]
    assert set(callback) - set(loop) == set(OF_A_TRAINER)
    assert set(loop) - set(callback) == set(OF_A_LOOP)
    assert all(callback[name] == loop[name] for name in set(callback) & set(loop))


def driver_of(**said: Any) -> tuple[Any, MixinCallback]:
    """A mixin module that says so, and the callback that it brings."""
    module: Any = Mixed()
    for name, value in said.items():
        setattr(module, name, value)
    module.trainer = Trainer(logger=False, enable_checkpointing=False)
    found = (c for c in module.configure_callbacks() if isinstance(c, MixinCallback))
    driver = next(found)
    driver._choose(module)
    return module, driver


def seen(each: Any, module: Any, name: str) -> Any:
    """What a callback has been told."""
    if name == "accumulation":
        return list(each.strategies.values())
    if name == "hold_schedulers":
        return each.holds_schedulers(module)
    return getattr(each, OTHERWISE.get(name, name))


@pytest.mark.parametrize("name", OTHERS)
def test_what_the_mixin_says_is_what_the_callback_is_told(name: str) -> None:
    said = OTHERS[name]
    told = {"accumulation": PerToken(), OTHERWISE.get(name, name): said}
    module, driver = driver_of(**{name: said})
    assert seen(driver, module, name) == seen(AccumulationCallback(**told), None, name)
    module, unsaid = driver_of()  # the control
    assert seen(unsaid, module, name) != seen(AccumulationCallback(**told), None, name)


@pytest.mark.parametrize("name", sorted(LONGER))
def test_the_longer_name_comes_first(name: str) -> None:
    short = name.removeprefix("accumulation_")
    plain = getattr(AccumulationMixin, short)
    assert getattr(driver_of(**{name: OTHERS[short]})[1], short) == OTHERS[short]
    # Something of the module's own under the shorter name does no harm then.
    own = driver_of(**{name: plain, short: ["its own"]})[1]
    assert getattr(own, short) == plain


def test_strategy_is_another_name_of_accumulation() -> None:
    for said in (PerSample(), {"ce": PerToken(), "kl": PerSample()}):
        one, other = AccumulationCallback(said), AccumulationCallback(strategy=said)
        assert one.strategies == other.strategies
    with pytest.raises(TrainkitError, match="two names of one option, received Per"):
        AccumulationCallback(PerSample(), strategy=PerToken())
    with pytest.raises(TrainkitError, match="must say what .*, received None"):
        AccumulationCallback()
