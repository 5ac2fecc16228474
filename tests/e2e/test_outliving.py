"""Suspended jobs and daemons that come and go: trainings, killed daemons, bytes on disk, a journal that is gone."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.e2e.daemon import RunningDaemon
from tests.e2e.test_moving import LARGE, LONG, Job, is_as_undisturbed
from tests.looks import COMMAND_MS, pause, still_there
from tests.needs import need_torch
from tests.patience import HANG_S
from tests.room import MIB, SHARED_MEMORY, skip_without

pytestmark = [pytest.mark.e2e, pytest.mark.xdist_group("memory of the node"), pytest.mark.usefixtures("preloaded")]
need_torch()

ENDLESS = [LONG, "0"]


def pieces(state_dir: Path) -> list[Path]:
    """Return the names of that daemon's segments in memory."""
    known = state_dir / "identity"
    identity = known.read_text()[:16] if known.exists() else "none"
    return list(SHARED_MEMORY.glob(f"hegmd-{os.geteuid()}-{identity}/*"))


def keepers(state_dir: Path) -> list[psutil.Process]:
    found: list[psutil.Process] = []
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if "hegmd.memory.keeper" in words and str(state_dir) in words:
            found.append(process)
    return found


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[RunningDaemon]:
    """A daemon that leaves nothing at its end: no segment, no place, no keeper, no file on disk."""
    state_dir = tmp_path / "state"
    with RunningDaemon(tmp_path) as running:
        yield running
        running.stop()
        identity = (state_dir / "identity").read_text()[:16]
        left = [*SHARED_MEMORY.glob(f"hegmd-*-{identity}"), *(state_dir / "spill").glob("*")]
    alive = still_there(keepers(state_dir), 10)
    for keeper in alive:
        keeper.kill()
    assert left == []
    assert alive == []


def until_attended(job: Job) -> None:
    """The agent comes back by itself."""
    with job.connect() as hegmd:
        while not any(process.agent for process in hegmd.processes().processes):
            pause()


def orphans(job: Job) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = job.command("adopt")[-1]["orphans"]
    return found


def test_on_disk_it_outlives_a_kill_and_a_stop_and_no_loss_changes(daemon: RunningDaemon) -> None:
    state_dir = daemon.folder / "state"
    with Job(daemon, ENDLESS, "--gpu", "gpu0") as job:
        pid = str(job.process.pid)
        job.steps(10)
        job.operation("suspend", pid)
        assert len(pieces(state_dir)) == 1
        assert job.operation("suspend", pid, "--spill")["phase"] == "suspended"
        assert pieces(state_dir) == []
        daemon.stop(signal.SIGKILL)
        daemon.start()
        until_attended(job)
        job.command("op", "1", "--follow")
        daemon.stop()
        assert len(list((state_dir / "spill").iterdir())) == 1
        daemon.start()
        until_attended(job)
        job.command("op", "1", "--follow")
        assert job.operation("resume", pid, "--to", "gpu1")["phase"] == "done"
        is_as_undisturbed(ENDLESS, job.output())


def test_spilled_its_memory_is_really_free(daemon: RunningDaemon, tmp_path: Path) -> None:
    skip_without(SHARED_MEMORY, 512 * MIB)
    script = tmp_path / "large.py"
    script.write_text(LARGE)
    with Job(daemon, [str(script)]) as job:
        pid = str(job.process.pid)
        job.steps(5)
        (out,) = job.operation("suspend", pid)["processes"]
        shared = os.statvfs(SHARED_MEMORY)
        before = shared.f_bfree * shared.f_frsize
        job.operation("suspend", pid, "--spill")
        shared = os.statvfs(SHARED_MEMORY)
        assert shared.f_bfree * shared.f_frsize - before > 0.5 * out["size_bytes"]  # others use it meanwhile
        held = [os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir()]
        assert not [link for link in held if "hegm-pool" in link], "its agent still has a descriptor"
        job.operation("resume", pid)
        job.steps(5)
        job.process.kill()
        job.process.wait()
        with job.connect() as hegmd:
            while any(process.held_bytes for process in hegmd.processes().processes):
                pause()


@pytest.mark.parametrize("memory", ["named", "nameless"])
def test_a_job_is_adopted_without_its_journal(tmp_path: Path, memory: str) -> None:
    """Named, its bytes are files; nameless, a keeper has them while no daemon is there."""
    (tmp_path / "hegmd.toml").write_text(f'[pool]\nmemory = "{memory}"\n')
    state_dir = tmp_path / "state"
    environ = {"INVOCATION_ID": ""} if "INVOCATION_ID" in os.environ else {}
    with RunningDaemon(tmp_path, "--config", str(tmp_path / "hegmd.toml"), environ=environ) as daemon:
        with Job(daemon, ENDLESS, "--gpu", "gpu0") as job:
            pid = str(job.process.pid)
            job.steps(10)
            job.operation("suspend", pid)
            assert len(keepers(state_dir)) == (memory == "nameless")
            daemon.stop(signal.SIGKILL)
            (state_dir / "operations.journal").unlink()
            daemon.start()
            while len(found := orphans(job)) < 2:
                pause(COMMAND_MS)
            assert {orphan["kind"] for orphan in found} == {"bytes", "process"}
            assert job.operation("adopt", pid, "--to", "gpu1")["phase"] == "done"
            is_as_undisturbed(ENDLESS, job.output())
            for orphan in orphans(job):
                job.command("adopt", "--drop", orphan["name"], "--yes")
        assert orphans(job) == []
        assert pieces(state_dir) == []
        assert still_there(keepers(state_dir), 10) == []


def test_two_daemons_on_one_state_directory_the_second_leaves_everything_alone(daemon: RunningDaemon) -> None:
    with Job(daemon, ENDLESS) as job:
        pid = str(job.process.pid)
        job.steps(10)
        job.operation("suspend", pid)
        before = pieces(daemon.folder / "state")
        second = [word.replace("hegmd.sock", "second.sock") for word in daemon.command()]
        refused = subprocess.run(second, capture_output=True, text=True, check=False, timeout=HANG_S)
        assert refused.returncode != 0
        assert f"another hegmd (pid {daemon.process.pid}) holds" in refused.stderr
        assert pieces(daemon.folder / "state") == before
        assert job.operation("resume", pid)["phase"] == "done"
        job.output()
