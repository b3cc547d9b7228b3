"""The log of W&B's agents, which also holds the output of trials."""

from __future__ import annotations

from pathlib import Path

from trainkit.cli.sweep.trial import own_lines

_AGENT = " - wandb.wandb_agent - "


def was_stopped(folder: Path, name: str) -> bool:
    """Whether an agent stopped the trial, which then ends with exit status 0."""
    return any(line.endswith(f"Stop: {name}") for _, line in _agent_lines(folder))


def last_words_of(folder: Path, name: str) -> str:
    """The last line of a trial that has ended; empty if no agent ran it."""
    for before, line in _agent_lines(folder):
        if line.endswith(f"Cleaning up finished run: {name}") and before:
            return before[-1].strip()
    return ""


def _agent_lines(folder: Path) -> list[tuple[list[str], str]]:
    """The lines of the agents, each with the output of the trial before it."""
    found = []
    for path in sorted(folder.glob("agent-*.log")):
        written: list[str] = []
        for line in path.read_text(errors="replace").splitlines():
            if _AGENT not in line:
                written.append(line)
                continue
            found.append((own_lines(written), line))
            if "About to run command" in line:
                written = []
    return found
