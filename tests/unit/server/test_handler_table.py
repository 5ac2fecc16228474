"""Each request reaches its service with all its arguments, and gets its own reply."""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Callable, Generator, Iterator, Sequence
from types import SimpleNamespace
from typing import Any, cast

from typing_extensions import Self

from hegmd.migration.machine.next_effects import SUSPENDED
from hegmd.protocol.messages import REQUESTS, Cancel, Events, Hello, Request
from hegmd.protocol.snapshots import Gpu, GpuProcess
from hegmd.server.auth import Peer
from hegmd.server.handlers import Handlers, Services
from tests.cells import in_one_test
from tests.unit.protocol.test_messages import full

ROOT = Peer(pid=1, uid=0, gid=0)
#: The call of each request, in that order.
CALLED = {
    "adopt": "jobs.pid operations.adopt jobs.with_job jobs.plan_with_jobs",
    "agent.attend": "workers.attend",
    "agent.lend": "operations.runner.of_process",
    "agent.reclaim": "operations.runner.of_process operations.resume",
    "agent.report": "workers.report",
    "checkpoint": "jobs.pid checkpoints.checkpoint jobs.with_job jobs.plan_with_jobs",
    "config": "show_config",
    "doctor": "doctor",
    "drain": "sequences.drain",
    "events": "events.subscribe",
    "gpus": "inventory.fresh",
    "handoff": "jobs.pid checkpoints.handoff jobs.with_job jobs.plan_with_jobs",
    "hello": "policy.describe",
    "job": "jobs.one",
    "job.place": "policy.may_act_on_all sharing.place",
    "job.priority": "policy.may_act_on_all sharing.set_priority",
    "job.register": "policy.may_act_on_all sharing.priority jobs.register",
    "job.wait": "jobs.wait",
    "jobs": "jobs.jobs",
    "metrics": "metrics",
    "migrate": "jobs.pids operations.migrate jobs.with_job jobs.plan_with_jobs",
    "nccl.begin-proof": "proving.begin",
    "nccl.end-proof": "proving.end",
    "operation": (
        "operations.runner.history operations.follow operations.runner.history operations.runner.describe "
        "jobs.with_job policy.visible_operation policy.visible_story"
    ),
    "operation.cancel": "operations.drop jobs.with_job",
    "operations": "orphans.search operations.runner.operations orphans.all",
    "orphans": "orphans.search orphans.all",
    "orphans.drop": "orphans.drop",
    "ping": "",
    "processes": "inventory.fresh jobs.pids ways jobs.of_process policy.visible",
    "queue": "policy.may_act_on_all sharing.queue",
    "quiesce": "jobs.pids operations.quiesce jobs.with_job jobs.plan_with_jobs",
    "recovery": "recoveries.show",
    "recovery.drop": "recoveries.drop",
    "recovery.hold": "recoveries.in_process.hold emit",
    "recovery.may-start": "recoveries.in_process.may_start",
    "recovery.report": "recoveries.in_process.report",
    "reload": "reload",
    "restore": "fds.view checkpoints.restore jobs.with_job jobs.plan_with_jobs",
    "resume": "queued_resumes.failed jobs.pid queued_resumes.resume jobs.with_job jobs.plan_with_jobs",
    "room.make": "policy.may_act_on_all sharing.make_room",
    "room.release": "policy.may_act_on_all sharing.release",
    "room.wait": "policy.may_act_on_all sharing.wait_for_room",
    "simulate.fault": "simulator.set_fault inventory.expire",
    "simulate.hold": "simulator.hold simulator.release inventory.expire inventory.expire",
    "supervise": "restarts.attend",
    "supervise.report": "restarts.report",
    "suspend": "jobs.pids operations.suspend jobs.with_job jobs.plan_with_jobs",
    "swap": "jobs.pid jobs.pid sequences.swap",
}


class Part:
    """Replaces any service of the daemon and its results. Records the calls."""

    def __init__(self, name: str, calls: list[tuple[str, object]], values: dict[str, object]) -> None:
        self._name, self._calls, self._values = name, calls, values

    def __getattr__(self, attribute: str) -> Any:
        name = f"{self._name}.{attribute}"
        return self._values[name] if name in self._values else Part(name, self._calls, self._values)

    def __call__(self, *args: object, **named: object) -> Any:
        self._calls.append((self._name, shown([*args, named])))
        return Part(f"{self._name}()", self._calls, self._values)

    def __await__(self) -> Generator[None, None, Any]:
        yield from ()
        return self._values.get(f"await {self._name}", self)

    def __iter__(self) -> Iterator[object]:
        return iter(())

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> None:
        raise StopAsyncIteration

    def __getitem__(self, key: object) -> Self:
        return self

    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return hash(self._name)

    def __repr__(self) -> str:
        return self._name


def shown(value: Any) -> object:
    """The value without the addresses of functions."""
    if isinstance(value, functools.partial):
        return shown([value.func, *value.args])
    if isinstance(value, types.FunctionType):
        return value.__qualname__
    if dataclasses.is_dataclass(value):
        return {field.name: shown(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, dict):
        named = cast(dict[str, object], value)
        return {key: shown(one) for key, one in named.items()}
    if isinstance(value, list | tuple):
        return [shown(one) for one in cast(Sequence[object], value)]
    return repr(value)


def _request(op: str) -> Request:
    """The request with every field filled."""
    request = full(REQUESTS[op])
    if isinstance(request, Events):
        request = request.replace(kinds=("gpu.lost",))
    assert isinstance(request, Request)
    return request


def _now(_name: str, act: Callable[[], None]) -> None:
    act()


async def _answered(request: Request) -> tuple[object, list[tuple[str, object]]]:
    """The reply, and what was called with which words."""
    calls: list[tuple[str, object]] = []
    gpus = tuple(full(Gpu).replace(id=name) for name in ("é", "gpu1"))
    values: dict[str, object] = {
        "inventory.latest.gpus": gpus,
        "inventory.fresh().gpus": gpus,
        "inventory.fresh().processes": (full(GpuProcess),),
        "operations.runner.of_process().phase": SUSPENDED,
        "await recoveries.in_process.hold()": (Part("job", calls, {}), Part("memory", calls, {})),
        "await queued_resumes.failed()": None,
        "session.at_end": _now,
    }
    part = functools.partial(Part, calls=calls, values=values)
    parts: dict[str, Any] = {name: part(name) for name in Services._fields}
    call: Any = SimpleNamespace(session=part("session"), peer=ROOT, emit=part("emit"), fds=part("fds"))
    handler = Handlers(Services(**parts)).table()[type(request)]
    return await handler(call, request), calls


OTHERS = {"str": "gpu1", "int": 8, "int | str": 8, "float": 0.5}


def _changed(request: Request, field: str, type_text: str) -> Request:
    """The request with another value in that field."""
    now, text = getattr(request, field), type_text.removesuffix(" | None")
    if isinstance(now, tuple):
        other: object = ("gpu1",) if field == "gpus" else ()
    else:
        other = not now if text == "bool" else OTHERS.get(text)
    return request.replace(**{field: other})


@in_one_test("op", CALLED)
async def test_a_request_reaches_its_part_and_is_answered_with_its_reply(op: str) -> None:
    request = _request(op)
    reply, calls = await _answered(request)
    assert " ".join(name for name, _ in calls) == CALLED[op]
    assert isinstance(reply, REQUESTS[op].reply | Part)


@in_one_test("op", sorted(CALLED.keys() - {Hello.op}))
async def test_every_field_of_a_request_is_heeded(op: str) -> None:
    request = _request(op)
    answered = repr(await _answered(request))
    for f in request.fields:
        assert repr(await _answered(_changed(request, f.name, f.type_text))) != answered, f.name


async def test_listing_orphans_inspects_everything_and_listing_operations_does_not() -> None:
    for op, words in (("orphans", {"thorough": "True", "within_s": "20.0"}), ("operations", {"thorough": "False"})):
        _, calls = await _answered(_request(op))
        ((_, given),) = [call for call in calls if call[0] == "orphans.search"]
        assert repr(words)[1:-1] in repr(given)


def test_every_request_is_here() -> None:
    assert CALLED.keys() == REQUESTS.keys() - {Cancel.op}  # which a session answers itself
