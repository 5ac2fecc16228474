"""The messages between the daemon and an agent: the agent's offer, the daemon's orders and the agent's reports.

Other code imports these names from `messages`, which gathers all messages.
"""

from __future__ import annotations

import struct

from .operations import PeriodicImages
from .record import BadValue, Record, field
from .requests import Request

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    #: The three numbers of a Place, in the order of its fields.
    Spot = tuple[int, int, int]
    #: The four numbers of a span: the storage, the offset in it, the size, and the offset in the descriptor.
    Span = tuple[int, int, int, int]

_SPOT, _SPAN = struct.Struct("<QQQ"), struct.Struct("<QQQQ")
#: Replaces a handle's number: CUDA IPC cannot export the storage, so its process copies it.
NO_HANDLE = (1 << 64) - 1
# The start of a name in `begin_anew` of what was not searched, so that its changes are unknown.
UNSEEN = "not searched: "


def not_connected(pid: int) -> str:
    """Return the message for a process whose agent is not connected."""
    return f"the agent of process {pid} is not connected"


class Order(Record):
    """An order of the daemon to an agent. The agent answers each order with `agent.report`, except `leave`.

    | `do` | what the agent does |
    |---|---|
    | `survey` | It counts its storages and communicator groups. |
    | `park` | It parks the training thread at a boundary. |
    | `withdraw` | It withdraws a pending order, or lets a parked training thread continue. |
    | `offload` | It copies its storages to the memory that comes along, and frees them. |
    | `reload` | It allocates its storages again and copies them back. |
    | `export` | It reports the CUDA IPC handles of its storages, for the daemon to copy. |
    | `free` | It frees the exported storages. They are offloaded from then on. |
    | `make` | It allocates offloaded storages again, and reports their handles. |
    | `copy` | It copies the storages that CUDA IPC cannot export. |
    | `filled` | It notes which storages have their bytes again. After the last one nothing is offloaded. |
    | `part` | It removes peer access between its GPUs. The next `release` or `withdraw` restores it. |
    | `rest` | It stays parked, however long there is no daemon. |
    | `entrust` | It closes its own descriptor of its bytes. `reload` brings another one. |
    | `aside` | It rests, entrusts its bytes and disconnects, so that an image of its process can be made. |
    | `release` | It lets the training thread continue, and reports the next boundary. |
    | `weigh` | It reports what a restart would save. |
    | `beforehand` | It reports which modules a prestarted process can import. |
    | `save` | It writes its state to the descriptor that comes along. |
    | `leave` | It exits. |
    | `snapshot` | It parks, writes its state into the slot that comes along, and continues. |
    | `disconnect` | It disconnects its communicator groups. |
    | `reconnect` | It connects them again. |
    | `count` | It reports its boundary at once, from its own thread. |
    | `stacks` | It reports where its threads are. |
    | `dismiss` | It closes the connection. |
    """

    order: int = field("number of the order, counted by the daemon on this connection")
    do: str = field("one of the orders in the table above")
    at: int | None = field(
        "park, snapshot: the boundary to park at, or the next one after it; nil for the next", default=None
    )
    limit_s: float | None = field(
        "park, snapshot, release: the limit, nil for none; disconnect, reconnect: the limit, nil for 60 s; aside: "
        "when the agent reconnects by itself",
        default=None,
    )
    exact: bool = field(
        "park, snapshot: only at the boundary `at`; fails at once, without parking, if it was passed", default=False
    )
    leaving: bool = field(
        "park: only where a restarted script can continue: at the boundary, or soon after it at the head of a "
        "training loop",
        default=False,
    )
    max_park_s: float | None = field(
        "park, snapshot: how long one attempt may keep the training thread parked while other threads of the process "
        "are busy. The training then continues until the next attempt. nil for half a second",
        default=None,
    )
    size_bytes: int | None = field(
        "make: at most this many bytes of storages, but at least one storage; nil for all", default=None
    )
    first: int | None = field("filled: the first storage that has its bytes again, counted from 0", default=None)
    count: int | None = field("filled: the number of storages from there on that have their bytes again", default=None)
    partly: bool = field(
        "export, make: whether the places may include storages that CUDA IPC cannot export, without a handle",
        default=False,
    )
    direction: str | None = field("copy: `out` into the descriptor, or `in` from there", default=None)
    spans: bytes | None = field(
        "copy: the spans that the process copies itself. Each is four numbers of 8 bytes, little-endian: storage, "
        "offset in it, size, offset in the descriptor",
        default=None,
    )
    path: str | None = field("aside: the file that tells the agent when and where to reconnect", default=None)
    restored: bool = field(
        "release: whether the driver has restored the storages, so that CUDA IPC cannot export them from now on",
        default=False,
    )
    by_driver: bool = field(
        "release: whether the driver has restored the process, so that the GPU interrupts no kernel of it from now on",
        default=False,
    )
    abort: bool = field(
        "disconnect: abort communicators that NCCL could suspend, because an image cannot contain them; release: "
        "continue without the communicators, because a rank of them has ended",
        default=False,
    )
    generation: int | None = field(
        "reconnect: a number that is the same for all ranks, and larger than in any earlier reconnect of the job; "
        "snapshot: the snapshot's number, the same for all ranks",
        default=None,
    )


class AgentDismissed(Record):
    """The daemon sends no further orders on this connection."""


class Communicators(Record):
    """The communicator groups of a process, and how the agent disconnects them before a driver checkpoint."""

    mechanism: str = field(
        "suspend: NCCL keeps the communicators and releases their GPU memory; replace: the agent aborts each backend "
        "and puts a new one in its place; none: no group has other ranks"
    )
    groups: int = field("number of groups that have other ranks", default=0)
    backends: tuple[str, ...] = field("their backends, such as nccl and gloo", default=())
    library: str | None = field("version of the NCCL library in the process; nil without one", default=None)
    nvls: bool = field("whether NCCL may use NVLink multicast (NVLS) in this process", default=False)
    pending: int = field("number of groups with unfinished collectives", default=0)
    uncovered: tuple[str, ...] = field(
        "groups that the agent cannot disconnect, a sentence each, with the reason", default=()
    )

    @property
    def uses_nccl(self) -> bool:
        return any("nccl" in backend for backend in self.backends)


class AgentAttend(Request, op="agent.attend", reply=AgentDismissed, event=Order):
    """An agent offers its process. The daemon's orders come as events until one side closes the connection.

    The kernel's credentials of the connection identify the process; the fields below only describe it. `offload`,
    `reload` and `copy` come with one descriptor, the memory to copy to or from.

    After `aside` the agent watches the file `path` and stays disconnected while it is empty. It then connects to the
    socket that the file names, or to the usual one once the file is gone. It believes only a file of root's or of its
    own user's.

    The daemon copies with `export`, `free`, `make` and `filled`. Each of them can come twice, and changes nothing the
    second time. A process on several GPUs has to `part` them before its checkpoint.

    The driver cannot checkpoint communicators. Once all ranks are parked, each one gets `disconnect`, and after the
    restore `reconnect`. Both orders wait for the other ranks, and change nothing if the groups are already in the
    wanted state. `reconnect` also reverses a `disconnect` that succeeded on some of the ranks only.

    A process that is started from a saved state restores it at its first boundary, attends again, and names in
    `restarted` the operation that the state is from.

    `snapshot` parks the training as for `save`, writes the slot and sets its record. Without a descriptor, or with one
    that is too small, the order fails and reports the size of the state. Any other order except `count`, `stacks` and
    `survey` cancels a snapshot that has not begun to write.
    """

    token: str = field("identifies this agent across connections; the agent makes it: 32 hexadecimal digits")
    framework: str | None = field("the training framework, such as torch; nil if none is loaded yet", default=None)
    framework_version: str | None = field("version of the framework", default=None)
    python_version: str = field("version of the interpreter")
    job: str | None = field("the name given to its `hegmctl run`; nil if none", default=None)
    run: str | None = field("the id of its `hegmctl run`, the same in all its processes", default=None)
    rank: int | None = field("its rank, in a distributed job", default=None)
    world_size: int | None = field("how many ranks the job has", default=None)
    gpu: str | None = field(
        "the GPU that the process was started for or reports to be on; nil if the daemon is to choose one", default=None
    )
    size_bytes: int = field("bytes of its storages that the agent can offload, as far as it knows now", default=0)
    communicators: Communicators | None = field(
        "its groups with other ranks in the same survey as `size_bytes`; nil without any, or without a survey",
        default=None,
    )
    boundary: int = field("number of batch boundaries that it has passed")
    parked: bool = field(
        "whether the training thread is parked now, such as after a restart of the daemon", default=False
    )
    held_bytes: int = field("bytes of its storages that are offloaded now", default=0)
    images: PeriodicImages | None = field("images to make of its job at intervals", default=None)
    revived: bool = field("whether the process was restored from an image since its last `aside`", default=False)
    driver_restored: bool = field("whether the driver has ever restored the process", default=False)
    entrusted: bool = field(
        "whether only the daemon has the offloaded bytes, so that it has to send them back", default=False
    )
    restarted: str | None = field(
        "the operation whose state the process was started from and has restored; nil for any other process",
        default=None,
    )
    mark: str | None = field(
        "the nonce of the memory that the process copied those bytes to, in hexadecimal: the memory stores it from "
        "byte 9 on. Empty if the daemon copied them or none are offloaded; nil from an agent that does not report it",
        default=None,
    )
    unknown: tuple[str, ...] | None = field(
        "for an agent that `hegmctl attach` loaded into a running process: what it cannot know, one phrase each; nil "
        "for an agent that started with its process",
        default=None,
    )


class Lent(Record):
    """The storages of the job are offloaded from its GPUs."""

    operation: str = field("id of the operation that suspends the job")


class AgentLend(Request, op="agent.lend", reply=Lent, changes_state=True):
    """Suspend the job of this agent's process and keep its CUDA contexts, because its script lends its GPU memory.

    Meanwhile the training thread waits at the start of a `hegm.released()` block, and counts as parked. After the reply
    it runs the block. The other ranks of the job reach the same block and send the same request. The processes copy
    their bytes themselves, so that they can reload them without a daemon. After an error nothing is lent. A BUSY error
    can be retried.
    """


class Reclaimed(Record):
    """The storages of the job are on its GPUs again, and it has trained its next batch or left its block."""


class AgentReclaim(Request, op="agent.reclaim", reply=Reclaimed, changes_state=True):
    """Resume the job that `agent.lend` suspended, because a block has ended.

    NOT_FOUND: no operation lends the job's memory. After any other error, such as a lack of GPU memory, the job is
    still suspended and the request can be retried. In each process, orders that reload wait for the end of the block.
    """


class CudaDevice(Record):
    """The agent's storages on one of its GPUs."""

    uuid: str = field("the GPU that they are on now, as the driver reports it")
    size_bytes: int = field("bytes of the storages that the agent can offload")
    padding_bytes: int = field("bytes that the allocator takes beyond these", default=0)
    reserved_bytes: int = field("bytes that the allocator has from the driver, cached memory included", default=0)
    number: int | None = field("its number in the process, such as 1 of `cuda:1`; nil: unknown", default=None)


class CudaFacts(Record):
    """An agent's facts about CUDA in its process, and the reasons that prevent a checkpoint."""

    gpus: tuple[str, ...] = field("UUIDs of the GPUs that its storages are on, as `nvidia-smi -L` lists them")
    allocator: str = field("native or cudaMallocAsync")
    expandable: bool = field(
        "whether CUDA IPC cannot export its memory: it is in expandable segments, or the driver has restored it"
    )
    own_bytes: int = field(
        "bytes of storages that the process copies itself. CUDA IPC cannot export them, or could not after the "
        "restore, because they share memory with what stays in the process",
        default=0,
    )
    reserved_bytes: int = field("bytes that the allocator has from the driver, cached memory included", default=0)
    largest_bytes: int = field("bytes of the largest storage that the agent can offload", default=0)
    stacks_bytes: int = field(
        "bytes that its contexts keep for thread stacks, except while storages are offloaded", default=0
    )
    padding_bytes: int = field("bytes that the allocator takes beyond its storages", default=0)
    devices: tuple[CudaDevice, ...] = field(
        "its storages on each of its GPUs; empty if the driver did not report which GPUs these are now", default=()
    )
    hazards: tuple[str, ...] = field(
        "graphs: captured CUDA graphs need the addresses to stay; nccl-p2p: live communicators may use peer-to-peer; "
        "ipc-shared: memory shared with another process; peer-mapped: memory mapped for other GPUs; managed memory",
        default=(),
    )


def packed(spots: Sequence[Spot] | Sequence[Span]) -> bytes:
    """Pack places or spans for a message. The job is parked while the message is made and read.

    A thousand records take about 20 ms each in the agent's msgpack, which is in Python, and in the daemon's checks.
    """
    numbers = [number for spot in spots for number in spot]
    return struct.pack(f"<{len(numbers)}Q", *numbers)


def unpacked(data: bytes) -> list[Spot]:
    """Return the places that `packed` was given. Raises BadValue for other data."""
    if len(data) % _SPOT.size:
        raise BadValue("places", f"{len(data)} bytes are no whole places of {_SPOT.size}")
    return list(_SPOT.iter_unpack(data))


def unpacked_spans(data: bytes) -> list[Span]:
    """Return the spans that `packed` was given. Raises BadValue for other data."""
    if len(data) % _SPAN.size:
        raise BadValue("spans", f"{len(data)} bytes are no whole spans of {_SPAN.size}")
    return list(_SPAN.iter_unpack(data))


class LeftAlone(Record):
    """Storages that the agent does not offload, and the reason."""

    why: str = field("the reason, one sentence")
    storages: int = field("number of storages")
    size_bytes: int = field("their bytes")


class Noted(Record):
    """The daemon has received the report."""


class AgentReport(Request, op="agent.report", reply=Noted):
    """The result of an order."""

    order: int = field("number of the order")
    result: str = field("done, failed, or progress while it is under way")
    message: str = field("failed: what failed, and why", default="")
    hint: str = field("failed: the next step", default="")
    boundary: int | None = field("number of batch boundaries that the process has passed", default=None)
    parked_s: float | None = field(
        "park, withdraw, snapshot: how long the order has kept the training thread parked so far, in all attempts",
        default=None,
    )
    copied_s: float | None = field(
        "snapshot: how long the state was copied to the host while the training continued; nil if it was paused",
        default=None,
    )
    parked: bool | None = field("survey: whether the training thread is parked now", default=None)
    held_bytes: int | None = field("survey: bytes of its storages that are offloaded now", default=None)
    storages: int | None = field("survey, offload, reload: number of storages", default=None)
    size_bytes: int | None = field("survey, offload, reload: bytes; with `progress`, so far", default=None)
    left_alone: tuple[LeftAlone, ...] = field("survey: storages that other carriers have to move", default=())
    state_bytes: int | None = field(
        "weigh: bytes of the state that a restart would carry; failed snapshot: the same, if the slot is too small",
        default=None,
    )
    refusals: tuple[str, ...] = field(
        "weigh, failed snapshot: what prevents a restart, or is not kept by one; failed park: what prevents it at "
        "every boundary",
        default=(),
    )
    begin_anew: tuple[str, ...] | None = field(
        "weigh, snapshot: variables of the script that a restart does not keep, at most 16; nil if unknown",
        default=None,
    )
    imports: tuple[str, ...] = field(
        "weigh, beforehand: modules of PyTorch that a prestarted process can import; none if the script could notice "
        "it",
        default=(),
    )
    path: tuple[str, ...] = field("with `imports`, the directories in which its Python looks for modules", default=())
    cuda: CudaFacts | None = field("survey: its use of CUDA; nil if it does not use CUDA", default=None)
    communicators: Communicators | None = field(
        "survey, disconnect, reconnect: its communicator groups; nil if the process has none", default=None
    )
    handles: tuple[bytes, ...] = field("export, make: CUDA IPC handles, 64 bytes each", default=())
    places: bytes | None = field(
        "export, make: for each storage the number of its handle, the offset from that address and the size, as "
        "unsigned 64-bit little-endian integers; the order stays the same while the storages are offloaded",
        default=None,
    )
    gpus: tuple[str, ...] = field(
        "export, make: if the storages are on several GPUs, the UUID of each GPU, in the order of the process's "
        "devices; the order stays the same while they are offloaded",
        default=(),
    )
    devices: bytes | None = field(
        "export, make: with `gpus`, a byte for each place: which of them it is on", default=None
    )
    first: int | None = field("export, make: number of the first place's storage, counted from 0", default=None)
    at_bytes: int | None = field(
        "export, make: the offset of that storage if all storages are laid out one after another, each aligned to 512"
        " bytes",
        default=None,
    )
    left: int | None = field("make: number of storages that have still to be allocated", default=None)
    short_bytes: int | None = field(
        "make, reload: bytes of its allocator's cached memory that it could not get back", default=None
    )
    spent_ms: Mapping[str, float] = field(
        "survey, export, free, make: milliseconds that each part took, by its name", default={}
    )
    stacks: tuple[str, ...] = field("stacks: for each thread its name and its calls, innermost last", default=())
    lacks_bytes: int | None = field(
        "failed make, reload: bytes that its GPU lacks; nil if it failed for another reason", default=None
    )
