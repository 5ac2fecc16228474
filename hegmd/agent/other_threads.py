"""Decides whether all other threads of the process are idle, so that their storages can be offloaded.

PyTorch works on a storage without the interpreter lock, so a thread inside an operation cannot be seen from outside;
only the position of its Python code can. A thread is idle if it is parked at the gate, stopped by the trap, or waits
in one of the standard library's waiting functions. A thread that trains has to be parked, and one inside a loader's
iterator is about to get a batch: neither is idle in a wait. Threads of PyTorch's compiler are known: they exchange
source code with worker processes, never storages.

A thread that the trap holds runs no more Python code of the script, so what follows its wait does not matter: it is at
rest also in its own `sleep` or `recv`, and in packages that never touch a storage. Any other call may be PyTorch's:
that thread counts as busy until it returns. So does a thread that the trap does not hold.
"""

from __future__ import annotations

import sys
from _thread import get_ident
from time import monotonic, sleep

from .quiesce import ParkRequest, wait_at_lock
from .trap import NoCollection, is_ours, library_path

TYPE_CHECKING = False
if TYPE_CHECKING:
    import dis
    from collections.abc import Callable, Iterator
    from types import FrameType
    from typing import Any

    from .quiesce import Gate

# Relative to the standard library: where its threads wait.
_WAITING_FILES = frozenset(
    ("queue.py", "selectors.py", "socket.py", "socketserver.py", "ssl.py", "subprocess.py", "threading.py")
)
_WAITING_FOLDERS = ("asyncio/", "concurrent/futures/", "multiprocessing/")
_POOL_FILE = "concurrent/futures/thread.py"
_ITERATOR_FILE = "/torch/utils/data/dataloader.py"
_COMPILER_FOLDER = "/torch/_inductor/compile_worker/"
# Packages whose threads wait in their own functions, which use no tensors.
_HELPER_FOLDERS = ("/grpc/", "/rich/", "/tensorboard/", "/tqdm/", "/wandb/")
# Functions that wait, and touch nothing before they return.
_WAITS = frozenset(
    "__enter__ accept acquire get poll read readinto readline recv recv_into recvfrom recvmsg select sleep wait4 "
    "waitid waitpid".split()
)
# How long an attempt parks the training thread, unless the daemon gives another limit.
MAX_PARK_S = 0.5
# Waits before a check: a poll would take whole milliseconds while the job is parked.
_SOON_S = (0.0001, 0.0002, 0.0004)
# For how much longer than that the training runs on after the first attempt, and after a later one at most.
_FIRST_PAUSE, _MAX_PAUSE = 2, 16


class Attempts:
    """Parks the training thread briefly until all others are idle, and again later if they are not.

    Between two attempts the training continues, longer each time.
    """

    def __init__(
        self,
        gate: Gate,
        request: ParkRequest,
        max_park_s: float | None = None,
        busy: Callable[[Gate], str | None] | None = None,
    ) -> None:
        self._gate = gate
        self._request = request
        self._busy = busy or busy_soon
        self._max_park_s = MAX_PARK_S if max_park_s is None else max_park_s
        self._pause_s = self._max_park_s * _FIRST_PAUSE
        self._again_at: float | None = None
        self._parked_s = self._more_s = 0.0
        #: A thread that was busy in the last attempt, as text.
        self.busy: str | None = None

    @property
    def parked_s(self) -> float:
        since = self._gate.parked_since
        return self._parked_s + (0.0 if since is None else monotonic() - since)

    @property
    def is_stopped_too_long(self) -> bool:
        """Return True if this attempt has used its time."""
        since = self._gate.parked_since
        return since is not None and monotonic() - since >= self._max_park_s + self._more_s

    def next_deadline(self, look_again_s: float) -> float | None:
        return monotonic() + look_again_s if self._gate.parked else self._again_at

    def park_next(self) -> None:
        """Park the training thread at its next boundary that fits, instead of at the named one."""
        request = self._request
        if not self._gate.parked and request.at <= self._gate.count + 1:
            return
        self._request = ParkRequest(request.what, self._gate.count + 1, request.call, request.fits)
        self.begin()

    def begin(self) -> None:
        """Park the training thread at its next boundary that fits."""
        self._gate.ask_on(self._request)

    def check(self) -> bool:
        """Return True if the training thread is parked and all others are idle. Parks it again when that is due."""
        if self._gate.parked:
            self.busy = self._busy(self._gate)
            return self.busy is None
        if not self._gate.requested and (self._again_at is None or monotonic() >= self._again_at):
            self._again_at = None
            self._gate.ask(self._request)
        return False

    def extend(self, seconds: float) -> None:
        self._more_s += seconds

    def pause(self) -> None:
        """Let the training continue until the next attempt."""
        self._parked_s, self._more_s = self.parked_s, 0.0
        self._gate.withdraw()
        self._again_at = monotonic() + self._pause_s
        self._pause_s = min(2 * self._pause_s, self._max_park_s * _MAX_PAUSE)


def busy_soon(gate: Gate) -> str | None:
    """Return one thread that is not idle. Threads that have just reached the gate, or were just stopped, get the
    time for their last steps, which they cannot make while this thread has the interpreter.
    """
    busy = busy_thread(gate)
    for pause_s in _SOON_S:
        if busy is None:
            break
        sleep(pause_s)
        busy = busy_thread(gate)
    return busy


def busy_thread(gate: Gate) -> str | None:
    """Return one thread that is not idle, as text, or None.

    While the training thread is parked, all others are stopped as soon as they run Python code of the script.
    """
    held = gate.stop_others() if gate.parked else frozenset[int]()
    with NoCollection():
        return next(busy_threads(gate.parked_threads, gate.trainers, held), None)


def busy_threads(parked: frozenset[int], trainers: frozenset[int], held: frozenset[int] = frozenset()) -> Iterator[str]:
    """Yield every thread that is not idle, as text. `held` threads run no more Python code of the script."""
    for ident, frame in sys._current_frames().items():  # pyright: ignore[reportPrivateUsage] - documented all the same
        if ident in parked:
            if frame.f_code is not wait_at_lock.__code__:  # the handler of a signal may still run in it
                yield f"{_name_of(ident)} has not stopped"
        elif ident == get_ident() or is_ours(frame):
            continue
        elif ident in trainers:
            yield f"{_name_of(ident)}, which trains too, is at {_place(frame)}"
        elif _COMPILER_FOLDER in frame.f_code.co_filename:
            continue
        elif not (_is_at_rest(frame) or (ident in held and _only_waits(frame))):
            yield f"{_name_of(ident)} is at {_place(frame)}"


def _is_at_rest(frame: FrameType) -> bool:
    within = library_path(frame.f_code.co_filename)
    if within is None or (within not in _WAITING_FILES and not within.startswith(_WAITING_FOLDERS)):
        return False
    outer: FrameType | None = frame
    while outer is not None:
        if outer.f_code.co_filename.endswith(_ITERATOR_FILE) and outer.f_code.co_name == "__next__":
            return False
        outer = outer.f_back
    return within != _POOL_FILE or called(frame) != _GIVEN


_BUILT_IN = type(len)
_GIVEN = "a function that was given to it"


def _only_waits(frame: FrameType) -> bool:
    path = frame.f_code.co_filename
    if any(folder in path for folder in _HELPER_FOLDERS):
        return True
    name = called(frame)
    return name is not None and (name in _WAITS or name.lstrip("_") in _WAITS)


def called(frame: FrameType) -> str | None:
    """Return the name by which the frame's current call was made, if its code tells."""
    import dis

    done: list[dis.Instruction] = []
    for instruction in dis.get_instructions(frame.f_code):
        done.append(instruction)
        if instruction.offset >= frame.f_lasti:
            break
    call = done.pop() if done else None
    if call is None or call.offset != frame.f_lasti:
        return None
    if call.opname in ("BEFORE_WITH", "SETUP_WITH"):
        return "__enter__"
    if call.opname == "CALL_FUNCTION_EX":
        return _GIVEN
    if not call.opname.startswith(("CALL", "PRECALL")) or call.arg is None:
        return None
    if done and done[-1].opname == "PRECALL":
        done.pop()
    names_of_arguments = call.opname in ("CALL_FUNCTION_KW", "CALL_KW")
    name = _producer(done, call.arg + names_of_arguments)
    known: object = None if name is None else frame.f_globals.get(name)
    return str(getattr(known, "__name__", name)) if type(known) is _BUILT_IN else name


def _producer(done: list[dis.Instruction], above: int) -> str | None:
    """Return the name of the value below that many others on the stack, from these instructions."""
    import dis

    while done:
        one = done.pop()
        if one.opname in _BESIDE or (above == 0 and one.opname == "PUSH_NULL"):
            continue
        if one.opcode in dis.hasjrel or one.opcode in dis.hasjabs:
            return None
        effect = dis.stack_effect(one.opcode, one.arg if one.opcode >= dis.HAVE_ARGUMENT else None)
        if above == 0 or effect > above:
            name: Any = one.argrepr if one.opname == "LOAD_SPECIAL" else one.argval
            if name and name.__class__ is tuple:
                name = name[0]
            return name if isinstance(name, str) and one.opname.startswith("LOAD") else None
        above -= effect
    return None


# They change nothing on the stack.
_BESIDE = frozenset(("CACHE", "EXTENDED_ARG", "KW_NAMES", "NOP"))


def _name_of(ident: int) -> str:
    threading = sys.modules.get("threading")
    known = getattr(threading, "_active", {}).get(ident)
    return f"thread {known.name}" if known is not None else f"thread {ident}"


def _place(frame: FrameType) -> str:
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
