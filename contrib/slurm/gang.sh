#!/bin/sh
#SBATCH --partition=low
# A training that Slurm suspends for a job of a higher partition (PreemptMode=SUSPEND,GANG), which gets the memory of its
# GPU: sbatch gang.sh python train.py
set -eu
exec "${HEGMCTL:-hegmctl}" run --slurm --priority best-effort --gpu "${HEGM_GPUS:-gpu0}" -- "$@"
