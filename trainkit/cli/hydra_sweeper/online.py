"""Trials of a sweep on a W&B server, for Hydra's sweeper."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

from trainkit.cli.hydra_sweeper.relay import ADDRESS, STOP
from trainkit.cli.sweep import environment
from trainkit.cli.sweep.online.agents import Agents
from trainkit.cli.sweep.online.server import Server
from trainkit.cli.sweep.sweep_file import SweepFile
from trainkit.cli.sweep.trial import Trial
from trainkit.cli.sweep.whole_config import PARAMETERS, read_parameters

_TICK = 0.2
_PATIENCE = 15.0
"""How many seconds a trial waits for those of the other agents."""
_LOOK_EVERY = 10.0
_LOST_AFTER = 120.0


class OnlineSource:
    """Takes trials from agents of W&B's client, which run `relay` for each.

    The server's protocol stays in W&B's client, and the server sees its own agents.

    Args:
        sweep: the sweep.
        server: the server, on which the sweep is created.
        n_jobs: how many agents, so trials at once.
        folder: where the agents write.
        can_stop: whether SIGTERM for this process stops the trial under way.
        say: called with each line of news.

    Attributes:
        path: the sweep's `entity/project/id`.
        was_asked_to_stop: whether the server has asked to stop a trial under way.
    """

    def __init__(
        self,
        sweep: SweepFile,
        server: Server,
        *,
        n_jobs: int,
        folder: Path,
        can_stop: bool,
        say: Callable[[str], None],
    ) -> None:
        self.path = server.path(server.create())
        self.was_asked_to_stop = False
        self._server = server
        self._folder = folder
        self._can_stop = can_stop
        self._say = say
        self._jobs: dict[str, tuple[socket.socket, dict[str, str]]] = {}
        folder.mkdir(parents=True, exist_ok=True)
        # Not in the folder of the runs: the path of a socket is 107 letters at most.
        self._room = tempfile.TemporaryDirectory(prefix="trainkit-")
        address = f"{self._room.name}/s"
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(address)
        self._listener.listen(n_jobs)
        self._listener.settimeout(_TICK)
        env = environment.base() | {
            "WANDB_DIR": str(folder),
            "WANDB_ENTITY": server.entity,
            "WANDB_PROJECT": server.project,
            ADDRESS: address,
        }
        cap = sweep.config.get("run_cap")
        self._agents = Agents(
            self.path, number=n_jobs, count=cap, env=env, folder=folder
        )

    def next_trials(self, trials: list[Trial]) -> list[Trial]:
        """The trials that all agents have now; none when the agents have left."""
        self.was_asked_to_stop = False
        found: list[Trial] = []
        first = answered = looked = time.monotonic()
        while len(found) < max(1, self._agents.num_running()):
            trial = self._accept()
            now = time.monotonic()
            if trial is not None:
                first = first if found else now
                found.append(trial)
            elif found and now - first > _PATIENCE:
                break
            elif not self._agents.num_running():
                break
            elif now - looked > _LOOK_EVERY:
                looked = now
                answered = now if self._server.is_alive() else answered
                if now - answered > _LOST_AFTER:
                    self._say(
                        f"the W&B server has not answered for {now - answered:.0f} s, "
                        f"so no more trials are started"
                    )
                    break
        if found:
            threading.Thread(target=self._watch, daemon=True).start()
        return found

    def environment(self, trial: Trial) -> dict[str, str]:
        """The variables of a trial's job, so that its run is a trial of the sweep."""
        return self._jobs[trial.name][1]

    def end(self, trial: Trial) -> None:
        """Tell the agent that a trial has ended."""
        connection, _ = self._jobs.pop(trial.name)
        try:
            connection.sendall(b".")
        except OSError:
            pass  # the agent did not wait for it
        connection.close()

    def last_words(self) -> str:
        """The last line that an agent has written."""
        logs = sorted(self._folder.glob("agent-*.log"))
        lines = [x for log in logs for x in log.read_text(errors="replace").split("\n")]
        return next((line for line in reversed(lines) if line.strip()), "nothing")

    def close(self) -> None:
        """End the agents, then what they run."""
        self._agents.end()  # one whose trial has ended would ask for another
        jobs, self._jobs = self._jobs, {}
        for connection, _ in jobs.values():
            connection.close()
        self._listener.close()
        self._room.cleanup()

    def _accept(self) -> Trial | None:
        try:
            connection, _ = self._listener.accept()
        except TimeoutError:
            return None
        connection.settimeout(None)
        with connection.makefile("rb") as file:
            about: dict[str, str] = json.loads(file.readline())
        name = about["WANDB_RUN_ID"]
        self._jobs[name] = connection, about
        arguments = read_parameters(Path(about[PARAMETERS]))
        return Trial(name=name, arguments=arguments, state="running")

    def _watch(self) -> None:
        """Pass on the server's requests to stop trials, until all of them are over."""
        watched = {c: name for name, (c, _) in dict(self._jobs).items()}
        while watched:
            for name in set(watched.values()) - set(self._jobs):  # over
                watched = {c: each for c, each in watched.items() if each != name}
            try:
                ready, _, _ = select.select(list(watched), [], [], _TICK)
                for connection in ready:
                    if STOP not in connection.recv(len(STOP)):
                        del watched[connection]  # the agent has killed it
                    else:
                        self._stop(watched[connection])
            except (OSError, ValueError):
                continue  # it has just been closed

    def _stop(self, name: str) -> None:
        if not self._can_stop:
            self._say(f"W&B asks to stop {name}, which this launcher cannot do")
            return
        self.was_asked_to_stop = True
        os.kill(os.getpid(), signal.SIGTERM)
