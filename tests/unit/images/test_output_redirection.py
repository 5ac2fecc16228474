"""The outputs of a restored job: which of them can be redirected, and which descriptors are suitable."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from hegmd.errors import HegmError
from hegmd.images.output_redirection import lost_streams, named_streams, redirected_streams
from hegmd.node.processes.open_files import Outlet

OUT = Outlet("pipe:[7]", ((100, 1), (101, 1)), is_read=False, is_written=True)
ERR = Outlet("pipe:[8]", ((100, 2),), is_read=False, is_written=True)
BOTH = Outlet("pipe:[9]", ((100, 1), (100, 2)), is_read=False, is_written=True)
TERMINAL = Outlet("tty[1:2]", ((100, 0), (100, 1), (100, 2)), is_read=True, is_written=True)
PAIR = Outlet("socket:[5]", ((100, 0), (100, 1)), is_read=True, is_written=True)
INPUT = Outlet("pipe:[6]", ((100, 0),), is_read=True, is_written=False)


@contextmanager
def opened(path: Path | str, flags: int) -> Iterator[int]:
    fd = os.open(path, flags | os.O_CREAT, 0o600)
    try:
        yield fd
    finally:
        os.close(fd)


def test_each_stream_goes_where_it_is_wanted(tmp_path: Path) -> None:
    with opened(tmp_path / "log", os.O_WRONLY) as fd, opened(tmp_path / "other", os.O_WRONLY) as other:
        assert redirected_streams((INPUT, OUT, ERR), {"stdout": fd}) == {OUT.key: fd}
        assert redirected_streams((OUT, ERR), {"stdout": fd, "stderr": other}) == {OUT.key: fd, ERR.key: other}
        assert redirected_streams((BOTH,), {"stdout": fd}) == {BOTH.key: fd}
        assert redirected_streams((BOTH,), {"stdout": fd, "stderr": other}) == {BOTH.key: fd}
        assert redirected_streams((TERMINAL,), {"stderr": other}) == {TERMINAL.key: other}


def test_dangling_outputs_are_named() -> None:
    assert lost_streams((OUT, ERR, INPUT), {}) == ("stdout", "stderr")
    assert lost_streams((OUT, ERR), {"stdout": 5}) == ("stderr",)
    assert lost_streams((BOTH,), {"stderr": 5}) == ()
    assert lost_streams((INPUT,), {}) == ()


def test_an_output_to_a_file_needs_no_redirection() -> None:
    with pytest.raises(HegmError, match="the job's stdout cannot be redirected"):
        redirected_streams((ERR, INPUT), {"stdout": 1})


def test_a_descriptor_gives_the_job_no_more_than_its_sender_had(tmp_path: Path) -> None:
    """Root opens it again, whatever mode the descriptor has."""
    path = tmp_path / "log"
    with opened(path, os.O_RDONLY) as reading, pytest.raises(HegmError, match="not open for writing"):
        named_streams(["stdout"], [reading])
    named = os.open(path, os.O_PATH)
    try:
        with pytest.raises(HegmError, match="not open for writing"):
            named_streams(["stdout"], [named])
    finally:
        os.close(named)
    with opened(path, os.O_WRONLY) as writing:
        assert redirected_streams((PAIR,), named_streams(["stdout"], [writing])) == {PAIR.key: writing}


def test_a_socket_cannot_be_reopened() -> None:
    one, other = socket.socketpair()
    with one, other, pytest.raises(HegmError, match="is a socket"):
        named_streams(["stderr"], [one.fileno()])


@pytest.mark.parametrize(
    ("names", "count"), [(("stdout",), 0), ((), 1), (("stdout", "stdout"), 2), (("stdin",), 1), (("stdout", "x"), 2)]
)
def test_names_and_descriptors_have_to_fit(tmp_path: Path, names: tuple[str, ...], count: int) -> None:
    with opened(tmp_path / "log", os.O_WRONLY) as fd, pytest.raises(HegmError, match="descriptors came for"):
        named_streams(names, [fd] * count)
