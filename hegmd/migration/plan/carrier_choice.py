"""The choice of the carrier for a job with an agent, and the expected duration. Pure.

The fastest possible one is chosen: `peer`, directly to the other GPU; `host`, to the pool, copied by the helper;
`worker`, to the pool, copied by the process. Everything that these may not or cannot take is left to the driver, so a
move never depends on finding every tensor. The figures are measured ones, until this node has its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from hegmd.memory.sizes import (
    NEXT_TO_NOTHING_BYTES,
    ROUND_BYTES,
    rounds_of,
    staging_in_needed_bytes,
    staging_out_needed_bytes,
    whole_size,
)
from hegmd.migration.machine.operation import CHECKPOINT, MIGRATE, RESUME, SUSPEND
from hegmd.migration.machine.wording import gigabytes
from hegmd.migration.model import CARRIERS, Candidate, CarrierRow, GpuMemory, NodeSnapshotForPlan, PlanRequest, Rates
from hegmd.migration.plan.driver_rules import (
    agent_overhead_of,
    devices_of,
    rest_of,
    shares_of,
    storage_bytes_with_cache,
)
from hegmd.protocol.messages import CudaFacts
from hegmd.protocol.operations import BY_DRIVER, HOST, PEER

# GPU memory on the target that rounds leave free, for other processes and for memory that was not counted.
LEFT_FREE_BYTES = 2 << 30
# CUDA IPC cannot show such memory to another process.
_NATIVE = "native"


class Choice(NamedTuple):
    """A carrier, and the memory that it takes besides the process's reservation."""

    carrier: str
    #: Memory of the carrier on the target; and how much of the storages must wait for memory that the copies free.
    target_bytes: int = 0
    overlap_bytes: int = 0
    #: The memory on each target instead, in their order, for a process on several GPUs.
    target_bytes_by_gpu: tuple[int, ...] = ()
    pool_bytes: int = 0
    #: Why none of the faster ones.
    why: str = ""


class Share(NamedTuple):
    """The memory of a process on one of its GPUs, and its target."""

    source: GpuMemory
    to: GpuMemory | None
    #: Bytes of its storages there; of several GPUs, with what its allocator caches.
    size_bytes: int
    #: The bytes that it needs on the target besides.
    reserved_bytes: int
    #: The bytes that it has on the target already, if its GPUs are exchanged.
    own_bytes: int = 0

    @property
    def needed_bytes(self) -> int:
        """Return the bytes that must be free on the target GPU for all of that."""
        return self.reserved_bytes + self.size_bytes - self.own_bytes


class Refusal(NamedTuple):
    """Why the requested carrier is impossible."""

    message: str
    hint: str


def choose(
    snapshot: NodeSnapshotForPlan,
    request: PlanRequest,
    candidate: Candidate,
    own: Sequence[GpuMemory],
    to: Sequence[GpuMemory] = (),
    carriers: Mapping[str, CarrierRow] = CARRIERS,
) -> Choice:
    """The fastest carrier that can take its storages from its `own` GPUs to those at the same places in `to`."""
    shares = _shares(snapshot, candidate, own, to)
    whys: list[str] = []
    for carrier, row in carriers.items():
        why = next(_against(snapshot, request, candidate, shares, row), None)
        if why is None:
            return _choice(candidate, shares, carrier)._replace(why="; ".join(dict.fromkeys(whys)))
        whys.append(why)
    raise AssertionError("the driver carries every byte of a process that it can checkpoint")


def choose_as_asked(
    snapshot: NodeSnapshotForPlan,
    request: PlanRequest,
    candidate: Candidate,
    own: Sequence[GpuMemory],
    to: Sequence[GpuMemory] = (),
    carriers: Mapping[str, CarrierRow] = CARRIERS,
) -> Choice | Refusal:
    """The carrier that was asked for, if any was; otherwise the fastest."""
    if request.carrier is None:
        return choose(snapshot, request, candidate, own, to, carriers)
    row = carriers.get(request.carrier)
    if row is None:
        return Refusal(f"there is no carrier {request.carrier[:40]!r}", f"there are {', '.join(carriers)}")
    shares = _shares(snapshot, candidate, own, to)
    why = next(_against(snapshot, request, candidate, shares, row), None)
    if why is not None:
        return Refusal(f"{request.carrier} cannot carry process {candidate.pid}: {why}", "omit --carrier")
    return _choice(candidate, shares, request.carrier)


def is_helped(carrier: str) -> bool:
    """True if the GPU helper copies for this carrier and needs contexts. False for an unknown carrier."""
    return carrier in CARRIERS and CARRIERS[carrier].is_helped


def _shares(
    snapshot: NodeSnapshotForPlan, candidate: Candidate, own: Sequence[GpuMemory], to: Sequence[GpuMemory]
) -> tuple[Share, ...]:
    """Return the process's memory on each of its GPUs. On several GPUs, no sizes if these are unknown."""
    size_bytes = candidate.agent.size_bytes or 0 if candidate.agent is not None else 0
    targets = tuple(to) or (None,) * len(own)
    if len(own) == 1:
        return (Share(own[0], targets[0], size_bytes, rest_of(candidate) + agent_overhead_of(candidate, own[0])),)
    devices = devices_of(snapshot, candidate)
    none = (0,) * len(own)
    wholes = storage_bytes_with_cache(candidate, devices, own) if devices else none
    rests = shares_of(candidate, devices) if devices else none
    held = candidate.driver_bytes_by_gpu
    return tuple(
        [
            Share(source, target, whole, rest, 0 if target is None else held.get(target.id, 0))
            for source, target, whole, rest in zip(own, targets, wholes, rests, strict=True)
        ]
    )


def _choice(candidate: Candidate, shares: Sequence[Share], carrier: str) -> Choice:
    size_bytes = candidate.agent.size_bytes or 0 if candidate.agent is not None else 0
    pool_bytes = 0 if carrier in (BY_DRIVER, PEER) else size_bytes
    if carrier not in (PEER, HOST) or shares[0].to is None:
        return Choice(carrier, pool_bytes=pool_bytes)
    copies_bytes = [
        (share.size_bytes if carrier == PEER else 0) + share.to.context_bytes
        for share in shares
        if share.to is not None
    ]
    if len(shares) > 1:
        return Choice(carrier, target_bytes_by_gpu=tuple(copies_bytes), pool_bytes=pool_bytes)
    overlap_bytes = _overlap(candidate, shares[0]) if carrier == PEER else 0
    return Choice(carrier, target_bytes=copies_bytes[0], overlap_bytes=overlap_bytes, pool_bytes=pool_bytes)


def _overlap(candidate: Candidate, share: Share) -> int:
    """Return how many bytes of the storages must wait for memory that the copies free; 0 if all fit at once.

    As few as possible, because every round costs a call to the agent and one to the helper: 100 GiB in rounds of 1 GiB
    took 0.5 to 1.3 s more than the copies.
    """
    agent = candidate.agent
    if agent is None or agent.cuda is None or share.to is None or share.to.free_bytes is None:
        return 0
    size_bytes = share.size_bytes
    lacking_bytes = 2 * size_bytes + share.to.context_bytes + share.reserved_bytes - share.to.free_bytes
    at_once_bytes = max(ROUND_BYTES, 2 * agent.cuda.largest_bytes)
    if lacking_bytes <= 0:
        return 0
    return max(0, min(size_bytes - at_once_bytes, lacking_bytes + LEFT_FREE_BYTES))


def _against(
    snapshot: NodeSnapshotForPlan, request: PlanRequest, candidate: Candidate, shares: Sequence[Share], row: CarrierRow
) -> Iterator[str]:
    """Why that carrier cannot take the process's storages."""
    if row.name == BY_DRIVER:
        return
    agent = candidate.agent
    cuda = agent.cuda if agent is not None else None
    if agent is None or cuda is None:
        yield "it has no agent that knows its storages on the GPU"
        return
    size_bytes = agent.size_bytes or 0
    if not size_bytes:
        yield "its agent reports no storages that can be offloaded"
    if len(shares) > 1 and not devices_of(snapshot, candidate):
        yield "it is on several GPUs, but its agent does not report what it holds on each"
    if "graphs" in cuda.hazards:
        yield "it has captured CUDA graphs, which need their memory addresses unchanged"
    if row.is_helped:
        yield from _against_showing(snapshot, candidate, cuda, shares, size_bytes)
    for share in shares:
        if row.name == HOST:
            yield from _against_context(request, candidate, share)
        if row.name == PEER:
            yield from _against_peer(request, candidate, share, is_alone=len(shares) == 1)
    if row.in_pool and whole_size(size_bytes) > snapshot.pool.free_bytes:
        yield f"the pool has {gigabytes(snapshot.pool.free_bytes)} free of {gigabytes(snapshot.pool.budget_bytes)}"


def _against_showing(
    snapshot: NodeSnapshotForPlan, candidate: Candidate, cuda: CudaFacts, shares: Sequence[Share], size_bytes: int
) -> Iterator[str]:
    """Yield why the helper cannot open the process's storages."""
    if not snapshot.outlived:  # the bytes would be in no place but its memory
        yield "the bytes would be lost if hegmd were killed: there is no descriptor store"
    if cuda.expandable or cuda.allocator != _NATIVE:
        how = "expandable segments, or memory that the driver restored" if cuda.expandable else cuda.allocator
        yield f"its allocator uses {how}, which CUDA IPC cannot show to another process"
    elif 2 * cuda.own_bytes > size_bytes:
        own, whole = gigabytes(cuda.own_bytes), gigabytes(size_bytes)
        yield f"{own} of its {whole} share memory with tensors that stay, so the process copies them itself"
    if candidate.around.same_ipc is False:
        yield "it is in another IPC namespace than hegmd"
    for share in shares:
        if (share.source.free_bytes or 0) < share.source.context_bytes:
            free = gigabytes(share.source.free_bytes or 0)
            yield f"{share.source.id} has {free} free, but copying needs {gigabytes(share.source.context_bytes)} there"


def own_bytes(candidate: Candidate, carrier: str) -> int:
    """Return how many bytes the process copies itself, of those that go by that carrier."""
    cuda = None if candidate.agent is None else candidate.agent.cuda
    return cuda.own_bytes if cuda is not None and is_helped(carrier) else 0


def _against_context(request: PlanRequest, candidate: Candidate, share: Share) -> Iterator[str]:
    """Yield why the target lacks memory for the helper's context, in addition to all that the process needs there."""
    to = share.to
    if to is None and not request.keep_context:
        yield from _against_return(candidate, share)
    if to is None or to.id == share.source.id or to.free_bytes is None:
        return
    needed_bytes = share.needed_bytes + to.context_bytes
    if to.free_bytes < needed_bytes:
        free, needed, own = gigabytes(to.free_bytes), gigabytes(needed_bytes), gigabytes(to.context_bytes)
        yield f"{to.id} has {free} free, and {needed} are needed there, {own} of these for copying"


def _against_return(candidate: Candidate, share: Share) -> Iterator[str]:
    """Yield why a process that leaves its GPU could not return there.

    Its own memory and the free memory are all that it can count on: without more it would stay suspended.
    """
    gpu = share.source
    if gpu.free_bytes is None:
        return
    room_bytes = gpu.free_bytes + candidate.driver_bytes_by_gpu.get(gpu.id, 0)
    needed_bytes = share.needed_bytes + gpu.context_bytes
    if candidate.driver_bytes_by_gpu and room_bytes < needed_bytes:
        room, needed, own = gigabytes(room_bytes), gigabytes(needed_bytes), gigabytes(gpu.context_bytes)
        yield f"its return to {gpu.id} needs {needed}, {own} of these for copying, and {room} will be free there"


def _against_peer(request: PlanRequest, candidate: Candidate, share: Share, *, is_alone: bool) -> Iterator[str]:
    to, source = share.to, share.source
    if request.kind != MIGRATE or to is None:
        yield "peer copies only serve a migration to another GPU"
        return
    if to.id not in source.nvlinks and (is_alone or to.id != source.id):
        yield f"there is no NVLink from {source.id} to {to.id}"
    copies_bytes = share.size_bytes + to.context_bytes
    overlap_bytes = _overlap(candidate, share) if is_alone else 0
    # Its own bytes on a target are there until all copies are made.
    needed_bytes = max(copies_bytes if share.own_bytes else 0, share.needed_bytes + copies_bytes - overlap_bytes)
    if to.free_bytes is not None and to.free_bytes < needed_bytes:
        free = gigabytes(to.free_bytes)
        yield f"{to.id} has {free} free, and {gigabytes(needed_bytes)} are needed there temporarily"


class OverlappedCopies(NamedTuple):
    """The copies that can overlap the driver's checkpoint (`out`) and restore (`back`), by free GPU memory."""

    out: bool = False
    back: bool = False


NO_COPIES = OverlappedCopies()


def overlapped_copies(
    snapshot: NodeSnapshotForPlan, carrier: str, size_bytes: int, at: str | None, to: str | None
) -> OverlappedCopies:
    """Return which copies fit besides everything else that is free now. `to` is the target before reservations."""
    if carrier != HOST:
        return NO_COPIES
    free = {gpu.id: gpu.free_bytes or 0 for gpu in snapshot.gpus}
    reserved_bytes = size_bytes if at != to else 0
    return OverlappedCopies(
        out=at is not None and free.get(at, 0) >= staging_out_needed_bytes(size_bytes, at_rest=True),
        back=to is not None and free.get(to, 0) - reserved_bytes >= staging_in_needed_bytes(size_bytes),
    )


def estimate_s(
    kind: str,
    carrier: CarrierRow,
    size_bytes: int,
    driver_bytes: int,
    rates: Rates,
    overlap_bytes: int = 0,
    copies: OverlappedCopies = NO_COPIES,
    own_bytes: int = 0,
) -> float:
    """Return the downtime of one process in seconds, without its wait for a boundary; for a resume with preparation."""
    by_driver_bytes = max(0, driver_bytes - NEXT_TO_NOTHING_BYTES)
    out_s = rates.driver_out_s + by_driver_bytes / rates.driver_out_bytes_per_s
    in_s = rates.driver_in_s + by_driver_bytes / rates.driver_in_bytes_per_s
    if carrier.rates is not None:
        out_bytes_per_s, in_bytes_per_s = (getattr(rates, name) for name in carrier.rates)
        out_s = _with_copy(out_s, size_bytes, out_bytes_per_s, rates, beside=copies.out) + rates.exchange_s / 2
        in_s += size_bytes / rates.make_bytes_per_s  # this too overlaps a copy
        in_s = _with_copy(in_s, size_bytes, in_bytes_per_s, rates, beside=copies.back) + rates.exchange_s / 2
        in_s += (rounds_of(size_bytes, overlap_bytes) - 1) * rates.round_s
        out_s += own_bytes / rates.cuda_out_bytes_per_s
        in_s += own_bytes / rates.cuda_in_bytes_per_s
        if kind == RESUME and carrier.is_helped:
            in_s += rates.arm_s
    if kind in (SUSPEND, CHECKPOINT):
        return out_s + rates.leave_s
    return in_s if kind == RESUME else out_s + in_s


def _with_copy(step_s: float, size_bytes: int, bytes_per_s: float, rates: Rates, *, beside: bool) -> float:
    """Return the duration of a driver step and a copy: their sum, or the longer of both if they run concurrently."""
    copy_s = size_bytes / bytes_per_s
    if not beside:
        return step_s + copy_s
    return max(step_s + rates.beside_s, copy_s) + size_bytes / rates.within_bytes_per_s
