"""`make demo`: a node with two simulated GPUs, three jobs on it, and a look at it from every side. No GPU is needed.

Everything but the hardware is real: the daemon, its socket, the processes, the events. The script checks each of its
claims and exits with 1 if one is false. It leaves nothing behind.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "client")]

from contrib.demo.moving import PATIENCE_S, NotAsTold  # noqa: E402 - only now it can be found
from contrib.demo.moving import Node as PrivateNode  # noqa: E402 - as above
from hegmctl.connection import Connection, connect  # noqa: E402 - as above
from hegmctl.tables import wrapped  # noqa: E402 - as above

GIB = 1 << 30
JOBS = (("vision", "gpu0", 3), ("language", "gpu0", 2), ("speech", "gpu1", 6))


class Node(PrivateNode):
    """A private node in a folder of its own: the daemon, the jobs, and the queries about them."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.socket_path = folder / "hegmd.sock"
        self.environ["PATH"] = f"{Path(sys.executable).parent}:{os.environ.get('PATH', os.defpath)}"

    @contextlib.contextmanager
    def job(self, name: str, gpu: str, size_gib: int) -> Iterator[subprocess.Popen[bytes]]:
        """A process that holds simulated memory for as long as it lives."""
        words = ["simulate", "hold", gpu, f"{size_gib}GiB", "--", "python3", "contrib/demo/job.py", name]
        process = subprocess.Popen(
            [sys.executable, "-m", "hegmctl", *words],
            env=self.environ,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=ROOT,
        )
        try:
            if process.stdout is None or not process.stdout.readline():
                raise NotAsTold(f"the job {name} did not start")
            yield process
        finally:
            process.communicate()  # the end of its input is the end of the job

    def show(self, line: str, status: int = 0) -> None:
        """Type a command, as it were, and let its output be seen."""
        terminal = sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
        print(f"\n  \x1b[1m$ {line}\x1b[0m\n" if terminal else f"\n  $ {line}\n", flush=True)
        words = [sys.executable, "-m", "hegmctl", *line.split()[1:]]
        ran = subprocess.run(words, env=self.environ, stderr=subprocess.STDOUT, check=False)
        if ran.returncode == -signal.SIGPIPE:
            raise BrokenPipeError
        if ran.returncode != status:
            raise NotAsTold(f"`{line}` ended with {ran.returncode} and not with {status}")
        if status:
            print(f"(exit status {status})", flush=True)

    def expect(self, what: str, true: Callable[[Connection], bool]) -> None:
        """Hold the daemon to it; it may take a moment until it has looked at the node again."""
        deadline = time.monotonic() + PATIENCE_S
        with connect(str(self.socket_path)) as hegmd:
            while not true(hegmd):
                if time.monotonic() > deadline:
                    raise NotAsTold(f"this did not come true: {what}")
                time.sleep(0.05)


def tell(text: str) -> None:
    """A paragraph between the commands."""
    print("\n" + "\n".join(wrapped(text, 78)), flush=True)


def used_bytes(hegmd: Connection) -> list[int | None]:
    """Memory in use on each GPU."""
    return [gpu.memory_used_bytes for gpu in hegmd.gpus().gpus]


def look_at_jobs(node: Node) -> None:
    """The inventory with three jobs running."""
    node.expect("three jobs hold 5 and 6 GiB", lambda hegmd: used_bytes(hegmd) == [5 * GIB, 6 * GIB])
    tell("Three jobs have started. Each is a process of its own, which the daemon knows by its pid and start time.")
    node.show("hegmctl gpus")
    node.show("hegmctl ps")
    tell("For each process the daemon says in which ways it could be moved as things are, and why not in the others:")
    node.show("hegmctl ps --gpu gpu1 --ways")
    tell(
        "What does not fit is refused, with the numbers and the next step. The exit status tells which kind of failure."
    )
    node.show("hegmctl simulate hold gpu1 4GiB -- true", status=6)


def lose_a_gpu(node: Node) -> None:
    """A GPU falls off the bus, and comes back."""
    tell("Now gpu1 falls off the bus. What is not known any more is shown as unknown, and not as 0:")
    node.show("hegmctl simulate fault gpu1 lost")
    node.expect("gpu1 is lost", lambda hegmd: [gpu.state for gpu in hegmd.gpus().gpus] == ["ok", "lost"])
    node.expect("its memory is unknown", lambda hegmd: used_bytes(hegmd)[1] is None)
    node.show("hegmctl gpus")
    tell("It comes back, with its name and its job:")
    node.show("hegmctl simulate fault gpu1 none")
    node.expect("gpu1 is back", lambda hegmd: used_bytes(hegmd) == [5 * GIB, 6 * GIB])
    node.show("hegmctl gpus --quiet")


def tour(node: Node) -> None:
    """The demonstration."""
    with node.daemon():
        tell("This is a node with two simulated GPUs; the daemon, its socket and the processes are real.")
        node.show("hegmctl version")
        node.show("hegmctl gpus")
        with contextlib.ExitStack() as running:
            jobs = [running.enter_context(node.job(*job)) for job in JOBS]
            look_at_jobs(node)
            lose_a_gpu(node)
        pids = {job.pid for job in jobs}
        node.expect("the jobs are gone", lambda hegmd: not hegmd.processes().processes)
        node.expect("their memory is free", lambda hegmd: used_bytes(hegmd) == [0, 0])
        node.expect(
            "every end was seen",
            lambda hegmd: pids <= {event.pid for event in hegmd.events() if event.kind == "process.ended"},
        )
        tell("The jobs have ended, and their memory is free again. All of this was noted as it happened:")
        node.show("hegmctl events")
        tell("Last, the doctor: what this machine would need to run such jobs for real, and how to mend what is amiss.")
        with connect(str(node.socket_path)) as hegmd:
            failed = any(check.status == "fail" for check in hegmd.doctor().checks)
        node.show("hegmctl doctor", status=15 if failed else 0)
    if node.socket_path.exists():
        raise NotAsTold("the daemon left its socket behind")
    tell("The daemon has ended and left nothing behind. `hegmctl --help` lists what else there is.")


def main() -> int:
    """Run the tour in a folder that is gone afterwards; the exit status."""
    with tempfile.TemporaryDirectory(prefix=f"hegm-demo-{os.getpid()}-", dir="/tmp") as folder:
        try:
            tour(Node(Path(folder)))
        except NotAsTold as error:
            print(f"\nThe demonstration failed: {error}", file=sys.stderr)
            return 1
        except BrokenPipeError:  # the reader has seen enough, as in `make demo | head`
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what Python still has to write
        except KeyboardInterrupt:
            return 128 + signal.SIGINT
    return 0


if __name__ == "__main__":
    sys.exit(main())
