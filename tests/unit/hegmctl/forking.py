"""hegmctl without the start of a Python: forked from one that has imported all of it, `python forking.py FD`.

The start of Python is half of the time of a short command. A fork has its own arguments, environment, folder and
outputs, and exits like a started process. Other tests start hegmctl to check its start and its imports.

Owns that Python, one for each process that runs tests, for as long as the fixture in conftest.py exists.
"""

from __future__ import annotations

import gc
import json
import os
import pkgutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

from tests.patience import HANG_S

MESSAGE_BYTES = 1 << 17
#: Programs of their own, and what is imported for a screen only.
_NOT_IMPORTED = ("hegmctl.__main__", "hegmctl.nccl_training", "hegmctl.exec_command", "hegmctl.remote_python")
#: Variables that a Python reads when it starts.
_READ_AT_START = ("PYTHON", "LANG", "LC_", "TZ")

_there: list[Forking] = []


class Forking:
    """The Python that forks, from the side of the tests."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._environ = dict(environ)
        self._line = ours
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.unit.hegmctl.forking", str(theirs.fileno())],
            env=self._environ,
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
        )
        theirs.close()
        ours.settimeout(HANG_S)

    def close(self) -> None:
        self._line.close()
        self._process.wait(HANG_S)

    def can_run(self, environ: Mapping[str, str]) -> bool:
        """Whether a Python with that environment starts as this one has."""
        of_start = [
            {name: value for name, value in each.items() if name.startswith(_READ_AT_START)}
            for each in (environ, self._environ)
        ]
        return of_start[0] == of_start[1]

    def run(self, words: Sequence[str], environ: Mapping[str, str], cwd: Path) -> subprocess.CompletedProcess[str]:
        """Run hegmctl to its end with both outputs in files."""
        ignores_hangup = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN  # as under nohup
        request = {"words": words, "environ": environ, "cwd": str(cwd), "ignores_hangup": ignores_hangup}
        wanted = json.dumps(request).encode()
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as errors:
            socket.send_fds(self._line, [wanted], [out.fileno(), errors.fileno()])
            status = int(self._line.recv(MESSAGE_BYTES))
            texts = [os.pread(file.fileno(), os.fstat(file.fileno()).st_size, 0).decode() for file in (out, errors)]
        return subprocess.CompletedProcess(list(words), status, *texts)


@contextmanager
def forked_clients(environ: Mapping[str, str]) -> Iterator[None]:
    """From here on, hegmctl is forked where that makes no difference."""
    forking = Forking(environ)
    _there.append(forking)
    try:
        yield
    finally:
        _there.remove(forking)
        forking.close()


def forking_for(environ: Mapping[str, str]) -> Forking | None:
    """The Python that forks a hegmctl with that environment, if there is one."""
    return _there[-1] if _there and _there[-1].can_run(environ) else None


def main(line: socket.socket) -> None:
    """Fork a hegmctl for each request, and answer with its status."""
    import hegmctl
    import hegmctl.cli

    for module in pkgutil.walk_packages(hegmctl.__path__, "hegmctl."):
        if module.name not in _NOT_IMPORTED and not module.name.startswith("hegmctl.top"):
            import_module(module.name)
    gc.freeze()
    while True:
        data, fds, _flags, _address = socket.recv_fds(line, MESSAGE_BYTES, 2)
        if not data:
            return
        pid = os.fork()
        if pid == 0:
            become(json.loads(data), fds, line)
        for fd in fds:
            os.close(fd)
        _, status = os.waitpid(pid, 0)
        line.send(str(os.waitstatus_to_exitcode(status)).encode())


def become(wanted: dict[str, Any], fds: list[int], line: socket.socket) -> None:
    """In the child: take these outputs and nothing else, and be hegmctl. Does not come back."""
    from hegmctl.cli import main as hegmctl_main

    line.close()
    for target, source in enumerate(fds, start=1):
        os.dup2(source, target)
        os.close(source)
    os.environ.clear()
    os.environ.update(wanted["environ"])
    os.chdir(wanted["cwd"])
    signal.signal(signal.SIGHUP, signal.SIG_IGN if wanted["ignores_hangup"] else signal.SIG_DFL)
    sys.argv = ["hegmctl", *wanted["words"]]
    hegmctl_main()


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with socket.socket(fileno=int(sys.argv[1])) as asked_by:
        main(asked_by)
