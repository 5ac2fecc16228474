"""Answers that hegmctl makes itself, from the daemon's answers and from what it found out.

They are records like those of the protocol, so that JSON, its reference in docs/json.md and the tests treat both alike.
"""

from __future__ import annotations

from hegmd.protocol.messages import Caller, ErrorInfo, Limits, Proof
from hegmd.protocol.record import Record, field
from hegmd.protocol.snapshots import Check


class DaemonVersion(Record):
    """The daemon that answered."""

    version: str = field("version of hegmd")
    protocol: int = field("protocol version in use")
    node: str = field("host name of the node")
    simulated: bool = field("the GPUs are simulated")
    capabilities: tuple[str, ...] = field("optional abilities of the daemon")
    limits: Limits = field("limits on the connection")
    you: Caller = field("the caller's identity")
    run: str = field("id of this start of the daemon", default="")


class VersionAnswer(Record):
    """The answer of `hegmctl version`."""

    version: str = field("version of hegmctl")
    protocols: tuple[int, ...] = field("protocol versions that hegmctl speaks")
    socket: str = field("path of the daemon's socket")
    daemon: DaemonVersion | None = field("the daemon, if one answered")
    error: ErrorInfo | None = field("why none answered")


class HegmAnswer(Record):
    """The answer of `hegmctl hegm enable`, `disable` and `status`."""

    venv: str = field("the environment")
    is_enabled: bool = field("its Pythons handle SIGUSR1 as HeGM's do")
    agent: str | None = field("the directory of the hegmd whose agent they load")


class RecoveryPlan(Record):
    """The answer of `hegmctl run --recover --dry-run`."""

    command: tuple[str, ...] = field("what would be started")
    interval_s: float | None = field("time between two snapshots; null: 100 times what one costs")
    truncates: bool = field("output files are cut back to their length at the snapshot")
    causes: tuple[str, ...] = field("ends that are recovered from: signal, error")
    against: tuple[str, ...] = field("what prevents its protection")


class PingAnswer(Record):
    """The answer of `hegmctl ping`."""

    version: str = field("version of hegmd")
    node: str = field("host name of the node")
    socket: str = field("path of the daemon's socket")
    round_trips_s: tuple[float, ...] = field("how long each answer took")


class DoctorAnswer(Record):
    """The answer of `hegmctl doctor`."""

    checks: tuple[Check, ...] = field("in order, the daemon's first")
    ok: int = field("number of checks that are ok")
    warn: int = field("number of warnings")
    fail: int = field("number of failures")
    skip: int = field("number of checks that do not apply here")


class AttachedProcess(Record):
    """A process with the agent of `hegmctl attach`."""

    pid: int = field("process id")
    python_version: str = field("version of its Python, such as 3.14")
    framework_version: str = field("version of its PyTorch")
    job: str | None = field("name of its job; null: the agent has not reached the daemon yet")
    unknown: tuple[str, ...] = field("unknown facts that prevent restarts but not migrations")


class AttachAnswer(Record):
    """The answer of `hegmctl attach`."""

    processes: tuple[AttachedProcess, ...] = field("in the order of the arguments; a launcher's ranks")
    socket: str = field("the socket that their agents connect to")


class NcclStep(Record):
    """One operation of the throwaway job."""

    step: str = field("the operation")
    took_s: float = field("until the job trained again, or was suspended")
    downtime_s: float | None = field("how long the job did not train", default=None)


class NcclAnswer(Record):
    """The answer of `hegmctl doctor --nccl`."""

    gpus: tuple[str, ...] = field("the GPUs of the throwaway job")
    python: str = field("the Python that ran it")
    proof: Proof = field("the verdict that the daemon stores")
    steps: tuple[NcclStep, ...] = field("the operations that succeeded")
    losses: int = field("number of compared losses, all equal")
