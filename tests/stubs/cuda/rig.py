"""Runs one row of the driver's contract in a process of its own: `python -m tests.stubs.cuda.rig ROW`.

The same for the stub (with the environment of a CudaNode) and for a real driver. Ends with 0 when the row holds; what
does not hold is the last line on its standard error. `--list` prints every row with the GPUs it needs, `--call` and
`--hold` are its own children: one call that may be killed, and a process that makes video memory and hands it over.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from contextlib import ExitStack
from pathlib import Path

from typing_extensions import Self

from hegmd.gpu_helper import cuda
from hegmd.node.devices.nvidia import NvidiaProvider
from tests.kit.driver import MIB, Caller, ProgressSample, Target, eventually
from tests.kit.progress import ROWS
from tests.patience import HANG_S
from tests.stubs.cuda.node import ENVIRONMENT, order_in_force

PROGRAM = Path(__file__).with_name("program.py")
ANSWERS_WITHIN_S = HANG_S


class Program:
    """The program of program.py, or any other that answers lines with lines."""

    def __init__(self, *argv: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, *argv], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
        )
        self.pid = self._process.pid
        self._heard = b""

    def ask(self, line: str) -> str:
        self.tell(line)
        return self.must_hear(line)

    def must_hear(self, after: str) -> str:
        answer = self.hears(ANSWERS_WITHIN_S)
        if answer is None:
            raise RuntimeError(f"the program {self.pid} did not answer {after!r}; it ended with {self._process.poll()}")
        return answer

    def tell(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line.encode() + b"\n")

    def hears(self, within_s: float) -> str | None:
        assert self._process.stdout is not None
        while b"\n" not in self._heard:
            if not select.select([self._process.stdout], [], [], within_s)[0]:
                return None
            part = os.read(self._process.stdout.fileno(), 65536)
            if not part:
                return None
            self._heard += part
        line, _, self._heard = self._heard.partition(b"\n")
        return line.decode()

    def pause(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WNOWAIT)  # until it has stopped

    def go_on(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def end(self) -> None:
        self._process.kill()
        self._process.communicate()


class Call:
    """A process that calls or holds, and that may be killed."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    def has_ended(self, within_s: float) -> bool:
        try:
            return self._process.wait(within_s) is not None
        except subprocess.TimeoutExpired:
            return False

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


class DriverRig:
    """Starts what a row needs; a context manager that ends it all."""

    def __init__(self) -> None:
        self._stub = Path(os.environ[ENVIRONMENT]) if ENVIRONMENT in os.environ else None
        self.large_mib = 16 if self._stub else 6144
        self._stack = ExitStack()
        self._nvml = NvidiaProvider()

    def __enter__(self) -> Self:
        self._stack.callback(self._nvml.close)
        self._nvml.open()
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def start(self, gpu: int | str, *sizes_mib: int) -> Target:
        program = Program(str(PROGRAM), str(gpu), *map(str, sizes_mib))
        self._stack.callback(program.end)
        program.must_hear("its start")
        return program

    def start_without_cuda(self) -> Target:
        program = Program("-c", "import sys; [print('pong', flush=True) for line in sys.stdin]")
        self._stack.callback(program.end)
        program.ask("ping")
        return program

    def call(self, step: str, *arguments: int) -> Caller:
        return self._started("--call", step, *map(str, arguments))

    def _started(self, *argv: str, fds: tuple[int, ...] = ()) -> Call:
        call = Call(subprocess.Popen([sys.executable, "-m", __spec__.name, *argv], pass_fds=fds))
        self._stack.callback(call.kill)
        return call

    def interrupt(self, step: str, pid: int) -> None:
        if self._stub:
            fifo = self._stub / f"{step}-{pid}"
            os.mkfifo(fifo)
            order_in_force(self._stub, f"hold step:{step}@{pid} {fifo} 1 1")
            caller = self.call(step, pid)
            with fifo.open("wb"):  # opens once the step is in there, and lets it go on afterwards
                caller.kill()
            return
        before = self._figures(pid)
        caller = self.call(step, pid)
        eventually(lambda: abs(self._figures(pid) - before) > 64 * MIB, f"the {step} does not show")
        if caller.has_ended(0):
            raise RuntimeError(f"the {step} was over before it could be interrupted")
        caller.kill()

    def _figures(self, pid: int) -> int:
        """Moves as soon as a real checkpoint or restore has begun: bytes in the process and on its GPU."""
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") - sum(self.look().used_bytes.values())

    def hold(self, gpu: int, size_bytes: int, pattern: int) -> tuple[Caller, int]:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            holder = self._started(
                "--hold", str(theirs.fileno()), str(gpu), str(size_bytes), str(pattern), fds=(theirs.fileno(),)
            )
            _, (fd,), _, _ = socket.recv_fds(ours, 1, 1)
        return holder, fd

    def look(self) -> ProgressSample:
        snapshot = self._nvml.snapshot()
        used = {gpu.uuid: gpu.memory_used_bytes or 0 for gpu in snapshot.gpus}
        return ProgressSample(used, {(one.pid, one.use.gpu): one.use.vram_bytes or 0 for one in snapshot.uses})


def call(step: str, *arguments: int) -> None:
    cuda.start()
    getattr(cuda, step)(*arguments)


def hold(socket_fd: int, gpu: int, size_bytes: int, pattern: int) -> None:
    """Make, fill and pass on the memory; then wait for a kill, with all of it open."""
    cuda.start()
    context = cuda.retain(gpu)
    cuda.use(context)
    handle = cuda.create(gpu, size_bytes)
    va = cuda.reserve(size_bytes)
    cuda.map_at(va, handle, size_bytes)
    cuda.access(va, size_bytes, [gpu])
    content = ctypes.create_string_buffer(bytes([pattern]) * MIB, MIB)
    stream = cuda.create_stream()
    for at in range(va, va + size_bytes, MIB):
        cuda.copy_async(at, context, ctypes.addressof(content), None, MIB, stream)
    cuda.synchronize(stream)
    socket.send_fds(socket.socket(fileno=socket_fd), [b"x"], [cuda.export(handle)])
    threading.Event().wait()


def main(argv: list[str]) -> None:
    if argv[0] == "--list":
        for name, row in ROWS.items():
            sys.stdout.write(f"{name} {row.gpus}\n")
    elif argv[0] == "--call":
        call(argv[1], *map(int, argv[2:]))
    elif argv[0] == "--hold":
        hold(*map(int, argv[1:]))
    else:
        with DriverRig() as rig:
            ROWS[argv[0]].check(rig)


if __name__ == "__main__":
    main(sys.argv[1:])
