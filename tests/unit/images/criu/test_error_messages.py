"""From CRIU's log to a sentence and the next step. The lines are CRIU 4.2.1's own."""

from __future__ import annotations

from hegmd.images.criu.error_messages import failure, had_numbers_taken
from hegmd.node.criu_program import first_error
from tests.cells import in_one_test

NOISE = """\
(00.000116) Version: 4.2.1 (gitid 0)
(00.072) Error (criu/util.c:642): exited, status=1
"""
AFTER = "(00.072246) Error (criu/cr-restore.c:2331): Restoring FAILED.\n"


@in_one_test(
    ("line", "sentence", "hint"),
    [
        (
            "(00.05)   77: Error (criu/files-reg.c:2122): File srv/out.log has bad size 300 (expect 200)",
            "/srv/out.log has 300 bytes; it had 200 when the image was written",
            "--truncate-outputs",
        ),
        (
            "(0.05) Error (criu/files-reg.c:2316): Can't open file srv/out.log on restore: No such file or directory",
            "/srv/out.log does not exist",
            "put that file where it was",
        ),
        (
            "(00.07) Error (criu/sk-inet.c:191): inet: Connected TCP socket, consider using --tcp-established option.",
            "the job has a TCP connection to a process outside the job",
            "connections to be closed",
        ),
        (
            "(00.07) Error (criu/sk-unix.c:874): unix: Can't dump half of stream unix connection.",
            "the job has a Unix socket connected to a process outside the job",
            "have the script close it",
        ),
        (
            "(00.07) Error (criu/cr-restore.c:1237): Can't fork for 1448: File exists",
            "the number 1448 is in use",
            "unshare --pid",
        ),
        (
            "(00.38) pie: 4534: Error (criu/pie/restorer.c:2185): Unable to create a thread: -17",
            "the number of a thread of the job is in use by another thread or process",
            "restore it again",
        ),
        (
            "(00.07) Error (criu/proc_parse.c:116): Can't handle non-regular mapping on 33's map 7f00",
            "process 33 has device memory mapped",
            "hegmctl run",
        ),
        (
            "(00.07) Error (criu/files.c:457): Can't dump file 5 of that type [20600] (chr 10:229)",
            "descriptor 5 open, which CRIU cannot dump: chr 10:229",
            "have the script close it",
        ),
        (
            "(00.07) Error (criu/files-reg.c:352): Can't create ghost regfile: File exists",
            "an interrupted restore left a file in place of a deleted one",
            ".ghost",
        ),
        (
            "(00.07) Error (criu/cgroup.c:741): cg: Failed walking /sys/fs/cgroup for empty cgroups",
            "the job's control groups",
            "manage-cgroups",
        ),
        (
            "(00.07) Error (criu/pidfd.c:148): pidfd: pidfd pid 6677 is not a part of process tree..",
            "a pidfd of process 6677 open",
            "have the script close it",
        ),
        (
            "(00.07) Error (criu/files-reg.c:1790): Can't lookup mount=12 for fd=3 path=/queue",
            "on a mount that CRIU does not see",
            "have the script close it",
        ),
        (
            "(00.07) Error (criu/image.c:112): write failed: No space left on device",
            "the disk of the image is full",
            "free space there",
        ),
    ],
)
def test_a_known_reason_is_reported_with_the_next_step(line: str, sentence: str, hint: str) -> None:
    error = failure("restore", NOISE + line + "\n" + AFTER, "", 1)
    assert error.message.startswith("CRIU's restore failed with status 1: ")
    assert sentence in error.message
    assert hint in error.hint
    assert error.facts["complaint"] == line.partition("): ")[2]


def test_an_unknown_reason_is_reported_in_the_words_of_criu() -> None:
    error = failure("dump", NOISE + "(00.1) Error (criu/x.c:1): the moon is full\n" + AFTER, "", 1)
    assert error.message == "CRIU's dump failed with status 1: the moon is full"
    assert error.hint == "read the end of CRIU's log: journalctl -u hegmd"


def test_no_reason_at_all() -> None:
    error = failure("dump", "", "", None)
    assert error.message == "CRIU's dump was stopped before it was done: CRIU logged no reason"
    assert "hegmctl doctor" in error.hint


def test_output_of_criu_counts_too_without_a_log() -> None:
    error = failure("dump", "", "Error (criu/util.c:1): Can't create log: No space left on device\n", 1)
    assert "the disk of the image is full" in error.message


def test_a_restore_is_retried_if_a_pid_was_taken_just_before() -> None:
    for line in ("Unable to create a thread: -17", "Can't fork for 1448: File exists"):
        assert had_numbers_taken(f"{NOISE}(00.07) Error (criu/x.c:1): {line}\n{AFTER}")
    assert not had_numbers_taken(NOISE + AFTER)


def test_the_first_error_is_the_first_with_a_message() -> None:
    assert first_error(NOISE + AFTER) == "Restoring FAILED."
    assert first_error("") is None
