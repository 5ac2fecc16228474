"""One command for a machine with NVIDIA GPUs: is the inventory true there, and what does it cost?

    PYTHONPATH=.:client python3 -m tests.gpu.inventory_run [STEP...]

Steps: the provider contract on the real library; every field beside nvidia-smi, with real torch jobs on each GPU; how
long video memory takes to show; what a snapshot costs, whole and question by question; what NVML costs in memory;
whether closing releases the driver; and the same comparison through a real hegmd and hegmctl, with what these cost.
A step that fails does not stop the ones after it. The exit status is 0 when all of them passed. Needs torch and
nvidia-smi, no network and no installed hegmd.
"""

# ruff: noqa: T201 - printing is what this program is for

from __future__ import annotations

import argparse
import json
import os
import select
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from hegmd.node.devices.base import VendorSnapshot
from hegmd.node.devices.nvidia import NvidiaProvider
from hegmd.node.devices.nvidia_host import NvidiaHost
from hegmd.node.devices.nvml import Nvml
from hegmd.node.devices.nvml_gpu import NvmlGpu
from hegmd.node.devices.shared_library import SharedLibrary
from hegmd.protocol.snapshots import Gpu, GpuProcess
from tests.gpu import nvidia_smi
from tests.gpu.comparison import MIB, Row, compare_gpus, compare_processes, compare_rows, compare_topology, table
from tests.gpu.jobs import VramJob
from tests.gpu.moves_node import require_nvml
from tests.kit.contracts import check_provider
from tests.patience import HANG_S

REPOSITORY = Path(__file__).resolve().parents[2]
SNAPSHOTS = 100
HELD_BYTES = 3 << 30
GIVE_UP_S = 20.0
READY_WITHIN_S = 30.0


@contextmanager
def opened() -> Iterator[NvidiaProvider]:
    provider = NvidiaProvider()
    provider.open()
    try:
        yield provider
    finally:
        provider.close()


def shares(snapshot: VendorSnapshot) -> dict[tuple[int, str], int | None]:
    return {(use.pid, use.use.gpu): use.use.vram_bytes for use in snapshot.uses}


def held_gpus(snapshot: VendorSnapshot) -> list[VramJob]:
    """One job for each GPU, each of another size, so that no two can be mistaken for one another."""
    return [VramJob(gpu.index, HELD_BYTES + gpu.index * 256 * MIB) for gpu in snapshot.gpus]


def verdict(rows: list[Row]) -> bool:
    print(table(rows))
    equal = sum(row.equal is True for row in rows)
    print(f"{equal} of {len(rows)} equal, {sum(row.equal is None for row in rows)} to look at")
    return all(row.equal is not False for row in rows)


# ---- steps ----------------------------------------------------------------------------------------------------------


def step_node() -> bool:
    """Print a description of the machine."""
    host = NvidiaHost()
    print("kernel module", host.module_version(), "| cards", host.cards(), "| driven", host.driven_gpus())
    with opened() as provider:
        snapshot = provider.snapshot()
        versions = f"NVML {snapshot.library_version} | CUDA {snapshot.compute_version}"
        print("driver", snapshot.driver_version, "|", versions, "| nvidia-smi's CUDA", nvidia_smi.cuda_version())
        for gpu in snapshot.gpus:
            print(gpu)
    nvml = Nvml(SharedLibrary("libnvidia-ml.so.1"))
    for index in range(nvml.device_count()):
        nvml_gpu = NvmlGpu(nvml, nvml.handle(index))
        links = [nvml_gpu.nvlink(number) for number in range(36)]
        up = [link for link in links if link is not None]
        lists = {kind: nvml_gpu.process_entries(kind) for kind in ("graphics", "compute", "mps")}
        print(f"GPU {index}: {len(up)} links up, first {up[:1]}; fabric {nvml_gpu.fabric()}; lists {lists}")
        print(
            f"GPU {index}: failures {nvml_gpu.failures}; recovery {nvml_gpu.recovery_action()};"
            f" rows {nvml_gpu.remapped_rows()}"
        )
    nvml.close()
    return snapshot.compute_version == nvidia_smi.cuda_version()


def step_contract() -> bool:
    """The same contract as over simulated GPUs and the stub library."""
    count = len(nvidia_smi.query("gpu", ["uuid"]))
    snapshot = check_provider(NvidiaProvider, expect_gpus=count)
    print(f"kept, on {len(snapshot.gpus)} GPUs")
    return True


def step_fields() -> bool:
    """Every field beside nvidia-smi, with a job on each GPU."""
    with opened() as provider, ExitStack() as jobs:
        started = [jobs.enter_context(job) for job in held_gpus(provider.snapshot())]
        for job in started:
            job.held_at()
        snapshot = provider.snapshot()
        rows = compare_gpus(snapshot.gpus) + compare_rows(snapshot.gpus) + compare_topology(snapshot.gpus)
        rows += compare_processes(shares(snapshot))
        by_job = {job.pid: job.held_bytes for job in started}
        for use in snapshot.uses:
            if use.pid in by_job:
                least = by_job.pop(use.pid)
                at_least = use.use.vram_bytes is not None and use.use.vram_bytes >= least
                rows.append(Row(f"pid {use.pid} holds at least", use.use.vram_bytes, least, at_least))
        rows += [Row(f"pid {pid} is listed", "no", "yes", False) for pid in by_job]
        return verdict(rows)


def step_delays() -> bool:
    """Measure the delay between the return of the driver's call and a snapshot that shows it."""
    with opened() as provider:
        uuid = provider.snapshot().gpus[0].uuid
        for attempt in range(2):
            print(f"{attempt}: " + _delays_of_one_job(provider, uuid))
    return True


def _delays_of_one_job(provider: NvidiaProvider, uuid: str) -> str:
    with VramJob(0, HELD_BYTES) as job:
        key, held_bytes = (job.pid, uuid), job.held_bytes
        taken = _seen_after(provider, job.held_at(), lambda now: (now.get(key) or 0) >= held_bytes)
        freed = _seen_after(provider, job.free(), lambda now: 0 < (now.get(key) or 0) < held_bytes)
        signalled = time.monotonic()
        job.end()
        ended = time.monotonic()
        gone = _seen_after(provider, ended, lambda now: key not in now)
    dying = (ended - signalled) * 1e3
    return (
        f"taken memory seen after {taken:.1f} ms, freed after {freed:.1f} ms; "
        f"killed process reaped after {dying:.0f} ms, gone {gone:.1f} ms later"
    )


def _seen_after(
    provider: NvidiaProvider, since: float, shows: Callable[[dict[tuple[int, str], int | None]], bool]
) -> float:
    """Milliseconds until a snapshot shows it; the snapshot's own time is in it."""
    while time.monotonic() < since + GIVE_UP_S:
        if shows(shares(provider.snapshot())):
            return (time.monotonic() - since) * 1e3
    raise RuntimeError(f"not seen within {GIVE_UP_S:.0f} s")


def step_cost() -> bool:
    """Measure a snapshot in CPU time and in waiting, and each query alone."""
    rss_before = _rss_kib()
    with opened() as provider, ExitStack() as jobs:
        first_wall, first_cpu, _ = _timed(provider.snapshot)
        print(f"resident memory: {rss_before} KiB before open, {_rss_kib()} KiB after the first snapshot")
        print(f"first snapshot: {first_wall * 1e3:.2f} ms, {first_cpu * 1e3:.2f} ms of CPU")
        _print_snapshots(provider, "idle")
        for job in held_gpus(provider.snapshot()):
            jobs.enter_context(job)
            job.held_at()
        _print_snapshots(provider, "a job on each")
    _print_questions()
    return True


def _print_snapshots(provider: NvidiaProvider, what: str) -> None:
    costs = [_timed(provider.snapshot) for _ in range(SNAPSHOTS)]
    gpus = len(costs[0][2].gpus)
    for name, values in (("wall", [cost[0] for cost in costs]), ("CPU", [cost[1] for cost in costs])):
        p50, p99 = statistics.median(values) * 1e3, sorted(values)[int(len(values) * 0.99) - 1] * 1e3
        share = f"; {statistics.mean(values) / 10:.4%} of a core at one in 10 s" if name == "CPU" else ""
        print(f"snapshot, {gpus} GPUs, {what}: {name:4} p50 {p50:.2f} ms, p99 {p99:.2f} ms{share}")


def _timed(call: Callable[[], VendorSnapshot]) -> tuple[float, float, VendorSnapshot]:
    cpu, wall = time.process_time(), time.perf_counter()
    result = call()
    return time.perf_counter() - wall, time.process_time() - cpu, result


def _print_questions() -> None:
    nvml = Nvml(SharedLibrary("libnvidia-ml.so.1"))
    handle = nvml.handle(0)
    gpu = NvmlGpu(nvml, handle)
    nvml.watch([handle])
    # ECC (volatile, corrected and not) and remapped rows in one call: what a batch would cost.
    batch = [3, 4, 142, 143, 144, 145]
    questions: dict[str, Callable[[], object]] = {
        "count": nvml.device_count,
        "handle": lambda: nvml.handle(0),
        "uuid": gpu.uuid,
        "memory": gpu.memory,
        "utilisation": gpu.utilisation_percent,
        "temperature": gpu.temperature_celsius,
        "power": gpu.power_watts,
        "power limit": gpu.power_limit_watts,
        "mig": gpu.mig,
        "persistence": gpu.persistence,
        "ecc corrected": lambda: gpu.ecc_errors(corrected=True),
        "ecc uncorrected": lambda: gpu.ecc_errors(corrected=False),
        "retired pages": gpu.retired_pages,
        "retired pending": gpu.retired_pending,
        "remapped rows": gpu.remapped_rows,
        "recovery action": gpu.recovery_action,
        "clock reasons": gpu.clocks_event_reasons,
        "fabric": gpu.fabric,
        "compute list": lambda: gpu.process_entries("compute"),
        "graphics list": lambda: gpu.process_entries("graphics"),
        "mps list": lambda: gpu.process_entries("mps"),
        "events": lambda: list(nvml.xids()),
        "one nvlink": lambda: gpu.nvlink(0),
        "six fields in one": lambda: nvml.answer("nvmlDeviceGetFieldValues", handle, batch),
    }
    print(f"{'question':20} {'wall us':>9} {'CPU us':>9}  answer")
    for name, question in questions.items():
        question()
        cpu, wall = time.process_time(), time.perf_counter()
        for _ in range(20):
            answer = question()
        wall, cpu = (time.perf_counter() - wall) / 20, (time.process_time() - cpu) / 20
        print(f"{name:20} {wall * 1e6:9.1f} {cpu * 1e6:9.1f}  {str(answer)[:60]}")
    nvml.close()


def _rss_kib(pid: int | str = "self") -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") // 1024


BARE = """
import ctypes, pynvml
def rss_mib():
    return int(next(line for line in open("/proc/self/status") if line.startswith("VmRSS")).split()[1]) / 1024
before = rss_mib()
pynvml.nvmlInit()
pynvml.nvmlSystemGetCudaDriverVersion_v2()
for index in range(pynvml.nvmlDeviceGetCount()):
    pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(index))
opened = rss_mib()
ctypes.CDLL(None).malloc_trim(0)
print(f"{before:.1f} MiB before NVML, {opened:.1f} MiB with it, {rss_mib():.1f} MiB after malloc_trim")
"""


def step_memory() -> bool:
    """Resident memory of a Python that does nothing but open NVML."""
    done = subprocess.run([sys.executable, "-c", BARE], text=True, capture_output=True, check=True, timeout=HANG_S)
    print(done.stdout, end="")
    return True


def step_letting_go() -> bool:
    """Opening and closing ten times leaves no device open, and no more descriptors than once did."""
    counts: list[int] = []
    with opened() as provider:
        for _ in range(10):
            provider.open()
            provider.snapshot()
            provider.close()
            counts.append(len(os.listdir("/proc/self/fd")))
    links = [os.readlink(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd") if _is_link(name)]
    devices = [link for link in links if link.startswith("/dev/nvidia")]
    print(f"descriptors after each close: {counts}; devices open: {devices}; resident memory: {_rss_kib()} KiB")
    return not devices and counts[0] == counts[-1]


def _is_link(name: str) -> bool:
    return os.path.lexists(f"/proc/self/fd/{name}")


def step_daemon() -> bool:
    """The same through hegmd and hegmctl."""
    if not (REPOSITORY / "client/hegmctl/cli.py").exists() or not (REPOSITORY / "hegmd/__main__.py").exists():
        print("there is no hegmctl or hegmd in this tree yet: left out")
        return True
    with tempfile.TemporaryDirectory(prefix="hegm-") as folder, ExitStack() as stack:
        environ = {**os.environ, "PYTHONPATH": f"{REPOSITORY}:{REPOSITORY / 'client'}"}
        pid = stack.enter_context(daemon(Path(folder), environ))
        with opened() as provider:
            jobs = [stack.enter_context(job) for job in held_gpus(provider.snapshot())]
        for job in jobs:
            job.held_at()
        ask = [sys.executable, "-m", "hegmctl", "--socket", f"{folder}/hegmd.sock"]
        for verb in ("gpus", "ps"):
            print(subprocess.run([*ask, verb], env=environ, text=True, capture_output=True, check=True).stdout)
            print(f"hegmctl {verb}, whole process: {_whole_process([*ask, verb], environ)}")
        print(f"python3 -c pass, for comparison: {_whole_process([sys.executable, '-c', 'pass'], environ)}")
        print(f"hegmd: {_rss_kib(pid) / 1024:.1f} MiB resident")
        gpus = [Gpu.from_plain(plain, "gpu") for plain in _json([*ask, "gpus", "--json"], environ)["gpus"]]
        answer = _json([*ask, "ps", "--json"], environ)
        processes = [GpuProcess.from_plain(plain, "process") for plain in answer["processes"]]
        uuids = {gpu.id: gpu.uuid for gpu in gpus}
        ours = {(process.pid, uuids[use.gpu]): use.vram_bytes for process in processes for use in process.gpus}
        rows = compare_gpus(gpus) + compare_topology(gpus) + compare_processes(ours)
        by_pid = {each.pid: each for each in processes}
        for job in jobs:
            uid = by_pid[job.pid].uid if job.pid in by_pid else None
            rows.append(Row(f"pid {job.pid} uid", uid, os.getuid(), uid == os.getuid()))
        return verdict(rows)


@contextmanager
def daemon(folder: Path, environ: dict[str, str]) -> Iterator[int]:
    """Return the pid of a private hegmd that has reported ready."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notify:
        notify.bind(str(folder / "notify"))
        command = [sys.executable, "-m", "hegmd", "--socket", f"{folder}/hegmd.sock", "--state-dir", f"{folder}/state"]
        process = subprocess.Popen(command, env={**environ, "NOTIFY_SOCKET": str(folder / "notify")}, cwd=folder)
        try:
            output = b""
            deadline = time.monotonic() + READY_WITHIN_S
            while b"READY=1" not in output:
                ready, _, _ = select.select([notify], [], [], max(0.0, deadline - time.monotonic()))
                if not ready:
                    raise RuntimeError(f"hegmd did not come up within {READY_WITHIN_S:.0f} s")
                output = notify.recv(4096)
            yield process.pid
        finally:
            process.terminate()
            try:
                process.wait(HANG_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _whole_process(command: list[str], environ: dict[str, str]) -> str:
    took: list[float] = []
    for _ in range(20):
        began = time.perf_counter()
        subprocess.run(command, env=environ, capture_output=True, check=True)
        took.append((time.perf_counter() - began) * 1e3)
    return f"p50 {statistics.median(took):.0f} ms, longest {max(took):.0f} ms"


def _json(command: list[str], environ: dict[str, str]) -> dict[str, list[object]]:
    done = subprocess.run(command, env=environ, text=True, capture_output=True, check=True, timeout=HANG_S)
    answer: dict[str, list[object]] = json.loads(done.stdout)
    return answer


STEPS = (step_node, step_contract, step_fields, step_delays, step_cost, step_memory, step_letting_go, step_daemon)


def main() -> int:
    parser = argparse.ArgumentParser(description="Compare hegmd's inventory with nvidia-smi on this machine's GPUs.")
    parser.add_argument("steps", nargs="*", help="only these: " + ", ".join(step.__name__[5:] for step in STEPS))
    wanted = parser.parse_args().steps
    require_nvml()
    results: dict[str, str] = {}
    for step in STEPS:
        name = step.__name__.removeprefix("step_")
        if wanted and name not in wanted:
            continue
        began = time.monotonic()
        print(f"\n==== {name}: {step.__doc__}", flush=True)
        try:
            passed = step()
        except Exception as error:  # noqa: BLE001 - one step that fails must not hide the others
            traceback.print_exc(file=sys.stdout)
            if isinstance(error, subprocess.CalledProcessError):
                print(error.stdout, error.stderr)
            passed = False
        results[name] = f"{'passed' if passed else 'FAILED'} in {time.monotonic() - began:.1f} s"
    print("\n==== result")
    for name, result in results.items():
        print(f"{name:12} {result}")
    return int(any("FAILED" in result for result in results.values()))


if __name__ == "__main__":
    sys.exit(main())
