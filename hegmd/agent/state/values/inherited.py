"""The state that this process was started with, if any: read once, and kept until all of it is restored.

It comes in an inherited descriptor or a file. A rank gets it from the supervisor of the job, which listens at an
address for each rank, because launchers leave no descriptor open for ranks. A process without a rank, such as the
launcher, has no state.
"""

from __future__ import annotations

import os
import sys
from time import monotonic

from ....protocol.slots import RECORD_BYTES, unpacked
from ....protocol.supervision import BACK, DAMAGED, EDITED, PAST, PAST_AT
from ... import pinned_buffers
from ...notes import note
from ..storage import state_file

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

#: An inherited descriptor, or a file. Set by who starts a worker again.
DESCRIPTOR, PATH = "HEGM_STATE_FD", "HEGM_STATE"
#: The number of ranks with states, and the prefix of the addresses that provide them.
RANKS = "HEGM_STATES"
RANK, WORLD_SIZE = "RANK", "WORLD_SIZE"
_STATE, _OVER = b"state", b"over"
_HANDED_WITHIN_S = 30.0
#: The right to continue from the state. It lasts while any process has this descriptor open; see protocol/supervision.
#: A process gives it up for an image.
LOCK = "HEGM_STATE_LOCK_FD"

_NVIDIA = "/dev/nvidiactl"
_NOT_READ = object()
_state: Any = _NOT_READ
_claimed: tuple[str | None, str] | None = None
_lock: int | None = None
#: The file of that descriptor.
_file: os.stat_result | None = None
#: The step of the snapshot that it is from.
_step: int | None = None
#: The rank; None for a process with a state of its own.
_rank: int | None = None


def is_there() -> bool:
    """Return True while this process continues from another one's state and has not restored it."""
    if _state is None:
        return False
    is_ranks = RANKS in os.environ and RANK in os.environ
    return _claimed is not None or DESCRIPTOR in os.environ or PATH in os.environ or is_ranks


def is_for_ranks() -> bool:
    """Return True if there are states of ranks and this process has claimed none."""
    return RANKS in os.environ and _claimed is None


def claim() -> None:
    """Claim the state for this process, so that its children see neither descriptor nor variables. Raises OSError."""
    global _claimed, _lock, _rank, _state  # noqa: PLW0603 - one a process
    if _claimed is None and is_there():
        of_ranks = os.environ.get(RANKS)
        if of_ranks is not None:
            handed = _handed(of_ranks)
            os.environ.pop(RANKS, None)
            if handed is None:
                _state = None
            else:
                _claimed, _lock, _rank = (str(handed[0]), ""), handed[1], int(os.environ[RANK])
            return
        lock = os.environ.pop(LOCK, "")
        if lock.isdigit():
            os.set_inheritable(int(lock), False)
            _lock = int(lock)
        number, path = os.environ.pop(DESCRIPTOR, None), os.environ.pop(PATH, "")
        if number is not None and number.isdigit():
            os.set_inheritable(int(number), False)
        _claimed = (number, path)


def state() -> Any:
    """Return the state, or None. Raises DamagedStateFile and OSError; a later call then reads again."""
    global _state  # noqa: PLW0603 - one a process
    if RANKS in os.environ:
        claim()
    if not is_there():
        return None
    if _state is _NOT_READ:
        if os.path.exists(_NVIDIA):
            pinned_buffers.prepare()  # while it is read
        began = monotonic()
        try:
            _state = _read()
        except state_file.DamagedStateFile:
            _note(DAMAGED, len(BACK))  # torchrun hides the exit status of a rank
            raise
        note(f"the state was checked in {monotonic() - began:.4f} s")
    return _state


def forget() -> None:
    """Drop the restored state and note that in the lock's file. Its memory is freed when it is unused."""
    global _state  # noqa: PLW0603 - one a process
    _state = None
    pinned_buffers.drop()
    _close()
    if _rank is None:
        _note(BACK, 0)


def _close() -> None:
    """Close the descriptor, which keeps the file's memory. The script may have closed it and reused its number."""
    global _claimed, _file  # noqa: PLW0603 - one a process
    file, _file = _file, None
    number = (_claimed or (None, ""))[0]
    _claimed = (None, "")
    try:
        if file is not None and number is not None and os.path.samestat(os.fstat(int(number)), file):
            os.close(int(number))
    except OSError:
        pass


def step() -> int | None:
    """Return the step of the snapshot that the state is from; None if it is from none, or was not read yet."""
    return _step


def note_past() -> None:
    """Note that this process has trained beyond its state: its exit no longer counts as a failure of its restart."""
    _note(PAST, PAST_AT + (_rank or 0))


def note_edited() -> None:
    """Note that this process ends because its script was edited after the state was saved."""
    _note(EDITED, 0)


def close_lock() -> None:
    """Give up the right: an image must not contain the descriptor, whose file belongs to the daemon."""
    global _lock
    lock, _lock = _lock, None
    if lock is not None:
        os.close(lock)


def _note(word: bytes, at: int) -> None:
    if _lock is not None:
        try:
            os.pwrite(_lock, word, at)
        except OSError:
            pass  # a full disk; the daemon reports it then


def _handed(of_ranks: str) -> tuple[int, int] | None:
    """Return this rank's state from the supervisor of its job; None if the operation is over. Raises OSError.

    Its second descriptor is the right to continue from the state, and stays open as long as the process lives.
    """
    socket: Any = __import__("socket")
    count, _, name = of_ranks.partition(":")
    if RANK not in os.environ:
        raise OSError(f"{RANKS} says that it is of ranks, and {RANK} is not set")
    rank, world = os.environ[RANK], os.environ.get(WORLD_SIZE, "1")
    if world != count:
        raise OSError(f"it is of {count} ranks, and the job has {world} now")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as door:
        door.settimeout(_HANDED_WITHIN_S)
        try:
            door.connect(f"\0{name}-{rank}")
        except OSError as error:
            raise OSError(f"rank {rank} cannot reach the hegmctl run of its job: {error}") from error
        said, ancillary, _, _ = door.recvmsg(64, socket.CMSG_SPACE(8), socket.MSG_CMSG_CLOEXEC)
    fds = [
        int.from_bytes(data[at : at + 4], sys.byteorder) for _, _, data in ancillary for at in range(0, len(data), 4)
    ]
    if said == _OVER:
        return None
    if said != _STATE or len(fds) != 2:
        raise OSError(f"rank {rank} received no state from the hegmctl run of its job")
    return fds[0], fds[1]


def _read() -> Any:
    global _file, _step  # noqa: PLW0603 - one a process
    number, path = _claimed or (os.environ.get(DESCRIPTOR), os.environ.get(PATH, ""))
    if number is not None:
        try:
            _file = os.fstat(int(number))
            record = unpacked(os.pread(int(number), RECORD_BYTES, max(0, _file.st_size - RECORD_BYTES)))
            _step = None if record is None else record.step
            return state_file.read(int(number))
        except ValueError as error:
            if isinstance(error, state_file.DamagedStateFile):
                raise
            raise state_file.DamagedStateFile(f"{DESCRIPTOR} is {number!r}, which is not a descriptor") from error
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        return state_file.read(fd)
    finally:
        os.close(fd)
