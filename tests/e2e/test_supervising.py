"""`hegmctl run --allow-restart` as the parent of a command: statuses, signals, terminals, orphans, and its own end.

No daemon is there: what a restart is has tests of its own. Each command here says what it has got, and ends by that.
"""

from __future__ import annotations

import contextlib
import os
import pty
import select
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from tests.patience import HANG_S
from tests.unit.hegmctl.running import command, environment

pytestmark = pytest.mark.e2e

PATIENCE_S = HANG_S
# Says each signal that comes, and ends with TERM; its two lines come before it waits.
HEARS = """
import os, signal, sys
def heard(number, _frame):
    os.write(1, b"heard %d\\n" % number)  # print is not to be interrupted by another one
    if number == signal.SIGTERM:
        sys.exit(41)
for name in ("USR1", "USR2", "HUP", "INT", "TERM", "CONT", "WINCH"):
    signal.signal(getattr(signal, "SIG" + name), heard)
signal.signal(signal.SIGRTMIN + 3, heard)
print("ready", os.getpid(), os.getpgid(0), flush=True)
while True:
    signal.pause()
"""


def _words(*words: str) -> list[str]:
    return command("--quiet", "run", "--no-daemon-start", "--allow-restart", "--", *words)


def _run(tmp_path: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environ = environment(tmp_path / "nobody.sock")
    return subprocess.run(_words(*words), env=environ, capture_output=True, text=True, timeout=PATIENCE_S, check=False)


@contextmanager
def _supervised(tmp_path: Path, *words: str) -> Iterator[subprocess.Popen[str]]:
    """A supervisor with its command's output, in a group of its own; both are gone with the context."""
    process = subprocess.Popen(
        _words(*words),
        env=environment(tmp_path / "nobody.sock"),
        stdout=subprocess.PIPE,
        text=True,
        # In the same session: the kernel stops no process of an orphaned process group.
        preexec_fn=os.setpgrp,  # noqa: PLW1509 - nothing but the system call
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def _line(process: subprocess.Popen[str]) -> list[str]:
    assert process.stdout is not None
    return process.stdout.readline().split()


@pytest.mark.parametrize("status", [0, 7, 98, 99])
def test_an_exit_status_is_the_commands_own(tmp_path: Path, status: int) -> None:
    """99 too: no restart is expected."""
    assert _run(tmp_path, "sh", "-c", f"exit {status}").returncode == status


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL, signal.SIGSEGV])
def test_a_command_that_a_signal_ended_is_followed_by_that_signal(tmp_path: Path, number: signal.Signals) -> None:
    assert _run(tmp_path, "sh", "-c", f"kill -{int(number)} $$").returncode == -number


def test_a_command_that_cannot_run_has_the_status_of_a_shell(tmp_path: Path) -> None:
    (tmp_path / "plain").write_text("echo hello")
    assert _run(tmp_path, "no-such-command").returncode == 127
    assert _run(tmp_path, str(tmp_path / "plain")).returncode == 126
    (tmp_path / "plain").chmod(0o755)
    assert _run(tmp_path, str(tmp_path / "plain")).stdout == "hello\n"


def test_signals_that_are_sent_to_it_reach_the_command(tmp_path: Path) -> None:
    with _supervised(tmp_path, sys.executable, "-c", HEARS) as process:
        assert _line(process)[0] == "ready"
        for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP, signal.SIGINT, signal.SIGRTMIN + 3):
            process.send_signal(number)
            assert _line(process) == ["heard", str(int(number))]
        process.terminate()
        assert _line(process) == ["heard", str(int(signal.SIGTERM))]
        assert process.wait(PATIENCE_S) == 41


def test_a_signal_that_was_ignored_stays_so_for_the_command(tmp_path: Path) -> None:
    """As under nohup: blocked in the supervisor, it is passed on, and the command ignores it as it was to."""
    environ = environment(tmp_path / "nobody.sock")
    words = " ".join(f"'{word}'" for word in _words("sh", "-c", "kill -HUP $PPID; kill -HUP $$; sleep 0.2; exit 5"))
    done = subprocess.run(["sh", "-c", f"trap '' HUP; {words}"], env=environ, timeout=PATIENCE_S, check=False)
    assert done.returncode == 5


def test_ctrl_c_at_a_terminal_reaches_the_command_once(tmp_path: Path) -> None:
    """The terminal sends it to the whole group; passed on as well, a script's handler would run twice."""
    leader, follower = pty.openpty()
    environ = environment(tmp_path / "nobody.sock")
    process = subprocess.Popen(
        _words(sys.executable, "-c", HEARS), env=environ, stdin=follower, stdout=follower, stderr=follower,
        start_new_session=True,
        preexec_fn=lambda: _make_controlling(follower),  # noqa: PLW1509 - nothing but the system call
    )  # fmt: skip
    os.close(follower)
    try:
        _read_until(leader, b"ready")
        os.write(leader, b"\x03")
        _read_until(leader, b"heard 2")
        process.send_signal(signal.SIGUSR1)  # what was sent twice would be heard before this
        output = _read_until(leader, b"heard 10")
        assert b"heard 2" not in output
        process.terminate()
        _read_until(leader, b"heard 15")
        assert process.wait(PATIENCE_S) == 41
    finally:
        os.close(leader)
        if process.poll() is None:
            process.kill()
            process.wait()


def _make_controlling(fd: int) -> None:
    import fcntl

    fcntl.ioctl(fd, termios.TIOCSCTTY, 0)


def _read_until(fd: int, wanted: bytes) -> bytes:
    received = b""
    deadline = time.monotonic() + PATIENCE_S
    while wanted not in received:
        left_s = deadline - time.monotonic()
        if not select.select([fd], [], [], max(0.0, left_s))[0]:
            pytest.fail(f"{wanted!r} did not come; what came: {received!r}")
        received += os.read(fd, 4096)
    return received.partition(wanted)[2]


def test_stopped_and_continued_it_stops_and_continues_the_command(tmp_path: Path) -> None:
    """As a shell does it with a job: what was sent to the parent alone reaches both, and its own parent sees it."""
    with _supervised(tmp_path, sys.executable, "-c", HEARS) as process:
        child = psutil.Process(int(_line(process)[1]))
        process.send_signal(signal.SIGTSTP)
        _pid, status = os.waitpid(process.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status)
        deadline = time.monotonic() + PATIENCE_S
        while child.status() != psutil.STATUS_STOPPED:  # it has the signal pending, and stops when it runs next
            assert time.monotonic() < deadline
        process.send_signal(signal.SIGCONT)
        assert _line(process) == ["heard", str(int(signal.SIGCONT))]
        process.terminate()
        assert process.wait(PATIENCE_S) == 41


def test_killed_it_leaves_the_command_running(tmp_path: Path) -> None:
    with _supervised(tmp_path, sys.executable, "-c", HEARS) as process:
        child = psutil.Process(int(_line(process)[1]))
        process.kill()
        process.wait()
        child.send_signal(signal.SIGUSR1)
        assert _line(process) == ["heard", str(int(signal.SIGUSR1))]
        child.terminate()
        assert _line(process) == ["heard", str(int(signal.SIGTERM))]
        child.wait(PATIENCE_S)


def test_orphans_of_a_container_do_not_stay_as_zombies(tmp_path: Path) -> None:
    """The first process of a pid namespace is the parent of all orphans."""
    if os.geteuid() != 0:
        pytest.skip("a pid namespace takes root")
    unshare = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]
    orphan = """p=$( (sh -c 'echo $$' &) ); while [ -e "/proc/$p" ]; do :; done; exit 6"""  # a zombie is there for ever
    done = subprocess.run(
        [*unshare, *_words("sh", "-c", orphan)], env=environment(tmp_path / "nobody.sock"),
        capture_output=True, text=True, timeout=PATIENCE_S, check=False,
    )  # fmt: skip
    if "unshare" in done.stderr:
        pytest.skip(done.stderr.strip())
    assert (done.stdout, done.returncode) == ("", 6)


def test_the_supervisor_uses_little_memory(tmp_path: Path) -> None:
    """It stays for as long as the job: an interpreter, the protocol, and nothing else. Measured: 13 MB."""
    with _supervised(tmp_path, sys.executable, "-c", HEARS) as process:
        _line(process)
        assert psutil.Process(process.pid).memory_info().rss < 24 << 20
        assert psutil.Process(process.pid).num_threads() == 1
        process.terminate()
        assert process.wait(PATIENCE_S) == 41
