"""Bytes and descriptors on a real socket."""

from __future__ import annotations

import _socket
import fcntl
import os
import resource
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from time import monotonic

import pytest

from hegmctl.wire import Descriptors, Wire
from tests.patience import HANG_S


@pytest.fixture
def ends() -> Iterator[tuple[Wire, socket.socket]]:
    ours, theirs = socket.socketpair()
    wire = Wire(_socket.socket(fileno=ours.detach()))
    with theirs:
        yield wire, theirs
        wire.close()


def soon() -> float:
    return monotonic() + HANG_S


def _inode(fd: int) -> int:
    return os.fstat(fd).st_ino


def test_an_interrupt_was_lost_after_an_answer_without_descriptors(ends: tuple[Wire, socket.socket]) -> None:
    """Python ignores an exception raised while it finalizes an object, and each answer created such an object."""
    called: list[str] = []
    sys.setprofile(lambda frame, event, _: called.append(frame.f_code.co_name) if event == "call" else None)
    try:
        ends[0].take(0)
    finally:
        sys.setprofile(None)
    assert called[:1] == ["take"]
    assert "__del__" not in called


WAITS = """
import _socket, signal, threading
from hegmctl.wire import Wire

ours, theirs = _socket.socketpair()
idle = threading.Event()
other = threading.Thread(target=idle.wait, daemon=True)
other.start()
signal.signal(signal.SIGINT, signal.default_int_handler)
try:
    # To a thread for which the kernel's call in this one does not end, as it does not for one that came just before.
    threading.Timer(0.2, signal.pthread_kill, (other.ident, signal.SIGINT)).start()
    Wire(ours).receive(None)
except KeyboardInterrupt:
    print("interrupted")
"""


@pytest.mark.thorough
def test_a_signal_just_before_the_call_is_handled_immediately() -> None:
    """Ctrl-C beside a daemon that says nothing: twice in whole runs of these tests."""
    ran = subprocess.run([sys.executable, "-c", WAITS], capture_output=True, text=True, timeout=HANG_S, check=False)
    assert ran.stdout == "interrupted\n", ran.stderr


def test_descriptors_go_both_ways_and_are_not_inherited(ends: tuple[Wire, socket.socket]) -> None:
    wire, theirs = ends
    read_end, write_end = os.pipe()
    try:
        wire.send(b"hello", [read_end, write_end], soon())
        data, fds, _flags, _address = socket.recv_fds(theirs, 100, 16)
        assert data == b"hello"
        socket.send_fds(theirs, [b"back"], fds)
        for fd in fds:
            os.close(fd)
        assert wire.receive(soon()) == b"back"
        with wire.take(2) or pytest.fail("none came") as received:
            first = received.steal(0)
            assert [_inode(first), _inode(received.numbers()[0])] == [_inode(read_end), _inode(write_end)]
            assert fcntl.fcntl(first, fcntl.F_GETFD) & fcntl.FD_CLOEXEC
            os.close(first)
    finally:
        os.close(read_end)
        os.close(write_end)


def test_descriptors_wait_in_the_order_in_which_they_came(ends: tuple[Wire, socket.socket], tmp_path: Path) -> None:
    wire, theirs = ends
    inodes: list[int] = []
    for name in "abc":
        with (tmp_path / name).open("w") as file:
            inodes.append(_inode(file.fileno()))
            socket.send_fds(theirs, [name.encode()], [file.fileno()])
    read = b""
    while len(read) < 3:
        read += wire.receive(soon())
    assert wire.take(4) is None, "fewer came"
    with wire.take(1) or pytest.fail("none came") as first, wire.take(2) or pytest.fail("none left") as rest:
        assert [_inode(fd) for fd in first.numbers() + rest.numbers()] == inodes


def test_unclaimed_descriptors_are_closed_with_the_wire(ends: tuple[Wire, socket.socket]) -> None:
    wire, theirs = ends
    read_end, write_end = os.pipe()
    socket.send_fds(theirs, [b"x"], [write_end])
    os.close(write_end)
    wire.receive(soon())
    wire.close()
    assert os.read(read_end, 1) == b""  # the last writer is gone
    os.close(read_end)
    wire.close()


def test_stolen_descriptors_are_the_thiefs() -> None:
    read_end, write_end = os.pipe()
    descriptors = Descriptors([read_end, write_end])
    assert len(descriptors) == 2
    assert descriptors.steal(1) == write_end
    with pytest.raises(LookupError):
        descriptors.steal(1)
    descriptors.close()
    descriptors.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(read_end)
    os.close(write_end)


def test_a_large_frame_is_sent_whole_through_a_small_buffer(ends: tuple[Wire, socket.socket]) -> None:
    wire, theirs = ends
    data = os.urandom(3_000_000)
    received = bytearray()

    def drain() -> None:
        while len(received) < len(data):
            received.extend(theirs.recv(65_536))

    reader = threading.Thread(target=drain)
    reader.start()
    wire.send(data, [], soon())
    reader.join()
    assert received == data


def test_a_peer_that_does_not_read_costs_the_deadline_and_the_connection(ends: tuple[Wire, socket.socket]) -> None:
    wire, _theirs = ends
    with pytest.raises(TimeoutError):
        wire.send(bytes(10_000_000), [], monotonic() + 0.05)
    assert wire.fileno() == -1  # half a frame was sent, and nothing can follow it


def test_a_silent_peer_costs_only_the_deadline(ends: tuple[Wire, socket.socket]) -> None:
    wire, theirs = ends
    with pytest.raises(TimeoutError):
        wire.receive(monotonic() + 0.01)
    with pytest.raises(TimeoutError):
        wire.receive(monotonic() - 1)
    theirs.sendall(b"late")
    assert wire.receive(soon()) == b"late"


def test_a_peer_that_hung_up_leaves_its_last_words_readable(ends: tuple[Wire, socket.socket]) -> None:
    wire, theirs = ends
    theirs.sendall(b"goodbye")
    theirs.close()
    with pytest.raises(BrokenPipeError):
        wire.send(b"anyone?", [], soon())
    assert wire.receive(soon()) == b"goodbye"
    assert wire.receive(soon()) == b""


def test_a_full_queue_is_waited_for_until_the_deadline(socket_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(socket_path))
        listener.listen(0)
        waiting = Wire.connect(str(socket_path), soon())  # takes the one place in the queue
        began = monotonic()
        with pytest.raises(TimeoutError):
            Wire.connect(str(socket_path), monotonic() + 0.05)
        assert monotonic() - began >= 0.04

        taken: list[socket.socket] = []
        taker = threading.Thread(target=lambda: taken.append(listener.accept()[0]))
        taker.start()
        late = Wire.connect(str(socket_path), soon())  # a place became free in the meantime
        taker.join()
        taken[0].close()
        late.close()
        waiting.close()


def test_lost_descriptors_do_not_shift_the_following_ones(ends: tuple[Wire, socket.socket]) -> None:
    """A process at its limit of open files receives only the first descriptors.

    The client waited for the rest for ever.
    """
    wire, theirs = ends
    read_end, write_end = os.pipe()
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        socket.send_fds(theirs, [b"two"], [read_end, write_end])
        free = os.dup(read_end)
        os.close(free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (free + 1, before[1]))  # room for one
        try:
            assert wire.receive(soon()) == b"two"
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
        assert wire.take(1) is None
    finally:
        os.close(read_end)
        os.close(write_end)
