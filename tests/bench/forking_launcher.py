"""A launcher that `failures` uses instead of torchrun: it forks ranks from a Python that has imported PyTorch.

Two programs. `forking_launcher.py serve SOCKET` is that Python. `forking_launcher.py run SOCKET RANKS SCRIPT` is the
launcher: it has ranks forked with its environment and descriptors, ends all of them once one has failed, as torchrun
does, and exits with 1 then. A launcher that is killed leaves its ranks, as torchrun does too. Ranks are children of
the server, which nothing in hegmd depends on: it knows ranks by their agents.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import sys
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

PRELOADED = Path(__file__).parents[1] / "e2e"
MESSAGE_BYTES = 1 << 17
# How long the other ranks may take to end after one has failed; torchrun waits for 30 s.
GRACE_S = 5


def serve(address: str) -> None:
    """Fork ranks for each launcher, and tell it how they ended, until it is killed."""
    sys.path.insert(0, str(PRELOADED))
    preloaded = import_module("preloaded")
    preloaded.get_ready(("torch.distributed", "torch.nn.parallel", "torch.utils.data"))
    preloaded.OURS.add(__file__)
    poll = select.poll()
    launchers: dict[int, socket.socket] = {}
    ranks: dict[int, tuple[int, int]] = {}  # pidfd to pid and launcher
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(f"{address}.new")
        listener.listen()
        os.rename(f"{address}.new", address)
        poll.register(listener, select.POLLIN)
        while True:
            for number, _ in poll.poll():
                if number == listener.fileno():
                    launcher, _ = listener.accept()
                    launchers[launcher.fileno()] = launcher
                    poll.register(launcher, select.POLLIN)
                elif number in launchers:
                    begun = _fork(preloaded, launchers[number])
                    if begun is None:
                        poll.unregister(number)
                        launchers.pop(number).close()
                    else:
                        ranks[begun[1]] = begun[0], number
                        poll.register(begun[1], select.POLLIN)
                else:
                    poll.unregister(number)
                    pid, launcher_number = ranks.pop(number)
                    os.close(number)
                    _, status = os.waitpid(pid, 0)
                    if launcher_number in launchers:
                        preloaded.answer(launchers[launcher_number], {"ended": pid, "status": status})


def _fork(preloaded: Any, launcher: socket.socket) -> tuple[int, int] | None:
    """The pid and the pidfd of the rank that the launcher wants; None if the launcher has ended."""
    try:
        data, fds, _flags, _address = socket.recv_fds(launcher, MESSAGE_BYTES, 3)
    except ConnectionResetError:
        return None
    if not data:
        return None
    pid = os.fork()
    if pid == 0:
        preloaded.become(json.loads(data), fds)
    for fd in fds:
        os.close(fd)
    preloaded.answer(launcher, {"begun": pid})
    return pid, os.pidfd_open(pid)


def run(address: str, ranks: int, script: str) -> int:
    """Launch these ranks; the exit status."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = {**os.environ, "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    living: set[int] = set()
    has_failed = False

    def end_all(number: int, _frame: object = None) -> None:
        for pid in living:
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    signal.signal(signal.SIGTERM, end_all)
    signal.signal(signal.SIGALRM, lambda *_: end_all(signal.SIGKILL))
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
        server.connect(address)
        for rank in range(ranks):
            environment = {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(ranks)}
            wanted = {"argv": [script], "environment": environment, "folder": str(Path.cwd()), "limit_s": 0}
            wanted |= {"agent": True, "at": None, "record": None, "session": True}
            socket.send_fds(server, [json.dumps(wanted).encode()], [0, 1, 2])
        begun = 0
        while living or begun < ranks:
            answer = json.loads(server.recv(MESSAGE_BYTES))
            if "begun" in answer:
                begun += 1
                living.add(answer["begun"])
                continue
            living.discard(answer["ended"])
            if answer["status"] and not has_failed:
                has_failed = True
                end_all(signal.SIGTERM)
                signal.alarm(GRACE_S)
    return int(has_failed)


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(sys.argv[2])
    sys.exit(run(sys.argv[2], int(sys.argv[3]), sys.argv[4]))
