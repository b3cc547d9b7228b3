"""Modules that somebody else wrote train exactly, no line of them changed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.demos import LightningTransformer
from lightning.pytorch.demos.boring_classes import BoringModel
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from tests.helpers import (
    NAIVE,
    TOLERANCE,
    TokenModule,
    deviation,
    loader,
    ragged_sequences,
    trainer,
    weights,
)
from tests.lit.fronts import RAGGED, WINDOW, cut, merged
from trainkit import AccumulationCallback, AccumulationStrategy, PerSample, PerToken

SEQUENCES = ragged_sequences(38)


def trained(
    make: Callable[[], pl.LightningModule],
    batches: Callable[[Sequence[int]], Any],
    strategy: AccumulationStrategy | None,
    window: int = WINDOW,
    epochs: int = 2,
) -> pl.LightningModule:
    """In float64; without a strategy plain Lightning; `window=1` takes big batches."""
    module = make().double()
    callbacks: list[Callback] = []
    if strategy is not None:
        callbacks.append(AccumulationCallback(strategy))
    sizes = RAGGED if window > 1 else merged(RAGGED)
    options = {"callbacks": callbacks, "limit_val_batches": 0, "max_epochs": epochs}
    trainer(window, **options).fit(module, batches(sizes))
    return module


def deviations(
    make: Callable[[], pl.LightningModule],
    batches: Callable[[Sequence[int]], Any],
    *strategies: AccumulationStrategy | None,
    epochs: int = 2,
) -> list[float]:
    """Of each strategy from plain Lightning with big batches."""
    start = weights(make().double())
    big = trained(make, batches, None, window=1, epochs=epochs)
    modules = [trained(make, batches, each, epochs=epochs) for each in strategies]
    return [deviation(module, big, start) for module in modules]


def ready(batches: list[Any]) -> Any:
    """A loader of batches that are there already."""
    return DataLoader(batches, batch_size=None)  # type: ignore[arg-type]


def rows(width: int) -> Callable[[Sequence[int]], Any]:
    generator = torch.Generator().manual_seed(0)
    data = torch.randn(38, width, generator=generator, dtype=torch.float64)

    def batches(sizes: Sequence[int]) -> Any:
        return DataLoader(data, batch_sampler=cut(SEQUENCES, sizes))  # type: ignore[arg-type]

    return batches


def seeded(make: Callable[[], Any]) -> Callable[[], Any]:
    def made() -> Any:
        with torch.random.fork_rng():
            torch.manual_seed(7)
            return make()

    return made


def test_boring_model_equals_big_batch() -> None:
    """It returns a dict, and brings a scheduler."""
    exact, naive = deviations(seeded(BoringModel), rows(32), PerSample(), None)
    assert exact <= 1e-10
    assert naive > NAIVE


def token_pairs(sizes: Sequence[int]) -> Any:
    """Inputs and targets; every micro-batch has another number of rows."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 13, (sum(sizes), 6), generator=generator)
    parts = [ids[part] for part in cut(SEQUENCES, sizes)]
    return ready([(part[:, :-1], part[:, 1:].contiguous()) for part in parts])


def transformer() -> LightningTransformer:
    module = LightningTransformer(vocab_size=13)
    for part in module.modules():
        if isinstance(part, torch.nn.Dropout):
            part.p = 0.0
        if isinstance(part, torch.nn.MultiheadAttention):
            part.dropout = 0.0
    return module


def test_lightning_transformer_equals_big_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Lightning's own demo, a mean over tokens. Its rate of 0.1 makes the training
    chaotic: rounding grows by far with each step, so that float32 shows nothing."""
    skip_download = pl.LightningModule.prepare_data
    monkeypatch.setattr(LightningTransformer, "prepare_data", skip_download)
    make = seeded(transformer)
    exact, naive = deviations(make, token_pairs, PerToken(labels=1), None, epochs=1)
    assert exact <= 1e-8
    assert naive > NAIVE


class Causal(pl.LightningModule):
    """What people write around a model of `transformers`."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.model(**batch).loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05)


def llama() -> Causal:
    config = LlamaConfig(
        vocab_size=13,
        hidden_size=8,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=32,
    )
    return Causal(LlamaForCausalLM(config))


def gpt2() -> Causal:
    config = GPT2Config(
        vocab_size=13, n_positions=32, n_embd=8, n_layer=1, n_head=2,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return Causal(GPT2LMHeadModel(config))


def causal_batches(sizes: Sequence[int]) -> Any:
    """Ragged rows, padded to one width: the model shifts labels by itself."""
    batches = []
    for part in cut(SEQUENCES, sizes):
        ids = torch.zeros(len(part), 20, dtype=torch.long)
        labels = torch.full((len(part), 20), -100)
        for row, index in enumerate(part):
            sequence = SEQUENCES[index][0]
            ids[row, : len(sequence)] = sequence
            labels[row, : len(sequence)] = sequence
        mask = (labels != -100).long()
        batches.append({"input_ids": ids, "labels": labels, "attention_mask": mask})
    return ready(batches)


@pytest.mark.parametrize("make", [llama, gpt2])
def test_transformers_model_with_shift_equals_big_batch(
    make: Callable[[], Causal],
) -> None:
    """transformers#46204, llm-foundry#1610: the first label of a row is no target, and
    padding is none. Counting either is off (negative control). In float64, but these
    models compute their loss in float32."""
    shifted, unshifted, naive = deviations(
        seeded(make), causal_batches, PerToken(shift=True), PerToken(), None, epochs=1
    )
    assert shifted <= TOLERANCE[torch.float32]
    assert unshifted > 1e-3
    assert naive > NAIVE


class WithoutIndex(TokenModule):
    def training_step(self, batch: Any) -> Any:  # type: ignore[override]
        return super().training_step(batch, 0)


def test_training_step_is_asked_for_no_argument() -> None:
    """A new argument breaks those who override the method: transformers#36331."""
    module, reference = (
        WithoutIndex(dtype=torch.float64),
        TokenModule(dtype=torch.float64),
    )
    start = weights(module)
    data = ragged_sequences(38)
    exact = [AccumulationCallback(PerToken())]
    trainer(4, callbacks=exact).fit(module, loader(data, 4))
    trainer().fit(reference, loader(data, 16))
    assert deviation(module, reference, start) <= 1e-10
