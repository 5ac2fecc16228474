"""hegmd.service against a real datagram socket that plays the manager, and against real descriptors."""

from __future__ import annotations

import array
import fcntl
import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hegmd.errors import Bug, HegmError
from hegmd.system import systemd
from hegmd.system.systemd import Offer, PassedDescriptors, ServiceManager, take_offer, under_systemd
from tests.cells import in_one_test
from tests.gpu.keeper import Keeper
from tests.patience import HANG_S


class Manager:
    """The receiving end of the reports."""

    def __init__(self, address: str) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.settimeout(HANG_S)
        self.socket.bind(address)

    def next(self) -> tuple[list[str], list[int]]:
        """The lines of one report and the descriptors that came with it, now the caller's."""
        data, ancillary, _, _ = self.socket.recvmsg(65536, socket.CMSG_SPACE(300 * 4))
        descriptors = array.array("i")
        for _, _, payload in ancillary:
            descriptors.frombytes(payload)
        return data.decode().split("\n"), list(descriptors)

    def fill(self) -> int:
        """Send to it until its queue is full; returns the number of datagrams now waiting."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as sender:
            count = 0
            try:
                while True:
                    sender.sendto(b"noise", self.socket.getsockname())
                    count += 1
            except BlockingIOError:
                return count


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[Manager]:
    made = Manager(str(tmp_path / "notify"))
    yield made
    made.socket.close()


@pytest.fixture
def reports(manager: Manager) -> Iterator[ServiceManager]:
    made = ServiceManager(manager.socket.getsockname())
    yield made
    made.close()


# -- what the environment says -----------------------------------------------------------------------------------------


def test_offer_is_read_once_and_removed() -> None:
    environ = {
        "NOTIFY_SOCKET": "/run/systemd/notify",
        "WATCHDOG_USEC": "30000000",
        "WATCHDOG_PID": "77",
        "LISTEN_PID": "77",
        "LISTEN_FDS": "3",
        "LISTEN_FDNAMES": "hegmd:job-4711:hegmd",
        "HOME": "/root",
    }
    assert take_offer(environ, 77) == Offer("/run/systemd/notify", 30.0, ("hegmd", "job-4711", "hegmd"))
    assert environ == {"HOME": "/root"}
    assert take_offer(environ, 77) == Offer(None, None, ())


def test_offer_to_another_process_is_removed_and_ignored() -> None:
    environ = {"WATCHDOG_USEC": "1", "WATCHDOG_PID": "76", "LISTEN_PID": "76", "LISTEN_FDS": "1"}
    assert take_offer(environ, 77) == Offer(None, None, ())
    assert environ == {}


def test_watchdog_without_a_pid_is_ours() -> None:
    assert take_offer({"WATCHDOG_USEC": "2500000"}, 77).watchdog_limit_s == 2.5


def test_descriptors_without_names_are_unknown() -> None:
    assert take_offer({"LISTEN_PID": "77", "LISTEN_FDS": "2"}, 77).descriptor_names == ("unknown", "unknown")


def test_no_descriptors_with_empty_names() -> None:
    assert take_offer({"LISTEN_PID": "77", "LISTEN_FDS": "0", "LISTEN_FDNAMES": ""}, 77).descriptor_names == ()


@in_one_test(
    ("variable", "others"),
    [
        ({"WATCHDOG_USEC": "soon"}, {}),
        ({"WATCHDOG_USEC": "0"}, {}),
        ({"WATCHDOG_USEC": "-1"}, {}),
        ({"WATCHDOG_PID": "٣"}, {"WATCHDOG_USEC": "1"}),
        ({"LISTEN_PID": ""}, {"LISTEN_FDS": "1"}),
        ({"LISTEN_FDS": "1e3"}, {"LISTEN_PID": "77"}),
        ({"LISTEN_FDNAMES": "hegmd"}, {"LISTEN_PID": "77", "LISTEN_FDS": "2"}),
    ],
)
def test_invalid_variables_for_this_process_are_errors_that_name_the_variable(
    variable: dict[str, str], others: dict[str, str]
) -> None:
    with pytest.raises(HegmError) as caught:
        take_offer({**variable, **others}, 77)
    assert caught.value.facts["variable"] == next(iter(variable))


def test_systemd_is_detected_by_the_notify_socket() -> None:
    assert under_systemd({"NOTIFY_SOCKET": "@x"})
    # Every child of a service inherits this one, a shell in a terminal too.
    assert not under_systemd({"INVOCATION_ID": "0123"})


# -- passed descriptors ------------------------------------------------------------------------------------------------


@pytest.fixture
def listener(tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as made:
        made.bind(str(tmp_path / "listener"))
        made.listen()
        yield made


def passed(*descriptors: int) -> int:
    """Copies of the descriptors at consecutive free numbers, inheritable as after exec; returns the first number."""
    first = 200
    for number, descriptor in enumerate(descriptors, start=first):
        assert fcntl.fcntl(descriptor, fcntl.F_DUPFD, number) == number
    return first


def test_descriptors_are_closed_in_children_from_now_on(listener: socket.socket) -> None:
    first = passed(listener.fileno())
    assert os.get_inheritable(first)
    with PassedDescriptors(["hegmd"], first):
        assert not os.get_inheritable(first)


def test_listeners_are_returned_as_sockets_and_the_rest_is_closed(listener: socket.socket) -> None:
    with listener.dup() as twin, Path(os.devnull).open() as stored:
        first = passed(listener.fileno(), stored.fileno(), twin.fileno(), stored.fileno())
        held = PassedDescriptors(["hegmd", "job-4711", "hegmd", "forgotten"], first)
        taken = held.take_listeners("hegmd")
        assert [each.fileno() for each in taken] == [first, first + 2]
        assert all(each.family == socket.AF_UNIX for each in taken)
        assert held.take("job-4711") == [first + 1]
        assert held.take("job-4711") == []
        assert held.names == ("forgotten",)
        held.close()
        held.close()
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(first + 3)
        os.close(first + 1)
        for each in taken:
            each.close()


def test_a_socket_that_does_not_listen_is_refused_and_stays_owned(listener: socket.socket) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs, socket.socket(socket.AF_INET, socket.SOCK_STREAM) as internet, Path(os.devnull).open() as file:
        internet.listen()
        for wrong in (ours.fileno(), internet.fileno(), file.fileno()):
            with PassedDescriptors(["hegmd", "hegmd"], passed(listener.fileno(), wrong)) as held:
                with pytest.raises(
                    HegmError, match="descriptor 201, passed as 'hegmd', is not a listening Unix stream"
                ):
                    held.take_listeners("hegmd")
                assert len(held.take("hegmd")) == 2
                os.close(200)
                os.close(201)


def test_a_count_beyond_the_open_descriptors_is_an_error() -> None:
    with pytest.raises(HegmError, match="LISTEN_FDS is not valid"):
        PassedDescriptors(["hegmd"], 4000)


# -- reports -----------------------------------------------------------------------------------------------------------


def test_every_report_as_the_manager_reads_it(manager: Manager, reports: ServiceManager) -> None:
    assert reports.ready("serving 2 GPUs")
    assert manager.next() == (["READY=1", "STATUS=serving 2 GPUs"], [])
    assert reports.ready()
    assert manager.next() == (["READY=1"], [])
    assert reports.stopping("asked to")
    assert manager.next() == (["STOPPING=1", "STATUS=asked to"], [])
    assert reports.status("idle")
    assert manager.next() == (["STATUS=idle"], [])
    assert reports.status("")
    assert manager.next() == (["STATUS="], [])
    assert reports.alive()
    assert manager.next() == (["WATCHDOG=1"], [])
    assert reports.unstore("job-4711")
    assert manager.next() == (["FDSTOREREMOVE=1", "FDNAME=job-4711"], [])


def test_reload_carries_the_time_of_the_clock_that_systemd_reads(manager: Manager, reports: ServiceManager) -> None:
    before_us = time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
    assert reports.reloading()
    after_us = time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
    (first, second), _ = manager.next()
    assert first == "RELOADING=1"
    assert before_us <= int(second.removeprefix("MONOTONIC_USEC=")) <= after_us


def test_a_line_break_in_a_status_cannot_start_another_variable(manager: Manager, reports: ServiceManager) -> None:
    reports.status("job 7\nMAINPID=1\r\nover")
    assert manager.next() == (["STATUS=job 7 MAINPID=1 over"], [])


def test_abstract_address() -> None:
    manager = Manager(f"\0hegm-test-{os.getpid()}")
    reports = ServiceManager(f"@hegm-test-{os.getpid()}")
    assert reports.ready()
    assert manager.next() == (["READY=1"], [])
    reports.close()
    manager.socket.close()


@pytest.mark.parametrize("address", ["relative/path", "@", "vsock:2:1234"])
def test_an_address_of_another_kind_is_an_error(address: str) -> None:
    with pytest.raises(HegmError, match="NOTIFY_SOCKET is not valid"):
        ServiceManager(address)


def test_without_a_manager_everything_is_a_quiet_no_op(caplog: pytest.LogCaptureFixture) -> None:
    nobody = Offer(None, None, ()).manager()
    assert not nobody.present
    assert not nobody.ready()
    assert not nobody.alive()
    assert not nobody.store("job-4711", [0])
    assert nobody.barrier(limit_s=0)
    nobody.close()
    assert not caplog.records


def test_a_vanished_manager_is_logged_and_its_return_is_noticed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = Manager(str(tmp_path / "notify"))
    reports = ServiceManager(first.socket.getsockname())
    first.socket.close()
    with caplog.at_level(logging.WARNING):
        assert not reports.ready()
    assert "does not take READY=1: Connection refused" in caplog.text
    with pytest.raises(HegmError, match="Connection refused"):
        reports.store("job-4711", [0])
    (tmp_path / "notify").unlink()
    second = Manager(str(tmp_path / "notify"))
    assert reports.ready()
    assert second.next() == (["READY=1"], [])
    second.socket.close()
    reports.close()


def test_a_full_queue_delays_reports_but_loses_none(manager: Manager, reports: ServiceManager) -> None:
    waiting = manager.fill()
    done = threading.Thread(target=reports.ready)
    done.start()
    for _ in range(waiting):
        assert manager.next()[0] == ["noise"]
    done.join()
    assert manager.next() == (["READY=1"], [])


@pytest.mark.thorough
def test_a_full_queue_blocks_no_caller(manager: Manager, reports: ServiceManager) -> None:
    manager.fill()
    started = time.monotonic()
    assert not reports.alive()
    assert time.monotonic() - started < systemd.SEND_LIMIT_S / 2
    assert not reports.ready()
    with pytest.raises(HegmError, match="queue is full"):
        reports.store("job-4711", [0])


# -- descriptor store --------------------------------------------------------------------------------------------------


def test_stored_descriptors_are_the_same_files(manager: Manager, reports: ServiceManager) -> None:
    memory = os.memfd_create("bytes in flight")
    assert reports.store("job-4711", [memory])
    lines, (received,) = manager.next()
    assert lines == ["FDSTORE=1", "FDNAME=job-4711", "FDPOLL=0"]
    assert os.fstat(received).st_ino == os.fstat(memory).st_ino
    os.close(received)
    os.close(memory)


def test_more_descriptors_than_fit_one_message_come_in_several(manager: Manager, reports: ServiceManager) -> None:
    memory = os.memfd_create("bytes in flight")
    assert reports.store("job-4711", [memory] * 300)
    received = [manager.next(), manager.next()]
    assert [len(descriptors) for _, descriptors in received] == [253, 47]
    for _, descriptors in received:
        for descriptor in descriptors:
            os.close(descriptor)
    os.close(memory)


@pytest.mark.parametrize("name", ["", "a:b", "a\nb", "ä", "x" * 256])
def test_a_name_that_the_store_would_not_take_is_a_bug(reports: ServiceManager, name: str) -> None:
    with pytest.raises(Bug):
        reports.store(name, [0])
    with pytest.raises(Bug):
        reports.unstore(name)


def test_a_barrier_opens_when_the_manager_has_reached_it(manager: Manager, reports: ServiceManager) -> None:
    reports.status("before")
    assert not reports.barrier(limit_s=0)
    assert manager.next()[0] == ["STATUS=before"]
    lines, (received,) = manager.next()
    assert lines == ["BARRIER=1"]
    os.close(received)

    opened: list[bool] = []
    waiting = threading.Thread(target=lambda: opened.append(reports.barrier(limit_s=10)))
    waiting.start()
    _, (received,) = manager.next()
    os.close(received)
    waiting.join()
    assert opened == [True]


@in_one_test(
    ("environ", "kept"),
    [
        ({"NOTIFY_SOCKET": "/run/n", "FDSTORE": "1024"}, True),
        ({"NOTIFY_SOCKET": "/run/n", "FDSTORE": "0"}, False),
        ({"NOTIFY_SOCKET": "/run/n", "INVOCATION_ID": "77"}, True),  # systemd before 254 does not say
        ({"NOTIFY_SOCKET": "/run/n"}, False),  # some other supervisor, which closes what it is sent
        ({"INVOCATION_ID": "77", "FDSTORE": "3"}, False),  # started by hand from the shell of a service
        ({}, False),
    ],
)
def test_the_environment_tells_whether_there_is_a_store(environ: dict[str, str], kept: bool) -> None:
    assert take_offer(environ, 77).keeps_descriptors is kept
    assert "FDSTORE" not in environ


def test_the_benchmarks_manager_did_not_tell_that_it_keeps_descriptors(tmp_path: Path) -> None:
    """So each move of the benchmark started a keeper of descriptors, which a daemon under systemd does not."""
    told = tmp_path / "told"
    words = (
        "import os, pathlib, sys; from hegmd.system.systemd import take_offer; "
        "offer = take_offer(os.environ, os.getpid()); "
        "pathlib.Path(sys.argv[1]).write_text(str(offer.keeps_descriptors)); offer.manager().ready('up')"
    )
    manager = Keeper(tmp_path)
    try:
        environ = {name: value for name, value in os.environ.items() if name != "INVOCATION_ID"}
        assert manager.start([sys.executable, "-c", words, str(told)], environ, subprocess.DEVNULL).wait(HANG_S) == 0
    finally:
        manager.close()
    assert told.read_text() == "True"
