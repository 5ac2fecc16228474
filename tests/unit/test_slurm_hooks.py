"""Slurm's hooks in contrib/slurm, with a substitute for hegmctl that records its arguments."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from hegmd.sharing.records import LeaseRecord
from tests.patience import HANG_S

HOOKS = Path(__file__).parents[2] / "contrib/slurm"
STAND_IN = """#!/bin/sh
echo "$*" >>"{calls}"
"""

# A node in a folder: `whole` is in it while its images are complete, `runs` while the training lives, and an answer of
# each command, which is given once, is in a file of its name. Like hegmctl it writes no image over another.
NODE = """#!/bin/sh
echo "$*" >>"{folder}/calls"
status=0
[ ! -e "{folder}/$1" ] || {{ read -r status <"{folder}/$1"; rm "{folder}/$1"; }}
case "$1 $2 $status" in
"images ls"*) ! [ -e "{folder}/whole" ] || echo '{{"images": [{{"state": "whole"}}]}}' ;;
jobs*0) ! [ -e "{folder}/runs" ] || echo j1 ;;
queue*) cat "{folder}/leases" ;;
restore*6) touch "{folder}/runs" ;;
restore*) kill -TERM $$; kill -TERM $PPID ;;
checkpoint*0 | handoff*0) mkdir "$3" ;;
wait*) rm -f "{folder}/runs" ;;
run*) [ ! -e "{folder}/requeued" ] || kill -TERM $PPID ;;
esac
exit "$status"
"""

# It ends the lease of job 7 once the Prolog waits or has made its lease.
SLOW_RELEASE = """#!/bin/sh
case "$1 $2" in
"release slurm-7")
    echo release >>"{folder}/calls"
    echo begun >"{folder}/begun"
    read -r _ <"{folder}/comes"
    echo released >>"{folder}/calls"
    ;;
make-room*)
    echo make-room >>"{folder}/calls"
    echo comes >"{folder}/comes"
    ;;
esac
"""


def requeued(folder: Path) -> list[str]:
    """Start the recipe on that node; return what it asks of hegmctl, without what only looks."""
    for name, text in (("hegmctl", NODE.format(folder=folder)), ("sleep", "#!/bin/sh\n")):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    environ = {"HEGM_IMAGE_DIR": str(folder), "SLURM_JOB_ID": "7", "PATH": f"{folder}:/usr/bin:/bin"}
    subprocess.run(["/bin/sh", str(HOOKS / "requeue.sh"), "train"], env=environ, check=False, timeout=HANG_S)
    asked = [line.split()[0] for line in (folder / "calls").read_text().splitlines()]
    return [command for command in asked if command not in ("images", "jobs")]


def test_a_requeued_training_lost_its_work_when_it_was_requeued_again_during_its_restore(tmp_path: Path) -> None:
    """No second image could be written, as the first was in its place: the next start began with the old one."""
    images = tmp_path / "slurm-7"
    (images / "1").mkdir(parents=True)
    (tmp_path / "whole").touch()
    assert requeued(tmp_path) == ["restore", "checkpoint"]
    assert len(list(images.iterdir())) == 2, "the old image and the new one"


def test_a_requeued_training_lost_its_work_when_hegmd_was_killed_during_its_image(tmp_path: Path) -> None:
    """The recipe ended at the first error, and Slurm the training with it, while the next daemon wrote the image."""
    (tmp_path / "requeued").touch()
    (tmp_path / "checkpoint").write_text("12\n")
    assert requeued(tmp_path) == ["run", "checkpoint", "checkpoint"]


def test_a_requeued_training_lost_its_work_when_it_was_suspended_for_others(tmp_path: Path) -> None:
    """A suspended job cannot be checkpointed: hegmctl refuses it, and names handoff."""
    (tmp_path / "requeued").touch()
    (tmp_path / "checkpoint").write_text("9\n")
    assert requeued(tmp_path) == ["run", "checkpoint", "handoff"]


def test_a_requeued_training_never_started_again_beside_an_incomplete_image(tmp_path: Path) -> None:
    """The node had failed during its first image: the restore found no complete one, and the Slurm job failed."""
    (tmp_path / "slurm-7/1").mkdir(parents=True)
    assert requeued(tmp_path) == ["run"]


def test_a_requeued_training_ran_twice_if_slurm_had_not_ended_the_first(tmp_path: Path) -> None:
    """A restored training is no child of slurmstepd, and one that is starting cannot be written: it goes on."""
    (tmp_path / "runs").touch()
    assert requeued(tmp_path) == ["wait"]


def test_a_requeued_training_ran_twice_if_hegmd_restarted_just_then(tmp_path: Path) -> None:
    """Without an answer of hegmd, the recipe took the training for ended."""
    (tmp_path / "runs").touch()
    (tmp_path / "jobs").write_text("3\n")
    assert requeued(tmp_path) == ["wait"]


def test_a_requeued_training_was_left_alone_if_hegmd_restarted_at_the_end_of_its_restore(tmp_path: Path) -> None:
    """The second request was refused, as the training was there, and the Slurm job ended without it."""
    (tmp_path / "whole").touch()
    (tmp_path / "restore").write_text("6\n")
    assert requeued(tmp_path) == ["restore", "wait"]


def test_a_job_of_the_option_failed_on_a_node_without_hegmctl(tmp_path: Path) -> None:
    environ = {"HEGM_SLURM_COMMAND": "echo", "HEGMCTL": str(tmp_path / "hegmctl"), "PATH": "/usr/bin:/bin"}
    words = ["/bin/sh", str(HOOKS / "hegm-task"), "it", "runs"]
    done = subprocess.run(words, env=environ, capture_output=True, text=True, check=False, timeout=HANG_S)
    assert (done.returncode, done.stdout) == (0, "it runs\n")
    assert "without hegmd" in done.stderr


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


@pytest.fixture
def node(tmp_path: Path) -> dict[str, str]:
    """The environment of the hooks for job 7, with an hegmctl that exits with the statuses in files of its commands."""
    (tmp_path / "hegmctl").write_text(NODE.format(folder=tmp_path))
    (tmp_path / "hegmctl").chmod(0o755)
    (tmp_path / "partitions").write_text("high gpu0 60GiB production\n")
    names = {"HEGMCTL": "hegmctl", "HEGM_SLURM_PARTITIONS": "partitions", "HEGM_SLURM_LEFT": "left"}
    environ = {name: str(tmp_path / path) for name, path in names.items()}
    return environ | {"SLURM_JOB_PARTITION": "high", "SLURM_JOB_ID": "7", "PATH": "/usr/bin:/bin"}


def called(hook: str, node: dict[str, str]) -> str:
    """Return what a hook prints, which always succeeds."""
    return subprocess.run(
        ["/bin/sh", str(HOOKS / hook)], env=node, check=True, stdout=subprocess.PIPE, text=True
    ).stdout


def test_a_lease_stayed_for_a_week_if_hegmd_was_down_at_the_epilog(tmp_path: Path, node: dict[str, str]) -> None:
    """The next call ends it, also that at the start of hegmd, and it is tried until hegmd has answered."""
    for status in ("3", "3", "5"):
        (tmp_path / "release").write_text(f"{status}\n")
        called("epilog", node)
        node.pop("SLURM_JOB_ID", None)  # as at a start of hegmd
    assert (tmp_path / "calls").read_text().splitlines() == ["release slurm-7"] * 3
    called("epilog", node)
    assert (tmp_path / "calls").read_text().splitlines() == ["release slurm-7"] * 3, "there was no such lease"


def test_a_node_was_drained_if_the_epilog_could_not_note_a_lease(tmp_path: Path, node: dict[str, str]) -> None:
    """A shell exits when it cannot redirect the output of `:`. A folder prevents it here, as a full /run would."""
    (tmp_path / "left/slurm-7").mkdir(parents=True)
    for status in ("3", "0"):
        (tmp_path / "release").write_text(f"{status}\n")
        called("epilog", node)
    called("prolog", node)


def test_a_requeued_job_was_told_that_its_memory_is_not_free_if_its_own_lease_has_it(
    tmp_path: Path, node: dict[str, str]
) -> None:
    (tmp_path / "release").write_text("3\n")
    called("epilog", node)
    (tmp_path / "make-room").write_text("4\n")
    (tmp_path / "leases").write_text('{"leases": [{"name": "slurm-7"}]}')
    assert "keeps its lease" in called("prolog", node)
    assert not list((tmp_path / "left").iterdir()), "it is in use again"
    (tmp_path / "make-room").write_text("4\n")
    (tmp_path / "leases").write_text('{"leases": [{"name": "slurm-71"}]}')
    assert "has not freed" in called("prolog", node)


def test_the_lease_of_a_requeued_job_was_ended_by_an_epilog_that_had_just_read_its_note(
    tmp_path: Path, node: dict[str, str]
) -> None:
    """The Prolog comes while the Epilog of another job ends the lease of before. It waits for that."""
    (tmp_path / "left").mkdir()
    (tmp_path / "left/slurm-7").touch()
    pipes = [tmp_path / name for name in ("begun", "comes")]
    for pipe in pipes:
        os.mkfifo(pipe)
    (tmp_path / "hegmctl").write_text(SLOW_RELEASE.format(folder=tmp_path))
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/flock").write_text(f'#!/bin/sh\necho waits >"{tmp_path}/comes"\nexec /usr/bin/flock "$@"\n')
    (tmp_path / "bin/flock").chmod(0o755)
    begun, comes = (os.open(pipe, os.O_RDWR) for pipe in pipes)
    try:
        other = subprocess.Popen(["/bin/sh", str(HOOKS / "epilog")], env=node | {"SLURM_JOB_ID": "8"})
        assert os.read(begun, 64)
        called("prolog", node | {"PATH": f"{tmp_path}/bin:{node['PATH']}"})
        assert other.wait(HANG_S) == 0
    finally:
        os.close(begun)
        os.close(comes)
    assert (tmp_path / "calls").read_text().split() == ["release", "released", "make-room"]


def test_all_leases_of_a_slurm_job_are_known_as_its() -> None:
    lease = LeaseRecord(number=1, size_bytes=1, priority=80, uid=0, is_admin=True, since_utc=0.0, made_ticks=0, boot="")
    names = ("slurm-7", "slurm-7-2", "slurm-7-x", "train-7")
    assert [lease.replace(name=name).slurm_job for name in names] == [7, 7, None, None]
