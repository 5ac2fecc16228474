"""The contents of an image's manifest: composed from a suspended operation, and read into one again.

Owns which facts are stored and which are trusted. A restored job becomes a suspended operation, as adoption makes them:
its processes have other start times, and its GPUs may be others. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from hegmd.errors import UNAVAILABLE, HegmError
from hegmd.images.criu.needs import Needs
from hegmd.memory.sizes import storages_in
from hegmd.migration.machine.next_effects import ROLLED_BACK, SUSPENDED
from hegmd.migration.machine.operation import RESTORE, Failure, Operation
from hegmd.migration.machine.operation import JobProcess as Member
from hegmd.migration.model import AgentSurvey, Candidate, GpuMemory
from hegmd.node.processes.process_tree import Tree
from hegmd.protocol.images import ImageGpu, ImageProcess, ImageWorker, Manifest
from hegmd.protocol.record import as_list
from hegmd.protocol.snapshots import Gpu

_NOT_READ = "restore the image with the version of hegmd that wrote it"


_MAX_PID = 1 << 22
_OF_A_DRIVER = "GPU-"  # as NVIDIA's UUIDs begin


def byte_name(member: Member) -> str:
    return f"{member.pid}.0"


def composed(  # noqa: PLR0913 - each source is named
    op: Operation,
    gpus: Iterable[Gpu],
    tree: Tree,
    needs: Needs,
    *,
    criu_version: str,
    meeting: str,
    attending: Mapping[int, ImageWorker],
    unmoved_agents: Sequence[str] = (),
    as_user: bool = False,
    node: Mapping[str, object] | None = None,
) -> Manifest:
    """Return the manifest, without what the writer of images fills in.

    `attending`: the reports of agents, by pid. `unmoved_agents`: the tokens of agents in processes without GPU bytes.
    """
    known = {gpu.id: gpu for gpu in gpus}
    used = [known[name] for name in dict.fromkeys(w.previous_gpu or w.first_gpu for w in op.live) if name in known]
    return Manifest(
        vendor=used[0].vendor if used else None,
        driver_version=used[0].driver_version if used else None,
        gpus=tuple([_gpu(gpu) for gpu in used]),
        criu_version=criu_version,
        criu_options=needs.dump_options,
        root_pid=tree.root,
        processes=tuple(
            [
                ImageProcess(
                    pid=member.pid,
                    parent_pid=None if member.pid == tree.root else member.parent,
                    uid=member.uid,
                    command=" ".join(member.command),
                )
                for member in tree.members
            ]
        ),
        workers=tuple([_worker(member, known, attending[member.pid]) for member in op.live]),
        leave_running=op.image is not None and op.image.leave_running,
        node=node,
        more={
            "operation": op.id,
            "asked_utc": op.created_utc,
            "lockstep": op.is_distributed,
            "meeting": meeting,
            "bystanders": list(unmoved_agents),
            "as_user": as_user,
            "needs": needs.plain(),
            "start_ticks": [[member.pid, member.start_ticks] for member in tree.members],
            "all_gpus": [[gpu.id, gpu.uuid] for gpu in known.values()],
        },
    )


def start_ticks_in(manifest: Manifest) -> dict[int, int]:
    """Return the dumped pids with their former start times; empty for an image of an older hegmd."""
    pairs = [as_list(each) or () for each in as_list((manifest.more or {}).get("start_ticks")) or ()]
    known = [(_whole(pair[0]) or 0, _whole(pair[1]) or 0) for pair in pairs if len(pair) == 2]
    return {pid: ticks for pid, ticks in known if 0 < pid <= _MAX_PID and ticks > 0}


def _gpu(gpu: Gpu) -> ImageGpu:
    return ImageGpu(id=gpu.id, uuid=gpu.uuid, chip=gpu.chip, memory_bytes=gpu.memory_total_bytes)


def _worker(member: Member, known: Mapping[str, Gpu], recorded: ImageWorker) -> ImageWorker:
    left = member.previous_gpu or member.first_gpu or ""
    return recorded.replace(
        pid=member.pid,
        gpus=(known[left].uuid,) if left in known else (),
        carrier=member.carrier,
        size_bytes=member.size_bytes,
        rest_bytes=member.driver_bytes,
        bytes=(byte_name(member),) if member.offloaded else (),
        token=member.token,
        boundary=member.boundary,
        more={
            **(recorded.more or {}),
            "method": member.method,
            "rank": member.rank,
            "chip": member.chip,
            "gpu": left,
            "communicators": member.communicators,
        },
    )


# ---- and back --------------------------------------------------------------------------------------------------------


def is_of(manifest: Manifest, op: Operation) -> bool:
    """Return True if this operation wrote the image, and not an earlier one to the same path."""
    more = manifest.more or {}
    return more.get("operation") == op.id and more.get("asked_utc") == op.created_utc


def mark_of(op: Operation) -> str:
    """Return what identifies the image of an operation."""
    return f"{op.id} {op.created_utc!r}"


def mark_in(manifest: Manifest) -> str:
    """Return the same value from an image."""
    more = manifest.more or {}
    return f"{more.get('operation')} {more.get('asked_utc')!r}"


def needs_in(manifest: Manifest) -> Needs:
    """Return the options for CRIU. Raises HegmError."""
    plain: Any = (manifest.more or {}).get("needs")
    try:
        return Needs.from_plain(plain)
    except (KeyError, TypeError, ValueError) as error:
        message = f"the manifest lacks what CRIU needs for its processes: {type(error).__name__} {error}"
        raise HegmError(UNAVAILABLE, message, _NOT_READ) from error


def tokens_in(manifest: Manifest) -> tuple[str, ...]:
    """Return the tokens of all its agents; those of processes without GPU memory come last."""
    others = as_list((manifest.more or {}).get("bystanders")) or ()
    tokens = (*(worker.token or "" for worker in manifest.workers), *map(str, others))
    return tuple(dict.fromkeys(tokens))


def pool_bytes_in(manifest: Manifest, worker: ImageWorker) -> int:
    """Return for how many bytes of storages a worker needs a pool segment. Raises HegmError for a missing file.

    The size of its byte file decides, because all of it is read into the segment. It can be larger than the storages
    were at the boundary: earlier builds of hegmd wrote as much as was reserved.
    """
    sizes = {file.name: file.size_bytes for file in manifest.byte_files}
    if missing := [name for name in worker.bytes if name not in sizes]:
        message = f"the image has no file {missing[0]!r:.140} with the bytes of process {worker.pid}"
        raise HegmError(UNAVAILABLE, message, _NOT_READ)
    return max(worker.size_bytes, *(storages_in(sizes[name]) for name in worker.bytes)) if worker.bytes else 0


def meeting_in(manifest: Manifest) -> str:
    """Return the directory in which its agents look for a daemon. Raises HegmError."""
    found = (manifest.more or {}).get("meeting")
    if not isinstance(found, str) or not found.startswith("/"):
        raise HegmError(UNAVAILABLE, "the manifest does not say where its agents wait", _NOT_READ)
    return found


def revived(
    manifest: Manifest, op_id: str, start_ticks: Mapping[int, int], gpus: Iterable[Gpu | GpuMemory], utc: float
) -> Operation:
    """Return a suspended operation of the image's processes, with their new start times."""
    names = {gpu.uuid: gpu.id for gpu in gpus}
    more = manifest.more or {}
    then = _gpus_then(more.get("all_gpus"))
    elsewhere = () if set(then) == {uuid for uuid in names if uuid.startswith(_OF_A_DRIVER)} else then
    return Operation(
        id=op_id,
        kind=RESTORE,
        phase=SUSPENDED,
        is_distributed=bool(more.get("lockstep")),
        workers=tuple(
            [_member(recorded, start_ticks.get(recorded.pid, 0), names, elsewhere) for recorded in manifest.workers]
        ),
        owner_uid=_owner(manifest),
        created_utc=utc,
    )


def unrevived(manifest: Manifest, op_id: str, failure: Failure, utc: float) -> Operation:
    """Return the operation of a restore that failed before the job was restored: it has ended, without processes."""
    op = revived(manifest, op_id, {}, (), utc)
    gone = {
        "has_exited": True,
        "offloaded": False,
        "park_requested": False,
        "is_parked": False,
        "needs_inspection": False,
        "recount_memory": False,
    }
    return op.replace(phase=ROLLED_BACK, failure=failure, workers=tuple([one.replace(**gone) for one in op.workers]))


def is_unrevived(op: Operation) -> bool:
    """Return True if it has handled no event, so that the remains of its restore belong to no operation."""
    return op.kind == RESTORE and op.phase == ROLLED_BACK and op.seq == 0


def _gpus_then(recorded: object) -> tuple[str, ...]:
    """Return the UUIDs of the GPUs that NVIDIA's driver had when the image was made."""
    pairs = [as_list(each) or () for each in as_list(recorded) or ()]
    uuids = [pair[1] for pair in pairs if len(pair) > 1]
    return tuple([uuid for uuid in uuids if isinstance(uuid, str) and uuid.startswith(_OF_A_DRIVER)])


def _member(recorded: ImageWorker, start_ticks: int, names: Mapping[str, str], elsewhere: tuple[str, ...]) -> Member:
    more = recorded.more or {}
    here = next((names[uuid] for uuid in recorded.gpus if uuid in names), None)
    own = next((uuid for uuid in recorded.gpus if uuid in elsewhere), None)
    communicators = _text(more.get("communicators")) or ""
    return Member(
        name=str(recorded.pid),
        pid=recorded.pid,
        start_ticks=start_ticks,
        token=recorded.token or "",
        method=str(more.get("method", "")),
        carrier=recorded.carrier or "",
        rank=_whole(more.get("rank")),
        chip=_text(more.get("chip")),
        first_gpu=here or (_text(more.get("gpu")) if not recorded.gpus else None),
        origin_gpu=None,
        target_gpu=None,
        gpu=None,
        previous_gpu=here if own is None else None,
        source_gpu_uuids=() if own is None else (own, *(uuid for uuid in elsewhere if uuid != own)),
        size_bytes=recorded.size_bytes,
        driver_bytes=recorded.rest_bytes,
        reservations={},
        boundary=recorded.boundary,
        communicators=communicators,
        is_connected=None if communicators else True,
        park_requested=True,
        is_parked=True,
        offloaded=bool(recorded.bytes),
        was_offloaded=True,
        needs_inspection=True,
        recount_memory=True,
    )


def candidates_in(manifest: Manifest) -> tuple[Candidate, ...]:
    """Return the processes for the planner: off their GPUs, with their future agents."""
    world = len(manifest.workers)
    return tuple(
        [
            Candidate(
                pid=recorded.pid,
                start_ticks=0,
                uid=_owner(manifest),
                name=next((p.command for p in manifest.processes if p.pid == recorded.pid), None),
                gpus=(),
                agent=AgentSurvey(
                    token=recorded.token or "",
                    size_bytes=recorded.size_bytes,
                    boundary=recorded.boundary,
                    rank=_whole((recorded.more or {}).get("rank")),
                    world_size=world if (manifest.more or {}).get("lockstep") else 1,
                ),
            )
            for recorded in manifest.workers
        ]
    )


def _owner(manifest: Manifest) -> int | None:
    return next((process.uid for process in manifest.processes if process.pid == manifest.root_pid), None)


def _whole(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None
