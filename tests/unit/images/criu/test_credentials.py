"""The credentials in CRIU's files, and that none counts as weaker than it is."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from hegmd.errors import HegmError
from hegmd.images.criu.credentials import BY_LOGIN, beyond, credentials_in
from tests.e2e.real_criu import directory

ME, MINE = 1000, frozenset({1000, 100})


def number(value: int) -> bytes:
    out = b""
    while value > 0x7F:
        out += bytes([value & 0x7F | 0x80])
        value >>= 7
    return out + bytes([value])


def whole(field: int, value: int) -> bytes:
    return number(field << 3) + number(value)


def part(field: int, content: bytes) -> bytes:
    return number(field << 3 | 2) + number(len(content)) + content


def credentials(*more: bytes, **other: int) -> bytes:
    names = ("uid", "gid", "euid", "egid", "suid", "sgid", "fsuid", "fsgid")
    return b"".join(whole(at, other.get(name, ME)) for at, name in enumerate(names, 1)) + b"".join(more)


def core(held: bytes | None, state: int = 1) -> bytes:
    thread = whole(1, 0) + number(12 << 3 | 1) + bytes(8) + (b"" if held is None else part(10, held))
    entry = whole(1, 1) + part(3, whole(1, state)) + part(5, thread)
    return struct.pack("<III", 0x54564319, 0x55053847, len(entry)) + entry


def objections(folder: Path, *cores: bytes) -> list[str]:
    """Return the objections to threads with these files, for user 1000 in groups 1000 and 100."""
    for at, content in enumerate(cores, 1):
        (folder / f"core-{at}.img").write_bytes(content)
    with directory(folder) as dir_fd:
        return [reason.message for reason in beyond(credentials_in(dir_fd), ME, MINE)]


def test_a_users_own_threads_are_restored(tmp_path: Path) -> None:
    own = core(credentials(whole(9, 0), whole(10, 0), whole(11, 0), whole(12, 0xFFFFFFFF), whole(14, 100)))
    assert objections(tmp_path, own, core(credentials()), core(None, state=6)) == []


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (core(credentials(euid=0)), "uid 0"),
        (core(credentials(suid=0)), "uid 0"),
        (core(credentials(fsuid=7)), "uid 7"),
        (core(credentials(sgid=27)), "group 27"),
        (core(credentials(whole(14, 100), whole(14, 27))), "group 27"),
        (core(credentials(part(14, number(100) + number(998)))), "group 998"),  # the packed form of a list
        (core(credentials(whole(9, 1 << 21))), "inheritable capabilities 0x200000"),
        (core(credentials(whole(10, 0), whole(10, 1 << 7))), "permitted capabilities 0x8000000000"),
        (core(credentials(whole(11, 1))), "effective capabilities 0x1"),
    ],
)
def test_every_right_that_the_caller_lacks_is_reported(tmp_path: Path, content: bytes, what: str) -> None:
    (message,) = objections(tmp_path, core(credentials()), content)
    assert message.startswith("core-2.img")
    assert what in message


def test_rights_of_every_login_are_not_roots(tmp_path: Path) -> None:
    sets = [whole(field, word) for field in (9, 10, 11) for word in (0, BY_LOGIN >> 32)]
    assert objections(tmp_path, core(credentials(*sets))) == []


@pytest.mark.parametrize(
    "content",
    [
        b"",
        core(None),  # it lives, and belongs to no user
        core(credentials())[:-1],
        core(credentials()) + b"\0",
        core(credentials() + whole(1, ME)),  # which of the two would CRIU take?
        core(credentials() + number(14 << 3 | 3)),
        core(credentials() + number(14 << 3) + b"\xff" * 11),
        b"\0" * 8 + core(credentials())[8:],
    ],
)
def test_unreadable_input_is_refused(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(HegmError, match=r"core-1\.img of the image does not say"):
        objections(tmp_path, content)


def test_files_without_any_thread_are_refused(tmp_path: Path) -> None:
    (tmp_path / "creds-1.img").write_bytes(b"")
    with pytest.raises(HegmError, match=r"older than 2\.0"):
        objections(tmp_path, core(credentials()))
    (tmp_path / "core-1.img").unlink()
    (tmp_path / "creds-1.img").unlink()
    with pytest.raises(HegmError, match="there is none"):
        objections(tmp_path)
