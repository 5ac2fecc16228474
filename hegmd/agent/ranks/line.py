"""The connection of a rank to its launcher, `hegmctl run --ranks`, and the thread that listens to it.

The launcher counts generations: each fault starts the next one. It announces that a generation has ended (`abort`),
from which step the next one starts (`plan`), and that all ranks are there (`go`). Messages of an older generation are
ignored.

An abort interrupts the block's thread, which is the main one, wherever it is: its collectives are ended, and a signal
that this module has taken over interrupts its system calls, unless the thread has left the block by then. The handler
raises `Interrupted`, but only while the block is on the stack and no step is being made. It is sent again until the
thread has left the block.
"""

from __future__ import annotations

import mmap
import os
import signal
import socket
import sys
import threading
from json import dumps, loads
from time import monotonic

from ...protocol.board import Board
from .. import lifecycle
from ..notes import note
from ..refusals import refusal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType
    from typing import Any

#: The launcher's pid, and the descriptor of this rank's end of the connection.
LAUNCHER, LINE_FD = "HEGM_LAUNCHER_PID", "HEGM_RANK_FD"
#: Taken over in the main thread of a script with a block: a real-time signal, which scripts rarely use.
INTERRUPT = signal.SIGRTMIN + 9
# The error of a collective leaves the block within this time; the script's own cleanup may take longer.
_SIGNAL_AFTER_S, _SIGNAL_AGAIN_S = 0.1, 1.0
MESSAGE_BYTES = 1 << 18
_MAX_DESCRIPTORS = 4
_INT_BYTES = 4


class Interrupted(BaseException):
    """The generation is over: another rank failed, or this one made no progress. Not an error of the script."""


class LauncherEnded(Exception):
    """The launcher has ended, so there is no recovery."""

    def __init__(self) -> None:
        super().__init__("hegmctl run has ended, so this training is not recovered after a failure")


class LauncherConnection:
    """A connection. `end_waits` ends the waits of the block's thread; it is called in the listening thread."""

    def __init__(self, connection: socket.socket, rank: int, ranks: int, end_waits: Callable[[], object]) -> None:
        self._socket = connection
        self._end_waits = end_waits
        self._news = threading.Condition()
        self._rank, self._ranks = rank, ranks
        self._board: Board | None = None
        #: The newest generation that the launcher wants, and the one whose block runs here; 0 outside of the block.
        self._wanted = 1
        self._running = 0
        self._is_making_step = False
        self._frame: FrameType | None = None
        self._said: dict[str, dict[str, Any]] = {}
        self._is_over: str | None = None
        self._slots: dict[int, int] = {}
        self._is_alone = False

    def open(self) -> Board:
        """Begin to listen, take the signal over, and return the board. Raises Alone."""
        signal.signal(INTERRUPT, self._interrupt)
        threading.Thread(target=self._listen, name="hegm-line", daemon=True).start()
        self._await(lambda: self._board is not None)
        board = self._board
        if board is None:
            raise LauncherEnded
        return board

    # ---- the block's thread -----------------------------------------------------------------------------------------

    @property
    def is_in_block(self) -> bool:
        """Whether a block is on the stack."""
        return self._running != 0

    @property
    def wanted_generation(self) -> int:
        """The newest generation that the launcher wants."""
        return self._wanted

    def say(self, do: str, **what: Any) -> None:
        """Send a message to the launcher. A launcher that has ended does not receive it."""
        try:
            self._socket.send(dumps({"do": do, **what}).encode())
        except OSError as error:
            note(f"the launcher did not receive {do}: {error}")

    def join(self, step: int | None, **about: Any) -> dict[str, Any]:
        """Offer the state of that step, or none, and return the plan of the newest generation. Raises Alone."""
        while True:
            generation = self._wanted
            self._said.pop("plan", None)  # of a block that has ended in this very generation
            self.say("join", generation=generation, step=step, **about)
            self._await_answer("plan", generation)
            if self._is_for("plan", generation):
                return self._said["plan"]

    def await_go(self, generation: int) -> bool:
        """Wait until all ranks have their state; False if a newer generation is wanted. Raises Alone."""
        self._await_answer("go", generation)
        return self._wanted == generation

    def await_end(self, generation: int) -> bool:
        """Wait until the block of all ranks has ended; False if a newer generation is wanted. Raises Alone.

        Another rank may be at the next block already, which is a newer generation too.
        """
        self._await_answer("over", generation)
        return self._is_for("over", generation)

    def await_abort(self, generation: int) -> str | None:
        """Wait for a newer generation. Return its reason, if it has one. Raises Alone."""
        self._await(lambda: self._wanted > generation or self._is_over is not None)
        return self._is_over

    def slot(self, number: int, size_bytes: int) -> int:
        """Return the descriptor of a slot of at least that size. Raises Alone, and OSError with what prevents it."""
        held = self._slots.get(number)
        if held is not None and os.fstat(held).st_size >= size_bytes:
            return held
        generation = self._wanted
        self._said.pop("slot", None)
        self.say("slot", slot=number, size_bytes=size_bytes)
        self._await(lambda: self._wanted > generation or "slot" in self._said)
        answer = self._said.get("slot", {"why": "another generation has begun"})
        if answer.get("why"):
            raise OSError(answer["why"])
        return self._slots[number]

    @property
    def held_slots(self) -> tuple[int, ...]:
        """Return the descriptors of all existing slots."""
        return tuple(self._slots.values())

    def held_slot(self, number: int) -> int:
        """Return the descriptor of an existing slot. Raises OSError."""
        if number not in self._slots:
            raise OSError(f"slot {number} has not come")
        return self._slots[number]

    def enter(self, generation: int, frame: FrameType) -> None:
        """From now on the thread may be interrupted below that frame. Raises Interrupted."""
        self._frame, self._running = frame, generation
        self.check()

    def leave(self) -> None:
        """Record that the thread has left the block, and must not be interrupted."""
        self._running, self._frame, self._is_making_step = 0, None, False

    def check(self) -> None:
        """Raise Interrupted if a newer generation is wanted."""
        if self._running and self._wanted > self._running:
            raise Interrupted

    def making_step(self, *, is_sure: bool) -> None:
        """From now on the thread is not interrupted, until `made_step`. Raises Interrupted.

        `is_sure` is True if gradients are right although the generation is over: with gloo a failed sum is an error.
        """
        self._is_making_step = True
        if not is_sure:
            self.check()

    def made_step(self) -> None:
        """The step is made. Raises Interrupted."""
        self._is_making_step = False
        self.check()

    def _interrupt(self, _number: int, frame: FrameType | None) -> None:
        if self._is_making_step or not self._running or self._wanted <= self._running:
            return
        while frame is not None:
            if frame is self._frame:
                raise Interrupted
            if frame.f_code.co_name == "__del__":
                return  # Python would print the exception and forget it
            frame = frame.f_back

    def _is_for(self, do: str, generation: int) -> bool:
        return self._said.get(do, {}).get("generation") == generation

    def _await_answer(self, do: str, generation: int) -> None:
        """Wait for the answer or a newer generation. Raises HegmError if the launcher ends the training instead."""
        self._await(lambda: self._is_over is not None or self._wanted > generation or self._is_for(do, generation))
        if self._is_over is not None and not self._is_for(do, generation):
            raise refusal(self._is_over, "run: hegmctl recovery")

    def _await(self, is_there: Callable[[], bool]) -> None:
        with self._news:
            while not is_there():
                if self._is_alone:
                    raise LauncherEnded
                self._news.wait()

    # ---- the listening thread ---------------------------------------------------------------------------------------

    def _listen(self) -> None:
        main = threading.main_thread().ident or 0
        pause_s: float | None = None
        while True:
            self._socket.settimeout(pause_s)
            try:
                data, fds = _received(self._socket)
            except socket.timeout:  # another class than TimeoutError before Python 3.10
                pause_s = None
                if self._running and self._wanted > self._running:
                    signal.pthread_kill(main, INTERRUPT)
                    pause_s = _SIGNAL_AGAIN_S
                continue
            except OSError as error:
                note(f"the launcher has disconnected: {error}")
                data, fds = b"", []
            if not data:
                break
            with self._news:
                aborts = self._take(loads(data), fds)
                self._news.notify_all()
            if aborts:
                self._end_waits()
                pause_s = _SIGNAL_AFTER_S
        with self._news:
            self._is_alone = True
            self._news.notify_all()

    def _take(self, message: dict[str, Any], fds: list[int]) -> bool:
        """Handle a message; whether it ends the generation that runs."""
        do = message["do"]
        if do == "board":
            self._board = Board(mmap.mmap(fds.pop(0), 0), self._ranks)
        elif do == "slot" and fds:
            former = self._slots.pop(message["slot"], None)
            if former is not None:
                os.close(former)
            self._slots[message["slot"]] = fds.pop(0)
        elif do == "end":
            self._is_over = message["why"]
        elif do == "ask" and lifecycle.gate().parked:
            self.say("parked")
        self._said[do] = message
        for fd in fds:
            os.close(fd)
        if do == "abort" and message["generation"] > self._wanted:
            self._wanted = message["generation"]
            return True
        return False


def find(environ: Any) -> tuple[socket.socket, int, int] | None:
    """Return this process's connection, its rank and the number of ranks; None if it is no rank of a launcher.

    A child process of a rank is none, although it has the variables.
    """
    launcher, fd = environ.get(LAUNCHER), environ.get(LINE_FD)
    if launcher is None or fd is None or int(launcher) != os.getppid():
        return None
    os.set_inheritable(int(fd), False)
    connection = socket.socket(fileno=int(fd))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, MESSAGE_BYTES)
    return connection, int(environ["RANK"]), int(environ["WORLD_SIZE"])


def _received(connection: socket.socket) -> tuple[bytes, list[int]]:
    space = socket.CMSG_SPACE(_MAX_DESCRIPTORS * _INT_BYTES)
    data, ancillary, _, _ = connection.recvmsg(MESSAGE_BYTES, space, socket.MSG_CMSG_CLOEXEC)
    return data, [
        int.from_bytes(numbers[at : at + _INT_BYTES], sys.byteorder)
        for _, _, numbers in ancillary
        for at in range(0, len(numbers) - len(numbers) % _INT_BYTES, _INT_BYTES)
    ]


def now() -> float:
    """The clock of the board, which all processes of the node share."""
    return monotonic()
