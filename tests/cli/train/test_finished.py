"""What is said of a run that has no step left to make."""

from __future__ import annotations

import re
from datetime import timedelta
from typing import Any

import pytest
from lightning.pytorch.callbacks import Timer

from tests.helpers import TokenModule, loader, ragged_sequences, trainer
from trainkit.cli.train.finished import why_no_more

STEPS = "nothing to do: the run had finished after 2 optimizer steps"


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"max_steps": 2}, f"{STEPS}; .* ckpt_path=a.ckpt trainer.max_steps=4$"),
        ({"max_epochs": 1}, f"{STEPS}; .* ckpt_path=a.ckpt trainer.max_epochs=2$"),
        (
            {"max_steps": 9, "callbacks": [Timer(timedelta(0))]},
            r"the run had used up its time \(trainer.max_time\) after 0 optimizer "
            r"steps; .* trainer.max_time=null, or a longer one$",
        ),
        (
            {"limit_train_batches": 0},
            "^nothing to do: the run had finished after 0 optimizer.*s$",
        ),
    ],
)
def test_what_had_ended_it_is_named(options: dict[str, Any], text: str) -> None:
    run = trainer(**options)
    run.fit(TokenModule(), loader(ragged_sequences(6), 3))
    assert re.search(text, why_no_more(run, "a.ckpt"))
