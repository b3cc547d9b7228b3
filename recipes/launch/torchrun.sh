#!/usr/bin/env bash
# A recipe on several processes. On several nodes, run the second line on each of them.
#
#   PROCESSES=4 recipes/launch/torchrun.sh code_lm trainer.accumulate_grad_batches=1
#   JOB=first NODES=2 PROCESSES=4 RENDEZVOUS=node0:29400 recipes/launch/torchrun.sh code_lm
#
# What follows the experiment's name goes to trainkit train. When a process fails,
# torchrun starts all of them again, up to RESTARTS times, and the run resumes in its
# folder from its last checkpoint. JOB names the folder. Nodes share a file system.
set -euo pipefail

experiment=${1:?the name of an experiment, then overrides}
shift
nodes=${NODES:-1}
processes=${PROCESSES:-1}
if [ "$nodes" -gt 1 ]; then
  : "${JOB:?a name that all nodes are given, and no other training has}"
  : "${RENDEZVOUS:?host:port of one of the nodes, the same on all}"
fi

# Each node counts its attempts by itself, so an old store would serve old addresses.
# https://github.com/pytorch/pytorch/issues/135712
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1

exec torchrun \
  --nnodes="$nodes" --nproc-per-node="$processes" --max-restarts="${RESTARTS:-3}" \
  --rdzv-backend=c10d --rdzv-endpoint="${RENDEZVOUS:-localhost:0}" \
  --rdzv-id="${JOB:-$(date +%Y-%m-%d_%H-%M-%S)-$$}" \
  -m trainkit train "experiment=$experiment" trainer=ddp \
  "trainer.num_nodes=$nodes" "trainer.devices=$processes" ckpt_path=auto "$@"
