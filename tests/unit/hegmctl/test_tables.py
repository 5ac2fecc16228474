"""Text for people: escaping, widths, wrapping and tables."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hegmctl.tables import Column, Style, fitted, printable, shortened, table, width, wrapped
from tests.cells import in_one_test


@in_one_test(
    ("text", "shown"),
    [
        ("plain", "plain"),
        ("ümläut 漢字", "ümläut 漢字"),
        ("\x1b[31mred\x1b]0;title\x07", r"\x1b[31mred\x1b]0;title\x07"),
        ("two\nlines\ttab\r", r"two\nlines\ttab\r"),
        ("\u202egnp.exe", r"\u202egnp.exe"),  # turns the text around
        ("\x9b1m", r"\x9b1m"),  # the one-byte form of ESC [
        ("\udcff", r"\udcff"),  # an undecodable byte of a command line
    ],
)
def test_nothing_that_a_terminal_obeys_gets_through(text: str, shown: str) -> None:
    assert printable(text) == shown


@pytest.mark.thorough
@given(st.text())
def test_printable_text_can_be_written_anywhere(text: str) -> None:
    shown = printable(text)
    assert shown.isprintable()
    shown.encode()


@in_one_test(("text", "columns"), [("abc", 3), ("漢字", 4), ("e\u0301", 1), ("ümlaut", 6), ("", 0)])
def test_width_is_counted_in_columns_of_the_terminal(text: str, columns: int) -> None:
    assert width(text) == columns


@pytest.mark.thorough
@given(st.text(alphabet="ab漢字\u0301 ", max_size=30), st.integers(1, 40))
def test_shortened_text_fits(text: str, columns: int) -> None:
    short = shortened(text, columns, "…")
    assert width(short) <= columns
    assert short == text or short.endswith("…")


def test_wrapped_text_keeps_every_word_and_the_indent() -> None:
    lines = wrapped("one two three four averyverylongword", 10, "  ")
    assert lines == ["  one two", "  three", "  four", "  averyverylongword"]
    assert wrapped("", 10, "  ") == ["  "]


def test_a_long_line_wraps_under_its_last_column_and_keeps_its_colour() -> None:
    """Issue 19: a terminal of 60 columns broke events and checks inside a word."""
    red = Style(colour=True).paint("error", "red")
    line = f"     2  12:00:00  {red}  gpu5 is lost: it fell off the bus, as was asked for"
    assert fitted([line, "short"], 50) == [
        f"     2  12:00:00  {red}  gpu5 is lost: it fell off",
        "                         the bus, as was asked for",
        "short",
    ]
    assert fitted([line], None) == fitted([line], 200) == [line]
    assert fitted(["  indented words go on", "and others further in"], 14) == [
        "  indented",
        "  words go on",
        "and others",
        "  further in",
    ]
    assert fitted(["/a/path/that/is/longer/than/the/line and more"], 12) == [
        "/a/path/that/is/longer/than/the/line",
        "  and more",
    ]


@pytest.mark.thorough
@given(
    st.lists(st.text(alphabet="abc", min_size=1, max_size=12)),
    st.sampled_from((" ", "  ", "    ")),
    st.integers(20, 60),
)
def test_no_word_is_lost_or_broken_and_no_line_is_too_long(words: list[str], gap: str, columns: int) -> None:
    lines = fitted([gap.join(words)], columns)
    assert " ".join(lines).split() == words
    assert all(len(line) <= columns or len(line.split()) == 1 for line in lines)


COLUMNS = (Column("ID"), Column("NAME", shrink=4), Column("SIZE", right=True), Column("EXTRA", drop=1), Column("LAST"))
ROWS = [["1", "a long name", "10", "more", "z"], ["22", "漢字", "9", "-", "last cell"]]


def test_columns_are_aligned_by_displayed_width() -> None:
    assert table(COLUMNS, ROWS, Style()) == [
        "ID  NAME         SIZE  EXTRA  LAST",
        "1   a long name    10  more   z",
        "22  漢字            9  -      last cell",
    ]


def test_a_pipe_gets_every_column_in_full() -> None:
    rows = [["1", "n" * 500, "10", "more", "z"]]
    assert "n" * 500 in table(COLUMNS, rows, Style(columns=None))[1]


def test_a_narrow_terminal_shortens_first_and_then_drops_the_least_important() -> None:
    assert table(COLUMNS, ROWS, Style(columns=33, ellipsis="…"))[1] == "1   a lo…    10  more   z"
    narrow = table(COLUMNS, ROWS, Style(columns=30, ellipsis="…"))
    assert narrow[0] == "ID  NAME       SIZE  LAST"  # EXTRA is gone, and its room goes to the name
    assert narrow[1] == "1   a long n…    10  z"


@pytest.mark.thorough
@given(st.integers(20, 120))
def test_no_line_is_wider_than_the_terminal_while_anything_can_give(columns: int) -> None:
    least = len("22") + 4 + 4 + len("last cell") + 3 * 2
    if columns >= least:
        assert all(width(line) <= columns for line in table(COLUMNS, ROWS, Style(columns=columns)))


def test_colour_does_not_disturb_the_alignment() -> None:
    rows: list[list[str | tuple[str, str]]] = [[("ok", "green"), "x", "1", "e", "l"], ["failed", "x", "1", "e", "l"]]
    coloured = table(COLUMNS, rows, Style(colour=True))
    assert coloured[1].startswith("\x1b[32mok\x1b[0m      x")
    assert coloured[2].startswith("failed  x")


def test_an_escape_sequence_in_a_cell_stays_in_it() -> None:
    assert "\x1b" not in "".join(table(COLUMNS, [["\x1b[2J", "\x1b", "1", "e", "l"]], Style()))
