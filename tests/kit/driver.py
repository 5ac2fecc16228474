"""The code's assumptions about CUDA's process checkpoint calls, each as a check for the stub and for real GPUs.

Owns the rows about states, callers and moving; video_memory.py has those about video memory, several_gpus.py those
about several GPUs, and `ROWS` there names them all. A row takes a `Rig`, which starts processes and reads the GPUs,
and raises ContractBroken. Each row needs its own process: some destroy a job on purpose, one gives up root, one must
not have initialised the driver. Rows know nothing of the stub: the rig meets a step in progress.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import NamedTuple, Protocol

from hegmd.gpu_helper import cuda
from tests.kit.contracts import ContractBroken
from tests.patience import HANG_S

MIB = 1 << 20
# The figures of an idle real GPU may differ by this much.
NOISE_BYTES = 16 * MIB
SETTLES_WITHIN_S = HANG_S
# How long to watch a call that has to block for ever. Too short can only hide a fault, not invent one.
WATCHED_S = 0.3
NOBODY = 65534


class Target(Protocol):
    """A CUDA program that answers each line with one line."""

    pid: int

    def ask(self, line: str) -> str: ...
    def tell(self, line: str) -> None: ...
    def hears(self, within_s: float) -> str | None: ...
    def pause(self) -> None: ...
    def go_on(self) -> None: ...
    def end(self) -> None: ...


class Caller(Protocol):
    """One call of `hegmd.gpu_helper.cuda`, in its own process."""

    def has_ended(self, within_s: float) -> bool: ...
    def kill(self) -> None: ...


class ProgressSample(NamedTuple):
    """NVML's figures: bytes in use by GPU, and by process and GPU."""

    used_bytes: dict[str, int]
    by_process: dict[tuple[int, str], int]


class Rig(Protocol):
    """The tools of a row. The rig ends everything that the row has started."""

    large_mib: int  # a size of which a step takes long enough to be met under way

    def start(self, gpu: int | str, *sizes_mib: int) -> Target: ...
    def start_without_cuda(self) -> Target: ...
    def call(self, step: str, *arguments: int) -> Caller: ...
    def interrupt(self, step: str, pid: int) -> None: ...
    def hold(self, gpu: int, size_bytes: int, pattern: int) -> tuple[Caller, int]: ...
    def look(self) -> ProgressSample: ...


class Row(NamedTuple):
    """A check and how many GPUs it needs."""

    check: Callable[[Rig], None]
    gpus: int


ROWS: dict[str, Row] = {}


def row(gpus: int = 1) -> Callable[[Callable[[Rig], None]], Callable[[Rig], None]]:
    """Put a check in the table, by its name."""

    def note(check: Callable[[Rig], None]) -> Callable[[Rig], None]:
        ROWS[check.__name__] = Row(check, gpus)
        return check

    return note


# ---- what rows say ---------------------------------------------------------------------------------------------------


def must(holds: bool, words: str) -> None:
    if not holds:
        raise ContractBroken(words)


def must_be(found: object, wanted: object, what: str) -> None:
    must(found == wanted, f"{what} is {found!r}, not {wanted!r}")


@contextmanager
def fails(*codes: int) -> Generator[None]:
    """The call in here fails with one of these codes; with none given, with any."""
    try:
        yield
    except cuda.CudaError as error:
        must(not codes or error.code in codes, f"{error}, where {codes} was expected")
    else:
        raise ContractBroken(f"a call went well that was to fail with {codes}")


def eventually(holds: Callable[[], bool], words: str) -> None:
    """Wait until the condition is true; no driver needs longer than this limit."""
    deadline = time.monotonic() + SETTLES_WITHIN_S
    while not holds():
        must(time.monotonic() < deadline, words)
        threading.Event().wait(0.01)


def swapped() -> list[tuple[str, str]]:
    """The full map that exchanges the first two GPUs and leaves the others."""
    uuids = [device.uuid for device in cuda.devices()]
    return list(zip(uuids, [uuids[1], uuids[0], *uuids[2:]], strict=True))


def begin(rig: Rig, *sizes_mib: int) -> tuple[Target, str]:
    """The driver initialised, and a program on the first GPU with the digest of its contents."""
    cuda.start()
    target = rig.start(0, *sizes_mib)
    return target, target.ask("digest")


def take_off(pid: int) -> None:
    cuda.lock(pid, 10_000)
    cuda.checkpoint(pid)


def goes_on(target: Target, digest: str) -> None:
    must_be(target.ask("digest"), digest, "the content afterwards")
    must(target.ask("step").startswith("step "), "the program does not go on")


# ---- states ----------------------------------------------------------------------------------------------------------


@row()
def initialising_takes_no_video_memory(rig: Rig) -> None:
    before = rig.look()
    must(cuda.start() >= cuda.CHECKPOINT_SINCE, "the driver is older than the checkpoint calls")
    cuda.start()
    after = rig.look()
    must_be(set(after.by_process), set(before.by_process), "who is on the GPUs")
    must(set(before.used_bytes) == {device.uuid for device in cuda.devices()}, "CUDA and NVML name other GPUs")
    for uuid, used in after.used_bytes.items():
        must(abs(used - before.used_bytes[uuid]) < NOISE_BYTES, f"cuInit took {used - before.used_bytes[uuid]} bytes")


@row()
def states_follow_each_other_and_a_restore_ends_locked(rig: Rig) -> None:
    target, digest = begin(rig, 64, 3)
    must_be(cuda.state(target.pid), "running", "the state at first")
    must(os.path.exists(f"/proc/{target.pid}/task/{cuda.restore_thread(target.pid)}"), "no thread to restore it with")
    cuda.lock(target.pid, 10_000)
    must_be(cuda.state(target.pid), "locked", "the state after lock")
    cuda.checkpoint(target.pid)
    must_be(cuda.state(target.pid), "checkpointed", "the state after checkpoint")
    cuda.restore(target.pid)
    must_be(cuda.state(target.pid), "locked", "the state after restore")
    cuda.unlock(target.pid)
    must_be(cuda.state(target.pid), "running", "the state after unlock")
    goes_on(target, digest)


@row()
def the_wrong_order_changes_nothing(rig: Rig) -> None:
    target, digest = begin(rig, 8)
    pid = target.pid

    def refused(*steps: Callable[[int], None]) -> None:
        before = cuda.state(pid)
        for step in steps:
            with fails(cuda.ILLEGAL_STATE):
                step(pid)
        must_be(cuda.state(pid), before, "the state after refusals")

    def lock(pid: int) -> None:
        cuda.lock(pid, 1000)

    refused(cuda.checkpoint, cuda.restore, cuda.unlock)
    lock(pid)
    refused(lock, cuda.restore)
    cuda.checkpoint(pid)
    refused(lock, cuda.checkpoint, cuda.unlock)
    cuda.restore(pid)
    cuda.unlock(pid)
    goes_on(target, digest)


@row()
def a_lock_waits_for_queued_work_and_gives_up_at_its_limit(rig: Rig) -> None:
    target, digest = begin(rig, 8)
    target.ask("queue 2")
    started = time.monotonic()
    with fails(cuda.NOT_READY):
        cuda.lock(target.pid, 200)
    must(time.monotonic() - started >= 0.19, "the lock gave up before its limit")
    must_be(cuda.state(target.pid), "running", "the state after a lock that gave up")
    cuda.lock(target.pid, 60_000)
    must_be(cuda.state(target.pid), "locked", "the state after a lock that waited")
    cuda.unlock(target.pid)
    target.ask("drain")
    goes_on(target, digest)


@row()
def only_cuda_waits_in_a_locked_process(rig: Rig) -> None:
    target, digest = begin(rig, 8)
    cuda.lock(target.pid, 10_000)
    must_be(target.ask("ping"), "pong", "the answer of a locked process")
    cuda.checkpoint(target.pid)
    must_be(target.ask("ping"), "pong", "the answer of a checkpointed process")
    target.tell("step")
    must_be(target.hears(WATCHED_S), None, "the answer to a CUDA call while checkpointed")
    cuda.restore(target.pid)
    must_be(target.hears(WATCHED_S), None, "the answer to a CUDA call before unlock")
    cuda.unlock(target.pid)
    must_be(target.hears(SETTLES_WITHIN_S), "step 1", "the answer that waited")
    goes_on(target, digest)


# ---- who may, and who is there ---------------------------------------------------------------------------------------


@row()
def an_exited_process_differs_from_one_without_cuda(rig: Rig) -> None:
    cuda.start()
    with fails(cuda.NOT_INITIALIZED):
        cuda.state(rig.start_without_cuda().pid)
    gone = rig.start_without_cuda()
    gone.end()
    with fails(cuda.OPERATING_SYSTEM):
        cuda.state(gone.pid)
    with fails(cuda.OPERATING_SYSTEM):
        cuda.lock(gone.pid, 1000)


@row()
def another_users_process_is_out_of_reach(rig: Rig) -> None:
    """Ends this process's rights; where it has none to give up there is nothing to see."""
    target, digest = begin(rig, 8)
    if os.geteuid():
        return
    os.seteuid(NOBODY)
    for call in (cuda.state, cuda.checkpoint, cuda.unlock):
        with fails(cuda.OPERATING_SYSTEM):
            call(target.pid)
    with fails(cuda.OPERATING_SYSTEM):
        cuda.lock(target.pid, 1000)
    os.seteuid(0)
    must_be(cuda.state(target.pid), "running", "the state after a stranger's calls")
    goes_on(target, digest)


@row()
def a_checkpointed_process_is_off_its_gpu(rig: Rig) -> None:
    cuda.start()
    (uuid, *_) = [device.uuid for device in cuda.devices()]
    idle_bytes = rig.look().used_bytes[uuid]
    target, digest = begin(rig, 256)
    state = rig.look()
    must(state.used_bytes[uuid] >= idle_bytes + 256 * MIB, "the program's memory does not show")
    must(state.by_process.get((target.pid, uuid), 0) >= 256 * MIB, "the program does not show")
    take_off(target.pid)
    eventually(lambda: rig.look().used_bytes[uuid] - idle_bytes < NOISE_BYTES, "video memory is left after checkpoint")
    must((target.pid, uuid) not in rig.look().by_process, "NVML lists a checkpointed process")
    cuda.restore(target.pid)
    must((target.pid, uuid) in rig.look().by_process, "NVML does not list a restored process")
    cuda.unlock(target.pid)
    goes_on(target, digest)


@row()
def a_target_killed_while_checkpointed_leaves_nothing(rig: Rig) -> None:
    cuda.start()
    idle = rig.look()
    target, _ = begin(rig, 64)
    take_off(target.pid)
    target.end()
    with fails(cuda.OPERATING_SYSTEM):
        cuda.restore(target.pid)
    for uuid, used in rig.look().used_bytes.items():
        must(abs(used - idle.used_bytes[uuid]) < NOISE_BYTES, f"{used - idle.used_bytes[uuid]} bytes are left")


# ---- callers that die ------------------------------------------------------------------------------------------------


@row()
def a_call_continues_when_its_caller_is_killed(rig: Rig) -> None:
    target, digest = begin(rig, rig.large_mib)
    cuda.lock(target.pid, 10_000)
    rig.interrupt("checkpoint", target.pid)
    must_be(cuda.state(target.pid), "checkpointed", "the state after a killed caller's checkpoint")
    rig.interrupt("restore", target.pid)
    must_be(cuda.state(target.pid), "locked", "the state after a killed caller's restore")
    cuda.unlock(target.pid)
    goes_on(target, digest)


@row()
def a_killed_callers_lock_stays_until_an_unlock(rig: Rig) -> None:
    target, digest = begin(rig, 8)
    caller = rig.call("lock", target.pid, 10_000)
    must(caller.has_ended(SETTLES_WITHIN_S), "the lock did not end")
    must_be(cuda.state(target.pid), "locked", "the state after its caller ended")
    cuda.unlock(target.pid)
    goes_on(target, digest)


@row()
def a_stopped_target_hangs_its_callers_and_loses_nothing(rig: Rig) -> None:
    target, digest = begin(rig, 8)
    target.pause()
    callers = [rig.call("lock", target.pid, 50), rig.call("state", target.pid)]
    for caller in callers:
        must(not caller.has_ended(WATCHED_S), "a call about a stopped process came back")
    for caller in callers:
        caller.kill()
    target.go_on()
    if cuda.state(target.pid) == "locked":  # the killed caller's lock was done all the same
        cuda.unlock(target.pid)
    must_be(cuda.state(target.pid), "running", "the state once it goes on")
    goes_on(target, digest)


# ---- other GPUs ------------------------------------------------------------------------------------------------------


@row(gpus=2)
def a_map_moves_a_process_and_back(rig: Rig) -> None:
    target, digest = begin(rig, 128)
    first, second = (device.uuid for device in cuda.devices()[:2])
    for there in (second, first):
        take_off(target.pid)
        cuda.restore(target.pid, swapped())
        cuda.unlock(target.pid)
        on = {uuid for (pid, uuid), used in rig.look().by_process.items() if pid == target.pid and used >= 128 * MIB}
        must_be(on, {there}, "the GPU of the moved process")
        must_be(target.ask("uuid"), f"uuid {there}", "what its driver calls its GPU")
        goes_on(target, digest)


@row(gpus=2)
def a_map_that_is_no_full_permutation_changes_nothing(rig: Rig) -> None:
    target, digest = begin(rig, 8)
    uuids = [device.uuid for device in cuda.devices()]
    take_off(target.pid)
    unknown = "GPU-" + "-".join("0" * length for length in (8, 4, 4, 4, 12))
    for pairs in ([(uuids[0], uuids[1])], [(uuid, unknown) for uuid in uuids], [(one, uuids[0]) for one in uuids]):
        with fails(cuda.INVALID_VALUE):
            cuda.restore(target.pid, pairs)
        must_be(cuda.state(target.pid), "checkpointed", f"the state after the map {pairs}")
    cuda.restore(target.pid)
    cuda.unlock(target.pid)
    goes_on(target, digest)


@row(gpus=2)
def a_restore_without_memory_destroys_the_job(rig: Rig) -> None:
    """Why hegmd never calls it without enough memory: later restores fail too, on the first GPU as well."""
    target, _ = begin(rig, 512)
    take_off(target.pid)
    rig.start(1, 1).ask("grab")
    with fails(cuda.OUT_OF_MEMORY):
        cuda.restore(target.pid, swapped())
    for pairs in (swapped(), []):
        with fails(cuda.OPERATING_SYSTEM):
            cuda.restore(target.pid, pairs)
