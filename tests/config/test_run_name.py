"""All ranks of a run find the same folder; another run finds another."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from trainkit.config.run_name import job_name, run_name

SLURM = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "1", "SLURM_NTASKS": "4"}
TORCHRUN = {"TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_RESTART_COUNT": "0"}


def test_two_runs_of_one_process_each_have_one() -> None:
    assert run_name({}) != run_name({})


@pytest.mark.parametrize(
    ("more", "name"),
    [
        ({}, "slurm-7-1"),
        ({"SLURM_PROCID": "3"}, "slurm-7-1"),
        ({"SLURM_RESTART_COUNT": "0"}, "slurm-7-1"),
        ({"SLURM_RESTART_COUNT": "2"}, "slurm-7-1-again2"),
        ({"SLURM_STEP_ID": "2"}, "slurm-7-2"),
    ],
)
def test_tasks_of_a_job_step(more: dict[str, str], name: str) -> None:
    assert run_name({**SLURM, **more}) == name


@pytest.mark.parametrize("leave", ["SLURM_STEP_ID", "SLURM_NTASKS"])
def test_one_process_of_a_job_is_a_run_of_its_own(leave: str) -> None:
    environ = {key: value for key, value in SLURM.items() if key != leave}
    assert run_name(environ) != run_name(environ)


def test_a_job_without_a_name_is_known_by_its_parent() -> None:
    program = "from trainkit.config.run_name import run_name\n"
    program += f"print(run_name({TORCHRUN}))"
    names = {
        subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, check=True
        ).stdout.strip()
        for _ in range(2)
    }
    (name,) = names
    assert name.startswith(f"torchrun-{os.getpid()}")
    assert run_name(TORCHRUN) != name  # of another parent
    assert run_name({**TORCHRUN, "TORCHELASTIC_RESTART_COUNT": "1"}).endswith("-again1")


def test_without_the_facts_of_a_process_its_number_is_its_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "getppid", lambda: 2**40)  # of none that runs
    assert job_name(TORCHRUN) == f"torchrun-{2**40}"


@pytest.mark.parametrize("count", ["0", "1"])
def test_every_attempt_of_a_job_has_its_name(count: str) -> None:
    torchrun = {"TORCHELASTIC_RUN_ID": "j", "TORCHELASTIC_RESTART_COUNT": count}
    assert job_name(torchrun) == "torchrun-j"
    assert job_name({**SLURM, "SLURM_RESTART_COUNT": count}) == "slurm-7-1"
    assert job_name({}) is None
