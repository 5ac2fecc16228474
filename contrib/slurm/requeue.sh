#!/bin/sh
#SBATCH --partition=low-requeue
#SBATCH --requeue
#SBATCH --open-mode=append
# A training that Slurm requeues for a job of a higher partition (PreemptMode=REQUEUE): it is written into an image
# within KillWait, and restored from there when Slurm starts it again. sbatch requeue.sh python train.py
set -eu
: "${HEGMCTL:=hegmctl}" "${HEGM_IMAGE_DIR:=$PWD}"
name=slurm-$SLURM_JOB_ID images=$HEGM_IMAGE_DIR/slurm-$SLURM_JOB_ID

# Each image has a directory of its own: the one before stays until the next is complete.
leave() {
    trap '' TERM
    mkdir -p "$images"
    "$HEGMCTL" checkpoint "$name" "$images/$(date +%s)"
    exit
}
trap leave TERM

if [ -n "$(ls "$images" 2>/dev/null)" ]; then
    # A SIGTERM of Slurm waits until the training is back: only then can it be written again.
    (trap '' TERM; exec "$HEGMCTL" restore --newest "$images")
    "$HEGMCTL" images rm --yes "$images"/* || :
    "$HEGMCTL" wait "$name" &
else
    # Slurm sends SIGTERM to the training too, which is not to end by it. A session of its own, since an image has the
    # leader of its session as well.
    (trap '' TERM; exec setsid "$HEGMCTL" run --name "$name" --priority best-effort --gpu "${HEGM_GPUS:-gpu0}" -- "$@") \
        </dev/null &
fi
wait $!
