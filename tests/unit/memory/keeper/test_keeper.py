"""The keeper with real processes and descriptors. It serves no other user and leaves nothing behind."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import psutil
import pytest

from hegmd.errors import UNAVAILABLE, HegmError
from hegmd.memory.keeper.client import KeeperStore
from hegmd.memory.keeper.wire import GREETING, HELLO, LIST, PUT, SOCKET_NAME, receive, send
from hegmd.system.programs import start_keeper
from tests.looks import still_there
from tests.patience import HANG_S

NAME = "hegm-pool-7-4711-3.ab"
ENDS_WITHIN_S = HANG_S


def keepers_of(folder: Path) -> list[psutil.Process]:
    """Return every keeper of that directory."""
    found: list[psutil.Process] = []
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if "hegmd.memory.keeper" in words and str(folder) in words:
            found.append(process)
    return found


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A state directory with a path that is too long for a socket's name; its keepers end with the test."""
    made = tmp_path / ("long" * 30)
    made.mkdir(mode=0o700)
    yield made
    for keeper in keepers_of(made):
        keeper.kill()


@asynccontextmanager
async def storing(folder: Path) -> AsyncIterator[KeeperStore]:
    """A daemon's side that runs; leaving it is the daemon's end."""
    store = KeeperStore(folder, start_keeper)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(store.run)
        yield store
        tasks.cancel_scope.cancel()


def memory(text: bytes) -> int:
    fd = os.memfd_create("bytes")
    os.pwrite(fd, text, 0)
    return fd


def run_python(code: str, *arguments: str) -> tuple[int, bytes]:
    """Status and output of a program in a session of its own."""
    argv = [sys.executable, "-c", code, *arguments]
    ended = subprocess.run(argv, stdout=subprocess.PIPE, check=False, start_new_session=True, timeout=HANG_S)
    return ended.returncode, ended.stdout


def gone(processes: list[psutil.Process]) -> bool:
    return not still_there(processes, ENDS_WITHIN_S)


async def test_stored_descriptors_outlive_the_daemon_and_are_returned(folder: Path) -> None:
    fd = memory(b"weights")
    async with storing(folder) as store:
        await store.put(NAME, fd)
        os.close(fd)
        (keeper,) = keepers_of(folder)
    async with storing(folder) as store:
        ((name, again),) = await store.found()
        assert name == NAME
        assert os.pread(again, 7, 0) == b"weights"
        os.close(again)
        assert keepers_of(folder) == [keeper], "a second keeper was started"
        await store.drop(NAME)
        assert gone([keeper]), "it stays with nothing to stay for"
    assert not (folder / SOCKET_NAME).exists()


@pytest.mark.thorough
async def test_it_survives_the_daemon_that_started_it_being_killed_with_its_group(folder: Path) -> None:
    program = (
        "import anyio, os, pathlib, signal, sys\n"
        "from hegmd.system.programs import start_keeper\n"
        "from hegmd.memory.keeper.client import KeeperStore\n"
        "async def main():\n"
        "    await KeeperStore(pathlib.Path(sys.argv[1]), start_keeper).put(sys.argv[2], os.memfd_create('m'))\n"
        "    os.killpg(0, signal.SIGKILL)\n"
        "anyio.run(main)\n"
    )
    assert run_python(program, str(folder), NAME) == (-signal.SIGKILL, b"")
    async with storing(folder) as store:
        ((name, fd),) = await store.found()
        os.close(fd)
        assert name == NAME
        await store.drop(name)
    assert gone(keepers_of(folder))


@pytest.mark.thorough
async def test_a_new_keeper_gets_all_descriptors_after_a_kill(folder: Path) -> None:
    fd = memory(b"weights")
    async with storing(folder) as store:
        await store.put(NAME, fd)
        (first,) = keepers_of(folder)
        first.kill()
        with anyio.fail_after(ENDS_WITHIN_S):
            while not (seconds := [keeper for keeper in keepers_of(folder) if keeper != first]):
                await anyio.wait_all_tasks_blocked()
            await store.put("hegm-other", fd)  # one after the other: by then the first is there again
    os.close(fd)
    async with storing(folder) as store:
        found = dict(await store.found())
        assert sorted(found) == ["hegm-other", NAME]
        assert os.pread(found[NAME], 7, 0) == b"weights"
        for name, one in found.items():
            os.close(one)
            await store.drop(name)
    assert gone(seconds)


async def test_without_a_keeper_nothing_is_found_and_none_is_started(folder: Path) -> None:
    async with storing(folder) as store:
        assert list(await store.found()) == []
        await store.drop(NAME)
    assert keepers_of(folder) == []


@pytest.mark.thorough
async def test_the_socket_of_a_killed_keeper_does_not_count_as_a_keeper(folder: Path) -> None:
    async with storing(folder) as store:
        await store.put(NAME, memory_fd := memory(b"x"))
        os.close(memory_fd)
    (keeper,) = keepers_of(folder)
    keeper.kill()
    assert gone([keeper])
    assert (folder / SOCKET_NAME).exists()
    async with storing(folder) as store:
        assert list(await store.found()) == []
        fd = memory(b"y")
        await store.put(NAME, fd)
        os.close(fd)
        await store.drop(NAME)


async def test_a_keeper_that_cannot_be_started_is_reported(folder: Path) -> None:
    async def fail(_: Path) -> None:
        return

    store = KeeperStore(folder, fail)
    fd = memory(b"x")
    with pytest.raises(HegmError, match="does not take"):
        await store.put(NAME, fd)
    os.close(fd)
    store.close()


async def replaced(folder: Path, first: psutil.Process) -> psutil.Process:
    """The keeper that has taken the place of that one."""
    with anyio.fail_after(ENDS_WITHIN_S):
        while not (others := [keeper for keeper in keepers_of(folder) if keeper != first]):
            await anyio.wait_all_tasks_blocked()
    return others[0]


def held_there(folder: Path) -> list[str]:
    with dial(folder) as caller:
        send(caller, [LIST])
        return sorted(receive(caller)[0][1:])


@pytest.mark.thorough
async def test_a_keeper_whose_end_a_request_saw_first_was_never_replaced(folder: Path) -> None:
    fd = memory(b"weights")
    async with storing(folder) as store:
        await store.put(NAME, fd)
        await store.put("hegm-other", fd)
        (first,) = keepers_of(folder)
        first.kill()
        assert gone([first])
        await store.drop("hegm-other")  # before the loop has looked at anything
        second = await replaced(folder, first)
        await store.put("hegm-third", fd)
        assert held_there(folder) == [NAME, "hegm-third"]
        await store.drop(NAME, "hegm-third")
    os.close(fd)
    assert gone([second])


@pytest.mark.thorough
async def test_a_keeper_that_ended_after_a_start_was_not_noticed_before_the_next_request(folder: Path) -> None:
    fd = memory(b"weights")
    async with storing(folder) as store:
        await store.put(NAME, fd)
    os.close(fd)
    async with storing(folder) as store:
        for _, one in await store.found():
            os.close(one)
        (first,) = keepers_of(folder)
        first.kill()
        second = await replaced(folder, first)
        await store.drop(NAME)
    assert gone([second])


@pytest.mark.thorough
async def test_descriptors_stored_without_an_answer_are_dropped_later(folder: Path) -> None:
    fd = memory(b"weights")
    store = KeeperStore(folder, start_keeper, answer_s=0.2)
    await store.put(NAME, fd)
    (keeper,) = keepers_of(folder)
    keeper.suspend()
    with pytest.raises(HegmError, match="does not take hegm-other"):
        await store.put("hegm-other", fd)
    keeper.resume()
    await put_at_last(store, "hegm-third", fd)
    assert held_there(folder) == [NAME, "hegm-third"]
    await store.drop(NAME, "hegm-third")
    os.close(fd)
    assert gone([keeper])


async def put_at_last(store: KeeperStore, name: str, fd: int) -> None:
    """Put it as often as it takes a keeper that was stopped to answer in time again."""
    with anyio.fail_after(ENDS_WITHIN_S):
        while True:
            try:
                return await store.put(name, fd)
            except HegmError:
                continue


async def test_a_drop_that_had_no_answer_was_forgotten(folder: Path) -> None:
    fd = memory(b"weights")
    store = KeeperStore(folder, start_keeper, answer_s=0.2)
    await store.put(NAME, fd)
    os.close(fd)
    (keeper,) = keepers_of(folder)
    keeper.suspend()
    with pytest.raises(HegmError, match="does not give up"):
        await store.drop(NAME)
    keeper.resume()
    with anyio.fail_after(ENDS_WITHIN_S):
        while True:
            try:
                await store.drop(NAME)
                break
            except HegmError:
                continue
    assert gone([keeper]), "what was to be dropped is held for ever"


async def test_nothing_could_be_dropped_while_no_keeper_could_be_started(folder: Path) -> None:
    """The wait for the next attempt blocked all other callers."""
    tried = anyio.Event()

    async def start(where: Path) -> None:
        if keepers:
            tried.set()
            raise HegmError(UNAVAILABLE, "no keeper can be started", "as by a test")
        await start_keeper(where)

    keepers: list[psutil.Process] = []
    store, fd = KeeperStore(folder, start), memory(b"weights")
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(store.run)
        await store.put(NAME, fd)
        keepers += keepers_of(folder)
        keepers[0].kill()
        with anyio.fail_after(ENDS_WITHIN_S):
            await tried.wait()
            await store.drop(NAME)
        tasks.cancel_scope.cancel()
    os.close(fd)


# -- what a stranger, or an older release, may send --------------------------------------------------------------------


def dial(folder: Path) -> socket.socket:
    at = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        made = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        made.settimeout(ENDS_WITHIN_S)
        made.connect(f"/proc/self/fd/{at}/{SOCKET_NAME}")
        return made
    finally:
        os.close(at)


@pytest.mark.thorough
async def test_invalid_messages_are_answered_and_lose_nothing(folder: Path) -> None:
    await start_keeper(folder)
    fds = [memory(b"a"), memory(b"b")]
    with dial(folder) as caller:
        for lines, came, answer in (
            (["sing"], [], "no"),
            ([f"{PUT} {NAME}"], fds, "no"),
            ([f"{PUT} {NAME}"], [], "no"),
            ([f"{PUT} "], fds[:1], "no"),
            (["get unheard-of"], [], "no"),
            (["drop unheard-of"], [], "ok"),
            ([LIST], [], "ok"),
            ([HELLO], [], "ok"),
        ):
            send(caller, lines, came)
            output, _ = receive(caller)
            assert output[0] == answer, lines
        assert output[1] == GREETING
        (keeper,) = keepers_of(folder)
        assert keeper.num_fds() < 12, "descriptors of refused requests are left open"
    for fd in fds:
        os.close(fd)
    assert gone([keeper])


@pytest.mark.skipif(os.geteuid() != 0, reason="takes another user, and only root can be one")
async def test_another_user_is_not_served(folder: Path) -> None:
    await start_keeper(folder)
    (keeper,) = keepers_of(folder)
    code = (
        "import os, socket, sys\n"
        "at = os.open(sys.argv[1], os.O_RDONLY | os.O_DIRECTORY)\n"
        "caller = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)\n"
        "os.chmod(sys.argv[1], 0o755); os.chmod(sys.argv[1] + '/keeper.sock', 0o666)\n"
        "os.setresuid(65534, 65534, 65534)\n"
        "caller.connect(f'/proc/self/fd/{at}/keeper.sock')\n"
        "try:\n"
        "    caller.send(b'list')\n"
        "    print(caller.recv(100))\n"
        "except OSError: print(b'')\n"
    )
    assert run_python(code, str(folder)) == (0, b"b''\n")
    keeper.kill()
    assert gone([keeper])


@pytest.mark.thorough
def test_a_caller_without_a_descriptor_kept_the_keeper_busy(tmp_path: Path) -> None:
    code = (
        "import resource, socket, sys\n"
        "from hegmd.memory.keeper.__main__ import Keeper\n"
        "class Counting(socket.socket):\n"
        "    calls = 0\n"
        "    def accept(self):\n"
        "        Counting.calls += 1\n"
        "        return super().accept()\n"
        "listening = Counting(socket.AF_UNIX, socket.SOCK_SEQPACKET)\n"
        "listening.bind(sys.argv[1]); listening.listen(1)\n"
        "caller = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)\n"
        "caller.connect(sys.argv[1])\n"
        "keeper = Keeper(listening)\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (3, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))\n"
        "keeper.serve(0.5)\n"
        "print(Counting.calls)\n"
    )
    status, output = run_python(code, str(tmp_path / "s"))
    assert status == 0
    assert 1 <= int(output) < 10


@pytest.mark.thorough
async def test_two_concurrent_starts_give_one_keeper(folder: Path) -> None:
    async with anyio.create_task_group() as tasks:
        for _ in range(3):
            tasks.start_soon(start_keeper, folder)
    assert len(keepers_of(folder)) == 1
    keepers_of(folder)[0].kill()


async def test_a_partial_answer_does_not_count_as_the_keepers_end(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Python waits out a socket's limit even with MSG_DONTWAIT: the event loop was blocked and a second one started."""
    async with storing(folder) as store:
        for number in range(50):
            fd = memory(b"bytes")
            await store.put(f"{NAME}{number}", fd)
            os.close(fd)
            await anyio.lowlevel.checkpoint()
        (keeper,) = keepers_of(folder)
        for number in range(50):
            await store.drop(f"{NAME}{number}")
    assert gone([keeper])
    assert not [record for record in caplog.records if "ended while it held" in record.message]
