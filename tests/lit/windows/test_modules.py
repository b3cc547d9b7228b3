"""Whatever a module, its optimizer and callbacks are: windows equal big batches."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from itertools import cycle
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    EMAWeightAveraging,
    LambdaCallback,
    StochasticWeightAveraging,
    WeightAveraging,
)
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from tests.helpers import NAIVE, TOLERANCE, deviation, trainer, weights
from tests.lit.fronts import (
    RAGGED,
    SEQUENCES,
    WINDOW,
    assert_big_batch,
    big_batch,
    cut,
    fit,
    merged,
    ragged,
)
from tests.lit.windows.moving import ONCE, Moving
from tests.zoo.callbacks import Weights
from tests.zoo.modules import Mixed, Plain, Rows, hooked, on_front
from trainkit import MicroBatching, PerSample, PerToken


class Sparse(Plain):
    """Embedding gradients with rows for used words only."""

    def __init__(self, adam: bool = False) -> None:
        super().__init__()
        self.adam = adam
        vectors = self.net.embed.weight.detach().clone()
        self.net.embed = nn.Embedding.from_pretrained(
            vectors, freeze=False, sparse=True
        )
        self.net.head.requires_grad_(not adam)

    def configure_optimizers(self) -> Any:
        if self.adam:
            return torch.optim.SparseAdam([self.net.embed.weight], lr=0.05)
        return super().configure_optimizers()


class Partial(Plain):
    """One layer is frozen, one unused, one left out of the optimizer."""

    def __init__(self, **how: Any) -> None:
        super().__init__(**how)
        with torch.random.fork_rng():
            torch.manual_seed(3)
            self.unused = nn.Linear(2, 2, dtype=torch.float64)
            self.left_out = nn.Parameter(torch.ones((), dtype=torch.float64))
        self.net.embed.requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss_of(batch) * self.left_out

    def configure_optimizers(self) -> Any:
        trained = [*self.net.parameters(), *self.unused.parameters()]
        return torch.optim.AdamW(trained, lr=0.01)


class Unfreeze(BaseFinetuning):
    """Lightning's own way to thaw a layer for a later epoch."""

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.net.embed)

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            embed = pl_module.net.embed
            self.unfreeze_and_add_param_group(embed, optimizer, initial_denom_lr=1)


def of_head(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in parameters if p.requires_grad], lr=0.5)


def recomputed(self: Plain, batch: Any, batch_idx: int) -> Any:
    """Runs its forward pass again in the backward pass."""
    net = lambda ids: checkpoint(self.net.forward, ids, use_reentrant=False)  # noqa: E731
    return self.loss(net, batch)


def warms_up(
    self: Any, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any
) -> None:
    """Overrides the step as documented (ultralytics)."""
    for group in optimizer.param_groups:
        group["lr"] = 0.1 * (self.trainer.global_step + 1)
    optimizer.step(closure=optimizer_closure)


class LooksLikeOne:
    """Has what Lightning asks of an optimizer, and nothing else."""

    def __init__(self, parameters: Any) -> None:
        self.inner = torch.optim.SGD(parameters, lr=0.5)
        data = "param_groups", "defaults", "state"
        for name in (*data, "step", "zero_grad", "state_dict", "load_state_dict"):
            setattr(self, name, getattr(self.inner, name))


class Wrapper(LooksLikeOne, torch.optim.Optimizer):
    """As many published ones: a subclass whose `super().__init__` does not run."""


class Causal(pl.LightningModule):
    """What people write around a model of `transformers`."""

    def __init__(self, of: LlamaConfig) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(7)
            self.model = LlamaForCausalLM(of).double()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.model(**batch).loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05)


LLAMA = LlamaConfig(
    vocab_size=13, hidden_size=8, intermediate_size=16, num_hidden_layers=1,
    num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=32,
)  # fmt: skip
NUMBERS = torch.randn(
    38, 32, generator=torch.Generator().manual_seed(0), dtype=torch.float64
)


def ready(make: Callable[[list[int]], Any]) -> Callable[[Sequence[int]], Any]:
    """Micro-batches that are made of the rows' indices."""
    return lambda sizes: DataLoader(
        [make(rows) for rows in cut(SEQUENCES, sizes)],  # type: ignore[arg-type]
        batch_size=None,
    )


def causal(rows: list[int]) -> Any:
    """Ragged rows, padded to one width: the model shifts labels by itself."""
    ids, labels = torch.zeros(len(rows), 20).long(), torch.full((len(rows), 20), -100)
    for row, index in enumerate(rows):
        sequence = SEQUENCES[index][0]
        ids[row, : len(sequence)] = labels[row, : len(sequence)] = sequence
    mask = (labels != -100).long()
    return {"input_ids": ids, "labels": labels, "attention_mask": mask}


# ---- the table -----------------------------------------------------------------------

VALIDATED = hooked(Plain, validation_step=lambda self, b, _: self.loss_of(b) and None)
AVERAGED: dict[str, Any] = {"kind": VALIDATED, "validation": ragged([4])}
AVERAGED |= {"max_epochs": 3, "in_windows": {"val_check_interval": 3}}
CASES: dict[str, dict[str, Any]] = {
    "sparse": {"kind": Sparse},
    "SparseAdam": {"kind": Sparse, "made": {"adam": True}},
    "frozen, unused, left out": {"kind": Partial},
    # 0.75 of their gradient was what parameters of the new group got.
    **{
        f"finetuning, {wide=}": {
            "callbacks": lambda: [Unfreeze()],
            "made": {"optimizer": of_head, "options": {"wide_gradients": wide}},
            "max_epochs": 3,
        }
        for wide in (True, False)
    },
    "checkpointed": {"kind": hooked(Plain, training_step=recomputed)},
    "warm-up in optimizer_step": {"kind": hooked(Plain, optimizer_step=warms_up)},
    "no torch optimizer": {"made": {"optimizer": LooksLikeOne}},
    "no torch optimizer inside": {"made": {"optimizer": Wrapper}},
    # Exact weights are averaged, also where validation swaps them inside a window.
    "swa": {
        "callbacks": lambda: [StochasticWeightAveraging(0.1, swa_epoch_start=1)],
        **AVERAGED,
    },
    "ema": {"callbacks": lambda: [EMAWeightAveraging(decay=0.5)], **AVERAGED},
    "mean": {"callbacks": lambda: [WeightAveraging()], **AVERAGED},
    # transformers#46204, llm-foundry#1610: the first label of a row is no target, and
    # padding is none. In float64, but this model computes its loss in float32.
    **{
        f"llama, {shift=}": {
            "kind": Causal,
            "made": {"of": LLAMA, "strategy": PerToken(shift=shift)},
            "batches": ready(causal),
            "max_epochs": 1,
            "tolerance": TOLERANCE[torch.float32],
        }
        for shift in (True, False)
    },
}
FRONTS = cycle(["mixin", "callback"])


@pytest.mark.parametrize(("name", "front"), [*zip(CASES, FRONTS, strict=False)])
def test_windows_equal_big_batches(name: str, front: str) -> None:
    """But for a strategy that counts what is no target."""
    is_off = name == "llama, shift=False"
    off = pytest.raises(AssertionError, match=f"'{front}': 0.0")
    with off if is_off else nullcontext():
        fits = assert_big_batch(fronts=[front], **CASES[name])
    if "unused" in name:  # without a gradient there is no step: also no weight decay
        before, after = Partial(), fits[front].lightning_module
        for part in ("unused.weight", "net.embed.weight", "left_out"):
            assert torch.equal(after.get_parameter(part), before.get_parameter(part))


@pytest.mark.slow
def test_compiled_module_equals_big_batch() -> None:
    exact, ours = on_front("callback")
    compiled: Any = torch.compile(exact, backend="aot_eager", dynamic=True)
    trainer(WINDOW, callbacks=ours).fit(compiled, ragged(RAGGED))
    expected = big_batch(SEQUENCES)
    assert deviation(exact, expected.end, expected.start) <= 1e-10


@pytest.mark.parametrize(
    ("front", "size"),
    [("mixin", None), ("callback", None), ("plain", None), ("mixin", 2), ("mixin", 9)],
)
def test_weights_do_not_move_in_batchnorm_epoch(front: str, size: int | None) -> None:
    """The extra epoch of SWA runs no backward pass, but Lightning steps at its end,
    with the gradients of the last window; and a naive cut of its batches would train.
    Statistics of batches that are not cut are those of any run."""
    made: dict[str, Any] = {"norm": True}
    if front != "plain":
        made |= {"strategy": PerSample(), "cut": size and MicroBatching(size=size)}
    rows: Any = DataLoader(NUMBERS[:18, :3], batch_size=4)  # type: ignore[arg-type]
    window = 1 if size else 2
    how: dict[str, Any] = {"batches": lambda sizes: rows, "max_epochs": 3}

    def trained(made: dict[str, Any]) -> tuple[Weights, Tensor]:
        swa, seen = StochasticWeightAveraging(0.05, swa_epoch_start=1), Weights()
        fitted = fit(front, Rows, swa, seen, made=made, window=window, **how)
        return seen, fitted.lightning_module.net[1].running_mean

    seen, mean = trained(made)
    first, *others = seen.seen[-5:]
    moved = [not torch.equal(first, other) for other in others]
    assert len(seen.seen) == 1 + 4 * 5
    assert seen.num_taken >= 3 * (5 // window)
    assert any(moved) is (front == "plain")
    if size == 9:
        torch.testing.assert_close(mean, trained({**made, "cut": None})[1])


def test_module_copied_inside_a_window_trains_exactly() -> None:
    """As averaging and search tools do. The original is not disturbed, and the copy
    starts a window of its own."""
    copies: list[Any] = []

    def send(trainer: Any, module: Any, outputs: Any, batch: Any, index: int) -> None:
        copies.extend([copy.deepcopy(module)] * (index == 5))

    sends = LambdaCallback(on_train_batch_end=send)
    original, expected = Mixed(), big_batch(SEQUENCES, epochs=1)
    trainer(WINDOW, callbacks=[sends], max_epochs=1).fit(original, ragged(RAGGED))
    assert deviation(original, expected.end, expected.start) <= 1e-10
    (copied,) = copies
    plain, before = Plain(), weights(copied)
    plain.load_state_dict(copied.state_dict())
    trainer(WINDOW, max_epochs=1).fit(copied, ragged(RAGGED))
    trainer(max_epochs=1).fit(plain, ragged(merged(RAGGED)))
    assert deviation(copied, plain, before) <= 1e-10


@pytest.mark.parametrize(
    ("way", "wrong"), [("in place", "training_step"), ("queue", "on_train_batch_end")]
)
def test_state_moved_once_a_step_equals_the_big_batch(way: str, wrong: str) -> None:
    """Before the step; in each batch, and at its end, which is the control, it moves
    too often."""

    whole, ours, naive = Moving(ONCE, way), Moving(ONCE, way), Moving(wrong, way)
    start = weights(whole)
    trainer(1).fit(whole, ragged(merged(RAGGED)))
    for module in (ours, naive):
        trainer(WINDOW).fit(module, ragged(RAGGED))
    assert deviation(ours, whole, start) < 1e-7
    assert deviation(naive, whole, start) > NAIVE


def clips(self: Any) -> None:
    torch.nn.utils.clip_grad_norm_(self.parameters(), 0.01)


def adds(self: Any, loss: Any, *args: Any, **kwargs: Any) -> None:
    loss.backward()
    torch.cat([p.flatten() for p in self.parameters()]).square().sum().backward()


@pytest.mark.parametrize("front", ["mixin", "callback"])
@pytest.mark.parametrize("hook", [{"on_after_backward": clips}, {"backward": adds}])
@pytest.mark.parametrize("precision", ["64-true", "bf16-true"])
def test_a_window_of_one_micro_batch_is_plain_lightning_s_step(
    precision: str, hook: dict[str, Any], front: str
) -> None:
    """To the bit, whatever hooks do to its gradient. In windows of several, which are
    the control, they do it to a part."""
    how: dict[str, Any] = {"max_epochs": 1, "precision": precision}

    def trained(front: str, window: int) -> torch.Tensor:
        fitted = fit(front, hooked(Plain, **hook), window=window, **how)
        return weights(fitted.lightning_module)

    assert torch.equal(trained(front, 1), trained("plain", 1))
    assert not torch.allclose(trained(front, 2), trained("plain", 2))
