"""The name of a run's folder, which each rank of the run must find by itself."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Mapping
from pathlib import Path


def run_name(environ: Mapping[str, str] = os.environ) -> str:
    """A unique name: the job's, or the time and some random digits.

    Ranks that Lightning starts receive the folder. Under torchrun or srun each rank
    composes the configuration by itself, at another time: they share only the job.

    >>> run_name({"SLURM_JOB_ID": "77", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "8"})
    'slurm-77-0'
    >>> run_name({"TORCHELASTIC_RUN_ID": "mine", "TORCHELASTIC_RESTART_COUNT": "0"})
    'torchrun-mine'
    """
    job = job_name(environ)
    if job is None:
        return f"{time.strftime('%Y-%m-%d_%H-%M-%S')}-{uuid.uuid4().hex[:4]}"
    of_slurm = job.startswith("slurm-")
    name = "SLURM_RESTART_COUNT" if of_slurm else "TORCHELASTIC_RESTART_COUNT"
    count = environ.get(name)
    return job if count in (None, "", "0") else f"{job}-again{count}"


def job_name(environ: Mapping[str, str] = os.environ) -> str | None:
    """The name of a job, which all its ranks and attempts share; None without a job.

    It does not contain the number of the attempt, on which nodes do not agree: torchrun
    counts only the failures that it has seen itself.

    >>> job_name({"TORCHELASTIC_RUN_ID": "mine", "TORCHELASTIC_RESTART_COUNT": "2"})
    'torchrun-mine'
    """
    return _of_slurm(environ) or _of_torchrun(environ)


def _of_slurm(environ: Mapping[str, str]) -> str | None:
    if int(environ.get("SLURM_NTASKS", "1")) < 2 or "SLURM_STEP_ID" not in environ:
        return None  # for example in a batch script, without srun
    return f"slurm-{environ['SLURM_JOB_ID']}-{environ['SLURM_STEP_ID']}"


def _of_torchrun(environ: Mapping[str, str]) -> str | None:
    job = environ.get("TORCHELASTIC_RUN_ID")
    if job is None:
        return None
    if job == "none":  # no id was given, but all ranks on a machine have one parent
        job = _identity(os.getppid())
    return f"torchrun-{job}"


def _identity(pid: int) -> str:
    """The number of a process and the time at which it began, in clock ticks."""
    try:
        facts = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return str(pid)
    return f"{pid}-{facts[19]}"
