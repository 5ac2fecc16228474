"""Running other programs: environment, limits, and no remains of a program after the call."""

from __future__ import annotations

import ctypes
import fcntl
import os
import resource
import shutil
import signal
import socket
import stat
import sys
import threading
from pathlib import Path

import anyio
import anyio.lowlevel
import pytest

from hegmd.errors import ExternalError
from hegmd.system import programs
from hegmd.system.programs import Companion, ProgramMissing, find_program, run
from tests.patience import HANG_S

SHIMS = Path(__file__).parent.parent.parent / "stubs" / "bin"


def state_of(pid: int) -> str | None:
    """Return the kernel's letter for the process's state, or None after its end."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return None


def has_ended(pid: int) -> bool:
    # A zombie of another parent has ended too: its parent has to reap it.
    return state_of(pid) in (None, "Z")


def wait_until_ended(pid: int) -> None:
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    with open(pidfd, closefd=True):
        import select

        assert select.select([pidfd], [], [], HANG_S)[0], f"process {pid} goes on"


def script(directory: Path, name: str, text: str) -> Path:
    path = directory / name
    path.write_text(text)
    path.chmod(0o755)
    return path


# -- what a program gets -----------------------------------------------------------------------------------------------


async def test_the_environment_inherits_nothing() -> None:
    assert "HOME" in os.environ or "PATH" in os.environ, "there is something to inherit"
    completed = await run(["env"], deadline_s=10, env={"EXTRA": "1"})
    assert sorted(completed.stdout.split()) == ["EXTRA=1", "LC_ALL=C", f"PATH={programs.SYSTEM_PATH}"]


@pytest.mark.thorough
async def test_arguments_reach_the_program_as_they_are() -> None:
    arguments = ["$HOME; false", "*", "a b", ""]
    completed = await run(["printf", "<%s>", *arguments], deadline_s=10)
    assert completed.stdout == "<$HOME; false><*><a b><>"


async def test_it_runs_in_a_session_of_its_own_in_the_root_directory() -> None:
    completed = await run(["/bin/sh", "-c", "pwd; cut -d' ' -f6 /proc/self/stat; echo $$"], deadline_s=10)
    directory, session, pid = completed.stdout.split()
    assert (directory, session) == ("/", pid)


async def test_standard_input_is_empty_unless_given() -> None:
    assert (await run(["cat"], deadline_s=10)).stdout == ""


@pytest.mark.thorough
async def test_standard_input_may_be_larger_than_a_pipe() -> None:
    completed = await run(["wc", "-c"], deadline_s=10, stdin=b"x" * 1_000_000)
    assert completed.stdout.strip() == "1000000"


# -- what comes back ---------------------------------------------------------------------------------------------------


@pytest.mark.thorough
async def test_output_and_complaints_are_kept_apart() -> None:
    completed = await run(["/bin/sh", "-c", "echo out; echo err >&2; exit 3"], deadline_s=10)
    assert (completed.stdout, completed.stderr, completed.status) == ("out\n", "err\n", 3)
    assert completed.output_tail == "err"
    assert 0 < completed.duration_s < 10


async def test_a_failure_names_program_status_and_the_end_of_its_output() -> None:
    completed = await run(["/bin/sh", "-c", "echo why >&2; exit 3"], deadline_s=10)
    with pytest.raises(ExternalError) as raised:
        completed.require("do this")
    assert "failed with status 3" in raised.value.message
    assert (raised.value.status, raised.value.output_tail, raised.value.hint) == (3, "why", "do this")
    assert raised.value.argv[0] == "/bin/sh"


async def test_a_success_needs_nothing() -> None:
    completed = await run(["true"], deadline_s=10)
    assert completed.require("not needed") is completed


async def test_the_signal_that_ended_a_program_is_named() -> None:
    completed = await run(["/bin/sh", "-c", "kill -KILL $$"], deadline_s=10)
    assert completed.status == -signal.SIGKILL
    with pytest.raises(ExternalError, match="was ended by SIGKILL"):
        completed.require("look into it")


async def test_the_end_of_long_output_is_kept() -> None:
    completed = await run(["seq", "300000"], deadline_s=10)
    assert completed.stdout.endswith("299999\n300000\n")
    assert len(completed.stdout) == programs.OUTPUT_TAIL_BYTES


def test_output_of_an_ended_child_in_a_large_pipe_is_read() -> None:
    """With pages of 64 KiB a pipe holds a MiB from the start, and the child can be gone before we have read that."""
    reader, writer = os.pipe()
    fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 1024 * 1024)
    child = os.posix_spawn("/bin/true", ["true"], {})
    pidfd = os.pidfd_open(child)
    try:
        os.write(writer, b"x" * 1_000_000 + b"end")
        os.set_blocking(reader, False)
        tail = programs._Tail()
        watch = programs._Watch(pidfd, {reader: tail})
        assert watch.until_exit()
        watch.drain()  # returns, although the pipe is still open for writing
        assert tail.text().endswith("xend")
    finally:
        os.waitpid(child, 0)
        for fd in (reader, writer, pidfd):
            os.close(fd)


async def test_binary_output_does_not_hurt() -> None:
    completed = await run(["printf", r"\377ok"], deadline_s=10)
    assert completed.stdout == "\ufffdok"


# -- what cannot be run ------------------------------------------------------------------------------------------------


async def test_a_missing_program_is_distinguished(tmp_path: Path) -> None:
    with pytest.raises(ProgramMissing, match=f"nowhere is not installed in {tmp_path}"):
        await run(["nowhere"], deadline_s=10, path=str(tmp_path))


async def test_a_file_that_is_not_a_program(tmp_path: Path) -> None:
    broken = script(tmp_path, "broken", "")
    with pytest.raises(ExternalError, match="broken cannot be started: Exec format error") as raised:
        await run([str(broken)], deadline_s=10)
    assert raised.value.status is None


async def test_each_failed_start_of_a_program_leaked_three_descriptors() -> None:
    """So a daemon at its limit stayed there; the hint was to run the program by hand, and did not name the limit."""
    taken = {int(name) for name in os.listdir("/proc/self/fd")}
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = [number for number in range(before[0]) if number not in taken][4]  # for its thread, and no pipes
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, before[1]))
        with pytest.raises(ExternalError, match="true cannot be started: hegmd has reached its limit") as raised:
            await run(["true"], deadline_s=10)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert "LimitNOFILE=" in raised.value.hint


def test_only_absolute_directories_and_executable_files_are_searched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    script(tmp_path, "tool", "#!/bin/sh\n")
    assert find_program("tool", ".::") is None
    assert find_program("tool", f"relative:{tmp_path}") == str(tmp_path / "tool")
    (tmp_path / "tool").chmod(stat.S_IRUSR)
    (tmp_path / "directory").mkdir()
    assert find_program("tool", str(tmp_path)) is None
    assert find_program("directory", str(tmp_path)) is None


# -- how it ends -------------------------------------------------------------------------------------------------------

STUBBORN = (
    "trap '' TERM; (trap '' TERM; sleep 600) & echo $! > children; echo $$ >> children; echo begun; wait; sleep 600"
)


@pytest.mark.thorough
async def test_a_deadline_ends_a_child_and_grandchild_that_ignore_sigterm(tmp_path: Path) -> None:
    with pytest.raises(ExternalError, match=r"was not done after 0\.3 s and was ended") as raised:
        await run(["/bin/sh", "-c", f"cd {tmp_path}; {STUBBORN}"], deadline_s=0.3)
    assert raised.value.output_tail == "begun"
    assert raised.value.status == -signal.SIGKILL
    grandchild, child = (int(pid) for pid in (tmp_path / "children").read_text().split())
    assert state_of(child) is None, "the child is reaped"
    wait_until_ended(grandchild)


async def test_at_its_deadline_a_child_may_end_cleanly(tmp_path: Path) -> None:
    orderly = f"trap 'echo tidy > {tmp_path}/left; exit 0' TERM; sleep 600 & wait"
    with pytest.raises(ExternalError) as raised:
        await run(["/bin/sh", "-c", orderly], deadline_s=0.3)
    assert raised.value.status == 0
    assert (tmp_path / "left").read_text() == "tidy\n"


async def test_cancellation_ends_and_reaps_the_child(tmp_path: Path) -> None:
    fifo = tmp_path / "begun"
    os.mkfifo(fifo)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(lambda: run(["/bin/sh", "-c", f"echo $$ > {fifo}; exec sleep 600"], deadline_s=60))
        pid = int(await anyio.to_thread.run_sync(fifo.read_text))
        assert not has_ended(pid)
        tasks.cancel_scope.cancel()
    assert state_of(pid) is None


async def test_a_grandchild_that_keeps_the_pipe_does_not_keep_us() -> None:
    completed = await run(["/bin/sh", "-c", "sleep 600 & echo $!"], deadline_s=10)
    assert completed.duration_s < 5
    wait_until_ended(int(completed.stdout))


async def test_a_grandchild_that_left_the_group_does_not_keep_us() -> None:
    daemonised = "setsid sh -c 'echo $$; exec sleep 600' & sleep 0.3"
    completed = await run(["/bin/sh", "-c", daemonised], deadline_s=10)
    escaped = int(completed.stdout)
    try:
        assert not has_ended(escaped)
        assert completed.duration_s < 5
    finally:
        os.kill(escaped, signal.SIGKILL)


@pytest.mark.thorough
async def test_a_stopped_child_is_ended_too() -> None:
    with pytest.raises(ExternalError, match="was ended"):
        await run(["/bin/sh", "-c", "kill -STOP $$"], deadline_s=0.2)


async def test_no_descriptor_is_left_whatever_happens(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    await run(["cat"], deadline_s=10, stdin=b"text")
    with pytest.raises(ExternalError):
        await run(["sleep", "600"], deadline_s=0.05)
    with pytest.raises(ExternalError):
        await run([str(script(tmp_path, "broken", ""))], deadline_s=10, stdin=b"text")
    with pytest.raises(ProgramMissing):
        await run(["nowhere"], deadline_s=10)
    assert len(os.listdir("/proc/self/fd")) == before


async def test_many_at_once() -> None:
    statuses: list[int] = []

    async def one(status: int) -> None:
        statuses.append((await run(["/bin/sh", "-c", f"exit {status}"], deadline_s=10)).status)

    async with anyio.create_task_group() as tasks:
        for status in range(16):
            tasks.start_soon(one, status)
    assert sorted(statuses) == list(range(16))


PTRACE_SEIZE, PTRACE_O_TRACEEXIT = 0x4206, 0x40


@pytest.mark.thorough
@pytest.mark.skipif(sys.platform != "linux", reason="ptrace requests are Linux's")
async def test_a_child_that_sigkill_cannot_end_is_left_to_its_thread(tmp_path: Path) -> None:
    """A tracer that holds the child at its exit takes the place of a driver call that never returns."""
    fifo = tmp_path / "begun"
    os.mkfifo(fifo)
    seized, release = threading.Event(), threading.Event()
    pids: list[int] = []

    def trace() -> None:
        pids.append(int(fifo.read_text()))
        libc = ctypes.CDLL(None, use_errno=True)
        libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
        assert libc.ptrace(PTRACE_SEIZE, pids[0], None, PTRACE_O_TRACEEXIT) == 0, os.strerror(ctypes.get_errno())
        seized.set()
        release.wait()  # a tracer that ends releases its tracees

    tracer = threading.Thread(target=trace, daemon=True)
    tracer.start()
    with pytest.raises(ExternalError, match="and did not end after SIGKILL") as raised:
        await run(["/bin/sh", "-c", f"echo $$ > {fifo}; exec sleep 600"], deadline_s=0.5)
    assert seized.is_set()
    assert raised.value.status is None
    left = [thread for thread in threading.enumerate() if thread.name == "program /bin/sh"]
    assert len(left) == 1, "its thread waits on"
    release.set()
    tracer.join(HANG_S)
    left[0].join(HANG_S)
    assert state_of(pids[0]) is None, "and has reaped it in the end"


# -- a companion -------------------------------------------------------------------------------------------------------


async def test_a_companion_holds_its_descriptor_and_its_exit_is_detected() -> None:
    ours, theirs = socket.socketpair()
    number = theirs.detach()
    text = f"import os; os.write(2, b'begun'); os.write({number}, b'hello'); os._exit(3)"
    companion = Companion([sys.executable, "-c", text], env={}, fds=[number])
    with ours:
        assert await companion.live() == 3
        assert ours.recv(64) == b"hello"
        assert ours.recv(64) == b"", "our copy of its end is still open"
    assert companion.output_tail == "begun"


async def test_an_unwanted_spare_process_is_killed_silently() -> None:
    """A process that is stuck in a driver must not have half a second more to cause damage."""
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    number = theirs.detach()
    text = f"""import os, signal
signal.signal(signal.SIGTERM, lambda *_: os.write({number}, b"tidy"))
os.write({number}, b"%d" % os.getpid())
while True:
    signal.pause()
"""
    with ours:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(Companion([sys.executable, "-c", text], env={}, fds=[number]).live)
            await anyio.wait_readable(ours)
            pid = int(ours.recv(64))
            tasks.cancel_scope.cancel()
        assert state_of(pid) is None, "it is reaped"
        await anyio.wait_readable(ours)
        assert ours.recv(64) == b""


async def test_a_companion_that_cannot_start_leaves_no_descriptor() -> None:
    ours, theirs = socket.socketpair()
    with ours:
        with pytest.raises(ExternalError):
            await Companion(["/nowhere/at/all"], env={}, fds=[theirs.detach()]).live()
        assert ours.recv(1) == b""


# -- programs ----------------------------------------------------------------------------------------------------------


def test_the_shims_only_need_a_shell() -> None:
    assert shutil.which("sh", path=programs.SYSTEM_PATH)
    for shim in SHIMS.iterdir():
        assert shim.read_text().startswith("#!/bin/sh\n"), shim
