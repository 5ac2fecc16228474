"""Pictures and tables show what was measured, and are as fresh as the code and the records they come from."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path

import pytest

from hegmd.migration.machine.machine import PHASES
from tests.cells import in_one_test
from tests.house.source import ROOT
from tools.pictures import drawings, records, tables, terminal
from tools.pictures.gallery import GALLERY, PICTURES, Picture
from tools.pictures.themes import LIGHT, THEMES, Theme

FILES = [(picture, theme) for picture in GALLERY for theme in THEMES]
REQUIRED = {"title", "machine", "date", "revision", "command", "rows"}


@in_one_test(("picture", "theme"), FILES, ids=lambda part: part.name)
def test_a_picture_is_fresh(picture: Picture, theme: Theme) -> None:
    assert picture.is_fresh(theme), f"{picture.path(theme).name} is stale: run `make pictures`"
    ET.fromstring(picture.path(theme).read_text())


def test_a_stale_picture_is_detected(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    figures.write_text("1")
    picture = replace(GALLERY[0], inputs=(figures,))
    before = picture.digest()
    figures.write_text("2")
    assert picture.digest() != before
    assert not picture.is_fresh(LIGHT)


def test_no_picture_is_without_a_source() -> None:
    assert sorted(PICTURES.glob("*.svg")) == sorted(picture.path(theme) for picture, theme in FILES)


def test_each_picture_is_shown_in_both_themes() -> None:
    pages = "".join(path.read_text() for path in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")))
    assert [p.path(t).name for p, t in FILES if p.path(t).name not in pages] == []


def words_of(name: str) -> set[str]:
    return set(re.findall(r"<text[^>]*>([^<]*)</text>", (PICTURES / f"{name}-light.svg").read_text()))


def test_the_bars_have_the_measured_figures() -> None:
    bars = [*records.migration_bars(), *records.restart_bars()]
    assert {bar.figure() for bar in bars} | {bar.label for bar in bars} <= words_of("downtime")


def test_the_timeline_adds_up_to_the_measured_downtime() -> None:
    """The phases are medians of their own, so their sum may be 3 % off the median of the whole."""
    for line in records.timelines():
        assert sum(seconds for _, seconds in line.phases) == pytest.approx(line.downtime_s, rel=0.03)
        assert f"{line.downtime_s:.2f} s" in words_of("timeline")


def test_the_drawing_names_phases_that_the_machine_has() -> None:
    assert {phase for phase, *_ in drawings.STEPS} - {"plan"} <= set(PHASES)


def test_a_terminal_shows_the_last_output() -> None:
    events = [(0.0, "\x1b[1m$ ls\x1b[0m\r\n"), (0.5, "abcdef"), (1.0, "\r\x1b[32mxy\x1b[0m\x1b[K\r\n"), (2.0, "end")]
    lines = terminal.play(events, 80)
    assert ["".join(character for character, _ in line.cells) for line in lines] == ["$ ls", "xy", "end"]
    assert [at for at, _ in lines[1].versions] == [0.5, 1.0]
    assert lines[1].cells[0] == ("x", "32")


def test_a_terminal_wraps_long_lines() -> None:
    assert [len(line.cells) for line in terminal.play([(0.0, "x" * 25)], 10)] == [10, 10, 5]


@in_one_test("path", sorted(records.MEASUREMENTS.glob("*.json")), ids=lambda path: path.stem)
def test_a_record_has_the_place_time_and_program_of_its_measurement(path: Path) -> None:
    record = records.record(path.stem)
    assert record.keys() >= REQUIRED
    assert all(record[field] for field in REQUIRED)


def test_the_tables_have_the_figures_of_the_records() -> None:
    page = tables.PAGE.read_text()
    assert page == tables.refreshed(page), "docs/benchmarks.md is stale: run `make docs`"
    assert page.count("<!-- table: end -->") == len(re.findall(r"<!-- table \S+: ", page))


def test_a_changed_figure_in_a_table_is_detected() -> None:
    page = tables.PAGE.read_text()
    (row, *_) = [line for line in page.splitlines() if re.match(r"\| 32 \| migrate", line)]
    assert tables.refreshed(page.replace(row, row.replace("32", "33"))) == page
    with pytest.raises(LookupError):
        tables.table("moves", "no_such_field")
