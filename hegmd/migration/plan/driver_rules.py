"""Reasons against a checkpoint by the driver, as far as they are known before it.

Owns these rules and their messages. They come from the driver's measured behaviour (580.159.04) and from NVIDIA's
documented limits. Each prevents a lost job or a failed attempt. No option overrides them, since no user may lose a job.
Pure.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence

from hegmd.errors import DENIED, REFUSED, Code
from hegmd.memory.sizes import CONTEXT_BYTES, LAST_BYTES, MAX_CONTEXT_BYTES, RESTORE_MARGIN_BYTES, SEGMENT_BYTES
from hegmd.migration.machine.wording import gigabytes
from hegmd.migration.model import Candidate, GpuMemory, NodeSnapshotForPlan
from hegmd.protocol.messages import CudaDevice

# The checkpoint calls of libcuda came with the first of these drivers, restoring onto another GPU with the second.
CHECKPOINT_DRIVER, MOVE_DRIVER = 570, 580

# Drivers that damage a process, and how.
DENIED_DRIVERS = {"610.57.04": "its lock can crash a process with several threads (NVIDIA/cuda-checkpoint#58)"}

Against = tuple[Code, str, str]

NCCL_HAZARD = "nccl-p2p"
HAZARDS = {
    NCCL_HAZARD: (
        "has live NCCL communicators that may use peer-to-peer: the driver may fail to restore it",
        "start the job with NCCL_P2P_DISABLE=1, or destroy its communicators first",
    ),
    "ipc-shared": (
        "shares GPU memory with another process through CUDA IPC: the driver may fail to restore it",
        "close its CUDA IPC handles, or end the process that it shares memory with",
    ),
    "peer-mapped": (
        "is on several GPUs and its allocator maps memory of one GPU for the others, which the driver cannot restore",
        "unset PYTORCH_CUDA_ALLOC_CONF, so that it uses PyTorch's own allocator without expandable segments",
    ),
    "managed": ("uses managed memory, which the driver cannot checkpoint", "run it without cudaMallocManaged"),
}


def against_leaving(snapshot: NodeSnapshotForPlan, candidate: Candidate, gpu: GpuMemory) -> Iterator[Against]:
    """Every reason why the driver cannot take that process off its GPU, whichever way its bytes go."""
    who = f"process {candidate.pid}"
    if snapshot.uid not in {0, candidate.uid}:
        message = (
            f"hegmd runs as uid {snapshot.uid}, so the driver lets it checkpoint processes of that user only, not {who}"
        )
        yield DENIED, message, "run hegmd as root: systemctl start hegmd"
    major = major_of(gpu.driver_version)
    if major is None:
        yield REFUSED, f"the driver version of {gpu.id} is not known", "see hegmctl doctor"
    elif major < CHECKPOINT_DRIVER:
        message = f"driver {gpu.driver_version} has no checkpoint calls"
        yield REFUSED, message, f"install driver {CHECKPOINT_DRIVER} or newer; {MOVE_DRIVER} to move to another GPU"
    elif gpu.driver_version in DENIED_DRIVERS:
        message = f"driver {gpu.driver_version} is not used for moves: {DENIED_DRIVERS[gpu.driver_version]}"
        yield REFUSED, message, "install another driver; or restart the job: hegmctl run --allow-restart"
    if gpu.mig or gpu.mps or "mps" in candidate.kinds:
        how = "cut into MIG instances" if gpu.mig else "shared through MPS"
        yield (REFUSED, f"{gpu.id} is {how}, which the driver cannot checkpoint", "use a GPU without MIG and MPS")
    if "graphics" in candidate.kinds:
        message = f"{who} has graphics contexts on {gpu.id}, but the driver checkpoints CUDA state only"
        yield REFUSED, message, "run: hegmctl ps"
    if candidate.around.stopped:
        message = f"{who} is stopped (SIGSTOP); the driver call would block until it continues"
        yield REFUSED, message, f"run: kill -CONT {candidate.pid}"
    if candidate.vram_bytes is None or (len(candidate.gpus) > 1 and gpu.id not in candidate.driver_bytes_by_gpu):
        message = f"the driver does not report how much memory {who} uses on {gpu.id}, so hegmd cannot reserve it"
        yield REFUSED, message, "run hegmd in the node's own pid namespace; see hegmctl ps"
    yield from _against_what_it_uses(candidate, who)


def _against_what_it_uses(candidate: Candidate, who: str) -> Iterator[Against]:
    told = candidate.agent.cuda if candidate.agent is not None else None
    for hazard in told.hazards if told is not None else ():
        if hazard == NCCL_HAZARD and candidate.agent is not None and candidate.agent.communicators is not None:
            continue  # its agent reports how it disconnects them, or why not: communicator_rules
        if hazard in HAZARDS:
            what, hint = HAZARDS[hazard]
            yield REFUSED, f"{who} {what}", hint
    # Without a report of an agent, NCCL's shared memory counts as live communicators; and those between the
    # GPUs of one process are in no list that an agent could read.
    if (
        (told is None or len(candidate.gpus) > 1)
        and candidate.around.nccl_shared
        and not candidate.around.nccl_p2p_disabled
    ):
        what, hint = HAZARDS[NCCL_HAZARD]
        yield REFUSED, f"{who} {what}", hint


def against_moving(gpu: GpuMemory) -> Iterator[Against]:
    """Every reason why the driver cannot bring a process of that GPU back on another one."""
    major = major_of(gpu.driver_version)
    if major is not None and CHECKPOINT_DRIVER <= major < MOVE_DRIVER:
        message = f"driver {gpu.driver_version} can only restore a process on its former GPU"
        yield REFUSED, message, f"install driver {MOVE_DRIVER} or newer; this one supports suspend and resume"
    if gpu.chip is None:
        message = f"the chip of {gpu.id} is unknown, and a process can only move to the same chip"
        yield REFUSED, message, "run: hegmctl doctor"


def against_memory(snapshot: NodeSnapshotForPlan, candidate: Candidate, driver_bytes: int) -> Iterator[Against]:
    """Return why the kernel would kill it or others once the driver puts its bytes into the process's own memory."""
    growth_bytes = candidate.around.cgroup_free_bytes
    if growth_bytes is not None and growth_bytes < driver_bytes:
        message = (
            f"the driver would copy {gigabytes(driver_bytes)} into process {candidate.pid}, but its control group "
            f"allows {gigabytes(growth_bytes)} more: the kernel would kill it"
        )
        yield REFUSED, message, "raise the memory limit of its pod, job or unit (memory.max)"
    if snapshot.available_bytes is not None and snapshot.available_bytes < driver_bytes:
        message = (
            f"the driver would copy {gigabytes(driver_bytes)} into process {candidate.pid}, but the node has "
            f"{gigabytes(snapshot.available_bytes)} of memory available"
        )
        yield REFUSED, message, "free memory on the node first"


def rest_of(candidate: Candidate) -> int:
    """Return the bytes that the process needs on a GPU besides the storages that its agent offloads, as far as known.

    Memory that an allocator only caches is released before the checkpoint: `agent_overhead_of` counts it.
    """
    held_bytes = candidate.vram_bytes or 0
    agent = candidate.agent
    if agent is None:
        return held_bytes + RESTORE_MARGIN_BYTES
    gone_bytes = agent.size_bytes or 0
    if agent.cuda is not None and agent.cuda.reserved_bytes:
        stays_bytes = sum(item.size_bytes for item in agent.left_alone)
        gone_bytes = max(gone_bytes, agent.cuda.reserved_bytes - stays_bytes)
    return max(0, held_bytes - gone_bytes) + RESTORE_MARGIN_BYTES


def stacks_of(candidate: Candidate) -> int:
    """Return the bytes of its CUDA contexts that its agent frees while storages are offloaded."""
    cuda = None if candidate.agent is None else candidate.agent.cuda
    return 0 if cuda is None else cuda.stacks_bytes


def contexts_of(gpus: Sequence[GpuMemory], candidates: Sequence[Candidate]) -> dict[str, int]:
    """Return what a CUDA context takes on each GPU, as measured there: the driver's bytes of a process without those
    that its allocator has. A process may have other memory too, so the smallest counts, and never less than expected.
    """
    measured: dict[str, int] = {}
    for candidate in candidates:
        cuda = None if candidate.agent is None else candidate.agent.cuda
        if cuda is None or len(candidate.gpus) != 1 or not cuda.reserved_bytes:
            continue
        (name,) = candidate.gpus
        held_bytes = candidate.driver_bytes_by_gpu.get(name, 0)
        size_bytes = held_bytes - cuda.reserved_bytes - cuda.stacks_bytes
        if held_bytes and size_bytes > 0:
            measured[name] = min(size_bytes, measured.get(name, size_bytes))
    chips = {gpu.id: gpu.chip for gpu in gpus}
    found: dict[str, int] = {}
    for gpu in gpus:
        alike = [size_bytes for name, size_bytes in measured.items() if chips.get(name) == gpu.chip]
        size_bytes = measured.get(gpu.id, max(alike, default=0))
        if size_bytes:
            found[gpu.id] = min(MAX_CONTEXT_BYTES, max(CONTEXT_BYTES, size_bytes))
    return found


def agent_overhead_of(candidate: Candidate, own: GpuMemory) -> int:
    """Return how much more its allocator takes than its storages have, when they are allocated again.

    This is the allocator's rounding or, if larger, its cache. The cache is released before the checkpoint and reserved
    again with the storages: a training step that had to ask the driver for it might find no memory.
    """
    cuda = None if candidate.agent is None else candidate.agent.cuda
    if cuda is None or candidate.agent is None:
        return 0
    size_bytes = candidate.agent.size_bytes or 0
    if len(candidate.gpus) > 1:
        return cuda.padding_bytes
    cached_bytes = _cached(candidate, cuda.reserved_bytes, size_bytes)
    return max(cuda.padding_bytes, min(cached_bytes, _max_free_in_addition(own, rest_of(candidate) + size_bytes)))


def storage_bytes_with_cache(
    candidate: Candidate, devices: Sequence[CudaDevice], own: Sequence[GpuMemory]
) -> tuple[int, ...]:
    """Return the bytes of a process on several GPUs, storages included, on each of them."""
    rests_bytes = shares_of(candidate, devices)
    sizes: list[int] = []
    for device, gpu, driver_bytes in zip(devices, own, rests_bytes, strict=True):
        cached_bytes = _cached(candidate, device.reserved_bytes, device.size_bytes)
        most_bytes = _max_free_in_addition(gpu, driver_bytes + device.size_bytes)
        sizes.append(device.size_bytes + max(device.padding_bytes, min(cached_bytes, most_bytes)))
    return tuple(sizes)


def _cached(candidate: Candidate, reserved_bytes: int, size_bytes: int) -> int:
    """Return what the allocator caches besides its storages and those that stay, with its rounding."""
    stays_bytes = 0 if candidate.agent is None else sum(item.size_bytes for item in candidate.agent.left_alone)
    cached_bytes = reserved_bytes - stays_bytes - size_bytes
    return cached_bytes + SEGMENT_BYTES if cached_bytes > 0 else 0


def _max_free_in_addition(gpu: GpuMemory, others_bytes: int) -> int:
    """Return the most that could be free there in addition: a process alone may cache all of its memory."""
    if gpu.total_bytes is None:
        return sys.maxsize
    return max(0, gpu.total_bytes - others_bytes - gpu.context_bytes - LAST_BYTES)


def devices_of(snapshot: NodeSnapshotForPlan, candidate: Candidate) -> tuple[CudaDevice, ...]:
    """Return what its agent offloads from each of its GPUs, in their order; empty unless all are known."""
    cuda = None if candidate.agent is None else candidate.agent.cuda
    told = {device.uuid: device for device in cuda.devices} if cuda is not None else {}
    uuids = {gpu.id: gpu.uuid for gpu in snapshot.gpus}
    found = [told[uuid] for gpu in candidate.gpus if (uuid := uuids.get(gpu)) in told]
    return tuple(found) if len(found) == len(candidate.gpus) == len(told) else ()


def shares_of(candidate: Candidate, devices: Sequence[CudaDevice] = ()) -> tuple[int, ...]:
    """Return the driver bytes of a process on several GPUs, in their order; empty for one GPU.

    Excludes what its agent offloads from `devices`, and what its allocator caches there.
    """
    if len(candidate.gpus) < 2:
        return ()
    stays_bytes = 0 if candidate.agent is None else sum(item.size_bytes for item in candidate.agent.left_alone)
    gone = [max(device.size_bytes, device.reserved_bytes - stays_bytes) for device in devices]
    held = [candidate.driver_bytes_by_gpu.get(gpu, 0) for gpu in candidate.gpus]
    rests = [max(0, one - other) for one, other in zip(held, gone, strict=True)] if gone else held
    return tuple([driver_bytes + RESTORE_MARGIN_BYTES for driver_bytes in rests])


def major_of(version: str | None) -> int | None:
    """The driver's branch; None when it is not known."""
    head = (version or "").partition(".")[0]
    return int(head) if head.isascii() and head.isdigit() else None
