"""The driver's contract on this machine's GPUs, as a table: `python3 -m tests.gpu.driver_run [--state FILE] [ROW...]`.

For a machine that has no pytest with our plugins; it needs cuda-bindings, nvidia-ml-py and what hegmd needs. Runs over
the stub too, with the environment of a CudaNode. With --state it continues where it was cut, rows that do not hold once
more; no row is begun after --budget-s. `--room` shows instead how much free memory a restore really needs,
beside what NVML says the process had: it destroys a job of its own each time that it was not enough.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from hegmd.gpu_helper import cuda
from tests.kit.driver import MIB, swapped, take_off
from tests.kit.progress import ROWS
from tests.stubs.cuda.rig import DriverRig

REPO = Path(__file__).resolve().parents[2]
ROW_S = 60
# How much more than the process had is left free, from ample to less than it had.
SPARE_MIB = (1024, 256, 64, 32, 16, 8, 4, 0, -16, -64)


def gpu_count() -> int:
    with DriverRig() as rig:
        return len(rig.look().used_bytes)


def run_row(name: str) -> subprocess.CompletedProcess[str]:
    paths = [str(REPO), str(REPO / "client"), *filter(None, [os.environ.get("PYTHONPATH")])]
    return subprocess.run(
        [sys.executable, "-m", "tests.stubs.cuda.rig", name],
        cwd=REPO,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        check=False,
        timeout=ROW_S,
    )


def say(*words: object) -> None:
    sys.stdout.write("  ".join(map(str, words)) + "\n")
    sys.stdout.flush()


def show_row(name: str, gpus: int) -> bool:
    """Run it and print how it went; whether nothing is wrong."""
    if ROWS[name].gpus > gpus:
        say("skipped", name, f"needs {ROWS[name].gpus} GPUs")
        return True
    started = time.monotonic()
    try:
        done = run_row(name)
    except subprocess.TimeoutExpired as late:
        say("FAILED ", name, late)
        return False
    took = f"{time.monotonic() - started:.1f} s"
    say("FAILED " if done.returncode else "ok     ", name, took, *done.stderr.splitlines()[-1:])
    return not done.returncode


def fill(ordinal: int, leave_bytes: int) -> list[object]:
    """Hold memory there until no more than that is free."""
    held: list[object] = []
    size_bytes = 1 << 36
    unit_bytes = cuda.granularity(ordinal)
    while size_bytes >= unit_bytes:
        if cuda.memory(ordinal)[0] - size_bytes < leave_bytes:
            size_bytes //= 2
        else:
            held.append(cuda.create(ordinal, size_bytes))
    return held


def try_restore(size_mib: int, spare_mib: int) -> bool:
    """Whether a process comes back on the other GPU with so much more free there than it had."""
    with DriverRig() as rig:
        target = rig.start(0, size_mib)
        digest = target.ask("digest")
        had_bytes = rig.look().by_process[target.pid, cuda.devices()[0].uuid]
        take_off(target.pid)
        cuda.retain(1)
        held = fill(1, had_bytes + spare_mib * MIB)
        free_bytes = cuda.memory(1)[0]
        started = time.monotonic()
        try:
            cuda.restore(target.pid, swapped())
            words = "restored"
        except cuda.CudaError as error:
            words = f"{error}; state {_state(target.pid)}"
        took = time.monotonic() - started
        left_bytes = cuda.memory(1)[0]
        for handle in held:
            cuda.release_handle(handle)
        cuda.release(1)
        say(
            f"had {had_bytes / MIB:.1f} MiB, {free_bytes / MIB:.1f} free, {left_bytes / MIB:.1f} after",
            f"{took:.2f} s",
            words,
        )
        if words != "restored":
            return False
        cuda.unlock(target.pid)
        return target.ask("digest") == digest


def _state(pid: int) -> str:
    try:
        return cuda.state(pid)
    except cuda.CudaError as error:
        return str(error)


def show_room() -> None:
    cuda.start()
    for size_mib in (1, 512):
        for spare_mib in SPARE_MIB:
            if not try_restore(size_mib, spare_mib):
                break


def show_rows(names: Sequence[str], state: Path | None, budget_s: float) -> bool:
    """Run those that have not held before; whether all of them have by then."""
    ends, gpus = time.monotonic() + budget_s, gpu_count()
    known = state.read_text().splitlines() if state is not None and state.exists() else []
    held = {line["row"] for line in map(json.loads, known) if line["holds"]}
    wrong: list[str] = []
    left = [name for name in names if name not in held]
    while left and time.monotonic() < ends:
        name = left.pop(0)
        holds = show_row(name, gpus)
        wrong += [] if holds else [name]
        if state is not None:
            with state.open("a") as file:
                file.write(json.dumps({"row": name, "holds": holds}) + "\n")
    if left:
        say(f"cut before {left[0]}: the time is over")
    say(f"{len(wrong)} of {len(names)} rows do not hold on {gpus} GPUs, {len(left)} were not run")
    return not wrong and not left


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", choices=[[], *ROWS], metavar="ROW")
    parser.add_argument("--state", type=Path, help="a file of what is done, a line of JSON each; made if not there")
    parser.add_argument("--budget-s", type=float, default=540.0, help="begin no row after so long")
    parser.add_argument("--room", action="store_true", help="how much room a restore takes; loses jobs of its own")
    options = parser.parse_args()
    if options.room:
        show_room()
        return 0
    return int(not show_rows(options.rows or list(ROWS), options.state, options.budget_s))


if __name__ == "__main__":
    sys.exit(main())
