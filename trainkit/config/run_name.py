"""The name of a run's folder, which all ranks of the run must find for themselves."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Mapping
from pathlib import Path


def run_name(environ: Mapping[str, str] = os.environ) -> str:
    """A unique name: when the run began, and something that no other run has.

    Ranks that Lightning starts receive the folder. Under torchrun or srun each rank
    composes the configuration by itself, at its own time: they share only the job.

    >>> run_name({"SLURM_JOB_ID": "77", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "8"})
    'slurm-77-0'
    >>> run_name({"TORCHELASTIC_RUN_ID": "mine", "TORCHELASTIC_RESTART_COUNT": "0"})
    'torchrun-mine'
    """
    job = job_name(environ)
    if job is None:
        return f"{time.strftime('%Y-%m-%d_%H-%M-%S')}-{uuid.uuid4().hex[:4]}"
    of_slurm = job.startswith("slurm-")
    count = "SLURM_RESTART_COUNT" if of_slurm else "TORCHELASTIC_RESTART_COUNT"
    return job + _restart(environ.get(count))


def job_name(environ: Mapping[str, str] = os.environ) -> str | None:
    """What all ranks of a job share, and its later attempts with the first.

    Nodes of one job do not agree on the number of the attempt: torchrun counts only the
    failures that it has seen itself.

    >>> job_name({"TORCHELASTIC_RUN_ID": "mine", "TORCHELASTIC_RESTART_COUNT": "2"})
    'torchrun-mine'
    """
    return _of_slurm(environ) or _of_torchrun(environ)


def _of_slurm(environ: Mapping[str, str]) -> str | None:
    if int(environ.get("SLURM_NTASKS", "1")) < 2 or "SLURM_STEP_ID" not in environ:
        return None  # in a batch script, say, but not started by srun
    return f"slurm-{environ['SLURM_JOB_ID']}-{environ['SLURM_STEP_ID']}"


def _of_torchrun(environ: Mapping[str, str]) -> str | None:
    job = environ.get("TORCHELASTIC_RUN_ID")
    if job is None:
        return None
    if job == "none":  # not given: all ranks have one parent, or need another name
        job = _started(os.getppid())
    return f"torchrun-{job}"


def _restart(count: str | None) -> str:
    return "" if count in (None, "", "0") else f"-again{count}"


def _started(pid: int) -> str:
    """A process by its number and when it began, in the system's own ticks."""
    try:
        facts = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return str(pid)
    return f"{pid}-{facts[19]}"
