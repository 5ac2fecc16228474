"""The worker carrier: the agent copies its own storages to the pool and back, with the process's own threads.

Needs an agent and nothing else, so it is what simulated GPUs use, and what is left where no faster way exists. The
memory is the daemon's and goes over by descriptor. Both ways the agent copies everything before it frees anything.
"""

from __future__ import annotations

from collections.abc import Callable

from hegmd.pool import Memory
from hegmd.workers import Worker

NAME = "worker"

Progress = Callable[[int], object]


async def take_out(worker: Worker, memory: Memory, on_progress: Progress) -> int:
    """Have the worker's bytes in that memory and no longer in the process; how many. Raises OrderFailed, AgentAway."""
    report = await worker.order("evacuate", fds=[memory.fd], on_progress=on_progress)
    return report.size_bytes or 0


async def put_back(worker: Worker, memory: Memory | None, on_progress: Progress) -> int:
    """Have the worker's bytes in the process again, and still in that memory. Raises OrderFailed, AgentAway.

    Without a memory the agent takes them from where it put them: it keeps a descriptor of its own as long as they are
    out.
    """
    report = await worker.order("refill", fds=() if memory is None else [memory.fd], on_progress=on_progress)
    return report.size_bytes or 0
