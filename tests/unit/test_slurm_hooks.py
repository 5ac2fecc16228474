"""Slurm's hooks in contrib/slurm, with a substitute for hegmctl that records its arguments."""

from __future__ import annotations

import subprocess
from pathlib import Path

from hegmd.sharing.records import LeaseRecord

HOOKS = Path(__file__).parents[2] / "contrib/slurm"
STAND_IN = """#!/bin/sh
echo "$*" >>"{calls}"
"""

# Its restore and the batch script get a SIGTERM of Slurm. Like hegmctl it writes no image over another.
REQUEUED = """#!/bin/sh
echo "$*" >>"{calls}"
case $1 in
restore) kill -TERM $$; kill -TERM $PPID ;;
checkpoint) mkdir "$3" ;;
esac
"""


def test_a_requeued_training_lost_its_work_when_it_was_requeued_again_during_its_restore(tmp_path: Path) -> None:
    """No second image could be written, as the first was in its place: the next start began with the old one."""
    calls, hegmctl, images = (tmp_path / name for name in ("calls", "hegmctl", "slurm-7"))
    hegmctl.write_text(REQUEUED.format(calls=calls))
    hegmctl.chmod(0o755)
    (images / "1").mkdir(parents=True)
    environ = {"HEGMCTL": str(hegmctl), "HEGM_IMAGE_DIR": str(tmp_path), "SLURM_JOB_ID": "7", "PATH": "/usr/bin:/bin"}
    subprocess.run(["/bin/sh", str(HOOKS / "requeue.sh"), "train"], env=environ, check=True)
    asked = [line.split()[0] for line in calls.read_text().splitlines()]
    assert asked == ["restore", "checkpoint"]
    assert len(list(images.iterdir())) == 2, "the old image and the new one"


def test_a_partition_with_a_line_for_each_of_its_gpus_gets_them_all(tmp_path: Path) -> None:
    """The lease of the second GPU was refused: a user cannot call two leases the same."""
    calls, hegmctl, partitions = (tmp_path / name for name in ("calls", "hegmctl", "partitions"))
    hegmctl.write_text(STAND_IN.format(calls=calls))
    hegmctl.chmod(0o755)
    partitions.write_text(
        "high gpu0 60GiB production\nlow gpu0 1GiB normal\nhigh gpu1 20GiB normal\nhigh auto 1GiB normal"
    )
    environ = {"HEGMCTL": str(hegmctl), "HEGM_SLURM_PARTITIONS": str(partitions)}
    environ |= {"SLURM_JOB_PARTITION": "high", "SLURM_JOB_ID": "7", "PATH": "/usr/bin:/bin"}
    for hook in ("prolog", "epilog"):
        subprocess.run(["/bin/sh", str(HOOKS / hook)], env=environ, check=True)
    asked = [line.split() for line in calls.read_text().splitlines()]
    names = [words[words.index("--name") + 1] for words in asked if words[0] == "make-room"]
    assert names == ["slurm-7", "slurm-7-2", "slurm-7-3"]
    assert [words[1] for words in asked if words[0] == "release"] == names


def test_all_leases_of_a_slurm_job_are_known_as_its() -> None:
    lease = LeaseRecord(number=1, size_bytes=1, priority=80, uid=0, is_admin=True, since_utc=0.0, made_ticks=0, boot="")
    names = ("slurm-7", "slurm-7-2", "slurm-7-x", "train-7")
    assert [lease.replace(name=name).slurm_job for name in names] == [7, 7, None, None]
