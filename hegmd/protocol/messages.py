"""All messages of the protocol: requests, replies and events.

Glossary, one word per thing on the wire, in logs and in the CLI:

- node: the machine that hegmd runs on. GPU: a card, or what the driver shows as one; `gpu0` is its id.
- process: a process that uses a GPU. worker: a process with our agent. agent: our thread in it.
- hold: simulated GPU memory that a process keeps. VRAM: GPU memory.
- request, reply, event, frame, descriptor: see docs/protocol.md, which is generated from this module.

A request class carries its wire tag (`op`), the record of its reply, the record of its events, and whether it changes
state: the daemon keeps an audit record of those that do. To add a message, add a class here or in one of the modules
whose messages are imported below.
"""

from __future__ import annotations

from .agents import *
from .jobs import *
from .moves import *
from .proofs import *
from .record import Record, field
from .recovery import *
from .requests import *
from .requests import Request
from .sharing import *
from .snapshots import Check, Event, Gpu, GpuProcess, Vendor
from .supervision import *

TYPE_CHECKING = False  # pyright: ignore[reportConstantRedefinition] - the modules above define it too
if TYPE_CHECKING:
    from collections.abc import Mapping

PROTOCOL_VERSION = 2
SUPPORTED_VERSIONS = (2,)
# The envelope of `hello` never changes, so the daemon can tell any release that it does not speak its version.
HELLO_VERSION = 1


class ErrorInfo(Record):
    """Why a request failed: for people, and for programs."""

    code: str = field("one of the [error codes](#error-codes), or a later one")
    message: str = field("what failed, on which process or device, with numbers")
    hint: str = field("the next step")
    facts: Mapping[str, object] = field("plain values for programs", default={})


class Caller(Record):
    """The caller's identity, from the credentials of the socket."""

    uid: int = field("user id")
    gid: int = field("primary group id")
    pid: int = field("process id at the time of connecting")
    may_act_on_all: bool = field("the caller may act on other users' processes")


class Limits(Record):
    """The limits of this connection."""

    frame_bytes: int = field("largest frame that the daemon accepts")
    requests_in_flight: int = field("most requests without an answer")


class Welcome(Record):
    """The connection is accepted."""

    version: int = field("protocol version from here on")
    daemon_version: str = field("version of hegmd")
    node: str = field("host name of the node")
    simulated: bool = field("the GPUs are simulated")
    capabilities: tuple[str, ...] = field("optional abilities of the daemon; ignore unknown names")
    limits: Limits = field("limits on this connection")
    you: Caller = field("the caller's identity")
    run: str = field("id of this start of the daemon", default="")


class Hello(Request, op="hello", reply=Welcome):
    """The first request on every connection: names the caller and the protocol versions that it speaks."""

    versions: tuple[int, ...] = field("protocol versions that the caller speaks")
    name: str = field("the caller's program")
    program_version: str = field("version of the program", default="")
    role: str = field("client, or agent for an agent in a worker", default="client")


class Pong(Record):
    """The daemon answers."""


class Ping(Request, op="ping", reply=Pong):
    """Check that the daemon answers, and how fast."""


class CancelReply(Record):
    """Whether there was a request to cancel."""

    found: bool = field("false if the request was already answered, or never made")


class Cancel(Request, op="cancel", reply=CancelReply):
    """Cancel an unanswered request of this connection. The daemon then answers it with the error `cancelled`."""

    request: int = field("id of the request to cancel")


class GpusReply(Record):
    """The node's GPUs at one moment."""

    taken_utc: float = field("when the reply was made")
    gpus: tuple[Gpu, ...] = field("ordered by id")
    vendors: tuple[Vendor, ...] = field("state of each vendor's library")


class Gpus(Request, op="gpus", reply=GpusReply):
    """List the node's GPUs."""


class ProcessesReply(Record):
    """The processes on the node's GPUs at one moment."""

    taken_utc: float = field("when the reply was made")
    processes: tuple[GpuProcess, ...] = field("ordered by pid")
    vendors: tuple[Vendor, ...] = field("state of each vendor's library")


class Processes(Request, op="processes", reply=ProcessesReply):
    """List the processes on the node's GPUs. A requested pid that is on no GPU is the error `not-found`."""

    pids: tuple[int | str, ...] = field("only these pids or jobs", default=())
    gpus: tuple[str, ...] = field("only those on these GPUs", default=())
    ways: bool = field("first ask the caller's agents for their state, for at most a second", default=False)


class EventsReply(Record):
    """The end of a stream of events."""

    next_seq: int = field("the `since` that continues without a gap")


class Events(Request, op="events", reply=EventsReply, event=Event):
    """Return the remembered events and, with `follow`, new ones until the request is cancelled.

    Each one is an event of this request. `events.missed` says that some are missing: the consumer is too slow, or
    `since` is older than the memory of the daemon or from another run. Then all events of this run follow. The
    message of an event about another user's job is hidden: it may quote an error of the script.
    """

    since: int = field("lowest event number", default=0)
    follow: bool = field("wait for new events", default=False)
    kinds: tuple[str, ...] = field("only these kinds; `gpu` means all `gpu.…` kinds", default=())
    run: str | None = field("the daemon's `run` that `since` is from; nil: the current one", default=None)


class DoctorReply(Record):
    """The result of all checks."""

    checks: tuple[Check, ...] = field("in the order in which they were made")


class Doctor(Request, op="doctor", reply=DoctorReply, event=Check):
    """Check the node with the daemon's rights. Each check is also sent as an event once it is made."""


class Setting(Record):
    """One setting with its current value."""

    key: str = field("section.key")
    value: object = field("its current value")
    source: str = field("default, file, environment or argument")
    doc: str = field("its meaning")


class ConfigReply(Record):
    """The current configuration."""

    path: str | None = field("the file that it was read from")
    settings: tuple[Setting, ...] = field("all settings")


class ShowConfig(Request, op="config", reply=ConfigReply):
    """Show the current configuration."""


class ReloadReply(Record):
    """The changes of a reload."""

    changed: tuple[str, ...] = field("keys whose value has changed")
    after_restart: tuple[str, ...] = field("changed keys that need a restart of the daemon")


class Reload(Request, op="reload", reply=ReloadReply, changes_state=True):
    """Read the configuration again. An invalid one is refused as a whole, and the current one stays."""


class MetricsReply(Record):
    """Prometheus metrics."""

    text: str = field("text exposition format 0.0.4")


class Metrics(Request, op="metrics", reply=MetricsReply):
    """Return the metrics of the node and the daemon."""


class HoldReply(Record):
    """The calling process holds simulated GPU memory until this connection ends."""

    gpu: str = field("id of the GPU")
    vram_bytes: int = field("bytes that this connection holds")


class SimulateHold(Request, op="simulate.hold", reply=HoldReply, changes_state=True, capability="simulate"):
    """Hold memory of a simulated GPU for the calling process until the connection ends, as a driver would."""

    gpu: str = field("id of the GPU")
    vram_bytes: int = field("bytes to hold from now on; 0 releases all")


class FaultReply(Record):
    """The simulated faults."""

    faults: Mapping[str, str] = field("current faults, by GPU id or `vendor`")


class SimulateFault(Request, op="simulate.fault", reply=FaultReply, changes_state=True, capability="simulate"):
    """Make a simulated GPU or the simulated vendor library fail, or end its fault."""

    target: str = field("id of a GPU, or `vendor` for the library")
    fault: str = field("lost, error, hang, unknown-memory, ecc, xid or xid79; none ends the fault")
