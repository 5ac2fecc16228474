"""The doctor's checks of a running daemon: for one caller at a time, each reported as soon as it is done.

Owns the lock, because checks start programs, and the delivery of results. `doctor` has the checks.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable

import anyio
from anyio.streams.memory import MemoryObjectSendStream

from hegmd.node.doctor.facts import NodeFacts
from hegmd.protocol.snapshots import Check


class Examination:
    """Examines the node. `read_facts` returns the facts for the checks."""

    def __init__(self, read_facts: Callable[[], Awaitable[NodeFacts]]) -> None:
        self._read_facts = read_facts
        self._turn = anyio.Lock()

    async def examine(self, on_check: Callable[[Check], Awaitable[None]]) -> tuple[Check, ...]:
        """Yield the doctor's checks in the order of its table. Raises what `on_check` raises."""
        # unbounded, but never more than the number of checks
        results, to_tell = anyio.create_memory_object_stream[Check](math.inf)
        made: list[Check] = []
        refusal: Exception | None = None
        async with anyio.create_task_group() as tasks, to_tell:
            tasks.start_soon(self._make, results)
            try:
                async for check in to_tell:
                    made.append(check)
                    await on_check(check)
            except Exception as error:  # noqa: BLE001 - raised below, where the task group cannot wrap it
                refusal = error
                tasks.cancel_scope.cancel()
        if refusal is not None:
            raise refusal
        return tuple(made)

    async def _make(self, results: MemoryObjectSendStream[Check]) -> None:
        """Run the checks for one caller at a time, independently of how fast it reads them."""
        from hegmd.node.doctor.run import run_checks  # with all its checks, of which a start needs none

        async with results, self._turn:
            await run_checks(await self._read_facts(), results.send)
