"""Runs the checks concurrently, and reports them in the order of the table.

A check is one function and one row of the table. A check that raises or does not end becomes a line that says so; the
others continue. Checks that read files run in threads that can be abandoned: a dead network disk or a hanging driver
file must not block the daemon's loop.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import NamedTuple

import anyio

from hegmd.errors import HegmError
from hegmd.node.doctor import amd, cgroups, criu, disk, gpus, injection, kernel, memory, nvidia, permissions
from hegmd.node.doctor.facts import CheckResult, NodeFacts, fail, skip, warn
from hegmd.protocol.snapshots import Check
from hegmd.system.threads import run_detached

CHECK_DEADLINE_S = 15.0
_AT_ONCE = 6

_log = logging.getLogger(__name__)

Absent = Callable[[NodeFacts], str | None]


def _always(_facts: NodeFacts) -> str | None:
    return None


class BlockingCheck(NamedTuple):
    """A check that reads; blocking."""

    id: str
    check: Callable[[NodeFacts], CheckResult]
    absent: Absent = _always


class ProgramCheck(NamedTuple):
    """A check that runs a program."""

    id: str
    check: Callable[[NodeFacts], Awaitable[CheckResult]]
    absent: Absent = _always


Row = BlockingCheck | ProgramCheck

CHECKS: tuple[Row, ...] = (
    BlockingCheck("nvidia.driver", nvidia.driver, nvidia.absent),
    BlockingCheck("nvidia.library", nvidia.library, nvidia.absent),
    BlockingCheck("nvidia.checkpoint", nvidia.checkpoint, nvidia.absent),
    BlockingCheck("nvidia.nodes", nvidia.nodes, nvidia.absent),
    BlockingCheck("nvidia.persistence", nvidia.persistence, nvidia.absent),
    BlockingCheck("nvidia.mig", nvidia.mig, nvidia.absent),
    BlockingCheck("nvidia.mps", nvidia.mps, nvidia.absent),
    BlockingCheck("nvidia.fabric", nvidia.fabric, nvidia.absent),
    BlockingCheck("amd.driver", amd.driver, amd.absent),
    BlockingCheck("amd.library", amd.library, amd.absent),
    BlockingCheck("amd.nodes", amd.nodes, amd.absent),
    BlockingCheck("gpu.health", gpus.health, gpus.absent),
    BlockingCheck("gpu.peers", gpus.peers, gpus.absent),
    ProgramCheck("criu.program", criu.program),
    BlockingCheck("criu.rights", criu.rights),
    ProgramCheck("criu.check", criu.check),
    BlockingCheck("memory.host", memory.host),
    BlockingCheck("memory.hugepages", memory.hugepages),
    BlockingCheck("memory.transparent", memory.transparent_pages, nvidia.absent),
    BlockingCheck("memory.ready", memory.ready),
    BlockingCheck("memory.cgroup", cgroups.own_memory),
    BlockingCheck("cgroup.hierarchy", cgroups.hierarchy),
    BlockingCheck("kernel.version", kernel.version),
    BlockingCheck("kernel.options", kernel.options),
    BlockingCheck("kernel.ptrace", kernel.ptrace),
    BlockingCheck("kernel.hidepid", kernel.hidepid),
    BlockingCheck("kernel.pid-namespace", kernel.pid_namespace),
    BlockingCheck("limits.open-files", kernel.descriptors),
    BlockingCheck("permissions.daemon", permissions.rights),
    BlockingCheck("permissions.group", permissions.group),
    BlockingCheck("permissions.socket", permissions.socket),
    BlockingCheck("disk.state", disk.state),
    BlockingCheck("disk.images", disk.images),
    ProgramCheck("agent.injection", injection.injection),
)


async def run_checks(
    facts: NodeFacts,
    on_check: Callable[[Check], Awaitable[None]],
    *,
    checks: tuple[Row, ...] = CHECKS,
    deadline_s: float = CHECK_DEADLINE_S,
) -> tuple[Check, ...]:
    """Run the checks and return them in the table's order. Each is passed on once all before it are done.

    Raises only what `on_check` raises, which ends the run. Cancellation ends what was started.
    """
    made: dict[str, Check] = {}
    ready = {row.id: anyio.Event() for row in checks}
    places = anyio.CapacityLimiter(_AT_ONCE)

    async def make(row: Row) -> None:
        async with places:
            finding = await _finding(row, facts, deadline_s)
        made[row.id] = Check(id=row.id, status=finding.status, summary=finding.summary, fix=finding.fix)
        ready[row.id].set()

    refusal: Exception | None = None
    async with anyio.create_task_group() as tasks:
        for row in checks:
            tasks.start_soon(make, row)
        for row in checks:
            await ready[row.id].wait()
            try:
                await on_check(made[row.id])
            except Exception as error:  # noqa: BLE001 - raised below, where the task group cannot wrap it
                refusal = error
                tasks.cancel_scope.cancel()
                break
    if refusal is not None:
        raise refusal
    return tuple(made[row.id] for row in checks)


async def _finding(row: Row, facts: NodeFacts, deadline_s: float) -> CheckResult:
    try:
        with anyio.fail_after(deadline_s):
            reason = await run_detached(lambda _: row.absent(facts), name=f"doctor {row.id}")
            if reason is not None:
                return skip(reason)
            if isinstance(row, BlockingCheck):
                check = row.check
                return await run_detached(lambda _: check(facts), name=f"doctor {row.id}")
            return await row.check(facts)
    except TimeoutError:
        return fail(f"no answer within {deadline_s:g} s: a disk or a driver hangs", "sudo dmesg | tail -50")
    except HegmError as error:
        return warn(f"could not be checked: {error.message}", error.hint)
    except OSError as error:
        where = f"{error.filename}: " if isinstance(error.filename, str) else ""
        return warn(f"could not be checked: {where}{error.strerror or error}", "run hegmd with the rights to read it")
    except Exception as error:  # noqa: BLE001 - a check's own mistake must not cost the others their answer
        _log.exception("check %s failed", row.id)
        return warn(f"the check itself failed: {type(error).__name__}: {error}", "report this with the daemon's log")
