"""Handlers over a real inventory, asked in ways that a polite client would not."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from typing import Any, cast

import pytest

from hegmd.migration.model import PoolMemory
from hegmd.node.processes.roll import has_ended
from hegmd.node.processes.table import NOTE_ENDED
from hegmd.operations.image_requests import Checkpoints
from hegmd.operations.job_requests import JobRequests
from hegmd.operations.operations import Operations
from hegmd.operations.orphans import Orphans
from hegmd.operations.proofs import ProofRequests
from hegmd.operations.restart_requests import Restarts
from hegmd.operations.sequences import MultiStepOperations
from hegmd.operations.survey import PlanSurvey
from hegmd.protocol.messages import ConfigReply, Limits, Processes, ProcessesReply, ReloadReply, Request
from hegmd.protocol.record import Record
from hegmd.recovery.service import Recoveries
from hegmd.server.auth import Peer, Policy
from hegmd.server.handlers import Handlers, Services
from hegmd.server.session import Call, Session, SessionLimits
from hegmd.sharing.requests import SharingRequests
from hegmd.sharing.resumes import QueuedResumes
from hegmd.system.descriptors import Descriptors
from hegmd.system.stream import PeerStream
from hegmd.telemetry.metrics import Counters
from hegmd.workers.jobs import Jobs
from hegmd.workers.supervisors import Supervisors
from hegmd.workers.workers import AgentConnection, Workers
from tests.unit.doubles import Provider, gpu, use
from tests.unit.node.inventory.rig import Node, node_of

LIMITS = SessionLimits(
    frame_bytes=65_536, requests_in_flight=4, hello_deadline_s=60, frame_deadline_s=60, send_deadline_s=60
)
ROOT = Peer(pid=os.getpid(), uid=0, gid=0)


async def _nothing(*_: object) -> tuple[()]:
    return ()


async def _no_reload() -> ReloadReply:
    return ReloadReply(changed=(), after_restart=())


async def _no_metrics() -> str:
    return ""


async def _uncounted(_worker: AgentConnection, _within_s: float) -> None:
    raise AssertionError


def _lookout_of(node: Node) -> PlanSurvey:
    return PlanSurvey(
        node.inventory,
        Workers(),
        lambda: PoolMemory(budget_bytes=0, free_bytes=0),
        count=_uncounted,
        running=tuple,
        supervisors=Supervisors(lambda _: None),
    )


def _only_pids(node: Node) -> JobRequests:
    """For requests that name pids."""
    nothing: Any = None
    jobs = Jobs(Workers(), Supervisors(lambda pid: None), lambda pid: None, nothing)
    return JobRequests(jobs, nothing, nothing, node.inventory, Workers(), nothing, nothing)


def handlers_of(node: Node) -> Handlers:
    services = Services(
        policy=Policy(daemon_uid=0),
        inventory=node.inventory,
        events=node.events,
        workers=Workers(),
        operations=cast(Operations, None),  # nothing is moved here
        ways=_lookout_of(node).ways,
        sequences=cast(MultiStepOperations, None),
        checkpoints=cast(Checkpoints, None),
        orphans=Orphans([], node.events),
        restarts=cast(Restarts, None),
        jobs=_only_pids(node),
        recoveries=cast(Recoveries, None),
        proving=cast(ProofRequests, None),
        sharing=cast(SharingRequests, None),
        queued_resumes=cast(QueuedResumes, None),
        simulator=None,
        limits=Limits(frame_bytes=65_536, requests_in_flight=4),
        doctor=_nothing,
        show_config=lambda: ConfigReply(path=None, settings=()),
        reload=_no_reload,
        metrics=_no_metrics,
    )
    return Handlers(services)


@pytest.fixture
async def stream() -> AsyncIterator[PeerStream]:
    here, there = socket.socketpair()
    made = PeerStream(there)
    with here:
        yield made
        made.close()


def call_of(stream: PeerStream, request: Request) -> Call:
    async def never(_: Call) -> Record:
        raise AssertionError

    return Call(Session(stream, ROOT, never, LIMITS, Counters()), 1, request, Descriptors([]))


@pytest.mark.thorough
async def test_a_request_that_names_very_many_pids_does_not_hold_up_the_loop(stream: PeerStream) -> None:
    """Each of the 65,000 pids that fit into a frame was compared with each process of the node."""
    pids = range(1, 4001)
    async with node_of(Provider(gpu(0), uses=[use(pid) for pid in pids])) as node:
        handlers = handlers_of(node)
        await node.inventory.refresh()
        for request in (Processes(pids=(1,) * 65_000), Processes(pids=(1,), gpus=("gpu0",) * 65_000)):
            before_s = time.process_time()
            reply = await handlers.processes(call_of(stream, request), request)
            took_s = time.process_time() - before_s
            assert isinstance(reply, ProcessesReply)
            assert [process.pid for process in reply.processes] == [1]
            assert took_s < 0.3


async def test_each_process_has_its_migration_options(stream: PeerStream) -> None:
    async with node_of(Provider(gpu(0), gpu(1), uses=[use(os.getpid())])) as node:
        request = Processes()
        reply = await handlers_of(node).processes(call_of(stream, request), request)
        (process,) = reply.processes
        assert [way.way for way in process.ways] == ["agent", "driver", "criu", "restart"]
        assert "no agent" in process.ways[0].reason


def _ended_pid() -> int:
    with subprocess.Popen([sys.executable, "-c", ""]) as child:
        return child.pid


async def test_a_plan_recognises_an_exited_process_that_is_still_listed() -> None:
    """Issue 14, row 12: it was no candidate, and so was mistaken for one on no GPU."""
    pid = _ended_pid()
    async with node_of(Provider(gpu(0), gpu(1), uses=[use(pid, 1)])) as node:
        (process,) = (await node.inventory.refresh()).processes
        (found,) = (await _lookout_of(node).snapshot([pid])).unreachable
    assert (found.pid, found.gpus, found.vram_bytes) == (pid, ("gpu1",), 1 << 30)
    assert found.ended == has_ended(process) == (process.note == NOTE_ENDED)
    assert found.why == process.note
