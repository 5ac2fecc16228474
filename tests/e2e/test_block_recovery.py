"""Ranks under `hegmctl run --ranks` that fail in every way: those that live go on, and each loss is the same."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from hegmctl.connection import Connection, connect
from hegmctl.ranks import ASK_WITHIN_S
from tests.e2e.daemon import RunningDaemon
from tests.e2e.forked import Forked, not_forked, started
from tests.e2e.moved_job import BARE, SCRIPTS, environment
from tests.looks import pause
from tests.needs import need_torch
from tests.patience import HANG_S

pytestmark = [pytest.mark.e2e, pytest.mark.usefixtures("preloaded")]
need_torch()

RUN = [sys.executable, "-m", "hegmctl", "run", "--ranks"]
SCRIPT = [sys.executable, str(SCRIPTS / "block_ranks.py")]
STEPS, SOFT_LIMIT_S = "24", "10"
# Ranks that are killed one after the other import PyTorch as often, on a machine that may have ten times its work.
ENDS_WITHIN_S = 2 * HANG_S

EXCEPTION = "rank=1,step=3,kind=exception"
KILLED_IN_BACKWARD = "rank=0,step=6,kind=sigkill,phase=backward,generation=2"
HANG = "rank=1,step=9,kind=hang,generation=3"
TORN = "rank=0,step=12,kind=exception,phase=torn,generation=4"
ALL_TORN = "rank=all,step=15,kind=oom,phase=torn,generation=5"

IN_COMMIT = "rank=2,step=3,kind=exception,phase=commit"
ALL_KILLED = "rank=all,step=7,kind=sigkill,phase=after,generation=2"
SEGFAULT = "rank=1,step=12,kind=segfault,phase=backward,generation=3"
KILLED_IN_RESTORE = "rank=1,step=12,kind=sigkill,phase=restore,generation=4"
HOLDS_INTERPRETER = "rank=2,step=14,kind=gil,generation=5"


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[RunningDaemon]:
    with RunningDaemon(tmp_path) as running:
        yield running


def _environ(daemon: RunningDaemon) -> dict[str, str]:
    """Return the environment of a job of that daemon, in which PyTorch is imported without its compiler."""
    return {**environment(daemon.socket_path), **BARE}


def _started(daemon: RunningDaemon, ranks: int, faults: str = "", steps: str = STEPS) -> subprocess.Popen[str] | Forked:
    """Start that job: by forking. A single rank that fails imports PyTorch, as its spare process does."""
    return (not_forked if ranks == 1 and faults else started)(
        [*RUN, str(ranks), "--", *SCRIPT, steps, SOFT_LIMIT_S],
        env={**_environ(daemon), "HEGM_FAULT": faults},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def _losses(output: str) -> set[tuple[str, ...]]:
    """Each rank's step with its loss. A step that was made twice with another loss is in it twice."""
    return {tuple(line.split()) for line in output.splitlines()}


@pytest.mark.parametrize(
    ("ranks", "faults", "recoveries"),
    [
        (2, f"{EXCEPTION};{KILLED_IN_BACKWARD};{HANG};{TORN};{ALL_TORN}", 5),
        (3, f"{IN_COMMIT};{ALL_KILLED};{SEGFAULT};{KILLED_IN_RESTORE};{HOLDS_INTERPRETER}", 4),
        (1, "rank=0,step=5,kind=sigkill,phase=torn;rank=0,step=9,kind=lock,generation=2", 2),
    ],
)
def test_ranks_that_fail_one_after_the_other_continue_with_the_losses_of_the_undisturbed_run(
    daemon: RunningDaemon, ranks: int, faults: str, recoveries: int
) -> None:
    expected, errors = _started(daemon, ranks).communicate(timeout=ENDS_WITHIN_S)
    assert len(_losses(expected)) == ranks * (int(STEPS) + 1), errors
    job = _started(daemon, ranks, faults)
    output, errors = job.communicate(timeout=ENDS_WITHIN_S)
    assert job.returncode == 0, errors
    assert _losses(output) == _losses(expected), errors
    with connect(str(daemon.socket_path)) as hegmd:
        events = list(hegmd.events(kinds=("job.recovered",)))
    assert len(events) == recoveries, errors


def test_a_requested_end_and_a_repeated_fault_end_all_ranks(daemon: RunningDaemon) -> None:
    ends = _started(daemon, 2, "rank=1,step=4,kind=exit")
    again = _started(daemon, 2, ";".join(f"rank=1,step=4,kind=exception,generation={one}" for one in range(1, 9)))
    _, errors = ends.communicate(timeout=ENDS_WITHIN_S)
    assert ends.returncode == 3, errors
    _, errors = again.communicate(timeout=ENDS_WITHIN_S)
    assert again.returncode == 1
    assert "3 recoveries in a row made no progress" in errors
    assert "HEGM_FAULT: exception in rank 1 at step 4" in errors
    one = _started(daemon, 2, "rank=all,step=4,kind=hang")
    os.kill(one.pid, signal.SIGTERM)
    one.communicate(timeout=ENDS_WITHIN_S)
    assert one.returncode == -signal.SIGTERM


NESTED = """
import torch, hegm
model = torch.nn.Linear(1, 1)
rec = hegm.recovery(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
@rec.block
def outer(run):
    @rec.block
    def inner(run):
        print("inside")
    inner()
outer()
"""


def test_a_block_within_a_block_is_refused_by_name(daemon: RunningDaemon, tmp_path: Path) -> None:
    """It waited for a plan that never came, until the hang was found three times."""
    (tmp_path / "nested.py").write_text(NESTED)
    words = [*RUN, "1", "--", sys.executable, str(tmp_path / "nested.py")]
    job = started(words, env=_environ(daemon), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    output, errors = job.communicate(timeout=ENDS_WITHIN_S)
    assert job.returncode == 1
    assert "a recovery block cannot run within another one" in errors
    assert output == ""


def test_a_signal_ends_a_training_whose_rank_waits_for_the_spare_process(daemon: RunningDaemon, tmp_path: Path) -> None:
    """The rank was started all the same once the spare process was ready, or `hegmctl run` waited without an end."""
    script = [sys.executable, str(SCRIPTS / "block_ranks.py"), "100000", SOFT_LIMIT_S, "gloo", "64", "0.02"]
    with (tmp_path / "out").open("w") as out:
        job = subprocess.Popen([*RUN, "1", "--", *script], env=_environ(daemon), stdout=out, stderr=out)
    _until(lambda: len(psutil.Process(job.pid).children()) > 1)
    rank, _spare = sorted(psutil.Process(job.pid).children(), key=psutil.Process.create_time)
    rank.kill()
    _until(lambda: "was ended by signal 9" in (tmp_path / "out").read_text())
    job.terminate()
    assert job.wait(HANG_S) == -signal.SIGTERM


IGNORES_SIGTERM = """
import runpy, signal, sys
signal.signal(signal.SIGTERM, lambda *_: None)
script = sys.argv.pop(1)
runpy.run_path(script, run_name="__main__")
"""


def test_a_signal_ends_ranks_that_wait_for_the_spare_process_and_handle_the_signal(
    daemon: RunningDaemon, tmp_path: Path
) -> None:
    """The missing rank was no longer started, and `hegmctl run` and rank 0 waited for it without an end."""
    (tmp_path / "script.py").write_text(IGNORES_SIGTERM)
    script = [sys.executable, str(tmp_path / "script.py"), str(SCRIPTS / "block_ranks.py")]
    script += ["100000", SOFT_LIMIT_S, "gloo", "64", "0.02"]
    with (tmp_path / "out").open("w") as out:
        job = subprocess.Popen([*RUN, "2", "--", *script], env=_environ(daemon), stdout=out, stderr=out)
    children: list[psutil.Process] = []
    try:
        _until(lambda: len(psutil.Process(job.pid).children()) > 2)
        children = sorted(psutil.Process(job.pid).children(), key=psutil.Process.create_time)
        _, rank, spare = children
        spare.suspend()
        _until(lambda: "\n1 3 " in (tmp_path / "out").read_text())
        rank.kill()
        _until(lambda: "was ended by signal 9" in (tmp_path / "out").read_text())
        job.terminate()
        assert job.wait(HANG_S) == -signal.SIGTERM
        assert "a signal ends the training" in (tmp_path / "out").read_text()
    finally:
        job.kill()
        job.wait()
        for process in children:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


@pytest.mark.parametrize("ended", [(1,), (0, 1)], ids=["one", "all"])
def test_ranks_that_end_while_their_job_is_suspended_for_others_are_started_again_in_its_turn(
    tmp_path: Path, ended: tuple[int, ...]
) -> None:
    """The other rank returned into memory that a lease had, and was killed as it did not join the new one in time.

    If all had ended, the new ones started in that memory at once. They also did so if the daemon was too busy to say
    within half a second whether they may.
    """
    limit_s, out, errors = "2", tmp_path / "out", tmp_path / "errors"
    with RunningDaemon(tmp_path, "--simulate", "1x4MiB") as daemon, connect(str(daemon.socket_path)) as hegmd:
        words = [*RUN, "2", "--gpu", "gpu0", "--", *SCRIPT, "100000", limit_s, "gloo", "64", "0.02"]
        with out.open("w") as output, errors.open("w") as noted:
            job = started(words, env=_environ(daemon), stdout=output, stderr=noted)
        try:
            _until(lambda: _steps(out) > 3 and len(_on_gpu(hegmd)) == 2)
            lease = hegmd.make_room(4 << 20, until_free=True).lease
            assert lease is not None
            (suspended,) = hegmd.operations().operations
            daemon.process.send_signal(signal.SIGSTOP)
            for rank in ended:
                os.kill(suspended.processes[rank].pid, signal.SIGKILL)
            _until(lambda: "was ended by signal 9" in errors.read_text())
            unanswered = time.monotonic()
            _until(lambda: time.monotonic() > unanswered + 3 * ASK_WITHIN_S)
            daemon.process.send_signal(signal.SIGCONT)
            _until(lambda: "is started again once its job is resumed" in errors.read_text())
            began = time.monotonic()
            _until(lambda: time.monotonic() > began + 3 * float(limit_s))
            assert (_on_gpu(hegmd), [one.state for one in hegmd.queue().jobs]) == ([], ["suspended"])
            assert len(psutil.Process(job.pid).children()) <= 2, "a rank, and the process that is kept ready"
            before = _steps(out)
            hegmd.release(lease.id)
            _until(lambda: _steps(out) > before + 3)
            assert "recovered from step" in errors.read_text()
        finally:
            job.terminate()
            job.wait()
    (tmp_path / "alone").mkdir()
    with RunningDaemon(tmp_path / "alone") as daemon:
        alone = _started(daemon, 2, steps=str(_steps(out) + 1))
        expected, alone_errors = alone.communicate(timeout=ENDS_WITHIN_S)
        assert alone.returncode == 0, alone_errors
    assert _losses(out.read_text()) <= _losses(expected), errors.read_text()


def _steps(out: Path) -> int:
    """Return the last step for which both ranks have reported their losses."""
    text = out.read_text()
    whole = text[: text.rfind("\n") + 1].splitlines()  # the last line may be half there
    done = [{int(line.split()[1]) for line in whole if line[0] == rank} for rank in "01"]
    return max(done[0] & done[1], default=0)


def _on_gpu(hegmd: Connection) -> list[int]:
    return [process.pid for process in hegmd.processes().processes if process.gpus]


def _until(holds: Callable[[], bool]) -> None:
    while not holds():
        pause()
