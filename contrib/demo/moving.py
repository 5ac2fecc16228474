"""The second part of `make demo`: a training is moved while it trains, suspended, and brought back. No GPU is needed.

The GPUs are simulated and everything else is real: PyTorch trains on the CPU, and the bytes of its tensors really leave
the process. The script checks each of its claims: it compares every loss, bit for bit, with those of an undisturbed
run, and exits with 1 if a claim is false.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
TRAINING = Path(__file__).with_name("train.py")
STEPS = 250
PATIENCE_S = 60.0
MIB = 1 << 20


class NotAsTold(Exception):
    """The demonstration did not do what its text says."""


class Node:
    """A private node: the daemon, and how it is spoken to."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environ = {name: value for name, value in os.environ.items() if not name.startswith("HEGM_")} | {
            "HEGM_SOCKET": str(folder / "hegmd.sock"),
            "PYTHONPATH": f"{ROOT}:{ROOT / 'client'}",
            "OMP_NUM_THREADS": "1",
        }

    @contextlib.contextmanager
    def daemon(self, gpus: str = "2x8GiB", settings: str = "") -> Iterator[None]:
        """hegmd, ready to answer; it says itself when it is."""
        address = str(self.folder / "notify.sock")
        config = self.folder / "hegmd.toml"
        config.write_text(settings)
        words = [
            "--config",
            str(config),
            "--simulate",
            gpus,
            "--socket",
            self.environ["HEGM_SOCKET"],
            "--state-dir",
            f"{self.folder}/state",
        ]
        with (self.folder / "hegmd.log").open("w+") as log, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notify:
            notify.bind(address)
            environ = self.environ | {"NOTIFY_SOCKET": address}
            daemon = subprocess.Popen([sys.executable, "-m", "hegmd", *words], env=environ, stderr=log)
            try:
                deadline = time.monotonic() + PATIENCE_S
                while daemon.poll() is None and time.monotonic() < deadline:
                    if select.select([notify], [], [], 0.1)[0] and b"READY=1" in notify.recv(4096):
                        yield
                        return
                log.seek(0)
                raise NotAsTold(f"hegmd did not come up: {log.read()}")
            finally:
                daemon.terminate()
                daemon.wait()

    def show(self, line: str) -> None:
        """Type a command, as it were, and let its output be seen."""
        print(f"\n  $ {line}\n", flush=True)
        words = [sys.executable, "-m", "hegmctl", *line.split()[1:]]
        if subprocess.run(words, env=self.environ, check=False).returncode:
            raise NotAsTold(f"`{line}` failed")

    def ask(self, *words: str) -> dict[str, Any]:
        """The answer to a command, as data."""
        command = [sys.executable, "-m", "hegmctl", *words, "--json"]
        answer: dict[str, Any] = json.loads(
            subprocess.run(command, env=self.environ, capture_output=True, check=True).stdout
        )
        return answer


class Training:
    """The script under `hegmctl run`; its lines go to a file, so that it never waits for a reader."""

    def __init__(
        self, node: Node, steps: int = STEPS, options: Sequence[str] = ("--gpu", "gpu0"), name: str = "losses"
    ) -> None:
        self.path = node.folder / name
        run = [sys.executable, "-m", "hegmctl", "run", *options]
        words = [*run, "--", sys.executable, str(TRAINING), str(steps)]
        with self.path.open("w") as losses:
            self.process = subprocess.Popen(words, env=node.environ, stdout=losses)

    def lines(self) -> list[list[str]]:
        """The steps so far: number, loss, time."""
        return [line.split() for line in self.path.read_text().splitlines(keepends=True) if line.endswith("\n")]

    def await_steps(self, count: int) -> None:
        """Wait until it has made so many steps more."""
        wanted, deadline = len(self.lines()) + count, time.monotonic() + PATIENCE_S
        while len(self.lines()) < wanted:
            if time.monotonic() > deadline or self.process.poll() is not None:
                raise NotAsTold("the training does not go on")
            time.sleep(0.02)

    def end(self) -> None:
        """Kill it if it runs."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait()

    def resident_mib(self) -> int:
        """Memory that the process has."""
        pages = Path(f"/proc/{self.process.pid}/statm").read_text().split()[1]
        return int(pages) * os.sysconf("SC_PAGE_SIZE") // MIB


def tell(text: str) -> None:
    """A sentence between the commands."""
    print(f"\n{text}", flush=True)


def undisturbed(node: Node, steps: int = STEPS) -> list[str]:
    """Return the losses of an undisturbed run."""
    ran = subprocess.run(
        [sys.executable, str(TRAINING), str(steps)], env=node.environ, capture_output=True, text=True, check=True
    )
    return [line.split()[1] for line in ran.stdout.splitlines()]


def tour(node: Node) -> None:
    """The demonstration."""
    tell(f"First an ordinary PyTorch training of {STEPS} steps, undisturbed, to compare with.")
    expected = undisturbed(node)
    with node.daemon():
        tell("Now the same script, unchanged, under `hegmctl run` on gpu0:")
        training = Training(node)
        try:
            disturb(node, training)
            status = training.process.wait(PATIENCE_S * 2)
        finally:
            training.end()
        operations = node.ask("ops")["operations"]
    if status:
        raise NotAsTold(f"the training ended with status {status}")
    losses = [line[1] for line in training.lines()]
    if losses != expected:
        first = next(
            (at for at, pair in enumerate(zip(losses, expected, strict=False)) if pair[0] != pair[1]), len(losses)
        )
        raise NotAsTold(f"the losses differ from step {first + 1} on")
    tell(f"The training has ended. All {len(losses)} losses are bit for bit those of the undisturbed run.")
    moved = next(operation for operation in operations if operation["kind"] == "migrate")
    print(f"Its downtime was {moved['downtime_s'] * 1000:.0f} ms while {moved['size_bytes'] / MIB:.0f} MiB were moved.")


def disturb(node: Node, training: Training) -> None:
    """Move it, suspend it, bring it back, all while it trains."""
    training.await_steps(20)
    pid = training.process.pid
    deadline = time.monotonic() + PATIENCE_S
    while not any(process["gpus"] for process in node.ask("ps")["processes"]):
        if time.monotonic() > deadline:
            raise NotAsTold("the training does not show up on its GPU")
    node.show("hegmctl ps")
    tell("It is moved to gpu1 while it trains; first what that takes, then the move:")
    node.show(f"hegmctl migrate {pid} --to gpu1 --dry-run")
    node.show(f"hegmctl migrate {pid} --to gpu1")
    training.await_steps(10)
    before_mib = training.resident_mib()
    tell("It is suspended: it stands between two batches, its bytes are in the daemon's pool, and its GPU is free.")
    node.show(f"hegmctl suspend {pid}")
    node.show("hegmctl ps")
    after_mib, steps = training.resident_mib(), len(training.lines())
    tell(f"Its resident memory went from {before_mib} to {after_mib} MiB. It goes on, on gpu0:")
    if after_mib >= before_mib:
        raise NotAsTold("its memory did not shrink")
    if len(training.lines()) != steps:
        raise NotAsTold("it trains although it is suspended")
    node.show(f"hegmctl resume {pid} --to gpu0")
    training.await_steps(10)
    node.show("hegmctl ops")


def main() -> int:
    """Run the tour; the exit status."""
    if find_spec("torch") is None:
        print("\nThe second part shows a PyTorch training being moved, and needs torch: pip install torch==2.13.0")
        return 0
    return run_tour(tour)


def run_tour(tour: Callable[[Node], None]) -> int:
    """Run a tour on a node in a folder that is deleted afterwards; the exit status."""
    with tempfile.TemporaryDirectory(prefix=f"hegm-demo-{os.getpid()}-", dir="/tmp") as folder:
        try:
            tour(Node(Path(folder)))
        except NotAsTold as error:
            print(f"\nThe demonstration failed: {error}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
