"""The terminal output: colours, widths, redrawing in place, and a terminal that is restored after every exit."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from hegmctl.operating_text import progress_text
from hegmctl.output import TextSink
from hegmctl.tables import Style
from hegmd.errors import NOT_FOUND, HegmError
from hegmd.protocol import messages as m
from hegmd.protocol.operations import OperationProgress
from tests.unit.hegmctl import node
from tests.unit.hegmctl.fake_daemon import FakeDaemon, failing, saying
from tests.unit.hegmctl.running import hegmctl
from tests.unit.hegmctl.terminal import Terminal

GREEN = "\x1b[32m"


@pytest.mark.parametrize(
    ("words", "environ", "coloured"),
    [
        (("gpus",), {}, True),
        (("gpus", "--no-color"), {}, False),
        (("gpus",), {"NO_COLOR": "1"}, False),
        (("gpus",), {"NO_COLOR": ""}, True),  # see no-color.org
        (("gpus",), {"TERM": "dumb"}, False),
        (("gpus",), {"TERM": "vt100"}, False),  # issue 19
        (("gpus",), {"TERM": "xterm-mono"}, False),
        (("gpus", "--color"), {"TERM": "dumb", "NO_COLOR": "1"}, True),
    ],
)
def test_colours_on_a_terminal(
    daemon: FakeDaemon, words: tuple[str, ...], environ: dict[str, str], coloured: bool
) -> None:
    with Terminal(*words, socket=daemon.path, environ=environ) as terminal:
        assert terminal.end() == 0
    assert (GREEN in terminal.picture.raw) == coloured
    assert terminal.picture.painted == coloured


def test_colours_in_a_pipe_need_a_request(daemon: FakeDaemon) -> None:
    assert GREEN not in hegmctl("gpus", socket=daemon.path).stdout
    assert GREEN in hegmctl("gpus", "--color", socket=daemon.path).stdout


@pytest.mark.parametrize("columns", [50, 80, 120])
def test_a_table_is_as_wide_as_the_terminal_allows(daemon: FakeDaemon, columns: int) -> None:
    daemon.answers[m.Processes] = saying(
        node.PROCESSES.replace(processes=(node.TRAINING.replace(command="python3 " + "x" * 300),))
    )
    with Terminal("ps", socket=daemon.path, columns=columns) as terminal:
        assert terminal.end() == 0
    row = terminal.picture.lines[1]
    assert row.endswith("x…")
    assert len(row) == columns


def test_columns_of_the_environment_win(daemon: FakeDaemon) -> None:
    with Terminal("gpus", socket=daemon.path, columns=200, environ={"COLUMNS": "60"}) as terminal:
        terminal.end()
    assert len(terminal.picture.lines[0]) <= 60


def test_an_error_on_a_terminal_has_its_hint_on_a_separate_line(daemon: FakeDaemon) -> None:
    daemon.answers[m.Gpus] = failing(HegmError(NOT_FOUND, "what failed", "what to do"))
    with Terminal("gpus", socket=daemon.path) as terminal:
        assert terminal.end() == 5
    assert terminal.picture.lines[:2] == ["hegmctl: what failed", "  → what to do"]


TWO = HegmError(
    NOT_FOUND,
    "there is no GPU gpu7\nthe number 4711 is taken",
    "the GPUs here: gpu0; end that one",
    {
        "reasons": [
            {"code": "not-found", "message": "there is no GPU gpu7", "hint": "the GPUs here: gpu0"},
            {"code": "refused", "message": "the number 4711 is taken", "hint": "end that one"},
        ]
    },
)


def test_hints_were_not_matched_to_their_reasons(daemon: FakeDaemon) -> None:
    daemon.answers[m.Gpus] = failing(TWO)
    with Terminal("gpus", socket=daemon.path) as terminal:
        assert terminal.end() == 5
    first, second = "hegmctl: there is no GPU gpu7", "hegmctl: the number 4711 is taken"
    assert terminal.picture.lines[:4] == [first, "  → the GPUs here: gpu0", second, "  → end that one"]
    ran = hegmctl("gpus", socket=daemon.path)
    assert ran.stderr == f"{first}; the GPUs here: gpu0\n{second}; end that one\n"


def test_a_long_wait_is_reported_in_a_pipe_too(capsys: pytest.CaptureFixture[str]) -> None:
    now = [0.0]
    sink = TextSink(Style(), Style(), clock=lambda: now[0])
    for at_s, moved_bytes in ((0.0, 0), (4.9, 1), (5.1, 2), (6.0, 3), (10.2, 4)):
        now[0] = at_s
        sink.progress(OperationProgress(id="7", phase="reading", moved_bytes=moved_bytes, size_bytes=8), progress_text)
    sink.end_progress()
    output = capsys.readouterr()
    assert output.out == ""
    assert [line.rpartition("]")[2] for line in output.err.splitlines()] == [
        "  reading  2 B of 8 B",
        "  reading  4 B of 8 B",
    ]
    quiet = TextSink(Style(), Style(), quiet=True, clock=lambda: now[0])
    for now[0] in (20.0, 40.0):
        quiet.progress(OperationProgress(id="7", phase="reading"), progress_text)
    assert capsys.readouterr().err == ""


def test_coloured_progress_filled_a_narrow_terminal_with_its_lines(capsys: pytest.CaptureFixture[str]) -> None:
    """A line that the terminal wraps cannot be overwritten."""
    for columns, shown in ((20, "operation 7  [#####"), (80, "\x1b[36m")):
        sink = TextSink(Style(), Style(colour=True, columns=columns))
        sink.progress(OperationProgress(id="7", phase="quiescing"), progress_text)
        written = capsys.readouterr().err
        assert shown in written
        assert columns > 20 or written == f"\r{shown}\x1b[K"


def test_json_is_laid_out_for_people_on_a_terminal(daemon: FakeDaemon) -> None:
    with Terminal("ping", "--json", socket=daemon.path) as terminal:
        assert terminal.end() == 0
    assert terminal.picture.lines[1] == '  "schema": 1,'


def _watching(daemon: FakeDaemon, lines: int = 24) -> Terminal:
    return Terminal("ps", "--watch=0.1", socket=daemon.path, lines=lines)


def test_watching_redraws_in_place(daemon: FakeDaemon) -> None:
    with _watching(daemon) as terminal:
        lines = terminal.until(lambda lines: any("train.py" in line for line in lines))
        assert terminal.picture.second
        assert "25" not in terminal.picture.modes, "the cursor is hidden"
        assert "hegmctl ps --watch=0.1" in lines[0]
        daemon.answers[m.Processes] = saying(node.PROCESSES.replace(processes=(node.TRAINING.replace(pid=31337),)))
        lines = terminal.until(lambda lines: any("31337" in line for line in lines))
        assert not any("4711" in line for line in lines), "nothing of the picture before is left"
        assert sum("COMMAND" in line for line in lines) == 1


def test_watching_sends_a_dumb_terminal_no_control_sequences(daemon: FakeDaemon) -> None:
    """The shell of an editor and a serial console had the sequences for redrawing among the lines."""
    with Terminal("ps", "--watch=0.1", socket=daemon.path, environ={"TERM": "dumb"}) as terminal:
        terminal.until(lambda lines: sum("train.py" in line for line in lines) == 2)
        assert terminal.end(signal.SIGINT) == -signal.SIGINT
    assert "\x1b" not in terminal.picture.raw


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_the_terminal_is_restored_with_the_last_screen_on_it(daemon: FakeDaemon, number: signal.Signals) -> None:
    with _watching(daemon) as terminal:
        terminal.until(lambda lines: any("train.py" in line for line in lines))
        assert terminal.end(number) == -number
    picture = terminal.picture
    assert not picture.second
    assert picture.modes == {"25", "7"}
    assert picture.lines[0].startswith(" PID  USER"), picture.lines
    assert not any("Traceback" in line for line in picture.lines)


def test_watching_ends_with_an_error_on_a_terminal_that_was_put_right(daemon: FakeDaemon) -> None:
    with _watching(daemon) as terminal:
        terminal.until(lambda lines: any("train.py" in line for line in lines))
        daemon.answers[m.Processes] = failing(HegmError(NOT_FOUND, "no process 4711", "hegmctl ps lists them"))
        assert terminal.end() == 5
    assert not terminal.picture.second
    assert "hegmctl: no process 4711" in terminal.picture.lines


def test_a_resized_terminal_is_redrawn_immediately(daemon: FakeDaemon) -> None:
    long = node.PROCESSES.replace(processes=(node.TRAINING.replace(command="python3 " + "x" * 300),))
    daemon.answers[m.Processes] = saying(long)
    with Terminal("ps", "--watch=1000", socket=daemon.path, columns=80) as terminal:
        terminal.until(lambda lines: any("x…" in line and len(line) == 80 for line in lines))
        terminal.resize(120, 30)
        terminal.until(lambda lines: any("x…" in line and len(line) == 120 for line in lines))
        assert sum(isinstance(request, m.Processes) for request in daemon.requests) == 1, "nothing was asked for that"


def test_lines_that_do_not_fit_are_counted(daemon: FakeDaemon) -> None:
    many = tuple(node.TRAINING.replace(pid=pid) for pid in range(100, 140))
    daemon.answers[m.Processes] = saying(node.PROCESSES.replace(processes=many))
    with _watching(daemon, lines=12) as terminal:
        lines = terminal.until(lambda lines: any("more lines" in line for line in lines))
        assert len(lines) == 12
        assert lines[-1] == "... and 32 more lines"


def test_watching_outlives_the_daemon(socket_path: Path) -> None:
    with FakeDaemon(socket_path, node.answers()) as first, _watching(first) as terminal:
        terminal.until(lambda lines: any("train.py" in line for line in lines))
        first.stop()
        lines = terminal.until(lambda lines: "waiting for the daemon" in lines[0])
        assert any("train.py" in line for line in lines), "what was seen last stays to be read"
        answers = node.answers()
        answers[m.Processes] = saying(node.PROCESSES.replace(processes=(node.TRAINING.replace(pid=31337),)))
        with FakeDaemon(socket_path, answers):
            lines = terminal.until(lambda lines: any("31337" in line for line in lines))
            assert "waiting" not in lines[0]


def test_ctrl_z_gives_the_terminal_back_for_as_long_as_it_lasts(daemon: FakeDaemon) -> None:
    with _watching(daemon) as terminal:
        terminal.until(lambda lines: any("train.py" in line for line in lines))
        terminal.process.send_signal(signal.SIGTSTP)
        _pid, status = os.waitpid(terminal.process.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status)
        terminal.until(lambda _lines: not terminal.picture.second)
        assert "25" in terminal.picture.modes
        terminal.process.send_signal(signal.SIGCONT)
        terminal.until(lambda lines: terminal.picture.second and any("train.py" in line for line in lines))
