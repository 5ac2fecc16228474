"""Agent and GPU helper alone, without a daemon, on real GPUs: every carrier with every kind of training.

    python3 -m tests.gpu.agent_run [--mib 2048] [--steps 400] [NAME...]

One GPU shows suspend and resume; with two, the processes come back on the other one. Each run's output is compared bit
for bit with an undisturbed run's, and video memory is looked at through NVML while the process is away. Prints one line
for each case and ends with status 1 if any went wrong. Names choose cases, as `peer-amp` or `host`.
"""

# ruff: noqa: T201 - printing is what this program is for

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pynvml

from hegmd.gpu_helper.link import Link
from hegmd.memory.pool import Key, Pool
from hegmd.protocol.agents import unpacked
from hegmd.protocol.messages import AgentReport
from tests.e2e.agented import Training, environment
from tests.e2e.scripted_daemon import AgentConnected, ScriptedDaemon
from tests.gpu.moves_node import require_nvml

SCRIPT = Path(__file__).with_name("training") / "mixed.py"
MIB, GIB, BORDER_BYTES = 1 << 20, 1 << 30, 512
CASES: dict[str, tuple[str, list[str], dict[str, str]]] = {
    "peer-plain": ("peer", [], {}),
    "host-plain": ("host", [], {}),
    "worker-plain": ("worker", [], {}),
    "peer-amp": ("peer", ["amp", "ema"], {}),
    "peer-streams": ("peer", ["streams"], {}),
    "peer-small": ("peer", ["small"], {}),
    "peer-compiled": ("peer", ["compiled"], {}),
    "driver-graph": ("driver", ["graph"], {}),
    "worker-expandable": ("worker", ["small"], {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}),
    "worker-async": ("worker", ["streams"], {"PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync"}),
}


def used_mib(index: int) -> int:
    """Video memory in use."""
    return int(pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(index)).used) // MIB


def places_of(report: AgentReport) -> list[list[int]]:
    """Places as the helper takes them, with where each lies in the flat space."""
    at = report.at_bytes or 0
    placed: list[list[int]] = []
    for handle, offset, size_bytes in unpacked(report.places or b""):
        placed.append([handle, offset, size_bytes, at])
        at += -(-size_bytes // BORDER_BYTES) * BORDER_BYTES
    return placed


class Case:
    """One training, moved once by one carrier."""

    def __init__(
        self, link: Link, gpus: list[str], carrier: str, agent: AgentConnected, pid: int, rounds_bytes: int
    ) -> None:
        self.link, self.gpus, self.carrier, self.agent, self.pid = link, gpus, carrier, agent, pid
        self.rounds_bytes = rounds_bytes
        self.times: dict[str, float] = {}
        self.problems: list[str] = []

    async def timed(self, what: str, work: Any) -> Any:
        began = time.perf_counter()
        done = await work
        self.times[what] = self.times.get(what, 0.0) + time.perf_counter() - began
        return done

    async def call(self, op: str, deadline_s: float = 60.0, fds: Any = (), **args: object) -> Any:
        return await self.timed(op, self.link.call(op, args, deadline_s=deadline_s, fds=fds))

    async def order(self, do: str, **more: Any) -> AgentReport:
        report: AgentReport = await self.timed(do, anyio.to_thread.run_sync(lambda: self.agent.done(do, **more)))
        return report

    async def run(self, pool: Pool) -> None:
        """Away and back. Raises whatever goes wrong."""
        idle_mib = {index: used_mib(index) for index in range(len(self.gpus))}
        survey = await anyio.to_thread.run_sync(lambda: self.agent.done("survey"))
        print("   facts:", survey.cuda, [(left.why, left.storages, left.size_bytes) for left in survey.left_alone])
        key = Key("case", str(self.pid))
        held, memory = await self.arm(pool, key, int(survey.size_bytes or 0) + 64 * MIB)
        await self.order("park", limit_s=20.0)
        began = time.perf_counter()
        await self.out(self.gpus[0], memory)
        await self.call("lock", pid=self.pid, timeout_s=10.0)
        await self.call("checkpoint", pid=self.pid)
        self.times["OUT"] = time.perf_counter() - began
        self.look_where_it_was(idle_mib)
        back = time.perf_counter()
        await self.back(memory)
        self.times["IN"] = time.perf_counter() - back
        self.times["BLACKOUT"] = time.perf_counter() - began
        await self.order("release", limit_s=60.0)
        if self.carrier in {"peer", "host"}:
            await self.call("close", lane="case")
        if held is not None:
            held.fds.close()
        await pool.release(key)

    async def arm(self, pool: Pool, key: Key, room_bytes: int) -> tuple[Any, Any]:
        """Return what the carrier needs: reserved video memory, or memory of the pool, attached to the helper's
        session.
        """
        source, target = self.gpus[0], self.gpus[-1]
        held: Any = None
        memory: Any = None
        if self.carrier == "peer":
            held = await self.call("hold", gpu=target, sizes=[GIB] * -(-room_bytes // GIB))
        if self.carrier == "peer":
            await self.call("open", lane="case", gpus=[source, target])
            fds = held.fds.view()
            await self.call("attach-video", lane="case", gpu=target, sizes=held.values["sizes"], fds=fds)
        if self.carrier in {"host", "worker"}:
            memory = await pool.take(key, room_bytes)
        if self.carrier == "host":
            await self.call("open", lane="case", gpus=[source, target], host_bytes=memory.size_bytes, fds=[memory.fd])
        return held, memory

    def look_where_it_was(self, idle_mib: dict[int, int]) -> None:
        """NVML has to have nothing of the process while it is checkpointed."""
        listed = [p.pid for p in pynvml.nvmlDeviceGetComputeRunningProcesses(pynvml.nvmlDeviceGetHandleByIndex(0))]
        if self.pid in listed:
            self.problems.append("still listed by NVML while checkpointed")
        print("   MiB before", idle_mib, "away", {index: used_mib(index) for index in range(len(self.gpus))})

    async def out(self, source: str, memory: Any) -> None:
        if self.carrier == "worker":
            await self.order("offload", fd=memory.fd)
        elif self.carrier != "driver":
            shown = await self.order("export")
            copied = await self.call(
                "copy", lane="case", gpu=source, direction="out", handles=list(shown.handles), places=places_of(shown)
            )
            print("   out:", shown.storages, "storages", len(shown.handles), "handles", copied.values)
            await self.order("free")

    async def back(self, memory: Any) -> None:
        """The driver's part, then the bytes."""
        source, target = self.gpus[0], self.gpus[-1]
        pairs = [[source, target], [target, source]] if len(self.gpus) > 1 else []
        await self.call("restore", pid=self.pid, pairs=pairs)
        await self.call("unlock", pid=self.pid)
        if self.carrier == "worker":
            await self.order("reload", fd=memory.fd)
        elif self.carrier != "driver":
            await self.reload(target)

    async def reload(self, target: str) -> None:
        """In rounds, if that was asked for."""
        left: int | None = 1
        while left:
            made = await self.order("make", size_bytes=self.rounds_bytes or None)
            copied = await self.call(
                "copy", lane="case", gpu=target, direction="in", handles=list(made.handles), places=places_of(made)
            )
            await self.order("filled", first=made.first, count=len(places_of(made)))
            left = made.left
            print("   in:", copied.values)


def chosen(names: list[str]) -> Iterator[tuple[str, tuple[str, list[str], dict[str, str]]]]:
    """The cases that a name begins."""
    for name, case in CASES.items():
        if not names or any(name.startswith(wanted) or wanted in name for wanted in names):
            yield name, case


def undisturbed(argv: list[str], more: dict[str, str]) -> str:
    """The output without an agent."""
    done = subprocess.run(
        [sys.executable, *argv], env=environment(None, **more), capture_output=True, text=True, timeout=300, check=False
    )
    if done.returncode:
        print(done.stderr[-2000:])
    return done.stdout


async def run_case(
    name: str, carrier: str, traits: list[str], more: dict[str, str], options: argparse.Namespace
) -> bool:
    more = {**more, "CUDA_VISIBLE_DEVICES": "0"}
    argv = [str(SCRIPT), str(options.steps), str(options.mib), *traits]
    print(f"== {name}", flush=True)
    count = pynvml.nvmlDeviceGetCount()
    gpus = [str(pynvml.nvmlDeviceGetUUID(pynvml.nvmlDeviceGetHandleByIndex(index))) for index in range(count)][:2]
    with tempfile.TemporaryDirectory() as folder, ExitStack() as held:
        daemon = held.enter_context(ScriptedDaemon(Path(folder) / "s"))
        training = held.enter_context(Training(argv, daemon.path, **more))
        agent = await anyio.to_thread.run_sync(daemon.attended)
        async with anyio.create_task_group() as tasks:
            link = Link()
            await tasks.start(link.run)
            await link.start()
            await anyio.to_thread.run_sync(lambda: wait_for_steps(training, 40))
            case = Case(link, gpus, carrier, agent, training.process.pid, options.rounds_mib * MIB)
            try:
                await case.run(Pool(64 * GIB))
            except Exception as error:  # noqa: BLE001 - one case must not end the others
                case.problems.append(repr(error))
                training.process.kill()
            tasks.cancel_scope.cancel()
        _output, errors = await anyio.to_thread.run_sync(training.process.communicate)
    output = "".join(SEEN.pop(training.process.pid, [])) + _output
    if not case.problems and output != await anyio.to_thread.run_sync(undisturbed, argv, more):
        case.problems.append("the output is not that of an undisturbed run")
    if case.problems:
        print("   errors:", errors[-1500:])
    print("   times:", {what: round(took_s, 4) for what, took_s in case.times.items()})
    print(f"   {name}: {'; '.join(case.problems) or 'ok'}", flush=True)
    return not case.problems


SEEN: dict[int, list[str]] = {}


def wait_for_steps(training: Training, steps: int) -> None:
    """Read the script's output until it is well under way."""
    assert training.process.stdout is not None
    lines = SEEN.setdefault(training.process.pid, [])
    while len(lines) < steps:
        line = training.process.stdout.readline()
        if not line:
            break
        lines.append(line)


async def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--mib", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--rounds-mib", type=int, default=0, help="make storages in rounds of so much")
    options = parser.parse_args()
    require_nvml()
    results = [await run_case(name, *case, options) for name, case in chosen(options.names)]
    print(f"{sum(results)} of {len(results)} cases ok")
    return 0 if all(results) else 1


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(anyio.run(main))
