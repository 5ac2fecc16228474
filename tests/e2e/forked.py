"""Child processes that need not import what they use: they are forked from a Python that has imported it.

PyTorch's import takes two seconds of processor, hegmd's half a second, and how a process starts proves nothing where a
test is about what happens to it later. A forked script has the environment, the descriptors and the agent of a started
one, and a session of its own. `hegmctl run` is not started for it, but sets its environment; where it supervises, it is
forked too, and forks what it would start (forking.py). Ranks are forked by a launcher that is forked as well, with the
store and the end of torchrun's. A forked daemon is in the session of the tests, as a started one. Tests of starts and
of process images start theirs, and of ranks, restarts and recoveries one test each.

Owns those Pythons (preloaded.py), one of each for each process that runs tests, while the fixtures of that name in
conftest.py are there. All of these processes share those with PyTorch alone.
"""

from __future__ import annotations

import array
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from hegmctl.running import nccl_settings, prepare
from tests.e2e.forking import TORCHRUN
from tests.leaks import RUN_MARK
from tests.patience import HANG_S

PRELOADED = Path(__file__).with_name("preloaded.py")
# With these, `hegmctl run` stays to supervise what it has started, and starts it again.
SUPERVISED = {"--recover", "--allow-restart", "--ranks"}
RUN = [sys.executable, "-m", "hegmctl", "run"]
HEGMD = [sys.executable, "-m", "hegmd"]
WITH_HEGMD = ("--no-torch", "hegmd.app", "anyio._backends._asyncio")
MESSAGE_BYTES = 1 << 17
ENDS_WITHIN_S = HANG_S

# Variables that the dynamic loader, the C library or a Python reads when it starts, but for the folders of libraries.
READ_AT_START = ("PYTHON", "LD_PRELOAD", "MALLOC_", "GLIBC_", "LANG", "LC_", "TZ")
# A daemon loads this one by its name, if it is to look for NVIDIA's GPUs.
LIBRARY = "libnvidia-ml.so.1"

_with_torch: list[PreloadedPython] = []
_with_hegmd: list[PreloadedPython] = []


class PreloadedPython:
    """The Python with PyTorch or hegmd in it, and what it has forked."""

    def __init__(self, environ: Mapping[str, str], *words: str, lock: Path | None = None) -> None:
        """`lock`: all workers of this run share it. The first starts it, and it ends with the last."""
        self._environ = dict(environ)
        self._statuses: dict[int, int] = {}
        self._process: subprocess.Popen[bytes] | None = None
        if lock is None:
            self._line, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self._process = self._start(theirs, *words)
            return
        self._line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        address = f"\0{lock.name} {os.environ[RUN_MARK]}"
        with lock.open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            try:
                self._line.connect(address)
            except ConnectionRefusedError:
                listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                listening.bind(address)
                listening.listen()
                self._start(listening, "--shared", str(lock), *words).wait(HANG_S)
                self._line.connect(address)

    def _start(self, theirs: socket.socket, *words: str) -> subprocess.Popen[bytes]:
        with theirs:
            number = theirs.fileno()
            words = (sys.executable, str(PRELOADED), "--socket", str(number), *words)
            return subprocess.Popen(words, env=self._environ, pass_fds=[number], stdin=subprocess.DEVNULL)

    def close(self) -> None:
        """End it, and what it has forked."""
        self._line.close()
        if self._process is not None:
            self._process.wait(ENDS_WITHIN_S)

    def starts_alike(self, environ: Mapping[str, str]) -> bool:
        """Whether a Python with that environment starts as this one has."""
        of_start = [
            {name: value for name, value in one.items() if name.startswith(READ_AT_START)}
            for one in (self._environ, environ)
        ]
        return of_start[0] == of_start[1]

    def fork(self, wanted: dict[str, Any], fds: Sequence[int]) -> int:
        """Have a script begin with these descriptors as its first three; its pid."""
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))]
        self._line.sendmsg([json.dumps(wanted).encode()], rights)
        while True:
            answer = self._heard(HANG_S)
            assert answer is not None, "the Python that forks scripts does not answer"
            if "begun" in answer:
                self._statuses.pop(answer["begun"], None)
                return int(answer["begun"])

    def status_of(self, pid: int, limit_s: float) -> int | None:
        """The exit status of what it has forked; None while it runs, for that long at most."""
        while pid not in self._statuses:
            if self._heard(limit_s) is None:
                return None
        return self._statuses[pid]

    def _heard(self, limit_s: float) -> dict[str, int] | None:
        self._line.settimeout(limit_s if limit_s > 0 else 0.0)
        try:
            data = self._line.recv(MESSAGE_BYTES)
        except (TimeoutError, BlockingIOError):
            return None
        assert data, "the Python that forks scripts has ended"
        answer: dict[str, int] = json.loads(data)
        if "ended" in answer:
            self._statuses[answer["ended"]] = answer["status"]
        return answer


class Forked:
    """A forked process, with what tests use of `subprocess.Popen`."""

    def __init__(self, python: PreloadedPython, wanted: dict[str, Any], stdin: Any, stdout: Any, stderr: Any) -> None:
        self.stdin: IO[str] | None = None
        self.stdout: IO[str] | None = None
        self.stderr: IO[str] | None = None
        self.args = wanted["argv"]
        self.returncode: int | None = None
        self._python = python
        passed: list[int] = []
        given: list[int] = []
        for name, stream, mode in (("stdin", stdin, "w"), ("stdout", stdout, "r"), ("stderr", stderr, "r")):
            if stream in (None, subprocess.DEVNULL):
                given.append(os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC))
                passed.append(given[-1])
            elif stream == subprocess.PIPE:
                reads, writes = os.pipe()
                ours, theirs = (writes, reads) if mode == "w" else (reads, writes)
                setattr(self, name, open(ours, mode, encoding="utf-8"))  # noqa: SIM115 - as of Popen
                given.append(theirs)
                passed.append(theirs)
            else:
                passed.append(stream if isinstance(stream, int) else stream.fileno())
        try:
            self.pid = python.fork(wanted, passed)
        finally:
            for number in given:
                os.close(number)

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self._python.status_of(self.pid, 0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        limit_s = HANG_S if timeout is None else timeout
        if self.returncode is None:
            self.returncode = self._python.status_of(self.pid, limit_s)
        if self.returncode is None:
            raise subprocess.TimeoutExpired(self.args, limit_s)
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """All that it still prints, once it has ended."""
        if self.stdin is not None:
            self.stdin.close()
        texts: dict[str, str] = {}

        def read(name: str, stream: IO[str]) -> None:
            with stream:
                texts[name] = stream.read()

        streams = {"stdout": self.stdout, "stderr": self.stderr}
        readers = [
            threading.Thread(target=read, args=(name, stream))
            for name, stream in streams.items()
            if stream is not None and not stream.closed
        ]
        for reader in readers:
            reader.start()
        try:
            self.wait(timeout)
        except subprocess.TimeoutExpired:
            self.kill()
            raise
        finally:
            for reader in readers:
                reader.join()
        return texts.get("stdout", ""), texts.get("stderr", "")

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


@contextmanager
def preloaded_python(environ: Mapping[str, str], *modules: str, lock: Path | None = None) -> Iterator[None]:
    """From here on, scripts are forked from a Python with PyTorch and these modules, which has that environment."""
    with _kept(PreloadedPython(environ, *modules, lock=lock), _with_torch):
        yield


@contextmanager
def preloaded_hegmd() -> Iterator[None]:
    """From here on, daemons are forked from a Python with hegmd, which has this environment."""
    with _kept(hegmd_python(os.environ), _with_hegmd):
        yield


@contextmanager
def _kept(python: PreloadedPython, there: list[PreloadedPython]) -> Iterator[None]:
    there.append(python)
    try:
        yield
    finally:
        there.remove(python)
        python.close()


def hegmd_python(environ: Mapping[str, str]) -> PreloadedPython:
    """A Python of one's own with hegmd, for daemons whose Python has to start with that environment."""
    return PreloadedPython(environ, *WITH_HEGMD)


def forks_daemon(environ: Mapping[str, str]) -> bool:
    """Whether a daemon with that environment is forked from the Python that all tests share."""
    return bool(_with_hegmd) and _with_hegmd[-1].starts_alike(environ)


def started_daemon(
    words: Sequence[str], *, env: Mapping[str, str], stderr: IO[str], forks: bool, python: PreloadedPython | None = None
) -> subprocess.Popen[bytes] | Forked:
    """Start that command: forked, if it may be and is `python -m hegmd`; else as any program.

    `python`: from which it is forked; else from the Python that all tests share, if that has started alike.
    """
    if python is None and forks_daemon(env):
        python = _with_hegmd[-1]
    if forks and list(words[:3]) == HEGMD and python is not None:
        folders = filter(None, env.get("LD_LIBRARY_PATH", "").split(os.pathsep))
        libraries = [str(path) for path in (Path(folder, LIBRARY) for folder in folders) if path.exists()]
        wanted = {
            "module": "hegmd",
            "argv": list(words[2:]),
            "environment": dict(env),
            "folder": str(Path.cwd()),
            "libraries": libraries,
            "session": False,
        }
        return Forked(python, wanted, subprocess.DEVNULL, sys.__stdout__, stderr)
    return subprocess.Popen(words, env=env, stdin=subprocess.DEVNULL, stderr=stderr)


def started(
    words: Sequence[str],
    *,
    env: Mapping[str, str],
    cwd: Path | None = None,
    stdin: Any = subprocess.DEVNULL,
    stdout: Any = None,
    stderr: Any = None,
) -> subprocess.Popen[str] | Forked:
    """Start that command: forked, where it is a Python script, also under `hegmctl run`; else as any program."""
    wanted = forked_by(words, env, cwd) if _with_torch else None
    if wanted is not None:
        return Forked(_with_torch[-1], wanted, stdin, stdout, stderr)
    return not_forked(words, env=env, cwd=cwd, stdin=stdin, stdout=stdout, stderr=stderr)


def not_forked(
    words: Sequence[str],
    *,
    env: Mapping[str, str],
    cwd: Path | None = None,
    stdin: Any = subprocess.DEVNULL,
    stdout: Any = None,
    stderr: Any = None,
) -> subprocess.Popen[str]:
    """Start that command as any program, in a session of its own as well."""
    return subprocess.Popen(
        words, env=env, cwd=cwd, stdin=stdin, stdout=stdout, stderr=stderr, text=True, start_new_session=True
    )


def forked_by(words: Sequence[str], env: Mapping[str, str], cwd: Path | None) -> dict[str, Any] | None:
    """Return the preloaded Python's request for that command; None if the command has to be started."""
    environ = dict(env)
    if list(words[:4]) == RUN:
        options, tail = list(words[4 : words.index("--")]), words[words.index("--") + 1 :]
        if SUPERVISED & {option.partition("=")[0] for option in options}:
            wanted = {"module": "hegmctl", "libraries": [], "supervises": True, "session": True}
            return {**wanted, "argv": list(words[2:]), "environment": environ, "folder": str(cwd or Path.cwd())}
        given = dict(zip(options[::2], options[1::2], strict=True)) if len(options) % 2 == 0 else {"": ""}
        if not given.keys() <= {"--gpu", "--name"}:
            return None
        prepare(environ, environ["HEGM_SOCKET"], given.get("--name"), given.get("--gpu"))
        environ = {**nccl_settings(None), **environ}
        words = tail
    launched = {}
    if tuple(words[:4]) == (sys.executable, *TORCHRUN):
        launched, words = {"ranks": int(words[4])}, [sys.executable, *words[5:]]
    if len(words) < 2 or words[0] != sys.executable or not words[1].endswith(".py"):
        return None
    return {
        **launched,
        "argv": list(words[1:]),
        "environment": environ,
        "folder": str(cwd or Path.cwd()),
        "record": None,
        "agent": "HEGM_SOCKET" in environ,
        "at": None,
        "session": True,
    }
