"""How long the driver alone takes for two ranks whose communicators have ended, in several orders.

    PYTHONPATH=.:client python3 -m tests.gpu.driver_at_once [nccl] [plain]

Needs two GPUs and PyTorch, and no daemon. Two processes train a small model, `nccl` ones with a process group that they
destroy. Then the driver checkpoints and restores them: one alone, on its GPU; both at once, each onto the other's GPU;
one after the other; and the first restore beside the second checkpoint. Prints the seconds of each call.
"""

# ruff: noqa: T201 - printing is what this program is for

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from hegmd.gpu_helper import cuda

TURNS = 2
LOCK_MS = 5000


def train(rank: int, kind: str) -> None:
    """One of the two processes: a few steps, then a product on its GPU for each line of input."""
    import torch
    import torch.distributed as dist

    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    if kind == "nccl":
        dist.init_process_group("nccl", rank=rank, world_size=2, device_id=device)
    model = torch.nn.Sequential(*[torch.nn.Linear(1024, 1024) for _ in range(8)]).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(4):
        model(torch.randn(64, 1024, device=device)).square().mean().backward()
        for weight in model.parameters() if kind == "nccl" else ():
            dist.all_reduce(weight.grad)
        optimizer.step()
        optimizer.zero_grad()
    torch.cuda.synchronize()
    if kind == "nccl":
        dist.destroy_process_group()
    torch.cuda.empty_cache()
    free_bytes, total_bytes = torch.cuda.mem_get_info()
    print((total_bytes - free_bytes) >> 20, flush=True)
    for _ in sys.stdin:
        values = torch.randn(512, 512, device=device)
        print(float((values @ values).isfinite().sum()), flush=True)


class Pair:
    """The two processes, and the seconds that the driver takes for them."""

    def __init__(self, kind: str) -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        environ = os.environ | {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "NCCL_NVLS_ENABLE": "0",
            "NCCL_CUMEM_HOST_ENABLE": "0",
        }
        self._processes = [
            subprocess.Popen(
                [sys.executable, "-m", "tests.gpu.driver_at_once", "--rank", str(rank), kind],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=environ,
            )
            for rank in (0, 1)
        ]
        sizes = [self._line(process) for process in self._processes]
        print(f"{kind}: {' and '.join(sizes)} MiB on the GPUs", flush=True)
        first, second = [device.uuid for device in cuda.devices()][:2]
        self._exchanged = [(first, second), (second, first)]
        self.pids = [process.pid for process in self._processes]

    @staticmethod
    def _line(process: subprocess.Popen[str]) -> str:
        assert process.stdout is not None
        return process.stdout.readline().strip()

    def measure(self, name: str, work: Callable[[], list[float]], pids: list[int]) -> None:
        """Lock the processes, do the work, and have both compute again."""
        for _ in range(TURNS):
            for pid in pids:
                cuda.lock(pid, LOCK_MS)
            began = time.monotonic()
            calls = work()
            took_s = time.monotonic() - began
            for pid in pids:
                cuda.unlock(pid)
            for process in self._processes:
                assert process.stdin is not None
                process.stdin.write("\n")
                process.stdin.flush()
            answers = [self._line(process) for process in self._processes]
            calls_s = ", ".join(f"{call:.3f}" for call in calls)
            print(f"  {name}: {took_s:.3f} s in all ({calls_s}); computes {answers}", flush=True)

    def out(self, pid: int) -> float:
        return _timed(lambda: cuda.checkpoint(pid))

    def back(self, pid: int, *, exchanged: bool = True) -> float:
        return _timed(lambda: cuda.restore(pid, self._exchanged if exchanged else ()))

    def alone(self, _pool: ThreadPoolExecutor) -> list[float]:
        return [self.out(self.pids[0]), self.back(self.pids[0], exchanged=False)]

    def at_once(self, pool: ThreadPoolExecutor) -> list[float]:
        return [*pool.map(self.out, self.pids), *pool.map(self.back, self.pids)]

    def in_turn(self, _pool: ThreadPoolExecutor) -> list[float]:
        return [*map(self.out, self.pids), *map(self.back, self.pids)]

    def staggered(self, pool: ThreadPoolExecutor) -> list[float]:
        first, second = self.pids
        out_first = self.out(first)
        back_first = pool.submit(self.back, first)
        out_second = self.out(second)
        return [out_first, out_second, back_first.result(), self.back(second)]

    def end(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()


def _timed(call: Callable[[], object]) -> float:
    began = time.monotonic()
    call()
    return time.monotonic() - began


def main(kinds: list[str]) -> None:
    """Measure each kind in every order."""
    cuda.start()
    with ThreadPoolExecutor(2) as pool:
        for kind in kinds or ["nccl", "plain"]:
            pair = Pair(kind)
            orders = {
                "alone": pair.alone,
                "at once": pair.at_once,
                "one after the other": pair.in_turn,
                "staggered": pair.staggered,
            }
            try:
                for name, work in orders.items():
                    pair.measure(name, partial(work, pool), pair.pids[: 1 if name == "alone" else 2])
            finally:
                pair.end()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        train(int(sys.argv[2]), sys.argv[3])
    else:
        main(sys.argv[1:])
