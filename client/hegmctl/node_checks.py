"""The doctor without a daemon: runs hegmd's own checks with the caller's rights.

Runs hegmd as a program, because importing it would load the whole daemon, and because its lines can be shown as they
come. This is the only program that hegmctl runs; the daemon runs others through hegmd/system/programs.py.
"""

from __future__ import annotations

import json
import os
import sys

from hegmd.errors import EXTERNAL, ExternalError, HegmError
from hegmd.protocol.record import BadValue
from hegmd.protocol.snapshots import Check

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_TAIL_BYTES = 2000


def doctor_command() -> list[str]:
    """Return the doctor's command of this installation, isolated from the user's Python if this process is."""
    return [sys.executable, *(["-I"] if sys.flags.isolated else []), "-m", "hegmd", "--doctor"]


def check_here(on_check: Callable[[Check], object], argv: Sequence[str] = ()) -> None:
    """Run the checks and pass each to `on_check` as soon as it is made. Raises HegmError if they cannot be run."""
    argv = list(argv) or doctor_command()
    read_end, write_end = os.pipe()
    # Its standard error is kept in memory and shown only after a failure: a pipe that is not read could fill up.
    output = os.memfd_create("doctor")
    try:
        actions = [(os.POSIX_SPAWN_DUP2, write_end, 1), (os.POSIX_SPAWN_DUP2, output, 2)]
        try:
            pid = os.posix_spawn(argv[0], argv, os.environ, file_actions=actions)
        except OSError as error:
            os.close(read_end)
            raise HegmError(
                EXTERNAL, f"{argv[0]} cannot be run: {error.strerror}", "check that hegmd is installed"
            ) from error
        finally:
            os.close(write_end)
        _take_checks(argv, pid, read_end, output, on_check)
    finally:
        os.close(output)


def _take_checks(
    argv: Sequence[str], pid: int, read_end: int, output: int, on_check: Callable[[Check], object]
) -> None:
    ended = False
    count = 0
    try:
        with open(read_end, encoding="utf-8", errors="replace") as lines:
            for line in lines:
                on_check(_check_in(line, argv))
                count += 1
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        ended = True
    finally:
        if not ended:
            from signal import SIGTERM

            os.kill(pid, SIGTERM)
            os.waitpid(pid, 0)
    if not count:
        size_bytes = os.fstat(output).st_size
        tail = os.pread(output, _TAIL_BYTES, max(size_bytes - _TAIL_BYTES, 0)).decode("utf-8", "replace").strip()
        raise ExternalError(
            f"the checks could not be made: {tail.splitlines()[-1] if tail else f'hegmd ended with status {status}'}",
            f"try it alone: `{' '.join(argv)}`",
            argv=argv,
            status=status,
            output_tail=tail,
        )


def _check_in(line: str, argv: Sequence[str]) -> Check:
    try:
        return Check.from_plain(json.loads(line), "check")
    except (ValueError, BadValue) as error:
        raise ExternalError(
            f"hegmd printed an invalid check: {error}",
            "bring hegmctl and hegmd to the same release",
            argv=argv,
            status=None,
            output_tail=line,
        ) from error
