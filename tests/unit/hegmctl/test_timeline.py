"""`hegmctl op --timeline`: the lanes that a story gives, as bars that fit a terminal, as SVG and as a page."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from hegmctl.tables import Style, width
from hegmctl.timeline import LANES, OFF, PARKED, TRAINS, Timeline, timeline_of
from hegmctl.timeline_svg import html_of, svg_of
from hegmctl.timeline_text import timeline_text
from hegmd.protocol import messages as m
from hegmd.protocol.operations import Operation, OperationProcess, StoryLine, Timing
from tests.cells import in_one_test
from tests.unit.hegmctl.fake_daemon import FakeDaemon, saying
from tests.unit.hegmctl.running import hegmctl

BEGAN = 1_790_000_000.0
GIB = 1 << 30
HOSTILE = "<script>alert('x')</script>\x1b[31m&"
MOVED = Operation(
    id="4",
    kind="migrate",
    phase="done",
    processes=(OperationProcess(pid=4711, began_on="gpu0", gpu="gpu1", to="gpu1", size_bytes=GIB, state="running"),),
    created_utc=BEGAN,
    size_bytes=GIB,
    downtime_s=1.5,
)


def line(at_s: float, event: str, phase: str, *timings: Timing, detail: str = "", effects: str = "") -> StoryLine:
    return StoryLine(
        utc=BEGAN + at_s,
        event=event,
        cause={"parked": "park", "offloaded": "offload", "restored": "restore"}.get(event, ""),
        detail=f"worker 4711-99{detail}" if event else "",
        phase=phase,
        effects=tuple(effects.split(",")) if effects else (),
        timings=timings,
    )


def timing(lane: str, name: str, at_s: float, took_s: float, size_bytes: int = 0) -> Timing:
    return Timing(lane=lane, name=name, began_utc=BEGAN + at_s, took_s=took_s, size_bytes=size_bytes)


STORY = (
    line(0.0, "", "planned"),
    line(0.125, "begin", "reserving", effects="reserve 4711-99"),
    line(0.5, "reserved", "quiescing", effects="park 4711-99"),
    line(1.0, "parked", "offloading", timing("agent", "park", 0.5, 0.5), detail=", parked_s 0.25",
         effects="offload 4711-99"),
    line(1.5, "offloaded", "checkpointing", timing("copies", "out", 1.0, 0.5, GIB), timing("helper", "copy", 1.0, 0.5)),
    line(1.75, "checkpointed", "restoring", timing("driver", "checkpoint", 1.5, 0.25), effects="restore 4711-99"),
    line(2.0, "restored", "reloading", timing("driver", "restore", 1.75, 0.25), detail=", landed None, pid None"),
    line(2.25, "released", "verifying", timing("copies", "in", 2.0, 0.1, GIB), timing("copies", "in", 2.0, 0.25, GIB)),
    line(2.5, "verified", "done"),
)  # fmt: skip
REPLY = m.StoryReply(operation=MOVED, story=STORY)


def segments_of(timeline: Timeline, lane: str) -> list[tuple[str, float, float]]:
    return [(segment.name, segment.began_s, segment.ended_s) for segment in timeline.segments if segment.lane == lane]


def test_each_lane_has_its_steps_of_the_story() -> None:
    timeline = timeline_of(REPLY, BEGAN + 100)
    job = [(TRAINS, 0.0, 0.75), (PARKED, 0.75, 1.75), (OFF, 1.75, 2.0), (PARKED, 2.0, 2.25), (TRAINS, 2.25, 2.5)]
    assert segments_of(timeline, "job") == job
    assert segments_of(timeline, "daemon")[:2] == [("planned", 0.0, 0.125), ("reserving", 0.125, 0.5)]
    assert segments_of(timeline, "agent") == [("park", 0.5, 1.0)]
    assert segments_of(timeline, "driver") == [("checkpoint", 1.5, 1.75), ("restore", 1.75, 2.0)]
    assert (timeline.took_s, timeline.shortened) == (2.5, ())
    copied = timeline.copied("in")
    assert copied is not None
    assert (copied.took_s, copied.size_bytes, copied.bytes_per_s) == (0.25, 2 * GIB, 8 * GIB)
    assert [len(timeline.rows(lane)) for lane in LANES] == [1, 1, 1, 1, 1, 2], "two copies at one time need two rows"


def test_a_process_without_an_agent_is_off_its_gpu_from_the_order_to_the_driver_on() -> None:
    alone = (
        line(0.0, "", "planned"),
        line(1.0, "reserved", "checkpointing", effects="checkpoint 4711-99"),
        line(2.0, "checkpointed", "restoring", effects="restore 4711-99"),
        line(3.0, "restored", "done"),
    )
    timeline = timeline_of(m.StoryReply(operation=MOVED.replace(way="driver"), story=alone), BEGAN)
    assert segments_of(timeline, "job") == [(TRAINS, 0.0, 1.0), (OFF, 1.0, 3.0)]


def test_a_story_of_an_earlier_daemon_has_its_effects_in_the_lanes() -> None:
    earlier = tuple(each.replace(timings=()) for each in STORY)
    timeline = timeline_of(REPLY.replace(story=earlier), BEGAN)
    assert segments_of(timeline, "agent") == [("park", 0.5, 1.0), ("offload", 1.0, 1.5)]
    assert segments_of(timeline, "driver") == [("restore", 1.75, 2.0)]


def test_a_running_operation_lasts_until_now() -> None:
    moving = REPLY.replace(operation=MOVED.replace(phase="reloading"), story=STORY[:-2])
    timeline = timeline_of(moving, BEGAN + 10)
    assert timeline.took_s == 10
    assert segments_of(timeline, "job")[-1] == (PARKED, 2.0, 10.0)


def test_an_hour_of_suspension_leaves_the_move_readable() -> None:
    suspended = (*STORY[:6], *(each.replace(utc=each.utc + 3600) for each in (STORY[6], STORY[7], STORY[8])))
    shifted = tuple(
        each.replace(timings=tuple(one.replace(began_utc=one.began_utc + 3600) for one in each.timings))
        if each.utc > BEGAN + 3000 else each
        for each in suspended
    )  # fmt: skip
    timeline = timeline_of(REPLY.replace(story=shifted), BEGAN)
    assert timeline.shortened == ((1.75, 3601.75),)
    assert timeline.place(1.75) > 0.5
    assert timeline.place(3601.75) - timeline.place(1.75) < 0.2
    for place in (0.0, 0.1, 0.5, 0.9, 1.0):
        assert timeline.place(timeline.instant(place)) == pytest.approx(place)


@in_one_test("columns", [60, 80, 120])
@in_one_test("ellipsis", ["…", "~"])
def test_the_bars_fit_the_terminal(columns: int, ellipsis: str) -> None:
    lines = timeline_text(REPLY, Style(columns=columns, ellipsis=ellipsis))
    assert max(width(each) for each in lines[1:]) <= columns  # the first is a sentence, which the terminal wraps
    if ellipsis == "~":
        assert all(each.isascii() for each in lines)
    job = next(each for each in lines if each.startswith("job"))
    assert columns - 3 <= len(job) <= columns, "the bars use the whole width"
    assert [each.split()[0] for each in lines if each.split(" ")[0] in LANES] == list(LANES)


def test_the_bars_in_a_pipe_show_durations() -> None:
    lines = timeline_text(REPLY, Style())
    assert "[trains====================][parked=====" in next(each for each in lines if each.startswith("job"))
    assert "in all 2.500 s; the job did not train for 1.500 s" in lines
    assert "copied in: 2.0 GiB in 0.250 s, 8.6 GB/s" in lines
    assert any(each.split() == ["1.000", "s", "0.500", "s", "copies", "out", "1.0", "GiB", "2.1", "GB/s", "4711"]
               for each in lines)  # fmt: skip


def test_a_forgotten_history_is_reported_as_forgotten() -> None:
    lines = timeline_text(m.StoryReply(operation=MOVED, story=()), Style())
    assert lines[-1] == "there is nothing to draw: its story is not remembered"


def test_the_drawing_has_a_bar_for_each_segment_and_no_markup_from_a_name() -> None:
    hostile = line(2.4, "failed", "verifying", timing("agent", HOSTILE, 2.3, 0.1))
    reply = REPLY.replace(story=(*STORY[:-1], hostile, STORY[-1]))
    for theme in ("", "light", "dark"):
        svg = svg_of(reply, theme=theme)
        root = ET.fromstring(svg)
        bars = root.findall(".//{http://www.w3.org/2000/svg}g/{http://www.w3.org/2000/svg}rect")
        assert len(bars) == len(timeline_of(reply, BEGAN).segments)
        assert ("prefers-color-scheme: dark" in svg) is (theme == "")
    page = html_of(reply)
    assert "<script" not in page
    assert "\x1b" not in page
    assert "&lt;script&gt;" in page
    assert "default-src 'none'" in page
    assert page.count("http") == 1 + page.count("http-equiv"), "the name of SVG is the only address"


@pytest.mark.parametrize(("option", "begins"), [("--svg", "<svg "), ("--html", "<!DOCTYPE html>")])
def test_a_drawing_is_written_whole_or_not_at_all(daemon: FakeDaemon, tmp_path: Path, option: str, begins: str) -> None:
    daemon.answers[m.Story] = saying(REPLY)
    file = tmp_path / "move"
    file.write_text("of before")
    ran = hegmctl("op", "4", "--timeline", option, str(file), socket=daemon.path)
    assert (ran.returncode, ran.stdout) == (0, "")
    assert file.read_text().startswith(begins)
    assert list(tmp_path.glob("move*")) == [file]
    ran = hegmctl("op", "4", "--timeline", option, str(tmp_path / "none/move"), socket=daemon.path)
    assert ran.returncode != 0
    assert "cannot be written: No such file" in ran.stderr
    ran = hegmctl("op", "4", option, str(file), socket=daemon.path)
    assert ran.returncode == 2
    assert "add --timeline" in ran.stderr
