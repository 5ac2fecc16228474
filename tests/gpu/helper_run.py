"""One command for a machine with NVIDIA GPUs: does the helper keep its word there, and at what speed?

    PYTHONPATH=.:client python3 -m tests.gpu.helper_run [--mib N] [STEP...]

Steps: how long a helper takes to be ready and armed; video memory held by descriptor, to the MiB by NVML, and what
stays when the helper is killed; another process's bytes out and back, peer and host, in 64 allocations and as 1,000
small storages; both ways at once; all of it from the sandbox of the shipped unit, for another user's process; and other
ways to cut and spread copies. A step that fails does not stop the ones after it. The exit status is 0 when all of them
passed. Needs cuda-bindings, nvidia-ml-py, anyio and msgpack; no pytest. With one GPU what takes two is left out.
"""

# ruff: noqa: T201 - printing is what this program is for

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pynvml

from hegmd.gpu_helper.copy_client import CopyClient, Place
from hegmd.gpu_helper.link import PROGRAM, Link
from hegmd.memory.video_memory import VideoMemory, piece_sizes
from tests.gpu.helper_rig import MIB, Node, Owner, Pool, linked

GIB = 1 << 30
LIMIT_S = 120.0
# The maximum rate of the links of two H200; bytes divided by it are the least time of a copy.
PEER_BYTES_PER_S = 394e9
HOST_BYTES_PER_S = 55.4e9
ENOUGH = 0.95
PIECES = 64
NOBODY = 65534
CONFINE = Path(__file__).with_name("confined.py")
SWEEP = Path(__file__).with_name("copy_sweep.py")
UNIT = Path(__file__).resolve().parents[2] / "systemd" / "hegmd.service"


async def ask(link: Link, op: str, args: Mapping[str, object]) -> dict[str, Any]:
    return (await link.call(op, args, deadline_s=LIMIT_S)).values


async def timed(work: Awaitable[Any]) -> float:
    started = time.monotonic()
    await work
    return time.monotonic() - started


async def kill(link: Link) -> None:
    """As the kernel does it when memory is short."""
    assert link.pid is not None
    os.kill(link.pid, signal.SIGKILL)
    await until(lambda: link.pid is None)


async def until(fact: Callable[[], bool]) -> None:
    with anyio.fail_after(LIMIT_S):
        while not fact():
            await anyio.lowlevel.checkpoint()


async def carry(
    what: str,
    limit: float,
    route: CopyClient,
    gpu: str,
    direction: str,
    owner: Owner,
    places: list[Place] | None = None,
) -> bool:
    """Copy, and print the rate; whether it is near the limit of the link."""
    handles = owner.handles()
    started = time.monotonic()
    done = await route.copy(gpu, direction, handles, owner.places() if places is None else places)
    took_s = time.monotonic() - started
    rate = done.copied_bytes / done.copy_s
    print(
        f"    {what:22} {done.copied_bytes / GIB:6.2f} GiB  {rate / 1e9:6.1f} GB/s  {rate / limit:6.1%} of the link"
        f"   open {done.open_s * 1e3:6.1f} ms, copy {done.copy_s * 1e3:7.1f} ms,"
        f" close {done.close_s * 1e3:6.1f} ms, whole request {took_s * 1e3:7.1f} ms",
        flush=True,
    )
    return rate >= ENOUGH * limit


# ---- steps ----------------------------------------------------------------------------------------------------------


async def step_start(node: Node) -> bool:
    """Process, imports and cuInit; then the contexts."""
    started: list[float] = []
    armed: list[float] = []
    for _ in range(5):
        async with linked() as link:
            started.append(await timed(link.start()))
            before = [node.used_bytes(gpu) for gpu in range(len(node.uuids))]
            begun = time.monotonic()
            route = await CopyClient.open(link, "7", node.uuids)
            armed.append(time.monotonic() - begun)
            costs = [node.used_bytes(gpu) - was for gpu, was in enumerate(before)]
            closed_s = await timed(route.close())
    print(f"    ready after {statistics.median(started):.3f} s (of {min(started):.3f} to {max(started):.3f})")
    print(f"    contexts on {len(node.uuids)} GPUs {statistics.median(armed):.3f} s; closed in {closed_s:.3f} s")
    print(f"    a context costs {[cost // MIB for cost in costs]} MiB")
    return True


async def step_hold(node: Node) -> bool:
    """Held without any context; accounted to the MiB; there after SIGKILL; free after the last descriptor."""
    gpu = len(node.uuids) - 1
    async with linked() as link:
        await link.start()
        before = node.used_bytes(gpu)
        memory = VideoMemory(link)
        took_s = await timed(memory.reserve("7", node.uuids[gpu], node.size_bytes))
        held_bytes = node.used_bytes(gpu) - before
        await kill(link)
        await link.start()
        after_kill_bytes = node.used_bytes(gpu) - before
        memory.close()
        freed_s = await timed(until(lambda: node.used_bytes(gpu) <= before))
    wanted_bytes = sum(piece_sizes(node.size_bytes))
    print(
        f"    {wanted_bytes // MIB} MiB in {took_s * 1e3:.1f} ms; by NVML {held_bytes / MIB:.1f},"
        f" after SIGKILL {after_kill_bytes / MIB:.1f}; free {freed_s * 1e3:.1f} ms after the descriptors were closed"
    )
    return held_bytes == after_kill_bytes and abs(held_bytes - wanted_bytes) < MIB


@asynccontextmanager
async def owning(node: Node, gpu: int = 0) -> AsyncIterator[Owner]:
    owner = await anyio.to_thread.run_sync(Owner, PIECES, node.size_bytes // PIECES, gpu)
    try:
        yield owner
    finally:
        owner.close()


async def through_video(link: Link, memory: VideoMemory, gpus: Sequence[str]) -> CopyClient:
    """A route on these GPUs with what is held on the last of them."""
    route = await CopyClient.open(link, "7", gpus)
    attach_s = await timed(route.attach_video(gpus[-1], memory.pieces("7", gpus[-1])))
    print(
        f"    peer access {route.peer}; {len(memory.pieces('7', gpus[-1]))} pieces attached in {attach_s * 1e3:.1f} ms"
    )
    return route


async def step_peer(node: Node) -> bool:
    """Out over the link, the helper killed, back."""
    if len(node.uuids) < 2:
        print("    left out: one GPU")
        return True
    gpus = node.uuids[:2]
    async with owning(node) as owner, linked() as link:
        memory = VideoMemory(link)
        await memory.reserve("7", gpus[1], node.size_bytes)
        route = await through_video(link, memory, gpus)
        fast = [await carry("out", PEER_BYTES_PER_S, route, gpus[0], "out", owner) for _ in range(4)]
        await kill(link)
        owner.come_back_empty()
        route = await through_video(link, memory, gpus)
        fast.append(await carry("back, after SIGKILL", PEER_BYTES_PER_S, route, gpus[0], "in", owner))
        whole = owner.whole()
        await carry("out, 1,000 storages", PEER_BYTES_PER_S, route, gpus[0], "out", owner, small_places())
        print(f"    closed in {await timed(route.close()) * 1e3:.1f} ms")
        memory.close()
    return whole and all(fast)


async def step_same(node: Node) -> bool:
    """As after a restore: the bytes and the process are on one GPU."""
    gpu = len(node.uuids) - 1
    async with owning(node, gpu) as owner, linked() as link:
        memory = VideoMemory(link)
        await memory.reserve("7", node.uuids[gpu], node.size_bytes)
        route = await through_video(link, memory, [node.uuids[gpu]])
        await carry("out, same GPU", PEER_BYTES_PER_S, route, node.uuids[gpu], "out", owner)
        owner.come_back_empty()
        await carry("back, same GPU", PEER_BYTES_PER_S, route, node.uuids[gpu], "in", owner)
        await route.close()
        memory.close()
        return owner.whole()


def small_places() -> list[Place]:
    """1,000 storages of 40,000 bytes in 20 allocations, each aligned as PyTorch does."""
    size_bytes, room_bytes = 40_000, 40_448
    return [(index % 20, index // 20 * room_bytes, size_bytes, index * room_bytes) for index in range(1000)]


async def through_host(link: Link, lane: str, gpu: str, pool: Pool) -> CopyClient:
    began = time.monotonic()
    route = await CopyClient.open(link, lane, [gpu], pool.fd, pool.size_bytes)
    attach_s = time.monotonic() - began
    pages = "huge" if pool.huge else "ordinary"
    print(
        f"    {pool.size_bytes / GIB:.2f} GiB of host memory in {pages} pages, and a context: open in {attach_s:.3f} s",
        flush=True,
    )
    return route


async def step_host(node: Node) -> bool:
    """Out to the pool, the helper killed, back."""
    here = node.uuids[0]
    with closing(await anyio.to_thread.run_sync(Pool, node.size_bytes)) as pool:
        async with owning(node) as owner, linked() as link:
            route = await through_host(link, "7", here, pool)
            fast = [await carry("out", HOST_BYTES_PER_S, route, here, "out", owner) for _ in range(2)]
            await kill(link)
            owner.come_back_empty()
            route = await through_host(link, "7", here, pool)
            fast.append(await carry("back, after SIGKILL", HOST_BYTES_PER_S, route, here, "in", owner))
            whole = owner.whole()
            print(f"    closed in {await timed(route.close()):.3f} s")
    return whole and all(fast)


async def step_duplex(node: Node) -> bool:
    """Copy one job out while another comes in: on two GPUs, and on one. Not judged: the host's memory decides the
    rate.
    """
    size_bytes = node.size_bytes // 4
    for what, gpu in (("two GPUs", len(node.uuids) - 1), ("one GPU", 0)):
        first = await anyio.to_thread.run_sync(Owner, 8, size_bytes // 8)
        second = await anyio.to_thread.run_sync(Owner, 8, size_bytes // 8, gpu)
        with closing(first), closing(second), closing(Pool(size_bytes)) as one, closing(Pool(size_bytes)) as other:
            async with linked() as link, anyio.create_task_group() as tasks:
                out = await through_host(link, "8", node.uuids[0], one)
                back = await through_host(link, "9", node.uuids[gpu], other)
                limit = HOST_BYTES_PER_S
                tasks.start_soon(carry, f"out, {what}", limit, out, node.uuids[0], "out", first)
                tasks.start_soon(carry, f"in, {what}", limit, back, node.uuids[gpu], "in", second)
    return True


async def step_sandbox(node: Node) -> bool:
    """With no more than the shipped unit allows: another user's process through all states, its bytes out and back."""
    here = node.uuids[0]
    owner = await anyio.to_thread.run_sync(lambda: Owner(4, 64 * MIB, user=NOBODY))
    with closing(owner):
        async with linked([sys.executable, str(CONFINE), str(UNIT), *PROGRAM]) as link:
            print(f"    {(await link.start())}")
            memory = VideoMemory(link)
            await memory.reserve("7", here, owner.count * owner.size_bytes)
            route = await through_video(link, memory, [here])
            await carry("out", PEER_BYTES_PER_S, route, here, "out", owner)
            owner.come_back_empty()
            await carry("in", PEER_BYTES_PER_S, route, here, "in", owner)
            await route.close()
            memory.close()
            with closing(await anyio.to_thread.run_sync(Pool, 64 * MIB)) as pool:
                await (await through_host(link, "8", here, pool)).close()
            steps: dict[str, dict[str, object]] = {
                "lock": {"timeout_s": 10.0},
                "checkpoint": {},
                "restore": {"pairs": []},
            }
            for op, args in {**steps, "unlock": {}}.items():
                took_s = await timed(ask(link, op, {"pid": owner.pid, **args}))
                state = (await ask(link, "state", {"pid": owner.pid}))["state"]
                print(f"    {op} {took_s * 1e3:.1f} ms, then {state}")
        return state == "running" and owner.whole()


async def step_sweep(node: Node) -> bool:
    """Other ways to cut and spread copies, in a process of their own."""
    argv = [sys.executable, str(SWEEP), str(node.size_bytes)]
    done = await anyio.to_thread.run_sync(lambda: subprocess.run(argv, check=False, timeout=LIMIT_S))
    return done.returncode == 0


STEPS = {
    "start": step_start,
    "hold": step_hold,
    "peer": step_peer,
    "same": step_same,
    "host": step_host,
    "duplex": step_duplex,
    "sandbox": step_sandbox,
    "sweep": step_sweep,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=32 * 1024, help="how much to move")
    parser.add_argument("steps", nargs="*", choices=[[], *STEPS], metavar="STEP")
    arguments = parser.parse_args()
    node = Node(arguments.mib * MIB)
    print("driver", pynvml.nvmlSystemGetDriverVersion(), "|", len(node.uuids), "GPUs |", arguments.mib, "MiB")
    failed: list[str] = []
    for name in arguments.steps or STEPS:
        print(f"{name}: {(STEPS[name].__doc__ or '').strip()}", flush=True)
        try:
            good = anyio.run(STEPS[name], node)
        except Exception:  # noqa: BLE001 - the steps after it are worth their time on such a machine
            traceback.print_exc()
            good = False
        print(f"  {'ok' if good else 'FAILED'}", flush=True)
        if not good:
            failed.append(name)
    print("all passed" if not failed else f"failed: {', '.join(failed)}")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
