"""Trainings dumped in the middle by real CRIU, ended, restored: no loss differs in a bit from an undisturbed run."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import anyio
import pytest

from hegmd.images.criu import run
from hegmd.images.criu.needs import Needs
from hegmd.node.processes.process_set import end_all, population_of, wait_until_free
from tests.e2e.agented import SCRIPTS, environment, undisturbed
from tests.e2e.real_criu import Job, criu_or_skip, directory, ended_after, ends, job, pipe
from tests.needs import need_torch

pytestmark = [pytest.mark.e2e, pytest.mark.usefixtures("preloaded")]
ROOT = Path(__file__).parents[2]


async def _dumped(training: Job, lines: int, images: int) -> tuple[list[str], Needs]:
    """Return its output when it was dumped after so many lines and ended, and the needs of its restore."""
    printed = [training.line() for _ in range(lines)]
    needs = training.needs()
    assert needs.reasons == ()
    await run.dump(criu_or_skip(), training.pid, images, needs, leave_stopped=True, in_unit=False)
    end_all(population_of(needs.pids))
    assert training.process.stdout is not None
    printed += training.process.stdout.read().splitlines()
    training.gone()
    assert wait_until_free(needs.pids) == ()
    return printed, needs


async def test_every_loss_of_a_job_with_loader_workers_is_that_of_an_undisturbed_run(tmp_path: Path) -> None:
    """They are two processes, with shared memory and semaphores whose names are gone, and with pipes to the first."""
    need_torch()
    criu = criu_or_skip()
    argv = [sys.executable, str(SCRIPTS / "workers.py")]
    with job(argv, env=environment(None)) as training, directory(tmp_path / "image") as images:
        lines, needs = await _dumped(training, 100, images)
        with pipe() as (more, output), ended_after(needs.pids):
            outlets = {outlet.key: output for outlet in needs.outlets}
            revived = await run.restore(criu, images, needs, log_dir_fd=images, unit_name=None, outlets=outlets)
            expected = undisturbed(argv[1:]).splitlines()
            lines += [more.readline().rstrip("\n") for _ in range(len(expected) - len(lines))]
            assert ends(revived.pid)
    assert lines == expected


async def test_a_training_is_restored_in_its_own_pid_namespace_while_its_pid_is_taken_here(tmp_path: Path) -> None:
    need_torch()
    criu = criu_or_skip()
    argv = [sys.executable, str(SCRIPTS / "plain.py")]
    with job(argv, env=environment(None)) as training, directory(tmp_path / "image") as images:
        lines = [training.line() for _ in range(50)]
        needs = training.needs()
        await run.dump(criu, training.pid, images, needs, leave_stopped=True, in_unit=False)
        # Stopped and not reaped, so its pid is taken; both the dumped and the restored process have its buffered
        # output.
        (tmp_path / "needs.json").write_text(json.dumps(needs.plain()))
        there = [sys.executable, "-m", "tests.e2e.revival", criu.path, criu.version, str(tmp_path / "image")]
        there += [str(tmp_path / "needs.json"), str(tmp_path / "output")]
        apart = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child", *there]
        done = await anyio.run_process(apart, cwd=ROOT, env=environment(None, PYTHONPATH=str(ROOT)), check=False)
        assert (done.returncode, done.stderr) == (0, b"")
        end_all(population_of(needs.pids))
        assert training.process.stdout is not None
        lines += training.process.stdout.read().splitlines()
    lines += (tmp_path / "output").read_text().splitlines()
    assert lines == undisturbed(argv[1:]).splitlines()
