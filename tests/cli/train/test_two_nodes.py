"""One training on two nodes, of which one is killed: two torchruns on the loopback."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.train.test_several_ranks import SGD, furthest, steps_logged
from tests.cli.training import SMALL, summary_of, the_run, train
from tests.startup import forked

KILLED = "model._target_=tests.cli.train.rank_models.KilledOnce"
TWO_NODES = [
    "trainer=ddp",
    "trainer.accelerator=cpu",
    "trainer.devices=1",
    "trainer.num_nodes=2",
    "trainer.accumulate_grad_batches=2",
    "ckpt_path=auto",
]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def node(where: Path, port: int, *words: str) -> subprocess.Popen[str]:
    """Each node is given the same command, and its own number of restarts counts."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("WANDB_")}
    env |= {"HOME": str(where), "OMP_NUM_THREADS": "1", **forked()}
    env |= {"TRAINKIT_ALLOW": "tests", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    agent = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2"]
    agent += ["--nproc-per-node=1", "--max-restarts=2", "--rdzv-id=job"]
    agent += ["--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{port}"]
    return subprocess.Popen(
        [*agent, "-m", "trainkit", "train", *SMALL, *TWO_NODES, *words],
        cwd=where,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.slow
def test_a_node_killed_and_started_again_trains_as_one_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed in its second window; the first step's checkpoint is gone on from, in the
    same folder, though only one of the nodes has counted a failure."""
    port = free_port()
    nodes = [node(tmp_path, port, KILLED, *SGD) for _ in range(2)]
    try:
        said = [each.communicate(timeout=240)[0] for each in nodes]
    finally:
        for each in nodes:
            each.kill()

    assert [each.returncode for each in nodes] == [0, 0], said
    assert (tmp_path / "killed").exists()
    two = the_run(tmp_path)  # one folder
    assert two.name == "torchrun-job"
    assert summary_of(two)["effective_batch"]["replicas"] == 2
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["trainkit"])
    assert train(*SGD, "trainer.accumulate_grad_batches=4", "name=one") == 0
    assert train(*SGD, "trainer.accumulate_grad_batches=2", "name=half") == 0
    one = the_run(tmp_path / "outputs" / "one")
    assert furthest(two, one) < 1e-6
    assert furthest(two, the_run(tmp_path / "outputs" / "half")) > 1e-4  # the control
    assert steps_logged(two) == steps_logged(one) == list("12")
