"""Ends of a command that count as failures to recover from, the options on the command line, and what is shown."""

from __future__ import annotations

import json
import sys

import pytest

from hegmctl.arguments import parse
from hegmctl.cli import run
from hegmctl.recovering import Recovery, recovery_asked
from hegmctl.recovery_text import recovery_text
from hegmctl.tables import Style
from hegmd.errors import HegmError
from hegmd.protocol.messages import RecoveryWish
from hegmd.protocol.recovery import JobRecovery, RecoveryAttempt, RecoveryReply, Snapshot
from tests.cells import in_one_test


def _recovery_options(*words: str) -> Recovery | None:
    return recovery_asked(parse(["run", *words, "--", "python3", "train.py"]))


@in_one_test(
    ("status", "requested_exit", "words", "expected"),
    [
        (-9, None, (), True),
        (1, None, (), True),
        (137, None, (), True),
        (0, None, (), False),
        (-15, None, (), False),
        (-2, None, (), False),
        (143, None, (), False),
        (130, None, (), False),
        (1, 15, (), False),
        (-9, 2, (), False),
        (3, None, ("--final-status", "3,4"), False),
        (5, None, ("--final-status", "3,4"), True),
        (1, None, ("--recover-from", "signal"), False),
        (-11, None, ("--recover-from", "signal"), True),
        (139, None, ("--recover-from", "signal"), True),
        (-11, None, ("--recover-from", "error"), False),
        (255, None, ("--recover-from", "error"), True),
        (255, None, ("--recover-from", "signal"), False),
    ],
)
def test_a_requested_exit_is_not_a_failure(
    status: int, requested_exit: int | None, words: tuple[str, ...], expected: bool
) -> None:
    recovery = _recovery_options("--recover", *words)
    assert recovery is not None
    assert recovery.is_failure(status, requested_exit) is expected


@in_one_test(
    ("words", "named"),
    [
        (("--dry-run",), "--dry-run"),
        (("--truncate-outputs",), "--truncate-outputs"),
        (("--max-recoveries", "3"), "--max-recoveries"),
        (("--hang-limit", "5s"), "--hang-limit"),
        (("--final-status", "3", "--dry-run"), "--final-status"),
    ],
)
def test_an_option_without_recover_is_named_with_the_corrected_command(words: tuple[str, ...], named: str) -> None:
    """All of them were answered with a message about --max-recoveries."""
    with pytest.raises(HegmError) as refused:
        _recovery_options(*words)
    assert refused.value.message == f"{named} is for --recover"
    assert refused.value.hint == f"run: hegmctl run --recover {' '.join(words)} -- COMMAND"


def test_the_interval_is_chosen_unless_it_is_given() -> None:
    assert _recovery_options() is None
    automatic, given = (
        _recovery_options("--recover"),
        _recovery_options("--recover=2min", "--max-recoveries", "5", "--hang-limit", "off"),
    )
    assert automatic is not None
    assert given is not None
    assert automatic.wish == RecoveryWish()
    assert given.wish == RecoveryWish(interval_s=120.0, max_recoveries=5, hang_limit_s=0.0)


@in_one_test(
    "words",
    [
        ("--recover=soon",),
        ("--recover=0.01s",),
        ("--max-recoveries", "3"),
        ("--recover", "--recover-from", "cuda"),
        ("--recover", "--final-status", "0"),
        ("--recover", "--final-status", "x"),
    ],
)
def test_a_meaningless_combination_is_a_mistake(words: tuple[str, ...]) -> None:
    with pytest.raises(HegmError) as caught:
        _recovery_options(*words)
    assert caught.value.code.name == "usage"


def test_slots_and_recoveries_are_shown_with_their_cost() -> None:
    slots = (
        Snapshot(rank=0, slot=0, generation=8, step=1200, size_bytes=3 << 20, taken_utc=90.0),
        Snapshot(rank=0, slot=1),
    )
    attempt = RecoveryAttempt(
        failed_utc=80.0,
        why="ended by signal 9",
        step=1190,
        from_step=1100,
        gpus=("gpu1",),
        started_s=0.1,
        trained_s=2.5,
    )
    job = JobRecovery(
        id="j7",
        name="train",
        uid=0,
        state="protected",
        interval_s=50.0,
        cost_s=0.5,
        snapshots=9,
        held_bytes=8 << 20,
        slots=slots,
        recoveries=(attempt,),
    )
    text = "\n".join(recovery_text(RecoveryReply(taken_utc=100.0, jobs=(job,)), Style()))
    assert "j7 (train): protected" in text
    assert "a snapshot every 50 s; the last one cost 500 ms (0.99% of the time); 8.0 MiB of host memory" in text
    beside = recovery_text(RecoveryReply(taken_utc=100.0, jobs=(job.replace(copied_s=2.0),)), Style())
    assert ", and was copied for 2.0 s while the training ran; 8.0 MiB" in "\n".join(beside)
    assert "no complete snapshot" in text
    assert "ended by signal 9" in text
    assert "2.5 s" in text
    assert recovery_text(RecoveryReply(taken_utc=1.0, jobs=()), Style())[0].startswith("No job is protected here")


def test_a_dry_run_reports_what_would_be_recovered_and_what_prevents_it(capsys: pytest.CaptureFixture[str]) -> None:
    """And starts nothing, nor asks a daemon."""
    python = sys.executable
    assert run(["run", "--recover=30s", "--recover-from", "signal", "--dry-run", "--", python, "-S", "no.py"]) == 0
    output = capsys.readouterr().out
    for line in ("every 30 s", "recovered from: signal\n", "--truncate-outputs cuts files back", "not protected: `-S`"):
        assert line in output
    assert run(["run", "--recover", "--truncate-outputs", "-n", "--json", "--", python, "no.py"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert (plan["interval_s"], plan["truncates"], plan["against"]) == (None, True, [])
