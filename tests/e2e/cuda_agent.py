"""A CUDA program with an agent in it, driven by lines: `python -m tests.e2e.cuda_agent SOCKET GPU MIB...`

Obeys the daemon's orders as the real agent does, over real IPC handles of real pieces of (stub) video memory, and
copies itself if ordered to; each piece represents a storage. PyTorch for CUDA is not to be had in CI, so what finds and
frees storages is tested on GPUs. Besides the program's lines: `facts NAME=VALUE...` changes what it says of itself,
`cache MIB` has it keep so much beside its pieces as an allocator does, `devices` has it say what it holds on each of
its GPUs, `refuse ORDER` and `allow ORDER` what it does, `seen` tells the orders. `stay NUMBER...` has pieces lie in
memory that it never gives back, of which it says nothing. With RANK and WORLD_SIZE it has communicators with the other
ranks: the stub driver loses it if it is checkpointed while they are connected.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
import sys
import threading
from collections.abc import Iterator
from typing import Any

from hegmctl.connection import Connection, connect
from hegmctl.wire import Descriptors
from hegmd.agent.cuda_driver import Driver, PeerAccess
from hegmd.agent.disconnected import RendezvousWait
from hegmd.protocol.agents import packed, unpacked_spans
from hegmd.protocol.messages import (
    AgentAttend,
    AgentDismissed,
    AgentReport,
    Communicators,
    CudaDevice,
    CudaFacts,
    Noted,
    Order,
)
from tests.e2e.stub_ranks import Ranks
from tests.stubs.cuda.program import MIB, Address, Handle, Program, call, cuda

ALIGNED_BYTES = 512


class Agent:
    """The orders, and the pieces that they are about."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.sizes = [size * MIB for size in program.sizes_mib]
        self.pieces: list[int] = list(program.pieces)
        self.boundary = 5
        self.parked = False
        self.filled = len(self.pieces)
        self.seen: list[str] = []
        self.facts: dict[str, Any] = {}
        self.refuses: dict[str, str] = {}
        self.token = secrets.token_hex(16)
        self.stays: RendezvousWait | None = None
        self.parted: list[tuple[int, int]] = []
        self.tells_devices = False
        self.own_fd = -1  # of the memory that it has copied to itself
        self.given = Descriptors()
        self.cached_bytes = 0
        self.cached: list[int] = []
        self.ranks: Ranks | None = None
        self.driver_restored = False
        if "RANK" in os.environ:
            self.ranks = Ranks(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))

    @property
    def held_bytes(self) -> int:
        return 0 if self.filled == len(self.sizes) else sum(self.sizes)

    def attend(self, socket_path: str) -> None:
        """Obey orders in a thread; a daemon that is gone is waited for."""
        context = ctypes.c_void_p()
        call("cuDevicePrimaryCtxRetain", ctypes.byref(context), self.program.ordinal)
        call("cuCtxSetCurrent", context)
        usual_path = socket_path
        while True:
            try:
                with connect(socket_path) as connection:
                    self._listen(connection)
                if self.stays is not None:
                    socket_path, self.stays = self.stays.wait() or usual_path, None
            except Exception as error:  # noqa: BLE001 - whatever it is, the next daemon is tried
                self.seen.append(f"lost:{type(error).__name__}")
                threading.Event().wait(0.05)

    def _listen(self, connection: Connection) -> None:
        about = AgentAttend(
            token=self.token,
            python_version="3.11",
            run=os.environ.get("HEGM_RUN"),
            rank=None if self.ranks is None else self.ranks.rank,
            world_size=None if self.ranks is None else self.ranks.world_size,
            framework="torch",
            boundary=self.boundary,
            parked=self.parked,
            held_bytes=self.held_bytes,
            size_bytes=0,  # counted when the agent gets the order, as by the real one
            entrusted=self.held_bytes > 0 and self.own_fd < 0,
            mark="",
            driver_restored=self.driver_restored,
            communicators=self._communicators() if self.driver_restored else None,
        )
        for order in connection.stream(about, Order, AgentDismissed, patient=True, take=self._take):
            self.seen.append(order.do)
            report = AgentReport(order=order.order, result="done", boundary=self.boundary)
            if order.do in self.refuses:
                report = report.replace(result="failed", message=self.refuses[order.do], hint="ask the test")
            else:
                obey = getattr(self, {"filled": "note_filled"}.get(order.do, order.do))
                try:
                    report = report.replace(**obey(order))
                except MemoryError as error:
                    lacks_bytes = error.args[0]
                    report = report.replace(result="failed", message="no room", hint="wait", lacks_bytes=lacks_bytes)
                except TimeoutError as error:
                    report = report.replace(result="failed", message=str(error), hint="ask the test")
            self.given.close()
            connection.call(report.replace(boundary=self.boundary), Noted)
            if self.stays is not None:
                return

    def _take(self, given: Descriptors) -> None:
        self.given = given

    # ---- orders ------------------------------------------------------------------------------------------------------

    def count(self, _: Order) -> dict[str, Any]:
        return {}  # every report has it

    def survey(self, _: Order) -> dict[str, Any]:
        if not self.parked:
            self.boundary += 1
        facts = {"gpus": (), "allocator": "native", "expandable": False, "largest_bytes": max(self.sizes)}
        return {
            "parked": self.parked,
            "held_bytes": self.held_bytes,
            "storages": len(self.sizes),
            "size_bytes": sum(self.sizes),
            "cuda": CudaFacts(**{**facts, "devices": tuple(self._devices()), **self.facts}),
            "communicators": self._communicators(),
        }

    def _communicators(self) -> Communicators | None:
        if self.ranks is None:
            return None
        return Communicators(mechanism="replace", groups=1, backends=("nccl",), library="2.26.2")

    def disconnect(self, _: Order) -> dict[str, Any]:
        assert self.parked
        assert self.ranks is not None
        self.ranks.disconnect()
        return {}

    def reconnect(self, order: Order) -> dict[str, Any]:
        assert self.parked
        assert self.ranks is not None
        self.ranks.connect(order.generation or 0, order.limit_s or 60.0)
        return {}

    def _devices(self) -> Iterator[CudaDevice]:
        """The bytes of its pieces on each of its GPUs, by the driver's current names."""
        for number, ordinal in enumerate(self.program.ordinals if self.tells_devices else ()):
            size_bytes = sum(self.sizes[number :: self._count])
            yield CudaDevice(uuid=Driver().uuid_of(ordinal), size_bytes=size_bytes, number=ordinal)

    @property
    def _count(self) -> int:
        return len(self.program.ordinals)

    def park(self, order: Order) -> dict[str, Any]:
        self.parked, self.boundary = True, max(self.boundary + 1, order.at or 0)
        return {}

    def withdraw(self, _: Order) -> dict[str, Any]:
        assert not self.held_bytes, "a thread was let go without its bytes"
        access = PeerAccess()
        while self.parted:
            access.begin(*self.parted.pop())
        self.parked = False
        return {}

    def release(self, order: Order) -> dict[str, Any]:
        self.withdraw(order)
        self.driver_restored = self.driver_restored or order.by_driver
        self.boundary += 1
        return {}

    def part(self, _: Order) -> dict[str, Any]:
        """Disable peer access by the real agent's own driver calls."""
        assert self.parked
        access = PeerAccess()
        pairs = [(device, other) for device in access.devices() for other in access.devices() if device != other]
        self.parted += [pair for pair in pairs if access.end(*pair)]
        return {}

    def rest(self, _: Order) -> dict[str, Any]:
        """It stays as it is, however long no daemon is there; this one has nothing that would bring it back."""
        assert self.parked
        return {}

    def entrust(self, _: Order) -> dict[str, Any]:
        """From now on it has no descriptor of its own bytes."""
        assert self.held_bytes
        if self.own_fd >= 0:
            os.close(self.own_fd)
            self.own_fd = -1
        return {}

    def aside(self, order: Order) -> dict[str, Any]:
        assert self.parked
        assert order.path is not None
        self.stays = RendezvousWait(order.path, order.limit_s)
        return {}

    def export(self, _: Order) -> dict[str, Any]:
        assert self.parked
        return self._view(0, len(self.sizes))

    def free(self, _: Order) -> dict[str, Any]:
        assert self.parked
        if not self.held_bytes:
            for number, piece in enumerate(self.pieces):
                if number in self.program.staying:
                    call("cuMemcpyHtoD_v2", piece, bytes(self.sizes[number]), self.sizes[number])
                else:
                    call("cuMemFree_v2", piece)
            for piece in self.cached:
                call("cuMemFree_v2", piece)
            self.pieces, self.cached, self.filled = [], [], 0
        return {"size_bytes": sum(self.sizes), "storages": len(self.sizes)}

    def offload(self, order: Order) -> dict[str, Any]:
        """Offload by its own copies: copy one piece after the other, then free all of them."""
        assert self.parked
        self.own_fd, at = os.dup(self.given.numbers()[0]), 0
        for piece, size_bytes in zip(self.pieces, self.sizes, strict=True):
            content = ctypes.create_string_buffer(size_bytes)
            call("cuMemcpyDtoH_v2", content, piece, size_bytes)
            at += os.pwrite(self.own_fd, content.raw, at)
        return self.free(order)

    def reload(self, _: Order) -> dict[str, Any]:
        """From the memory that came with the order, or else its own; made on the GPUs that its devices are on now."""
        fd, at = [*self.given.numbers(), self.own_fd][0], 0
        assert fd >= 0
        with contextlib.ExitStack() as undo:
            for number, size_bytes in enumerate(self.sizes):
                call("cuCtxSetCurrent", self.program.contexts[number % self._count])
                address = Address(self.program.staying.get(number, 0))
                if not address.value:
                    if cuda.cuMemAlloc_v2(ctypes.byref(address), size_bytes):
                        raise MemoryError(sum(self.sizes))
                    undo.callback(cuda.cuMemFree_v2, address.value)
                self.pieces.append(address.value)
                undo.callback(self.pieces.pop)
                call("cuMemcpyHtoD_v2", address, os.pread(fd, size_bytes, at), size_bytes)
                at += size_bytes
            undo.pop_all()
        call("cuCtxSetCurrent", self.program.contexts[0])
        self.take_cache()
        self.filled, self.program.pieces = len(self.pieces), list(self.pieces)
        if self.own_fd >= 0:
            os.close(self.own_fd)
            self.own_fd = -1
        return {"size_bytes": sum(self.sizes), "storages": len(self.sizes), "held_bytes": 0}

    def make(self, order: Order) -> dict[str, Any]:
        """Those that were made and are not filled are shown once more. Raises MemoryError, with none of them made."""
        if len(self.pieces) == self.filled:
            made_bytes = 0
            while len(self.pieces) < len(self.sizes):
                size_bytes = self.sizes[len(self.pieces)]
                if order.size_bytes is not None and made_bytes and made_bytes + size_bytes > order.size_bytes:
                    break
                call("cuCtxSetCurrent", self.program.contexts[len(self.pieces) % self._count])
                address = Address(self.program.staying.get(len(self.pieces), 0))
                if not address.value and cuda.cuMemAlloc_v2(ctypes.byref(address), size_bytes):
                    while len(self.pieces) > self.filled:
                        if (last := self.pieces.pop()) not in self.program.staying.values():
                            call("cuMemFree_v2", last)
                    raise MemoryError(sum(self.sizes[self.filled :]))
                self.pieces.append(address.value)
                made_bytes += size_bytes
            call("cuCtxSetCurrent", self.program.contexts[0])
            self.take_cache()
        return self._view(self.filled, len(self.pieces))

    def take_cache(self) -> None:
        """With the first pieces that are made, as far as there is memory for it."""
        address = Address()
        if self.cached_bytes and not self.cached and not cuda.cuMemAlloc_v2(ctypes.byref(address), self.cached_bytes):
            self.cached = [address.value]

    def keep(self, size_mib: str) -> str:
        """Allocate memory besides the pieces, as the next step needs it; return the allocated size."""
        self.cached_bytes = int(size_mib) * MIB
        self.take_cache()
        self.facts["reserved_bytes"] = sum(self.sizes) + self.cached_bytes
        return f"cached {len(self.cached)}"

    def copy(self, order: Order) -> dict[str, Any]:
        """Copy parts of pieces itself."""
        fd = self.given.numbers()[0]
        for number, start, size_bytes, place in unpacked_spans(order.spans or b""):
            buffer = ctypes.create_string_buffer(size_bytes)
            if order.direction == "out":
                call("cuMemcpyDtoH_v2", buffer, self.pieces[number] + start, size_bytes)
                os.pwrite(fd, buffer.raw, place)
            else:
                buffer.raw = os.pread(fd, size_bytes, place)
                call("cuMemcpyHtoD_v2", self.pieces[number] + start, buffer.raw, size_bytes)
        return {}

    def note_filled(self, order: Order) -> dict[str, Any]:
        assert order.first is not None
        assert order.count is not None
        self.filled = max(self.filled, order.first + order.count)
        assert self.filled <= len(self.pieces)
        if not self.held_bytes:
            self.program.pieces = list(self.pieces)
        return {"held_bytes": self.held_bytes}

    def _view(self, first: int, last: int) -> dict[str, Any]:
        handles: list[bytes] = []
        for piece in self.pieces[first:last]:
            handle = Handle()
            call("cuIpcGetMemHandle", ctypes.byref(handle), piece)
            handles.append(bytes(memoryview(handle)))
        places = [(index, 0, size) for index, size in enumerate(self.sizes[first:last])]
        at_bytes = sum(-(-size // ALIGNED_BYTES) * ALIGNED_BYTES for size in self.sizes[:first])
        uuids = [Driver().uuid_of(ordinal) for ordinal in self.program.ordinals] if self._count > 1 else []
        return {
            "gpus": tuple(uuids),
            "devices": bytes(number % self._count for number in range(first, last)) if uuids else None,
            "handles": tuple(handles),
            "places": packed(places),
            "first": first,
            "at_bytes": at_bytes,
            "left": len(self.sizes) - last,
        }


def main() -> None:
    socket_path, gpu, *sizes_mib = sys.argv[1:]
    program = Program([int(one) for one in gpu.split(",")], [int(size) for size in sizes_mib])
    agent = Agent(program)
    threading.Thread(target=agent.attend, args=(socket_path,), daemon=True).start()
    _say(f"ready {os.getpid()}")
    for line in sys.stdin:
        command, *arguments = line.split()
        if command == "facts":
            agent.facts.update({name: _value(text) for name, _, text in (word.partition("=") for word in arguments)})
            _say("noted")
        elif command == "refuse":
            agent.refuses[arguments[0]] = "the test wants it so"
            _say("noted")
        elif command == "allow":
            agent.refuses.pop(arguments[0])
            _say("noted")
        elif command == "devices":
            agent.tells_devices = True
            _say("noted")
        elif command == "cache":
            _say(agent.keep(*arguments) if arguments else f"cached {len(agent.cached)}")
        elif command == "seen":
            _say(" ".join(["seen", *agent.seen]))
        else:
            _say(getattr(program, command)(*arguments))


def _value(text: str) -> object:
    """A list where there is a comma, a truth for yes and no, a number, else the word."""
    known = {"yes": True, "no": False}
    if text.isdigit():
        return int(text)
    return tuple(filter(None, text.split(","))) if "," in text else known.get(text, text)


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
