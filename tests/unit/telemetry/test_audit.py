"""The fields of an audit record, where it is written, and what a peer cannot change in it."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hegmd.errors import DENIED, NOT_FOUND, HegmError
from hegmd.protocol.messages import Processes, Reload, Request, SimulateFault
from hegmd.server.auth import Peer
from hegmd.telemetry.audit import RECORD_BYTES, Audit, bounded

ALICE = Peer(pid=4711, uid=1000, gid=100)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "audit.jsonl"


@pytest.fixture
def now() -> list[float]:
    return [0.0]


@pytest.fixture
def audit(path: Path, now: list[float]) -> Iterator[Audit]:
    made = Audit(path, clock=lambda: 1763721000.5, limiter_clock=lambda: now[0], user_name={1000: "alice"}.get)
    yield made
    made.close()


@pytest.fixture
def written(audit: Audit, path: Path) -> Callable[[], list[dict[str, Any]]]:
    """Closes the audit and gives the records in its file."""

    def read() -> list[dict[str, Any]]:
        audit.close()
        return [json.loads(line) for line in path.read_bytes().splitlines()]

    return read


Written = Callable[[], list[dict[str, Any]]]


def record(audit: Audit, request: Request, error: HegmError | None = None, peer: Peer = ALICE) -> None:
    audit.record(peer, request, "ok" if error is None else error.code.name, error, 0.0123456789, "abc-1")


def test_an_audit_record_has_the_caller_the_request_and_the_result(audit: Audit, written: Written) -> None:
    record(audit, SimulateFault(target="gpu0", fault="lost"))
    record(audit, Reload(), HegmError(NOT_FOUND, "no such thing", "look again"), Peer(pid=1, uid=5, gid=6))
    fields = {"operation": "abc-1", "duration_s": 0.012346, "time": "2025-11-21T10:30:00.500000Z"}
    assert written() == [
        {
            **fields,
            "op": "simulate.fault",
            "uid": 1000,
            "gid": 100,
            "pid": 4711,
            "user": "alice",
            "args": {"target": "gpu0", "fault": "lost"},
            "result": "ok",
        },
        {
            **fields,
            "op": "reload",
            "uid": 5,
            "gid": 6,
            "pid": 1,
            "args": {},
            "result": "not-found",
            "error": "no such thing",
        },
    ]


def test_every_record_is_in_the_log_too_with_its_fields(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    audit = Audit(None)
    record(audit, SimulateFault(target="gpu0", fault="lost"))
    record(audit, Reload(), HegmError(NOT_FOUND, "no such thing", "look again"))
    first, second = caplog.records
    assert first.name == "hegmd.telemetry.audit"
    assert first.getMessage() == "simulate.fault, asked by uid 1000 (pid 4711): ok"
    found = first.__dict__["fields"]
    assert (found["operation"], found["args"]["target"], found["result"]) == ("abc-1", "gpu0", "ok")
    assert "user" not in found
    assert (first.levelname, second.levelname) == ("INFO", "WARNING")


def test_a_file_that_cannot_be_opened_refuses_the_start(path: Path) -> None:
    with pytest.raises(HegmError, match="cannot be opened"):
        Audit(path / "below")


def test_a_file_can_come_and_go_by_reload(path: Path) -> None:
    audit = Audit(None)
    record(audit, Reload())
    audit.reopen(None)
    audit.reopen(path)
    record(audit, Reload())
    audit.reopen(None)
    record(audit, Reload())
    audit.close()
    assert len(path.read_bytes().splitlines()) == 1
    assert audit.lost == 0


def test_a_failing_file_fails_no_request(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    audit = Audit(None)
    audit.reopen(tmp_path / "missing" / "audit.jsonl")
    record(audit, Reload())
    audit.close()
    assert audit.lost == 1
    assert [each.name for each in caplog.records if each.levelno == logging.ERROR] == ["hegmd.telemetry.audit_file"] * 2


def test_a_peer_cannot_make_a_log_record_large_or_span_lines(audit: Audit, written: Written) -> None:
    record(audit, SimulateFault(target="\n" * 100000, fault='"}\r\n{\u2028\ud800'))
    record(audit, Processes(gpus=tuple("g\n" * 1000 for _ in range(1000))))
    lines = written()
    assert [line["op"] for line in lines] == ["simulate.fault", "processes"]
    assert lines[0]["args"]["target"] == "\n" * 256 + "... (100000 characters)"
    assert lines[0]["args"]["fault"] == '"}\r\n{\u2028\ud800'
    assert len(json.dumps(lines[1])) < RECORD_BYTES


def test_long_and_deep_values_are_cut_and_marked() -> None:
    assert bounded(list(range(20))) == [*range(16), "... (20 items)"]
    assert bounded({str(n): n for n in range(17)}) == {**{str(n): n for n in range(16)}, "...": "(17 entries)"}
    assert bounded([[[[[1]]]]]) == [[[["..."]]]]
    assert bounded(b"secret") == "(6 bytes)"
    assert bounded((1, True, None, 1.5, float("inf"))) == [1, True, None, 1.5, "inf"]
    assert len(json.dumps(bounded([["x" * 1000] * 100] * 100))) < 100000


def test_a_record_that_is_still_too_large_goes_without_its_arguments(audit: Audit, written: Written) -> None:
    record(audit, Processes(gpus=("\u2028" * 256,) * 16))
    record(audit, Processes(gpus=("gpu0",) * 16))
    large, small = written()
    assert large["args"].endswith(" bytes)")
    assert small["args"]["gpus"] == ["gpu0"] * 16


def test_repeated_failures_are_counted_and_actions_never_left_out(
    audit: Audit, written: Written, now: list[float]
) -> None:
    denied = HegmError(DENIED, "only be dropped by its owner", "ask")
    for _ in range(25):
        record(audit, Reload(), denied)
    record(audit, Reload(), denied, Peer(pid=1, uid=1, gid=1))
    for _ in range(25):
        record(audit, Reload())
    now[0] = 61.0
    record(audit, Reload(), denied)
    results = [(line["result"], line["uid"], line.get("left_out")) for line in written()]
    assert results == [
        *[("denied", 1000, None)] * 10,
        ("denied", 1, None),
        *[("ok", 1000, None)] * 25,
        ("denied", 1000, 15),
    ]
