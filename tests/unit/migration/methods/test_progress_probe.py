"""When the watchdog gives up a driver call: the process is stopped or has made no progress for too long."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hegmd.gpu_helper.link import Stuck
from hegmd.migration.methods.progress_probe import (
    ProgressLimits,
    ProgressSample,
    WatchedCall,
    is_ending,
    is_stopped,
    look_at,
)
from tests.patience import HANG_S

MIB = 1 << 20
PLAIN = ProgressLimits(look_s=1, stopped_s=2, floor_s=15, times=4, quiet_s=10, moved_bytes=16 * MIB)
RUNNING = {"S": 30, "D": 1}


def judged(*sights: ProgressSample, expected_s: float = 1.0) -> list[int]:
    """At which of these looks, one a second, it is given up."""
    work = WatchedCall("checkpoint", 4711, expected_s, PLAIN, 0.0)
    return [number for number, sight in enumerate(sights) if work.judge(sight, float(number)) is not None]


def quiet(count: int, resident_bytes: int = 0) -> list[ProgressSample]:
    return [ProgressSample(resident_bytes, 0, RUNNING)] * count


def test_a_driver_call_without_progress_is_given_up_long_after_its_estimate() -> None:
    assert judged(*quiet(25))[0] == 19, "15 s, and four times the one that was expected"
    assert judged(*quiet(80), expected_s=14.0)[0] == 71


@pytest.mark.parametrize("what", ["resident_bytes", "free_bytes"])
def test_a_call_that_goes_slowly_is_waited_for_as_long_as_something_moves(what: str) -> None:
    """16 MiB in ten seconds are a thousandth of what was measured, and still something."""
    moving = [ProgressSample(**{what: number // 9 * 16 * MIB}, threads=RUNNING) for number in range(300)]
    assert not judged(*moving)
    stalled = [*moving, *[moving[-1]] * 20]
    assert judged(*stalled)[0] > 300


def test_occasional_cpu_time_of_other_threads_is_no_progress() -> None:
    assert judged(*[ProgressSample(number % 2 * MIB, 0, RUNNING) for number in range(25)])[0] == 19


def test_an_unreadable_sample_is_neither_progress_nor_a_reason_to_wait_for_ever() -> None:
    assert judged(*[ProgressSample()] * 25)[0] == 19


def test_a_call_to_a_stopped_process_is_given_up_immediately_but_not_to_a_traced_one() -> None:
    one_stopped = ProgressSample(0, 0, {"S": 30, "t": 1})
    assert judged(*quiet(1), *[one_stopped] * 3) == [3]
    assert not judged(*[one_stopped, *quiet(1)] * 7)


def test_the_message_of_an_abandoned_call_has_figures_and_the_next_step() -> None:
    work = WatchedCall("restore", 4711, 2.0, PLAIN, 100.0)
    assert work.judge(ProgressSample(2 << 30, 0, RUNNING), 101.0) is None
    stuck = work.judge(ProgressSample(2 << 30, 0, RUNNING), 130.0)
    assert isinstance(stuck, Stuck)
    assert "of process 4711 for 30 s, where 2.0 s were expected, and made no progress for 29 s" in stuck.message
    assert "1 D, 30 S, 2.0 GiB" in stuck.message
    assert "/proc/4711/task" in stuck.hint
    assert (stuck.facts["quiet_s"], stuck.in_flight) == (29.0, ("restore",))


@pytest.fixture
def child() -> Iterator[subprocess.Popen[str]]:
    loop = "held = [bytearray(int(size)) for size in iter(input, '') if not print(flush=True)]"
    text = f"print('ready', flush=True); {loop}"
    process = subprocess.Popen(
        [sys.executable, "-c", text], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    yield process
    process.communicate("\n", timeout=HANG_S)


def test_growing_and_stopped_processes_are_reported(child: subprocess.Popen[str]) -> None:
    before = look_at(child.pid, 7)
    assert (before.free_bytes, before.stopped, sum(before.threads.values())) == (7, 0, 1)
    os.kill(child.pid, signal.SIGSTOP)
    os.waitpid(child.pid, os.WUNTRACED)
    assert is_stopped(child.pid)
    assert look_at(child.pid, None).stopped == 1
    os.kill(child.pid, signal.SIGCONT)
    assert child.stdin is not None
    assert child.stdout is not None
    for size_bytes in (64 * MIB, 1):  # the first reading exists when the second is requested
        child.stdin.write(f"{size_bytes}\n")
        child.stdout.readline()
    grown, was = look_at(child.pid, None).resident_bytes, before.resident_bytes
    assert was is not None
    assert grown is not None
    assert grown - was > 60 * MIB


@pytest.fixture
def cut_name() -> Iterator[None]:
    """This process with a name of which the kernel kept 15 bytes, the last one half a character."""
    comm = Path("/proc/self/comm")
    before = comm.read_bytes()
    comm.write_bytes("trainings-xyzaü".encode()[:15])
    yield
    comm.write_bytes(before)


@pytest.mark.usefixtures("cut_name")
def test_a_process_whose_name_was_cut_within_a_character_could_not_be_moved() -> None:
    """Its suspend failed inside hegmd, with a UnicodeDecodeError."""
    pid = os.getpid()
    assert not is_stopped(pid)
    assert not is_ending(pid)
    assert sum(look_at(pid, None).threads.values())


def test_nothing_is_read_of_an_exited_process() -> None:
    assert look_at(2**22 + 1, None) == ProgressSample(None, None, {})
    assert not is_stopped(2**22 + 1)
