"""Workers whose agent is connected now, by pid.

A worker is known by the kernel's word on its connection, and only as long as that connection lasts: its end is the end
of the entry, so a pid that is used again is never taken for its predecessor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from hegmd.protocol.snapshots import AgentInfo


class Workers:
    """The agents that are connected."""

    def __init__(self) -> None:
        self._agents: dict[int, AgentInfo] = {}

    def register(self, pid: int, agent: AgentInfo) -> Callable[[], None]:
        """Enter an agent; returns what takes it out again. The newest connection of a pid is the one that counts."""
        self._agents[pid] = agent

        def leave() -> None:
            if self._agents.get(pid) is agent:
                del self._agents[pid]

        return leave

    def agents(self) -> Mapping[int, AgentInfo]:
        """Every connected agent by pid."""
        return dict(self._agents)
