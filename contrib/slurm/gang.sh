#!/bin/sh
#SBATCH --partition=low
# A training that Slurm may suspend for a job of a higher partition, which gets the memory of its GPU.
set -eu
# Ignored signals are inherited: SIGTSTP, which Slurm sends first, would stop the training before its bytes have left.
trap '' TSTP
exec "${HEGMCTL:-hegmctl}" run --priority best-effort --gpu "${HEGM_GPUS:-gpu0}" -- "$@"
