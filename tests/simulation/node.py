"""A model of a node: GPUs with memory, a pool, and workers that train, park, offload their bytes and reload them.

It is the true state; the machine gets only reports of it. Everything that must never happen raises `Violation` at the
moment at which it happens. A worker's bytes are modelled by the step that they belong to: bytes of another step are not
its bytes. driver.py has the driver's effects on a process; what must hold between any two steps is in promises.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random

# The most that one process takes at once while memory on its GPU passes from hegmd to it; the method allows for this.
AT_ONCE_BYTES = 2048 << 20
RUNNING, LOCKED, CHECKPOINTED, FAILED = "running", "locked", "checkpointed", "failed"


class Violation(AssertionError):
    """A promise was broken."""


@dataclass
class Process:
    """The true state of one worker."""

    name: str
    pid: int
    token: str
    job: int
    gpu: str | None
    size_bytes: int
    boundary: int = 3
    alive: bool = True
    replaced: bool = False  # its pid runs another program now, which has an agent too
    connected: bool = True
    connection: int = 1
    stopped: bool = False  # by SIGSTOP: it does nothing, and does not say so
    asked_at: int | None = None  # it is to park at this boundary or a later one
    parked: bool = False
    has_bytes: bool = True
    step: int = 3  # the training step that its bytes belong to
    proven: bool = True  # whether it has passed a boundary since it got its bytes back
    under_way: str | None = None  # an order that continues in it although its connection has ended
    memory_bytes: int = 0  # of the descriptor that came with that order
    driver: str = RUNNING
    finishing: bool = False  # it finishes a driver call whose caller was killed; until then no query ends
    ending: Callable[[], None] | None = None  # the same for one whose step is still to be done
    came_from: str | None = None  # the GPU that the driver took it off last
    ruined: bool = False  # the driver has lost it, and nothing could have shown that before
    # For a worker that leaves by exiting: whether a successor has to exist, whether anything would start it, and
    # whether there may be none.
    restarts: bool = False
    owed: bool = False
    supervised: bool = True
    finished: bool = False
    # For a rank: how its communicators are disconnected, how many groups have one, how many of these are connected and
    # since which generation, and what it waits for the others with. See ranks.py.
    communicators: str = ""
    groups: int = 1
    live_groups: int = 1
    generation: int = 0
    joining: tuple[str, int] | None = None
    # For a worker whose last suspension keeps its CUDA context. See kept.py.
    keeps_context: bool = False

    @property
    def has_agent(self) -> bool:
        return bool(self.token)

    @property
    def linked(self) -> bool:
        """Whether any communicator of that rank is up."""
        return self.live_groups > 0

    @property
    def runs(self) -> bool:
        return self.alive and not self.parked and not self.stopped and self.driver == RUNNING


@dataclass
class Node:
    """The whole node. `capacity` and `holds` are in bytes, by GPU; a hold belongs to a worker or to another process.

    `driven` GPUs are moved by a driver that frees and takes real memory; on others a process can continue without one.
    `alone`: no process has an agent, and only the driver can stop it; then `strangers` use the GPUs as well. `keeper`
    says that what the daemon holds by descriptor outlives it. Without one, agents keep their own bytes.
    """

    capacity: dict[str, int]
    processes: dict[str, Process]
    is_distributed: dict[int, bool]
    pool_free: int
    driven: bool
    keeper: bool
    alone: bool = False
    strangers: dict[str, Process] = field(default_factory=dict)
    # on disk: which processes are paused
    noted: dict[tuple[int, int], tuple[int, int] | None] = field(default_factory=dict)
    changing: dict[str, int] = field(default_factory=dict)  # what others took since room there began to change hands
    holds: dict[str, dict[str, int]] = field(default_factory=dict)
    pool: dict[str, int] = field(default_factory=dict)
    copies: dict[str, int] = field(default_factory=dict)
    saved_at: dict[str, int] = field(default_factory=dict)  # of states: boundaries that had been passed
    own_copies: set[str] = field(default_factory=set)  # those whose agent holds a descriptor of its own
    images: set[str] = field(default_factory=set)  # operations whose image is whole; these outlive everything
    # By process that exists only in an image: its step there, and the step of its bytes in the pool.
    written: dict[str, dict[str, int]] = field(default_factory=dict)
    unclaimed: set[str] = field(default_factory=set)  # no journal tells of them any more: they wait for `adopt`

    def free(self, gpu: str) -> int:
        return self.capacity[gpu] - sum(self.holds.get(gpu, {}).values())

    def held(self, name: str, gpu: str) -> int:
        return self.holds.get(gpu, {}).get(name, 0)

    def ranks(self, name: str) -> list[Process]:
        """The living processes of that one's job, itself among them."""
        job = self.processes[name].job
        return [process for process in self.processes.values() if process.job == job and process.alive]

    # ---- video memory of those that the driver alone has a hold on ---------------------------------------------------

    @property
    def uuids(self) -> tuple[str, ...]:
        """Return the driver's names of the GPUs: their own."""
        return tuple(self.capacity)

    def find(self, pid: int) -> Process | None:
        """The living process of that number, whose ever it is."""
        for process in (*self.processes.values(), *self.strangers.values()):
            if process.pid == pid and process.alive:
                return process
        return None

    def pieces_of(self, owner: str) -> dict[str, int]:
        return {gpu: held[owner] for gpu, held in self.holds.items() if owner in held}

    def hold_piece(self, owner: str, gpu: str, size_bytes: int) -> bool:
        held = self.holds.setdefault(gpu, {})
        if size_bytes - held.get(owner, 0) > self.free(gpu):
            return False
        held[owner] = max(size_bytes, held.get(owner, 0))
        return True

    def give_piece(self, owner: str, gpu: str) -> None:
        """Room that the driver is to have, of one who is off its GPU, is changing hands from now on."""
        if self.holds.get(gpu, {}).pop(owner, 0) and self.processes[owner.split(".")[1]].driver == CHECKPOINTED:
            self.changing[gpu] = 0

    def grow(self, process: Process, size_bytes: int) -> bool:
        """Take more memory on its GPU, if possible: a paused process takes none."""
        gpu = process.gpu
        if gpu is None or not process.runs or self.free(gpu) < size_bytes:
            return False
        if gpu in self.changing:
            if self.changing[gpu] + size_bytes > AT_ONCE_BYTES:
                return False
            self.changing[gpu] += size_bytes
        process.size_bytes += size_bytes
        self.holds[gpu][process.name] = process.size_bytes
        return True

    def snatch(self, gpu: str) -> Process | None:
        """Have a process there take all it may at once, at the moment in which memory changes hands."""
        size_bytes = min(self.free(gpu), AT_ONCE_BYTES - self.changing[gpu])
        for process in (*self.strangers.values(), *self.processes.values()):
            if size_bytes > 0 and process.gpu == gpu and self.grow(process, size_bytes):
                return process
        return None

    # ---- what the daemon does itself ---------------------------------------------------------------------------------

    def reserve(self, name: str, gpu: str, size_bytes: int) -> bool:
        held = self.holds.setdefault(gpu, {})
        if size_bytes - held.get(name, 0) > self.free(gpu):
            return False
        held[name] = max(size_bytes, held.get(name, 0))
        return True

    def release_reservation(self, name: str, gpu: str) -> None:
        process = self.processes[name]
        if process.alive and process.gpu == gpu:
            raise Violation(f"the room of {name} on {gpu} was given away while it is there")
        self.holds.get(gpu, {}).pop(name, None)

    def reserve_pool(self, name: str, size_bytes: int) -> bool:
        wanted = size_bytes - self.pool.get(name, 0)
        if wanted > self.pool_free:
            return False
        if wanted > 0:
            self.pool_free -= wanted
            self.pool[name] = size_bytes
        return True

    def release_pool(self, name: str) -> None:
        process = self.processes[name]
        if process.alive and not process.has_bytes and name in self.pool:
            raise Violation(f"the bytes of {name} were freed while they are nowhere else")
        if process.owed:
            raise Violation(f"the state of {name} was freed while there is no process of it")
        if process.alive and not process.proven:
            raise Violation(f"the bytes of {name} were freed before it had passed a boundary with its own")
        self._drop_pool(name)

    def _drop_pool(self, name: str) -> None:
        self.pool_free += self.pool.pop(name, 0)
        if name not in self.own_copies:
            self.copies.pop(name, None)

    # ---- what is done in a worker ------------------------------------------------------------------------------------

    def offload(self, name: str, memory_bytes: int | None = None) -> None:
        """Offload into the pool, or into memory that came with the order."""
        process = self.processes[name]
        memory_bytes = self.pool.get(name, 0) if memory_bytes is None else memory_bytes
        if not process.parked:
            raise Violation(f"{name} was offloaded while it trains")
        if not process.has_bytes:
            return
        if memory_bytes < process.size_bytes:
            raise Violation(f"{name} was offloaded to {memory_bytes} bytes, {process.size_bytes} are needed")
        self._must_stand_together(name)
        self.copies[name] = process.step
        if process.restarts:
            self.saved_at[name] = process.boundary
            return
        if not self.keeper:
            self.own_copies.add(name)
        process.has_bytes = False
        process.proven = False

    def _must_stand_together(self, name: str) -> None:
        if self.is_distributed[self.processes[name].job]:
            counts = {p.boundary for p in self.ranks(name) if p.parked and p.has_bytes}
            if len(counts) > 1:
                raise Violation(f"{name} was offloaded while the ranks stand at {sorted(counts)}")

    def leave(self, name: str) -> None:
        """A GPU that is only imagined is left by saying so; the room there stays held."""
        process = self.processes[name]
        if not process.parked:
            raise Violation(f"{name} was checkpointed while it trains")
        process.gpu = None

    def arrive(self, name: str, gpu: str) -> None:
        process = self.processes[name]
        if process.gpu is not None:
            return
        if self.held(name, gpu) < process.size_bytes:
            raise Violation(f"{name} was restored on {gpu} without the room: it is lost")
        process.gpu = gpu

    def dump(self, op_id: str, names: Sequence[str], *, goes_on: bool) -> None:
        """Write the image of a job. An image cannot have what is on a GPU, or moves. If the job ends, the image is
        whole.
        """
        for process in (self.processes[name] for name in names):
            if process.gpu is not None or not process.parked or process.under_way:
                raise Violation(f"an image was made of {process.name} while it is not off its GPU and at rest")
        if goes_on:
            out = {name: self.processes[name].step for name in names if not self.processes[name].has_bytes}
            self.written[op_id] = out
        else:
            self.images.add(op_id)

    def seal(self, op_id: str) -> None:
        """Check that the pool's bytes of a job that continues were written and read back."""
        for name, step in self.written.pop(op_id).items():
            if self.copies.get(name) != step:
                had = f"the bytes of step {self.copies.get(name)}, not {step}"
                raise Violation(f"the image of {op_id} was to be written from the pool, which has of {name} {had}")
        self.images.add(op_id)

    def scrap(self, op_id: str) -> None:
        self.written.pop(op_id, None)

    def end(self, op_id: str, name: str) -> None:
        if op_id not in self.images:
            raise Violation(f"{name} was ended before its image was whole")
        self.die(name)

    def reload(self, name: str) -> None:
        process = self.processes[name]
        if process.runs and process.has_bytes:
            raise Violation(f"{name} was reloaded while it trains")
        if process.gpu is None:
            raise Violation(f"{name} was reloaded while it is on no GPU")
        if process.driver != RUNNING:
            raise Violation(f"{name} was reloaded while the driver has it {process.driver}: it would hang")
        if process.has_bytes:
            return
        if self.held(name, process.gpu) < process.size_bytes:
            raise Violation(f"{name} was reloaded on {process.gpu} without the room")
        if self.copies.get(name) != process.step:
            raise Violation(f"{name} was reloaded with the bytes of step {self.copies.get(name)}, not {process.step}")
        self._take_back(process)

    def _take_back(self, process: Process) -> None:
        process.has_bytes = True
        self.own_copies.discard(process.name)
        if process.name not in self.pool:
            self.copies.pop(process.name, None)

    def release(self, name: str) -> None:
        process = self.processes[name]
        process.asked_at = None
        if process.parked and not (process.has_bytes and process.gpu and process.driver == RUNNING):
            raise Violation(f"{name} was let go without its bytes")
        together = self.is_distributed[process.job] and process.parked
        if together and any(not p.has_bytes for p in self.ranks(name)):
            raise Violation(f"{name} was let go while another rank has no bytes")
        process.parked = False

    def train(self, name: str) -> bool:
        """Train to the next boundary, and park there if requested. Returns False if it cannot."""
        process = self.processes[name]
        if not process.runs:
            return False
        if self.is_distributed[process.job] and any(p.boundary < process.boundary for p in self.ranks(name)):
            return False
        process.boundary += 1
        process.step += 1
        process.proven = True
        process.parked = process.asked_at is not None and process.boundary >= process.asked_at
        return True

    def come_back_alone(self, name: str) -> bool:
        """Do what an agent does that was parked for too long without a daemon, or at a signal. Returns False if it
        cannot.
        """
        process = self.processes[name]
        if not process.parked or process.under_way or process.stopped or process.driver != RUNNING:
            return False
        if process.gpu is None and self.driven:
            return False
        if not process.has_bytes:
            room = process.size_bytes if process.gpu is None else self.held(name, process.gpu)
            if room < process.size_bytes or self.copies.get(name) != process.step:
                return False
            self._take_back(process)
        process.parked, process.asked_at = False, None
        return True

    def die(self, name: str) -> None:
        process = self.processes[name]
        process.owed = process.owed or (process.restarts and not process.proven and not process.finished)
        process.alive = process.connected = process.parked = process.stopped = process.finishing = False
        process.under_way = process.asked_at = None
        process.driver, process.ending = RUNNING, None
        self.unclaimed.discard(name)
        self.own_copies.discard(name)
        if name not in self.pool:
            self.copies.pop(name, None)
        if process.gpu is not None:
            self.holds.get(process.gpu, {}).pop(name, None)

    # ---- what is lost with a daemon ----------------------------------------------------------------------------------

    def lose_daemon(self, *, kept: bool, random: Random) -> None:
        """Drop what only the daemon held: memory on other GPUs than the job's, and memory without a keeper."""
        self.written.clear()
        if kept:
            return
        for name in list(self.pool):
            self._drop_pool(name)
        for gpu, held in self.holds.items() if random.random() < 0.5 else ():
            for name in list(held):
                if "." in name:  # a piece of video memory
                    del held[name]
                process = self.processes.get(name)
                if process is not None and (process.gpu != gpu or not process.alive):
                    del held[name]
