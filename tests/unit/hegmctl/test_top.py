"""`hegmctl top`: what it draws in a terminal of a given size, and what its keys do, by textual's own driver."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from textual.pilot import Pilot
from textual.widgets import Input

from hegmctl.tables import width
from hegmctl.top.app import Page, TopApp
from hegmctl.top.picture import HISTORY, ORDERS, JobRow, Listener, NodeView, Picture
from hegmd.errors import REFUSED, HegmError
from hegmd.protocol.operations import Operation, OperationProcess
from hegmd.protocol.snapshots import Event, Gpu, Health
from tests.cells import in_one_test

GIB = 1 << 30
SNAPSHOT = Path(__file__).with_name("top_80x24.txt")


def gpu(number: int, busy: float | None = None, *, state: str = "ok") -> Gpu:
    return Gpu(
        id=f"gpu{number}",
        index=number,
        uuid=f"GPU-{number}",
        vendor="simulated",
        name="Imagined H200",
        state=state,
        memory_total_bytes=141 * GIB,
        memory_used_bytes=None if busy is None else int(busy) * GIB,
        utilisation_percent=busy,
        health=Health(state="ok"),
    )


def job(number: int, state: str = "training", *, steps_per_s: float | None = 1.0) -> JobRow:
    return JobRow(
        f"j{number}",
        f"train-{number}",
        state,
        pids=(4000 + number,),
        gpus=(f"gpu{number % 16}",),
        vram_bytes=(200 - number) * GIB // 4,
        steps_per_s=None if steps_per_s is None else number * steps_per_s / 2,
        age_s=60.0 * number,
        command=f"train.py --seed {number}",
    )


def operation(op_id: str, phase: str, pid: int, *, moved_bytes: int = 0, downtime_s: float | None = None) -> Operation:
    return Operation(
        id=op_id,
        kind="migrate",
        phase=phase,
        processes=(
            OperationProcess(
                pid=pid,
                began_on="gpu0",
                gpu="gpu1",
                to="gpu2",
                size_bytes=8 * GIB,
                state="out",
                job=f"j{pid - 4000}",
                job_name=f"train-{pid - 4000}",
            ),
        ),
        created_utc=1.0,
        size_bytes=8 * GIB,
        moved_bytes=moved_bytes,
        downtime_s=downtime_s,
    )


OPERATIONS = (operation("1", "done", 4003, downtime_s=0.84), operation("2", "offloading", 4001, moved_bytes=3 * GIB))
EVENT = Event(seq=1, time_utc=0.0, kind="gpu.lost", severity="error", message="gpu3 is lost\x1b[31m")


def large(gpus: int = 16, jobs: int = 200) -> NodeView:
    gpus_shown = [gpu(number, 6.25 * number) for number in range(gpus)]
    rows = [job(number, "suspended" if number % 7 == 0 else "training") for number in range(1, jobs + 1)]
    return NodeView(0.0, "node1", gpus_shown, rows, OPERATIONS)


def text(picture: Picture, columns: int, rows: int) -> list[str]:
    return ["".join(part for part, _ in line) for line in picture.lines(columns, rows)]


def shown(picture: Picture) -> list[str]:
    """The ids of the jobs that are on the screen."""
    return [line[2:].split()[0] for line in text(picture, 80, 24) if line[2:3] == "j"]


@in_one_test(("columns", "rows"), [(60, 20), (80, 24), (120, 40), (200, 60)])
@in_one_test("unicode", [True, False])
def test_the_screen_is_filled_and_never_overrun(columns: int, rows: int, unicode: bool) -> None:
    picture = Picture(unicode=unicode)
    picture.take(large())
    picture.happened(EVENT)
    lines = text(picture, columns, rows)
    assert len(lines) == rows
    assert max(map(width, lines)) <= columns
    assert sum(line.startswith(("  j", "> j")) for line in lines) >= rows // 3
    assert all("\x1b" not in line for line in lines)
    assert unicode or all(line.isascii() for line in lines)
    if columns >= 80:
        assert all(any(f"gpu{number} " in line for line in lines) for number in range(16)), "every GPU is seen"


def test_the_screen_at_80_by_24_matches_the_recording() -> None:
    """To draw it again: delete the file, run this, and look at it."""
    picture = Picture(unicode=False)
    for busy in range(30):
        picture.take(
            NodeView(0.0, "node1", [gpu(0, busy * 3.0), gpu(1), gpu(2, state="lost")], large(0, 40).jobs, OPERATIONS)
        )
    picture.happened(EVENT)
    found = "\n".join(line.rstrip() for line in text(picture, 80, 24)) + "\n"
    if not SNAPSHOT.exists():
        SNAPSHOT.write_text(found)
        pytest.fail(f"{SNAPSHOT.name} was written: look at it")
    shown, expected = found.splitlines(), SNAPSHOT.read_text().splitlines()
    assert shown[0][:-8] == expected[0][:-8], "but for the clock"
    assert [line for line in shown[1:] if "lost\\x1b" not in line] == [
        line for line in expected[1:] if "lost\\x1b" not in line
    ]


def test_a_gpu_has_its_last_minutes_and_a_gap_where_nothing_was_known() -> None:
    picture = Picture(unicode=False)
    for busy in (*range(0, 100, 10), None):
        picture.take(NodeView(0.0, "n", [gpu(0, busy)], (), ()))
    assert picture.sparkline([0.0, 50.0, None, 100.0], 6) == "  _= #"
    first = text(picture, 80, 24)[1]
    assert "_.:" in first
    assert "-%" in first
    assert "-/141.0GiB" in first
    for _ in range(2 * HISTORY):
        picture.take(NodeView(0.0, "n", [gpu(0, 1.0)], (), ()))
    assert "#" not in text(picture, 200, 24)[1]


def test_a_failing_gpu_shows_the_reason_in_place_of_its_history() -> None:
    picture = Picture(unicode=False)
    health = Health(
        state="warn", condition="failing", reason="XID 63, last seen\x1b[31m: a bad memory row was recorded"
    )
    picture.take(NodeView(0.0, "n", [gpu(0, 90.0).replace(health=health)], (), ()))
    for columns in (40, 80, 200):
        first = text(picture, columns, 24)[1]
        assert first.startswith("gpu0  failing: X"[: columns // 3])
        assert first.rstrip().endswith("90.0/141.0GiB")
        assert len(first) <= columns
        assert "\x1b" not in first


def test_a_refresh_of_operations_adds_nothing_to_the_history_of_gpus() -> None:
    picture = Picture(unicode=False)
    gpus = NodeView(0.0, "n", [gpu(0, 99.0)], (), ())
    for _ in range(5):
        picture.take(NodeView(0.0, "n", gpus.gpus, gpus.jobs, ()))
    assert text(picture, 80, 24)[1].count("#") == 1


def test_a_waiting_job_shows_what_it_waits_for_in_place_of_its_figures() -> None:
    picture = Picture(unicode=False)
    waiting = JobRow("j2", "train", "waiting", command="train.py", waits="8.0 GiB on gpu0\x1b[31m")
    picture.take(NodeView(0.0, "n", (), [job(1), waiting], ()))
    lines = text(picture, 80, 24)
    assert "2 jobs, 1 waiting" in lines[0]
    assert lines[3].endswith(r"train waits: 8.0 GiB on gpu0\x1b[31m")
    assert "train.py --" in lines[2]


def test_jobs_are_ordered_by_each_column_and_filtered_by_text() -> None:
    picture = Picture()
    picture.take(NodeView(0.0, "n", (), [job(3), job(10, steps_per_s=None), job(1, "waiting")], ()))
    orders = {}
    for _ in ORDERS:
        orders[picture.order] = [row.id for row in picture.jobs]
        picture.next_order()
    assert orders["job"] == ["j1", "j3", "j10"]
    assert orders["gpu"] == ["j1", "j3", "j10"]
    assert orders["vram"] == ["j1", "j3", "j10"]
    assert orders["step/s"] == ["j3", "j1", "j10"]
    assert orders["age"] == ["j10", "j3", "j1"]
    assert orders["state"] == ["j3", "j10", "j1"]
    assert picture.order == "job"
    picture.filter = "SEED 10"
    assert [row.id for row in picture.jobs] == ["j10"]
    picture.filter = "nothing like that"
    assert any("no job matches the filter" in line for line in text(picture, 80, 24))


def test_the_cursor_stays_on_its_job_and_on_the_screen() -> None:
    picture = Picture()
    picture.take(large())
    for _ in range(50):
        picture.move(1)
    chosen = picture.job()
    assert chosen is not None
    assert chosen.id == "j51"
    assert "j51" in shown(picture)
    picture.move(-1000)
    assert shown(picture)[0] == "j1"
    picture.move(1000)
    assert shown(picture)[-1] == "j200"
    picture.take(large(16, 10))  # the chosen one has ended
    assert picture.job() is not None
    assert picture.job() is picture.jobs[0]


@in_one_test("columns", range(26, 130))
def test_the_line_of_keys_is_never_cut(columns: int) -> None:
    """Issue 19: at 80 columns it ended with `Tab operations  ~`, and `? help` was not seen."""
    line = text(Picture(), columns, 24)[-1]
    assert len(line) <= columns
    whole = "s suspend  r resume  m migrate  o order  / filter  t timeline  Tab operations  ? help  q quit"
    assert all(f"  {key}  " in f"  {whole}  " for key in line.split("  "))
    assert {"m migrate", "? help", "q quit"} <= set(line.split("  ")) or columns < 40
    if columns >= 80:
        assert {"s suspend", "r resume", "t timeline", "Tab operations"} <= set(line.split("  "))


@pytest.mark.parametrize(
    ("gpus", "proposed"),
    [(("gpu0",), "gpu2"), (("gpu0", "gpu2"), "gpu3,gpu1"), (("gpu0", "gpu1", "gpu2"), "gpu1,gpu2,gpu0"), ((), "gpu2")],
)
def test_a_migration_is_proposed_to_as_many_fit_gpus_as_the_job_has(gpus: tuple[str, ...], proposed: str) -> None:
    """Issue 19: one GPU was proposed for two ranks, and a lost one as well."""
    picture = Picture()
    failing = gpu(5, 0.0).replace(health=Health(state="failed", condition="failing", reason="XID 79"))
    known = [gpu(0, 50.0), gpu(1, 30.0), gpu(2, 0.0), gpu(3, 10.0), gpu(4, state="lost"), failing]
    picture.take(NodeView(0.0, "node1", known, (), ()))
    assert picture.target_for(JobRow("j1", "ranks", "training", gpus=gpus)) == proposed


def test_the_newest_operation_of_a_job_is_found_after_a_restart_has_changed_its_pid() -> None:
    picture = Picture()
    done = operation("1", "done", 4003).replace(job="j3")
    picture.take(NodeView(0.0, "node1", (), [JobRow("j3", "train", "training", pids=(5000,))], (done,)))
    assert picture.operation() == done


class FixedSource:
    """A source with the replies of a test, which records the queries."""

    def __init__(self) -> None:
        self.calls: list[tuple[object, ...]] = []
        self.refuses = False
        self.done = threading.Event()

    def start(self, listener: Listener) -> None:
        listener.on_view(large())
        listener.happened(EVENT)

    def stop(self) -> None:
        self.calls.append(("stop",))

    def plan(self, action: str, job: str, to: str | None, columns: int) -> list[str]:
        self.calls.append(("plan", action, job, to))
        if self.refuses:
            raise HegmError(REFUSED, "gpu9 is no GPU", "hegmctl gpus lists them")
        return ["it would stand for about 0.5 s"]

    def carry_out(self, action: str, job: str, to: str | None, tell: Callable[[str], object]) -> str:
        self.calls.append(("do", action, job, to))
        tell("offloading")
        self.done.set()
        return "operation 3: done"

    def timeline(self, op_id: str, columns: int, ellipsis: str) -> list[str]:
        self.calls.append(("timeline", op_id))
        return ["job  [trains]"]


async def until(pilot: Pilot[None], holds: Callable[[], bool]) -> None:
    """Let the screen and the threads of commands work until that holds."""
    for _ in range(2000):
        if holds():
            return
        await pilot.pause(0.01)
    raise AssertionError("it never came to that")


def page_of(app: TopApp) -> str:
    return app.screen.lines[0] if isinstance(app.screen, Page) else ""


@pytest.mark.thorough
async def test_keys_show_the_plan_first_and_act_only_on_a_yes() -> None:
    source, picture = FixedSource(), Picture()
    app = TopApp(source, picture)
    async with app.run_test(size=(80, 24)) as pilot:
        await until(pilot, lambda: bool(picture.jobs))
        await pilot.press("down", "s")
        await until(pilot, lambda: page_of(app) == "it would stand for about 0.5 s")
        await pilot.press("escape")
        assert source.calls == [("plan", "suspend", "j2", None)]
        await pilot.press("r")
        await until(pilot, lambda: isinstance(app.screen, Page))
        await pilot.press("enter")
        assert isinstance(app.screen, Page), "Enter is no yes"
        await pilot.press("y")
        await until(pilot, lambda: picture.notice == "operation 3: done")
        assert source.calls[1:] == [("plan", "resume", "j2", None), ("do", "resume", "j2", None)]


@pytest.mark.thorough
async def test_the_migrate_dialog_asks_for_a_target_and_shows_plan_and_refusals() -> None:
    source, picture = FixedSource(), Picture()
    app = TopApp(source, picture)
    async with app.run_test(size=(80, 24)) as pilot:
        await until(pilot, lambda: bool(picture.jobs))
        await pilot.press("m")
        await until(pilot, lambda: bool(app.screen.query(Input)))
        assert app.screen.query_one(Input).value == "gpu0", "a GPU that it is not on"
        await pilot.press(*"gpu5", "enter")
        await until(pilot, lambda: isinstance(app.screen, Page))
        await pilot.press("y")
        await until(pilot, lambda: picture.notice == "operation 3: done")
        assert source.calls == [("plan", "migrate", "j1", "gpu5"), ("do", "migrate", "j1", "gpu5")]
        source.refuses = True
        await pilot.press("m", "enter")
        await until(pilot, lambda: picture.notice == "gpu9 is no GPU; hegmctl gpus lists them")


@pytest.mark.thorough
async def test_order_filter_timeline_help_and_quit() -> None:
    source, picture = FixedSource(), Picture()
    app = TopApp(source, picture)
    async with app.run_test(size=(80, 24)) as pilot:
        await until(pilot, lambda: bool(picture.jobs))
        await pilot.press("o")
        assert picture.order == "gpu"
        await pilot.press("slash", *"train-17", "enter")
        await until(pilot, lambda: picture.filter == "train-17")
        assert len(picture.jobs) == 11
        await pilot.press("t")
        assert picture.notice == "no operation of this job is known"
        await pilot.press("tab", "down", "enter")
        await until(pilot, lambda: page_of(app) == "job  [trains]")
        assert source.calls == [("timeline", "1")]
        await pilot.press("escape", "question_mark")
        assert page_of(app).startswith("Up, Down")
        await pilot.press("escape", "q")
    assert source.calls[-1] == ("stop",)
