"""Whether the GPU interrupts a kernel of one process for another process, before and after a restore by the driver.

    PYTHONPATH=.:client python3 -m tests.gpu.preemption_run [--seconds 1,3,8]

Needs one GPU, PyTorch and nvcc's runtime compiler, and no daemon. One process multiplies matrices all the time, the
neighbour. Another one runs one kernel that spins: after nothing, after the driver has checkpointed and restored it, and
after that in a context that it makes itself. Prints a line of JSON each: how long the neighbour waited at most, and how
the kernel ended.
"""

# ruff: noqa: T201 - printing is what this program is for

from __future__ import annotations

import argparse
import ctypes
import importlib
import json
import select
import subprocess
import sys
import time
from typing import Any

from hegmd.gpu_helper import cuda

NOTHING, RESTORED, NEW_CONTEXT = "nothing", "restored", "restored, in a new context"
LOCK_MS = 5000
#: Cycles of a second on an H200, rounded down.
CYCLES_PER_S = 1_900_000_000
SOURCE = b'extern "C" __global__ void spin(long long n) { long long t = clock64(); while (clock64() - t < n); }'


def multiply() -> None:
    """The neighbour: for each line of input, print the longest product since the last one, this moment's included."""
    import torch

    matrix = torch.randn(2048, 2048, device="cuda")
    float((matrix @ matrix).sum())
    print("ready", flush=True)
    longest_s = 0.0
    while True:
        began = time.monotonic()
        float((matrix @ matrix).sum())
        longest_s = max(longest_s, time.monotonic() - began)
        if select.select([sys.stdin], [], [], 0)[0]:
            sys.stdin.readline()
            print(longest_s, flush=True)
            longest_s = 0.0


def spin(seconds: float, *, in_new_context: bool) -> None:
    """The other process: wait for a line of input, spin, and print how that ended."""
    import torch

    driver, nvrtc = (importlib.import_module(f"cuda.bindings.{name}") for name in ("driver", "nvrtc"))

    torch.ones(1, device="cuda")
    torch.cuda.synchronize()
    print("ready", flush=True)
    sys.stdin.readline()
    cycles = int(seconds * CYCLES_PER_S)
    if in_new_context:
        _, program = nvrtc.nvrtcCreateProgram(SOURCE, b"spin.cu", 0, [], [])
        nvrtc.nvrtcCompileProgram(program, 1, [b"--gpu-architecture=sm_90"])
        image = b" " * nvrtc.nvrtcGetCUBINSize(program)[1]
        nvrtc.nvrtcGetCUBIN(program, image)
        driver.cuCtxCreate(None, 0, driver.cuDeviceGet(0)[1])
        function = driver.cuModuleGetFunction(driver.cuModuleLoadData(image)[1], b"spin")[1]
        driver.cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, 0, ((cycles,), (ctypes.c_longlong,)), 0)
        print(str(driver.cuCtxSynchronize()[0]), flush=True)
        return
    try:
        torch.cuda._sleep(cycles)
        torch.cuda.synchronize()
        print("done", flush=True)
    except RuntimeError as error:
        print(str(error).splitlines()[0], flush=True)


def started(*words: str) -> subprocess.Popen[str]:
    """Return that part of this program as a process, once it is ready."""
    command = [sys.executable, "-m", "tests.gpu.preemption_run", *words]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert said(process) == "ready"
    return process


def said(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def ask(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


def measured(neighbour: subprocess.Popen[str], after: str, seconds: float) -> dict[str, Any]:
    """Run the kernel once beside the neighbour."""
    process = started("--spin", str(seconds), *(["--new-context"] if after == NEW_CONTEXT else []))
    if after != NOTHING:
        cuda.lock(process.pid, LOCK_MS)
        cuda.checkpoint(process.pid)
        cuda.restore(process.pid, ())
        cuda.unlock(process.pid)
    ask(neighbour)
    said(neighbour)
    began = time.monotonic()
    ask(process)
    ended, took_s = said(process), time.monotonic() - began
    ask(neighbour)
    waited_s = float(said(neighbour))
    process.kill()
    process.wait()
    row = {"after": after, "kernel_s": seconds, "took_s": took_s, "neighbour_waited_s": waited_s}
    return {**{key: round(value, 3) if isinstance(value, float) else value for key, value in row.items()}, "end": ended}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", default="1,3,8")
    parser.add_argument("--spin", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--new-context", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--multiply", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.multiply:
        multiply()
    if options.spin is not None:
        spin(options.spin, in_new_context=options.new_context)
        return
    neighbour = started("--multiply")
    for after in (NOTHING, RESTORED, NEW_CONTEXT):
        for seconds in map(float, options.seconds.split(",")):
            print(json.dumps(measured(neighbour, after, seconds)), flush=True)
    neighbour.kill()
    neighbour.wait()


if __name__ == "__main__":
    main()
