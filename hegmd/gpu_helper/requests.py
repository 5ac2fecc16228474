"""The helper's requests by name: from plain values to driver calls and back.

    devices, state, lock, checkpoint, restore, unlock           the node's GPUs; other processes
    hold                                                        GPU memory that outlives the helper
    pin, unpin                                                  segments of the host pool, for any session
    open, attach-video, detach-video, copy, mark, close         copy sessions
    shift, begin-shift, shifted                                 between a session's own address spaces

Times are in seconds, GPUs are named by UUID. The only decision here: GPU memory is reserved whole or not at all.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hegmd.errors import Refused
from hegmd.gpu_helper import cuda
from hegmd.gpu_helper.copy_session import Contexts, CopySession
from hegmd.gpu_helper.host_memory import HostMemory, PinnedSegments, Segment
from hegmd.gpu_helper.mark import Mark
from hegmd.gpu_helper.wire import DriverFailed, Handler, HelperReply, Request
from hegmd.system.descriptors import Descriptors

MIB = 1 << 20


def make_ready() -> tuple[Mapping[str, Handler], Callable[[], int], Mapping[str, object]]:
    """Initialise the driver. Returns the requests, the count of sessions, and the driver's facts. Raises
    DriverFailed."""
    requests = _driven(Requests)()
    return requests.table(), requests.lanes, {"cuda_version": requests.cuda_version, "gpus": len(requests.gpus)}


def _driven(work: Callable[..., Any]) -> Callable[..., Any]:
    """Run the work and convert the driver's errors to their wire form."""

    @functools.wraps(work)
    def done(*arguments: object) -> Any:
        try:
            return work(*arguments)
        except cuda.CudaError as error:
            raise DriverFailed(error.call, error.code, error.name) from error

    return done


class Requests:
    """All requests, for any thread. The constructor initialises the driver. Raises CudaError."""

    def __init__(self) -> None:
        self.cuda_version = cuda.start()
        self.gpus = {device.uuid: device for device in cuda.devices()}
        self._contexts = Contexts()
        self._pinned = PinnedSegments(self._contexts)
        self._lanes: dict[str, CopySession] = {}
        self._guard = threading.Lock()

    def table(self) -> Mapping[str, Handler]:
        """Return the requests by their names on the wire."""
        named: dict[str, Handler] = {
            "devices": self._devices,
            "state": self._state,
            "lock": self._lock,
            "checkpoint": self._checkpoint,
            "restore": self._restore,
            "unlock": self._unlock,
            "hold": self._hold,
            "pin": self._pin,
            "unpin": self._unpin,
            "open": self._open,
            "attach-video": self._attach_video,
            "detach-video": self._detach_video,
            "copy": self._copy,
            "shift": self._shift,
            "begin-shift": self._begin_shift,
            "shifted": self._shifted,
            "mark": self._mark,
            "close": self._close,
        }
        return {name: _driven(handler) for name, handler in named.items()}

    def lanes(self) -> int:
        return len(self._lanes)

    def _ordinal(self, uuid: str) -> int:
        if uuid not in self.gpus:
            raise Refused(
                f"the CUDA driver shows no GPU {uuid} to hegmd's helper; it shows {len(self.gpus)}",
                "compare `nvidia-smi -L` with `hegmctl gpus`; a MIG device cannot be moved to",
            )
        return self.gpus[uuid].ordinal

    # -- the node and other processes ----------------------------------------------------------------------------------

    def _devices(self, _: Request) -> HelperReply:
        listed = [
            {"ordinal": gpu.ordinal, "uuid": gpu.uuid, "pci": gpu.pci, "total_bytes": gpu.total_bytes}
            for gpu in self.gpus.values()
        ]
        return HelperReply({"devices": listed, "cuda_version": self.cuda_version})

    def _state(self, request: Request) -> HelperReply:
        return HelperReply({"state": cuda.state(request.args["pid"])})

    def _lock(self, request: Request) -> HelperReply:
        cuda.lock(request.args["pid"], max(1, round(request.args["timeout_s"] * 1000)))
        return HelperReply({})

    def _checkpoint(self, request: Request) -> HelperReply:
        """Checkpoint a process. On a full GPU the driver lacks memory for itself and reports 999 (580.159).

        Then release a piece of the sessions' reserves and try again, until none is left.
        """
        pid: int = request.args["pid"]
        while True:
            try:
                cuda.checkpoint(pid)
            except cuda.CudaError as error:
                is_crowded = error.code in (cuda.OUT_OF_MEMORY, cuda.UNKNOWN) and cuda.state(pid) == "locked"
                if not is_crowded or not self._spend():
                    raise
            else:
                return HelperReply({})

    def _spend(self) -> bool:
        """Release a piece of every session's reserve. Returns False if none had any."""
        spent = [lane.spend() for lane in list(self._lanes.values())]
        return any(spent)

    def _restore(self, request: Request) -> HelperReply:
        cuda.restore(request.args["pid"], [(old, new) for old, new in request.args["pairs"]])
        return HelperReply({})

    def _unlock(self, request: Request) -> HelperReply:
        cuda.unlock(request.args["pid"])
        return HelperReply({})

    # -- video memory --------------------------------------------------------------------------------------------------

    def _hold(self, request: Request) -> HelperReply:
        """Create GPU memory of these sizes and return descriptors. This process keeps none of it."""
        ordinal = self._ordinal(request.args["gpu"])
        unit_bytes = cuda.granularity(ordinal)
        sizes: list[int] = [-(-size_bytes // unit_bytes) * unit_bytes for size_bytes in request.args["sizes"]]
        if sum(sizes) > self.gpus[request.args["gpu"]].total_bytes:  # for such a size the driver reports INVALID_VALUE
            raise _out_of_memory(request.args["gpu"], sizes, 0)
        made = Descriptors([])
        try:
            for size_bytes in sizes:
                made.add(_exported(ordinal, size_bytes))
        except cuda.CudaError as error:
            got_bytes = sum(sizes[: len(made)])
            made.close()
            if error.code != cuda.OUT_OF_MEMORY:
                raise
            raise _out_of_memory(request.args["gpu"], sizes, got_bytes) from error
        except BaseException:
            made.close()
            raise
        return HelperReply({"sizes": sizes}, made)

    # -- host memory ---------------------------------------------------------------------------------------------------

    def _pin(self, request: Request) -> HelperReply:
        """Unpin a piece of a segment that is not among these, or pin one of these."""
        wanted = list(zip(request.fds.view(), map(int, request.args["sizes"]), strict=True))
        try:
            left_bytes = self._pinned.adjust(self._ordinal(request.args["gpu"]), wanted)
        except (OSError, ValueError) as error:  # mmap compares the size with that of the file
            raise _not_mapped(sum(size_bytes for _, size_bytes in wanted), error) from error
        return HelperReply({"left_bytes": left_bytes})

    def _unpin(self, request: Request) -> HelperReply:
        """Unpin these segments, as far as they are pinned, and those that are not wanted."""
        self._pinned.unpin((int(device), int(number)) for device, number in request.args["inodes"])
        return HelperReply({})

    def _segment(self, fd: int, size_bytes: int) -> Segment:
        """Return the segment, pinned in advance or mapped now. Raises Refused."""
        try:
            return self._pinned.borrow(fd, size_bytes) or HostMemory(fd, size_bytes)
        except (OSError, ValueError) as error:  # mmap compares the size with that of the file
            raise _not_mapped(size_bytes, error) from error

    # -- lanes ---------------------------------------------------------------------------------------------------------

    def _open(self, request: Request) -> HelperReply:
        """Create contexts on these GPUs; map the pool segment if a descriptor came."""
        name = str(request.args["lane"])
        ordinals = [self._ordinal(uuid) for uuid in dict.fromkeys(request.args["gpus"])]
        map_host: Callable[[], Segment] | None = None
        if request.fds:
            (fd,), size_bytes = request.fds.view(), int(request.args["host_bytes"])
            map_host = functools.partial(self._segment, fd, size_bytes)
        with self._guard:
            if name in self._lanes:
                raise Refused(f"the copy session {name} is already open", "close it first")
            lane = self._lanes[name] = CopySession(self._contexts, ordinals, map_host)
        return HelperReply({"peer": lane.peer})

    def _attach_video(self, request: Request) -> HelperReply:
        sizes: Sequence[int] = request.args["sizes"]
        if len(sizes) != len(request.fds):
            raise Refused(f"{len(sizes)} sizes came with {len(request.fds)} descriptors", "send one for each size")
        pieces = list(zip(request.fds.view(), sizes, strict=True))
        self._lane(request).attach_video(self._ordinal(request.args["gpu"]), pieces, request.args.get("start", 0))
        return HelperReply({})

    def _detach_video(self, request: Request) -> HelperReply:
        return HelperReply({"detached_bytes": self._lane(request).detach(request.args["pieces"])})

    def _copy(self, request: Request) -> HelperReply:
        args = request.args
        done = self._lane(request).copy(
            self._ordinal(args["gpu"]),
            args["direction"],
            args.get("through"),
            args["handles"],
            args["places"],
            lambda copied_bytes: request.tell({"copied_bytes": copied_bytes}),
        )
        return HelperReply(done._asdict())

    def _shift(self, request: Request) -> HelperReply:
        places: Sequence[Sequence[int]] | None = request.args.get("places")
        done = self._lane(request).copy_regions(
            request.args["direction"],
            [(0, 0, request.args["size_bytes"])] if places is None else places,
            lambda copied_bytes: request.tell({"copied_bytes": copied_bytes}),
        )
        return HelperReply(done._asdict())

    def _begin_shift(self, request: Request) -> HelperReply:
        self._lane(request).start_copy(request.args["direction"], request.args["size_bytes"])
        return HelperReply({})

    def _shifted(self, request: Request) -> HelperReply:
        return HelperReply(self._lane(request).finish_copy()._asdict())

    def _mark(self, request: Request) -> HelperReply:
        """Record in the pool segment which owner has its bytes, or clear the record (no owner)."""
        owner = request.args["owner"]
        self._lane(request).mark(None if owner is None else Mark(str(owner), int(request.args["size_bytes"])))
        return HelperReply({})

    def _close(self, request: Request) -> HelperReply:
        """Close the session. Does nothing if it does not exist."""
        with self._guard:
            lane = self._lanes.pop(str(request.args["lane"]), None)
        if lane is not None:
            lane.close()
        return HelperReply({})

    def _lane(self, request: Request) -> CopySession:
        name = str(request.args["lane"])
        lane = self._lanes.get(name)
        if lane is None:
            raise Refused(f"there is no copy session {name}", "open it first; a new helper has no open copy sessions")
        return lane


def _not_mapped(size_bytes: int, error: Exception) -> Refused:
    errno = error.errno if isinstance(error, OSError) else None
    why = error.strerror if isinstance(error, OSError) else error
    return Refused(
        f"{size_bytes // MIB} MiB of the host pool cannot be mapped into the GPU helper: {why or error}",
        "check the node's free memory and huge pages, and MemoryMax= of hegmd.service",
        {"size_bytes": size_bytes, "errno": errno},
    )


def _exported(ordinal: int, size_bytes: int) -> int:
    handle = cuda.create(ordinal, size_bytes)
    try:
        return cuda.export(handle)
    finally:
        cuda.release_handle(handle)  # the descriptor holds the memory


def _out_of_memory(gpu: str, sizes: Sequence[int], got_bytes: int) -> Refused:
    return Refused(
        f"{gpu} has only {got_bytes // MIB} MiB free of the {sum(sizes) // MIB} MiB that are needed",
        "free GPU memory there, choose another GPU, or suspend a job that is on it",
        {"asked_bytes": sum(sizes), "got_bytes": got_bytes, "gpu": gpu},
    )
