"""A training under `hegmctl run --recover` whose process is killed: it continues exactly, or says why it does not."""

from __future__ import annotations

import os
import re
import resource
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

from hegmctl.connection import connect
from hegmd.protocol.recovery import JobRecovery
from tests.e2e.daemon import RunningDaemon
from tests.e2e.handed_job import daemon_with_criu
from tests.e2e.moved_job import BARE, LEAVING, RANKED, SCRIPTS, SLOWLY_MS, MovedJob, Script, by_rank, environment
from tests.e2e.references import output_of
from tests.needs import need_torch
from tests.patience import HANG_S

pytestmark = [pytest.mark.e2e]
need_torch()

FAILING = str(SCRIPTS / "failing.py")
MIB = 1 << 20


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[RunningDaemon]:
    with RunningDaemon(tmp_path) as running:
        yield running


class RecoveredJob(MovedJob):
    """The training under its supervisor, which goes no faster than it is read."""

    more = BARE
    script = LEAVING

    def __init__(self, daemon: RunningDaemon, folder: Path, *options: str, gpu: str = "gpu0", **more: str) -> None:
        self.folder = folder
        self.more = {**BARE, **more}
        words = [sys.executable, "-m", "hegmctl", "run", "--recover=0.1s", "--gpu", gpu, *options]
        Script.__init__(self, [*words, "--", sys.executable, self.script], daemon.socket_path, folder)
        self._daemon = daemon
        self._gpu = 0

    def pids(self) -> list[int]:
        """The pid of each start."""
        return [int(line.split()[0]) for line in (self.folder / "starts").read_text().splitlines() if line]

    def until(self, is_so: Callable[[JobRecovery], bool], *, ended: bool = False) -> JobRecovery:
        """Read until that is true of the job's recovery; return the record. `ended`: it may be over before."""
        with connect(str(self._daemon.socket_path)) as hegmd:
            while True:
                is_over = not ended and self.process.poll() is not None
                found = hegmd.recovery().jobs
                if found and is_so(found[0]):
                    return found[0]
                assert not is_over, (found, self._error_text())
                self._read_on(SLOWLY_MS)

    def stopped_with_two_slots(self) -> list[tuple[int, int]]:
        """Stop its process while it writes neither of its slots; these, with their generations."""
        while True:
            os.kill(self.pids()[0], signal.SIGSTOP)
            slots = _slots_of(self.folder)
            if all(generation for _slot, generation in slots):
                return slots
            os.kill(self.pids()[0], signal.SIGCONT)
            self._read_on(SLOWLY_MS)

    def read_to_the_end(self) -> list[str]:
        """Return every line of a step, once no process has its output open."""
        while self._read():
            pass
        return self._steps()

    def errors(self) -> str:
        """Return its standard error."""
        return self._error_text()


def _has_two(job: JobRecovery) -> bool:
    return job.state == "protected" and sum(slot.step is not None for slot in job.slots) == 2


def _flip_a_bit(folder: Path, slot: int) -> None:
    """In the tensors of that slot of the only job."""
    identity = (folder / "state" / "identity").read_text()[:16]
    (path,) = Path(f"/dev/shm/hegmd-{os.geteuid()}-{identity}").glob(f"hegm-pool-j1-0.{slot}-*")
    with path.open("r+b") as file:
        data = bytearray(file.read())
        at = data.rindex(b"HEGMSLOT")
        place = max(index for index in range(0, at, 4096) if data[index : index + 4096].strip(b"\0"))
        data[place] ^= 1
        file.seek(0)
        file.write(data)


def test_a_killed_training_continues_though_its_daemon_was_killed_and_its_newest_snapshot_damaged(
    daemon: RunningDaemon, tmp_path: Path, undisturbed_leaving: list[str]
) -> None:
    """Every loss equals the undisturbed run's, those of the repeated steps too."""
    with RecoveredJob(daemon, tmp_path) as job:
        job.until(_has_two)
        daemon.stop(signal.SIGKILL)
        newest = max(job.stopped_with_two_slots(), key=lambda slot: slot[1])
        os.kill(job.pids()[0], signal.SIGKILL)
        _flip_a_bit(tmp_path, newest[0])
        daemon.start()
        job.until(lambda view: view.recoveries[-1:] != () and view.recoveries[-1].result == "recovered")
        steps = job.steps()
        assert list(dict.fromkeys(steps)) == undisturbed_leaving
        assert set(steps) == set(undisturbed_leaving)
        assert len(job.pids()) == 3
        assert "do not match their checksums" in job.errors()
    with connect(str(daemon.socket_path)) as hegmd:
        while hegmd.recovery().jobs:  # its memory is freed once the daemon sees that its supervisor has exited
            select.poll().poll(SLOWLY_MS)


def test_an_image_and_a_snapshot_that_is_due_share_one_pause_from_which_the_job_is_recovered(tmp_path: Path) -> None:
    """The daemon is killed at the next image, and then the job."""
    folder, images, notes = tmp_path / "job", tmp_path / "images", tmp_path / "notes"
    folder.mkdir()
    every = ("--checkpoint-every", "1", "--keep", "2", "--dir", str(images), "--name", "train")
    run = [sys.executable, "-m", "hegmctl", "run", "--recover=0.1s", "--gpu", "gpu0", "--no-daemon-start", *every, "--"]

    def shared() -> list[int]:
        """The boundaries at which an order to park has taken a snapshot."""
        log = " ".join(
            line.split(": ", 1)[1]
            for line in notes.read_text().splitlines()
            if re.search(": (order|parked at|snapshot: looked) ", f"{line} ") and " count" not in line
        )
        return list(map(int, re.findall(r"order \d+: park parked at boundary (\d+) snapshot: looked", log)))

    def steps() -> list[str]:
        return [line for line in (folder / "out").read_text().splitlines() if line.startswith("step")]

    with daemon_with_criu(tmp_path) as daemon, ExitStack() as held:
        out = held.enter_context((folder / "out").open("wb"))
        more = {"HEGM_AGENT_DEBUG": str(notes), "STEPS": "100000", "PACE_S": "0.02"}
        environ = {**environment(daemon.socket_path), **BARE, **more}
        job = held.enter_context(
            subprocess.Popen(
                [*run, sys.executable, FAILING], env=environ, cwd=folder, stdout=out, start_new_session=True
            )
        )
        held.callback(job.kill)

        def until(is_so: Callable[[], bool]) -> None:
            """Poll: nothing reports an image or a snapshot."""
            while not is_so():
                assert job.poll() is None, daemon.log_text()
                select.poll().poll(SLOWLY_MS)

        def recoveries() -> Sequence[JobRecovery]:
            with connect(str(daemon.socket_path)) as hegmd:
                return hegmd.recovery().jobs

        until(lambda: images.exists() and any(not name.startswith(".") for name in os.listdir(images)))
        until(lambda: any(map(_has_two, recoveries())) and bool(shared()))
        before = len(shared())
        until(lambda: len(shared()) > before)
        daemon.stop(signal.SIGKILL)
        boundary = shared()[-1]
        daemon.start()
        os.kill(int((folder / "starts").read_text().split()[0]), signal.SIGKILL)
        until(lambda: any(attempt.result == "recovered" for job in recoveries() for attempt in job.recoveries))
        assert (recoveries()[0].recoveries[0].from_step or 0) >= boundary
        last = int(steps()[-1].split()[2]) + 50
        (tmp_path / "ends-at").write_text(f"{last}")
        (tmp_path / "ends-at").rename(folder / "ends-at")
        assert job.wait(HANG_S) == 0
    assert len((folder / "starts").read_text().splitlines()) == 2
    alone = output_of([FAILING], {**environment(None), **BARE, "STEPS": f"{last}", "PACE_S": "0"}, tmp_path)
    assert list(dict.fromkeys(steps())) == [line for line in alone.splitlines() if line.startswith("step")]


def _slots_of(folder: Path) -> list[tuple[int, int]]:
    """Each slot of the only job with its generation, as a daemon that starts reads it."""
    from hegmd.protocol.slots import RECORD_BYTES, unpacked

    identity = (folder / "state" / "identity").read_text()[:16]
    found: list[tuple[int, int]] = []
    for slot in (0, 1):
        (path,) = Path(f"/dev/shm/hegmd-{os.geteuid()}-{identity}").glob(f"hegm-pool-j1-0.{slot}-*")
        record = unpacked(path.read_bytes()[-RECORD_BYTES:])
        found.append((slot, 0 if record is None else record.generation))
    return found


def test_a_training_that_fails_again_and_again_ends_with_its_own_status_and_keeps_its_state(
    daemon: RunningDaemon, tmp_path: Path, undisturbed_leaving: list[str]
) -> None:
    """Another `hegmctl run` continues from that."""
    with RecoveredJob(daemon, tmp_path, "--max-recoveries", "1", FAILS_AT="60") as job:
        job.until(lambda view: view.state == "protected")
        job.read_to_the_end()
        assert job.process.wait(HANG_S) == 7
        assert len(job.pids()) == 2
        assert "it was recovered 1 times, as often as --max-recoveries allows" in job.errors()
        assert "hegmctl run --recover --resume j1" in job.errors()
        kept = job.until(lambda view: view.state == "kept", ended=True)
        assert kept.held_bytes > 0
        assert kept.recoveries[-1].result == "given up"
        before = job.read_to_the_end()
    with RecoveredJob(daemon, tmp_path, "--resume", "j1") as again:
        steps = again.steps()
        assert list(dict.fromkeys([*before, *steps])) == undisturbed_leaving
        assert steps[0] != undisturbed_leaving[0]


class EditedJob(RecoveredJob):
    """A training whose script is in the folder."""

    def __init__(self, daemon: RunningDaemon, folder: Path, *options: str) -> None:
        self.script = str(folder / "edited.py")
        super().__init__(daemon, folder, *options)


def test_a_script_that_was_edited_is_reported_before_the_failure_and_its_snapshots_are_kept(
    daemon: RunningDaemon, tmp_path: Path, undisturbed_leaving: list[str]
) -> None:
    """No message named the edit, and the snapshots were given up as unusable, also once the script was put back."""
    script, text = tmp_path / "edited.py", Path(LEAVING).read_text()
    script.write_text(text)
    with EditedJob(daemon, tmp_path) as job:
        job.until(_has_two)
        script.write_text(f"# A line above moves all others.\n{text}")
        job.until(lambda view: view.state == "unprotected" and "edited.py was edited after" in (view.why or ""))
        os.kill(job.pids()[0], signal.SIGKILL)
        before = job.read_to_the_end()
        job.process.wait(HANG_S)
        assert "edited.py was edited after the state was saved: put the file back as it was" in job.errors()
        assert "hegmctl run --recover --resume j1" in job.errors()
        assert len(job.pids()) == 2
    script.write_text(text)
    with EditedJob(daemon, tmp_path, "--resume", "j1") as again:
        assert list(dict.fromkeys([*before, *again.steps()])) == undisturbed_leaving


def test_a_training_that_hangs_is_killed_and_recovered_on_a_healthy_gpu(
    daemon: RunningDaemon, tmp_path: Path, undisturbed_leaving: list[str]
) -> None:
    """Its GPU is failing meanwhile, so that it continues on the other one. No step is in its log twice."""
    options = "--hang-limit", "10s", "--truncate-outputs"  # a busy machine may take some for a step
    with RecoveredJob(daemon, tmp_path, *options, HANGS_AT="9", LOG="log") as job:
        job.until(_has_two)
        job.answer("simulate", "fault", "gpu0", "ecc")
        recovery = job.until(lambda view: view.recoveries[-1:] != () and view.recoveries[-1].result == "recovered")
        assert "completed no step for" in recovery.recoveries[0].why
        assert f"{LEAVING}:" in (recovery.recoveries[0].stacks or "")
        assert recovery.recoveries[0].gpus == ("gpu1",)
        assert list(dict.fromkeys(job.steps())) == undisturbed_leaving
        assert len(job.pids()) == 2
        assert (tmp_path / "log").read_text().splitlines() == undisturbed_leaving


def test_a_training_leaves_a_failing_gpu_live_and_is_recovered_from_one_that_is_gone(
    tmp_path: Path, undisturbed_leaving: list[str]
) -> None:
    """It is not started again to leave the first, and no signal but hegmd's ends it on the second."""
    with (
        RunningDaemon(tmp_path).configured('[evacuate]\non = ["uncorrected"]\n') as daemon,
        RecoveredJob(daemon, tmp_path) as job,
        connect(str(daemon.socket_path)) as hegmd,
    ):
        job.until(_has_two)
        job.answer("simulate", "fault", "gpu0", "ecc")
        job.answer("gpus")  # hegmd looks now
        job.until(lambda _: any(event.kind == "gpu.evacuated" for event in hegmd.events()))
        assert len(job.pids()) == 1
        newest = job.until(_has_two).slots
        job.until(lambda view: _has_two(view) and view.slots != newest)
        job.answer("simulate", "fault", "gpu0", "none")
        job.answer("simulate", "fault", "gpu1", "xid79")
        job.answer("gpus")
        recovery = job.until(lambda view: view.recoveries[-1:] != () and view.recoveries[-1].result == "recovered")
        assert "was on gpu1, which is gone (the driver reported XID 79" in recovery.recoveries[0].why
        assert recovery.recoveries[0].gpus == ("gpu0",)
        assert list(dict.fromkeys(job.steps())) == undisturbed_leaving
        assert len(job.pids()) == 2


def test_a_job_without_pool_memory_is_unprotected_and_reports_that_once(tmp_path: Path) -> None:
    with (
        RunningDaemon(tmp_path).configured("[pool]\nbudget_bytes = 1048576\n") as daemon,
        RecoveredJob(daemon, tmp_path) as job,
    ):
        recovery = job.until(lambda view: view.state == "unprotected")
        assert recovery.why is not None
        with connect(str(daemon.socket_path)) as hegmd:
            assert 'hegmd_recovery_jobs{state="unprotected"} 1' in hegmd.metrics().text
        assert "the pool may hold 1 MiB" in recovery.why
        os.kill(job.pids()[0], signal.SIGKILL)
        job.read_to_the_end()
        assert job.process.wait(HANG_S) == -signal.SIGKILL
        assert job.errors().count("is not protected") == 1
        with connect(str(daemon.socket_path)) as hegmd:
            assert len([event for event in hegmd.events() if event.kind == "job.unprotected"]) == 1


def test_a_job_with_a_limit_on_its_files_was_said_to_be_starting_and_parked_all_the_time(
    daemon: RunningDaemon, tmp_path: Path
) -> None:
    """The limit of `ulimit -f` is for memory with a descriptor too."""
    with RecoveredJob(daemon, tmp_path) as job:
        job.until(_has_two)
        resource.prlimit(job.pids()[0], resource.RLIMIT_FSIZE, (4096, 4096))
        job.until(lambda view: view.state == "unprotected" and "larger than the files" in (view.why or ""))


@pytest.fixture
def memory_cgroup() -> Iterator[Path]:
    """A memory cgroup of 700 MiB below our own, version 1 or 2. Skips the test where none can be made."""
    own = dict(line.strip().split(":")[1:] for line in Path("/proc/self/cgroup").read_text().splitlines())
    old = "memory" in own
    parent = Path(f"/sys/fs/cgroup{'/memory' * old}{own['memory' if old else '']}")
    folder = parent / f"hegm-oom-{os.getpid()}"
    try:
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"no memory cgroup can be made in {parent}: {error.strerror}")
    try:
        try:
            (folder / ("memory.limit_in_bytes" if old else "memory.max")).write_text(str(700 * MIB))
        except OSError as error:
            pytest.skip(f"{folder} takes no limit of memory: {error.strerror}")
        yield folder
    finally:
        while (folder / "cgroup.procs").read_text():
            select.poll().poll(SLOWLY_MS)
        folder.rmdir()


class MemoryHungryJob(RecoveredJob):
    """It takes memory without end at its 200th step, in that cgroup."""

    def __init__(self, daemon: RunningDaemon, folder: Path, cgroup: Path) -> None:
        self.folder = folder
        self.more = {**BARE, "FAILS": "oom forward 0 200", "STEPS": "220", "PACE_S": "0"}
        words = [sys.executable, "-m", "hegmctl", "run", "--recover=0.1s", "--gpu", "gpu0", "--", "sh", "-c"]
        enter = ['echo $$ > "$0/cgroup.procs"; exec "$@"', str(cgroup), sys.executable, FAILING]
        Script.__init__(self, [*words, *enter], daemon.socket_path, folder)
        self._daemon = daemon
        self._gpu = 0


def test_a_training_that_the_kernel_kills_for_its_memory_continues(
    daemon: RunningDaemon, tmp_path: Path, memory_cgroup: Path
) -> None:
    """Its loop is a `while` whose body begins with the loop over the loader: it was taken for a second training."""
    (tmp_path / "alone").mkdir()
    quick = {**os.environ, "STEPS": "220", "PACE_S": "0"}
    alone = [line for line in output_of([FAILING], quick, tmp_path / "alone").splitlines() if line.startswith("step")]
    with MemoryHungryJob(daemon, tmp_path, memory_cgroup) as job:
        job.until(_has_two)
        recovery = job.until(lambda view: view.recoveries[-1:] != () and view.recoveries[-1].result == "recovered")
        assert recovery.recoveries[0].why == "ended by signal 9"
        assert (recovery.recoveries[0].from_step or 0) > 0
        assert list(dict.fromkeys(job.steps())) == alone
        counts = next(path for name in ("oom_control", "events") if (path := memory_cgroup / f"memory.{name}").exists())
        assert "oom_kill 1" in counts.read_text()


class RecoveredRanks(RecoveredJob):
    """Two ranks of torchrun under one supervisor."""

    forks = False

    def __init__(self, daemon: RunningDaemon, folder: Path) -> None:
        self.folder = folder
        words = [sys.executable, "-m", "hegmctl", "run", "--recover=0.1s", "--gpu", "gpu0", "--"]
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        Script.__init__(self, [*words, sys.executable, *launcher, RANKED], daemon.socket_path, folder)
        self._daemon = daemon
        self._gpu = 0


@pytest.mark.xdist_group("ranks")
def test_two_ranks_continue_from_one_step_when_one_of_them_is_killed(
    daemon: RunningDaemon, tmp_path: Path, undisturbed_ranks: dict[str, list[str]]
) -> None:
    with RecoveredRanks(daemon, tmp_path) as job:
        recovery = job.until(lambda view: sum(slot.step is not None for slot in view.slots) == 4)
        assert {slot.rank for slot in recovery.slots} == {0, 1}
        os.kill(job.pids()[1], signal.SIGKILL)
        steps_by_rank = by_rank(job.steps())
        assert {rank: list(dict.fromkeys(steps)) for rank, steps in steps_by_rank.items()} == undisturbed_ranks
        assert len(job.pids()) == 4
