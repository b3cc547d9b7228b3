"""The message for a resumed run that has no steps left."""

from __future__ import annotations

import shlex
from typing import Any

from lightning.pytorch.callbacks import Timer

from trainkit.cli.runs.summary_rows import counted_steps


def why_no_more(trainer: Any, ckpt_path: str | None) -> str:
    """Why the run has nothing left to train, and what to change to train longer.

    Args:
        trainer: a Trainer that restored the checkpoint and trained no step.
        ckpt_path: the checkpoint.
    """
    done = f"after {counted_steps(trainer.global_step)}"
    why = "the run had finished"
    if 0 <= trainer.max_steps <= trainer.global_step:
        change = f"trainer.max_steps={2 * trainer.global_step}"
    elif 0 <= (trainer.max_epochs or -1) <= trainer.current_epoch:
        change = f"trainer.max_epochs={2 * trainer.current_epoch}"
    elif any(_is_over(each) for each in trainer.callbacks):
        why = "the run had used up its time (trainer.max_time)"
        change = "trainer.max_time=null, or a longer one"
    else:
        return f"nothing to do: {why} {done}"
    return (
        f"nothing to do: {why} {done}; to train longer: trainkit train "
        f"{shlex.quote(f'ckpt_path={ckpt_path}')} {change}"
    )


def _is_over(callback: Any) -> bool:
    if not isinstance(callback, Timer):
        return False
    left = callback.time_remaining()
    return left is not None and left <= 0
