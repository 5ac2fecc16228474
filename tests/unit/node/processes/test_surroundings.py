"""Properties of a process seen from outside, with real processes and written control groups."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hegmd.node.processes.surroundings import SurroundingFacts, nearest_ancestor, read_outside
from tests.patience import HANG_S

MAPS = """
import mmap, os, sys
descriptor = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)
os.ftruncate(descriptor, 4096)
mapped = mmap.mmap(descriptor, 4096)
os.unlink(sys.argv[1])
print("ready", flush=True)
input()
"""
PARENT = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "print('ready', flush=True); input()"], stdin=subprocess.PIPE)
input()
child.kill()
child.wait()
"""
MIB = 1 << 20

Child = subprocess.Popen[str]


def _started(*words: str, **environ: str) -> Child:
    process = subprocess.Popen(
        [sys.executable, "-c", *words],
        env={**os.environ, **environ},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def _ended(process: Child) -> None:
    process.communicate("\n", timeout=HANG_S)


@pytest.fixture
def quiet() -> Iterator[Child]:
    process = _started("print('ready', flush=True); input()")
    yield process
    _ended(process)


def test_a_process_of_ours_with_nothing_about_it(quiet: Child) -> None:
    facts = read_outside(quiet.pid, cgroups=Path("/nowhere"))
    assert facts == SurroundingFacts(nccl_shared=False, same_ipc=True)


def test_nccls_shared_memory_is_found_although_its_name_was_removed() -> None:
    process = _started(MAPS, f"/dev/shm/nccl-test-{os.getpid()}")
    assert read_outside(process.pid).nccl_shared is True
    assert read_outside(process.pid).nccl_p2p_disabled is False
    _ended(process)


def test_a_process_that_was_started_without_peer_to_peer() -> None:
    process = _started("print('ready', flush=True); input()", NCCL_P2P_DISABLE="1")
    assert read_outside(process.pid).nccl_p2p_disabled is True
    _ended(process)


def test_a_stopped_process(quiet: Child) -> None:
    os.kill(quiet.pid, signal.SIGSTOP)
    os.waitpid(quiet.pid, os.WUNTRACED)
    assert read_outside(quiet.pid).stopped is True
    os.kill(quiet.pid, signal.SIGCONT)


def test_an_exited_process_is_unknown_and_not_clean(quiet: Child) -> None:
    assert read_outside(2**22 + 1) == SurroundingFacts()
    assert nearest_ancestor(2**22 + 1, [1]) is None


def test_the_nearest_ancestor_of_those_named() -> None:
    parent = _started(PARENT)
    (child,) = (int(text) for text in Path(f"/proc/{parent.pid}/task/{parent.pid}/children").read_text().split())
    assert nearest_ancestor(child, [parent.pid, os.getpid()]) == parent.pid
    assert nearest_ancestor(child, [child, os.getpid()]) == os.getpid()
    assert nearest_ancestor(child, []) is None
    _ended(parent)


def _group(folder: Path, **figures: int | str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, figure in figures.items():
        (folder / name.replace("_", ".", 1)).write_text(f"{figure}\n")


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    (tmp_path / "proc/7").mkdir(parents=True)
    return tmp_path / "proc"


def test_the_tightest_control_group_counts_and_cache_is_free_memory(tmp_path: Path, proc: Path) -> None:
    (proc / "7/cgroup").write_text("0::/pods/one\n")
    _group(tmp_path / "cgroup/pods", memory_max=1000 * MIB, memory_current=900 * MIB, memory_stat="inactive_file 0")
    stat = f"anon 5\ninactive_file {50 * MIB}"
    _group(tmp_path / "cgroup/pods/one", memory_max=400 * MIB, memory_current=350 * MIB, memory_stat=stat)
    assert read_outside(7, str(proc), tmp_path / "cgroup").cgroup_free_bytes == 100 * MIB
    _group(tmp_path / "cgroup/pods/one", memory_max="max")
    assert read_outside(7, str(proc), tmp_path / "cgroup").cgroup_free_bytes == 100 * MIB, "its parent's"
    _group(tmp_path / "cgroup/pods", memory_max="max")
    assert read_outside(7, str(proc), tmp_path / "cgroup").cgroup_free_bytes is None


def test_control_groups_of_the_first_version(tmp_path: Path, proc: Path) -> None:
    (proc / "7/cgroup").write_text("5:cpu,cpuacct:/x\n4:memory:/slurm/job\n")
    job = tmp_path / "cgroup/memory/slurm/job"
    job.mkdir(parents=True)
    (job / "memory.limit_in_bytes").write_text(str(300 * MIB))
    (job / "memory.usage_in_bytes").write_text(str(100 * MIB))
    assert read_outside(7, str(proc), tmp_path / "cgroup").cgroup_free_bytes == 200 * MIB
    (job / "memory.limit_in_bytes").write_text("9223372036854771712")
    assert read_outside(7, str(proc), tmp_path / "cgroup").cgroup_free_bytes is None
