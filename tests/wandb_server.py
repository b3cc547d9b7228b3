"""A stand-in for the W&B server, on the loopback, for tests with the real client.

    with WandbServer() as server:
        env = server.env(home=tmp_path)  # for subprocesses: private HOME, dummy key
        subprocess.run(["wandb", "sweep", "sweep.yaml"], env=env, check=True)
        server.sweeps["sw0"].config  # what `wandb sweep` uploaded
        server.runs["abc"].history  # rows as received: [{"_step": 0, "loss": ..}, ..]
        server.runs["abc"].summary, .config, .group, .tags, .state, .exit_code

        server.stop_run("sw0r1")  # the agent is told to stop it, as hyperband does
        server.suggest = my_search  # (sweep, n) -> arguments or None; default: its grid
        server.should_stop = too_bad  # (run) -> bool, asked at each heartbeat
        server.artifacts  # {"A0": {"name": .., "run": .., "files": {..}, ..}}
        server.die()  # connections are refused from now on
        server.hang()  # or: requests are taken and never answered
        server.revive()  # the same port again, with all that it knew

As a fixture: `wandb_server` of tests/cli/conftest.py. The client's exit status tells
little (an agent may exit 0 over crashed runs): assert on what arrived here.

The protocol is private to W&B and moves: `tests/wandb_answers.py` knows what clients
of 0.31 ask. What nobody answered is in `server.unknown`, for a test to show.
"""

from __future__ import annotations

import gzip
import json
import re
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.wandb_answers import answer, grid_or_random

Json = dict[str, Any]


@dataclass
class Run:
    """What arrived of one run."""

    name: str
    raw_config: Json = field(default_factory=dict)
    summary: Json = field(default_factory=dict)
    rows: dict[int, Json] = field(default_factory=dict)
    num_rows_received: int = 0
    logs: list[str] = field(default_factory=list)
    files: dict[str, bytes] = field(default_factory=dict)
    exit_code: int | None = None
    sweep: str | None = None
    fields: Json = field(default_factory=dict)
    is_lost: bool = False

    @property
    def history(self) -> list[Json]:
        """The rows in order; a row that is sent again takes the place of the first."""
        return [self.rows[line] for line in sorted(self.rows)]

    @property
    def config(self) -> Json:
        """The configuration as it was logged, without W&B's own entry."""
        entries = self.raw_config.items()
        return {key: entry["value"] for key, entry in entries if key != "_wandb"}

    @property
    def metrics(self) -> list[Any]:
        """What `define_metric` said, as the client encodes it."""
        return self.raw_config.get("_wandb", {}).get("value", {}).get("m", [])

    @property
    def state(self) -> str:
        """running, finished, failed, or crashed where its agent has lost it."""
        if self.exit_code is not None:
            return "failed" if self.exit_code else "finished"
        return "crashed" if self.is_lost else "running"

    @property
    def group(self) -> str | None:
        return self.fields.get("groupName")

    @property
    def job_type(self) -> str | None:
        return self.fields.get("jobType")

    @property
    def tags(self) -> list[str]:
        return self.fields.get("tags") or []


@dataclass
class Sweep:
    """What `wandb sweep` uploaded, and how far it is."""

    name: str
    raw: str
    config: Json
    num_proposed: int = 0
    state: str = "RUNNING"


@dataclass
class Agent:
    """An agent, with the runs that it was given."""

    sweep: str
    runs: set[str] = field(default_factory=set)


def wait_until(condition: Callable[[], bool], seconds: float = 240) -> None:
    """Until something has arrived, or an AssertionError."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited {seconds} s in vain"
        time.sleep(0.02)


class WandbServer:
    """Answers the client in threads of this process; see the top of the file."""

    def __init__(self) -> None:
        self.sweeps: dict[str, Sweep] = {}
        self.runs: dict[str, Run] = {}
        self.agents: dict[str, Agent] = {}
        self.artifacts: dict[str, Json] = {}
        self.operations: list[str] = []
        self.unknown: list[str] = []
        self.received: list[bytes] = []
        """Every request as it came, unzipped: path, headers and body."""
        self.suggest: Callable[[Sweep, int], Json | None] = grid_or_random
        self.should_stop: Callable[[Run], bool] = lambda run: False
        self.to_stop: set[str] = set()
        self.lock = threading.RLock()
        self._hanging = threading.Event()
        self._listener: _Listener | None = None
        self._port = 0

    def __enter__(self) -> WandbServer:
        self.revive()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.die()

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def env(self, home: Path, **more: str) -> dict[str, str]:
        """The environment of a client: nothing of W&B's is inherited, no real key."""
        return {
            "PATH": f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin",
            "HOME": str(home),
            "PYTHONUNBUFFERED": "1",
            "OMP_NUM_THREADS": "1",
            "WANDB_BASE_URL": self.base_url,
            "WANDB_API_KEY": "local" + 35 * "x",
            "WANDB_ENTITY": "local",
            "WANDB_PROJECT": "p",
            "WANDB_DIR": str(home),
            # How long a trial that is asked to stop may take: it says when it has.
            "WANDB_AGENT_KILL_DELAY": "240",
            "WANDB_X_FILE_STREAM_TRANSMIT_INTERVAL": "1",  # the least: whole seconds
            "WANDB_ERROR_REPORTING": "false",  # statistics about the client itself
            "WANDB_X_TRANSACTION_LOG_FLUSH_INTERVAL": "0.2",
            **more,
        }

    def run(self, name: str) -> Run:
        """The run of that name, made where it is new."""
        with self.lock:
            return self.runs.setdefault(name, Run(name))

    def stop_run(self, name: str) -> None:
        """Tell the agent that has the run to stop it, at its next heartbeat."""
        self.to_stop.add(name)

    def die(self) -> None:
        """Refuse connections, and break those that are open."""
        listener, self._listener = self._listener, None
        if listener is not None:
            self._hanging.set()  # a request under way gets no answer any more
            listener.shutdown()
            listener.server_close()
            listener.break_connections()

    def hang(self) -> None:
        """Take requests, and never answer."""
        self._hanging.set()

    def revive(self) -> None:
        """Answer again, at the same address."""
        self._hanging = threading.Event()
        if self._listener is None:
            self._listener = _Listener(self._port, self)
            self._port = self._listener.server_port
            # It looks so often whether it shall end; by default twice a second.
            serve, often = self._listener.serve_forever, {"poll_interval": 0.02}
            threading.Thread(target=serve, kwargs=often, daemon=True).start()

    def take(self, method: str, path: str, headers: Mapping[str, str], body: bytes):
        """Answer a request with a JSON object, or with None: never."""
        hanging = self._hanging
        if hanging.is_set():
            return None
        with self.lock:
            heading = f"{method} {path}\n{json.dumps(dict(headers))}\n".encode()
            self.received.append(heading + body)
            if path == "/graphql":
                request = json.loads(body)
                query, variables = request["query"], request.get("variables") or {}
                return {"data": answer(self, query, variables)}
            if match := re.match(r"/files/[^/]+/[^/]+/([^/]+)/file_stream", path):
                self._take_stream(self.run(match[1]), json.loads(body or b"{}"))
                return {"exitcode": None, "limits": {}}
            if match := re.match(r"/upload/([^/]+)/(.+)", path):
                found = self.artifacts.get(match[1])
                files = self.run(match[1]).files if found is None else found["files"]
                files[match[2]] = body
            return {}

    def _take_stream(self, run: Run, sent: Json) -> None:
        files = sent.get("files") or {}
        history = files.get("wandb-history.jsonl", {})
        for line, text in enumerate(
            history.get("content", []), history.get("offset", 0)
        ):
            run.rows[line] = json.loads(text)
            run.num_rows_received += 1
        for text in files.get("wandb-summary.json", {}).get("content", []):
            run.summary.update(json.loads(text))
        run.logs += files.get("output.log", {}).get("content", [])
        if sent.get("complete"):
            run.exit_code = sent.get("exitcode")


class _Listener(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def __init__(self, port: int, owner: WandbServer) -> None:
        self.owner = owner
        self.connections: set[socket.socket] = set()
        super().__init__(("127.0.0.1", port), _Handler)

    def break_connections(self) -> None:
        for connection in list(self.connections):
            try:
                connection.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass  # it has been closed by the client

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that goes in mid-request, as killed ones do, is no error here."""
        if not isinstance(sys.exc_info()[1], OSError):
            self.owner.unknown.append(traceback.format_exc())


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Listener  # type: ignore[assignment]

    def setup(self) -> None:
        super().setup()
        self.server.connections.add(self.connection)

    def finish(self) -> None:
        self.server.connections.discard(self.connection)
        super().finish()

    def log_message(self, format: str, *args: Any) -> None:
        """Quiet."""

    def _serve(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        found = self.server.owner.take(self.command, self.path, self.headers, body)  # type: ignore[arg-type]
        if found is None:
            self._wait_for_the_client_to_give_up()
            return
        text = json.dumps(found).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    do_GET = do_POST = do_PUT = _serve

    def _wait_for_the_client_to_give_up(self) -> None:
        self.close_connection = True
        try:
            self.connection.recv(1)
        except OSError:
            pass  # broken by `die`
