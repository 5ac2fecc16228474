"""Issue 16, outcome 1: ranks of DDP, FSDP2, tensor parallel, a pipeline and a grid, with several groups of gloo.

They are suspended, resumed elsewhere, have their GPUs exchanged, go into images and come back: no loss differs.
"""

from __future__ import annotations

import signal
from pathlib import Path
from time import monotonic

import pytest

from hegmctl.connection import connect
from hegmd.node.processes.process_set import end_all, population_of
from tests.e2e.agented import SCRIPTS, undisturbed
from tests.e2e.daemon import RunningDaemon
from tests.e2e.handed_job import ENDS_WITHIN_S, ImageJob, daemon_with_criu
from tests.looks import COMMAND_MS, pause
from tests.needs import need_torch
from tests.wide import telling

pytestmark = [pytest.mark.e2e, pytest.mark.usefixtures("preloaded"), pytest.mark.xdist_group("ranks")]
need_torch()

SCRIPT = str(SCRIPTS / "rank_kinds.py")
ALONE = str(Path(__file__).with_name("ranks_alone.py"))
#: Each kind with its number of ranks, and how it makes its groups.
KINDS = [
    ("ddp", 2, "evaluates"),
    ("fsdp", 2, "groups evaluates"),
    ("fsdp", 2, "eager both"),
    ("tensor", 2, "both"),
    ("tensor", 2, "eager groups"),
    ("pipeline", 2, "groups"),
    ("pipeline", 2, "eager both"),
    ("pipeline", 3, "groups"),
    ("pipeline", 4, "eager"),
    ("pipeline", 3, "fed"),
    ("grid", 4, "groups both"),
    ("grid", 4, "eager"),
    ("chain", 3, "groups"),
    ("ddp", 4, "averaged recomputed"),
    ("ddp", 4, "recurrent"),
]


@pytest.mark.parametrize(
    ("kind", "ranks", "words"),
    telling(KINDS, [("fsdp", 2, "groups evaluates"), ("pipeline", 3, "fed"), ("chain", 3, "groups")]),
)
def test_ranks_of_each_kind_are_moved_and_written_into_an_image(
    tmp_path: Path, kind: str, ranks: int, words: str
) -> None:
    out, image = tmp_path / "out", tmp_path / "image"
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
    there, back = (",".join(f"gpu{(rank + first) % 2}" for rank in range(ranks)) for first in range(2))
    script = [*launcher, SCRIPT, kind, str(out), *words.split()]
    with daemon_with_criu(tmp_path) as daemon, ImageJob(tmp_path / "job", daemon.socket_path, script=script) as job:
        pid = str(_pids(job, ranks)[0])
        _await_steps(job, out, ranks, 3)
        assert job.operation("suspend", pid)["phase"] == "suspended"
        assert _places(job.operation("resume", pid, "--to", there)) == there
        _await_steps(job, out, ranks, 2)
        assert _places(job.operation("migrate", pid, "--to", back)) == back
        assert job.operation("checkpoint", pid, str(image))["phase"] == "done"
        job.process.wait(ENDS_WITHIN_S)
        assert _places(job.operation("restore", str(image), "--to", there)) == there
        _await_steps(job, out, ranks, 2)
        _end(job, out)
    losses = _losses(out, ranks)
    steps = len(losses[0])
    undisturbed([ALONE, str(ranks), SCRIPT, kind, str(tmp_path / "expected"), str(steps), *words.split()])
    assert losses == _losses(tmp_path / "expected", ranks)


def test_ranks_go_into_images_with_their_launcher_and_its_store(tmp_path: Path) -> None:
    """Their launcher's agent stayed connected, and its store had io_uring: no job of torchrun's could be dumped.

    First they are left running, then they end with the image; they come back from both.
    """
    script, out = str(SCRIPTS / "ranks.py"), tmp_path / "out"
    first, second = str(tmp_path / "first"), str(tmp_path / "second")
    launched = ["-m", "torch.distributed.run", "--nproc-per-node", "2", script, str(out)]
    with (
        daemon_with_criu(tmp_path) as daemon,
        ImageJob(tmp_path / "job", daemon.socket_path, script=launched, forks=False) as job,
    ):
        ranks = _pids(job, 2)
        left = job.operation("checkpoint", "--leave-running", str(ranks[0]), first)
        assert [process["state"] for process in left["processes"]] == ["running", "running"]
        _await_steps(job, out, 2, 5)
        done = job.operation("checkpoint", str(ranks[1]), second)
        assert [process["state"] for process in done["processes"]] == ["gone", "gone"]
        assert job.process.wait(ENDS_WITHIN_S) == -9
        assert _places(job.operation("restore", second, "--to", "gpu1")) == "gpu1,gpu1"
        _end(job, out)
        longest = _losses(out, 2)
        assert _places(job.operation("restore", first, "--truncate-outputs")) == "gpu0,gpu0"
        _end(job, out)
    shortest = _losses(out, 2)
    steps = max(len(losses) for losses in (*longest, *shortest))
    undisturbed([ALONE, "2", script, str(tmp_path / "expected"), str(steps)])
    for found in (longest, shortest):
        assert all(found)
        expected = _losses(tmp_path / "expected", 2)
        assert found == [losses[: len(own)] for losses, own in zip(expected, found, strict=True)]


def test_ranks_with_uneven_batches_were_rolled_back_after_a_minute(tmp_path: Path) -> None:
    """A rank without batches waits in `Join`: it says so, and the others train on meanwhile."""
    out = tmp_path / "out"
    script = ["-m", "torch.distributed.run", "--nproc-per-node", "2", str(SCRIPTS / "joined.py"), str(out)]
    with RunningDaemon(tmp_path) as daemon, ImageJob(tmp_path / "job", daemon.socket_path, script=script) as job:
        pid = str(_pids(job, 2)[0])
        until = monotonic() + ENDS_WITHIN_S
        while any(len(losses) < least for losses, least in zip(_losses(out, 2), (8, 4), strict=True)):
            assert monotonic() < until, (job.folder / "errors").read_text()
            pause()
        ended = job.operation("suspend", pid, status=6)
        assert ended["phase"] == "rolled-back"
        assert "it has no batches left, and waits in `Join`" in ended["failure"]["message"]
        _end(job, out)


def test_ranks_that_receive_before_a_boundary_what_is_sent_after_it_were_rolled_back_after_a_minute(
    tmp_path: Path,
) -> None:
    """They wait for one another at each boundary, and a failure for that was reported as a missing boundary."""
    out = tmp_path / "out"
    script = ["-m", "torch.distributed.run", "--nproc-per-node", "2", SCRIPT, "chain", str(out), "early"]
    with RunningDaemon(tmp_path) as daemon, ImageJob(tmp_path / "job", daemon.socket_path, script=script) as job:
        pid = str(_pids(job, 2)[0])
        _await_steps(job, out, 2, 3)
        ended = job.operation("suspend", pid, status=6)
        assert ended["phase"] == "rolled-back"
        assert "other ranks wait for it at each of its batch boundaries" in ended["failure"]["message"]
        _await_steps(job, out, 2, 3)
        _end(job, out)


@pytest.mark.parametrize("is_down", [False, True])
def test_the_exit_of_a_launcher_with_suspended_ranks_was_not_reported(tmp_path: Path, *, is_down: bool) -> None:
    """They can never continue. The first report was a failed resume. The daemon may be down when the launcher ends."""
    out = tmp_path / "out"
    launched = ["-m", "torch.distributed.run", "--nproc-per-node", "2", str(SCRIPTS / "ranks.py"), str(out)]
    with (
        RunningDaemon(tmp_path) as daemon,
        ImageJob(tmp_path / "job", daemon.socket_path, script=launched, forks=False) as job,
    ):
        pids = _pids(job, 2)
        _await_steps(job, out, 2, 1)
        op = job.operation("suspend", str(pids[0]))["id"]
        if is_down:
            daemon.stop(signal.SIGKILL)
        job.process.kill()
        job.process.wait(ENDS_WITHIN_S)
        if is_down:
            daemon.start()
        until = monotonic() + ENDS_WITHIN_S
        with connect(str(daemon.socket_path)) as hegmd:
            while len(hegmd.processes().processes) < 2:  # after a start of the daemon their agents connect again
                assert monotonic() < until
                pause(COMMAND_MS)
            while "--drop" not in (why := str(hegmd.jobs().jobs[0].waits)):
                assert monotonic() < until
                pause(COMMAND_MS)
        assert f"hegmctl cancel {op} --drop then ends them" in why
        event = job.command("events", "--kind", "job.launcher-ended")
        assert (event["kind"], event["severity"]) == ("job.launcher-ended", "warning")
        assert event["message"].endswith(why)
        assert [one["note"] for one in job.command("ps")["processes"]] == [why, why]
        end_all(population_of(pids))  # else they would run until the end of the tests


def _pids(job: ImageJob, count: int) -> list[int]:
    """The pids of the ranks, once each is on a GPU."""
    until = monotonic() + ENDS_WITHIN_S
    with connect(job.environ["HEGM_SOCKET"]) as hegmd:
        while len(found := [process.pid for process in hegmd.processes().processes if process.gpus]) < count:
            assert job.process.poll() is None, (job.folder / "errors").read_text()
            assert monotonic() < until, (job.folder / "errors").read_text()
            pause(COMMAND_MS)
    return found


def _places(operation: dict[str, object]) -> str:
    """The GPU of each rank in their order."""
    processes = operation["processes"]
    assert isinstance(processes, list)
    return ",".join(process["gpu"] for process in sorted(processes, key=lambda process: process["rank"]))


def _end(job: ImageJob, out: Path) -> None:
    """Have the ranks end at one step, with their launcher, whose number is free then."""
    stop = Path(f"{out}.stop")
    stop.touch()
    job.output()
    stop.unlink()
    until = monotonic() + ENDS_WITHIN_S
    while job.pid in population_of([job.pid]).start_ticks:
        assert monotonic() < until, "its parent does not reap it"
        pause()


def _losses(out: Path, ranks: int) -> list[list[str]]:
    texts = [Path(f"{out}.{rank}").read_text() for rank in range(ranks)]
    return [text.splitlines() for text in texts]


def _await_steps(job: ImageJob, out: Path, ranks: int, count: int) -> None:
    """Wait until each rank has made so many steps more."""
    wanted = [len(losses) + count for losses in _losses(out, ranks)]
    until = monotonic() + ENDS_WITHIN_S
    while any(len(losses) < least for losses, least in zip(_losses(out, ranks), wanted, strict=True)):
        assert monotonic() < until, (job.folder / "errors").read_text()
        pause()
