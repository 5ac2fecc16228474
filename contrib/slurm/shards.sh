#!/bin/sh
#SBATCH --partition=low
#SBATCH --gres=shard:4
#SBATCH --hegm=--priority=best-effort
# The same where Slurm counts GPUs, by shards: a suspended job keeps its own, and others get the rest. Needs the SPANK
# plugin, which has the script run by `hegmctl run --slurm`: sbatch shards.sh python train.py
set -eu
exec "$@"
