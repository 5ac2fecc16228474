"""Process sets, read, resumed and ended, with processes of the tests."""

from __future__ import annotations

import errno
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from hegmd.images.criu.privileges import CAP_SYS_RESOURCE
from hegmd.node.processes.process_set import (
    ProcessSet,
    continue_all,
    dumpers_of,
    end_all,
    holders_of,
    population_of,
    wait_for_thread_numbers,
    wait_until_free,
)
from tests.patience import HANG_S

# The tree that the dumpers of these tests dump: this process, because the same tests may run next to it.
ROOT = os.getpid()

SLEEPER = "import time; print('ready', flush=True); time.sleep(600)"


TREE = Path(__file__).parents[4]
UNIT, CONFINED = TREE / "systemd" / "hegmd.service", TREE / "tests" / "gpu" / "confined.py"
# A user who owns nothing here.
USER = 4242


@contextmanager
def sleeper(
    *arguments: str, text: str = SLEEPER, user: int | None = None, fds: Sequence[int] = ()
) -> Iterator[subprocess.Popen[str]]:
    # Not in a clone: another user may be unable to enter it, as below /root.
    argv, pipe = [os.path.realpath(sys.executable), "-c", text, *arguments], subprocess.PIPE
    with subprocess.Popen(
        argv, stdin=pipe, stdout=pipe, text=True, user=user, group=user, cwd="/", pass_fds=fds
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            yield process
        finally:
            process.kill()


@contextmanager
def confined(unit: Path, pid: int) -> Iterator[subprocess.Popen[str]]:
    """Do what the next daemon does for a job, with the rights of that unit only."""
    argv = [sys.executable, str(CONFINED), str(unit), sys.executable, "-c", LET_GO, str(pid)]
    with subprocess.Popen(argv, stderr=subprocess.PIPE, text=True, cwd=TREE) as process:
        try:
            yield process
        finally:
            process.kill()


def has_capability(number: int) -> bool:
    status = Path("/proc/self/status").read_text()
    return bool(int(status.partition("CapEff:")[2].split()[0], 16) >> number & 1)


def stop(process: subprocess.Popen[str]) -> None:
    os.kill(process.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED)


def state(process: subprocess.Popen[str]) -> str:
    return Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_processes_stopped_by_criu_continue_and_those_stopped_before_do_not() -> None:
    with sleeper() as one, sleeper() as other:
        stop(other)
        before = population_of([one.pid, other.pid])
        assert before.stopped == {other.pid}
        stop(one)
        continue_all(before)
        os.waitid(os.P_PID, one.pid, os.WCONTINUED)
        assert state(other) == "T"


def test_a_process_without_a_pidfd_does_not_leave_the_next_ones_stopped() -> None:
    with sleeper() as one, sleeper() as other:
        before = population_of([one.pid, other.pid])
        for process in (one, other):
            stop(process)
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
            continue_all(before)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for process in (one, other):
            os.waitid(os.P_PID, process.pid, os.WCONTINUED)


def test_no_process_counts_as_gone_for_lack_of_descriptors() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
        with pytest.raises(OSError, match="Too many open files") as scarce:
            population_of([os.getpid()])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert scarce.value.errno == errno.EMFILE


def test_a_daemon_with_many_open_files_ended_a_job_and_failed_to_wait_for_its_end() -> None:
    """`select` takes no descriptor above 1023, and a daemon may have 65536."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4096), hard))
    open_files = [os.open("/dev/null", os.O_RDONLY)]
    try:
        with sleeper() as process:
            while open_files[-1] < 1024:
                open_files.append(os.dup(open_files[0]))
            end_all(population_of([process.pid]))
            assert state(process) in {"", "Z"}
    finally:
        for file in open_files:
            os.close(file)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_foreign_tracer_does_not_delay_the_resume_of_a_job() -> None:
    """An strace of a job kept it parked for 15 minutes after CRIU was done."""
    trace = "import ctypes, os, signal, sys, time\nlibc = ctypes.CDLL(None)\npid = int(sys.argv[1])\n"
    trace += "assert libc.ptrace(0x4206, pid, None, None) == 0\nprint('ready', flush=True)\ntime.sleep(600)"
    with sleeper() as one:
        before = population_of([one.pid])
        with sleeper(str(one.pid), text=trace) as tracer:
            continue_all(before)
            assert tracer.poll() is None


def test_a_pid_that_now_belongs_to_another_process_is_not_signalled() -> None:
    with sleeper() as process:
        ticks = population_of([process.pid]).start_ticks[process.pid]
        end_all(ProcessSet({process.pid: ticks - 1}))
        assert process.poll() is None
        end_all(ProcessSet({process.pid: ticks}))
        assert process.wait() == -signal.SIGKILL


def test_ended_processes_are_skipped() -> None:
    with sleeper() as process:
        people = population_of([process.pid])
    continue_all(people)
    end_all(people)
    assert population_of([process.pid]).start_ticks == {}


def test_a_number_is_held_by_processes_groups_and_sessions_and_by_zombies() -> None:
    leader = "import os, time\nif os.fork() == 0: time.sleep(600)\nprint('ready', flush=True)\ntime.sleep(600)"
    with subprocess.Popen(
        [sys.executable, "-c", leader], stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        found = {(holder.what, holder.is_zombie) for holder in holders_of([process.pid])}
        assert found == {("process", False), ("group", False)}
        os.kill(process.pid, signal.SIGKILL)
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert ("process", True) in {(each.what, each.is_zombie) for each in holders_of([process.pid])}
        assert wait_until_free([process.pid], limit_s=0) != ()
        end_all(population_of(each.pid for each in holders_of([process.pid]) if not each.is_zombie))
    assert [each for each in holders_of([process.pid]) if not each.is_zombie] == []


def test_a_restore_failed_because_a_stranger_had_the_number_of_one_of_its_threads() -> None:
    """CRIU printed: Unable to create a thread: -17. No code had compared the thread ids."""
    begun, ended = threading.Event(), threading.Event()
    stranger = threading.Thread(target=lambda: (begun.set(), ended.wait()))
    stranger.start()
    begun.wait()
    number = stranger.native_id
    assert number is not None
    assert wait_for_thread_numbers([1 << 22, number], limit_s=0) == (number, os.getpid())
    ended.set()
    assert wait_for_thread_numbers([number], limit_s=30) is None
    stranger.join()


@pytest.mark.parametrize(
    ("tree", "is_one"),
    [(f"{ROOT}", True), (f"{ROOT}"[:-1], False), (f"{ROOT}0", False)],
    ids=["it", "shorter", "longer"],
)
def test_a_dumper_is_known_by_the_root_of_its_tree(tree: str, is_one: bool) -> None:
    with sleeper("dump", "--tree", tree, "--images-dir", "x") as process:
        assert (process.pid in dumpers_of([ROOT])) == is_one


def test_processes_left_stopped_by_a_killed_criu_are_not_waited_for_forever() -> None:
    with sleeper("dump", "--tree", str(ROOT), "--images-dir", "x") as process:
        stop(process)
        assert dumpers_of([ROOT]) == ()


# Writes for as long as it can, as CRIU does, and then stops.
WRITER = "import os, sys\nprint('ready', flush=True)\nfile = os.open(sys.argv[-1], os.O_WRONLY | os.O_CREAT)\n"
WRITER += "try:\n    while True: os.pwrite(file, b'x', 0)\nexcept OSError as error: sys.exit(error.errno)"


def test_a_dump_that_was_cancelled_is_not_waited_for(tmp_path: Path) -> None:
    """A restarted daemon waited up to 15 minutes, with the job stopped, for an image that it then discarded."""
    people = population_of([ROOT])
    with sleeper("dump", "--tree", str(ROOT), "--images-dir", str(tmp_path / "pages"), text=WRITER) as dumper:
        continue_all(people)
        assert dumper.wait(0) == errno.EFBIG, "it was told by an error, and was not killed"


# The service as it was, and as it is.
WITHOUT, WITH = "CapabilityBoundingSet=CAP_KILL", "CapabilityBoundingSet=CAP_KILL CAP_SYS_RESOURCE"
LET_GO = "import sys\nfrom hegmd.node.processes.process_set import continue_all, population_of\n"
LET_GO += "continue_all(population_of([int(sys.argv[1])]))"


@pytest.mark.thorough
@pytest.mark.skipif(os.geteuid() != 0, reason="to be another user takes root")
def test_a_users_cancelled_dump_ends_early(tmp_path: Path) -> None:
    """The rights that the unit left root did not suffice to set a limit of another user's process."""
    (tmp_path / "unit").write_text(WITHOUT)
    with sleeper(user=USER) as one:
        text = "import sys; print('ready', flush=True); sys.stdin.read()"
        words = ("dump", "--tree", str(one.pid), "--images-dir", "x")
        with sleeper(*words, text=text, user=USER) as dumper, confined(tmp_path / "unit", one.pid) as daemon:
            assert daemon.stderr is not None
            assert "waited for, because ending it needs CAP_SYS_RESOURCE" in daemon.stderr.readline()
            assert dumper.stdin is not None
            dumper.stdin.close()  # its own end
            assert (daemon.wait(HANG_S), dumper.wait(HANG_S)) == (0, 0)
    assert "CAP_SYS_RESOURCE" in next(line for line in UNIT.read_text().splitlines() if line.startswith("Capab"))


@pytest.mark.skipif(not has_capability(CAP_SYS_RESOURCE), reason="to tell another user's CRIU takes CAP_SYS_RESOURCE")
def test_a_users_dump_is_ended_by_the_service(tmp_path: Path) -> None:
    (tmp_path / "unit").write_text(WITH)
    pages = os.memfd_create("pages")  # with a name that all users may open
    try:
        with sleeper(user=USER) as one:
            words = ("dump", "--tree", str(one.pid), "--images-dir", f"/proc/self/fd/{pages}")
            with sleeper(*words, text=WRITER, user=USER, fds=(pages,)) as dumper:
                with confined(tmp_path / "unit", one.pid) as daemon:
                    assert daemon.wait(HANG_S) == 0
                assert dumper.wait(0) == errno.EFBIG, "it was told by an error, and was not killed"
    finally:
        os.close(pages)


def test_a_dump_that_a_signal_would_kill_is_not_signalled(tmp_path: Path) -> None:
    """Killed within a process of the job, it could take that with it; it ends by itself."""
    text = f"import signal; signal.signal(signal.SIGXFSZ, signal.SIG_DFL)\n{WRITER}"
    text = text.replace("while True", "while not os.path.exists(sys.argv[-2])")
    enough = tmp_path / "enough"
    people = population_of([ROOT])
    words = ("dump", "--tree", str(ROOT), "--images-dir", str(enough), str(tmp_path / "pages"))
    with sleeper(*words, text=text) as dumper:
        timer = threading.Timer(0, enough.touch)
        timer.start()
        continue_all(people)
        timer.join()
        assert dumper.wait(HANG_S) == 0


def test_another_users_program_named_like_criu_kept_a_job_stopped() -> None:
    """hegmd waited 15 minutes for each program with CRIU's arguments, of any user, before the job continued."""
    with sleeper("dump", "--tree", str(ROOT), "--images-dir", "x") as process:
        assert dumpers_of([ROOT], uid=os.geteuid()) == (process.pid,)
        assert dumpers_of([ROOT], uid=os.geteuid() + 1) == ()
