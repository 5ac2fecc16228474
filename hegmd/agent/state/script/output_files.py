"""Files that the script appends to: their sizes at a snapshot, to which a recovered process truncates them.

Only with `hegmctl run --recover --truncate-outputs`. The agent keeps the rest of the file in another file beside it: a
second job may have opened the file, appended to it and closed it, and its lines cannot be recognised. A file is
truncated only if all of this holds: at the snapshot the process had it open for writing at its end, or had opened it
for appending before; it belongs to the user; it is still the same regular file, longer than it was, and the last bytes
before the cut are unchanged; and no process outside the job has it open for writing. So files that are changed in the
middle, such as databases, are left alone, and so are those that several ranks write.
"""

from __future__ import annotations

import os
import sys
from binascii import crc32

from ...notes import DEBUG, note

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from typing import Any

    #: Path, device, inode, length, and the checksum of the last bytes.
    Length = tuple[str, int, int, int, int]

#: In a state: the files, of a job that asked for it. And where it did: the process of its supervisor.
KEY, WISH = "outputs", "HEGM_TRUNCATE_OUTPUTS"
_TAIL_BYTES = 4096
#: FILE.cut has the rest of FILE; each recovery appends to it.
CUT = ".cut"
_PIECE_BYTES = 1 << 20
_NOWHERE = ("/dev/", "/proc/", "/sys/")
_PERMISSIONS_FORMAT = 0o170000
_REGULAR = 0o100000

#: Paths that were opened for appending, in this process.
_appended: dict[str, None] = {}
_is_followed = False


def is_wanted() -> bool:
    """True if the job's supervisor was asked to truncate files."""
    return os.environ.get(WISH, "").isdigit()


def follow() -> None:
    """From now on notice which files are opened for appending: many scripts open their log for each line."""
    global _is_followed  # noqa: PLW0603 - one process
    if not _is_followed and is_wanted():
        _is_followed = True
        sys.addaudithook(_notice)


def _notice(event: str, arguments: Any) -> None:
    if event != "open":
        return
    try:
        path, _mode, flags = arguments
        if type(path) is not int and flags & os.O_APPEND:
            _appended[os.path.abspath(os.fsdecode(path))] = None
    except Exception as error:  # noqa: BLE001 - the script's own call would fail
        note(f"a file that is opened for appending was not noticed: {error!r}")


def lengths() -> list[Length]:
    """Each file that is to be cut back to its length now. Called while the training is parked, its output flushed."""
    paths = {**dict.fromkeys(_open_paths()), **_appended}
    return [found for found in map(_length_of, paths) if found is not None]


def _open_paths() -> Iterator[str]:
    """Files that this process has open for writing at their end."""
    for name in os.listdir("/proc/self/fd"):
        try:
            path = os.readlink("/proc/self/fd/" + name)
            flags, at = _open_flags("self", name)
            if _writes_at_end(flags, at, os.stat(int(name)).st_size) and not _is_of_ranks(int(name)):
                yield path
        except (OSError, ValueError):  # the folder's own
            continue


def _is_of_ranks(fd: int) -> bool:
    """Return True if it is the output of a launcher, which its ranks have together."""
    return fd in (1, 2) and os.environ.get("WORLD_SIZE", "1") != "1"


def _writes_at_end(flags: int, at: int, size_bytes: int) -> bool:
    if flags & os.O_APPEND:
        return bool(flags & os.O_ACCMODE)
    return flags & os.O_ACCMODE == os.O_WRONLY and at == size_bytes


def _open_flags(pid: str, fd: str) -> tuple[int, int]:
    """With which flags a descriptor was opened, and its place in the file. Raises OSError, ValueError."""
    with open(f"/proc/{pid}/fdinfo/{fd}", "rb") as info:
        lines = dict([line.split(b":", 1) for line in info.read().splitlines() if b":" in line])
    return int(lines[b"flags"], 8), int(lines[b"pos"])


def _length_of(path: str) -> Length | None:
    try:
        fd = _opened(path, os.O_RDONLY)
    except OSError:  # it was removed, is a link, or is unreadable
        return None
    try:
        found = os.fstat(fd)
        if not _is_own(found) or path.startswith(_NOWHERE) or path == os.environ.get(DEBUG):
            return None
        return path, found.st_dev, found.st_ino, found.st_size, _sum_before(fd, found.st_size)
    except OSError:
        return None
    finally:
        os.close(fd)


def _opened(path: str, how: int) -> int:
    return os.open(path, how | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)


def _is_own(found: os.stat_result) -> bool:
    return found.st_mode & _PERMISSIONS_FORMAT == _REGULAR and found.st_uid == os.geteuid() and found.st_nlink > 0


def _sum_before(fd: int, size_bytes: int) -> int:
    start = max(0, size_bytes - _TAIL_BYTES)
    return crc32(os.pread(fd, size_bytes - start, start))


# ---- in the process that was started from the snapshot --------------------------------------------------------------


def cut_back(saved: Iterable[Length]) -> None:
    """Cut these files, and have descriptors of this process write on from there. Its output is flushed before."""
    supervisor = os.environ.get(WISH, "")
    if not supervisor.isdigit():
        return
    longer = [one for one in saved if _is_longer(one)]
    if not longer:
        return
    others = _written_by_others(int(supervisor))
    for path, device, inode, size_bytes, total in longer:
        if (device, inode) in others:
            _say(f"{path} was not cut back to {size_bytes} bytes: process {others[device, inode]} writes to it as well")
            continue
        try:
            _cut((path, device, inode, size_bytes, total))
        except OSError as error:
            _say(f"{path} was not cut back to {size_bytes} bytes: {error}")


def _is_longer(saved: Length) -> bool:
    try:
        found = os.lstat(saved[0])
    except OSError:
        return False
    return (found.st_dev, found.st_ino) == saved[1:3] and _is_own(found) and found.st_size > saved[3]


def _cut(saved: Length) -> None:
    path, device, inode, size_bytes, total = saved
    fd = _opened(path, os.O_RDWR)
    try:
        found = os.fstat(fd)
        is_same = (found.st_dev, found.st_ino) == (device, inode) and _is_own(found)
        if not is_same or _sum_before(fd, size_bytes) != total:
            note(f"{path} was replaced, and is left unchanged")
            return
        _keep_rest(path + CUT, fd, size_bytes, found.st_mode & 0o666)
        os.ftruncate(fd, size_bytes)
    finally:
        os.close(fd)
    for name in os.listdir("/proc/self/fd"):
        try:
            found = os.stat(int(name))
            if (found.st_dev, found.st_ino) == (device, inode) and _open_flags("self", name)[1] > size_bytes:
                os.lseek(int(name), size_bytes, os.SEEK_SET)
        except (OSError, ValueError):
            continue


def _keep_rest(path: str, fd: int, start: int, mode: int) -> None:
    """Append what follows that place in the file. Raises OSError; then nothing is cut off."""
    # Not by O_APPEND: a file that is opened so is taken for an output of the script.
    kept = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, mode)
    try:
        if not _is_own(os.fstat(kept)):
            raise OSError(f"{path} does not belong to this user")
        end = os.lseek(kept, 0, os.SEEK_END)
        try:
            while piece := os.pread(fd, _PIECE_BYTES, start):
                start += len(piece)
                while piece:
                    piece = piece[os.write(kept, piece) :]
            os.fsync(kept)
        except OSError:
            os.ftruncate(kept, end)  # the next recovery appends it again
            raise
    finally:
        os.close(kept)


def _written_by_others(supervisor: int) -> dict[tuple[int, int], int]:
    """Return the files that other readable processes write to, each with one of these processes.

    This process, its children and its ancestors up to the supervisor do not count.
    """
    parents = {pid: _parent_of(pid) for pid in map(int, filter(str.isdigit, os.listdir("/proc")))}
    own = os.getpid()
    line, pid = {own, supervisor}, own
    while pid not in (0, 1, supervisor):
        pid = parents.get(pid, 0)
        line.add(pid)
    found: dict[tuple[int, int], int] = {}
    for pid in parents:
        if pid in line or own in _line_of(pid, parents):
            continue
        for file in _written_by(str(pid)):
            found[file] = pid
    return found


def _line_of(pid: int, parents: dict[int, int]) -> set[int]:
    found: set[int] = set()
    while pid not in found and pid:
        found.add(pid)
        pid = parents.get(pid, 0)
    return found


def _parent_of(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:
            return int(stat.read().rpartition(b")")[2].split()[1])
    except (OSError, ValueError, IndexError):
        return 0


def _written_by(pid: str) -> Iterator[tuple[int, int]]:
    try:
        names = os.listdir(f"/proc/{pid}/fd")
    except OSError:  # another user's, or it has ended
        return
    for name in names:
        try:
            if _open_flags(pid, name)[0] & os.O_ACCMODE:
                found = os.stat(f"/proc/{pid}/fd/{name}")
                yield found.st_dev, found.st_ino
        except (OSError, ValueError, KeyError):
            continue


def _say(text: str) -> None:
    """On stderr: stdout belongs to the script."""
    os.write(2, f"hegm: {text}.\n".encode(errors="replace"))
