"""Jobs whose CUDA contexts take 300 to 900 MiB share a GPU, and no byte is lost if one takes more than was measured."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from hegmctl.connection import Connection
from hegmd.protocol.sharing import RUNNING
from tests.e2e.driven import MIB, DrivenNode, DrivenProgram, Watched
from tests.looks import pause
from tests.wide import quick_first

pytestmark = pytest.mark.e2e
SIZES_MIB = (32, 16)
LARGER_MIB, LEFT_MIB = 900, 600


@contextmanager
def _node(folder: Path, context_mib: int, gpu_mib: int) -> Iterator[DrivenNode]:
    """A GPU on which each context takes so much, and a daemon that has jobs take turns."""
    node = DrivenNode(folder, gpus=1, gpu_bytes=gpu_mib * MIB)
    node.daemon.configured('[sharing]\nslices = "on"\nmin_quantum_s = 0.2\nmethod = "keep-context"\n')
    node.cuda.context_bytes = context_mib * MIB
    node.cuda.write()
    with node:
        yield node


def _job(node: DrivenNode, run: str) -> DrivenProgram:
    """A job; its context is what it has on the GPU beside what its allocator has."""
    program = node.agented(0, *SIZES_MIB, HEGM_RUN=run * 16)
    program.tell(f"facts reserved_bytes={sum(SIZES_MIB) * MIB}")
    return program


@pytest.mark.parametrize("context_mib", quick_first([900, 300, 600], 1, most=1))
def test_jobs_take_turns_and_make_room_with_contexts_of_any_size(tmp_path: Path, context_mib: int) -> None:
    gpu_mib, job_mib = 8192, sum(SIZES_MIB)
    with _node(tmp_path, context_mib, gpu_mib) as node, _job(node, "a") as one, _job(node, "b") as other:
        jobs = [Watched(program) for program in (one, other)]
        with node.connect() as hegmd:
            for job in jobs:
                suspended = hegmd.suspend(job.pid, keep_context=True).operation
                assert suspended is not None
                (process,) = suspended.processes
                assert context_mib * MIB <= (process.stays_bytes or 0) < (context_mib + 20) * MIB
            for job in jobs:
                hegmd.resume(job.pid)
            # Both have to leave: beside the lease there is room for their contexts only.
            kept_mib = 2 * context_mib + job_mib // 2
            lease = hegmd.make_room((gpu_mib - kept_mib) * MIB, until_free=True, keep_context=True).lease
            assert lease is not None
            hegmd.release(lease.id)
            _until(lambda: _states(hegmd) == [RUNNING, RUNNING])
            for program in (one, other):  # the process copies by itself, which takes no further context
                program.tell("facts expandable=yes")
            kept_mib = 2 * context_mib + job_mib * 3 // 2
            before = _count(hegmd, "sharing.resumed")
            lease = hegmd.make_room((gpu_mib - kept_mib) * MIB, pid=node.daemon.process.pid, until_free=True).lease
            assert lease is not None
            _until(lambda: _count(hegmd, "sharing.resumed") >= before + 1)
            hegmd.release(lease.id)
            _until(lambda: _states(hegmd) == [RUNNING, RUNNING])
            assert _count(hegmd, "sharing.failed") == 0
        for job in jobs:
            job.is_whole()


def test_a_job_copies_its_own_bytes_if_the_context_for_copying_takes_more_than_was_measured(tmp_path: Path) -> None:
    """Each suspend that kept its context was refused, and others waited for its memory for ever."""
    gpu_mib, used_mib = 2048, 2 * 512 + sum(SIZES_MIB)
    with _node(tmp_path, 512, gpu_mib) as node, _job(node, "a") as program, node.connect() as hegmd:
        job = Watched(program)
        with node.program(0, gpu_mib - used_mib - LEFT_MIB):
            node.cuda.context_bytes = LARGER_MIB * MIB
            node.cuda.write()
            lease = hegmd.make_room(
                (LEFT_MIB + sum(SIZES_MIB) * 2 // 3) * MIB, until_free=True, keep_context=True
            ).lease
            assert lease is not None
            hegmd.release(lease.id)
            _until(lambda: _states(hegmd) == [RUNNING])
            assert _count(hegmd, "sharing.failed") == 0
            job.is_whole()
            assert program.tell("seen").split().count("copy") == 2, "out of its GPU, and back"


@pytest.mark.parametrize("keeps_context", [True, False])
def test_a_job_copies_its_bytes_back_itself_if_the_context_for_copying_grows_meanwhile(
    tmp_path: Path, *, keeps_context: bool
) -> None:
    gpu_mib, used_mib = 2048, 512 + sum(SIZES_MIB)
    left_mib = LEFT_MIB if keeps_context else 800
    with _node(tmp_path, 512, gpu_mib) as node, _job(node, "a") as program, node.connect() as hegmd:
        job = Watched(program)
        hegmd.suspend(job.pid, keep_context=keeps_context)
        with node.program(0, gpu_mib - used_mib - left_mib - 512):
            node.cuda.context_bytes = LARGER_MIB * MIB
            node.cuda.write()
            hegmd.resume(job.pid, queue=True, limit_s=20)
            job.is_whole()
            assert program.tell("seen").split().count("copy") == 1


def _states(hegmd: Connection) -> list[str]:
    return [job.state for job in hegmd.queue().jobs]


def _count(hegmd: Connection, kind: str) -> int:
    return sum(event.kind == kind for event in hegmd.events(kinds=["sharing"]))


def _until(holds: Callable[[], bool]) -> None:
    while not holds():
        pause()
