"""Processes dumped and restored by real CRIU, as the daemon has it done."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import anyio
import pytest

from hegmd.errors import HegmError
from hegmd.images.criu import parent as criu_parent
from hegmd.images.criu import run
from hegmd.images.criu.dumped import dumped_processes
from hegmd.images.criu.needs import Needs
from hegmd.node.processes.process_set import continue_all, end_all, population_of
from hegmd.node.processes.process_tree import read_tree
from tests.e2e.real_criu import criu_or_skip, directory, ended_after, ends, job, pipe, python, tell

pytestmark = [pytest.mark.e2e]

ATTENDANT = Path(str(criu_parent.__file__))

# Counts its cues into a file and onto its standard output.
COUNTER = """
import signal, sys
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
log = open(sys.argv[1], "a")
print("ready", flush=True)
for number in range(100):
    signal.sigwait([signal.SIGUSR1])
    print(number, file=log, flush=True)
    print(number, flush=True)
"""


async def test_a_job_is_dumped_ended_and_restored_with_its_output_led_elsewhere(tmp_path: Path) -> None:
    criu = criu_or_skip()
    with job([*python(COUNTER), str(tmp_path / "log")]) as counter, directory(tmp_path / "image") as images:
        assert counter.line() == "ready"
        tell(counter.pid)
        assert counter.line() == "0"
        needs = counter.needs()
        assert needs.reasons == ()
        assert [outlet.key.split(":")[0] for outlet in needs.outlets] == ["pipe"]
        await run.dump(criu, counter.pid, images, needs, leave_stopped=True, in_unit=False)
        while (stopped := population_of(needs.pids)).stopped != {counter.pid}:
            os.sched_yield()  # CRIU has sent the signal and is gone; it takes effect when the job is on a processor
        end_all(stopped)
        assert counter.gone() == -9

        again = Needs.from_plain(needs.plain())
        with pipe() as (reader, output), ended_after(needs.pids):
            outlets = {again.outlets[0].key: output}
            revived = await run.restore(criu, images, again, log_dir_fd=images, unit_name=None, outlets=outlets)
            assert revived.pid == counter.pid
            for number in range(1, 100):
                tell(revived.pid)
                assert reader.readline() == f"{number}\n"
    assert (tmp_path / "log").read_text().split() == [str(number) for number in range(100)]


HIDDEN = "import ctypes; ctypes.CDLL(None).prctl(4, 0)\n"


@pytest.mark.parametrize("hides", [False, True])
async def test_the_core_image_states_whether_the_user_may_read_the_memory_of_the_process(
    tmp_path: Path, hides: bool
) -> None:
    """Nothing else says it for sure: until CRIU holds it still, a process may become another program."""
    criu = criu_or_skip()
    argv = [*python(HIDDEN * hides + COUNTER), str(tmp_path / "log")]
    with job(argv) as counter, directory(tmp_path / "image") as images:
        assert counter.line() == "ready"
        await run.dump(criu, counter.pid, images, counter.needs(), leave_stopped=False, in_unit=False)
        assert dumped_processes(images) == {counter.pid: not hides}


async def test_a_job_left_running_continues_and_one_left_stopped_continues_once_resumed(tmp_path: Path) -> None:
    criu = criu_or_skip()
    with job([*python(COUNTER), str(tmp_path / "log")]) as counter:
        assert counter.line() == "ready"
        for leave_stopped in (False, True):
            with directory(tmp_path / f"image-{leave_stopped}") as images:
                needs = counter.needs()
                before = population_of(needs.pids)
                await run.dump(criu, counter.pid, images, needs, leave_stopped=leave_stopped, in_unit=False)
                continue_all(before)
            tell(counter.pid)
            assert counter.line() == str(int(leave_stopped))


async def test_the_restoring_process_reaps_it(tmp_path: Path) -> None:
    """Without a service manager no other process might: a container's first process often reaps nothing."""
    criu = criu_or_skip()
    with job([*python(COUNTER), str(tmp_path / "log")]) as counter, directory(tmp_path / "image") as images:
        assert counter.line() == "ready"
        needs = counter.needs()
        await run.dump(criu, counter.pid, images, needs, leave_stopped=True, in_unit=False)
        end_all(population_of(needs.pids))
        counter.gone()
        with ended_after(needs.pids):
            await run.restore(criu, images, needs, log_dir_fd=images, unit_name=None)
            parent = read_tree(counter.pid).members[0].parent
            assert "criu/parent.py" in " ".join(read_tree(parent).members[0].command)
            end_all(population_of([counter.pid]))  # waits for the end of its life, not for it to be reaped
            assert ends(parent)
    assert population_of([counter.pid, parent]).start_ticks == {}


async def test_a_restore_under_numbers_that_are_taken_leaves_those_alone(tmp_path: Path) -> None:
    criu = criu_or_skip()
    with job([*python(COUNTER), str(tmp_path / "log")]) as counter, directory(tmp_path / "image") as images:
        assert counter.line() == "ready"
        needs = counter.needs()
        await run.dump(criu, counter.pid, images, needs, leave_stopped=False, in_unit=False)
        with pytest.raises(HegmError, match=f"number {counter.pid}, which is the process of") as failed:
            await run.restore(criu, images, needs, log_dir_fd=images, unit_name=None)
        assert "unshare --pid" in failed.value.hint
        tell(counter.pid)
        assert counter.line() == "0"


# Has one of each object that needs an option or is easily lost, and checks on command that all of it works.
RICH = """
import fcntl, mmap, os, select, signal, socket, sys, threading
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
folder = sys.argv[1]
gone = open(folder + "/gone", "w+"); gone.write("x" * 3_000_000); gone.flush(); os.unlink(gone.name)
other = open(folder + "/first", "w+"); other.write("kept"); other.flush()
os.link(other.name, folder + "/second"); os.unlink(other.name)
locked = open(folder + "/locked", "w"); fcntl.flock(locked, fcntl.LOCK_EX)
listening = socket.create_server(("127.0.0.1", 0))
client = socket.create_connection(listening.getsockname()); server, _ = listening.accept()
client.sendall(b"in flight")
left, right = socket.socketpair(); left.sendall(b"waiting")
reader, writer = os.pipe(); os.write(writer, b"in the pipe")
memory = mmap.mmap(-1, 1 << 20); memory[:6] = b"shared"
polled = select.epoll(); polled.register(reader, select.EPOLLIN)
asked, answered = threading.Event(), threading.Event()
threading.Thread(target=lambda: (asked.wait(), answered.set()), daemon=True).start()
child = os.fork()
if child == 0:
    signal.sigwait([signal.SIGUSR1])
    memory[:6] = b"worked"
    os._exit(3)
print("ready", os.isatty(1), flush=True)
signal.sigwait([signal.SIGUSR1])
os.kill(child, signal.SIGUSR1)
asked.set()
gone.seek(0); other.seek(0)
found = [
    os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3, memory[:6] == b"worked", answered.wait(120),
    len(gone.read()) == 3_000_000, other.read() == "kept", server.recv(9) == b"in flight", right.recv(7) == b"waiting",
    [fd for fd, _ in polled.poll(0)] == [reader], os.read(reader, 11) == b"in the pipe",
]
with open(folder + "/locked") as again:
    try:
        fcntl.flock(again, fcntl.LOCK_EX | fcntl.LOCK_NB)
        found.append(False)
    except BlockingIOError:
        found.append(True)
print(all(found), found, os.isatty(1), flush=True)
"""


@pytest.mark.parametrize("terminal", [False, True], ids=["pipe", "terminal"])
async def test_whatever_a_job_has_open_works_after_its_restore(terminal: bool, tmp_path: Path) -> None:
    criu = criu_or_skip()
    ours, theirs = os.openpty()
    given = {"stdout": theirs, "stdin": theirs, "stderr": theirs} if terminal else {}
    with os.fdopen(ours) as seen, job([*python(RICH), str(tmp_path)], **given) as rich:
        os.close(theirs)
        with directory(tmp_path / "image") as images:
            text = seen.readline().strip() if terminal else rich.line()
            assert text == f"ready {terminal}"
            needs = rich.needs()
            assert needs.reasons == ()
            assert {"--file-locks", "--ghost-limit", "--link-remap", "--tcp-established"} <= set(needs.dump_options)
            await run.dump(criu, rich.pid, images, needs, leave_stopped=True, in_unit=False)
            end_all(population_of(needs.pids))
            rich.gone()
            with ended_after(needs.pids), pipe() as (more, output):
                outlets = {outlet.key: output for outlet in needs.outlets}
                await run.restore(criu, images, needs, log_dir_fd=images, unit_name=None, outlets=outlets)
                tell(rich.pid)
                assert more.readline().split()[0] == "True"
                assert ends(rich.pid)


async def test_an_attendant_ends_as_its_job_does_and_takes_half_made_ones_with_it(tmp_path: Path) -> None:
    """A stub of CRIU leaves a child behind and succeeds, or fails, or is killed."""
    ready, tells = os.pipe()
    child = tmp_path / "child"
    statuses = []
    for ending in ("exit 0", "exit 5", "kill -9 $$"):
        text = f"(trap 'exit 9' USR1; echo $BASHPID > {child}; while :; do sleep 0.05; done) & "
        text += f"until [ -s {child} ]; do :; done; {ending}"
        argv = [sys.executable, "-SE", str(ATTENDANT), "tend", str(tells), "0", "--", "/bin/bash", "-c", text]
        process = await anyio.open_process(argv, stdin=None, stdout=None, stderr=None, pass_fds=(tells,))
        if ending == "exit 0":
            assert os.read(ready, 64) == b"restored"
            tell(int(child.read_text()))
        statuses.append(await process.wait())
        assert population_of([int(child.read_text())]).start_ticks == {}
        child.unlink()
    os.close(ready)
    os.close(tells)
    assert statuses == [0, 5, 137]


# Starts another process on command, which no image has.
FORKING = "(trap 'sleep 600 & echo $! > {made}; wait' USR1; echo $BASHPID > {child}; while :; do sleep 0.05; done) & "
FORKING += "until [ -s {child} ]; do :; done; exit 0"


@pytest.mark.parametrize("is_heard", [True, False], ids=["told to", "nobody hears of it"])
async def test_a_child_started_after_a_restore_survived_its_rollback(is_heard: bool, tmp_path: Path) -> None:
    """The rollback ended processes by the numbers in the image only; and a daemon killed just then left all of it
    behind.
    """
    ready, tells = os.pipe()
    child, made = tmp_path / "child", tmp_path / "made"
    text = FORKING.format(child=child, made=made)
    argv = [sys.executable, "-SE", str(ATTENDANT), "tend", str(tells), "0", "--", "/bin/bash", "-c", text]
    if not is_heard:
        os.close(ready)
    process = await anyio.open_process(argv, stdin=None, stdout=None, stderr=None, pass_fds=(tells,))
    os.close(tells)
    numbers = [child]
    if is_heard:
        assert os.read(ready, 64) == b"restored"
        os.close(ready)
        tell(int(child.read_text()))
        while not _is_written(made):
            await anyio.lowlevel.checkpoint()
        numbers.append(made)
        process.send_signal(signal.SIGUSR1)
    await process.wait()
    assert population_of(int(number.read_text()) for number in numbers).start_ticks == {}


def _is_written(file: Path) -> bool:
    return file.exists() and file.read_text().endswith("\n")
