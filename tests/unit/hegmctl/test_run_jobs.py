"""`hegmctl run` enters its command as a job, with a name, before it becomes that command."""

from __future__ import annotations

import pytest

from hegmd.errors import INCOMPATIBLE, NOT_FOUND, UNAVAILABLE, HegmError
from hegmd.protocol import messages as m
from tests.unit.hegmctl.fake_daemon import FakeDaemon, failing, saying
from tests.unit.hegmctl.running import hegmctl


def test_a_command_needs_no_dashes_before_it_and_keeps_its_own_options(daemon: FakeDaemon) -> None:
    ran = hegmctl("run", "--name", "mine", "sh", "-c", "echo $HEGM_JOB $0", "--json", socket=daemon.path)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "mine --json\n", "")
    request = daemon.wait_for(m.RegisterJob)
    assert isinstance(request, m.RegisterJob)
    assert request.command == ("sh", "-c", "echo $HEGM_JOB $0", "--json")


@pytest.mark.parametrize("name", ["j7", "4711", "-x", "two words", "x" * 65, "a\nb", "a\x1b[31mb"])
def test_a_name_that_would_mean_something_else_is_refused_before_the_command_begins(
    daemon: FakeDaemon, name: str
) -> None:
    ran = hegmctl("run", f"--name={name}", "echo", "begun", socket=daemon.path)
    assert (ran.returncode, ran.stdout) == (2, "")
    assert f"--name {name!r}: " in ran.stderr, "a line break is escaped like other control characters"


def test_a_job_runs_though_the_daemon_cannot_enter_it(daemon: FakeDaemon) -> None:
    daemon.answers[m.RegisterJob] = failing(HegmError(UNAVAILABLE, "no thread is to be had", "raise TasksMax="))
    ran = hegmctl("run", "echo", "begun", socket=daemon.path)
    assert (ran.returncode, ran.stdout) == (0, "begun\n")
    assert "no thread is to be had; the job runs" in ran.stderr
    daemon.answers[m.RegisterJob] = failing(HegmError(NOT_FOUND, "there is no operation 4", "run: hegmctl ops"))
    ran = hegmctl("run", "--allow-restart", "--resume", "4", "echo", "begun", socket=daemon.path)
    assert (ran.returncode, ran.stdout) == (5, "")


def test_run_without_a_command_shows_the_usage(daemon: FakeDaemon) -> None:
    for words in (("run",), ("run", "--gpu", "gpu0")):
        ran = hegmctl(*words, socket=daemon.path)
        assert ran.returncode == 2
        assert "hegmctl run python3 train.py" in ran.stderr


def test_a_job_does_not_start_on_fewer_gpus_than_it_requested(daemon: FakeDaemon) -> None:
    """A daemon that does not know `gpu_count` chooses one GPU, and four ranks started on it."""
    daemon.answers[m.PlaceJob] = saying(m.JobPlaced(gpu="gpu0"))
    ran = hegmctl("run", "--gpu", "auto:4", "echo", "begun", socket=daemon.path)
    assert (ran.returncode, ran.stdout) == (INCOMPATIBLE.exit_status, "")
    assert "this daemon has chosen gpu0, and 4 GPUs were requested; name one GPU with --gpu" in ran.stderr
