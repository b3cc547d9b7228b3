#!/usr/bin/env bash
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=8
#SBATCH --time=04:00:00
#SBATCH --signal=INT@120
#SBATCH --requeue
#SBATCH --open-mode=append
# A recipe under SLURM, one task for each GPU. Options of sbatch go before the file:
#
#   sbatch --nodes=4 recipes/launch/slurm.sh code_lm trainer.accumulate_grad_batches=1
#
# What follows the experiment's name goes to trainkit train. Two minutes before its time
# is over, the run saves a checkpoint and ends, and the job is put into the queue again.
# When it starts again, also after a preemption or a node's failure, the run resumes.
set -euo pipefail

experiment=${1:?the name of an experiment, then overrides}
shift

status=0
# shellcheck disable=SC2016  # paths.output_dir is trainkit's to fill in
srun trainkit train "experiment=$experiment" trainer=slurm \
  "trainer.devices=$SLURM_NTASKS_PER_NODE" \
  'paths.run_dir=${paths.output_dir}/slurm-'"$SLURM_JOB_ID" ckpt_path=auto "$@" ||
  status=$?

case "$status" in # 128 + SIGINT, SIGUSR1, SIGUSR2: the time is over. scancel sends SIGTERM
  130 | 138 | 140) scontrol requeue "$SLURM_JOB_ID" ;;
esac
exit "$status"
