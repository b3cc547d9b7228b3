"""What an agent's output tells of each of its trials."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainkit.cli.sweep.online.agent_log import last_words_of, was_stopped

AGENT = "2026-11-21 12:36:05,919 - wandb.wandb_agent - INFO - "
LOG = f"""\
wandb: Starting wandb agent
{AGENT}Agent starting run with config:
	lr: 0.1
{AGENT}About to run command: python train.py lr=0.1
wandb: Tracking run with wandb version 0.31.0
{AGENT}Running runs: ['good']
step 1
{AGENT}Stop: good
saved
{AGENT}Cleaning up finished run: good
{AGENT}Agent starting run with config:
	lr: 7
{AGENT}About to run command: python train.py lr=7
{AGENT}Cleaning up finished run: silent
{AGENT}About to run command: python train.py lr=8
Traceback (most recent call last):
RuntimeError: out of cheese
wandb: View run bad
{AGENT}Cleaning up finished run: bad
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "agent-0.log").write_text("")
    (tmp_path / "agent-1.log").write_text(LOG)
    return tmp_path


def test_the_last_words_are_the_trials_own(folder: Path) -> None:
    words = {
        name: last_words_of(folder, name) for name in ("good", "silent", "bad", "no")
    }
    assert words == {
        "good": "saved",
        "silent": "",
        "bad": "RuntimeError: out of cheese",
        "no": "",
    }


def test_a_trial_that_was_told_to_stop_is_known(folder: Path) -> None:
    assert was_stopped(folder, "good")
    assert not was_stopped(folder, "bad")
    assert not was_stopped(folder, "goo")
