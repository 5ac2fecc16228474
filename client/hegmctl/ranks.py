"""`hegmctl run --ranks N`: the launcher of a training's ranks, which keeps the surviving ranks when one dies.

Parent of all ranks. It shares the board and the slots with them, sends them the decisions of `generations`, and holds
one spare process that has imported PyTorch. The daemon holds the slots; a recovery works without a running daemon. A
signal that ends this process is passed on to the ranks. If it is killed, they train on without recovery. Longer than
400 lines because all events of ranks, daemon and kernel are sorted here, in one loop.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import shutil
import signal
import socket
import tempfile
from json import dumps, loads
from time import monotonic, time

from hegmctl.generations import OVER, RUNNING, Generations
from hegmctl.parenthood import STOPS, EndRequest, Signals, end_like, perform_default_stop, reap, start
from hegmctl.prestart import LINE_FD, PrestartSpec, make_ready
from hegmd.errors import DISCONNECTED, NO_DAEMON, TIMEOUT, UNAVAILABLE, HegmError
from hegmd.protocol.agents import Noted
from hegmd.protocol.board import Board, board_bytes
from hegmd.protocol.messages import (
    DropRecovery,
    HoldSlot,
    MayStartRank,
    RankStart,
    RecoveryAttempt,
    RecoveryDropped,
    ReportRecovery,
    SlotHeld,
    SlotMemory,
)
from hegmd.protocol.recovery import UNDER_WAY
from hegmd.protocol.slots import RECORD_BYTES, unpacked

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Any

    from hegmctl.connection import Connection
    from hegmctl.generations import Attempt
    from hegmctl.parenthood import Signal
    from hegmctl.prestart import PrestartedProcess
    from hegmctl.wire import Descriptors

# The variables that a rank's agent reads; see hegmd/agent/ranks/line.py.
LAUNCHER, FOLDER = "HEGM_LAUNCHER_PID", "HEGM_RANKS_FOLDER"
MESSAGE_BYTES = 1 << 18
# Ranks that were asked to end have this long.
END_WITHIN_S = 10.0
# How long the daemon may take to accept a report: ranks wait for this process meanwhile.
REPORT_S = 2.0
# The daemon has so long to say whether a rank may be started, and is asked again so often while the job is suspended.
ASK_WITHIN_S, ASK_INTERVAL_S = 0.5, 1.0
# A daemon that does not answer may be busy. It is asked so long before ranks start without its answer.
SILENT_S = 10.0
_MEMORY = "/dev/shm"  # noqa: S108 - a private folder is made in it


class Process:
    """A rank: its process and our end of the connection to it."""

    def __init__(self, pid: int, line: socket.socket) -> None:
        self.pid = pid
        self.line = line
        #: True if it ends by its own will; and if this launcher has ended it, so that its status is of no account.
        self.ends = False
        self.was_ended = False

    def end(self, *numbers: int) -> None:
        self.was_ended = True
        for number in numbers:
            _send_signal(self.pid, number)


class Launcher:
    """The ranks of one command; the crew of its generations. `connect` opens a connection to the daemon."""

    def __init__(
        self,
        ranks: int,
        command: Sequence[str],
        environ: Mapping[str, str],
        *,
        connect: Callable[[float | None], Connection],
        say: Callable[[str], object],
        max_recoveries: int | None = None,
    ) -> None:
        self._ranks = ranks
        self._command = tuple(command)
        self._connect, self._say = connect, say
        self._folder = tempfile.mkdtemp(prefix="hegm-ranks-", dir=_MEMORY if os.path.isdir(_MEMORY) else None)
        self._environ = {**environ, **_surroundings(ranks, self._folder, environ)}
        self._board_fd = os.memfd_create("hegm-board")
        os.ftruncate(self._board_fd, board_bytes(ranks))
        self._board = Board(mmap.mmap(self._board_fd, 0), ranks)
        self._generations = Generations(ranks, self, max_recoveries=max_recoveries)
        self._processes: dict[int, Process] = {}
        self._slots: dict[int, int] = {}
        self._job: str | None = None
        self._is_protected = True
        self._mask: set[signal.Signals] = set()
        self._imports: tuple[Sequence[str], Sequence[str]] | None = None
        self._spare: PrestartedProcess | None = None
        #: The rank that the spare process is to be once it is ready.
        self._awaits_spare: int | None = None
        #: The ranks to start once their job is no longer suspended, and when the daemon is asked next.
        self._held_back: list[int] = []
        self._ask_at = 0.0
        #: Since when the daemon has not answered that question; and whether the user knows why ranks wait.
        self._silent_since: float | None = None
        #: Whether the daemon has answered, so that it may come back.
        self._has_daemon = False
        self._has_told_of_wait = False
        #: The signal that should end the ranks, the first status other than 0, and when the remaining ones are killed.
        self._end_request = EndRequest()
        self._status = 0
        self._kill_at: float | None = None
        self._gave_up = False

    def run(self) -> int:
        """Run the ranks to their end; the exit status. Raises HegmError if they cannot be started."""
        with Signals() as signals:
            self._mask = signals.before
            try:
                for rank in range(self._ranks):
                    self._start(rank)
                while self._processes or self._awaits_spare is not None or self._held_back:
                    self._on_signal(signals.next(self._tick()))
                    self._read_all()
            finally:
                self._close()
        return end_like(self._status or int(self._gave_up))

    def _tick(self) -> float | None:
        now = monotonic()
        if self._kill_at is not None:
            if now >= self._kill_at:
                for process in self._processes.values():
                    if not process.ends:
                        process.end(signal.SIGKILL)
                self._kill_at = now + END_WITHIN_S
            return self._kill_at - now
        self._look_at_spare()
        if self._held_back:
            self._generations.hold(now)
            if now >= self._ask_at:
                self._start_held_back(now)
        wait_s = self._generations.tick(now)
        return wait_s if not self._held_back else min(ASK_INTERVAL_S, ASK_INTERVAL_S if wait_s is None else wait_s)

    def _close(self) -> None:
        if self._spare is not None:
            self._spare.end()
        for process in self._processes.values():  # only after an error of ours
            _send_signal(process.pid, signal.SIGKILL)
        shutil.rmtree(self._folder, ignore_errors=True)
        if self._job is not None:
            self._ask(lambda connection: connection.call(DropRecovery(job=str(self._job)), RecoveryDropped))

    # ---- processes --------------------------------------------------------------------------------------------------

    def _start(self, rank: int) -> None:
        """Start a process as that rank, or the spare one, which is ended if it cannot be it. Raises HegmError."""
        own_end, rank_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with rank_end:
            own_end.setblocking(False)
            own_end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, MESSAGE_BYTES)
            fcntl.fcntl(own_end.fileno(), fcntl.F_SETOWN, os.getpid())
            fcntl.fcntl(own_end.fileno(), fcntl.F_SETFL, fcntl.fcntl(own_end.fileno(), fcntl.F_GETFL) | fcntl.FASYNC)
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank), LINE_FD: str(rank_end.fileno())}
            environ = {**self._environ, **own}
            pid: int | None = None
            if self._spare is not None and not self._spare_is_coming():
                spare, self._spare = self._spare, None
                pid = spare.activate_as(self._command, environ)
            if pid is None:
                pid = start(self._command, environ, mask=self._mask, keep=(rank_end.fileno(),)).pid
        self._processes[rank] = Process(pid, own_end)
        self._send(rank, {"do": "board"}, (self._board_fd,))
        for slot, fd in self._slots.items():
            self._send(rank, {"do": "slot", "slot": slot}, (fd,))

    def _look_at_spare(self) -> None:
        """Keep one process ready while all ranks run, and assign it to a rank that needs it."""
        if self._spare is not None:
            self._spare.check()
        elif self._imports is not None and self._generations.phase == RUNNING and self._imports[0]:
            self._spare = make_ready(PrestartSpec(self._command, self._environ, *self._imports), self._mask)
            if self._spare is None:
                self._imports = None
        if self._awaits_spare is not None and not self._spare_is_coming():
            rank, self._awaits_spare = self._awaits_spare, None
            self._start_in_place_of(rank)

    def _start_held_back(self, now: float) -> None:
        """Start the ranks that wait, if the job is no longer suspended."""
        self._ask_at = now + ASK_INTERVAL_S
        if self._may_start():
            self._has_told_of_wait = False
            ranks, self._held_back = self._held_back, []
            for rank in ranks:
                self._start_in_place_of(rank)
        else:
            self._tell_of_wait()

    def _may_start(self) -> bool:
        """Return False while the job is suspended: others may have its GPU memory. Without a daemon it may start.

        A daemon that does not answer may be busy or restarting: False until it answers, or has been silent for long.
        """
        request = MayStartRank(run=self._environ["HEGM_RUN"])
        answer = self._ask(lambda connection: connection.call(request, RankStart), ASK_WITHIN_S)
        since, self._silent_since = self._silent_since, None
        if isinstance(answer, RankStart):
            return answer.may_start
        now = monotonic()
        is_away = self._has_daemon and answer.code in (DISCONNECTED, NO_DAEMON, UNAVAILABLE)
        if not (is_away or answer.code is TIMEOUT) or (since is not None and now - since >= SILENT_S):
            self._has_daemon = False
            return True
        self._silent_since = now if since is None else since
        return False

    def _tell_of_wait(self) -> None:
        """Tell the user once why ranks wait, as soon as the daemon has said so."""
        if self._silent_since is None and not self._has_told_of_wait:
            self._has_told_of_wait = True
            self._say(f"rank {self._held_back[0]} is started again once its job is resumed")

    def _spare_is_coming(self) -> bool:
        """Whether the spare process is still importing: it began before any other that could be started now."""
        return self._spare is not None and self._spare.awaited_until(self._command, self._environ) is not None

    def _on_signal(self, came: Signal | None) -> None:
        if came is None or (came.number == signal.SIGIO and not came.was_sent):
            return
        if came.number == signal.SIGCHLD:
            reap(self._reaped)
            return
        if came.ends:
            self._end_request.note(came.number, monotonic())
            if self._start_no_more():
                self._status = self._status or -came.number
                self._end_waits()
        if came.was_sent:
            for process in self._processes.values():
                _send_signal(process.pid, came.number)
        if came.number in STOPS:
            perform_default_stop(came.number)

    def _reaped(self, pid: int, status: int) -> None:
        rank = next((rank for rank, process in self._processes.items() if process.pid == pid), None)
        if rank is not None:
            self._ended(rank, status)

    def _ended(self, rank: int, status: int) -> None:
        """The process of a rank has ended: a fault, or the end of the training."""
        process = self._processes[rank]
        self._read(rank, process)
        del self._processes[rank]
        process.line.close()
        is_end = process.ends or self._end_request.number(monotonic()) is not None or self._kill_at is not None
        if not is_end and self._generations.can_replace:
            how = f"was ended by signal {-status}" if status < 0 else f"ended with exit status {status}"
            self._generations.died(rank, how, monotonic())
            if self._generations.phase == OVER and not self._status:
                self._status = status
            return
        if status and not self._status and not process.was_ended:
            self._status = status
        if status or process.ends:
            self._end_all()
        elif (
            self._end_request.number(monotonic()) is not None
            and self._generations.can_replace
            and self._generations.phase != RUNNING
        ):
            self._end_waits()

    def _start_no_more(self) -> bool:
        """Start none of the ranks that wait for the spare process, or for their job to be resumed; whether any did."""
        some = bool(self._held_back) or self._awaits_spare is not None
        self._held_back.clear()
        self._awaits_spare = None
        return some

    def _end_waits(self) -> None:
        """End the ranks that wait for one that does not come: a signal, which they may ignore, ends the training."""
        self._generations.ends()
        for rank in self._processes:
            self.send(rank, "end", why="a signal ends the training, and not all ranks are there")
        if self._kill_at is None:
            self._kill_at = monotonic() + END_WITHIN_S

    def _end_all(self) -> None:
        """End the remaining ranks, except those that are already ending."""
        self._start_no_more()
        if self._kill_at is None:
            self._kill_at = monotonic() + END_WITHIN_S
            for process in self._processes.values():
                if not process.ends:
                    process.end(signal.SIGTERM, signal.SIGCONT)

    # ---- what ranks say ---------------------------------------------------------------------------------------------

    def _read_all(self) -> None:
        for rank, process in list(self._processes.items()):
            self._read(rank, process)

    def _read(self, rank: int, process: Process) -> None:
        while True:
            try:
                data = process.line.recv(MESSAGE_BYTES)
            except OSError:
                return
            if not data:
                return
            self._take(rank, process, loads(data))

    def _take(self, rank: int, process: Process, message: dict[str, Any]) -> None:
        do, now, generation = message["do"], monotonic(), message.get("generation", 0)
        if do == "join":
            self._generations.hard_limit_s = message.get("hard_limit_s", self._generations.hard_limit_s)
            if message.get("imports") and self._imports is None:
                self._imports = (message["imports"], message["path"])
            self._generations.joined(rank, generation, message["step"], now, is_new=message["is_new"])
        elif do == "fault":
            self._generations.failed(rank, generation, message["why"], now)
        elif do == "unusable":
            self._generations.unusable(rank, generation, message["why"], now)
        elif do == "restored":
            self._generations.restored(rank, generation, now)
        elif do == "step":
            self._generations.stepped(rank, generation, now)
        elif do == "done":
            self._generations.finished(rank, generation, now)
        elif do == "layout":
            self._generations.learnt(message["layout"])
        elif do == "parked":
            self._generations.is_parked()
        elif do == "ends":
            process.ends = True
            self._generations.ends()
        elif do == "slot":
            self._hold_slot(rank, message["slot"], message["size_bytes"])
        elif do == "unprotected":
            self._note_unprotected(message["why"])

    # ---- the crew ---------------------------------------------------------------------------------------------------

    def send(self, rank: int, do: str, **what: Any) -> None:
        """Send an order to a rank. One that has just ended does not receive it."""
        self._send(rank, {"do": do, **what})

    def _send(self, rank: int, message: Mapping[str, Any], fds: Sequence[int] = ()) -> None:
        process = self._processes.get(rank)
        if process is None:
            return
        try:
            socket.send_fds(process.line, [dumps(message).encode()], list(fds))
        except OSError:  # it has ended, or does not read for so long that it is killed
            pass

    def kill(self, rank: int) -> None:
        """End a rank that does not answer."""
        process = self._processes.get(rank)
        if process is not None:
            self._say(f"rank {rank} does not answer, and is killed")
            _send_signal(process.pid, signal.SIGKILL)
        elif self._end_request.number(monotonic()) is not None:  # it has ended by that, and is not replaced
            self._end_waits()

    def replace(self, rank: int) -> None:
        """Replace that rank by another process: the spare one if there is one. While the job is suspended, it waits."""
        if not self._may_start():
            self._held_back.append(rank)
            self._ask_at = monotonic() + ASK_INTERVAL_S
            self._tell_of_wait()
        else:
            self._start_in_place_of(rank)

    def _start_in_place_of(self, rank: int) -> None:
        if self._awaits_spare is None and self._spare_is_coming():
            self._awaits_spare = rank
            return
        try:
            self._start(rank)
        except HegmError as error:
            self._say(error.message)
            self._end_all()

    def slots(self) -> dict[int, tuple[int, int]]:
        found: dict[int, tuple[int, int]] = {}
        for slot, fd in self._slots.items():
            record = unpacked(os.pread(fd, RECORD_BYTES, os.fstat(fd).st_size - RECORD_BYTES))
            if record is not None:
                found[slot] = (record.generation, record.step)
        return found

    def has_record(self, rank: int, step: int) -> bool:
        return self._board.read(rank, step) is not None

    def progress(self, rank: int) -> tuple[float, float, int]:
        return self._board.progress(rank)

    def forget_records(self) -> None:
        self._board.clear()
        for fd in self._slots.values():
            os.pwrite(fd, bytes(RECORD_BYTES), os.fstat(fd).st_size - RECORD_BYTES)

    def note(self, attempt: Attempt) -> None:
        """Report a recovery to the user and the daemon."""
        if attempt.gathered_s is None and attempt.result is None:
            self._say(
                f"{attempt.why}; all ranks stop at step {attempt.step}, and continue from the last one they share"
            )
        elif attempt.result == "recovered" and attempt.trained_s is not None:
            self._say(f"recovered from step {attempt.from_step} in {attempt.trained_s:.3f} s")
        told = RecoveryAttempt(
            failed_utc=time() - (monotonic() - attempt.failed_at) if attempt.failed_utc is None else attempt.failed_utc,
            why=attempt.why,
            step=attempt.step,
            from_step=attempt.from_step,
            generation=attempt.generation,
            started_s=attempt.gathered_s,
            restored_s=attempt.restored_s,
            trained_s=attempt.trained_s,
            result=attempt.result or UNDER_WAY,
        )
        attempt.failed_utc = told.failed_utc
        if attempt.restored_s is not None or attempt.result is not None:  # not while ranks wait
            self._report(told)

    def give_up(self, why: str, rank: int | None) -> None:
        """End all ranks. The one that failed last ends with its own error."""
        self._say(f"not recovered: {why}")
        self._gave_up = True
        self._start_no_more()
        self._kill_at = monotonic() + END_WITHIN_S
        for one, process in self._processes.items():
            if one == rank:
                self.send(one, "end", why=why)
            else:
                process.end(signal.SIGTERM, signal.SIGCONT)

    # ---- the daemon -------------------------------------------------------------------------------------------------

    def _hold_slot(self, rank: int, slot: int, size_bytes: int) -> None:
        """Have the daemon hold memory for a slot, and give it to all ranks."""
        fds: list[int] = []

        def take(descriptors: Descriptors) -> None:
            fds.extend(descriptors.steal(index) for index in range(len(descriptors)))

        def ask(connection: Connection) -> str:
            request = HoldSlot(run=self._environ["HEGM_RUN"], slot=slot, size_bytes=size_bytes)
            events = connection.stream(request, SlotMemory, SlotHeld, take=take)
            while True:
                try:
                    next(events)
                except StopIteration as end:
                    return str(end.value.job)

        answer = self._ask(ask)
        if isinstance(answer, HegmError) or not fds:
            self.send(rank, "slot", slot=slot, why=str(getattr(answer, "message", "the daemon sent no memory")))
            return
        self._job = answer
        if not self._is_protected:
            self._is_protected = True
            self._report(None)
        former = self._slots.get(slot)
        self._slots[slot] = fds.pop(0)
        if former is not None:
            os.close(former)
        for one in self._processes:
            self._send(one, {"do": "slot", "slot": slot}, (self._slots[slot],))

    def _note_unprotected(self, why: str) -> None:
        """Report once that there are no snapshots."""
        if self._is_protected:
            self._is_protected = False
            self._say(f"no snapshots are taken, so only ranks that live are recovered: {why}")
            self._report(None, why)

    def _report(self, attempt: RecoveryAttempt | None, why: str | None = None) -> None:
        request = ReportRecovery(run=self._environ["HEGM_RUN"], recovery=attempt, unprotected=why)
        self._ask(lambda connection: connection.call(request, Noted), REPORT_S)

    def _ask(self, what: Callable[[Connection], Any], limit_s: float | None = None) -> Any:
        """Ask the daemon; returns the error if it does not answer."""
        try:
            with self._connect(limit_s) as connection:
                answer = what(connection)
                self._has_daemon = True
                return answer
        except HegmError as error:
            return error


def _surroundings(ranks: int, folder: str, environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that all ranks have in addition to the command's environment."""
    found = {
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_free_port()),
        LAUNCHER: str(os.getpid()),
        FOLDER: folder,
    }
    # NCCL's watchdog would end a process whose communicator fails; this launcher decides that. Threads as of torchrun.
    by_default = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", **({"OMP_NUM_THREADS": "1"} if ranks > 1 else {})}
    return {**{name: value for name, value in by_default.items() if name not in environ}, **found}


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def _send_signal(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except (ProcessLookupError, PermissionError):
        pass
