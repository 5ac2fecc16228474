"""The decisions of HeGM's launcher: a lock between a worker that saved its state and the next, and the files of both.

Serves the supervisor of `hegmctl run`, with files instead of the daemon. Owns `FOLDER/PID/`: `latest.pt`, which the
worker's agent writes and the next worker's agent restores; `lock`, which exists from the save until a controller
removes it; `command`, which shows that a state belongs to the same training. If a worker exits for another reason, the
launcher exits in the same way. A state is never ignored silently: it is restored, or it belongs to another command and
is kept aside with a warning, or nothing is started.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from hegmcompat import held_state, private_files, workers
from hegmcompat.surroundings import COMMAND, REFUSED, LauncherSettings
from hegmcompat.terminal import warn
from hegmctl import claim_notes
from hegmctl.agentless import HINT, AgentlessWatch
from hegmctl.endpoint import find_endpoint
from hegmctl.isolation import leaves_out
from hegmctl.prestart import LOCK_FD
from hegmctl.running import OF_ONE_START, prepare
from hegmctl.supervisor import GiveUp, Start
from hegmd.errors import EXTERNAL, HegmError, Refused

_OTHERS = ".other"
_COMMAND_BYTES = 1 << 20
_ZIP = b"PK"  # the first bytes of a file of torch.save
_MIB, _GIB = 1 << 20, 1 << 30


class Launcher:
    """A command and its folder. `debug` takes HeGM's own lines."""

    def __init__(
        self,
        surroundings: LauncherSettings,
        command: Sequence[str],
        *,
        environ: Mapping[str, str],
        debug: Callable[[str], None],
    ) -> None:
        self._at = surroundings
        self.command = normalized(command)
        self._debug = debug
        self._pid = os.getpid()
        self._state = surroundings.state_of(self._pid)
        self._lock = surroundings.lock_of(self._pid)
        self._iteration = 0
        self._before: tuple[int, int, int, int] | None = None
        self._held: held_state.HeldState | None = None
        self._next: Start | GiveUp | None = None
        #: The file in which a restarted worker notes that it has restored the state.
        self._claim: int | None = None
        #: Finds processes that started again from the beginning; and the last finding.
        self._lookout = AgentlessWatch()
        self._found = ""
        #: The environment of a worker, without the variables of its state.
        self.environ = self._prepared(environ)

    def first(self) -> Start:
        """Return the first start, after creating and checking the directory. Raises HegmError."""
        private_files.make_folder(self._state.parent)
        self._clear()
        own = json.dumps([_working_folder(), *self.command]).encode()
        command_path = self._state.with_name(COMMAND)
        if os.path.lexists(self._state):
            self._look_at_state()
            if private_files.read(command_path, _COMMAND_BYTES) != own:
                aside = self._state.with_name(self._state.name + _OTHERS)
                self._put_aside(aside)
                warn(f"{self._state} belongs to another command: it is kept as {aside}, and the training starts over")
            else:
                self._require_agent()
                warn(f"the training continues from {self._state}")
        try:
            private_files.write(command_path, own)
        except OSError as error:
            hint = "name another folder in HEGM_CHECKPOINT_DIR"
            raise HegmError(EXTERNAL, f"{self._state.parent} cannot be written: {error.strerror}", hint) from error
        return self._turn_of_worker()

    # ---- for the supervisor -----------------------------------------------------------------------------------------

    def turn(self, now: float, pid: int | None) -> float | None:
        """Look at a lock every so often, and at a worker until it has its state. Raises HegmError."""
        if self._held is None:
            return self._look_for_agentless(now, pid)
        if os.path.lexists(self._lock):
            return now + self._at.poll_interval_s
        held, self._held = self._held, None
        try:
            held.put_back()
        except OSError as error:
            raise self._not_kept(error) from error
        finally:
            held.close()
        self._debug(f"[Launcher] Checkpoint flushed to disk ({held.size_bytes / _MIB:.1f} MB).")
        self._debug("[Launcher] Snapshot complete. Resuming...")
        self._next = self._turn_of_worker()
        return None

    def expected(self) -> None:
        """Do nothing: a launcher prestarts no process."""

    def is_ready(self, pid: int | None) -> None:
        """Do nothing: a launcher prestarts no process."""

    def started(self, pid: int, *, was_ready: bool = False) -> None:
        """Register the worker for hegm-ctrl."""
        self._next = None
        try:
            workers.register(self._at.folder, self._pid, pid)
        except (OSError, HegmError) as error:
            warn(f"hegm-ctrl will not find the worker, pid {pid}: {error}")

    def not_started(self, why: str) -> None:
        """Give up: the command can no longer be started."""
        hint = f"check that it exists; its state stays in {self._state}"
        self._next = GiveUp(f"{self.command[0]} cannot be started again: {why}", hint)

    def next_start(self) -> Start | GiveUp | None:
        """Return what to do, once the lock is gone."""
        return self._next

    def ended(self, status: int, *, sent_signal: int | None) -> bool:
        """Return True if it has saved its state and has to be continued. Raises HegmError."""
        workers.unregister(self._at.folder, self._pid)
        self._debug(f"[Launcher] Worker exited with code {status}")
        now = private_files.identity(self._state)
        has_gone_on = self._take_word()
        if self._found:
            self._next = GiveUp(self._found, f"{HINT}; {self._state} is unchanged")
            return True
        if status == 0 and self.has_new_state():
            raise Refused(
                f"{self.command[0]} ended with 0, and a training in it has saved its state, {self._state}",
                f"have {self.command[0]} exec the training, so that its {self._at.exit_code} is seen; the state stays",
            )
        if status == 0 and not has_gone_on:
            message = f"{self.command[0]} ended with 0, and no training in it has continued from {self._state}"
            hint = f"read its output; to continue from the file, set HEGM_CHECKPOINT_PATH={self._state}"
            self._next = GiveUp(message, hint)
            return True
        if status == 0:
            self._debug("[Launcher] Training complete.")
            self._forget()
        elif status != self._at.exit_code:
            self._debug(f"[Launcher] Unexpected exit code {status}. Aborting.")
            if now is not None:
                warn(f"the worker ended with {status}; its last saved state stays in {self._state}")
        elif not self.has_new_state():
            warn(f"the worker ended with {status} and saved no state, so its training counts as finished")
        elif sent_signal is not None:
            warn(f"ended by signal {sent_signal}; the saved state stays in {self._state}")
        else:
            self._debug("[Launcher] Worker ready for snapshot.")
            self._hold()
            return True
        return False

    def has_new_state(self) -> bool:
        return private_files.identity(self._state) not in (None, self._before)

    def settle(self, command: Sequence[str], environ: Mapping[str, str]) -> None:
        """Adopt another command and environment, with which it also continues from its files."""
        self.command = list(command)
        self.environ = {name: value for name, value in environ.items() if name not in OF_ONE_START}

    def left_to_daemon(self) -> None:
        """Leave the next step to the daemon: the worker has ended."""
        workers.unregister(self._at.folder, self._pid)
        self._take_word()
        self._before = private_files.identity(self._state)

    def close(self) -> None:
        """Remove the lock and the registration."""
        self._take_word()
        if self._held is not None:
            warn(f"the state of the training stays in {self._state}")
            self._held.close()
            self._held = None
            with suppress(OSError):
                self._lock.unlink()

    def _look_for_agentless(self, now: float, pid: int | None) -> float | None:
        if self._claim is None or pid is None or self._found or claim_notes.is_back(self._claim):
            return None
        self._found = self._lookout.check(pid, now, self._claim) or ""
        return self._lookout.look_at

    # ---- its parts --------------------------------------------------------------------------------------------------

    def _require_agent(self) -> None:
        if (word := leaves_out(self.command)) is not None:
            hint = f"remove it from the command; {self._state} is unchanged"
            raise Refused(f"`{word}` keeps hegmd's agent out of {self.command[0]}: it would start over", hint)

    def _look_at_state(self) -> None:
        try:
            with private_files.opened(self._state) as fd:
                begins = os.read(fd, len(_ZIP))
        except OSError as error:
            hint = "move it away, or name another folder in HEGM_CHECKPOINT_DIR"
            raise Refused(f"{self._state} is not a state file of hegmd: {error.strerror}", hint) from error
        if begins == _ZIP:
            raise Refused(
                f"{self._state} was written by HeGM with torch.save: loading it would run code from it",
                "let HeGM finish that training, or move the file away and start over",
            )

    def _clear(self) -> None:
        """Remove the files of an earlier process with our pid. Raises HegmError."""
        for path in (self._lock, self._state.with_name(REFUSED)):
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                raise _in_the_way(path, error) from error

    def _put_aside(self, aside: Path) -> None:
        try:
            self._state.rename(aside)
        except OSError as error:
            raise _in_the_way(aside, error) from error

    def _turn_of_worker(self) -> Start:
        self._iteration += 1
        self._debug(f"[Launcher] ---- iteration {self._iteration} ----")
        self._debug(f"[Launcher] Spawning: {' '.join(self.command)}")
        private_files.remove_unfinished(self._state)
        # Now, while no worker runs: once one does it may have saved its state already.
        self._before = private_files.identity(self._state)
        environ = dict(self.environ)
        if private_files.identity(self._state) is not None:
            environ["HEGM_STATE"] = str(self._state)
            self._claim = os.memfd_create("hegm-claim")
            environ[LOCK_FD] = str(self._claim)
        return Start(self.command, environ, lock=self._claim)

    def _take_word(self) -> bool:
        """Return True if the worker that has ended had restored its state, if it had one. Closes the file."""
        claim, self._claim = self._claim, None
        if claim is None:
            return True
        try:
            return claim_notes.is_back(claim)
        finally:
            os.close(claim)

    def _prepared(self, environ: Mapping[str, str]) -> dict[str, str]:
        made = dict(environ)
        prepare(made, find_endpoint(None, made).path, None, made.get("HEGM_GPU"))
        made.pop("HEGM_CTRL_TOKEN", None)
        made["HEGM_CHECKPOINT_PATH"] = str(self._state)
        made["HEGM_EXIT_CODE"] = str(self._at.exit_code)
        made["HEGM_LAUNCHER"] = str(self._pid)
        made["HEGM_ALLOW_RESTART"] = "1"
        return made

    def _hold(self) -> None:
        """Take the state into memory and make the lock."""
        try:
            self._held = held_state.take(self._state)
            self._debug(f"[Launcher] Checkpoint buffered ({self._held.size_bytes / _MIB:.1f} MB).")
            if not self._held.is_held:
                warn(f"no memory for {self._held.size_bytes / _GIB:.1f} GiB: {self._state} alone has the state")
            private_files.write(self._lock, str(self._pid).encode())
        except OSError as error:
            raise self._not_kept(error) from error
        self._debug(f"[Launcher] Lock at {self._lock}. Waiting for controller...")

    def _not_kept(self, error: OSError) -> HegmError:
        return HegmError(
            EXTERNAL,
            f"the state of the training, {self._state}, cannot be kept: {error.strerror}",
            "check that the folder exists and has free space; the file is unchanged",
        )

    def _forget(self) -> None:
        """Remove the state of a finished training, so that a later one with this pid does not continue from it."""
        for path in (self._state, self._state.with_name(COMMAND), self._state.with_name(REFUSED)):
            with suppress(OSError):
                path.unlink()
        if self._at.path is None:
            with suppress(OSError):
                self._state.parent.rmdir()


def _in_the_way(path: Path, error: OSError) -> Refused:
    hint = "move it away, or name another folder in HEGM_CHECKPOINT_DIR"
    return Refused(f"{path} is in the way of the launcher's own file: {error.strerror}", hint)


def _working_folder() -> str:
    try:
        return os.getcwd()
    except OSError as error:
        message = "the working folder was removed, and a state is identified by the command and its folder"
        raise Refused(message, "start it in a folder that exists") from error


def normalized(command: Sequence[str]) -> list[str]:
    """Let Python run a plain script: this Python, unless it is an installation's private one."""
    if not command[0].endswith(".py"):
        return list(command)
    return ["python3" if sys.flags.isolated else sys.executable, "-u", *command]
