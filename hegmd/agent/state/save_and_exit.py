"""Saves the state and ends workers: one that has saved its state, or one in which it could not be restored.

`save` writes into a descriptor while the training thread is parked. `leave` flushes all output and exits with code 99,
`end_unrestored` with 98. Neither returns. Exit handlers do not run: the training has
not ended, and they could destroy what the training thread uses.
"""

from __future__ import annotations

import gc
import os
import sys
from time import monotonic

from .. import cuda_state, signals
from ..notes import note
from ..refusals import refusal
from ..trap import NoCollection
from .values.refusals import Refusal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType
    from typing import Any, NoReturn

    from .storage.state_file import UnwrittenRest

_DENSE = "make the embedding with sparse=False, and its optimizer one for dense gradients (Adam in place of SparseAdam)"
_HELD_ELSEWHERE = "create it again in each batch, or keep its parts with hegm.keep(name, get, set)"
LEFT_STATUS = 99
UNRESTORED_STATUS = 98


def weigh() -> tuple[int, list[Refusal], list[str]]:
    """Return the size of the state, what prevents a restart, and what starts over after one.

    Temporary reasons are left out. The training thread is at a boundary.
    """
    from .capture import capture
    from .code import source_check
    from .script import variables
    from .storage import state_file

    state, refusals = capture()
    lasting = [*source_check.refusals(), *(found for found in refusals if not found.passes)]
    try:
        return state_file.size_bytes(state), lasting, variables.begin_anew(state)
    except state_file.UnsupportedValue as error:
        return 0, [*lasting, not_plain(state, error)], []


class TooLarge(Exception):
    """The state has more bytes than there is memory for it. Nothing was written."""

    def __init__(self, size_bytes: int) -> None:
        super().__init__(f"the state has {size_bytes} bytes")
        self.size_bytes = size_bytes


class SaveObstacles(Exception):
    """Reasons that prevent saving the state; `passes` is True if all of them are temporary."""

    def __init__(self, refusals: list[Refusal]) -> None:
        super().__init__("; ".join([found.what for found in refusals]))
        self.refusals = refusals
        self.passes = all(found.passes for found in refusals)


def snapshot(
    fd: int | None, most_bytes: int, begin: Callable[[], object]
) -> tuple[int, list[str], UnwrittenRest | None]:
    """Write the state of the parked training to the start of a descriptor. The training then continues.

    Returns the size, what starts over in a process that starts from it, and what is still to be written while the
    training continues. Calls `begin` before the first byte is written. Flushes the script's output first. Raises
    TooLarge, SaveObstacles, OSError and HegmError.
    """
    from .. import pinned_buffers
    from .storage import shadow

    rest = None
    if fd is not None and cuda_state.in_use() is not None:
        shadow.prepare()
        pinned_buffers.prepare()
    try:
        with NoCollection():  # in every third snapshot the new objects made it search all, for 0.2 s
            size_bytes, anew, rest = _snapshot(fd, most_bytes, begin)
        return size_bytes, anew, rest
    finally:
        shadow.drop()
        if rest is None:
            pinned_buffers.drop()


def _snapshot(
    fd: int | None, most_bytes: int, begin: Callable[[], object]
) -> tuple[int, list[str], UnwrittenRest | None]:
    from .capture import capture
    from .code import source_check
    from .script import output_files, variables
    from .storage import state_file

    times = [monotonic()]
    state, refusals = capture()
    times.append(monotonic())
    refusals = [*source_check.refusals(), *refusals]
    if refusals:
        raise SaveObstacles(refusals)
    if output_files.is_wanted():
        flush_changed()
        state[output_files.KEY] = output_files.lengths()
    try:
        whole = state_file.State(state)
    except state_file.UnsupportedValue as error:
        raise SaveObstacles([not_plain(state, error)]) from error
    if fd is None or whole.size_bytes > most_bytes:
        raise TooLarge(whole.size_bytes)
    flush_changed()
    anew = variables.begin_anew(state)
    begin()
    times.append(monotonic())
    rest = whole.begin(fd)
    times.append(monotonic())
    looked_s, parted_s, written_s = [end - start for start, end in zip(times, times[1:])]
    note(f"snapshot: looked {looked_s:.4f} s, taken apart {parted_s:.4f} s, kept {written_s:.4f} s")
    return whole.size_bytes, anew, rest


def save(
    fd: int,
    ident: int | None = None,
    progress: Callable[[int], None] | None = None,
    frame: FrameType | None = None,
    tell: Callable[[list[str]], object] | None = None,
) -> int:
    """Write the state of the parked training to the descriptor, and return its size. Raises HegmError, OSError.

    Once it is written, `tell` gets what starts over after a restart from it.
    """
    from .. import pinned_buffers

    if cuda_state.in_use() is not None:
        pinned_buffers.prepare()
    try:
        with NoCollection():
            return _save(fd, ident, progress, frame, tell)
    finally:
        pinned_buffers.drop()


def _save(
    fd: int,
    ident: int | None,
    progress: Callable[[int], None] | None,
    frame: FrameType | None,
    tell: Callable[[list[str]], object] | None,
) -> int:
    from .capture import capture
    from .code import source_check
    from .script import variables
    from .storage import state_file

    state, refusals = capture(ident, frame)
    refusals = [*source_check.refusals(), *refusals]
    if not refusals:
        began = monotonic()
        try:
            written_bytes = state_file.write(fd, state, progress)
            note(f"the state was written in {monotonic() - began:.4f} s: {written_bytes} bytes")
            if tell is not None:
                tell(variables.begin_anew(state))
            return written_bytes
        except state_file.UnsupportedValue as error:
            refusals = [not_plain(state, error)]
    raise refusal("; ".join([found.what for found in refusals]), hints_of(refusals))


def hints_of(refusals: list[Refusal]) -> str:
    """Join the hints of all refusals, each once."""
    return "; and ".join(dict.fromkeys(found.hint for found in refusals))


def not_plain(state: dict[str, Any], error: Any) -> Refusal:
    """Return the refusal for an object that has no form in a state file."""
    hint = _DENSE if "torch.sparse_" in error.why else _HELD_ELSEWHERE
    return Refusal(f"{_named(state, error.path)} {error.why}, which no state file holds", hint)


def leave() -> NoReturn:
    """Flush all output and end the process. The workers of its loaders end with it."""
    flush_all()
    processes = sys.modules.get("multiprocessing.process")
    for child in list(getattr(processes, "_children", ())):
        try:
            child.terminate()
        except (OSError, ValueError, AttributeError):
            pass
    os._exit(left_status())


def end_unrestored(reasons: list[str]) -> NoReturn:
    """Print why the state was not restored, and end the worker before it has made a step. Its state stays complete."""
    flush_all()
    text = f"hegm: the training was not restarted: {'; '.join(reasons)}. Its saved state is unchanged.\n"
    os.write(2, text.encode(errors="replace"))
    os._exit(UNRESTORED_STATUS)


def tell_waiting() -> None:
    """Print that another script saved this state, and that this process has ended without it."""
    os.write(2, b"hegm: this script is not the one that left its state, which waits for that one.\n")


def left_status() -> int:
    """Return the exit code of a worker that has saved its state."""
    try:
        return int(os.environ["HEGM_EXIT_CODE"])
    except (KeyError, ValueError):
        return LEFT_STATUS


# Files that no file object of the script writes to, and the slot of a snapshot, which differs each time.
_NO_FILES = ("socket:", "anon_inode:", "hegm-pool")
#: The files that the script had open when they were looked for last, and its descriptors at that time.
_files: list[Any] = []
_descriptors: list[str] = []


def flush_changed() -> None:
    """Flush all output again. A search of all objects takes 0.1 s, and is made only if other files are open now."""
    global _descriptors
    weakref: Any = sys.modules["weakref"]
    now, files = _open_files(), [reference() for reference in _files]
    if now != _descriptors or not all(map(_is_open, files)):  # a file can be opened again by the same descriptor
        files, _descriptors = [file for file in _open_writers() if _is_open(file)], now
        _files[:] = map(weakref.ref, files)
    _flush(files)


def _is_open(file: Any) -> bool:
    try:
        return file is not None and not file.closed
    except ValueError:  # a text layer without its buffer
        return False


def _open_files() -> list[str]:
    """Return the descriptors of files and pipes, each with its target. Leaves out the agent's own of this park."""
    found: list[str] = []
    for name in set(os.listdir("/proc/self/fd")) - {str(fd) for fd in signals.own_descriptors()}:
        try:
            found.append(f"{name} {os.readlink('/proc/self/fd/' + name)}")
        except OSError:  # the folder itself
            pass
    return sorted(entry for entry in found if not any(word in entry for word in _NO_FILES))


def flush_all() -> None:
    """Flush every file that the script writes to, wherever it is referenced; text layers before their buffers."""
    _flush(_open_writers())


def _open_writers() -> list[Any]:
    # One pass: a process with PyTorch has 300,000 objects, and the request is answered after this.
    kinds = _kinds_of_files()
    return [candidate for candidate in gc.get_objects() if type(candidate) in kinds]


def _kinds_of_files() -> tuple[Any, ...]:
    io: Any = sys.modules["io"]
    return (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom)


def _flush(files: list[Any]) -> None:
    for kind in _kinds_of_files():
        for file in [candidate for candidate in files if type(candidate) is kind]:
            try:
                file.flush()
            except (OSError, ValueError, RuntimeError):
                pass


def _named(state: dict[str, Any], path: str) -> str:
    """Return the path in the state in the script's words, as far as it concerns what the script holds."""
    import re

    match = re.match(r"holdings\[(\d+)\](?:\.content)?(.*)", path)
    if match is None:
        return path
    return f"{state['holdings'][int(match[1])]['names'][0]}{match[2]}"
