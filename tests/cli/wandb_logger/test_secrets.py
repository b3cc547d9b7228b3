"""No secret and no environment variable reaches W&B or its files."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.startup import forked
from tests.wandb_server import WandbServer

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
from trainkit.config.public_config import public_config

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
