"""Descriptors that arrive with frames are kept if they are named, and closed otherwise."""

from __future__ import annotations

import os

from hegmd.protocol.connection import Failure, Reply
from hegmd.protocol.frames import frame
from hegmd.protocol.messages import Ping, Processes
from tests.unit.server.test_session import talking


async def test_descriptors_reach_the_request_that_names_them_and_are_closed_on_exec() -> None:
    async with talking() as (talker, _, daemon, _):
        await talker.hello()
        read_end, write_end = os.pipe()
        _, data = talker.protocol.request(Ping(), fds=1)
        await talker.send(data, [read_end])
        assert isinstance(await talker.next(), Reply)
        (taken,) = daemon.taken_fds
        os.write(write_end, b"!")
        assert os.read(taken, 1) == b"!"
        assert not os.get_inheritable(taken)
        for fd in (taken, read_end, write_end):
            os.close(fd)


async def test_unclaimed_descriptors_are_closed() -> None:
    async with talking() as (talker, _, _, _):
        await talker.hello()
        read_end, write_end = os.pipe()
        _, data = talker.protocol.request(Processes(pids=(1,)), fds=1)
        await talker.send(data, [write_end])
        os.close(write_end)
        assert isinstance(await talker.next(), Failure)
        assert os.read(read_end, 1) == b""  # end of file: no copy of the pipe's other end is open
        os.close(read_end)


async def test_descriptors_that_are_named_have_to_come() -> None:
    async with talking() as (talker, _, _, ended):
        await talker.hello()
        read_end, write_end = os.pipe()
        _, data = talker.protocol.request(Ping(), fds=2)
        await talker.send(data, [write_end])
        os.close(write_end)
        await ended.wait()
        assert os.read(read_end, 1) == b""
        os.close(read_end)


async def test_descriptors_that_no_frame_names_are_not_hoarded_for_the_peer() -> None:
    """They were kept until the connection ended, 32 for each: two users' connections could take all of the daemon's."""
    async with talking() as (talker, _, daemon, _):
        await talker.hello()
        read_end, write_end = os.pipe()
        _, data = talker.protocol.request(Ping())
        await talker.send(data, [write_end] * 16)
        os.close(write_end)
        assert isinstance(await talker.next(), Reply)
        assert os.read(read_end, 1) == b""
        os.close(read_end)
        other_read_end, other_write_end = os.pipe()
        _, data = talker.protocol.request(Ping(), fds=1)
        await talker.send(data, [other_write_end])
        assert isinstance(await talker.next(), Reply)
        (taken,) = daemon.taken_fds
        assert os.fstat(taken).st_ino == os.fstat(other_write_end).st_ino, "the frame got its own"
        for fd in (taken, other_read_end, other_write_end):
            os.close(fd)


async def test_a_frame_with_too_many_descriptors_ends_the_connection() -> None:
    async with talking() as (talker, _, _, ended):
        await talker.hello()
        read_end, write_end = os.pipe()
        for byte in frame(b"x" * 100)[:4]:
            try:
                await talker.send(bytes([byte]), [write_end] * 16)
            except OSError:
                break
        os.close(write_end)
        await ended.wait()
        assert os.read(read_end, 1) == b""
        os.close(read_end)
