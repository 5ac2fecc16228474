"""The node for tests of restarts: a real hegmd, and trainings under `hegmctl run --allow-restart`, by their lines.

A rehearsal is the same on simulated GPUs: daemon, supervisor, agent, scripts and whoever asks are those of a machine
with real ones, and only what is on a GPU is not. Owns their processes.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

from typing_extensions import Self

from hegmctl.connection import Connection, connect
from hegmd.protocol import operations as protocol
from hegmd.protocol.messages import Migrate, OperationReply, StoryReply
from tests.gpu.keeper import HegmdKeeper
from tests.gpu.moves_jobs import Lines
from tests.gpu.moves_node import COMMAND_S, NOT_INHERITED, ROOT, WentWrongError, until
from tests.patience import HANG_S

CPU = "cpu"
POOL_BYTES = 48 << 30
REHEARSED_GPUS, REHEARSED_POOL_BYTES = "2x8GiB", 4 << 30
READY_WITHIN_S = 180.0
# The number of its GPU on this machine, whatever else its environment says.
_ORDER = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}


class RestartNode:
    """The daemon. A context manager."""

    def __init__(
        self, folder: Path, *, rehearsed: bool, pool_bytes: int = POOL_BYTES, more: Mapping[str, str] | None = None
    ) -> None:
        self._more = more or {}
        self.folder, self.rehearsed = folder, rehearsed
        self.socket_path = folder / "hegmd.sock"
        self._log = (folder / "hegmd.log").open("ab")
        self._keeper = HegmdKeeper(self.socket_path, folder / "state")
        (folder / "hegmd.toml").write_text(
            f"[pool]\nbudget_bytes = {REHEARSED_POOL_BYTES if rehearsed else pool_bytes}\n"
        )

    def __enter__(self) -> Self:
        words = ["--socket", self.socket_path, "--state-dir", self.folder / "state"]
        words += ["--config", self.folder / "hegmd.toml", "--log-level", "debug"]
        words += ["--simulate", REHEARSED_GPUS] if self.rehearsed else []
        command = [sys.executable, "-m", "hegmd", *map(str, words)]
        try:
            self._daemon = self._keeper.start(command, self.environ(), self._log.fileno())
        except RuntimeError as error:
            raise WentWrongError(f"{error}\n{self.log_tail()}") from error
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._daemon.terminate()
        try:
            self._daemon.wait(HANG_S)
        finally:
            self._daemon.kill()
            self._daemon.wait()
            self._log.close()

    def environ(self) -> dict[str, str]:
        """Return the environment of our programs."""
        plain = {
            name: value for name, value in os.environ.items() if name not in (*NOT_INHERITED, "HEGM_ALLOW_RESTART")
        }
        paths = os.pathsep.join(filter(None, [str(ROOT), str(ROOT / "client"), os.environ.get("PYTHONPATH")]))
        return {**plain, **_ORDER, **self._more, "HEGM_SOCKET": str(self.socket_path), "PYTHONPATH": paths}

    def log_tail(self, lines: int = 15) -> str:
        return "\n".join((self.folder / "hegmd.log").read_text(errors="replace").splitlines()[-lines:])

    def connect(self) -> Connection:
        return connect(str(self.socket_path), timeout_s=COMMAND_S)

    def gpus(self) -> list[str]:
        """The names of those that are there."""
        with self.connect() as connection:
            return [gpu.id for gpu in connection.gpus().gpus if gpu.state == "ok"]

    def begun_on(self, place: str) -> tuple[list[str], dict[str, str]]:
        """Words for `hegmctl run`, and an environment, by which a job begins there."""
        if self.rehearsed:
            return ["--gpu", place], {}
        return [], {"CUDA_VISIBLE_DEVICES": "" if place == CPU else place.replace("gpu", "")}

    def place_of(self, pid: int) -> str | None:
        """Return the place of a process as the daemon reports it: its GPUs, the CPU, or none yet."""
        with self.connect() as connection:
            for there in connection.processes().processes:
                if there.pid == pid and there.agent is not None:
                    on = [use.gpu for use in there.gpus]
                    return ",".join(sorted(on)) or (CPU if there.agent.on_cpu else None)
        return None

    def uuids_at(self, place: str) -> list[str]:
        """The UUIDs of the GPUs there, in that order, as PyTorch writes them."""
        with self.connect() as connection:
            found = {gpu.id: gpu.uuid.removeprefix("GPU-") for gpu in connection.gpus().gpus}
        return [found[name] for name in place.split(",")]

    def story(self, op_id: str) -> StoryReply:
        with self.connect() as connection:
            return connection.story(op_id)


class RestartedJob(Lines):
    """A training and its supervisor. Every line of all of its processes is read, each with its time."""

    def __init__(
        self, node: RestartNode, words: Sequence[str], begins: str, *, options: Sequence[str] = (), **more: str
    ) -> None:
        self.node = node
        places, environ = node.begun_on(begins)
        run = [sys.executable, "-m", "hegmctl", "run", "--no-daemon-start", "--allow-restart", *options, *places, "--"]
        super().__init__([*run, sys.executable, "-u", *words], {**node.environ(), **environ, **more})

    def steps(self) -> list[str]:
        """The lines that tell of a step."""
        return [line for line in list(self.lines) if line.startswith("step ")]

    def read_steps(self, count: int) -> None:
        """Read its lines for so many more steps."""
        wanted = len(self.steps()) + count
        self.wait_for(lambda: len(self.steps()) >= wanted, f"{count} steps more did not come", READY_WITHIN_S)

    def worker(self) -> int:
        """The training's own process: the first child of its supervisor; one that is made ready is a later one."""
        children = self.children()
        if not children:
            raise WentWrongError("the supervisor has no child")
        return children[0]

    def children(self) -> list[int]:
        """All processes that its supervisor has started, the training first."""
        return [int(pid) for pid in Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()]

    def seen_at(self, place: str) -> None:
        """Wait until the daemon sees it there; several GPUs in any order, since only the training knows that."""
        known = ",".join(sorted(place.split(",")))
        until(lambda: self.node.place_of(self.worker()) == known, f"that it is seen on {place}", READY_WITHIN_S)

    def restart(self, to: str, requested: str | None = "") -> protocol.Operation:
        """Have it started again there. Raises WentWrongError where it does not train there afterwards.

        `asked` is what the request names instead: pairs of GPUs, or None for the GPUs that it is on.
        """
        pid = self.worker()
        with self.node.connect() as connection:
            request = Migrate(pids=(pid,), to=to if requested == "" else requested, via="restart")
            reply = connection.call(request, OperationReply)
        operation = reply.operation
        if operation is None or operation.phase != "done":
            raise WentWrongError(f"the restart on {to}: {operation}; {self.error_text()}")
        if self.worker() == pid:
            raise WentWrongError(f"process {pid} is there still")
        self.seen_at(to)
        return operation

    def close(self) -> None:
        """The training as well: a supervisor that is killed leaves it running."""
        children: list[int] = []
        if self.alive:
            children = [int(pid) for pid in Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()]
        self.process.kill()
        for pid in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, 9)
        super().close()
