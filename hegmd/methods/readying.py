"""The next process of a restart, made ready while the last one trains still: when that is asked, and when withdrawn.

It takes no step of the operation and holds none up: it is said to the supervisor and not answered, nothing rests on it,
and a start in whose place nobody waits is a start as any. What it costs is memory for as long as the operation takes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from hegmd.methods.base import Subject
from hegmd.pool import read_available_bytes
from hegmd.supervisors import Supervisor, SupervisorAway, Supervisors

logger = logging.getLogger(__name__)

# What a Python with PyTorch takes is a fifth of it; the rest is left to those who need it more.
LEAST_AVAILABLE_BYTES = 2 << 30
# What decides which Python it is, and whether that comes by an agent: where they change, nobody has seen that it does.
_DECISIVE, _DECISIVE_NAMES = ("PYTHON", "LD_"), frozenset(("PATH", "HOME"))


class Readying:
    """Asked at arming. `surroundings` are what is different for whoever is started for that process at that place."""

    def __init__(
        self,
        supervisors: Supervisors,
        surroundings: Callable[[Subject, str], Mapping[str, Any]],
        *,
        allowed: bool = True,
        available_bytes: Callable[[], int | None] = read_available_bytes,
    ) -> None:
        self._supervisors = supervisors
        self._surroundings = surroundings
        self._allowed = allowed
        self._available_bytes = available_bytes
        self._asked: dict[str, Supervisor] = {}

    async def begin(self, subject: Subject, size_bytes: int) -> None:
        """Have it made ready, where that can be and the node has the memory beside a state of that size."""
        supervisor = self._supervisors.find(subject.uid, subject.run)
        if supervisor is None or subject.operation in self._asked or not self._is_fit(subject, supervisor, size_bytes):
            return
        worker, place = subject.worker, subject.goal or ""
        surroundings = self._surroundings(subject, place)
        try:
            await supervisor.tell("ready", subject.operation, imports=worker.imports, path=worker.path, **surroundings)
        except SupervisorAway as error:
            logger.debug("nothing is made ready for operation %s: %s", subject.operation, error.message)
        else:
            self._asked[subject.operation] = supervisor
            logger.debug(
                "operation %s has the next process made ready: %d modules", subject.operation, len(worker.imports)
            )

    async def end(self, subject: Subject) -> None:
        """Have nobody wait any more. Fine when nobody does."""
        supervisor = self._asked.pop(subject.operation, None)
        if supervisor is not None:
            with suppress(SupervisorAway):  # it lets go of it with the connection
                await supervisor.tell("unready", subject.operation)

    def _is_fit(self, subject: Subject, supervisor: Supervisor, size_bytes: int) -> bool:
        worker, respawn = subject.agent, subject.respawn
        if not self._allowed or subject.ranks or worker is None or not worker.imports or subject.goal is None:
            return False
        if supervisor.offer.pid != subject.pid or not supervisor.offer.python:
            return False  # a launcher, a shell or another program is between them
        if respawn.python is not None or any(_is_decisive(name) for name in (*respawn.set, *respawn.unset)):
            return False
        available_bytes = self._available_bytes()
        return available_bytes is None or available_bytes >= LEAST_AVAILABLE_BYTES + size_bytes


def _is_decisive(name: str) -> bool:
    return name.startswith(_DECISIVE) or name in _DECISIVE_NAMES
