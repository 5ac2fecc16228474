"""Options and output of the commands for sharing GPUs."""

from __future__ import annotations

import pytest

from hegmctl.arguments import parse
from hegmctl.running import auto_count, gpus_asked
from hegmctl.sharing_text import lease_note, queue_text, released_text, room_progress_text, room_text
from hegmctl.tables import Style, width
from hegmd.errors import USAGE, HegmError
from hegmd.protocol.messages import MakeRoom, QueueReply, Released, RoomProgress, RoomReply, RoomStep, SetPriority
from hegmd.protocol.sharing import Lease, QueuedJob

GIB = 1 << 30
PLAIN = Style()
LEASE = Lease(id="l3", gpu="gpu0", size_bytes=60 * GIB, state="held", priority=80, uid=0, pid=4711, since_utc=5.0)


def test_the_words_of_a_command_become_its_request() -> None:
    words = [
        "make-room",
        "--gpu",
        "1",
        "--bytes",
        "60GiB",
        "--for",
        "4711",
        "--wait",
        "--timeout",
        "9",
        "--priority",
        "7",
    ]
    assert parse(words).request() == MakeRoom(
        gpu="1", size_bytes=60 * GIB, pid=4711, until_free=True, limit_s=9.0, priority="7"
    )
    assert parse(["priority", "train", "7"]).request() == SetPriority(job="train", priority="7")
    assert parse(["priority", "4711", "best-effort"]).request() == SetPriority(job=4711, priority="best-effort")


def test_a_job_that_waits_for_memory_names_one_gpu_or_lets_hegmd_choose() -> None:
    assert gpus_asked("auto") == ("auto",)
    assert gpus_asked(None, waits=True) == ("auto",)
    assert gpus_asked("gpu1", waits=True) == ("gpu1",)
    assert gpus_asked("gpu0,gpu1") == ("gpu0", "gpu1")
    assert gpus_asked("auto:2", waits=True) == ("auto:2",)
    counts = [auto_count("gpu1", 4), auto_count("auto"), auto_count("auto", 4), auto_count("auto:2", 4)]
    assert counts == [None, 1, 4, 2], "each rank gets a GPU unless another number is given"
    wrong = (("auto,gpu1", False), ("auto:2,gpu1", False), ("gpu0,gpu1", True), ("cpu", True))
    for text, waits in (*wrong, *((f"auto:{number}", False) for number in ("", "0", "-1", "two", "1e1", "10000"))):
        with pytest.raises(HegmError) as refused:
            gpus_asked(text, waits=waits)
        assert refused.value.code is USAGE


def test_scripts_read_the_id_of_a_lease_and_people_the_rest() -> None:
    assert room_text(RoomReply(lease=LEASE, gpu="gpu0"), PLAIN) == ["l3"]
    assert lease_note(LEASE) == "60.0 GiB of gpu0 are kept free until process 4711 ends; sooner: hegmctl release l3"
    pending = LEASE.replace(state="pending", gpu=None, pid=None)
    assert lease_note(pending) == "60.0 GiB of a GPU are being freed, and kept until it is released: see hegmctl queue"
    assert "and kept for 3 min 20 s after that: see" in lease_note(pending.replace(hold_s=200.0))
    assert "kept free for 0 ms; sooner:" in lease_note(LEASE.replace(pid=None, until_utc=0.0))
    released = Released(lease="l3", gpu="gpu0", size_bytes=60 * GIB)
    assert released_text(released, PLAIN) == ["lease l3 has ended: 60.0 GiB of gpu0 are free for jobs again"]
    progress = RoomProgress(
        lease="l3", gpu="gpu0", free_bytes=GIB, size_bytes=60 * GIB, waits="until train has left gpu0"
    )
    assert room_progress_text(progress, PLAIN) == [
        "lease l3: 60.0 GiB on gpu0 (1.0 GiB free), waits until train has left gpu0"
    ]
    (line,) = room_progress_text(progress.replace(waits="a decision"), PLAIN)
    assert line.endswith(", waits for a decision")


def test_a_plan_names_each_job_that_would_leave() -> None:
    steps = (
        RoomStep(job="j1", name="train", action="suspend", gpu="gpu0", size_bytes=GIB),
        RoomStep(job="j2", name="eval", action="migrate", gpu="gpu0", to="gpu1"),
    )
    assert room_text(RoomReply(gpu="gpu0", steps=steps), PLAIN) == [
        "suspend j1 (train) on gpu0, 1.0 GiB",
        "migrate j2 (eval) on gpu0 to gpu1",
        "nothing was changed: this is only the plan",
    ]
    assert room_text(RoomReply(gpu="gpu0"), PLAIN)[0] == "no further job has to leave gpu0"


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_the_reason_of_a_waiting_job_is_whole_at_every_width(columns: int) -> None:
    """Issue 19: at 80 columns `hegmctl queue` cut WAITS FOR to 12 characters."""
    why, then = "60.0 GiB on gpu0, which train (j1) has", "train (j1) is suspended when its turn of 5 min is over"
    waiting = QueuedJob(
        job="j2", name="eval", uid=0, priority=20, state="waiting", since_utc=40.0, gpu="gpu0", why=why, next=then
    )
    pending = LEASE.replace(waits="until train (j1) has left gpu0, and its memory is free")
    reply = QueueReply(taken_utc=100.0, jobs=(waiting,), leases=(pending,), slices=False)
    lines = queue_text(reply, Style(columns=columns))
    assert max(map(width, lines)) <= columns
    text = " ".join(" ".join(lines).split())
    assert f"j2 (eval) waits for {why}; next: {then}" in text
    assert f"{LEASE.id} waits until train (j1) has left gpu0, and its memory is free" in text
    assert "  ".join(("WAITS FOR", " " * (len(why) - 9) + "NEXT")) in queue_text(reply, Style(columns=250))[0]


def test_a_job_that_runs_waits_for_nothing_in_a_narrow_terminal() -> None:
    """It read: waits for cannot be suspended."""
    why = "cannot be suspended: it has no agent"
    job = QueuedJob(job="j1", name="train", uid=0, priority=50, state="running", gpu="gpu0", since_utc=1.0, why=why)
    reply = QueueReply(taken_utc=2.0, jobs=(job,), leases=(), slices=False)
    assert queue_text(reply, Style(columns=60))[-1] == "j1 (train) cannot be suspended: it has no agent"
    late = job.replace(state="starting", why="it has not trained: no memory is kept for it")
    assert queue_text(reply.replace(jobs=(late,)), Style(columns=70))[-1] == f"j1 (train): {late.why}"


def test_the_queue_shows_jobs_and_leases_and_unknown_as_such() -> None:
    waiting = QueuedJob(job="j2", name="eval", uid=0, priority=20, state="waiting", since_utc=40.0, why="a GPU")
    lines = queue_text(QueueReply(taken_utc=100.0, jobs=(waiting,), leases=(LEASE,), slices=False), PLAIN)
    assert lines[0].split()[:5] == ["JOB", "NAME", "PRIORITY", "STATE", "SINCE"]
    assert lines[1].split() == ["j2", "eval", "20", "waiting", "1", "min", "-", "-", "a", "GPU", "-"]
    assert lines[2] == ""
    assert "with process 4711" in lines[4]
    of_slurm = LEASE.replace(name="slurm-42", pid=None, slurm_job=42, until_utc=9000.0, uid=4711)
    lines = queue_text(QueueReply(taken_utc=100.0, jobs=(waiting,), leases=(of_slurm,), slices=False), PLAIN)
    assert "with Slurm job 42" in lines[4], "it said only when it ends at the latest"
    assert lines[3].split()[:3] == ["LEASE", "NAME", "USER"]
    assert lines[4].split()[:3] == ["l3", "slurm-42", "4711"]
    assert queue_text(QueueReply(taken_utc=1.0, jobs=(), leases=(), slices=False), PLAIN) == [
        "No job has or wants a GPU."
    ]
