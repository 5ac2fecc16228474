"""The journal's native protocol, against a socket that plays the journal."""

from __future__ import annotations

import array
import fcntl
import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from hegmd.telemetry import journald
from hegmd.telemetry.journald import JournalSocket, encode, field_name, is_behind


class Journal:
    """A datagram socket in the journal's place, with a strict parser of what arrives."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        self.socket.bind(str(path))

    def receive(self) -> bytes:
        data, ancillary, flags, _ = self.socket.recvmsg(1 << 20, socket.CMSG_SPACE(4))
        assert not flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC)
        if not ancillary:
            return data
        assert data == b""
        [descriptor] = array.array("i", ancillary[0][2])
        with open(descriptor, "rb") as file:
            seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
            assert seals == fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
            return os.pread(file.fileno(), 1 << 26, 0)

    def record(self) -> list[tuple[str, str]]:
        return parse(self.receive())

    def close(self) -> None:
        self.socket.close()


def parse(data: bytes) -> list[tuple[str, str]]:
    """Parse as the protocol's description requires; anything else is an error."""
    found: list[tuple[str, str]] = []
    while data:
        line, end, rest = data.partition(b"\n")
        assert end
        name, equals, value = line.partition(b"=")
        if not equals:
            size = int.from_bytes(rest[:8], "little")
            value, end, rest = rest[8 : 8 + size], rest[8 + size : 9 + size], rest[9 + size :]
            assert len(value) == size
            assert end == b"\n"
        assert journald.field_name(name.decode()) == name.decode()
        found.append((name.decode(), value.decode()))
        data = rest
    return found


@pytest.fixture
def journal(socket_path: Path) -> Iterator[Journal]:
    made = Journal(socket_path)
    yield made
    made.close()


@pytest.fixture
def way(socket_path: Path) -> Iterator[JournalSocket]:
    made = JournalSocket(str(socket_path))
    yield made
    made.close()


def test_fields_arrive_as_they_were_given(journal: Journal, way: JournalSocket) -> None:
    given = [("MESSAGE", "two\nlines=and more\n"), ("EMPTY", ""), ("HEGM_NAME", "a=b"), ("UMLAUT", "ü")]
    assert way.write(encode(given))
    assert journal.record() == given


def test_a_value_cannot_smuggle_in_a_field(journal: Journal, way: JournalSocket) -> None:
    assert way.write(encode([("HEGM_NAME", "x\nPRIORITY=0\n")]))
    assert journal.record() == [("HEGM_NAME", "x\nPRIORITY=0\n")]


def test_half_of_a_surrogate_pair_is_written_out(journal: Journal, way: JournalSocket) -> None:
    assert way.write(encode([("HEGM_NAME", "\udcff")]))
    assert journal.record() == [("HEGM_NAME", "\\udcff")]


@pytest.mark.thorough
def test_a_record_too_large_for_a_datagram_arrives_as_a_sealed_file(journal: Journal, way: JournalSocket) -> None:
    given = [("MESSAGE", "x" * (32 << 20)), ("PRIORITY", "6")]
    assert way.write(encode(given))
    assert journal.record() == given


@pytest.mark.thorough
def test_a_journal_that_does_not_read_costs_the_record_and_no_time(journal: Journal, way: JournalSocket) -> None:
    record = encode([("MESSAGE", "x")])
    written = 0
    while way.write(record):
        written += 1
    assert written > 0
    assert not way.write(encode([("MESSAGE", "x" * (32 << 20))]))
    journal.receive()
    assert way.write(record)


def test_a_journal_that_was_restarted_is_found_again(journal: Journal, way: JournalSocket) -> None:
    record = encode([("MESSAGE", "x")])
    assert way.write(record)
    journal.close()
    assert not way.write(record)
    journal.path.unlink()
    assert not way.write(record)
    again = Journal(journal.path)
    assert way.write(record)
    assert again.record() == [("MESSAGE", "x")]
    again.close()


@pytest.mark.parametrize(
    ("given", "name"), [("gpu", "GPU"), ("frame.bytes", "FRAME_BYTES"), ("_1hidden", "HIDDEN"), ("x" * 90, "X" * 64)]
)
def test_names_of_fields_are_made_fit(given: str, name: str) -> None:
    assert field_name(given) == name


def test_the_journal_is_detected_from_systemds_variable() -> None:
    reader, writer = os.pipe()
    try:
        found = os.fstat(writer)
        assert stat.S_ISFIFO(found.st_mode)
        assert is_behind(writer, {"JOURNAL_STREAM": f"{found.st_dev}:{found.st_ino}"})
        assert not is_behind(writer, {"JOURNAL_STREAM": f"{found.st_dev}:{found.st_ino + 1}"})
        assert not is_behind(writer, {})
    finally:
        os.close(reader)
        os.close(writer)
    assert not is_behind(writer, {"JOURNAL_STREAM": "1:1"})
