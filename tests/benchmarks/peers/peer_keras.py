"""Keras on torch: its optimizers' `gradient_accumulation_steps`."""

from __future__ import annotations

import os

os.environ["KERAS_BACKEND"] = "torch"

from typing import Any

import keras  # pyright: ignore[reportMissingImports]
from torch.utils.data import DataLoader

from tests.benchmarks.peers.work import CausalNet, Work, loss_of, pad_as_pair

PACKAGES = ("keras",)

OPTIMIZERS = {
    "sgd": lambda **options: keras.optimizers.SGD(0.5, **options),
    # torch's epsilon; Keras adds it before the bias correction, torch after it.
    "adamw": lambda **options: keras.optimizers.Adam(0.01, epsilon=1e-8, **options),
}


class Model(keras.Model):
    def __init__(self, net: CausalNet) -> None:
        super().__init__()
        self.net = keras.layers.TorchModuleWrapper(net)

    def call(self, inputs: Any) -> Any:
        return self.net(inputs)


def train(work: Work, net: CausalNet) -> None:
    keras.config.set_floatx(work.dtype)
    keras.device("cpu").__enter__()
    steps = work.accumulate if work.accumulate > 1 else None
    model = Model(net)
    model.compile(
        optimizer=OPTIMIZERS[work.optimizer](gradient_accumulation_steps=steps),
        # Keras makes floats of the labels.
        loss=lambda labels, logits: loss_of(logits, labels.long()),
    )
    rows: Any = work.rows
    loader = DataLoader(rows, work.micro_batch, collate_fn=pad_as_pair)
    model.fit(loader, epochs=1, shuffle=False, verbose=0)


VARIANTS = {"Keras on torch": train}
