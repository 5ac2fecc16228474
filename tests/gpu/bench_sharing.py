"""One command for a machine with one NVIDIA GPU: how soon does an urgent job get its memory, and what do turns cost?

    PYTHONPATH=.:client python3 -m tests.gpu.bench_sharing [--parts room,turns,shared] [--sizes 32,1] [--repeat 5]
                                                         [--shared-s 480] [--out FILE]

`room`: a training of so many GiB has to leave for a lease, with its CUDA context kept and without; from the request
until NVML shows the memory free, and until the training's next step after the lease is released. `turns`: two trainings
share a GPU that has room for one; from the last step of one to the first step of the other. `shared`: the same two for
so many seconds, and the steps of both per second against those of one that trains alone. What the trainings print,
losses bit for bit and digests, is compared with an undisturbed run. Ends with status 1 if anything differs.

A lease without a process takes the rest of the GPU, so that there is room for one. Runs over the stub driver too, where
its figures say nothing.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from hegmd.errors import HegmError
from hegmd.memory.sizes import whole_size
from hegmd.protocol.messages import Events, EventsReply, MakeRoom, Queue, QueueReply, Release, RoomReply
from hegmd.protocol.moves import Operations, OperationsReply, StoryReply
from hegmd.protocol.operations import Operation
from hegmd.protocol.sharing import Released
from hegmd.protocol.snapshots import Event
from tests.gpu.bench_suspend import FREE_WITHIN_S, Watch
from tests.gpu.moves_jobs import DIGEST_EVERY, PACE_S, Kind, Lines, command_of, on_stub
from tests.gpu.moves_node import MIB, Node, WentWrongError
from tests.gpu.moves_timing import phases_s

GIB = 1 << 30
# A training's memory besides its tensors: its context, and the blocks that its allocator keeps.
BESIDES_BYTES = 1536 * MIB
# The GPU memory left to two trainings, as a multiple of one's need. One fits, with the contexts of both and of the GPU
# helper: at 1.7, three contexts left too little for trainings of 1 GiB, and hegmd freed a training's own.
ROOM_FOR_ONE = 1.9
STEPS = 1_000_000
TURN_WITHIN_S = 240.0
# No switch is so short: two jobs whose steps are closer train at the same time.
LEAST_SWITCH_S = 0.05
# A step of an operation that is worth a line.
LONG_STEP_S = 0.02
# A job that was interrupted is left alone for twice as long as its switch, so it trains for so long between two leases.
UNDISTURBED_LINES = 300
METHODS = ("whole",) if on_stub() else ("whole", "keep-context")


class Training(Lines):
    """A job of the queue."""

    def __init__(self, node: Node, name: str, size_gib: int, folder: Path, *options: str) -> None:
        self.node, self.size_gib, self.folder = node, size_gib, folder
        words = ["--name", name, "--gpu", "gpu0", "--bytes", str(needed_bytes(size_gib)), *options]
        command = command_of(kind_of(size_gib, STEPS), folder, PACE_S)
        super().__init__(
            [sys.executable, "-m", "hegmctl", "run", "--no-daemon-start", *words, "--", *command], node.environ()
        )

    def trains(self, lines: int = DIGEST_EVERY) -> None:
        """Wait until it has its turn and has printed so many lines. Raises WentWrongError with what it waits for."""
        count = len(self.lines)
        try:
            self.wait_for(lambda: len(self.lines) > count + lines, "it does not train", TURN_WITHIN_S)
        except WentWrongError as error:
            raise WentWrongError(f"{error}\n{queue(self.node)}") from error

    def step_times(self) -> list[float]:
        """When each step was done."""
        return [at for at, line in zip(self.times, list(self.lines), strict=False) if _is_step(line)]


def _is_step(line: str) -> bool:
    return not line.startswith("digest")


def kind_of(size_gib: int, steps: int) -> Kind:
    return Kind(f"shared-{size_gib}", "peer", pad_mib=size_gib << 10, steps=steps)


def needed_bytes(size_gib: int) -> int:
    return size_gib * GIB + BESIDES_BYTES


def compare(node: Node, trainings: Sequence[Training]) -> None:
    """Compare what ended trainings have printed with an undisturbed run. Raises WentWrongError where they differ."""
    one = trainings[0]
    longest = max(len(training.lines) for training in trainings)
    environ = node.environ()
    del environ["HEGM_SOCKET"]
    with closing(Lines(command_of(kind_of(one.size_gib, longest), one.folder, 0.0), environ)) as reference:
        reference.wait_for(lambda: len(reference.lines) >= longest, "the undisturbed run is late", TURN_WITHIN_S)
        for training in trainings:
            for number, (line, wanted) in enumerate(zip(training.lines, reference.lines, strict=False)):
                if line != wanted:
                    raise WentWrongError(f"line {number} is {line!r}, and undisturbed it is {wanted!r}")


@contextmanager
def lease(node: Node, size_bytes: int) -> Iterator[str]:
    """A lease of gpu0 for the block."""
    with node.connect() as connection:
        wanted = MakeRoom(gpu="gpu0", size_bytes=size_bytes, until_free=True, priority=100, limit_s=FREE_WITHIN_S)
        try:
            reply = connection.call(wanted, RoomReply)
        except HegmError as error:
            raise WentWrongError(f"no lease: {error.message}\n{queue(node)}") from error
    assert reply.lease is not None
    try:
        yield reply.lease.id
    finally:
        with node.connect() as connection:
            connection.call(Release(lease=reply.lease.id), Released)


def gpu_bytes(node: Node) -> int:
    """How much memory gpu0 has."""
    with node.connect() as connection:
        return next(gpu.memory_total_bytes or 0 for gpu in connection.gpus().gpus if gpu.id == "gpu0")


@contextmanager
def sharing_node(size_gib: int, settings: str) -> Iterator[tuple[Node, Path]]:
    """A daemon that shares, with enough ready memory for one such training."""
    ready = 0 if on_stub() else whole_size(size_gib * GIB + GIB)
    text = f'ready_bytes = {ready}\nready_helper = "contexts"\n[sharing]\n{settings}'
    with tempfile.TemporaryDirectory(prefix="hegm-sharing-") as name, Node(Path(name), settings=text) as node:
        try:
            node.wait_until_ready()
            yield node, Path(name)
        except (HegmError, WentWrongError):
            print(node.log_tail(40), flush=True)
            raise


# -- room --------------------------------------------------------------------------------------------------------------


def room(size_gib: int, method: str, repeat: int) -> dict[str, Any]:
    """A training leaves for a lease, and comes back."""
    rows: list[dict[str, float]] = []
    with sharing_node(size_gib, f'method = "{method}"\n') as (node, folder), ExitStack() as held:
        training = held.enter_context(closing(Training(node, "low", size_gib, folder, "--priority", "best-effort")))
        training.trains()
        for _ in range(repeat):
            node.wait_until_ready()
            rows.append(room_once(node, training, keeps=method == "keep-context"))
            print(f"  {size_gib} GiB {method}: {_rounded(rows[-1])}", flush=True)
        print(events(node), flush=True)
        training.end()
        compare(node, [training])
    medians = {name: statistics.median(row[name] for row in rows) for name in rows[0]}
    return {"what": "make-room", "size_gib": size_gib, "method": method, "count": repeat, **_rounded(medians)}


def room_once(node: Node, training: Training, *, keeps: bool) -> dict[str, float]:
    held_mib = sum(node.gpus.account().places(training.pid).values())
    limit_mib = held_mib - 0.9 * training.size_gib * 1024 if keeps else 0.0
    if on_stub():
        limit_mib = held_mib
    # The driver's own memory never becomes free, so this requests a part of the training's memory.
    free_bytes = gpu_bytes(node) - int(node.gpus.account().used_mib[0] * MIB)
    wanted_bytes = free_bytes + training.size_gib * GIB // 2
    watch, asked_at = Watch(node, training.pid, limit_mib), time.monotonic()
    asked_utc = time.time()
    with lease(node, wanted_bytes):
        replied_s = time.monotonic() - asked_at
        free_s = max(0.0, watch.wait() - asked_at)
        operation = _last_operation(node, training.pid)
        boundary_s = _waited_for_boundary(node, operation)
        steps, released_at = len(training.lines), time.monotonic()
    training.wait_for(lambda: len(training.lines) > steps, "it does not train", TURN_WITHIN_S)
    back_s = training.times[steps] - released_at
    training.trains(UNDISTURBED_LINES)
    story = node.story(operation.id)
    tell_story(story, operation.created_utc, asked_utc)
    return {"free_s": free_s, "boundary_s": boundary_s, "replied_s": replied_s, "back_s": back_s}


def tell_story(story: StoryReply, since_utc: float, zero_utc: float) -> None:
    """Print the phases of an operation since then and its long steps, in seconds after `zero_utc`."""
    parts = ", ".join(f"{name} {value:.3f}" for name, value in phases_s(story, since_utc).items() if value > 0.001)
    began_s = max(story.story[0].utc, since_utc) - zero_utc
    print(f"  operation {story.operation.id} from {began_s:.3f} s on: {parts}")
    for step in [step for line in story.story for step in line.timings]:
        if step.began_utc >= since_utc and step.took_s > LONG_STEP_S:
            print(f"    {step.began_utc - zero_utc:.3f} {step.lane} {step.name}: {step.took_s:.3f} s", flush=True)


def _last_operation(node: Node, pid: int) -> Operation:
    with node.connect() as connection:
        known = connection.call(Operations(), OperationsReply).operations
    return [one for one in known if any(pid == there.pid for there in one.processes)][-1]


def _waited_for_boundary(node: Node, operation: Operation) -> float:
    """How long the operation waited for a boundary between two batches."""
    return phases_s(node.story(operation.id), operation.created_utc).get("quiescing", 0.0)


# -- turns -------------------------------------------------------------------------------------------------------------


def turns(size_gib: int, within: Callable[[float, int], bool], quantum_s: float) -> dict[str, Any]:
    """Two trainings take turns until `within` says that it is enough, of the seconds and of the switches."""
    settings = f'slices = "on"\nmin_quantum_s = {quantum_s}\n'
    with sharing_node(size_gib, settings) as (node, folder), ExitStack() as held:
        filler = gpu_bytes(node) - int(ROOM_FOR_ONE * needed_bytes(size_gib))
        held.enter_context(lease(node, filler))
        first = held.enter_context(closing(Training(node, "first", size_gib, folder)))
        first.trains()
        print(f"  {size_gib} GiB: the first trains", flush=True)
        alone_began = time.monotonic()
        count = len(first.step_times())
        first.wait_for(lambda: len(first.step_times()) >= count + 300, "it does not train", TURN_WITHIN_S)
        alone = (len(first.step_times()) - count) / (time.monotonic() - alone_began)
        second = held.enter_context(closing(Training(node, "second", size_gib, folder)))
        second.trains()
        print(f"  {size_gib} GiB: the second trains", flush=True)
        began, done = time.monotonic(), len(first.step_times()) + len(second.step_times())
        recorded_count = 0
        while within(time.monotonic() - began, len(gaps := switches(first, second))):
            for gap in gaps[recorded_count:]:  # what is known when the machine's time ends is not lost
                print(f"  {size_gib} GiB: a switch took {gap.took_s:.3f} s", flush=True)
                for training in (first, second):
                    tell_switch(node, training, gap)
            recorded_count = len(gaps)
            time.sleep(0.2)  # a program that watches
            if not (first.alive and second.alive):
                raise WentWrongError(f"a training ended: {first.error_text()} {second.error_text()}\n{queue(node)}")
        took_s = time.monotonic() - began
        done = len(first.step_times()) + len(second.step_times()) - done
        took = [gap.took_s for gap in switches(first, second)]
        first.end()
        second.end()
        compare(node, [first, second])
        print(events(node), flush=True)
        if not took:
            raise WentWrongError(f"no turn ended\n{queue(node)}\n{events(node)}")
        if min(took) < LEAST_SWITCH_S:
            raise WentWrongError(f"both train at the same time: {min(took):.3f} s between their steps")
    return {
        "what": "turns",
        "size_gib": size_gib,
        "quantum_s": quantum_s,
        "seconds": round(took_s, 1),
        "switches": len(took),
        "switch_s": round(statistics.median(took), 3),
        "longest_switch_s": round(max(took), 3),
        "steps": done,
        "alone_steps_per_s": round(alone, 3),
        "throughput": round(done / took_s / alone, 4),
    }


@dataclass(frozen=True)
class TurnSwitch:
    """The last step of one training, and the first step of the other after it."""

    began: float
    took_s: float


def switches(first: Training, second: Training) -> list[TurnSwitch]:
    """Each change from one training to the other, without the first one: it has the start of the second in it."""
    steps = sorted([(at, 0) for at in first.step_times()] + [(at, 1) for at in second.step_times()])
    found = [
        TurnSwitch(earlier[0], later[0] - earlier[0]) for earlier, later in pairwise(steps) if earlier[1] != later[1]
    ]
    return found[1:]


def tell_switch(node: Node, training: Training, switch: TurnSwitch) -> None:
    """Print what the last operation of a training did in that time."""
    began_utc = time.time() - time.monotonic() + switch.began
    with suppress(IndexError):  # it had none yet
        tell_story(node.story(_last_operation(node, training.pid).id), began_utc - 1, began_utc)


def queue(node: Node) -> str:
    with node.connect() as connection:
        return str(connection.call(Queue(), QueueReply))


def events(node: Node) -> str:
    with node.connect() as connection:
        return "\n".join(one.message for one in connection.stream(Events(kinds=("sharing",)), Event, EventsReply))


# ----------------------------------------------------------------------------------------------------------------------


def _rounded(row: dict[str, float]) -> dict[str, float]:
    return {name: round(value, 3) for name, value in row.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default="room,turns,shared")
    parser.add_argument("--sizes", default="32,1", help="in GiB; `shared` takes the first")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--quantum-s", type=float, default=5.0, help="for `turns`")
    parser.add_argument("--shared-quantum-s", type=float, default=30.0)
    parser.add_argument("--shared-s", type=float, default=480.0)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    parts, sizes = options.parts.split(","), [int(text) for text in options.sizes.split(",")]
    runs: list[Callable[[], dict[str, Any]]] = []
    if "room" in parts:
        runs += [partial(room, size, how, options.repeat) for size in sizes for how in METHODS]
    if "turns" in parts:
        runs += [partial(turns, size, lambda _, count: count < options.repeat, options.quantum_s) for size in sizes]
    if "shared" in parts:
        runs += [lambda: turns(sizes[0], lambda seconds, _: seconds < options.shared_s, options.shared_quantum_s)]
    rows, wrong = [], False
    for run in runs:
        try:
            rows.append(run())
            print(json.dumps(rows[-1]), flush=True)
        except (HegmError, WentWrongError) as error:
            wrong = True
            print(f"WENT WRONG: {error}", flush=True)
        if options.out is not None:
            options.out.write_text(json.dumps({"rows": rows}, indent=1) + "\n")
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
