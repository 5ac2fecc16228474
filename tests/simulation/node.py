"""A model of a node: GPUs with room, a pool, and workers that train, stand, give their bytes away and get them back.

It is the truth that the machine only hears of. Whatever must never happen raises `Violation` at the moment at which it
happens. A worker's bytes are modelled by the step that they belong to: bytes of another step are not its bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hegmd.migration.operation import Operation


class Violation(AssertionError):
    """A promise was broken."""


@dataclass
class Process:
    """One worker as it really is."""

    name: str
    pid: int
    token: str
    gpu: str | None
    size_bytes: int
    boundary: int = 3
    alive: bool = True
    connected: bool = True
    connection: int = 1
    asked_at: int | None = None  # it is to stand at this boundary or a later one
    parked: bool = False
    has_bytes: bool = True
    step: int = 3  # the training step that its bytes belong to
    proven: bool = True  # whether it has passed a boundary since it got its bytes back
    under_way: str | None = None  # an order that goes on in it though the connection that it came by has ended

    @property
    def runs(self) -> bool:
        return self.alive and not self.parked


@dataclass
class Node:
    """The whole of it. `capacity` and `holds` are in bytes, by GPU; a hold belongs to a worker or to somebody else."""

    capacity: dict[str, int]
    processes: dict[str, Process]
    lockstep: bool
    pool_free: int
    imagined: bool  # on a GPU that is only imagined, a process can go on without one
    holds: dict[str, dict[str, int]] = field(default_factory=dict)
    pool: dict[str, int] = field(default_factory=dict)
    copies: dict[str, int] = field(default_factory=dict)

    def free(self, gpu: str) -> int:
        return self.capacity[gpu] - sum(self.holds.get(gpu, {}).values())

    # ---- what the daemon does itself --------------------------------------------------------------------------------

    def take_room(self, name: str, gpu: str, size_bytes: int) -> bool:
        held = self.holds.setdefault(gpu, {})
        if size_bytes - held.get(name, 0) > self.free(gpu):
            return False
        held[name] = max(size_bytes, held.get(name, 0))
        return True

    def give_room(self, name: str, gpu: str) -> None:
        process = self.processes[name]
        if process.alive and process.gpu == gpu:
            raise Violation(f"the room of {name} on {gpu} was given away while it is there")
        self.holds.get(gpu, {}).pop(name, None)

    def take_pool(self, name: str, size_bytes: int) -> bool:
        wanted = size_bytes - self.pool.get(name, 0)
        if wanted > self.pool_free:
            return False
        if wanted > 0:
            self.pool_free -= wanted
            self.pool[name] = size_bytes
        return True

    def give_pool(self, name: str) -> None:
        process = self.processes[name]
        if process.alive and not process.has_bytes:
            raise Violation(f"the bytes of {name} were freed while they are nowhere else")
        if process.alive and not process.proven:
            raise Violation(f"the bytes of {name} were freed before it had passed a boundary with its own")
        self.pool_free += self.pool.pop(name, 0)
        self.copies.pop(name, None)

    # ---- what is done in a worker -----------------------------------------------------------------------------------

    def evacuate(self, name: str) -> None:
        process = self.processes[name]
        if not process.parked:
            raise Violation(f"{name} was evacuated while it trains")
        if not process.has_bytes:
            return
        if self.pool.get(name, 0) < process.size_bytes:
            raise Violation(f"{name} was evacuated to {self.pool.get(name, 0)} bytes, {process.size_bytes} are needed")
        self._must_stand_together(name)
        self.copies[name] = process.step
        process.has_bytes = False
        process.proven = False

    def _must_stand_together(self, name: str) -> None:
        if self.lockstep:
            counts = {p.boundary for p in self.processes.values() if p.alive and p.parked and p.has_bytes}
            if len(counts) > 1:
                raise Violation(f"{name} was evacuated while the ranks stand at {sorted(counts)}")

    def checkpoint(self, name: str) -> None:
        process = self.processes[name]
        if not process.parked:
            raise Violation(f"{name} was checkpointed while it trains")
        process.gpu = None

    def restore(self, name: str, gpu: str) -> None:
        process = self.processes[name]
        if process.gpu is not None:
            return
        if self.holds.get(gpu, {}).get(name, 0) < process.size_bytes:
            raise Violation(f"{name} was restored on {gpu} without the room: it is lost")
        process.gpu = gpu

    def refill(self, name: str) -> None:
        process = self.processes[name]
        if process.runs and process.has_bytes:
            raise Violation(f"{name} was refilled while it trains")
        if process.gpu is None:
            raise Violation(f"{name} was refilled while it is on no GPU")
        if process.has_bytes:
            return
        if self.holds.get(process.gpu, {}).get(name, 0) < process.size_bytes:
            raise Violation(f"{name} was refilled on {process.gpu} without the room")
        if self.copies.get(name) != process.step:
            raise Violation(f"{name} was refilled with the bytes of step {self.copies.get(name)}, not {process.step}")
        process.has_bytes = True

    def release(self, name: str) -> None:
        process = self.processes[name]
        process.asked_at = None
        if process.parked and not (process.has_bytes and process.gpu):
            raise Violation(f"{name} was let go without its bytes")
        if self.lockstep and process.parked and any(p.alive and not p.has_bytes for p in self.processes.values()):
            raise Violation(f"{name} was let go while another rank has no bytes")
        process.parked = False

    def train(self, name: str) -> bool:
        """Go on to the next boundary, and stand there if that is asked. False if it cannot."""
        process = self.processes[name]
        if not process.runs:
            return False
        if self.lockstep and any(p.boundary < process.boundary for p in self.processes.values()):
            return False
        process.boundary += 1
        process.step += 1
        process.proven = True
        process.parked = process.asked_at is not None and process.boundary >= process.asked_at
        return True

    def come_back_alone(self, name: str) -> bool:
        """What an agent does that has stood for too long without a daemon, or at a signal. False if it cannot."""
        process = self.processes[name]
        if not process.parked or process.under_way or (process.gpu is None and not self.imagined):
            return False
        room = process.size_bytes if process.gpu is None else self.holds.get(process.gpu, {}).get(name, 0)
        if not process.has_bytes and room < process.size_bytes:
            return False
        if not process.has_bytes and self.copies.get(name) != process.step:
            return False
        process.has_bytes, process.parked, process.asked_at = True, False, None
        return True

    def die(self, name: str) -> None:
        process = self.processes[name]
        process.alive = process.connected = process.parked = False
        process.under_way = None
        if process.gpu is not None:
            self.holds.get(process.gpu, {}).pop(name, None)

    # ---- what must hold all the time --------------------------------------------------------------------------------

    def check(self, op: Operation) -> None:
        for gpu, capacity in self.capacity.items():
            if sum(self.holds.get(gpu, {}).values()) > capacity:
                raise Violation(f"more is held on {gpu} than it has")
        for name, process in self.processes.items():
            if not process.alive:
                continue
            if not process.has_bytes and self.copies.get(name) != process.step:
                raise Violation(f"the bytes of {name} are nowhere")
            if process.gpu and self.holds.get(process.gpu, {}).get(name, 0) < process.size_bytes:
                raise Violation(f"{name} is on {process.gpu} without room that is its own")
            stands = process.parked or process.asked_at is not None
            if stands and op.phase in {"done", "undone", "lost"}:
                raise Violation(f"{name} stands though the operation is {op.phase}")
