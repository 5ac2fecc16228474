"""Answers that hegmctl makes itself, from what the daemon said and from what it found out on its own.

Records like those of the protocol, so that JSON, its reference in docs/json.md and the tests treat both alike.
"""

from __future__ import annotations

from hegmd.protocol.messages import Caller, ErrorInfo, Limits, Proof
from hegmd.protocol.record import Record, field
from hegmd.protocol.snapshots import Check


class DaemonVersion(Record):
    """The daemon that answered."""

    version: str = field("version of hegmd")
    protocol: int = field("protocol version in force between the two")
    node: str = field("host name of the node")
    simulated: bool = field("whether the GPUs are simulated")
    capabilities: tuple[str, ...] = field("what the daemon can do beyond the basics")
    limits: Limits = field("limits on the connection")
    you: Caller = field("who the daemon takes the caller for")
    run: str = field("names this run of the daemon, in which events are counted", default="")


class VersionAnswer(Record):
    """The answer of `hegmctl version`."""

    version: str = field("version of hegmctl")
    protocols: tuple[int, ...] = field("protocol versions that hegmctl speaks")
    socket: str = field("where the daemon was looked for")
    daemon: DaemonVersion | None = field("the daemon; null when none answered")
    error: ErrorInfo | None = field("why none answered")


class HegmAnswer(Record):
    """The answer of `hegmctl hegm enable`, `disable` and `status`."""

    venv: str = field("the environment")
    is_enabled: bool = field("whether its Pythons take SIGUSR1 as HeGM's do")
    agent: str | None = field("the folder of the hegmd whose agent they load")


class RecoveryPlan(Record):
    """The answer of `hegmctl run --recover --dry-run`."""

    command: tuple[str, ...] = field("what would be started")
    interval_s: float | None = field("time between two snapshots; null for 100 times what the last one cost")
    truncates: bool = field("whether output files are cut back to their length at the snapshot")
    causes: tuple[str, ...] = field("ends of the command that are recovered from: signal, error")
    against: tuple[str, ...] = field("what would keep it from being protected, as far as its words tell")


class PingAnswer(Record):
    """The answer of `hegmctl ping`."""

    version: str = field("version of hegmd")
    node: str = field("host name of the node")
    socket: str = field("where it was asked")
    round_trips_s: tuple[float, ...] = field("how long each answer took")


class DoctorAnswer(Record):
    """The answer of `hegmctl doctor`."""

    checks: tuple[Check, ...] = field("in the order in which they were made; the first is about the daemon itself")
    ok: int = field("how many are ok")
    warn: int = field("how many are warnings")
    fail: int = field("how many failed")
    skip: int = field("how many do not apply here")


class AttachedProcess(Record):
    """A process that has the agent since `hegmctl attach`."""

    pid: int = field("process id")
    python_version: str = field("version of its Python, such as 3.14")
    framework_version: str = field("version of its PyTorch")
    job: str | None = field("the name of its job; null if the daemon has not heard of its agent in time")
    unknown: tuple[str, ...] = field("what the agent cannot know, which blocks restarts but no move")


class AttachAnswer(Record):
    """The answer of `hegmctl attach`."""

    processes: tuple[AttachedProcess, ...] = field("in the order in which they were named; the ranks of a launcher")
    socket: str = field("where their agents connect to")


class NcclStep(Record):
    """One move of the throwaway job."""

    step: str = field("what was done")
    took_s: float = field("until the job trained on, or was suspended")
    downtime_s: float | None = field("how long the job did not train for it", default=None)


class NcclAnswer(Record):
    """The answer of `hegmctl doctor --nccl`."""

    gpus: tuple[str, ...] = field("the GPUs of the throwaway job")
    python: str = field("the Python that it ran with")
    proof: Proof = field("the verdict, as the daemon keeps it")
    steps: tuple[NcclStep, ...] = field("the moves that succeeded")
    losses: int = field("losses that were compared and are equal")
