#!/bin/sh
#SBATCH --partition=low-requeue
#SBATCH --requeue
#SBATCH --open-mode=append
# A training that Slurm requeues for a job of a higher partition (PreemptMode=REQUEUE): it is written into an image
# within KillWait, and restored from there when Slurm starts it again. sbatch requeue.sh python train.py
set -eu
: "${HEGMCTL:=hegmctl}" "${HEGM_IMAGE_DIR:=$PWD}"
name=slurm-$SLURM_JOB_ID images=$HEGM_IMAGE_DIR/slurm-$SLURM_JOB_ID

# Ask hegmd, again if it has restarted meanwhile (3, 12) or still does what it was asked before that (9).
ask() {
    tries=0
    while :; do
        status=0
        "$@" || status=$?
        case $status in 3 | 9 | 12) ;; *) return "$status" ;; esac
        [ $((tries += 1)) -lt 60 ] || return "$status"
        sleep 5
    done
}

# Each image has a directory of its own: the one before stays until the next is complete.
write() {
    image=$images/$(date +%s) why=0
    "$HEGMCTL" checkpoint "$name" "$image" || why=$?
    [ "$why" -eq 9 ] || return "$why"
    "$HEGMCTL" handoff "$name" "$image" || return 9 # it is suspended for others
}

# A SIGTERM of Slurm waits until the training is back: only then can it be written again.
restore() { (trap '' TERM; exec "$HEGMCTL" restore --newest "$images"); }

leave() {
    trap '' TERM
    mkdir -p "$images"
    ask write
    exit
}
trap leave TERM

# Wait for the training, by a process that a SIGTERM of Slurm does not end before this script has handled its own.
follow() {
    (trap '' TERM; exec "$HEGMCTL" wait "$name") &
    wait $!
}
runs() {
    found=$(ask "$HEGMCTL" jobs --filter "name=$name" --filter "user=$(id -un)" --format '{{.ID}}') && [ -n "$found" ]
}
has_image() { "$HEGMCTL" images ls --json "$images" 2>/dev/null | grep -q '"state": "whole"'; }

# It has outlived the script that started it. 14: written into an image, or it ended with an unknown status.
if runs; then
    status=0
    follow || status=$?
    if [ "$status" -ne 14 ] || ! has_image; then exit "$status"; fi
fi
# Without a complete image it starts over: the node failed, or KillWait was over, while the first one was written.
if has_image; then
    status=0
    ask restore || status=$?
    if [ "$status" -eq 0 ]; then
        "$HEGMCTL" images rm --yes "$images"/* || :
    elif ! runs; then # it runs if hegmd restarted after it had restored it, and before it could say so
        exit "$status"
    fi
    follow
    exit
fi
# Slurm sends SIGTERM to the training too, which is not to end by it. A session of its own, since an image has the
# leader of its session as well.
(trap '' TERM; exec setsid "$HEGMCTL" run --name "$name" --priority best-effort --gpu "${HEGM_GPUS:-gpu0}" -- "$@") \
    </dev/null &
wait $!
