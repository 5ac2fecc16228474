"""The exits of workers whose state is kept: of one that saved it, and of one in which it could not be restored.

`save` writes into a descriptor while the training thread is parked. `leave` flushes all output and exits with code 99,
and `end_unrestored` with 98; neither returns. Exit handlers do not run: the training has not ended, and they could
destroy what the training thread uses.
"""

from __future__ import annotations

import gc
import os
import sys
from time import monotonic

from .. import cuda_state
from ..notes import note
from ..refusals import refusal
from .values.refusals import Refusal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType
    from typing import Any, NoReturn

    from .storage.state_file import Rest

_DENSE = "make the embedding with sparse=False, and its optimizer one for dense gradients (Adam in place of SparseAdam)"
_HELD_ELSEWHERE = "make it anew in each batch, or keep what it is made of with hegm.keep(name, get, set)"
LEFT_STATUS = 99
UNRESTORED_STATUS = 98


def weigh() -> tuple[int, list[Refusal], list[str]]:
    """How many bytes the state comes to, what stands against a restart, and what begins anew after one.

    Left out is what is over by itself. The training thread is at a boundary.
    """
    from .capture import capture
    from .code import source_check
    from .script import variables
    from .storage import state_file

    state, refusals = capture()
    lasting = [*source_check.refusals(), *(found for found in refusals if not found.passes)]
    try:
        return state_file.size_bytes(state), lasting, variables.begin_anew(state)
    except state_file.NotPlain as error:
        return 0, [*lasting, not_plain(state, error)], []


class TooLarge(Exception):
    """The state has more bytes than there is memory for it. Nothing was written."""

    def __init__(self, size_bytes: int) -> None:
        super().__init__(f"the state has {size_bytes} bytes")
        self.size_bytes = size_bytes


class Prevented(Exception):
    """What prevents that the state is saved; where all of it is over by itself, `passes` is set."""

    def __init__(self, refusals: list[Refusal]) -> None:
        super().__init__("; ".join([found.what for found in refusals]))
        self.refusals = refusals
        self.passes = all(found.passes for found in refusals)


def snapshot(fd: int | None, most_bytes: int, begin: Callable[[], object]) -> tuple[int, list[str], Rest | None]:
    """Write the state of the parked training, which then goes on, into the beginning of a descriptor.

    Return how many bytes it has, what begins anew in a process that is started from it, and what is still to be written
    while the training goes on. `begin` is called before the first byte is written. What the script has printed is
    flushed before. Raises TooLarge, Prevented, OSError and HegmError.
    """
    from .capture import capture
    from .code import source_check
    from .script import output_files, variables
    from .storage import pinned_buffers, state_file

    state, refusals = capture()
    refusals = [*source_check.refusals(), *refusals]
    if refusals:
        raise Prevented(refusals)
    if output_files.is_wanted():
        _flush_again()
        state[output_files.KEY] = output_files.lengths()
    try:
        whole = state_file.State(state)
    except state_file.NotPlain as error:
        raise Prevented([not_plain(state, error)]) from error
    if fd is None or whole.size_bytes > most_bytes:
        raise TooLarge(whole.size_bytes)
    if cuda_state.in_use() is not None:
        pinned_buffers.prepare()
    rest = None
    try:
        _flush_again()
        begin()
        rest = whole.begin(fd)
        if rest is None:
            whole.write(fd)
        return whole.size_bytes, variables.begin_anew(state), rest
    finally:
        if rest is None:
            pinned_buffers.drop()


def save(
    fd: int,
    ident: int | None = None,
    progress: Callable[[int], None] | None = None,
    frame: FrameType | None = None,
    tell: Callable[[list[str]], object] | None = None,
) -> int:
    """Write the state of the training, which stands, into the descriptor; how many bytes. Raises HegmError, OSError.

    `tell` is called, once it is written, with what begins anew after a restart from it.
    """
    from .storage import pinned_buffers

    if cuda_state.in_use() is not None:
        pinned_buffers.prepare()
    try:
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
        except state_file.NotPlain as error:
            refusals = [not_plain(state, error)]
    raise refusal("; ".join([found.what for found in refusals]), hints_of(refusals))


def hints_of(refusals: list[Refusal]) -> str:
    """What to change, for all of them: each thing once."""
    return "; and ".join(dict.fromkeys(found.hint for found in refusals))


def not_plain(state: dict[str, Any], error: Any) -> Refusal:
    """That something which goes along has no form in a state file."""
    hint = _DENSE if "torch.sparse_" in error.why else _HELD_ELSEWHERE
    return Refusal(f"{_named(state, error.path)} {error.why}, which no state file holds", hint)


def leave() -> NoReturn:
    """End the process: what it has written is flushed, its loaders' workers end with it."""
    flush_all()
    processes = sys.modules.get("multiprocessing.process")
    for child in list(getattr(processes, "_children", ())):
        try:
            child.terminate()
        except (OSError, ValueError, AttributeError):
            pass
    os._exit(left_status())


def end_unrestored(reasons: list[str]) -> NoReturn:
    """Say why a restarted worker is not to go on, and end it before it has done a step: its state is whole."""
    flush_all()
    text = f"hegm: the training was not restarted: {'; '.join(reasons)}. Nothing of its state was used up.\n"
    os.write(2, text.encode(errors="replace"))
    os._exit(UNRESTORED_STATUS)


def tell_waiting() -> None:
    """Say that this Python, another than the one that left its state, has ended without it."""
    os.write(2, b"hegm: this script is not the one that left its state, which waits for that one.\n")


def left_status() -> int:
    """What a worker ends with that has left its state."""
    try:
        return int(os.environ["HEGM_EXIT_CODE"])
    except (KeyError, ValueError):
        return LEFT_STATUS


# What no file object of the script writes to, and the slot of a snapshot, which is another one each time.
_NO_FILES = ("socket:", "anon_inode:", "hegm-pool")
#: The files that the script had open when they were looked for last, and its descriptors at that time.
_files: list[Any] = []
_descriptors: list[str] = []


def _flush_again() -> None:
    """The same as `flush_all`, which takes a fifth of a second, but that only files opened since are looked for."""
    global _descriptors  # noqa: PLW0603 - one process
    weakref: Any = sys.modules["weakref"]
    now = _open_files()
    if now != _descriptors:
        _files[:] = [weakref.ref(file) for file in _open_writers()]
        _descriptors = now
    _flush([file for file in [reference() for reference in _files] if file is not None])


def _open_files() -> list[str]:
    """Each descriptor that is of a file or a pipe, with what it is of."""
    found: list[str] = []
    for name in os.listdir("/proc/self/fd"):
        try:
            found.append(f"{name} {os.readlink('/proc/self/fd/' + name)}")
        except OSError:  # the folder itself
            pass
    return sorted(entry for entry in found if not any(word in entry for word in _NO_FILES))


def flush_all() -> None:
    """Every file that the script writes to, wherever it holds it; text before the bytes under it."""
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
    """The path in the state in the script's words, as far as it is about something that the script holds."""
    import re

    match = re.match(r"holdings\[(\d+)\](?:\.content)?(.*)", path)
    if match is None:
        return path
    return f"{state['holdings'][int(match[1])]['names'][0]}{match[2]}"
