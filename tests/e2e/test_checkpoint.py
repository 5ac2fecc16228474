"""Trainings into images and back, by command, with real CRIU: not one loss different, and nothing lost on the way."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from hegmd.errors import BUSY, TIMEOUT
from hegmd.node.processes.process_set import population_of
from tests.chaos.halts import BEGUN, RECORDED, UNRECORDED, Halts, Trap
from tests.e2e.daemon import RunningDaemon
from tests.e2e.handed_job import ENDS_WITHIN_S, ImageJob, daemon_with_criu, losses_alone
from tests.e2e.mounting import why_no_mounts
from tests.e2e.references import once_for_all
from tests.needs import need_torch
from tests.stubs.build import build_stub
from tests.wide import telling

pytestmark = [pytest.mark.e2e, pytest.mark.usefixtures("preloaded_bare")]
need_torch()


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[RunningDaemon]:
    with daemon_with_criu(tmp_path) as running:
        yield running


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory, preloaded_bare: None) -> list[str]:
    """The output of an undisturbed run."""
    return once_for_all(tmp_path_factory, "handed", lambda folder: losses_alone(folder / "job"))


@pytest.mark.xdist_group("large images")
def test_a_restored_job_continues_on_another_gpu_with_equal_losses(daemon: RunningDaemon, tmp_path: Path) -> None:
    """Its loader's workers, its thread, its child and its open file with it; what it says goes where it is led."""
    image, log, expected = tmp_path / "image", tmp_path / "log", losses_alone(tmp_path / "alone", workers=2)
    log.write_text("before\n")
    with ImageJob(tmp_path / "job", daemon.socket_path, workers=2, piped=True, forks=False) as job:
        job.await_steps(20)
        done = job.operation("checkpoint", str(job.pid), str(image))
        assert (done["phase"], done["processes"][0]["state"]) == ("done", "gone")
        assert (job.process.wait(ENDS_WITHIN_S), len(job.losses) < len(expected)) == (-9, True)
        assert f"into the image {image}" in (named := job.command("jobs", "--all")["jobs"][-1])["end"]
        plan = job.command("restore", "--dry-run", str(image))["plan"]
        assert plan["kind"] == "restore"
        assert [line for line in plan["hazards"] if "its stdout is not connected" in line]
        refused = job.command("restore", str(image), "--stderr", str(log), status=6)["error"]
        assert "its stderr cannot be redirected" in refused["message"].replace("the job's", "its")
        late = job.command("restore", str(image), "--timeout", "0.05", status=TIMEOUT.exit_status)["error"]
        assert "only its image is left" in late["message"]
        assert job.pid not in population_of([job.pid]).start_ticks
        back = job.operation("restore", str(image), "--to", "gpu1", "--stdout", str(log), "--timeout", "5min")
        assert (back["kind"], back["phase"], back["processes"][0]["gpu"]) == ("restore", "done", "gpu1")
        assert job.command("inspect", str(job.pid))["job"]["id"] == named["id"], "a restored job is the same job"
        assert job.output() == expected
        assert log.read_text() == f"before\n{len(expected) - 1} steps\n"


def test_a_job_left_running_continues_and_its_image_resumes_at_the_same_step(
    daemon: RunningDaemon, tmp_path: Path, expected: list[str]
) -> None:
    image = tmp_path / "image"
    with ImageJob(tmp_path / "job", daemon.socket_path) as job:
        job.await_steps(20)
        words = ("checkpoint", "--leave-running", str(job.pid), str(image))
        notes = job.command(*words, "--dry-run")["plan"]["hazards"]
        (estimated_mib,) = (int(line.split()[4]) for line in notes if "the image takes about" in line)
        done = job.operation(*words)
        assert (done["phase"], done["processes"][0]["gpu"]) == ("done", "gpu0")
        assert 0.5 < estimated_mib / (job.command("images", "ls", str(image))["images"][0]["size_bytes"] >> 20) < 2
        job.await_steps(len(job.losses) + 1)
        # It was refused because the job still runs, and had cut the job's output back before.
        job.command("restore", str(image), "--truncate-outputs", status=6)
        assert job.output() == expected
        job.process.wait(ENDS_WITHIN_S)
        plan = job.command("restore", "--dry-run", str(image))["plan"]
        assert any("losses has" in hazard for hazard in plan["hazards"])
        cut = job.command("restore", "--dry-run", "--truncate-outputs", str(image))["plan"]["hazards"]
        assert any(line.endswith("hegmctl truncates it to that size") for line in cut)
        assert job.losses == expected, "a dry run has cut something"
        refused = job.command("restore", str(image), "--truncate-outputs", "--stdout", str(tmp_path / "log"), status=6)
        assert "restore with --truncate-outputs" not in refused["error"]["hint"]
        job.operation("restore", str(image), "--truncate-outputs")
        assert job.output() == expected


def test_it_is_restored_in_a_fresh_pid_namespace_under_another_daemon(
    daemon: RunningDaemon, tmp_path: Path, expected: list[str]
) -> None:
    """As on another node: its process numbers are free there, and the socket and the state are others."""
    image, other = tmp_path / "image", tmp_path / "other"
    other.mkdir()
    with ImageJob(tmp_path / "job", daemon.socket_path) as job:
        job.await_steps(20)
        job.operation("checkpoint", "--leave-running", str(job.pid), str(image))
        losses = len(job.losses)
        assert losses < len(expected)
    (tmp_path / "job" / "slow").unlink()
    daemon.stop()
    program = [sys.executable, "-m", "tests.e2e.second_node", str(other), str(image), str(job.pid)]
    ran = subprocess.run(
        ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child", *program],
        env=job.environ,
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert job.losses == expected


def test_an_unwritable_target_is_refused_before_the_job_stops(daemon: RunningDaemon, tmp_path: Path) -> None:
    (tmp_path / "image").mkdir()
    (tmp_path / "image" / "mine").touch()
    with ImageJob(tmp_path / "job", daemon.socket_path) as job:
        job.await_steps(20)
        refused = job.command("checkpoint", str(job.pid), str(tmp_path / "image"), status=None)
        assert str(tmp_path / "image") in refused["error"]["message"], refused
        assert job.command("ops")["operations"] == []


def test_one_of_two_restores_of_an_image_at_once_is_refused(
    daemon: RunningDaemon, tmp_path: Path, expected: list[str]
) -> None:
    image = tmp_path / "image"
    with ImageJob(tmp_path / "job", daemon.socket_path) as job:
        job.await_steps(20)
        job.operation("checkpoint", str(job.pid), str(image))
        job.process.wait(ENDS_WITHIN_S)
        words = [sys.executable, "-m", "hegmctl", "restore", str(image)]
        both = [subprocess.Popen(words, env=job.environ, stderr=subprocess.PIPE, text=True) for _ in range(2)]
        output = [one.communicate(timeout=ENDS_WITHIN_S)[1] for one in both]
        assert sorted(one.returncode == 0 for one in both) == [False, True], output
        assert job.output() == expected


# ---- kills
# ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def halts(tmp_path: Path) -> Iterator[Halts]:
    with Halts(tmp_path / "halt.sock") as made:
        yield made


@pytest.fixture
def halted(tmp_path: Path, halts: Halts) -> Iterator[RunningDaemon]:
    preload = {"LD_PRELOAD": str(build_stub("halt", tmp_path)), "HEGM_TEST_HALT": str(halts.path)}
    with daemon_with_criu(tmp_path, **preload) as running:
        yield running


@pytest.mark.skipif(why_no_mounts() is not None, reason=why_no_mounts() or "")
def test_on_a_disk_that_fills_up_the_job_continues_and_nothing_is_left(
    halted: RunningDaemon, halts: Halts, tmp_path: Path, expected: list[str]
) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1g", "none", str(disk)], check=True)
    try:
        with ImageJob(tmp_path / "job", halted.socket_path) as job:
            job.await_steps(20)
            halts.set(Trap(job.pid, "handing", RECORDED))
            words = [sys.executable, "-m", "hegmctl", "checkpoint", str(job.pid), str(disk / "image")]
            with subprocess.Popen(words, env=job.environ, stderr=subprocess.DEVNULL) as client:
                halts.wait(ENDS_WITHIN_S)
                subprocess.run(["mount", "-o", "remount,size=4m", str(disk)], check=True)
                halts.go()
                assert client.wait(ENDS_WITHIN_S) != 0
            assert job.operation("op", "1", status=None)["phase"] == "rolled-back"
            assert os.listdir(disk) == []
            assert job.output() == expected
    finally:
        subprocess.run(["umount", str(disk)], check=True)


# Nothing of the image is there, something is, it is whole, the journal says so; and whether the job ends by it.
CUTS = [("handing", moment, ends) for moment, ends in ((RECORDED, False), (BEGUN, None), (UNRECORDED, True))]
CUTS.append(("ending", RECORDED, True))
# The first and the last are also among the kills of test_chaos.py, where there is a job already: half the time.


@pytest.mark.parametrize(("phase", "moment", "ended"), telling(CUTS, CUTS[1:2]))
def test_a_daemon_killed_while_it_writes_an_image_leaves_a_complete_one_or_a_running_job(
    halted: RunningDaemon,
    halts: Halts,
    tmp_path: Path,
    expected: list[str],
    phase: str,
    moment: str,
    ended: bool | None,
) -> None:
    image = tmp_path / "image"
    with ImageJob(tmp_path / "job", halted.socket_path) as job:
        job.await_steps(20)
        halts.set(Trap(job.pid, phase, moment))
        words = [sys.executable, "-m", "hegmctl", "checkpoint", str(job.pid), str(image)]
        with subprocess.Popen(words, env=job.environ, stderr=subprocess.DEVNULL) as client:
            halts.wait(ENDS_WITHIN_S)
            if moment == BEGUN:
                halts.go()
                job.await_image_begun(image)
            halted.stop(signal.SIGKILL)
            if moment != BEGUN:
                halts.forget()
            client.wait(ENDS_WITHIN_S)
        halted.start()
        op = job.operation("op", "1", "--follow", status=None)
        assert (op["phase"] == "done") == image.is_dir() == (job.pid not in population_of([job.pid]).start_ticks)
        if ended is not None:
            assert image.is_dir() is ended
        assert [name for name in os.listdir(tmp_path) if "hegm-new" in name] == []
        if image.is_dir():
            job.process.wait(ENDS_WITHIN_S)
            job.operation("restore", str(image))
        assert job.output() == expected


# When a daemon is killed whose job has continued: none of its bytes are in the image, some may be, or it is whole.
HELD, WRITING, WHOLE = "held", "writing", "whole"


@pytest.mark.parametrize("when", telling([(HELD,), (WRITING,), (WHOLE,)], [(WRITING,)]))
def test_a_job_left_running_is_not_parked_while_its_image_is_written(
    halted: RunningDaemon, halts: Halts, tmp_path: Path, expected: list[str], when: str
) -> None:
    """The job trains before the daemon writes its bytes, and also if the daemon is killed; the image is then whole, or
    nothing is left of it.
    """
    image = tmp_path / "image"
    with ImageJob(tmp_path / "job", halted.socket_path) as job:
        job.await_steps(20)
        halts.set(Trap(job.pid, "sealing", UNRECORDED if when == WHOLE else RECORDED))
        words = [sys.executable, "-m", "hegmctl", "checkpoint", "--leave-running", str(job.pid), str(image)]
        with subprocess.Popen(words, env=job.environ, stderr=subprocess.DEVNULL) as client:
            halts.wait(ENDS_WITHIN_S)
            job.await_steps(len(job.losses) + 2)
            assert image.exists() is (when == WHOLE)
            assert when == WHOLE or os.listdir(_unnamed(image) / "bytes") == []
            if when == WHOLE:  # as far as the daemon has reported, it is still being written
                pid = str(job.pid)
                for other in (("migrate", pid, "--to", "gpu1"), ("checkpoint", "--leave-running", pid, f"{image}-2")):
                    refused = job.command(*other, status=BUSY.exit_status)["error"]
                    assert f"the image of process {pid} is being written by operation" in refused["message"]
            if when == WRITING:
                for writer in _writers(halted):
                    writer.suspend()
                halts.go()
            halted.stop(signal.SIGKILL)
            if when != WRITING:
                halts.forget()
            client.wait(ENDS_WITHIN_S)
        halted.start()
        op = job.operation("op", "1", "--follow", status=None)
        assert (op["phase"], image.is_dir()) == (("done", True) if when == WHOLE else ("rolled-back", False))
        assert [name for name in os.listdir(tmp_path) if "hegm-new" in name] == []
        assert 'hegmd_pool_bytes{what="memory"} 0\n' in _metrics(job)
        assert job.output() == expected


def _unnamed(image: Path) -> Path:
    (unnamed,) = image.parent.glob(f".{image.name}.hegm-new-*")
    return unnamed


def _metrics(job: ImageJob) -> str:
    words = [sys.executable, "-m", "hegmctl", "metrics"]
    return subprocess.run(words, env=job.environ, capture_output=True, text=True, check=True).stdout


def _writers(daemon: RunningDaemon) -> list[psutil.Process]:
    children = psutil.Process(daemon.process.pid).children()
    return [child for child in children if "hegmd.images.files.child" in child.cmdline()]


def _kill_writers(daemon: RunningDaemon, _disk: Path) -> None:
    for writer in _writers(daemon):
        writer.kill()


def _fill(_daemon: RunningDaemon, disk: Path) -> None:
    status = os.statvfs(disk)
    with (disk / "somebody else's").open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, status.f_bavail * status.f_frsize)


@pytest.mark.skipif(why_no_mounts() is not None, reason=why_no_mounts() or "")
def test_an_image_that_cannot_be_completed_is_removed_and_reported_while_its_job_trains(
    halted: RunningDaemon, halts: Halts, tmp_path: Path, expected: list[str]
) -> None:
    """The disk has filled up since the job resumed, or the writing process is killed. The next image succeeds."""
    disk = tmp_path / "disk"
    disk.mkdir()
    harms = ((_fill, "No space left on device"), (_kill_writers, "the image writer"))
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2g", "none", str(disk)], check=True)
    try:
        with ImageJob(tmp_path / "job", halted.socket_path) as job:
            job.await_steps(20)
            checkpoint = ("checkpoint", "--leave-running", str(job.pid), str(disk / "image"))
            for number, (harm, why) in enumerate(harms, 1):
                halts.set(Trap(job.pid, "sealing", RECORDED))
                words = [sys.executable, "-m", "hegmctl", *checkpoint]
                with subprocess.Popen(words, env=job.environ, stderr=subprocess.DEVNULL) as client:
                    halts.wait(ENDS_WITHIN_S)
                    harm(halted, disk)
                    halts.go()
                    assert client.wait(ENDS_WITHIN_S) != 0
                op = job.operation("op", str(number), status=None)
                assert (op["phase"], op["processes"][0]["state"]) == ("rolled-back", "running")
                assert f"the image in {disk}/image was not written and is removed" in op["failure"]["message"]
                assert why in op["failure"]["message"]
                assert [name for name in os.listdir(disk) if "image" in name] == []
                (disk / "somebody else's").unlink(missing_ok=True)
            assert job.operation(*checkpoint)["phase"] == "done"
            assert 'hegmd_pool_bytes{what="memory"} 0\n' in _metrics(job)
            assert job.output() == expected
            job.process.wait(ENDS_WITHIN_S)
            job.operation("restore", str(disk / "image"), "--truncate-outputs")
            assert job.output() == expected
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_a_daemon_killed_within_a_restore_leaves_a_job_or_only_the_image(
    daemon: RunningDaemon, tmp_path: Path, expected: list[str]
) -> None:
    """No operation owned the restored processes: they were stopped, their bytes were held, and the image could not be
    restored again.
    """
    image = tmp_path / "image"
    with ImageJob(tmp_path / "job", daemon.socket_path, forks=False) as job:
        job.await_steps(20)
        job.operation("checkpoint", str(job.pid), str(image))
        job.process.wait(ENDS_WITHIN_S)
        words = [sys.executable, "-m", "hegmctl", "restore", str(image)]
        with subprocess.Popen(words, env=job.environ, stderr=subprocess.DEVNULL) as client:
            job.await_revived()
            daemon.stop(signal.SIGKILL)
            client.wait(ENDS_WITHIN_S)
        daemon.start()
        began = "2" in {op["id"] for op in job.command("ops")["operations"]}
        assert began == (job.pid in population_of([job.pid]).start_ticks)
        assert job.command("adopt")["orphans"] == []
        if not began:
            job.operation("restore", str(image))
        else:
            ended = job.operation("op", "2", "--follow", status=None)
            if ended["phase"] == "suspended":
                job.operation("resume", str(job.pid))
        assert job.output() == expected


def test_a_killed_writer_makes_the_job_resume(daemon: RunningDaemon, tmp_path: Path, expected: list[str]) -> None:
    image = tmp_path / "image"
    with ImageJob(tmp_path / "job", daemon.socket_path) as job:
        job.await_steps(20)
        words = [sys.executable, "-m", "hegmctl", "checkpoint", str(job.pid), str(image)]
        with subprocess.Popen(words, env=job.environ, stderr=subprocess.DEVNULL) as client:
            job.await_image_begun(image)
            _kill_writers(daemon, image)
            assert client.wait(ENDS_WITHIN_S) != 0
        assert not image.exists()
        assert job.output() == expected
