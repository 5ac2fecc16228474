"""A model of the GPU helper, as the real methods call it: whatever is asked is in flight until the life lets it end.

A call may end well, with an error of the driver, with an answer that is not true, or never; then, or at random, the
helper is killed, and with it all calls in flight. A driver step that had begun continues in the process, and takes its
memory as it ends.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING, Any

import anyio

from hegmd.errors import HegmError, Refused
from hegmd.gpu_helper.link import DriverFailed, HelperLost, HelperReply, Link
from tests.simulation.driver import CallRefused, Calls
from tests.simulation.node import FAILED, Process

if TYPE_CHECKING:
    from tests.simulation.daemon import Daemon

STEPS = frozenset(("lock", "checkpoint", "restore", "unlock"))


@dataclass(eq=False)
class Call:
    """A call in flight. `act` performs it and returns the reply; `process` is the driver's target. A call of the
    daemon's own fails without a helper.
    """

    op: str
    act: Callable[[], Mapping[str, object]]
    process: Process | None
    overdue_at: float
    is_own: bool = False
    over: anyio.Event = field(default_factory=anyio.Event)
    hangs: bool = False
    answer: Mapping[str, object] | None = None
    error: HegmError | None = None

    @property
    def is_blocked(self) -> bool:
        """Whether the driver does not answer about that process, however long one waits."""
        return self.hangs or (self.process is not None and (self.process.stopped or self.process.ending is not None))

    def end(self, answer: Mapping[str, object] | None, error: HegmError | None = None) -> None:
        self.answer, self.error = answer, error
        self.over.set()


class ModelHelper(Link):
    """One helper after the other; `dead` once its daemon is."""

    def __init__(self, daemon: Daemon, random: Random) -> None:
        super().__init__(environment={})
        self._daemon = daemon
        self._node = daemon.node
        self._random = random
        self._driver = Calls(daemon.node)
        self.calls: list[Call] = []
        self.dead = False

    async def call(
        self,
        op: str,
        args: Mapping[str, object] | None = None,
        *,
        deadline_s: float,
        fds: Sequence[int] = (),
        on_progress: object = None,
        helper: int | None = None,
        watch: object = None,
    ) -> HelperReply:
        given: Mapping[str, Any] = args or {}
        if op == "devices":
            return HelperReply(await self.have(op, lambda: {"devices": [{"uuid": uuid} for uuid in self._node.uuids]}))
        process = self._node.find(given["pid"])
        if process is None:
            raise DriverFailed(op, 304, "CUDA_ERROR_OPERATING_SYSTEM")
        return HelperReply(await self.have(op, self._act(op, process, given), process, deadline_s))

    async def have(
        self,
        op: str,
        act: Callable[[], Mapping[str, object]],
        process: Process | None = None,
        deadline_s: float = 1000.0,
        *,
        is_own: bool = False,
    ) -> Mapping[str, object]:
        """Wait until the life lets it be done."""
        if self.dead:
            raise anyio.get_cancelled_exc_class()
        call = Call(op, act, process, self._daemon.now + deadline_s, is_own)
        self.calls.append(call)
        await call.over.wait()
        if call.error is not None:
            raise call.error
        return call.answer or {}

    def _act(self, op: str, process: Process, args: Mapping[str, Any]) -> Callable[[], Mapping[str, object]]:
        def act() -> Mapping[str, object]:
            if op == "state":
                return {"state": self._driver.state(process)}
            if op == "restore":
                self._driver.restore(process, dict(args["pairs"]))
            else:
                getattr(self._driver, op)(process)
            return {}

        return act

    # ---- how calls end -----------------------------------------------------------------------------------------------

    def go_on(self) -> bool:
        """End one call, if any can end. Returns False if none did."""
        if any(self._daemon.now > call.overdue_at for call in self.calls if not call.is_own):
            self.lose("did not answer in time")
            return True
        ready = [call for call in self.calls if not call.is_blocked]
        if not ready:
            return False
        call = self._random.choice(ready)
        if self._daemon.is_killed(f"before {call.op}()"):
            self._daemon.crash(b"")
            return True
        self._end(call)
        if not self.dead and self._daemon.is_killed(f"after {call.op}()"):
            self._daemon.crash(b"")
        return True

    def _end(self, call: Call) -> None:
        luck = self._daemon.luck
        if call.is_own:
            self.calls.remove(call)
            call.end(*self._do(call))
        elif luck("helper"):
            self.lose("was killed")
        elif call.process is not None and luck("hang"):
            self._daemon.tell(f"{call.op} hangs")
            call.hangs = True
        else:
            self.calls.remove(call)
            call.end(*self._outcome(call))

    def _outcome(self, call: Call) -> tuple[Mapping[str, object] | None, HegmError | None]:
        luck, process = self._daemon.luck, call.process
        if call.op in STEPS and luck("lie"):
            self._daemon.tell(f"{call.op} is said to be done, and is not")
            return {}, None
        if call.op == "restore" and process is not None and luck("ruin"):
            process.driver, process.ruined = FAILED, True
            return None, DriverFailed(call.op, 801, "CUDA_ERROR_NOT_SUPPORTED")
        if call.op == "lock" and luck("busy"):
            return None, DriverFailed(call.op, 600, "CUDA_ERROR_NOT_READY")
        if luck("fail"):
            if self._random.random() < 0.5:
                self._do(call)
            return None, DriverFailed(call.op, 999, "CUDA_ERROR_UNKNOWN")
        return self._do(call)

    def _do(self, call: Call) -> tuple[Mapping[str, object] | None, HegmError | None]:
        if call.process is not None and not call.process.alive:
            return None, DriverFailed(call.op, 304, "CUDA_ERROR_OPERATING_SYSTEM")
        try:
            return call.act(), None
        except CallRefused as refused:
            return None, DriverFailed(call.op, refused.number, str(refused))
        except HegmError as error:
            return None, error

    def lose(self, why: str) -> None:
        """The helper ends, and with it whatever was in flight: not begun, done already, or ending by itself."""
        calls = [call for call in self.calls if not call.is_own]
        self.calls = [call for call in self.calls if call.is_own]
        self._daemon.tell(f"the helper {why}; in flight: {', '.join(call.op for call in calls)}")
        for call in calls:
            how = self._random.randrange(3)
            if call.op in STEPS and call.process is not None and not call.hangs and not call.is_blocked and how:
                self._leave(call, call.process, at_once=how == 1)
            call.end(None, HelperLost(why, [call.op], None, ""))

    def _leave(self, call: Call, process: Process, *, at_once: bool) -> None:
        def end() -> None:
            process.ending = None
            self._do(call)

        if at_once:
            end()
        else:
            process.ending = end


@dataclass
class ModelMemory:
    """Video memory that is held by descriptor, which outlives the daemon: in the node."""

    helper: ModelHelper
    daemon: Daemon

    async def reserve(self, who: str, gpu: str, size_bytes: int, *, spare: bool = False, start: int = 0) -> None:
        if size_bytes > self.of(who).get(gpu, 0):
            await self.helper.have("hold", lambda: self._hold(who, gpu, size_bytes))

    def _hold(self, who: str, gpu: str, size_bytes: int) -> Mapping[str, object]:
        node = self.daemon.node
        if not node.hold_piece(who, gpu, size_bytes):
            raise Refused(f"no room for {size_bytes} bytes on {gpu}", "free some")
        return {}

    async def keep(self, who: str, gpu: str) -> bool:
        return True

    async def release(self, who: str, gpu: str) -> None:
        if gpu in self.of(who):
            await self.helper.have("give", lambda: self._give(who, gpu), is_own=True)

    def _give(self, who: str, gpu: str) -> Mapping[str, object]:
        self.daemon.node.give_piece(who, gpu)
        return {}

    async def give_first(self, who: str, gpu: str, count: int) -> int:
        raise NotImplementedError("only carriers give memory bit by bit")

    def of(self, who: str) -> Mapping[str, int]:
        return self.daemon.node.pieces_of(who)

    def pieces(self, who: str, gpu: str) -> Sequence[Any]:
        raise NotImplementedError("only carriers look into pieces")
