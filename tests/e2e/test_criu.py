"""Processes dumped and restored by real CRIU, as the daemon has it done."""

from __future__ import annotations

from pathlib import Path

import pytest

from hegmd.criu import runs
from hegmd.criu.needs import Needs
from hegmd.criu.population import end_all, let_go, population_of
from hegmd.criu.tree import read_tree
from hegmd.errors import HegmError
from tests.e2e.real_criu import criu_or_skip, directory, ended_after, ends, job, pipe, python, tell

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(60)]

# Counts its cues into a file and onto its standard output.
COUNTER = """
import signal, sys
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
log = open(sys.argv[1], "a")
print("ready", flush=True)
for number in range(100):
    signal.sigwait([signal.SIGUSR1])
    print(number, file=log, flush=True)
    print(number, flush=True)
"""


async def test_a_job_is_dumped_ended_and_restored_with_its_output_led_elsewhere(tmp_path: Path) -> None:
    criu = criu_or_skip()
    with job([*python(COUNTER), str(tmp_path / "log")]) as counter, directory(tmp_path / "image") as images:
        assert counter.line() == "ready"
        tell(counter.pid)
        assert counter.line() == "0"
        needs = counter.needs()
        assert needs.reasons == ()
        assert [outlet.key.split(":")[0] for outlet in needs.outlets] == ["pipe"]
        await runs.dump(criu, counter.pid, images, needs, leave_stopped=True, in_unit=False)
        stopped = population_of(needs.pids)
        assert stopped.stopped == {counter.pid}
        end_all(stopped)
        assert counter.gone() == -9

        again = Needs.from_plain(needs.plain())
        with pipe() as (said, output), ended_after(needs.pids):
            outlets = {again.outlets[0].key: output}
            revived = await runs.restore(criu, images, again, log_dir_fd=images, unit_name=None, outlets=outlets)
            assert revived.pid == counter.pid
            for number in range(1, 100):
                tell(revived.pid)
                assert said.readline() == f"{number}\n"
    assert (tmp_path / "log").read_text().split() == [str(number) for number in range(100)]


async def test_a_job_that_is_left_running_goes_on_and_so_does_one_left_stopped_when_it_is_let_go(
    tmp_path: Path,
) -> None:
    criu = criu_or_skip()
    with job([*python(COUNTER), str(tmp_path / "log")]) as counter:
        assert counter.line() == "ready"
        for leave_stopped in (False, True):
            with directory(tmp_path / f"image-{leave_stopped}") as images:
                needs = counter.needs()
                before = population_of(needs.pids)
                await runs.dump(criu, counter.pid, images, needs, leave_stopped=leave_stopped, in_unit=False)
                let_go(before)
            tell(counter.pid)
            assert counter.line() == str(int(leave_stopped))


async def test_whoever_restores_it_is_there_to_reap_it(tmp_path: Path) -> None:
    """Without a service manager nobody else might: a container's first process often reaps nothing."""
    criu = criu_or_skip()
    with job([*python(COUNTER), str(tmp_path / "log")]) as counter, directory(tmp_path / "image") as images:
        assert counter.line() == "ready"
        needs = counter.needs()
        await runs.dump(criu, counter.pid, images, needs, leave_stopped=True, in_unit=False)
        end_all(population_of(needs.pids))
        counter.gone()
        with ended_after(needs.pids):
            await runs.restore(criu, images, needs, log_dir_fd=images, unit_name=None)
            parent = read_tree(counter.pid).members[0].parent
            assert "attendant.py" in " ".join(read_tree(parent).members[0].command)
            end_all(population_of([counter.pid]))  # waits for the end of its life, not for it to be reaped
            assert ends(parent)
    assert population_of([counter.pid, parent]).start_ticks == {}


async def test_a_restore_under_numbers_that_are_taken_leaves_those_alone(tmp_path: Path) -> None:
    criu = criu_or_skip()
    with job([*python(COUNTER), str(tmp_path / "log")]) as counter, directory(tmp_path / "image") as images:
        assert counter.line() == "ready"
        needs = counter.needs()
        await runs.dump(criu, counter.pid, images, needs, leave_stopped=False, in_unit=False)
        with pytest.raises(HegmError, match=f"number {counter.pid}, which is taken as the process of") as failed:
            await runs.restore(criu, images, needs, log_dir_fd=images, unit_name=None)
        assert "unshare --pid" in failed.value.hint
        tell(counter.pid)
        assert counter.line() == "0"
