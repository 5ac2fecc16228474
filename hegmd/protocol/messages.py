"""Every message of the protocol: what can be asked, what comes back, and what may come in between.

Glossary, one word per thing on the wire, in logs and in the CLI:
- node: the machine that hegmd runs on. GPU: a card or what the driver shows as one; `gpu0` is its id.
- process: anything with a hand on a GPU. worker: a process with our agent in it. agent: our thread in there.
- hold: memory that is kept for a process on a GPU. VRAM: video memory.
- request, reply, event, frame, descriptor: as in docs/protocol.md, which is generated from this module.

A request class carries its wire tag (`op`), the record that answers it, the record that may come in between, and
whether it changes state, in which case the daemon keeps an audit record of it. To add a message: add a class here, or
in `moves`, `jobs`, `sharing`, `agents` or `supervision`, whose messages are gathered here: all are in this one place.
"""

from __future__ import annotations

from .agents import (
    AgentAttend,
    AgentDismissed,
    AgentLend,
    AgentReclaim,
    AgentReport,
    Communicators,
    CudaDevice,
    CudaFacts,
    LeftAlone,
    Lent,
    Noted,
    Order,
    Place,
    Reclaimed,
)
from .jobs import InspectJob, Job, JobRegistered, JobReply, Jobs, JobsReply, RegisterJob, WaitForJob
from .moves import (
    Adopt,
    CancelOperation,
    Checkpoint,
    Drain,
    Drained,
    DropOrphan,
    Dropped,
    Handoff,
    Migrate,
    OperationReply,
    Operations,
    OperationsReply,
    Orphans,
    OrphansReply,
    Quiesce,
    Restore,
    Resume,
    Story,
    StoryReply,
    Suspend,
    Swap,
)
from .proofs import BeginProof, Combination, EndProof, Proof
from .record import Record, field
from .recovery import (
    DropRecovery,
    HoldSlot,
    JobRecovery,
    Recovery,
    RecoveryAttempt,
    RecoveryDropped,
    RecoveryReply,
    ReportRecovery,
    SlotHeld,
    SlotMemory,
    Snapshot,
)
from .requests import REQUESTS, Request
from .sharing import (
    JobPlaced,
    Lease,
    MakeRoom,
    PlaceJob,
    PlaceProgress,
    Queue,
    QueuedJob,
    QueueReply,
    Release,
    Released,
    RoomProgress,
    RoomReply,
    RoomStep,
    SetPriority,
    WaitForRoom,
)
from .snapshots import Check, Event, Gpu, GpuProcess, Vendor
from .supervision import RecoveryWish, Supervise, SuperviseReport, SupervisionEnded, SupervisorOrder

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

# What is gathered here from other modules; what is defined here needs no list.
__all__ = [
    "Adopt",
    "AgentAttend",
    "AgentDismissed",
    "AgentLend",
    "AgentReclaim",
    "AgentReport",
    "BeginProof",
    "CancelOperation",
    "Checkpoint",
    "Combination",
    "Communicators",
    "CudaDevice",
    "CudaFacts",
    "Drain",
    "Drained",
    "DropOrphan",
    "DropRecovery",
    "Dropped",
    "EndProof",
    "Handoff",
    "HoldSlot",
    "InspectJob",
    "Job",
    "JobPlaced",
    "JobRecovery",
    "JobRegistered",
    "JobReply",
    "Jobs",
    "JobsReply",
    "Lease",
    "LeftAlone",
    "Lent",
    "MakeRoom",
    "Migrate",
    "Noted",
    "OperationReply",
    "Operations",
    "OperationsReply",
    "Order",
    "Orphans",
    "OrphansReply",
    "Place",
    "PlaceJob",
    "PlaceProgress",
    "Proof",
    "Queue",
    "QueueReply",
    "QueuedJob",
    "Quiesce",
    "REQUESTS",
    "Reclaimed",
    "Recovery",
    "RecoveryAttempt",
    "RecoveryDropped",
    "RecoveryReply",
    "RecoveryWish",
    "RegisterJob",
    "Release",
    "Released",
    "ReportRecovery",
    "Request",
    "Restore",
    "Resume",
    "RoomProgress",
    "RoomReply",
    "RoomStep",
    "SetPriority",
    "SlotHeld",
    "SlotMemory",
    "Snapshot",
    "Story",
    "StoryReply",
    "Supervise",
    "SuperviseReport",
    "SupervisionEnded",
    "SupervisorOrder",
    "Suspend",
    "Swap",
    "WaitForJob",
    "WaitForRoom",
]

PROTOCOL_VERSION = 2
SUPPORTED_VERSIONS = (2,)
# The envelope of hello itself never changes: a caller of any release can be told that its version is not spoken.
HELLO_VERSION = 1


class ErrorInfo(Record):
    """Why a request failed: what a person reads, and what a program decides by."""

    code: str = field("one of the codes in the table of errors; an unknown one is a failure all the same")
    message: str = field("what failed, on which process or device, with numbers")
    hint: str = field("the next step")
    facts: Mapping[str, object] = field("plain values for programs", default={})


class Caller(Record):
    """Who the daemon takes the caller for, by the socket's own credentials."""

    uid: int = field("user id")
    gid: int = field("primary group id")
    pid: int = field("process id at the time of connecting")
    may_act_on_all: bool = field("whether it may act on every process, or on its own user's only")


class Limits(Record):
    """What the daemon allows on this connection."""

    frame_bytes: int = field("largest frame that the daemon accepts")
    requests_in_flight: int = field("requests that may be unanswered at a time")


class Welcome(Record):
    """The connection is accepted."""

    version: int = field("protocol version in force from here on")
    daemon_version: str = field("version of hegmd")
    node: str = field("host name of the node")
    simulated: bool = field("whether the GPUs are simulated")
    capabilities: tuple[str, ...] = field("what this daemon can do beyond the basics; unknown names are ignored")
    limits: Limits = field("limits on this connection")
    you: Caller = field("who the daemon takes the caller for")
    run: str = field(
        "names this run of the daemon: another one after each start, in which events are counted anew", default=""
    )


class Hello(Request, op="hello", reply=Welcome):
    """The first request on every connection: who calls, and which protocol versions it speaks."""

    versions: tuple[int, ...] = field("protocol versions that the caller speaks")
    name: str = field("program that calls")
    program_version: str = field("its version", default="")
    role: str = field("client, or agent for the one inside a worker", default="client")


class Pong(Record):
    """The daemon is there."""


class Ping(Request, op="ping", reply=Pong):
    """Ask for nothing: shows that the daemon answers, and how fast."""


class CancelReply(Record):
    """Whether there was something to cancel."""

    found: bool = field("false when that request was answered already or never made")


class Cancel(Request, op="cancel", reply=CancelReply):
    """Cancel a request of this connection that is not answered yet. It is then answered with the error `cancelled`."""

    request: int = field("id of the request to cancel")


class GpusReply(Record):
    """The node's GPUs at one moment."""

    taken_utc: float = field("when, in seconds since 1970")
    gpus: tuple[Gpu, ...] = field("ordered by id")
    vendors: tuple[Vendor, ...] = field("how each vendor's library does")


class Gpus(Request, op="gpus", reply=GpusReply):
    """The node's GPUs."""


class ProcessesReply(Record):
    """The processes on the node's GPUs at one moment."""

    taken_utc: float = field("when, in seconds since 1970")
    processes: tuple[GpuProcess, ...] = field("ordered by pid")
    vendors: tuple[Vendor, ...] = field("how each vendor's library does")


class Processes(Request, op="processes", reply=ProcessesReply):
    """The processes on the node's GPUs. A pid that is asked for and not on any GPU is the error `not-found`."""

    pids: tuple[int | str, ...] = field("only these, or those of these jobs; empty for all", default=())
    gpus: tuple[str, ...] = field("only those on these GPUs; empty for all", default=())
    ways: bool = field(
        "whether the agents of the caller's processes are asked first what they hold now, within a second; without it "
        "their ways are judged by what they said last",
        default=False,
    )


class EventsReply(Record):
    """The end of a stream of events."""

    next_seq: int = field("pass this number as `since` to continue without a gap")


class Events(Request, op="events", reply=EventsReply, event=Event):
    """Events that are remembered and, with `follow`, those to come until the request is cancelled.

    Each comes as an event of this request. A consumer that is too slow, or asks for more than is remembered, is told so
    by an event of kind `events.missed`; so is one whose `since` was counted in another run of the daemon, and then all
    that this one remembers follows. A kind that there is not is the error `bad-request`.
    """

    since: int = field("only events with this number or a higher one; 0 for all that are remembered", default=0)
    follow: bool = field("whether to stay and wait for more", default=False)
    kinds: tuple[str, ...] = field("only these kinds; `gpu` means all that begin with `gpu.`", default=())
    run: str | None = field("the run that `since` was counted in, from `welcome`; nil for this one", default=None)


class DoctorReply(Record):
    """The result of all checks."""

    checks: tuple[Check, ...] = field("in the order in which they were made")


class Doctor(Request, op="doctor", reply=DoctorReply, event=Check):
    """Check the node, with the daemon's own rights. Each check is also sent as an event when it is done."""


class Setting(Record):
    """One setting with its current value."""

    key: str = field("section.key")
    value: object = field("the value; unknown keys and bad values never get this far")
    source: str = field("default, file, environment or argument")
    doc: str = field("what it does")


class ConfigReply(Record):
    """The configuration in force."""

    path: str | None = field("the file it was read from; None when there is none")
    settings: tuple[Setting, ...] = field("every setting")


class ShowConfig(Request, op="config", reply=ConfigReply):
    """The configuration in force."""


class ReloadReply(Record):
    """What a reload changed."""

    changed: tuple[str, ...] = field("keys that have another value now")
    after_restart: tuple[str, ...] = field("keys that differ in the file but take a restart")


class Reload(Request, op="reload", reply=ReloadReply, changes_state=True):
    """Read the configuration again. A bad one is refused whole and the one before stays."""


class MetricsReply(Record):
    """Prometheus metrics."""

    text: str = field("text exposition format 0.0.4")


class Metrics(Request, op="metrics", reply=MetricsReply):
    """Metrics of node and daemon."""


class HoldReply(Record):
    """Simulated video memory is held for the calling process until this connection ends."""

    gpu: str = field("where")
    vram_bytes: int = field("what this connection holds there now")


class SimulateHold(Request, op="simulate.hold", reply=HoldReply, changes_state=True, capability="simulate"):
    """Hold video memory on a simulated GPU for the calling process, as a driver would, until the connection ends."""

    gpu: str = field("id of the GPU")
    vram_bytes: int = field("how much this connection holds there from now on; 0 gives all back")


class FaultReply(Record):
    """The fault is in force."""

    faults: Mapping[str, str] = field("every fault in force, by GPU id, or `vendor` for the whole library")


class SimulateFault(Request, op="simulate.fault", reply=FaultReply, changes_state=True, capability="simulate"):
    """Make a simulated GPU, or the whole simulated vendor library, fail, or mend it again."""

    target: str = field("id of a GPU, or `vendor` for the whole library")
    fault: str = field("lost, error, hang, unknown-memory, ecc, xid, xid79, or none to mend it")
