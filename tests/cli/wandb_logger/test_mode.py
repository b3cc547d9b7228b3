"""Whether a run is online, what it keeps to itself, and what a dead server does."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.wandb_runs import connect, folders, sync
from tests.startup import forked
from tests.wandb_server import WandbServer
from trainkit import WandbRunLogger
from trainkit.cli.wandb_logger import resolve_mode
from trainkit.errors import TrainkitError

KEY = "local" + 35 * "x"


@pytest.mark.parametrize(
    ("mode", "environ", "expected"),
    [
        ("auto", {}, "offline"),
        ("auto", {"WANDB_API_KEY": KEY}, "online"),
        ("auto", {"WANDB_API_KEY": KEY, "WANDB_MODE": "offline"}, "offline"),
        ("auto", {"WANDB_SWEEP_ID": "s", "WANDB_MODE": "dryrun"}, "offline"),
        ("auto", {"WANDB_MODE": "disabled"}, "disabled"),
        ("offline", {"WANDB_API_KEY": KEY, "WANDB_MODE": "online"}, "offline"),
        ("online", {"WANDB_API_KEY": KEY, "WANDB_MODE": "offline"}, "online"),
    ],
)
def test_mode_by_the_environment(
    private_wandb: Path,
    monkeypatch: pytest.MonkeyPatch,
    mode: str,
    environ: dict[str, str],
    expected: str,
) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert resolve_mode(mode) == expected  # type: ignore[arg-type]


@pytest.mark.parametrize("where", ["home", "variable"])
def test_a_login_for_this_server_is_found(
    private_wandb: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    path = Path.home() / ".netrc" if where == "home" else private_wandb / "other"
    path.write_text(f"machine wandb.here\n  login user\n  password {KEY}\n")
    path.chmod(0o600)
    if where == "variable":
        monkeypatch.setenv("NETRC", str(path))
    assert resolve_mode("auto") == "offline"  # that is another server's

    import wandb

    wandb.teardown()  # the client reads its settings once
    monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.here")
    assert resolve_mode("auto") == "online"


def test_a_file_of_logins_that_holds_none_is_no_login(
    private_wandb: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (Path.home() / ".netrc").write_text("machine wandb.here login user")
    monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.here")
    assert resolve_mode("auto") == "offline"


def test_wandb_offline_is_remembered(
    private_wandb: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless the environment says otherwise."""
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    subprocess.run([sys.executable, "-m", "wandb", "offline"], check=True, timeout=240)
    assert resolve_mode("auto") == "offline"
    monkeypatch.setenv("WANDB_MODE", "run")
    assert resolve_mode("auto") == "online"


@pytest.mark.parametrize(
    "environ", [{}, {"WANDB_MODE": "online"}, {"WANDB_SWEEP_ID": "s"}]
)
def test_online_without_a_login_is_refused_instead_of_asking(
    private_wandb: Path, monkeypatch: pytest.MonkeyPatch, environ: dict[str, str]
) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(TrainkitError, match="mode: online needs a login for https?://"):
        resolve_mode("auto" if environ else "online")


SECRET, VARIABLE, ARGUMENT, PASSWORD = (
    "s3cretvalue",
    "plainvalue",
    "argvalue",
    "pwvalue",
)

TRAINING = """
import sys
import wandb
from trainkit import WandbRunLogger
from trainkit.config.redact import public_config

print("printed s3cretvalue")
config = {
    "hub": {"api_key": "s3cretvalue", "url": "https://me:pwvalue@host/x"},
    "home": "${oc.env:MY_VARIABLE}",
    "below": "${home}/data",
    "note": "with s3cretvalue inside",
    "lr": 0.1,
}
if sys.argv[1] == "trainkit":
    logger = WandbRunLogger(save_dir="run")
    logger.log_hyperparams(public_config(config))
    logger.log_metrics({"x": 1.0}, step=0)
    logger.finalize("success")
else:
    with wandb.init(dir="run", config={"note": "with s3cretvalue inside"}) as run:
        run.log({"x": 1.0})
"""


def found(word: str, server: WandbServer, folder: Path) -> list[str]:
    """Where a word is: requests, and files under a folder."""
    needle = word.encode()
    requests = [r.split(b"\n")[0].decode() for r in server.received if needle in r]
    files = [p for p in folder.rglob("*") if p.is_file() and needle in p.read_bytes()]
    return requests + [str(p) for p in files]


def train(kind: str, server: WandbServer, folder: Path, mode: str) -> None:
    """Train in a process."""
    git = ["git", "-c", "init.defaultBranch=main"]
    remote = "https://me:pwvalue@github.com/a/b.git"
    subprocess.run([*git, "init", "-q", str(folder)], check=True, timeout=240)
    subprocess.run(
        [*git, "-C", str(folder), "remote", "add", "origin", remote], check=False
    )
    (folder / "run").mkdir(exist_ok=True)
    (folder / "train.py").write_text(TRAINING)
    env = server.env(
        folder,
        **forked(),
        MY_API_KEY=SECRET,
        MY_VARIABLE=VARIABLE,
        SLURM_JOB_ID="1",
        SLURM_MY_TOKEN=SECRET,
        WANDB_MODE=mode,
        WANDB_ERROR_REPORTING="true",  # what is sent by default
    )
    command = [sys.executable, "train.py", kind, f"password={ARGUMENT}"]
    subprocess.run(command, env=env, cwd=folder, check=True, timeout=240)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["online", "offline"])
def test_nothing_secret_is_sent_or_written(
    wandb_server: WandbServer, tmp_path: Path, mode: str
) -> None:
    train("trainkit", wandb_server, tmp_path, mode)
    key = wandb_server.env(tmp_path)["WANDB_API_KEY"]
    for word in (SECRET, VARIABLE, ARGUMENT, PASSWORD, key):
        assert found(word, wandb_server, tmp_path / "run") == []
    if mode == "online":
        (run,) = wandb_server.runs.values()
        assert run.config == {
            "hub": {"api_key": "<redacted>", "url": "https://<redacted>@host/x"},
            "home": "${oc.env:MY_VARIABLE}",
            "below": "${oc.env:MY_VARIABLE}/data",
            "note": "with <redacted> inside",
            "lr": 0.1,
        }


@pytest.mark.slow
def test_the_plain_client_sends_what_is_searched_for(
    wandb_server: WandbServer, tmp_path: Path
) -> None:
    """Or the search above would prove nothing."""
    train("plain", wandb_server, tmp_path, "online")
    for word in (SECRET, ARGUMENT):
        assert found(word, wandb_server, tmp_path / "run")


DYING = """
import pathlib, sys, time
from trainkit import WandbRunLogger

logger = WandbRunLogger(save_dir="run", finish_timeout=0.5)
for step in range(20):
    logger.log_metrics({"x": float(step)}, step=step)
    while step == 9 and not pathlib.Path("go").exists():
        time.sleep(0.02)
logger.finalize("success")
sys.exit(int(sys.argv[1]))
"""


@pytest.mark.slow
def test_a_server_that_dies_in_mid_run_costs_seconds_and_no_row(
    wandb_server: WandbServer, tmp_path: Path
) -> None:
    """Without a bound the client goes on trying, for hours."""
    (tmp_path / "training.py").write_text(DYING)
    command = [sys.executable, "training.py", "3"]
    env = wandb_server.env(tmp_path, **forked())
    child = subprocess.Popen(
        command, env=env, cwd=tmp_path, stderr=subprocess.PIPE, text=True
    )
    try:
        wandb_server.wait_until(
            lambda: any(len(r.history) == 10 for r in wandb_server.runs.values())
        )
        wandb_server.die()
        (tmp_path / "go").touch()
        _, said = child.communicate(timeout=240)
    finally:
        child.kill()
        child.communicate()
    (folder,) = folders(tmp_path / "run")
    assert child.returncode == 3
    assert f"wandb sync --include-online {folder}" in said
    assert [len(run.history) for run in wandb_server.runs.values()] == [10]

    wandb_server.revive()
    sync(wandb_server, folder, tmp_path)
    (run,) = wandb_server.runs.values()
    assert [row["x"] for row in run.history] == list(range(20))
    assert run.state == "finished"


@pytest.mark.slow
def test_a_server_that_is_not_there_at_the_start_makes_the_run_offline(
    wandb_server: WandbServer,
    private_wandb: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    connect(wandb_server, monkeypatch, private_wandb)
    # Twice before that the client asks who it is, for five seconds each.
    seconds = "wandb.sdk.lib.identity._RESOLVE_TIMEOUT_SECONDS"
    monkeypatch.setattr(seconds, 0.2, raising=False)
    wandb_server.hang()
    logger = WandbRunLogger(save_dir=private_wandb, init_timeout=0.3)
    logger.log_metrics({"x": 1.0}, step=0)
    logger.finalize("success")
    offline = [f for f in folders(private_wandb) if f.name.startswith("offline-")]
    assert f"To upload it: wandb sync {offline[0]}" in capsys.readouterr().err

    wandb_server.revive()
    sync(wandb_server, offline[0], private_wandb)
    (run,) = wandb_server.runs.values()
    assert [row["x"] for row in run.history] == [1.0]
