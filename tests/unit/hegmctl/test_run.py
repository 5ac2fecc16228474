"""`hegmctl run`: a command cannot tell that it was started by it, but for a few variables that are for the agent.

Longer than 400 lines because all that a command can notice of `hegmctl run` is here.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hegmd.errors import NO_DAEMON
from hegmd.protocol import messages as m
from hegmd.protocol.connection import IncomingRequest
from tests.patience import HANG_S
from tests.unit.hegmctl import node
from tests.unit.hegmctl.fake_daemon import Caller, FakeDaemon, saying
from tests.unit.hegmctl.running import NCCL, ROOT, command, environment, hegmctl

# Reports everything that a process can see of its start. `-I -S`: it reads no variable of ours, so it has no agent.
PROBE = """
import json, os, resource, sys
def status(key):
    return next(line.split(":")[1].strip() for line in open("/proc/self/status") if line.startswith(key))
def place(fd):
    try:
        return os.lseek(fd, 0, os.SEEK_CUR)
    except OSError:
        return None
terminal = os.isatty(0)
def is_open(fd):
    try:
        return bool(os.fstat(fd))
    except OSError:
        return False
fds = [fd for fd in range(256) if is_open(fd)]
print(json.dumps({
    "arguments": sys.argv[1:],
    "cwd": os.getcwd(),
    "signals": [status(key) for key in ("SigBlk", "SigIgn", "SigCgt")],
    "fds": [[fd, os.get_blocking(fd), place(fd)] for fd in fds],
    "terminals": [os.isatty(fd) for fd in (0, 1, 2)],
    "foreground": terminal and os.tcgetpgrp(0) == os.getpgrp(),
    "leads": [os.getpgrp() == os.getpid(), os.getsid(0) == os.getpid()],
    "parent": os.getppid(),
    "umask": os.umask(0),
    "nice": os.nice(0),
    "limits": [resource.getrlimit(kind) for kind in range(16)],
    "environment": dict(os.environ),
}))
"""
WORDS = [sys.executable, "-I", "-S", "-c", PROBE, "an argument", "", "--json", "--", "$HOME"]
ADDED = {f"HEGM_{name}" for name in ("JOB", "RUN", "SOCKET", "MSGPACK")} | {"USE_LIBUV", "PYTHONPATH", *NCCL}
# Takes every signal that it can, and says which came.
LISTENER = """
import os, signal
def say(number, _frame):
    os.write(1, signal.Signals(number).name.encode() + b"\\n")
for name in ("INT", "TERM", "HUP", "QUIT", "WINCH", "USR1", "CONT"):
    signal.signal(getattr(signal, "SIG" + name), say)
os.write(1, b"ready\\n")
while True:
    signal.pause()
"""


def _seen(words: list[str], environ: dict[str, str], **how: Any) -> dict[str, Any]:
    ran = subprocess.run(words, env=environ, cwd=ROOT, timeout=HANG_S, check=True, stdout=subprocess.PIPE, **how)
    result: dict[str, Any] = json.loads(ran.stdout)
    return result


def _seen_both_ways(daemon: FakeDaemon, before: tuple[str, ...] = (), **how: Any) -> dict[str, Any]:
    """Return the probe's report with and without hegmctl. Both must be equal, except for the added variables."""
    environ = environment(daemon.path)
    alone = _seen([*before, *WORDS], environ, **how)
    under = _seen([*before, *command("run", "--", *WORDS)], environ, **how)
    added = {name: value for name, value in under["environment"].items() if alone["environment"].get(name) != value}
    assert set(added) <= ADDED
    assert added["PYTHONPATH"].endswith(environ["PYTHONPATH"]), "what was there comes after it"
    for seen in (alone, under):
        del seen["environment"]
    assert under == alone
    return under


@pytest.mark.thorough
def test_the_image_interval_reaches_the_agent_and_no_nested_job(daemon: FakeDaemon, tmp_path: Path) -> None:
    environ = environment(daemon.path)
    words = [sys.executable, "-I", "-S", "-c", "import os; print(os.environ.get('HEGM_IMAGES'))"]
    folder = tmp_path / "made" / "images"
    every = ["--checkpoint-every", "10min", "--dir", str(folder)]
    within = command("run", "--", *words)
    for options, arguments, interval in (
        (every, words, f"600:3:{folder}"),
        ([*every, "--keep", "1"], words, f"600:1:{folder}"),
        (every, within, "None"),
    ):
        ran = subprocess.run(
            command("run", *options, "--", *arguments),
            env=environ,
            cwd=ROOT,
            timeout=HANG_S,
            check=True,
            stdout=subprocess.PIPE,
        )
        assert ran.stdout.decode().strip() == interval
    assert folder.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ("--checkpoint-every 10min", "needs a directory"),
        ("--checkpoint-every 0.5 --dir .", "too often"),
        ("--keep 3", "are for --checkpoint-every"),
        ("--checkpoint-every 5 --dir /dev/null/images", "cannot be made: Not a directory"),
    ],
)
def test_images_that_cannot_be_had_are_refused_before_anything_runs(
    daemon: FakeDaemon, options: str, says: str
) -> None:
    ran = hegmctl("run", *options.split(), "--", "true", socket=daemon.path)
    assert ran.returncode != 0
    assert says in ran.stderr


@pytest.mark.thorough
def test_missed_images_are_reported_by_the_command(socket_path: Path) -> None:
    """The process that stays with the job prints the daemon's messages while the job runs."""

    def supervise(caller: Caller, request: IncomingRequest) -> None:
        for number, do in enumerate(("note", "of a later release", "note"), 1):
            order = m.SupervisorOrder(order=number, do=do, operation="", message=f"no image {number}", hint="free some")
            caller.event(request.id, order)

    words = ["run", "--allow-restart", "--", "sh", "-c", "read line; exit 3"]
    with FakeDaemon(socket_path, {**node.answers(), m.Supervise: supervise}):
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        with subprocess.Popen(command(*words), env=environment(socket_path), **pipes) as run:
            assert run.stderr is not None
            lines = [run.stderr.readline() for _ in range(2)]
            run.communicate("go on\n", timeout=HANG_S)
    assert [line.rpartition(": ")[2].rstrip() for line in lines] == ["no image 1; free some", "no image 3; free some"]
    assert run.returncode == 3


@pytest.mark.thorough
def test_a_command_in_a_pipe_sees_no_difference(daemon: FakeDaemon, tmp_path: Path) -> None:
    source = tmp_path / "input"
    source.write_bytes(b"not to be read by us")
    with source.open("rb") as stdin, (tmp_path / "errors").open("wb") as stderr:
        result = _seen_both_ways(daemon, stdin=stdin, stderr=stderr)
    assert result["arguments"] == ["an argument", "", "--json", "--", "$HOME"]
    assert result["fds"][0] == [0, True, 0], "nothing of its input was read"
    assert [fd for fd, _blocking, _place in result["fds"]] == [0, 1, 2]


@pytest.mark.thorough
def test_a_command_on_its_own_terminal_sees_no_difference(daemon: FakeDaemon) -> None:
    master, slave = os.openpty()
    try:
        result = _seen_both_ways(daemon, ("setsid", "-c"), stdin=slave, stderr=slave)
    finally:
        os.close(master)
        os.close(slave)
    assert (result["terminals"], result["foreground"], result["leads"]) == ([True, False, True], True, [True, True])


@pytest.mark.thorough
def test_a_command_keeps_the_signals_that_are_ignored(daemon: FakeDaemon) -> None:
    """As under nohup, or in the background of a script."""
    ignoring = ("sh", "-c", 'trap "" HUP INT; exec "$@"', "sh")
    result = _seen_both_ways(daemon, ignoring, stdin=subprocess.DEVNULL)
    assert int(result["signals"][1], 16) & 0b11 == 0b11


def _listening(daemon: FakeDaemon) -> subprocess.Popen[bytes]:
    words = command("run", "--", sys.executable, "-I", "-S", "-c", LISTENER)
    # A session leader cannot be stopped, so the test gives it a process group in our session.
    group: dict[str, Any] = {"process_group": 0} if sys.version_info >= (3, 11) else {}
    return subprocess.Popen(words, env=environment(daemon.path), cwd=ROOT, stdout=subprocess.PIPE, **group)


def test_every_signal_reaches_the_command(daemon: FakeDaemon) -> None:
    with _listening(daemon) as listener:
        assert listener.stdout is not None
        assert listener.stdout.readline() == b"ready\n"
        for name in ("SIGWINCH", "SIGHUP", "SIGINT", "SIGTERM", "SIGQUIT", "SIGUSR1"):
            listener.send_signal(signal.Signals[name])
            assert listener.stdout.readline() == f"{name}\n".encode()
        listener.send_signal(signal.SIGTSTP)
        assert os.WIFSTOPPED(os.waitpid(listener.pid, os.WUNTRACED)[1])
        listener.send_signal(signal.SIGCONT)
        assert listener.stdout.readline() == b"SIGCONT\n"
        listener.kill()
        assert listener.wait(HANG_S) == -signal.SIGKILL


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE])
def test_a_command_dies_of_a_signal_as_it_would(daemon: FakeDaemon, number: signal.Signals) -> None:
    before = signal.signal(number, signal.SIG_DFL)  # nohup has one ignored
    ran = hegmctl("run", "--", "sh", "-c", f"kill -{int(number)} $$; sleep 9", socket=daemon.path)
    assert (ran.returncode, signal.signal(number, before)) == (-number, signal.SIG_DFL)


def test_ctrl_c_at_a_terminal_ends_only_the_command(daemon: FakeDaemon) -> None:
    master, slave = os.openpty()
    words = ["setsid", "-c", *command("run", "--", "sh", "-c", "echo ready; exec cat")]
    with subprocess.Popen(
        words, env=environment(daemon.path), cwd=ROOT, stdin=slave, stdout=subprocess.PIPE, stderr=slave
    ) as job:
        os.close(slave)
        assert job.stdout is not None
        assert job.stdout.readline() == b"ready\n"
        os.write(master, b"\x03")
        assert job.wait(HANG_S) == -signal.SIGINT
    os.close(master)


@pytest.mark.parametrize("status", [0, 1, 7, 126, 255])
def test_the_exit_status_is_the_commands(daemon: FakeDaemon, status: int) -> None:
    ran = hegmctl("run", "--", "sh", "-c", f"exit {status}", socket=daemon.path)
    assert (ran.returncode, ran.stdout, ran.stderr) == (status, "", "")


def _file(path: Path, text: str, mode: int) -> str:
    path.write_text(text)
    path.chmod(mode)
    return str(path)


def test_a_script_without_a_first_line_is_run_as_a_shell_would(daemon: FakeDaemon, tmp_path: Path) -> None:
    script = _file(tmp_path / "bare", 'echo "$0 $1"; exit 3\n', 0o755)
    ran = hegmctl("run", "--", script, "one two", socket=daemon.path)
    assert (ran.returncode, ran.stdout) == (3, f"{script} one two\n")
    path = f"{tmp_path}:{os.environ['PATH']}"
    assert hegmctl("run", "--", "bare", "x", socket=daemon.path, environ={"PATH": path}).returncode == 3


@pytest.mark.thorough
def test_a_missing_or_unexecutable_command_exits_as_in_a_shell(daemon: FakeDaemon, tmp_path: Path) -> None:
    plain = _file(tmp_path / "plain", "echo no\n", 0o644)
    lost = _file(tmp_path / "lost", "#!/no/such/interpreter\n", 0o755)
    for words, status, says in (
        (("no-such-program-here",), 127, "no-such-program-here cannot be run: No such file"),
        (("/no/such/program",), 127, "/no/such/program cannot be run"),
        ((lost,), 127, "install the interpreter that its first line names"),
        ((plain,), 126, "make it an executable file: chmod +x"),
        ((str(tmp_path),), 126, "name a program in this directory"),
        ((f"{plain}/below",), 127, "cannot be run"),
    ):
        ran = hegmctl("run", "--", *words, socket=daemon.path)
        assert (ran.returncode, ran.stdout) == (status, ""), ran.stderr
        assert says in ran.stderr
    path = f"{tmp_path}:{os.environ['PATH']}"
    assert hegmctl("run", "--", "plain", socket=daemon.path, environ={"PATH": path}).returncode == 126


def test_nothing_is_started_for_a_missing_command(socket_path: Path) -> None:
    """hegmctl started a daemon, which exited because no job connected."""
    ran = hegmctl("run", "--simulate", "1x1GiB", "--", "no-such-program-here", socket=socket_path)
    assert (ran.returncode, "started hegmd" in ran.stderr) == (127, False)
    assert list(socket_path.parent.iterdir()) == []


def test_no_daemon_is_started_in_place_of_a_killed_one(socket_path: Path) -> None:
    """Its jobs got new ids from the new daemon, which knew none of their operations."""
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(socket_path))
    ran = hegmctl("run", "--", "true", socket=socket_path)
    assert ran.returncode == NO_DAEMON.exit_status
    assert "has ended, and `hegmctl run` had not started it" in ran.stderr
    assert f"run: rm {socket_path}" in ran.stderr
    assert list(socket_path.parent.iterdir()) == [socket_path]
    assert hegmctl("run", "--no-daemon-start", "--", "true", socket=socket_path).returncode == 0


def test_without_a_daemon_and_with_no_daemon_the_command_runs(socket_path: Path) -> None:
    ran = hegmctl("run", "--no-daemon-start", "--", "sh", "-c", "echo $HEGM_SOCKET; exit 4", socket=socket_path)
    assert (ran.returncode, ran.stdout) == (4, f"{socket_path}\n")
    assert "the job runs, and its agent connects once a daemon runs" in ran.stderr
    assert list(socket_path.parent.iterdir()) == []
    quiet = hegmctl("-q", "run", "--no-daemon-start", "--", "true", socket=socket_path)
    assert (quiet.returncode, quiet.stderr) == (0, "")


def test_a_missing_gpu_is_reported_before_the_command_starts(daemon: FakeDaemon) -> None:
    ran = hegmctl("run", "--gpu", "gpu7", "--", "echo", "begun", socket=daemon.path)
    assert (ran.returncode, ran.stdout) == (5, "")
    assert "no GPU 'gpu7'; this node has gpu0, gpu1" in ran.stderr


SHOWN = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
SHOW = " ".join(f"{name}=${{{name}-none}}" for name in SHOWN)
# A child of the command: what it starts has the same GPUs.
SHOW_IN_A_CHILD = ("--", "sh", "-c", f"sh -c 'echo {SHOW}'")
SECOND = node.GPU1.replace(state="ok")
HEALTHY = node.GPUS.replace(gpus=(node.GPU0, SECOND))
AMDS = node.GPUS.replace(gpus=(node.GPU0.replace(vendor="amd"), SECOND.replace(vendor="amd")))
BOTH = node.GPUS.replace(gpus=(node.GPU0, SECOND.replace(vendor="amd")))


@pytest.mark.parametrize(
    ("gpus", "requested", "cuda", "hip"),
    [
        (HEALTHY, "gpu1", "GPU-0001", "none"),
        (HEALTHY, "gpu1,gpu0", "GPU-0001,GPU-0000", "none"),
        (HEALTHY, "GPU-0001", "GPU-0001", "none"),
        (HEALTHY, "cuda:1,0", "GPU-0001,GPU-0000", "none"),
        (HEALTHY, "cpu", "", "-1"),
        (AMDS, "gpu1", "none", "GPU-0001"),
    ],
)
def test_the_requested_gpu_was_ignored_on_real_gpus(
    daemon: FakeDaemon, gpus: m.GpusReply, requested: str, cuda: str, hip: str
) -> None:
    """Issue 14, row 8: the job ran on gpu0, whatever --gpu was."""
    daemon.answers[m.Gpus] = saying(gpus)
    before = {"CUDA_VISIBLE_DEVICES": "0", "ROCR_VISIBLE_DEVICES": "3"}
    ran = hegmctl("run", "--gpu", requested, *SHOW_IN_A_CHILD, socket=daemon.path, environ=before)
    shown = f"CUDA_VISIBLE_DEVICES={cuda} HIP_VISIBLE_DEVICES={hip} ROCR_VISIBLE_DEVICES=none\n"
    assert (ran.returncode, ran.stdout) == (0, shown), ran.stderr
    assert "--gpu overrides CUDA_VISIBLE_DEVICES=0 of the environment" in ran.stderr


def test_without_a_gpu_the_callers_own_choice_stays(daemon: FakeDaemon) -> None:
    before = {"CUDA_VISIBLE_DEVICES": "0", "ROCR_VISIBLE_DEVICES": "3"}
    ran = hegmctl("run", *SHOW_IN_A_CHILD, socket=daemon.path, environ=before)
    assert ran.stdout == "CUDA_VISIBLE_DEVICES=0 HIP_VISIBLE_DEVICES=none ROCR_VISIBLE_DEVICES=3\n"
    assert ran.stderr == ""


@pytest.mark.parametrize(
    ("gpus", "requested", "status", "says"),
    [
        (node.GPUS, "gpu1", 6, "gpu1 is lost: it fell off the bus; use another: gpu0"),
        (node.GPUS, "gpu0,gpu1", 6, "gpu1 is lost"),
        (HEALTHY, "gpo1", 5, "did you mean gpu1?"),
        (HEALTHY, "0,7", 5, "no GPU '7'; this node has gpu0, gpu1"),
        (HEALTHY, "1,gpu1", 2, "names a GPU twice"),
        (HEALTHY, "gpu0,", 2, "write each once: --gpu gpu0,gpu1"),
        (HEALTHY, "gpu0,gpu0", 2, "write each once"),
        (HEALTHY, "gpu0,cpu", 2, "write each once"),
        (BOTH, "gpu0,gpu1", 6, "belong to several vendors: amd, nvidia"),
    ],
)
def test_a_gpu_that_cannot_be_had_is_refused_before_the_command_begins(
    daemon: FakeDaemon, gpus: m.GpusReply, requested: str, status: int, says: str
) -> None:
    """Issue 14, row 8: a job for a lost GPU was put elsewhere."""
    daemon.answers[m.Gpus] = saying(gpus)
    ran = hegmctl("run", "--gpu", requested, "--", "echo", "begun", socket=daemon.path)
    assert (ran.returncode, ran.stdout) == (status, ""), ran.stderr
    assert says in ran.stderr


def test_a_gpu_is_not_ignored_where_no_daemon_knows_it(socket_path: Path) -> None:
    """Issue 14, row 8: the job ran on the first GPU."""
    ran = hegmctl("run", "--no-daemon-start", "--gpu", "gpu1", "--", "echo", "begun", socket=socket_path)
    assert (ran.returncode, ran.stdout) == (3, "")
    assert "only a daemon knows gpu1" in ran.stderr


def test_the_agents_settings_are_in_the_environment(daemon: FakeDaemon) -> None:
    print_it = ("--", "sh", "-c", "echo $HEGM_RUN,$HEGM_JOB,$HEGM_GPU")
    daemon.answers[m.Gpus] = saying(HEALTHY)
    stale = {"HEGM_RUN": "before", "HEGM_JOB": "before", "HEGM_GPU": "before"}
    named = hegmctl("run", "--name", "bert", "--gpu", "gpu1", *print_it, socket=daemon.path, environ=stale)
    run, *rest = named.stdout.strip().split(",")
    assert rest == ["bert", "gpu1"]
    again = hegmctl("run", *print_it, socket=daemon.path, environ=stale)
    other, *rest = again.stdout.strip().split(",")
    assert rest == ["job", ""], "a run within another is a job of its own"
    assert len({run, other, "before", ""}) == 4


def test_more_ranks_than_a_node_can_run_are_refused(tmp_path: Path) -> None:
    """A slip of the hand ended with a traceback, or began to start 100,000 processes."""
    with FakeDaemon(tmp_path / "hegmd.sock", node.answers()) as daemon:
        ran = hegmctl("run", "--ranks", "100000", "--", "true", socket=daemon.path)
    assert (ran.returncode, "at most 1024 ranks" in ran.stderr) == (2, True)


@pytest.mark.parametrize("words", [("--ready", "always"), ("--resume", "4"), ("--restart-tries", "3")])
def test_options_for_a_parent_are_refused_without_one(daemon: FakeDaemon, words: tuple[str, ...]) -> None:
    ran = hegmctl("run", *words, "--", "true", socket=daemon.path)
    assert ran.returncode == 2
    assert "are for --allow-restart" in ran.stderr


def test_an_unknown_prestart_time_counted_as_no_prestart(daemon: FakeDaemon) -> None:
    """`--ready sometimes` began the job, and nothing was ever kept ready for it."""
    ran = hegmctl("run", "--allow-restart", "--ready", "sometimes", "--", "true", socket=daemon.path)
    assert ran.returncode == 2
    assert "write one of: in-turn, beforehand, always" in ran.stderr


@pytest.mark.parametrize("words", [(sys.executable, "-I", "t.py"), ("env", "-i", sys.executable, "t.py")])
def test_a_command_that_excludes_the_agent_does_not_start_over_instead_of_continuing(
    daemon: FakeDaemon, words: tuple[str, ...]
) -> None:
    ran = hegmctl("run", "--allow-restart", "--resume", "4", "--", *words, socket=daemon.path)
    assert ran.returncode == 6
    assert "would start from the beginning" in ran.stderr
    assert "hegmctl run --allow-restart --resume 4 -- COMMAND" in ran.stderr
    assert not daemon.requests


@pytest.mark.thorough
def test_a_job_that_can_never_be_restarted_is_reported_and_runs(daemon: FakeDaemon) -> None:
    ran = hegmctl("run", "--allow-restart", "--", sys.executable, "-I", "-c", "print('ran')", socket=daemon.path)
    assert (ran.returncode, ran.stdout) == (0, "ran\n")
    assert "`-I` keeps hegmd's agent out" in ran.stderr
