"""The communicator groups of a generation: connected again for each, and ended from another thread if one fails.

gloo's own abort ends no wait (torch 2.13), so the sockets that gloo opened in this process are shut down, which ends
each wait within a millisecond. NCCL's communicators are aborted by their backends, each once and by one thread at a
time: two threads that abort or destroy one communicator corrupt the heap of the process (PyTorch 2.11). Ranks that
joined later have other ProcessGroups than those that lived on, so each generation makes new ones, and wraps the model
again.

DDP puts gradients into buckets, in another order after its first step. With three ranks or more that order decides how
sums are rounded, so a generation that begins later is given the final buckets at once.
"""

from __future__ import annotations

import os
import stat
import sys
import threading
import time

from ..group_backend import NCCL, abort_backend, backends_of, kind_of
from ..notes import note
from .line import now

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from datetime import timedelta
    from typing import Any

    Layout = Sequence[Sequence[int]]

# With fewer, a sum has one order only.
_ORDER_MATTERS = 3
_LISTENING = "0A"
# Between two looks whether the other ranks have come: such a wait can be interrupted, one of PyTorch's store cannot.
_LOOK_S = 0.002
# Among the arguments of `torch.distributed.new_group`.
_TIMEOUT_AT = 1


class Groups:
    """Those of the generation that runs. `end_waits` may be called from any thread, the rest from the block's."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._before: frozenset[tuple[int, int]] = frozenset()
        self._sockets: set[tuple[int, int]] = set()
        self._is_connecting = self._is_connected = False
        self._wrapped: list[Any] = []
        self._former: list[Any] = []
        self._ending = threading.Lock()
        self._aborted: list[Any] = []
        #: The store of this generation, the rank of this process, the number of ranks, and how often they have met.
        self._store: Any = None
        self._rank, self._ranks, self._meeting = 0, 1, 0
        #: The order of parameters in DDP's buckets after its first step, if it is known.
        self.layout: Layout | None = None

    # ---- connections ------------------------------------------------------------------------------------------------

    def connect(self, backend: str | None, generation: int, rank: int, ranks: int, options: dict[str, Any]) -> None:
        """Make the default group of this generation. Raises what PyTorch raises."""
        distributed: Any = __import__("torch.distributed").distributed
        if self._is_connected and distributed.is_initialized():  # by the block before
            distributed.destroy_process_group()
        self._store = distributed.FileStore(os.path.join(self._folder, f"generation-{generation}"), -1)
        self._rank, self._ranks, self._meeting = rank, ranks, 0
        self._meet(options.get("timeout"))
        options = {**options, "store": self._store, "rank": rank, "world_size": ranks}
        self._noting(lambda: distributed.init_process_group(backend, **options))
        self._is_connected = True

    def new_group(self, *args: Any, **options: Any) -> Any:
        """`torch.distributed.new_group`, whose waits can be ended."""
        distributed: Any = sys.modules["torch.distributed"]
        if self._is_connected and not options.get("use_local_synchronization"):
            self._meet(args[_TIMEOUT_AT] if len(args) > _TIMEOUT_AT else options.get("timeout"))
        return self._noting(lambda: distributed.new_group(*args, **options))

    def _meet(self, timeout: timedelta | None) -> None:
        """Wait until all ranks are about to connect. A signal cannot interrupt PyTorch's own wait for them.

        Raises TimeoutError after the group's timeout: before the first step nothing else ends this wait.
        """
        constants: Any = __import__("torch.distributed.constants").distributed.constants
        limit_s: float = (timeout or constants.default_pg_timeout).total_seconds()
        self._meeting += 1
        self._store.set(f"hegm-{self._meeting}-{self._rank}", "")
        deadline = now() + limit_s
        missing = list(range(self._ranks))
        while missing:
            missing = [rank for rank in missing if not self._store.check([f"hegm-{self._meeting}-{rank}"])]
            if missing and now() >= deadline:
                names = ", ".join(map(str, missing))
                raise TimeoutError(f"rank {names} did not come to connect within {limit_s:g} s")
            if missing:
                time.sleep(_LOOK_S)

    def _noting(self, connect: Callable[[], Any]) -> Any:
        self._before, self._is_connecting = _sockets(), True
        try:
            return connect()
        finally:
            self._sockets |= _sockets() - self._before
            self._is_connecting = False

    def end_waits(self) -> None:
        """Have every collective of this process end with an error, now."""
        socket: Any = __import__("socket")
        here = _sockets()
        own = here - self._before if self._is_connecting else here & self._sockets
        for fd, inode in own:
            try:
                with socket.socket(fileno=os.dup(fd)) as connection:
                    if os.fstat(connection.fileno()).st_ino == inode:
                        connection.shutdown(socket.SHUT_RDWR)
            except OSError as error:
                note(f"socket {fd} was not shut down: {error}")
        if _nccl_backends():
            with self._ending:
                self._abort_nccl()

    def _abort_nccl(self) -> None:
        """Abort the communicators of this generation that are not aborted yet."""
        for backend in _nccl_backends():
            if any(backend is one for one in self._aborted):
                continue
            self._aborted.append(backend)
            try:
                abort_backend(backend)
            except Exception as error:  # noqa: BLE001 - the other ones are to be aborted all the same
                note(f"a communicator was not aborted: {error!r}")

    def forget(self) -> None:
        """The block has ended: its groups and models are the script's own from now on."""
        self._wrapped.clear()
        self._sockets.clear()

    def leave(self) -> None:
        """Destroy the groups of this generation, and take the wrapped models off it."""
        for wrapped in self._wrapped:
            reducer = wrapped.reducer
            if hasattr(reducer, "_remove_autograd_hooks"):
                reducer._remove_autograd_hooks()
        self.forget()
        # A thread of gloo may still release a tensor, for which it needs the interpreter. The end of a ProcessGroup
        # waits for that thread and keeps the interpreter: it comes a generation later, when the thread is idle.
        c10d: Any = sys.modules.get("torch.distributed.distributed_c10d")
        self._former = [] if c10d is None else list(c10d._world.pg_map)
        distributed: Any = sys.modules.get("torch.distributed")
        with self._ending:
            if distributed is not None and distributed.is_available() and distributed.is_initialized():
                self._abort_nccl()  # a communicator with a failed rank cannot be destroyed in peace
                try:
                    distributed.destroy_process_group()
                except Exception as error:  # noqa: BLE001 - it was aborted, and is forgotten all the same
                    note(f"a group was not destroyed: {error!r}")
            self._aborted.clear()

    # ---- DDP --------------------------------------------------------------------------------------------------------

    def wrap(self, model: Any, *, is_first_step: bool, options: dict[str, Any]) -> Any:
        """Return the model in DistributedDataParallel; the model itself without a group."""
        distributed: Any = sys.modules.get("torch.distributed")
        if distributed is None or not distributed.is_initialized():
            return model
        parallel: Any = __import__("torch.nn.parallel.distributed", fromlist=["DistributedDataParallel"])
        assign = distributed._compute_bucket_assignment_by_size
        if self.layout is not None and not is_first_step:
            given = [list(bucket) for bucket in reversed(self.layout)]  # DDP reverses the list that it gets

            def as_before(*args: Any, **named: Any) -> Any:
                limits = assign(*args, **named)[1]
                return given, [limits[min(number, len(limits) - 1)] for number in range(len(given))]

            distributed._compute_bucket_assignment_by_size = as_before
        try:
            made = parallel.DistributedDataParallel(model, **options)
        finally:
            distributed._compute_bucket_assignment_by_size = assign
        self._wrapped.append(made)
        return made

    def settle(self, ranks: int) -> bool:
        """Have DDP rebuild its buckets after its first step, on all ranks; whether the layout was learnt."""
        if ranks < _ORDER_MATTERS or self.layout is not None or len(self._wrapped) != 1:
            return False
        wrapped = self._wrapped[0]
        if not wrapped.reducer._rebuild_buckets():
            return False
        numbers = {id(one): number for number, one in enumerate(p for p in wrapped.parameters() if p.requires_grad)}
        buckets = wrapped.reducer._get_zeros_like_grad_buckets()
        self.layout = [[numbers[id(one)] for one in bucket.parameters()] for bucket in buckets]
        return True


def _nccl_backends() -> list[Any]:
    c10d: Any = sys.modules.get("torch.distributed.distributed_c10d")
    groups = [] if c10d is None else list(c10d._world.pg_map)
    return [backend for group in groups for backend, _ in backends_of(group) if kind_of(backend) == NCCL]


def _sockets() -> frozenset[tuple[int, int]]:
    """Each connection by IP of this process: its descriptor, and its inode, which no other one has."""
    inodes: set[int] = set()
    for name in ("tcp", "tcp6"):
        try:
            with open(f"/proc/self/net/{name}", encoding="ascii") as file:
                rows = [line.split() for line in file.readlines()[1:]]
        except OSError:  # a kernel without IPv6
            continue
        inodes.update(int(row[9]) for row in rows if row[3] != _LISTENING)  # gloo's listener ends the process then
    found: list[tuple[int, int]] = []
    for name in os.listdir("/proc/self/fd"):
        try:
            about = os.fstat(int(name))
        except OSError:
            continue
        if stat.S_ISSOCK(about.st_mode) and about.st_ino in inodes:
            found.append((int(name), about.st_ino))
    return frozenset(found)
