"""What daemon and agent say to one another: the agent's offer of its process, the daemon's orders, and their reports.

Everybody else reads these from `messages`, which gathers every message there is.
"""

from __future__ import annotations

import struct

from .operations import PeriodicImages
from .record import BadValue, Record, field
from .requests import Request

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    #: The three numbers of a place, in their order.
    Spot = tuple[int, int, int]
    #: The four numbers of a span: which storage, where in it, its bytes, and where in the descriptor.
    Span = tuple[int, int, int, int]

_SPOT, _SPAN = struct.Struct("<QQQ"), struct.Struct("<QQQQ")
#: In the place of a handle's number: CUDA IPC cannot show that storage, and its process copies it itself.
NO_HANDLE = (1 << 64) - 1


class Order(Record):
    """What the daemon wants of an agent. `do` says what; what is done is told by `agent.report`."""

    order: int = field("number of the order, counted by the daemon on this connection")
    do: str = field(
        "survey, park, withdraw, offload, reload, export, free, make, copy, filled, part, rest, entrust, aside, "
        "release, weigh, beforehand, save, snapshot, disconnect, reconnect, leave, count, stacks or dismiss"
    )
    at: int | None = field(
        "park, snapshot: at this boundary by count, or the next one after it; nil for the next", default=None
    )
    limit_s: float | None = field(
        "park, snapshot and release: how long it may take, nil for as long as it takes; disconnect and reconnect: "
        "the same, nil for 60 s; aside: when to come back by itself",
        default=None,
    )
    exact: bool = field(
        "park, snapshot: only at the boundary with that count; fails at once, without parking, if it was passed",
        default=False,
    )
    leaving: bool = field(
        "park: where a restarted script could continue from: at that boundary, or soon after it, at the head of a loop "
        "that trains",
        default=False,
    )
    max_park_s: float | None = field(
        "park, snapshot: how long the training thread may be parked for an attempt that other threads of its process "
        "keep from succeeding; it then runs on, and is stopped again at a later boundary. nil for half a second",
        default=None,
    )
    size_bytes: int | None = field(
        "make: at most so many bytes of storages this time, but one at least; nil for all that are out", default=None
    )
    first: int | None = field("filled: the first storage that has its bytes again, counted from 0", default=None)
    count: int | None = field("filled: how many have, from that one on", default=None)
    packed: bool = field("export, make: whether the report may have its places packed", default=False)
    partly: bool = field(
        "export, make: whether storages that CUDA IPC cannot show may be among them, in packed places without a handle",
        default=False,
    )
    direction: str | None = field("copy: `out` into the descriptor, or `in` from there", default=None)
    spans: bytes | None = field(
        "copy: what the process copies itself: of each span which storage, where in it, how many bytes, and where in "
        "the descriptor, four numbers of 8 bytes each, little-endian",
        default=None,
    )
    path: str | None = field("aside: the meeting place, a file", default=None)
    restored: bool = field(
        "release: the driver has brought its storages back, which cannot be shown to others from then on", default=False
    )
    abort: bool = field(
        "disconnect: abort communicators that the library could suspend, because an image cannot have these",
        default=False,
    )
    generation: int | None = field(
        "reconnect: a number that is the same for all ranks, and larger than in any earlier reconnect of this job; "
        "snapshot: the number of the snapshot, the same for all ranks",
        default=None,
    )


class AgentDismissed(Record):
    """The daemon has no more orders on this connection."""


class AgentAttend(Request, op="agent.attend", reply=AgentDismissed, event=Order):
    """An agent offers its process: the daemon's orders come as events until one side ends it.

    The process is the peer of the connection, by the kernel's word; what is said here only describes it. Orders that
    move bytes (`offload`, `reload`) come with one descriptor, the memory to copy to or from. One that is told to
    `rest` stays parked however long no daemon is there; one that is told to `entrust` closes its own descriptor of
    its bytes as well, and gets another one with `reload`.

    One that is told to step `aside`, for an image of its process, does both, ends this connection, and looks at the
    meeting place instead: while that file is empty it stays away, then it comes to the socket that stands there, or to
    the usual one once the file is gone. It believes only a file of root's or of its own user's.

    Where the daemon copies by itself: `export` shows the storages, `free` frees exactly these, and from then on they
    are out; `make` makes those again that are out and not made yet, and shows them; `filled` says that some have their
    bytes. With the last of them filled, nothing is out any more. Each may come a second time and changes nothing then.
    What the daemon cannot open of these, the process copies itself: `copy` comes with a descriptor of host memory.
    One on several GPUs has to `part` them before it is taken off: none reaches into another's memory until it goes on.

    The ranks of a job hold communicators, which the driver cannot checkpoint. When all of them are parked, each is told
    to `disconnect` its groups; after the restore each is told to `reconnect` them. Both orders wait for the other
    ranks. Both change nothing when the groups are in the wanted state already. `reconnect` also undoes a `disconnect`
    that succeeded on some of the ranks only.

    One that is told to `count` reports its boundary at once, from the agent's own thread.

    For a restart it is told to `weigh` what its state comes to, or to say `beforehand` only what the next process may
    import before its turn; parked, to `save` that into the descriptor that comes
    with the order, and to `leave`, which ends its process and is not reported. The process that is started from there
    puts the state back at its first boundary, attends anew, and says which operation it was `restarted` from.

    For a recovery it is told to take a `snapshot`: it parks the training as for `save`, writes its state into the slot
    that comes with the order, sets the slot's record, and lets the training go on. Without a descriptor, or with one
    that is too small, the order fails and says how many bytes the state has. Any other order but `count` and `stacks`
    ends a snapshot that has not begun to write. One that is asked for its `stacks` tells where its threads are.
    """

    token: str = field("names this agent across connections; made by the agent, 32 hexadecimal digits")
    framework: str | None = field("what trains, such as torch; nil if none is there yet", default=None)
    framework_version: str | None = field("its version", default=None)
    python_version: str = field("version of the interpreter")
    job: str | None = field("what the `hegmctl run` it belongs to was named; nil if it was not", default=None)
    run: str | None = field("which `hegmctl run` it belongs to: one id for each, in all its processes", default=None)
    rank: int | None = field("its rank, in a distributed job", default=None)
    world_size: int | None = field("how many ranks the job has", default=None)
    gpu: str | None = field("the GPU it was started for, or is on by its own word; nil to be given one", default=None)
    size_bytes: int = field("bytes of its storages that it vouches for, as far as it knows now", default=0)
    boundary: int = field("batch boundaries that it has passed")
    parked: bool = field("whether the training thread is parked now, as after a restart of the daemon", default=False)
    held_bytes: int = field("bytes of its storages that are out of the process now", default=0)
    images: PeriodicImages | None = field("images that are to be taken of its job every so often", default=None)
    revived: bool = field("whether its process was restored from an image since it last stepped aside", default=False)
    entrusted: bool = field("whether the daemon alone has those bytes, so that it has to send them back", default=False)
    restarted: str | None = field(
        "the operation whose state it was started from and has put back; nil for any other process", default=None
    )
    mark: str | None = field(
        "the nonce of the memory that it copied those bytes to, in hexadecimal: it is stored there from the ninth "
        "byte on; empty where the daemon copied them, or none are out; nil from an agent that does not say",
        default=None,
    )
    unknown: tuple[str, ...] | None = field(
        "for an agent that `hegmctl attach` loaded into a running process: what it cannot know, one phrase "
        "each; nil for an agent that began with its process",
        default=None,
    )


class Lent(Record):
    """The storages of the job are off its GPUs."""

    operation: str = field("id of the operation by which the job is suspended")


class AgentLend(Request, op="agent.lend", reply=Lent, changes_state=True):
    """Suspend the job of this agent's process with its CUDA contexts kept, because its script lends its GPU memory.

    The training thread waits at the begin of a `hegm.released()` block meanwhile, and counts as parked; after the reply
    it runs the block. The other ranks of the job come to the same block and send the same request. The processes copy
    their bytes themselves, so that they can reload them without a daemon. An error means that nothing is lent; with
    BUSY it can be asked again.
    """


class Reclaimed(Record):
    """The storages of the job are on its GPUs again, and it has made its next batch or left its block."""


class AgentReclaim(Request, op="agent.reclaim", reply=Reclaimed, changes_state=True):
    """Resume the job that was suspended by `agent.lend`, because a block has ended.

    NOT_FOUND says that no operation lends its memory. Any other error means that the job is still suspended, such as
    for want of GPU memory, and that it can be asked again. Orders that reload wait for the end of the block in each
    process.
    """


class CudaDevice(Record):
    """What an agent vouches for on one of its GPUs."""

    uuid: str = field("the GPU that it is on now, by the driver's word")
    size_bytes: int = field("bytes of the storages that it vouches for there")
    padding_bytes: int = field("what its allocator takes there beyond these", default=0)
    reserved_bytes: int = field("what its allocator has there from the driver, including cached memory", default=0)


class CudaFacts(Record):
    """What an agent knows of its process's use of CUDA, and of what stands against taking it off its GPU."""

    gpus: tuple[str, ...] = field("UUIDs of the GPUs that its storages are on, as `nvidia-smi -L` shows them")
    allocator: str = field("native or cudaMallocAsync")
    expandable: bool = field(
        "whether CUDA IPC cannot show its memory: it is in expandable segments, or the driver has brought it back"
    )
    own_bytes: int = field(
        "bytes of storages that the process copies itself, because CUDA IPC cannot show them, or could not once they "
        "are back: memory that they share with what stays in the process",
        default=0,
    )
    reserved_bytes: int = field("what the allocator has of the driver, cached memory included", default=0)
    largest_bytes: int = field("bytes of the largest storage that it vouches for", default=0)
    stacks_bytes: int = field(
        "what its contexts keep for the stacks of their threads, but not while storages are offloaded", default=0
    )
    padding_bytes: int = field("what its allocator takes beyond its storages", default=0)
    devices: tuple[CudaDevice, ...] = field(
        "what of all this is on each of its GPUs; empty where the driver did not say which these are now", default=()
    )
    hazards: tuple[str, ...] = field(
        "graphs: CUDA graphs were captured, so addresses must stay; nccl-p2p: live communicators that may use "
        "peer-to-peer; ipc-shared: shared with another process; peer-mapped: mapped for other GPUs; managed memory",
        default=(),
    )


class Communicators(Record):
    """The communicator groups of a process, and how the agent disconnects them before a driver checkpoint."""

    mechanism: str = field(
        "suspend: NCCL keeps the communicators and releases their GPU memory; replace: the agent aborts each backend "
        "and puts a new one in its place; none: no group has other ranks"
    )
    groups: int = field("groups that have other ranks", default=0)
    backends: tuple[str, ...] = field("their backends, such as nccl and gloo", default=())
    library: str | None = field(
        "version of the NCCL library that the process has loaded; nil without one", default=None
    )
    nvls: bool = field("whether NCCL may use NVLink multicast (NVLS) in this process", default=False)
    pending: int = field("groups with collectives that have not finished", default=0)
    uncovered: tuple[str, ...] = field(
        "what the agent cannot disconnect: a sentence each, with the group and the reason", default=()
    )


class Place(Record):
    """Where a storage lies, for another process that opens the handle."""

    handle: int = field("which of the handles, counted from 0")
    offset: int = field("where it begins behind that handle's address")
    size_bytes: int = field("how long it is")


def packed(spots: Sequence[Spot] | Sequence[Span]) -> bytes:
    """Places as a report carries them where it may: the job stands while it is made and read.

    A thousand records take an agent's msgpack, which is in Python, and the daemon's checks some 20 ms each.
    """
    numbers = [number for spot in spots for number in spot]
    return struct.pack(f"<{len(numbers)}Q", *numbers)


def unpacked(data: bytes) -> list[Spot]:
    """What `packed` was given. Raises BadValue for what it cannot have made."""
    if len(data) % _SPOT.size:
        raise BadValue("packed_places", f"{len(data)} bytes are no whole places of {_SPOT.size}")
    return list(_SPOT.iter_unpack(data))


def unpacked_spans(data: bytes) -> list[Span]:
    """The spans of an order to copy, which `packed` was given. Raises BadValue for what it cannot have made."""
    if len(data) % _SPAN.size:
        raise BadValue("spans", f"{len(data)} bytes are no whole spans of {_SPAN.size}")
    return list(_SPAN.iter_unpack(data))


class LeftAlone(Record):
    """Storages that the agent does not vouch for, and why."""

    why: str = field("one sentence")
    storages: int = field("how many")
    size_bytes: int = field("their bytes")


class Noted(Record):
    """The report was taken."""


class AgentReport(Request, op="agent.report", reply=Noted):
    """What became of an order."""

    order: int = field("number of the order")
    result: str = field("done, failed, or progress while it is under way")
    message: str = field("failed: what and why", default="")
    hint: str = field("failed: the next step", default="")
    boundary: int | None = field("batch boundaries that it has passed", default=None)
    parked_s: float | None = field(
        "park, withdraw, snapshot: how long the training thread was parked for the order until now, in all attempts",
        default=None,
    )
    copied_s: float | None = field(
        "snapshot: how long the state was copied to the host while the training went on; nil if it stood meanwhile",
        default=None,
    )
    parked: bool | None = field("survey: whether the training thread is parked now", default=None)
    held_bytes: int | None = field("survey: bytes of its storages that are out of the process now", default=None)
    storages: int | None = field("survey, offload, reload: how many storages", default=None)
    size_bytes: int | None = field("survey, offload, reload: how many bytes; in progress, so far", default=None)
    left_alone: tuple[LeftAlone, ...] = field("survey: what it leaves to other carriers", default=())
    state_bytes: int | None = field(
        "weigh: bytes of the state that a restart would carry; failed snapshot: the same, where its slot is too small",
        default=None,
    )
    refusals: tuple[str, ...] = field(
        "weigh, failed snapshot: what prevents a restart, or is not kept by one", default=()
    )
    begin_anew: tuple[str, ...] | None = field(
        "weigh, snapshot: variables of the script's that a restart does not keep, 16 at most; nil if it cannot tell",
        default=None,
    )
    imports: tuple[str, ...] = field(
        "weigh, beforehand: modules of PyTorch that the next process may import before its turn; none where the script "
        "could see a "
        "difference",
        default=(),
    )
    path: tuple[str, ...] = field("with these, the folders in which its Python looks for modules", default=())
    cuda: CudaFacts | None = field("survey: its use of CUDA; nil if it uses none", default=None)
    communicators: Communicators | None = field(
        "survey, disconnect, reconnect: its communicator groups; nil if the process has none", default=None
    )
    handles: tuple[bytes, ...] = field("export, make: handles of CUDA IPC, 64 bytes each", default=())
    places: tuple[Place, ...] = field(
        "export, make: where the storages lie, in the order that stays as long as they are out; empty where they are "
        "packed",
        default=(),
    )
    packed_places: bytes | None = field(
        "the same, where the order allows it: of each its three numbers one after the other, as unsigned 64-bit "
        "little-endian integers",
        default=None,
    )
    first: int | None = field("export, make: which storage the first place is, counted from 0", default=None)
    at_bytes: int | None = field(
        "export, make: where that storage lies in the one space in which all of them lie one after the other, each "
        "beginning at a multiple of 512 bytes",
        default=None,
    )
    left: int | None = field("make: how many storages have still to be made after these", default=None)
    short_bytes: int | None = field(
        "make, reload: how much of its allocator's cached memory it could not get back",
        default=None,
    )
    spent_ms: Mapping[str, float] = field(
        "survey, export, free, make: milliseconds that parts of it took, by a word for each", default={}
    )
    stacks: tuple[str, ...] = field("stacks: of each thread its name and its calls, the innermost last", default=())
    lacks_bytes: int | None = field(
        "failed make, reload: how many bytes its GPU lacks; nil if it failed for another reason", default=None
    )
