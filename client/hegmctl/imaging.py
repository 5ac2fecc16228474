"""The command that restores a job from an image.

It truncates outputs that have grown itself, with the caller's rights: the daemon names them when it refuses, and is
asked again.
"""

from __future__ import annotations

import os
from contextlib import contextmanager, suppress

from hegmctl.connection import of_kind
from hegmctl.interruption import Interrupted
from hegmctl.move_commands import Watched, carry_out
from hegmctl.outputs import cut_back
from hegmd.errors import DENIED, DISCONNECTED, REFUSED, HegmError
from hegmd.protocol.messages import Restore
from hegmd.protocol.record import as_list

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Generator, Mapping, Sequence

    from hegmctl.cli import Session
    from hegmctl.outputs import TruncatedFile

STREAMS = {"stdout": 1, "stderr": 2}


def restore(session: Session) -> int:
    named = {name: path for name in STREAMS if (path := session.arguments.text(name)) is not None}
    request = of_kind(session.arguments.request(outlets=tuple(named)), Restore)
    older: list[str] = []
    if session.arguments.flag("newest"):
        from hegmctl.images import from_newest

        newest, *older = from_newest(request.path)
        request = request.replace(path=newest)
        session.sink.note(f"the newest image is {newest}")
    watched = Watched()
    with outlets(named, watched, keep=not request.dry_run) as fds:
        for next_older in older:
            try:
                return _restore(session, request, fds, watched)
            except HegmError as denied:
                if denied.code is not DENIED:
                    raise
                session.sink.note(f"{denied.message}; the next older image is {next_older}")
            request = request.replace(path=next_older)
        return _restore(session, request, fds, watched)


def _restore(session: Session, request: Restore, fds: Sequence[int], watched: Watched) -> int:
    try:
        return carry_out(session, request, fds, watched)
    except HegmError as refused:
        grown = as_list(refused.facts.get("grown"))
        if not request.as_then or request.dry_run or refused.code is not REFUSED or not grown:
            raise
        with _as_then(session, grown, watched):
            return carry_out(session, request, fds, watched)


@contextmanager
def _as_then(session: Session, grown: Sequence[object], watched: Watched) -> Generator[None]:
    """Truncate those files to their former sizes. Undo that if the restore is known to have failed."""
    cuts: list[TruncatedFile] = []
    is_asked = False
    with _ended_in_order():
        try:
            cut_back(grown, cuts)
            for cut in cuts:
                _say(session, f"{cut.path} was cut back to {cut.size_bytes} bytes")
            waits = "restored processes end, and then the files are restored; a second Ctrl-C leaves them truncated"
            watched.stays = lambda: _say(session, waits)
            is_asked = True
            yield
        except BaseException as error:
            is_none = not is_asked or _came_to_nothing(error, watched)
            for cut in cuts:
                if is_none and _is_put_back(cut):
                    _say(session, f"{cut.path} is unchanged")
                else:
                    _say(session, f"{cut.path} stays truncated, and the removed part is in {cut.kept}")
            raise
        for cut in cuts:
            cut.drop()


def _is_put_back(cut: TruncatedFile) -> bool:
    try:
        return cut.put_back()
    except OSError:
        return False


def _say(session: Session, text: str) -> None:
    """Write a note, ignoring errors: a closed terminal must not prevent the files from being restored."""
    with suppress(OSError):
        session.sink.note(text)


@contextmanager
def _ended_in_order() -> Generator[None]:
    """Turn SIGHUP and SIGTERM into exceptions, so that changes are undone first. An ignored one stays so (nohup)."""
    from signal import SIG_IGN, SIGHUP, SIGTERM, getsignal, signal

    def end(number: int, _frame: object) -> None:
        raise Interrupted(number)

    heard = [number for number in (SIGHUP, SIGTERM) if getsignal(number) is not SIG_IGN]
    before = {number: signal(number, end) for number in heard}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal(number, handler)


@contextmanager
def outlets(named: Mapping[str, str], watched: Watched, *, keep: bool = True) -> Generator[list[int]]:
    """Open the targets of the job's streams with the caller's rights; `-` is our own stream. Raises HegmError.

    A file that was created for this is removed if the restore fails, or with `keep` False.
    """
    fds: list[int] = []
    made: list[str] = []
    try:
        for name, path in named.items():
            if path == "-":
                fds.append(os.dup(STREAMS[name]))
                continue
            try:
                fds.append(_opened(path, made))
            except OSError as error:
                raise HegmError(
                    REFUSED, f"{path} cannot be opened for --{name}: {error.strerror}", "name a file that you may write"
                ) from error
        yield fds
    except HegmError as error:
        keep = keep and not _came_to_nothing(error, watched)
        raise
    finally:
        for fd in fds:
            os.close(fd)
        if not keep:
            _remove_empty(made)


def _opened(path: str, made: list[str]) -> int:
    """Open the file for appending, and add its path to `made` if it is new. Raises OSError."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOCTTY | os.O_CLOEXEC
    try:
        fd = os.open(path, flags | os.O_EXCL, 0o666)
    except FileExistsError:
        return os.open(path, flags, 0o666)
    made.append(path)
    return fd


def _remove_empty(paths: Sequence[str]) -> None:
    for path in paths:
        with suppress(OSError):
            if os.lstat(path).st_size == 0:
                os.unlink(path)


def _came_to_nothing(error: BaseException, watched: Watched) -> bool:
    """Return True if the restore is known to have failed. Without an answer from the daemon it may have succeeded."""
    if watched.has_begun:
        return False
    return watched.refusal is not None or (isinstance(error, HegmError) and error.code is not DISCONNECTED)
