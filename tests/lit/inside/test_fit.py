"""A fit with an inner cut equals a fit of the whole batches."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelPruning
from torch.utils.data import TensorDataset

from tests.core.inside.common import Loss, Net, batch, dice, nt_xent
from tests.helpers import NAIVE, deviation, trainer, weights
from tests.lit.inside.common import Foreign, Own, copies, data, fit
from trainkit import (
    AccumulationCallback,
    ExactResume,
    MicroBatching,
    PerSample,
    ResumableLoader,
    TrainkitError,
)

EXACT = 1e-12


def off(module: Any, reference: Any, start: Any) -> float:
    return deviation(weights(module), weights(reference), weights(start))


@pytest.mark.parametrize(
    ("kind", "optimizer", "clip"),
    [(Foreign, "adamw", None), (Own, "sgd", 0.05)],
)
def test_fit_equals_that_of_the_whole_batch(
    kind: Any, optimizer: str, clip: float | None
) -> None:
    start = kind(calls=2, optimizer=optimizer)
    plain = Foreign(calls=2, optimizer=optimizer)
    plain.load_state_dict(start.state_dict())
    module = copy.deepcopy(start)
    fit(plain, None, gradient_clip_val=clip)
    run = fit(module, MicroBatching(size=4, inside="net"), gradient_clip_val=clip)
    assert off(module, plain, start) <= EXACT
    assert module.logged == pytest.approx(plain.logged, rel=EXACT)
    assert set(run.callback_metrics) >= {"loss"}
    assert "forward" not in vars(module.net)


@pytest.mark.parametrize("loss", [nt_xent, dice])
def test_any_loss_is_that_of_the_whole_batch(loss: Loss) -> None:
    start = Foreign(loss)
    plain, module, naive = copies(start, 3)
    fit(plain, None)
    fit(module, MicroBatching(size=5, inside="net"))
    assert off(module, plain, start) <= EXACT
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        callback = AccumulationCallback(PerSample(), proof="off")
        fit(naive, None, callback, loader=data(size=4), accumulate=5)
    assert off(naive, plain, start) > NAIVE  # the control: accumulation


@pytest.mark.parametrize(
    ("inside", "size"),  # None begins with all rows
    [("auto", 3), ("auto", None), ("self", 3), (("net.body", "net.head"), None)],
)
def test_which_modules_are_cut_does_not_matter(inside: Any, size: Any) -> None:
    start = Foreign(calls=2)
    plain, module = copies(start, 2)
    fit(plain, None)
    fit(module, MicroBatching(size=size, inside=inside))
    assert off(module, plain, start) <= EXACT


def test_a_strategy_weighs_windows_of_several_batches() -> None:
    """Means over rows: the inner cut, and accumulation on top of it."""

    def mean(out: Any, labels: Any) -> Any:
        return torch.nn.functional.cross_entropy(out, labels)

    start = Foreign(mean)
    plain, module = copies(start, 2)
    fit(plain, None, loader=data(size=33))
    callback = AccumulationCallback(
        PerSample(), micro_batching=MicroBatching(size=4, inside="net")
    )
    fit(module, None, callback, loader=data(size=11), accumulate=3)
    assert off(module, plain, start) <= EXACT


def test_the_forward_is_given_back_after_an_error() -> None:
    class Fails(Foreign):
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            assert "forward" in vars(self.net)
            raise RuntimeError("as asked")

    module = Fails()
    with pytest.raises(RuntimeError, match="as asked"):
        fit(module, MicroBatching(size=4, inside="net"))
    assert "forward" not in vars(module.net)


def resumable(folder: Any, steps: int, ckpt_path: Any = None) -> Any:
    """The weights after so many steps, with what resumes to the bit."""
    module = Foreign(calls=2, dropout=0.3, optimizer="adamw")
    torch.manual_seed(7)
    callbacks = [
        AccumulationCallback(micro_batching=MicroBatching(size=4, inside="net")),
        ExactResume(dirpath=folder, every_n_train_steps=1),
    ]
    loader = ResumableLoader(TensorDataset(*batch(66)), batch_size=22, shuffle=True)
    how: Any = {"max_epochs": -1, "max_steps": steps, "enable_checkpointing": True}
    run = trainer(callbacks=callbacks, **how)
    run.fit(module, loader, ckpt_path=ckpt_path)
    return weights(module)


def test_a_resumed_run_is_the_uninterrupted_one_to_the_bit(tmp_path: Any) -> None:
    whole = resumable(tmp_path / "whole", 7)
    half = resumable(tmp_path / "half", 4)
    assert not torch.equal(half, whole)
    torch.rand(9)
    resumed = resumable(tmp_path / "half", 7, tmp_path / "half" / "last.ckpt")
    assert torch.equal(resumed, whole)


def test_memory_that_runs_out_makes_chunks_finer_and_is_remembered(
    tmp_path: Any,
) -> None:
    class Small(Net):
        """Has memory for 6 rows with a graph."""

        def forward(self, x: Any) -> Any:
            if torch.is_grad_enabled() and len(x) > 6:
                raise torch.OutOfMemoryError("as asked")
            return super().forward(x)

    def module(kind: type[Net]) -> Foreign:
        made = Foreign(calls=2)
        made.net = kind().double()
        return made

    plain, start, small = module(Net), module(Net), module(Small)
    fit(plain, None)
    callback = AccumulationCallback(micro_batching=MicroBatching(inside="net"))
    run = fit(small, None, callback)
    assert off(small, plain, start) <= EXACT
    assert callback.micro_batch_size == 5  # halves of 22, 11
    run.save_checkpoint(tmp_path / "small.ckpt", weights_only=False)
    held = torch.load(tmp_path / "small.ckpt", weights_only=False)
    assert held["trainkit_micro_batching"] == {"limit": 5}


@pytest.mark.parametrize("inside", ["net", "net.body", "auto"])
def test_what_will_be_pruned_is_refused_before_the_first_step(inside: str) -> None:
    """Pruning begins at an epoch's end. The control: another submodule is cut."""

    def pruned(cut: MicroBatching | None) -> Any:
        module = Foreign(dice)
        of: Any = [(module.net.body[0], "weight")]
        fit(module, cut, ModelPruning("l1_unstructured", of, amount=0.2))
        return module

    with pytest.raises(TrainkitError, match="': ModelPruning lets each call"):
        pruned(MicroBatching(size=4, inside=inside))
    whole, cut = pruned(None), pruned(MicroBatching(size=4, inside="net.head"))
    assert (
        0
        < int((whole.net.body[0].weight == 0).sum())
        < whole.net.body[0].weight.numel()
    )
    torch.testing.assert_close(cut.state_dict(), whole.state_dict())
