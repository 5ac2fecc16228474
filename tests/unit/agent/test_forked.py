"""A forked child closes its parent's GPU, with files that have the names of the devices."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

# Maps and opens what it is given, forks, and says what is left in the child, in the parent, and what was dropped.
PROGRAM = """
import json, mmap, os, sys
from hegmd.agent.lifecycle import leave_gpu
prefix, kept = sys.argv[1], sys.argv[2:]
held = []
for name in kept:
    with open(name, "r+b") as file:
        held.append(mmap.mmap(file.fileno(), 8192))
    held.append(os.open(name, os.O_RDWR))

def left():
    fds = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
    targets = [os.readlink(fd) for fd in fds if os.path.exists(fd)]
    with open("/proc/self/maps") as maps:
        mapped = [line.split()[-1] for line in maps if "/" in line]
    return {name: (targets.count(name), mapped.count(name)) for name in kept}

reader, writer = os.pipe()
if os.fork() == 0:
    os.write(writer, json.dumps([leave_gpu(prefix), left()]).encode())
    os._exit(0)
os.wait()
child = json.loads(os.read(reader, 4096))
print(json.dumps([child, left()]))
"""

# Forks beside an agent that has suspended the collector of a script which uses it, and of one which does not.
FORKS = """
import gc, os
from hegmd.agent import lifecycle
from hegmd.agent.trap import NoCollection

lifecycle.start()
for is_on in (True, False):
    gc.enable() if is_on else gc.disable()
    with NoCollection():
        child = os.fork()
        if child == 0:
            os._exit(gc.isenabled())
        print(os.waitpid(child, 0)[1] >> 8, gc.isenabled())
    print(gc.isenabled())
"""


def dropped(tmp_path: Path, *names: str) -> tuple[int, dict[str, list[int]], dict[str, list[int]]]:
    """How many, and what of each file is left in the child and in the parent: descriptors and mappings."""
    paths = [str(tmp_path / name) for name in names]
    for path in paths:
        Path(path).write_bytes(bytes(8192))
    argv = [sys.executable, "-c", PROGRAM, str(tmp_path / "nvidia"), *paths]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (count, child), parent = json.loads(done.stdout)
    return count, _by_name(child), _by_name(parent)


def _by_name(left: dict[str, list[int]]) -> dict[str, list[int]]:
    return {Path(path).name: counts for path, counts in left.items()}


def test_a_child_drops_its_parents_gpu_and_nothing_else(tmp_path: Path) -> None:
    # Python's own mapping of a file keeps a second descriptor.
    count, child, parent = dropped(tmp_path, "nvidia0", "nvidia-uvm", "other")
    assert count == 6
    assert child == {"nvidia0": [0, 0], "nvidia-uvm": [0, 0], "other": [2, 1]}
    assert parent == {"nvidia0": [2, 1], "nvidia-uvm": [2, 1], "other": [2, 1]}


def test_a_child_of_a_parent_that_only_uses_nvml_keeps_its_devices(tmp_path: Path) -> None:
    count, child, _ = dropped(tmp_path, "nvidia0", "nvidiactl")
    assert count == 0
    assert child == {"nvidia0": [2, 1], "nvidiactl": [2, 1]}


def test_a_child_that_was_forked_during_a_snapshot_never_ran_the_garbage_collector() -> None:
    """A loader's workers keep their cycles for the whole epoch."""
    ran = subprocess.run([sys.executable, "-W", "ignore", "-c", FORKS], capture_output=True, text=True, check=False)
    assert (ran.stderr, ran.stdout.split("\n")) == ("", ["1 False", "True", "0 False", "False", ""])
