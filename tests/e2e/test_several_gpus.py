"""One process on several GPUs, whose GPUs have peer access: moved, suspended, cut off, refused.

The stub has the trap of the real driver: with that access at the checkpoint the restore fails and the job is lost
permanently. Every program here has it, so one that answers with its digest afterwards had it disabled before.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest

from hegmctl.connection import Connection
from hegmd.errors import HegmError
from hegmd.protocol import operations as protocol
from hegmd.protocol.messages import Drain, Drained, Migrate, OperationReply, Suspend
from tests.e2e.driven import GIB, LOOKS, MIB, DrivenNode, DrivenProgram, Watched, at_rest
from tests.looks import pause
from tests.wide import telling

pytestmark = [pytest.mark.e2e]

# The total of the pieces on each of its GPUs, in turn; the first also has the counter.
FIRST_BYTES, SECOND_BYTES = 32 * MIB + 512, 72 * MIB


class TwoGpuProgram(Watched):
    """A watched program on two GPUs that reach one another."""

    def __init__(self, program: DrivenProgram) -> None:
        assert program.tell("reach") == "reached 0 0"
        super().__init__(program)

    def is_whole(self) -> None:
        super().is_whole()
        assert self.program.tell("across") == "crossed"


@pytest.fixture
def node(tmp_path: Path) -> Iterator[DrivenNode]:
    with DrivenNode(tmp_path, gpus=4) as made:
        yield made


def spread(node: DrivenNode) -> DrivenProgram:
    return node.agented("0,1", 24, 72, 8)


def migrate(connection: Connection, pid: int, to: str, carrier: str | None = None) -> protocol.Operation:
    reply = connection.call(Migrate(pids=(pid,), to=to, carrier=carrier), OperationReply)
    assert reply.operation is not None
    assert (reply.operation.phase, reply.operation.failure) == ("done", None)
    return reply.operation


def holds(node: DrivenNode, pid: int) -> dict[str, int]:
    """Return the memory that it has on each GPU besides its contexts, which are equal in size, once no other process
    has any.
    """
    own, used = node.vram(pid), node.used()
    for _ in range(LOOKS):
        own, used = node.vram(pid), node.used()
        if {gpu: size_bytes for gpu, size_bytes in used.items() if size_bytes} == own:
            break
        pause()
    else:
        raise AssertionError(f"{used} is in use, of which {own} is the program's")
    return {gpu: size_bytes - min(own.values()) + FIRST_BYTES for gpu, size_bytes in own.items()}


def test_a_process_moves_all_its_devices_or_one_or_exchanges_them(node: DrivenNode) -> None:
    with spread(node) as program, node.connect() as connection:
        watched = TwoGpuProgram(program)
        assert holds(node, watched.pid) == {"gpu0": FIRST_BYTES, "gpu1": SECOND_BYTES}
        moved = migrate(connection, watched.pid, "gpu3,gpu2")
        assert moved.processes[0].gpu == "gpu3,gpu2"
        watched.is_whole()
        assert holds(node, watched.pid) == {"gpu3": FIRST_BYTES, "gpu2": SECOND_BYTES}
        migrate(connection, watched.pid, "gpu3=gpu0")
        watched.is_whole()
        assert holds(node, watched.pid) == {"gpu0": FIRST_BYTES, "gpu2": SECOND_BYTES}
        migrate(connection, watched.pid, "gpu2,gpu0")
        watched.is_whole()
        assert holds(node, watched.pid) == {"gpu2": FIRST_BYTES, "gpu0": SECOND_BYTES}
        assert program.tell("seen").split().count("part") == 3


def test_it_is_suspended_and_resumes_on_other_gpus_also_after_a_kill_of_the_daemon(node: DrivenNode) -> None:
    """The journal records what each device needs: the driver cannot report it once the process is checkpointed."""
    with spread(node) as program:
        watched = TwoGpuProgram(program)
        with node.connect() as connection:
            suspended = connection.suspend(watched.pid).operation
            assert suspended is not None
            assert (suspended.phase, suspended.processes[0].state) == ("suspended", "parked")
            assert set(node.used().values()) == {0}
        node.daemon.process.kill()
        node.daemon.stop()
        node.daemon.start()
        node.wait_for_agents(watched.pid)
        assert at_rest(node).phase == "suspended"
        with node.connect() as connection:
            with pytest.raises(HegmError, match="--to gives 1 GPU"):
                connection.resume(watched.pid, "gpu2")
            resumed = connection.resume(watched.pid, "gpu0=gpu2").operation
            assert resumed is not None
            assert (resumed.phase, resumed.failure, resumed.processes[0].gpu) == ("done", None, "gpu2,gpu1")
        watched.is_whole()
        assert holds(node, watched.pid) == {"gpu2": FIRST_BYTES, "gpu1": SECOND_BYTES}


def test_it_copies_its_storages_itself_and_memory_for_them_is_reserved_on_each_gpu(node: DrivenNode) -> None:
    """Before, all bytes of such a process went with the driver, at a tenth of the speed. The record of what each GPU
    needs outlives the daemon.
    """
    with spread(node) as program:
        watched = TwoGpuProgram(program)
        assert program.tell("devices") == "noted"
        with node.connect() as connection:
            to = Migrate(pids=(watched.pid,), to="gpu3,gpu2", carrier="worker", dry_run=True)
            planned = connection.call(to, OperationReply).plan
            assert planned is not None
            worker = planned.workers[0]
            assert (worker.carrier, worker.storage_bytes_by_gpu) == ("worker", (32 * MIB, 72 * MIB))
            rests = dict(zip(("gpu3", "gpu2"), worker.driver_bytes_by_gpu, strict=True))
            assert planned.reservation_bytes == {"gpu3": rests["gpu3"] + 32 * MIB, "gpu2": rests["gpu2"] + 72 * MIB}
            migrate(connection, watched.pid, "gpu3,gpu2", "worker")
            watched.is_whole()
            assert holds(node, watched.pid) == {"gpu3": FIRST_BYTES, "gpu2": SECOND_BYTES}
            migrate(connection, watched.pid, "gpu3=gpu0", "worker")
            watched.is_whole()
            suspended = connection.call(Suspend(pids=(watched.pid,), carrier="worker"), OperationReply).operation
            assert suspended is not None
            assert (suspended.phase, set(node.used().values())) == ("suspended", {0})
        node.daemon.process.kill()
        node.daemon.stop()
        node.daemon.start()
        node.wait_for_agents(watched.pid)
        assert at_rest(node).phase == "suspended"
        with node.connect() as connection:
            resumed = connection.resume(watched.pid, "gpu2=gpu1").operation
            assert resumed is not None
            assert (resumed.phase, resumed.failure, resumed.processes[0].gpu) == ("done", None, "gpu0,gpu1")
        watched.is_whole()
        assert holds(node, watched.pid) == {"gpu0": FIRST_BYTES, "gpu1": SECOND_BYTES}
        result = program.tell("seen").split()
        assert (result.count("offload"), result.count("reload"), result.count("part")) == (3, 3, 3)


@pytest.mark.parametrize("carrier", ["peer", "host"])
def test_the_helper_copies_from_each_of_its_gpus_and_back(node: DrivenNode, carrier: str) -> None:
    """One operation uses one session for each device: to another GPU, with one device alone, and with GPUs
    exchanged.
    """
    with spread(node) as program, node.connect() as connection:
        watched = TwoGpuProgram(program)
        assert program.tell("devices") == "noted"
        requested = None if carrier == "peer" else carrier  # peer is what the plan chooses
        dry = Migrate(pids=(watched.pid,), to="gpu3,gpu2", carrier=requested, dry_run=True)
        planned = connection.call(dry, OperationReply)
        assert planned.plan is not None
        assert planned.plan.workers[0].carrier == carrier
        migrate(connection, watched.pid, "gpu3,gpu2", carrier)
        watched.is_whole()
        assert holds(node, watched.pid) == {"gpu3": FIRST_BYTES, "gpu2": SECOND_BYTES}
        migrate(connection, watched.pid, "gpu3=gpu0", carrier)
        watched.is_whole()
        assert holds(node, watched.pid) == {"gpu0": FIRST_BYTES, "gpu2": SECOND_BYTES}
        migrate(connection, watched.pid, "gpu2,gpu0", carrier)
        watched.is_whole()
        assert holds(node, watched.pid) == {"gpu2": FIRST_BYTES, "gpu0": SECOND_BYTES}
        result = program.tell("seen").split()
        assert (result.count("export"), result.count("make"), result.count("copy"), result.count("offload")) == (
            3,
            3,
            0,
            0,
        )


def test_it_is_suspended_by_the_helper_and_resumes_on_other_gpus_after_a_kill_of_the_daemon(node: DrivenNode) -> None:
    with spread(node) as program:
        watched = TwoGpuProgram(program)
        program.tell("devices")
        with node.connect() as connection:
            suspended = connection.suspend(watched.pid).operation
            assert suspended is not None
            assert suspended.phase == "suspended"
            assert set(node.used().values()) == {0}
        node.daemon.process.kill()
        node.daemon.stop()
        node.daemon.start()
        node.wait_for_agents(watched.pid)
        assert at_rest(node).phase == "suspended"
        with node.connect() as connection:
            resumed = connection.resume(watched.pid, "gpu2,gpu0").operation
            assert resumed is not None
            assert (resumed.phase, resumed.failure, resumed.processes[0].gpu) == ("done", None, "gpu2,gpu0")
        watched.is_whole()
        assert holds(node, watched.pid) == {"gpu2": FIRST_BYTES, "gpu0": SECOND_BYTES}
        result = program.tell("seen").split()
        assert (result.count("export"), result.count("make"), result.count("offload")) == (1, 1, 0), (
            "host has the bytes"
        )


@pytest.mark.parametrize(
    ("carrier", "to", "stage"),
    telling(
        product(
            ("peer", "host"),
            ("gpu1,gpu0", "gpu1=gpu2"),
            ("step:checkpoint", "step:restore", "cuIpcOpenMemHandle_v2", "cuCheckpointProcessUnlock"),
        ),
        [("peer", "gpu1,gpu0", "step:restore"), ("host", "gpu1=gpu2", "cuIpcOpenMemHandle_v2")],
    ),
)
def test_a_daemon_killed_while_the_helper_has_the_bytes_is_followed_by_one_that_finds_all_devices(
    node: DrivenNode, tmp_path: Path, carrier: str, to: str, stage: str
) -> None:
    """With GPUs exchanged, the place of an operation does not tell on which GPU the bytes of which device are."""
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    with spread(node) as program:
        watched = TwoGpuProgram(program)
        program.tell("devices")
        node.cuda.order(f"hold {stage} {gate}")
        with node.connect() as connection:
            connection.call(Migrate(pids=(watched.pid,), to=to, carrier=carrier, wait=False), OperationReply)
        with gate.open("w"):
            node.daemon.process.send_signal(signal.SIGKILL)
            node.cuda.mend()
        node.daemon.stop()
        node.daemon.start()
        ended = at_rest(node)
        assert (ended.phase in {"done", "rolled-back"}, ended.processes[0].state) == (True, "running")
        watched.is_whole()
        place = ended.processes[0].gpu
        assert place in {"gpu0,gpu1", "gpu1,gpu0" if to == "gpu1,gpu0" else "gpu0,gpu2"}
        assert holds(node, watched.pid) == dict(zip(place.split(","), (FIRST_BYTES, SECOND_BYTES), strict=True))


def test_a_greedy_neighbour_gets_no_memory_reserved_for_storages_on_several_gpus(
    node: DrivenNode, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    with spread(node) as program, node.program(2) as neighbour, node.connect() as connection:
        watched = TwoGpuProgram(program)
        program.tell("devices")
        node.cuda.order(f"hold step:checkpoint@{watched.pid} {gate}")
        connection.call(Migrate(pids=(watched.pid,), to="gpu0=gpu2", wait=False), OperationReply)
        with gate.open("w"):
            node.cuda.mend()
            assert neighbour.tell("hoard") == "hoarding"
        ended = at_rest(node)
        assert (ended.phase, ended.failure, ended.processes[0].gpu) == ("done", None, "gpu2,gpu1")
        watched.is_whole()


@pytest.mark.parametrize(
    ("to", "stage"),
    telling(
        product(
            ("gpu1,gpu0", "gpu1=gpu2"), ("step:lock", "step:checkpoint", "step:restore", "cuCheckpointProcessUnlock")
        ),
        [("gpu1,gpu0", "step:restore"), ("gpu1=gpu2", "step:checkpoint")],
    ),
)
def test_a_daemon_killed_in_the_middle_costs_no_job(node: DrivenNode, tmp_path: Path, stage: str, to: str) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    with spread(node) as program:
        watched = TwoGpuProgram(program)
        node.cuda.order(f"hold {stage} {gate}")
        with node.connect() as connection:
            connection.call(Migrate(pids=(watched.pid,), to=to, wait=False), OperationReply)
        with gate.open("w"):  # from here on a call is in progress
            node.daemon.process.send_signal(signal.SIGKILL)
            node.cuda.mend()
        node.daemon.stop()
        node.daemon.start()
        ended = at_rest(node)
        assert (ended.phase in {"done", "rolled-back"}, ended.processes[0].state) == (True, "running")
        watched.is_whole()
        place = ended.processes[0].gpu
        assert place in {"gpu0,gpu1", "gpu1,gpu0" if to == "gpu1,gpu0" else "gpu0,gpu2"}
        assert holds(node, watched.pid) == dict(zip(place.split(","), (FIRST_BYTES, SECOND_BYTES), strict=True))


def test_a_failed_move_restores_peer_access_between_its_gpus(node: DrivenNode) -> None:
    with spread(node) as program, node.connect() as connection:
        watched = TwoGpuProgram(program)
        node.cuda.order("error cuCheckpointProcessLock 600")
        moved = connection.migrate(watched.pid, "gpu2,gpu3").operation
        assert moved is not None
        assert (moved.phase, moved.processes[0].gpu) == ("rolled-back", "gpu0,gpu1")
        watched.is_whole()
        assert program.tell("reach") == "reached 704 704"


def test_an_agent_that_cannot_part_them_keeps_its_job_where_it_is(node: DrivenNode) -> None:
    with spread(node) as program, node.connect() as connection:
        watched = TwoGpuProgram(program)
        program.tell("refuse part")
        moved = connection.migrate(watched.pid, "gpu2,gpu3").operation
        assert moved is not None
        assert (moved.phase, moved.processes[0].gpu) == ("rolled-back", "gpu0,gpu1")
        assert moved.failure is not None
        assert "the test wants it so" in moved.failure.message
        watched.is_whole()


def test_a_drained_gpu_gives_up_its_part_alone(node: DrivenNode) -> None:
    with spread(node) as program, node.connect() as connection:
        watched = TwoGpuProgram(program)
        drained = connection.call(Drain(gpu="gpu1", to=("gpu3",)), Drained)
        assert [op.phase for op in drained.operations] == ["done"]
        watched.is_whole()
        assert holds(node, watched.pid) == {"gpu0": FIRST_BYTES, "gpu3": SECOND_BYTES}


def test_an_ambiguous_or_destructive_request_is_refused(tmp_path: Path) -> None:
    with (
        DrivenNode(tmp_path, gpus=3, gpu_bytes=2 * GIB) as node,
        spread(node) as program,
        node.program("0,1") as bare,
        node.connect() as connection,
    ):

        def refused(pid: int, to: str) -> str:
            with pytest.raises(HegmError) as error:
                connection.migrate(pid, to)
            return f"{error.value.message}; {error.value.hint}"

        pid = program.pid
        assert "hegmctl migrate tests.e2e.cuda_agent --to gpu0=gpu2" in refused(pid, "gpu2")
        assert "cannot both move to gpu2" in refused(pid, "gpu2,gpu2")
        assert "cannot both move to gpu1" in refused(pid, "gpu0=gpu1")
        assert "not on gpu2" in refused(pid, "gpu2=gpu1")
        assert "does not map each source GPU" in refused(pid, "gpu0=,gpu1=gpu2")
        assert "there is no GPU gpu9" in refused(pid, "gpu0=gpu9")
        assert "already" in refused(pid, "gpu0,gpu1")
        assert "hegmctl run" in refused(bare.pid, "gpu1,gpu2")
        program.tell("facts hazards=peer-mapped,")
        assert "expandable segments" in refused(pid, "gpu0=gpu2")
