"""Operations as text: where a job is and goes in every phase, plans, stories, drains, and the bar."""

from __future__ import annotations

from hegmctl.operating_text import (
    cancelled_text,
    drained_text,
    operation_text,
    operations_text,
    outcome,
    plan_text,
    progress_text,
    story_text,
    swapped_text,
)
from hegmctl.tables import Style, width
from hegmd.migration.machine.machine import PHASES
from hegmd.protocol import messages as m
from hegmd.protocol.operations import (
    Operation,
    OperationProcess,
    OperationProgress,
    Plan,
    PlannedProcess,
    Reason,
    StoryLine,
    Wait,
)
from tests.cells import in_one_test

PIPE = Style()
GIB = 1 << 30
FAILURE = Reason(code="refused", message="no batch boundary within 60 s", hint="a longer --timeout")


def operation(phase: str = "done", *processes: OperationProcess, **values: object) -> Operation:
    plain: dict[str, object] = {"id": "7", "kind": "migrate", "created_utc": 0.0, "size_bytes": 2 * GIB}
    found = processes or (process(),)
    return Operation(phase=phase, processes=found, **{**plain, **values})  # type: ignore[arg-type] # a table of fields is not typed one by one


def process(
    here: str | None = "gpu1", to: str | None = "gpu1", state: str = "running", pid: int = 4711
) -> OperationProcess:
    return OperationProcess(pid=pid, began_on="gpu0", gpu=here, to=to, size_bytes=2 * GIB, state=state)


def where(*operations: Operation) -> list[str]:
    """Return the column with that name."""
    head, *rows = operations_text(m.OperationsReply(operations=operations), PIPE)
    start, end = head.index("WHERE"), head.index("SIZE")
    # The size is right-aligned below its header, and is the value with a unit.
    return [row[start:].rsplit("  2.0 GiB", 1)[0].strip() for row in rows] if end else []


@in_one_test(
    ("shown", "expected"),
    [
        (operation("done"), "gpu0 -> gpu1"),
        (operation("done", process("gpu0", "gpu0"), kind="resume"), "gpu0"),
        (operation("rolled-back", process("gpu0", "gpu0")), "gpu0"),
        (operation("quiescing", process("gpu0", "gpu1")), "gpu0 -> gpu1"),
        (operation("reloading", process("gpu1", "gpu1", "out")), "gpu1"),
        (operation("restoring", process(None, "gpu1", "out")), "pool -> gpu1"),
        (operation("offloading", process("gpu0", None, "parked"), kind="suspend"), "gpu0 -> pool"),
        (operation("suspended", process(None, None, "out"), kind="suspend"), "gpu0 -> pool"),
        (operation("reserving", process(None, "gpu1", "out"), kind="resume"), "pool -> gpu1"),
        (operation("rolled-back", process("gpu0", "gpu1", "gone")), "ended"),
        (operation("done", process(), process(pid=4712)), "gpu0 -> gpu1"),
        (operation("done", process(), process("gpu2", "gpu2", pid=4712)), "gpu0 -> gpu1, gpu0 -> gpu2"),
        (operation("done", process("gpu0", "gpu0"), process(pid=4712)), "gpu0 -> gpu1, stays on gpu0"),
    ],
)
def test_the_current_and_target_gpu_of_a_job(shown: Operation, expected: str) -> None:
    assert where(shown) == [expected]


def test_a_lost_job_was_shown_as_moving_to_a_gpu() -> None:
    """It read `->gpu0`: from nowhere to the GPU that it would have gone to."""
    lost = operation("lost", process(None, "gpu0", "lost"), failure=FAILURE)
    assert where(lost) == ["lost"]
    assert operation_text(m.OperationReply(operation=lost), PIPE)[0] == "operation 7: migrate of 4711: lost (2.0 GiB)"


@in_one_test("phase", PHASES)
def test_no_phase_reads_as_from_or_to_nowhere(phase: str) -> None:
    for here in ("gpu0", None):
        for to in ("gpu1", None):
            (text,) = where(operation(phase, process(here, to)))
            assert text
            assert not {"", "-", "None"} & set(text.split(" -> "))


def test_fields_that_an_older_daemon_lacks_are_left_out() -> None:
    bare = OperationProcess(pid=4711, gpu="gpu1", to="gpu1", size_bytes=2 * GIB, state="running")
    assert where(operation("done", bare)) == ["gpu1"]


def test_an_end_is_reported_with_its_reason_and_the_next_step() -> None:
    ended = operation("rolled-back", process("gpu0", "gpu0"), downtime_s=0.1234, failure=FAILURE)
    assert operation_text(m.OperationReply(operation=ended), PIPE) == [
        "operation 7: migrate of 4711: rolled back (gpu0, 2.0 GiB, downtime 0.123 s)",
        "  no batch boundary within 60 s",
        "  next: a longer --timeout",
    ]


def test_an_image_is_reported_with_its_duration_and_the_downtime_of_the_job() -> None:
    ended = operation("done", process("gpu0", "gpu0"), kind="checkpoint", downtime_s=1.5, took_s=8.25)
    (line,) = operation_text(m.OperationReply(operation=ended), PIPE)
    assert line == "operation 7: checkpoint of 4711: done (gpu0, 2.0 GiB, downtime 1.500 s, 8.2 s in all)"
    back = operation_text(m.OperationReply(operation=ended.replace(kind="restore")), PIPE)
    assert back == ["operation 7: restore of 4711: done (gpu0, 2.0 GiB, 8.2 s in all)"], "it stood since its image"
    moved = operation_text(m.OperationReply(operation=ended.replace(kind="migrate")), PIPE)
    assert "in all" not in moved[0], "a move is over with what its job waits for"


def test_the_absence_of_operations_is_stated() -> None:
    assert operations_text(m.OperationsReply(operations=()), PIPE) == ["There was no operation on this node."]


def test_a_narrow_terminal_shows_the_important_columns() -> None:
    ended = operation("rolled-back", process("gpu0", "gpu0"), downtime_s=0.1234, failure=FAILURE)
    lines = operations_text(m.OperationsReply(operations=(ended,)), Style(columns=60, ellipsis="~"))
    assert all(width(line) <= 60 for line in lines)
    assert lines[0].split()[:5] == ["ID", "KIND", "PHASE", "PIDS", "WHERE"]
    lines = operations_text(m.OperationsReply(operations=(ended.replace(job="j7"), ended)), Style(columns=60))
    assert lines[0].split()[:5] == ["ID", "KIND", "PHASE", "JOB", "WHERE"], "a job is shorter than its pids"
    assert [line.split()[4] for line in lines[1:3]] == ["j7", "-"]


def test_results_name_the_job_and_a_pid_only_without_one() -> None:
    """Issue 19: users think in jobs, and hegmctl printed `migrate of 4711`."""
    ranks = [process("gpu1").replace(job="j7", job_name="bert") for _ in range(2)]
    done = operation("done", *ranks).replace(job="j7")
    alone = operation("done", process("gpu1"))
    assert outcome(done, Style())[0].startswith("operation 7: migrate of bert (j7): done (")
    assert outcome(alone, Style())[0].startswith("operation 7: migrate of 4711: done (")
    rows = operations_text(m.OperationsReply(operations=(done, alone)), Style())
    assert "  bert (j7)  " in rows[1]
    (line,) = drained_text(m.Drained(operations=(done, alone)), Style())
    assert line == "2 moved (operations 7, 7): bert (j7) gpu0 -> gpu1, 4711 gpu0 -> gpu1"
    (line,) = swapped_text(m.Drained(operations=(done, alone)), Style())
    assert line.startswith("the jobs have changed places: bert (j7), 4711 (")


def test_a_story_includes_every_process_of_a_job() -> None:
    ranks = (process("gpu1", "gpu1"), process("gpu1", "gpu1", "out", pid=4712).replace(rank=1))
    story = (
        StoryLine(utc=10.0, event="", phase="planned"),
        StoryLine(utc=10.5, event="begin", cause="request", phase="reserving", effects=("reserve-pool", "reserve")),
    )
    reply = m.StoryReply(operation=operation("reloading", *ranks), story=story, untold=3)
    assert story_text(reply, PIPE) == [
        "operation 7: migrate of 4711, 4712: reloading (gpu1, 2.0 GiB)",
        "  4711: gpu1, 2.0 GiB; it runs",
        "  4712 (rank 1): gpu1, 2.0 GiB; it is parked, its bytes are in the pool",
        "",
        "(3 earlier lines are no longer remembered)",
        "    0.000 s  planned       planned",
        "    0.500 s  reserving     begin -> reserve-pool, reserve",
    ]


PLAN = Plan(
    kind="migrate",
    way="agent",
    workers=(PlannedProcess(pid=4711, name="train.py", gpu="gpu0", to="gpu1", size_bytes=GIB, carrier="worker"),),
    size_bytes=GIB,
    reservation_bytes={"gpu1": GIB},
    gpu_free_bytes={"gpu1": 8 * GIB},
    pool_needed_bytes=GIB,
    pool_free_bytes=4 * GIB,
    pool_ready_bytes=2 * GIB,
    estimate_s=1.25,
    is_distributed=True,
    hazards=("2 of the job's 4 ranks are here",),
    steps=("take room", "stop at a boundary"),
)


def test_a_plan_shows_the_needs_and_that_nothing_was_done() -> None:
    assert plan_text(m.OperationReply(plan=PLAN), PIPE) == [
        " PID  NAME      FROM  TO    CARRIED  STAYS  CARRIER",
        "4711  train.py  gpu0  gpu1  1.0 GiB    0 B  worker",
        "",
        "memory on gpu1: 1.0 GiB needed, 8.0 GiB free",
        "pool: 1.0 GiB needed, 4.0 GiB free, 2.0 GiB ready",
        "the estimated downtime is 1.25 s, after it reaches its next boundary",
        "all ranks stop at the same boundary",
        "note: 2 of the job's 4 ranks are here",
        "steps: take room; stop at a boundary",
        "nothing was changed: this is only the plan",
    ]


def test_a_drain_reports_each_job_and_their_number() -> None:
    undone = operation("rolled-back", process("gpu0", "gpu0", pid=4712), failure=FAILURE)
    left = Reason(code="refused", message="process 9 has no agent", hint="start it with `hegmctl run`", pid=9)
    lines = drained_text(m.Drained(operations=(operation(), undone), left=(left,)), PIPE)
    assert lines[0].startswith("operation 7: migrate of 4711: done")
    assert "not moved: process 9 has no agent; start it with `hegmctl run`" in lines
    assert lines[-1] == "1 moved, 2 not"


def test_drains_without_a_job_and_planned_and_in_progress() -> None:
    assert drained_text(m.Drained(operations=()), PIPE) == ["there is no process on it to move"]
    planned = drained_text(m.Drained(operations=(), plans=(PLAN, PLAN)), PIPE)
    assert [line for line in planned if line[:2] in ("1.", "2.")] == ["1. migrate", "2. migrate"]
    assert planned[-2:] == ["2 could be moved, 0 not", "nothing was changed: this is only the plan"]
    begun = m.Drained(operations=(operation("reserving", process("gpu0", "gpu1")), operation()))
    assert drained_text(begun, PIPE)[-1] == "1 moved, 1 under way, 0 not"


def test_a_swap_reports_whether_the_jobs_changed_places() -> None:
    back = operation("done", process("gpu0", "gpu0", pid=4712))
    swapped = m.Drained(operations=(operation(), back))
    assert swapped_text(swapped, PIPE) == ["the jobs have changed places: 4711, 4712 (operations 7, 7)"]
    undone = operation("rolled-back", process("gpu0", "gpu0", pid=4712), failure=FAILURE)
    assert swapped_text(m.Drained(operations=(operation(), undone)), PIPE)[-1] == "the jobs have not changed places"
    left = m.Drained(operations=(operation(),), left=(FAILURE,))
    assert swapped_text(left, PIPE)[-1] == "the jobs have not changed places"
    begun = m.Drained(operations=(operation("reserving", process("gpu0", "gpu1")),))
    assert swapped_text(begun, PIPE)[-1] == "hegmd runs the other steps: watch them with hegmctl ops"
    planned = swapped_text(m.Drained(operations=(), plans=(PLAN, PLAN, PLAN)), PIPE)
    assert planned[0] == "1. migrate"
    assert planned.count("nothing was changed: this is only the plan") == 1


def test_a_cancelled_operation_is_reported_as_rolled_back() -> None:
    lines = cancelled_text(m.OperationReply(operation=operation("releasing", process("gpu0", "gpu0"))), PIPE)
    assert lines == ["operation 7 is rolled back: releasing"]


def test_a_followed_operation_shows_what_it_waits_for() -> None:
    waits = Wait(why="process 12 is stopped by a signal or a debugger", next="kill -CONT 12")
    line = "operation 7: restoring waits: process 12 is stopped by a signal or a debugger; next: kill -CONT 12"
    assert progress_text(OperationProgress(id="7", phase="restoring", waits=waits), PIPE) == [line]


def test_the_bar_advances_with_phases_and_bytes() -> None:
    phases = ("reserving", "quiescing", "offloading", "reloading", "verifying", "sealing", "done")
    lines = [
        progress_text(OperationProgress(id="7", phase=phase, moved_bytes=GIB, size_bytes=2 * GIB), PIPE)[0]
        for phase in phases
    ]
    filled = [line.count("#") for line in lines]
    assert filled == sorted(filled)
    assert filled[-2] < filled[-1] == 24
    assert lines[2] == "operation 7  [##########..............]  offloading  1.0 GiB of 2.0 GiB"
    assert "GiB" not in lines[1], "no bytes go while it waits for a boundary"


def test_a_plan_shows_the_state_of_the_job_afterwards_and_the_time_for_its_image() -> None:
    def estimate_line(**values: object) -> str:
        lines = plan_text(m.OperationReply(plan=PLAN.replace(**values)), PIPE)
        return next(line for line in lines if " about " in line or " downtime " in line)

    after = ", after it reaches its next boundary"
    assert estimate_line() == f"the estimated downtime is 1.25 s{after}"
    assert (
        estimate_line(kind="checkpoint", image_s=1.0)
        == f"the estimated downtime is 1.25 s, 1.0 s of it for the image{after}"
    )
    assert estimate_line(kind="checkpoint", image_s=1.0, ends=True) == (
        f"it would take about 1.2 s, 1.0 s of it for the image, until the job ends{after}"
    )
    assert estimate_line(kind="restore", image_s=1.0) == (
        "the job would train again after about 1.2 s, 1.0 s of it for the image"
    )


def test_a_suspend_that_keeps_contexts_reports_what_stays_on_which_gpu() -> None:
    kept = [process(None, None, "out", pid).replace(stays_bytes=600 << 20) for pid in (4711, 4712)]
    (line,) = operation_text(m.OperationReply(operation=operation("suspended", *kept, kind="suspend")), PIPE)
    assert "(gpu0 -> pool, 2.0 GiB, 1.2 GiB stays on gpu0)" in line
    (back,) = operation_text(m.OperationReply(operation=operation("done", *kept, kind="resume")), PIPE)
    assert "stays" not in back
