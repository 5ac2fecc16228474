"""The log: what records carry, what a hostile text or peer can do to it, and what a slow reader costs."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import re
import resource
import socket
import warnings
from collections.abc import Iterator
from pathlib import Path

import anyio
import pytest

from hegmd.errors import BAD_CONFIG, HegmError
from hegmd.telemetry.log import (
    Limiter,
    LogSetup,
    SinkHandler,
    current_operation,
    error_ref,
    fields,
    limited,
    operation,
    set_up,
)

logger = logging.getLogger("hegmd.test")
HOSTILE = "x\n2026-11-21T10:30:00.000Z info    hegmd.telemetry.audit: forged\x1b[2J\u202e\x9b\ud800"


class Pipe:
    """A reader of the log at the other end of stderr."""

    def __init__(self) -> None:
        self.reader, self.writer = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self.reader, False)

    def read(self) -> str:
        """Return everything written so far."""
        parts: list[bytes] = []
        try:
            while part := os.read(self.reader, 1 << 20):
                parts.append(part)
        except BlockingIOError:
            pass
        return b"".join(parts).decode()

    def lines(self) -> list[str]:
        return self.read().splitlines()

    def close(self) -> None:
        os.close(self.reader)
        os.close(self.writer)


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    made = Pipe()
    yield made
    made.close()


@pytest.fixture
def as_text(pipe: Pipe) -> Iterator[LogSetup]:
    with set_up("info", "text", descriptor=pipe.writer) as made:
        yield made


@pytest.fixture
def as_json(pipe: Pipe) -> Iterator[LogSetup]:
    with set_up("info", "json", descriptor=pipe.writer) as made:
        yield made


@pytest.fixture
def journal(socket_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as made:
        made.bind(str(socket_path))
        yield made


@pytest.fixture
def as_journal(journal: socket.socket, pipe: Pipe, socket_path: Path) -> Iterator[LogSetup]:
    with set_up("info", "journal", descriptor=pipe.writer, journal_path=str(socket_path)) as made:
        yield made


def test_a_line_of_text_has_time_level_logger_message_and_fields(pipe: Pipe, as_text: LogSetup) -> None:
    logger.warning("a %s", "message", extra=fields(gpu="gpu0", used_bytes=12, name="a b", empty="", none=None, ok=True))
    [line] = pipe.lines()
    time, rest = line.split(" ", 1)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", time)
    assert rest == 'warning hegmd.test: a message gpu=gpu0 used_bytes=12 name="a b" empty="" ok=true'


def test_text_from_a_peer_can_neither_forge_a_line_nor_move_the_cursor(pipe: Pipe, as_text: LogSetup) -> None:
    logger.info("name %s", HOSTILE, extra=fields(name=HOSTILE))
    [line] = pipe.lines()
    assert line.isprintable()
    assert r"name x\n2026" in line
    assert r"\x1b[2J\u202e\x9b\ud800" in line


def test_a_traceback_cannot_forge_a_line_either(pipe: Pipe, as_text: LogSetup) -> None:
    try:
        raise ValueError(HOSTILE)
    except ValueError:
        logger.exception("failed")
    head, *rest = pipe.lines()
    assert head.endswith("error   hegmd.test: failed")
    assert all(line.startswith("    ") and line.isprintable() for line in rest)
    assert any("test_a_traceback_cannot_forge" in line for line in rest)


def test_json_gives_one_object_a_line_that_no_field_can_counterfeit(pipe: Pipe, as_json: LogSetup) -> None:
    logger.info(
        "said %s", HOSTILE, extra=fields(message="other", level="other", nested={"a": (1, {2})}, odd=float("nan"))
    )
    try:
        raise ValueError("bad")
    except ValueError:
        logger.exception("failed", extra=fields(path=Path("/x")))
    first, second = (json.loads(line) for line in pipe.lines())
    assert list(first)[:4] == ["time", "level", "logger", "message"]
    assert (first["level"], first["logger"], first["message"]) == ("info", "hegmd.test", f"said {HOSTILE}")
    assert first["nested"] == {"a": [1, [2]]}
    assert first["odd"] == "nan"
    assert second["path"] == "/x"
    assert second["traceback"][-1] == "ValueError: bad"


def test_the_journal_gets_fields(journal: socket.socket, as_journal: LogSetup, pipe: Pipe) -> None:
    with operation("reload", uid=1000, pid=77) as operation_id:
        logger.error("failed\x1b", extra=fields(error_ref="abc", vram_bytes=5))
    record = dict(line.split("=", 1) for line in journal.recv(1 << 16).decode().splitlines())
    assert record.pop("CODE_LINE").isdigit()
    assert record == {
        "MESSAGE": r"failed\x1b",
        "PRIORITY": "3",
        "SYSLOG_IDENTIFIER": "hegmd",
        "LOGGER": "hegmd.test",
        "CODE_FILE": __file__,
        "CODE_FUNC": "test_the_journal_gets_fields",
        "HEGM_OPERATION": operation_id,
        "HEGM_OP": "reload",
        "HEGM_UID": "1000",
        "HEGM_PID": "77",
        "HEGM_ERROR_REF": "abc",
        "HEGM_VRAM_BYTES": "5",
    }
    assert pipe.read() == ""


@pytest.mark.parametrize(
    ("level", "priority"), [("debug", "7"), ("info", "6"), ("warning", "4"), ("error", "3"), ("critical", "2")]
)
def test_levels_are_the_journals_priorities(
    journal: socket.socket, as_journal: LogSetup, level: str, priority: str
) -> None:
    as_journal.configure("debug", "journal")
    getattr(logger, level)("x")
    assert f"\nPRIORITY={priority}\n" in journal.recv(1 << 16).decode()


def test_auto_is_the_journal_where_stderr_goes_there_and_text_elsewhere(
    journal: socket.socket, pipe: Pipe, socket_path: Path
) -> None:
    found = os.fstat(pipe.writer)
    there = {"JOURNAL_STREAM": f"{found.st_dev}:{found.st_ino}"}
    with set_up("info", "auto", descriptor=pipe.writer, environ=there, journal_path=str(socket_path)) as made:
        assert made.format == "journal"
        logger.info("x")
    assert journal.recv(1 << 16).startswith(b"MESSAGE=x\n")
    with set_up("info", "auto", descriptor=pipe.writer, environ={}, journal_path=str(socket_path)) as made:
        assert made.format == "text"
        logger.info("x")
    assert len(pipe.lines()) == 1


def test_a_journal_for_which_no_descriptor_is_left_is_refused_and_the_log_stays_as_it_was(
    journal: socket.socket, socket_path: Path, pipe: Pipe
) -> None:
    """A SIGHUP at that moment ended the daemon."""
    with set_up("info", "text", descriptor=pipe.writer, journal_path=str(socket_path)) as made:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
        try:
            with pytest.raises(HegmError, match="Too many open files") as caught:
                made.configure("info", "journal")
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert "LimitNOFILE=" in caught.value.hint
        assert made.format == "text"


def test_a_missing_journal_is_refused_and_the_log_is_unchanged(pipe: Pipe) -> None:
    with set_up("info", "text", descriptor=pipe.writer, journal_path="/nonexistent") as made:
        with pytest.raises(HegmError, match="no socket at /nonexistent") as caught:
            made.configure("error", "journal")
        assert caught.value.code is BAD_CONFIG
        logger.info("still there")
        assert made.format == "text"
    assert len(pipe.lines()) == 1


def test_a_reload_changes_level_and_form_and_keeps_the_count_of_losses(pipe: Pipe, as_text: LogSetup) -> None:
    logger.debug("no")
    as_text.configure("debug", "json")
    logger.debug("yes")
    as_text.configure("error", "text")
    logger.warning("no")
    logger.error("yes")
    assert [line[0] for line in pipe.lines()] == ["{", "2"]


def test_audit_records_are_kept_at_every_level(pipe: Pipe, as_text: LogSetup) -> None:
    as_text.configure("error", "text")
    logging.getLogger("hegmd.telemetry.audit").info("done")
    [line] = pipe.lines()
    assert line.endswith("info    hegmd.telemetry.audit: done")


def test_other_packages_log_from_level_warning_on_and_python_warnings_too(pipe: Pipe, as_text: LogSetup) -> None:
    as_text.configure("debug", "text")
    logging.getLogger("other").info("no")
    logging.getLogger("other").warning("yes")
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        as_text.configure("debug", "text")
        logging.captureWarnings(capture=True)
        warnings.warn("deprecated", DeprecationWarning, stacklevel=1)
    lines = pipe.lines()
    assert lines[0].endswith("warning other: yes")
    assert "DeprecationWarning: deprecated" in lines[1]


def test_closing_restores_logging(pipe: Pipe) -> None:
    root = logging.getLogger()
    before = (list(root.handlers), root.level, logging.getLogger("hegmd").level)
    made = set_up("debug", "text", descriptor=pipe.writer)
    assert root.handlers != before[0]
    made.close()
    made.close()
    assert (list(root.handlers), root.level, logging.getLogger("hegmd").level) == before


def test_a_second_set_up_replaces_the_first(pipe: Pipe, socket_path: Path, journal: socket.socket) -> None:
    first = set_up("info", "journal", descriptor=pipe.writer, journal_path=str(socket_path))
    with set_up("info", "text", descriptor=pipe.writer):
        logger.info("once")
    assert len(pipe.lines()) == 1
    assert not any(isinstance(handler, SinkHandler) for handler in logging.getLogger().handlers)
    first.close()


def test_a_wrong_log_call_breaks_nothing(pipe: Pipe, as_text: LogSetup, capsys: pytest.CaptureFixture[str]) -> None:
    as_text.configure("info", "text")  # without the handler of pytest, which raises
    logger.info("%d", "not a number")
    assert pipe.lines() == []
    assert "not a number" in capsys.readouterr().err


async def test_each_record_carries_the_operation_of_its_own_task(pipe: Pipe, as_json: LogSetup) -> None:
    both_inside = anyio.Event()
    ids: dict[str, str] = {}

    async def request(name: str, is_last: bool) -> None:
        with operation(name, uid=5) as ids[name]:
            if is_last:
                both_inside.set()
            await both_inside.wait()
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(child, name)

    async def child(name: str) -> None:
        logger.info(name)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(request, "gpus", False)
        tasks.start_soon(request, "reload", True)
    logger.info("outside")
    found = {record["message"]: record for record in map(json.loads, pipe.lines())}
    assert found["gpus"]["operation"] == ids["gpus"] != ids["reload"] == found["reload"]["operation"]
    assert (found["gpus"]["op"], found["gpus"]["uid"]) == ("gpus", 5)
    assert "pid" not in found["gpus"]
    assert "operation" not in found["outside"]
    assert current_operation() is None


def test_an_operation_ends_with_its_block_also_by_an_error() -> None:
    def fail() -> None:
        with operation("gpus"):
            assert current_operation() is not None
            raise ValueError("inside")

    with pytest.raises(ValueError, match="inside"):
        fail()
    assert current_operation() is None


def test_references_differ_and_are_easy_to_search() -> None:
    made = {error_ref() for _ in range(100)}
    assert len(made) == 100
    assert all(re.fullmatch("[0-9a-f]{8}", ref) for ref in made)


def test_repeated_messages_of_a_peer_are_suppressed_and_counted(pipe: Pipe, as_text: LogSetup) -> None:
    now = [0.0]
    limiter = Limiter(burst=2, window_s=60, clock=lambda: now[0])

    def repeat(key: str, times: int) -> list[str]:
        for _ in range(times):
            limited(logger, key, logging.WARNING, "bad frame from uid %d", 7, limiter=limiter)
        return [line.split(": ", 1)[1] for line in pipe.lines()]

    once = "bad frame from uid 7"
    assert repeat("a", 10) == [once, once]
    assert repeat("b", 1) == [once]
    now[0] = 60
    assert repeat("a", 4) == [f"{once} (8 more like this were left out)", once]
    now[0] = 120
    assert repeat("a", 1) == [f"{once} (2 more like this were left out)"]
    assert limiter.held_back == 10


def test_records_below_the_level_do_not_use_up_the_allowance(pipe: Pipe, as_text: LogSetup) -> None:
    limiter = Limiter(burst=1)
    limited(logger, "a", logging.DEBUG, "x", limiter=limiter)
    limited(logger, "a", logging.INFO, "y", limiter=limiter)
    assert len(pipe.lines()) == 1


def test_a_limited_record_names_the_code_that_made_it(journal: socket.socket, as_journal: LogSetup) -> None:
    limited(logger, "a", logging.INFO, "x", limiter=Limiter())
    assert b"\nCODE_FUNC=test_a_limited_record_names_the_code_that_made_it\n" in journal.recv(1 << 16)


def test_inventing_kinds_of_records_does_not_use_up_memory() -> None:
    limiter = Limiter(burst=1, kinds=8)
    for number in range(1000):
        assert limiter.admit(number) == 0
    assert limiter.admit(999) is None
    assert limiter.admit(0) == 0


def test_a_blocked_reader_loses_records_and_gets_their_number(pipe: Pipe, as_text: LogSetup) -> None:
    fcntl.fcntl(pipe.writer, fcntl.F_SETPIPE_SZ, 16384)
    for number in range(500):
        logger.info("%d %s", number, "x" * 100)
    lost = as_text.dropped
    assert 300 < lost < 500
    assert len(pipe.lines()) == 500 - lost
    logger.info("next")
    logger.info("after")
    lines = [line.split(": ", 1)[1] for line in pipe.lines()]
    assert lines == ["next", f"{lost} log records were lost: they were not read in time", "after"]
    assert as_text.dropped == lost


def test_a_record_that_was_cut_off_does_not_spoil_the_next(pipe: Pipe, as_text: LogSetup) -> None:
    fcntl.fcntl(pipe.writer, fcntl.F_SETPIPE_SZ, 8192)
    logger.info("x" * 20000)
    assert as_text.dropped == 1
    assert len(pipe.read()) == 8192
    logger.info("whole")
    assert pipe.read().splitlines()[1].endswith("info    hegmd.test: whole")


def test_a_long_record_arrives_whole(pipe: Pipe, as_json: LogSetup) -> None:
    fcntl.fcntl(pipe.writer, fcntl.F_SETPIPE_SZ, 1 << 17)
    logger.info("y" * 100000)
    [line] = pipe.lines()
    assert json.loads(line)["message"] == "y" * 100000


def test_a_reader_that_has_left_costs_records_only() -> None:
    reader, writer = os.pipe2(os.O_CLOEXEC)
    with set_up("info", "text", descriptor=writer) as made:
        os.close(reader)
        logger.info("nobody reads this")
        assert made.dropped == 1
        os.close(writer)
        logger.info("nor this")
        assert made.dropped == 2


def test_a_blocked_journal_gets_the_number_of_lost_records(journal: socket.socket, as_journal: LogSetup) -> None:
    while not as_journal.dropped:
        logger.info("x")
    while True:
        try:
            journal.recv(1 << 16)
        except BlockingIOError:
            break
    logger.info("next")
    assert journal.recv(1 << 16).startswith(b"MESSAGE=next\n")
    assert journal.recv(1 << 16).startswith(b"MESSAGE=1 log records were lost")
