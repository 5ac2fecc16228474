"""Under `hegm-launcher`: SIGUSR1 asks this process to save its state at the next boundary, and to exit.

The package `state` saves the state, as for a restart that the daemon requests. The signal's handler only records the
request (`hegm_signal`). The agent's thread parks the training, has it write the state file next to the launcher's lock
file, and ends the process. Without a launcher (`enabled`) the command line is written next to the state file. If
something prevents the save, the reason is written to `refused` in the same directory, and the training continues.
"""

from __future__ import annotations

import os
from time import monotonic

from ..errors import HegmError
from .hegm_signal import ENABLED, LAUNCHER, STATE_PATH
from .notes import note
from .other_threads import Attempts, busy_thread
from .quiesce import PARK, ParkRequest
from .refusals import BUSY_HINT, DEBUG_HINT, not_parked, refusal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any, Protocol

    from .hegm_signal import Request
    from .orders import Orders
    from .quiesce import Gate

    class ExitInterface(Protocol):
        """The interface of the package `state` for saving and exiting."""

        #: The variables that a restart from the last saved state does not preserve.
        begins_anew: list[str]

        def is_due(self) -> bool:
            """Return True while a state is still to be restored in this process."""
            ...

        def fits(self) -> Callable[[], bool]:
            """Return the gate's check at each boundary: whether a restart can continue from there."""
            ...

        def save(self, fd: int) -> object:
            """Write the state of the parked training. Raises HegmError and OSError."""
            ...

        def leave(self) -> object: ...


REFUSED = "refused"
# How long other threads may stay busy after the training thread is parked.
IDLE_LIMIT_S = 30.0
_POLL_INTERVAL_S = 0.02
_OPEN_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_CREATE = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_STANDARD_ERROR = 2
_COMMAND_BYTES = 1 << 20


class StatePackage:
    """The package `state`, imported eagerly, because an upgrade may replace its files."""

    def __init__(self, gate: Gate) -> None:
        # No import statement: the package `state` imports `lifecycle`, which imports this module.
        session, _capture, leaving, points = map(
            _import_state_module, ("session", "capture", "save_and_exit", "script.capture_points")
        )
        self._gate = gate
        self._leaving = leaving
        self._readiness = points
        self.is_due = session.is_due
        self.leave = leaving.leave
        self.begins_anew: list[str] = []

    def fits(self) -> Callable[[], bool]:
        found: Callable[[], bool] = self._readiness.fits_of(self._gate)
        return found

    def save(self, fd: int) -> Any:
        """Write the state of the parked training. Raises HegmError with what prevents it, and OSError."""
        return self._leaving.save(fd, self._gate.training_thread, tell=self._note)

    def _note(self, begins_anew: list[str]) -> None:
        self.begins_anew = begins_anew


def _import_state_module(name: str) -> Any:
    return __import__(f"{__package__}.state.{name}", fromlist=["__name__"])


class ProcessExit:
    """Saves the state and ends this process. Runs in the agent's thread only."""

    def __init__(
        self,
        request: Request,
        gate: Gate,
        orders: Orders,
        restarts: ExitInterface,
        environ: Mapping[str, str],
        busy: Callable[[Gate], str | None] = busy_thread,
    ) -> None:
        self._request = request
        self._gate = gate
        self._orders = orders
        self._restarts = restarts
        self._environ = environ
        self._busy = busy
        self._attempts: Attempts | None = None
        self._rest_deadline: float | None = None

    def next_deadline(self) -> float | None:
        if not self._request.is_wanted:
            return None
        if self._attempts is not None:
            return self._attempts.next_deadline(_POLL_INTERVAL_S)
        return monotonic() + _POLL_INTERVAL_S

    def tick(self) -> None:
        """Read the state of the gate, and do the next step."""
        if not self._request.is_wanted or self._restarts.is_due():
            return  # its own state is not restored yet, and would be lost
        if self._attempts is None:
            self._ask()
        elif self._gate.declined is not None:
            self._stay(not_parked(None, None, self._gate.declined))
        else:
            self._leave_once_parked(self._attempts)

    def _ask(self) -> None:
        """Ask the training thread to park, unless an order of the daemon is under way: then after it."""
        ranks = self._environ.get("WORLD_SIZE", "")
        launcher = self._environ.get(LAUNCHER, "")
        in_the_way = against(self._environ)
        if in_the_way is not None:
            self._stay(refusal(*in_the_way))
        elif ranks.isdigit() and int(ranks) > 1:
            hint = "start the job with hegmctl run --allow-restart, which makes all of them exit at one boundary"
            self._stay(refusal(f"it is one of {ranks} ranks, which must exit together", hint))
        elif launcher.isdigit() and int(launcher) != os.getppid():
            hint = "start it with exec (exec python3 train.py), or start it with hegm-launcher directly"
            self._stay(
                refusal(f"its parent, process {os.getppid()}, would take its exit for the end of the training", hint)
            )
        elif self._orders.leave_alone("hegm-ctrl has requested its state, and it is about to exit"):
            self._attempts = Attempts(self._gate, ParkRequest(PARK, fits=self._restarts.fits()), busy=self._busy)
            self._attempts.begin()

    def _leave_once_parked(self, attempts: Attempts) -> None:
        if attempts.check():
            self._go()
            return
        if self._gate.parked and self._rest_deadline is None:
            self._rest_deadline = monotonic() + IDLE_LIMIT_S
        if self._rest_deadline is not None and attempts.busy is not None and monotonic() >= self._rest_deadline:
            self._stay(refusal(f"{attempts.busy}, not parked", BUSY_HINT))
        elif attempts.is_stopped_too_long:
            attempts.pause()

    def _go(self) -> None:
        self._gate.release_other_threads()  # one of them may have a lock that the script's own code needs here
        try:
            note_command(self._environ)
            write_whole(self._environ[STATE_PATH], self._restarts.save)
        except HegmError as error:
            self._stay(error)
        except Exception as error:  # noqa: BLE001 - the edge: whatever fails in here, the training continues
            self._stay(refusal(f"its state was not saved: {error!r}", DEBUG_HINT))
        else:
            note("the state is saved; leaving")
            if self._restarts.begins_anew:
                say(f"starts over after the restart: {'; '.join(self._restarts.begins_anew)}; hegm.keep keeps it")
            self._restarts.leave()

    def _stay(self, why: HegmError) -> None:
        """Let the training continue, and report why to the requester and to the user."""
        self._request.is_wanted = False
        self._attempts = self._rest_deadline = None
        text = f"{why.message}; {why.hint}"
        note(f"not leaving: {text}")
        say(text)
        try:
            folder = os.path.dirname(self._environ[STATE_PATH])
            write_whole(f"{folder}/{REFUSED}", lambda fd: os.write(fd, text.encode(errors="backslashreplace")))
        except (OSError, KeyError) as error:
            note(f"the reason was not written: {error!r}")
        self._gate.withdraw()
        self._orders.take_up()


def against(environ: Mapping[str, str]) -> tuple[str, str] | None:
    """Return why this training cannot save its state there, and what to do; None if it can."""
    path = environ.get(STATE_PATH, "")
    if environ.get(ENABLED) != str(os.getpid()) or not os.path.lexists(path) or is_own(path):
        return None
    return f"{path} holds the state of another command", hint_of(path)


def note_command(environ: Mapping[str, str]) -> None:
    """Write the command beside the state, before the state is written. Raises OSError."""
    if environ.get(ENABLED) == str(os.getpid()):
        path = environ[STATE_PATH]
        os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
        write_whole(command_file(path), lambda fd: os.write(fd, command()))


def is_own(path: str) -> bool:
    """Return True if the file there is a state that this command has saved."""
    try:
        found = os.lstat(path)
        fd = os.open(command_file(path), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        owners = {found.st_uid, os.fstat(fd).st_uid}
        return owners <= {0, os.geteuid()} and os.read(fd, _COMMAND_BYTES) == command()
    finally:
        os.close(fd)


def command() -> bytes:
    """Return the words of this process and its directory, which identify its state."""
    with open("/proc/self/cmdline", "rb") as file:
        return os.fsencode(os.getcwd()) + b"\0" + file.read()


def command_file(path: str) -> str:
    return f"{os.path.dirname(path)}/command"


def hint_of(path: str) -> str:
    """Return what to do if another command's state is in the way."""
    return f"name another file in {STATE_PATH}, or move {path} away"


def warn_of_another(modules: Mapping[str, object]) -> None:
    """Warn of HeGM's own package: it loads itself into every Python, and takes SIGUSR1 and the builtins."""
    if "hegm._config" in modules:
        say("HeGM's own package is in this Python too, and both would control the training: pip uninstall hegm")


def say(text: str) -> None:
    """Write a line for the user, in HeGM's form."""
    try:
        os.write(_STANDARD_ERROR, f"[HeGM] WARNING -- {text}\n".encode(errors="backslashreplace"))
    except OSError as error:
        note(f"it has no reader: {error}")


def write_whole(path: str, write: Callable[[int], object]) -> None:
    """Write a file for the owner only, which gets its name once all of it is on disk.

    Raises OSError, and what `write` raises; then the unfinished file is removed and the former file stays.
    """
    folder_path, _, name = path.rpartition("/")
    unnamed = f".{name}-{os.urandom(8).hex()}"
    folder = os.open(folder_path or "/", _OPEN_FOLDER)
    try:
        fd = os.open(unnamed, _CREATE, 0o600, dir_fd=folder)
        try:
            try:
                write(fd)
                os.fsync(fd)
            finally:
                os.close(fd)
            os.rename(unnamed, name, src_dir_fd=folder, dst_dir_fd=folder)
            os.fsync(folder)
        except BaseException:
            try:
                os.unlink(unnamed, dir_fd=folder)
            except OSError:
                pass
            raise
    finally:
        os.close(folder)
