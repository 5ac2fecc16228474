"""The process tree of an image: who may be in it, and that no process of it stays stopped or orphaned."""

from __future__ import annotations

import os
import resource
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hegmd.errors import DENIED, REFUSED, HegmError
from hegmd.images.criu.needs import needs_of
from hegmd.images.dump_tree import end_tree, not_theirs, outside_relatives, require_no_more, resume_all, tree_of
from hegmd.migration.machine.operation import ImageRequest as Wish
from hegmd.node.processes.process_set import ProcessSet, end_all, population_of
from hegmd.node.processes.process_tree import Descriptor, Tree, read_tree
from hegmd.node.processes.process_tree import TreeProcess as Process
from hegmd.system.programs import Rights
from tests.cells import in_one_test
from tests.looks import pause
from tests.unit.migration.operations import worker


@in_one_test(
    ("uid", "changes", "why"),
    [
        (1000, {}, None),
        (1001, {}, "process 7 runs as uid 1000, and the image would belong to you, uid 1001"),
        (1000, {"is_guarded": True}, "hides its memory from its own user"),
        (1000, {"gid": 5}, "has other rights or another group"),
        (0, {"is_guarded": True}, None),
    ],
)
def test_an_image_holds_nothing_that_its_reader_could_not_have(
    uid: int, changes: dict[str, Any], why: str | None
) -> None:
    first = Process(7, 1, 70, "S", 7, 7, uid=1000, gid=1000)
    tree = Tree(7, (first._replace(**changes),))
    reasons = not_theirs(tree, needs_of(tree), Rights(uid, 1000, ()))
    assert [reason.message for reason in reasons if why is None or why in reason.message] == (
        [] if why is None else [reasons[0].message]
    )


def test_the_lock_of_a_restart_kept_a_user_from_an_image_of_a_job(tmp_path: Path) -> None:
    """It is the daemon's file, which the agent closes before the image is written."""
    files = [(tmp_path / name).open("w") for name in ("restart-j7.lock", "restart-4.lock", "restart-mine.lock")]
    opened = tuple(
        Descriptor(os.getpid(), file.fileno(), file.name, stat.S_IFREG | 0o600, os.O_RDWR, owner=(0, 0))
        for file in files
    )
    tree = Tree(7, (Process(7, 1, 70, "S", 7, 7, uid=1000, gid=1000),), opened)
    reasons = not_theirs(tree, needs_of(tree), Rights(1000, 1000, ()))
    for file in files:
        file.close()
    assert [reason.message.partition(" has ")[2].partition(" open")[0] for reason in reasons] == [files[2].name]


@pytest.mark.parametrize("uid", [0, 1000])
def test_a_process_that_joins_a_job_during_its_image_is_not_in_it(uid: int) -> None:
    tree = Tree(7, (Process(7, 1, 70, "S", 7, 7),))
    with pytest.raises(HegmError, match="process 8 joined the job or changed its rights") as refused:
        require_no_more({7: True, 8: True}, tree, Rights(uid, uid, ()))
    assert refused.value.code is (DENIED if uid else REFUSED)
    require_no_more({7: True}, tree, Rights(uid, uid, ()))


@pytest.fixture
def orphan() -> Iterator[tuple[int, int, int]]:
    """The number of a root that was killed, and its child, which is stopped as CRIU leaves it; its start time too."""
    text = "import subprocess\nchild = subprocess.Popen(['sleep', '1000'])\nprint(child.pid, flush=True)\nchild.wait()"
    with subprocess.Popen([sys.executable, "-c", text], stdout=subprocess.PIPE, start_new_session=True) as root:
        assert root.stdout is not None
        child = int(root.stdout.readline())
        people = population_of([child])
        os.kill(child, signal.SIGSTOP)
        root.kill()
    try:
        yield root.pid, child, people.start_ticks[child]
    finally:
        end_all(people)


@pytest.mark.parametrize("is_whole", [True, False], ids=["in a whole image", "in none"])
def test_a_child_of_a_job_killed_after_its_dump_does_not_stay_stopped(
    is_whole: bool, orphan: tuple[int, int, int]
) -> None:
    """The child was no longer below its root. A restore was refused because the child had its pid."""
    root, child, ticks = orphan
    wish = Wish(path="/images/one", uid=0, gid=0, root_pid=root, root_ticks=1)
    dumped = ProcessSet({root: 1, child: ticks})
    if is_whole:
        end_tree(wish, worker(pid=root, start_ticks=1), dumped)
        assert child not in population_of([child]).start_ticks
    else:
        resume_all(wish, dumped)
        assert child not in population_of([child]).stopped


STARTS = """
import subprocess
started = subprocess.run(["sh", "-c", "sleep 1000 >&2 & echo $!"], check=True, stdout=subprocess.PIPE, text=True)
print(started.stdout, end="", flush=True)
input()
"""


def test_detached_processes_of_a_job_are_reported_before_the_dump() -> None:
    """It has the job's number for its group, and its parent has ended."""
    argv, pipe = [sys.executable, "-c", STARTS], subprocess.PIPE
    with subprocess.Popen(argv, stdin=pipe, stdout=pipe, text=True, start_new_session=True) as job:
        assert job.stdout is not None
        kin = int(job.stdout.readline())
        try:
            outsiders = list(outside_relatives(read_tree(job.pid)))
        finally:
            end_all(population_of([kin]))
            job.kill()
    assert [line.partition(":")[0] for line in outsiders] == [
        f"process {kin}, which is not in the job, uses its number {job.pid} as its group"
    ]


@pytest.mark.parametrize("launched", [True, False])
def test_the_only_rank_of_torchrun_was_refused_for_its_connection_to_its_launcher(*, launched: bool) -> None:
    environ = "TORCHELASTIC_RUN_ID=1" if launched else "OTHER=1"
    words = ["sh", "-c", f"env {environ} sleep 1000 & echo $!; wait"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as launcher:
        assert launcher.stdout is not None
        rank = int(launcher.stdout.readline())
        try:
            while b"sleep" not in Path(f"/proc/{rank}/cmdline").read_bytes().split(b"\0")[0]:
                pause()
            root, tree = tree_of([rank], lambda _look: None)
            assert (root, set(tree.pids)) == ((launcher.pid, {launcher.pid, rank}) if launched else (rank, {rank}))
        finally:
            end_all(population_of([rank, launcher.pid]))


def test_a_process_root_that_cannot_be_opened_without_descriptors_is_not_an_error(paused: int) -> None:
    ticks = population_of([paused]).start_ticks[paused]
    wish = Wish(path="/images/one", uid=0, gid=0, root_pid=paused, root_ticks=ticks)
    os.kill(paused, signal.SIGSTOP)
    os.waitid(os.P_PID, paused, os.WSTOPPED)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (0, before[1]))
        resume_all(wish, ProcessSet({}))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    os.waitid(os.P_PID, paused, os.WCONTINUED)


def test_a_child_that_the_job_has_stopped_itself_stays_stopped_after_an_image(paused: int) -> None:
    with subprocess.Popen(["sleep", "1000"]) as child:
        try:
            ticks = population_of([paused, child.pid]).start_ticks
            for pid in (paused, child.pid):
                os.kill(pid, signal.SIGSTOP)
                os.waitid(os.P_PID, pid, os.WSTOPPED)
            wish = Wish(path="/images/one", uid=0, gid=0, root_pid=paused, root_ticks=ticks[paused])
            resume_all(wish, ProcessSet(ticks, frozenset({child.pid})))
            os.waitid(os.P_PID, paused, os.WCONTINUED)
            assert population_of([child.pid]).stopped == {child.pid}
        finally:
            child.kill()
